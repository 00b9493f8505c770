//! Time stamps for measuring: the processor's cycle counter where it can be believed, the system's monotonic clock
//! where it cannot.
//!
//! The cycle counter is used when the processor says that it is invariant and the kernel itself keeps time by it. Its
//! rate is the kernel's own figure where the kernel publishes it and what it publishes is not refuted by a glance at
//! the monotonic clock; otherwise it is measured. [`ClockFacts`] says which, and why not better.

mod calibrate;
mod tsc;

use std::time::{Duration, Instant};

use calibrate::Rate;
pub use calibrate::RateSource;

/// A source of time stamps: a few words, copied freely. Stamps of copies of one clock can be subtracted from each
/// other, also across threads and cores; stamps of clocks set up apart cannot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    cycle_counter: bool,
    /// Nanoseconds a tick, times 2^32.
    ns_per_tick: u64,
}

/// What a clock is and how far it can be trusted.
#[derive(Clone, Debug, PartialEq)]
pub struct ClockFacts {
    /// `tsc` or `monotonic`.
    pub source: &'static str,
    /// Ticks a second.
    pub hz: f64,
    /// Where the rate comes from.
    pub rate: RateSource,
    /// Largest error of the rate that the measurement allows, in parts per million. Zero for the kernel's own figure
    /// and for the system clock, whose errors are not ours to know.
    pub rate_error_ppm: f64,
    /// Why the cycle counter is not used; `None` when it is.
    pub why_not_cycle_counter: Option<String>,
    /// What a pair of stamps adds to what is measured between them, in nanoseconds: the median of many.
    pub pair_ns: f64,
    /// Step of the counter in nanoseconds: all differences seen are multiples of it.
    pub granularity_ns: f64,
    /// How long setting the clock up took.
    pub set_up: Duration,
}

impl Clock {
    /// The best clock of this machine. Takes up to 100 ms when the rate has to be measured.
    pub fn set_up() -> (Self, ClockFacts) {
        let clock_source = std::fs::read_to_string(CLOCK_SOURCE).ok();
        Self::choose(tsc::fitness(), clock_source.as_deref())
    }

    /// The system's monotonic clock, with the reason why nothing better is used.
    pub fn system(why: &str) -> (Self, ClockFacts) {
        let started = Instant::now();
        let clock = Self {
            cycle_counter: false,
            ns_per_tick: 1 << 32,
        };
        let facts = clock.facts(
            started,
            Rate {
                hz: 1e9,
                source: RateSource::Fixed,
                error_ppm: 0.0,
            },
            Some(why.to_owned()),
        );
        (clock, facts)
    }

    fn choose(fitness: Result<(), &'static str>, clock_source: Option<&str>) -> (Self, ClockFacts) {
        let started = Instant::now();
        let source = clock_source.map(str::trim);
        let rate = match (fitness, source) {
            (Err(why), _) => Err(why.to_owned()),
            (Ok(()), Some("tsc")) => calibrate::rate().map_err(str::to_owned),
            (Ok(()), Some(other)) => Err(format!(
                "the kernel keeps time by '{other}', not by the cycle counter"
            )),
            (Ok(()), None) => Err(format!(
                "{CLOCK_SOURCE} cannot be read, so the kernel's opinion is unknown"
            )),
        };
        match rate {
            Ok(rate) => {
                let clock = Self {
                    cycle_counter: true,
                    ns_per_tick: (1e9 / rate.hz * (1u64 << 32) as f64).round() as u64,
                };
                (clock, clock.facts(started, rate, None))
            }
            Err(why) => Self::system(&why),
        }
    }

    /// A stamp. What stands before it in the program is done (stores may still be under way), what stands after it has
    /// not begun.
    #[inline(always)]
    pub fn ticks(&self) -> u64 {
        if self.cycle_counter {
            tsc::stamp()
        } else {
            calibrate::monotonic_ns()
        }
    }

    /// Nanoseconds in a number of ticks, rounded down. Saturates after 584 years.
    #[inline(always)]
    pub fn to_ns(&self, ticks: u64) -> u64 {
        let ns = (u128::from(ticks) * u128::from(self.ns_per_tick)) >> 32;
        u64::try_from(ns).unwrap_or(u64::MAX)
    }

