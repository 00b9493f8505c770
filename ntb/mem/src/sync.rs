//! The one place process-local atomics, fences and spin hints come from, so that the model checker can
//! replace them: under `--cfg loom` everything here is loom's.
//!
//! Memory mapped from elsewhere cannot be loom's; it goes through [`crate::region`], which uses the
//! processor's atomics always. Models put their own memory in its place.

#[cfg(not(loom))]
pub use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence},
};

#[cfg(loom)]
pub use loom::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence},
};

/// Tells the processor (or the model checker) that the caller is waiting for another thread or device.
#[inline(always)]
pub fn spin_hint() {
    #[cfg(not(loom))]
    std::hint::spin_loop();
    #[cfg(loom)]
    loom::thread::yield_now();
}

/// Gives the rest of the time slice away.
#[inline]
pub fn yield_now() {
    #[cfg(not(loom))]
    std::thread::yield_now();
    #[cfg(loom)]
    loom::thread::yield_now();
}

/// A counter that one thread stores and others load, alone on its cache lines: two neighbours would be bounced between
/// cores with every message.
pub type Counter = crossbeam_utils::CachePadded<AtomicU64>;

/// A shared [`Counter`].
pub fn counter(value: u64) -> Arc<Counter> {
    Arc::new(Counter::new(AtomicU64::new(value)))
}
