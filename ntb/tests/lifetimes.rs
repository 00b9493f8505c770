//! Drop order, failures on the k-th call, and devices that die or answer at random.

mod spr_pair;

use std::sync::{Arc, Mutex};

use ntb::{
    conformance::{PortFixture, Ports},
    hw::{self, NtbPort, regs::intel_gen4::*},
    pci::{
        Bar, DmaSpace, Function, PciFunction, config,
        fake::{Call, Fake, FakeConfig, Fault, Model},
    },
    window::{Aperture, ApertureChoice, ApertureKind, InboundWindow},
};
use ntb_mem::region::{Pages, Region};
use proptest::prelude::*;
use rustix::io::Errno;
use spr_pair::Pair;

const BYTES: u64 = 64 << 10;

fn open(fake: &Arc<Fake>) -> Result<Arc<dyn NtbPort>, hw::NtbError> {
    let function: Arc<dyn PciFunction> = Arc::clone(fake) as _;
    hw::open(&function)
}

fn inbound(port: &Arc<dyn NtbPort>) -> Result<InboundWindow, hw::NtbError> {
    let space = DmaSpace::new(Arc::clone(port.function()))?;
    InboundWindow::allocate(port, &space, 0, BYTES, Pages::Normal)
}

fn closed(fake: &Fake) -> bool {
    let base: u64 = fake.read(Bar::B0, IM23XBASE.offset().into()).unwrap();
    base == 0
}

/// Position of a line in the log.
fn at(log: &[String], line: &str) -> usize {
    log.iter()
        .position(|l| l == line)
        .unwrap_or_else(|| panic!("no '{line}' in {log:?}"))
}

#[test]
fn a_start_is_quiet_before_anything_is_mapped() {
    let pair = Pair::default();
    let fake = pair.function(0);
    config::set_bus_master(&*fake, true).unwrap();
    let port = open(&fake).unwrap();
    let window = inbound(&port).unwrap();
    let log = fake.log();
    let off = at(&log, "bus-master off");
    assert!(
        off < at(&log, "vectors 0") && off < at(&log, "dma-map"),
        "{log:?}"
    );
    drop(window);
}

#[test]
fn a_window_closes_before_its_mapping_goes_and_the_mapping_before_the_memory() {
    let pair = Pair::default();
    let fake = pair.function(0);
    let port = open(&fake).unwrap();
    let space = DmaSpace::new(Arc::clone(port.function())).unwrap();
    let region = Arc::new(Region::allocate(BYTES, Pages::Normal).unwrap());
    let memory = Arc::downgrade(&region);
    let window = InboundWindow::over(&port, &space, 0, &region, BYTES).unwrap();
    drop(region);
    assert!(!closed(&fake));
    // The unmapping fails: what was done before it is done, what comes after is not.
    fake.fail(Call::DmaUnmap, 1, Fault::Error(Errno::IO));
    drop(window);
    assert!(closed(&fake), "the mapping was to go with the window open");
    assert_eq!(fake.mappings().len(), 1, "unmapped in spite of the failure");
    assert!(
        memory.upgrade().is_none(),
        "a software device keeps its own mapping; the memory can go"
    );
    let (iova, bytes) = fake.mappings()[0];
    fake.dma_unmap(iova, bytes).unwrap();
}

#[test]
fn memory_and_devices_may_come_in_any_order() {
    let memory = || Arc::new(Region::allocate(BYTES, Pages::Normal).unwrap());
    let space = |port: &Arc<dyn NtbPort>| DmaSpace::new(Arc::clone(port.function())).unwrap();
    let map = |space: &Arc<DmaSpace>, regions: &[Arc<Region>]| -> Vec<_> {
        regions.iter().map(|r| space.map(r, 4096).unwrap()).collect()
    };
    let pair = Pair::default();
    let before = memory();
    let first = pair.function(0);
    let port = open(&first).unwrap();
    let regions = [before, memory()];
    let at_first = map(&space(&port), &regions);
    // One that is added later reaches all memory that there was before it, whatever becomes of the first.
    let second = pair.function(1);
    let later = open(&second).unwrap();
    let later_space = space(&later);
    let at_second = map(&later_space, &regions);
    assert_eq!((first.mappings().len(), second.mappings().len()), (2, 2));
    drop((at_first, port));
    assert_eq!((first.mappings().len(), second.mappings().len()), (0, 2));
    let window = InboundWindow::over(&later, &later_space, 0, &regions[0], BYTES).unwrap();
    drop((window, at_second));
    assert_eq!(second.mappings().len(), 0);
}

