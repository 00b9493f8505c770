//! One NVIDIA GPU as a [`Gpu`].

#![allow(unsafe_code, reason = "calls of the driver")]

use std::{
    ffi::{CStr, CString, c_char, c_int, c_uint, c_void},
    os::fd::{FromRawFd, OwnedFd},
    ptr,
    sync::Arc,
};

use cudarc::driver::sys::{
    self, CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_IOMEMORY, CUcontext, CUdevice,
    CUdevice_attribute_enum as attribute, CUfunction, CUmodule, CUstream,
};

use super::{
    codes::check,
    library::{Calls, Driver},
    running::Kernel,
};
use crate::{
    GpuError,
    kernels::PTX,
    seam::{Arg, Flush, Gpu, GpuFacts, HostMemory, Ordering, Running},
};

/// Attributes newer than the interface that the constants come from.
const HOST_ALLOC_DMA_BUF_SUPPORTED: c_int = 146;
const DMA_BUF_MMAP_SUPPORTED: c_int = 152;
/// Work of a stream that does not wait for the default stream.
const NON_BLOCKING: c_uint = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as c_uint;
/// The processor may have writes flushed ([`attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS`]).
const FLUSH_BY_HOST: i32 = 1;

/// An open GPU. The primary context is shared with everything else in the process that uses the runtime.
#[derive(Debug)]
pub struct Cuda {
    inner: Arc<Inner>,
    facts: GpuFacts,
}

/// What running kernels hold on to.
pub(super) struct Inner {
    pub(super) driver: Arc<Driver>,
    device: CUdevice,
    context: CUcontext,
    stream: CUstream,
    module: CUmodule,
}

// SAFETY: the handles are the driver's, which takes them from any thread; each call makes the context current in its own thread
// first.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner")
            .field("driver", &self.driver)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl Cuda {
    /// Opens GPU `index`, and loads the device code.
    pub fn open(driver: &Arc<Driver>, index: u32) -> Result<Self, GpuError> {
        let count = driver.count()?;
        if index >= count {
            return Err(GpuError::new(
                "gpu-none",
                3,
                format!("there is no gpu:{index}: the driver sees {count}, numbered from 0"),
            ));
        }
        let calls = &driver.calls;
        let mut device: CUdevice = 0;
        // SAFETY: the pointer is to a local of the type the function stores.
        check("cuDeviceGet", unsafe {
            (calls.device)(&raw mut device, index.cast_signed())
        })?;
        let facts = facts(driver, device, index)?;
        if facts.capability < 75 {
            return Err(GpuError::new(
                "gpu-code-refused",
                7,
                format!(
                    "{} has compute capability {}.{}: the device code needs 7.5 or newer",
                    facts.name,
                    facts.capability / 10,
                    facts.capability % 10
                ),
            ));
        }
        let mut inner = Inner {
            driver: Arc::clone(driver),
            device,
            context: ptr::null_mut(),
            stream: ptr::null_mut(),
            module: ptr::null_mut(),
        };
        // SAFETY: the pointer is to a field of the type the function stores; what it stores is undone when `inner` drops.
        check("cuDevicePrimaryCtxRetain", unsafe {
            (calls.retain)(&raw mut inner.context, device)
        })?;
        inner.enter()?;
        // SAFETY: as above.
        check("cuStreamCreate", unsafe {
            (calls.stream)(&raw mut inner.stream, NON_BLOCKING)
        })?;
        // SAFETY: the image is text that ends with a zero.
        check("cuModuleLoadData", unsafe {
            (calls.load_module)(&raw mut inner.module, PTX.as_ptr().cast())
        })?;
        Ok(Self {
            inner: Arc::new(inner),
            facts,
        })
    }

    fn calls(&self) -> Result<&Calls, GpuError> {
        self.inner.enter()?;
        Ok(&self.inner.driver.calls)
    }
}

