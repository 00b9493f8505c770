//! Intel Gen3 ports: Skylake and Cascade Lake. Topology and link status are in configuration space, vector 32 does
//! not work, and an external limit stands beside the internal one.

use ntb::hw::{inferred, regs::intel_gen3 as r};

use super::{
    config::{BarSpec, ConfigSpec},
    family::{Family, Translation},
    intel::{Layout, Window, add_msix, bars},
    regfile::{RegFile, touches},
    side::SideId,
    state::{Actor, State},
};

/// A Gen3 port.
#[derive(Debug)]
pub struct IntelGen3;

/// Skylake.
pub static SKX: IntelGen3 = IntelGen3;

const LAYOUT: Layout = Layout {
    status: r::IM_INT_STATUS,
    disable: r::IM_INT_DISABLE,
    intvec: r::INTVEC,
    own_spads: r::IM_SPAD,
    peer_spads: r::B2B_SPAD,
    doorbells: r::IM_DOORBELL,
    windows: [
        Window {
            bar: 2,
            base: r::IMBAR1XBASE,
            limit: r::IMBAR1XLMT,
        },
        Window {
            bar: 4,
            base: r::IMBAR2XBASE,
            limit: r::IMBAR2XLMT,
        },
    ],
    bad_vector: Some(32),
    aligned_to_size: true,
};

impl Family for IntelGen3 {
    fn name(&self) -> &'static str {
        "intel-skx"
    }

    fn config(&self) -> ConfigSpec {
        ConfigSpec {
            vendor: 0x8086,
            device: 0x201C,
            revision: 0x04,
            class: 0x06_8000,
            pcie_at: 0x90,
            msix_at: 0x80,
            pm_at: 0xE0,
            aer_at: 0x148,
            vectors: r::MSIX_VECTORS,
            msix_bar: 0,
            msix_table: r::MSIX_TABLE_OFFSET,
            msix_pba: r::MSIX_PBA_OFFSET,
            link: (3, 8),
        }
    }

    fn bars(&self, window_bytes: u64) -> Vec<BarSpec> {
        bars(r::BAR0_BYTES, window_bytes)
    }

    fn window_of(&self, bar: u8) -> Option<usize> {
        LAYOUT.window_of(bar)
    }

    fn power_on(&self, side: SideId, window_bytes: u64, config: &mut RegFile) -> RegFile {
        let log2 = window_bytes.ilog2() as u8;
        for reg in r::cfg::MAP.regs {
            config.define(reg.offset, reg.width, 0, 0, 0);
        }
        for size in [
            r::cfg::IMBAR1SZ,
            r::cfg::IMBAR2SZ,
            r::cfg::EMBAR1SZ,
            r::cfg::EMBAR2SZ,
        ] {
            config.reset_reg(size, log2);
        }
        let ppd = if side == SideId::A {
            r::PPD_B2B_USD
        } else {
            r::PPD_B2B_DSD
        };
        config.reset_reg(r::cfg::PPD, ppd);

        let mut regs = RegFile::new(r::BAR0_BYTES as usize).with_map(&r::MAP);
        add_msix(
            &mut regs,
            r::MSIX_TABLE_OFFSET,
            r::MSIX_PBA_OFFSET,
            r::MSIX_VECTORS.into(),
        );
        for (n, vector) in r::INTVEC.iter().enumerate() {
            regs.reset_reg(vector, r::intvec_reset(n));
        }
        regs.reset_reg(r::NTBCNTL, inferred::GEN3_NTBCNTL_RESET);
        // The external side's BARs, at the addresses that both ends agree on; low bits as in a BAR.
        regs.reset_reg(r::EMBAR0, r::B2B_BAR0 | 0xC);
        regs.reset_reg(r::EMBAR1, r::B2B_BAR2 | 0xC);
        regs.reset_reg(r::EMBAR2, r::B2B_BAR4 | 0xC);
        regs
    }

    fn read(&self, st: &mut State, side: SideId, _bar: u8, at: u64, out: &mut [u8]) {
        if !LAYOUT.read_across(st, side, at, out) {
            st.sides[side].regs.read(at, out);
        }
    }

    fn write(&self, st: &mut State, side: SideId, _bar: u8, at: u64, data: &[u8]) {
        if LAYOUT.write_across(st, side, at, data) {
            return;
        }
        LAYOUT.write_own(st, side, at, data);
        if touches(at, data.len(), r::NTBCNTL.offset(), 4) {
            st.update_link(Actor::Client);
        }
    }

    fn translation(&self, st: &State, from: SideId, window: usize) -> Option<Translation> {
        let exposing = from.peer();
        let inner = LAYOUT.translation(st, exposing, window)?;
        let (bar, limit) = *[(r::EMBAR1, r::EMBAR1XLMT), (r::EMBAR2, r::EMBAR2XLMT)].get(window)?;
        let regs = &st.sides[exposing].regs;
        let outer = regs.reg(limit).checked_sub(regs.reg(bar) & !0xF)?;
        Some(Translation {
            bytes: inner.bytes.min(outer),
            ..inner
        })
    }

    fn wants_link(&self, st: &State, side: SideId) -> bool {
        st.sides[side].regs.reg(r::NTBCNTL) & r::NTBCNTL_LINK_DISABLE == 0
    }

    fn connected(&self, st: &State) -> bool {
        st.link.up
    }

    fn link_changed(&self, st: &mut State, side: SideId, _by: Actor) {
        self.lanes_changed(st, side);
        LAYOUT.latch_link(st, side);
    }

    fn lanes_changed(&self, st: &mut State, side: SideId) {
        let status = st.link_status();
        st.sides[side].config.set_reg(r::cfg::LINK_STATUS, status);
    }

    fn doorbells(&self, st: &mut State, side: SideId, bits: u64) {
        LAYOUT.latch(st, side, bits);
    }

    fn missed(&self, st: &mut State, side: SideId) {
        let regs = &mut st.sides[side].regs;
        let count = regs.reg(r::USMEMMISS).wrapping_add(1);
        regs.set_reg(r::USMEMMISS, count);
    }
}
