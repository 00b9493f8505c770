//! The Linux endpoint NTB as a host sees it: a control block that firmware works off, scratchpads in memory,
//! doorbells that are message-signalled interrupts of the other host. No masks, no latches.

use ntb::hw::regs::epf as r;

use super::{
    config::{BarSpec, ConfigSpec},
    family::{Family, Translation},
    intel::add_msix,
    regfile::{RegFile, touches},
    side::SideId,
    state::{Actor, State},
};

/// An endpoint port with the BAR map of the NXP parts: control and all scratchpads in BAR0, doorbells in BAR2, one
/// window in BAR4.
#[derive(Debug)]
pub struct Epf;

/// 1957:0809.
pub static EPF: Epf = Epf;

const BAR0_BYTES: u64 = 0x4000;
const DOORBELL_BYTES: u64 = 0x1000;
const MSIX_TABLE: u32 = 0x1000;
const MSIX_PBA: u32 = 0x1800;
const SPAD_OFFSET: u32 = 0x200;
const SPAD_COUNT: u32 = 16;
const DB_ENTRY: u32 = 4;
const WINDOWS: u32 = 1;
const CONTROL_BAR: u8 = 0;
const WINDOW_BAR: u8 = 4;

/// The other side's scratchpads stand behind the own ones.
fn across(at: u64) -> Option<u32> {
    let spads = 4 * SPAD_COUNT;
    let index = u32::try_from(at).ok()?.checked_sub(SPAD_OFFSET + spads)?;
    (index < spads).then_some(SPAD_OFFSET + index)
}

impl Epf {
    /// What the firmware does with a command; whether it went well.
    fn command(st: &mut State, side: SideId, command: u32, argument: u32) -> bool {
        let window_bytes = st.window_bytes;
        let s = &mut st.sides[side];
        match command {
            r::CMD_CONFIGURE_DOORBELL => {
                let vectors = argument & 0xFFFF;
                let good = (1..=u32::from(r::MSIX_VECTORS_MAX)).contains(&vectors);
                if good {
                    s.firmware.vectors = vectors;
                }
                good
            }
            r::CMD_TEARDOWN_DOORBELL => {
                s.firmware.vectors = 0;
                true
            }
            r::CMD_CONFIGURE_MW => {
                let half = |low, high| u64::from(s.regs.reg(high)) << 32 | u64::from(s.regs.reg(low));
                let address = half(r::LOWER_ADDR, r::UPPER_ADDR);
                let size = half(r::LOWER_SIZE, r::UPPER_SIZE);
                let good = argument < WINDOWS && size <= window_bytes && address.is_multiple_of(4096);
                if good && let Some(window) = s.firmware.windows.get_mut(argument as usize) {
                    *window = (size > 0).then_some((address, size));
                }
                good
            }
            r::CMD_TEARDOWN_MW => {
                let good = argument < WINDOWS;
                if good && let Some(window) = s.firmware.windows.get_mut(argument as usize) {
                    *window = None;
                }
                good
            }
            r::CMD_LINK_UP | r::CMD_LINK_DOWN => {
                s.firmware.link_asked = command == r::CMD_LINK_UP;
                st.update_link(Actor::Client);
                true
            }
            _ => false,
        }
    }
}

