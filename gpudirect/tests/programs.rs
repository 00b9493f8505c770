//! `gpu-try` as a program: with the host stand-in in the driver's place, and without any driver.

#![allow(unsafe_code, reason = "calling the host stand-in's own functions")]

mod common;

use std::process::{Command, Output};

use common::Standin;

fn gpu_try(standin: &Standin, words: &str, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gpu-try"))
        .args(args)
        .env("LD_LIBRARY_PATH", standin.path().parent().unwrap())
        .env("NTB_HOST_STANDIN", words)
        .output()
        .unwrap()
}

#[test]
fn all_steps_run_against_the_host_stand_in() {
    let standin = Standin::new("");
    let out = gpu_try(&standin, "", &["--only", "r"]);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(0), "{said}");
    assert!(said.contains("pass   report: host stand-in (no GPU)"), "{said}");
    for step in ["ring-to-host", "ring-to-gpu", "ring-on-gpu", "round-trip"] {
        assert!(said.contains(&format!("pass   {step}")), "{said}");
    }
    let json = String::from_utf8(out.stdout).unwrap();
    assert!(
        json.contains("\"passed\":true") && json.contains("host stand-in (no GPU)"),
        "{json}"
    );
    for (step, words) in [
        ("dma", ""),
        ("copy", ""),
        ("aperture", ""),
        ("poll", "ordering=0"),
        ("channel", ""),
    ] {
        let out = gpu_try(&standin, words, &["--only", step]);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success() && said.starts_with("pass"), "{step}: {said}");
    }
    let out = gpu_try(&standin, "no-dma-buf", &["--only", "dma"]);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(
        out.status.success() && said.contains("waived") && said.contains("attribute 124"),
        "{said}"
    );
}

#[test]
fn without_a_usable_driver_it_says_what_is_missing() {
    let standin = Standin::new("");
    for (words, name, exit) in [
        ("stub", "gpu-library-stub", 3),
        ("no-device", "gpu-none", 3),
        ("capability=70", "gpu-code-refused", 7),
        ("lost=3", "gpu-lost", 5),
    ] {
        let out = gpu_try(&standin, words, &[]);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(exit), "{words}: {said}");
        assert!(said.contains(name), "{words}: {said}");
        // Nothing to try it on is no failure: every step says so.
        if exit == 3 {
            assert!(said.lines().all(|l| l.starts_with("waived ")), "{said}");
            assert_eq!(said.lines().count(), 12, "{said}");
        }
        assert!(!said.contains("panicked"), "{said}");
    }
    let out = gpu_try(&standin, "", &["--gpu", "3"]);
    assert_eq!(out.status.code(), Some(3));
}

/// The script for a machine with a GPU, on one without: it runs to the end, and its log says of every step why not.
#[test]
fn the_script_runs_to_the_end_without_a_gpu() {
    let standin = Standin::new("");
    let folder = standin.path().parent().unwrap().to_owned();
    let built = std::path::Path::new(env!("CARGO_BIN_EXE_gpu-try"))
        .parent()
        .unwrap();
    let log = folder.join("log.json");
    let out = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/gpu/run"))
        .args([
            std::ffi::OsStr::new("--built"),
            built.as_os_str(),
            log.as_os_str(),
        ])
        .env("LD_LIBRARY_PATH", &folder)
        .env("NTB_HOST_STANDIN", "stub")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(3), "{said}");
    assert_eq!(said.lines().count(), 15, "{said}");
    for line in said.lines() {
        let (state, rest) = line.split_once(' ').unwrap();
        let (step, why) = rest.trim().split_once(": ").unwrap();
        assert!(state == "waived" && !step.is_empty() && why.len() > 10, "{line}");
    }
    let log: serde_json::Value = serde_json::from_slice(&std::fs::read(log).unwrap()).unwrap();
    let waived = |steps: &serde_json::Value| {
        let steps = steps.as_array().unwrap();
        assert!(
            steps.iter().all(|s| s["state"] == "waived" && s["what"] != ""),
            "{steps:?}"
        );
        steps.len()
    };
    assert_eq!((waived(&log["tried"]["steps"]), waived(&log["script"])), (12, 3));
    assert_eq!(log["tried"]["name"], "gpu-library-stub");
}

/// The programs of `tests/gpu/two-hosts`, and `ssh`: the peer is this machine. As with a real one, what runs there outlives its
/// connection.
struct TwoHosts {
    folder: std::path::PathBuf,
}

