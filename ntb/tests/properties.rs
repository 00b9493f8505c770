//! Properties of what parses and what allocates.

use std::collections::BTreeMap;

use ntb::{
    hw::{inferred::LOWEST_IOVA, regs::amd},
    pci::{
        Bar,
        config::{self, capabilities, extended_capabilities},
        fake::{Fake, FakeConfig, RegisterFile},
        iova::{IovaAllocator, IovaRange},
    },
};
use proptest::prelude::*;

fn with_space(edits: &[(u16, u32)]) -> std::sync::Arc<Fake> {
    let mut config = FakeConfig::new("random", 0x8086, 0x347E).bar(Bar::B0, 0x1000);
    for (at, value) in edits {
        config.put(usize::from(*at & 0xFFC), &value.to_le_bytes());
    }
    Fake::new(config, RegisterFile::new(&amd::MAP, 0x1000))
}

/// Configuration space with a list through random places, mostly well formed.
fn chains() -> impl Strategy<Value = Vec<(u16, u32)>> {
    let link = (0x0u16..0x1000, any::<u8>(), 0u32..0x1000).prop_map(|(at, id, next)| {
        let next = if at >= 0x100 {
            next << 20
        } else {
            (next & 0xFF) << 8
        };
        (at, u32::from(id) | next)
    });
    proptest::collection::vec(link, 0..60)
}

proptest! {
    /// Whatever configuration space holds, the walks end, and what they find lies inside, once each.
    #[test]
    fn capability_walks_end(edits in chains(), first in any::<u8>()) {
        let mut edits = edits;
        edits.push((0x34, first.into()));
        edits.push((0x04, 0x0010_0000));
        let fake = with_space(&edits);
        if let Ok(found) = capabilities(&*fake) {
            let mut at: Vec<_> = found.iter().map(|c| c.offset).collect();
            prop_assert!(at.iter().all(|o| (0x40..0x100).contains(o) && o % 4 == 0));
            at.sort_unstable();
            at.dedup();
            prop_assert_eq!(at.len(), found.len());
        }
        if let Ok(found) = extended_capabilities(&*fake) {
            prop_assert!(found.iter().all(|c| (0x100..0x1000).contains(&c.offset) && c.offset % 4 == 0));
            prop_assert!(found.len() <= 960);
        }
        let _ = config::pcie_link(&*fake);
        let _ = config::msix_vectors(&*fake);
    }

    /// Whatever a device answers, the driver keeps its promises; most devices that lie now and then still open.
    #[test]
    fn a_device_that_answers_anything_breaks_nothing(family in 0u8..6, rest in proptest::collection::vec(any::<u8>(), 0..600)) {
        let data: Vec<u8> = [family, 0].into_iter().chain(rest).collect();
        ntb::hw::fuzz::fuzz(&data);
    }

    /// What the allocator hands out lies in the ranges, off the holes, aligned, apart; what comes back makes the space
    /// whole again.
    #[test]
    fn iova_allocations_are_apart_and_come_back(
        ranges in proptest::collection::vec((0u64..1 << 40, 1u64..1 << 34), 1..6),
        start in 0u64..1 << 41,
        steps in proptest::collection::vec((any::<bool>(), 1u64..1 << 24, 12u32..30), 1..60),
    ) {
        let ranges: Vec<IovaRange> =
            ranges.into_iter().map(|(start, bytes)| IovaRange::new(start, bytes).unwrap()).collect();
        let mut space = IovaAllocator::new(&ranges, 4096, start);
        let at_first: Vec<_> = space.free().collect();
        // No two free ranges touch, or they would have been merged.
        prop_assert!(at_first.windows(2).all(|w| w[0].last + 1 < w[1].start));
        let mut held: BTreeMap<u64, IovaRange> = BTreeMap::new();
        for (take, bytes, log2) in steps {
            if take {
                let align = 1 << log2;
                match space.allocate(bytes, align) {
                    Ok(r) => {
                        prop_assert_eq!(r.bytes(), bytes.next_multiple_of(4096));
                        prop_assert!(r.start.is_multiple_of(align) && r.start >= LOWEST_IOVA);
                        prop_assert!(at_first.iter().any(|f| f.covers(&r)), "in a hole: {r}");
                        prop_assert!(held.values().all(|h| r.last < h.start || h.last < r.start), "overlap: {r}");
                        held.insert(r.start, r);
                    }
                    Err(e) => {
                        prop_assert_eq!(e.name(), "no-iova");
                        let rounded = bytes.next_multiple_of(4096);
                        let fits = |f: &IovaRange| {
                            let at = f.start.next_multiple_of(align);
                            IovaRange::new(at, rounded).is_some_and(|r| r.last <= f.last)
                        };
                        prop_assert!(!space.free().any(|f| fits(&f)), "refused although it fits");
                    }
                }
            } else if let Some((_, r)) = held.pop_first() {
                space.release(r).unwrap();
                prop_assert!(space.release(r).is_err(), "released twice");
            }
        }
        for r in held.into_values() {
            prop_assert!(space.reserve(r).is_err(), "reserved what is in use");
            space.release(r).unwrap();
        }
        prop_assert_eq!(space.free().collect::<Vec<_>>(), at_first);
    }
}

#[test]
fn a_device_that_tells_the_truth_is_opened_and_used() {
    for family in 0..6 {
        // No lies: bytes up to 199 are truths, and calls as well.
        let calls = (0..6000u32).map(|i| (i * 7 % 200) as u8);
        let data: Vec<u8> = [family, 0].into_iter().chain(calls).collect();
        assert!(ntb::hw::fuzz::fuzz(&data), "family {family}");
    }
}

#[test]
fn a_39_bit_iommu_with_an_interrupt_hole_is_respected() {
    let ranges = [
        IovaRange {
            start: 0,
            last: 0xFEDF_FFFF,
        },
        IovaRange {
            start: 0xFEF0_0000,
            last: (1 << 39) - 1,
        },
    ];
    let mut space = IovaAllocator::new(&ranges, 4096, u64::MAX);
    let mut taken = 0;
    while let Ok(r) = space.allocate(1 << 31, 1 << 20) {
        assert!(r.last < 1 << 39);
        assert!(
            r.last < 0xFEE0_0000 || r.start > 0xFEEF_FFFF,
            "{r} covers the interrupt window"
        );
        taken += 1;
    }
    assert!(taken > 250, "{taken}");
}

#[test]
fn the_top_of_the_address_space_can_be_used() {
    let all = IovaRange {
        start: 0,
        last: u64::MAX,
    };
    let mut space = IovaAllocator::new(&[all], 4096, u64::MAX - 4095);
    let top = space.allocate(4096, 4096).unwrap();
    assert_eq!(top.last, u64::MAX);
    let next = space.allocate(4096, 4096).unwrap();
    assert_eq!(next.start, LOWEST_IOVA, "wraps to the lowest");
    space.release(top).unwrap();
    space.release(next).unwrap();
    assert_eq!(space.free().count(), 1);
}
