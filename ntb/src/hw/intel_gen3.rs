//! Intel Skylake and Cascade Lake.
//!
//! Sequences follow the Linux driver `ntb_hw_gen3`. Topology and link status are in configuration space; an inbound
//! window has a second limit register on the external side.

use std::sync::Arc;

use super::{
    Family, LinkState, NtbError, Role, WindowInfo,
    access::Regs,
    inferred::INTEL_XBASE_CLOSED,
    latched::{Core, Hardware, Latched},
    mode,
    regs::{Reg, Rw, intel_gen3 as r},
};
use crate::pci::{
    Bar, PciFunction,
    config::{self, LinkRate},
};

#[derive(Debug)]
pub(super) enum IntelGen3 {}

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

pub(super) fn open(function: &Arc<dyn PciFunction>, family: Family) -> Result<Latched<IntelGen3>, NtbError> {
    let regs = Regs::new(Arc::clone(function), family)?;
    let role = topology(&**function)?;
    let align = |bytes| bytes;
    let core = Core::new(regs, family, role, &[Bar::B2, Bar::B4], align, r::DOORBELL_MASK)?;
    Ok(Latched::new(core))
}

fn topology(function: &dyn PciFunction) -> Result<Role, NtbError> {
    let ppd = config::read8(function, r::cfg::PPD.offset())?;
    if ppd == u8::MAX {
        return Err(NtbError::Gone {
            device: function.name().to_owned(),
            register: r::cfg::PPD.name(),
        });
    }
    mode::intel_gen3(ppd).map_err(|e| e.of(function.name()))
}

/// Sets both limits `bytes` behind the start of their BARs.
fn set_limits(
    core: &Core,
    info: &WindowInfo,
    reg: &Window,
    bytes: u64,
    hint: &'static str,
) -> Result<(), NtbError> {
    let bar = core.regs.function().bar_address(info.bar)?;
    core.regs.write_back(reg.limit, bar.wrapping_add(bytes), hint)?;
    let external = core.regs.read_live(reg.external_bar)? & !0xF;
    core.regs
        .write_back(reg.external_limit, external.wrapping_add(bytes), hint)
}

impl Hardware for IntelGen3 {
    const DOORBELLS: u64 = r::DOORBELL_MASK;
    const SPADS: usize = r::SPADS;
    const SPADS_ACROSS: bool = true;

    fn alive(core: &Core) -> Result<(), NtbError> {
        core.regs.read_live(r::NTBCNTL).map(drop)
    }

    fn connect_interrupts(core: &Core) -> Result<(), NtbError> {
        core.regs
            .write(r::IM_INT_DISABLE, r::DOORBELL_MASK | r::LINK_BITS)?;
        core.route_to_two_vectors(r::INTVEC.iter(), r::LINK_BIT)
    }

    fn enable_link(core: &Core) -> Result<(), NtbError> {
        core.regs.write(r::SPCICMD, r::SPCICMD_VALUE)?;
        let control = core.regs.read_live(r::NTBCNTL)?;
        let control = control & !(r::NTBCNTL_LINK_DISABLE | r::NTBCNTL_CFG_LOCK) | r::NTBCNTL_SNOOP;
        core.regs
            .write_back(r::NTBCNTL, control, "the link was not enabled")
    }

    fn disable_link(core: &Core) -> Result<(), NtbError> {
        let control = core.regs.read_live(r::NTBCNTL)?;
        let control = control & !r::NTBCNTL_SNOOP | r::NTBCNTL_LINK_DISABLE | r::NTBCNTL_CFG_LOCK;
        core.regs
            .write_back(r::NTBCNTL, control, "the link was not taken down")
    }

    fn link(core: &Core) -> Result<LinkState, NtbError> {
        let status = config::read16(&**core.regs.function(), r::cfg::LINK_STATUS.offset())?;
        if status == u16::MAX {
            return Err(core.regs.gone(r::cfg::LINK_STATUS.name()));
        }
        if status & r::LINK_STATUS_ACTIVE == 0 {
            return Ok(LinkState::Down);
        }
        Ok(LinkState::Up(LinkRate::from_bits(status)))
    }

    fn acknowledge_link(core: &Core) -> Result<bool, NtbError> {
        core.regs.clear(r::IM_INT_STATUS, r::LINK_BITS)?;
        Ok(false)
    }

    fn open_window(core: &Core, window: usize, iova: u64, bytes: u64) -> Result<(), NtbError> {
        let (info, reg) = core.window(window, &WINDOWS)?;
        core.regs.write_back(
            reg.base,
            iova,
            "the address needs more alignment or bits than the hardware keeps",
        )?;
        set_limits(
            core,
            info,
            reg,
            bytes,
            "the BAR is not where the kernel says it is",
        )
    }

    fn close_window(core: &Core, window: usize) -> Result<(), NtbError> {
        let (info, reg) = core.window(window, &WINDOWS)?;
        let hint = "the window could not be closed";
        core.regs.write_back(reg.base, INTEL_XBASE_CLOSED, hint)?;
        set_limits(core, info, reg, 0, hint)
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
            true => r::B2B_SPAD.get(index),
            false => r::IM_SPAD.get(index),
        }
    }
}
