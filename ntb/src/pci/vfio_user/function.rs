//! A served device as a [`PciFunction`].

use std::{
    collections::BTreeSet,
    os::fd::BorrowedFd,
    sync::{Arc, PoisonError},
};

use zerocopy::IntoBytes;

use super::{
    super::{
        Bar, BarInfo, BarMap, CacheType, DmaMemory, Isolation, Notice, PciError, PciFunction, ResetPlan,
        check_reset, config, iova::IovaRange, sorted_vectors,
    },
    VfioUser,
    proto::{self, Command, irq, region},
    protocol_error,
    socket::MAX_FDS,
};

impl PciFunction for VfioUser {
    fn name(&self) -> &str {
        &self.name
    }

    fn config_size(&self) -> u32 {
        self.config_size
    }

    fn raw_config_read(&self, offset: u32, data: &mut [u8]) -> Result<(), PciError> {
        self.read_region(region::CONFIG, offset.into(), data)
    }

    fn raw_config_write(&self, offset: u32, data: &[u8]) -> Result<(), PciError> {
        self.write_region(region::CONFIG, offset.into(), data, true)
    }

    fn bar(&self, bar: Bar) -> Option<&BarInfo> {
        self.bars.get(bar.index())?.as_ref().map(|r| &r.info)
    }

    fn bar_address(&self, bar: Bar) -> Result<u64, PciError> {
        config::bar_address(self, bar)
    }

    fn raw_read(&self, bar: Bar, offset: u64, bytes: u32) -> Result<u64, PciError> {
        let mut value = [0; 8];
        if let Some(part) = value.get_mut(..bytes as usize) {
            self.read_region(bar.index() as u32, offset, part)?;
        }
        Ok(u64::from_le_bytes(value))
    }

    fn raw_write(&self, bar: Bar, offset: u64, bytes: u32, value: u64) -> Result<(), PciError> {
        let value = value.to_le_bytes();
        let part = value.get(..bytes as usize).unwrap_or(&value);
        self.write_region(bar.index() as u32, offset, part, true)
    }

    fn bar_read(&self, bar: Bar, offset: u64, data: &mut [u8]) -> Result<(), PciError> {
        self.read_region(bar.index() as u32, offset, data)
    }

    fn bar_write(&self, bar: Bar, offset: u64, data: &[u8]) -> Result<(), PciError> {
        self.write_region(bar.index() as u32, offset, data, true)
    }

    fn bar_post(&self, bar: Bar, offset: u64, data: &[u8]) -> Result<(), PciError> {
        self.write_region(bar.index() as u32, offset, data, false)
    }

    fn map_bar(self: Arc<Self>, bar: Bar, wanted: CacheType) -> Result<BarMap, PciError> {
        let region = self.bars.get(bar.index()).and_then(Option::as_ref);
        let region = region.ok_or_else(|| PciError::NoBar {
            bar,
            device: self.name.clone(),
        })?;
        let areas = region.map()?;
        if areas.is_empty() {
            return Err(PciError::NoSuchMapping {
                bar,
                device: self.name.clone(),
                wanted,
                why: "the server traps every access to it; use region writes".to_owned(),
            });
        }
        Ok(BarMap::new(bar, CacheType::WriteBack, areas, Arc::clone(&self)))
    }

    fn vectors(&self) -> u16 {
        self.vectors
    }

