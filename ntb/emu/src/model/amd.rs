//! AMD ports: a primary and a secondary side of one bridge, which sees both sides' registers whatever the hosts do.

use ntb::hw::{inferred, regs::amd as r};

use super::{
    config::{BarSpec, ConfigSpec, pcie},
    family::{Family, Translation},
    intel::{add_msix, bars},
    regfile::{RegFile, touches},
    side::SideId,
    state::{Actor, State},
};

/// An AMD port.
#[derive(Debug)]
pub struct Amd;

/// The two-window part, 1022:14C0.
pub static AMD: Amd = Amd;

const BAR0_BYTES: u64 = 0x1_0000;
const MSIX_TABLE: u32 = 0x2000;
const MSIX_PBA: u32 = 0x2800;
const BLOCK: std::ops::Range<u32> = 0x400..0x800;

/// Where an access to the own BAR really goes: the other side's register, if it does.
fn across(side: SideId, at: u64) -> Option<u32> {
    let at = u32::try_from(at).ok()?;
    if (BLOCK.start + r::PEER..BLOCK.end + r::PEER).contains(&at) {
        return Some(at - r::PEER);
    }
    // One set of scratchpads: the primary side owns the first half, the secondary the second.
    let index = at.checked_sub(r::SPAD.offset())? / 4;
    let owner = match index {
        0..8 => SideId::A,
        8..16 => SideId::B,
        _ => return None,
    };
    (owner != side).then_some(at)
}

impl Amd {
    /// What follows from a change of masks, by whichever side.
    fn unmasked(st: &mut State, side: SideId, doorbells: u16, events: u32) {
        let regs = &st.sides[side].regs;
        let rung = regs.reg(r::DBSTAT) & doorbells & !regs.reg(r::DBMASK);
        let happened = regs.reg(r::INTSTAT) & events & !regs.reg(r::INTMASK);
        Self::fire(st, side, rung);
        if happened != 0 {
            st.raise(side, r::EVENT_VECTOR.into());
        }
    }

    fn fire(st: &mut State, side: SideId, bits: u16) {
        for bit in (0..16).filter(|bit| bits & 1 << bit != 0) {
            st.raise(side, bit);
        }
    }

    fn event(st: &mut State, side: SideId, event: u32) {
        let regs = &mut st.sides[side].regs;
        let status = regs.reg(r::INTSTAT);
        regs.set_reg(r::INTSTAT, status | event);
        if event & !status & !regs.reg(r::INTMASK) != 0 {
            st.raise(side, r::EVENT_VECTOR.into());
        }
    }
}

