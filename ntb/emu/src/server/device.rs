//! What a session needs of a device: the seam between protocol and model.

use std::{os::fd::OwnedFd, sync::Arc};

use ntb::pci::vfio_user::proto;
use rustix::io::Errno;

use crate::model::{Actor, DmaAccess, IrqKind, Port};

/// One region as the protocol describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Bytes; 0 when the region is not there.
    pub bytes: u64,
    /// Whether it is configuration space or a BAR.
    pub space: Space,
}

/// Which space a region is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// A BAR by its index.
    Bar(u8),
    /// Configuration space.
    Config,
    /// Not there.
    None,
}

/// A model port as a vfio-user device: translates region and interrupt indexes, and nothing else.
#[derive(Debug)]
pub struct Device {
    port: Arc<Port>,
}

impl Device {
    /// Stands for `port`.
    pub fn new(port: Arc<Port>) -> Self {
        Self { port }
    }

    /// The port behind.
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// Region `index`; `None` past the last.
    pub fn region(&self, index: u32) -> Option<Region> {
        let (bytes, space) = match index {
            proto::region::BAR0..=proto::region::BAR5 => {
                let bar = index as u8; // at most 5
                (self.port.bar_bytes(bar), Space::Bar(bar))
            }
            proto::region::CONFIG => (self.port.config_bytes(), Space::Config),
            proto::region::ROM | proto::region::VGA => (0, Space::None),
            _ => return None,
        };
        Some(Region { bytes, space })
    }

    /// Vectors of interrupt `index`; `None` past the last.
    pub fn vectors(&self, index: u32) -> Option<u32> {
        (index < proto::irq::COUNT).then(|| Self::kind(index).map_or(0, |kind| self.port.vectors(kind)))
    }

    fn kind(index: u32) -> Option<IrqKind> {
        match index {
            proto::irq::MSIX => Some(IrqKind::Msix),
            proto::irq::ERROR => Some(IrqKind::Error),
            proto::irq::REQUEST => Some(IrqKind::Request),
            _ => None,
        }
    }

    /// Reads `out.len()` bytes; the range has been checked against [`Device::region`].
    pub fn read(&self, space: Space, offset: u64, out: &mut [u8]) {
        match space {
            Space::Bar(bar) => self.port.bar_read(bar, offset, out),
            Space::Config => self.port.config_read(offset, out),
            Space::None => out.fill(0xFF),
        }
    }

    /// Writes; the range has been checked against [`Device::region`].
    pub fn write(&self, space: Space, offset: u64, data: &[u8]) {
        match space {
            Space::Bar(bar) => self.port.bar_write(bar, offset, data),
            Space::Config => self.port.config_write(offset, data),
            Space::None => {}
        }
    }

    /// Makes client memory reachable.
    pub fn map(&self, map: &proto::DmaMap, descriptor: Option<OwnedFd>) -> Result<(), Errno> {
        let access = DmaAccess {
            read: map.flags & proto::DMA_READ != 0,
            write: map.flags & proto::DMA_WRITE != 0,
        };
        self.port
            .dma_map(map.iova, map.size, map.offset, access, descriptor)
    }

    /// Takes memory back; answers how many bytes were mapped.
    pub fn unmap(&self, unmap: &proto::DmaUnmap) -> Result<u64, Errno> {
        if unmap.flags & proto::DMA_UNMAP_ALL != 0 {
            if unmap.iova != 0 || unmap.size != 0 {
                return Err(Errno::INVAL);
            }
            return Ok(self.port.dma_unmap_all());
        }
        self.port.dma_unmap(unmap.iova, unmap.size)
    }

    /// Assigns (or with `None` takes away) the event descriptors of vectors from `start`.
    pub fn assign(
        &self,
        index: u32,
        start: u32,
        descriptors: impl Iterator<Item = Option<OwnedFd>>,
    ) -> Result<(), Errno> {
        let kind = Self::kind(index).ok_or(Errno::INVAL)?;
        for (vector, descriptor) in (start..).zip(descriptors) {
            self.port.set_vector(kind, vector, descriptor)?;
        }
        Ok(())
    }

    /// Raises a vector as if the device had, which clients do to test their wiring.
    pub fn trigger(&self, index: u32, vector: u32) -> Result<(), Errno> {
        let kind = Self::kind(index).ok_or(Errno::INVAL)?;
        self.port.trigger(kind, vector);
        Ok(())
    }

    /// Takes every event descriptor of an index away.
    pub fn disable(&self, index: u32) -> Result<(), Errno> {
        let kind = Self::kind(index).ok_or(Errno::INVAL)?;
        self.port.clear_vectors(kind);
        Ok(())
    }

    /// Resets the function.
    pub fn reset(&self) {
        self.port.reset(Actor::Client);
    }

    /// Stores into client memory that its mappings refused.
    pub fn take_refused(&self) -> Vec<(u64, Vec<u8>)> {
        self.port.take_refused()
    }

    /// A client has come.
    pub fn attach(&self) {
        self.port.attach();
    }

    /// The client has left: the function is reset, as the kernel does when a VFIO device is closed, and its memory
    /// and event descriptors are let go.
    pub fn detach(&self) {
        self.port.detach();
    }
}