impl Inner {
    /// Makes the context current in this thread.
    pub(super) fn enter(&self) -> Result<(), GpuError> {
        // SAFETY: the context is retained for as long as `self` lives.
        check("cuCtxSetCurrent", unsafe {
            (self.driver.calls.enter)(self.context)
        })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.context.is_null() {
            return;
        }
        // A context that is lost takes all it had with it: what is refused then is of no concern.
        let _ = self.enter();
        let calls = &self.driver.calls;
        if !self.module.is_null() {
            // SAFETY: loaded in `open` and unloaded once; no kernel runs, since each holds this object.
            let _ = unsafe { (calls.unload_module)(self.module) };
        }
        if !self.stream.is_null() {
            // SAFETY: created in `open` and destroyed once.
            let _ = unsafe { (calls.end_stream)(self.stream) };
        }
        // SAFETY: retained in `open` and released once.
        let _ = unsafe { (calls.release)(self.device) };
    }
}

impl Gpu for Cuda {
    fn facts(&self) -> &GpuFacts {
        &self.facts
    }

    fn allocate(&self, bytes: u64) -> Result<u64, GpuError> {
        let calls = self.calls()?;
        let mut at = 0;
        // SAFETY: the pointer is to a local of the type the function stores.
        check("cuMemAlloc", unsafe {
            (calls.allocate)(&raw mut at, length(bytes))
        })?;
        let yes: c_uint = 1;
        let sync = sys::CUpointer_attribute_enum::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS as c_int;
        // SAFETY: the attribute is a number of this type, and the address was allocated above.
        let set = check("cuPointerSetAttribute", unsafe {
            (calls.set_pointer_attribute)((&raw const yes).cast(), sync, at)
        });
        if let Err(e) = set {
            // SAFETY: allocated above and known to nobody.
            let _ = unsafe { (calls.free)(at) };
            return Err(e);
        }
        Ok(at)
    }

    fn free(&self, at: u64) -> Result<(), GpuError> {
        // SAFETY: an address that the driver does not know is refused by it.
        check("cuMemFree", unsafe { (self.calls()?.free)(at) })
    }

    fn export(&self, at: u64, bytes: u64) -> Result<OwnedFd, GpuError> {
        const CALL: &str = "cuMemGetHandleForAddressRange";
        let calls = self.calls()?;
        let export = calls.export.ok_or_else(|| missing(CALL))?;
        let kind = sys::CUmemRangeHandleType_enum::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD as c_int;
        let mut fd: c_int = -1;
        // SAFETY: for this kind of handle the function stores one descriptor. Flags are 0: the other mapping is for coherent
        // platforms and refused elsewhere.
        check(CALL, unsafe {
            export((&raw mut fd).cast(), at, length(bytes), kind, 0)
        })?;
        if fd < 0 {
            return Err(GpuError::new(
                "gpu-call",
                1,
                format!("{CALL} gave no descriptor and no error"),
            ));
        }
        // SAFETY: the driver has made it for this call and keeps no other hold on it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    unsafe fn register(&self, address: *mut u8, bytes: u64, what: HostMemory) -> Result<u64, GpuError> {
        let calls = self.calls()?;
        let flags = CU_MEMHOSTREGISTER_DEVICEMAP
            | match what {
                HostMemory::Ram => 0,
                HostMemory::Aperture => CU_MEMHOSTREGISTER_IOMEMORY,
            };
        // SAFETY: the caller vouches for the range.
        check("cuMemHostRegister", unsafe {
            (calls.host_register)(address.cast(), length(bytes), flags)
        })
        .map_err(|e| explain_register(e, what, bytes))?;
        let mut at = 0;
        // SAFETY: the pointer is to a local of the type the function stores; the range is registered.
        let found = check("cuMemHostGetDevicePointer", unsafe {
            (calls.host_pointer)(&raw mut at, address.cast(), 0)
        });
        if let Err(e) = found {
            let _ = self.unregister(address);
            return Err(e);
        }
        Ok(at)
    }

    fn unregister(&self, address: *mut u8) -> Result<(), GpuError> {
        // SAFETY: a range that is not registered is refused by the driver.
        check("cuMemHostUnregister", unsafe {
            (self.calls()?.host_unregister)(address.cast())
        })
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), GpuError> {
        // SAFETY: the source is a slice; a destination that is not the GPU's is refused by the driver.
        check("cuMemcpyHtoD", unsafe {
            (self.calls()?.copy_in)(at, bytes.as_ptr().cast(), bytes.len())
        })
    }

    fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), GpuError> {
        // SAFETY: the destination is a slice; a source that is not the GPU's is refused by the driver.
        check("cuMemcpyDtoH", unsafe {
            (self.calls()?.copy_out)(bytes.as_mut_ptr().cast(), at, bytes.len())
        })
    }

    fn publish(&self, at: u64, word: u64) -> Result<(), GpuError> {
        let calls = self.calls()?;
        let stream = self.inner.stream;
        // SAFETY: the stream is this object's. Flag 0: the write comes behind all that the stream did before.
        check("cuStreamWriteValue64", unsafe {
            (calls.stream_write)(stream, at, word, 0)
        })?;
        // SAFETY: as above.
        check("cuStreamSynchronize", unsafe { (calls.finish_stream)(stream) })
    }

    fn write_then_publish(&self, at: u64, bytes: &[u8], mark: u64, word: u64) -> Result<(), GpuError> {
        let calls = self.calls()?;
        let stream = self.inner.stream;
        // SAFETY: the source is a slice, which the stream reads until it is waited for below. A destination that is not the GPU's is
        // refused by the driver.
        let copied = check("cuMemcpyHtoDAsync", unsafe {
            (calls.copy_in_stream)(at, bytes.as_ptr().cast(), bytes.len(), stream)
        });
        let marked = copied.and_then(|()| {
            // SAFETY: the stream is this object's. Flag 0: the write comes behind the copy.
            check("cuStreamWriteValue64", unsafe {
                (calls.stream_write)(stream, mark, word, 0)
            })
        });
        // Whatever became of the mark: the copy may still read the slice.
        // SAFETY: as above.
        let finished = check("cuStreamSynchronize", unsafe { (calls.finish_stream)(stream) });
        marked.and(finished)
    }

    fn poll(&self, at: u64) -> Result<u64, GpuError> {
        let mut word = [0; 8];
        self.read(at, &mut word)?;
        // What was stored before the word that was seen.
        self.flush()?;
        Ok(u64::from_le_bytes(word))
    }

    fn flush(&self) -> Result<Flush, GpuError> {
        if self.facts.ordering != Ordering::Nobody {
            return Ok(Flush::NotNeeded);
        }
        const CALL: &str = "cuFlushGPUDirectRDMAWrites";
        if !self.facts.host_flush {
            return Err(GpuError::new(
                "gpu-no-flush",
                3,
                format!(
                    "{} neither keeps a peer's writes in order nor lets the processor flush them: a peer cannot write into its \
                     memory",
                    self.facts.name
                ),
            ));
        }
        let calls = self.calls()?;
        let flush = calls.flush.ok_or_else(|| missing(CALL))?;
        let target =
            sys::CUflushGPUDirectRDMAWritesTarget_enum::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
        let scope = sys::CUflushGPUDirectRDMAWritesScope_enum::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER;
        // SAFETY: two numbers of the driver's own.
        check(CALL, unsafe { flush(target as c_int, scope as c_int) })?;
        Ok(Flush::Done)
    }

    unsafe fn start(&self, kernel: &str, threads: u32, args: &[Arg]) -> Result<Box<dyn Running>, GpuError> {
        let calls = self.calls()?;
        let name = CString::new(kernel)
            .map_err(|_| GpuError::new("gpu-call", 1, "a kernel's name has no zero in it"))?;
        let mut function: CUfunction = ptr::null_mut();
        // SAFETY: the module is loaded, and the name ends with a zero.
        check("cuModuleGetFunction", unsafe {
            (calls.function)(&raw mut function, self.inner.module, name.as_ptr())
        })?;
        let mut running = Kernel::new(Arc::clone(&self.inner), NON_BLOCKING)?;
        // The driver copies from here as many bytes as the kernel declares: little-endian, so that the first four of eight are
        // those of a 32-bit argument.
        let mut values: Vec<u64> = args
            .iter()
            .map(|arg| match *arg {
                Arg::U32(value) => u64::from(value),
                Arg::U64(value) => value,
            })
            .collect();
        let mut pointers: Vec<*mut c_void> = values
            .iter_mut()
            .map(|value| ptr::from_mut(value).cast::<c_void>())
            .collect();
        // SAFETY: one pointer an argument, to eight readable bytes each, read before the call returns; the caller vouches for
        // what they mean.
        check("cuLaunchKernel", unsafe {
            (calls.launch)(
                function,
                1,
                1,
                1,
                threads,
                1,
                1,
                0,
                running.stream(),
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        })?;
        running.started();
        Ok(Box::new(running))
    }
}

