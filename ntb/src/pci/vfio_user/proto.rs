//! Messages of the vfio-user protocol, shared by the client here and by servers.
//!
//! Every message is a [`Header`] and `Header::size - 16` bytes of payload; descriptors travel beside it. Integers
//! are in the machine's own byte order: the two ends are always on one machine. The structures mirror those of
//! `linux/vfio.h` where a command mirrors an ioctl.
//!
//! Source: the vfio-user specification of the libvfio-user project and QEMU's `docs/interop/vfio-user.rst`.

#![allow(
    missing_debug_implementations,
    reason = "helper types that the zerocopy derives make"
)]

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Major protocol version: both ends must agree.
pub const VERSION_MAJOR: u16 = 0;
/// Minor protocol version spoken here; a lower one of the other end is accepted.
pub const VERSION_MINOR: u16 = 1;

/// Commands, as in [`Header::command`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
#[non_exhaustive]
pub enum Command {
    /// Negotiates version and capabilities; the first message. [`Version`] and a JSON text.
    Version = 1,
    /// Makes client memory reachable. [`DmaMap`], usually with one descriptor.
    DmaMap = 2,
    /// Takes memory back. [`DmaUnmap`].
    DmaUnmap = 3,
    /// Counts regions and interrupts. [`DeviceInfo`].
    DeviceGetInfo = 4,
    /// Describes one region. [`RegionInfo`].
    DeviceGetRegionInfo = 5,
    /// Asks for descriptors that stand for parts of a region.
    DeviceGetRegionIoFds = 6,
    /// Describes one interrupt index. [`IrqInfo`].
    DeviceGetIrqInfo = 7,
    /// Assigns event descriptors, masks or triggers. [`IrqSet`].
    DeviceSetIrqs = 8,
    /// Reads from a region. [`RegionAccess`].
    RegionRead = 9,
    /// Writes to a region. [`RegionAccess`] and the data.
    RegionWrite = 10,
    /// Server reads client memory through the socket.
    DmaRead = 11,
    /// Server writes client memory through the socket.
    DmaWrite = 12,
    /// Resets the function.
    DeviceReset = 13,
}

impl std::fmt::Display for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Version => "version negotiation",
            Self::DmaMap => "mapping memory for DMA",
            Self::DmaUnmap => "unmapping memory",
            Self::DeviceGetInfo => "asking for the device",
            Self::DeviceGetRegionInfo => "asking for a region",
            Self::DeviceGetRegionIoFds => "asking for region descriptors",
            Self::DeviceGetIrqInfo => "asking for interrupts",
            Self::DeviceSetIrqs => "connecting interrupts",
            Self::RegionRead => "a read",
            Self::RegionWrite => "a write",
            Self::DmaRead => "a read of client memory",
            Self::DmaWrite => "a write of client memory",
            Self::DeviceReset => "device reset",
        })
    }
}

impl Command {
    /// The command with this number, if it is one.
    pub const fn from_number(number: u16) -> Option<Self> {
        Some(match number {
            1 => Self::Version,
            2 => Self::DmaMap,
            3 => Self::DmaUnmap,
            4 => Self::DeviceGetInfo,
            5 => Self::DeviceGetRegionInfo,
            6 => Self::DeviceGetRegionIoFds,
            7 => Self::DeviceGetIrqInfo,
            8 => Self::DeviceSetIrqs,
            9 => Self::RegionRead,
            10 => Self::RegionWrite,
            11 => Self::DmaRead,
            12 => Self::DmaWrite,
            13 => Self::DeviceReset,
            _ => return None,
        })
    }
}

/// Bits of [`Header::flags`].
pub mod flags {
    /// The four bits that give the kind of message.
    pub const TYPE_MASK: u32 = 0xF;
    /// A command.
    pub const COMMAND: u32 = 0;
    /// A reply.
    pub const REPLY: u32 = 1;
    /// The sender of the command wants no reply.
    pub const NO_REPLY: u32 = 1 << 4;
    /// The reply carries an error number and no payload.
    pub const ERROR: u32 = 1 << 5;
}