#[test]
fn a_window_that_does_not_close_takes_the_bus_from_the_device() {
    let pair = Pair::default();
    let fake = pair.function(0);
    let port = open(&fake).unwrap();
    let window = inbound(&port).unwrap();
    assert!(config::bus_master(&*fake).unwrap());
    // The write that closes is lost, so the read-back finds the window open.
    fake.fail(Call::Write, 1, Fault::Dead);
    drop(window);
    assert!(!config::bus_master(&*fake).unwrap(), "the device may still write");
    assert!(fake.mappings().is_empty());
}

#[test]
fn an_explicit_close_reports_what_a_drop_would_swallow() {
    let pair = Pair::default();
    let fake = pair.function(0);
    let port = open(&fake).unwrap();
    let window = inbound(&port).unwrap();
    fake.fail(Call::Write, 1, Fault::Dead);
    let e = window.close().unwrap_err();
    assert_eq!(e.name(), "value-not-taken");
    assert!(e.to_string().contains("IM23XBASE"), "{e}");
}

/// Everything from opening the port to storing through its window.
fn life(fake: &Arc<Fake>) -> Result<(), hw::NtbError> {
    let port = open(fake)?;
    let window = inbound(&port)?;
    port.enable_link()?;
    port.unmask_doorbells(3)?;
    port.ring_peer(1)?;
    port.set_peer_scratchpad(0, 1)?;
    port.scratchpad(0)?;
    port.take_doorbells(3)?;
    port.take_link_report()?;
    let aperture = Aperture::open(&*port, 0, ApertureChoice::Best)?;
    assert_eq!(aperture.kind(), ApertureKind::Trapped);
    assert_eq!(aperture.refusals().len(), 2, "why not a faster one");
    aperture.write(0, &[0; 64])?;
    window.close()?;
    port.disable_link()
}

#[test]
fn every_failure_of_every_call_is_an_error_and_leaves_nothing_behind() {
    let calls = [
        Call::ConfigRead,
        Call::ConfigWrite,
        Call::Read,
        Call::Write,
        Call::SetVectors,
        Call::DmaMap,
    ];
    for call in calls {
        for k in 1.. {
            let pair = Pair::default();
            let fake = pair.function(0);
            fake.fail(call, k, Fault::Error(Errno::IO));
            let result = life(&fake);
            assert!(fake.mappings().is_empty(), "{call:?} {k}: memory left mapped");
            if let Err(e) = result {
                assert_eq!(e.name(), "device-io", "{call:?} {k}: {e}");
                continue;
            }
            // A failure late enough is after the end, or in a drop, which has nobody to tell.
            if k > 400 {
                break;
            }
        }
    }
}

#[test]
fn a_device_that_dies_at_any_access_is_found_out() {
    for k in 1..200 {
        let pair = Pair::default();
        let fake = pair.function(0);
        for call in [Call::Read, Call::ConfigRead] {
            fake.fail(call, k, Fault::Dead);
        }
        // A single lost answer is either noticed or of no consequence, never a panic.
        if let Err(e) = life(&fake) {
            assert!(
                [
                    "device-gone",
                    "value-not-taken",
                    "not-an-ntb",
                    "wrong-mode",
                    "bad-capabilities"
                ]
                .contains(&e.name()),
                "{k}: {} {e}",
                e.name()
            );
        }
        assert!(fake.mappings().is_empty());
    }
    let pair = Pair::default();
    let fake = pair.function(0);
    fake.set_removed(true);
    let e = open(&fake).unwrap_err();
    assert_eq!(
        (e.name(), e.class()),
        ("device-gone", ntb::pci::ExitClass::LinkLost)
    );
}

#[test]
fn removal_in_mid_life_is_an_error_everywhere_and_a_restart_brings_it_back() {
    let pair = Pair::default();
    let fake = pair.function(0);
    let port = open(&fake).unwrap();
    let window = inbound(&port).unwrap();
    fake.set_removed(true);
    let gone = |r: Result<(), hw::NtbError>| assert!(r.as_ref().is_err_and(hw::NtbError::is_gone), "{r:?}");
    gone(port.link().map(drop));
    gone(port.take_link_report().map(drop));
    gone(port.enable_link());
    gone(port.disable_link());
    gone(port.doorbells().map(drop));
    gone(port.take_doorbells(1).map(drop));
    gone(port.scratchpad(0).map(drop));
    gone(port.peer_scratchpad(0).map(drop));
    gone(port.close_window(0));
    gone(port.quiesce());
    drop(window);
    assert!(fake.mappings().is_empty());
    fake.set_removed(false);
    hw::restart(&*port).unwrap();
    inbound(&port).unwrap().close().unwrap();
}

