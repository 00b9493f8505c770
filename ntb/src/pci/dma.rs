//! Memory that the device may reach.

#![allow(unsafe_code, reason = "describing memory by address")]

use std::{
    collections::hash_map::RandomState,
    fmt,
    hash::BuildHasher,
    os::fd::BorrowedFd,
    sync::{Arc, Mutex, PoisonError},
};

use ntb_mem::{export::Exportable, region::Region};

use super::{
    Isolation, PciError, PciFunction,
    iova::{IovaAllocator, IovaRange},
};

/// Memory to be mapped for DMA, as the backends need it described: by address for an IOMMU of the kernel, by
/// descriptor for a device in another process.
#[derive(Clone, Copy)]
pub struct DmaMemory<'a> {
    address: usize,
    bytes: u64,
    descriptor: Option<(BorrowedFd<'a>, u64)>,
}

impl<'a> DmaMemory<'a> {
    /// All of a region.
    pub fn region(region: &'a Region) -> Self {
        Self::exported(region)
    }

    /// All of what somebody exports: a region, another device's memory.
    pub fn exported(memory: &'a dyn Exportable) -> Self {
        Self {
            address: memory.as_ptr().expose_provenance(),
            bytes: memory.bytes(),
            descriptor: memory.descriptor(),
        }
    }

    /// Memory that is not a [`Region`]: another device's BAR, for instance. `descriptor` is a file that holds the
    /// same memory and the offset in it.
    ///
    /// # Safety
    /// The address range is mapped, and no Rust reference to any of it exists while it is mapped for DMA.
    pub unsafe fn raw(address: *mut u8, bytes: u64, descriptor: Option<(BorrowedFd<'a>, u64)>) -> Self {
        Self {
            address: address.expose_provenance(),
            bytes,
            descriptor,
        }
    }

    /// Address in this process.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// File that holds the memory, and the offset in it.
    pub fn descriptor(&self) -> Option<(BorrowedFd<'a>, u64)> {
        self.descriptor
    }
}

impl fmt::Debug for DmaMemory<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaMemory")
            .field("bytes", &self.bytes)
            .field("descriptor", &self.descriptor.is_some())
            .finish_non_exhaustive()
    }
}

/// The I/O address space of a function: hands out addresses and maps memory at them.
#[derive(Debug)]
pub struct DmaSpace {
    function: Arc<dyn PciFunction>,
    addresses: Mutex<IovaAllocator>,
}

impl DmaSpace {
    /// The space of `function`, by what it reports. Addresses begin at a random place.
    pub fn new(function: Arc<dyn PciFunction>) -> Result<Arc<Self>, PciError> {
        let ranges = function.iova_ranges()?;
        let top = ranges.iter().map(|r| r.last).max().unwrap_or(0);
        // The lower half of the space, so that large requests still fit above.
        let start = RandomState::new().hash_one(std::process::id()) % (top / 2 + 1);
        let addresses = Mutex::new(IovaAllocator::new(&ranges, function.dma_page(), start));
        Ok(Arc::new(Self { function, addresses }))
    }

    /// The function whose space it is.
    pub fn function(&self) -> &Arc<dyn PciFunction> {
        &self.function
    }

    /// Maps a region at an address that is a multiple of `align`. One entry of the IOMMU per call, whatever the size.
    pub fn map(self: &Arc<Self>, region: &Arc<Region>, align: u64) -> Result<DmaMapping, PciError> {
        let exported: Arc<dyn Exportable> = Arc::clone(region) as _;
        self.map_exported(&exported, align)
    }

    /// The same with memory of any owner.
    pub fn map_exported(
        self: &Arc<Self>,
        exported: &Arc<dyn Exportable>,
        align: u64,
    ) -> Result<DmaMapping, PciError> {
        let range = self.place(&DmaMemory::exported(&**exported), align)?;
        Ok(DmaMapping {
            range,
            space: Arc::clone(self),
            _keep: Some(Arc::clone(exported)),
        })
    }

    /// Maps memory that is not a region.
    ///
    /// # Safety
    /// The memory stays mapped in this process, with no reference to it, until the mapping is dropped.
    pub unsafe fn map_raw(
        self: &Arc<Self>,
        memory: &DmaMemory<'_>,
        align: u64,
    ) -> Result<DmaMapping, PciError> {
        let range = self.place(memory, align)?;
        Ok(DmaMapping {
            range,
            space: Arc::clone(self),
            _keep: None,
        })
    }

    fn place(&self, memory: &DmaMemory<'_>, align: u64) -> Result<IovaRange, PciError> {
        let page = self.function.dma_page();
        if !memory.bytes.is_multiple_of(page) || memory.bytes == 0 {
            return Err(PciError::NotPageAligned {
                what: "length of the memory",
                value: memory.bytes,
                page,
            });
        }
        let mut addresses = self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
        let range = match self.function.own_address(memory)? {
            None => addresses.allocate(memory.bytes, align)?,
            Some(address) => {
                let range = IovaRange::new(address, memory.bytes);
                let range = range.filter(|_| address.is_multiple_of(align.max(1))).ok_or(
                    PciError::NotPageAligned {
                        what: "address of the memory",
                        value: address,
                        page: align,
                    },
                )?;
                addresses.reserve(range)?;
                range
            }
        };
        if let Err(e) = self.function.dma_map(memory, range.start) {
            // It was handed out a moment ago.
            let _ = addresses.release(range);
            return Err(e);
        }
        Ok(range)
    }
}

/// Memory that the device can reach, until this is dropped. Holds the memory and the function.
///
/// Drop order: the mapping is taken away first, then the memory may go, then the function.
#[derive(Debug)]
pub struct DmaMapping {
    range: IovaRange,
    space: Arc<DmaSpace>,
    _keep: Option<Arc<dyn Exportable>>,
}

impl DmaMapping {
    /// Address at which the device finds the memory.
    pub fn iova(&self) -> u64 {
        self.range.start
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.range.bytes()
    }
}

impl Drop for DmaMapping {
    fn drop(&mut self) {
        match self
            .space
            .function
            .dma_unmap(self.range.start, self.range.bytes())
        {
            Ok(()) => {
                let mut addresses = self
                    .space
                    .addresses
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                // Exactly what `place` handed out.
                let _ = addresses.release(self.range);
            }
            // The address is not used again. The memory can go all the same where something guards it: the kernel
            // keeps the pages of a mapping pinned, and an emulator has its own mapping of the descriptor.
            Err(e) => {
                tracing::warn!(range = %self.range, error = %e, "a DMA mapping could not be removed");
                if self.space.function.isolation() == Isolation::None {
                    let _ = std::mem::ManuallyDrop::new(self._keep.take());
                }
            }
        }
    }
}
