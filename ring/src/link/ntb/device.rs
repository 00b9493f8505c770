//! An open port, and the memory behind its windows.

use std::{os::fd::AsFd, sync::Arc};

use ntb::{
    address::{OpenOptions, PortAddress},
    hw::{self, NtbError, NtbPort},
    pci::{DmaSpace, EventFd, Notice, PciError, config},
};
use ntb_mem::{
    line::LINE_BYTES,
    region::{Region, RegionError},
};

use super::{
    NtbOptions,
    error::link_error,
    health::Health,
    joined::{capacity, ordinary},
};
use crate::link::{LinkError, REGISTERS, ends::memory_error};

/// An open port.
#[derive(Debug)]
pub(super) struct Device {
    // Fields drop in order: the port quiets the device, which nothing else holds then.
    pub(super) space: Arc<DmaSpace>,
    pub(super) port: Arc<dyn NtbPort>,
    pub(super) health: Health,
    /// Signalled when the kernel, or whoever serves the device, wants it back.
    wanted_back: EventFd,
}

impl Device {
    pub(super) fn open(address: &PortAddress, options: &OpenOptions) -> Result<Self, NtbError> {
        let function = address.open(options)?;
        let port = hw::open(&function)?;
        if port.scratchpads() < REGISTERS {
            return Err(NtbError::TooSmall {
                device: function.name().to_owned(),
                what: "the number of scratchpads",
                needed: REGISTERS as u64,
                available: port.scratchpads() as u64,
            });
        }
        let space = DmaSpace::new(Arc::clone(&function))?;
        let health = Health::new(&*function);
        let wanted_back = EventFd::new()?;
        // Whoever holds a device on and on keeps the kernel from unplugging it, unbinding it and shutting down.
        function.set_notice(Notice::Release, Some(wanted_back.as_fd()))?;
        Ok(Self {
            space,
            port,
            health,
            wanted_back,
        })
    }

    /// An error when the device is to be let go.
    pub(super) fn is_ours(&self) -> Result<(), NtbError> {
        match self.wanted_back.take()? {
            0 => Ok(()),
            _ => Err(NtbError::Pci(PciError::Gone {
                what: "it was wanted back, to be unplugged or for another driver, and was let go".to_owned(),
            })),
        }
    }

    /// Whether the function has been reset behind the driver, by a power cycle or by whoever may: its registers answer then,
    /// and nothing works.
    pub(super) fn is_as_started(&self) -> Result<(), NtbError> {
        let function = &**self.port.function();
        if config::bus_master(function)? {
            return Ok(());
        }
        Err(NtbError::NotTaken {
            device: function.name().to_owned(),
            register: "bus master enable",
            wrote: 1,
            read: 0,
            hint: "the function was reset by somebody else, and is started anew",
        })
    }
}

/// The memory that the peer writes: as much as asked for, as far as the windows show it.
pub(super) fn allocate(port: &dyn NtbPort, options: &NtbOptions) -> Result<(Arc<Region>, u64), LinkError> {
    let windows = ordinary(port.windows(), options.export.is_some());
    if let (Some(memory), false) = (&options.export, windows.iter().any(|info| info.bytes > 0)) {
        return Err(LinkError {
            name: "export-needs-window",
            exit: 3,
            what: format!(
                "{} is to be shown to the peer, and {} has no window to spare for it: the first one is the session's own",
                memory.kind(),
                port.function().name()
            ),
            errno: None,
        });
    }
    let asked = match options.export {
        // There is no gap between the two.
        Some(_) => capacity(windows),
        None => options.window_bytes,
    };
    let unit = windows.iter().map(|info| info.size_align).max().unwrap_or(1);
    let bytes = match asked.is_multiple_of(LINE_BYTES as u64) {
        // Zero stays zero, for the error.
        true => asked.min(capacity(windows)).next_multiple_of(unit.max(1)),
        false => asked,
    };
    let region = Region::allocate(bytes, options.pages).map_err(|e| match e {
        RegionError::BadSize { .. } => memory_error(&e),
        source => link_error(port.function().name(), &NtbError::Memory { bytes, source }),
    })?;
    Ok((Arc::new(region), bytes))
}
