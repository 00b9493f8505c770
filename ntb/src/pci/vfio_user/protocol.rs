//! Messages of the vfio-user protocol, version 0.1, shared by client and server.
//!
//! Source: "vfio-user Protocol Specification" in QEMU's documentation; constants of `linux/vfio.h` where it refers
//! to them. All fields are in the byte order of the host, as the specification has it.

#![allow(
    missing_debug_implementations,
    reason = "helper types that the zerocopy derives make"
)]

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Major version.
pub const VERSION_MAJOR: u16 = 0;
/// Minor version.
pub const VERSION_MINOR: u16 = 1;
/// Descriptors per message that a side can take unless it says otherwise.
pub const DEFAULT_MAX_FDS: u64 = 1;
/// Bytes per transfer that a side can take unless it says otherwise.
pub const DEFAULT_MAX_TRANSFER: u64 = 1 << 20;
/// Longest version data that is looked at.
pub const MAX_VERSION_DATA: usize = 4096;

/// Command numbers.
pub mod command {
    #![allow(missing_docs, reason = "the names are the specification's")]

    pub const VERSION: u16 = 1;
    pub const DMA_MAP: u16 = 2;
    pub const DMA_UNMAP: u16 = 3;
    pub const DEVICE_GET_INFO: u16 = 4;
    pub const DEVICE_GET_REGION_INFO: u16 = 5;
    pub const DEVICE_GET_REGION_IO_FDS: u16 = 6;
    pub const DEVICE_GET_IRQ_INFO: u16 = 7;
    pub const DEVICE_SET_IRQS: u16 = 8;
    pub const REGION_READ: u16 = 9;
    pub const REGION_WRITE: u16 = 10;
    pub const DMA_READ: u16 = 11;
    pub const DMA_WRITE: u16 = 12;
    pub const DEVICE_RESET: u16 = 13;
    pub const REGION_WRITE_MULTI: u16 = 15;
}

/// Header flags: mask of the type.
pub const FLAG_TYPE_MASK: u32 = 0xF;
/// Header flags: this is a reply.
pub const FLAG_REPLY: u32 = 0x1;
/// Header flags: no reply is wanted.
pub const FLAG_NO_REPLY: u32 = 0x10;
/// Header flags: the command failed; the error field holds an errno or zero.
pub const FLAG_ERROR: u32 = 0x20;

/// DMA map flags: readable and writable.
pub const DMA_READ_WRITE: u32 = 0x3;
/// Device info flags: can be reset.
pub const DEVICE_RESET_SUPPORTED: u32 = 1 << 0;
/// Device info flags: is a PCI device.
pub const DEVICE_PCI: u32 = 1 << 1;
/// Region info flags: readable.
pub const REGION_READABLE: u32 = 1 << 0;
/// Region info flags: writable.
pub const REGION_WRITABLE: u32 = 1 << 1;
/// Region info flags: the descriptor in the message can be mapped.
pub const REGION_MMAP: u32 = 1 << 2;
/// Region info flags: capabilities follow.
pub const REGION_CAPS: u32 = 1 << 3;
/// Region capability: sparse areas.
pub const CAP_SPARSE_MMAP: u16 = 1;
/// Region index of configuration space; BARs are 0 to 5.
pub const REGION_CONFIG: u32 = 7;
/// Interrupt index of MSI-X.
pub const IRQ_MSIX: u32 = 2;
/// Interrupt flags: no data follows.
pub const IRQ_DATA_NONE: u32 = 1 << 0;
/// Interrupt flags: descriptors come with the message; without any, the vectors are disconnected.
pub const IRQ_DATA_EVENTFD: u32 = 1 << 2;
/// Interrupt flags: about triggering.
pub const IRQ_ACTION_TRIGGER: u32 = 1 << 5;

