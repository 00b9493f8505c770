//! Mapped memory that another party writes or reads: allocation, views, revocation.
//!
//! A [`Region`] is shared memory without a name: a memory file descriptor, sealed against resizing, so
//! that neither a crash leaves anything behind nor a peer that holds the descriptor can shrink it and
//! make an access fault.

#![allow(unsafe_code, reason = "mmap, and atomics over mapped memory")]

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU64, Ordering},
    },
};

use rustix::{
    fs::{MemfdFlags, SealFlags},
    io::Errno,
    mm::{MapFlags, ProtFlags},
};

use crate::{
    export::Exportable,
    line::{LINE_BYTES, LINE_WORDS, Line},
};

/// Which pages a region may stand on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Pages {
    /// Huge pages where the pool has enough of them, otherwise normal ones.
    #[default]
    HugeIfAny,
    /// Normal pages only.
    Normal,
    /// Huge pages or an error.
    Huge,
}

/// Why memory could not be had.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// A size of zero, or one that is not a whole number of lines.
    #[error("a region of {bytes} bytes was asked for: the size must be a non-zero multiple of 64")]
    BadSize {
        /// Bytes asked for.
        bytes: u64,
    },
    /// Huge pages were required and the pool has too few.
    #[error(
        "{needed} bytes of huge pages are needed, {free} bytes are free ({errno}): reserve more with \
         'sysctl vm.nr_hugepages=N' or allow normal pages"
    )]
    NoHugePages {
        /// Bytes needed, rounded up to whole huge pages.
        needed: u64,
        /// Bytes free in the pool of default-sized huge pages.
        free: u64,
        /// What the kernel said.
        errno: Errno,
    },
    /// The kernel refused a step.
    #[error("{step} of {bytes} bytes failed: {errno}")]
    Kernel {
        /// The system call.
        step: &'static str,
        /// Bytes asked for.
        bytes: u64,
        /// What the kernel said.
        errno: Errno,
    },
    /// A descriptor handed over by a peer is not memory that is safe to map.
    #[error("the peer's memory descriptor is refused: {why}")]
    BadDescriptor {
        /// What is wrong with it.
        why: &'static str,
    },
}

/// A shared mapping of memory that other processes or devices access at the same time.
#[derive(Debug)]
pub struct Region {
    map: Map,
    fd: OwnedFd,
    page_bytes: u64,
    /// Handed over by a peer: reading it would be a read across the link.
    #[cfg_attr(
        not(debug_assertions),
        expect(dead_code, reason = "counted where assertions are on")
    )]
    remote: bool,
}

#[derive(Debug)]
struct Map {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread; all access goes through atomics or the store
// routines, which are sound from any thread.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: ptr and len are those of a mapping made in `Region::map` and not unmapped since; views hold an
        // `Arc` of the region, so none is left.
        let _ = unsafe { rustix::mm::munmap(self.ptr.cast(), self.len) };
    }
}

