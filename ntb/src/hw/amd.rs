//! AMD and Hygon.
//!
//! One side is primary, the other secondary. An inbound window is programmed in the peer's block, since it
//! translates what comes through the peer's BAR; the link is up when both sides say that they are ready.

use std::{os::fd::BorrowedFd, sync::Arc};

use super::{
    Family, LinkReport, LinkState, NtbError, NtbPort, Role, WindowInfo,
    access::Regs,
    check_doorbells, check_translation,
    events::Events,
    inferred::{AMD_PEER_SILENT_IS_CLOSED, AMD_XLAT_CLOSED},
    regs::{Reg, Rw, amd as r},
};
use crate::pci::{
    Bar, Function, PciFunction,
    config::{self, LinkRate},
};

/// Events that say that the peer goes or is gone.
const PEER_LEFT: u32 = r::INT_PEER_RESET | r::INT_PEER_D3 | r::INT_PME_TO | r::INT_LINK_DOWN;

#[derive(Debug)]
pub(super) struct Amd {
    regs: Regs,
    family: Family,
    role: Role,
    windows: Vec<WindowInfo>,
    events: Events,
}

/// A limit register, which is 32 bits wide for BAR1.
#[derive(Clone, Copy)]
enum Limit {
    Narrow(Reg<u32, Rw>),
    Wide(Reg<u64, Rw>),
}

impl Amd {
    pub(super) fn open(function: &Arc<dyn PciFunction>, family: Family) -> Result<Self, NtbError> {
        let regs = Regs::new(Arc::clone(function), Bar::B0, r::BAR0_BYTES)?;
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
        let bars: &[Bar] = match family {
            Family::Amd { windows } => windows,
            _ => &[],
        };
        let windows = bars
            .iter()
            .map(|&bar| {
                Ok(WindowInfo {
                    bar,
                    offset: 0,
                    bytes: function.bar_or_error(bar)?.bytes,
                    address_align: 4096,
                    size_align: 4096,
                })
            })
            .collect::<Result<_, NtbError>>()?;
        Ok(Self {
            regs,
            family,
            role,
            windows,
            events: Events::new(r::DOORBELL_MASK)?,
        })
    }

    /// Vectors are fixed: one per doorbell, then one per event. The last doorbell tells of the peer's driver.
    fn connect_interrupts(&self) -> Result<(), NtbError> {
        let last = self.function().vectors().min(r::MSIX_VECTORS);
        let connected: Vec<_> = (0..last)
            .map(|vector| match u32::from(vector) < r::DOORBELLS {
                true => (vector, self.events.doorbell_fd()),
                false => (vector, self.events.link_fd()),
            })
            .collect();
        Ok(self.function().set_vectors(&connected)?)
    }

    /// Registers of an inbound window: in the peer's block.
    fn registers(&self, index: usize) -> Result<(Reg<u64, Rw>, Limit), NtbError> {
        let (xlat, limit) = match super::window(&self.windows, index)?.bar {
            Bar::B1 => (r::BAR1XLAT, Limit::Narrow(r::BAR1LMT.shifted(r::PEER))),
            Bar::B2 => (r::BAR23XLAT, Limit::Wide(r::BAR23LMT.shifted(r::PEER))),
            _ => (r::BAR45XLAT, Limit::Wide(r::BAR45LMT.shifted(r::PEER))),
        };
        Ok((xlat.shifted(r::PEER), limit))
    }

    fn set_limit(&self, limit: Limit, bytes: u64, hint: &'static str) -> Result<(), NtbError> {
        match limit {
            // A BAR of 32 bits is shorter than 4 GiB, and the length was checked against it.
            Limit::Narrow(reg) => self.regs.write_back(reg, bytes as u32, hint),
            Limit::Wide(reg) => self.regs.write_back(reg, bytes, hint),
        }
    }