macro_rules! messages {
    ($($(#[$doc:meta])* $name:ident = $size:literal { $($(#[$fdoc:meta])* $field:ident: $t:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
        #[repr(C)]
        pub struct $name { $($(#[$fdoc])* pub $field: $t,)* }
        const _: () = assert!(size_of::<$name>() == $size);
    )*};
}

messages! {
    /// Stands before every message.
    Header = 16 {
        /// Chosen by the sender, echoed in the reply.
        id: u16,
        /// See [`command`].
        command: u16,
        /// Bytes of the whole message, header included.
        size: u32,
        /// See [`FLAG_REPLY`] and its kin.
        flags: u32,
        /// errno of a failed command.
        error: u32,
    }
    /// Version; JSON follows.
    Version = 4 {
        /// Major.
        major: u16,
        /// Minor.
        minor: u16,
    }
    /// Memory that the server may reach; its descriptor comes with the message.
    DmaMap = 32 {
        /// Size of this structure.
        argsz: u32,
        /// See [`DMA_READ_WRITE`].
        flags: u32,
        /// Where in the descriptor the memory starts.
        offset: u64,
        /// I/O address.
        address: u64,
        /// Length in bytes.
        size: u64,
    }
    /// Takes a mapping away.
    DmaUnmap = 24 {
        /// Largest reply payload.
        argsz: u32,
        /// Zero.
        flags: u32,
        /// I/O address of the mapping.
        address: u64,
        /// Its length in bytes.
        size: u64,
    }
    /// What the device is.
    DeviceInfo = 16 {
        /// Largest reply payload.
        argsz: u32,
        /// See [`DEVICE_PCI`].
        flags: u32,
        /// Regions.
        regions: u32,
        /// Interrupt indexes.
        irqs: u32,
    }
    /// What a region is.
    RegionInfo = 32 {
        /// Bytes of the whole payload.
        argsz: u32,
        /// See [`REGION_MMAP`].
        flags: u32,
        /// Which region.
        index: u32,
        /// Where the first capability starts in the payload; 0 for none.
        cap_offset: u32,
        /// Length in bytes.
        size: u64,
        /// Where in the descriptor the region starts.
        offset: u64,
    }
    /// Head of a region capability.
    CapHeader = 8 {
        /// See [`CAP_SPARSE_MMAP`].
        id: u16,
        /// Its version.
        version: u16,
        /// Where the next capability starts in the payload; 0 for none.
        next: u32,
    }
    /// Follows the head of a sparse capability; areas follow.
    SparseHeader = 8 {
        /// Areas.
        areas: u32,
        /// Zero.
        reserved: u32,
    }
    /// A mappable area of a region.
    SparseArea = 16 {
        /// From the start of the region.
        offset: u64,
        /// Length in bytes.
        size: u64,
    }
    /// What an interrupt index is.
    IrqInfo = 16 {
        /// Largest reply payload.
        argsz: u32,
        /// Attributes.
        flags: u32,
        /// Which index.
        index: u32,
        /// Vectors.
        count: u32,
    }
    /// Connects vectors.
    IrqSet = 20 {
        /// Bytes of the whole payload.
        argsz: u32,
        /// See [`IRQ_DATA_EVENTFD`].
        flags: u32,
        /// Which index.
        index: u32,
        /// First vector.
        start: u32,
        /// Vectors.
        count: u32,
    }
    /// Reads or writes a region; data follows in a write and in the reply to a read.
    RegionAccess = 16 {
        /// From the start of the region.
        offset: u64,
        /// Which region.
        region: u32,
        /// Bytes.
        count: u32,
    }
}

/// Splits the first `T` off a payload; `None` when it is too short.
pub fn split<T: FromBytes>(payload: &[u8]) -> Option<(T, &[u8])> {
    T::read_from_prefix(payload).ok()
}

/// Capabilities that a side states in its version message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Descriptors that it can take in one message.
    pub max_fds: u64,
    /// Bytes that it can take in one transfer.
    pub max_transfer: u64,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self {
            max_fds: DEFAULT_MAX_FDS,
            max_transfer: DEFAULT_MAX_TRANSFER,
        }
    }
}

impl Capabilities {
    /// The JSON that follows the version, with its final zero.
    pub fn to_json(self) -> Vec<u8> {
        let mut text = format!(
            r#"{{"capabilities":{{"max_msg_fds":{},"max_data_xfer_size":{}}}}}"#,
            self.max_fds, self.max_transfer
        )
        .into_bytes();
        text.push(0);
        text
    }

    /// From what follows the version; nothing there means the defaults. `None` when it is not JSON of the right
    /// form, or a value cannot be.
    pub fn from_json(data: &[u8]) -> Option<Self> {
        let text = data.strip_suffix(&[0]).unwrap_or(data);
        if text.is_empty() {
            return Some(Self::default());
        }
        if text.len() > MAX_VERSION_DATA {
            return None;
        }
        let json: serde_json::Value = serde_json::from_slice(text).ok()?;
        let number = |name: &str, otherwise| match json.get("capabilities").and_then(|c| c.get(name)) {
            None => Some(otherwise),
            Some(v) => v.as_u64().filter(|n| *n > 0),
        };
        Some(Self {
            max_fds: number("max_msg_fds", DEFAULT_MAX_FDS)?,
            max_transfer: number("max_data_xfer_size", DEFAULT_MAX_TRANSFER)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_survive_the_wire_and_default() {
        let c = Capabilities {
            max_fds: 8,
            max_transfer: 65536,
        };
        assert_eq!(Capabilities::from_json(&c.to_json()), Some(c));
        assert_eq!(Capabilities::from_json(b""), Some(Capabilities::default()));
        assert_eq!(Capabilities::from_json(b"{}\0"), Some(Capabilities::default()));
        for bad in [&b"{"[..], b"{\"capabilities\":{\"max_msg_fds\":0}}", b"\xff\0"] {
            assert_eq!(Capabilities::from_json(bad), None);
        }
    }
}
