//! What a kernel reaches outside of its GPU: a bridge's aperture, and memory of the host.
//!
//! An aperture is stored to and never loaded: a load would cross the link and may take the GPU off the bus. Its pages must be in
//! the process's page tables before the driver is asked, since it takes no page faults and VFIO maps lazily; they are put there
//! by mapping the range for DMA at an I/O address that is given up at once, which touches no byte of it.
//!
//! The GPU's own mapping does not follow the process's. So a link's mapping stays, also beyond the end of its life, until this
//! object is gone ([`OnGpu::direct`]); who gives addresses ([`OnGpu::raw`]) sees to that. Make it anew for each life of a link,
//! and stop kernels that store through it first.

#![allow(unsafe_code, reason = "registering memory with the driver")]

use std::{fmt, sync::Arc};

use ntb_mem::region::{Region, View};
use ntb_ring::link::engine::Direct;

use crate::{
    GpuError,
    seam::{Gpu, HostMemory},
};

/// A range of this process that kernels reach; given up on drop.
pub struct OnGpu {
    // Fields drop after `Drop::drop`, which takes the registration away: what is kept mapped goes last.
    gpu: Arc<dyn Gpu>,
    address: *mut u8,
    bytes: u64,
    at: u64,
    _keep: Keep,
}

#[derive(Debug)]
#[expect(dead_code, reason = "held, not used")]
enum Keep {
    Region(Arc<Region>),
    View(View),
    Direct(Direct),
    Caller,
}

// SAFETY: the address is that of a mapping of the process, kept by `_keep` or by the caller's promise, and never dereferenced.
unsafe impl Send for OnGpu {}
// SAFETY: as above.
unsafe impl Sync for OnGpu {}

impl fmt::Debug for OnGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnGpu")
            .field("gpu", &self.gpu.facts().index)
            .field("bytes", &self.bytes)
            .field("keep", &self._keep)
            .finish_non_exhaustive()
    }
}

impl OnGpu {
    /// Lets kernels load and store memory of the host: what credits and answers come back to.
    pub fn region(gpu: &Arc<dyn Gpu>, region: &Arc<Region>) -> Result<Self, GpuError> {
        let keep = Keep::Region(Arc::clone(region));
        // SAFETY: the region is mapped and kept, and gives no reference out.
        unsafe { Self::register(gpu, region.as_ptr(), region.bytes(), HostMemory::Ram, keep) }
    }

    /// As [`OnGpu::region`], for a part of memory that the peer stores into.
    pub fn view(gpu: &Arc<dyn Gpu>, view: &View) -> Result<Self, GpuError> {
        let (address, bytes) = (view.as_ptr().cast(), view.words() as u64 * 8);
        let keep = Keep::View(view.clone());
        // SAFETY: the view keeps its memory mapped, and gives no reference out that lasts.
        unsafe { Self::register(gpu, address, bytes, HostMemory::Ram, keep) }
    }

    /// Lets kernels store into a piece of the peer's memory that is mapped into this process.
    pub fn direct(gpu: &Arc<dyn Gpu>, direct: &Direct) -> Result<Self, GpuError> {
        direct.populate().map_err(|e| unpopulated(direct.bytes(), &*e))?;
        let what = match direct.is_aperture() {
            true => HostMemory::Aperture,
            false => HostMemory::Ram,
        };
        let keep = Keep::Direct(direct.clone());
        // SAFETY: the piece stays mapped as long as `direct` is kept, and gives no reference out.
        unsafe { Self::register(gpu, direct.as_ptr(), direct.bytes(), what, keep) }
    }

    /// Lets kernels reach any range of this process.
    ///
    /// # Safety
    /// The range is mapped, all its pages are in the page tables, no Rust reference to any of it exists, and it stays mapped
    /// until the result is dropped.
    pub unsafe fn raw(
        gpu: &Arc<dyn Gpu>,
        address: *mut u8,
        bytes: u64,
        what: HostMemory,
    ) -> Result<Self, GpuError> {
        // SAFETY: the caller's promise.
        unsafe { Self::register(gpu, address, bytes, what, Keep::Caller) }
    }

    /// # Safety
    /// As for [`OnGpu::raw`], where `keep` may be what keeps it mapped.
    unsafe fn register(
        gpu: &Arc<dyn Gpu>,
        address: *mut u8,
        bytes: u64,
        what: HostMemory,
        keep: Keep,
    ) -> Result<Self, GpuError> {
        // SAFETY: the caller's promise.
        let at = unsafe { gpu.register(address, bytes, what) }?;
        Ok(Self {
            gpu: Arc::clone(gpu),
            address,
            bytes,
            at,
            _keep: keep,
        })
    }

    /// Where kernels find its first byte. Not the address that this process uses.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for OnGpu {
    fn drop(&mut self) {
        // A GPU that is lost has no mapping left.
        let _ = self.gpu.unregister(self.address);
    }
}

fn unpopulated(bytes: u64, why: &dyn std::error::Error) -> GpuError {
    GpuError::new(
        "gpu-aperture-not-populated",
        6,
        format!(
            "the pages of an aperture of {bytes} bytes could not be mapped beforehand: {why}. It takes VFIO's group interface with \
             a type 1 container: iommufd does not take the memory of devices"
        ),
    )
}
