//! Mappings of BARs.

#![allow(unsafe_code, reason = "loads and stores of device memory")]

use std::{any::Any, fmt, io};

use memmap2::{MmapOptions, MmapRaw};
use ntb_mem::region::Region;
use rustix::mm::{MapFlags, ProtFlags};

use super::{Area, Areas, Bar, CacheType, PciError, fault::Guarded};
use crate::hw::regs::Width;

/// One contiguous mapped area of a BAR.
pub struct MappedArea {
    area: Area,
    pointer: *mut u8,
    // Fields drop in order: the guard before the mapping.
    guard: Guarded,
    map: MmapRaw,
}

// SAFETY: a mapping belongs to the process; it is accessed by fixed-width volatile loads and stores only.
unsafe impl Send for MappedArea {}
// SAFETY: as above.
unsafe impl Sync for MappedArea {}

impl MappedArea {
    /// An area that starts at `offset` of the BAR and is as long as `map`.
    pub fn file(offset: u64, map: MmapRaw) -> Self {
        Self {
            area: Area {
                offset,
                bytes: map.len() as u64,
            },
            pointer: map.as_mut_ptr(),
            guard: Guarded::new(map.as_mut_ptr(), map.len()),
            map,
        }
    }

    /// An area that is the same part of plain memory of this process: a software device's. A mapping of its own, so that
    /// it can be let go of alone; cut to what the region has.
    pub fn shared(area: Area, region: &Region) -> io::Result<Self> {
        let offset = area.offset.min(region.bytes());
        let bytes = area.bytes.min(region.bytes() - offset);
        let length = usize::try_from(bytes).map_err(io::Error::other)?;
        let map = MmapOptions::new()
            .offset(offset)
            .len(length)
            .map_raw(&region.descriptor())?;
        Ok(Self::file(offset, map))
    }

    /// Puts private memory that nobody reads in place of the device's.
    fn revoke(&self) -> Result<(), PciError> {
        // SAFETY: replaces exactly the mapping that `map` owns and will unmap; its users hold raw addresses only,
        // which stay valid, and the kernel makes the exchange atomic towards accesses of other threads.
        unsafe {
            rustix::mm::mmap_anonymous(
                self.pointer.cast(),
                self.map.len(),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE,
            )
        }
        .map(drop)
        .map_err(|e| PciError::io("letting go of a mapped BAR", e))
    }
}

impl fmt::Debug for MappedArea {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.area.fmt(f)
    }
}

/// The mapped parts of a BAR, until this is dropped. Holds the device open.
///
/// Fields drop in order: first the areas, then whatever keeps the device open.
#[derive(Debug)]
pub struct BarMap {
    areas: Vec<MappedArea>,
    bar: Bar,
    cache: CacheType,
    _device: Box<dyn Keep>,
}

/// Whatever a mapping depends on.
trait Keep: Any + Send + Sync + fmt::Debug {}
impl<T: Any + Send + Sync + fmt::Debug> Keep for T {}

impl BarMap {
    /// A map of these areas of `bar`, ascending and apart, that keeps `device` alive.
    pub fn new<D>(bar: Bar, cache: CacheType, areas: Vec<MappedArea>, device: D) -> Self
    where
        D: Send + Sync + fmt::Debug + 'static,
    {
        Self {
            areas,
            bar,
            cache,
            _device: Box::new(device),
        }
    }

    /// Lets go of the device's memory while others may still be storing to it: the addresses stay valid as long as the
    /// map and turn into private memory that nobody reads.
    pub fn revoke(&self) -> Result<(), PciError> {
        self.areas.iter().try_for_each(MappedArea::revoke)
    }

    /// Memory type.
    pub fn cache(&self) -> CacheType {
        self.cache
    }

    /// Which BAR.
    pub fn bar(&self) -> Bar {
        self.bar
    }

    /// The mapped areas.
    pub fn areas(&self) -> Vec<Area> {
        self.areas.iter().map(|a| a.area).collect()
    }

    /// Whether the kernel has taken the mapping away under an access: the device is gone, loads give all ones, and
    /// stores land nowhere.
    pub fn lost(&self) -> bool {
        self.areas.iter().map(|a| &a.guard).any(Guarded::lost)
    }

    /// Address of `bytes` bytes from `offset`, if they lie in one mapped area; [`PciError::Hole`] otherwise.
    ///
    /// Valid as long as the map; for store routines, never to be made a reference.
    pub fn pointer(&self, offset: u64, bytes: u64) -> Result<*mut u8, PciError> {
        self.areas
            .iter()
            .find(|a| a.area.contains(offset, bytes))
            // In range of a mapping, whose length is a usize.
            .map(|a| a.pointer.wrapping_add((offset - a.area.offset) as usize))
            .ok_or_else(|| PciError::Hole {
                bar: self.bar,
                offset,
                bytes,
                areas: Areas(self.areas()),
            })
    }

    /// One load of exactly this width. The offset must be naturally aligned.
    pub fn load<W: Width>(&self, offset: u64) -> Result<W, PciError> {
        let p = self.aligned::<W>(offset)?;
        // SAFETY: `pointer` found the bytes inside a mapping that lives as long as self, `aligned` checked alignment
        // (mappings start on pages); every bit pattern of an unsigned integer is valid.
        Ok(unsafe { p.read_volatile() })
    }

    /// One store of exactly this width. The offset must be naturally aligned.
    pub fn store<W: Width>(&self, offset: u64, value: W) -> Result<(), PciError> {
        let p = self.aligned::<W>(offset)?;
        // SAFETY: as in `load`.
        unsafe { p.write_volatile(value) };
        Ok(())
    }

    fn aligned<W: Width>(&self, offset: u64) -> Result<*mut W, PciError> {
        let bytes = W::BYTES.into();
        let p = self.pointer(offset, bytes)?.cast::<W>();
        if p.is_aligned() {
            return Ok(p);
        }
        Err(PciError::Misaligned {
            bar: self.bar,
            offset,
            bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ntb_mem::region::Pages;

    #[test]
    fn stores_after_revocation_reach_nobody() {
        let region = Region::allocate(8192, Pages::Normal).unwrap();
        let area = Area {
            offset: 4096,
            bytes: 4096,
        };
        let areas = vec![MappedArea::shared(area, &region).unwrap()];
        let map = BarMap::new(Bar::B2, CacheType::WriteBack, areas, ());
        let region = std::sync::Arc::new(region);
        let seen = || region.view().load(512, std::sync::atomic::Ordering::Acquire);
        map.store(4096, 7u64).unwrap();
        assert_eq!(seen(), 7);
        map.revoke().unwrap();
        let pointer = map.pointer(4096, 8).unwrap();
        map.store(4096, 9u64).unwrap();
        assert_eq!(map.load::<u64>(4096).unwrap(), 9, "private memory");
        assert_eq!(seen(), 7, "what the device has is left alone");
        map.revoke().unwrap();
        assert_eq!(map.pointer(4096, 8).unwrap(), pointer);
    }
}
