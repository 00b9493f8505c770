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

    /// Nanoseconds of a round trip, over `n` of them in runs of [`RUN`]: the median run, so that a moment in which a core
    /// was taken away does not count.
    pub(crate) fn measure(&self, n: u64) -> f64 {
        let mut sum = 0u64;
        let base = self.back.load(7, Ordering::Acquire);
        let mut i = base;
        let ns = runs(n, || {
            i += 1;
            self.there.store_line(0, &Line([i, sum, i, i, i, i, i, i]));
            while self.back.load(7, Ordering::Acquire) != i {
                std::hint::spin_loop();
            }
            sum = (0..8).fold(sum, |s, w| s.wrapping_add(self.back.load(w, Ordering::Relaxed)));
        });
        std::hint::black_box(sum);
        ns
    }

    /// The other side.
    pub(crate) fn answer(&self, n: u64) {
        let mut sum = 0u64;
        let base = self.back.load(7, Ordering::Acquire);
        for i in base + 1..=base + n {
            while self.there.load(7, Ordering::Acquire) != i {
                std::hint::spin_loop();
            }
            sum = (0..8).fold(sum, |s, w| s.wrapping_add(self.there.load(w, Ordering::Relaxed)));
            self.back.store_line(0, &Line([i, sum, i, i, i, i, i, i]));
        }
        std::hint::black_box(sum);
    }
}
