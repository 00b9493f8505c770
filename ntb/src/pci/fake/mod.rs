//! A PCI function inside the process: registers with hooks, memory for windows, faults on demand.
//!
//! For tests of whatever stands on [`super::PciFunction`], here and in programs that use this crate. It behaves as PCI
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

mod config;
mod function;
mod registers;

use std::{
    collections::BTreeMap,
    io,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use ntb_mem::region::{Pages, Region};
use rustix::io::Errno;

pub use config::FakeConfig;
pub use registers::RegisterFile;

use super::{Area, Bar, Notice, PciError, config as pci_config};

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
    notices: BTreeMap<Notice, OwnedFd>,
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
                notices: BTreeMap::new(),
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

    /// Gives a notice, if it is connected.
    pub fn notify(&self, notice: Notice) {
        if let Some(fd) = self.state().notices.get(&notice) {
            let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
        }
    }

    /// Changes configuration space as the device itself does.
    pub fn set_config(&self, at: u32, bytes: &[u8]) {
        let at = at as usize;
        if let Some(place) = self.state().space.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
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
        let low = self.space.get(pci_config::COMMAND as usize).copied().unwrap_or(0);
        u16::from(low) & pci_config::COMMAND_MASTER != 0
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

impl Drop for Fake {
    fn drop(&mut self) {
        // Guards hold the function, so nothing can be mapped any more.
        debug_assert!(
            std::thread::panicking() || self.state().dma.is_empty(),
            "the function was closed with memory mapped"
        );
    }
}
