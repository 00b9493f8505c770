//! `ntb-check`: whether a machine is set up for its bridges, and what to do where it is not.
//!
//! It finds bridges with the driver's own code, and what keeps the driver from opening one is found by the same
//! functions with which the driver refuses it: names and classes of faults are those of the driver's errors. It reads
//! only.

pub mod bridge;
pub mod command;
pub mod description;
pub mod gpu;
pub mod item;
pub mod log;
pub mod machine;
pub mod opening;
pub mod record;
pub mod report;
pub mod traffic;
pub mod windows;

use std::{ffi::OsString, io::Write};

use ntb::pci::{
    OpenError,
    machine::{Device, Machine, PciAddress},
};

use self::{
    command::{CheckArgs, Command, RANGES, Sub},
    description::Described,
    item::Item,
    report::Report,
};
use crate::{
    cli::{self, Answer},
    exit::{Exit, Failure},
};

/// The whole program: parses, looks, prints. The exit code is returned.
#[allow(clippy::print_stderr, reason = "this is the program")]
pub fn main(args: impl IntoIterator<Item = OsString>) -> Exit {
    let command: Command = match cli::parse(args, RANGES) {
        Ok(command) => command,
        Err(Answer::Text(text)) => {
            print(&text);
            return Exit::Good;
        }
        Err(Answer::Wrong(failure)) => {
            eprintln!("ntb-check: {failure}");
            return failure.exit;
        }
    };
    let result = match &command.sub {
        Some(Sub::Record { file }) => record::record(&Machine::default(), file).map(|()| Exit::Good),
        None => run(&command.check).and_then(|report| {
            let exit = Exit::from_class(report.exit);
            if command.check.json {
                let text = serde_json::to_string(&report)
                    .map_err(|e| Failure::new(Exit::Bad, "json", e.to_string()))?;
                print(&format!("{text}\n"));
            } else {
                print(&report.to_string());
            }
            Ok(exit)
        }),
    };
    result.unwrap_or_else(|failure| {
        eprintln!("ntb-check: {}: {failure}", failure.name);
        failure.exit
    })
}

/// To standard output. A reader that went away has seen enough.
fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

fn run(args: &CheckArgs) -> Result<Report, Failure> {
    match &args.machine {
        None => Ok(check(&Machine::default(), "this", args)),
        Some(path) => {
            let described = Described::open(path)?;
            Ok(check(described.machine(), "described", args))
        }
    }
}

/// Checks a machine.
pub fn check(machine: &Machine, which: &'static str, args: &CheckArgs) -> Report {
    let mut devices = machine.bridges();
    if let Some(address) = args.address {
        // A function that is no known bridge is looked at too: the answer says who it is.
        devices = machine.device(address).into_iter().collect();
    }
    let log = log::read(machine);
    let bridges: Vec<_> = devices.iter().map(|d| bridge::look(machine, d, &log)).collect();
    let windows = || bridges.iter().flat_map(|b| &b.windows).map(|w| w.bar_bytes);
    // A bridge whose windows are smaller gives what they have.
    let wanted = match bridges
        .iter()
        .map(|b| b.windows.iter().map(|w| w.bar_bytes).sum::<u64>())
        .max()
    {
        Some(most) if most > 0 => args.memory.min(most),
        _ => args.memory,
    };
    let mut items = vec![found(machine, &devices, args.address)];
    items.extend(machine::items(machine, wanted, windows().max().unwrap_or(0)));
    items.extend(gpu::items(machine, &devices));
    let kernel = machine.text("/proc/sys/kernel/osrelease");
    Report::new(which, kernel, wanted, items, bridges, args.strict)
}

/// Whether there is anything to drive.
fn found(machine: &Machine, devices: &[Device], asked: Option<PciAddress>) -> Item {
    const ITEM: &str = "bridges";
    if !devices.is_empty() {
        let list: Vec<String> = devices.iter().map(|d| d.address().to_string()).collect();
        return Item::pass(ITEM, list.join(", "));
    }
    let address = asked.map_or("any".to_owned(), |a| a.to_string());
    let error = OpenError::NoDevice {
        address: address.clone(),
        hint: String::new(),
    };
    let finding = match asked {
        Some(_) => format!(
            "there is no PCI function {address}; bridges are: {}",
            list(machine.bridges())
        ),
        None => format!("no NTB is visible; what comes nearest: {}", list(near(machine))),
    };
    Item::fault(
        ITEM,
        &error,
        finding,
        "without a bridge only links within this machine, and over networks, can be had",
        "in the firmware set-up, set the PCIe port that the cable is in to 'NTB to NTB', and boot anew; a port in \
         transparent or root-port mode shows as an ordinary bridge or not at all. 'lspci -Dnn' lists what the machine \
         sees",
    )
}

fn list(devices: Vec<Device>) -> String {
    let show = |d: Device| {
        let id = d.identity().as_ref().map(bridge::describe).unwrap_or_default();
        format!("{} ({id})", d.address())
    };
    let all: Vec<String> = devices.into_iter().map(show).collect();
    if all.is_empty() {
        "none".to_owned()
    } else {
        all.join(", ")
    }
}

/// Functions that may be a bridge in another mode, or its management function: bridges of no standard kind, and what
/// makers of PCIe switches sell.
fn near(machine: &Machine) -> Vec<Device> {
    const OTHER_BRIDGE: u32 = 0x06_80;
    const NTB_BRIDGE: u32 = 0x06_09;
    const SWITCH_MAKERS: [u16; 3] = [0x11F8, 0x10B5, 0x1000];
    let like = |d: &Device| {
        d.identity().is_some_and(|id| {
            let class = id.class >> 8;
            let management = id.class >> 16 == 0x05 || id.class >> 16 == 0x08;
            class == OTHER_BRIDGE || class == NTB_BRIDGE || SWITCH_MAKERS.contains(&id.vendor) && management
        })
    };
    machine.functions().into_iter().filter(like).collect()
}
