//! Regions as a server describes them, checked before use.

use std::os::fd::OwnedFd;

use memmap2::MmapOptions;

use super::{
    super::{Area, Bar, BarInfo, MappedArea, PciError},
    proto::{self, CapHeader, RegionInfo, SparseArea, SparseHeader},
    protocol_error,
    socket::Message,
};

/// Most areas that a region may have.
const MAX_AREAS: u32 = 64;
/// Largest region that is taken for real.
const MAX_BYTES: u64 = 1 << 52;

/// A region of the device.
#[derive(Debug)]
pub(super) struct Region {
    /// Facts, with the mappable areas.
    pub(super) info: BarInfo,
    /// Length in bytes; zero when the region is absent.
    pub(super) bytes: u64,
    /// File to map, and where in it the region starts.
    file: Option<(OwnedFd, u64)>,
}

impl Region {
    pub(super) fn parse(index: u32, reply: Message) -> Result<Self, PciError> {
        let (info, mut mappable) = describe(index, &reply.payload)?;
        let file = reply.fds.into_iter().next().map(|fd| (fd, info.offset));
        if file.is_none() {
            mappable.clear();
        }
        Ok(Self {
            info: BarInfo {
                bar: u8::try_from(index).ok().and_then(Bar::new).unwrap_or(Bar::B0),
                bytes: info.size,
                prefetchable: false,
                mappable,
            },
            bytes: info.size,
            file,
        })
    }

    /// Maps every mappable area.
    pub(super) fn map(&self) -> Result<Vec<MappedArea>, PciError> {
        let Some((fd, base)) = &self.file else {
            return Ok(Vec::new());
        };
        let mut areas = Vec::new();
        for area in &self.info.mappable {
            let at = base
                .checked_add(area.offset)
                .ok_or_else(|| protocol_error("an area beyond the end of its file"))?;
            // A file that is too short would make accesses fault.
            let length = rustix::fs::fstat(fd)
                .map_err(|e| PciError::io("fstat of a region's file", e))?
                .st_size;
            if at
                .checked_add(area.bytes)
                .is_none_or(|end| i64::try_from(end).map_or(true, |e| e > length))
            {
                return Err(protocol_error("a region's file is shorter than the region"));
            }
            let bytes =
                usize::try_from(area.bytes).map_err(|_| protocol_error("an area too large to map"))?;
            let map = MmapOptions::new()
                .offset(at)
                .len(bytes)
                .map_raw(fd)
                .map_err(|e| PciError::io(format!("mapping {bytes} bytes of a region"), e))?;
            areas.push(MappedArea::file(area.offset, map));
        }
        Ok(areas)
    }
}

/// A region info with its mappable areas, ascending and apart. The kernel's answer to the corresponding ioctl has the
/// same form.
pub(in crate::pci) fn describe(index: u32, answer: &[u8]) -> Result<(RegionInfo, Vec<Area>), PciError> {
    let (info, _) =
        proto::split::<RegionInfo>(answer).ok_or_else(|| protocol_error("a short region info"))?;
    if info.index != index {
        return Err(protocol_error(format!(
            "region {} in answer to region {index}",
            info.index
        )));
    }
    if info.size > MAX_BYTES {
        return Err(protocol_error(format!(
            "region {index} of {:#x} bytes",
            info.size
        )));
    }
    let mut mappable = Vec::new();
    if info.flags & proto::REGION_MMAP != 0 && info.size > 0 {
        mappable = match sparse_areas(&info, answer)? {
            Some(areas) => areas,
            None => vec![Area {
                offset: 0,
                bytes: info.size,
            }],
        };
    }
    for area in &mappable {
        check_area(index, area, info.size)?;
    }
    mappable.sort_unstable_by_key(|a| a.offset);
    if mappable
        .iter()
        .zip(mappable.iter().skip(1))
        .any(|(a, b)| a.end() > b.offset)
    {
        return Err(protocol_error(format!("overlapping areas in region {index}")));
    }
    Ok((info, mappable))
}

fn check_area(index: u32, area: &Area, size: u64) -> Result<(), PciError> {
    let whole = Area {
        offset: 0,
        bytes: size,
    };
    if area.bytes == 0 || !area.offset.is_multiple_of(4096) || !whole.contains(area.offset, area.bytes) {
        return Err(protocol_error(format!(
            "area {:#x}+{:#x} in region {index} of {size:#x} bytes",
            area.offset, area.bytes
        )));
    }
    Ok(())
}

/// The areas of a sparse capability; `None` when there is no such capability.
fn sparse_areas(info: &RegionInfo, payload: &[u8]) -> Result<Option<Vec<Area>>, PciError> {
    if info.flags & proto::REGION_CAPS == 0 {
        return Ok(None);
    }
    let mut at = info.cap_offset as usize;
    // Each capability lies behind the one before, so the walk ends.
    let mut behind = size_of::<RegionInfo>();
    while at != 0 {
        let broken = || protocol_error("a broken list of region capabilities");
        if at < behind {
            return Err(broken());
        }
        behind = at + size_of::<CapHeader>();
        let (head, rest) = payload
            .get(at..)
            .and_then(proto::split::<CapHeader>)
            .ok_or_else(broken)?;
        if head.id == proto::CAP_SPARSE_MMAP {
            let (sparse, mut rest) = proto::split::<SparseHeader>(rest).ok_or_else(broken)?;
            if sparse.areas > MAX_AREAS {
                return Err(protocol_error(format!("{} areas in a region", sparse.areas)));
            }
            let mut areas = Vec::new();
            for _ in 0..sparse.areas {
                let (area, more) = proto::split::<SparseArea>(rest).ok_or_else(broken)?;
                rest = more;
                areas.push(Area {
                    offset: area.offset,
                    bytes: area.size,
                });
            }
            return Ok(Some(areas));
        }
        at = head.next as usize;
    }
    Ok(None)
}
