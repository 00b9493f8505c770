//! How many looks a kernel is given, and when one that does not end has stalled.
//!
//! What a look takes differs by orders: memory of a GPU or of the host behind a bus, an interpreter in a GPU's place on a machine
//! with other things to do. So it is measured, and a kernel is given as many as fit a short time. One that takes many times
//! longer, and longer than the caller's patience, waits for something other than its budget.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    GpuError,
    ends::{InFlight, Watch},
    memory::{GPU_PAGE, GpuMemory},
    seam::{Arg, Gpu},
};

/// Time for which a kernel is to look at most.
const AIM: Duration = Duration::from_millis(100);
/// Looks by which it is measured what one takes.
const TRIED: u64 = 1 << 10;
/// Fewest looks of a kernel.
const LEAST: u64 = 64;
/// Times by which a kernel may be slower than was measured: a machine can become busy in between.
const SLOWER: u32 = 32;
/// Longest time that the first measurement may take.
const FIRST: Duration = Duration::from_secs(120);

/// What a look takes, and what follows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    look: Duration,
    budget: u64,
    most: u64,
    patience: Duration,
}

impl Pace {
    /// Measures. A kernel is never given more than `most` looks, and never called stalled within `patience`.
    #[allow(unsafe_code, reason = "starting a kernel with addresses of memory made here")]
    pub(crate) fn measure(gpu: &Arc<dyn Gpu>, most: u64, patience: Duration) -> Result<Self, GpuError> {
        let page = GpuMemory::allocate(gpu, GPU_PAGE)?;
        let at = page.at();
        let args = [
            Arg::U64(at), // where nobody asks
            Arg::U64(at + 128),
            Arg::U64(1),
            Arg::U64(TRIED),
            Arg::U64(0),
            Arg::U64(at + 256),
        ];
        let begin = Instant::now();
        // SAFETY: the arguments are those of the kernel; all addresses lie in `page`, which is kept until it has ended.
        let running = unsafe { gpu.start("ntb_echo", 32, &args) }?;
        InFlight::new(running, vec![page]).finish_watched(&mut Watch {
            progress: &mut || 0,
            patience: FIRST,
            slice: Watch::SLICE,
        })?;
        Ok(Self::of(begin.elapsed() / TRIED as u32, most, patience))
    }

    fn of(look: Duration, most: u64, patience: Duration) -> Self {
        Self {
            look,
            budget: fitting(look, most),
            most,
            patience,
        }
    }

    /// Looks for the next kernel.
    pub(crate) fn budget(&self) -> u64 {
        self.budget
    }

    /// Time in which a kernel ends that has nothing to wait for but its budget and `bytes` bytes to handle.
    pub(crate) fn allowed(&self, bytes: u64) -> Duration {
        let steps = self.budget.saturating_add(bytes / 8);
        let expected = self.look.saturating_mul(u32::try_from(steps).unwrap_or(u32::MAX));
        self.patience.max(expected.saturating_mul(SLOWER))
    }

    /// A kernel has looked `looks` times in vain, and taken so long.
    pub(crate) fn took(&mut self, looks: u64, elapsed: Duration) {
        let Some(look) = elapsed.checked_div(u32::try_from(looks).unwrap_or(u32::MAX)) else {
            return;
        };
        // What was slow a moment ago is believed a while longer.
        self.look = look.max(self.look / 2);
        self.budget = fitting(look, self.most).min(self.budget.saturating_mul(4));
    }
}

fn fitting(look: Duration, most: u64) -> u64 {
    let fits = AIM.as_nanos() / look.as_nanos().max(1);
    u64::try_from(fits).unwrap_or(u64::MAX).max(LEAST).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_takes_a_short_time_and_a_stall_is_many_times_longer() {
        let (most, patience) = (1 << 18, Duration::from_secs(10));
        // A GPU at once has all that it may have; ten seconds are ten seconds.
        let quick = Pace::of(Duration::from_nanos(300), most, patience);
        assert_eq!((quick.budget(), quick.allowed(0)), (most, patience));
        // Where a look takes 40 us, all of them would take as long as the patience.
        let mut slow = Pace::of(Duration::from_micros(40), most, patience);
        assert_eq!((slow.budget(), slow.allowed(0)), (2500, patience));
        // A message of 8 MiB takes such a machine its time.
        assert!(slow.allowed(8 << 20) > Duration::from_secs(40 * 30));
        // It gets slower still, and quicker again: at most fourfold a kernel, and time is allowed a while longer.
        slow.took(2500, Duration::from_secs(10));
        assert_eq!((slow.budget(), slow.look), (64, Duration::from_millis(4)));
        assert_eq!(slow.allowed(0), patience);
        slow.took(64, Duration::from_micros(64));
        assert_eq!((slow.budget(), slow.look), (256, Duration::from_millis(2)));
        assert_eq!(slow.allowed(0), Duration::from_millis(2 * 256 * 32));
        // The caller's most is the most, and no look at all tells nothing.
        let mut few = Pace::of(Duration::from_nanos(1), 10, patience);
        few.took(0, Duration::from_secs(1));
        assert_eq!((few.budget(), few.look), (10, Duration::from_nanos(1)));
    }
}
