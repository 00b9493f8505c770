//! The bare hand-off between two processors that results are compared with: one 64-byte line each way between two
//! processes, all eight words written and read by aligned 8-byte stores and loads, nothing else.
//!
//! FROZEN: do not tune. Results of different days and machines are compared by their ratio to this, which is worth
//! nothing once this changes. Both loops poll without a pause instruction; after 4096 empty polls they give the time
//! slice away, so that two ends on one processor make progress, which a hand-off between two processors never reaches.

#![allow(
    unsafe_code,
    reason = "bare loads and stores of shared memory, without the bounds checks of a view"
)]

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use ntb_mem::{
    clock::Clock,
    region::{Pages, Region, View},
};

use crate::stats::Latencies;

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Floor {
    /// Median of the round trips, each with a pair of stamps, in nanoseconds.
    pub p50_ns: u64,
    /// Mean of as many round trips with one pair of stamps around all of them, in nanoseconds.
    pub mean_ns: f64,
    /// Round trips of each kind.
    pub rounds: u64,
}

/// Bytes of memory the two ends share.
pub const BYTES: u64 = 4096;
/// First words of the lines: 256 bytes apart, so that no prefetcher takes two of them for neighbours.
const REQUEST: usize = 0;
const REPLY: usize = 32;
const STOP: usize = 64;
/// Empty polls before the slow path: a hand-off between two processors takes some tens.
const PATIENCE: u32 = 4096;
/// Round trips before anything is timed, cut short after [`PART`].
const WARM_UP: u64 = 2000;
/// Aimed at for each of the two parts.
const PART: Duration = Duration::from_millis(60);
/// Fewest and most round trips of each part.
const ROUNDS: (u128, u128) = (100, 200_000);
/// All must be done within this time, which is far more than it takes on one processor that others use too.
const DEADLINE: Duration = Duration::from_secs(10);

/// A line in shared memory.
#[derive(Clone, Copy)]
struct Line(*mut u64);

impl Line {
    fn new(memory: &View, word: usize) -> Option<Self> {
        (word + 8 <= memory.words()).then(|| Self(memory.as_ptr().wrapping_add(word)))
    }

    #[inline(always)]
    fn word(&self, index: usize) -> &AtomicU64 {
        debug_assert!(index < 8);
        // SAFETY: `new` has checked that eight words lie in the view, whose memory is page-aligned and stays mapped
        // while the loops below hold it; it is only ever accessed atomically.
        unsafe { AtomicU64::from_ptr(self.0.add(index)) }
    }

    /// Writes all eight words, the last with release: pairs with the acquire in `wait`.
    #[inline(always)]
    fn write(&self, value: u64) {
        for index in 0..7 {
            self.word(index).store(value, Ordering::Relaxed);
        }
        self.word(7).store(value, Ordering::Release);
    }

    /// Waits until the last word is `value`, then reads the other seven. False when `slow` gave up.
    #[inline(always)]
    fn wait(&self, value: u64, slow: &mut impl FnMut() -> bool) -> bool {
        let mut polls = 0u32;
        while self.word(7).load(Ordering::Acquire) != value {
            polls += 1;
            if polls >= PATIENCE {
                polls = 0;
                if !slow() {
                    return false;
                }
            }
        }
        let mut different = 0;
        for index in 0..7 {
            different |= self.word(index).load(Ordering::Relaxed) ^ value;
        }
        different == 0
    }
}

/// Answers until the other end says stop, or `slow`, called after many empty polls, returns false.
pub fn respond(memory: &View, mut slow: impl FnMut() -> bool) {
    let (Some(request), Some(reply), Some(stop)) = (
        Line::new(memory, REQUEST),
        Line::new(memory, REPLY),
        Line::new(memory, STOP),
    ) else {
        return;
    };
    let mut slow = || {
        std::thread::yield_now();
        stop.word(0).load(Ordering::Relaxed) == 0 && slow()
    };
    for round in 1.. {
        if !request.wait(round, &mut slow) {
            return;
        }
        reply.write(round);
    }
}

/// Measures against [`respond`] on the same memory, and stops it. `None` when it does not answer, or when `slow`, called
/// after many empty polls, returns false.
pub fn initiate(memory: &View, clock: Clock, slow: impl FnMut() -> bool) -> Option<Floor> {
    let stop = Line::new(memory, STOP)?;
    let floor = measure_rounds(memory, clock, slow);
    stop.word(0).store(1, Ordering::Relaxed);
    floor
}

