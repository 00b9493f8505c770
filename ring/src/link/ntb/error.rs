//! Errors of the driver as errors of the link.

use ntb::{
    hw::NtbError,
    pci::{OpenError, PciError},
};

use ntb_mem::region::RegionError;

use crate::link::LinkError;

/// An error of the driver, with the link it is about.
pub(super) fn link_error(address: &str, e: &NtbError) -> LinkError {
    let what = if e.to_string().contains(address) {
        e.to_string()
    } else {
        format!("{address}: {e}")
    };
    LinkError {
        name: e.name(),
        exit: e.class().code(),
        what,
        errno: errno(e),
    }
}

fn errno(e: &NtbError) -> Option<i32> {
    match e {
        NtbError::Pci(PciError::Io { source, .. })
        | NtbError::Open(
            OpenError::Permission { source, .. } | OpenError::Pci(PciError::Io { source, .. }),
        ) => source.raw_os_error(),
        NtbError::Memory {
            source: RegionError::NoHugePages { errno, .. } | RegionError::Kernel { errno, .. },
            ..
        } => Some(errno.raw_os_error()),
        _ => None,
    }
}

/// No more descriptors.
pub(super) fn limits(address: &str, errno: rustix::io::Errno) -> LinkError {
    LinkError {
        name: "link-limits",
        exit: 6,
        what: format!(
            "{address}: the link needs 33 open files more and cannot have them ({errno}): raise the limit with 'ulimit -n'"
        ),
        errno: Some(errno.raw_os_error()),
    }
}
