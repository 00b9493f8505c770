//! How a caller waits, and what it costs.

use std::time::Duration;

use ntb_mem::sync;

/// What a blocking call does while there is nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Spins. Lowest latency; takes a whole core, and must have one to itself.
    Spin,
    /// Spins `spins` times, then gives the rest of each time slice away. The default, with 2000 spins (some 20 to 100
    /// us): as fast as spinning while the peer answers quickly, and two sides still get on when they share one core.
    SpinYield {
        /// Polls before the first yield.
        spins: u32,
    },
    /// Spins `spins` times, then sleeps until the peer rings. Costs the peer a system call and this side a wake-up
    /// (some 10 to 100 us) per sleep, and no processor time in between.
    SpinSleep {
        /// Polls before going to sleep.
        spins: u32,
    },
}

impl Default for Wait {
    fn default() -> Self {
        Self::SpinYield { spins: 2000 }
    }
}

/// Polls between two looks at the clock while spinning.
pub(super) const CLOCK_EVERY: u32 = 256;
/// Naps of a sender that waits for room and does not want to burn a core: credits ring no bell.
pub(super) const NAP: Duration = Duration::from_micros(50);

impl Wait {
    /// One step of waiting, the `n`th. True when it is time for the caller to sleep.
    #[inline]
    pub(super) fn step(self, n: u32) -> bool {
        match self {
            Self::Spin => sync::spin_hint(),
            Self::SpinYield { spins } | Self::SpinSleep { spins } if n < spins => sync::spin_hint(),
            Self::SpinYield { .. } => sync::yield_now(),
            Self::SpinSleep { .. } => return true,
        }
        false
    }
}
