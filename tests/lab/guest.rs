//! One running guest: a QEMU process, its console log and the channel that its script talks over.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::Sender;

use serde_json::{Value, json};

use crate::child::Tied;
use crate::error::{Context as _, LabError};
use crate::qmp::Qmp;
use crate::scenario::Machine;
use crate::setup::Prepared;

/// What a guest does that the lab must know of.
#[derive(Debug)]
pub(crate) struct Event {
    /// The guest's place in the scenario.
    pub place: usize,
    /// Which QEMU of that place: what an earlier one said last may arrive late.
    pub generation: u32,
    /// A line of the channel; none when QEMU has ended.
    pub line: Option<String>,
}

/// What a guest is started with.
#[derive(Debug, Clone)]
pub(crate) struct Start<'a> {
    pub prepared: &'a Prepared,
    pub place: usize,
    pub role: char,
    pub machine: &'a Machine,
    /// Whether it shares a network with the other guest.
    pub network: bool,
    pub initramfs: &'a Path,
    /// The script's environment.
    pub settings: Vec<(&'a str, String)>,
    /// vfio-user socket of the port that this guest gets.
    pub port: Option<PathBuf>,
    pub logs: &'a Path,
    pub sockets: &'a Path,
}

/// Name of the bridge's port in QEMU.
const PORT: &str = "ntb";
/// Name of the slot that it is in.
const SLOT: &str = "ntb-slot";

#[derive(Debug)]
pub(crate) struct Guest<'a> {
    start: Start<'a>,
    events: Sender<Event>,
    process: Tied,
    input: std::process::ChildStdin,
    generation: u32,
    pub console: PathBuf,
}

impl<'a> Guest<'a> {
    /// Starts QEMU; its channel's lines arrive at `events`, and its end.
    pub(crate) fn start(start: Start<'a>, events: Sender<Event>) -> Result<Self, LabError> {
        let console = start.logs.join(format!("{}.console", start.role));
        let (process, input) = launch(&start, &console, &events, 0)?;
        Ok(Self {
            start,
            events,
            process,
            input,
            generation: 0,
            console,
        })
    }

    /// Whether what an event tells is of the QEMU that runs now.
    pub(crate) fn told(&self, event: &Event) -> bool {
        event.generation == self.generation
    }

    /// Sends a line to the guest's script. A guest that has ended reads nothing, which its own end reports.
    pub(crate) fn tell(&mut self, line: &str) {
        let _ = writeln!(self.input, "{line}").and_then(|()| self.input.flush());
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill();
    }

    /// Does something to the machine, in the words of `machine` in guest/main.sh. Returns whether it will boot anew.
    pub(crate) fn act(&mut self, action: &str) -> Result<bool, String> {
        match action {
            "off" => {
                self.kill();
                self.generation += 1;
                return Ok(false);
            }
            "on" => {
                self.kill();
                self.generation += 1;
                let started = launch(&self.start, &self.console, &self.events, self.generation);
                (self.process, self.input) = started.map_err(|why| why.to_string())?;
                return Ok(true);
            }
            _ => {}
        }
        let mut qmp = Qmp::connect(&self.control())?;
        match action.split_once(' ').unwrap_or((action, "")) {
            ("reset", _) => {
                // QEMU was told to end when the guest reboots by itself.
                qmp.execute(&json!({ "execute": "set-action", "arguments": { "reboot": "reset" } }))?;
                qmp.execute(&json!({ "execute": "system_reset" }))?;
                return Ok(true);
            }
            ("unplug", _) => qmp.execute(&json!({ "execute": "device_del", "arguments": { "id": PORT } }))?,
            ("plug", _) => {
                let port = self.start.port.as_deref().ok_or("there is no port")?;
                qmp.execute(
                    &json!({ "execute": "device_add", "arguments": port_device(self.start.machine, port) }),
                )?
            }
            ("qmp", command) => {
                let command: Value = serde_json::from_str(command).map_err(|why| why.to_string())?;
                qmp.execute(&command)?
            }
            _ => return Err(format!("{action:?} is nothing that can be done to a machine")),
        };
        Ok(false)
    }

    fn control(&self) -> PathBuf {
        control(&self.start)
    }
}

fn control(start: &Start<'_>) -> PathBuf {
    start.sockets.join(format!("{}.qmp", start.role))
}

