//! `ntb-emu`: a pair of emulated NTB ports for other programs to connect to.

#![allow(clippy::print_stdout, reason = "a program that talks to its user")]

use std::{
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use clap::Parser;
use ntb_emu::{
    EmuConfig, EmuError, Emulator,
    control::ControlSocket,
    emulator::parse_duration,
    model::{FAMILIES, Family, Pair, PairConfig, SideId, family},
    scenario,
    server::{Endpoint, Limits},
};
use rustix::event::{PollFd, PollFlags, poll};

/// Emulates a pair of PCIe Non-Transparent Bridge ports and serves each over vfio-user.
///
/// Runs until SIGTERM or SIGINT. Connect one client to each socket: this project's driver (address emu:PATH), or QEMU
/// with '-device vfio-user-pci'.
#[derive(Debug, Parser)]
#[command(name = "ntb-emu", version)]
struct Options {
    /// Which bridge: intel-spr, intel-icx, intel-gnr, intel-skx, amd, epf.
    #[arg(long, value_parser = parse_family, default_value = "intel-spr")]
    family: &'static dyn Family,

    /// Directory for the two sockets, a.sock and b.sock; made if it is not there.
    #[arg(
        long,
        value_name = "DIR",
        conflicts_with = "sockets",
        required_unless_present_any = ["sockets", "dump_config"]
    )]
    socket_dir: Option<PathBuf>,

    /// The two sockets: paths, or '@NAME' for abstract ones.
    #[arg(long, num_args = 2, value_names = ["A", "B"])]
    sockets: Option<Vec<Endpoint>>,

    /// Size of each memory window, a power of two: 65536, 64KiB, 1MiB, 4GiB.
    #[arg(long, value_parser = parse_size, default_value = "1MiB")]
    window: u64,

    /// Maximum payload of a packet in bytes, for the accounting.
    #[arg(long, default_value_t = 256)]
    max_payload: u64,

    /// How long the link trains once both ends ask for it; 300ms for Linux guests on a busy machine.
    #[arg(long, value_parser = parse_duration, default_value = "10ms")]
    train_time: Duration,

    /// What goes wrong, and when: see docs/emulator.md.
    #[arg(long, value_name = "FILE")]
    scenario: Option<PathBuf>,

    /// Decides what the scenario leaves open.
    #[arg(long, default_value_t = 0)]
    seed: u64,

    /// Where to write all counts as JSON on exit; '-' for standard output.
    #[arg(long, value_name = "FILE")]
    stats_json: Option<PathBuf>,

    /// A socket that takes 'stats' and scenario actions, one a line.
    #[arg(long, value_name = "SOCKET")]
    control: Option<Endpoint>,

    /// Prints both configuration spaces after power-on, as 'lspci -F' reads them, and ends.
    #[arg(long)]
    dump_config: bool,

    /// Hands stores that a client's mappings refuse to that client, so that its own IOMMU reports the fault; for QEMU.
    #[arg(long)]
    tell_refused: bool,

    /// How long a client may take to finish a message or to take a reply.
    #[arg(long, value_parser = parse_duration, default_value = "5s")]
    client_timeout: Duration,
}

fn parse_family(name: &str) -> Result<&'static dyn Family, String> {
    family(name).ok_or_else(|| {
        let names: Vec<_> = FAMILIES.iter().map(|f| f.name()).collect();
        format!("known are {}", names.join(", "))
    })
}

fn parse_size(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let shift = match unit {
        "" => 0,
        "KiB" | "K" => 10,
        "MiB" | "M" => 20,
        "GiB" | "G" => 30,
        _ => return Err("units are KiB, MiB and GiB".to_owned()),
    };
    digits
        .parse::<u64>()
        .ok()
        .and_then(|n| n.checked_mul(1 << shift))
        .ok_or_else(|| "give a number of bytes, such as 1MiB".to_owned())
}

/// Why the program ends early: exit code and text.
struct Failure(u8, String);

