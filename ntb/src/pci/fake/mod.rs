//! A PCI function inside the process: registers with hooks, memory for windows, faults on demand.
//!
//! For tests of whatever stands on [`PciFunction`], here and in programs that use this crate. It behaves as PCI
//! says (sizes, capabilities, interrupts by event descriptor, DMA only to what was mapped and only with bus
//! mastering on); what the device does is a [`Model`].
//!
//! ```
//! use ntb::{hw::regs::amd, pci::{Bar, Function, PciFunction, fake::{Fake, FakeConfig, RegisterFile}}};
//! let fake = Fake::new(
//!     FakeConfig::new("a", 0x1022, 0x14C0).bar(Bar::B0, 0x1000).vectors(24),
//!     RegisterFile::new(&amd::MAP, 0x1000).preset(amd::SIDEINFO, 1),
//! );
//! assert_eq!(fake.read::<u32>(Bar::B0, 0x408).unwrap(), 1);
//! ```

mod registers;

use std::{
    collections::BTreeMap,
    io,
    os::fd::{BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use ntb_mem::region::{Pages, Region};
use rustix::io::Errno;

pub use registers::RegisterFile;

use super::{
    Area, Bar, BarInfo, BarMap, CacheType, DmaMemory, Function, Isolation, MappedArea, PciError, PciFunction,
    ResetPlan, config, iova::IovaRange,
};

/// What the fake device does.
pub trait Model: Send {
    /// A read of `bytes` (1, 2, 4, 8) at `offset` of `bar`.
    fn read(&mut self, bar: Bar, offset: u64, bytes: u32) -> u64;
    /// A write.
    fn write(&mut self, bar: Bar, offset: u64, bytes: u32, value: u64);
    /// The function was reset.
    fn reset(&mut self) {}
    /// What the last access leads to elsewhere: interrupts, stores into a peer. Run when the access is over, with
    /// nothing locked.
    fn effects(&mut self) -> Vec<Effect> {
        Vec::new()
    }
}

/// Something that happens outside the model; see [`Model::effects`].
pub type Effect = Box<dyn FnOnce() + Send>;

/// Which kind of call a fault is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the methods of the seam")]
pub enum Call {
    ConfigRead,
    ConfigWrite,
    Read,
    Write,
    MapBar,
    SetVectors,
    DmaMap,
    DmaUnmap,
    Reset,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The call fails with this error number.
    Error(Errno),
    /// A read gives all ones; a write is lost.
    Dead,
}

/// How a [`Fake`] is built.
#[derive(Debug)]
pub struct FakeConfig {
    name: String,
    space: Vec<u8>,
    bars: [Option<BarInfo>; 6],
    vectors: u16,
    ranges: Vec<IovaRange>,
    reset: ResetPlan,
    isolation: Isolation,
}

/// Where the fake's PCIe capability stands.
const CAP_PCIE_AT: usize = 0x40;
/// Where its MSI-X capability stands.
const CAP_MSIX_AT: usize = 0x80;

impl FakeConfig {
    /// A function with this identity, PCIe and MSI-X capabilities, 4 KiB of configuration space and no BARs.
    pub fn new(name: &str, vendor: u16, device: u16) -> Self {
        let mut this = Self {
            name: name.to_owned(),
            space: vec![0; 4096],
            bars: [const { None }; 6],
            vectors: 0,
            ranges: vec![IovaRange {
                start: 0,
                last: (1 << 48) - 1,
            }],
            reset: ResetPlan {
                method: Some("function level reset".to_owned()),
                also: Vec::new(),
            },
            isolation: Isolation::Software,
        };
        this.put(config::VENDOR_ID as usize, &vendor.to_le_bytes());
        this.put(config::DEVICE_ID as usize, &device.to_le_bytes());
        this.put(
            config::STATUS as usize,
            &config::STATUS_CAPABILITIES.to_le_bytes(),
        );
        this.put(config::CAPABILITIES as usize, &[CAP_PCIE_AT as u8]);
        this.put(CAP_PCIE_AT, &[config::CAP_PCIE, CAP_MSIX_AT as u8]);
        this.class(0x06_8000)
    }

    /// Bytes of configuration space.
    pub fn put(&mut self, at: usize, bytes: &[u8]) {
        if let Some(place) = self.space.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }

    /// Revision.
    #[must_use]
    pub fn revision(mut self, revision: u8) -> Self {
        self.put(config::REVISION as usize, &[revision]);
        self
    }

    /// Class, 24 bits.
    #[must_use]
    pub fn class(mut self, class: u32) -> Self {
        self.put(config::CLASS as usize, &class.to_le_bytes()[..3]);
        self
    }

    /// Link of the function itself, now and possible, as in the PCIe capability.
    #[must_use]
    pub fn link(mut self, status: u16, capability: u32) -> Self {
        self.put(CAP_PCIE_AT + 0x0C, &capability.to_le_bytes());
        self.put(CAP_PCIE_AT + 0x12, &status.to_le_bytes());
        self
    }

    /// A 64-bit prefetchable BAR whose accesses are trapped.
    #[must_use]
    pub fn bar(self, bar: Bar, bytes: u64) -> Self {
        self.bar_with(bar, bytes, Vec::new())
    }

    /// A BAR of which these areas can be mapped.
    #[must_use]
    pub fn bar_with(mut self, bar: Bar, bytes: u64, mappable: Vec<Area>) -> Self {
        let at = config::BAR0 as usize + 4 * bar.index();
        // Placed apart, as firmware would: BAR n at n + 1 tebibytes.
        let address = (bar.index() as u64 + 1) << 40;
        self.put(at, &(address as u32 | 0xC).to_le_bytes());
        if bar != Bar::B5 {
            self.put(at + 4, &((address >> 32) as u32).to_le_bytes());
        }
        if let Some(slot) = self.bars.get_mut(bar.index()) {
            *slot = Some(BarInfo {
                bar,
                bytes,
                prefetchable: true,
                mappable,
            });
        }
        self
    }

    /// MSI-X vectors.
    #[must_use]
    pub fn vectors(mut self, vectors: u16) -> Self {
        self.vectors = vectors;
        let next = CAP_MSIX_AT;
        self.put(next, &[config::CAP_MSIX, 0]);
        self.put(next + 2, &vectors.saturating_sub(1).to_le_bytes());
        self
    }

    /// I/O addresses that may be mapped.
    #[must_use]
    pub fn iova_ranges(mut self, ranges: Vec<IovaRange>) -> Self {
        self.ranges = ranges;
        self
    }

    /// What a reset would do.
    #[must_use]
    pub fn reset_plan(mut self, plan: ResetPlan) -> Self {
        self.reset = plan;
        self
    }

    /// What keeps the device from other memory.
    #[must_use]
    pub fn isolation(mut self, isolation: Isolation) -> Self {
        self.isolation = isolation;
        self
    }
}

/// The function.
pub struct Fake {
    config: FakeConfig,
    /// Memory behind mappable areas, per BAR.
    memory: [Option<Arc<Region>>; 6],
    state: Mutex<State>,
}

struct State {
    space: Vec<u8>,
    model: Box<dyn Model>,
    vectors: BTreeMap<u16, OwnedFd>,
    dma: BTreeMap<u64, Arc<Region>>,
    calls: BTreeMap<Call, u64>,
    faults: Vec<(Call, u64, Fault)>,
    removed: bool,
    log: Vec<String>,
}

impl std::fmt::Debug for Fake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fake")
            .field("name", &self.config.name)
            .finish_non_exhaustive()
    }
}

