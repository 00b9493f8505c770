//! The gdrcopy library: a mapping of a GPU's memory where the driver itself gives none. Loaded at run time.

#![allow(unsafe_code, reason = "loading a library, and calling it")]

use std::{
    ffi::{c_int, c_ulong, c_void},
    path::Path,
    ptr,
    sync::Arc,
};

use libloading::Library;
use rustix::io::Errno;

use crate::{GpuError, memory::GPU_PAGE};

const NAMES: [&str; 2] = ["libgdrapi.so.2", "libgdrapi.so"];

/// A handle as the library passes it: a structure of one number.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Handle(c_ulong);

/// The library and its open device.
pub struct Gdrcopy {
    calls: Calls,
    device: *mut c_void,
    _library: Library,
}

struct Calls {
    close: unsafe extern "C" fn(*mut c_void) -> c_int,
    pin: unsafe extern "C" fn(*mut c_void, c_ulong, usize, u64, u32, *mut Handle) -> c_int,
    unpin: unsafe extern "C" fn(*mut c_void, Handle) -> c_int,
    map: unsafe extern "C" fn(*mut c_void, Handle, *mut *mut c_void, usize) -> c_int,
    unmap: unsafe extern "C" fn(*mut c_void, Handle, *mut c_void, usize) -> c_int,
}

// SAFETY: the library's calls on one device are thread-safe by its manual; the pointer is its own.
unsafe impl Send for Gdrcopy {}
// SAFETY: as above.
unsafe impl Sync for Gdrcopy {}

impl std::fmt::Debug for Gdrcopy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Gdrcopy")
    }
}

impl Gdrcopy {
    /// The library of this machine.
    pub fn find() -> Result<Arc<Self>, GpuError> {
        let mut why = None;
        for name in NAMES {
            match Self::load(Path::new(name)) {
                Ok(found) => return Ok(found),
                Err(e) => why = Some(e),
            }
        }
        Err(why.unwrap_or_else(|| GpuError::new("gdrcopy-missing", 3, "no name was tried")))
    }

    /// The library in this file.
    pub fn load(path: &Path) -> Result<Arc<Self>, GpuError> {
        // SAFETY: a file of this name that is something else is outside of what a process can guard against.
        let library = unsafe { Library::new(path) }.map_err(|e| {
            GpuError::new(
                "gdrcopy-missing",
                3,
                format!(
                    "gdrcopy's library was not found ({}): install gdrcopy and load its module gdrdrv",
                    GpuError::loading(&e)
                ),
            )
        })?;
        let missing = |name: &str| {
            GpuError::new(
                "gdrcopy-too-old",
                7,
                format!("{} has no function {name}", path.display()),
            )
        };
        // SAFETY: the signatures are those of the library's header.
        let (open, calls) = unsafe {
            let open: unsafe extern "C" fn() -> *mut c_void =
                *library.get(b"gdr_open\0").map_err(|_| missing("gdr_open"))?;
            let calls = Calls {
                close: *library.get(b"gdr_close\0").map_err(|_| missing("gdr_close"))?,
                pin: *library
                    .get(b"gdr_pin_buffer\0")
                    .map_err(|_| missing("gdr_pin_buffer"))?,
                unpin: *library
                    .get(b"gdr_unpin_buffer\0")
                    .map_err(|_| missing("gdr_unpin_buffer"))?,
                map: *library.get(b"gdr_map\0").map_err(|_| missing("gdr_map"))?,
                unmap: *library.get(b"gdr_unmap\0").map_err(|_| missing("gdr_unmap"))?,
            };
            (open, calls)
        };
        // SAFETY: takes nothing.
        let device = unsafe { open() };
        if device.is_null() {
            return Err(GpuError::new(
                "gdrcopy-no-device",
                6,
                "gdrcopy's library is there and cannot open /dev/gdrdrv: load the module with 'modprobe gdrdrv', and let this user \
                 read and write the device",
            ));
        }
        Ok(Arc::new(Self {
            calls,
            device,
            _library: library,
        }))
    }
}

impl Drop for Gdrcopy {
    fn drop(&mut self) {
        // SAFETY: opened in `load`, closed once; what was pinned holds this object.
        let _ = unsafe { (self.calls.close)(self.device) };
    }
}

/// Memory of a GPU, pinned and mapped.
#[derive(Debug)]
pub struct Pinned {
    owner: Arc<Gdrcopy>,
    handle: Handle,
    ptr: *mut c_void,
    bytes: usize,
}

// SAFETY: a mapping belongs to the process; what lies there is reached through atomics and by devices only.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Pins and maps `bytes` bytes at `at`, both multiples of [`GPU_PAGE`].
    pub fn new(library: &Arc<Gdrcopy>, at: u64, bytes: u64) -> Result<Self, GpuError> {
        if !at.is_multiple_of(GPU_PAGE) || !bytes.is_multiple_of(GPU_PAGE) {
            return Err(GpuError::new(
                "gpu-alignment",
                2,
                format!("{bytes} bytes at {at:#x} are not whole pages of {GPU_PAGE} bytes"),
            ));
        }
        let refused = |call: &str, errno: c_int| {
            let errno = Errno::from_raw_os_error(errno.abs());
            let mut what = format!("{call} of {bytes} bytes failed: {errno}");
            if errno == Errno::NOMEM {
                what.push_str(
                    ": the board's BAR1 is full; 'nvidia-smi -q -d MEMORY' shows its size. Boards with 256 MiB let about 220 MiB be \
                     pinned: enable 'Above 4G decoding' and resizable BAR in the firmware set-up, or use less",
                );
            }
            GpuError::errno("gdrcopy-refused", 6, what, errno)
        };
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut pinned = Self {
            owner: Arc::clone(library),
            handle: Handle::default(),
            ptr: ptr::null_mut(),
            bytes: length,
        };
        let calls = &library.calls;
        // SAFETY: the device is open; the handle is a local.
        match unsafe {
            (calls.pin)(
                library.device,
                at as c_ulong,
                length,
                0,
                0,
                &raw mut pinned.handle,
            )
        } {
            0 => {}
            e => {
                // Nothing to undo.
                let error = refused("gdr_pin_buffer", e);
                pinned.bytes = 0;
                return Err(error);
            }
        }
        // SAFETY: pinned above; the pointer is a local.
        match unsafe { (calls.map)(library.device, pinned.handle, &raw mut pinned.ptr, length) } {
            0 if !pinned.ptr.is_null() => Ok(pinned),
            e => {
                pinned.ptr = ptr::null_mut();
                Err(refused("gdr_map", e))
            }
        }
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.ptr.cast()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let (calls, device) = (&self.owner.calls, self.owner.device);
        if !self.ptr.is_null() {
            // SAFETY: mapped in `new`, unmapped once.
            let _ = unsafe { (calls.unmap)(device, self.handle, self.ptr, self.bytes) };
        }
        // SAFETY: pinned in `new`, unpinned once.
        let _ = unsafe { (calls.unpin)(device, self.handle) };
    }
}
