//! What concerns one bridge.

use std::time::Duration;

use ntb::{
    hw::{Family, NtbError, Role, mode, regs},
    pci::{
        Bar, GroupMember, OpenError, PciError, bind_command,
        config::{Identity, LinkRate},
        machine::{Device, Machine},
    },
};
use serde::Serialize;

use super::{
    item::Item,
    log::Trouble,
    machine::IOMMU_REMEDY,
    windows::{self, BarFacts, WindowFacts},
};

/// A bridge: facts, and what is made of them.
#[derive(Clone, Debug, Serialize)]
pub struct Bridge {
    /// PCI address.
    pub address: String,
    /// Family, as the emulator's option has it; null for bridges that are not supported.
    pub family: Option<&'static str>,
    /// Vendor, device, revision, class.
    pub id: String,
    /// `upstream`, `downstream`; null where the hardware does not say or cannot be asked.
    pub mode: Option<&'static str>,
    /// Kernel driver that holds it.
    pub driver: Option<String>,
    /// NUMA node it is at.
    pub numa_node: Option<u32>,
    /// IOMMU group.
    pub group: Option<u32>,
    /// Who else is in the group.
    pub group_members: Vec<Member>,
    /// Link of the function now, such as `x16 16.0 GT/s`.
    pub link_now: Option<String>,
    /// Link of the function at best.
    pub link_possible: Option<String>,
    /// BARs.
    pub bars: Vec<BarFacts>,
    /// Memory windows.
    pub windows: Vec<WindowFacts>,
    /// What was looked at.
    pub items: Vec<Item>,
}

/// A function in the same IOMMU group.
#[derive(Clone, Debug, Serialize)]
pub struct Member {
    /// PCI address.
    pub address: String,
    /// Kernel driver that holds it.
    pub driver: Option<String>,
    /// Whether it keeps the group from being used.
    pub in_the_way: bool,
}

/// Looks at one bridge. `log` is the kernel's, or why it cannot be read.
pub fn look(machine: &Machine, device: &Device, log: &Result<Vec<String>, String>) -> Bridge {
    let identity = device.identity();
    let family = identity.as_ref().and_then(Family::of);
    let refusals = device.refusals(false);
    let (now, best) = device.link();
    let mut items = vec![who(device, identity.as_ref(), family)];
    let mut role = None;
    if let Some(family) = family {
        let (found, item) = look_at_mode(device, family);
        role = found;
        items.push(item);
    }
    items.push(driver(device, &refusals));
    items.push(group(device, &refusals));
    items.extend(node(machine, device));
    items.push(windows::bars(device, &refusals));
    let windows = family
        .map(|f| windows::windows(machine, device, f))
        .unwrap_or_default();
    items.extend(windows.iter().map(|(_, item)| item.clone()));
    items.push(link(now, best));
    items.push(errors(device));
    items.extend(kernel_log(device, log));
    Bridge {
        address: device.address().to_string(),
        family: family.map(Family::name),
        id: identity.as_ref().map(describe).unwrap_or_default(),
        mode: match role {
            Some(Role::Upstream) => Some("upstream"),
            Some(Role::Downstream) => Some("downstream"),
            Some(Role::Symmetric) | None => None,
        },
        driver: device.driver(),
        numa_node: device.text("numa_node").and_then(|t| t.parse().ok()),
        group: device.group(),
        group_members: device.group_members().into_iter().map(member).collect(),
        link_now: now.map(|r| r.to_string()),
        link_possible: best.map(|r| r.to_string()),
        bars: windows::bar_facts(device),
        windows: windows.into_iter().map(|(facts, _)| facts).collect(),
        items,
    }
}

fn member(m: GroupMember) -> Member {
    Member {
        address: m.address,
        driver: m.driver,
        in_the_way: m.in_the_way,
    }
}

/// Vendor, device, revision and class in words.
pub fn describe(id: &Identity) -> String {
    format!(
        "{:04x}:{:04x}, revision {:02x}, class {:06x}",
        id.vendor, id.device, id.revision, id.class
    )
}

