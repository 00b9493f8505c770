//! Intel Skylake and Cascade Lake.
//!
//! Sequences follow the Linux driver `ntb_hw_gen3`. Topology and link status are in configuration space; an inbound
//! window has a second limit register on the external side.

use std::{os::fd::BorrowedFd, sync::Arc};

use super::{
    Family, LinkReport, LinkState, NtbError, NtbPort, Role, WindowInfo,
    access::Regs,
    check_doorbells, check_translation,
    events::Events,
    inferred::INTEL_XBASE_CLOSED,
    peer_answered,
    regs::{Reg, Rw, intel_gen3 as r},
    scratchpad, window,
};
use crate::pci::{
    Bar, Function, PciFunction,
    config::{self, LinkRate},
};

/// MSI-X vector of all doorbells.
const DOORBELL_VECTOR: u8 = 0;
/// MSI-X vector of the link: any but the one that the erratum spoils.
const LINK_VECTOR: u8 = 1;

#[derive(Debug)]
pub(super) struct IntelGen3 {
    regs: Regs,
    role: Role,
    windows: [WindowInfo; 2],
    events: Events,
}

/// Registers of one inbound window.
struct Window {
    base: Reg<u64, Rw>,
    limit: Reg<u64, Rw>,
    external_bar: Reg<u64, Rw>,
    external_limit: Reg<u64, Rw>,
}

const WINDOWS: [Window; 2] = [
    Window {
        base: r::IMBAR1XBASE,
        limit: r::IMBAR1XLMT,
        external_bar: r::EMBAR1,
        external_limit: r::EMBAR1XLMT,
    },
    Window {
        base: r::IMBAR2XBASE,
        limit: r::IMBAR2XLMT,
        external_bar: r::EMBAR2,
        external_limit: r::EMBAR2XLMT,
    },
];

impl IntelGen3 {
    pub(super) fn open(function: &Arc<dyn PciFunction>) -> Result<Self, NtbError> {
        let regs = Regs::new(Arc::clone(function), Bar::B0, r::MAP.end.into())?;
        let role = topology(&**function)?;
        let facts = |bar| -> Result<WindowInfo, NtbError> {
            let bytes = function.bar_or_error(bar)?.bytes;
            Ok(WindowInfo {
                bar,
                offset: 0,
                bytes,
                address_align: bytes,
                size_align: 4096,
            })
        };
        Ok(Self {
            windows: [facts(Bar::B2)?, facts(Bar::B4)?],
            regs,
            role,
            events: Events::new(r::DOORBELL_MASK)?,
        })
    }

    fn route_interrupts(&self) -> Result<(), NtbError> {
        self.regs
            .write(r::IM_INT_DISABLE, r::DOORBELL_MASK | r::LINK_BITS)?;
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

    fn registers(&self, index: usize) -> Result<(&WindowInfo, &'static Window), NtbError> {
        let info = window(&self.windows, index)?;
        let registers = WINDOWS.get(index).ok_or(NtbError::NoWindow {
            window: index,
            windows: WINDOWS.len(),
        })?;
        Ok((info, registers))
    }

    /// Sets both limits `bytes` behind the start of their BARs.
    fn set_limits(
        &self,
        info: &WindowInfo,
        reg: &Window,
        bytes: u64,
        hint: &'static str,
    ) -> Result<(), NtbError> {
        let bar = self.function().bar_address(info.bar)?;
        self.regs.write_back(reg.limit, bar.wrapping_add(bytes), hint)?;
        let external = self.regs.read_live(reg.external_bar)? & !0xF;
        self.regs
            .write_back(reg.external_limit, external.wrapping_add(bytes), hint)
    }
}

fn topology(function: &dyn PciFunction) -> Result<Role, NtbError> {
    let ppd = config::read8(function, r::cfg::PPD.offset())?;
    let wrong = |found: String| NtbError::WrongMode {
        device: function.name().to_owned(),
        found,
        remedy: "In the firmware set-up, choose 'NTB to NTB' for this PCIe port on both hosts, with BARs not split, \
                 upstream on one and downstream on the other",
    };
    if ppd == u8::MAX {
        return Err(NtbError::Gone {
            device: function.name().to_owned(),
            register: r::cfg::PPD.name(),
        });
    }
    if ppd & r::PPD_SPLIT != 0 {
        return Err(wrong(format!(
            "PPD is {ppd:#x}: its BARs are split into 32-bit halves"
        )));
    }
    match ppd & r::PPD_MASK {
        r::PPD_B2B_USD => Ok(Role::Upstream),
        r::PPD_B2B_DSD => Ok(Role::Downstream),
        other if other & 3 == r::PPD_CONN_TRANSPARENT => {
            Err(wrong(format!("PPD is {ppd:#x}: a transparent port")))
        }
        other if other & 3 == r::PPD_CONN_RP => Err(wrong(format!("PPD is {ppd:#x}: NTB to root port"))),
        _ => Err(wrong(format!("PPD is {ppd:#x}, which no manual lists"))),
    }
}

impl NtbPort for IntelGen3 {
    fn family(&self) -> Family {
        Family::IntelSkx
    }

