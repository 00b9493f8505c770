//! AMD and Hygon.
//!
//! One side is primary, the other secondary. An inbound window is programmed in the peer's block, since it
//! translates what comes through the peer's BAR; the link is up when both sides say that they are ready.

use std::sync::Arc;

use super::{
    Family, LinkState, NtbError, Role,
    access::Regs,
    inferred::{AMD_PEER_SILENT_IS_CLOSED, AMD_XLAT_CLOSED},
    latched::{Core, Hardware, Latched},
    regs::{Reg, Rw, amd as r},
    window,
};
use crate::pci::{
    Bar, PciFunction,
    config::{self, LinkRate},
};

/// Events that say that the peer goes or is gone.
const PEER_LEFT: u32 = r::INT_PEER_RESET | r::INT_PEER_D3 | r::INT_PME_TO | r::INT_LINK_DOWN;

#[derive(Debug)]
pub(super) enum Amd {}

/// A limit register, which is 32 bits wide for BAR1.
#[derive(Clone, Copy)]
enum Limit {
    Narrow(Reg<u32, Rw>),
    Wide(Reg<u64, Rw>),
}

pub(super) fn open(
    function: &Arc<dyn PciFunction>,
    family: Family,
    bars: &[Bar],
) -> Result<Latched<Amd>, NtbError> {
    let regs = Regs::new(Arc::clone(function), family)?;
    let side = regs.read_live(r::SIDEINFO)?;
    let role = match side & r::SIDEINFO_SECONDARY {
        0 => Role::Upstream,
        _ => Role::Downstream,
    };
    if function.vectors() < r::MSIX_VECTORS_MIN {
        return Err(NtbError::TooSmall {
            device: function.name().to_owned(),
            what: "the number of MSI-X vectors",
            needed: r::MSIX_VECTORS_MIN.into(),
            available: function.vectors().into(),
        });
    }
    let core = Core::new(regs, family, role, bars, |_| 4096, r::DOORBELL_MASK)?;
    Ok(Latched::new(core))
}

/// Registers of an inbound window: in the peer's block.
fn registers(core: &Core, index: usize) -> Result<(Reg<u64, Rw>, Limit), NtbError> {
    let (xlat, limit) = match window(&core.windows, index)?.bar {
        Bar::B1 => (r::BAR1XLAT, Limit::Narrow(r::BAR1LMT.shifted(r::PEER))),
        Bar::B2 => (r::BAR23XLAT, Limit::Wide(r::BAR23LMT.shifted(r::PEER))),
        _ => (r::BAR45XLAT, Limit::Wide(r::BAR45LMT.shifted(r::PEER))),
    };
    Ok((xlat.shifted(r::PEER), limit))
}

fn set_limit(core: &Core, limit: Limit, bytes: u64, hint: &'static str) -> Result<(), NtbError> {
    match limit {
        // A BAR of 32 bits is shorter than 4 GiB, and the length was checked against it.
        Limit::Narrow(reg) => core.regs.write_back(reg, bytes as u32, hint),
        Limit::Wide(reg) => core.regs.write_back(reg, bytes, hint),
    }
}

fn set_ready(core: &Core, ready: bool) -> Result<(), NtbError> {
    let side = core.regs.read_live(r::SIDEINFO)?;
    let new = match ready {
        true => side | r::SIDEINFO_READY,
        false => side & !r::SIDEINFO_READY,
    };
    core.regs
        .write_back(r::SIDEINFO, new, "the side's readiness was not taken")?;
    // No interrupt tells the peer of it but this one.
    Ok(core.regs.write(r::DBREQ, r::DOORBELL_GONE)?)
}

fn peer_ready(core: &Core) -> Result<bool, NtbError> {
    let side = core.regs.read(r::SIDEINFO.shifted(r::PEER))?;
    // All ones has the bit set and means that nobody is there.
    Ok(side != u32::MAX && side & r::SIDEINFO_READY != 0)
}

impl Hardware for Amd {
    const DOORBELLS: u64 = r::DOORBELL_MASK;
    const SPADS: usize = r::SPADS;
    /// One set serves both sides, on this side of the link.
    const SPADS_ACROSS: bool = false;

    fn alive(core: &Core) -> Result<(), NtbError> {
        core.regs.read_live(r::SIDEINFO).map(drop)
    }