    /// Ticks in a number of nanoseconds, rounded down. Saturates.
    #[inline]
    pub fn from_ns(&self, ns: u64) -> u64 {
        let ticks = (u128::from(ns) << 32) / u128::from(self.ns_per_tick.max(1));
        u64::try_from(ticks).unwrap_or(u64::MAX)
    }

    /// Nanoseconds since the stamp `earlier`; zero when it lies ahead.
    #[inline(always)]
    pub fn ns_since(&self, earlier: u64) -> u64 {
        self.to_ns(self.ticks().saturating_sub(earlier))
    }

    /// True for the cycle counter, whose stamps two processes of one machine can compare.
    pub fn is_cycle_counter(&self) -> bool {
        self.cycle_counter
    }

    fn facts(&self, started: Instant, rate: Rate, why: Option<String>) -> ClockFacts {
        let mut steps: Vec<u64> = (0..PAIRS)
            .map(|_| {
                let first = self.ticks();
                self.ticks().saturating_sub(first)
            })
            .collect();
        let step = steps.iter().fold(0, |a, b| gcd(a, *b));
        steps.sort_unstable();
        let ns = |ticks: u64| ticks as f64 * 1e9 / rate.hz;
        ClockFacts {
            source: if self.cycle_counter { "tsc" } else { "monotonic" },
            hz: rate.hz,
            rate: rate.source,
            rate_error_ppm: rate.error_ppm,
            why_not_cycle_counter: why,
            pair_ns: ns(steps.get(PAIRS / 2).copied().unwrap_or(0)),
            granularity_ns: ns(step.max(1)),
            set_up: started.elapsed(),
        }
    }
}

/// Pairs of stamps for the cost and the step: some 50 microseconds.
const PAIRS: usize = 1001;

const CLOCK_SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_advance_and_agree_with_the_system_clock() {
        let (clock, facts) = Clock::set_up();
        let (t0, i0) = (clock.ticks(), Instant::now());
        while i0.elapsed() < Duration::from_millis(20) {
            std::hint::spin_loop();
        }
        let (ns, elapsed) = (clock.ns_since(t0), i0.elapsed());
        // Stamps enclose the interval from outside but for the second pair; the rate may be off by its bound.
        let least = 20_000_000.0 * (1.0 - (facts.rate_error_ppm + 600.0) / 1e6);
        assert!(ns as f64 >= least, "{ns} ns in {elapsed:?}: {facts:?}");
        assert!(facts.pair_ns > 0.0 && facts.granularity_ns > 0.0, "{facts:?}");
    }

    #[test]
    fn the_system_clock_stands_in_with_a_reason() {
        for (fitness, source, part) in [
            (Ok(()), Some("hpet\n"), "'hpet'"),
            (Ok(()), Some("kvm-clock"), "'kvm-clock'"),
            (Ok(()), None, "cannot be read"),
            (Err("it stops in sleep states"), Some("tsc"), "stops"),
        ] {
            let (clock, facts) = Clock::choose(fitness, source);
            assert!(!clock.is_cycle_counter());
            assert_eq!(facts.source, "monotonic");
            let why = facts.why_not_cycle_counter.unwrap();
            assert!(why.contains(part), "{why}");
            let t0 = clock.ticks();
            assert!(clock.ticks() >= t0);
            assert_eq!(clock.to_ns(12_345), 12_345);
        }
    }

    #[test]
    fn conversion_is_exact_over_the_whole_range() {
        let clock = Clock {
            cycle_counter: false,
            ns_per_tick: (1 << 32) / 4, // 4 GHz
        };
        assert_eq!(clock.to_ns(4_000_000_000), 1_000_000_000);
        assert_eq!(clock.to_ns(u64::MAX), u64::MAX / 4);
        assert_eq!(clock.from_ns(1_000), 4_000);
        assert_eq!(clock.from_ns(u64::MAX), u64::MAX);
        assert_eq!(
            Clock {
                cycle_counter: false,
                ns_per_tick: 5 << 32
            }
            .to_ns(u64::MAX),
            u64::MAX
        );
        assert_eq!(clock.ns_since(u64::MAX), 0, "a stamp ahead gives zero");
    }

    #[test]
    fn greatest_common_divisor() {
        assert_eq!([26, 52, 0, 130].iter().fold(0, |a, b| gcd(a, *b)), 26);
    }
}
