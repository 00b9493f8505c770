//! Stores into the peer's memory, of any length at any place.

use ntb::{
    hw::{NtbError, NtbPort},
    window::{Aperture, ApertureChoice, ApertureKind},
};

/// An aperture that takes bytes. Each call leaves ahead of every later one, and of every later register write.
#[derive(Debug)]
pub(crate) struct Outbound(Aperture);

impl Outbound {
    pub(crate) fn open(port: &dyn NtbPort, window: usize) -> Result<Self, NtbError> {
        Aperture::open(port, window, ApertureChoice::Best).map(Self)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    pub(crate) fn store(&self, offset: u64, bytes: &[u8]) -> Result<(), NtbError> {
        match self.0.kind() {
            ApertureKind::Trapped => self.0.post(offset, bytes),
            ApertureKind::Mapped(_) => self.0.write(offset, bytes),
        }
    }
}
