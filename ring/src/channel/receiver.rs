//! The receiving end of a channel.

use std::{
    ops::{AddAssign, Sub},
    time::{Duration, Instant},
};

use ntb_mem::{
    region::View,
    sync::{self, Arc, Ordering},
};
use zerocopy::{FromBytes, IntoBytes};

use super::{
    Lost, RecvFailure,
    device::{RECEIVING, ended},
    shared::{Rx, Shared},
    wait::{CLOCK_EVERY, NAP, Wait},
};
use crate::{
    link::{Doorbell, Pump},
    queue::{Answer, ConsumerStats, Message, Polled, Received, RecvError},
    session::CloseReason,
};

/// Counts of a receiver over all lives of its channel. Exact.
pub type ReceiverStats = ConsumerStats;

impl AddAssign for ConsumerStats {
    fn add_assign(&mut self, other: Self) {
        *self = Self::each(*self, other, u64::wrapping_add);
    }
}

impl Sub for ConsumerStats {
    type Output = Self;

    /// Wraps around: a later addition undoes it.
    fn sub(self, other: Self) -> Self {
        Self::each(self, other, u64::wrapping_sub)
    }
}

impl ConsumerStats {
    fn each(a: Self, b: Self, f: fn(u64, u64) -> u64) -> Self {
        Self {
            messages: f(a.messages, b.messages),
            bytes: f(a.bytes, b.bytes),
            lines: f(a.lines, b.lines),
            credits: f(a.credits, b.credits),
            incomplete: f(a.incomplete, b.incomplete),
        }
    }
}

/// How long a reader yields for the answer to its arm before it naps: several wake-ups of a service thread.
const PATIENCE: Duration = Duration::from_millis(1);

/// The receiving end of a channel. One thread uses it at a time.
#[derive(Debug)]
pub struct Receiver {
    pub(super) shared: Arc<Shared>,
    /// Epoch at which `rx` was taken up; behind the shared one while the rest of an ended life is given out.
    pub(super) epoch: u64,
    pub(super) rx: Option<Rx>,
    doorbell: Option<Doorbell>,
    pub(super) pump: Option<Arc<dyn Pump>>,
    ended: ReceiverStats,
    sleeps: u64,
    wait: Wait,
    /// What the slow way of [`Receiver::try_recv`] gave. Were it returned by that call, the result of the fast way would
    /// have to go through memory as well, in pieces that cannot be forwarded to the wider load that follows.
    outcome: Result<Received, RecvFailure>,
}

