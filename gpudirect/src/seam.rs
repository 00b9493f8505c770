//! What this crate needs of a GPU, whoever made it.
//!
//! | job | method | NVIDIA (module [`crate::cuda`]) | AMD (not built) |
//! | --- | --- | --- | --- |
//! | export memory | [`Gpu::allocate`], [`Gpu::export`] | `cuMemAlloc`, `cuMemGetHandleForAddressRange` | `hipMalloc`, `hsa_amd_portable_export_dmabuf` |
//! | map an aperture | [`Gpu::register`] | `cuMemHostRegister` with `IOMEMORY` | `hipHostRegister` with `IoMemory`: refused by many generations |
//! | publish | [`Gpu::publish`] | `cuStreamWriteValue64`, which fences before it writes | a kernel: store with release at system scope |
//! | poll | [`Gpu::poll`] | flush where needed, then a copy of one word | the same with `hipMemcpy` |
//! | flush | [`Gpu::flush`] | `cuFlushGPUDirectRDMAWrites` | `hipDeviceFlushGPUDirectRDMAWrites` |
//!
//! A vendor gives bare operations; the guards that keep them in order ([`crate::memory`], [`crate::aperture`]) are written
//! once, above.

#![allow(unsafe_code, reason = "methods whose callers vouch for addresses")]

use std::{fmt, os::fd::OwnedFd, time::Duration};

use ntb::pci::machine::PciAddress;

use crate::GpuError;

/// What a GPU is and can do, as its driver says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuFacts {
    /// Number with the driver.
    pub index: u32,
    /// Model.
    pub name: String,
    /// Where it sits, when it says so.
    pub address: Option<PciAddress>,
    /// Bytes of memory.
    pub bytes: u64,
    /// Version of the driver, as it counts: 12080 is 12.8.
    pub driver_version: i32,
    /// Compute capability: 75 is 7.5.
    pub capability: u32,
    /// Attributes that decide about the ways in and out, by the driver's number. `None`: the driver does not know it.
    pub attributes: Vec<(i32, &'static str, Option<i32>)>,
    /// Whether memory can be exported as a dma-buf.
    pub dma_buf: bool,
    /// Whether such a dma-buf can be mapped into this process.
    pub dma_buf_mmap: bool,
    /// Who sees a peer's writes in order.
    pub ordering: Ordering,
    /// Whether the processor can have writes flushed.
    pub host_flush: bool,
}

/// Who sees the writes of other devices into this GPU's memory in the order in which they came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ordering {
    /// Nobody: what is behind a mark may be missing when the mark is seen. Every look needs a flush before it.
    Nobody,
    /// This GPU.
    Owner,
    /// All GPUs of the machine.
    All,
}

/// What [`Gpu::flush`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// Writes are seen in order: nothing to do.
    NotNeeded,
    /// The driver has pushed all earlier writes through.
    Done,
}

/// Which memory of this host [`Gpu::register`] is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostMemory {
    /// Ordinary memory that this process has allocated.
    Ram,
    /// Another device's memory: stored to, never loaded.
    Aperture,
}

/// An argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arg {
    /// 32 bits.
    U32(u32),
    /// 64 bits, or an address.
    U64(u64),
}

/// One GPU. Addresses are those that its kernels use; they mean nothing to the processor.
///
/// Calls may come from any thread and block no longer than the operation takes.
pub trait Gpu: Send + Sync + fmt::Debug {
    /// What it is.
    fn facts(&self) -> &GpuFacts;

    /// Memory of the GPU whose synchronous copies are synchronous towards other devices too, of at least `bytes` bytes.
    fn allocate(&self, bytes: u64) -> Result<u64, GpuError>;

    /// Gives memory of [`Gpu::allocate`] back. No device may reach it any more.
    fn free(&self, at: u64) -> Result<(), GpuError>;

    /// The memory as a dma-buf. Both numbers are multiples of the host's page.
    fn export(&self, at: u64, bytes: u64) -> Result<OwnedFd, GpuError>;

    /// Lets kernels reach memory of this process. The result is where they find it.
    ///
    /// # Safety
    /// The range is mapped, and stays so until [`Gpu::unregister`]; no Rust reference to any of it exists meanwhile.
    unsafe fn register(&self, address: *mut u8, bytes: u64, what: HostMemory) -> Result<u64, GpuError>;

    /// Undoes [`Gpu::register`].
    fn unregister(&self, address: *mut u8) -> Result<(), GpuError>;

    /// Copies into the GPU's memory.
    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), GpuError>;

    /// Copies out of the GPU's memory.
    fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), GpuError>;

    /// Stores a word behind everything that the GPU has stored before.
    fn publish(&self, at: u64, word: u64) -> Result<(), GpuError>;

    /// Copies into the GPU's memory and stores a word at `mark` behind the copy: two steps of one stream, with no wait between them.
    /// Both are done at the end.
    fn write_then_publish(&self, at: u64, bytes: &[u8], mark: u64, word: u64) -> Result<(), GpuError>;

    /// The word at an address in the GPU's memory, with all that a peer had stored before it visible after.
    fn poll(&self, at: u64) -> Result<u64, GpuError>;

    /// Makes what other devices have stored visible to kernels that start now.
    fn flush(&self) -> Result<Flush, GpuError>;

    /// Starts a kernel of this crate's device code in one block of `threads` threads.
    ///
    /// # Safety
    /// The arguments are those of the kernel, and every address among them is one that it may use until it has ended.
    unsafe fn start(&self, kernel: &str, threads: u32, args: &[Arg]) -> Result<Box<dyn Running>, GpuError>;
}

/// A kernel on its way. Dropping waits for its end: all kernels of this crate end by themselves.
pub trait Running: Send + fmt::Debug {
    /// Waits for the end; false when the time is over first.
    fn wait(&mut self, timeout: Duration) -> Result<bool, GpuError>;
}