impl Fake {
    /// A function that behaves as `model`.
    pub fn new(config: FakeConfig, model: impl Model + 'static) -> Arc<Self> {
        let memory = std::array::from_fn(|i| {
            let info = config.bars.get(i)?.as_ref()?;
            let bytes = info.mappable.iter().map(Area::end).max()?;
            Region::allocate(bytes.next_multiple_of(64), Pages::Normal)
                .ok()
                .map(Arc::new)
        });
        Arc::new(Self {
            state: Mutex::new(State {
                space: config.space.clone(),
                model: Box::new(model),
                vectors: BTreeMap::new(),
                dma: BTreeMap::new(),
                calls: BTreeMap::new(),
                faults: Vec::new(),
                removed: false,
                log: Vec::new(),
            }),
            memory,
            config,
        })
    }

    /// Lets the `k`-th call from now on (1 is the next) of this kind fail.
    pub fn fail(&self, call: Call, k: u64, fault: Fault) {
        let mut state = self.state();
        let so_far = state.calls.get(&call).copied().unwrap_or(0);
        state.faults.push((call, so_far + k, fault));
    }

    /// Pulls the device out (or puts it back): reads give all ones, writes vanish.
    pub fn set_removed(&self, removed: bool) {
        self.state().removed = removed;
    }