fn who(device: &Device, identity: Option<&Identity>, family: Option<Family>) -> Item {
    const ITEM: &str = "identity";
    const WHY: &str = "only bridges of known families can be driven";
    let Some(identity) = identity else {
        return Item::note(ITEM, "the kernel does not say who it is", WHY);
    };
    let id = describe(identity);
    if device.config_bytes(0) == Some([0xFF; 4]) {
        let error = PciError::Gone {
            what: "its configuration space reads all ones".to_owned(),
        };
        return Item::fault(
            ITEM,
            &error,
            format!("{id}; but its configuration space reads all ones: it does not answer"),
            "a device that has vanished or lost power answers so; nothing that is written to it arrives",
            format!(
                "reseat or power the device; then, as root: echo 1 > /sys/bus/pci/devices/{}/remove; echo 1 > \
                 /sys/bus/pci/rescan",
                device.address()
            ),
        );
    }
    if let Some(family) = family {
        return Item::pass(ITEM, format!("{family} ({id})"));
    }
    let why = Family::why_unsupported(identity).unwrap_or("it is no bridge that is known");
    let error = mode::WrongMode {
        found: why.to_owned(),
        remedy: "Use a bridge of a later generation",
    }
    .of(&device.address().to_string());
    Item::fault(
        ITEM,
        &error,
        format!("{id}: {why}"),
        WHY,
        "use a bridge of a later generation",
    )
}

/// The mode, where it can be read without opening the port.
fn look_at_mode(device: &Device, family: Family) -> (Option<Role>, Item) {
    const ITEM: &str = "mode";
    const WHY: &str = "only a port that is set to NTB back to back reaches another host's memory";
    let unknown = |finding: &str| (None, Item::note(ITEM, finding, WHY));
    let root = "it cannot be read as this user: the driver finds it out when it opens the port. Run ntb-check as root";
    let told = match family {
        Family::IntelSkx => {
            let Some([ppd]) = device.config_bytes(regs::intel_gen3::cfg::PPD.offset()) else {
                return unknown(root);
            };
            mode::intel_gen3(ppd)
        }
        Family::IntelIcx | Family::IntelSpr | Family::IntelGnr => {
            if !awake(device) {
                return unknown(
                    "the port sleeps or is switched off: the driver finds it out when it opens the port",
                );
            }
            match device.peek(Bar::B0, regs::intel_gen4::PPD1.offset().into()) {
                Ok(u32::MAX) => return unknown("its register does not answer"),
                Ok(ppd1) => mode::intel_gen4(family, ppd1),
                Err(_) => return unknown(root),
            }
        }
        Family::Amd { .. } => {
            return (
                None,
                Item::pass(ITEM, "NTB; which side is told when the port is open"),
            );
        }
        Family::Epf { .. } => {
            let item = Item::pass(ITEM, "NTB endpoint; both ends are alike");
            return (Some(Role::Symmetric), item);
        }
    };
    match told {
        Ok(Role::Downstream) => (
            Some(Role::Downstream),
            Item::pass(ITEM, "back to back, downstream"),
        ),
        Ok(role) => (Some(role), Item::pass(ITEM, "back to back, upstream")),
        Err(wrong) => {
            let (found, remedy) = (wrong.found.clone(), wrong.remedy);
            let error: NtbError = wrong.of(&device.address().to_string());
            (None, Item::fault(ITEM, &error, found, WHY, remedy))
        }
    }
}

/// Whether the function answers on its BARs: full power, memory decoded.
pub(super) fn awake(device: &Device) -> bool {
    const COMMAND: u32 = 4;
    const MEMORY: u16 = 2;
    let powered = device.text("power_state").is_none_or(|s| s == "D0");
    let decodes = device.config_bytes(COMMAND).map(u16::from_le_bytes);
    powered && decodes.is_some_and(|c| c & MEMORY != 0 && c != u16::MAX)
}

fn driver(device: &Device, refusals: &[OpenError]) -> Item {
    const ITEM: &str = "driver";
    let address = device.address().to_string();
    let refusal = refusals
        .iter()
        .find(|e| matches!(e, OpenError::WrongDriver { .. }));
    let Some(error) = refusal else {
        return Item::pass(ITEM, "vfio-pci");
    };
    let holder = device.driver();
    Item::fault(
        ITEM,
        error,
        holder.map_or("no driver holds it".to_owned(), |d| {
            format!("driver {d} holds it")
        }),
        "the bridge is driven from user space through vfio-pci, and a function has one driver",
        format!(
            "'modprobe vfio-pci; driverctl set-override {address} vfio-pci', which survives reboots; or as root, until \
             the next boot: 'modprobe vfio-pci; {}'",
            bind_command(&address)
        ),
    )
}

