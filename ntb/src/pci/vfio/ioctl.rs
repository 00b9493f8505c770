//! System calls on an open VFIO device and container, with their errors.
//!
//! What vfio-ioctls swallows or leaves out is done here: errors of register access, ranges of I/O addresses, any
//! subset of vectors, reset and what it hits. The structures are those of the vfio-user protocol, which mirrors
//! `linux/vfio.h`.

#![allow(unsafe_code, reason = "ioctl")]

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
};

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::super::{
    iova::IovaRange,
    vfio_user::proto::{self, IrqInfo, IrqSet, RegionInfo},
};

/// `_IO(';', 100 + n)` of `linux/vfio.h`.
const fn vfio(n: libc::c_ulong) -> libc::c_ulong {
    0x3B64 + n
}

const GROUP_SET_CONTAINER: libc::c_ulong = vfio(4);
const GROUP_GET_DEVICE_FD: libc::c_ulong = vfio(6);
const SET_IOMMU: libc::c_ulong = vfio(2);
const DEVICE_GET_INFO: libc::c_ulong = vfio(7);
const DEVICE_GET_REGION_INFO: libc::c_ulong = vfio(8);
const DEVICE_GET_IRQ_INFO: libc::c_ulong = vfio(9);
const DEVICE_SET_IRQS: libc::c_ulong = vfio(10);
const DEVICE_RESET: libc::c_ulong = vfio(11);
const DEVICE_GET_PCI_HOT_RESET_INFO: libc::c_ulong = vfio(12);
const IOMMU_GET_INFO: libc::c_ulong = vfio(12);
const IOMMU_IOAS_IOVA_RANGES: libc::c_ulong = 0x3B84;
/// `VFIO_NOIOMMU_IOMMU`.
const NOIOMMU: libc::c_ulong = 8;
/// `VFIO_IOMMU_INFO_PGSIZES`, `VFIO_IOMMU_INFO_CAPS`.
const IOMMU_INFO_PAGE_SIZES: u32 = 1 << 0;
const IOMMU_INFO_CAPS: u32 = 1 << 1;
/// `VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE`.
const CAP_IOVA_RANGE: u16 = 1;
/// Most that the kernel is asked for in one answer.
const MAX_ANSWER: usize = 64 << 10;

/// # Safety
/// `argument` is what `number` takes: a value, or the address of a structure that starts with its own size.
unsafe fn ioctl(
    fd: BorrowedFd<'_>,
    number: libc::c_ulong,
    argument: *mut libc::c_void,
) -> io::Result<libc::c_int> {
    // SAFETY: by the caller's promise.
    let answer = unsafe { libc::ioctl(fd.as_raw_fd(), number as _, argument) };
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(answer)
}

/// A structure that starts with its size, in and out.
fn exchange<T: IntoBytes + FromBytes + Immutable>(
    fd: BorrowedFd<'_>,
    number: libc::c_ulong,
    value: &mut T,
) -> io::Result<()> {
    // SAFETY: callers pass the structure that `number` takes, whose first field is its size.
    unsafe { ioctl(fd, number, value.as_mut_bytes().as_mut_ptr().cast()) }.map(drop)
}

/// A structure with whatever the kernel has to say behind it. `head` starts with its size.
fn exchange_long(fd: BorrowedFd<'_>, number: libc::c_ulong, head: &[u8]) -> io::Result<Vec<u8>> {
    let mut bytes = head.len();
    loop {
        // Words, so that the structure is aligned as the kernel's own.
        let mut buffer = vec![0u64; bytes.div_ceil(8)];
        let memory = buffer.as_mut_bytes();
        memory
            .get_mut(..head.len())
            .unwrap_or_default()
            .copy_from_slice(head);
        let size = (bytes as u32).to_ne_bytes();
        memory.get_mut(..4).unwrap_or_default().copy_from_slice(&size);
        // SAFETY: the buffer has the size that its first field says; callers pass a head that fits `number`.
        let result = unsafe { ioctl(fd, number, memory.as_mut_ptr().cast()) };
        let needed = proto::split::<u32>(memory).map_or(0, |(n, _)| n as usize);
        let too_small = result.as_ref().err().and_then(io::Error::raw_os_error) == Some(libc::ENOSPC);
        if let (Err(e), false) = (result, too_small) {
            return Err(e);
        }
        if needed <= bytes && !too_small {
            return Ok(memory.get(..bytes).unwrap_or_default().to_vec());
        }
        // Hot reset info does not say how much it needs.
        bytes = needed.max(bytes * 2);
        if bytes > MAX_ANSWER {
            return Err(io::Error::from_raw_os_error(libc::E2BIG));
        }
    }
}

