//! How well a bridge works: its link, and the errors that were seen.

use ntb::pci::{config::LinkRate, machine::Device};

use super::{item::Item, log::Trouble};

/// Speed and width of its link.
pub fn link(now: Option<LinkRate>, best: Option<LinkRate>) -> Item {
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

/// What the kernel has counted.
pub fn errors(device: &Device) -> Item {
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

/// What the kernel has written about it. `log` is the kernel's, or why it cannot be read.
pub fn kernel_log(device: &Device, log: &Result<Vec<String>, String>) -> Vec<Item> {
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
