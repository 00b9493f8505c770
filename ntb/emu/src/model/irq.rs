//! Interrupt vectors: event descriptors that a client hands over and that the device counts up.

use std::{
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

/// Which kind of interrupt of the function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqKind {
    /// A message-signalled vector.
    Msix,
    /// An uncorrectable error was reported.
    Error,
    /// The device is about to be taken away.
    Request,
}

/// One side's vectors of one kind.
#[derive(Debug)]
pub struct Vectors {
    targets: Vec<Option<Arc<OwnedFd>>>,
    raised: u64,
    lost: u64,
}

impl Vectors {
    /// `count` vectors without targets.
    pub fn new(count: u32) -> Self {
        Self {
            targets: (0..count).map(|_| None).collect(),
            raised: 0,
            lost: 0,
        }
    }

    /// Vectors there are.
    pub fn count(&self) -> u32 {
        self.targets.len() as u32 // made from a u32
    }

    /// Interrupts that reached an event descriptor.
    pub fn raised(&self) -> u64 {
        self.raised
    }

    /// Interrupts that had nowhere to go.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Gives a vector its event descriptor, or takes it away.
    ///
    /// # Errors
    /// `EINVAL` for a vector that is not there and for a descriptor that is no event counter.
    pub fn set(&mut self, vector: u32, target: Option<OwnedFd>) -> Result<(), Errno> {
        let slot = self.targets.get_mut(vector as usize).ok_or(Errno::INVAL)?;
        if let Some(fd) = &target
            && !is_eventfd(fd)
        {
            return Err(Errno::INVAL);
        }
        *slot = target.map(Arc::new);
        Ok(())
    }

    /// Takes all event descriptors away.
    pub fn clear(&mut self) {
        self.targets.fill(None);
    }

    /// Raises a vector.
    pub fn raise(&mut self, vector: u32, guard: &Guard) {
        match self.targets.get(vector as usize) {
            Some(Some(fd)) => {
                guard.signal(fd);
                self.raised += 1;
            }
            _ => self.lost += 1,
        }
    }
}

/// Anything else could block, or mean something when written to.
fn is_eventfd(fd: &OwnedFd) -> bool {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
        .is_ok_and(|target| target.as_os_str() == "anon_inode:[eventfd]")
}

/// Keeps a client from hanging the device by filling a blocking event counter up at the wrong moment.
///
/// A counter that is full is not written to: its owner is woken already. Should it fill up between that look and the
/// write, [`Guard::rescue`], called by another thread, empties it.
#[derive(Debug, Default)]
pub struct Guard {
    writing: Mutex<Option<(Instant, Arc<OwnedFd>)>>,
}

/// A write that takes longer than this is stuck.
const STUCK: Duration = Duration::from_millis(100);
const NOW: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

impl Guard {
    fn signal(&self, fd: &Arc<OwnedFd>) {
        let mut fds = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::OUT)];
        if !matches!(poll(&mut fds, Some(&NOW)), Ok(n) if n > 0) {
            return;
        }
        *self.writing.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), Arc::clone(fd)));
        // Cannot fail for an event counter with room but by a signal or by filling up: it is readable then.
        let _ = rustix::io::retry_on_intr(|| rustix::io::write(&**fd, &1u64.to_ne_bytes()));
        *self.writing.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Frees a write that is stuck.
    pub fn rescue(&self) {
        let stuck = self
            .writing
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
            .filter(|(since, _)| since.elapsed() > STUCK);
        if let Some((_, fd)) = stuck {
            let mut fds = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)];
            if matches!(poll(&mut fds, Some(&NOW)), Ok(n) if n > 0) {
                let _ = rustix::io::read(&*fd, &mut [0u8; 8]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn count(fd: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(fd, &mut bytes).map_or(0, |_| u64::from_ne_bytes(bytes))
    }

    #[test]
    fn raised_lost_and_merged() {
        let guard = Guard::default();
        let mut v = Vectors::new(2);
        let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        v.set(1, Some(fd.try_clone().unwrap())).unwrap();
        v.raise(1, &guard);
        v.raise(1, &guard);
        v.raise(0, &guard);
        v.raise(7, &guard);
        assert_eq!((v.raised(), v.lost(), count(&fd)), (2, 2, 2));
        v.clear();
        v.raise(1, &guard);
        assert_eq!(v.lost(), 3);
    }

    #[test]
    fn only_event_counters_are_taken() {
        let mut v = Vectors::new(1);
        let (r, w) = rustix::pipe::pipe().unwrap();
        assert_eq!(v.set(0, Some(w)), Err(Errno::INVAL));
        assert_eq!(v.set(0, Some(r)), Err(Errno::INVAL));
        assert_eq!(v.set(1, None), Err(Errno::INVAL));
    }

    #[test]
    fn a_full_blocking_counter_does_not_hang() {
        let guard = Guard::default();
        let mut v = Vectors::new(1);
        let fd = eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        v.set(0, Some(fd.try_clone().unwrap())).unwrap();
        v.raise(0, &guard);
        assert_eq!(count(&fd), u64::MAX - 1);
    }

    #[test]
    fn a_stuck_write_is_freed() {
        let guard = Arc::new(Guard::default());
        let fd = Arc::new(eventfd(0, EventfdFlags::empty()).unwrap());
        rustix::io::write(&*fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        // As if the counter had filled up between look and write.
        *guard.writing.lock().unwrap() = Some((Instant::now(), Arc::clone(&fd)));
        let writer = std::thread::spawn({
            let fd = Arc::clone(&fd);
            move || rustix::io::write(&*fd, &1u64.to_ne_bytes()).unwrap()
        });
        let begin = Instant::now();
        while !writer.is_finished() {
            assert!(
                begin.elapsed() < Duration::from_secs(60),
                "the write stayed stuck"
            );
            std::thread::sleep(Duration::from_millis(10));
            guard.rescue();
        }
        assert_eq!(writer.join().unwrap(), 8);
    }
}
