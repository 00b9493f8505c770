//! The rows of the table, measured in interleaved blocks.

use std::{sync::Arc, time::Instant};

use ntb_mem::region::Region;
use ntb_ring::channel::Sender;
use zerocopy::IntoBytes;

use crate::{
    child::{self, BATCH, CPUS, Ends, Job, LONG, spin},
    floor::{Floor, runs},
    peers,
};

/// A row: figures of every block.
struct Row {
    name: String,
    unit: &'static str,
    /// What it is divided by.
    against: &'static str,
    goal: &'static str,
    value: Vec<f64>,
    yardstick: Vec<f64>,
}

impl Row {
    fn ratio(&self) -> (f64, f64, f64) {
        let mut ratios: Vec<f64> = self
            .value
            .iter()
            .zip(&self.yardstick)
            .map(|(v, y)| v / y)
            .collect();
        ratios.sort_by(f64::total_cmp);
        (ratios[0], median(&ratios), ratios[ratios.len() - 1])
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

struct Bench {
    ends: Ends,
    region: Arc<Region>,
    floor: Floor,
    turns: Floor,
    rows: Vec<Row>,
    scale: u64,
}

pub(crate) fn run(blocks: usize, quick: bool, json: bool) -> Result<(), Box<dyn std::error::Error>> {
    let region = child::shared()?;
    let floor = Floor::new(&region).ok_or("the shared memory is too small")?;
    let turns = Floor::turns(&region).ok_or("the shared memory is too small")?;
    let name = format!("soft:bench-{}", std::process::id());
    let mut far = child::start(&name, &region)?;
    child::pin(CPUS[0]);
    let ends = Ends::open(&name)?;
    let scale = if quick { 1 } else { 10 };
    let mut bench = Bench {
        ends,
        region,
        floor,
        turns,
        rows: Vec::new(),
        scale,
    };
    bench.block()?; // warm-up: first touches, frequency
    bench.rows.clear();
    for _ in 0..blocks {
        bench.block()?;
    }
    bench.ends.control.0.send(
        Job {
            what: child::END,
            size: 0,
            count: 0,
        }
        .as_bytes(),
        LONG,
    )?;
    far.wait()?;
    if json {
        bench.print_json();
    } else {
        bench.print();
    }
    Ok(())
}

impl Bench {
    /// One block of every row.
    fn block(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        let n = 10_000 * self.scale;
        let mut at = 0;
        for size in [16, 48, 64, 256, 4096] {
            let goal = if size == 48 { "bar 1.25, aim 1.15" } else { "" };
            self.bracketed(&mut at, &format!("round trip {size} B"), goal, |b| {
                b.round_trip(child::ECHO, size, n)
            })?;
        }
        for size in [16, 48, 64, 256, 4096] {
            let goal = if size == 48 { "aim 1.4" } else { "" };
            self.bracketed(&mut at, &format!("round trip {size} B, checked"), goal, |b| {
                b.round_trip(child::ECHO_CHECKED, size, n)
            })?;
        }
        self.bracketed(&mut at, "bare, another line each time", "", |b| {
            Ok(b.job(child::TURNS, 64, n, |b| b.turns.measure(n))?.0)
        })?;
        self.bracketed(&mut at, "rtrb round trip 48 B (threads)", "", |_| {
            Ok(peers::rtrb_round_trip::<48>(n))
        })?;
        let ring = self.round_trip(child::ECHO, 48, n)?;
        let rtrb = peers::rtrb_round_trip::<48>(n);
        let again = self.round_trip(child::ECHO, 48, n)?;
        self.note(
            &mut at,
            "round trip 48 B",
            "ns",
            "rtrb",
            "",
            (f64::midpoint(ring, again), rtrb),
        );
        self.rates::<16>(&mut at, "0.7 of chunks")?;
        self.rates::<32>(&mut at, "0.7 of chunks")?;
        self.rates::<48>(&mut at, "0.7 of chunks")?;
        self.rates::<64>(&mut at, "")?;
        for (size, count) in [(64 << 10, 400 * self.scale), (1 << 20, 30 * self.scale)] {
            let copy = self.copy(size, count)?;
            let ring = self.bulk(size, count)?;
            let again = self.copy(size, count)?;
            let gigabytes = |ns: f64| size as f64 / ns;
            let yardstick = gigabytes(f64::midpoint(copy, again));
            self.note(
                &mut at,
                &format!("bandwidth {} KiB", size >> 10),
                "GB/s",
                "copy",
                "aim 0.9",
                (gigabytes(ring), yardstick),
            );
        }
        Ok(())
    }

    fn note(
        &mut self,
        at: &mut usize,
        name: &str,
        unit: &'static str,
        against: &'static str,
        goal: &'static str,
        (value, yardstick): (f64, f64),
    ) {
        if self.rows.len() == *at {
            self.rows.push(Row {
                name: name.to_owned(),
                unit,
                against,
                goal,
                value: Vec::new(),
                yardstick: Vec::new(),
            });
        }
        self.rows[*at].value.push(value);
        self.rows[*at].yardstick.push(yardstick);
        *at += 1;
    }

    /// A latency between two floors.
    fn bracketed(
        &mut self,
        at: &mut usize,
        name: &str,
        goal: &'static str,
        measure: impl FnOnce(&mut Self) -> Result<f64, Box<dyn std::error::Error>>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let n = 5_000 * self.scale;
        let before = self.measure_floor(n)?;
        let value = measure(self)?;
        let after = self.measure_floor(n)?;
        self.note(
            at,
            name,
            "ns",
            "floor",
            goal,
            (value, f64::midpoint(before, after)),
        );
        Ok(())
    }

    /// Has the far side do `what`, does `near` meanwhile, and says when the far side was done.
    fn job<T>(
        &mut self,
        what: u64,
        size: usize,
        count: u64,
        near: impl FnOnce(&mut Self) -> T,
    ) -> Result<(T, Instant), Box<dyn std::error::Error>> {
        let job = Job {
            what,
            size: size as u64,
            count,
        };
        let mut word = [0; 16];
        self.ends.control.0.send(job.as_bytes(), LONG)?;
        self.ends.control.1.recv(&mut word, LONG)?;
        let result = near(self);
        spin(|| self.ends.control.1.try_recv(&mut word).ok());
        Ok((result, Instant::now()))
    }

    fn measure_floor(&mut self, n: u64) -> Result<f64, Box<dyn std::error::Error>> {
        Ok(self.job(child::FLOOR, 64, n, |b| b.floor.measure(n))?.0)
    }

    fn round_trip(&mut self, what: u64, size: usize, n: u64) -> Result<f64, Box<dyn std::error::Error>> {
        let n = if size > 1000 { n / 4 } else { n };
        self.job(what, size, n, |b| {
            let (tx, rx) = if what == child::ECHO {
                &mut b.ends.ping[child::ping(size)]
            } else {
                &mut b.ends.checked[child::ping(size)]
            };
            let mut buf = vec![7; size];
            runs(n, || {
                send(tx, &buf);
                spin(|| rx.try_recv(&mut buf).ok());
            })
        })
        .map(|(ns, _)| ns)
    }

    /// One-way rates of `N` bytes in million messages a second: single and batched, against rtrb single and in chunks.
    fn rates<const N: usize>(
        &mut self,
        at: &mut usize,
        goal: &'static str,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let n = 40_000 * self.scale;
        let rate = |ns: f64| 1000.0 / ns;
        let rtrb = rate(peers::rtrb_single::<N>(n));
        let single = rate(self.stream(N, n)?);
        let chunks = rate(peers::rtrb_chunks::<N>(n));
        let batched = rate(self.batches(N, n)?);
        self.note(
            at,
            &format!("one way {N} B"),
            "M/s",
            "rtrb single",
            "",
            (single, rtrb),
        );
        self.note(
            at,
            &format!("one way {N} B, batched"),
            "M/s",
            "rtrb single",
            "aim 1.2",
            (batched, rtrb),
        );
        self.note(
            at,
            &format!("one way {N} B, batched"),
            "M/s",
            "rtrb chunks",
            goal,
            (batched, chunks),
        );
        Ok(())
    }

    fn stream(&mut self, size: usize, n: u64) -> Result<f64, Box<dyn std::error::Error>> {
        let (start, end) = self.job(child::DRAIN, size, n, |b| {
            let buf = vec![7; size];
            let start = Instant::now();
            for _ in 0..n {
                send(&mut b.ends.plain.0, &buf);
            }
            start
        })?;
        Ok((end - start).as_nanos() as f64 / n as f64)
    }

    fn batches(&mut self, size: usize, n: u64) -> Result<f64, Box<dyn std::error::Error>> {
        let (start, end) = self.job(child::DRAIN_BATCHES, size, n, |b| {
            let buf = vec![7; size * BATCH];
            let start = Instant::now();
            let mut sent = 0;
            while sent < n {
                let part = &buf[..size * BATCH.min((n - sent) as usize)];
                sent += spin(|| b.ends.plain.0.try_send_packed(size, part).ok()) as u64;
            }
            start
        })?;
        Ok((end - start).as_nanos() as f64 / n as f64)
    }

    fn bulk(&mut self, size: usize, n: u64) -> Result<f64, Box<dyn std::error::Error>> {
        let (start, end) = self.job(child::DRAIN_BULK, size, n, |b| {
            let buf = vec![7; size];
            let start = Instant::now();
            for _ in 0..n {
                send(&mut b.ends.bulk.0, &buf);
            }
            start
        })?;
        Ok((end - start).as_nanos() as f64 / n as f64)
    }

    fn copy(&mut self, size: usize, n: u64) -> Result<f64, Box<dyn std::error::Error>> {
        let buf = vec![7; size];
        Ok(self
            .job(child::COPY, size, n, |b| peers::copy_in(&b.region, &buf, n))?
            .0)
    }

    fn print(&self) {
        println!(
            "two processes on processors {CPUS:?}, pages of {} bytes, {} interleaved blocks; medians, and the ratio's range",
            self.ends.page_bytes,
            self.rows.first().map_or(0, |r| r.value.len())
        );
        println!(
            "{:<34} {:>10} {:>14} {:>8}  {:<17} goal",
            "row", "value", "yardstick", "ratio", "(min to max)"
        );
        for row in &self.rows {
            let (low, mid, high) = row.ratio();
            println!(
                "{:<34} {:>10} {:>14} {:>8.2}  ({low:.2} to {high:.2}) of {:<12} {}",
                row.name,
                format!("{:.1} {}", median(&row.value), row.unit),
                format!("{:.1} {}", median(&row.yardstick), row.unit),
                mid,
                row.against,
                row.goal
            );
        }
    }

    fn print_json(&self) {
        let rows: Vec<_> = self
            .rows
            .iter()
            .map(|row| {
                let (low, mid, high) = row.ratio();
                serde_json::json!({
                    "row": row.name, "unit": row.unit, "median": median(&row.value), "against": row.against,
                    "yardstick_median": median(&row.yardstick), "ratio": mid, "ratio_min": low, "ratio_max": high,
                    "goal": row.goal,
                })
            })
            .collect();
        println!(
            "{}",
            serde_json::json!({ "benchmark": "ring", "page_bytes": self.ends.page_bytes, "rows": rows })
        );
    }
}

#[inline(always)]
fn send(tx: &mut Sender, bytes: &[u8]) {
    spin(|| tx.try_send(bytes).ok());
}
