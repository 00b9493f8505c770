//! Memory that devices may be let into, whoever owns it: ordinary memory, or another device's.

#![allow(unsafe_code, reason = "a trait that vouches for an address range")]

use std::{error::Error, fmt, os::fd::BorrowedFd};

use crate::region::Region;

/// Memory with an address in this process by which a device can be let into it.
///
/// Links and windows take it as it is and know nothing of its owner.
///
/// # Safety
/// [`Exportable::as_ptr`] is the start of [`Exportable::bytes`] bytes that stay mapped for as long as the object lives, and
/// to which no Rust reference ever exists.
pub unsafe trait Exportable: Send + Sync + fmt::Debug {
    /// Start of the mapping, never to be made a reference. What lies there may be slow to read.
    fn as_ptr(&self) -> *mut u8;

    /// Length in bytes.
    fn bytes(&self) -> u64;

    /// A file that holds the same memory, and where in it: for devices that are software of another process. What is not in a
    /// file can be shown to hardware only.
    fn descriptor(&self) -> Option<(BorrowedFd<'_>, u64)>;

    /// What the I/O address at which a device finds it must be a multiple of.
    fn alignment(&self) -> u64;

    /// What kind of memory it is, in words.
    fn kind(&self) -> &'static str;

    /// Makes what devices have stored visible to the memory's owner, where that is not this processor.
    fn settle(&self) -> Result<(), Box<dyn Error + Send + Sync>> {
        Ok(())
    }
}

// SAFETY: a region is mapped for as long as it lives, also when revoked, and never gives a reference out.
unsafe impl Exportable for Region {
    fn as_ptr(&self) -> *mut u8 {
        Region::as_ptr(self)
    }

    fn bytes(&self) -> u64 {
        Region::bytes(self)
    }

    fn descriptor(&self) -> Option<(BorrowedFd<'_>, u64)> {
        Some((Region::descriptor(self), 0))
    }

    fn alignment(&self) -> u64 {
        self.page_bytes()
    }

    fn kind(&self) -> &'static str {
        "memory of this host"
    }
}
