//! What concerns one bridge.

use ntb::{
    hw::{Family, NtbError, Role, mode, regs},
    pci::{
        Bar, GroupMember, PciError,
        config::Identity,
        machine::{Device, Machine},
    },
};
use serde::Serialize;

use super::{
    item::Item,
    opening, traffic,
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
    let mut windows = Vec::new();
    // Nothing else matters for a function that cannot be driven, and nobody is told to bind it.
    if let Some(family) = family {
        let (found, item) = look_at_mode(device, family);
        role = found;
        items.push(item);
        items.push(opening::driver(device, &refusals));
        items.push(opening::group(device, &refusals));
        items.extend(opening::node(machine, device, &refusals));
        items.push(windows::bars(device, family, &refusals));
        windows = windows::windows(machine, device, family);
        items.extend(windows.iter().map(|(_, item)| item.clone()));
        items.push(traffic::link(now, best));
        items.push(traffic::errors(device));
        items.extend(traffic::kernel_log(device, log));
    }
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
    let Some(why) = Family::why_unsupported(identity) else {
        let error = NtbError::NotAnNtb {
            device: device.address().to_string(),
            identity: *identity,
        };
        return Item::fault(
            ITEM,
            &error,
            format!("{id}: no NTB that is known"),
            WHY,
            "run ntb-check without an address: it finds the bridges there are",
        );
    };
    let error = mode::WrongMode {
        found: why.to_owned(),
        remedy: "Use one of those that docs/hardware.md lists",
    }
    .of(&device.address().to_string());
    Item::fault(
        ITEM,
        &error,
        format!("{id}: {why}"),
        WHY,
        "use one of those that docs/hardware.md lists",
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
