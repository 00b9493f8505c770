//! Ports whose hardware latches doorbells and keeps scratchpads: everything but the registers themselves.
//!
//! [`Hardware`] is what a family adds. The order of steps, the checks and the events stand here, once.

use std::{os::fd::BorrowedFd, sync::Arc};

use super::{
    Family, LinkReport, LinkState, NtbError, NtbPort, Role, WindowInfo,
    access::Regs,
    check_doorbells, check_translation, end,
    events::Events,
    peer_answered,
    regs::{Reg, Rw, Wo},
    window,
};
use crate::pci::{Bar, Function, PciFunction};

/// What every such port has.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) regs: Regs,
    pub(super) family: Family,
    pub(super) role: Role,
    pub(super) windows: Vec<WindowInfo>,
    pub(super) events: Events,
}

impl Core {
    /// All doorbells masked; one window a BAR; `address_align` gives the alignment it needs by its length.
    pub(super) fn new(
        regs: Regs,
        family: Family,
        role: Role,
        bars: &[Bar],
        address_align: impl Fn(u64) -> u64,
        doorbells: u64,
    ) -> Result<Self, NtbError> {
        let windows = bars
            .iter()
            .map(|&bar| {
                let bytes = regs.function().bar_or_error(bar)?.bytes;
                Ok(WindowInfo {
                    bar,
                    offset: 0,
                    bytes,
                    address_align: address_align(bytes),
                    size_align: 4096,
                })
            })
            .collect::<Result<_, NtbError>>()?;
        Ok(Self {
            regs,
            family,
            role,
            windows,
            events: Events::new(doorbells)?,
        })
    }

    /// One of a family's window register sets, with the facts of its window.
    pub(super) fn window<'t, W>(
        &self,
        index: usize,
        sets: &'t [W],
    ) -> Result<(&WindowInfo, &'t W), NtbError> {
        let info = window(&self.windows, index)?;
        let set = sets.get(index).ok_or(NtbError::NoWindow {
            window: index,
            windows: sets.len(),
        })?;
        Ok((info, set))
    }

    /// Intel: all doorbells on one MSI-X vector, the link on another. The reset values are not relied upon.
    pub(super) fn route_to_two_vectors(
        &self,
        table: impl Iterator<Item = Reg<u8, Rw>>,
        link_bit: u32,
    ) -> Result<(), NtbError> {
        // Any but the one that Skylake's erratum spoils.
        const DOORBELL_VECTOR: u8 = 0;
        const LINK_VECTOR: u8 = 1;
        for (bit, vector) in table.enumerate() {
            let link = bit == link_bit as usize;
            self.regs
                .write(vector, if link { LINK_VECTOR } else { DOORBELL_VECTOR })?;
        }
        Ok(self.regs.function().set_vectors(&[
            (DOORBELL_VECTOR.into(), self.events.doorbell_fd()),
            (LINK_VECTOR.into(), self.events.link_fd()),
        ])?)
    }

    /// Intel: a register of its own rings each doorbell at the peer.
    pub(super) fn ring_each(
        &self,
        registers: impl Iterator<Item = Reg<u32, Wo>>,
        bits: u64,
    ) -> Result<(), NtbError> {
        for (bit, doorbell) in registers.enumerate() {
            if bits >> bit & 1 != 0 {
                self.regs.write(doorbell, 1)?;
            }
        }
        Ok(())
    }
}

/// What a family adds: its registers. Arguments are checked before.
pub(super) trait Hardware: std::fmt::Debug + Send + Sync + 'static {
    /// Doorbells that clients may use.
    const DOORBELLS: u64;
    /// Scratchpads a side.
    const SPADS: usize;
    /// Whether a read of the peer's scratchpads crosses the link, where it may go unanswered.
    const SPADS_ACROSS: bool;

    /// Reads a register that is never all ones on a live device. That also pushes posted writes to it.
    fn alive(core: &Core) -> Result<(), NtbError>;
    fn connect_interrupts(core: &Core) -> Result<(), NtbError>;
    fn enable_link(core: &Core) -> Result<(), NtbError>;
    fn disable_link(core: &Core) -> Result<(), NtbError>;
    fn link(core: &Core) -> Result<LinkState, NtbError>;
    /// Takes what the link's interrupt left; whether it told that the peer left.
    fn acknowledge_link(core: &Core) -> Result<bool, NtbError>;
    fn open_window(core: &Core, window: usize, iova: u64, bytes: u64) -> Result<(), NtbError>;
    fn close_window(core: &Core, window: usize) -> Result<(), NtbError>;
    fn ring(core: &Core, bits: u64) -> Result<(), NtbError>;
    fn latched(core: &Core) -> Result<u64, NtbError>;
    fn unlatch(core: &Core, bits: u64) -> Result<(), NtbError>;
    fn write_mask(core: &Core, mask: u64) -> Result<(), NtbError>;
    /// An own or a peer's scratchpad; `None` past the last.
    fn scratchpad(core: &Core, index: usize, peers: bool) -> Option<Reg<u32, Rw>>;
}

/// A port of such a family.
#[derive(Debug)]
pub(super) struct Latched<H: Hardware> {
    core: Core,
    hardware: std::marker::PhantomData<fn() -> H>,
}

impl<H: Hardware> Latched<H> {
    pub(super) fn new(core: Core) -> Self {
        Self {
            core,
            hardware: std::marker::PhantomData,
        }
    }

