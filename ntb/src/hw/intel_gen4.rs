//! Intel Ice Lake, Sapphire Rapids, Emerald Rapids, Granite Rapids.
//!
//! Sequences follow the Linux driver `ntb_hw_gen4`, which is known to work on the hardware.

use std::{os::fd::BorrowedFd, sync::Arc};

use super::{
    Family, LinkReport, LinkState, NtbError, NtbPort, Role, WindowInfo,
    access::Regs,
    check_doorbells, check_translation,
    events::Events,
    inferred::INTEL_XBASE_CLOSED,
    peer_answered,
    regs::{Reg, Rw, intel_gen4 as r},
    scratchpad, window,
};
use crate::pci::{Bar, Function, PciFunction, config::LinkRate};

/// MSI-X vector of all doorbells.
const DOORBELL_VECTOR: u8 = 0;
/// MSI-X vector of the link.
const LINK_VECTOR: u8 = 1;

#[derive(Debug)]
pub(super) struct IntelGen4 {
    regs: Regs,
    family: Family,
    role: Role,
    windows: [WindowInfo; 2],
    events: Events,
}

/// Registers of one inbound window.
struct Window {
    base: Reg<u64, Rw>,
    limit: Reg<u64, Rw>,
    index: Reg<u16, Rw>,
}

const WINDOWS: [Window; 2] = [
    Window {
        base: r::IM23XBASE,
        limit: r::IM23XLMT,
        index: r::IM23XBASEIDX,
    },
    Window {
        base: r::IM45XBASE,
        limit: r::IM45XLMT,
        index: r::IM45XBASEIDX,
    },
];

impl IntelGen4 {
    pub(super) fn open(function: &Arc<dyn PciFunction>, family: Family) -> Result<Self, NtbError> {
        let regs = Regs::new(Arc::clone(function), Bar::B0, u64::from(r::PPD1.offset()) + 4)?;
        let role = topology(&regs, family)?;
        let facts = |bar| -> Result<WindowInfo, NtbError> {
            let bytes = function.bar_or_error(bar)?.bytes;
            Ok(WindowInfo {
                bar,
                offset: 0,
                bytes,
                address_align: if family == Family::IntelIcx { bytes } else { 4096 },
                size_align: 4096,
            })
        };
        Ok(Self {
            windows: [facts(Bar::B2)?, facts(Bar::B4)?],
            regs,
            family,
            role,
            events: Events::new(r::DOORBELL_MASK)?,
        })
    }

    /// All doorbells on one vector, the link on another. The reset values are not relied upon.
    fn route_interrupts(&self) -> Result<(), NtbError> {
        self.regs
            .write(r::IM_INT_DISABLE, r::DOORBELL_MASK | 1 << r::LINK_BIT)?;
        for (bit, vector) in r::INTVEC.iter().enumerate() {
            let link = bit == r::LINK_BIT as usize;
            self.regs
                .write(vector, if link { LINK_VECTOR } else { DOORBELL_VECTOR })?;
        }
        self.regs.function().set_vectors(&[
            (DOORBELL_VECTOR.into(), self.events.doorbell_fd()),
            (LINK_VECTOR.into(), self.events.link_fd()),
        ])?;
        Ok(())
    }

    fn acknowledge_link(&self) -> Result<(), NtbError> {
        // The slot's bit holds the interrupt's: it goes first.
        self.regs.clear(r::SLOTSTS, r::SLOTSTS_DLLSCS)?;
        self.regs.clear(r::IM_INT_STATUS, 1 << r::LINK_BIT)?;
        Ok(())
    }

    fn has_ltr(&self) -> bool {
        self.family != Family::IntelIcx
    }

    fn registers(&self, index: usize) -> Result<(&WindowInfo, &'static Window), NtbError> {
        let info = window(&self.windows, index)?;
        let registers = WINDOWS.get(index).ok_or(NtbError::NoWindow {
            window: index,
            windows: WINDOWS.len(),
        })?;
        Ok((info, registers))
    }
}

/// Which end of the link the port is; anything else cannot be used.
fn topology(regs: &Regs, family: Family) -> Result<Role, NtbError> {
    let (mask, usd, dsd) = match family {
        Family::IntelIcx => (r::ICX_PPD1_MASK, r::ICX_PPD1_B2B_USD, r::ICX_PPD1_B2B_DSD),
        _ => (r::SPR_PPD1_MASK, r::SPR_PPD1_B2B_USD, r::SPR_PPD1_B2B_DSD),
    };
    let ppd1 = regs.read_live(r::PPD1)?;
    match ppd1 & mask {
        v if v == usd => Ok(Role::Upstream),
        v if v == dsd => Ok(Role::Downstream),
        _ => Err(NtbError::WrongMode {
            device: regs.function().name().to_owned(),
            found: format!("PPD1 is {ppd1:#x}, which is not a back-to-back NTB"),
            remedy: "In the firmware set-up, choose 'NTB to NTB' for this PCIe port on both hosts, upstream on one and \
                     downstream on the other",
        }),
    }
}

