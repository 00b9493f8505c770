//! The driver's library: found, probed, and its functions as a table.

#![allow(unsafe_code, reason = "loading a library, and calling it")]

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    path::{Path, PathBuf},
    sync::Arc,
};

use cudarc::driver::sys::{CUcontext, CUdevice, CUdeviceptr, CUfunction, CUmodule, CUstream};
use libloading::Library;

use super::codes;
use crate::GpuError;

/// Names under which the driver's library is looked for.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

macro_rules! calls {
    (
        needed { $($needed:ident $name:literal ($($arg:ty),*);)* }
        wanted { $($wanted:ident $wanted_name:literal ($($wanted_arg:ty),*);)* }
    ) => {
        /// The driver's functions. Results are numbers: see [`super::codes`].
        pub(super) struct Calls {
            $(pub(super) $needed: unsafe extern "C" fn($($arg),*) -> c_int,)*
            $(pub(super) $wanted: Option<unsafe extern "C" fn($($wanted_arg),*) -> c_int>,)*
        }

        /// The symbols without which the driver is of no use; those that are wanted only are left out.
        pub const SYMBOLS: &[&str] = &[$($name),*];

        impl Calls {
            /// Looks every symbol up; the name of the first one missing otherwise.
            fn find(library: &Library) -> Result<Self, &'static str> {
                // SAFETY: the signatures are those of the driver's published header for these versioned names.
                unsafe {
                    Ok(Self {
                        $($needed: *library
                            .get(concat!($name, "\0").as_bytes())
                            .map_err(|_| $name)?,)*
                        $($wanted: library
                            .get(concat!($wanted_name, "\0").as_bytes())
                            .ok()
                            .map(|symbol| *symbol),)*
                    })
                }
            }
        }
    };
}

calls! {
    needed {
        init "cuInit" (c_uint);
        version "cuDriverGetVersion" (*mut c_int);
        device_count "cuDeviceGetCount" (*mut c_int);
        device "cuDeviceGet" (*mut CUdevice, c_int);
        device_name "cuDeviceGetName" (*mut c_char, c_int, CUdevice);
        attribute "cuDeviceGetAttribute" (*mut c_int, c_int, CUdevice);
        memory "cuDeviceTotalMem_v2" (*mut usize, CUdevice);
        bus_id "cuDeviceGetPCIBusId" (*mut c_char, c_int, CUdevice);
        retain "cuDevicePrimaryCtxRetain" (*mut CUcontext, CUdevice);
        release "cuDevicePrimaryCtxRelease_v2" (CUdevice);
        enter "cuCtxSetCurrent" (CUcontext);
        allocate "cuMemAlloc_v2" (*mut CUdeviceptr, usize);
        free "cuMemFree_v2" (CUdeviceptr);
        set_pointer_attribute "cuPointerSetAttribute" (*const c_void, c_int, CUdeviceptr);
        host_register "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
        host_unregister "cuMemHostUnregister" (*mut c_void);
        host_pointer "cuMemHostGetDevicePointer_v2" (*mut CUdeviceptr, *mut c_void, c_uint);
        copy_in "cuMemcpyHtoD_v2" (CUdeviceptr, *const c_void, usize);
        copy_in_stream "cuMemcpyHtoDAsync_v2" (CUdeviceptr, *const c_void, usize, CUstream);
        copy_out "cuMemcpyDtoH_v2" (*mut c_void, CUdeviceptr, usize);
        stream "cuStreamCreate" (*mut CUstream, c_uint);
        end_stream "cuStreamDestroy_v2" (CUstream);
        stream_done "cuStreamQuery" (CUstream);
        finish_stream "cuStreamSynchronize" (CUstream);
        stream_write "cuStreamWriteValue64_v2" (CUstream, CUdeviceptr, u64, c_uint);
        load_module "cuModuleLoadData" (*mut CUmodule, *const c_void);
        unload_module "cuModuleUnload" (CUmodule);
        function "cuModuleGetFunction" (*mut CUfunction, CUmodule, *const c_char);
        launch "cuLaunchKernel" (
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void
        );
    }
    wanted {
        export "cuMemGetHandleForAddressRange" (*mut c_void, CUdeviceptr, usize, c_int, u64);
        flush "cuFlushGPUDirectRDMAWrites" (c_int, c_int);
    }
}

/// The driver, loaded and initialised.
pub struct Driver {
    pub(super) calls: Calls,
    path: PathBuf,
    version: i32,
    // Stays loaded for as long as anything uses the table.
    _library: Library,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver")
            .field("path", &self.path)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

impl Driver {
    /// The driver of this machine, from where the loader looks for libraries.
    pub fn find() -> Result<Arc<Self>, GpuError> {
        let mut why = String::new();
        for name in NAMES {
            match open(Path::new(name)) {
                Ok(library) => return Self::start(library, name.into()),
                Err(e) => why = e,
            }
        }
        Err(GpuError::new(
            "gpu-library-missing",
            3,
            format!(
                "the driver's library was not found ({why}): it comes with the NVIDIA driver; install the driver in its open \
                 flavour, or, in a container, give the container the GPU"
            ),
        ))
    }

    /// The driver in this file.
    pub fn load(path: &Path) -> Result<Arc<Self>, GpuError> {
        let library = open(path).map_err(|why| {
            GpuError::new(
                "gpu-library-missing",
                3,
                format!("{} cannot be loaded: {why}", path.display()),
            )
        })?;
        Self::start(library, path.to_owned())
    }

    fn start(library: Library, path: PathBuf) -> Result<Arc<Self>, GpuError> {
        let calls = Calls::find(&library).map_err(|symbol| {
            GpuError::new(
                "gpu-library-too-old",
                7,
                format!(
                    "{} has no function {symbol}: a driver of version 515 (CUDA 11.7) or newer is needed",
                    path.display()
                ),
            )
        })?;
        // SAFETY: the function of this name takes flags, which must be 0.
        codes::check("cuInit", unsafe { (calls.init)(0) })?;
        let mut version = 0;
        // SAFETY: the pointer is to a local of the type the function stores.
        codes::check("cuDriverGetVersion", unsafe { (calls.version)(&raw mut version) })?;
        Ok(Arc::new(Self {
            calls,
            path,
            version,
            _library: library,
        }))
    }

    /// Where the library was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Version as the driver counts: 12080 is 12.8.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// How many GPUs there are; the error when there is none.
    pub fn count(&self) -> Result<u32, GpuError> {
        let mut count = 0;
        // SAFETY: the pointer is to a local of the type the function stores.
        codes::check("cuDeviceGetCount", unsafe {
            (self.calls.device_count)(&raw mut count)
        })?;
        u32::try_from(count).ok().filter(|n| *n > 0).ok_or_else(|| {
            GpuError::new(
                "gpu-none",
                3,
                "the driver sees no GPU: look at 'nvidia-smi -L' and CUDA_VISIBLE_DEVICES",
            )
        })
    }
}

fn open(path: &Path) -> Result<Library, String> {
    // SAFETY: the driver's library has initialisers that may run at any time; a file of this name that is something else is
    // outside of what a process can guard against.
    unsafe { Library::new(path) }.map_err(|e| GpuError::loading(&e))
}