/// `VFIO_DEVICE_GET_INFO`: flags.
pub(super) fn device_flags(device: BorrowedFd<'_>) -> io::Result<u32> {
    let mut info = proto::DeviceInfo::new_zeroed();
    info.argsz = size_of::<proto::DeviceInfo>() as u32;
    exchange(device, DEVICE_GET_INFO, &mut info)?;
    Ok(info.flags)
}

/// `VFIO_DEVICE_GET_REGION_INFO` with capabilities.
pub(super) fn region_info(device: BorrowedFd<'_>, index: u32) -> io::Result<Vec<u8>> {
    let mut ask = RegionInfo::new_zeroed();
    ask.index = index;
    exchange_long(device, DEVICE_GET_REGION_INFO, ask.as_bytes())
}

/// Vectors of an interrupt index.
pub(super) fn vectors(device: BorrowedFd<'_>, index: u32) -> io::Result<u32> {
    let mut info = IrqInfo::new_zeroed();
    info.argsz = size_of::<IrqInfo>() as u32;
    info.index = index;
    exchange(device, DEVICE_GET_IRQ_INFO, &mut info)?;
    Ok(info.count)
}

/// Connects vectors from 0 on to these descriptors; -1 leaves one out. None at all disables the index.
pub(super) fn set_vectors(device: BorrowedFd<'_>, index: u32, fds: &[RawFd]) -> io::Result<()> {
    let data = if fds.is_empty() {
        proto::IRQ_SET_DATA_NONE
    } else {
        proto::IRQ_SET_DATA_EVENTFD
    };
    let mut message = Vec::new();
    let size = size_of::<IrqSet>() + size_of_val(fds);
    let head = IrqSet {
        argsz: size as u32,
        flags: data | proto::IRQ_SET_ACTION_TRIGGER,
        index,
        start: 0,
        count: fds.len() as u32,
    };
    message.extend_from_slice(head.as_bytes());
    message.extend_from_slice(fds.as_bytes());
    // Words, so that the structure is aligned as the kernel's own.
    let mut buffer = vec![0u64; size.div_ceil(8)];
    buffer
        .as_mut_bytes()
        .get_mut(..size)
        .unwrap_or_default()
        .copy_from_slice(&message);
    // SAFETY: the buffer holds the structure that its first field gives the size of.
    unsafe { ioctl(device, DEVICE_SET_IRQS, buffer.as_mut_ptr().cast()) }.map(drop)
}

/// `VFIO_DEVICE_RESET`.
pub(super) fn reset(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: takes no argument.
    unsafe { ioctl(device, DEVICE_RESET, std::ptr::null_mut()) }.map(drop)
}

/// A device that a hot reset would hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Dependent {
    pub(super) group_or_id: u32,
    pub(super) segment: u16,
    pub(super) bus: u8,
    pub(super) devfn: u8,
}

/// `VFIO_DEVICE_GET_PCI_HOT_RESET_INFO`: what a reset of the bus would hit, this device included.
pub(super) fn hot_reset_hits(device: BorrowedFd<'_>) -> io::Result<Vec<Dependent>> {
    // argsz, flags, count.
    let answer = exchange_long(device, DEVICE_GET_PCI_HOT_RESET_INFO, &[0; 12])?;
    let Some((head, mut rest)) = proto::split::<[u32; 3]>(&answer) else {
        return Ok(Vec::new());
    };
    let [_, _, count] = head;
    let mut hit = Vec::new();
    for _ in 0..count {
        let Some((one, more)) = proto::split::<Dependent>(rest) else {
            break;
        };
        hit.push(one);
        rest = more;
    }
    Ok(hit)
}

/// What a container says: I/O addresses that may be mapped (`None` from kernels that do not say), smallest page.
pub(super) fn container_ranges(container: BorrowedFd<'_>) -> io::Result<(Option<Vec<IovaRange>>, u64)> {
    // argsz, flags, page sizes, cap_offset, padding.
    let answer = exchange_long(container, IOMMU_GET_INFO, &[0; 24])?;
    Ok(parse_container_info(&answer))
}

/// The answer to `VFIO_IOMMU_GET_INFO`.
pub(super) fn parse_container_info(answer: &[u8]) -> (Option<Vec<IovaRange>>, u64) {
    let word = |at: usize| {
        answer
            .get(at..)
            .and_then(proto::split::<u32>)
            .map_or(0, |(w, _)| w)
    };
    let flags = word(4);
    let pages = answer
        .get(8..)
        .and_then(proto::split::<u64>)
        .map_or(0, |(w, _)| w);
    let page = match flags & IOMMU_INFO_PAGE_SIZES != 0 && pages != 0 {
        true => 1u64 << pages.trailing_zeros(),
        false => 4096,
    };
    let mut at = if flags & IOMMU_INFO_CAPS != 0 {
        word(16) as usize
    } else {
        0
    };
    let mut behind = 1;
    while at >= behind {
        behind = at + 8;
        let Some((head, rest)) = answer.get(at..).and_then(proto::split::<proto::CapHeader>) else {
            break;
        };
        if head.id == CAP_IOVA_RANGE {
            let Some(([count, _], mut rest)) = proto::split::<[u32; 2]>(rest) else {
                break;
            };
            let mut ranges = Vec::new();
            for _ in 0..count {
                let Some(([start, last], more)) = proto::split::<[u64; 2]>(rest) else {
                    break;
                };
                if start <= last {
                    ranges.push(IovaRange { start, last });
                }
                rest = more;
            }
            return (Some(ranges), page.max(4096));
        }
        at = head.next as usize;
    }
    (None, page.max(4096))
}

