//! Intel Ice Lake, Sapphire Rapids, Emerald Rapids, Granite Rapids.
//!
//! Sequences follow the Linux driver `ntb_hw_gen4`, which is known to work on the hardware.

use std::sync::Arc;

use super::{
    Family, LinkState, NtbError, Role,
    access::Regs,
    inferred::INTEL_XBASE_CLOSED,
    latched::{Core, Hardware, Latched},
    mode,
    regs::{Reg, Rw, intel_gen4 as r},
};
use crate::pci::{Bar, PciFunction, config::LinkRate};

#[derive(Debug)]
pub(super) enum IntelGen4 {}

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

pub(super) fn open(function: &Arc<dyn PciFunction>, family: Family) -> Result<Latched<IntelGen4>, NtbError> {
    let regs = Regs::new(Arc::clone(function), family)?;
    let role = topology(&regs, family)?;
    let align = |bytes| if family == Family::IntelIcx { bytes } else { 4096 };
    let core = Core::new(regs, family, role, &[Bar::B2, Bar::B4], align, r::DOORBELL_MASK)?;
    Ok(Latched::new(core))
}

fn has_ltr(core: &Core) -> bool {
    core.family != Family::IntelIcx
}

/// Which end of the link the port is; anything else cannot be used.
fn topology(regs: &Regs, family: Family) -> Result<Role, NtbError> {
    let ppd1 = regs.read_live(r::PPD1)?;
    mode::intel_gen4(family, ppd1).map_err(|e| e.of(regs.function().name()))
}

impl Hardware for IntelGen4 {
    const DOORBELLS: u64 = r::DOORBELL_MASK;
    const SPADS: usize = r::SPADS;
    const SPADS_ACROSS: bool = true;

    fn alive(core: &Core) -> Result<(), NtbError> {
        core.regs.read_live(r::PPD1).map(drop)
    }

    fn connect_interrupts(core: &Core) -> Result<(), NtbError> {
        core.regs
            .write(r::IM_INT_DISABLE, r::DOORBELL_MASK | 1 << r::LINK_BIT)?;
        core.route_to_two_vectors(r::INTVEC.iter(), r::LINK_BIT)
    }

    fn enable_link(core: &Core) -> Result<(), NtbError> {
        if has_ltr(core) {
            core.regs.write(r::LTR_ACTIVE, r::LTR_ACTIVE_VALUE)?;
            core.regs.write(r::LTR_IDLE, r::LTR_IDLE_VALUE)?;
            core.regs.write(r::LTR_SWSEL, r::LTR_SWSEL_ACTIVE)?;
        }
        core.regs.write(r::NTBCNTL, r::NTBCNTL_SNOOP)?;
        let control = core.regs.read_live(r::LINK_CTRL)?;
        core.regs.write(r::LINK_CTRL, control & !r::LINK_CTRL_DISABLE)?;
        let wrote = core.regs.read_live(r::PPD0)? | r::PPD0_TRAIN;
        core.regs.write(r::PPD0, wrote)?;
        let read = core.regs.read_live(r::PPD0)?;
        if read & r::PPD0_TRAIN == 0 {
            return Err(NtbError::TrainingRefused {
                device: core.regs.function().name().to_owned(),
                register: r::PPD0.name(),
                wrote: wrote.into(),
                read: read.into(),
            });
        }
        Ok(())
    }

    fn disable_link(core: &Core) -> Result<(), NtbError> {
        let snoop = core.regs.read_live(r::NTBCNTL)?;
        core.regs.write(r::NTBCNTL, snoop & !r::NTBCNTL_SNOOP)?;
        let control = core.regs.read_live(r::LINK_CTRL)?;
        core.regs.write_back(
            r::LINK_CTRL,
            control | r::LINK_CTRL_DISABLE,
            "the link was not taken down",
        )?;
        if has_ltr(core) {
            core.regs.write(r::LTR_SWSEL, r::LTR_SWSEL_IDLE)?;
        }
        Ok(())
    }

    fn link(core: &Core) -> Result<LinkState, NtbError> {
        let status = core.regs.read_live(r::LINK_STATUS)?;
        if status & r::LINK_STATUS_ACTIVE == 0 {
            return Ok(LinkState::Down);
        }
        Ok(LinkState::Up(LinkRate::from_bits(status)))
    }

    fn acknowledge_link(core: &Core) -> Result<bool, NtbError> {
        // The slot's bit holds the interrupt's: it goes first.
        core.regs.clear(r::SLOTSTS, r::SLOTSTS_DLLSCS)?;
        core.regs.clear(r::IM_INT_STATUS, 1 << r::LINK_BIT)?;
        Ok(false)
    }

    fn open_window(core: &Core, window: usize, iova: u64, bytes: u64) -> Result<(), NtbError> {
        let (info, reg) = core.window(window, &WINDOWS)?;
        let bar = core.regs.function().bar_address(info.bar)?;
        core.regs.write_back(
            reg.base,
            iova,
            "the address needs more alignment or bits than the hardware keeps",
        )?;
        core.regs.write_back(
            reg.limit,
            bar.wrapping_add(bytes),
            "the BAR is not where the kernel says it is",
        )?;
        if core.family == Family::IntelIcx {
            // The size is not zero: checked above.
            let log2 = bytes.checked_ilog2().unwrap_or(0) as u16;
            core.regs
                .write_back(reg.index, log2, "the window's size was not taken")?;
        }
        Ok(())
    }

    fn close_window(core: &Core, window: usize) -> Result<(), NtbError> {
        let (info, reg) = core.window(window, &WINDOWS)?;
        let bar = core.regs.function().bar_address(info.bar)?;
        let hint = "the window could not be closed";
        core.regs.write_back(reg.base, INTEL_XBASE_CLOSED, hint)?;
        core.regs.write_back(reg.limit, bar, hint)?;
        if core.family == Family::IntelIcx {
            core.regs.write(reg.index, r::BASEIDX_CLOSED)?;
        }
        Ok(())
    }

    fn ring(core: &Core, bits: u64) -> Result<(), NtbError> {
        core.ring_each(r::IM_DOORBELL.iter(), bits)
    }

    fn latched(core: &Core) -> Result<u64, NtbError> {
        core.regs.read_live(r::IM_INT_STATUS)
    }

    fn unlatch(core: &Core, bits: u64) -> Result<(), NtbError> {
        Ok(core.regs.clear(r::IM_INT_STATUS, bits)?)
    }

    fn write_mask(core: &Core, mask: u64) -> Result<(), NtbError> {
        Ok(core.regs.write(r::IM_INT_DISABLE, mask)?)
    }

    fn scratchpad(_: &Core, index: usize, peers: bool) -> Option<Reg<u32, Rw>> {
        match peers {
            true => r::EM_SPAD.get(index),
            false => r::IM_SPAD.get(index),
        }
    }
}