impl From<EmuError> for Failure {
    fn from(e: EmuError) -> Self {
        Self(e.exit_code(), format!("{e} [{}]", e.name()))
    }
}

fn main() -> ExitCode {
    match run(Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure(code, text)) => {
            eprintln!("ntb-emu: {text}");
            ExitCode::from(code)
        }
    }
}

fn run(options: Options) -> Result<(), Failure> {
    // Before anything can be left behind.
    let stop = signals().map_err(|e| Failure(6, format!("signals cannot be caught: {e} [signals]")))?;
    let steps = match &options.scenario {
        None => Vec::new(),
        Some(path) => {
            let text = std::fs::read_to_string(path).map_err(|e| {
                Failure(
                    2,
                    format!(
                        "the scenario {} cannot be read: {e} [no-scenario]",
                        path.display()
                    ),
                )
            })?;
            scenario::parse(&text).map_err(EmuError::Scenario)?
        }
    };
    let pair = PairConfig {
        window_bytes: options.window,
        max_payload: options.max_payload,
        train_time: options.train_time,
        steps,
        seed: options.seed,
        tell_refused: options.tell_refused,
    };
    if options.dump_config {
        pair.check()?;
        let pair = Pair::new(options.family, pair).map_err(EmuError::Threads)?;
        for side in SideId::BOTH {
            println!("{}", pair.port(side).config_dump());
        }
        return Ok(());
    }
    let (a, b) = endpoints(&options)?;
    let names = (a.to_string(), b.to_string());
    let config = EmuConfig {
        family: options.family,
        a,
        b,
        pair,
        limits: Limits {
            message: options.client_timeout,
            ..Limits::default()
        },
    };
    let emulator = Emulator::start(config)?;
    let control = options
        .control
        .map(ControlSocket::bind)
        .transpose()
        .map_err(|e| Failure(6, format!("the control socket cannot be had: {e} [{}]", e.name())))?;
    let ports = SideId::BOTH.iter().zip([&names.0, &names.1]);
    for (side, name) in ports {
        println!("{} side {side} at {name}", options.family.name());
    }
    let waited = match control {
        Some(socket) => socket.serve(emulator.control(), &stop),
        None => {
            let mut fds = [PollFd::new(&stop, PollFlags::IN)];
            rustix::io::retry_on_intr(|| poll(&mut fds, None)).map(drop)
        }
    };
    let report = serde_json::to_string_pretty(&emulator.control().report());
    drop(emulator); // sockets go first, whatever becomes of the counts
    waited.map_err(|e| Failure(6, format!("waiting for clients failed: {e} [poll]")))?;
    if let Some(path) = options.stats_json {
        let text = report.map_err(|e| Failure(6, format!("the counts cannot be written: {e} [stats]")))?;
        if path.as_os_str() == "-" {
            println!("{text}");
        } else {
            std::fs::write(&path, text + "\n").map_err(|e| {
                Failure(
                    6,
                    format!("the counts cannot be written to {}: {e} [stats]", path.display()),
                )
            })?;
        }
    }
    Ok(())
}

fn endpoints(options: &Options) -> Result<(Endpoint, Endpoint), Failure> {
    if let Some(dir) = &options.socket_dir {
        std::fs::create_dir_all(dir).map_err(|e| {
            Failure(
                6,
                format!("the directory {} cannot be made: {e} [socket-dir]", dir.display()),
            )
        })?;
        return Ok((
            Endpoint::Path(dir.join("a.sock")),
            Endpoint::Path(dir.join("b.sock")),
        ));
    }
    match options.sockets.as_deref() {
        Some([a, b]) => Ok((a.clone(), b.clone())),
        _ => Err(Failure(2, "two sockets are needed [sockets]".to_owned())),
    }
}

/// Becomes readable when the program is asked to end.
fn signals() -> std::io::Result<OwnedFd> {
    let (reader, writer) = UnixStream::pair()?;
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::low_level::pipe::register(signal, writer.try_clone()?)?;
    }
    Ok(reader.into())
}