#[test]
fn what_is_not_a_usable_ntb_is_refused_in_words() {
    struct Mode(u32);
    impl Model for Mode {
        fn read(&mut self, _: Bar, offset: u64, _: u32) -> u64 {
            if offset == u64::from(PPD1.offset()) {
                self.0.into()
            } else {
                0
            }
        }
        fn write(&mut self, _: Bar, _: u64, _: u32, _: u64) {}
    }
    let spr = || {
        FakeConfig::new("0000:81:00.0", 0x8086, 0x347E)
            .revision(0x10)
            .bar(Bar::B0, BAR0_BYTES)
            .bar(Bar::B2, 1 << 20)
            .bar(Bar::B4, 1 << 20)
            .vectors(33)
    };
    let e = open(&Fake::new(spr(), Mode(0x0100))).unwrap_err();
    assert_eq!(
        (e.name(), e.class()),
        ("wrong-mode", ntb::pci::ExitClass::NoHardware)
    );
    assert!(
        e.to_string().contains("0x100") && e.to_string().contains("firmware set-up"),
        "{e}"
    );
    let e = open(&Fake::new(spr().revision(1), Mode(0x0200))).unwrap_err();
    assert_eq!(e.name(), "wrong-mode");
    let e = open(&Fake::new(spr().bar(Bar::B0, 0x8000), Mode(0x0200))).unwrap_err();
    assert_eq!(e.name(), "too-small");
    assert!(e.to_string().contains("0xb4c4"), "{e}");
    let nic = FakeConfig::new("0000:01:00.0", 0x8086, 0x1572)
        .class(0x02_0000)
        .bar(Bar::B0, 4096);
    let e = open(&Fake::new(nic, Mode(0))).unwrap_err();
    assert_eq!(e.name(), "not-an-ntb");
    assert!(
        e.to_string().contains("1572") && e.to_string().contains("020000"),
        "{e}"
    );
}

#[test]
fn memory_that_cannot_be_had_is_refused_with_the_amount() {
    let config = FakeConfig::new("huge", 0x8086, 0x347E)
        .revision(0x10)
        .bar(Bar::B0, BAR0_BYTES)
        .bar(Bar::B2, 1 << 50)
        .bar(Bar::B4, 1 << 50)
        .vectors(33);
    struct Spr(std::collections::BTreeMap<u64, u64>);
    impl Model for Spr {
        fn read(&mut self, _: Bar, offset: u64, _: u32) -> u64 {
            let usd = u64::from(SPR_PPD1_B2B_USD);
            if offset == u64::from(PPD1.offset()) {
                usd
            } else {
                *self.0.get(&offset).unwrap_or(&0)
            }
        }
        fn write(&mut self, _: Bar, offset: u64, _: u32, value: u64) {
            self.0.insert(offset, value);
        }
    }
    let port = open(&Fake::new(config, Spr(Default::default()))).unwrap();
    let space = DmaSpace::new(Arc::clone(port.function())).unwrap();
    let e = InboundWindow::allocate(&port, &space, 0, 1 << 50, Pages::Normal).unwrap_err();
    assert_eq!(
        (e.name(), e.class()),
        ("no-memory", ntb::pci::ExitClass::Permission)
    );
    assert!(e.to_string().contains(&(1u64 << 50).to_string()), "{e}");
    assert!(e.to_string().contains("need not be filled"), "{e}");
    // A smaller window works in the same process.
    InboundWindow::allocate(&port, &space, 0, BYTES, Pages::Normal).unwrap();
}

#[test]
fn the_register_dump_reads_without_effect() {
    let pair = Pair::default();
    let Ports { a, b } = PortFixture::open(&pair);
    a.set_scratchpad(3, 0x1234).unwrap();
    let dump = hw::access::dump(&**a.function(), &MAP).unwrap();
    let value = |name: &str| {
        dump.iter()
            .find(|d| d.name == name)
            .unwrap_or_else(|| panic!("{name}"))
            .value
    };
    assert_eq!(value("IM_SPAD[3]"), Some(0x1234));
    assert_eq!(value("PPD1"), Some(SPR_PPD1_B2B_USD.into()));
    assert_eq!(value("SPAD_SEM"), None, "reading it takes the semaphore");
    assert_eq!(value("IM_DOORBELL[0]"), None);
    assert!(
        dump.iter().any(|d| d.to_string().contains("0xb052 LINK_STATUS")),
        "{}",
        dump[0]
    );
    drop(b);
}

