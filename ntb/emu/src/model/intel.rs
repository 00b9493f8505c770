//! What the Intel generations share: latched doorbells behind a mask, a vector per status bit, scratchpads of the
//! other side in the own BAR, inbound windows by base and limit.

use ntb::hw::{
    inferred,
    regs::{Reg, RegBank, Rw, W1c, Wo},
};

use super::{
    config::BarSpec,
    family::Translation,
    regfile::{RegFile, touches},
    side::SideId,
    state::State,
};

/// Where a generation keeps what all of them have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) status: Reg<u64, W1c>,
    pub(super) disable: Reg<u64, Rw>,
    pub(super) intvec: RegBank<u8, Rw, 33, 1>,
    pub(super) own_spads: RegBank<u32, Rw, 16, 4>,
    pub(super) peer_spads: RegBank<u32, Rw, 16, 4>,
    pub(super) doorbells: RegBank<u32, Wo, 32, 4>,
    pub(super) windows: [Window; 2],
    /// A vector that does not work on this generation.
    pub(super) bad_vector: Option<u32>,
    /// Translations are aligned to the window's size: lower bits are ignored.
    pub(super) aligned_to_size: bool,
}

/// One inbound window's registers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    pub(super) bar: u8,
    pub(super) base: Reg<u64, Rw>,
    pub(super) limit: Reg<u64, Rw>,
}

/// Status bit of a link change.
const LINK: u64 = 1 << 32;

impl Layout {
    pub(super) fn window_of(&self, bar: u8) -> Option<usize> {
        self.windows.iter().position(|w| w.bar == bar)
    }

    /// Takes accesses to the other side's registers; `false` when `at` is none of them.
    pub(super) fn read_across(&self, st: &mut State, side: SideId, at: u64, out: &mut [u8]) -> bool {
        let Some(own) = shift(at, self.peer_spads, self.own_spads) else {
            return false;
        };
        st.read_peer(side, own, out);
        true
    }

    /// As [`Layout::read_across`], for stores; doorbells among them.
    pub(super) fn write_across(&self, st: &mut State, side: SideId, at: u64, data: &[u8]) -> bool {
        if let Some(own) = shift(at, self.peer_spads, self.own_spads) {
            st.post_register(side, own, data);
            return true;
        }
        let first = u64::from(self.doorbells.offset());
        if !(first..first + 4 * 32).contains(&at) {
            return false;
        }
        // Bit 0 of each doorbell's word counts, in whichever lanes the access has.
        let bits = (at - first..)
            .zip(data)
            .filter(|(i, byte)| i % 4 == 0 && **byte & 1 != 0)
            .fold(0, |bits, (i, _)| bits | 1 << (i / 4));
        if bits != 0 {
            st.post_doorbells(side, bits);
        }
        true
    }

    /// Stores to an own register, with what follows from status and mask.
    pub(super) fn write_own(&self, st: &mut State, side: SideId, at: u64, data: &[u8]) {
        let regs = &mut st.sides[side].regs;
        let masked = regs.reg(self.disable);
        regs.write(at, data);
        if touches(at, data.len(), self.disable.offset(), 8) {
            // What was latched while masked fires as soon as it is not.
            let fire = regs.reg(self.status) & masked & !regs.reg(self.disable);
            self.fire(st, side, fire);
        }
    }

    /// Latches status bits; fires those that are new and not masked.
    pub(super) fn latch(&self, st: &mut State, side: SideId, bits: u64) {
        let regs = &mut st.sides[side].regs;
        let before = regs.reg(self.status);
        regs.set_reg(self.status, before | bits);
        let edges = if inferred::DOORBELL_FIRES_WHEN_SET_ALREADY {
            bits
        } else {
            bits & !before
        };
        let fire = edges & !regs.reg(self.disable);
        self.fire(st, side, fire);
    }

    /// Latches a link change.
    pub(super) fn latch_link(&self, st: &mut State, side: SideId) {
        self.latch(st, side, LINK);
    }

    fn fire(&self, st: &mut State, side: SideId, bits: u64) {
        for (bit, vector) in self.intvec.iter().enumerate() {
            if bits & 1 << bit == 0 {
                continue;
            }
            let vector = u32::from(st.sides[side].regs.reg(vector));
            if self.bad_vector == Some(vector) {
                st.sides[side].stats.interrupts_lost += 1;
            } else {
                st.raise(side, vector);
            }
        }
    }

    /// Base and length that the registers of `exposing` give a window.
    pub(super) fn translation(&self, st: &State, exposing: SideId, window: usize) -> Option<Translation> {
        let w = self.windows.get(window)?;
        let side = &st.sides[exposing];
        let base = side.regs.reg(w.base);
        if base == inferred::INTEL_XBASE_CLOSED {
            return None;
        }
        // The limit is an address in the exposing side's own BAR.
        let bytes = side.regs.reg(w.limit).checked_sub(side.bar_base(w.bar))?;
        let base = if self.aligned_to_size {
            base & !(st.window_bytes - 1)
        } else {
            base & !0xFFF
        };
        Some(Translation { base, bytes })
    }
}

/// `at`, moved from one bank of scratchpads to the other.
fn shift(at: u64, from: RegBank<u32, Rw, 16, 4>, to: RegBank<u32, Rw, 16, 4>) -> Option<u32> {
    let index = at.checked_sub(from.offset().into())?;
    (index < 16 * 4).then(|| to.offset() + index as u32)
}

/// The three BARs of all generations.
pub(super) fn bars(register_bytes: u64, window_bytes: u64) -> Vec<BarSpec> {
    [(0, register_bytes), (2, window_bytes), (4, window_bytes)]
        .map(|(index, bytes)| BarSpec {
            index,
            bytes,
            prefetchable: true,
        })
        .to_vec()
}

/// Adds an MSI-X table and its pending bits to a register block.
pub(super) fn add_msix(regs: &mut RegFile, table: u32, pba: u32, vectors: u32) {
    for entry in 0..vectors {
        let at = table + 16 * entry;
        regs.define(at, 8, !3, 0, 0);
        regs.define(at + 8, 4, 0xFFFF_FFFF, 0, 0);
        regs.define(at + 12, 4, 1, 0, 1); // masked
    }
    for word in 0..vectors.div_ceil(64) {
        regs.define(pba + 8 * word, 8, 0, 0, 0);
    }
}
