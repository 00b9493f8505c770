//! The driver against a device that answers anything: what a fuzzer calls.
//!
//! The device behaves as memory with the family's access kinds, but the input decides, read by read, whether it tells
//! the truth, answers all ones, or makes something up.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    Family, NtbPort, open,
    regs::{amd, epf, intel_gen3, intel_gen4},
    restart,
};
use crate::{
    health::Watch,
    pci::{
        Bar, DmaSpace, Function, PciFunction,
        fake::{Fake, FakeConfig, Model, RegisterFile},
    },
    window::InboundWindow,
};
use ntb_mem::region::Pages;

/// Bytes of every window, and of the registers.
const WINDOW_BYTES: u64 = 1 << 16;

/// What the input still holds; shared by the device and whoever drives the port.
#[derive(Clone, Debug)]
struct Input(Arc<Mutex<VecDeque<u8>>>);

impl Input {
    fn byte(&self) -> Option<u8> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    /// Eight bytes; zeros past the end.
    fn word(&self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte().unwrap_or(0)))
    }
}

/// A register file that lies as the input says.
struct Liar {
    truth: RegisterFile,
    input: Input,
}

impl Model for Liar {
    fn read(&mut self, bar: Bar, offset: u64, bytes: u32) -> u64 {
        match self.input.byte() {
            None | Some(0..=199) => self.truth.read(bar, offset, bytes),
            Some(200..=219) => u64::MAX,
            Some(220..=229) => 0,
            // What single bits say, most of all.
            Some(230..=244) => {
                self.truth.read(bar, offset, bytes) ^ 1 << (self.input.byte().unwrap_or(0) & 63)
            }
            Some(245..) => self.input.word(),
        }
    }

    fn write(&mut self, bar: Bar, offset: u64, bytes: u32, value: u64) {
        self.truth.write(bar, offset, bytes, value);
    }

    fn reset(&mut self) {
        self.truth.reset();
    }
}

/// An honest device of the `n`-th kind, to be made a liar: [`open`] takes it, and windows of it open.
fn device(n: u8) -> (FakeConfig, RegisterFile) {
    let new = |vendor, device| FakeConfig::new("fuzz", vendor, device).vectors(33);
    let two = |config: FakeConfig| config.bar(Bar::B2, WINDOW_BYTES).bar(Bar::B4, WINDOW_BYTES);
    let wide = |config: FakeConfig| config.bar(Bar::B0, WINDOW_BYTES);
    let bytes = WINDOW_BYTES as usize;
    match n % 6 {
        0 => (
            two(wide(new(0x8086, 0x347E).revision(0x10))),
            RegisterFile::new(&intel_gen4::MAP, bytes).preset(intel_gen4::PPD1, intel_gen4::SPR_PPD1_B2B_USD),
        ),
        1 => (
            two(wide(new(0x8086, 0x347E).revision(0x02))),
            RegisterFile::new(&intel_gen4::MAP, bytes).preset(intel_gen4::PPD1, intel_gen4::ICX_PPD1_B2B_DSD),
        ),
        2 => {
            let mut config = two(wide(new(0x8086, 0x201C)));
            config.put(intel_gen3::cfg::PPD.offset() as usize, &[intel_gen3::PPD_B2B_USD]);
            (config, RegisterFile::new(&intel_gen3::MAP, bytes))
        }
        3 => (
            two(wide(new(0x1022, 0x14C0))),
            RegisterFile::new(&amd::MAP, bytes),
        ),
        4 => (
            two(wide(new(0x1022, 0x145B)).bar(Bar::B1, WINDOW_BYTES)),
            RegisterFile::new(&amd::MAP, bytes),
        ),
        _ => (
            two(wide(new(0x1912, 0x0030).class(epf::CLASS))),
            RegisterFile::new(&epf::MAP, bytes)
                .preset(epf::MW_COUNT, 1)
                .preset(epf::MW1_OFFSET, 0)
                .preset(epf::SPAD_OFFSET, 0x200)
                .preset(epf::SPAD_COUNT, 16)
                .on_write(|registers, offset, _, _| {
                    if offset == u64::from(epf::COMMAND.offset()) {
                        registers.set(epf::CMD_STATUS, epf::STATUS_OK);
                    }
                }),
        ),
    }
}

