//! What the operating system took from a thread while it measured.

use std::fs;

use serde::Serialize;

/// Counts of the calling thread since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    involuntary: u64,
    voluntary: u64,
    minor: u64,
    major: u64,
    steal_ticks: u64,
}

/// What happened between two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Noise {
    /// Times the thread was taken off its processor.
    pub involuntary_context_switches: u64,
    /// Times it gave its processor away itself.
    pub voluntary_context_switches: u64,
    /// Page faults served from memory.
    pub minor_page_faults: u64,
    /// Page faults served from a disk.
    pub major_page_faults: u64,
    /// Time that a hypervisor took from the whole machine, in milliseconds, to ten of them.
    pub stolen_ms: u64,
    /// Longest time between two readings of the clock in the polling loop, in nanoseconds.
    pub largest_gap_ns: u64,
}

impl Counts {
    /// Reads the counts of the calling thread; those that cannot be read are zero.
    pub fn read() -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Self::parse(
            &text("/proc/thread-self/status"),
            &text("/proc/thread-self/stat"),
            &text("/proc/stat"),
        )
    }

    fn parse(status: &str, thread: &str, machine: &str) -> Self {
        let line = |name: &str| {
            status
                .lines()
                .find_map(|l| l.strip_prefix(name)?.trim().parse().ok())
                .unwrap_or(0)
        };
        // proc_pid_stat(5): behind the name in parentheses, field 3 is the state, 10 and 12 the faults.
        let behind_name = thread.rsplit_once(')').map_or("", |(_, rest)| rest);
        let field = |n: usize| {
            behind_name
                .split_whitespace()
                .nth(n - 3)
                .and_then(|f| f.parse().ok())
                .unwrap_or(0)
        };
        let steal = machine
            .lines()
            .next()
            .and_then(|l| l.strip_prefix("cpu "))
            .and_then(|l| l.split_whitespace().nth(7)?.parse().ok())
            .unwrap_or(0);
        Self {
            involuntary: line("nonvoluntary_ctxt_switches:"),
            voluntary: line("voluntary_ctxt_switches:"),
            minor: field(10),
            major: field(12),
            steal_ticks: steal,
        }
    }

    /// What happened between `before` and these counts.
    pub fn since(self, before: Self, largest_gap_ns: u64) -> Noise {
        // Unit of /proc/stat: USER_HZ, 100 on every architecture that Linux runs this on.
        const MS_A_TICK: u64 = 10;
        Noise {
            involuntary_context_switches: self.involuntary.saturating_sub(before.involuntary),
            voluntary_context_switches: self.voluntary.saturating_sub(before.voluntary),
            minor_page_faults: self.minor.saturating_sub(before.minor),
            major_page_faults: self.major.saturating_sub(before.major),
            stolen_ms: self.steal_ticks.saturating_sub(before.steal_ticks) * MS_A_TICK,
            largest_gap_ns,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_texts_are_understood() {
        let counts = Counts::parse(
            "Name:\tx\nvoluntary_ctxt_switches:\t12\nnonvoluntary_ctxt_switches:\t34\n",
            "77 (a ) b) R 1 77 77 0 -1 4194304 56 0 78 0 9 9",
            "cpu  1 2 3 4 5 6 7 90 0 0\ncpu0 1\n",
        );
        let noise = counts.since(Counts::default(), 5);
        assert_eq!(
            noise,
            Noise {
                involuntary_context_switches: 34,
                voluntary_context_switches: 12,
                minor_page_faults: 56,
                major_page_faults: 78,
                stolen_ms: 900,
                largest_gap_ns: 5,
            }
        );
        assert_eq!(Counts::parse("", "", ""), Counts::default());
    }

    #[test]
    fn sleeping_is_counted_as_voluntary() {
        let before = Counts::read();
        for _ in 0..20 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let noise = Counts::read().since(before, 0);
        assert!(noise.voluntary_context_switches >= 20, "{noise:?}");
    }
}
