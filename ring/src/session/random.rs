//! Values that differ from use to use: keys and tags. Seeded, so that a run can be repeated.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use crate::wire::hash;

/// A stream of 64-bit values.
#[derive(Clone, Debug)]
pub(super) struct Random {
    seed: u64,
    count: u64,
}

impl Random {
    pub(super) fn new(seed: u64, incarnation: u64) -> Self {
        Self {
            seed: hash::hash(seed, &[incarnation]),
            count: 0,
        }
    }

    pub(super) fn next(&mut self) -> u64 {
        self.count = self.count.wrapping_add(1);
        hash::step(self.seed, self.count)
    }
}