    fn set_ready(&self, ready: bool) -> Result<(), NtbError> {
        let side = self.regs.read_live(r::SIDEINFO)?;
        let new = match ready {
            true => side | r::SIDEINFO_READY,
            false => side & !r::SIDEINFO_READY,
        };
        self.regs
            .write_back(r::SIDEINFO, new, "the side's readiness was not taken")?;
        // No interrupt tells the peer of it but this one.
        Ok(self.regs.write(r::DBREQ, r::DOORBELL_GONE)?)
    }

    fn peer_ready(&self) -> Result<bool, NtbError> {
        let side = self.regs.read(r::SIDEINFO.shifted(r::PEER))?;
        // All ones has the bit set and means that nobody is there.
        Ok(side != u32::MAX && side & r::SIDEINFO_READY != 0)
    }

    fn hardware_mask(mask: u64) -> u16 {
        // The last doorbell is never masked.
        mask as u16 & !r::DOORBELL_GONE
    }

    fn spad(&self, index: usize, peers: bool) -> Result<Reg<u32, Rw>, NtbError> {
        let second = (self.role == Role::Downstream) != peers;
        let missing = NtbError::BadScratchpad {
            index,
            count: r::SPADS,
        };
        if index >= r::SPADS {
            return Err(missing);
        }
        r::SPAD
            .get(index + if second { r::SPADS } else { 0 })
            .ok_or(missing)
    }
}

impl NtbPort for Amd {
    fn family(&self) -> Family {
        self.family
    }

    fn function(&self) -> &Arc<dyn PciFunction> {
        self.regs.function()
    }

    fn role(&self) -> Role {
        self.role
    }

    fn enable_link(&self) -> Result<(), NtbError> {
        let control = self.regs.read_live(r::CNTL)?;
        self.regs.write(r::CNTL, control | r::CNTL_REG_CTL)?;
        self.regs.write(r::INTMASK, 0)?;
        self.set_ready(true)
    }

    fn disable_link(&self) -> Result<(), NtbError> {
        self.set_ready(false)
    }

    fn link(&self) -> Result<LinkState, NtbError> {
        let own = self.regs.read_live(r::SIDEINFO)?;
        if own & r::SIDEINFO_READY == 0 || !self.peer_ready()? {
            return Ok(LinkState::Down);
        }
        let link = config::pcie_link(&**self.function())?.and_then(|l| l.current);
        Ok(LinkState::Up(link.unwrap_or(LinkRate::from_bits(0))))
    }

    fn take_link_report(&self) -> Result<LinkReport, NtbError> {
        // In this order, so that a change after the read of the state raises a new event.
        let interrupts = self.events.link.take()?;
        let events = self.regs.read_live(r::INTSTAT)?;
        if events != 0 {
            self.regs.clear(r::INTSTAT, events)?;
            let acknowledged = self.regs.read_live(r::SMUACK)?;
            self.regs.write(r::SMUACK, acknowledged | events)?;
        }
        let said = self.regs.read_witnessed(r::DBSTAT, r::SIDEINFO)? & r::DOORBELL_GONE != 0;
        if said {
            self.regs.clear(r::DBSTAT, r::DOORBELL_GONE)?;
        }
        let peer_left = events & PEER_LEFT != 0 || said && !self.peer_ready()?;
        Ok(LinkReport {
            state: self.link()?,
            interrupts,
            peer_left,
        })
    }

