//! The two event descriptors of a port, for families whose hardware latches doorbells.

use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::pci::{EventFd, PciError};

/// Doorbell and link events, and the doorbell mask as last written.
#[derive(Debug)]
pub(super) struct Events {
    pub(super) doorbell: EventFd,
    pub(super) link: EventFd,
    mask: Mutex<u64>,
}

impl Events {
    /// With these doorbells masked.
    pub(super) fn new(mask: u64) -> Result<Self, PciError> {
        Ok(Self {
            doorbell: EventFd::new()?,
            link: EventFd::new()?,
            mask: Mutex::new(mask),
        })
    }

    /// The mask, locked so that it and the hardware change together.
    pub(super) fn mask(&self) -> MutexGuard<'_, u64> {
        self.mask.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn doorbell_fd(&self) -> BorrowedFd<'_> {
        self.doorbell.as_fd()
    }

    pub(super) fn link_fd(&self) -> BorrowedFd<'_> {
        self.link.as_fd()
    }
}
