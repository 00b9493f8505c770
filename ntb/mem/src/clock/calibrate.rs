//! The rate of the cycle counter, against the monotonic clock.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::tsc;

/// Where the rate of a clock comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateSource {
    /// The kernel's own figure.
    Kernel,
    /// Measured against the monotonic clock at set-up.
    Measured,
    /// The clock counts nanoseconds.
    Fixed,
}

impl RateSource {
    /// The stable name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Measured => "measured",
            Self::Fixed => "fixed",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rate {
    pub(super) hz: f64,
    pub(super) source: RateSource,
    pub(super) error_ppm: f64,
}

/// A measured rate is accepted below this bound of its error...
const GOOD_PPM: f64 = 10.0;
/// ...or, when time is up, below this one; beyond, the counter is not used.
const BEARABLE_PPM: f64 = 50.0;
/// Time between two looks at both clocks.
const STEP: Duration = Duration::from_millis(10);
/// Looks before giving up: 60 ms of sleeping, more where the machine is so busy that sleeping takes longer, which makes
/// the interval longer and the rate better.
const STEPS: u32 = 6;
/// Readings per look, of which the quickest counts: one that an interrupt hit is not it.
const TRIES: u32 = 64;
/// Disagreement with the monotonic clock that refutes the kernel's figure: no clock discipline goes beyond 500 ppm.
const REFUTED_PPM: f64 = 1000.0;

/// Both clocks at one moment: the counter was at `ticks`, give or take `slack / 2`, when the other was at `ns`.
#[derive(Clone, Copy, Debug)]
struct Look {
    ticks: f64,
    ns: f64,
    slack: f64,
}

/// The two clocks and the passing of time, so that tests can bring their own.
trait Clocks {
    fn counter(&mut self) -> u64;
    fn monotonic_ns(&mut self) -> u64;
    fn pause(&mut self, time: Duration);
}

struct Real;

impl Clocks for Real {
    fn counter(&mut self) -> u64 {
        tsc::stamp()
    }

    fn monotonic_ns(&mut self) -> u64 {
        monotonic_ns()
    }

