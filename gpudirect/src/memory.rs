//! Memory of a GPU, and how a bridge is let into it.
//!
//! # Order of the end
//!
//! stop the peer, close the window, take the I/O mapping away, take the processor's mapping away, free. Each object holds the
//! one before, so whatever order a program drops them in, this is the order in which they go: a window
//! ([`ntb::window::ExportedWindow`]) holds [`Exposed`], and that holds [`GpuMemory`].

#![allow(unsafe_code, reason = "mappings of a GPU's memory")]

use std::{
    error::Error,
    fmt,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use ntb_mem::{export::Exportable, region::Region};
use rustix::mm::{MapFlags, ProtFlags};

use crate::{
    GpuError,
    gdrcopy::{Gdrcopy, Pinned},
    seam::{Flush, Gpu},
};

/// Pages in which a GPU's memory is shown to other devices.
pub const GPU_PAGE: u64 = 64 << 10;
/// Least memory asked of the driver at a time: less would share its pages with other allocations.
pub const LEAST: u64 = 2 << 20;

/// Memory of a GPU, aligned to [`GPU_PAGE`]; freed on drop.
pub struct GpuMemory {
    gpu: Arc<dyn Gpu>,
    allocation: u64,
    at: u64,
    bytes: u64,
}

impl fmt::Debug for GpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuMemory")
            .field("gpu", &self.gpu.facts().index)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl GpuMemory {
    /// Allocates `bytes`, rounded up to whole pages of the GPU, and clears them.
    pub fn allocate(gpu: &Arc<dyn Gpu>, bytes: u64) -> Result<Arc<Self>, GpuError> {
        let too_large = || {
            GpuError::new(
                "gpu-memory",
                6,
                format!("{bytes} bytes were asked for: no GPU has that much"),
            )
        };
        let bytes = bytes
            .max(1)
            .checked_next_multiple_of(GPU_PAGE)
            .ok_or_else(too_large)?;
        // One page more, for an allocation that does not begin at one.
        let asked = bytes.checked_add(GPU_PAGE).ok_or_else(too_large)?.max(LEAST);
        let allocation = gpu.allocate(asked)?;
        let memory = Self {
            gpu: Arc::clone(gpu),
            allocation,
            at: allocation.next_multiple_of(GPU_PAGE),
            bytes,
        };
        let zeros = vec![0; GPU_PAGE as usize];
        for page in 0..bytes / GPU_PAGE {
            gpu.write(memory.at + page * GPU_PAGE, &zeros)?;
        }
        Ok(Arc::new(memory))
    }

    /// Where kernels find it.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whose it is.
    pub fn gpu(&self) -> &Arc<dyn Gpu> {
        &self.gpu
    }

    /// Copies in, from byte `offset` on.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), GpuError> {
        self.gpu.write(self.place(offset, bytes.len())?, bytes)
    }

    /// Copies out, from byte `offset` on.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), GpuError> {
        self.gpu.read(self.place(offset, bytes.len())?, bytes)
    }

    fn place(&self, offset: u64, bytes: usize) -> Result<u64, GpuError> {
        let fits = offset
            .checked_add(bytes as u64)
            .is_some_and(|end| end <= self.bytes);
        fits.then(|| self.at + offset).ok_or_else(|| {
            GpuError::new(
                "gpu-outside",
                2,
                format!(
                    "{bytes} bytes from {offset} on are not in a memory of {} bytes",
                    self.bytes
                ),
            )
        })
    }
}

impl Drop for GpuMemory {
    fn drop(&mut self) {
        // A GPU that is lost has nothing to free.
        let _ = self.gpu.free(self.allocation);
    }
}

/// How another device reaches a GPU's memory, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The driver's dma-buf, mapped into this process.
    DmaBuf,
    /// A mapping by the gdrcopy module.
    Gdrcopy,
    /// Not at all: memory of the host takes the peer's writes, and the processor copies them on.
    Staging,
}