impl Region {
    /// Allocates `bytes` (a multiple of 64, rounded up to whole pages) of unnamed shared memory, filled with zeros.
    ///
    /// Pages are touched by nobody here: a large region costs no time until it is used. Huge pages are reserved by
    /// the kernel at this point or refused; they are never over-committed.
    pub fn allocate(bytes: u64, pages: Pages) -> Result<Self, RegionError> {
        if bytes == 0 || !bytes.is_multiple_of(LINE_BYTES as u64) {
            return Err(RegionError::BadSize { bytes });
        }
        let mut refusal = None;
        if pages != Pages::Normal {
            match Self::allocate_huge(bytes) {
                Ok(region) => return Ok(region),
                Err(e) if pages == Pages::Huge => return Err(e),
                Err(e) => refusal = Some(e),
            }
        }
        let _ = refusal; // normal pages are the documented second choice
        let page = rustix::param::page_size() as u64;
        let bytes = bytes.next_multiple_of(page);
        Self::create(bytes, page, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
    }

    fn allocate_huge(bytes: u64) -> Result<Self, RegionError> {
        let (page, free_pages) = huge_pages();
        let needed = bytes.next_multiple_of(page);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        if free_pages.saturating_mul(page) < needed {
            return Err(RegionError::NoHugePages {
                needed,
                free: free_pages * page,
                errno: Errno::NOMEM,
            });
        }
        Self::create(needed, page, flags).map_err(|e| match e {
            RegionError::Kernel { errno, .. } => RegionError::NoHugePages {
                needed,
                free: free_pages * page,
                errno,
            },
            other => other,
        })
    }

    fn create(bytes: u64, page_bytes: u64, flags: MemfdFlags) -> Result<Self, RegionError> {
        let kernel = |step| move |errno| RegionError::Kernel { step, bytes, errno };
        let fd = rustix::fs::memfd_create("ntb-region", flags).map_err(kernel("memfd_create"))?;
        rustix::fs::ftruncate(&fd, bytes).map_err(kernel("ftruncate"))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(kernel("sealing"))?;
        let map = Self::map(&fd, bytes)?;
        Ok(Self {
            map,
            fd,
            page_bytes,
            remote: false,
        })
    }

    /// Maps memory that a peer handed over as a descriptor.
    ///
    /// The descriptor must be a memory file sealed against resizing, and exactly `bytes` long: otherwise its owner
    /// could make every access fault, or a part of a huge page would be mapped that cannot be unmapped, so it is refused.
    pub fn from_peer(fd: OwnedFd, bytes: u64) -> Result<Self, RegionError> {
        if bytes == 0 || !bytes.is_multiple_of(LINE_BYTES as u64) {
            return Err(RegionError::BadSize { bytes });
        }
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|_| RegionError::BadDescriptor {
            why: "it is not a memory file",
        })?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(RegionError::BadDescriptor {
                why: "it is not sealed against resizing",
            });
        }
        let stat = rustix::fs::fstat(&fd).map_err(|errno| RegionError::Kernel {
            step: "fstat",
            bytes,
            errno,
        })?;
        if u64::try_from(stat.st_size) != Ok(bytes) {
            return Err(RegionError::BadDescriptor {
                why: "it is shorter or longer than announced",
            });
        }
        let page_bytes = u64::try_from(stat.st_blksize)
            .unwrap_or(0)
            .max(rustix::param::page_size() as u64);
        let map = Self::map(&fd, bytes)?;
        Ok(Self {
            map,
            fd,
            page_bytes,
            remote: true,
        })
    }

    fn map(fd: &OwnedFd, bytes: u64) -> Result<Map, RegionError> {
        let len = usize::try_from(bytes).map_err(|_| RegionError::BadSize { bytes })?;
        // SAFETY: a new mapping at an address the kernel chooses; nothing of ours lies there.
        let ptr = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd.as_fd(),
                0,
            )
        }
        .map_err(|errno| RegionError::Kernel {
            step: "mmap",
            bytes,
            errno,
        })?;
        Ok(Map { ptr: ptr.cast(), len })
    }

    /// Length in bytes of what is mapped.
    pub fn bytes(&self) -> u64 {
        self.map.len as u64
    }

    /// Size in bytes of the pages it stands on.
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// The descriptor to hand to another process. What it gives away is the whole region.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// First byte of the mapping. Valid as long as the region; never to be made a reference or a slice.
    pub fn as_ptr(&self) -> *mut u8 {
        self.map.ptr
    }

    /// Lets go of the memory behind the mapping while others may still be storing to it.
    ///
    /// The address range stays valid and turns into private memory of this process that nobody else sees: late stores
    /// land harmlessly, late loads give zeros. The other party's pages are released at once.
    pub fn revoke(&self) -> Result<(), RegionError> {
        // SAFETY: replaces exactly our own mapping in place; users hold raw addresses only, which stay valid, and
        // the kernel makes the exchange atomic towards other threads' page faults.
        unsafe {
            rustix::mm::mmap_anonymous(
                self.map.ptr.cast(),
                self.map.len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE,
            )
        }
        .map(drop)
        .map_err(|errno| RegionError::Kernel {
            step: "revoking mmap",
            bytes: self.bytes(),
            errno,
        })
    }

    /// A checked window onto the whole region.
    pub fn view(self: &Arc<Self>) -> View {
        View {
            base: self.map.ptr.cast(),
            words: self.map.len / 8,
            #[cfg(debug_assertions)]
            remote: self.remote,
            memory: Arc::clone(self) as _,
        }
    }
}

