//! Event descriptors: how interrupts arrive.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    io::Errno,
};

use super::PciError;

/// A counter in the kernel that an interrupt adds to and a waiter takes from. Interrupts merge in it.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A counter at zero.
    pub fn new() -> Result<Self, PciError> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map(Self)
            .map_err(|e| PciError::io("eventfd", e))
    }

    /// Takes the count and resets it; 0 when nothing has happened.
    pub fn take(&self) -> Result<u64, PciError> {
        let mut count = [0; 8];
        loop {
            match rustix::io::read(&self.0, &mut count) {
                Ok(8) => return Ok(u64::from_ne_bytes(count)),
                Err(Errno::AGAIN) => return Ok(0),
                Err(Errno::INTR) => {}
                Ok(_) => {
                    return Err(PciError::Protocol {
                        what: "a short read of an event descriptor".to_owned(),
                    });
                }
                Err(e) => return Err(PciError::io("reading an event descriptor", e)),
            }
        }
    }

    /// Adds one, as an interrupt does.
    pub fn signal(&self) -> Result<(), PciError> {
        match rustix::io::write(&self.0, &1u64.to_ne_bytes()) {
            // A counter that is full has been signalled already.
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(e) => Err(PciError::io("signalling an event descriptor", e)),
        }
    }

    /// Waits until something happens, at most `timeout`, and takes the count; 0 on time-out.
    pub fn wait(&self, timeout: Duration) -> Result<u64, PciError> {
        let until = Instant::now() + timeout;
        loop {
            let count = self.take()?;
            let left = until.saturating_duration_since(Instant::now());
            if count > 0 || left.is_zero() {
                return Ok(count);
            }
            let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
            let time = Timespec {
                tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            match poll(&mut fds, Some(&time)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(PciError::io("waiting on an event descriptor", e)),
            }
        }
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_merge_and_are_taken_once() {
        let event = EventFd::new().unwrap();
        assert_eq!(event.take().unwrap(), 0);
        event.signal().unwrap();
        event.signal().unwrap();
        assert_eq!(event.wait(Duration::from_secs(10)).unwrap(), 2);
        assert_eq!(event.wait(Duration::from_millis(1)).unwrap(), 0);
    }
}
