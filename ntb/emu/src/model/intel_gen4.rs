//! Intel Gen4 ports: Ice Lake, Sapphire and Emerald Rapids, Granite Rapids.

use ntb::hw::regs::intel_gen4 as r;

use super::{
    config::{BarSpec, ConfigSpec},
    family::{Family, Translation},
    intel::{Layout, Window, add_msix, bars},
    regfile::{RegFile, touches},
    side::SideId,
    state::{Actor, State},
};

/// A Gen4 port by what distinguishes the parts.
#[derive(Debug)]
pub struct IntelGen4 {
    name: &'static str,
    device: u16,
    revision: u8,
    /// Topology of each side.
    ppd1: (u32, u32),
    /// Translations are aligned to the window and the index register must be set (Ice Lake).
    aligned_to_size: bool,
}

/// Sapphire Rapids.
pub static SPR: IntelGen4 = IntelGen4 {
    name: "intel-spr",
    device: 0x347E,
    revision: ntb::hw::inferred::SPR_FIRST_REVISION,
    ppd1: (r::SPR_PPD1_B2B_USD, r::SPR_PPD1_B2B_DSD),
    aligned_to_size: false,
};

/// Granite Rapids.
pub static GNR: IntelGen4 = IntelGen4 {
    name: "intel-gnr",
    device: 0x0DB4,
    revision: 0,
    ppd1: (r::SPR_PPD1_B2B_USD, r::SPR_PPD1_B2B_DSD),
    aligned_to_size: false,
};

/// Ice Lake.
pub static ICX: IntelGen4 = IntelGen4 {
    name: "intel-icx",
    device: 0x347E,
    revision: ntb::hw::inferred::ICX_FIRST_REVISION,
    ppd1: (r::ICX_PPD1_B2B_USD, r::ICX_PPD1_B2B_DSD),
    aligned_to_size: true,
};

impl IntelGen4 {
    const fn layout(&self) -> Layout {
        Layout {
            status: r::IM_INT_STATUS,
            disable: r::IM_INT_DISABLE,
            intvec: r::INTVEC,
            own_spads: r::IM_SPAD,
            peer_spads: r::EM_SPAD,
            doorbells: r::IM_DOORBELL,
            windows: [
                Window {
                    bar: 2,
                    base: r::IM23XBASE,
                    limit: r::IM23XLMT,
                },
                Window {
                    bar: 4,
                    base: r::IM45XBASE,
                    limit: r::IM45XLMT,
                },
            ],
            bad_vector: None,
            aligned_to_size: self.aligned_to_size,
        }
    }
}

impl Family for IntelGen4 {
    fn name(&self) -> &'static str {
        self.name
    }

    fn config(&self) -> ConfigSpec {
        ConfigSpec {
            vendor: 0x8086,
            device: self.device,
            revision: self.revision,
            class: 0x06_8000,
            pcie_at: 0x40,
            msix_at: 0x80,
            pm_at: 0xE0,
            aer_at: 0x100,
            vectors: r::MSIX_VECTORS,
            msix_bar: 0,
            msix_table: r::MSIX_TABLE_OFFSET,
            msix_pba: r::MSIX_PBA_OFFSET,
            link: (4, 16),
        }
    }

    fn bars(&self, window_bytes: u64) -> Vec<BarSpec> {
        bars(r::BAR0_BYTES, window_bytes)
    }

    fn window_of(&self, bar: u8) -> Option<usize> {
        self.layout().window_of(bar)
    }

    fn power_on(&self, side: SideId, window_bytes: u64, config: &mut RegFile) -> RegFile {
        let log2 = window_bytes.ilog2();
        for reg in r::cfg::MAP.regs {
            config.define(reg.offset, 1, 0, 0, log2.into());
        }
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
        let (usd, dsd) = self.ppd1;
        regs.reset_reg(r::PPD1, if side == SideId::A { usd } else { dsd });
        regs
    }

    fn read(&self, st: &mut State, side: SideId, _bar: u8, at: u64, out: &mut [u8]) {
        if !self.layout().read_across(st, side, at, out) {
            st.sides[side].regs.read(at, out);
        }
    }

    fn write(&self, st: &mut State, side: SideId, _bar: u8, at: u64, data: &[u8]) {
        let layout = self.layout();
        if layout.write_across(st, side, at, data) {
            return;
        }
        let trained = st.sides[side].regs.reg(r::PPD0) & r::PPD0_TRAIN;
        layout.write_own(st, side, at, data);
        let regs = &mut st.sides[side].regs;
        if touches(at, data.len(), r::IM_INT_STATUS.offset(), 8)
            && regs.reg(r::SLOTSTS) & r::SLOTSTS_DLLSCS != 0
        {
            // The link bit cannot be cleared before its cause is.
            let status = regs.reg(r::IM_INT_STATUS);
            regs.set_reg(r::IM_INT_STATUS, status | 1 << r::LINK_BIT);
        }
        if touches(at, data.len(), r::PPD0.offset(), 4) {
            // Training stays requested until it is cleared.
            let mut ppd0 = regs.reg(r::PPD0) | trained;
            if ppd0 & r::PPD0_CLEAR_TRAIN != 0 {
                ppd0 &= !(r::PPD0_TRAIN | r::PPD0_CLEAR_TRAIN);
            }
            regs.set_reg(r::PPD0, ppd0);
        }
        if touches(at, data.len(), r::PPD0.offset(), 4) || touches(at, data.len(), r::LINK_CTRL.offset(), 2) {
            st.update_link(Actor::Client);
        }
    }

    fn translation(&self, st: &State, from: SideId, window: usize) -> Option<Translation> {
        let exposing = from.peer();
        if self.aligned_to_size {
            let index = [r::IM23XBASEIDX, r::IM45XBASEIDX];
            let log2 = st.sides[exposing].regs.reg(*index.get(window)?);
            if !(12..64).contains(&log2) {
                return None;
            }
        }
        self.layout().translation(st, exposing, window)
    }

    fn wants_link(&self, st: &State, side: SideId) -> bool {
        let regs = &st.sides[side].regs;
        regs.reg(r::LINK_CTRL) & r::LINK_CTRL_DISABLE == 0 && regs.reg(r::PPD0) & r::PPD0_TRAIN != 0
    }

    fn connected(&self, st: &State) -> bool {
        st.link.up
    }

    fn link_changed(&self, st: &mut State, side: SideId, _by: Actor) {
        self.lanes_changed(st, side);
        let regs = &mut st.sides[side].regs;
        let slot = regs.reg(r::SLOTSTS);
        regs.set_reg(r::SLOTSTS, slot | r::SLOTSTS_DLLSCS);
        self.layout().latch_link(st, side);
    }

    fn lanes_changed(&self, st: &mut State, side: SideId) {
        let status = st.link_status();
        st.sides[side].regs.set_reg(r::LINK_STATUS, status);
    }

    fn doorbells(&self, st: &mut State, side: SideId, bits: u64) {
        self.layout().latch(st, side, bits & r::DOORBELL_MASK);
    }
}