fn launch(
    start: &Start<'_>,
    console: &Path,
    events: &Sender<Event>,
    generation: u32,
) -> Result<(Tied, std::process::ChildStdin), LabError> {
    let errors = start.logs.join(format!("{}.qemu", start.role));
    let mut command = qemu(start.prepared);
    command.args(arguments(start, console));
    let mut log = File::options()
        .append(true)
        .create(true)
        .open(&errors)
        .context("open", &errors)?;
    writeln!(log, "{command:?}").context("write", &errors)?;
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
    // What a killed one left is in the way of the next.
    let _ = fs::remove_file(control(start));
    let mut process = Tied::spawn(&mut command).context("start", Path::new(command.get_program()))?;
    let (Some(input), Some(output)) = (process.child().stdin.take(), process.child().stdout.take()) else {
        unreachable!("both were asked for as pipes");
    };
    let (place, events) = (start.place, events.clone());
    std::thread::spawn(move || {
        let event = |line| Event {
            place,
            generation,
            line,
        };
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            if events.send(event(Some(text))).is_err() {
                return;
            }
        }
        let _ = events.send(event(None));
    });
    Ok((process, input))
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

fn arguments(start: &Start<'_>, console: &Path) -> Vec<String> {
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
    add(
        "-chardev",
        format!("file,id=console,path={},append=on", console.display()),
    );
    add("-serial", "chardev:console".into());
    add(
        "-qmp",
        format!("unix:{},server=on,wait=off", control(start).display()),
    );
    if machine.iommu {
        // VFIO refuses a container without interrupt remapping; caching mode is what tells QEMU of each mapping.
        add("-device", "intel-iommu,caching-mode=on,intremap=on".into());
    }
    add("-chardev", "stdio,id=lab,signal=off".into());
    add("-device", "virtio-serial-pci,id=channel,addr=4".into());
    add(
        "-device",
        "virtserialport,bus=channel.0,chardev=lab,name=lab".into(),
    );
    if start.network {
        let [local, remote] = [start.place, 1 - start.place]
            .map(|place| start.sockets.join(format!("{place}.net")).display().to_string());
        add(
            "-netdev",
            format!("dgram,id=net,local.type=unix,local.path={local},remote.type=unix,remote.path={remote}"),
        );
        let mac = start.place + 1;
        add(
            "-device",
            format!("virtio-net-pci,netdev=net,mac=52:54:00:00:00:0{mac},addr=6"),
        );
    }
    if let Some(socket) = &start.port {
        // Hot-plug by the slot's own registers: the other kind is ACPI's, which servers do not have.
        add(
            "-global",
            "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off".into(),
        );
        // In a slot of its own: QEMU takes the link registers off a function that sits on the root bus.
        add("-device", format!("pcie-root-port,id={SLOT},chassis=1,addr=5"));
        add("-device", port_device(machine, socket).to_string());
    }
    add("-kernel", start.prepared.kernel.image.display().to_string());
    add("-initrd", start.initramfs.display().to_string());
    add("-append", kernel_line(start));
    all.extend(["-nodefaults", "-no-reboot"].map(String::from));
    all.extend(machine.qemu.iter().map(|argument| (*argument).to_owned()));
    all
}

fn port_device(machine: &Machine, socket: &Path) -> Value {
    // Other functions of the same card share its slot, and then its IOMMU group.
    let shared = machine
        .qemu
        .iter()
        .any(|argument| argument.contains(&format!("bus={SLOT}")));
    json!({
        "multifunction": shared,
        "driver": "vfio-user-pci",
        "id": PORT,
        "bus": SLOT,
        "socket": { "type": "unix", "path": socket },
    })
}

/// Settings reach the first program as environment: the kernel hands over what it does not know itself.
fn kernel_line(start: &Start<'_>) -> String {
    let iommu = if start.machine.iommu { "on" } else { "off" };
    // `no_timer_check`: on a busy machine the timer test of a guest sometimes fails, and the guest panics.
    let mut line = format!("console=ttyS0 no_timer_check panic=-1 intel_iommu={iommu}");
    for word in start.machine.kernel {
        line.push_str(&format!(" {word}"));
    }
    for (name, value) in &start.settings {
        line.push_str(&format!(" {name}={value}"));
    }
    line
}
