//! A device held through VFIO as a [`PciFunction`].

use std::{
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::fs::FileExt,
    },
    sync::{Arc, PoisonError},
};

use super::{
    super::{
        Bar, BarInfo, BarMap, CacheType, DmaMemory, Function, Isolation, Notice, PciError, PciFunction,
        ResetPlan, check_reset, config,
        iova::IovaRange,
        machine::PciAddress,
        sorted_vectors,
        vfio_user::proto::{self, irq},
    },
    Vfio,
    explain::{dma_errno, explain_map, physical_address},
    ioctl,
    open::Keeper,
};
use crate::hw::regs::Width;

impl PciFunction for Vfio {
    fn name(&self) -> &str {
        &self.name
    }

    fn config_size(&self) -> u32 {
        self.config_size
    }

    fn raw_config_read(&self, offset: u32, data: &mut [u8]) -> Result<(), PciError> {
        let at = self.config_offset + u64::from(offset);
        let read = self.opened.file.read_exact_at(data, at);
        read.map_err(|e| self.access_error("a read of configuration space", e))
    }

    fn raw_config_write(&self, offset: u32, data: &[u8]) -> Result<(), PciError> {
        let at = self.config_offset + u64::from(offset);
        let written = self.opened.file.write_all_at(data, at);
        written.map_err(|e| self.access_error("a write of configuration space", e))
    }

    fn bar(&self, bar: Bar) -> Option<&BarInfo> {
        self.bars.get(bar.index())?.as_ref().map(|f| &f.info)
    }

    fn bar_address(&self, bar: Bar) -> Result<u64, PciError> {
        // VFIO shows a virtual BAR register; the bridge compares with the real one.
        let resource = self.device.resource(bar).ok_or_else(|| PciError::NoBar {
            bar,
            device: self.name.clone(),
        })?;
        Ok(resource.start)
    }

    fn raw_read(&self, bar: Bar, offset: u64, bytes: u32) -> Result<u64, PciError> {
        if let Some(map) = self.registers.as_ref().filter(|m| m.bar() == bar) {
            match load(map, offset, bytes) {
                Err(PciError::Hole { .. }) => {}
                other => return other,
            }
        }
        let mut value = [0; 8];
        if let Some(part) = value.get_mut(..bytes as usize) {
            self.bar_read(bar, offset, part)?;
        }
        Ok(u64::from_le_bytes(value))
    }

    fn raw_write(&self, bar: Bar, offset: u64, bytes: u32, value: u64) -> Result<(), PciError> {
        if let Some(map) = self.registers.as_ref().filter(|m| m.bar() == bar) {
            match store(map, offset, bytes, value) {
                Err(PciError::Hole { .. }) => {}
                other => return other,
            }
        }
        let value = value.to_le_bytes();
        self.bar_write(bar, offset, value.get(..bytes as usize).unwrap_or(&value))
    }

    fn bar_read(&self, bar: Bar, offset: u64, data: &mut [u8]) -> Result<(), PciError> {
        self.check_access(bar, offset, data.len() as u64)?;
        let at = self.fix_uncached(bar)?.offset + offset;
        let read = self.opened.file.read_exact_at(data, at);
        read.map_err(|e| self.access_error("a read of a BAR", e))
    }

    fn bar_write(&self, bar: Bar, offset: u64, data: &[u8]) -> Result<(), PciError> {
        self.check_access(bar, offset, data.len() as u64)?;
        let at = self.fix_uncached(bar)?.offset + offset;
        let written = self.opened.file.write_all_at(data, at);
        written.map_err(|e| self.access_error("a write of a BAR", e))
    }

    fn map_bar(self: Arc<Self>, bar: Bar, wanted: CacheType) -> Result<BarMap, PciError> {
        match wanted {
            CacheType::WriteCombining => self.map_combining(bar),
            CacheType::Uncached => self.map_uncached(bar),
            CacheType::WriteBack => Err(self.no_mapping(
                bar,
                wanted,
                "only emulated devices have write-back BARs".to_owned(),
            )),
        }
    }

    fn vectors(&self) -> u16 {
        self.vectors
    }

