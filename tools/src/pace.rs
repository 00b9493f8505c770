//! Schedules that do not slip when the far end stalls.

/// Evenly spaced instants, exact over any length: instant `i` is worked out from `i`, not from instant `i - 1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    start_ns: u64,
    millihertz: u64,
}

impl Schedule {
    /// Instants `rate_hz` times a second, the first at `start_ns`. Rates are kept to a thousandth of a hertz.
    pub fn new(start_ns: u64, rate_hz: f64) -> Self {
        Self {
            start_ns,
            millihertz: ((rate_hz * 1000.0).round() as u64).max(1),
        }
    }

    /// When number `index` is due, in nanoseconds.
    #[inline]
    pub fn due(&self, index: u64) -> u64 {
        let after = u128::from(index) * 1_000_000_000_000 / u128::from(self.millihertz);
        self.start_ns
            .saturating_add(u64::try_from(after).unwrap_or(u64::MAX))
    }

    /// How many are due before `ns` after the start.
    pub fn due_within(&self, ns: u64) -> u64 {
        let count = (u128::from(ns) * u128::from(self.millihertz)).div_ceil(1_000_000_000_000);
        u64::try_from(count).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instants_do_not_drift() {
        let s = Schedule::new(7, 3.0);
        assert_eq!(s.due(0), 7);
        assert_eq!(s.due(1), 7 + 333_333_333);
        assert_eq!(s.due(3_000_000_000), 7 + 1_000_000_000 * 1_000_000_000);
        assert_eq!(Schedule::new(0, 1e8).due(1), 10);
        assert_eq!(Schedule::new(0, 0.001).due(1), 1_000_000_000_000);
        assert_eq!(Schedule::new(1, 0.0).due(u64::MAX), u64::MAX);
    }

    #[test]
    fn as_many_as_fit() {
        let s = Schedule::new(5, 1000.0);
        assert_eq!(s.due_within(10_000_000), 10);
        assert_eq!(s.due_within(10_000_001), 11);
        assert_eq!(s.due_within(1), 1);
        for n in [1u64, 9, 10, 11, 1000] {
            let within = s.due_within(s.due(n) - 5);
            assert_eq!(within, n);
        }
    }
}