fn group(device: &Device, refusals: &[OpenError]) -> Item {
    const ITEM: &str = "iommu-group";
    for error in refusals {
        match error {
            OpenError::NoIommu { .. } => {
                return Item::fault(
                    ITEM,
                    error,
                    "it is in no IOMMU group: the IOMMU is absent or off",
                    "without an IOMMU the peer could write to all memory of this machine; the driver takes that only \
                     when it is told to",
                    IOMMU_REMEDY,
                );
            }
            OpenError::GroupNotViable { group, members, .. } => {
                let (list, blocking) = describe_group(device, members);
                return Item::fault(
                    ITEM,
                    error,
                    format!("group {group} is shared with {list}"),
                    "functions of one group can reach each other's memory, so VFIO gives out all of them or none",
                    format!(
                        "as root: {}; or put the card into another slot",
                        blocking
                            .iter()
                            .map(|a| bind_command(a))
                            .collect::<Vec<_>>()
                            .join("; ")
                    ),
                );
            }
            _ => {}
        }
    }
    let (list, _) = describe_group(device, &device.group_members());
    let group = device.group().unwrap_or_default();
    if list.is_empty() {
        return Item::pass(ITEM, format!("group {group}, alone in it"));
    }
    Item::pass(
        ITEM,
        format!("group {group}, shared with {list}: none is in the way"),
    )
}

/// The others of a group in words, and which are in the way.
fn describe_group(device: &Device, members: &[GroupMember]) -> (String, Vec<String>) {
    let own = device.address().to_string();
    let others = members.iter().filter(|m| m.address != own);
    let list: Vec<String> = others
        .map(|m| {
            let driver = m.driver.as_deref().unwrap_or("no driver");
            let note = if m.in_the_way { ", in the way" } else { "" };
            format!("{} ({driver}{note})", m.address)
        })
        .collect();
    let blocking = members.iter().filter(|m| m.in_the_way).map(|m| m.address.clone());
    (list.join(", "), blocking.collect())
}

/// The device node: only where one is to be expected.
fn node(machine: &Machine, device: &Device) -> Option<Item> {
    const ITEM: &str = "device-node";
    const WHY: &str = "the driver opens the bridge through this node";
    let path = device.group_node()?;
    let node = path.display().to_string();
    if device.driver().as_deref() != Some("vfio-pci") {
        return None;
    }
    if !machine.path(&path).exists() {
        let error = OpenError::NodeMissing {
            node: node.clone(),
            waited: Duration::ZERO,
            hint: "",
        };
        return Some(Item::fault(
            ITEM,
            &error,
            format!("{node} does not exist, though vfio-pci holds the function"),
            WHY,
            format!(
                "load the module ('modprobe vfio-pci'); give a container the node: --device /dev/vfio/vfio --device {node}"
            ),
        ));
    }
    if !machine.may_use(&path) {
        let error = OpenError::Permission {
            node: node.clone(),
            source: std::io::ErrorKind::PermissionDenied.into(),
            remedy: String::new(),
        };
        return Some(Item::fault(
            ITEM,
            &error,
            format!("{node} may not be opened by this user"),
            WHY,
            format!(
                "run as root; or as root: 'chown USER {node}', or a udev rule that does it at every boot"
            ),
        ));
    }
    let holders = machine.holders(&path);
    if !holders.is_empty() {
        let error = OpenError::NodeBusy {
            node: node.clone(),
            waited: Duration::ZERO,
            holders: holders.clone(),
        };
        return Some(Item::fault(
            ITEM,
            &error,
            format!("{node} is held by {}", holders.join(", ")),
            "one program at a time drives a bridge",
            format!("end that program if it should not run; as root, 'fuser -v {node}' shows its user"),
        ));
    }
    Some(Item::pass(ITEM, node))
}

