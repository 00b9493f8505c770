//! The floor: frozen. One 64-byte line each way, all eight words written and read, nothing checked.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use ntb_mem::{
    line::Line,
    region::{Region, View},
};

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

    /// Nanoseconds of a round trip, over `n` of them.
    pub(crate) fn measure(&self, n: u64) -> f64 {
        let mut sum = 0u64;
        let base = self.back.load(7, Ordering::Acquire);
        let start = Instant::now();
        for i in base + 1..=base + n {
            self.there.store_line(0, &Line([i, sum, i, i, i, i, i, i]));
            while self.back.load(7, Ordering::Acquire) != i {
                std::hint::spin_loop();
            }
            sum = (0..8).fold(sum, |s, w| s.wrapping_add(self.back.load(w, Ordering::Relaxed)));
        }
        std::hint::black_box(sum);
        start.elapsed().as_nanos() as f64 / n as f64
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
