//! Writes a description of a machine: what the check reads, from a fixed list, and nothing else.

use std::{collections::BTreeSet, fs, io::Write, path::Path};

use ntb::{
    hw::{Family, regs},
    pci::{
        Bar,
        machine::{Device, Machine},
    },
};

use super::{
    description::{Description, SCHEMA, to_hex},
    gpu,
    log::{self, Trouble},
    machine,
    traffic::ERROR_COUNTS,
};
use crate::exit::{Exit, Failure};

/// Files that concern the machine as a whole and are taken as they are.
const WHOLE_FILES: [&str; 6] = [
    "/proc/sys/kernel/osrelease",
    gpu::VERSION,
    "/sys/kernel/security/lockdown",
    machine::UNSAFE_MODE,
    machine::ASPM,
    machine::GOVERNOR,
];
/// Files of which only lines with these beginnings are taken.
const LINES: [(&str, &[&str]); 4] = [
    (
        gpu::PARAMS,
        &[
            "EnablePCIERelaxedOrderingMode:",
            "DmaRemapPeerMmio:",
            "RegistryDwords:",
        ],
    ),
    (
        "/proc/meminfo",
        &[
            "MemTotal:",
            "MemAvailable:",
            "Hugepagesize:",
            "HugePages_Total:",
            "HugePages_Free:",
        ],
    ),
    ("/proc/self/limits", &["Max locked memory"]),
    ("/proc/self/status", &["VmLck:", "CapEff:"]),
];
/// Files of every function: who it is.
const EVERY_FUNCTION: [&str; 4] = ["vendor", "device", "class", "revision"];
/// Files of a bridge.
const BRIDGE: [&str; 7] = [
    "resource",
    "numa_node",
    "power_state",
    "current_link_speed",
    "current_link_width",
    "max_link_speed",
    "max_link_width",
];
/// Bytes of configuration space that are taken: ids, command, status. Serial numbers lie far behind.
const HEADER: usize = 8;

/// What the check reads of a machine.
pub fn describe(machine: &Machine) -> Description {
    let mut d = Description {
        ntb_machine: SCHEMA,
        ..Description::default()
    };
    for path in WHOLE_FILES {
        take(&mut d, machine, path);
    }
    for (path, beginnings) in LINES {
        let Some(text) = machine.text(path) else { continue };
        let wanted = text
            .lines()
            .filter(|l| beginnings.iter().any(|b| l.starts_with(b)));
        d.files
            .insert(path.to_owned(), wanted.collect::<Vec<_>>().join("\n"));
    }
    let movdir64b = if machine::has_movdir64b(machine) {
        " movdir64b"
    } else {
        ""
    };
    d.files
        .insert("/proc/cpuinfo".to_owned(), format!("flags :{movdir64b}"));
    for unit in machine.names("/sys/class/iommu") {
        d.directories.push(format!("/sys/class/iommu/{unit}"));
    }
    for state in machine.names(machine::SLEEP_STATES) {
        for file in ["name", "latency", "disable"] {
            take(
                &mut d,
                machine,
                &format!("{}/{state}/{file}", machine::SLEEP_STATES),
            );
        }
    }
    for device in machine.functions() {
        for file in EVERY_FUNCTION {
            take(&mut d, machine, &format!("{}/{file}", directory(&device)));
        }
    }
    let bridges = machine.bridges();
    for device in &bridges {
        bridge(&mut d, machine, device);
    }
    gpus(&mut d, machine);
    if let Ok(lines) = log::read(machine) {
        // A line may speak of two bridges.
        let mut wanted = BTreeSet::new();
        for device in &bridges {
            let Trouble { iommu, aer } = Trouble::of(&device.address().to_string(), &lines);
            wanted.extend(iommu.into_iter().chain(aer));
        }
        let wanted = lines
            .into_iter()
            .filter(|l| wanted.contains(l))
            .collect::<Vec<_>>();
        d.files.insert(log::PATH.to_owned(), wanted.join("\n"));
    }
    d
}

/// GPUs, and the ports between them and everything else: device control, buses and access control.
fn gpus(d: &mut Description, machine: &Machine) {
    let gpus = gpu::gpus(machine);
    if gpus.is_empty() {
        return;
    }
    for module in gpu::MODULES {
        if machine.path(module).exists() {
            d.directories.push(module.to_owned());
        }
    }
    for device in &gpus {
        let dir = directory(device);
        for file in ["resource", "numa_node"] {
            take(d, machine, &format!("{dir}/{file}"));
        }
        if let Some(name) = machine.link_name(format!("{dir}/iommu_group")) {
            d.links
                .insert(format!("{dir}/iommu_group"), format!("../iommu_group/{name}"));
        }
    }
    for (device, parts) in gpu::looked_at(machine) {
        let parts = parts.into_iter().map(|(at, bytes)| (at.into(), to_hex(&bytes)));
        d.bytes
            .insert(format!("{}/config", directory(&device)), parts.collect());
    }
}

