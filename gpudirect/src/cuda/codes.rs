//! What the driver's numbers mean, and what to do about them.

use std::ffi::c_int;

use cudarc::driver::sys::cudaError_enum as code;

use crate::GpuError;

const SUCCESS: c_int = code::CUDA_SUCCESS as c_int;
/// A stream has work left.
pub(super) const NOT_READY: c_int = code::CUDA_ERROR_NOT_READY as c_int;

/// An error for everything but success.
pub(super) fn check(call: &str, result: c_int) -> Result<(), GpuError> {
    if result == SUCCESS {
        return Ok(());
    }
    Err(explain(call, result))
}

fn explain(call: &str, result: c_int) -> GpuError {
    let (name, exit, text) = meaning(result);
    GpuError {
        code: Some(result),
        ..GpuError::new(name, exit, format!("{call} failed with {result}: {text}"))
    }
}

/// Stable name, exit class, explanation with the remedy.
fn meaning(result: c_int) -> (&'static str, u8, &'static str) {
    let is = |known: code| result == known as c_int;
    if is(code::CUDA_ERROR_STUB_LIBRARY) {
        return (
            "gpu-library-stub",
            3,
            "the library is the toolkit's stub, which is for linking only: take its folder ('stubs') out of LD_LIBRARY_PATH, \
             and install the driver",
        );
    }
    if is(code::CUDA_ERROR_NO_DEVICE) {
        return (
            "gpu-none",
            3,
            "the driver sees no GPU: look at 'nvidia-smi -L' and CUDA_VISIBLE_DEVICES",
        );
    }
    if is(code::CUDA_ERROR_NOT_PERMITTED) {
        return (
            "gpu-not-permitted",
            6,
            "the driver lets only root register other devices' memory: run as root, or set \
             'options nvidia NVreg_RegistryDwords=\"PeerMappingOverride=1;\"' in /etc/modprobe.d/nvidia.conf and load the \
             module anew",
        );
    }
    if is(code::CUDA_ERROR_NOT_SUPPORTED) {
        return (
            "gpu-not-supported",
            3,
            "this GPU, driver or kernel has no such function: GeForce boards have no GPUDirect; else use the open kernel \
             modules of a current driver",
        );
    }
    if is(code::CUDA_ERROR_INVALID_VALUE) {
        return ("gpu-invalid-value", 7, "the driver refuses an argument");
    }
    if is(code::CUDA_ERROR_OUT_OF_MEMORY) {
        return (
            "gpu-memory",
            6,
            "the GPU has not that much memory free: look at 'nvidia-smi'",
        );
    }
    if is(code::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH) || is(code::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE) {
        return (
            "gpu-driver-mismatch",
            7,
            "library and kernel module are of different versions: load the module anew, or reboot",
        );
    }
    if is(code::CUDA_ERROR_UNSUPPORTED_PTX_VERSION)
        || is(code::CUDA_ERROR_NO_BINARY_FOR_GPU)
        || is(code::CUDA_ERROR_INVALID_PTX)
    {
        return (
            "gpu-code-refused",
            7,
            "the driver does not take this crate's device code: compute capability 7.5 and a driver of version 525 or newer are \
             needed",
        );
    }
    let lost = [
        code::CUDA_ERROR_DEVICE_UNAVAILABLE,
        code::CUDA_ERROR_DEINITIALIZED,
        code::CUDA_ERROR_CONTEXT_IS_DESTROYED,
        code::CUDA_ERROR_ECC_UNCORRECTABLE,
        code::CUDA_ERROR_HARDWARE_STACK_ERROR,
        code::CUDA_ERROR_ILLEGAL_ADDRESS,
        code::CUDA_ERROR_LAUNCH_FAILED,
        code::CUDA_ERROR_UNKNOWN,
        code::CUDA_ERROR_INVALID_CONTEXT,
    ];
    if lost.into_iter().any(is) {
        return (
            "gpu-lost",
            5,
            "the GPU, or this process's context on it, is of no use any more: look into the kernel log for 'Xid', and open it \
             anew",
        );
    }
    ("gpu-call", 1, "see the number in the driver's header")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_stable_names() {
        for (number, name, exit) in [
            (34, "gpu-library-stub", 3),
            (100, "gpu-none", 3),
            (800, "gpu-not-permitted", 6),
            (801, "gpu-not-supported", 3),
            (1, "gpu-invalid-value", 7),
            (2, "gpu-memory", 6),
            (803, "gpu-driver-mismatch", 7),
            (222, "gpu-code-refused", 7),
            (46, "gpu-lost", 5),
            (700, "gpu-lost", 5),
            (999, "gpu-lost", 5),
            (123_456, "gpu-call", 1),
            (-1, "gpu-call", 1),
        ] {
            let e = check("cuCall", number).unwrap_err();
            assert_eq!((e.name, e.exit, e.code), (name, exit, Some(number)));
            assert!(e.to_string().contains("cuCall failed with"), "{e}");
        }
        assert!(check("cuCall", 0).is_ok());
        assert_eq!(NOT_READY, 600);
    }
}