    /// Vectors are fixed: one per doorbell, then one per event. The last doorbell tells of the peer's driver.
    fn connect_interrupts(core: &Core) -> Result<(), NtbError> {
        core.regs.write(r::INTMASK, r::INT_ALL)?;
        let last = core.regs.function().vectors().min(r::MSIX_VECTORS);
        let connected: Vec<_> = (0..last)
            .map(|vector| match u32::from(vector) < r::DOORBELLS {
                true => (vector, core.events.doorbell_fd()),
                false => (vector, core.events.link_fd()),
            })
            .collect();
        Ok(core.regs.function().set_vectors(&connected)?)
    }

    fn enable_link(core: &Core) -> Result<(), NtbError> {
        let control = core.regs.read_live(r::CNTL)?;
        core.regs.write(r::CNTL, control | r::CNTL_REG_CTL)?;
        core.regs.write(r::INTMASK, 0)?;
        set_ready(core, true)
    }

    fn disable_link(core: &Core) -> Result<(), NtbError> {
        set_ready(core, false)
    }

    fn link(core: &Core) -> Result<LinkState, NtbError> {
        let own = core.regs.read_live(r::SIDEINFO)?;
        if own & r::SIDEINFO_READY == 0 || !peer_ready(core)? {
            return Ok(LinkState::Down);
        }
        let link = config::pcie_link(&**core.regs.function())?.and_then(|l| l.current);
        Ok(LinkState::Up(link.unwrap_or(LinkRate::from_bits(0))))
    }

    fn acknowledge_link(core: &Core) -> Result<bool, NtbError> {
        let events = core.regs.read_live(r::INTSTAT)?;
        if events != 0 {
            core.regs.clear(r::INTSTAT, events)?;
            let acknowledged = core.regs.read_live(r::SMUACK)?;
            core.regs.write(r::SMUACK, acknowledged | events)?;
        }
        let said = core.regs.read_witnessed(r::DBSTAT, r::SIDEINFO)? & r::DOORBELL_GONE != 0;
        if said {
            core.regs.clear(r::DBSTAT, r::DOORBELL_GONE)?;
        }
        Ok(events & PEER_LEFT != 0 || said && !peer_ready(core)?)
    }

    fn open_window(core: &Core, window: usize, iova: u64, bytes: u64) -> Result<(), NtbError> {
        let (xlat, limit) = registers(core, window)?;
        core.regs
            .write_back(xlat, iova, "the address was not taken by the peer's side")?;
        set_limit(core, limit, bytes, "the length was not taken by the peer's side")
    }

    fn close_window(core: &Core, window: usize) -> Result<(), NtbError> {
        let (xlat, limit) = registers(core, window)?;
        let hint = "the window could not be closed";
        // The length too when the address was not taken: either closes the window.
        let address = core.regs.write_back(xlat, AMD_XLAT_CLOSED, hint);
        let length = set_limit(core, limit, 0, hint);
        match address.and(length) {
            // The peer's side answers all ones: whether this side is still alive decides.
            Err(NtbError::Gone { .. }) if AMD_PEER_SILENT_IS_CLOSED => {
                core.regs.read_live(r::SIDEINFO).map(drop)
            }
            other => other,
        }
    }

    fn ring(core: &Core, bits: u64) -> Result<(), NtbError> {
        Ok(core.regs.write(r::DBREQ, bits as u16)?)
    }

    fn latched(core: &Core) -> Result<u64, NtbError> {
        Ok(core.regs.read_witnessed(r::DBSTAT, r::SIDEINFO)?.into())
    }

    fn unlatch(core: &Core, bits: u64) -> Result<(), NtbError> {
        Ok(core.regs.clear(r::DBSTAT, bits as u16)?)
    }

    /// The last doorbell, which tells of the peer's driver, is never masked.
    fn write_mask(core: &Core, mask: u64) -> Result<(), NtbError> {
        Ok(core.regs.write(r::DBMASK, mask as u16 & !r::DOORBELL_GONE)?)
    }

    fn scratchpad(core: &Core, index: usize, peers: bool) -> Option<Reg<u32, Rw>> {
        let second = (core.role == Role::Downstream) != peers;
        if index >= r::SPADS {
            return None;
        }
        r::SPAD.get(index + if second { r::SPADS } else { 0 })
    }
}
