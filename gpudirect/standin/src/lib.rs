//! A host stand-in of a GPU driver's library, for tests: it has the driver's function names, host memory behind them, and
//! faults on demand. There is no GPU in it.
//!
//! What it proves: order of calls, flags, error mapping, tear-down, and the logic of the device code, which it runs by
//! interpreting the PTX ([`ptx`]). What it does not: anything about a GPU's ordering, speed, or its driver's real limits.
//!
//! The shared object is loaded under the real one's name from a folder of the test's own. Each copy of the file is an instance
//! with a state of its own; its faults are set by `ntb_standin_configure`, or by the variable `NTB_HOST_STANDIN`:
//!
//! | word | effect |
//! | --- | --- |
//! | `stub` | what the toolkit's stub library does: `cuInit` gives 34 |
//! | `no-device` | no GPU is there |
//! | `not-permitted` | registering I/O memory gives 800 |
//! | `not-supported` | exporting memory gives 801 |
//! | `no-dma-buf`, `no-mmap` | the attributes say so |
//! | `ordering=N` | what attribute 118 says: 0, 100, 200 |
//! | `no-flush` | the processor may not flush |
//! | `hold-stores` | what kernels store into registered memory, such as an aperture, does not complete |
//! | `lose-stores` | such stores go nowhere, without an error |
//! | `odd-address` | allocations begin 512 bytes behind a page |
//! | `lost=N` | from the Nth call on everything gives 719 |
//! | `capability=N` | compute capability, 90 at first |

#![allow(
    unsafe_code,
    missing_docs,
    unreachable_pub,
    reason = "the functions of a C library, with the names and meanings that library's manual gives them"
)]
#![allow(
    clippy::missing_safety_doc,
    clippy::unwrap_used,
    reason = "test code; what callers owe is in the driver's manual"
)]

mod gdr;
mod launch;
mod memory;
pub mod ptx;
mod state;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use state::{INVALID_VALUE, NO_DEVICE, OK, STUB, call, state};

type Ptr = *mut c_void;

/// Sets faults, in the words of the table above, in place of those set before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ntb_standin_configure(words: *const c_char) {
    // SAFETY: the test gives a text that ends with a zero.
    let words = unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned();
    state().configure(&words);
}

/// Copies what was called so far, one call a line, into `room` bytes at `to`, and gives the length of all of it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ntb_standin_log(to: *mut u8, room: usize) -> usize {
    let log = state().log.join("\n");
    let n = log.len().min(room);
    // SAFETY: the test gives room for `room` bytes.
    unsafe { std::ptr::copy_nonoverlapping(log.as_ptr(), to, n) };
    log.len()
}

/// How many allocations, registrations, streams, modules and contexts have not been given back.
#[unsafe(no_mangle)]
pub extern "C" fn ntb_standin_left() -> usize {
    state().left()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuInit(flags: c_uint) -> c_int {
    call(format!("cuInit {flags}"), |s| {
        if flags != 0 {
            return INVALID_VALUE;
        }
        if s.stub { STUB } else { OK }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    call("cuDriverGetVersion".into(), |_| {
        // SAFETY: the caller's promise.
        unsafe { version.write(13030) };
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    call("cuDeviceGetCount".into(), |s| {
        if s.no_device {
            return NO_DEVICE;
        }
        // SAFETY: the caller's promise.
        unsafe { count.write(1) };
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, index: c_int) -> c_int {
    call(format!("cuDeviceGet {index}"), |_| {
        if index != 0 {
            return 101;
        }
        // SAFETY: the caller's promise.
        unsafe { device.write(0) };
        OK
    })
}

fn text(to: *mut c_char, room: c_int, text: &str) -> c_int {
    let bytes = text.as_bytes();
    let n = bytes.len().min(room.max(1) as usize - 1);
    // SAFETY: the caller gives `room` bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast(), n);
        to.add(n).write(0);
    }
    OK
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(to: *mut c_char, room: c_int, _device: c_int) -> c_int {
    call("cuDeviceGetName".into(), |_| {
        text(to, room, "host stand-in (no GPU)")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetPCIBusId(to: *mut c_char, room: c_int, _device: c_int) -> c_int {
    call("cuDeviceGetPCIBusId".into(), |_| text(to, room, "0000:41:00.0"))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) -> c_int {
    call("cuDeviceTotalMem_v2".into(), |_| {
        // SAFETY: the caller's promise.
        unsafe { bytes.write(1 << 30) };
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) -> c_int {
    call(format!("cuDeviceGetAttribute {attribute}"), |s| {
        let answer = match attribute {
            75 => (s.capability / 10) as c_int,
            76 => (s.capability % 10) as c_int,
            98 => 1,
            110 | 116 => 1,
            117 => c_int::from(!s.no_flush),
            118 => s.ordering,
            124 => c_int::from(!s.no_dma_buf),
            146 => 0,
            152 => c_int::from(!s.no_mmap),
            _ => return INVALID_VALUE,
        };
        // SAFETY: the caller's promise.
        unsafe { value.write(answer) };
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut Ptr, _device: c_int) -> c_int {
    call("cuDevicePrimaryCtxRetain".into(), |s| {
        s.contexts += 1;
        // SAFETY: the caller's promise.
        unsafe { context.write(std::ptr::without_provenance_mut(0x1000)) };
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> c_int {
    call("cuDevicePrimaryCtxRelease_v2".into(), |s| {
        s.contexts -= 1;
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSetCurrent(context: Ptr) -> c_int {
    // Called before everything else: not worth a line of the log.
    let s = state();
    if s.is_lost() {
        return state::LOST;
    }
    if context.addr() == 0x1000 && s.contexts > 0 {
        OK
    } else {
        201
    }
}
