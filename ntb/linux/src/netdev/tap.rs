//! A TAP device: an Ethernet interface of this machine whose frames this program carries.

#![allow(unsafe_code, reason = "the ioctl that makes the device")]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};

use crate::LinuxError;

/// Where devices are made.
const CONTROL: &str = "/dev/net/tun";
/// Most bytes in the name of an interface.
const NAME_MOST: usize = libc::IFNAMSIZ - 1;

/// An interface, which is gone when this is dropped.
#[derive(Debug)]
pub struct Tap {
    fd: OwnedFd,
    name: String,
}

impl Tap {
    /// Makes the interface `name`. Needs the right to administer the network (CAP_NET_ADMIN), or an interface of that name
    /// that was made for this user. Addresses, size of packets and state are set with the machine's own tools.
    pub fn open(name: &str) -> Result<Self, LinuxError> {
        let failed = |step, errno, remedy| LinuxError::Tap {
            name: name.to_owned(),
            step,
            errno,
            remedy,
        };
        let bad_name = name.is_empty()
            || name.len() > NAME_MOST
            || name.bytes().any(|b| b == 0 || b == b'%' || b == b'/');
        if bad_name {
            let remedy = "A name has 1 to 15 bytes, without '%' and '/'";
            return Err(failed("reading its name", Errno::INVAL, remedy));
        }
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let fd = rustix::fs::open(CONTROL, flags, Mode::empty()).map_err(|errno| {
            let remedy = "Load the kernel's module tun; the file must be readable and writable for this user";
            failed("opening /dev/net/tun", errno, remedy)
        })?;
        set_interface(&fd, name).map_err(|errno| {
            let remedy = "Run as root, or make the interface before: ip tuntap add NAME mode tap user USER; no other \
                          program may hold it";
            failed("attaching to the interface", errno, remedy)
        })?;
        Ok(Self {
            fd,
            name: name.to_owned(),
        })
    }

    /// Name of the interface.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Takes a frame that this machine sends, into `buffer`; its length, or `None` when there is none now.
    pub fn read(&self, buffer: &mut [u8]) -> Result<Option<usize>, LinuxError> {
        loop {
            match rustix::io::read(&self.fd, &mut *buffer) {
                Ok(bytes) => return Ok(Some(bytes)),
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(self.failed("reading a frame", errno)),
            }
        }
    }

    /// Gives this machine a frame. False when it does not take it: the interface is down, the frame is none, or there is
    /// no room; the frame is lost then, as on a wire.
    pub fn write(&self, frame: &[u8]) -> Result<bool, LinuxError> {
        loop {
            match rustix::io::write(&self.fd, frame) {
                Ok(_) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN | Errno::IO | Errno::INVAL | Errno::NOBUFS | Errno::NOMEM) => {
                    return Ok(false);
                }
                Err(errno) => return Err(self.failed("writing a frame", errno)),
            }
        }
    }

    fn failed(&self, step: &'static str, errno: Errno) -> LinuxError {
        LinuxError::Tap {
            name: self.name.clone(),
            step,
            errno,
            remedy: "See whether the interface is still there",
        }
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn set_interface(fd: &OwnedFd, name: &str) -> Result<(), Errno> {
    use std::os::fd::AsRawFd as _;
    // SAFETY: the structure is made of integers and arrays of them, for all of which zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the kernel reads and writes the structure that TUNSETIFF is defined for, which lives until it returns;
    // the name ends with a zero, since it is shorter than the array.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF as _, &mut request) };
    if done < 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_cannot_be_are_refused() {
        for name in ["", "a-name-of-sixteen", "a/b", "tap%d", "a\0b"] {
            let e = Tap::open(name).unwrap_err();
            assert_eq!(e.name(), "tap");
            assert!(e.to_string().contains("1 to 15 bytes"), "{e}");
        }
    }
}
