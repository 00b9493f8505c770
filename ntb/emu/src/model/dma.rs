//! The memory of a port's client, reached by bus address exactly as through an IOMMU.
//!
//! What is not mapped cannot be reached: writes are dropped, reads give all ones, both are counted as faults.
//! Memory is shared with another process that stores to it at any time; it is accessed by aligned atomics only.

#![allow(unsafe_code, reason = "atomics over memory that a client shares with us")]

use std::{
    collections::{BTreeMap, HashMap},
    os::fd::OwnedFd,
    sync::{
        Arc, Weak,
        atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering},
    },
};

use ntb_mem::region::{Region, RegionError};
use rustix::io::Errno;

use super::regfile::pieces;

/// Most mappings of a client at a time; advertised to it.
pub const MAX_DMA_MAPS: usize = 65_535;
/// Most different memory files behind them: each takes a mapping of this process.
const MAX_FILES: usize = 4096;
/// Granularity of mappings.
const PAGE: u64 = 4096;

/// What a device may do with mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaAccess {
    /// It may read.
    pub read: bool,
    /// It may write.
    pub write: bool,
}

/// Why part of an access went nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Faults {
    /// Pieces whose address no mapping covers.
    pub unmapped: u64,
    /// Pieces whose mapping does not allow the access.
    pub forbidden: u64,
    /// Pieces whose mapping has no memory that this process can reach.
    pub unreachable: u64,
    /// Where in the access the first piece is that no mapping allows, and its length.
    pub refused: Option<(usize, usize)>,
}

#[derive(Debug)]
struct Mapping {
    size: u64,
    access: DmaAccess,
    memory: Option<(Arc<Region>, u64)>,
}

/// The mappings of one client, by bus address.
#[derive(Debug, Default)]
pub struct ClientMemory {
    maps: BTreeMap<u64, Mapping>,
    files: HashMap<(u64, u64), Weak<Region>>,
    unreachable: u64,
}

impl ClientMemory {
    /// Maps `size` bytes at bus address `iova` to `descriptor` from `offset`.
    ///
    /// Without a descriptor, or with one that its owner could shrink under us, the mapping is remembered and
    /// nothing behind it can be reached.
    ///
    /// # Errors
    /// `EINVAL` for sizes and addresses that are not whole pages or wrap, `EEXIST` for an overlap, `ENOSPC` for too
    /// many, and what the kernel says when it refuses to map.
    pub fn map(
        &mut self,
        iova: u64,
        size: u64,
        offset: u64,
        access: DmaAccess,
        descriptor: Option<OwnedFd>,
    ) -> Result<(), Errno> {
        let last = iova
            .checked_add(size.checked_sub(1).ok_or(Errno::INVAL)?)
            .ok_or(Errno::INVAL)?;
        if !(iova | size | offset).is_multiple_of(PAGE) {
            return Err(Errno::INVAL);
        }
        if let Some((&start, below)) = self.maps.range(..=last).next_back()
            && start + (below.size - 1) >= iova
        {
            return Err(Errno::EXIST);
        }
        if self.maps.len() >= MAX_DMA_MAPS {
            return Err(Errno::NOSPC);
        }
        let memory = match descriptor {
            None => None,
            Some(fd) => {
                let end = offset.checked_add(size).ok_or(Errno::INVAL)?;
                self.file(fd, end)?.map(|region| (region, offset))
            }
        };
        if memory.is_none() {
            self.unreachable += 1;
        }
        let mapping = Mapping { size, access, memory };
        self.maps.insert(iova, mapping);
        Ok(())
    }

    /// The file behind `fd`, mapped once however many mappings stand on it; `None` when it is not safe to map.
    fn file(&mut self, fd: OwnedFd, end: u64) -> Result<Option<Arc<Region>>, Errno> {
        let stat = rustix::fs::fstat(&fd)?;
        let key = (stat.st_dev, stat.st_ino);
        if let Some(region) = self.files.get(&key).and_then(Weak::upgrade)
            && region.bytes() >= end
        {
            return Ok(Some(region));
        }
        self.files.retain(|_, file| file.strong_count() > 0);
        if self.files.len() >= MAX_FILES {
            return Err(Errno::NOSPC);
        }
        let bytes = u64::try_from(stat.st_size).unwrap_or(0) / PAGE * PAGE;
        if bytes < end {
            return Err(Errno::INVAL);
        }
        match Region::from_peer(fd, bytes) {
            Ok(region) => {
                let region = Arc::new(region);
                self.files.insert(key, Arc::downgrade(&region));
                Ok(Some(region))
            }
            Err(RegionError::BadDescriptor { .. }) => Ok(None),
            Err(RegionError::Kernel { errno, .. }) => Err(errno),
            Err(_) => Err(Errno::INVAL),
        }
    }

