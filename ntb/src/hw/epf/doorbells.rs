//! Doorbell status and mask in software, over one event descriptor per doorbell.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Mutex, MutexGuard, PoisonError},
};

use rustix::event::epoll;

use super::super::NtbError;
use crate::pci::{EventFd, PciError};

/// What hardware would keep in a status and a mask register.
#[derive(Debug)]
pub(super) struct SoftDoorbells {
    events: Vec<EventFd>,
    /// Readable when a doorbell was seen set and unmasked, but not taken.
    pending_event: EventFd,
    /// Readable when any unmasked event is.
    poll: OwnedFd,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    pending: u64,
    mask: u64,
}

impl SoftDoorbells {
    /// `count` doorbells, below 64, all masked.
    pub(super) fn new(count: u32) -> Result<Self, NtbError> {
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| PciError::io("epoll_create", e))?;
        let pending_event = EventFd::new()?;
        watch(&poll, &pending_event, true)?;
        let events = (0..count)
            .map(|_| EventFd::new())
            .collect::<Result<Vec<_>, _>>()?;
        for event in &events {
            watch(&poll, event, false)?;
        }
        let this = Self {
            events,
            pending_event,
            poll,
            state: Mutex::new(State { pending: 0, mask: 0 }),
        };
        this.state().mask = this.valid();
        Ok(this)
    }

    pub(super) fn valid(&self) -> u64 {
        (1 << self.events.len()) - 1
    }

    /// One descriptor per doorbell, for the interrupts.
    pub(super) fn events(&self) -> impl Iterator<Item = &EventFd> {
        self.events.iter()
    }

    pub(super) fn masked(&self) -> u64 {
        self.state().mask
    }

    pub(super) fn pending(&self) -> Result<u64, NtbError> {
        let mut state = self.state();
        self.collect(&mut state)?;
        Ok(state.pending)
    }

    pub(super) fn clear(&self, bits: u64) -> Result<(), NtbError> {
        let mut state = self.state();
        self.collect(&mut state)?;
        state.pending &= !bits;
        Ok(())
    }

    pub(super) fn take(&self, bits: u64) -> Result<u64, NtbError> {
        let mut state = self.state();
        self.collect(&mut state)?;
        // What is left behind keeps the event up only if it is not asked for again before the next interrupt.
        self.pending_event.take()?;
        let set = state.pending & bits;
        state.pending &= !set;
        Ok(set)
    }

    pub(super) fn mask(&self, bits: u64) -> Result<(), NtbError> {
        let mut state = self.state();
        self.watch_all(bits, false)?;
        state.mask |= bits;
        Ok(())
    }

    pub(super) fn unmask(&self, bits: u64) -> Result<(), NtbError> {
        let mut state = self.state();
        self.watch_all(bits, true)?;
        state.mask &= !bits;
        if state.pending & bits != 0 {
            self.pending_event.signal()?;
        }
        Ok(())
    }

    /// Moves what the interrupts left into `pending`, without losing the event for it.
    fn collect(&self, state: &mut State) -> Result<(), NtbError> {
        let mut new = 0;
        for (bit, event) in self.events.iter().enumerate() {
            if event.take()? > 0 {
                new |= 1 << bit;
            }
        }
        state.pending |= new;
        if new & !state.mask != 0 {
            self.pending_event.signal()?;
        }
        Ok(())
    }

    fn watch_all(&self, bits: u64, on: bool) -> Result<(), NtbError> {
        for (bit, event) in self.events.iter().enumerate() {
            if bits >> bit & 1 != 0 {
                rewatch(&self.poll, event, on)?;
            }
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for SoftDoorbells {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.poll.as_fd()
    }
}

fn flags(on: bool) -> epoll::EventFlags {
    if on {
        epoll::EventFlags::IN
    } else {
        epoll::EventFlags::empty()
    }
}

fn watch(poll: &OwnedFd, event: &EventFd, on: bool) -> Result<(), PciError> {
    epoll::add(poll, event, epoll::EventData::new_u64(0), flags(on)).map_err(|e| PciError::io("epoll_ctl", e))
}

fn rewatch(poll: &OwnedFd, event: &EventFd, on: bool) -> Result<(), PciError> {
    epoll::modify(poll, event, epoll::EventData::new_u64(0), flags(on))
        .map_err(|e| PciError::io("epoll_ctl", e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn readable(soft: &SoftDoorbells) -> bool {
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        poll(&mut [PollFd::new(soft, PollFlags::IN)], Some(&now)).unwrap() > 0
    }

    fn ring(soft: &SoftDoorbells, bit: usize) {
        soft.events().nth(bit).unwrap().signal().unwrap();
    }

    #[test]
    fn masked_doorbells_latch_and_fire_when_unmasked() {
        let soft = SoftDoorbells::new(6).unwrap();
        assert_eq!(soft.valid(), 0x3F);
        ring(&soft, 2);
        assert!(!readable(&soft), "masked");
        assert_eq!(soft.pending().unwrap(), 4);
        assert!(!readable(&soft), "looking does not unmask");
        soft.unmask(4).unwrap();
        assert!(
            readable(&soft),
            "an unmasked doorbell that was set before must fire"
        );
        assert_eq!(soft.take(soft.valid()).unwrap(), 4);
        assert!(!readable(&soft));
        assert_eq!(soft.pending().unwrap(), 0);
    }

    #[test]
    fn looking_at_doorbells_does_not_lose_the_event() {
        let soft = SoftDoorbells::new(2).unwrap();
        soft.unmask(3).unwrap();
        ring(&soft, 1);
        assert_eq!(soft.pending().unwrap(), 2);
        assert!(readable(&soft), "seen, but nobody has taken it");
        assert_eq!(soft.take(2).unwrap(), 2);
        assert!(!readable(&soft));
    }
}