/// Size in bytes of the default huge page and how many are free, by the kernel's own account; free is zero where
/// that cannot be read.
pub fn huge_pages() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        text.lines()
            .find_map(|l| l.strip_prefix(name))
            .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
    };
    let page = field("Hugepagesize:")
        .unwrap_or(2048)
        .saturating_mul(1024)
        .max(4096);
    // Reserved pages are promised to mappings that have not touched them yet.
    let free = field("HugePages_Free:")
        .unwrap_or(0)
        .saturating_sub(field("HugePages_Rsvd:").unwrap_or(0));
    (page, free)
}

#[cfg(debug_assertions)]
static REMOTE_LOADS: AtomicU64 = AtomicU64::new(0);

/// How often this process has read memory that a peer handed over, through any view of it. `None` in builds without
/// debug assertions, where nobody counts.
///
/// On a bridge such a read stalls the processor for a round trip; no data path has one.
pub fn remote_loads() -> Option<u64> {
    #[cfg(debug_assertions)]
    return Some(REMOTE_LOADS.load(Ordering::Relaxed));
    #[cfg(not(debug_assertions))]
    None
}

/// What [`View::take_small`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Small {
    /// A message.
    Taken {
        /// Bytes copied.
        len: usize,
        /// Lower half of word 6.
        lower: u32,
    },
    /// Anything else, with this word 7.
    Not(u64),
}

/// A bounds-checked window onto a [`Region`], or onto what another owner exports, in 64-bit words. Keeps it mapped.
///
/// Another party may change any word at any time; each load gives one moment's value of one word.
#[derive(Clone, Debug)]
pub struct View {
    base: *mut u64,
    words: usize,
    #[cfg(debug_assertions)]
    remote: bool,
    memory: Arc<dyn Exportable>,
}