    /// Unmaps every mapping that lies within the range; answers how many bytes that were.
    ///
    /// # Errors
    /// `EINVAL` when the range wraps or would cut a mapping in two.
    pub fn unmap(&mut self, iova: u64, size: u64) -> Result<u64, Errno> {
        let last = iova
            .checked_add(size.checked_sub(1).ok_or(Errno::INVAL)?)
            .ok_or(Errno::INVAL)?;
        let cut = |at: u64| {
            // A mapping that starts below `at` and reaches it.
            self.maps
                .range(..at)
                .next_back()
                .is_some_and(|(start, m)| start + (m.size - 1) >= at)
        };
        if cut(iova) || last.checked_add(1).is_some_and(cut) {
            return Err(Errno::INVAL);
        }
        let gone: Vec<u64> = self.maps.range(iova..=last).map(|(&start, _)| start).collect();
        Ok(gone
            .iter()
            .filter_map(|start| self.maps.remove(start))
            .map(|m| m.size)
            .sum())
    }

    /// Unmaps everything; answers how many bytes that were.
    pub fn clear(&mut self) -> u64 {
        self.files.clear();
        std::mem::take(&mut self.maps)
            .values()
            .map(|m| m.size)
            .fold(0, u64::saturating_add)
    }

    /// Mappings there are.
    pub fn mappings(&self) -> usize {
        self.maps.len()
    }

    /// Mappings made so far whose memory cannot be reached.
    pub fn unreachable_maps(&self) -> u64 {
        self.unreachable
    }

    /// Cuts an access at the borders of mappings and hands each part over: offset in the access, length, memory.
    fn parts(&self, address: u64, len: usize, mut each: impl FnMut(usize, usize, Option<&Mapping>, u64)) {
        let mut done = 0;
        while done < len {
            let left = (len - done) as u64;
            let Some(at) = address.checked_add(done as u64) else {
                each(done, len - done, None, 0);
                return;
            };
            let hit = self
                .maps
                .range(..=at)
                .next_back()
                .map(|(&start, m)| (at - start, m))
                .filter(|&(into, m)| into < m.size);
            let room = match hit {
                Some((into, m)) => m.size - into,
                None => self
                    .maps
                    .range(at..)
                    .next()
                    .map_or(left, |(&start, _)| start - at),
            };
            let n = room.min(left) as usize; // at most `len`
            match hit {
                Some((into, m)) => each(done, n, Some(m), into),
                None => each(done, n, None, 0),
            }
            done += n;
        }
    }

    /// Stores `data` at bus address `address`: ascending, in the widest aligned pieces, the last with release.
    ///
    /// Pairs with the client's acquire load of the last word: who sees it sees the rest.
    pub fn write(&self, address: u64, data: &[u8]) -> Faults {
        let mut faults = Faults::default();
        self.parts(address, data.len(), |from, len, mapping, into| {
            let Some(data) = data.get(from..from + len) else {
                return;
            };
            if !mapping.is_some_and(|m| m.access.write) {
                faults.refused.get_or_insert((from, len));
            }
            match mapping {
                None => faults.unmapped += 1,
                Some(m) if !m.access.write => faults.forbidden += 1,
                Some(m) => match &m.memory {
                    None => faults.unreachable += 1,
                    Some((region, offset)) => store(region, offset + into, data),
                },
            }
        });
        faults
    }

