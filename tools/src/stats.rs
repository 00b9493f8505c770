//! Histograms whose percentiles are shown only when enough samples back them, sequence checks, histogram logs.

use std::{
    fs::File,
    io::{BufWriter, Write},
    path::Path,
    time::{Duration, SystemTime},
};

use hdrhistogram::{
    Histogram,
    serialization::{
        V2DeflateSerializer,
        interval_log::{IntervalLogWriterBuilder, Tag},
    },
};
use serde::Serialize;

/// Largest time that a histogram tells from larger ones: an hour, in nanoseconds.
const LARGEST_NS: u64 = 3_600_000_000_000;
/// Decimal digits kept of each value.
const DIGITS: u8 = 3;
/// Samples that must lie beyond a percentile before it is shown.
const BACKING: u64 = 10;

/// Times in nanoseconds. Memory is fixed at the start; recording allocates nothing.
#[derive(Clone, Debug)]
pub struct Latencies {
    histogram: Histogram<u64>,
    min: u64,
    max: u64,
    sum: u128,
}

impl Default for Latencies {
    /// # Panics
    /// Never: the bounds are constants that the histogram accepts.
    fn default() -> Self {
        #[allow(clippy::expect_used, reason = "constant bounds")]
        let histogram = Histogram::new_with_bounds(1, LARGEST_NS, DIGITS).expect("constant bounds are good");
        Self {
            histogram,
            min: u64::MAX,
            max: 0,
            sum: 0,
        }
    }
}

impl Latencies {
    /// Records one time.
    #[inline]
    pub fn record(&mut self, ns: u64) {
        self.histogram.saturating_record(ns);
        self.min = self.min.min(ns);
        self.max = self.max.max(ns);
        self.sum += u128::from(ns);
    }

    /// Samples so far.
    pub fn count(&self) -> u64 {
        self.histogram.len()
    }

    /// Mean in nanoseconds; `None` without samples.
    pub fn mean(&self) -> Option<f64> {
        (self.count() > 0).then(|| self.sum as f64 / self.count() as f64)
    }

    /// The value that `q` (0 to 1) of the samples do not exceed, whether it is backed or not; 0 without samples.
    pub fn quantile(&self, q: f64) -> u64 {
        if self.count() == 0 {
            return 0;
        }
        self.histogram.value_at_quantile(q).clamp(self.min, self.max)
    }

    /// What can be said with these samples.
    pub fn percentiles(&self) -> Percentiles {
        let n = self.count();
        let any = |value| (n > 0).then_some(value);
        // `beyond` of ten thousand samples lie beyond the percentile.
        let backed = |beyond: u64| {
            (u128::from(n) * u128::from(beyond) >= u128::from(BACKING) * 10_000)
                .then(|| self.quantile(1.0 - beyond as f64 / 10_000.0))
        };
        Percentiles {
            min: any(self.min),
            p50: backed(5000),
            p90: backed(1000),
            p99: backed(100),
            p999: backed(10),
            p9999: backed(1),
            max: any(self.max),
        }
    }
}

/// Percentiles in nanoseconds; `None` where fewer than ten samples lie beyond.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Percentiles {
    /// Smallest sample.
    pub min: Option<u64>,
    /// Median.
    pub p50: Option<u64>,
    /// 90 %.
    pub p90: Option<u64>,
    /// 99 %.
    pub p99: Option<u64>,
    /// 99.9 %.
    pub p999: Option<u64>,
    /// 99.99 %.
    pub p9999: Option<u64>,
    /// Largest sample.
    pub max: Option<u64>,
}

