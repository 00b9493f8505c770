//! Counts what would leave a processor per message: the ring's real stores, put through a model of the write-combining
//! buffers, while the messages flow and are received.

mod rdma;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use ntb_ring::{
    channel::{Connection, Options, Receiver, RecvFailure, SendFailure, Sender},
    link::{
        Link, Wrapped,
        combining::{Combining, CombiningOptions, StorePath, Traffic},
        pair::{PairOptions, pair},
    },
    session::ChannelSpec,
    wire::{layout::CHANNELS_FIRST_LINE, page},
};
use serde_json::{Value, json};

use crate::{Report, Rng, venue::Venue};

const WATCHDOG: Duration = Duration::from_secs(30);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// A stream in one direction (the default).
    #[arg(long, conflicts_with = "pingpong")]
    oneway: bool,
    /// One message each way in turn.
    #[arg(long)]
    pingpong: bool,
    /// Seed of early evictions.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Store path to count; all of them if not given.
    #[arg(long, value_parser = ["wc", "movdir64b", "uc8"])]
    engine: Option<String>,
    /// Bytes of a message.
    #[arg(long, default_value_t = 48, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    size: u64,
    /// Messages packed into one send; 1 sends each by itself.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=4096))]
    batch: u64,
    /// Messages.
    #[arg(long, default_value_t = 200_000, value_parser = clap::value_parser!(u64).range(1..=10_000_000_000))]
    messages: u64,
    /// Lines of the ring, a power of two.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(4..=1 << 20))]
    ring: u64,
    /// Chance of an early eviction per store, in parts per million.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    early_eviction: u32,
    /// Transport under test.
    #[arg(long, default_value = "pair", value_parser = ["pair", "emu", "tcp", "rdma"])]
    link: String,
    /// Accepted for symmetry: the result is always one JSON object.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<Report, String> {
    if !args.ring.is_power_of_two() {
        return Err(format!(
            "--ring {}: a power of two from 4 to 1048576 is needed",
            args.ring
        ));
    }
    let mut report = Report::new("count", args.seed);
    report.set("pattern", if args.pingpong { "pingpong" } else { "oneway" });
    report.set("link", args.link.clone());
    report.set("size", args.size);
    report.set("batch", args.batch);
    report.set("ring_lines", args.ring);
    report.set("messages", args.messages);
    if args.link == "rdma" {
        rdma::count(args, &mut report)?;
        return Ok(report);
    }
    let paths = [
        StorePath::Combining8,
        StorePath::Combining64,
        StorePath::Direct64,
        StorePath::Uncached8,
    ];
    let mut engines = Vec::new();
    let mut reads = 0;
    for path in paths {
        if args.engine.as_deref().is_none_or(|e| path.name().starts_with(e)) {
            let counted = count(args, path)?;
            judge(args, path, &counted, &mut report);
            reads += counted.reads;
            engines.push(counted.json(args, path));
        }
    }
    // Counted where a bridge carries the messages; no engine has an operation that loads.
    report.set("remote_reads", reads);
    report.set("engines", engines);
    // Builds with assertions count every load of a peer's memory. Without them there is only the reason why there can be
    // none: an engine has no operation that loads.
    let reads = ntb_mem::region::remote_loads();
    report.set("remote_reads", reads.unwrap_or(0));
    report.set(
        "remote_reads_by",
        if reads.is_some() {
            "counted"
        } else {
            "construction: engines cannot load"
        },
    );
    if let Some(n @ 1..) = reads {
        report.violation(format!("{n} loads of the peer's memory"));
    }
    Ok(report)
}

/// What both directions took for the messages of one run, beats of the session included.
struct Counted {
    forward: Traffic,
    back: Traffic,
    received: u64,
    /// Loads that crossed a bridge.
    reads: u64,
    /// Writes of both directions since the start, by the model and by the bridge.
    writes: Option<([u64; 2], [u64; 2])>,
}

impl Counted {
    fn per_message(&self, what: impl Fn(&Traffic) -> u64) -> f64 {
        (what(&self.forward) + what(&self.back)) as f64 / self.received as f64
    }

    fn json(&self, args: &Args, path: StorePath) -> Value {
        let messages = self.received * if args.pingpong { 2 } else { 1 };
        let per = |what: u64| what as f64 / messages as f64;
        json!({
            "engine": path.name(),
            "received": self.received,
            "tlps_per_message": per(self.forward.tlps + self.back.tlps),
            "bytes_per_message": per(self.forward.wire_bytes + self.back.wire_bytes),
            "stores_per_message": per(self.forward.stores + self.back.stores),
            "fences_per_message": per(self.forward.fences + self.back.fences),
            "credits_per_message": per(self.forward.credits + self.back.credits),
            "partial_evictions": self.forward.partial + self.back.partial,
        })
    }
}

