//! A window of a bridge onto memory of another device: a GPU's, or any that has an address in this process.

#![allow(unsafe_code, reason = "memory that vouches for its address")]

use std::{fmt, os::fd::BorrowedFd, sync::Arc};

use ntb::{
    hw::NtbPort,
    pci::{BarMap, DmaSpace, Isolation},
    window::ExportedWindow,
};
use ntb_mem::export::Exportable;

use crate::{GpuError, proof::Proof};

/// Memory of a device that the peer stores into, until dropped: then the window is closed and read back, the I/O mapping taken
/// away, and the memory let go, in this order.
///
/// Nothing is to be read from it before the way there was proven ([`crate::proof`]): that a window opened and a mapping was made
/// does not show that one device's stores reach the other.
#[derive(Debug)]
pub struct DeviceWindow {
    window: ExportedWindow,
}

impl DeviceWindow {
    /// Lets the peer into all of `memory` through window `index`.
    pub fn open(
        port: &Arc<dyn NtbPort>,
        space: &Arc<DmaSpace>,
        index: usize,
        memory: &Arc<dyn Exportable>,
    ) -> Result<Self, GpuError> {
        let function = port.function();
        if function.isolation() == Isolation::None {
            return Err(GpuError::new(
                "gpu-no-iommu",
                6,
                format!(
                    "{} runs without an IOMMU: where {} lies on the bus is not told to programs, so the bridge cannot be pointed at \
                     it; switch the IOMMU on",
                    function.name(),
                    memory.kind()
                ),
            ));
        }
        let window = ExportedWindow::open(port, space, index, memory).map_err(|e| {
            let hint = match memory.descriptor() {
                Some(_) => "",
                None => {
                    "; memory of devices is mapped by VFIO's group interface (a type 1 container) only: iommufd takes ordinary \
                     memory, and an emulated bridge takes files"
                }
            };
            GpuError {
                name: "gpu-window",
                exit: e.class().code(),
                what: format!("{} cannot be shown to the peer: {e}{hint}", memory.kind()),
                code: None,
                errno: None,
            }
        })?;
        Ok(Self { window })
    }

    /// Bytes that the peer reaches.
    pub fn bytes(&self) -> u64 {
        self.window.bytes()
    }

    /// Where the bridge finds the memory.
    pub fn iova(&self) -> u64 {
        self.window.iova()
    }

    /// The memory.
    pub fn memory(&self) -> &Arc<dyn Exportable> {
        self.window.memory()
    }

    /// Whether the peer's pattern has arrived, whole and where it belongs. `read` copies out of the memory as its owner sees it.
    pub fn verify(
        &self,
        proof: &Proof,
        read: impl FnMut(u64, &mut [u8]) -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        self.memory().settle().map_err(|e| {
            GpuError::new(
                "gpu-flush",
                3,
                format!("what the peer has stored cannot be made visible: {e}"),
            )
        })?;
        proof.verify(read)
    }

    /// Closes the window, with the error that dropping would only log.
    pub fn close(self) -> Result<(), GpuError> {
        self.window.close().map_err(|e| {
            GpuError::new(
                "gpu-window",
                e.class().code(),
                format!("a window could not be closed: {e}"),
            )
        })
    }
}

/// A part of another device's BAR, mapped into this process: what a GPU's memory is to a bridge, without the GPU.
#[derive(Debug)]
pub struct PeerBar {
    map: Arc<BarMap>,
    pointer: *mut u8,
    offset: u64,
    bytes: u64,
}

// SAFETY: the address is that of a mapping that `map` keeps; it is reached by the map's own atomic accesses and by devices only.
unsafe impl Send for PeerBar {}
// SAFETY: as above.
unsafe impl Sync for PeerBar {}

impl PeerBar {
    /// `bytes` bytes from `offset` on of a mapped BAR, both multiples of the page.
    pub fn new(map: &Arc<BarMap>, offset: u64, bytes: u64) -> Result<Self, GpuError> {
        let pointer = map
            .pointer(offset, bytes)
            .map_err(|e| GpuError::new("gpu-outside", 2, format!("a part of a BAR: {e}")))?;
        Ok(Self {
            map: Arc::clone(map),
            pointer,
            offset,
            bytes,
        })
    }

    /// Copies out, by words: both numbers are multiples of 8. An error once the device has been taken away under an access
    /// (decoding off, a reset, unplugged): what is read then is nobody's.
    pub fn read(&self, from: u64, to: &mut [u8]) -> Result<(), GpuError> {
        for (at, slot) in (from..).step_by(8).zip(to.chunks_mut(8)) {
            let word: u64 = self
                .map
                .load(self.offset + at)
                .map_err(|e| GpuError::new("gpu-outside", 2, format!("reading a BAR: {e}")))?;
            let bytes = word.to_le_bytes();
            let take = slot.len();
            slot.copy_from_slice(bytes.get(..take).unwrap_or(&bytes));
        }
        if self.map.lost() {
            return Err(GpuError::new(
                "gpu-bar-lost",
                5,
                "the device's BAR does not answer any more: memory decoding was switched off, or the device was reset or taken away; \
                 close the window, and map the BAR anew once it answers",
            ));
        }
        Ok(())
    }
}

// SAFETY: the map is kept, so that the range stays mapped; it never gives a reference out.
unsafe impl Exportable for PeerBar {
    fn as_ptr(&self) -> *mut u8 {
        self.pointer
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn descriptor(&self) -> Option<(BorrowedFd<'_>, u64)> {
        None
    }

    fn alignment(&self) -> u64 {
        4096
    }

    fn kind(&self) -> &'static str {
        "another device's BAR"
    }
}

impl fmt::Display for DeviceWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} bytes at I/O address {:#x}",
            self.memory().kind(),
            self.bytes(),
            self.iova()
        )
    }
}
