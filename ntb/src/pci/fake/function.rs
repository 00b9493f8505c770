//! The fake as a [`PciFunction`].

use std::{io, os::fd::BorrowedFd, sync::Arc};

use ntb_mem::region::Region;

use super::{
    super::{
        Bar, BarInfo, BarMap, CacheType, DmaMemory, Function, Isolation, MappedArea, Notice, PciError,
        PciFunction, ResetPlan, check_reset, config, iova::IovaRange, sorted_vectors,
    },
    Call, Fake, Fault, State,
};

impl PciFunction for Fake {
    fn name(&self) -> &str {
        &self.config.name
    }

    fn config_size(&self) -> u32 {
        self.config.space.len() as u32
    }

    fn raw_config_read(&self, offset: u32, data: &mut [u8]) -> Result<(), PciError> {
        let mut state = self.state();
        match state.enter(Call::ConfigRead) {
            Some(Fault::Error(e)) => return Err(PciError::io("config read", io::Error::from(e))),
            Some(Fault::Dead) => data.fill(0xFF),
            None => {
                let at = offset as usize;
                match state.space.get(at..at + data.len()) {
                    Some(bytes) => data.copy_from_slice(bytes),
                    None => data.fill(0xFF),
                }
            }
        }
        Ok(())
    }

    fn raw_config_write(&self, offset: u32, data: &[u8]) -> Result<(), PciError> {
        let mut state = self.state();
        match state.enter(Call::ConfigWrite) {
            Some(Fault::Error(e)) => return Err(PciError::io("config write", io::Error::from(e))),
            Some(Fault::Dead) => return Ok(()),
            None => {}
        }
        let mastered = state.may_master();
        for (at, &byte) in (offset as usize..).zip(data) {
            let mask = State::writable(at);
            if let Some(place) = state.space.get_mut(at) {
                *place = *place & !mask | byte & mask;
            }
        }
        if state.may_master() != mastered {
            let line = format!("bus-master {}", if mastered { "off" } else { "on" });
            state.log.push(line);
        }
        Ok(())
    }

    fn bar(&self, bar: Bar) -> Option<&BarInfo> {
        self.config.bars.get(bar.index())?.as_ref()
    }

    fn bar_address(&self, bar: Bar) -> Result<u64, PciError> {
        config::bar_address(self, bar)
    }

    fn raw_read(&self, bar: Bar, offset: u64, bytes: u32) -> Result<u64, PciError> {
        let mut state = self.state();
        match state.enter(Call::Read) {
            Some(Fault::Error(e)) => Err(PciError::io("register read", io::Error::from(e))),
            Some(Fault::Dead) => Ok(u64::MAX >> (64 - 8 * bytes.clamp(1, 8))),
            None => Ok(state.model.read(bar, offset, bytes)),
        }
    }

    fn raw_write(&self, bar: Bar, offset: u64, bytes: u32, value: u64) -> Result<(), PciError> {
        let mut state = self.state();
        match state.enter(Call::Write) {
            Some(Fault::Error(e)) => return Err(PciError::io("register write", io::Error::from(e))),
            Some(Fault::Dead) => return Ok(()),
            None => state.model.write(bar, offset, bytes, value),
        }
        let effects = state.model.effects();
        drop(state);
        effects.into_iter().for_each(|effect| effect());
        Ok(())
    }

    fn bar_read(&self, bar: Bar, offset: u64, data: &mut [u8]) -> Result<(), PciError> {
        self.check_access(bar, offset, data.len() as u64)?;
        for (at, byte) in (offset..).zip(data) {
            *byte = self.raw_read(bar, at, 1)? as u8;
        }
        Ok(())
    }

    fn bar_write(&self, bar: Bar, offset: u64, data: &[u8]) -> Result<(), PciError> {
        self.check_access(bar, offset, data.len() as u64)?;
        // As the widest stores would carry it, so that models see words where they can.
        let mut at = offset;
        let mut rest = data;
        while !rest.is_empty() {
            let fits = |n: u64| at.is_multiple_of(n) && rest.len() as u64 >= n;
            let n = [8, 4, 2].into_iter().find(|n| fits(*n)).unwrap_or(1) as usize;
            let (now, later) = rest.split_at(n);
            let mut word = [0; 8];
            word.iter_mut().zip(now).for_each(|(w, b)| *w = *b);
            self.raw_write(bar, at, n as u32, u64::from_le_bytes(word))?;
            at += n as u64;
            rest = later;
        }
        Ok(())
    }

