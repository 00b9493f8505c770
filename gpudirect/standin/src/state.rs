//! What one copy of the library knows.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::c_int,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
};

use crate::ptx::Module;

pub(crate) const OK: c_int = 0;
pub(crate) const INVALID_VALUE: c_int = 1;
pub(crate) const OUT_OF_MEMORY: c_int = 2;
pub(crate) const STUB: c_int = 34;
pub(crate) const NO_DEVICE: c_int = 100;
pub(crate) const INVALID_HANDLE: c_int = 400;
pub(crate) const NOT_FOUND: c_int = 500;
pub(crate) const NOT_READY: c_int = 600;
pub(crate) const ILLEGAL_ADDRESS: c_int = 700;
pub(crate) const ALREADY_REGISTERED: c_int = 712;
pub(crate) const NOT_REGISTERED: c_int = 713;
pub(crate) const LOST: c_int = 719;
pub(crate) const NOT_PERMITTED: c_int = 800;
pub(crate) const NOT_SUPPORTED: c_int = 801;

/// Memory that kernels reach: its length, and whether they may load it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reach {
    pub(crate) bytes: u64,
    pub(crate) loads: bool,
}

#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) fd: rustix::fd::OwnedFd,
    pub(crate) map: usize,
    pub(crate) mapped: usize,
    /// From the start of the mapping.
    pub(crate) skip: u64,
    pub(crate) sync_memops: bool,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) log: Vec<String>,
    calls: u64,
    pub(crate) stub: bool,
    pub(crate) no_device: bool,
    pub(crate) not_permitted: bool,
    pub(crate) not_supported: bool,
    pub(crate) no_dma_buf: bool,
    pub(crate) no_mmap: bool,
    pub(crate) no_flush: bool,
    /// Stores of kernels into memory that is not the GPU's do not complete.
    pub(crate) hold_stores: bool,
    /// Such stores are lost, without an error.
    pub(crate) lose_stores: bool,
    pub(crate) odd_address: bool,
    pub(crate) ordering: c_int,
    pub(crate) capability: u32,
    lost_from: Option<u64>,
    pub(crate) contexts: usize,
    pub(crate) allocations: BTreeMap<u64, Allocation>,
    pub(crate) reach: BTreeMap<u64, Reach>,
    pub(crate) registered: BTreeMap<u64, u64>,
    pub(crate) next_handle: usize,
    pub(crate) modules: HashMap<usize, Arc<Module>>,
    pub(crate) functions: HashMap<usize, (Arc<Module>, String)>,
    pub(crate) streams: HashMap<usize, Option<JoinHandle<c_int>>>,
    configured: bool,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// The state, with a handle that looks like the one inside.
pub(crate) struct Guard(MutexGuard<'static, Option<State>>);

impl std::ops::Deref for Guard {
    type Target = State;
    fn deref(&self) -> &State {
        self.0.as_ref().unwrap()
    }
}

impl std::ops::DerefMut for Guard {
    fn deref_mut(&mut self) -> &mut State {
        self.0.as_mut().unwrap()
    }
}

pub(crate) fn state() -> Guard {
    let mut guard = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    let state = guard.get_or_insert_default();
    if !state.configured {
        state.configure(&std::env::var("NTB_HOST_STANDIN").unwrap_or_default());
    }
    Guard(guard)
}

/// A call of the library: logged, and refused once the device is lost.
pub(crate) fn call(line: String, act: impl FnOnce(&mut State) -> c_int) -> c_int {
    let mut s = state();
    s.calls += 1;
    if s.is_lost() {
        s.log.push(format!("{line} (lost)"));
        return LOST;
    }
    let result = act(&mut s);
    s.log.push(if result == OK {
        line
    } else {
        format!("{line} -> {result}")
    });
    result
}

impl State {
    pub(crate) fn configure(&mut self, words: &str) {
        *self = Self {
            configured: true,
            ordering: 200,
            capability: 90,
            next_handle: self.next_handle.max(0x2000),
            log: std::mem::take(&mut self.log),
            calls: self.calls,
            contexts: self.contexts,
            allocations: std::mem::take(&mut self.allocations),
            reach: std::mem::take(&mut self.reach),
            registered: std::mem::take(&mut self.registered),
            modules: std::mem::take(&mut self.modules),
            functions: std::mem::take(&mut self.functions),
            streams: std::mem::take(&mut self.streams),
            ..Self::default()
        };
        for word in words.split_whitespace() {
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            let number = || value.parse::<u32>().unwrap();
            match name {
                "stub" => self.stub = true,
                "no-device" => self.no_device = true,
                "not-permitted" => self.not_permitted = true,
                "not-supported" => self.not_supported = true,
                "no-dma-buf" => self.no_dma_buf = true,
                "no-mmap" => self.no_mmap = true,
                "no-flush" => self.no_flush = true,
                "hold-stores" => self.hold_stores = true,
                "lose-stores" => self.lose_stores = true,
                "odd-address" => self.odd_address = true,
                "ordering" => self.ordering = number() as c_int,
                "capability" => self.capability = number(),
                "lost" => self.lost_from = Some(self.calls + u64::from(number())),
                _ => panic!("the host stand-in knows no fault '{name}'"),
            }
        }
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.lost_from.is_some_and(|from| self.calls >= from)
    }

    pub(crate) fn handle(&mut self) -> usize {
        self.next_handle += 0x10;
        self.next_handle
    }

    pub(crate) fn left(&self) -> usize {
        self.contexts
            + self.allocations.len()
            + self.registered.len()
            + self.modules.len()
            + self.streams.len()
    }

    /// Whether a kernel's store does not complete.
    pub(crate) fn holds(&self, at: u64) -> bool {
        self.hold_stores && self.is_registered(at)
    }

    /// Whether a kernel's store goes nowhere.
    pub(crate) fn loses(&self, at: u64) -> bool {
        self.lose_stores && self.is_registered(at)
    }

    fn is_registered(&self, at: u64) -> bool {
        let found = self.registered.range(..=at).next_back();
        found.is_some_and(|(start, bytes)| at < start + bytes)
    }

    /// Whether all of a range is what kernels reach.
    pub(crate) fn reaches(&self, at: u64, bytes: u64, load: bool) -> bool {
        let found = self.reach.range(..=at).next_back();
        found.is_some_and(|(start, r)| {
            at.checked_add(bytes).is_some_and(|end| end <= start + r.bytes) && (r.loads || !load)
        })
    }
}