impl Way {
    /// All, best first.
    pub const ALL: [Self; 3] = [Self::DmaBuf, Self::Gdrcopy, Self::Staging];

    /// Stable name.
    pub fn name(self) -> &'static str {
        match self {
            Self::DmaBuf => "dma-buf",
            Self::Gdrcopy => "gdrcopy",
            Self::Staging => "staging",
        }
    }
}

/// A GPU's memory with an address by which a bridge can be let into it.
#[derive(Debug)]
pub struct Exposed {
    // Fields drop in order: the mapping, then the memory.
    place: Place,
    memory: Arc<GpuMemory>,
    refusals: Vec<(Way, GpuError)>,
}

#[derive(Debug)]
enum Place {
    DmaBuf { map: Map, fd: OwnedFd },
    Gdrcopy(Pinned),
    Staging(Arc<Region>),
}

#[derive(Debug)]
struct Map {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: a mapping belongs to the process; what lies there is reached through atomics and by devices only.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: made in `by_dma_buf`, unmapped once, and handed out only as long as it lives (`Exportable`).
        let _ = unsafe { rustix::mm::munmap(self.ptr.cast(), self.len) };
    }
}

impl Exposed {
    /// The best way there is, or the one asked for and no other.
    ///
    /// Staging is a way that always works and is slower by a copy: say [`Exposed::announcement`] to the user.
    pub fn new(memory: &Arc<GpuMemory>, only: Option<Way>) -> Result<Self, GpuError> {
        let mut refusals = Vec::new();
        for way in Way::ALL {
            if only.is_some_and(|wanted| wanted != way) {
                continue;
            }
            let place = match way {
                Way::DmaBuf => by_dma_buf(memory),
                Way::Gdrcopy => by_gdrcopy(memory),
                Way::Staging => by_staging(memory),
            };
            match place {
                Ok(place) => {
                    return Ok(Self {
                        place,
                        memory: Arc::clone(memory),
                        refusals,
                    });
                }
                Err(e) => refusals.push((way, e)),
            }
        }
        Err(refusals
            .pop()
            .map_or_else(|| GpuError::new("gpu-call", 1, "no way was tried"), |(_, e)| e))
    }

    /// Which way it is.
    pub fn way(&self) -> Way {
        match self.place {
            Place::DmaBuf { .. } => Way::DmaBuf,
            Place::Gdrcopy(_) => Way::Gdrcopy,
            Place::Staging(_) => Way::Staging,
        }
    }

    /// Why the better ways could not be had.
    pub fn refusals(&self) -> &[(Way, GpuError)] {
        &self.refusals
    }

    /// What the user must be told: the way, and why not a better one.
    pub fn announcement(&self) -> String {
        let mut text = format!("GPU memory is reached by {}", self.way().name());
        if self.way() == Way::Staging {
            text.push_str(": every byte goes through memory of the host and is copied by the processor");
        }
        for (way, why) in &self.refusals {
            text.push_str(&format!("; not by {}: {why}", way.name()));
        }
        text
    }

    /// The GPU's memory behind it.
    pub fn memory(&self) -> &Arc<GpuMemory> {
        &self.memory
    }

    /// The dma-buf, for other importers.
    pub fn dma_buf(&self) -> Option<BorrowedFd<'_>> {
        match &self.place {
            Place::DmaBuf { fd, .. } => Some(fd.as_fd()),
            _ => None,
        }
    }

    /// The host's memory in between, when it is staging.
    pub fn staging(&self) -> Option<&Arc<Region>> {
        match &self.place {
            Place::Staging(region) => Some(region),
            _ => None,
        }
    }

    /// With staging: copies `bytes` bytes from `offset` on to the GPU, both multiples of eight. Elsewhere they are there already.
    pub fn carry(&self, offset: u64, bytes: u64) -> Result<(), GpuError> {
        let Some(region) = self.staging() else {
            return Ok(());
        };
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        self.memory.place(offset, length)?;
        let mut copy = vec![0; length];
        region.view().copy_out(offset as usize, &mut copy);
        self.memory.write(offset, &copy)
    }
}