fn measure_rounds(memory: &View, clock: Clock, mut go_on: impl FnMut() -> bool) -> Option<Floor> {
    let (request, reply) = (Line::new(memory, REQUEST)?, Line::new(memory, REPLY)?);
    let deadline = Instant::now() + DEADLINE;
    let mut slow = || {
        std::thread::yield_now();
        Instant::now() < deadline && go_on()
    };
    let mut round = 0;
    let mut exchange = || {
        round += 1;
        request.write(round);
        reply.wait(round, &mut slow)
    };

    if !exchange() {
        return None; // the first takes as long as the other process takes to start
    }
    let started = Instant::now();
    let mut warm = 0;
    while warm < WARM_UP && started.elapsed() < PART {
        if !exchange() {
            return None;
        }
        warm += 1;
    }
    let each = started.elapsed().as_nanos().max(1) / u128::from(warm.max(1));
    let rounds = (PART.as_nanos() / each.max(1)).clamp(ROUNDS.0, ROUNDS.1) as u64;

    let start = clock.ticks();
    for _ in 0..rounds {
        if !exchange() {
            return None;
        }
    }
    let mean_ns = clock.ns_since(start) as f64 / rounds as f64;

    let mut latencies = Latencies::default();
    for _ in 0..rounds {
        let start = clock.ticks();
        let good = exchange();
        let end = clock.ticks();
        if !good {
            return None;
        }
        latencies.record(clock.to_ns(end.saturating_sub(start)));
    }
    Some(Floor {
        p50_ns: latencies.quantile(0.5),
        mean_ns,
        rounds,
    })
}

/// Measures between this thread, wherever it runs, and a process started for it: the running program again, with the
/// arguments `floor-peer --parent PID [--cpu B]`, which must lead to [`serve`]. Given up when `go_on` returns false.
pub fn between_processes(
    peer_cpu: Option<u32>,
    clock: Clock,
    go_on: impl FnMut() -> bool,
) -> io::Result<Floor> {
    let region = Region::allocate(BYTES, Pages::Normal).map_err(io::Error::other)?;
    let memory: OwnedFd = region.descriptor().try_clone_to_owned()?;
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("ntb-floor-peer")
        .args(["floor-peer", "--parent", &std::process::id().to_string()])
        .stdin(Stdio::from(memory))
        .stdout(Stdio::null());
    if let Some(cpu) = peer_cpu {
        command.args(["--cpu", &cpu.to_string()]);
    }
    let child = Reaped(command.spawn()?);
    let floor = initiate(&Arc::new(region).view(), clock, go_on);
    drop(child);
    floor.ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::TimedOut,
            "the other process did not answer within 10 s",
        )
    })
}

/// A child that is ended and waited for, whatever happens.
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The other process: answers over the memory that is its standard input.
pub fn serve() -> io::Result<()> {
    let memory = io::stdin().as_fd().try_clone_to_owned()?;
    let region = Region::from_peer(memory, BYTES).map_err(io::Error::other)?;
    respond(&Arc::new(region).view(), || true);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_ends_exchange_lines() {
        let memory = Arc::new(Region::allocate(BYTES, Pages::Normal).unwrap()).view();
        let other = memory.clone();
        let peer = std::thread::spawn(move || respond(&other, || true));
        let floor = initiate(&memory, Clock::set_up().0, || true).unwrap();
        peer.join().unwrap();
        assert!(
            floor.p50_ns > 0 && floor.mean_ns > 0.0 && floor.rounds >= 100,
            "{floor:?}"
        );
        // Both lines carry the last round in all words.
        let last = memory.load(REPLY, Ordering::Relaxed);
        assert!(last > 2 * floor.rounds && last <= 1 + WARM_UP + 2 * floor.rounds);
        for word in 0..8 {
            assert_eq!(memory.load(REQUEST + word, Ordering::Relaxed), last);
            assert_eq!(memory.load(REPLY + word, Ordering::Relaxed), last);
        }
    }

    #[test]
    fn memory_that_is_too_small_is_refused() {
        let region = Arc::new(Region::allocate(BYTES, Pages::Normal).unwrap());
        let small = region.view().part(0, 4).unwrap();
        assert_eq!(initiate(&small, Clock::system("test").0, || true), None);
        respond(&small, || true);
    }
}
