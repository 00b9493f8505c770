//! One running guest: a QEMU process, its console log and the channel that its script talks over.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::Sender;

use crate::child::Tied;
use crate::error::{Context as _, LabError};
use crate::scenario::Machine;
use crate::setup::Prepared;

/// What a guest does that the lab must know of. The number is the guest's place in the scenario.
#[derive(Debug)]
pub(crate) enum Event {
    Line(usize, String),
    Ended(usize),
}

/// What a guest is started with.
#[derive(Debug)]
pub(crate) struct Start<'a> {
    pub place: usize,
    pub role: char,
    pub machine: &'a Machine,
    pub initramfs: &'a Path,
    /// The script's environment.
    pub settings: &'a [(&'a str, String)],
    /// vfio-user socket of the port that this guest gets.
    pub port: Option<&'a Path>,
    pub logs: &'a Path,
}

#[derive(Debug)]
pub(crate) struct Guest {
    process: Tied,
    input: std::process::ChildStdin,
    pub console: PathBuf,
}

impl Guest {
    /// Starts QEMU; its channel's lines arrive at `events`, and one [`Event::Ended`] when it exits.
    pub(crate) fn start(
        prepared: &Prepared,
        start: &Start<'_>,
        events: Sender<Event>,
    ) -> Result<Self, LabError> {
        let console = start.logs.join(format!("{}.console", start.role));
        let errors = start.logs.join(format!("{}.qemu", start.role));
        let mut command = qemu(prepared);
        command.args(arguments(prepared, start, &console));
        let text = format!("{command:?}\n");
        fs::write(&errors, text).context("write", &errors)?;
        let log = File::options()
            .append(true)
            .open(&errors)
            .context("open", &errors)?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
        let mut process = Tied::spawn(&mut command).context("start", Path::new(command.get_program()))?;
        let (Some(input), Some(output)) = (process.child().stdin.take(), process.child().stdout.take())
        else {
            unreachable!("both were asked for as pipes");
        };
        let place = start.place;
        std::thread::spawn(move || {
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                if events.send(Event::Line(place, text)).is_err() {
                    return;
                }
            }
            let _ = events.send(Event::Ended(place));
        });
        Ok(Self {
            process,
            input,
            console,
        })
    }

    /// Sends a line to the guest's script. A guest that has ended reads nothing, which its own end reports.
    pub(crate) fn tell(&mut self, line: &str) {
        let _ = writeln!(self.input, "{line}").and_then(|()| self.input.flush());
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill();
    }
}

/// QEMU of the prepared root, run by that root's loader on that root's libraries: no chroot, hence no root
/// rights, and sockets and logs may lie anywhere.
fn qemu(prepared: &Prepared) -> Command {
    let root = &prepared.root;
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    let mut command = Command::new(root.join("usr/lib64/ld-linux-x86-64.so.2"));
    command.arg("--library-path").arg(&libraries);
    command.arg(root.join("usr/bin/qemu-system-x86_64"));
    for data in ["usr/share/qemu", "usr/share/seabios"] {
        command.arg("-L").arg(root.join(data));
    }
    command.env("QEMU_MODULE_DIR", libraries.join("qemu"));
    command
}

fn arguments(prepared: &Prepared, start: &Start<'_>, console: &Path) -> Vec<String> {
    let machine = start.machine;
    let memory = machine.memory_mib;
    let mut all: Vec<String> = Vec::new();
    let mut add = |option: &str, value: String| {
        all.push(option.to_owned());
        all.push(value);
    };
    add("-machine", "q35,memory-backend=memory".into());
    add("-accel", "tcg,thread=multi".into());
    add("-cpu", "max".into());
    add("-smp", machine.cpus.to_string());
    add("-m", format!("{memory}M"));
    // Shared, so that the emulator can map what the guest exposes.
    add(
        "-object",
        format!("memory-backend-memfd,id=memory,size={memory}M,share=on"),
    );
    add("-display", "none".into());
    add("-serial", format!("file:{}", console.display()));
    if machine.iommu {
        // VFIO refuses a container without interrupt remapping.
        add("-device", "intel-iommu,caching-mode=on,intremap=on".into());
    }
    add("-chardev", "stdio,id=lab,signal=off".into());
    add("-device", "virtio-serial-pci,id=channel,addr=4".into());
    add(
        "-device",
        "virtserialport,bus=channel.0,chardev=lab,name=lab".into(),
    );
    if let Some(socket) = start.port {
        // In a slot of its own: QEMU takes the link registers off a function that sits on the root bus.
        add("-device", "pcie-root-port,id=ntb-slot,chassis=1,addr=5".into());
        let address = serde_json::json!({
            "driver": "vfio-user-pci",
            "bus": "ntb-slot",
            "socket": { "type": "unix", "path": socket },
        });
        add("-device", address.to_string());
    }
    add("-kernel", prepared.kernel.image.display().to_string());
    add("-initrd", start.initramfs.display().to_string());
    add("-append", kernel_line(start));
    all.extend(["-nodefaults", "-no-reboot"].map(String::from));
    all
}

/// Settings reach the first program as environment: the kernel hands over what it does not know itself.
fn kernel_line(start: &Start<'_>) -> String {
    let iommu = if start.machine.iommu { "on" } else { "off" };
    // `no_timer_check`: on a busy machine the timer test of a guest sometimes fails, and the guest panics.
    let mut line = format!("console=ttyS0 no_timer_check panic=-1 intel_iommu={iommu}");
    for (name, value) in start.settings {
        line.push_str(&format!(" {name}={value}"));
    }
    line
}
