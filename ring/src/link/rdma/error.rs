//! Errors of links over RDMA, in words.

use rustix::io::Errno;

use crate::link::LinkError;

/// Names a failure that leaves nothing to go on with.
pub(crate) fn failed(name: &'static str, exit: u8, what: impl Into<String>) -> LinkError {
    LinkError {
        name,
        exit,
        what: what.into(),
        errno: None,
    }
}

/// RDMA cannot be had on this machine as it is.
pub(crate) fn unavailable(why: impl std::fmt::Display) -> LinkError {
    failed("rdma-unavailable", 3, format!("RDMA unavailable: {why}"))
}

/// A call of the library or the kernel failed.
pub(crate) fn refused(step: &str, errno: Errno) -> LinkError {
    let (name, exit, hint) = match errno {
        Errno::PERM | Errno::ACCESS => (
            "rdma-permission",
            6,
            "; the devices in /dev/infiniband must be readable and writable for this user",
        ),
        Errno::NODEV | Errno::NXIO | Errno::IO => {
            ("rdma-device-gone", 3, "; the device has gone or is broken")
        }
        Errno::NOMEM | Errno::MFILE | Errno::NFILE | Errno::AGAIN => {
            ("rdma-limits", 6, "; a limit was reached")
        }
        Errno::TIMEDOUT | Errno::NETUNREACH | Errno::HOSTUNREACH => (
            "rdma-unreachable",
            4,
            "; the peer's address cannot be reached from this GID: choose another with the GID index",
        ),
        _ => ("rdma-refused", 3, ""),
    };
    LinkError {
        name,
        exit,
        what: format!("{step} failed: {errno}{hint}"),
        errno: Some(errno.raw_os_error()),
    }
}

/// Memory could not be registered.
pub(crate) fn not_registered(bytes: u64, kind: MemoryKind, errno: Errno) -> LinkError {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    let limit = limit.map_or("no limit".to_owned(), |bytes| format!("{bytes} bytes"));
    let (name, exit, hint) = match (kind, errno) {
        (_, Errno::NOMEM | Errno::AGAIN) => (
            "rdma-memlock",
            6,
            format!(
                "registered memory is pinned, and this process may pin {limit}: raise it with 'ulimit -l', 'LimitMEMLOCK=' \
                 of the service or '--ulimit memlock=' of the container, or ask for smaller windows"
            ),
        ),
        (MemoryKind::DmaBuf, Errno::OPNOTSUPP | Errno::PROTONOSUPPORT | Errno::NOSYS) => (
            "rdma-no-dma-buf",
            3,
            "this kernel or device cannot register a dma-buf (Linux 5.12 and a driver that can are needed): use the \
             peer-memory module, or host memory"
                .to_owned(),
        ),
        (MemoryKind::Peer, Errno::FAULT | Errno::INVAL) => (
            "rdma-no-peer-memory",
            3,
            "no peer-memory module knows this address: load nvidia-peermem, or hand the memory over as a dma-buf".to_owned(),
        ),
        (MemoryKind::Local, Errno::FAULT) => (
            "rdma-memory",
            6,
            "this memory cannot be pinned (a mapping of a device's registers?)".to_owned(),
        ),
        _ => ("rdma-memory", 6, "the device refuses it".to_owned()),
    };
    LinkError {
        name,
        exit,
        what: format!("{bytes} bytes could not be registered with the device: {errno}; {hint}"),
        errno: Some(errno.raw_os_error()),
    }
}

/// Where memory to be registered lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    /// In this process.
    Local,
    /// Behind a dma-buf.
    DmaBuf,
    /// On another device, by address.
    Peer,
}