    fn spad(&self, index: usize, peers: bool) -> Result<Reg<u32, Rw>, NtbError> {
        H::scratchpad(&self.core, index, peers).ok_or(NtbError::BadScratchpad {
            index,
            count: H::SPADS,
        })
    }

    /// A scratchpad's value; all ones may be one, if somebody is there.
    fn read_spad(&self, reg: Reg<u32, Rw>) -> Result<u32, NtbError> {
        let value = self.core.regs.read(reg)?;
        if value == u32::MAX {
            H::alive(&self.core)?;
        }
        Ok(value)
    }
}

impl<H: Hardware> Drop for Latched<H> {
    fn drop(&mut self) {
        end(self);
    }
}

impl<H: Hardware> NtbPort for Latched<H> {
    fn family(&self) -> Family {
        self.core.family
    }

    fn function(&self) -> &Arc<dyn PciFunction> {
        self.core.regs.function()
    }

    fn role(&self) -> Role {
        self.core.role
    }

    fn enable_link(&self) -> Result<(), NtbError> {
        H::enable_link(&self.core)
    }

    fn disable_link(&self) -> Result<(), NtbError> {
        H::disable_link(&self.core)
    }

    fn link(&self) -> Result<LinkState, NtbError> {
        H::link(&self.core)
    }

    fn take_link_report(&self) -> Result<LinkReport, NtbError> {
        // In this order, so that a change after the read of the state raises a new event.
        let interrupts = self.core.events.link.take()?;
        let peer_left = H::acknowledge_link(&self.core)?;
        Ok(LinkReport {
            state: self.link()?,
            interrupts,
            peer_left,
        })
    }

    fn link_event(&self) -> BorrowedFd<'_> {
        self.core.events.link_fd()
    }

    fn windows(&self) -> &[WindowInfo] {
        &self.core.windows
    }

    fn open_window(&self, window: usize, iova: u64, bytes: u64) -> Result<(), NtbError> {
        check_translation(&self.core.windows, window, iova, bytes)?;
        H::open_window(&self.core, window, iova, bytes)
    }

    fn close_window(&self, window: usize) -> Result<(), NtbError> {
        H::close_window(&self.core, window)
    }

    fn doorbell_bits(&self) -> u64 {
        H::DOORBELLS
    }

    fn ring_peer(&self, bits: u64) -> Result<(), NtbError> {
        check_doorbells(bits, H::DOORBELLS)?;
        H::ring(&self.core, bits)
    }

    fn doorbells(&self) -> Result<u64, NtbError> {
        Ok(H::latched(&self.core)? & H::DOORBELLS)
    }

    /// Waits until the device has done it. Without that, a doorbell that arrives while the clear is on its way to the
    /// device is cleared with the old one, although whoever clears has looked at memory before its data came: a lost
    /// wake-up.
    fn clear_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        check_doorbells(bits, H::DOORBELLS)?;
        H::unlatch(&self.core, bits)?;
        H::alive(&self.core)
    }

    fn mask_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        check_doorbells(bits, H::DOORBELLS)?;
        let mut mask = self.core.events.mask();
        H::write_mask(&self.core, *mask | bits)?;
        H::alive(&self.core)?;
        *mask |= bits;
        Ok(())
    }

    fn unmask_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        check_doorbells(bits, H::DOORBELLS)?;
        let mut mask = self.core.events.mask();
        H::write_mask(&self.core, *mask & !bits)?;
        *mask &= !bits;
        Ok(())
    }

    fn masked_doorbells(&self) -> u64 {
        *self.core.events.mask()
    }

    fn doorbell_event(&self) -> BorrowedFd<'_> {
        self.core.events.doorbell_fd()
    }

    fn take_doorbells(&self, bits: u64) -> Result<u64, NtbError> {
        self.core.events.doorbell.take()?;
        let set = self.doorbells()? & bits;
        if set != 0 {
            self.clear_doorbells(set)?;
        }
        Ok(set)
    }

    fn scratchpads(&self) -> usize {
        H::SPADS
    }

    fn scratchpad(&self, index: usize) -> Result<u32, NtbError> {
        self.read_spad(self.spad(index, false)?)
    }

    fn set_scratchpad(&self, index: usize, value: u32) -> Result<(), NtbError> {
        Ok(self.core.regs.write(self.spad(index, false)?, value)?)
    }

    fn peer_scratchpad(&self, index: usize) -> Result<u32, NtbError> {
        let reg = self.spad(index, true)?;
        match H::SPADS_ACROSS {
            true => peer_answered(self, self.core.regs.read(reg)?),
            false => self.read_spad(reg),
        }
    }

    fn set_peer_scratchpad(&self, index: usize, value: u32) -> Result<(), NtbError> {
        Ok(self.core.regs.write(self.spad(index, true)?, value)?)
    }

    fn quiesce(&self) -> Result<(), NtbError> {
        H::alive(&self.core)?;
        H::connect_interrupts(&self.core)?;
        self.mask_doorbells(H::DOORBELLS)?;
        self.disable_link()?;
        for window in 0..self.core.windows.len() {
            self.close_window(window)?;
        }
        for index in 0..H::SPADS {
            self.set_scratchpad(index, 0)?;
        }
        H::acknowledge_link(&self.core)?;
        self.clear_doorbells(H::DOORBELLS)?;
        self.core.events.doorbell.take()?;
        self.core.events.link.take()?;
        Ok(())
    }
}