impl NtbPort for IntelGen4 {
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
        if self.has_ltr() {
            self.regs.write(r::LTR_ACTIVE, r::LTR_ACTIVE_VALUE)?;
            self.regs.write(r::LTR_IDLE, r::LTR_IDLE_VALUE)?;
            self.regs.write(r::LTR_SWSEL, r::LTR_SWSEL_ACTIVE)?;
        }
        self.regs.write(r::NTBCNTL, r::NTBCNTL_SNOOP)?;
        let control = self.regs.read_live(r::LINK_CTRL)?;
        self.regs.write(r::LINK_CTRL, control & !r::LINK_CTRL_DISABLE)?;
        let wrote = self.regs.read_live(r::PPD0)? | r::PPD0_TRAIN;
        self.regs.write(r::PPD0, wrote)?;
        let read = self.regs.read_live(r::PPD0)?;
        if read & r::PPD0_TRAIN == 0 {
            return Err(NtbError::TrainingRefused {
                device: self.function().name().to_owned(),
                register: r::PPD0.name(),
                wrote: wrote.into(),
                read: read.into(),
            });
        }
        Ok(())
    }

    fn disable_link(&self) -> Result<(), NtbError> {
        let snoop = self.regs.read_live(r::NTBCNTL)?;
        self.regs.write(r::NTBCNTL, snoop & !r::NTBCNTL_SNOOP)?;
        let control = self.regs.read_live(r::LINK_CTRL)?;
        self.regs.write_back(
            r::LINK_CTRL,
            control | r::LINK_CTRL_DISABLE,
            "the link was not taken down",
        )?;
        if self.has_ltr() {
            self.regs.write(r::LTR_SWSEL, r::LTR_SWSEL_IDLE)?;
        }
        Ok(())
    }

    fn link(&self) -> Result<LinkState, NtbError> {
        let status = self.regs.read_live(r::LINK_STATUS)?;
        if status & r::LINK_STATUS_ACTIVE == 0 {
            return Ok(LinkState::Down);
        }
        Ok(LinkState::Up(LinkRate::from_bits(status)))
    }

    fn take_link_report(&self) -> Result<LinkReport, NtbError> {
        // In this order, so that a change after the read of the state raises a new event.
        let interrupts = self.events.link.take()?;
        self.acknowledge_link()?;
        Ok(LinkReport {
            state: self.link()?,
            interrupts,
            peer_left: false,
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
        let (info, reg) = self.registers(window)?;
        let bar = self.function().bar_address(info.bar)?;
        self.regs.write_back(
            reg.base,
            iova,
            "the address needs more alignment or bits than the hardware keeps",
        )?;
        self.regs.write_back(
            reg.limit,
            bar.wrapping_add(bytes),
            "the BAR is not where the kernel says it is",
        )?;
        if self.family == Family::IntelIcx {
            // The size is not zero: checked above.
            let log2 = bytes.checked_ilog2().unwrap_or(0) as u16;
            self.regs
                .write_back(reg.index, log2, "the window's size was not taken")?;
        }
        Ok(())
    }

    fn close_window(&self, window: usize) -> Result<(), NtbError> {
        let (info, reg) = self.registers(window)?;
        let bar = self.function().bar_address(info.bar)?;
        let hint = "the window could not be closed";
        self.regs.write_back(reg.base, INTEL_XBASE_CLOSED, hint)?;
        self.regs.write_back(reg.limit, bar, hint)?;
        if self.family == Family::IntelIcx {
            self.regs.write(reg.index, r::BASEIDX_CLOSED)?;
        }
        Ok(())
    }

    fn doorbell_bits(&self) -> u64 {
        r::DOORBELL_MASK
    }

    fn ring_peer(&self, bits: u64) -> Result<(), NtbError> {
        check_doorbells(bits, self.doorbell_bits())?;
        for (n, doorbell) in r::IM_DOORBELL.iter().enumerate() {
            if bits >> n & 1 != 0 {
                self.regs.write(doorbell, 1)?;
            }
        }
        Ok(())
    }

    fn doorbells(&self) -> Result<u64, NtbError> {
        Ok(self.regs.read_live(r::IM_INT_STATUS)? & r::DOORBELL_MASK)
    }

    fn clear_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        check_doorbells(bits, self.doorbell_bits())?;
        self.regs.clear_now(r::IM_INT_STATUS, bits, r::PPD1)
    }

    fn mask_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        check_doorbells(bits, self.doorbell_bits())?;
        let mut mask = self.events.mask();
        self.regs.write_now(r::IM_INT_DISABLE, *mask | bits, r::PPD1)?;
        *mask |= bits;
        Ok(())
    }

    fn unmask_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        check_doorbells(bits, self.doorbell_bits())?;
        let mut mask = self.events.mask();
        self.regs.write(r::IM_INT_DISABLE, *mask & !bits)?;
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
        self.regs.read_witnessed(scratchpad(r::IM_SPAD, index)?, r::PPD1)
    }

    fn set_scratchpad(&self, index: usize, value: u32) -> Result<(), NtbError> {
        Ok(self.regs.write(scratchpad(r::IM_SPAD, index)?, value)?)
    }

    fn peer_scratchpad(&self, index: usize) -> Result<u32, NtbError> {
        let value = self.regs.read(scratchpad(r::EM_SPAD, index)?)?;
        peer_answered(self, value)
    }

    fn set_peer_scratchpad(&self, index: usize, value: u32) -> Result<(), NtbError> {
        Ok(self.regs.write(scratchpad(r::EM_SPAD, index)?, value)?)
    }

    fn quiesce(&self) -> Result<(), NtbError> {
        self.regs.read_live(r::PPD1)?;
        self.route_interrupts()?;
        self.mask_doorbells(r::DOORBELL_MASK)?;
        self.disable_link()?;
        for window in 0..self.windows.len() {
            self.close_window(window)?;
        }
        for spad in r::IM_SPAD.iter() {
            self.regs.write(spad, 0)?;
        }
        self.acknowledge_link()?;
        self.clear_doorbells(r::DOORBELL_MASK)?;
        self.events.doorbell.take()?;
        self.events.link.take()?;
        Ok(())
    }
}
