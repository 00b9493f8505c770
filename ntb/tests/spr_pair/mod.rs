//! Two in-process fakes that are wired together as Sapphire Rapids ports.

#![allow(dead_code, reason = "not every test program uses all of it")]

use std::{
    cell::RefCell,
    sync::{Arc, Mutex, Weak},
};

use ntb::{
    conformance::{PortFixture, Ports},
    hw::{self, NtbPort, regs::intel_gen4::*},
    pci::{
        Bar, PciFunction,
        fake::{Effect, Fake, FakeConfig, Model},
    },
};

const WINDOW: u64 = 1 << 20;

/// One end's registers, as far as the driver uses them.
#[derive(Default)]
struct End {
    plain: std::collections::BTreeMap<u64, u8>,
    status: u64,
    mask: u64,
    fired: Vec<u8>,
    device: Weak<Fake>,
}

impl End {
    fn get(&self, offset: u32, bytes: u32) -> u64 {
        let byte = |i: u64| u64::from(*self.plain.get(&(u64::from(offset) + i)).unwrap_or(&0));
        (0..u64::from(bytes)).map(|i| byte(i) << (8 * i)).sum()
    }

    fn set(&mut self, offset: u64, bytes: u32, value: u64) {
        for i in 0..u64::from(bytes) {
            self.plain.insert(offset + i, (value >> (8 * i)) as u8);
        }
    }

    /// Sets status bits and fires what is not masked.
    fn raise(&mut self, bits: u64) {
        self.status |= bits;
        self.fire(bits & !self.mask);
    }

    fn fire(&mut self, bits: u64) {
        for n in (0..33u32).filter(|n| bits >> n & 1 != 0) {
            self.fired.push(self.get(INTVEC.offset() + n, 1) as u8);
        }
    }

    fn wants_link(&self) -> bool {
        let disabled = self.get(LINK_CTRL.offset(), 2) as u16 & LINK_CTRL_DISABLE != 0;
        !disabled && self.get(PPD0.offset(), 4) as u32 & PPD0_TRAIN != 0
    }
}

/// What is wrong with a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Flaw {
    #[default]
    None,
    NoRefire,
    ClearsWhole,
    LimitIgnored,
    WindowsAreOne,
    UpWithOneEnd,
    LinkIsSilent,
    DoorbellFirst,
}

#[derive(Default)]
struct Wire {
    flaw: Flaw,
    /// Stores that a later doorbell brings, where doorbells overtake data.
    late: [Vec<(usize, u64, u64)>; 2],
    ends: [End; 2],
    up: bool,
    stores: Vec<(usize, u64, u64)>,
}

impl Wire {
    fn train(&mut self) {
        let mut wants = self.ends.iter().map(End::wants_link);
        let up = match self.flaw {
            Flaw::UpWithOneEnd => wants.any(|w| w),
            _ => wants.all(|w| w),
        };
        if up != self.up {
            self.up = up;
            if self.flaw == Flaw::LinkIsSilent {
                return;
            }
            for end in &mut self.ends {
                end.raise(1 << LINK_BIT);
            }
        }
    }

    fn read(&self, side: usize, offset: u64, bytes: u32) -> u64 {
        let at = offset as u32;
        let end = &self.ends[side];
        if EM_SPAD.index_of(at).is_some() {
            let peer = &self.ends[1 - side];
            return if self.up {
                peer.get(at - 0x8000, bytes)
            } else {
                u64::from(u32::MAX)
            };
        }
        match at {
            _ if at == IM_INT_STATUS.offset() => end.status,
            _ if at == LINK_STATUS.offset() => u64::from(if self.up { 0x2104u16 } else { 0 }),
            _ if at == PPD1.offset() => [SPR_PPD1_B2B_USD, SPR_PPD1_B2B_DSD][side].into(),
            _ => end.get(at, bytes),
        }
    }

    fn write(&mut self, side: usize, offset: u64, bytes: u32, value: u64) {
        let at = offset as u32;
        if EM_SPAD.index_of(at).is_some() {
            if self.up {
                self.ends[1 - side].set(offset - 0x8000, bytes, value);
            }
        } else if let Some(n) = IM_DOORBELL.index_of(at) {
            if self.up {
                self.ends[1 - side].raise(1 << n);
                let [new, old] = &mut self.late;
                self.stores.append(old);
                std::mem::swap(new, old);
            }
        } else if at == IM_INT_STATUS.offset() {
            let whole = self.flaw == Flaw::ClearsWhole && value & 0xFFFF_FFFF != 0;
            self.ends[side].status &= if whole { 0 } else { !value };
        } else if at == IM_INT_DISABLE.offset() {
            let end = &mut self.ends[side];
            let refires = self.flaw != Flaw::NoRefire;
            let unmasked = if refires { end.mask & !value } else { 0 };
            end.mask = value;
            end.set(offset, bytes, value);
            end.fire(end.status & unmasked);
        } else {
            self.ends[side].set(offset, bytes, value);
            self.train();
        }
    }