    /// Loads from bus address `address`; what cannot be had is all ones.
    pub fn read(&self, address: u64, out: &mut [u8]) -> Faults {
        let mut faults = Faults::default();
        out.fill(0xFF);
        self.parts(address, out.len(), |from, len, mapping, into| {
            let Some(out) = out.get_mut(from..from + len) else {
                return;
            };
            match mapping {
                None => faults.unmapped += 1,
                Some(m) if !m.access.read => faults.forbidden += 1,
                Some(m) => match &m.memory {
                    None => faults.unreachable += 1,
                    Some((region, offset)) => load(region, offset + into, out),
                },
            }
        });
        faults
    }
}

/// Whether the range lies in the region: established when it was mapped, checked again since memory hangs on it.
fn inside(region: &Region, offset: u64, len: usize) -> bool {
    offset
        .checked_add(len as u64)
        .is_some_and(|end| end <= region.bytes())
}

fn store(region: &Region, offset: u64, data: &[u8]) {
    if !inside(region, offset, data.len()) {
        return;
    }
    let end = offset + data.len() as u64;
    let mut rest = data;
    for (at, size) in pieces(offset, data.len()) {
        let (piece, tail) = rest.split_at(size);
        rest = tail;
        let order = if at + size as u64 == end {
            Ordering::Release
        } else {
            Ordering::Relaxed
        };
        let ptr = region.as_ptr().wrapping_add(at as usize);
        // SAFETY: `inside` keeps the piece in the mapping, which lives as long as `region`; `pieces` aligns it to
        // its size (the mapping starts at a page); this memory is accessed atomically only.
        unsafe {
            match *piece {
                [a] => AtomicU8::from_ptr(ptr).store(a, order),
                [a, b] => AtomicU16::from_ptr(ptr.cast()).store(u16::from_ne_bytes([a, b]), order),
                [a, b, c, d] => {
                    AtomicU32::from_ptr(ptr.cast()).store(u32::from_ne_bytes([a, b, c, d]), order);
                }
                [a, b, c, d, e, f, g, h] => {
                    AtomicU64::from_ptr(ptr.cast())
                        .store(u64::from_ne_bytes([a, b, c, d, e, f, g, h]), order);
                }
                _ => {}
            }
        }
    }
}

