//! What can go wrong below the NTB port.

use std::{fmt, io, time::Duration};

use super::{Bar, iova::IovaRange};

/// Exit class of an error: the exit code of every tool that ends with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum ExitClass {
    /// Good.
    Good = 0,
    /// Measured, but bad.
    Bad = 1,
    /// Usage, or a fault of the program that calls.
    Usage = 2,
    /// No such hardware, or hardware that is not set up for this use.
    NoHardware = 3,
    /// Nobody at the other end.
    NoPeer = 4,
    /// The link, or the device, was lost.
    LinkLost = 5,
    /// Permission or limits.
    Permission = 6,
    /// Versions or layouts that do not match.
    Mismatch = 7,
}

impl ExitClass {
    /// The exit code.
    pub const fn code(self) -> u8 {
        self as u8
    }
}

/// A failure of an operation on an open PCI function. [`PciError::name`] is stable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PciError {
    /// A configuration access that is not naturally aligned, of another width than 1, 2 or 4, or past the end.
    #[error(
        "configuration access of {bytes} bytes at {offset:#x}: must be 1, 2 or 4 bytes, naturally aligned, within \
         {size:#x} bytes"
    )]
    BadConfigAccess {
        /// Offset asked for.
        offset: u32,
        /// Bytes asked for.
        bytes: usize,
        /// Bytes of configuration space that there are.
        size: u32,
    },
    /// The BAR does not exist or has no memory.
    #[error("BAR{bar} does not exist on {device}")]
    NoBar {
        /// The BAR.
        bar: Bar,
        /// The function.
        device: String,
    },
    /// Firmware or kernel gave the BAR no address.
    #[error(
        "BAR{bar} of {device} has no address: the firmware or the kernel could not place its {bytes} bytes. Enable \
         64-bit MMIO ('above 4G decoding') in the firmware set-up, or choose a smaller window size there"
    )]
    BarNotPlaced {
        /// The BAR.
        bar: Bar,
        /// The function.
        device: String,
        /// Size of the BAR.
        bytes: u64,
    },
    /// An access past the end of a BAR.
    #[error("access of {bytes} bytes at {offset:#x} of BAR{bar}, which has {size:#x} bytes")]
    OutOfBar {
        /// The BAR.
        bar: Bar,
        /// Offset asked for.
        offset: u64,
        /// Bytes asked for.
        bytes: u64,
        /// Bytes that there are.
        size: u64,
    },
    /// A register access that is not naturally aligned.
    #[error("register access of {bytes} bytes at {offset:#x} of BAR{bar} is not naturally aligned")]
    Misaligned {
        /// The BAR.
        bar: Bar,
        /// Offset asked for.
        offset: u64,
        /// Bytes asked for.
        bytes: u64,
    },
    /// The bytes lie in a part of the BAR that is not mapped (an interrupt table, usually).
    #[error(
        "{bytes} bytes at {offset:#x} of BAR{bar} cannot be mapped: mappable are {areas}, the rest is kept back by \
         the kernel or the device"
    )]
    Hole {
        /// The BAR.
        bar: Bar,
        /// Offset asked for.
        offset: u64,
        /// Bytes asked for.
        bytes: u64,
        /// The areas that are mapped.
        areas: Areas,
    },
    /// The wanted memory type is not to be had on this BAR.
    #[error("BAR{bar} of {device} cannot be mapped {wanted}: {why}")]
    NoSuchMapping {
        /// The BAR.
        bar: Bar,
        /// The function.
        device: String,
        /// The memory type asked for.
        wanted: super::CacheType,
        /// The reason and the remedy.
        why: String,
    },
    /// Kernel lockdown forbids the wanted memory type.
    #[error(
        "BAR{bar} of {device} cannot be mapped write-combining: kernel lockdown ('{mode}', which Secure Boot switches \
         on) forbids it. Mappings through VFIO work, and stores are uncached then: turn Secure Boot off in the \
         firmware set-up, or accept that"
    )]
    Lockdown {
        /// The BAR.
        bar: Bar,
        /// The function.
        device: String,
        /// The mode in /sys/kernel/security/lockdown.
        mode: String,
    },
    /// An operation of the kernel or the device server failed.
    #[error("{what} failed: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// The cause, with its number.
        source: io::Error,
    },
    /// No answer in time.
    #[error("{what}: no answer within {after:?}")]
    Timeout {
        /// What was waited for.
        what: String,
        /// For how long.
        after: Duration,
    },
    /// The device, or the process that emulates it, is gone.
    #[error("the device is gone ({what}): reads give all ones, nothing that is written arrives")]
    Gone {
        /// What showed it.
        what: String,
    },
    /// The far side of a device protocol said something that it must not say.
    #[error("the device server broke the protocol: {what}")]
    Protocol {
        /// What it said.
        what: String,
    },
    /// Versions that cannot talk to each other.
    #[error("version mismatch: {what}")]
    Version {
        /// Both versions.
        what: String,
    },
    /// This backend or device cannot do it.
    #[error("{what} is not supported by {device}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// The function.
        device: String,
    },
    /// A memory size or address that is not a multiple of the page size.
    #[error("{what} {value:#x} is not a multiple of the I/O page size {page:#x}")]
    NotPageAligned {
        /// Which value.
        what: &'static str,
        /// The value.
        value: u64,
        /// The page size.
        page: u64,
    },
    /// No free range of I/O addresses is large enough.
    #[error(
        "no room for {bytes:#x} bytes (aligned to {align:#x}) among the I/O addresses: largest free range is \
         {largest:#x} bytes"
    )]
    NoIova {
        /// Bytes needed.
        bytes: u64,
        /// Alignment needed.
        align: u64,
        /// Largest range free.
        largest: u64,
    },
    /// An address outside the ranges that the IOMMU accepts, or already in use.
    #[error("I/O addresses {range} are refused: {why}")]
    BadIova {
        /// The range.
        range: IovaRange,
        /// Why.
        why: &'static str,
    },
    /// Mapping for DMA would pass the limit on locked memory.
    #[error(
        "{needed} bytes must be locked in memory for the device and {allowed} are allowed: raise the limit with \
         'ulimit -l' in the shell, LimitMEMLOCK= in the service unit, --ulimit memlock= for a container, or in \
         /etc/security/limits.conf (new sessions only)"
    )]
    Memlock {
        /// Bytes needed, with what is locked already.
        needed: u64,
        /// The limit.
        allowed: u64,
    },
    /// Memory for the device must be there in full, and this machine has less.
    #[error(
        "{needed} bytes of memory are needed for the device and {available} are available: ask for less (a window need \
         not be filled), end what uses memory, or choose a smaller window size in the firmware set-up, equal on both \
         hosts"
    )]
    NoMemory {
        /// Bytes needed.
        needed: u64,
        /// Bytes that this machine has left.
        available: u64,
    },
    /// The IOMMU driver keeps no more mappings.
    #[error(
        "the IOMMU driver takes no more than {limit} mappings: use huge pages or fewer, larger regions, or raise \
         the module parameter {parameter}"
    )]
    TooManyMappings {
        /// The limit.
        limit: u64,
        /// The parameter that sets it.
        parameter: &'static str,
    },
    /// A vector that the function does not have, or given twice.
    #[error("interrupt vector {vector} is refused: {why} (the function has {available})")]
    BadVector {
        /// The vector.
        vector: u16,
        /// Why.
        why: &'static str,
        /// Vectors that there are.
        available: u16,
    },
    /// The only reset there is would hit other devices.
    #[error("reset of {device} is refused, since it would also reset {}", .others.join(", "))]
    ResetHitsOthers {
        /// The function.
        device: String,
        /// What else would be reset, with the driver that holds it.
        others: Vec<String>,
    },
    /// A capability list that loops or leaves configuration space.
    #[error("the {list} capability list of the function is broken at {at:#x}: {why}")]
    BadCapabilities {
        /// Which list.
        list: &'static str,
        /// Where.
        at: u32,
        /// Why.
        why: &'static str,
    },
    /// A capability that is needed is missing.
    #[error("the function has no {what} capability, which is needed for {needed_for}")]
    NoCapability {
        /// Which.
        what: &'static str,
        /// What for.
        needed_for: &'static str,
    },
    /// A written value did not read back.
    #[error("{what}: wrote {wrote:#x}, reads back {read:#x}")]
    NotTaken {
        /// What was written.
        what: &'static str,
        /// Value written.
        wrote: u64,
        /// Value read back.
        read: u64,
    },
}