// SAFETY: the mapping is a field that lives as long as the object (each kind of it unmaps on drop only), and no reference to it
// is ever made; its length is that of the GPU's memory.
unsafe impl Exportable for Exposed {
    fn as_ptr(&self) -> *mut u8 {
        match &self.place {
            Place::DmaBuf { map, .. } => map.ptr,
            Place::Gdrcopy(pinned) => pinned.as_ptr(),
            Place::Staging(region) => region.as_ptr(),
        }
    }

    fn bytes(&self) -> u64 {
        self.memory.bytes
    }

    fn descriptor(&self) -> Option<(BorrowedFd<'_>, u64)> {
        match &self.place {
            Place::DmaBuf { fd, .. } => Some((fd.as_fd(), 0)),
            Place::Gdrcopy(_) => None,
            Place::Staging(region) => Some((region.descriptor(), 0)),
        }
    }

    fn alignment(&self) -> u64 {
        GPU_PAGE
    }

    fn kind(&self) -> &'static str {
        match self.place {
            Place::DmaBuf { .. } => "GPU memory by dma-buf",
            Place::Gdrcopy(_) => "GPU memory by gdrcopy",
            Place::Staging(_) => "memory of this host, staging for a GPU",
        }
    }

    fn settle(&self) -> Result<(), Box<dyn Error + Send + Sync>> {
        match self.place {
            Place::Staging(_) => Ok(()),
            _ => match self.memory.gpu.flush() {
                Ok(Flush::NotNeeded | Flush::Done) => Ok(()),
                Err(e) => Err(e.into()),
            },
        }
    }
}

fn by_dma_buf(memory: &GpuMemory) -> Result<Place, GpuError> {
    let facts = memory.gpu.facts();
    if !facts.dma_buf {
        return Err(GpuError::new(
            "gpu-no-dma-buf",
            3,
            format!(
                "{} does not export memory as a dma-buf (attribute 124): it takes the open kernel modules, version 515 or newer, and \
                 a board with GPUDirect",
                facts.name
            ),
        ));
    }
    if !facts.dma_buf_mmap {
        return Err(GpuError::new(
            "gpu-no-dma-buf-mapping",
            3,
            "the driver does not let a process map its dma-bufs (attribute 152): it takes a driver with CUDA 13.3 or newer; \
             gdrcopy's module does the same on older ones",
        ));
    }
    let fd = memory.gpu.export(memory.at, memory.bytes)?;
    let len = usize::try_from(memory.bytes).unwrap_or(usize::MAX);
    // SAFETY: a new mapping at an address the kernel chooses; nothing of ours lies there.
    let ptr = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            &fd,
            0,
        )
    }
    .map_err(|errno| {
        GpuError::errno(
            "gpu-dma-buf-mapping",
            6,
            format!("mapping a dma-buf of {} bytes failed: {errno}", memory.bytes),
            errno,
        )
    })?;
    Ok(Place::DmaBuf {
        map: Map { ptr: ptr.cast(), len },
        fd,
    })
}

fn by_gdrcopy(memory: &GpuMemory) -> Result<Place, GpuError> {
    Pinned::new(&Gdrcopy::find()?, memory.at, memory.bytes).map(Place::Gdrcopy)
}

fn by_staging(memory: &GpuMemory) -> Result<Place, GpuError> {
    use ntb_mem::region::{Pages, RegionError};
    Region::allocate(memory.bytes, Pages::HugeIfAny)
        .map(|region| Place::Staging(Arc::new(region)))
        .map_err(|e| {
            let errno = match &e {
                RegionError::NoHugePages { errno, .. } | RegionError::Kernel { errno, .. } => {
                    Some(errno.raw_os_error())
                }
                _ => None,
            };
            GpuError {
                errno,
                ..GpuError::new(
                    "gpu-staging",
                    6,
                    format!("no memory of the host to stage in: {e}"),
                )
            }
        })
}