fn load(region: &Region, offset: u64, out: &mut [u8]) {
    if !inside(region, offset, out.len()) {
        return;
    }
    let len = out.len();
    let mut rest = out;
    for (at, size) in pieces(offset, len) {
        let (piece, tail) = rest.split_at_mut(size);
        rest = tail;
        let ptr = region.as_ptr().wrapping_add(at as usize);
        // SAFETY: as in `store`.
        unsafe {
            match size {
                1 => piece.copy_from_slice(&AtomicU8::from_ptr(ptr).load(Ordering::Acquire).to_ne_bytes()),
                2 => piece.copy_from_slice(
                    &AtomicU16::from_ptr(ptr.cast())
                        .load(Ordering::Acquire)
                        .to_ne_bytes(),
                ),
                4 => piece.copy_from_slice(
                    &AtomicU32::from_ptr(ptr.cast())
                        .load(Ordering::Acquire)
                        .to_ne_bytes(),
                ),
                _ => piece.copy_from_slice(
                    &AtomicU64::from_ptr(ptr.cast())
                        .load(Ordering::Acquire)
                        .to_ne_bytes(),
                ),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ntb_mem::region::Pages;
    use rustix::fs::MemfdFlags;

    use super::*;

    const RW: DmaAccess = DmaAccess {
        read: true,
        write: true,
    };

    fn memory(bytes: u64) -> (Arc<Region>, OwnedFd) {
        let region = Region::allocate(bytes, Pages::Normal).unwrap();
        let fd = region.descriptor().try_clone_to_owned().unwrap();
        (Arc::new(region), fd)
    }

    #[test]
    fn reaches_exactly_what_is_mapped() {
        let (region, fd) = memory(0x4000);
        let view = region.view();
        let mut m = ClientMemory::default();
        m.map(0x10_0000, 0x1000, 0x2000, RW, Some(fd.try_clone().unwrap()))
            .unwrap();
        m.map(0x10_1000, 0x1000, 0x0000, RW, Some(fd)).unwrap();
        // Across the border of two mappings that are neighbours in bus addresses and not in memory.
        let data: Vec<u8> = (1..=20).collect();
        assert_eq!(m.write(0x10_0FF6, &data), Faults::default());
        let mut back = [0; 20];
        assert_eq!(m.read(0x10_0FF6, &mut back), Faults::default());
        assert_eq!(back[..], data[..]);
        assert_eq!(
            view.load(0x2FF8 / 8, Ordering::Acquire),
            u64::from_le_bytes([3, 4, 5, 6, 7, 8, 9, 10])
        );
        assert_eq!(
            view.load(0, Ordering::Acquire),
            u64::from_le_bytes([11, 12, 13, 14, 15, 16, 17, 18])
        );
        // Below, above and around.
        let mut out = [0; 16];
        assert_eq!(m.read(0xF_FFF8, &mut out).unmapped, 1);
        assert_eq!(out[..8], [0xFF; 8]);
        assert_eq!(out[8..], [0; 8]);
        assert_eq!(m.write(0x10_1FFC, &[9; 8]).unmapped, 1);
        assert_eq!(view.load(0xFF8 / 8, Ordering::Acquire) >> 32, 0x0909_0909);
        assert_eq!(m.write(u64::MAX - 3, &[9; 8]).unmapped, 1);
    }

    #[test]
    fn permissions_hold() {
        let (_region, fd) = memory(0x1000);
        let mut m = ClientMemory::default();
        let read_only = DmaAccess {
            read: true,
            write: false,
        };
        m.map(0, 0x1000, 0, read_only, Some(fd)).unwrap();
        assert_eq!(m.write(0, &[1]).forbidden, 1);
        let mut out = [7];
        assert_eq!(m.read(0, &mut out), Faults::default());
        assert_eq!(out, [0]);
    }

    #[test]
    fn maps_and_unmaps_like_an_iommu() {
        let mut m = ClientMemory::default();
        m.map(0x2000, 0x2000, 0, RW, None).unwrap();
        assert_eq!(m.unreachable_maps(), 1);
        assert_eq!(m.write(0x2000, &[1]).unreachable, 1);
        assert_eq!(m.map(0x3000, 0x1000, 0, RW, None), Err(Errno::EXIST));
        assert_eq!(m.map(0x1000, 0x2000, 0, RW, None), Err(Errno::EXIST));
        assert_eq!(m.map(0x0, 0x10_0000, 0, RW, None), Err(Errno::EXIST));
        assert_eq!(m.map(0x8000, 0, 0, RW, None), Err(Errno::INVAL));
        assert_eq!(m.map(0x8001, 0x1000, 0, RW, None), Err(Errno::INVAL));
        assert_eq!(
            m.map(0u64.wrapping_sub(0x1000), 0x2000, 0, RW, None),
            Err(Errno::INVAL)
        );
        m.map(0u64.wrapping_sub(0x1000), 0x1000, 0, RW, None).unwrap();
        m.map(0x4000, 0x1000, 0, RW, None).unwrap();
        assert_eq!(m.unmap(0x2000, 0x1000), Err(Errno::INVAL), "would cut one");
        assert_eq!(m.unmap(0x3000, 0x2000), Err(Errno::INVAL), "would cut one");
        assert_eq!(m.unmap(0x0, 0x10_0000), Ok(0x3000));
        assert_eq!(m.unmap(0x0, 0x10_0000), Ok(0));
        assert_eq!(m.clear(), 0x1000);
        assert_eq!(m.mappings(), 0);
    }

    #[test]
    fn memory_that_could_vanish_is_not_mapped() {
        let fd = rustix::fs::memfd_create("t", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 0x1000).unwrap();
        let mut m = ClientMemory::default();
        m.map(0, 0x1000, 0, RW, Some(fd)).unwrap();
        assert_eq!(m.unreachable_maps(), 1);
        assert_eq!(m.write(0, &[1]).unreachable, 1);
        let (_region, fd) = memory(0x1000);
        assert_eq!(
            m.map(0x1000, 0x2000, 0, RW, Some(fd)),
            Err(Errno::INVAL),
            "shorter than announced"
        );
        let (r, _w) = rustix::pipe::pipe().unwrap();
        assert_eq!(m.map(0x1000, 0x1000, 0, RW, Some(r)), Err(Errno::INVAL));
    }
}
