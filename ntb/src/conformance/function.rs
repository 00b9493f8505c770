//! What every [`PciFunction`] must do.

use std::{os::fd::AsFd, sync::Arc};

use ntb_mem::region::{Pages, Region};

use super::{readable, wait_until};
use crate::{
    health::Watch,
    pci::{
        Area, Bar, CacheType, DmaMemory, DmaSpace, EventFd, Function, Notice, PciError, PciFunction, config,
    },
};

/// Makes functions for the cases, and does to the device what only the test's side can.
pub trait FunctionFixture {
    /// A function, fresh and exclusively held. All earlier ones are gone.
    fn open(&self) -> Arc<dyn PciFunction>;

    /// Eight bytes in a BAR that hold what is written and do nothing else, as two 32-bit registers.
    fn scratch(&self) -> (Bar, u64);

    /// Makes the device raise a vector; false where the fixture cannot.
    fn raise(&self, function: &Arc<dyn PciFunction>, vector: u16) -> bool;
}

/// A case with its name.
type Case = (&'static str, fn(&dyn FunctionFixture));

/// The suite.
pub const FUNCTION_CASES: &[Case] = &[
    ("config-access-is-checked", config_access_is_checked),
    ("capabilities-are-found", capabilities_are_found),
    ("bars-say-what-they-are", bars_say_what_they_are),
    ("register-access-is-checked", register_access_is_checked),
    ("registers-have-widths", registers_have_widths),
    ("bulk-access-equals-registers", bulk_access_equals_registers),
    ("maps-honour-holes", maps_honour_holes),
    ("bus-master-turns-on-and-off", bus_master_turns_on_and_off),
    ("vectors-in-any-subset", vectors_in_any_subset),
    ("vectors-arrive", vectors_arrive),
    ("notices-connect-and-disconnect", notices_connect_and_disconnect),
    ("dma-maps-and-unmaps", dma_maps_and_unmaps),
    ("dma-refuses-what-cannot-be", dma_refuses_what_cannot_be),
    ("guards-hold-the-function", guards_hold_the_function),
    ("reset-quiets-or-is-refused", reset_quiets_or_is_refused),
];

/// A function whose BARs answer.
fn live(fixture: &dyn FunctionFixture) -> Arc<dyn PciFunction> {
    let function = fixture.open();
    config::quiesce(&*function).expect("quiesce");
    function
}

fn config_access_is_checked(fixture: &dyn FunctionFixture) {
    let f = &*fixture.open();
    let size = f.config_size();
    assert!(size == 256 || size == 4096, "{size} bytes of configuration space");
    for offset in [1, 3, size - 1, size, u32::MAX - 1, u32::MAX] {
        let e = config::read32(f, offset).expect_err("an unaligned or outlying read");
        assert_eq!(e.name(), "bad-config-access", "{e}");
        let e = config::write16(f, offset | 1, 0).expect_err("an unaligned or outlying write");
        assert_eq!(e.name(), "bad-config-access", "{e}");
    }
    let whole = config::read32(f, config::VENDOR_ID).expect("read");
    let halves = [config::read16(f, 0), config::read16(f, 2)].map(|h| h.expect("read"));
    assert_eq!(whole, u32::from(halves[1]) << 16 | u32::from(halves[0]));
    let bytes = [0, 1, 2, 3].map(|i| config::read8(f, i).expect("read"));
    assert_eq!(whole, u32::from_le_bytes(bytes));
}

fn capabilities_are_found(fixture: &dyn FunctionFixture) {
    let f = &*fixture.open();
    let id = config::identity(f).expect("somebody is there");
    assert!(id.vendor != 0 && id.vendor != u16::MAX);
    config::extended_capabilities(f).expect("a list that ends");
    let list = config::capabilities(f).expect("a list that ends");
    assert!(
        list.iter().any(|c| c.id == config::CAP_PCIE),
        "no PCIe capability in {list:?}"
    );
    assert_eq!(config::msix_vectors(f).expect("read"), f.vectors());
}

fn bars_say_what_they_are(fixture: &dyn FunctionFixture) {
    let f = &*fixture.open();
    let mut found = 0;
    for bar in Bar::ALL {
        let Some(info) = f.bar(bar) else { continue };
        found += 1;
        assert_eq!(info.bar, bar);
        assert!(
            info.bytes.is_power_of_two(),
            "BAR{bar} of {:#x} bytes",
            info.bytes
        );
        let address = f.bar_address(bar).expect("an address");
        assert!(address.is_multiple_of(info.bytes), "BAR{bar} at {address:#x}");
        let mut behind = 0;
        for area in &info.mappable {
            assert!(
                area.offset >= behind && area.bytes > 0,
                "areas out of order: {:?}",
                info.mappable
            );
            assert!(area.end() <= info.bytes, "an area outside the BAR: {area:?}");
            behind = area.end();
        }
    }
    assert!(found > 0, "no BARs");
}

fn register_access_is_checked(fixture: &dyn FunctionFixture) {
    let f = &*live(fixture);
    let (bar, scratch) = fixture.scratch();
    let size = f.bar(bar).expect("the scratch BAR").bytes;
    let name = |r: Result<u32, PciError>| r.map_err(|e| e.name());
    assert_eq!(name(f.read::<u32>(bar, scratch + 1)), Err("misaligned-access"));
    for offset in [size, size - 2, u64::MAX - 3, u64::MAX] {
        assert_eq!(
            name(f.read::<u32>(bar, offset)),
            Err("out-of-bar"),
            "at {offset:#x}"
        );
        let e = f.write::<u64>(bar, offset, 0).expect_err("an outlying write");
        assert_eq!(e.name(), "out-of-bar");
    }
    if let Some(missing) = Bar::ALL.into_iter().find(|b| f.bar(*b).is_none()) {
        assert_eq!(name(f.read::<u32>(missing, 0)), Err("no-bar"));
    }
}

fn registers_have_widths(fixture: &dyn FunctionFixture) {
    let f = &*live(fixture);
    let (bar, at) = fixture.scratch();
    f.write::<u32>(bar, at, 0x4433_2211).expect("write");
    f.write::<u32>(bar, at + 4, 0x8877_6655).expect("write");
    assert_eq!(f.read::<u32>(bar, at).expect("read"), 0x4433_2211);
    assert_eq!(f.read::<u32>(bar, at + 4).expect("read"), 0x8877_6655);
    assert_eq!(f.read::<u64>(bar, at).expect("read"), 0x8877_6655_4433_2211);
    assert_eq!(f.read::<u16>(bar, at + 2).expect("read"), 0x4433);
    assert_eq!(f.read::<u8>(bar, at + 5).expect("read"), 0x66);
}

fn bulk_access_equals_registers(fixture: &dyn FunctionFixture) {
    let f = &*live(fixture);
    let (bar, at) = fixture.scratch();
    f.bar_write(bar, at, &[1, 2, 3, 4, 5, 6, 7, 8]).expect("write");
    assert_eq!(f.read::<u32>(bar, at).expect("read"), 0x0403_0201);
    let mut bytes = [0; 8];
    f.bar_read(bar, at, &mut bytes).expect("read");
    assert_eq!(bytes, [1, 2, 3, 4, 5, 6, 7, 8]);
    // Posted writes are ordered before later reads.
    f.bar_post(bar, at, &[9, 0, 0, 0]).expect("post");
    assert_eq!(f.read::<u32>(bar, at).expect("read"), 9);
}

fn maps_honour_holes(fixture: &dyn FunctionFixture) {
    let f = live(fixture);
    for bar in Bar::ALL {
        let Some(info) = f.bar(bar).cloned() else { continue };
        let map = match Arc::clone(&f).map_bar(bar, CacheType::Uncached) {
            Ok(map) => map,
            Err(e) => {
                assert_eq!(e.name(), "no-such-mapping", "{e}");
                continue;
            }
        };
        assert_eq!(map.areas(), info.mappable);
        for area in map.areas() {
            map.pointer(area.offset, 8).expect("inside");
            map.pointer(area.end() - 8, 8).expect("inside");
            assert_eq!(
                map.load::<u32>(area.offset + 2).map_err(|e| e.name()),
                Err("misaligned-access")
            );
        }
        // The first byte that no area covers.
        let hole = info
            .mappable
            .iter()
            .fold(0, |at, a| if a.contains(at, 1) { a.end() } else { at });
        assert_eq!(map.pointer(hole, 1).map_err(|e| e.name()), Err("bar-hole"));
        assert_eq!(
            map.load::<u64>(u64::MAX - 7).map_err(|e| e.name()),
            Err("bar-hole")
        );
        let whole = Area {
            offset: 0,
            bytes: info.bytes,
        };
        assert!(!whole.contains(info.bytes, 1));
    }
}

fn bus_master_turns_on_and_off(fixture: &dyn FunctionFixture) {
    let f = &*fixture.open();
    config::quiesce(f).expect("quiesce");
    assert!(
        !config::bus_master(f).expect("read"),
        "quiet means no bus mastering"
    );
    config::set_bus_master(f, true).expect("on");
    assert!(config::bus_master(f).expect("read"));
    config::set_bus_master(f, false).expect("off");
    assert!(!config::bus_master(f).expect("read"));
}

fn vectors_in_any_subset(fixture: &dyn FunctionFixture) {
    let f = &*fixture.open();
    let n = f.vectors();
    assert!(n >= 4, "{n} vectors");
    let (a, b) = (EventFd::new().expect("eventfd"), EventFd::new().expect("eventfd"));
    f.set_vectors(&[(n - 1, a.as_fd())]).expect("the last alone");
    f.set_vectors(&[(2, a.as_fd()), (0, b.as_fd())])
        .expect("a hole, out of order");
    let all: Vec<_> = (0..n).map(|v| (v, a.as_fd())).collect();
    f.set_vectors(&all).expect("all on one descriptor");
    let e = f.set_vectors(&[(n, a.as_fd())]).expect_err("a vector too many");
    assert_eq!(e.name(), "bad-vector");
    let e = f
        .set_vectors(&[(1, a.as_fd()), (1, b.as_fd())])
        .expect_err("one vector twice");
    assert_eq!(e.name(), "bad-vector");
    f.set_vectors(&[]).expect("none");
    f.set_vectors(&[]).expect("none again");
}

fn vectors_arrive(fixture: &dyn FunctionFixture) {
    let f = fixture.open();
    let event = EventFd::new().expect("eventfd");
    config::set_bus_master(&*f, true).expect("on");
    f.set_vectors(&[(1, event.as_fd())]).expect("connect");
    if !fixture.raise(&f, 1) {
        return;
    }
    wait_until("the vector", || event.take().expect("take") > 0);
    f.set_vectors(&[(0, event.as_fd())])
        .expect("another in its place");
    event.take().expect("take");
    fixture.raise(&f, 1);
    fixture.raise(&f, 0);
    wait_until("the other vector", || readable(event.as_fd()));
}

fn notices_connect_and_disconnect(fixture: &dyn FunctionFixture) {
    let f = fixture.open();
    let event = EventFd::new().expect("eventfd");
    for notice in [Notice::Error, Notice::Release] {
        let there = f.set_notice(notice, Some(event.as_fd())).expect("connect");
        assert_eq!(f.set_notice(notice, Some(event.as_fd())).expect("again"), there);
        assert_eq!(f.set_notice(notice, None).expect("disconnect"), there);
        assert!(!readable(event.as_fd()), "{notice:?} without a cause");
    }
    let mut watch = Watch::new(&f).expect("watch");
    assert_eq!(watch.look().expect("look"), [], "events of a quiet function");
}

fn dma_maps_and_unmaps(fixture: &dyn FunctionFixture) {
    let f = fixture.open();
    let space = DmaSpace::new(Arc::clone(&f)).expect("space");
    let page = f.dma_page();
    let region = Arc::new(Region::allocate(page * 4, Pages::Normal).expect("memory"));
    let one = space.map(&region, page).expect("map");
    let two = space
        .map(&region, 1 << 20)
        .expect("the same memory again, elsewhere");
    assert_ne!(one.iova(), 0);
    assert!(two.iova().is_multiple_of(1 << 20), "{:#x}", two.iova());
    let ranges = f.iova_ranges().expect("ranges");
    for m in [&one, &two] {
        let last = m.iova() + (m.bytes() - 1);
        assert!(
            ranges.iter().any(|r| r.start <= m.iova() && last <= r.last),
            "outside the ranges"
        );
    }
    assert!(one.iova() + one.bytes() <= two.iova() || two.iova() + two.bytes() <= one.iova());
    let memory = DmaMemory::region(&region);
    f.dma_map(&memory, one.iova())
        .expect_err("over an existing mapping");
    let iova = one.iova();
    drop(one);
    f.dma_map(&memory, iova).expect("where it was unmapped");
    f.dma_unmap(iova, memory.bytes()).expect("unmap");
    f.dma_unmap(iova, memory.bytes()).expect_err("twice");
}

fn dma_refuses_what_cannot_be(fixture: &dyn FunctionFixture) {
    let f = fixture.open();
    let space = DmaSpace::new(Arc::clone(&f)).expect("space");
    let region = Arc::new(Region::allocate(f.dma_page(), Pages::Normal).expect("memory"));
    let e = space
        .map(&region, 1 << 63)
        .expect_err("an alignment that no range has");
    assert_eq!(e.name(), "no-iova", "{e}");
    space.map(&region, 0).expect("the space is whole after a refusal");
}

fn guards_hold_the_function(fixture: &dyn FunctionFixture) {
    let f = fixture.open();
    let weak = Arc::downgrade(&f);
    let space = DmaSpace::new(Arc::clone(&f)).expect("space");
    let region = Arc::new(Region::allocate(f.dma_page(), Pages::Normal).expect("memory"));
    let mapping = space.map(&region, 0).expect("map");
    drop((f, space));
    assert!(weak.upgrade().is_some(), "the function closed under a mapping");
    drop(mapping);
    assert!(
        weak.upgrade().is_none(),
        "the function stayed open without a user"
    );
}

fn reset_quiets_or_is_refused(fixture: &dyn FunctionFixture) {
    let f = &*fixture.open();
    config::set_bus_master(f, true).expect("on");
    let plan = f.reset_plan().expect("a plan");
    match f.reset() {
        Ok(()) => {
            assert!(plan.method.is_some() && plan.also.is_empty(), "{plan:?}");
            assert!(
                !config::bus_master(f).expect("read"),
                "bus mastering survived a reset"
            );
        }
        Err(e) if plan.method.is_none() => assert_eq!(e.name(), "unsupported"),
        Err(e) => {
            assert_eq!(e.name(), "reset-hits-others");
            for other in &plan.also {
                assert!(e.to_string().contains(other), "{other} is not named: {e}");
            }
        }
    }
}
