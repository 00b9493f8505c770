//! Streams, modules and kernels: device code runs on threads of the host, interpreted.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::{Arc, atomic::Ordering},
};

use crate::{
    ptx::{self, Fault, Memory, Module},
    state::{ILLEGAL_ADDRESS, INVALID_HANDLE, INVALID_VALUE, LOST, NOT_FOUND, NOT_READY, OK, call, state},
};

type Ptr = *mut c_void;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut Ptr, flags: c_uint) -> c_int {
    call(format!("cuStreamCreate {flags}"), |s| {
        let handle = s.handle();
        s.streams.insert(handle, None);
        // SAFETY: the caller's promise.
        unsafe { stream.write(std::ptr::without_provenance_mut(handle)) };
        OK
    })
}

/// Waits for what runs on a stream, without holding the state meanwhile.
pub(crate) fn finish(stream: Ptr) -> c_int {
    let running = match state().streams.get_mut(&stream.addr()) {
        None => return INVALID_HANDLE,
        Some(running) => running.take(),
    };
    running.map_or(OK, |thread| thread.join().unwrap_or(LOST))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamDestroy_v2(stream: Ptr) -> c_int {
    let ended = finish(stream);
    call("cuStreamDestroy_v2".into(), |s| {
        s.streams.remove(&stream.addr());
        ended
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamQuery(stream: Ptr) -> c_int {
    {
        let s = state();
        if s.is_lost() {
            return LOST;
        }
        match s.streams.get(&stream.addr()) {
            None => return INVALID_HANDLE,
            Some(Some(thread)) if !thread.is_finished() => return NOT_READY,
            Some(_) => {}
        }
    }
    finish(stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamSynchronize(stream: Ptr) -> c_int {
    let ended = finish(stream);
    call("cuStreamSynchronize".into(), |_| ended)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWriteValue64_v2(stream: Ptr, at: u64, value: u64, flags: c_uint) -> c_int {
    let ended = finish(stream);
    call(format!("cuStreamWriteValue64_v2 flags {flags}"), |s| {
        if ended != OK {
            return ended;
        }
        if !at.is_multiple_of(8) || !s.reaches(at, 8, false) {
            return INVALID_VALUE;
        }
        // SAFETY: found in `reach` under the lock that is still held, so mapped; accessed through atomics and volatile copies
        // only.
        unsafe { std::sync::atomic::AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(at as usize)) }
            .store(value, Ordering::Release);
        OK
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut Ptr, image: *const c_void) -> c_int {
    // SAFETY: the caller gives text that ends with a zero.
    let text = unsafe { CStr::from_ptr(image.cast()) }
        .to_string_lossy()
        .into_owned();
    call(
        format!("cuModuleLoadData {} bytes", text.len()),
        |s| match Module::parse(&text) {
            Ok(parsed) => {
                let handle = s.handle();
                s.modules.insert(handle, Arc::new(parsed));
                // SAFETY: the caller's promise.
                unsafe { module.write(std::ptr::without_provenance_mut(handle)) };
                OK
            }
            Err(why) => {
                s.log.push(why);
                218 // invalid PTX
            }
        },
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleUnload(module: Ptr) -> c_int {
    call("cuModuleUnload".into(), |s| {
        s.functions.clear();
        if s.modules.remove(&module.addr()).is_some() {
            OK
        } else {
            INVALID_HANDLE
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(function: *mut Ptr, module: Ptr, name: *const c_char) -> c_int {
    // SAFETY: the caller gives text that ends with a zero.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    call(format!("cuModuleGetFunction {name}"), |s| {
        let Some(found) = s.modules.get(&module.addr()).cloned() else {
            return INVALID_HANDLE;
        };
        if found.entry(&name).is_none() {
            return NOT_FOUND;
        }
        let handle = s.handle();
        s.functions.insert(handle, (found, name));
        // SAFETY: the caller's promise.
        unsafe { function.write(std::ptr::without_provenance_mut(handle)) };
        OK
    })
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "as the driver has it")]
pub unsafe extern "C" fn cuLaunchKernel(
    function: Ptr,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared: c_uint,
    stream: Ptr,
    arguments: *mut Ptr,
    extra: *mut Ptr,
) -> c_int {
    call(format!("cuLaunchKernel {block_x} threads"), |s| {
        if [grid_x, grid_y, grid_z, block_y, block_z] != [1; 5]
            || shared != 0
            || !extra.is_null()
            || block_x == 0
        {
            return INVALID_VALUE;
        }
        let Some((module, name)) = s.functions.get(&function.addr()).cloned() else {
            return INVALID_HANDLE;
        };
        if !matches!(s.streams.get(&stream.addr()), Some(None)) {
            return INVALID_HANDLE; // one kernel a stream is all that is used
        }
        let Some(entry) = module.entry(&name) else {
            return NOT_FOUND;
        };
        let mut values = Vec::new();
        for (i, bytes) in entry.parameter_bytes().iter().enumerate() {
            // SAFETY: the caller gives one pointer a parameter, to as many bytes as the kernel declares.
            let value = unsafe {
                let at = *arguments.add(i);
                match bytes {
                    4 => u64::from(at.cast::<u32>().read_unaligned()),
                    _ => at.cast::<u64>().read_unaligned(),
                }
            };
            values.push(value);
        }
        let thread = std::thread::spawn(move || match ptx::run(&module, &name, block_x, &values, &Host) {
            Ok(()) => OK,
            Err(Fault::Address { .. }) => ILLEGAL_ADDRESS,
            Err(other) => {
                state().log.push(format!("kernel {name}: {other}"));
                LOST
            }
        });
        s.streams.insert(stream.addr(), Some(thread));
        OK
    })
}

/// Memory of this process, as far as kernels reach it.
#[derive(Debug)]
struct Host;

impl Memory for Host {
    fn load(&self, at: u64, bytes: u32, order: Ordering) -> Result<u64, Fault> {
        if !at.is_multiple_of(bytes.into()) || !state().reaches(at, bytes.into(), true) {
            return Err(Fault::Address {
                at,
                bytes,
                store: false,
            });
        }
        let p = at as usize;
        // SAFETY: the range was found in `reach` a moment ago and is mapped; it is only ever accessed through atomics and
        // volatile copies.
        Ok(unsafe {
            use std::{ptr::with_exposed_provenance_mut as ptr, sync::atomic::*};
            match bytes {
                1 => AtomicU8::from_ptr(ptr(p)).load(order).into(),
                4 => AtomicU32::from_ptr(ptr(p)).load(order).into(),
                _ => AtomicU64::from_ptr(ptr(p)).load(order),
            }
        })
    }

    fn store(&self, at: u64, bytes: u32, value: u64, order: Ordering) -> Result<(), Fault> {
        if !at.is_multiple_of(bytes.into()) || !state().reaches(at, bytes.into(), false) {
            return Err(Fault::Address {
                at,
                bytes,
                store: true,
            });
        }
        while state().holds(at) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        if state().loses(at) {
            return Ok(());
        }
        let p = at as usize;
        // SAFETY: as above.
        unsafe {
            use std::{ptr::with_exposed_provenance_mut as ptr, sync::atomic::*};
            match bytes {
                1 => AtomicU8::from_ptr(ptr(p)).store(value as u8, order),
                4 => AtomicU32::from_ptr(ptr(p)).store(value as u32, order),
                _ => AtomicU64::from_ptr(ptr(p)).store(value, order),
            }
        }
        Ok(())
    }
}
