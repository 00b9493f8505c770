//! Debian packages without touching the machine's own: a root folder made by mmdebstrap.
//!
//! The mirror, proxies and certificate settings are those that the machine's own apt uses.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::child::Tied;
use crate::error::{Context as _, LabError};
use crate::report::{say, tail};

/// The release that the lab's QEMU and kernel source come from.
pub(crate) const SUITE: &str = "trixie";

/// Packages to take from backports: QEMU 10.1 is the first with `vfio-user-pci`, the release has 10.0.
pub(crate) const PINS: &str = "Package: src:qemu:any src:seabios:any src:ipxe:any
Pin: release n=trixie-backports
Pin-Priority: 900
";

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// A root folder to be made: packages, and shell commands to run in it while its system folders are mounted.
#[derive(Debug)]
pub(crate) struct Bootstrap<'a> {
    /// Where the root is left; `None` when only what the hooks copy out is wanted.
    pub root: Option<&'a Path>,
    pub packages: &'a [&'a str],
    /// mmdebstrap customize hooks, in order.
    pub hooks: &'a [String],
    /// Folder for temporary files and the log.
    pub work: &'a Path,
}

impl Bootstrap<'_> {
    pub(crate) fn run(&self) -> Result<(), LabError> {
        require_mmdebstrap()?;
        let mirror = mirror()?;
        let pins = self.work.join("pins");
        fs::write(&pins, PINS).context("write", &pins)?;

        let mut command = own_namespaces("mmdebstrap");
        command.args(["--variant=apt", "--aptopt=APT::Install-Recommends \"false\""]);
        for option in apt_options()? {
            command.arg(format!("--aptopt={option}"));
        }
        command.arg(format!("--include={}", self.packages.join(",")));
        command.arg("--setup-hook=mkdir -p \"$1\"/etc/apt/preferences.d");
        command.arg(format!(
            "--setup-hook=cp '{}' \"$1\"/etc/apt/preferences.d/lab",
            pins.display()
        ));
        for hook in self.hooks {
            command.arg(format!("--customize-hook={hook}"));
        }
        match self.root {
            Some(root) => command.arg("--format=directory").arg(SUITE).arg(root),
            None => command.arg("--format=null").arg(SUITE).arg("/dev/null"),
        };
        for suite in [SUITE.to_owned(), format!("{SUITE}-backports")] {
            command.arg(format!("deb [signed-by={KEYRING}] {mirror} {suite} main"));
        }
        command.env("TMPDIR", self.work);
        logged("mmdebstrap", &mut command, &self.work.join("mmdebstrap.log"))?;
        fs::remove_file(&pins).context("remove", &pins)
    }
}

/// A command whose mounts and processes end with it, and it with the lab: mmdebstrap mounts the machine's /dev, /proc and
/// /sys into what it makes, and an interrupted run must not leave them there. Without root it sees to that itself.
fn own_namespaces(program: &str) -> Command {
    if !rustix::process::geteuid().is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("unshare");
    command.args([
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        program,
    ]);
    command
}

/// Runs a command with its output in a file; a failure carries the end of it. The command does not outlive the lab.
pub(crate) fn logged(what: &str, command: &mut Command, log: &Path) -> Result<(), LabError> {
    let file = File::create(log).context("create", log)?;
    let second = file.try_clone().context("share", log)?;
    command.stdin(Stdio::null()).stdout(file).stderr(second);
    let program = PathBuf::from(command.get_program());
    let mut child = Tied::spawn(command).context("run", &program)?;
    let status = child.child().wait().context("wait for", &program)?;
    if status.success() {
        return Ok(());
    }
    Err(LabError::Command {
        what: what.to_owned(),
        status: status.to_string(),
        log: log.to_owned(),
        tail: tail(log, 25),
    })
}