    fn set_vectors(&self, vectors: &[(u16, BorrowedFd<'_>)]) -> Result<(), PciError> {
        let sorted = sorted_vectors(vectors, self.vectors)?;
        let mut enabled = self.enabled.lock().unwrap_or_else(PoisonError::into_inner);
        let device = self.opened.file.as_fd();
        // Kernels without dynamic MSI-X cannot grow a set in place.
        if *enabled {
            let off = ioctl::set_vectors(device, irq::MSIX, &[]);
            off.map_err(|e| self.access_error("turning the interrupts off", e))?;
            *enabled = false;
        }
        let Some((last, _)) = sorted.last() else {
            return Ok(());
        };
        let mut fds = vec![-1; usize::from(*last) + 1];
        for (vector, fd) in &sorted {
            if let Some(slot) = fds.get_mut(usize::from(*vector)) {
                *slot = fd.as_raw_fd();
            }
        }
        let on = ioctl::set_vectors(device, irq::MSIX, &fds);
        on.map_err(|e| self.access_error("connecting the interrupts", e))?;
        *enabled = true;
        Ok(())
    }

    fn set_notice(&self, notice: Notice, event: Option<BorrowedFd<'_>>) -> Result<bool, PciError> {
        let device = self.opened.file.as_fd();
        let index = notice.interrupt();
        if ioctl::vectors(device, index).unwrap_or(0) == 0 {
            return Ok(false);
        }
        let fds: Vec<_> = event.iter().map(AsRawFd::as_raw_fd).collect();
        let done = ioctl::set_vectors(device, index, &fds);
        done.map_err(|e| self.access_error("connecting a notice", e))?;
        Ok(true)
    }

    fn iova_ranges(&self) -> Result<Vec<IovaRange>, PciError> {
        Ok(self.ranges.clone())
    }

    fn dma_page(&self) -> u64 {
        self.page
    }

    fn isolation(&self) -> Isolation {
        self.opened.isolation()
    }

    fn own_address(&self, memory: &DmaMemory<'_>) -> Result<Option<u64>, PciError> {
        match self.opened.keeper {
            Keeper::NoIommu { .. } => physical_address(&self.machine, memory).map(Some),
            _ => Ok(None),
        }
    }

    fn dma_map(&self, memory: &DmaMemory<'_>, iova: u64) -> Result<(), PciError> {
        let bytes = memory.bytes();
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        let address = std::ptr::with_exposed_provenance_mut::<u8>(memory.address());
        let result = match &self.opened.keeper {
            // SAFETY: whoever made a `DmaMemory` vouches that no reference to it exists while it is mapped: regions
            // never give one out, and `DmaMemory::raw` demands it.
            Keeper::Group { container, .. } => unsafe { container.vfio_dma_map(iova, length, address) },
            // SAFETY: as above.
            Keeper::Iommufd { space, .. } => unsafe { space.vfio_dma_map(iova, length, address) },
            Keeper::NoIommu { .. } => return Ok(()),
        };
        result.map_err(|e| explain_map(&self.machine, bytes, dma_errno(&e)))
    }

    fn dma_unmap(&self, iova: u64, bytes: u64) -> Result<(), PciError> {
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        let result = match &self.opened.keeper {
            Keeper::Group { container, .. } => container.vfio_dma_unmap(iova, length),
            Keeper::Iommufd { space, .. } => space.vfio_dma_unmap(iova, length),
            Keeper::NoIommu { .. } => return Ok(()),
        };
        result.map_err(|e| PciError::io(format!("unmapping {bytes} bytes ({e})"), dma_errno(&e)))
    }

    fn reset_plan(&self) -> Result<ResetPlan, PciError> {
        let device = self.opened.file.as_fd();
        let flags = ioctl::device_flags(device).map_err(|e| self.access_error("asking for the device", e))?;
        if flags & proto::DEVICE_RESET != 0 {
            return Ok(ResetPlan {
                method: Some("reset of the function alone".to_owned()),
                also: Vec::new(),
            });
        }
        let hits = ioctl::hot_reset_hits(device).unwrap_or_default();
        let own = self.device.address();
        let also: Vec<String> = hits
            .iter()
            .filter_map(|d| {
                let text = format!(
                    "{:04x}:{:02x}:{:02x}.{}",
                    d.segment,
                    d.bus,
                    d.devfn >> 3,
                    d.devfn & 7
                );
                let address: PciAddress = text.parse().ok().filter(|a| *a != own)?;
                let driver = self.machine.device(address).and_then(|d| d.driver());
                Some(format!(
                    "{address} ({})",
                    driver.map_or("no driver".to_owned(), |d| format!("driver {d}"))
                ))
            })
            .collect();
        Ok(ResetPlan {
            method: (!also.is_empty()).then(|| "reset of the whole bus".to_owned()),
            also,
        })
    }

    fn reset(&self) -> Result<(), PciError> {
        check_reset(&self.name, &self.reset_plan()?)?;
        if let Some(file) = self.bars.iter().flatten().find(|f| {
            let fixed = f.fixed.lock().unwrap_or_else(PoisonError::into_inner);
            fixed.combining.strong_count() > 0
        }) {
            let why =
                "it is mapped write-combining, which the kernel does not take away before a reset".to_owned();
            return Err(self.no_mapping(file.info.bar, CacheType::WriteCombining, why));
        }
        // The kernel restores configuration space after a reset, bus mastering included.
        config::set_bus_master(self, false)?;
        let done = ioctl::reset(self.opened.file.as_fd());
        done.map_err(|e| self.access_error("reset", e))?;
        config::wake(self)
    }
}

fn load(map: &BarMap, offset: u64, bytes: u32) -> Result<u64, PciError> {
    match bytes {
        1 => map.load::<u8>(offset).map(Width::to_u64),
        2 => map.load::<u16>(offset).map(Width::to_u64),
        4 => map.load::<u32>(offset).map(Width::to_u64),
        _ => map.load::<u64>(offset),
    }
}

fn store(map: &BarMap, offset: u64, bytes: u32, value: u64) -> Result<(), PciError> {
    match bytes {
        1 => map.store(offset, value as u8),
        2 => map.store(offset, value as u16),
        4 => map.store(offset, value as u32),
        _ => map.store(offset, value),
    }
}
