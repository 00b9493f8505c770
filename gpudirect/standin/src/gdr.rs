//! The gdrcopy library's functions: pinning gives the same host memory.

use std::ffi::{c_int, c_ulong, c_void};

use crate::state::state;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GdrHandle(c_ulong);

const PAGE: u64 = 64 << 10;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_open() -> *mut c_void {
    let mut s = state();
    s.log.push("gdr_open".into());
    if s.no_device {
        return std::ptr::null_mut();
    }
    s.contexts += 1;
    std::ptr::without_provenance_mut(0x3000)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_close(_device: *mut c_void) -> c_int {
    let mut s = state();
    s.log.push("gdr_close".into());
    s.contexts -= 1;
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_pin_buffer(
    _device: *mut c_void,
    at: c_ulong,
    bytes: usize,
    token: u64,
    space: u32,
    handle: *mut GdrHandle,
) -> c_int {
    let mut s = state();
    s.log.push(format!("gdr_pin_buffer {bytes}"));
    if !at.is_multiple_of(PAGE) || token != 0 || space != 0 {
        return 22;
    }
    if s.not_supported {
        return 12; // what a board says whose BAR1 is full
    }
    s.registered.insert(at, bytes as u64);
    // SAFETY: the caller's promise.
    unsafe { handle.write(GdrHandle(at)) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_unpin_buffer(_device: *mut c_void, handle: GdrHandle) -> c_int {
    let mut s = state();
    s.log.push("gdr_unpin_buffer".into());
    if s.registered.remove(&handle.0).is_some() {
        0
    } else {
        22
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_map(
    _device: *mut c_void,
    handle: GdrHandle,
    at: *mut *mut c_void,
    bytes: usize,
) -> c_int {
    let mut s = state();
    s.log.push(format!("gdr_map {bytes}"));
    if s.registered.get(&handle.0) != Some(&(bytes as u64)) {
        return 22;
    }
    // SAFETY: the caller's promise.
    unsafe { at.write(std::ptr::with_exposed_provenance_mut(handle.0 as usize)) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn gdr_unmap(
    _device: *mut c_void,
    _handle: GdrHandle,
    _at: *mut c_void,
    bytes: usize,
) -> c_int {
    state().log.push(format!("gdr_unmap {bytes}"));
    0
}