impl Percentiles {
    /// Name and value of each, in order.
    pub fn rows(&self) -> [(&'static str, Option<u64>); 7] {
        [
            ("min", self.min),
            ("p50", self.p50),
            ("p90", self.p90),
            ("p99", self.p99),
            ("p99.9", self.p999),
            ("p99.99", self.p9999),
            ("max", self.max),
        ]
    }
}

/// Tells loss, duplicates and reordering from the sequence numbers that arrive.
#[derive(Clone, Debug)]
pub struct SequenceCheck {
    next: u64,
    /// One bit for each of the last [`WINDOW`] numbers below `next`: arrived.
    seen: Vec<u64>,
    /// Messages that arrived for the first time.
    pub received: u64,
    /// Messages that had arrived before.
    pub duplicated: u64,
    /// Messages that arrived after a later one. Those too late for the window count here, not as duplicates.
    pub out_of_order: u64,
}

/// How far back a duplicate is told from a late message.
const WINDOW: u64 = 1 << 16;

impl SequenceCheck {
    /// Expects `first`, then one more each time.
    pub fn new(first: u64) -> Self {
        Self {
            next: first,
            seen: vec![0; (WINDOW / 64) as usize],
            received: 0,
            duplicated: 0,
            out_of_order: 0,
        }
    }

    /// Takes up `seq`; true when it arrives for the first time.
    #[inline]
    pub fn observe(&mut self, seq: u64) -> bool {
        let ahead = seq.wrapping_sub(self.next);
        if ahead < 1 << 63 {
            // Numbers skipped have not arrived.
            for skipped in 0..ahead.min(WINDOW) {
                self.mark(self.next.wrapping_add(skipped), false);
            }
            if ahead > WINDOW {
                self.seen.fill(0);
            }
            self.mark(seq, true);
            self.next = seq.wrapping_add(1);
            self.received += 1;
            return true;
        }
        let behind = self.next.wrapping_sub(seq);
        if behind <= WINDOW && self.is_marked(seq) {
            self.duplicated += 1;
            return false;
        }
        self.out_of_order += 1;
        self.received += 1;
        self.mark(seq, behind <= WINDOW);
        true
    }

    #[inline]
    fn mark(&mut self, seq: u64, arrived: bool) {
        let at = seq % WINDOW;
        if let Some(word) = self.seen.get_mut((at / 64) as usize) {
            let bit = 1 << (at % 64);
            *word = if arrived { *word | bit } else { *word & !bit };
        }
    }

    fn is_marked(&self, seq: u64) -> bool {
        let at = seq % WINDOW;
        self.seen
            .get((at / 64) as usize)
            .is_some_and(|word| word >> (at % 64) & 1 == 1)
    }
}

/// Writes histograms as an HdrHistogram interval log (version 2, compressed): one line each, tagged with its name.
pub fn write_log(
    path: &Path,
    comment: &str,
    started: SystemTime,
    lasted: Duration,
    histograms: &[(&str, &Latencies)],
) -> std::io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    let mut serializer = V2DeflateSerializer::new();
    {
        let mut builder = IntervalLogWriterBuilder::new();
        for line in comment.lines() {
            builder.add_comment(line);
        }
        let mut log = builder
            .add_comment("values are nanoseconds")
            .with_start_time(started)
            .with_base_time(started)
            .with_max_value_divisor(1.0)
            .begin_log_with(&mut file, &mut serializer)?;
        for (name, latencies) in histograms {
            log.write_histogram(&latencies.histogram, Duration::ZERO, lasted, Tag::new(name))
                .map_err(|e| std::io::Error::other(format!("{e:?}")))?;
        }
    }
    file.flush()
}

#[cfg(test)]
mod tests {
    use hdrhistogram::serialization::{
        Deserializer,
        interval_log::{IntervalLogIterator, LogEntry},
    };

    use super::*;

    fn filled(n: u64) -> Latencies {
        let mut l = Latencies::default();
        (1..=n).for_each(|v| l.record(v));
        l
    }

    #[test]
    fn percentiles_need_ten_samples_beyond() {
        let shown = |n| filled(n).percentiles().rows().map(|(_, v)| v.is_some());
        assert_eq!(shown(0), [false; 7]);
        assert_eq!(shown(1), [true, false, false, false, false, false, true]);
        assert_eq!(shown(3), [true, false, false, false, false, false, true]);
        assert_eq!(shown(19), [true, false, false, false, false, false, true]);
        assert_eq!(shown(20), [true, true, false, false, false, false, true]);
        assert_eq!(shown(100), [true, true, true, false, false, false, true]);
        assert_eq!(shown(999), [true, true, true, false, false, false, true]);
        assert_eq!(shown(10_000), [true, true, true, true, true, false, true]);
        assert_eq!(shown(100_000), [true; 7]);
    }

