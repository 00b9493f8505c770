//! A kernel on a stream of its own.

#![allow(unsafe_code, reason = "calls of the driver")]

use std::{
    ffi::c_uint,
    ptr,
    sync::Arc,
    time::{Duration, Instant},
};

use cudarc::driver::sys::CUstream;

use super::{
    codes::{self, check},
    device::Inner,
};
use crate::{GpuError, seam::Running};

/// Time between two looks whether it has ended.
const LOOK: Duration = Duration::from_micros(20);

#[derive(Debug)]
pub(super) struct Kernel {
    inner: Arc<Inner>,
    stream: CUstream,
    runs: bool,
}

// SAFETY: the stream is the driver's handle, which it takes from any thread in which the context is current.
unsafe impl Send for Kernel {}

impl Kernel {
    pub(super) fn new(inner: Arc<Inner>, flags: c_uint) -> Result<Self, GpuError> {
        let mut stream = ptr::null_mut();
        // SAFETY: the pointer is to a local of the type the function stores; the context is current (`Cuda::calls`).
        check("cuStreamCreate", unsafe {
            (inner.driver.calls.stream)(&raw mut stream, flags)
        })?;
        Ok(Self {
            inner,
            stream,
            runs: false,
        })
    }

    pub(super) fn stream(&self) -> CUstream {
        self.stream
    }

    pub(super) fn started(&mut self) {
        self.runs = true;
    }
}

impl Running for Kernel {
    fn wait(&mut self, timeout: Duration) -> Result<bool, GpuError> {
        self.inner.enter()?;
        let begin = Instant::now();
        loop {
            // SAFETY: the stream is this object's.
            let result = unsafe { (self.inner.driver.calls.stream_done)(self.stream) };
            if result != codes::NOT_READY {
                self.runs = false;
                return check("cuStreamQuery", result).map(|()| true);
            }
            if begin.elapsed() >= timeout {
                return Ok(false);
            }
            std::thread::sleep(LOOK);
        }
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        // Errors here were or will be those of other calls: a context that is lost runs nothing.
        let _ = self.inner.enter();
        if self.runs {
            // SAFETY: the stream is this object's; what runs on it ends by itself.
            let _ = unsafe { (self.inner.driver.calls.finish_stream)(self.stream) };
        }
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { (self.inner.driver.calls.end_stream)(self.stream) };
    }
}