impl PciError {
    /// Stable name of the kind of error.
    pub fn name(&self) -> &'static str {
        match self {
            Self::BadConfigAccess { .. } => "bad-config-access",
            Self::NoBar { .. } => "no-bar",
            Self::BarNotPlaced { .. } => "bar-not-placed",
            Self::OutOfBar { .. } => "out-of-bar",
            Self::Misaligned { .. } => "misaligned-access",
            Self::Hole { .. } => "bar-hole",
            Self::NoSuchMapping { .. } => "no-such-mapping",
            Self::Lockdown { .. } => "lockdown",
            Self::Io { .. } => "device-io",
            Self::Timeout { .. } => "device-timeout",
            Self::Gone { .. } => "device-gone",
            Self::Protocol { .. } => "device-protocol",
            Self::Version { .. } => "device-version",
            Self::Unsupported { .. } => "unsupported",
            Self::NotPageAligned { .. } => "not-page-aligned",
            Self::NoIova { .. } => "no-iova",
            Self::BadIova { .. } => "bad-iova",
            Self::Memlock { .. } => "memlock-too-small",
            Self::NoMemory { .. } => "no-memory",
            Self::TooManyMappings { .. } => "too-many-mappings",
            Self::BadVector { .. } => "bad-vector",
            Self::ResetHitsOthers { .. } => "reset-hits-others",
            Self::BadCapabilities { .. } => "bad-capabilities",
            Self::NoCapability { .. } => "no-capability",
            Self::NotTaken { .. } => "value-not-taken",
        }
    }

    /// Exit class.
    pub fn class(&self) -> ExitClass {
        match self {
            Self::BadConfigAccess { .. }
            | Self::OutOfBar { .. }
            | Self::Misaligned { .. }
            | Self::Hole { .. }
            | Self::NotPageAligned { .. }
            | Self::BadIova { .. }
            | Self::BadVector { .. } => ExitClass::Usage,
            Self::NoBar { .. }
            | Self::BarNotPlaced { .. }
            | Self::NoSuchMapping { .. }
            | Self::Unsupported { .. }
            | Self::BadCapabilities { .. }
            | Self::NoCapability { .. } => ExitClass::NoHardware,
            Self::Io { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                ExitClass::Permission
            }
            Self::Io { .. } | Self::Timeout { .. } | Self::Gone { .. } | Self::NotTaken { .. } => {
                ExitClass::LinkLost
            }
            Self::Protocol { .. } | Self::Version { .. } => ExitClass::Mismatch,
            Self::NoIova { .. }
            | Self::Memlock { .. }
            | Self::NoMemory { .. }
            | Self::TooManyMappings { .. }
            | Self::Lockdown { .. }
            | Self::ResetHitsOthers { .. } => ExitClass::Permission,
        }
    }

    /// An [`PciError::Io`] of a system call.
    pub(crate) fn io(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Io {
            what: what.into(),
            source: source.into(),
        }
    }
}

/// Parts of a BAR, for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Areas(pub Vec<super::Area>);

impl fmt::Display for Areas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no areas");
        }
        for (i, area) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{:#x}..{:#x}", area.offset, area.end())?;
        }
        Ok(())
    }
}