fn link(now: Option<LinkRate>, best: Option<LinkRate>) -> Item {
    const ITEM: &str = "link";
    const SLOW: &str = "idle links may be slowed down to save power: judge the speed under load";
    let (Some(now), Some(best)) = (now, best) else {
        let finding = match best {
            Some(best) => format!("down, or not told; possible: {best}"),
            None => "the kernel tells neither speed nor width of the function's link".to_owned(),
        };
        return Item::note(
            ITEM,
            finding,
            "the link between the hosts is known once the port is open",
        );
    };
    let finding = format!("{now} now, {best} possible");
    if now.lanes < best.lanes {
        return Item::warning(
            ITEM,
            "narrow-link",
            finding,
            "each lane that is missing takes its share of the bandwidth, and large messages take longer",
            "reseat card and cable; see that the slot has that many lanes and is not split in the firmware set-up, \
             and that the peer's port has as many",
        );
    }
    if now.generation < best.generation {
        return Item::note(ITEM, finding, SLOW);
    }
    Item::pass(ITEM, finding)
}

/// The kernel's counts of errors, by severity; a file for each.
pub const ERROR_COUNTS: [(&str, &str); 3] = [
    ("aer_dev_correctable", "TOTAL_ERR_COR"),
    ("aer_dev_nonfatal", "TOTAL_ERR_NONFATAL"),
    ("aer_dev_fatal", "TOTAL_ERR_FATAL"),
];

fn errors(device: &Device) -> Item {
    const ITEM: &str = "pcie-errors";
    const WHY: &str =
        "correctable errors are repeated by the link and show as rare long latencies; the others lose data";
    let count = |(file, key): (&str, &str)| -> Option<u64> {
        let text = device.text(file)?;
        text.lines()
            .find_map(|l| l.strip_prefix(key)?.trim().parse().ok())
    };
    let [Some(correctable), Some(nonfatal), Some(fatal)] = ERROR_COUNTS.map(count) else {
        return Item::note(ITEM, "the kernel keeps no counts for it", WHY);
    };
    let finding = format!("{correctable} correctable, {nonfatal} non-fatal, {fatal} fatal since boot");
    match (correctable, nonfatal + fatal) {
        (0, 0) => Item::pass(ITEM, finding),
        (_, 0) => Item::note(ITEM, finding, WHY),
        _ => Item::warning(
            ITEM,
            "pcie-errors",
            finding,
            WHY,
            "reseat card and cable, or use a shorter cable; 'dmesg | grep -i aer' has the details",
        ),
    }
}

fn kernel_log(device: &Device, log: &Result<Vec<String>, String>) -> Vec<Item> {
    const ITEM: &str = "kernel-log";
    const WHY: &str = "refused accesses and link errors are told there and nowhere else";
    let lines = match log {
        Ok(lines) => lines,
        Err(why) => return vec![Item::note(ITEM, format!("it cannot be read: {why}"), WHY)],
    };
    let trouble = Trouble::of(&device.address().to_string(), lines);
    let last = |lines: &[String]| lines.last().cloned().unwrap_or_default();
    let mut items = Vec::new();
    if !trouble.iommu.is_empty() {
        items.push(Item::warning(
            ITEM,
            "iommu-faults",
            format!(
                "{} accesses of the bridge were refused by the IOMMU; the last: {}",
                trouble.iommu.len(),
                last(&trouble.iommu)
            ),
            "what the peer writes is dropped then, and its messages never arrive",
            "from before the driver ran, or once at its end: harmless. Otherwise the bridge's writes carry a requester id \
             that the IOMMU does not know: update the kernel (it needs the alias quirk of the bridge), see that the \
             peer's port has its id table filled, and that no other driver resets the IOMMU",
        ));
    }
    if !trouble.aer.is_empty() {
        items.push(Item::warning(
            ITEM,
            "aer-reports",
            format!(
                "{} reports of PCIe errors; the last: {}",
                trouble.aer.len(),
                last(&trouble.aer)
            ),
            "each is a packet that was damaged or refused",
            "reseat card and cable; many at the time of a peer's crash are stores into its closed window",
        ));
    }
    if items.is_empty() {
        items.push(Item::pass(ITEM, "nothing about refused accesses or link errors"));
    }
    items
}