    fn pause(&mut self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// The monotonic clock in nanoseconds.
#[inline]
pub(super) fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // Never negative, and 584 years fit.
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The counter's rate: the kernel's figure unless it is refuted, otherwise measured.
pub(super) fn rate() -> Result<Rate, &'static str> {
    rate_of(tsc::kernel_hz(), &mut Real)
}

fn rate_of(kernel_hz: Option<f64>, clocks: &mut impl Clocks) -> Result<Rate, &'static str> {
    let first = look(clocks);
    if let Some(hz) = kernel_hz {
        clocks.pause(Duration::from_millis(2));
        let seen = between(first, look(clocks));
        if (hz / seen.hz - 1.0).abs() * 1e6 <= REFUTED_PPM + seen.error_ppm {
            return Ok(Rate {
                hz,
                source: RateSource::Kernel,
                error_ppm: 0.0,
            });
        }
    }
    let mut best = None::<Rate>;
    for _ in 0..STEPS {
        clocks.pause(STEP);
        let rate = between(first, look(clocks));
        if best.is_none_or(|b| rate.error_ppm < b.error_ppm) {
            best = Some(rate);
        }
        if best.is_some_and(|b| b.error_ppm < GOOD_PPM) {
            break;
        }
    }
    best.filter(|b| b.error_ppm < BEARABLE_PPM && b.hz.is_finite() && b.hz > 1e6)
        .ok_or("its rate could not be measured to 50 parts per million")
}

/// Reads the counter on both sides of the monotonic clock; the narrowest of many such readings.
fn look(clocks: &mut impl Clocks) -> Look {
    let mut best = Look {
        ticks: 0.0,
        ns: 0.0,
        slack: f64::INFINITY,
    };
    for _ in 0..TRIES {
        let before = clocks.counter();
        let ns = clocks.monotonic_ns();
        let after = clocks.counter();
        let slack = after.saturating_sub(before) as f64;
        if slack < best.slack && after >= before {
            best = Look {
                ticks: before as f64 + slack / 2.0,
                ns: ns as f64,
                slack,
            };
        }
    }
    best
}

fn between(a: Look, b: Look) -> Rate {
    let ticks = b.ticks - a.ticks;
    Rate {
        hz: ticks / (b.ns - a.ns) * 1e9,
        source: RateSource::Measured,
        error_ppm: (a.slack + b.slack) / 2.0 / ticks * 1e6,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine whose every reading can be interrupted.
    struct Machine {
        ns: u64,
        ghz: f64,
        seed: u64,
        interrupted_in_64: u64,
        slept: Duration,
    }

    impl Machine {
        fn new(seed: u64, interrupted_in_64: u64) -> Self {
            Self {
                ns: 1_000_000,
                ghz: 2.6,
                seed: seed | 1,
                interrupted_in_64,
                slept: Duration::ZERO,
            }
        }

        fn tick(&mut self) {
            self.seed ^= self.seed << 13;
            self.seed ^= self.seed >> 7;
            self.seed ^= self.seed << 17;
            self.ns += 20;
            if self.seed % 64 < self.interrupted_in_64 {
                self.ns += self.seed >> 44; // up to a millisecond
            }
        }
    }

    impl Clocks for Machine {
        fn counter(&mut self) -> u64 {
            self.tick();
            (self.ns as f64 * self.ghz) as u64
        }

        fn monotonic_ns(&mut self) -> u64 {
            self.tick();
            self.ns
        }

        fn pause(&mut self, time: Duration) {
            self.slept += time;
            self.ns += time.as_nanos() as u64;
            self.tick();
        }
    }

    #[test]
    fn interruptions_do_not_spoil_the_rate() {
        for seed in 1..=200 {
            let mut machine = Machine::new(seed * 7919, 32);
            let rate = rate_of(None, &mut machine).unwrap();
            let off = (rate.hz / 2.6e9 - 1.0).abs() * 1e6;
            assert!(off <= rate.error_ppm && off < 25.0, "{off} ppm: {rate:?}");
            assert!(machine.slept < Duration::from_millis(100));
        }
    }

    #[test]
    fn a_rate_that_cannot_be_measured_is_refused() {
        let mut machine = Machine::new(3, 64);
        machine.ghz = 1e-7; // stands still
        assert!(rate_of(None, &mut machine).is_err());
    }

    #[test]
    fn the_kernels_figure_is_believed_unless_it_is_far_off() {
        let kernel = rate_of(Some(2.6001e9), &mut Machine::new(5, 8)).unwrap();
        assert_eq!((kernel.source, kernel.hz), (RateSource::Kernel, 2.6001e9));
        let measured = rate_of(Some(2.7e9), &mut Machine::new(5, 8)).unwrap();
        assert_eq!(measured.source, RateSource::Measured);
        assert!((measured.hz / 2.6e9 - 1.0).abs() < 25e-6);
    }

    /// Under load from every core; spread over all calibrations below 50 ppm.
    #[test]
    fn two_hundred_calibrations_under_load_agree() {
        use std::sync::atomic::{AtomicBool, Ordering};
        if tsc::fitness().is_err() {
            return;
        }
        static STOP: AtomicBool = AtomicBool::new(false);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let load: Vec<_> = (0..cores)
            .map(|_| {
                std::thread::spawn(|| {
                    while !STOP.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                })
            })
            .collect();
        let rates: Vec<f64> = (0..200)
            .map(|_| rate_of(None, &mut Real).map_or(f64::NAN, |r| r.hz))
            .collect();
        STOP.store(true, Ordering::Relaxed);
        for thread in load {
            let _ = thread.join();
        }
        let (low, high) = rates
            .iter()
            .fold((f64::INFINITY, 0f64), |(l, h), r| (l.min(*r), h.max(*r)));
        assert!(rates.iter().all(|r| r.is_finite()), "{rates:?}");
        assert!((high / low - 1.0) * 1e6 < 50.0, "{low} to {high} Hz");
    }
}