    fn link_event(&self) -> BorrowedFd<'_> {
        self.events.link_fd()
    }

    fn windows(&self) -> &[WindowInfo] {
        &self.windows
    }

    fn open_window(&self, window: usize, iova: u64, bytes: u64) -> Result<(), NtbError> {
        check_translation(&self.windows, window, iova, bytes)?;
        let (xlat, limit) = self.registers(window)?;
        self.regs
            .write_back(xlat, iova, "the address was not taken by the peer's side")?;
        self.set_limit(limit, bytes, "the length was not taken by the peer's side")
    }

    fn close_window(&self, window: usize) -> Result<(), NtbError> {
        let (xlat, limit) = self.registers(window)?;
        let hint = "the window could not be closed";
        let closed = self
            .regs
            .write_back(xlat, AMD_XLAT_CLOSED, hint)
            .and_then(|()| self.set_limit(limit, 0, hint));
        match closed {
            // The peer's side answers all ones: whether this side is still alive decides.
            Err(NtbError::Gone { .. }) if AMD_PEER_SILENT_IS_CLOSED => {
                self.regs.read_live(r::SIDEINFO).map(drop)
            }
            other => other,
        }
    }

    fn doorbell_bits(&self) -> u64 {
        r::DOORBELL_MASK
    }

    fn ring_peer(&self, bits: u64) -> Result<(), NtbError> {
        check_doorbells(bits, self.doorbell_bits())?;
        Ok(self.regs.write(r::DBREQ, bits as u16)?)
    }

    fn doorbells(&self) -> Result<u64, NtbError> {
        let set = self.regs.read_witnessed(r::DBSTAT, r::SIDEINFO)?;
        Ok(u64::from(set) & r::DOORBELL_MASK)
    }

    fn clear_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        check_doorbells(bits, self.doorbell_bits())?;
        self.regs.clear_now(r::DBSTAT, bits as u16, r::SIDEINFO)
    }

    fn mask_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        check_doorbells(bits, self.doorbell_bits())?;
        let mut mask = self.events.mask();
        self.regs
            .write_now(r::DBMASK, Self::hardware_mask(*mask | bits), r::SIDEINFO)?;
        *mask |= bits;
        Ok(())
    }

    fn unmask_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        check_doorbells(bits, self.doorbell_bits())?;
        let mut mask = self.events.mask();
        self.regs.write(r::DBMASK, Self::hardware_mask(*mask & !bits))?;
        *mask &= !bits;
        Ok(())
    }

    fn masked_doorbells(&self) -> u64 {
        *self.events.mask()
    }

    fn doorbell_event(&self) -> BorrowedFd<'_> {
        self.events.doorbell_fd()
    }

    fn take_doorbells(&self, bits: u64) -> Result<u64, NtbError> {
        self.events.doorbell.take()?;
        let set = self.doorbells()? & bits;
        if set != 0 {
            self.clear_doorbells(set)?;
        }
        Ok(set)
    }

    fn scratchpads(&self) -> usize {
        r::SPADS
    }

    fn scratchpad(&self, index: usize) -> Result<u32, NtbError> {
        self.regs.read_witnessed(self.spad(index, false)?, r::SIDEINFO)
    }

    fn set_scratchpad(&self, index: usize, value: u32) -> Result<(), NtbError> {
        Ok(self.regs.write(self.spad(index, false)?, value)?)
    }

    fn peer_scratchpad(&self, index: usize) -> Result<u32, NtbError> {
        // One set for both sides, on this side of the link.
        self.regs.read_witnessed(self.spad(index, true)?, r::SIDEINFO)
    }

    fn set_peer_scratchpad(&self, index: usize, value: u32) -> Result<(), NtbError> {
        Ok(self.regs.write(self.spad(index, true)?, value)?)
    }

    fn quiesce(&self) -> Result<(), NtbError> {
        self.regs.read_live(r::SIDEINFO)?;
        self.regs.write(r::INTMASK, r::INT_ALL)?;
        self.connect_interrupts()?;
        self.mask_doorbells(r::DOORBELL_MASK)?;
        self.disable_link()?;
        for window in 0..self.windows.len() {
            self.close_window(window)?;
        }
        for index in 0..r::SPADS {
            self.set_scratchpad(index, 0)?;
        }
        self.regs.clear(r::INTSTAT, r::INT_ALL)?;
        self.regs.clear(r::DBSTAT, u16::MAX)?;
        self.events.doorbell.take()?;
        self.events.link.take()?;
        Ok(())
    }
}