impl Family for Amd {
    fn name(&self) -> &'static str {
        "amd"
    }

    fn config(&self) -> ConfigSpec {
        ConfigSpec {
            vendor: 0x1022,
            device: 0x14C0,
            revision: 0x00,
            class: 0x06_8000,
            pcie_at: 0x64,
            msix_at: 0xC0,
            pm_at: 0x50,
            aer_at: 0x150,
            vectors: r::MSIX_VECTORS,
            msix_bar: 0,
            msix_table: MSIX_TABLE,
            msix_pba: MSIX_PBA,
            link: (4, 16),
        }
    }

    fn bars(&self, window_bytes: u64) -> Vec<BarSpec> {
        bars(BAR0_BYTES, window_bytes)
    }

    fn window_of(&self, bar: u8) -> Option<usize> {
        match bar {
            2 => Some(0),
            4 => Some(1),
            _ => None,
        }
    }

    fn power_on(&self, side: SideId, _window_bytes: u64, _config: &mut RegFile) -> RegFile {
        let mut regs = RegFile::new(BAR0_BYTES as usize).with_map(&r::MAP);
        let secondary = if side == SideId::A {
            0
        } else {
            r::SIDEINFO_SECONDARY
        };
        regs.define(
            r::SIDEINFO.offset(),
            4,
            r::SIDEINFO_READY.into(),
            0,
            secondary.into(),
        );
        regs.reset_reg(r::INTMASK, r::INT_ALL);
        // The other side's block answers at its distance; here only so that its bytes count as registers.
        for reg in r::MAP.regs.iter().filter(|reg| BLOCK.contains(&reg.offset)) {
            regs.define(reg.offset + r::PEER, reg.width, 0, 0, 0);
        }
        add_msix(&mut regs, MSIX_TABLE, MSIX_PBA, r::MSIX_VECTORS.into());
        regs
    }

    fn read(&self, st: &mut State, side: SideId, _bar: u8, at: u64, out: &mut [u8]) {
        if let Some(theirs) = across(side, at) {
            st.read_peer(side, theirs, out);
        } else if touches(at, out.len(), r::MIRRDBSTAT.offset(), 2) {
            let mirrored = r::DBSTAT.offset() - r::MIRRDBSTAT.offset();
            st.read_peer(side, at as u32 + mirrored, out);
        } else {
            st.sides[side].regs.read(at, out);
        }
    }

    fn write(&self, st: &mut State, side: SideId, _bar: u8, at: u64, data: &[u8]) {
        if let Some(theirs) = across(side, at) {
            st.post_register(side, theirs, data);
            return;
        }
        let request = u64::from(r::DBREQ.offset());
        let bits = (request..request + 2)
            .zip([0, 8])
            .filter_map(|(byte, shift)| {
                let i = usize::try_from(byte.checked_sub(at)?).ok()?;
                Some(u64::from(*data.get(i)?) << shift)
            })
            .fold(0, |bits, b| bits | b);
        if bits != 0 {
            st.post_doorbells(side, bits);
        }
        let regs = &mut st.sides[side].regs;
        let (doorbells, events) = (regs.reg(r::DBMASK), regs.reg(r::INTMASK));
        regs.write(at, data);
        Self::unmasked(st, side, doorbells, events);
    }

    fn translation(&self, st: &State, from: SideId, window: usize) -> Option<Translation> {
        let (base, limit) = *[(r::BAR23XLAT, r::BAR23LMT), (r::BAR45XLAT, r::BAR45LMT)].get(window)?;
        let holder = if inferred::AMD_XLAT_IS_PROGRAMMED_BY_PEER {
            from
        } else {
            from.peer()
        };
        let regs = &st.sides[holder].regs;
        let base = regs.reg(base) & !0xFFF;
        (base != inferred::AMD_XLAT_CLOSED).then(|| Translation {
            base,
            bytes: regs.reg(limit), // a length
        })
    }

    fn window_registers(&self, window: usize) -> &'static [(u32, u32)] {
        const WINDOWS: [[(u32, u32); 2]; 2] = [
            [(r::BAR23XLAT.offset(), 8), (r::BAR23LMT.offset(), 8)],
            [(r::BAR45XLAT.offset(), 8), (r::BAR45LMT.offset(), 8)],
        ];
        match WINDOWS.get(window) {
            Some(registers) if inferred::AMD_XLAT_IS_PROGRAMMED_BY_PEER => registers,
            _ => &[],
        }
    }

    fn wants_link(&self, _st: &State, _side: SideId) -> bool {
        true // software agrees by its ready bits
    }

    fn connected(&self, st: &State) -> bool {
        st.link.cable && SideId::BOTH.into_iter().all(|s| st.sides[s].present)
    }

    fn link_changed(&self, st: &mut State, side: SideId, by: Actor) {
        if by == Actor::Cable {
            let event = if st.link.up {
                r::INT_LINK_UP
            } else {
                r::INT_LINK_DOWN
            };
            Self::event(st, side, event);
        }
    }

    fn lanes_changed(&self, st: &mut State, side: SideId) {
        let (speed, width) = (u16::from(st.link.speed), u16::from(st.link.width));
        let s = &mut st.sides[side];
        let at = s.pcie(pcie::LNKSTA);
        s.config.set(at, 2, u64::from(speed | width << 4 | 1 << 12));
    }

    fn before_reset(&self, st: &mut State, side: SideId) {
        // A driver that goes away says so by a doorbell; one that is reset cannot.
        if st.sides[side].regs.reg(r::SIDEINFO) & r::SIDEINFO_READY != 0 && self.connected(st) {
            Self::event(st, side.peer(), r::INT_PEER_RESET);
        }
    }

    fn peer_wrote(&self, st: &mut State, side: SideId, offset: u32, len: usize) {
        if touches(offset.into(), len, r::DBMASK.offset(), 2) {
            Self::unmasked(st, side, u16::MAX, 0);
        }
        if touches(offset.into(), len, r::INTMASK.offset(), 4) {
            Self::unmasked(st, side, 0, u32::MAX);
        }
    }

    fn doorbells(&self, st: &mut State, side: SideId, bits: u64) {
        let bits = bits as u16; // sixteen of them
        let regs = &mut st.sides[side].regs;
        let before = regs.reg(r::DBSTAT);
        regs.set_reg(r::DBSTAT, before | bits);
        let edges = if inferred::DOORBELL_FIRES_WHEN_SET_ALREADY {
            bits
        } else {
            bits & !before
        };
        let fire = edges & !regs.reg(r::DBMASK);
        Self::fire(st, side, fire);
    }
}