// SAFETY: all access is by atomics; the memory is kept mapped by the `Arc`.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl View {
    /// All of what an owner exports, as this processor reaches it. Memory of a device is slow to read.
    ///
    /// # Panics
    /// When it does not begin at a multiple of 8: mappings begin at a page.
    pub fn exported(memory: &Arc<dyn Exportable>) -> Self {
        #[allow(clippy::cast_ptr_alignment, reason = "asserted in the next line")]
        let base = memory.as_ptr().cast::<u64>();
        assert!(base.is_aligned(), "exported memory begins within a word");
        Self {
            base,
            words: memory.bytes() as usize / 8,
            #[cfg(debug_assertions)]
            remote: false,
            memory: Arc::clone(memory),
        }
    }

    /// Length in 64-bit words.
    #[inline]
    pub fn words(&self) -> usize {
        self.words
    }

    /// Length in whole lines.
    #[inline]
    pub fn lines(&self) -> u64 {
        (self.words / LINE_WORDS) as u64
    }

    /// The part of this view from line `first`, `lines` long; `None` when it does not fit.
    pub fn part(&self, first: u64, lines: u64) -> Option<Self> {
        let end = first.checked_add(lines)?;
        if end > self.lines() {
            return None;
        }
        // In range of the mapping, whose length is a usize.
        let skip = first as usize * LINE_WORDS;
        Some(Self {
            base: self.base.wrapping_add(skip),
            words: lines as usize * LINE_WORDS,
            #[cfg(debug_assertions)]
            remote: self.remote,
            memory: Arc::clone(&self.memory),
        })
    }

    /// Address of the first word: for store routines and devices, never for references.
    #[inline(always)]
    pub fn as_ptr(&self) -> *mut u64 {
        self.base
    }

    #[inline(always)]
    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.words, "word outside the view");
        // SAFETY: in bounds by the line above, 8-byte aligned since mappings are page-aligned, mapped as long as
        // `memory` lives, and only ever accessed atomically or by store routines.
        unsafe { AtomicU64::from_ptr(self.base.add(index)) }
    }

    /// Counts what no data path may do: see [`remote_loads`].
    #[inline(always)]
    fn count_remote_load(&self) {
        #[cfg(debug_assertions)]
        if self.remote {
            REMOTE_LOADS.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Loads word `index` with `order` (relaxed or acquire).
    ///
    /// # Panics
    /// When `index` is not below [`View::words`]: indexes are computed by this program and masked, never taken from
    /// a peer.
    #[inline(always)]
    pub fn load(&self, index: usize, order: Ordering) -> u64 {
        self.count_remote_load();
        u64::from_le(self.word(index).load(order))
    }

    /// Loads words 0 to 6 of a line, each once, relaxed.
    ///
    /// # Panics
    /// When `line` is not below [`View::lines`].
    #[inline(always)]
    pub fn load_body(&self, line: u64) -> [u64; LINE_WORDS - 1] {
        assert!(line < self.lines(), "line outside the view");
        self.count_remote_load();
        let base = self.base.wrapping_add(line as usize * LINE_WORDS);
        let mut body = [0; LINE_WORDS - 1];
        for (i, slot) in body.iter_mut().enumerate() {
            // SAFETY: in bounds by the assertion above; otherwise as in `word`.
            let word = unsafe { AtomicU64::from_ptr(base.add(i)) };
            *slot = u64::from_le(word.load(Ordering::Relaxed));
        }
        body
    }

    /// Stores word `index`.
    ///
    /// # Panics
    /// As for [`View::load`].
    #[inline(always)]
    pub fn store(&self, index: usize, value: u64, order: Ordering) {
        self.word(index).store(value.to_le(), order);
    }

    /// Stores a line: words 0 to 6, then word 7 with release.
    ///
    /// # Panics
    /// When `line` is not below [`View::lines`].
    #[inline(always)]
    pub fn store_line(&self, line: u64, content: &Line) {
        assert!(line < self.lines(), "line outside the view");
        // SAFETY: in bounds by the line above; lines of a page-aligned mapping are aligned to 64; mapped as long as
        // `region` lives, and no reference to it exists anywhere.
        unsafe { crate::store::write_back(self.base.add(line as usize * LINE_WORDS), content) };
    }

    /// Takes a message of up to 48 bytes out of a line, if word 7 (loaded first, with acquire) is `word7` in all but its
    /// highest byte, which is the length, and the upper half of word 6 is `upper`. Its bytes are copied in no order, some
    /// of them perhaps twice.
    ///
    /// # Panics
    /// When `line` is not below [`View::lines`].
    #[inline(always)]
    pub fn take_small(&self, line: u64, word7: u64, upper: u32, buf: &mut [u8]) -> Small {
        assert!(line < self.lines(), "line outside the view");
        self.count_remote_load();
        let src = self.base.wrapping_add(line as usize * LINE_WORDS);
        let word = |i, order| {
            // SAFETY: a word of a line in bounds by the assertion above; otherwise as in `word`.
            u64::from_le(unsafe { AtomicU64::from_ptr(src.add(i)) }.load(order))
        };
        let found = word(7, Ordering::Acquire);
        let differing = found ^ word7;
        if differing << 8 != 0 {
            return Small::Not(found);
        }
        let (len, seal) = ((differing >> 56) as usize, word(6, Ordering::Relaxed));
        let fits = len <= 48 && len <= buf.len();
        if !fits || (seal >> 32) as u32 != upper {
            return Small::Not(found);
        }
        let dst = &mut buf[..len];
        #[cfg(target_arch = "x86_64")]
        // SAFETY: inside the line, as above; `dst` is nobody else's.
        unsafe {
            crate::store::copy_small(dst.as_mut_ptr(), src.cast(), len);
        }
        #[cfg(not(target_arch = "x86_64"))]
        Line::from_parts(self.load_body(line), 0).copy_to(dst);
        Small::Taken {
            len,
            lower: seal as u32,
        }
    }

    /// Stores a line of up to 48 bytes, filled up with zeros, and its words 6 and 7: the last one with release.
    ///
    /// # Panics
    /// When `line` is not below [`View::lines`], or there are more bytes.
    #[inline(always)]
    pub fn store_small(&self, line: u64, bytes: &[u8], word6: u64, word7: u64) {
        #[cfg(target_arch = "x86_64")]
        {
            assert!(line < self.lines() && bytes.len() <= 48, "outside the view");
            let dst = self.base.wrapping_add(line as usize * LINE_WORDS);
            let word = |i| {
                // SAFETY: in the line, in bounds by the assertion above; otherwise as in `word`.
                unsafe { AtomicU64::from_ptr(dst.add(i)) }
            };
            if bytes.len() < 48 {
                for i in 0..6 {
                    word(i).store(0, Ordering::Relaxed);
                }
            }
            // SAFETY: inside the line, as above; `bytes` is nobody else's.
            unsafe { crate::store::copy_small(dst.cast(), bytes.as_ptr(), bytes.len()) };
            word(6).store(word6.to_le(), Ordering::Relaxed);
            word(7).store(word7.to_le(), Ordering::Release);
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            let mut content = Line::from_bytes(bytes);
            content.0[6] = word6;
            content.0[7] = word7;
            self.store_line(line, &content);
        }
    }

    /// Copies bytes out, from byte `from` on: each byte is loaded once, in no order.
    ///
    /// # Panics
    /// When the range does not lie inside the view.
    pub fn copy_out(&self, from: usize, dst: &mut [u8]) {
        self.count_remote_load();
        let mut at = from;
        let (head, rest) = dst.split_at_mut(dst.len().min(at.wrapping_neg() % 8));
        if !head.is_empty() {
            let word = self.load(at / 8, Ordering::Relaxed).to_le_bytes();
            head.copy_from_slice(&word[at % 8..at % 8 + head.len()]);
            at += head.len();
        }
        assert!(at / 8 + rest.len() / 8 <= self.words, "range outside the view");
        let lines = rest.len() / LINE_BYTES;
        let (blocks, rest) = rest.split_at_mut(lines * LINE_BYTES);
        // SAFETY: in bounds by the assertion above, `blocks` is ours alone; otherwise as in `word`.
        unsafe { crate::store::copy_lines(blocks.as_mut_ptr(), self.base.add(at / 8).cast(), lines) };
        at += blocks.len();
        let mut words = rest.chunks_exact_mut(8);
        let count = words.len();
        for (i, slot) in (&mut words).enumerate() {
            // SAFETY: in bounds by the assertion above; otherwise as in `word`.
            let word = unsafe { AtomicU64::from_ptr(self.base.add(at / 8 + i)) }.load(Ordering::Relaxed);
            slot.copy_from_slice(&word.to_ne_bytes());
        }
        let tail = words.into_remainder();
        if !tail.is_empty() {
            let word = self.load(at / 8 + count, Ordering::Relaxed).to_le_bytes();
            tail.copy_from_slice(&word[..tail.len()]);
        }
    }

    /// Stores bytes one by one, relaxed, from byte `to` on: the bytes beside them, which another party may be writing,
    /// are left alone even within a word.
    ///
    /// # Panics
    /// When the range does not lie inside the view.
    pub fn store_bytes(&self, to: usize, bytes: &[u8]) {
        let end = to.checked_add(bytes.len());
        assert!(
            end.is_some_and(|end| end <= self.words * 8),
            "range outside the view"
        );
        for (i, byte) in bytes.iter().enumerate() {
            let at = self.base.cast::<u8>().wrapping_add(to + i);
            // SAFETY: in bounds by the assertion above; otherwise as in `word`.
            unsafe { AtomicU8::from_ptr(at) }.store(*byte, Ordering::Relaxed);
        }
    }

    /// Copies bytes in, to byte `to`, a multiple of 64, and fills the last line up with zeros. Stores are of 8 or 16
    /// bytes, relaxed.
    ///
    /// # Panics
    /// When the lines do not lie inside the view, or `to` is not the start of a line.
    pub fn copy_in(&self, to: usize, bytes: &[u8]) {
        let base = to / 8;
        let padded = bytes.len().next_multiple_of(LINE_BYTES) / 8;
        assert!(
            to.is_multiple_of(LINE_BYTES) && base + padded <= self.words,
            "range outside the view"
        );
        let lines = bytes.len() / LINE_BYTES;
        let (blocks, bytes) = bytes.split_at(lines * LINE_BYTES);
        // SAFETY: in bounds by the assertion above; `blocks` is borrowed, and the mapping overlaps nothing of Rust's.
        unsafe { crate::store::copy_lines(self.base.add(base).cast(), blocks.as_ptr(), lines) };
        let words = bytes.chunks_exact(8);
        let mut at = base + lines * LINE_WORDS;
        let store = |at: usize, word: u64| {
            // SAFETY: in bounds by the assertion above; otherwise as in `word`.
            unsafe { AtomicU64::from_ptr(self.base.add(at)) }.store(word, Ordering::Relaxed);
        };
        let rest = words.remainder();
        for word in words {
            store(at, u64::from_ne_bytes(word.try_into().unwrap_or([0; 8])));
            at += 1;
        }
        if !rest.is_empty() {
            let mut word = [0; 8];
            word[..rest.len()].copy_from_slice(rest);
            store(at, u64::from_ne_bytes(word));
            at += 1;
        }
        while at < base + padded {
            store(at, 0);
            at += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroed_shared_and_sealed() {
        let region = Arc::new(Region::allocate(64, Pages::Normal).unwrap());
        assert!(region.bytes() >= 4096);
        let view = region.view();
        assert!((0..view.words()).all(|i| view.load(i, Ordering::Relaxed) == 0));
        assert!(
            rustix::fs::ftruncate(region.descriptor(), 0).is_err(),
            "a peer could shrink it"
        );
        let other = Arc::new(
            Region::from_peer(region.descriptor().try_clone_to_owned().unwrap(), region.bytes()).unwrap(),
        );
        view.store(9, 77, Ordering::Release);
        let before = remote_loads();
        assert_eq!(other.view().load(9, Ordering::Acquire), 77);
        assert_eq!(view.load(9, Ordering::Acquire), 77);
        // Other tests read peers' memory too.
        assert!(
            !cfg!(debug_assertions) || remote_loads() > before,
            "a read of a peer's memory is counted"
        );
    }

    #[test]
    fn single_bytes_leave_their_neighbours_alone() {
        let view = Arc::new(Region::allocate(64, Pages::Normal).unwrap()).view();
        view.store(0, u64::MAX, Ordering::Relaxed);
        view.store(1, u64::MAX, Ordering::Relaxed);
        view.store_bytes(6, &[1, 2, 3]);
        assert_eq!(view.load(0, Ordering::Relaxed), 0x0201_FFFF_FFFF_FFFF);
        assert_eq!(view.load(1, Ordering::Relaxed), 0xFFFF_FFFF_FFFF_FF03);
        let end = view.words() * 8;
        view.store_bytes(end - 1, &[7]);
        let behind = std::panic::AssertUnwindSafe(|| view.store_bytes(end - 1, &[7, 7]));
        let behind = std::panic::catch_unwind(behind);
        assert!(behind.is_err(), "behind the end");
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        for bytes in [0, 1, 63, 65] {
            assert!(matches!(
                Region::allocate(bytes, Pages::Normal),
                Err(RegionError::BadSize { bytes: b }) if b == bytes
            ));
        }
        let e = Region::allocate(1 << 62, Pages::Normal).unwrap_err().to_string();
        assert!(e.contains(&(1u64 << 62).to_string()), "{e}");
    }

    #[test]
    fn a_peer_descriptor_that_could_fault_is_refused() {
        let plain = rustix::fs::memfd_create("t", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&plain, 4096).unwrap();
        assert!(matches!(
            Region::from_peer(plain, 4096),
            Err(RegionError::BadDescriptor { .. })
        ));
        let (r, _w) = rustix::pipe::pipe().unwrap();
        assert!(matches!(
            Region::from_peer(r, 4096),
            Err(RegionError::BadDescriptor { .. })
        ));
        let short = Region::allocate(4096, Pages::Normal).unwrap();
        for announced in [64, short.bytes() - 64, 1 << 20] {
            let fd = short.descriptor().try_clone_to_owned().unwrap();
            assert!(matches!(
                Region::from_peer(fd, announced),
                Err(RegionError::BadDescriptor { .. })
            ));
        }
    }

    #[test]
    fn revoked_memory_stays_addressable_and_is_no_longer_shared() {
        let region = Arc::new(Region::allocate(4096, Pages::Normal).unwrap());
        let other = Arc::new(
            Region::from_peer(region.descriptor().try_clone_to_owned().unwrap(), region.bytes()).unwrap(),
        );
        let (mine, theirs) = (region.view(), other.view());
        theirs.store(0, 1, Ordering::Relaxed);
        other.revoke().unwrap();
        theirs.store(0, 2, Ordering::Relaxed);
        assert_eq!(mine.load(0, Ordering::Relaxed), 1);
        assert_eq!(theirs.load(1, Ordering::Relaxed), 0);
    }

    #[test]
    fn copies_of_every_offset_and_length() {
        let region = Arc::new(Region::allocate(4096, Pages::Normal).unwrap());
        let view = region.view();
        let bytes: Vec<u8> = (0..=255).collect();
        for len in 0..=256 {
            for word in 0..view.words() {
                view.store(word, u64::MAX, Ordering::Relaxed);
            }
            view.copy_in(128, &bytes[..len]);
            let padded = len.next_multiple_of(64);
            let mut out = vec![0; 64 + padded + 64];
            view.copy_out(64, &mut out);
            assert!(out[..64].iter().all(|b| *b == 0xff));
            assert_eq!(out[64..64 + len], bytes[..len]);
            assert!(out[64 + len..64 + padded].iter().all(|b| *b == 0));
            assert!(out[64 + padded..].iter().all(|b| *b == 0xff));
        }
        view.copy_in(0, &bytes);
        for from in 0..64 {
            for len in 0..128 {
                let mut out = vec![0; len];
                view.copy_out(from, &mut out);
                assert_eq!(out, bytes[from..from + len]);
            }
        }
    }

    #[test]
    fn parts_stay_inside() {
        let region = Arc::new(Region::allocate(4096, Pages::Normal).unwrap());
        let view = region.view();
        assert_eq!(view.part(60, 4).unwrap().lines(), 4);
        assert!(view.part(60, 5).is_none());
        assert!(view.part(u64::MAX, 2).is_none());
    }

    #[test]
    #[should_panic(expected = "word outside the view")]
    fn loads_outside_panic_before_they_touch_memory() {
        let region = Arc::new(Region::allocate(4096, Pages::Normal).unwrap());
        let view = region.view();
        view.load(view.words(), Ordering::Relaxed);
    }
}