fn bridge(d: &mut Description, machine: &Machine, device: &Device) {
    let dir = directory(device);
    for file in BRIDGE.into_iter().chain(ERROR_COUNTS.map(|(file, _)| file)) {
        take(d, machine, &format!("{dir}/{file}"));
    }
    let mut members: Vec<String> = device.group_members().into_iter().map(|m| m.address).collect();
    members.push(device.address().to_string());
    for member in members {
        let dir = format!("/sys/bus/pci/devices/{member}");
        for link in ["driver", "iommu_group"] {
            if let Some(name) = machine.link_name(format!("{dir}/{link}")) {
                d.links
                    .insert(format!("{dir}/{link}"), format!("../{link}/{name}"));
            }
        }
        if let Some(group) = device.group() {
            let link = format!("/sys/kernel/iommu_groups/{group}/devices/{member}");
            d.links.insert(link, format!("../../../../{member}"));
        }
    }
    if let Some(node) = device.group_node().filter(|n| machine.path(n).exists()) {
        let path = node.display().to_string();
        d.nodes.insert(path.clone(), machine.may_use(&node));
        for (number, _) in machine.holders(&node).iter().enumerate() {
            // The number of the process says nothing on another machine, and its name is nobody's business.
            let process = format!("/proc/{}", 1000 + number);
            d.links.insert(format!("{process}/fd/3"), path.clone());
            d.files.insert(format!("{process}/comm"), "a program".to_owned());
        }
    }
    if let Some(bare) = device.bare_node().filter(|n| machine.path(n).exists()) {
        d.nodes.insert(bare.display().to_string(), machine.may_use(&bare));
    }
    for bar in Bar::ALL {
        let path = format!("{dir}/resource{bar}_wc");
        if machine.path(&path).exists() {
            let usable = machine.may_use(&path);
            d.nodes.insert(path, usable);
        }
    }
    registers(d, device, &dir);
}

/// The registers that tell the mode, and the beginning of configuration space.
fn registers(d: &mut Description, device: &Device, dir: &str) {
    let mut config = Vec::new();
    if let Some(header) = device.config_bytes::<HEADER>(0) {
        config.push((0, to_hex(&header)));
    }
    match device.identity().as_ref().and_then(Family::of) {
        Some(Family::IntelSkx) => {
            let ppd = regs::intel_gen3::cfg::PPD.offset();
            if let Some(value) = device.config_bytes::<1>(ppd) {
                config.push((ppd.into(), to_hex(&value)));
            }
        }
        Some(Family::IntelIcx | Family::IntelSpr | Family::IntelGnr) if super::bridge::awake(device) => {
            let ppd1 = u64::from(regs::intel_gen4::PPD1.offset());
            if let Ok(value) = device.peek(Bar::B0, ppd1) {
                let value = to_hex(&value.to_le_bytes());
                d.bytes.insert(format!("{dir}/resource0"), vec![(ppd1, value)]);
            }
        }
        _ => {}
    }
    if !config.is_empty() {
        d.bytes.insert(format!("{dir}/config"), config);
    }
}

fn directory(device: &Device) -> String {
    format!("/sys/bus/pci/devices/{}", device.address())
}

fn take(d: &mut Description, machine: &Machine, path: &str) {
    if let Some(text) = machine.text(path) {
        d.files.insert(path.to_owned(), text);
    }
}

/// Records a machine to a file that does not exist yet.
pub fn record(machine: &Machine, to: &Path) -> Result<(), Failure> {
    let failed = |e: std::io::Error| {
        let hint = match e.kind() {
            std::io::ErrorKind::AlreadyExists => ": choose another name, or remove it first",
            _ => "",
        };
        Failure::new(
            Exit::Limits,
            "cannot-write",
            format!("{}: {e}{hint}", to.display()),
        )
    };
    let mut text = serde_json::to_string_pretty(&describe(machine))
        .map_err(|e| Failure::new(Exit::Bad, "json", e.to_string()))?;
    text.push('\n');
    let mut file = fs::File::create_new(to).map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(failed)
}
