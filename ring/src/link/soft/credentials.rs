//! Who is at the other end of a socket, by the kernel's word.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]
#![allow(
    unsafe_code,
    reason = "two socket options: one that rustix lacks, one whose pid it takes to be non-zero, which it is not for a \
              process of another pid namespace"
)]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::io::Errno;

/// Effective ids of a peer at the time it connected or listened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Credentials {
    /// Process id as seen from here; 0 when it has none here.
    pub(super) pid: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
}

impl Credentials {
    /// Those of this process.
    pub(super) fn own() -> Self {
        Self {
            pid: std::process::id(),
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
        }
    }

    /// Those of the process that connected, or that listens, at the other end.
    pub(super) fn of_peer(socket: impl AsFd) -> Result<Self, Errno> {
        let mut ids = libc::ucred {
            pid: 0,
            uid: u32::MAX,
            gid: u32::MAX,
        };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the option writes at most `len` bytes to `ids`, a plain struct of integers that lives on this stack.
        let rc = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut ids).cast(),
                &raw mut len,
            )
        };
        if rc != 0 {
            return Err(last_errno());
        }
        Ok(Self {
            pid: u32::try_from(ids.pid).unwrap_or(0),
            uid: ids.uid,
            gid: ids.gid,
        })
    }

    /// Something that is readable once the process has died; `None` where the kernel has no such thing.
    ///
    /// Where the process has died already and another has its number by now, this is about the other; the socket tells
    /// then.
    pub(super) fn process(self) -> Option<OwnedFd> {
        let pid = rustix::process::Pid::from_raw(i32::try_from(self.pid).ok()?)?;
        rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok()
    }
}

/// Whether the peer has `group` among its supplementary groups.
pub(super) fn peer_has_group(socket: impl AsFd, group: u32) -> Result<bool, Errno> {
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    loop {
        let mut len = (groups.len() * size_of::<libc::gid_t>()) as libc::socklen_t;
        // SAFETY: the option writes at most `len` bytes, the length of the buffer, which has no invariants.
        let rc = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        let count = len as usize / size_of::<libc::gid_t>();
        if rc == 0 {
            return Ok(groups.iter().take(count).any(|g| *g == group));
        }
        match last_errno() {
            // The kernel has said how many there are; 65536 are its limit.
            Errno::RANGE if count > groups.len() && count <= 65536 => groups.resize(count, 0),
            e => return Err(e),
        }
    }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_within_this_process_has_its_credentials() {
        let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(Credentials::of_peer(&a).unwrap(), Credentials::own());
    }

    #[test]
    fn supplementary_groups_are_the_kernels() {
        let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
        let own: Vec<u32> = rustix::process::getgroups()
            .unwrap()
            .iter()
            .map(|g| g.as_raw())
            .collect();
        for group in &own {
            assert!(peer_has_group(&a, *group).unwrap(), "{group}");
        }
        let absent = (0..u32::MAX).find(|g| !own.contains(g)).unwrap();
        assert!(!peer_has_group(&a, absent).unwrap());
    }

    #[test]
    fn what_is_no_socket_is_an_error() {
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert_eq!(Credentials::of_peer(&pipe), Err(Errno::NOTSOCK));
        assert_eq!(peer_has_group(&pipe, 0), Err(Errno::NOTSOCK));
    }
}