/// The bars of the project: one posted write a small message, and few credits.
fn judge(args: &Args, path: StorePath, counted: &Counted, report: &mut Report) {
    let ways = if args.pingpong { 2.0 } else { 1.0 };
    let tlps = counted.per_message(|t| t.tlps) / ways;
    let bar = if path == StorePath::Uncached8 { 8.4 } else { 1.05 };
    if !args.pingpong && args.size <= 48 && args.ring >= 256 && args.early_eviction <= 100 && tlps > bar {
        report.violation(format!(
            "{}: {tlps:.3} TLPs a message, at most {bar} are allowed",
            path.name()
        ));
    }
    let credits = counted.per_message(|t| t.credits) / ways;
    if args.size <= 48 && args.ring >= 256 && credits * 64.0 >= 1.0 {
        report.violation(format!(
            "{}: {credits:.4} credits a message, one in 64 is too many",
            path.name()
        ));
    }
    if counted.reads != 0 {
        report.violation(format!(
            "{}: {} loads crossed the link",
            path.name(),
            counted.reads
        ));
    }
    if let Some((model, bridge)) = counted.writes
        && model != bridge
    {
        report.violation(format!(
            "{}: the model counts {model:?} writes, the bridge {bridge:?}",
            path.name()
        ));
    }
    if counted.received != args.messages {
        report.violation(format!(
            "{}: {} of {} messages received",
            path.name(),
            counted.received,
            args.messages
        ));
    }
}

type Ends = (Sender, Receiver);

fn count(args: &Args, path: StorePath) -> Result<Counted, String> {
    let ring = args.ring;
    let is_credit = move |line: u64| {
        line.checked_sub(CHANNELS_FIRST_LINE)
            .is_some_and(|l| l % (page::PAGE_LINES + ring) == page::CREDIT)
    };
    let model = |seed| {
        let mut options = CombiningOptions::new(path, seed);
        options.early_eviction = args.early_eviction;
        options.is_credit = Some(Arc::new(is_credit));
        Combining::new(options)
    };
    let (forward, back) = (model(args.seed), model(args.seed.wrapping_add(1)));
    let window_bytes =
        ((CHANNELS_FIRST_LINE + page::PAGE_LINES + ring) * 64 + (1 << 16)).next_multiple_of(4096);
    let (a, b, venue): (Box<dyn Link>, Box<dyn Link>, _) = if args.link != "pair" {
        let venue = Venue::new(&args.link, &mut Rng::new(args.seed))?;
        (
            venue.open(0, window_bytes)?,
            venue.open(1, window_bytes)?,
            Some(venue),
        )
    } else {
        let (a, b) = pair(&PairOptions {
            window_bytes,
            ..PairOptions::default()
        })
        .map_err(|e| e.to_string())?;
        (Box::new(a), Box::new(b), None)
    };
    let wrap = |link: Box<dyn Link>, model: &Combining| -> Result<Connection, String> {
        let order = model.order(link.order());
        Connection::open(
            Box::new(Wrapped::new(link, order, model.hook())),
            &Options::default(),
        )
        .map_err(|e| e.to_string())
    };
    let (a, b) = (wrap(a, &forward)?, wrap(b, &back)?);
    let spec = ChannelSpec {
        ring_lines: ring,
        ..ChannelSpec::default()
    };
    let mut near = a.channel("count", spec).map_err(|e| e.to_string())?;
    let mut far = b.channel("count", spec).map_err(|e| e.to_string())?;
    near.0.wait_connected(WATCHDOG).map_err(|e| e.to_string())?;
    far.0.wait_connected(WATCHDOG).map_err(|e| e.to_string())?;
    if near.0.max_message().is_some_and(|max| max < args.size) {
        return Err(format!(
            "--size {}: a ring of {ring} lines takes less; give a larger --ring",
            args.size
        ));
    }
    let reads = |venue: &Option<Venue>| {
        venue
            .as_ref()
            .and_then(Venue::counts)
            .map_or(0, |(_, reads)| reads)
    };
    let reads_before = reads(&venue);
    let before = (forward.traffic(), back.traffic());
    let received = exchange(args, &mut near, &mut far)?;
    let after = (forward.traffic(), back.traffic());
    let reads = reads(&venue) - reads_before;
    drop((near, far, a, b)); // nothing is under way from here on
    let writes = venue
        .as_ref()
        .and_then(Venue::counts)
        .map(|(counted, _)| ([&forward, &back].map(|model| model.traffic().tlps), counted));
    Ok(Counted {
        reads,
        writes,
        forward: minus(after.0, before.0),
        back: minus(after.1, before.1),
        received,
    })
}