    /// Raises a vector, if it is connected and the function may master the bus.
    pub fn interrupt(&self, vector: u16) {
        let state = self.state();
        if state.may_master()
            && let Some(fd) = state.vectors.get(&vector)
        {
            let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
        }
    }

    /// What was done with memory, vectors, bus mastering and reset, in order.
    pub fn log(&self) -> Vec<String> {
        self.state().log.clone()
    }

    /// Adds a line to the log: for models and tests that want their events in the same order.
    pub fn note(&self, line: impl Into<String>) {
        self.state().log.push(line.into());
    }

    /// Mappings that are in place, as (address, length).
    pub fn mappings(&self) -> Vec<(u64, u64)> {
        self.state()
            .dma
            .iter()
            .map(|(iova, region)| (*iova, region.bytes()))
            .collect()
    }

    /// Writes a word of memory as the device would: only what is mapped, and only with bus mastering on. Returns
    /// whether it arrived.
    pub fn dma_write(&self, iova: u64, word: u64) -> bool {
        let state = self.state();
        let hit = state
            .dma
            .range(..=iova)
            .next_back()
            .filter(|_| state.may_master());
        let Some((start, region)) = hit else {
            return false;
        };
        let inside = iova.is_multiple_of(8) && iova - start <= region.bytes().saturating_sub(8);
        if inside {
            let index = ((iova - start) / 8) as usize;
            region
                .view()
                .store(index, word, std::sync::atomic::Ordering::Release);
        }
        inside
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Counts the call; what is to go wrong with it.
    fn enter(&mut self, call: Call) -> Option<Fault> {
        let count = self.calls.entry(call).or_insert(0);
        *count += 1;
        let now = *count;
        let planned = self
            .faults
            .iter()
            .find(|(c, k, _)| *c == call && *k == now)
            .map(|f| f.2);
        planned.or(self.removed.then_some(Fault::Dead))
    }

    /// For calls that are not bus accesses: a dead device does not stop them.
    fn kernel_call(&mut self, call: Call) -> Result<(), PciError> {
        match self.enter(call) {
            Some(Fault::Error(errno)) => Err(PciError::io(format!("{call:?}"), io::Error::from(errno))),
            _ => Ok(()),
        }
    }

    fn may_master(&self) -> bool {
        let low = self.space.get(config::COMMAND as usize).copied().unwrap_or(0);
        u16::from(low) & config::COMMAND_MASTER != 0
    }

    /// Bits of configuration space that software may change.
    fn writable(at: usize) -> u8 {
        match at {
            0x04 => 0x06, // memory, bus master
            0x05 => 0x04, // INTx disable
            0x83 => 0xC0, // MSI-X enable and mask
            _ => 0,
        }
    }
}

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
            .filter_map(|area| Some(MappedArea::shared(*area, memory?)))
            .collect::<Result<_, _>>()
            .map_err(|e| PciError::io("mapping a fake BAR", e))?;
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
        let sorted = super::sorted_vectors(vectors, self.config.vectors)?;
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
        super::check_reset(&self.config.name, &self.config.reset)?;
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

impl Drop for Fake {
    fn drop(&mut self) {
        // Guards hold the function, so nothing can be mapped any more.
        debug_assert!(
            std::thread::panicking() || self.state().dma.is_empty(),
            "the function was closed with memory mapped"
        );
    }
}