fn length(bytes: u64) -> usize {
    // What does not fit is more than there can be, and refused as such.
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

fn missing(symbol: &str) -> GpuError {
    GpuError::new(
        "gpu-library-too-old",
        7,
        format!("the driver's library has no function {symbol}: a newer driver is needed"),
    )
}

fn explain_register(e: GpuError, what: HostMemory, bytes: u64) -> GpuError {
    if what == HostMemory::Aperture && e.name == "gpu-invalid-value" {
        return GpuError {
            name: "gpu-aperture-refused",
            what: format!(
                "{e}; an aperture of {bytes} bytes was given. Either not all of its pages were mapped yet (the driver takes no page \
                 faults), or this kernel and driver do not fit: kernels from 6.12 on need the open kernel modules, version \
                 570.133.07 or newer, built where the function follow_pfnmap_start was found"
            ),
            ..e
        };
    }
    e
}

fn facts(driver: &Driver, device: CUdevice, index: u32) -> Result<GpuFacts, GpuError> {
    let calls = &driver.calls;
    let number = |attribute: c_int| {
        let mut value = 0;
        // SAFETY: the pointer is to a local of the type the function stores; numbers it does not know are refused.
        let result = unsafe { (calls.attribute)(&raw mut value, attribute, device) };
        match check("cuDeviceGetAttribute", result) {
            Ok(()) => Ok(Some(value)),
            Err(e) if e.is_lost() => Err(e),
            Err(_) => Ok(None),
        }
    };
    use attribute::*;
    let wanted = [
        (
            CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES as c_int,
            "can flush remote writes",
        ),
        (
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED as c_int,
            "GPUDirect with virtual memory management",
        ),
        (
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED as c_int,
            "GPUDirect RDMA",
        ),
        (
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS as c_int,
            "ways to flush",
        ),
        (
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING as c_int,
            "order of a peer's writes",
        ),
        (CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED as c_int, "dma-buf"),
        (HOST_ALLOC_DMA_BUF_SUPPORTED, "dma-buf of host memory"),
        (DMA_BUF_MMAP_SUPPORTED, "mapping of a dma-buf"),
    ];
    let mut attributes = Vec::new();
    for (n, name) in wanted {
        attributes.push((n, name, number(n)?));
    }
    let value = |n: c_int| attributes.iter().find(|(m, ..)| *m == n).and_then(|(.., v)| *v);
    let mut bytes = 0usize;
    // SAFETY: the pointer is to a local of the type the function stores.
    check("cuDeviceTotalMem", unsafe {
        (calls.memory)(&raw mut bytes, device)
    })?;
    let capability = |n: attribute| Ok(number(n as c_int)?.unwrap_or(0).max(0).cast_unsigned());
    let ordering = value(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING as c_int).unwrap_or(0);
    Ok(GpuFacts {
        index,
        name: text("cuDeviceGetName", |at, room| {
            // SAFETY: the function stores no more than `room` bytes, the zero included.
            unsafe { (calls.device_name)(at, room, device) }
        })?,
        address: text("cuDeviceGetPCIBusId", |at, room| {
            // SAFETY: as above.
            unsafe { (calls.bus_id)(at, room, device) }
        })
        .ok()
        .and_then(|id| id.parse().ok()),
        bytes: bytes as u64,
        driver_version: driver.version(),
        capability: capability(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? * 10
            + capability(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        dma_buf: calls.export.is_some() && value(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED as c_int) == Some(1),
        dma_buf_mmap: value(DMA_BUF_MMAP_SUPPORTED) == Some(1),
        ordering: match ordering {
            ..100 => Ordering::Nobody,
            100..200 => Ordering::Owner,
            _ => Ordering::All,
        },
        host_flush: value(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS as c_int).unwrap_or(0)
            & FLUSH_BY_HOST
            != 0,
        attributes,
    })
}

fn text(call: &str, fill: impl Fn(*mut c_char, c_int) -> c_int) -> Result<String, GpuError> {
    let mut room = [0u8; 256];
    // The last byte is kept out of the call's reach, so that the text ends whatever was stored.
    check(call, fill(room.as_mut_ptr().cast(), 255))?;
    let text = CStr::from_bytes_until_nul(&room).map(CStr::to_string_lossy);
    Ok(text.map(|t| t.trim().to_owned()).unwrap_or_default())
}