impl TwoHosts {
    fn new(name: &str) -> Self {
        use std::os::unix::fs::PermissionsExt;
        let folder = std::env::temp_dir().join(format!("ntb-two-hosts-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        const PROGRAM: &str = r#"#!/bin/sh
cd "$STUB" || exit 9
case ${0##*/} in
ntb-check) echo "{\"items\":[\"${CHECK:-}\"]}"; exit "${CHECK_EXIT:-0}" ;;
esac
case "$*" in
*--only*) echo "gpu-library-missing: no driver"; exit "${GPU_EXIT:-0}" ;;
serve* | --serve*) echo $$ >>servers; exec sleep 600 ;;
esac
echo >>clients
until [ "$(wc -l <servers)" -ge "$(wc -l <clients)" ]; do sleep 0.05; done
for server in $(head -n -1 servers); do
    kill -0 "$server" 2>/dev/null && { echo "an earlier one still runs"; exit 1; }
done
[ -z "${CLIENT_HANGS:-}" ] || exec sleep 600
echo 'all "as" sent'
exit "${CLIENT_EXIT:-0}"
"#;
        const SSH: &str = "#!/bin/sh\nshift 4\nsetsid sh -c \"$1\" &\nwait $!\n";
        for (name, text) in [
            ("ntb-check", PROGRAM),
            ("ntb-ping", PROGRAM),
            ("gpu-try", PROGRAM),
            ("ssh", SSH),
        ] {
            let path = folder.join(name);
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        Self { folder }
    }

    fn command(&self, words: &[(&str, &str)]) -> Command {
        let path = std::env::var("PATH").unwrap();
        let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/gpu/two-hosts"));
        command
            .arg("--built")
            .arg(&self.folder)
            .args(["root@b", "0000:81:00.0", "0000:82:00.0"])
            .arg(self.folder.join("log.json"))
            .env("PATH", format!("{}:{path}", self.folder.display()))
            .env("STUB", &self.folder)
            .envs(words.iter().copied());
        command
    }

    /// The numbers of all programs that have served.
    fn servers(&self) -> Vec<u32> {
        let text = std::fs::read_to_string(self.folder.join("servers")).unwrap_or_default();
        text.lines().filter_map(|l| l.parse().ok()).collect()
    }

    fn running(&self) -> usize {
        let is_there = |pid: &u32| std::path::Path::new(&format!("/proc/{pid}")).exists();
        self.servers().iter().filter(|pid| is_there(pid)).count()
    }
}

impl Drop for TwoHosts {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[test]
fn the_script_for_two_hosts_ends_what_it_starts_and_says_why_it_waives() {
    let (pass, waived, fail) = ("pass", "waived", "fail");
    for (name, words, exit, states, served) in [
        ("good", &[][..], 0, [pass; 6], 4),
        // What the check finds fails nothing: the messages went through.
        (
            "findings",
            &[("CHECK_EXIT", "3"), ("CHECK", "no-iommu")],
            0,
            [waived, waived, pass, pass, pass, pass],
            4,
        ),
        (
            "no-bridge",
            &[("CHECK_EXIT", "3"), ("CHECK", "no-device")],
            3,
            [waived; 6],
            0,
        ),
        (
            "no-check",
            &[("CHECK_EXIT", "2")],
            1,
            [fail, fail, waived, waived, waived, waived],
            0,
        ),
        (
            "no-gpu",
            &[("GPU_EXIT", "3")],
            3,
            [pass, pass, pass, waived, waived, waived],
            1,
        ),
        (
            "wrong",
            &[("CLIENT_EXIT", "1")],
            1,
            [pass, pass, fail, fail, fail, fail],
            4,
        ),
    ] {
        let hosts = TwoHosts::new(name);
        let out = hosts.command(words).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(exit), "{name}: {said}");
        let log: serde_json::Value =
            serde_json::from_slice(&std::fs::read(hosts.folder.join("log.json")).unwrap()).unwrap();
        let steps = log["script"].as_array().unwrap();
        let names = [
            "check-here",
            "check-peer",
            "host-to-host",
            "host-to-gpu",
            "gpu-to-host",
            "gpu-to-gpu",
        ];
        assert_eq!(steps.len(), names.len(), "{name}: {said}");
        for ((step, state), (expected, line)) in steps.iter().zip(states).zip(names.iter().zip(said.lines()))
        {
            assert_eq!(
                (&step["step"], &step["state"]),
                (&(*expected).into(), &state.into()),
                "{name}: {said}"
            );
            assert!(
                line.to_lowercase().starts_with(state) && line.contains(expected),
                "{name}: {line}"
            );
            assert!(step["what"].as_str().unwrap().len() > 5, "{name}: {step}");
        }
        assert_eq!(log["peer"].is_object(), name != "no-check", "{log}");
        assert_eq!(
            (hosts.servers().len(), hosts.running()),
            (served, 0),
            "{name}: {said}"
        );
    }
}

#[test]
fn the_script_for_two_hosts_leaves_nothing_behind_when_it_is_ended() {
    let hosts = TwoHosts::new("ended");
    let mut script = hosts.command(&[("CLIENT_HANGS", "1")]).spawn().unwrap();
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while hosts.running() == 0 {
        assert!(std::time::Instant::now() < until, "nothing serves");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let ended = Command::new("kill")
        .arg(script.id().to_string())
        .status()
        .unwrap();
    assert!(ended.success());
    assert_eq!(script.wait().unwrap().code(), Some(1));
    assert_eq!((hosts.servers().len(), hosts.running()), (1, 0));
}
