//! Doorbells of a port: one interrupt for all of them, handed out to whoever sleeps on which.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use ntb::hw::{NtbError, NtbPort};
use rustix::{event::epoll, io::Errno};

use crate::link::{
    DOORBELLS, Doorbell,
    doorbell::{Hub, ring_event, sleep_on},
};

/// The doorbells of a link object, over whichever port it has at the moment.
#[derive(Debug)]
pub(super) struct Bells {
    /// Readable while the port's doorbell event is.
    arrivals: OwnedFd,
    port: Mutex<Option<Arc<dyn NtbPort>>>,
    /// What sleepers sleep on, by number.
    locals: Vec<Arc<OwnedFd>>,
}

/// The hardware's bit for doorbell `number`: the lowest stands for 0, and for numbers that are one too many.
pub(super) fn bit(valid: u64, number: u32) -> u64 {
    let mut bits = (0..64).map(|n| 1 << n).filter(|bit| valid & bit != 0);
    let first = bits.next().unwrap_or(0);
    match number.checked_sub(1) {
        None => first,
        Some(others) => bits.nth(others as usize).unwrap_or(first),
    }
}

/// Doorbells that have a bit of their own.
pub(super) fn distinct(valid: u64) -> u32 {
    valid.count_ones().min(DOORBELLS)
}

impl Bells {
    /// Without a port yet, and the doorbells to give away.
    pub(super) fn new() -> Result<(Arc<Self>, [Doorbell; DOORBELLS as usize]), Errno> {
        let bells = Arc::new(Self {
            arrivals: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            port: Mutex::new(None),
            locals: Doorbell::locals()?,
        });
        let hub = Arc::clone(&bells) as Arc<dyn Hub>;
        let doorbells = Doorbell::handed_all(&bells.locals, bells.arrivals.as_fd(), &hub)?;
        Ok((bells, doorbells))
    }

    /// Takes up a port's doorbells and lets them interrupt.
    pub(super) fn attach(&self, port: &Arc<dyn NtbPort>) -> Result<(), NtbError> {
        let mut held = self.port();
        self.release(&mut held);
        let watched = epoll::add(
            &self.arrivals,
            port.doorbell_event(),
            epoll::EventData::new_u64(0),
            epoll::EventFlags::IN,
        );
        watched.map_err(|errno| {
            NtbError::Pci(ntb::pci::PciError::Io {
                what: "watching the doorbell event (epoll_ctl)".to_owned(),
                source: errno.into(),
            })
        })?;
        *held = Some(Arc::clone(port));
        port.unmask_doorbells(port.doorbell_bits())
    }

    /// Lets go of the port. Sleepers sleep on.
    pub(super) fn detach(&self) {
        self.release(&mut self.port());
    }

    fn release(&self, held: &mut Option<Arc<dyn NtbPort>>) {
        if let Some(port) = held.take() {
            // Fails only when it is not watched, which is what is wanted.
            let _ = epoll::delete(&self.arrivals, port.doorbell_event());
        }
    }

    fn port(&self) -> MutexGuard<'_, Option<Arc<dyn NtbPort>>> {
        // Nothing is left half done under this lock.
        self.port.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hub for Bells {
    fn hand_out(&self) {
        let held = self.port();
        let Some(port) = &*held else { return };
        if !sleep_on(&[self.arrivals.as_fd()], Duration::ZERO) {
            return;
        }
        let valid = port.doorbell_bits();
        // Cleared in the hardware before anybody is woken: whoever wakes looks at memory after that, and a ring that
        // comes later interrupts again. A port that does not answer rings nobody; the link notices its loss itself.
        let rung = port.take_doorbells(valid).unwrap_or(0);
        for (number, local) in (0..).zip(&self.locals) {
            if rung & bit(valid, number) != 0 {
                ring_event(local);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_without_a_bit_share_that_of_doorbell_0() {
        assert_eq!(bit(0xffff_ffff, 0), 1);
        assert_eq!(bit(0xffff_ffff, 15), 1 << 15);
        assert_eq!(bit(0x7fff, 14), 1 << 14);
        assert_eq!(bit(0x7fff, 15), 1);
        assert_eq!(bit(0b1010_0100, 0), 0b100);
        assert_eq!(bit(0b1010_0100, 2), 0b1000_0000);
        assert_eq!(bit(0b1010_0100, 3), 0b100);
        assert_eq!(bit(0, 3), 0);
        assert_eq!(
            (distinct(0x7fff), distinct(u64::MAX), distinct(0b11)),
            (15, 16, 2)
        );
    }
}