/// Sends all messages from the near end to the far one, and back in a ping-pong. How many the far end has received.
fn exchange(args: &Args, near: &mut Ends, far: &mut Ends) -> Result<u64, String> {
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            if args.pingpong {
                echo(far, args)
            } else {
                drain(&mut far.1, args)
            }
        });
        let sent = if args.pingpong {
            ask(near, args)
        } else {
            stream(&mut near.0, args)
        };
        let received = other.join().map_err(|_| "the far side panicked".to_owned())?;
        sent.and(received)
    })
}

fn minus(a: Traffic, b: Traffic) -> Traffic {
    Traffic {
        lines: a.lines - b.lines,
        stores: a.stores - b.stores,
        tlps: a.tlps - b.tlps,
        wire_bytes: a.wire_bytes - b.wire_bytes,
        fences: a.fences - b.fences,
        partial: a.partial - b.partial,
        credits: a.credits - b.credits,
    }
}

/// Message `i`, as sender and receiver compute it.
fn content(buf: &mut [u8], i: u64) {
    for (at, byte) in buf.iter_mut().enumerate() {
        *byte = (i as usize).wrapping_mul(31).wrapping_add(at) as u8;
    }
}

/// Repeats until it moves, under a watchdog.
fn until<T>(mut f: impl FnMut() -> Result<Option<T>, String>) -> Result<T, String> {
    let start = Instant::now();
    loop {
        for _ in 0..1000 {
            if let Some(t) = f()? {
                return Ok(t);
            }
        }
        if start.elapsed() > WATCHDOG {
            return Err("nothing moves any more".to_owned());
        }
        std::thread::yield_now();
    }
}

fn send(tx: &mut Sender, bytes: &[u8]) -> Result<(), String> {
    until(|| match tx.try_send(bytes) {
        Ok(_) => Ok(Some(())),
        Err(SendFailure::Full { .. }) => Ok(None),
        Err(e) => Err(e.to_string()),
    })
}

fn recv(rx: &mut Receiver, buf: &mut [u8], i: u64) -> Result<(), String> {
    let got = until(|| match rx.try_recv(buf) {
        Ok(got) => Ok(Some(got)),
        Err(RecvFailure::Empty) => Ok(None),
        Err(e) => Err(e.to_string()),
    })?;
    let mut expected = vec![0; buf.len()];
    content(&mut expected, i);
    if got.seq != i || buf[..got.len] != expected {
        return Err(format!("message {i} arrived as number {} or altered", got.seq));
    }
    Ok(())
}

fn stream(tx: &mut Sender, args: &Args) -> Result<u64, String> {
    let size = args.size as usize;
    let mut buf = vec![0; size * args.batch as usize];
    let mut i = 0;
    while i < args.messages {
        let n = args.batch.min(args.messages - i) as usize;
        for (k, message) in buf.chunks_mut(size).take(n).enumerate() {
            content(message, i + k as u64);
        }
        if args.batch == 1 {
            send(tx, &buf)?;
        } else {
            let mut done = 0;
            while done < n {
                done += until(|| match tx.try_send_packed(size, &buf[done * size..n * size]) {
                    Ok(k) => Ok(Some(k)),
                    Err(SendFailure::Full { .. }) => Ok(None),
                    Err(e) => Err(e.to_string()),
                })?;
            }
        }
        i += n as u64;
    }
    Ok(i)
}

fn drain(rx: &mut Receiver, args: &Args) -> Result<u64, String> {
    let mut buf = vec![0; args.size as usize];
    for i in 0..args.messages {
        recv(rx, &mut buf, i)?;
    }
    Ok(args.messages)
}

fn ask((tx, rx): &mut Ends, args: &Args) -> Result<u64, String> {
    let mut buf = vec![0; args.size as usize];
    for i in 0..args.messages {
        content(&mut buf, i);
        send(tx, &buf)?;
        recv(rx, &mut buf, i)?;
    }
    Ok(args.messages)
}

fn echo((tx, rx): &mut Ends, args: &Args) -> Result<u64, String> {
    let mut buf = vec![0; args.size as usize];
    for i in 0..args.messages {
        recv(rx, &mut buf, i)?;
        send(tx, &buf)?;
    }
    Ok(args.messages)
}
