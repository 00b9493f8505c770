//! BARs and memory windows of a bridge, and the memory type that stores to them can have.

use ntb::{
    hw::{Family, NtbError},
    pci::{
        Bar, OpenError, PciError,
        machine::{Device, Machine},
    },
};
use serde::Serialize;

use super::{
    item::Item,
    machine::{amount, has_movdir64b},
};

/// A BAR.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BarFacts {
    /// Its number.
    pub bar: u32,
    /// Length.
    pub bytes: u64,
    /// Whether it has an address.
    pub placed: bool,
    /// Whether it may be mapped write-combining.
    pub prefetchable: bool,
}

/// A memory window.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WindowFacts {
    /// Its number.
    pub window: usize,
    /// The BAR it lies in.
    pub bar: u32,
    /// Length of the BAR.
    pub bar_bytes: u64,
    /// Bytes of it that can be used; null where only the open port tells.
    pub usable_bytes: Option<u64>,
    /// What the I/O address of its memory is a multiple of.
    pub address_align: u64,
    /// `write-combining` or `uncached`.
    pub memory_type: &'static str,
}

/// The BARs that there are.
pub fn bar_facts(device: &Device) -> Vec<BarFacts> {
    let facts = |bar: Bar| {
        let r = device.resource(bar)?;
        Some(BarFacts {
            bar: bar.index() as u32,
            bytes: r.bytes,
            placed: r.placed,
            prefetchable: r.prefetchable,
        })
    };
    Bar::ALL.into_iter().filter_map(facts).collect()
}

/// Whether all BARs have addresses, and the registers room.
pub fn bars(device: &Device, family: Family, refusals: &[OpenError]) -> Item {
    const ITEM: &str = "bars";
    let list: Vec<String> = bar_facts(device)
        .iter()
        .map(|b| {
            format!(
                "BAR{} {}{}",
                b.bar,
                amount(b.bytes),
                if b.placed { "" } else { " (no address)" }
            )
        })
        .collect();
    let finding = list.join(", ");
    let (bar, needed) = family.registers();
    let available = device.resource(bar).map_or(0, |r| r.bytes);
    if !finding.is_empty() && available < needed {
        let error = NtbError::TooSmall {
            device: device.address().to_string(),
            what: "the register BAR",
            needed,
            available,
        };
        return Item::fault(
            ITEM,
            &error,
            format!("{finding}; the registers need {needed} bytes of BAR{bar}, and it has {available}"),
            "every bridge of this family has its registers there",
            "update the firmware of the bridge, or set the port to NTB in the firmware set-up",
        );
    }
    let refusal = refusals
        .iter()
        .find(|e| matches!(e, OpenError::Pci(PciError::BarNotPlaced { .. })));
    match refusal {
        Some(error) => Item::fault(
            ITEM,
            error,
            finding,
            "firmware or kernel found no room for it: what lies behind it cannot be reached",
            "enable 64-bit MMIO ('above 4G decoding') in the firmware set-up, or choose a smaller window size there",
        ),
        None if finding.is_empty() => {
            Item::note(ITEM, "the kernel lists none", "registers and windows lie in BARs")
        }
        None => Item::pass(ITEM, finding),
    }
}

/// The windows, each with what can be said about stores to it.
pub fn windows(machine: &Machine, device: &Device, family: Family) -> Vec<(WindowFacts, Item)> {
    let list = family.window_bars().iter().enumerate();
    // How many windows an endpoint has, its firmware decides: what it has no BAR for is not missing.
    let optional = matches!(family, Family::Epf { .. });
    list.filter(|(_, bar)| !optional || device.resource(**bar).is_some())
        .map(|(index, &bar)| window(machine, device, family, index, bar))
        .collect()
}

fn window(machine: &Machine, device: &Device, family: Family, index: usize, bar: Bar) -> (WindowFacts, Item) {
    const ITEM: &str = "window";
    let resource = device.resource(bar);
    let bytes = resource.map_or(0, |r| r.bytes);
    let fills_bar = !matches!(family, Family::Epf { .. });
    let aligned_to_size = matches!(family, Family::IntelSkx | Family::IntelIcx);
    let mut facts = WindowFacts {
        window: index,
        bar: bar.index() as u32,
        bar_bytes: bytes,
        usable_bytes: fills_bar.then_some(bytes),
        address_align: if aligned_to_size { bytes.max(4096) } else { 4096 },
        memory_type: "uncached",
    };
    if resource.is_none() {
        let error = NtbError::Pci(PciError::NoBar {
            bar,
            device: device.address().to_string(),
        });
        let item = Item::fault(
            ITEM,
            &error,
            format!("window {index} lies in BAR{bar}, which has no memory"),
            "a bridge of this family has this window, and the driver uses all there are",
            "give the window a size in the firmware set-up, equal on both hosts",
        );
        return (facts, item);
    }
    let usable = if fills_bar {
        format!("window {index}: BAR{bar} of {}, usable in full", amount(bytes))
    } else {
        format!(
            "window {index}: BAR{bar} of {}, of which the endpoint gives part (its control block says how much, and \
             doorbells may lie in front)",
            amount(bytes)
        )
    };
    let Some(error) = device.combining_refusal(bar) else {
        facts.memory_type = "write-combining";
        return (
            facts,
            Item::pass(ITEM, format!("{usable}; write-combining stores can be had")),
        );
    };
    let finding = format!("{usable}; stores will be uncached: {error}");
    let item = if has_movdir64b(machine) {
        Item::note(
            ITEM,
            finding,
            "the processor stores whole lines on any memory type (movdir64b)",
        )
    } else {
        Item::warning(
            ITEM,
            error.name(),
            finding,
            "eight bus writes per line of 64 bytes instead of one: small messages take longer, and bulk runs at a tenth \
             of the rate",
            remedy(&error, device.combining_file(bar).exists()),
        )
    };
    (facts, item)
}

/// What to do where a window cannot be mapped write-combining.
fn remedy(error: &PciError, offered: bool) -> &'static str {
    match error {
        PciError::Lockdown { .. } => "turn Secure Boot off in the firmware set-up",
        _ if offered => "run as root, or have a helper pass the descriptor",
        _ => "none on this machine: a processor with movdir64b stores whole lines all the same",
    }
}