    #[test]
    fn values_are_those_recorded() {
        let l = filled(100_000);
        let p = l.percentiles();
        assert_eq!((p.min, p.max), (Some(1), Some(100_000)));
        for (value, exact) in [
            (p.p50, 50_000.0),
            (p.p90, 90_000.0),
            (p.p99, 99_000.0),
            (p.p9999, 99_990.0),
        ] {
            let off = value.map_or(f64::NAN, |v| v as f64 / exact - 1.0);
            assert!(off.abs() < 0.001, "{value:?} for {exact}");
        }
        assert_eq!(l.mean(), Some(50_000.5));
        let mut huge = Latencies::default();
        huge.record(u64::MAX);
        huge.record(0);
        assert_eq!(
            (huge.percentiles().min, huge.percentiles().max),
            (Some(0), Some(u64::MAX))
        );
    }

    #[test]
    fn loss_duplicates_and_reordering_are_told_apart() {
        for first in [0, 5, u64::MAX - 3, (1 << 32) - 2] {
            let mut check = SequenceCheck::new(first);
            let news: Vec<bool> = [0u64, 1, 1, 4, 3, 3, 5, 2]
                .iter()
                .map(|n| check.observe(first.wrapping_add(*n)))
                .collect();
            assert_eq!(news, [true, true, false, true, true, false, true, true]);
            assert_eq!(
                (check.received, check.duplicated, check.out_of_order),
                (6, 2, 2),
                "{first}"
            );
        }
    }

    #[test]
    fn jumps_beyond_the_window_forget_what_was_before() {
        let mut check = SequenceCheck::new(0);
        (0..100).for_each(|n| assert!(check.observe(n)));
        assert!(check.observe(100 + 3 * WINDOW));
        assert!(check.observe(99 + 3 * WINDOW), "it was skipped");
        assert_eq!(
            (check.received, check.duplicated, check.out_of_order),
            (102, 0, 1)
        );
        assert!(!check.observe(100 + 3 * WINDOW));
        assert_eq!(check.duplicated, 1);
    }

    #[test]
    fn logs_can_be_read_back() {
        let path = std::env::temp_dir().join(format!("ntb-stats-{}.hlog", std::process::id()));
        let l = filled(1000);
        write_log(
            &path,
            "a comment",
            SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000),
            Duration::from_secs(2),
            &[("rtt", &l), ("service", &filled(5))],
        )
        .unwrap();
        let bytes = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(bytes.starts_with(b"#"), "{}", String::from_utf8_lossy(&bytes));
        let mut found = Vec::new();
        for entry in IntervalLogIterator::new(&bytes) {
            if let LogEntry::Interval(interval) = entry.unwrap() {
                let raw = base64(interval.encoded_histogram());
                let h: Histogram<u64> = Deserializer::new().deserialize(&mut raw.as_slice()).unwrap();
                found.push((
                    interval.tag().unwrap().as_str().to_owned(),
                    h.len(),
                    interval.max(),
                ));
            }
        }
        assert_eq!(found[0].0, "rtt");
        assert_eq!((found[0].1, found[1].1), (1000, 5));
        assert!((found[0].2 - 1000.0).abs() < 1.0);
    }

    /// RFC 4648, to read back what the library wrote.
    fn base64(text: &str) -> Vec<u8> {
        let value = |b: u8| match b {
            b'A'..=b'Z' => u32::from(b - b'A'),
            b'a'..=b'z' => u32::from(b - b'a') + 26,
            b'0'..=b'9' => u32::from(b - b'0') + 52,
            b'+' => 62,
            _ => 63,
        };
        let mut out = Vec::new();
        for chunk in text.trim_end_matches('=').as_bytes().chunks(4) {
            let word = chunk.iter().fold(0, |a, b| a << 6 | value(*b)) << (6 * (4 - chunk.len()));
            out.extend_from_slice(&word.to_be_bytes()[1..chunk.len()]);
        }
        out
    }
}