/// `IOMMU_IOAS_IOVA_RANGES`.
pub(super) fn ioas_ranges(iommufd: BorrowedFd<'_>, ioas: u32) -> io::Result<Vec<IovaRange>> {
    #[derive(FromBytes, IntoBytes, Immutable)]
    #[repr(C)]
    struct Ask {
        size: u32,
        ioas: u32,
        count: u32,
        reserved: u32,
        array: u64,
        alignment: u64,
    }
    let mut room = 16usize;
    loop {
        let mut array = vec![[0u64; 2]; room];
        let mut ask = Ask {
            size: size_of::<Ask>() as u32,
            ioas,
            count: room as u32,
            reserved: 0,
            array: array.as_mut_ptr().expose_provenance() as u64,
            alignment: 0,
        };
        match exchange(iommufd, IOMMU_IOAS_IOVA_RANGES, &mut ask) {
            Err(e) if e.raw_os_error() == Some(libc::EMSGSIZE) && room < 4096 => {
                room = (ask.count as usize).clamp(room + 1, 4096);
            }
            Err(e) => return Err(e),
            Ok(()) => {
                let ranges = array.iter().take(ask.count as usize);
                return Ok(ranges
                    .map(|[start, last]| IovaRange {
                        start: *start,
                        last: *last,
                    })
                    .collect());
            }
        }
    }
}

/// Joins a group without an IOMMU to a container and opens a device of it.
pub(super) fn open_without_iommu(
    container: BorrowedFd<'_>,
    group: BorrowedFd<'_>,
    address: &str,
) -> io::Result<OwnedFd> {
    let mut fd = container.as_raw_fd();
    let name = std::ffi::CString::new(address)?;
    // SAFETY: takes the address of a descriptor number.
    unsafe { ioctl(group, GROUP_SET_CONTAINER, (&raw mut fd).cast()) }?;
    // SAFETY: takes a number.
    unsafe {
        ioctl(
            container,
            SET_IOMMU,
            std::ptr::without_provenance_mut(NOIOMMU as usize),
        )
    }?;
    // SAFETY: takes a string that ends with a zero, which it does not change.
    let device = unsafe { ioctl(group, GROUP_GET_DEVICE_FD, name.as_ptr().cast_mut().cast()) }?;
    // SAFETY: the call made a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(device) })
}

/// Makes a descriptor of our own for what another type holds open.
pub(super) fn duplicate(holder: &impl AsRawFd) -> io::Result<OwnedFd> {
    // SAFETY: `holder` keeps the descriptor open for the time of the borrow.
    let borrowed = unsafe { BorrowedFd::borrow_raw(holder.as_raw_fd()) };
    borrowed.as_fd().try_clone_to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn container_info_gives_ranges_and_page() {
        let mut answer = vec![0u8; 24];
        answer[4..8].copy_from_slice(&3u32.to_ne_bytes());
        answer[8..16].copy_from_slice(&0x4020_1000u64.to_ne_bytes());
        answer[16..20].copy_from_slice(&24u32.to_ne_bytes());
        // A capability of another kind, then the ranges.
        answer.extend_from_slice(&[3, 0, 1, 0, 40, 0, 0, 0, 0xFF, 0xFF, 0, 0, 0, 0, 0, 0]);
        answer.extend_from_slice(&[1, 0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
        for n in [0u64, 0xFEDF_FFFF, 0xFEF0_0000, (1 << 39) - 1] {
            answer.extend_from_slice(&n.to_ne_bytes());
        }
        let (ranges, page) = parse_container_info(&answer);
        assert_eq!(page, 4096);
        let ranges = ranges.unwrap();
        assert_eq!(ranges.len(), 2);
        assert_eq!(ranges[1].start, 0xFEF0_0000);
        // Cut anywhere, it gives less and never panics.
        for cut in 0..answer.len() {
            let _ = parse_container_info(&answer[..cut]);
        }
        // A list that points at itself ends.
        answer[28..32].copy_from_slice(&24u32.to_ne_bytes());
        assert_eq!(parse_container_info(&answer).0, None);
    }
}