    fn set_vectors(&self, vectors: &[(u16, BorrowedFd<'_>)]) -> Result<(), PciError> {
        let sorted = sorted_vectors(vectors, self.vectors)?;
        let now: BTreeSet<u16> = sorted.iter().map(|(v, _)| *v).collect();
        let before = {
            let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut connection.connected, now.clone())
        };
        if sorted.is_empty() {
            let flags = proto::IRQ_SET_DATA_NONE | proto::IRQ_SET_ACTION_TRIGGER;
            return if before.is_empty() {
                Ok(())
            } else {
                self.set_irqs(irq::MSIX, flags, 0, 0, &[])
            };
        }
        let flags = proto::IRQ_SET_DATA_EVENTFD | proto::IRQ_SET_ACTION_TRIGGER;
        for gone in before.difference(&now) {
            self.set_irqs(irq::MSIX, flags, *gone, 1, &[])?;
        }
        // Runs of consecutive vectors, no longer than the server can take descriptors.
        let limit = usize::try_from(self.server.max_fds)
            .unwrap_or(MAX_FDS)
            .clamp(1, MAX_FDS);
        let mut run: Vec<BorrowedFd<'_>> = Vec::new();
        let mut start = 0;
        for (vector, fd) in sorted {
            if run.len() == limit || (!run.is_empty() && vector != start + run.len() as u16) {
                self.connect_run(start, &run)?;
                run.clear();
            }
            if run.is_empty() {
                start = vector;
            }
            run.push(fd);
        }
        self.connect_run(start, &run)
    }

    fn set_notice(&self, notice: Notice, event: Option<BorrowedFd<'_>>) -> Result<bool, PciError> {
        let index = notice.interrupt();
        if self.vectors_of(index)? == 0 {
            return Ok(false);
        }
        match event {
            Some(fd) => {
                let flags = proto::IRQ_SET_DATA_EVENTFD | proto::IRQ_SET_ACTION_TRIGGER;
                self.set_irqs(index, flags, 0, 1, &[fd])?;
            }
            None => {
                let flags = proto::IRQ_SET_DATA_NONE | proto::IRQ_SET_ACTION_TRIGGER;
                self.set_irqs(index, flags, 0, 0, &[])?;
            }
        }
        Ok(true)
    }

    fn iova_ranges(&self) -> Result<Vec<IovaRange>, PciError> {
        // As an IOMMU with 48 bits on x86 reports them, so that the interrupt window stays a hole here too.
        Ok(vec![
            IovaRange {
                start: 0,
                last: 0xFEDF_FFFF,
            },
            IovaRange {
                start: 0xFEF0_0000,
                last: (1 << 48) - 1,
            },
        ])
    }

    fn dma_page(&self) -> u64 {
        4096
    }

    fn isolation(&self) -> Isolation {
        Isolation::Software
    }

    fn dma_map(&self, memory: &DmaMemory<'_>, iova: u64) -> Result<(), PciError> {
        let (fd, offset) = memory.descriptor().ok_or_else(|| PciError::Unsupported {
            what: "mapping memory that has no descriptor".to_owned(),
            device: self.name.clone(),
        })?;
        let ask = proto::DmaMap {
            argsz: size_of::<proto::DmaMap>() as u32,
            flags: proto::DMA_READ | proto::DMA_WRITE,
            offset,
            iova,
            size: memory.bytes(),
        };
        self.call(Command::DmaMap, ask.as_bytes(), &[], &[fd]).map(drop)
    }

    fn dma_unmap(&self, iova: u64, bytes: u64) -> Result<(), PciError> {
        let ask = proto::DmaUnmap {
            argsz: size_of::<proto::DmaUnmap>() as u32,
            flags: 0,
            iova,
            size: bytes,
        };
        let reply = self.call(Command::DmaUnmap, ask.as_bytes(), &[], &[])?;
        match proto::split::<proto::DmaUnmap>(&reply.payload) {
            Some((done, _)) if (done.iova, done.size) == (iova, bytes) => Ok(()),
            _ => Err(protocol_error("an unmap of another range than asked for")),
        }
    }

    fn reset_plan(&self) -> Result<ResetPlan, PciError> {
        Ok(ResetPlan {
            method: self.resettable.then(|| "device reset of the server".to_owned()),
            also: Vec::new(),
        })
    }

    fn reset(&self) -> Result<(), PciError> {
        check_reset(&self.name, &self.reset_plan()?)?;
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        connection
            .call(
                &self.name,
                Command::DeviceReset,
                &[],
                &[],
                &[],
                self.timeouts.reset,
            )
            .map(drop)
    }
}