impl Family for Epf {
    fn name(&self) -> &'static str {
        "epf"
    }

    fn config(&self) -> ConfigSpec {
        ConfigSpec {
            vendor: 0x1957,
            device: 0x0809,
            revision: 0x01,
            class: r::CLASS,
            pcie_at: 0x70,
            msix_at: 0xB0,
            pm_at: 0x40,
            aer_at: 0x100,
            vectors: r::MSIX_VECTORS_MAX,
            msix_bar: CONTROL_BAR,
            msix_table: MSIX_TABLE,
            msix_pba: MSIX_PBA,
            link: (3, 1),
        }
    }

    fn bars(&self, window_bytes: u64) -> Vec<BarSpec> {
        [
            (CONTROL_BAR, BAR0_BYTES, false),
            (2, DOORBELL_BYTES, false),
            (WINDOW_BAR, window_bytes, true),
        ]
        .map(|(index, bytes, prefetchable)| BarSpec {
            index,
            bytes,
            prefetchable,
        })
        .to_vec()
    }

    fn window_of(&self, bar: u8) -> Option<usize> {
        (bar == WINDOW_BAR).then_some(0)
    }

    fn power_on(&self, _side: SideId, _window_bytes: u64, _config: &mut RegFile) -> RegFile {
        let mut regs = RegFile::new(BAR0_BYTES as usize).with_map(&r::MAP);
        regs.reset_reg(r::MW_COUNT, WINDOWS);
        regs.reset_reg(r::SPAD_OFFSET, SPAD_OFFSET);
        regs.reset_reg(r::SPAD_COUNT, SPAD_COUNT);
        regs.reset_reg(r::DB_ENTRY_SIZE, DB_ENTRY);
        for (n, data) in (1..).zip(r::DB_DATA.iter()) {
            regs.reset_reg(data, n);
        }
        for spad in 0..2 * SPAD_COUNT {
            regs.define(SPAD_OFFSET + 4 * spad, 4, u32::MAX.into(), 0, 0);
        }
        add_msix(&mut regs, MSIX_TABLE, MSIX_PBA, r::MSIX_VECTORS_MAX.into());
        regs
    }

    fn read(&self, st: &mut State, side: SideId, bar: u8, at: u64, out: &mut [u8]) {
        if bar != CONTROL_BAR {
            out.fill(0xFF); // doorbells lead to an interrupt controller: nothing to read
        } else if let Some(theirs) = across(at) {
            st.read_peer(side, theirs, out);
        } else {
            st.sides[side].regs.read(at, out);
        }
    }

    fn write(&self, st: &mut State, side: SideId, bar: u8, at: u64, data: &[u8]) {
        if bar != CONTROL_BAR {
            let slot = at / u64::from(DB_ENTRY);
            if slot < r::MSIX_VECTORS_MAX.into() {
                st.post_doorbells(side, 1 << slot);
            }
            return;
        }
        if let Some(theirs) = across(at) {
            st.post_register(side, theirs, data);
            return;
        }
        let regs = &mut st.sides[side].regs;
        regs.write(at, data);
        let command = regs.reg(r::COMMAND);
        if command != 0 && touches(at, data.len(), r::COMMAND.offset(), 4) {
            let argument = regs.reg(r::ARGUMENT);
            regs.set_reg(r::COMMAND, 0);
            regs.set_reg(r::ARGUMENT, 0);
            let good = Self::command(st, side, command, argument);
            let status = if good { r::STATUS_OK } else { r::STATUS_ERROR };
            st.sides[side].regs.set_reg(r::CMD_STATUS, status);
        }
    }

    fn translation(&self, st: &State, from: SideId, window: usize) -> Option<Translation> {
        let firmware = &st.sides[from.peer()].firmware;
        let (base, bytes) = (*firmware.windows.get(window)?)?;
        Some(Translation { base, bytes })
    }

    fn wants_link(&self, st: &State, side: SideId) -> bool {
        st.sides[side].firmware.link_asked
    }

    fn connected(&self, st: &State) -> bool {
        st.link.cable && SideId::BOTH.into_iter().all(|s| st.sides[s].present)
    }

    fn link_changed(&self, st: &mut State, side: SideId, _by: Actor) {
        let up = if st.link.up { r::LINK_UP } else { 0 };
        st.sides[side].regs.set_reg(r::LINK_STATUS, up);
        if st.sides[side].firmware.vectors > 0 {
            st.raise(side, r::SLOT_LINK);
        }
    }

    fn lanes_changed(&self, _st: &mut State, _side: SideId) {}

    fn doorbells(&self, st: &mut State, side: SideId, bits: u64) {
        for slot in (0..st.sides[side].firmware.vectors).filter(|slot| bits & 1 << slot != 0) {
            st.raise(side, slot);
        }
    }
}
