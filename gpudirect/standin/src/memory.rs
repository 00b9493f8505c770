//! Memory: allocation, export, registration, copies.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::IntoRawFd;

use rustix::{
    fs::{MemfdFlags, SealFlags},
    mm::{MapFlags, ProtFlags},
};

use crate::launch::finish;
use crate::state::{
    ALREADY_REGISTERED, Allocation, INVALID_VALUE, NOT_PERMITTED, NOT_REGISTERED, NOT_SUPPORTED, OK,
    OUT_OF_MEMORY, Reach, call,
};

/// Where allocations begin: as a driver's large ones do.
const ALIGN: usize = 2 << 20;
const PAGE: u64 = 4096;
const IOMEMORY: c_uint = 4;
const DEVICEMAP: c_uint = 2;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(at: *mut u64, bytes: usize) -> c_int {
    call(format!("cuMemAlloc_v2 {bytes}"), |s| {
        if bytes == 0 {
            return INVALID_VALUE;
        }
        if bytes > 1 << 30 {
            return OUT_OF_MEMORY;
        }
        let skip = if s.odd_address { 512 } else { 0 };
        let length = (bytes + skip).next_multiple_of(ALIGN);
        let fd = rustix::fs::memfd_create("host-stand-in", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .unwrap();
        rustix::fs::ftruncate(&fd, length as u64).unwrap();
        // Emulated bridges take no file that could shrink under them.
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
        // SAFETY: a new mapping at an address the kernel chooses.
        let room = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                length + ALIGN,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .unwrap();
        let map = room.addr().next_multiple_of(ALIGN);
        // SAFETY: in place of a part of the room made above.
        unsafe {
            rustix::mm::mmap(
                room.with_addr(map),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED,
                &fd,
                0,
            )
        }
        .unwrap();
        room.expose_provenance();
        let start = (map + skip) as u64;
        s.allocations.insert(
            start,
            Allocation {
                fd,
                map,
                mapped: length,
                skip: skip as u64,
                sync_memops: false,
            },
        );
        s.reach.insert(
            start,
            Reach {
                bytes: bytes as u64,
                loads: true,
            },
        );
        // SAFETY: the caller's promise.
        unsafe { at.write(start) };
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(at: u64) -> c_int {
    call("cuMemFree_v2".into(), |s| {
        let Some(gone) = s.allocations.remove(&at) else {
            return INVALID_VALUE;
        };
        s.reach.remove(&at);
        // SAFETY: mapped by `cuMemAlloc_v2`; kernels check against `reach` before each access.
        let _ = unsafe { rustix::mm::munmap(std::ptr::with_exposed_provenance_mut(gone.map), gone.mapped) };
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerSetAttribute(value: *const c_void, attribute: c_int, at: u64) -> c_int {
    call(format!("cuPointerSetAttribute {attribute}"), |s| {
        const SYNC_MEMOPS: c_int = 6;
        // SAFETY: for this attribute the value is a 32-bit number.
        let on = attribute == SYNC_MEMOPS && unsafe { value.cast::<c_uint>().read() } == 1;
        match s.allocations.get_mut(&at) {
            Some(allocation) if on => {
                allocation.sync_memops = true;
                OK
            }
            _ => INVALID_VALUE,
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetHandleForAddressRange(
    handle: *mut c_void,
    at: u64,
    bytes: usize,
    kind: c_int,
    flags: u64,
) -> c_int {
    call(
        format!("cuMemGetHandleForAddressRange {bytes} kind {kind} flags {flags}"),
        |s| {
            if s.not_supported || s.no_dma_buf {
                return NOT_SUPPORTED;
            }
            let found = s.allocations.range(..=at).next_back();
            let Some((start, allocation)) = found else {
                return INVALID_VALUE;
            };
            let inside = at + bytes as u64 <= start - allocation.skip + allocation.mapped as u64;
            let whole = at.is_multiple_of(PAGE) && (bytes as u64).is_multiple_of(PAGE) && bytes > 0;
            if !inside || !whole || kind != 1 || flags != 0 || !allocation.sync_memops {
                return INVALID_VALUE;
            }
            // A file of its own, that begins where the range does: as a dma-buf would.
            let from = at - (start - allocation.skip);
            if from != 0 {
                return INVALID_VALUE;
            }
            let fd = allocation.fd.try_clone().unwrap();
            // SAFETY: for this kind the caller gives room for a descriptor.
            unsafe { handle.cast::<c_int>().write(fd.into_raw_fd()) };
            OK
        },
    )
}

/// Whether all pages of a range are in this process's page tables, as the driver finds them: it takes no page faults.
fn populated(address: u64, bytes: u64) -> bool {
    use std::os::unix::fs::FileExt;
    let Ok(map) = std::fs::File::open("/proc/self/pagemap") else {
        return false;
    };
    (address / PAGE..(address + bytes).div_ceil(PAGE)).all(|page| {
        let mut entry = [0; 8];
        map.read_exact_at(&mut entry, page * 8).is_ok() && u64::from_le_bytes(entry) >> 63 == 1
    })
}

/// Whether all of a range is mapped at all.
fn mapped(address: u64, bytes: u64) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut at = address;
    for line in maps.lines() {
        let Some((from, to)) = line.split(' ').next().and_then(|r| r.split_once('-')) else {
            continue;
        };
        let number = |t| u64::from_str_radix(t, 16).unwrap_or(0);
        if number(from) <= at && at < number(to) {
            at = number(to);
        }
        if at >= address + bytes {
            return true;
        }
    }
    false
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostRegister_v2(at: *mut c_void, bytes: usize, flags: c_uint) -> c_int {
    call(format!("cuMemHostRegister_v2 {bytes} flags {flags}"), |s| {
        let (address, length) = (at.expose_provenance() as u64, bytes as u64);
        let io = flags & IOMEMORY != 0;
        if flags & DEVICEMAP == 0 || bytes == 0 || !mapped(address, length) {
            return INVALID_VALUE;
        }
        if io && s.not_permitted {
            return NOT_PERMITTED;
        }
        if io && (!address.is_multiple_of(PAGE) || !populated(address, length)) {
            return INVALID_VALUE;
        }
        if s.registered.insert(address, length).is_some() {
            return ALREADY_REGISTERED;
        }
        s.reach.insert(
            address,
            Reach {
                bytes: length,
                loads: !io,
            },
        );
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostUnregister(at: *mut c_void) -> c_int {
    call("cuMemHostUnregister".into(), |s| {
        let address = at.addr() as u64;
        if s.registered.remove(&address).is_none() {
            return NOT_REGISTERED;
        }
        s.reach.remove(&address);
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostGetDevicePointer_v2(
    at: *mut u64,
    address: *mut c_void,
    flags: c_uint,
) -> c_int {
    call("cuMemHostGetDevicePointer_v2".into(), |s| {
        let address = address.addr() as u64;
        if flags != 0 || !s.registered.contains_key(&address) {
            return INVALID_VALUE;
        }
        // SAFETY: the caller's promise.
        unsafe { at.write(address) };
        OK
    })
}

/// Copies by words that another party may be storing or loading.
fn copy(to: u64, from: u64, bytes: usize) {
    for i in 0..bytes as u64 {
        let (to, from) = (
            std::ptr::with_exposed_provenance_mut::<u8>((to + i) as usize),
            std::ptr::with_exposed_provenance::<u8>((from + i) as usize),
        );
        // SAFETY: both ranges were checked by the callers, or are the caller's own memory.
        unsafe { to.write_volatile(from.read_volatile()) };
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) -> c_int {
    call(format!("cuMemcpyHtoD_v2 {bytes}"), |s| {
        if !s.reaches(to, bytes as u64, false) {
            return INVALID_VALUE;
        }
        copy(to, from.expose_provenance() as u64, bytes);
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    bytes: usize,
    stream: *mut c_void,
) -> c_int {
    let ended = finish(stream);
    call(format!("cuMemcpyHtoDAsync_v2 {bytes}"), |s| {
        if ended != OK {
            return ended;
        }
        if !s.reaches(to, bytes as u64, false) {
            return INVALID_VALUE;
        }
        copy(to, from.expose_provenance() as u64, bytes);
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) -> c_int {
    call(format!("cuMemcpyDtoH_v2 {bytes}"), |s| {
        if !s.reaches(from, bytes as u64, true) {
            return INVALID_VALUE;
        }
        copy(to.expose_provenance() as u64, from, bytes);
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFlushGPUDirectRDMAWrites(target: c_int, scope: c_int) -> c_int {
    call(format!("cuFlushGPUDirectRDMAWrites {target} {scope}"), |s| {
        if target != 0 || scope != 100 {
            return INVALID_VALUE;
        }
        if s.no_flush { NOT_SUPPORTED } else { OK }
    })
}