/// What every message starts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// Chosen by the sender of a command, repeated in its reply.
    pub id: u16,
    /// See [`Command`].
    pub command: u16,
    /// Bytes of the whole message, this header included.
    pub size: u32,
    /// See [`flags`].
    pub flags: u32,
    /// `errno` of a failed command.
    pub error: u32,
}

/// Bytes of [`Header`].
pub const HEADER_BYTES: usize = size_of::<Header>();

/// Payload of [`Command::Version`], followed by a JSON text that ends with a zero byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Version {
    /// See [`VERSION_MAJOR`].
    pub major: u16,
    /// See [`VERSION_MINOR`].
    pub minor: u16,
}

/// Payload of [`Command::DmaMap`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaMap {
    /// Bytes of this structure.
    pub argsz: u32,
    /// [`DMA_READ`] and [`DMA_WRITE`].
    pub flags: u32,
    /// Where in the descriptor's file the memory starts.
    pub offset: u64,
    /// First bus address.
    pub iova: u64,
    /// Bytes.
    pub size: u64,
}

/// The device may read the memory.
pub const DMA_READ: u32 = 1 << 0;
/// The device may write the memory.
pub const DMA_WRITE: u32 = 1 << 1;

/// Payload of [`Command::DmaUnmap`] and of its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaUnmap {
    /// Bytes of this structure.
    pub argsz: u32,
    /// [`DMA_UNMAP_ALL`] or 0.
    pub flags: u32,
    /// First bus address.
    pub iova: u64,
    /// Bytes; in the reply, bytes that were mapped.
    pub size: u64,
}

/// Takes back everything; address and size must be 0.
pub const DMA_UNMAP_ALL: u32 = 1 << 1;

/// Payload of [`Command::DeviceGetInfo`] and of its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceInfo {
    /// Bytes of this structure.
    pub argsz: u32,
    /// [`DEVICE_RESET`] and [`DEVICE_PCI`].
    pub flags: u32,
    /// Regions, see [`region`].
    pub num_regions: u32,
    /// Interrupt indexes, see [`irq`].
    pub num_irqs: u32,
}

/// The device can be reset.
pub const DEVICE_RESET: u32 = 1 << 0;
/// It is a PCI function.
pub const DEVICE_PCI: u32 = 1 << 1;

/// Region indexes of a PCI function.
pub mod region {
    /// First of the six BARs.
    pub const BAR0: u32 = 0;
    /// Last of the six BARs.
    pub const BAR5: u32 = 5;
    /// Expansion ROM.
    pub const ROM: u32 = 6;
    /// Configuration space.
    pub const CONFIG: u32 = 7;
    /// Legacy VGA.
    pub const VGA: u32 = 8;
    /// How many there are.
    pub const COUNT: u32 = 9;
}

/// Interrupt indexes of a PCI function.
pub mod irq {
    /// Legacy interrupt.
    pub const INTX: u32 = 0;
    /// Message signalled.
    pub const MSI: u32 = 1;
    /// Message signalled, extended.
    pub const MSIX: u32 = 2;
    /// An uncorrectable error was reported.
    pub const ERROR: u32 = 3;
    /// The device is about to be taken away.
    pub const REQUEST: u32 = 4;
    /// How many there are.
    pub const COUNT: u32 = 5;
}

/// Payload of [`Command::DeviceGetRegionInfo`] and of its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionInfo {
    /// Bytes of this structure and of the capabilities behind it.
    pub argsz: u32,
    /// [`REGION_READ`], [`REGION_WRITE`], [`REGION_MMAP`], [`REGION_CAPS`].
    pub flags: u32,
    /// Which region; see [`region`].
    pub index: u32,
    /// Where the capabilities start, 0 for none.
    pub cap_offset: u32,
    /// Bytes of the region, 0 when it is not there.
    pub size: u64,
    /// Where it starts in the descriptor that comes with the reply.
    pub offset: u64,
}

/// The region can be read.
pub const REGION_READ: u32 = 1 << 0;
/// The region can be written.
pub const REGION_WRITE: u32 = 1 << 1;
/// The region can be mapped through the descriptor that comes with the reply.
pub const REGION_MMAP: u32 = 1 << 2;
/// Capabilities follow.
pub const REGION_CAPS: u32 = 1 << 3;