/// Finds mmdebstrap, or installs it where that needs no asking (root on a Debian machine).
fn require_mmdebstrap() -> Result<(), LabError> {
    if on_path("mmdebstrap").is_some() && Path::new(KEYRING).exists() {
        return Ok(());
    }
    let packages = ["mmdebstrap", "debian-archive-keyring"];
    let missing = |remedy: String| LabError::MissingTool {
        tool: "mmdebstrap",
        purpose: "make a Debian root with QEMU and the kernel source",
        remedy,
    };
    if on_path("apt-get").is_none() {
        return Err(missing("install it from your distribution".to_owned()));
    }
    if !rustix::process::geteuid().is_root() {
        return Err(missing(format!(
            "as root: apt-get install {}",
            packages.join(" ")
        )));
    }
    say("installing mmdebstrap with apt-get");
    let log = std::env::temp_dir().join("ntb-lab-apt.log");
    logged("apt-get update", Command::new("apt-get").arg("update"), &log)?;
    let mut install = Command::new("apt-get");
    install
        .args(["install", "-y", "--no-install-recommends"])
        .args(packages);
    logged(
        "apt-get install",
        install.env("DEBIAN_FRONTEND", "noninteractive"),
        &log,
    )
}

/// The Debian mirror that this machine's apt uses.
fn mirror() -> Result<String, LabError> {
    if let Some(mirror) = std::env::var("NTB_LAB_MIRROR")
        .ok()
        .filter(|text| !text.is_empty())
    {
        return Ok(mirror);
    }
    let format = "$(REPO_URI) $(COMPONENT)";
    let targets = output(
        "apt-get",
        &["indextargets", "--format", format, "Identifier: Packages"],
    )?;
    pick_mirror(&targets).ok_or(LabError::NoMirror { suite: SUITE })
}

/// The first source of Debian's own archive. The archive's folder is named `debian` on every mirror; the
/// security archive and other publishers' repositories have other names.
fn pick_mirror(targets: &str) -> Option<String> {
    targets.lines().find_map(|line| {
        let (address, component) = line.trim().rsplit_once(' ')?;
        let archive = address.trim_end_matches('/').ends_with("/debian");
        (archive && component == "main").then(|| address.to_owned())
    })
}

/// How apt reaches the mirror: proxies, transports, certificate and date checks.
fn apt_options() -> Result<Vec<String>, LabError> {
    let dump = output("apt-config", &["dump"])?;
    Ok(transport_options(&dump))
}

fn transport_options(dump: &str) -> Vec<String> {
    let wanted = |line: &&str| {
        let name = line
            .split([' ', '"'])
            .next()
            .unwrap_or_default()
            .to_ascii_lowercase();
        let transport = [
            "acquire::http",
            "acquire::https",
            "acquire::ftp",
            "acquire::check-",
        ]
        .iter()
        .any(|prefix| name.starts_with(prefix));
        transport && !line.contains(" \"\"")
    };
    dump.lines().filter(wanted).map(str::to_owned).collect()
}

fn output(program: &'static str, arguments: &[&str]) -> Result<String, LabError> {
    let result = Command::new(program)
        .args(arguments)
        .stderr(Stdio::null())
        .output()
        .context("run", Path::new(program))?;
    Ok(String::from_utf8_lossy(&result.stdout).into_owned())
}

fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|folder| folder.join(program))
        .find(|candidate| candidate.is_file())
}

#[cfg(test)]
mod tests {
    use super::{pick_mirror, transport_options};

    #[test]
    fn mirror_is_the_first_debian_archive() {
        let targets = "https://vendor.example/apt/ main\n\
                       http://mirror.example/debian-security/ main\n\
                       http://mirror.example/debian/ contrib\n\
                       http://mirror.example/debian/ main\n\
                       http://other.example/debian/ main\n";
        assert_eq!(
            pick_mirror(targets).as_deref(),
            Some("http://mirror.example/debian/")
        );
        assert_eq!(pick_mirror("http://mirror.example/ubuntu/ main\n"), None);
        assert_eq!(pick_mirror(""), None);
    }

    #[test]
    fn proxies_and_checks_are_carried_over_and_nothing_else() {
        let dump = "Acquire \"\";\nAcquire::http \"\";\nAcquire::http::Proxy \"http://proxy.example:3142\";\n\
                    Acquire::Check-Valid-Until \"false\";\nAcquire::cdrom::mount \"/media/cdrom/\";\n\
                    APT::Architecture \"amd64\";\n";
        assert_eq!(
            transport_options(dump),
            [
                "Acquire::http::Proxy \"http://proxy.example:3142\";",
                "Acquire::Check-Valid-Until \"false\";"
            ]
        );
    }
}