/// A device that answers anything.
struct Random {
    state: u64,
    plain: bool,
    memory: std::collections::BTreeMap<u64, u64>,
}

impl Model for Random {
    fn read(&mut self, bar: Bar, offset: u64, _: u32) -> u64 {
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let random = self.state >> 20;
        // Mostly plausible, so that opening gets somewhere.
        if self.plain && !random.is_multiple_of(16) {
            return *self.memory.get(&(offset ^ bar.index() as u64)).unwrap_or(&0x0200);
        }
        if random.is_multiple_of(5) {
            u64::MAX
        } else {
            random
        }
    }
    fn write(&mut self, bar: Bar, offset: u64, _: u32, value: u64) {
        self.memory.insert(offset ^ bar.index() as u64, value);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// No answer of a device makes the driver panic or hang.
    #[test]
    fn random_devices_are_survived(seed in any::<u64>(), plain in any::<bool>(), which in 0usize..5, bytes in 12u32..24) {
        let ids = [(0x8086, 0x347E), (0x8086, 0x347E), (0x8086, 0x201C), (0x1022, 0x14C0), (0x1957, 0x0809)];
        let (vendor, device) = ids[which];
        let mut config = FakeConfig::new("random", vendor, device)
            .revision(if which == 1 { 4 } else { 0x10 })
            .class(if which == 4 { 0x05_0000 } else { 0x06_8000 })
            .bar(Bar::B0, 1 << bytes.max(16))
            .bar(Bar::B2, 1 << bytes)
            .bar(Bar::B4, 1 << bytes)
            .bar(Bar::B5, 1 << bytes)
            .vectors(33);
        config.put(0xD4, &[0x01]);
        let fake = Fake::new(config, Random { state: seed, plain, memory: Default::default() });
        let _ = life(&fake);
        prop_assert!(fake.mappings().is_empty());
    }
}

/// A device whose posted writes arrive with the next read, as on a bus.
#[derive(Default)]
struct Posted {
    status: u64,
    on_its_way: Vec<u64>,
    mask_on_its_way: Option<u64>,
    memory: std::collections::BTreeMap<u64, u64>,
}

struct Shared(Arc<Mutex<Posted>>);

impl Model for Shared {
    fn read(&mut self, _: Bar, offset: u64, _: u32) -> u64 {
        let mut this = self.0.lock().unwrap();
        for bits in std::mem::take(&mut this.on_its_way) {
            this.status &= !bits;
        }
        if let Some(mask) = this.mask_on_its_way.take() {
            this.memory.insert(IM_INT_DISABLE.offset().into(), mask);
        }
        match offset as u32 {
            at if at == PPD1.offset() => SPR_PPD1_B2B_USD.into(),
            at if at == IM_INT_STATUS.offset() => this.status,
            _ => *this.memory.get(&offset).unwrap_or(&0),
        }
    }

    fn write(&mut self, _: Bar, offset: u64, _: u32, value: u64) {
        let mut this = self.0.lock().unwrap();
        if offset as u32 == IM_INT_STATUS.offset() {
            this.on_its_way.push(value);
        } else if offset as u32 == IM_INT_DISABLE.offset() {
            this.mask_on_its_way = Some(value);
        } else {
            this.memory.insert(offset, value);
        }
    }
}

#[test]
fn clears_and_masks_are_in_force_when_they_return() {
    for take in [true, false] {
        let device = Arc::new(Mutex::new(Posted::default()));
        let config = FakeConfig::new("posted", 0x8086, 0x347E)
            .revision(0x10)
            .bar(Bar::B0, BAR0_BYTES)
            .bar(Bar::B2, 1 << 20)
            .bar(Bar::B4, 1 << 20)
            .vectors(33);
        let port = open(&Fake::new(config, Shared(Arc::clone(&device)))).unwrap();
        port.unmask_doorbells(1).unwrap();
        port.mask_doorbells(1).unwrap();
        let mask = device.lock().unwrap().memory[&IM_INT_DISABLE.offset().into()];
        assert_eq!(mask, DOORBELL_MASK, "the mask is still on its way");
        device.lock().unwrap().status = 1;
        if take {
            assert_eq!(port.take_doorbells(1).unwrap(), 1);
        } else {
            port.clear_doorbells(1).unwrap();
        }
        device.lock().unwrap().status = 1;
        assert_eq!(
            port.doorbells().unwrap(),
            1,
            "the clear took the next doorbell along"
        );
    }
}