/// Opens a port on such a device and uses it, as `data` says: the first byte chooses the family, the second how many
/// places of configuration space hold something else; the rest are answers and calls. Returns whether the port opened.
///
/// # Panics
/// When the driver accepts what it must refuse, or leaves memory mapped: that is what is looked for.
pub fn fuzz(data: &[u8]) -> bool {
    let input = Input(Arc::new(Mutex::new(data.iter().copied().collect())));
    let (mut config, truth) = device(input.byte().unwrap_or(0));
    for _ in 0..input.byte().unwrap_or(0) % 4 {
        let (at, value) = (input.word(), input.word());
        config.put((at & 0xFFF) as usize, &value.to_le_bytes()[..1]);
    }
    let truth = Liar {
        truth,
        input: input.clone(),
    };
    let fake = Fake::new(config, truth);
    let function: Arc<dyn PciFunction> = Arc::clone(&fake) as _;
    let Ok(port) = open(&function) else {
        assert!(
            fake.mappings().is_empty(),
            "a port that failed to open left memory mapped"
        );
        return false;
    };
    check_facts(&*port);
    if let Ok(space) = DmaSpace::new(Arc::clone(&function)) {
        let mut watch = Watch::over(&port).ok();
        let mut inbound = None;
        while let Some(call) = input.byte() {
            use_port(&port, &fake, &space, &input, call, &mut inbound, &mut watch);
        }
    }
    drop(port);
    assert!(fake.mappings().is_empty(), "a port that ended left memory mapped");
    true
}

/// What a port tells of itself lies inside its function.
fn check_facts(port: &dyn NtbPort) {
    for window in port.windows() {
        let bar = port.function().bar_or_error(window.bar).map_or(0, |b| b.bytes);
        let end = window.offset.checked_add(window.bytes);
        assert!(end.is_some_and(|e| e <= bar), "{window:?} is outside its BAR");
        assert!(window.address_align.is_power_of_two() && window.size_align.is_power_of_two());
    }
    assert!((1..=1024).contains(&port.scratchpads()));
    if let Family::Epf { .. } = port.family() {
        assert!(port.windows().len() <= epf::MW_MAX as usize);
    }
}

fn use_port(
    port: &Arc<dyn NtbPort>,
    fake: &Arc<Fake>,
    space: &Arc<DmaSpace>,
    input: &Input,
    call: u8,
    inbound: &mut Option<InboundWindow>,
    watch: &mut Option<Watch>,
) {
    let valid = port.doorbell_bits();
    let bits = 1u64 << (call >> 4 & 3);
    let index = usize::from(call >> 4 & 1);
    match call & 0xF {
        0 => drop(port.enable_link()),
        1 => drop(port.disable_link()),
        2 => drop(port.link()),
        3 => drop(port.take_link_report()),
        4 => {
            let (iova, bytes) = (input.word(), input.word() % (4 * WINDOW_BYTES));
            let taken = port.open_window(index, iova, bytes).is_ok();
            let fits = port.windows().get(index).is_some_and(|w| {
                bytes > 0
                    && bytes <= w.bytes
                    && bytes.is_multiple_of(w.size_align)
                    && iova != 0
                    && iova.is_multiple_of(w.address_align)
            });
            assert!(!taken || fits, "window {index} took {bytes} bytes at {iova:#x}");
        }
        5 => drop(port.close_window(index)),
        6 => {
            *inbound = None;
            *inbound = InboundWindow::allocate(port, space, index, WINDOW_BYTES / 4, Pages::Normal).ok();
        }
        7 => *inbound = None,
        8 => drop(port.ring_peer(bits & valid)),
        9 => {
            let outside = !valid & (1 << 63 | bits << 60);
            assert!(outside == 0 || port.ring_peer(outside).is_err());
            assert!(outside == 0 || port.mask_doorbells(outside).is_err());
        }
        10 => {
            if let Ok(set) = port.doorbells() {
                assert_eq!(set & !valid, 0, "doorbells that there are not");
            }
            if let Ok(set) = port.take_doorbells(bits) {
                assert_eq!(set & !bits, 0, "doorbells that were not asked for");
            }
        }
        11 => {
            if port.mask_doorbells(bits & valid).is_ok() {
                assert_eq!(port.masked_doorbells() & bits & valid, bits & valid);
            }
            drop(port.unmask_doorbells(bits & valid));
        }
        12 => {
            let index = usize::from(call >> 4) * 3;
            let known = index < port.scratchpads();
            assert!(known || port.scratchpad(index).is_err());
            drop(port.set_scratchpad(index, call.into()));
            drop(port.peer_scratchpad(index));
            drop(port.set_peer_scratchpad(index, call.into()));
        }
        13 => {
            if let Some(watch) = watch {
                drop(watch.look());
            }
        }
        14 => {
            fake.set_removed(call & 0x10 != 0);
        }
        _ => {
            *inbound = None;
            drop(restart(&**port));
        }
    }
}
