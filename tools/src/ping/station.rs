//! One end of a channel as the loops see it.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use std::time::Duration;

use ntb_mem::clock::Clock;
use ntb_ring::channel::{Receiver, RecvFailure, SendFailure, Sender, Wait};

use super::measure::{Hold, Port, Progress};
use crate::{
    cli::ping::Waiting,
    exit::{Exit, Failure},
};

/// Empty polls without any pause: most replies come within them.
const BARE_POLLS: u64 = 200;
/// Empty polls before a time slice is given away, or before sleeping: some 50 us.
const SPINS: u64 = 2000;
/// Longest sleep between two looks.
const NAP: Duration = Duration::from_millis(10);
/// Sleeping is not tried for less: waking takes that long.
const WORTH_SLEEPING_NS: u64 = 200_000;

/// What [`Port::look`] calls.
pub type Look = Box<dyn FnMut(Progress) -> bool>;

/// The two ends of a channel, a clock, and a way of waiting.
pub struct Station {
    tx: Sender,
    rx: Receiver,
    clock: Clock,
    origin: u64,
    waiting: Waiting,
    spins: u64,
    /// A message that arrived while sleeping, and its length.
    stash: Vec<u8>,
    stashed: Option<usize>,
    look: Look,
}

impl std::fmt::Debug for Station {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Station")
            .field("waiting", &self.waiting)
            .finish_non_exhaustive()
    }
}

impl Station {
    /// A station whose longest message has `largest` bytes. `alone` is false when another end that polls shares the
    /// processor: then time slices are given away at once. `look` is called as [`Port::look`] says.
    pub fn new(
        (tx, mut rx): (Sender, Receiver),
        clock: Clock,
        waiting: Waiting,
        alone: bool,
        largest: usize,
        look: Look,
    ) -> Self {
        rx.set_wait(Wait::SpinSleep { spins: 0 });
        Self {
            tx,
            rx,
            clock,
            origin: clock.ticks(),
            waiting,
            spins: if alone { SPINS } else { 1 },
            stash: vec![0; largest],
            stashed: None,
            look,
        }
    }

    /// The sending end, for what it knows of the reader.
    pub fn sender(&self) -> &Sender {
        &self.tx
    }

    /// Waits up to `timeout` until both ends are connected to the same life of the peer. True when they are.
    pub fn connected(&mut self, timeout: Duration) -> bool {
        self.stashed = None;
        // Each end is told once that a life has ended; what follows belongs to the next.
        for _ in 0..3 {
            if self.tx.wait_connected(timeout).is_ok() && self.rx.wait_connected(timeout).is_ok() {
                return true;
            }
        }
        false
    }

    /// Waits up to `timeout` for a message, asleep. True when one is there to be received.
    pub fn sleep(&mut self, timeout: Duration) -> bool {
        if self.stashed.is_none()
            && let Ok(received) = self.rx.recv(&mut self.stash, timeout)
        {
            self.stashed = Some(received.len);
        }
        self.stashed.is_some()
    }

    /// Sends a message of the agreement, waiting for room up to `timeout`.
    pub fn say(&mut self, message: &[u8], timeout: Duration) -> Result<(), Hold> {
        self.tx.send(message, timeout).map(drop).map_err(|e| sending(&e))
    }
}

#[cold]
fn sending(e: &SendFailure) -> Hold {
    match e {
        SendFailure::Full { .. } | SendFailure::TimedOut { .. } => Hold::NotNow,
        SendFailure::NotConnected(_) | SendFailure::Lost(_) => Hold::Down,
        SendFailure::TooLong { .. } => broken(e.name(), e),
    }
}

#[cold]
fn receiving(e: &RecvFailure) -> Hold {
    match e {
        RecvFailure::Empty | RecvFailure::TimedOut => Hold::NotNow,
        RecvFailure::NotConnected(_) | RecvFailure::Lost(_) => Hold::Down,
        RecvFailure::TooSmall { .. } | RecvFailure::OtherSize { .. } | RecvFailure::WithinBlock => {
            broken(e.name(), e)
        }
    }
}

fn broken(name: &'static str, e: &impl std::fmt::Display) -> Hold {
    Hold::Broken(Box::new(Failure::new(Exit::Bad, name, e.to_string())))
}

impl Port for Station {
    #[inline]
    fn try_send(&mut self, message: &[u8]) -> Result<(), Hold> {
        match self.tx.try_send(message) {
            Ok(_) => Ok(()),
            Err(e) => Err(sending(&e)),
        }
    }

    #[inline]
    fn try_recv(&mut self, into: &mut [u8]) -> Result<usize, Hold> {
        if let Some(len) = self.stashed.take() {
            let len = len.min(into.len()).min(self.stash.len());
            if let (Some(to), Some(from)) = (into.get_mut(..len), self.stash.get(..len)) {
                to.copy_from_slice(from);
            }
            return Ok(len);
        }
        match self.rx.try_recv(into) {
            Ok(received) => Ok(received.len),
            Err(RecvFailure::Empty) => Err(Hold::NotNow),
            Err(e) => Err(receiving(&e)),
        }
    }

    #[inline(always)]
    fn ns(&mut self) -> u64 {
        self.clock.ns_since(self.origin)
    }

    #[inline]
    fn idle(&mut self, polls: u64, until_ns: u64) {
        if polls < BARE_POLLS.min(self.spins) {
            return;
        }
        if polls < self.spins || self.waiting == Waiting::Spin {
            ntb_mem::sync::spin_hint();
            return;
        }
        if self.waiting == Waiting::Sleep {
            let left = until_ns.saturating_sub(self.ns());
            if left >= WORTH_SLEEPING_NS {
                self.sleep(NAP.min(Duration::from_nanos(left - WORTH_SLEEPING_NS / 2)));
                return;
            }
        }
        ntb_mem::sync::yield_now();
    }

    fn look(&mut self, progress: Progress) -> bool {
        (self.look)(progress)
    }
}