impl Receiver {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            epoch: 0,
            rx: None,
            doorbell: None,
            pump: None,
            ended: ReceiverStats::default(),
            sleeps: 0,
            wait: Wait::default(),
            outcome: Err(RecvFailure::Empty),
        }
    }

    /// Chooses how blocking calls wait.
    pub fn set_wait(&mut self, wait: Wait) {
        self.wait = wait;
    }

    /// Receives one message into `buf`.
    #[inline(always)]
    pub fn try_recv(&mut self, buf: &mut [u8]) -> Result<Received, RecvFailure> {
        // Twice, so that what the one gives stays in registers.
        match &mut self.rx {
            Some(rx) if rx.is_plain() => {
                let polled = rx.try_recv_plain(buf);
                self.polled(polled, buf)
            }
            Some(rx) => {
                let polled = rx.try_recv_checked(buf);
                self.polled(polled, buf)
            }
            None => self.polled(Polled::Other, buf),
        }
    }

    #[inline(always)]
    fn polled(&mut self, polled: Polled, buf: &mut [u8]) -> Result<Received, RecvFailure> {
        let now = self.shared.epoch.load(Ordering::Acquire); // E2
        match polled {
            Polled::Received(received) if now == self.epoch => return Ok(received),
            Polled::Empty if now == self.epoch && self.pump.is_none() => return Err(RecvFailure::Empty),
            Polled::Received(received) => {
                let one = ReceiverStats {
                    messages: 1,
                    bytes: received.len as u64,
                    lines: 1,
                    ..ReceiverStats::default()
                };
                self.outcome = self.attempt_ended(Ok(received), received.seq, one);
            }
            Polled::Empty | Polled::Other => self.try_recv_other(buf),
        }
        std::mem::replace(&mut self.outcome, Err(RecvFailure::Empty))
    }

    /// [`Receiver::try_recv`] in every case, into `outcome`.
    #[inline(never)]
    fn try_recv_other(&mut self, buf: &mut [u8]) {
        self.outcome = self.attempt(|rx| rx.try_recv(buf));
    }

    /// Receives one message and lets `f` read it where it is. It is consumed when `f` returns.
    ///
    /// Should the peer be replaced while `f` runs, what `f` saw may be void and its result is dropped for an error.
    #[inline]
    pub fn try_recv_with<R>(&mut self, f: impl FnOnce(&Message<'_, View>) -> R) -> Result<R, RecvFailure> {
        self.attempt(|rx| rx.try_recv_with(f))
    }

    /// Receives a value of exactly the size of `T`.
    ///
    /// # Panics
    /// When `T` has no bytes.
    #[inline]
    pub fn try_recv_value<T: FromBytes + IntoBytes>(&mut self) -> Result<T, RecvFailure> {
        self.attempt(|rx| {
            let mut value = T::new_zeroed();
            rx.try_recv_packed(size_of::<T>(), value.as_mut_bytes())
                .map(|_| value)
        })
    }

    /// Receives messages of exactly `size` bytes into `out`, back to back, as many as are there and fit. Returns how many.
    ///
    /// # Panics
    /// When `size` is zero.
    #[inline]
    pub fn try_recv_packed(&mut self, size: usize, out: &mut [u8]) -> Result<usize, RecvFailure> {
        self.attempt(|rx| rx.try_recv_packed(size, out))
    }

    /// Receives one message into `buf`, waiting as long as `timeout` for it.
    pub fn recv(&mut self, buf: &mut [u8], timeout: Duration) -> Result<Received, RecvFailure> {
        match self.try_recv(buf) {
            Err(RecvFailure::Empty | RecvFailure::NotConnected(_)) => {}
            other => return other,
        }
        let start = Instant::now();
        let mut n = 0u32;
        loop {
            let result = self.try_recv(buf);
            let connected = match &result {
                Err(RecvFailure::Empty) => true,
                Err(RecvFailure::NotConnected(_)) => false,
                _ => return result,
            };
            let mut look = n.is_multiple_of(CLOCK_EVERY);
            if !connected {
                std::thread::sleep(NAP);
                look = true;
            } else if self.wait.step(n) {
                let left = timeout.saturating_sub(start.elapsed());
                self.sleep(left);
                look = true;
                n = 0; // awake: spin again before the next sleep
            }
            if look && start.elapsed() >= timeout {
                return match self.try_recv(buf) {
                    Err(RecvFailure::Empty) => Err(RecvFailure::TimedOut),
                    last => last,
                };
            }
            n = n.saturating_add(1);
        }
    }

    /// Arms, and sleeps once the peer has answered that nothing is on its way.
    fn sleep(&mut self, timeout: Duration) {
        let (Some(rx), Some(doorbell)) = (&mut self.rx, &self.doorbell) else {
            return;
        };
        doorbell.take(); // rings for what has been received since
        rx.arm();
        self.shared.armed.store(true, Ordering::Release);
        self.shared.common.bell.ring();
        let start = Instant::now();
        loop {
            if let Some(pump) = &self.pump {
                pump.pump();
            }
            match rx.answer() {
                Answer::Sleep => break,
                Answer::Poll => return,
                Answer::None => {}
            }
            // The answer takes the peer's service thread a wake-up: no need to burn the core for it.
            let waited = start.elapsed();
            if rx.has_arrived()
                || waited >= timeout
                || self.epoch != self.shared.epoch.load(Ordering::Acquire)
            {
                return;
            }
            if waited < PATIENCE {
                sync::yield_now();
            } else {
                std::thread::sleep(NAP);
            }
        }
        self.sleeps += 1;
        if let Some(pump) = &self.pump {
            pump.rest();
            self.shared.common.bell.ring(); // from now on the service thread reads the stream
        }
        doorbell.wait(timeout.saturating_sub(start.elapsed()));
    }

    /// Waits until the channel has a peer.
    pub fn wait_connected(&mut self, timeout: Duration) -> Result<(), RecvFailure> {
        let start = Instant::now();
        loop {
            if self.epoch != self.shared.epoch.load(Ordering::Acquire) {
                self.turn();
            }
            if self.rx.is_some() {
                return Ok(());
            }
            if start.elapsed() >= timeout {
                return Err(RecvFailure::NotConnected(self.shared.state()));
            }
            std::thread::sleep(NAP);
        }
    }

    /// Counts over all lives.
    pub fn stats(&self) -> ReceiverStats {
        let mut stats = self.ended;
        if let Some(rx) = &self.rx {
            stats += rx.stats();
        }
        stats
    }

    /// How often this end has slept.
    pub fn sleeps(&self) -> u64 {
        self.sleeps
    }

    #[inline(always)]
    fn attempt<R>(&mut self, f: impl FnOnce(&mut Rx) -> Result<R, RecvError>) -> Result<R, RecvFailure> {
        if self.rx.is_none() && self.epoch != self.shared.epoch.load(Ordering::Acquire) {
            // E2
            if let Some((reason, _)) = self.turn() {
                return Err(RecvFailure::Lost(Lost {
                    reason,
                    certain: 0,
                    sent: 0,
                }));
            }
        }
        let Some(rx) = &mut self.rx else {
            return Err(RecvFailure::NotConnected(self.shared.state()));
        };
        if let Some(pump) = &self.pump
            && !rx.has_arrived()
        {
            pump.pump();
        }
        let (seq, before) = (rx.next_seq(), rx.stats());
        let result = f(rx);
        if self.epoch != self.shared.epoch.load(Ordering::Acquire) {
            let taken = rx.stats() - before;
            return self.attempt_ended(result, seq, taken); // E2
        }
        match result {
            Ok(value) => Ok(value),
            Err(RecvError::Empty) => Err(RecvFailure::Empty), // not by the cold way: it is polled
            Err(e) => Err(self.explain(e)),
        }
    }

    /// The life has ended: its rest is given out as long as nobody writes over it. `result` is of message `seq` and what
    /// follows it, and counted as `taken`.
    #[cold]
    fn attempt_ended<R>(
        &mut self,
        result: Result<R, RecvError>,
        seq: u64,
        taken: ReceiverStats,
    ) -> Result<R, RecvFailure> {
        match result {
            Ok(value) => {
                sync::fence(Ordering::Acquire);
                if self.shared.reset.load(Ordering::Relaxed) <= self.epoch {
                    return Ok(value); // R2: the ring was still that of the old life
                }
                // What was just read may be a mixture of two lives: it does not count as received.
                self.ended = self.ended
                    - ReceiverStats {
                        credits: 0,
                        incomplete: 0,
                        ..taken
                    };
            }
            Err(e @ (RecvError::TooSmall { .. } | RecvError::OtherSize { .. })) => {
                return Err(self.explain(e));
            }
            Err(RecvError::Empty | RecvError::Corrupt { .. }) => {}
        }
        match self.turn() {
            Some((reason, _)) => Err(RecvFailure::Lost(Lost {
                reason,
                certain: seq,
                sent: seq,
            })),
            None => Err(RecvFailure::Empty),
        }
    }

    /// Lets the old life go, if there was one, and takes up the next.
    #[cold]
    fn turn(&mut self) -> Option<(CloseReason, ReceiverStats)> {
        let mut life = self.shared.life();
        let epoch = self.shared.epoch.load(Ordering::Relaxed);
        let reason = life.ended.unwrap_or(CloseReason::PeerGone);
        let untold = std::mem::take(&mut life.untold).then(ReceiverStats::default);
        let ended = self
            .rx
            .take()
            .map(|rx| rx.stats())
            .or(untold)
            .map(|stats| (reason, stats));
        if let Some((_, stats)) = ended {
            self.ended += stats;
        }
        self.epoch = epoch;
        if let Some(rx) = life.rx.take() {
            self.rx = Some(rx);
            self.doorbell.clone_from(&life.doorbell);
            self.pump.clone_from(&life.pump);
            if !life.up {
                self.epoch -= 1; // it ended before this end ever looked: give out what arrived
            }
        }
        drop(life);
        if self.rx.is_none() {
            self.shared.drained.store(epoch, Ordering::Release);
            self.shared.common.bell.ring();
        }
        ended
    }

    /// As [`Receiver::turn`], for an end that a device had: what the device has not taken is given up.
    #[cold]
    pub(super) fn turn_for_device(&mut self) -> Option<RecvFailure> {
        let seq = self.rx.as_ref().map_or(0, Rx::next_seq);
        self.turn().map(|(reason, _)| {
            RecvFailure::Lost(Lost {
                reason,
                certain: seq,
                sent: seq,
            })
        })
    }

    #[cold]
    fn explain(&self, e: RecvError) -> RecvFailure {
        match e {
            RecvError::Empty => RecvFailure::Empty,
            RecvError::TooSmall { needed, given } => RecvFailure::TooSmall { needed, given },
            RecvError::OtherSize { found, wanted } => RecvFailure::OtherSize { found, wanted },
            RecvError::Corrupt { .. } => {
                self.shared.corrupt.store(true, Ordering::Release);
                self.shared.common.bell.ring();
                RecvFailure::Empty
            }
        }
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        ended(&self.shared, RECEIVING);
        self.shared.has_reader.store(false, Ordering::Release);
        self.shared.end_dropped();
    }
}