    fn function(&self) -> &Arc<dyn PciFunction> {
        self.regs.function()
    }

    fn role(&self) -> Role {
        self.role
    }

    fn enable_link(&self) -> Result<(), NtbError> {
        self.regs.write(r::SPCICMD, r::SPCICMD_VALUE)?;
        let control = self.regs.read_live(r::NTBCNTL)?;
        let control = control & !(r::NTBCNTL_LINK_DISABLE | r::NTBCNTL_CFG_LOCK) | r::NTBCNTL_SNOOP;
        self.regs
            .write_back(r::NTBCNTL, control, "the link was not enabled")
    }

    fn disable_link(&self) -> Result<(), NtbError> {
        let control = self.regs.read_live(r::NTBCNTL)?;
        let control = control & !r::NTBCNTL_SNOOP | r::NTBCNTL_LINK_DISABLE | r::NTBCNTL_CFG_LOCK;
        self.regs
            .write_back(r::NTBCNTL, control, "the link was not taken down")
    }

    fn link(&self) -> Result<LinkState, NtbError> {
        let status = config::read16(&**self.function(), r::cfg::LINK_STATUS.offset())?;
        if status == u16::MAX {
            return Err(self.regs.gone(r::cfg::LINK_STATUS.name()));
        }
        if status & r::LINK_STATUS_ACTIVE == 0 {
            return Ok(LinkState::Down);
        }
        Ok(LinkState::Up(LinkRate::from_bits(status)))
    }

    fn take_link_report(&self) -> Result<LinkReport, NtbError> {
        // In this order, so that a change after the read of the state raises a new event.
        let interrupts = self.events.link.take()?;
        self.regs.clear(r::IM_INT_STATUS, r::LINK_BITS)?;
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
        self.regs.write_back(
            reg.base,
            iova,
            "the address needs more alignment or bits than the hardware keeps",
        )?;
        self.set_limits(info, reg, bytes, "the BAR is not where the kernel says it is")
    }

    fn close_window(&self, window: usize) -> Result<(), NtbError> {
        let (info, reg) = self.registers(window)?;
        let hint = "the window could not be closed";
        self.regs.write_back(reg.base, INTEL_XBASE_CLOSED, hint)?;
        self.set_limits(info, reg, 0, hint)
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
        self.regs.clear_now(r::IM_INT_STATUS, bits, r::NTBCNTL)
    }

    fn mask_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        check_doorbells(bits, self.doorbell_bits())?;
        let mut mask = self.events.mask();
        self.regs.write_now(r::IM_INT_DISABLE, *mask | bits, r::NTBCNTL)?;
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
        self.regs
            .read_witnessed(scratchpad(r::IM_SPAD, index)?, r::NTBCNTL)
    }

    fn set_scratchpad(&self, index: usize, value: u32) -> Result<(), NtbError> {
        Ok(self.regs.write(scratchpad(r::IM_SPAD, index)?, value)?)
    }

    fn peer_scratchpad(&self, index: usize) -> Result<u32, NtbError> {
        let value = self.regs.read(scratchpad(r::B2B_SPAD, index)?)?;
        peer_answered(self, value)
    }

    fn set_peer_scratchpad(&self, index: usize, value: u32) -> Result<(), NtbError> {
        Ok(self.regs.write(scratchpad(r::B2B_SPAD, index)?, value)?)
    }

    fn quiesce(&self) -> Result<(), NtbError> {
        self.regs.read_live(r::NTBCNTL)?;
        self.route_interrupts()?;
        self.mask_doorbells(r::DOORBELL_MASK)?;
        self.disable_link()?;
        for window in 0..self.windows.len() {
            self.close_window(window)?;
        }
        for spad in r::IM_SPAD.iter() {
            self.regs.write(spad, 0)?;
        }
        self.regs
            .clear(r::IM_INT_STATUS, r::LINK_BITS | r::DOORBELL_MASK)?;
        self.events.doorbell.take()?;
        self.events.link.take()?;
        Ok(())
    }
}
