//! Survives accesses to mappings whose device has gone.
//!
//! The kernel takes BAR mappings away when a device resets, sleeps or is pulled; a load or store then raises SIGBUS,
//! which ends the process. Here, a page of a BAR mapping that faults is replaced by private memory of all ones, which
//! is what a dead device answers: registers then read as gone, stores land nowhere, and [`Guarded::lost`] tells.
//! Faults at any other address go where they went before.

#![allow(unsafe_code, reason = "a signal handler")]

use std::{
    mem::MaybeUninit,
    sync::{
        Once,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

/// Mappings that can be guarded at a time: six BARs of a few functions, in a few areas each.
const SLOTS: usize = 128;

struct Slot {
    /// First address; zero when free, one while being filled.
    start: AtomicUsize,
    /// Address behind the last.
    end: AtomicUsize,
    lost: AtomicBool,
}

static TABLE: [Slot; SLOTS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        lost: AtomicBool::new(false),
    }
}; SLOTS];

/// The handler that was there before, as a function address; only read by the handler after it was installed.
static BEFORE: AtomicUsize = AtomicUsize::new(libc::SIG_DFL);
/// Whether that handler takes the three arguments.
static BEFORE_TAKES_INFO: AtomicBool = AtomicBool::new(false);

/// A range of addresses that is watched, until dropped. Must be dropped before the range is unmapped.
#[derive(Debug)]
pub(super) struct Guarded(Option<usize>);

impl Guarded {
    /// Watches `bytes` bytes from `start`, both multiples of the page size. More ranges than there is room for are
    /// not watched: a fault there ends the process, as it would have without any of this.
    pub(super) fn new(start: *mut u8, bytes: usize) -> Self {
        static INSTALL: Once = Once::new();
        INSTALL.call_once(install);
        let start = start.expose_provenance();
        let free = |slot: &Slot| {
            slot.start
                .compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
        };
        let index = TABLE.iter().position(free);
        match index.and_then(|i| TABLE.get(i)) {
            Some(slot) => {
                slot.lost.store(false, Ordering::Relaxed);
                slot.end.store(start.saturating_add(bytes), Ordering::Relaxed);
                // Release: pairs with the acquire in `slot_of`.
                slot.start.store(start, Ordering::Release);
            }
            None => tracing::warn!("too many mappings to guard against vanishing devices"),
        }
        Self(index)
    }

    /// Whether a page of it has faulted.
    pub(super) fn lost(&self) -> bool {
        self.slot().is_some_and(|s| s.lost.load(Ordering::Acquire))
    }

    fn slot(&self) -> Option<&'static Slot> {
        TABLE.get(self.0?)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if let Some(slot) = self.slot() {
            // Release: pairs with the acquire of the next owner in `new`.
            slot.start.store(0, Ordering::Release);
        }
    }
}

/// The watched range that an address lies in.
fn slot_of(address: usize) -> Option<&'static Slot> {
    TABLE.iter().find(|slot| {
        // Acquire: pairs with the release in `Guarded::new`.
        let start = slot.start.load(Ordering::Acquire);
        start > 1 && start <= address && address < slot.end.load(Ordering::Relaxed)
    })
}

fn install() {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: all zeros is a valid `sigaction`; the handler only does what a signal handler may. Called once.
    unsafe {
        let action = action.assume_init_mut();
        action.sa_sigaction =
            on_fault as extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
        if libc::sigaction(libc::SIGBUS, std::ptr::null(), before.as_mut_ptr()) == 0 {
            let before = before.assume_init_ref();
            BEFORE_TAKES_INFO.store(before.sa_flags & libc::SA_SIGINFO != 0, Ordering::Relaxed);
            BEFORE.store(before.sa_sigaction, Ordering::Release);
            libc::sigaction(libc::SIGBUS, action, std::ptr::null_mut());
        }
    }
}

extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t` to a handler installed with SA_SIGINFO, and SIGBUS has an address.
    let address = unsafe { (*info).si_addr() }.addr();
    if let Some(slot) = slot_of(address)
        && replace_page(address)
    {
        // Release: pairs with the acquire in `lost`.
        slot.lost.store(true, Ordering::Release);
        return;
    }
    let before = BEFORE.load(Ordering::Acquire);
    if before == libc::SIG_DFL || before == libc::SIG_IGN {
        // SAFETY: restores the default, so that the fault, which happens again on return, does what it always did.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        return;
    }
    // SAFETY: the address is that of the handler that was installed before, of the kind that its flags say.
    unsafe {
        if BEFORE_TAKES_INFO.load(Ordering::Relaxed) {
            type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
            std::mem::transmute::<usize, Handler>(before)(signal, info, context);
        } else {
            std::mem::transmute::<usize, extern "C" fn(libc::c_int)>(before)(signal);
        }
    }
}

/// Puts a page of all ones where the mapping was. Makes system calls and touches memory, and nothing else.
fn replace_page(address: usize) -> bool {
    // SAFETY: sysconf and mmap are plain system calls here; the page lies in a mapping of ours, whose users hold raw
    // addresses only, which stay valid; errno is put back for the code that was interrupted.
    unsafe {
        let errno = libc::__errno_location();
        let saved = *errno;
        let page = usize::try_from(libc::sysconf(libc::_SC_PAGESIZE)).unwrap_or(4096);
        let at = std::ptr::with_exposed_provenance_mut::<libc::c_void>(address & !(page - 1));
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let new = libc::mmap(at, page, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        let replaced = new == at;
        if replaced {
            new.cast::<u8>().write_bytes(0xFF, page);
        }
        *errno = saved;
        replaced
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pci::{Bar, BarMap, CacheType, MappedArea};
    use memmap2::MmapOptions;

    /// A file whose end is cut off is as good as a device that is pulled: accesses behind the end raise SIGBUS.
    #[test]
    fn a_mapping_whose_device_goes_reads_all_ones_and_tells() {
        let fd = rustix::fs::memfd_create("device", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 1 << 16).unwrap();
        let raw = MmapOptions::new().len(1 << 16).map_raw(&fd).unwrap();
        let map = BarMap::new(Bar::B0, CacheType::Uncached, vec![MappedArea::file(0, raw)], ());
        map.store(0x1000, 5u32).unwrap();
        assert_eq!(map.load::<u32>(0x1000).unwrap(), 5);
        assert!(!map.lost());
        rustix::fs::ftruncate(&fd, 0).unwrap();
        assert_eq!(map.load::<u32>(0x1000).unwrap(), u32::MAX);
        map.store(0x8000, 7u64).unwrap();
        assert_eq!(map.load::<u64>(0xFFF8).unwrap(), u64::MAX);
        assert!(map.lost());
        drop(map);
        // Its place in the table is free again.
        let raw = MmapOptions::new().len(4096).map_anon().unwrap();
        let again = Guarded::new(raw.as_ptr().cast_mut(), 4096);
        assert!(!again.lost());
    }
}