/// Payload of [`Command::DeviceGetIrqInfo`] and of its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IrqInfo {
    /// Bytes of this structure.
    pub argsz: u32,
    /// [`IRQ_EVENTFD`], [`IRQ_NORESIZE`].
    pub flags: u32,
    /// Which interrupt; see [`irq`].
    pub index: u32,
    /// Vectors.
    pub count: u32,
}

/// Interrupts arrive by event descriptor.
pub const IRQ_EVENTFD: u32 = 1 << 0;
/// Vectors cannot be added one by one once some are in use.
pub const IRQ_NORESIZE: u32 = 1 << 3;

/// Payload of [`Command::DeviceSetIrqs`], followed by `count` bytes when [`IRQ_SET_DATA_BOOL`] is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IrqSet {
    /// Bytes of this structure and of the data behind it.
    pub argsz: u32,
    /// One `IRQ_SET_DATA_*` and one `IRQ_SET_ACTION_*`.
    pub flags: u32,
    /// Which interrupt; see [`irq`].
    pub index: u32,
    /// First vector.
    pub start: u32,
    /// Vectors; 0 with no data takes all event descriptors away.
    pub count: u32,
}

/// No data: applies to all vectors named.
pub const IRQ_SET_DATA_NONE: u32 = 1 << 0;
/// One byte per vector says whether it is meant.
pub const IRQ_SET_DATA_BOOL: u32 = 1 << 1;
/// Event descriptors come with the message, one per vector, or none to take them away.
pub const IRQ_SET_DATA_EVENTFD: u32 = 1 << 2;
/// Masks.
pub const IRQ_SET_ACTION_MASK: u32 = 1 << 3;
/// Unmasks.
pub const IRQ_SET_ACTION_UNMASK: u32 = 1 << 4;
/// Triggers, or assigns what is triggered.
pub const IRQ_SET_ACTION_TRIGGER: u32 = 1 << 5;

/// Payload of [`Command::RegionRead`] and [`Command::RegionWrite`], followed by the data of a write or of the reply
/// to a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionAccess {
    /// Where in the region.
    pub offset: u64,
    /// Which region; see [`region`].
    pub region: u32,
    /// Bytes.
    pub count: u32,
}

/// Head of a region capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CapHeader {
    /// See [`CAP_SPARSE_MMAP`].
    pub id: u16,
    /// Its version.
    pub version: u16,
    /// Where the next capability starts in the payload; 0 for none.
    pub next: u32,
}

/// Region capability: only these areas can be mapped. [`CapHeader`], [`SparseHeader`], then [`SparseArea`]s.
pub const CAP_SPARSE_MMAP: u16 = 1;

/// Follows the head of a sparse capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SparseHeader {
    /// Areas that follow.
    pub areas: u32,
    /// Zero.
    pub reserved: u32,
}

/// A mappable area of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SparseArea {
    /// From the start of the region.
    pub offset: u64,
    /// Length in bytes.
    pub size: u64,
}

/// Splits the first `T` off a payload; `None` when it is too short.
pub fn split<T: FromBytes>(payload: &[u8]) -> Option<(T, &[u8])> {
    T::read_from_prefix(payload).ok()
}

// The sizes are part of the protocol.
const _: () = {
    assert!(HEADER_BYTES == 16);
    assert!(size_of::<Version>() == 4);
    assert!(size_of::<DmaMap>() == 32);
    assert!(size_of::<DmaUnmap>() == 24);
    assert!(size_of::<DeviceInfo>() == 16);
    assert!(size_of::<RegionInfo>() == 32);
    assert!(size_of::<IrqInfo>() == 16);
    assert!(size_of::<IrqSet>() == 20);
    assert!(size_of::<RegionAccess>() == 16);
    assert!(size_of::<CapHeader>() == 8);
    assert!(size_of::<SparseHeader>() == 8);
    assert!(size_of::<SparseArea>() == 16);
};
