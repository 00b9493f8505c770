//! The floor: frozen. One 64-byte line each way, all eight words written and read, nothing checked.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use ntb_mem::{
    line::Line,
    region::{Region, View},
};

/// Round trips between two looks at the clock: many, so that the clock costs nothing.
pub(crate) const RUN: u64 = 250;

/// Does `round_trip` `n` times (a multiple of [`RUN`]) and gives the nanoseconds of one in the median run.
#[inline(always)]
pub(crate) fn runs(n: u64, mut round_trip: impl FnMut()) -> f64 {
    let mut each: Vec<f64> = (0..n / RUN)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..RUN {
                round_trip();
            }
            start.elapsed().as_nanos() as f64 / RUN as f64
        })
        .collect();
    each.sort_by(f64::total_cmp);
    each.get(each.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Lines that [`Floor::turns`] takes in turn.
const TURN: u64 = 1024;
/// Where they lie: behind the control lines and the two buffers of the copy.
const TURNS_AT: u64 = 64 + (2 << 20) / 64;
/// Bytes that everything together takes.
pub(crate) const SHARED_BYTES: u64 = (TURNS_AT + 2 * TURN) * 64;

/// Two lines far apart in one region: there, and back.
pub(crate) struct Floor {
    there: View,
    back: View,
}

impl Floor {
    pub(crate) fn new(region: &Arc<Region>) -> Option<Self> {
        let view = region.view();
        Some(Self {
            there: view.part(0, 1)?,
            back: view.part(32, 1)?,
        })
    }

    /// The same over [`TURN`] lines each way, one after the other, as a ring takes them: a floor for rings, where the one
    /// above is the floor of the machine.
    pub(crate) fn turns(region: &Arc<Region>) -> Option<Self> {
        let view = region.view();
        Some(Self {
            there: view.part(TURNS_AT, TURN)?,
            back: view.part(TURNS_AT + TURN, TURN)?,
        })
    }

    /// The line of number `i`.
    #[inline(always)]
    fn line(&self, i: u64) -> u64 {
        if self.there.lines() == 1 { 0 } else { i % TURN }
    }

    /// Number of the last exchange: a line of each turn holds it.
    fn last(&self) -> u64 {
        (0..self.back.lines())
            .map(|l| self.back.load(l as usize * 8 + 7, Ordering::Acquire))
            .max()
            .unwrap_or(0)
    }

    /// Nanoseconds of a round trip, over `n` of them in runs of [`RUN`]: the median run, so that a moment in which a core
    /// was taken away does not count.
    pub(crate) fn measure(&self, n: u64) -> f64 {
        let mut sum = 0u64;
        let mut i = self.last();
        let ns = runs(n, || {
            i += 1;
            let line = self.line(i);
            let at = line as usize * 8;
            self.there.store_line(line, &Line([i, sum, i, i, i, i, i, i]));
            while self.back.load(at + 7, Ordering::Acquire) != i {
                std::hint::spin_loop();
            }
            sum = (0..8).fold(sum, |s, w| {
                s.wrapping_add(self.back.load(at + w, Ordering::Relaxed))
            });
        });
        std::hint::black_box(sum);
        ns
    }

    /// The other side.
    pub(crate) fn answer(&self, n: u64) {
        let mut sum = 0u64;
        let base = self.last();
        for i in base + 1..=base + n {
            let line = self.line(i);
            let at = line as usize * 8;
            while self.there.load(at + 7, Ordering::Acquire) != i {
                std::hint::spin_loop();
            }
            sum = (0..8).fold(sum, |s, w| {
                s.wrapping_add(self.there.load(at + w, Ordering::Relaxed))
            });
            self.back.store_line(line, &Line([i, sum, i, i, i, i, i, i]));
        }
        std::hint::black_box(sum);
    }
}
