//! Deadlines and retries over a clock that is an input.

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

/// A step that is repeated until it is answered, first quickly, then at a slow pace.
#[derive(Clone, Copy, Debug)]
pub(super) struct Retry {
    first: Duration,
    interval: Duration,
    due: Duration,
}

/// The slow pace, in first intervals.
const SLOW: u32 = 20;

impl Retry {
    /// Due at once.
    pub(super) fn new(first: Duration) -> Self {
        Self {
            first,
            interval: first,
            due: Duration::ZERO,
        }
    }

    pub(super) fn is_due(&self, now: Duration) -> bool {
        now >= self.due
    }

    /// When it is due.
    pub(super) fn due(&self) -> Duration {
        self.due
    }

    /// It has been done: the next time is twice as far away, up to the slow pace.
    pub(super) fn done(&mut self, now: Duration) {
        self.due = now.saturating_add(self.interval);
        let slow = self.first.saturating_mul(SLOW);
        self.interval = self.interval.saturating_mul(2).min(slow);
    }

    /// Something new is to be said: due at once, and quickly again.
    pub(super) fn restart(&mut self) {
        *self = Self::new(self.first);
    }
}

/// The earliest of the deadlines noted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Earliest(Duration);

impl Earliest {
    pub(super) fn new() -> Self {
        Self(Duration::MAX)
    }

    pub(super) fn note(&mut self, at: Duration) {
        self.0 = self.0.min(at);
    }

    pub(super) fn get(self) -> Duration {
        self.0
    }
}