    /// A store through a window: where it lands at the peer.
    fn store(&mut self, side: usize, window: u32, offset: u64, value: u64) {
        let peer = &self.ends[1 - side];
        let (base, limit) = if window == 0 || self.flaw == Flaw::WindowsAreOne {
            (IM23XBASE, IM23XLMT)
        } else {
            (IM45XBASE, IM45XLMT)
        };
        let Some(device) = peer.device.upgrade() else {
            return;
        };
        let bar = device.bar_address([Bar::B2, Bar::B4][window as usize]).unwrap();
        let length = match self.flaw {
            Flaw::LimitIgnored | Flaw::WindowsAreOne => WINDOW,
            _ => peer.get(limit.offset(), 8) - bar,
        };
        let base = peer.get(base.offset(), 8);
        if self.up && base != 0 && offset < length {
            let to = match self.flaw {
                Flaw::DoorbellFirst => &mut self.late[0],
                _ => &mut self.stores,
            };
            to.push((1 - side, base + offset, value));
        }
    }
}

struct Port {
    wire: Arc<Mutex<Wire>>,
    side: usize,
}

impl Model for Port {
    fn read(&mut self, bar: Bar, offset: u64, bytes: u32) -> u64 {
        match bar {
            Bar::B0 => self.wire.lock().unwrap().read(self.side, offset, bytes),
            _ => u64::MAX,
        }
    }

    fn write(&mut self, bar: Bar, offset: u64, bytes: u32, value: u64) {
        let mut wire = self.wire.lock().unwrap();
        match bar {
            Bar::B0 => wire.write(self.side, offset, bytes, value),
            Bar::B2 => wire.store(self.side, 0, offset, value),
            _ => wire.store(self.side, 1, offset, value),
        }
    }

    fn effects(&mut self) -> Vec<Effect> {
        let mut wire = self.wire.lock().unwrap();
        let devices = [wire.ends[0].device.upgrade(), wire.ends[1].device.upgrade()];
        let mut effects: Vec<Effect> = Vec::new();
        for (side, iova, value) in std::mem::take(&mut wire.stores) {
            let device = devices[side].clone().unwrap();
            effects.push(Box::new(move || {
                let _ = device.dma_write(iova, value);
            }));
        }
        for (side, device) in devices.iter().enumerate() {
            for vector in std::mem::take(&mut wire.ends[side].fired) {
                let device = device.clone();
                effects.push(Box::new(move || {
                    device.iter().for_each(|d| d.interrupt(vector.into()));
                }));
            }
        }
        effects
    }
}

#[derive(Default)]
pub(crate) struct Pair {
    flaw: Flaw,
    wire: RefCell<Arc<Mutex<Wire>>>,
}

impl Pair {
    pub(crate) fn with(flaw: Flaw) -> Self {
        Self {
            flaw,
            ..Self::default()
        }
    }

    /// The function of one end, not yet opened as a port.
    pub(crate) fn function(&self, side: usize) -> Arc<Fake> {
        let wire = Arc::clone(&self.wire.borrow());
        let config = FakeConfig::new(["a", "b"][side], 0x8086, 0x347E)
            .revision(0x10)
            .bar(Bar::B0, BAR0_BYTES)
            .bar(Bar::B2, WINDOW)
            .bar(Bar::B4, WINDOW)
            .vectors(MSIX_VECTORS);
        let model = Port {
            wire: Arc::clone(&wire),
            side,
        };
        let fake = Fake::new(config, model);
        wire.lock().unwrap().ends[side].device = Arc::downgrade(&fake);
        fake
    }
}

fn port(fake: Arc<Fake>) -> Arc<dyn NtbPort> {
    let function: Arc<dyn PciFunction> = fake;
    hw::open(&function).unwrap()
}

impl PortFixture for Pair {
    fn open(&self) -> Ports {
        self.wire.replace(Arc::default());
        self.wire.borrow().lock().unwrap().flaw = self.flaw;
        // What an earlier life may have left behind.
        for end in &mut self.wire.borrow().lock().unwrap().ends {
            end.status = 0xF0;
            for offset in [
                IM23XBASE.offset(),
                IM45XLMT.offset(),
                IM_SPAD.offset(),
                PPD0.offset(),
            ] {
                end.set(offset.into(), 4, 0x00DE_AD08);
            }
        }
        Ports {
            a: port(self.function(0)),
            b: port(self.function(1)),
        }
    }

    fn reopen(&self, a: bool) -> Arc<dyn NtbPort> {
        port(self.function(usize::from(!a)))
    }
}
