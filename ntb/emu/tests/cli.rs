//! The program: its sockets, its exit codes, its counts.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

const PATIENCE: Duration = Duration::from_secs(30);

struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("ntb-emu-cli-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn at(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn emu(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ntb-emu"));
    command
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Starts it and waits until both sockets are there.
fn running(args: &[&str]) -> Child {
    let mut child = emu(args).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap());
    for side in ["side a", "side b"] {
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        assert!(line.contains(side), "{line}");
    }
    child
}

fn stop(child: Child) -> Output {
    let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    child.wait_with_output().unwrap()
}

fn failing(args: &[&str], code: i32, hints: &[&str]) {
    let out = emu(args).output().unwrap();
    let text = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(code), "{args:?}: {text}");
    for hint in hints {
        assert!(text.contains(hint), "{args:?}: no '{hint}' in: {text}");
    }
}

#[test]
fn serves_counts_and_leaves_nothing_behind() {
    let dir = Dir::new("serves");
    let (stats, control) = (dir.at("stats.json"), dir.at("control"));
    let sockets = dir.at("s");
    let child = running(&[
        "--family",
        "amd",
        "--socket-dir",
        &sockets,
        "--stats-json",
        &stats,
        "--control",
        &control,
        "--window",
        "64KiB",
    ]);
    let _client = UnixStream::connect(dir.0.join("s/a.sock")).unwrap();
    let stream = UnixStream::connect(&control).unwrap();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut ask = |line: &str| {
        writeln!(&stream, "{line}").unwrap();
        let mut answer = String::new();
        reader.read_line(&mut answer).unwrap();
        answer.trim().to_owned()
    };
    assert_eq!(ask("link down"), "ok");
    assert!(ask("link melt").starts_with("error the link does not do 'melt'"));
    let begin = Instant::now();
    loop {
        let json: serde_json::Value = serde_json::from_str(&ask("stats")).unwrap();
        assert_eq!(json["family"], "amd");
        assert_eq!(json["actions"], 1);
        if json["a"]["attached"] == true {
            break;
        }
        assert!(begin.elapsed() < PATIENCE);
    }
    let out = stop(child);
    assert_eq!(out.status.code(), Some(0));
    for socket in ["s/a.sock", "s/b.sock", "control"] {
        assert!(!dir.0.join(socket).exists(), "{socket} is left behind");
    }
    let json: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(stats).unwrap()).unwrap();
    assert_eq!(json["server_a"]["clients"], 1);
}

#[test]
fn stale_sockets_are_replaced_and_live_ones_are_not() {
    let dir = Dir::new("stale");
    let (a, b) = (dir.at("a"), dir.at("b"));
    drop(UnixListener::bind(&a).unwrap()); // its file stays
    assert!(Path::new(&a).exists());
    let child = running(&["--sockets", &a, &b]);
    failing(
        &["--sockets", &a, &dir.at("c")],
        6,
        &["in use", "[socket-in-use]", &a],
    );
    assert!(Path::new(&a).exists(), "the refused one took the socket away");
    assert_eq!(stop(child).status.code(), Some(0));
    std::fs::write(&a, "a file").unwrap();
    failing(
        &["--sockets", &a, &b],
        6,
        &["is not a socket", "[path-is-no-socket]"],
    );
    assert_eq!(std::fs::read_to_string(&a).unwrap(), "a file");
    // Killed without a chance to clean up: the next one starts.
    std::fs::remove_file(&a).unwrap();
    let mut child = running(&["--sockets", &a, &b]);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(stop(running(&["--sockets", &a, &b])).status.code(), Some(0));
}

#[test]
fn bad_requests_say_what_would_be_good() {
    let dir = Dir::new("bad");
    let d = dir.0.display().to_string();
    failing(&[], 2, &["--socket-dir"]);
    failing(
        &["--socket-dir", &d, "--family", "vax"],
        2,
        &["vax", "intel-spr", "epf"],
    );
    failing(
        &["--socket-dir", &d, "--window", "3MiB"],
        2,
        &["3145728", "power of two", "[bad-window-size]"],
    );
    failing(&["--socket-dir", &d, "--window", "1TB"], 2, &["KiB"]);
    failing(
        &["--socket-dir", &d, "--max-payload", "100"],
        2,
        &["[bad-payload-size]"],
    );
    failing(
        &["--socket-dir", &d, "--scenario", &dir.at("none")],
        2,
        &["[no-scenario]"],
    );
    let file = dir.at("scenario");
    std::fs::write(&file, "# fine\nat 1ms link melt\n").unwrap();
    failing(
        &["--socket-dir", &d, "--scenario", &file],
        2,
        &["line 2", "melt", "[bad-scenario]"],
    );
    failing(
        &["--sockets", &"x".repeat(200), "@b"],
        2,
        &["107", "[bad-socket-address]"],
    );
    failing(&["--socket-dir", "/proc/none"], 6, &["[socket-dir]"]);
}

#[test]
fn configuration_spaces_are_printed() {
    let out = emu(&["--family", "epf", "--dump-config"]).output().unwrap();
    assert_eq!(out.status.code(), Some(0));
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(
        text.starts_with("0000:00:00.0 epf side a\n00: 57 19 09 08"),
        "{text}"
    );
    assert!(text.contains("0000:01:00.0 epf side b\n"));
    assert!(text.contains("\nff0: "));
}