    fn map_bar(self: Arc<Self>, bar: Bar, wanted: CacheType) -> Result<BarMap, PciError> {
        self.state().kernel_call(Call::MapBar)?;
        let info = self.bar_or_error(bar)?;
        let memory = self.memory.get(bar.index()).and_then(Option::as_ref);
        let areas: Vec<_> = info
            .mappable
            .iter()
            .filter_map(|area| Some(MappedArea::shared(*area, Arc::clone(memory?))))
            .collect();
        if areas.is_empty() {
            return Err(PciError::NoSuchMapping {
                bar,
                device: self.config.name.clone(),
                wanted,
                why: "every access to it is trapped".to_owned(),
            });
        }
        Ok(BarMap::new(bar, CacheType::WriteBack, areas, Arc::clone(&self)))
    }

    fn vectors(&self) -> u16 {
        self.config.vectors
    }

    fn set_vectors(&self, vectors: &[(u16, BorrowedFd<'_>)]) -> Result<(), PciError> {
        let sorted = sorted_vectors(vectors, self.config.vectors)?;
        let mut state = self.state();
        state.kernel_call(Call::SetVectors)?;
        state.vectors.clear();
        for (vector, fd) in sorted {
            let own = fd
                .try_clone_to_owned()
                .map_err(|e| PciError::io("dup of an event descriptor", e))?;
            state.vectors.insert(vector, own);
        }
        let line = format!("vectors {}", state.vectors.len());
        state.log.push(line);
        Ok(())
    }

    fn set_notice(&self, notice: Notice, event: Option<BorrowedFd<'_>>) -> Result<bool, PciError> {
        let mut state = self.state();
        state.kernel_call(Call::SetVectors)?;
        match event {
            Some(fd) => {
                let own = fd.try_clone_to_owned();
                let own = own.map_err(|e| PciError::io("dup of an event descriptor", e))?;
                state.notices.insert(notice, own);
            }
            None => drop(state.notices.remove(&notice)),
        }
        Ok(true)
    }

    fn iova_ranges(&self) -> Result<Vec<IovaRange>, PciError> {
        Ok(self.config.ranges.clone())
    }

    fn dma_page(&self) -> u64 {
        4096
    }

    fn isolation(&self) -> Isolation {
        self.config.isolation
    }

    fn dma_map(&self, memory: &DmaMemory<'_>, iova: u64) -> Result<(), PciError> {
        let mut state = self.state();
        state.kernel_call(Call::DmaMap)?;
        let bytes = memory.bytes();
        let range = IovaRange::new(iova, bytes);
        let allowed = range.is_some_and(|r| self.config.ranges.iter().any(|a| a.covers(&r)));
        let taken = state.dma.range(..iova.saturating_add(bytes)).next_back();
        let taken = taken.is_some_and(|(start, region)| start + region.bytes() > iova);
        if !allowed || taken {
            let range = range.unwrap_or(IovaRange {
                start: iova,
                last: iova,
            });
            let why = if taken {
                "already mapped"
            } else {
                "outside the reported ranges"
            };
            return Err(PciError::BadIova { range, why });
        }
        let (fd, offset) = memory.descriptor().ok_or_else(|| PciError::Unsupported {
            what: "mapping memory that has no descriptor".to_owned(),
            device: self.config.name.clone(),
        })?;
        let own = fd
            .try_clone_to_owned()
            .map_err(|e| PciError::io("dup of a memory descriptor", e))?;
        let region =
            Region::from_peer(own, offset + bytes).map_err(|e| PciError::Protocol { what: e.to_string() })?;
        state.dma.insert(iova, Arc::new(region));
        state.log.push("dma-map".to_owned());
        Ok(())
    }

    fn dma_unmap(&self, iova: u64, bytes: u64) -> Result<(), PciError> {
        let mut state = self.state();
        state.kernel_call(Call::DmaUnmap)?;
        if state.dma.get(&iova).is_none_or(|region| region.bytes() != bytes) {
            let range = IovaRange::new(iova, bytes).unwrap_or(IovaRange {
                start: iova,
                last: iova,
            });
            let why = "not mapped as one range";
            return Err(PciError::BadIova { range, why });
        }
        state.dma.remove(&iova);
        state.log.push("dma-unmap".to_owned());
        Ok(())
    }

    fn reset_plan(&self) -> Result<ResetPlan, PciError> {
        Ok(self.config.reset.clone())
    }

    fn reset(&self) -> Result<(), PciError> {
        check_reset(&self.config.name, &self.config.reset)?;
        let mut state = self.state();
        state.kernel_call(Call::Reset)?;
        state.space.clone_from(&self.config.space);
        state.model.reset();
        state.log.push("reset".to_owned());
        let effects = state.model.effects();
        drop(state);
        effects.into_iter().for_each(|effect| effect());
        Ok(())
    }
}
