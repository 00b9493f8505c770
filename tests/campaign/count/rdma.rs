//! Counts work requests per message of links over RDMA, by the link's own account of what it has posted.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use ntb_mem::line::Line;
use ntb_ring::{
    channel::{Connection, Options},
    link::{
        Link, Wrapped,
        engine::{Engine, Order, StoreEngine},
        rdma::{RdmaLink, RdmaOptions, SendCounts, Tally},
    },
    session::ChannelSpec,
    wire::{layout::CHANNELS_FIRST_LINE, page},
};
use serde_json::json;

use super::{Args, Ends, WATCHDOG, exchange};
use crate::{Report, Rng, venue::Venue};

/// What an engine was given: lines of rings, and lines beside them (credits, arms, beats).
#[derive(Debug, Default)]
struct Puts {
    ring: AtomicU64,
    beside: AtomicU64,
}

#[derive(Debug)]
struct Counting {
    inner: Engine,
    puts: Arc<Puts>,
    ring_lines: u64,
}

impl Counting {
    fn note(&self, line: u64) {
        let is_ring = line
            .checked_sub(CHANNELS_FIRST_LINE)
            .is_some_and(|l| l % (page::PAGE_LINES + self.ring_lines) >= page::PAGE_LINES);
        let count = if is_ring {
            &self.puts.ring
        } else {
            &self.puts.beside
        };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

impl StoreEngine for Counting {
    fn order(&self) -> Order {
        self.inner.order()
    }
    fn lines(&self) -> u64 {
        self.inner.lines()
    }
    fn put(&mut self, line: u64, content: &Line) {
        self.note(line);
        self.inner.put(line, content);
    }
    fn put_bytes(&mut self, line: u64, bytes: &[u8]) {
        self.note(line);
        self.inner.put_bytes(line, bytes);
    }
    fn barrier(&mut self) {
        self.inner.barrier();
    }
    fn flush(&mut self) {
        self.inner.flush();
    }
}

/// One side of the link, opened and counted.
struct Side {
    connection: Connection,
    tally: Tally,
    puts: Arc<Puts>,
}

impl Side {
    fn open(venue: &Venue, args: &Args) -> Result<Self, String> {
        let window_bytes =
            ((CHANNELS_FIRST_LINE + page::PAGE_LINES + args.ring) * 64 + (1 << 16)).next_multiple_of(4096);
        let (port, _) = venue.meeting().ok_or("nobody meets at a port here")?;
        let secret = venue.options(window_bytes)?.secret;
        let options = RdmaOptions {
            window_bytes,
            ..RdmaOptions::default()
        };
        let link = RdmaLink::open("127.0.0.1", port, &secret, &options).map_err(|e| e.to_string())?;
        let (tally, puts, ring_lines) = (link.tally(), Arc::new(Puts::default()), args.ring);
        let (order, counted) = (link.order(), Arc::clone(&puts));
        let hook = move |inner| {
            Engine::Other(Box::new(Counting {
                inner,
                puts: Arc::clone(&counted),
                ring_lines,
            }))
        };
        let link = Wrapped::new(Box::new(link), order, Box::new(hook));
        let connection = Connection::open(Box::new(link), &Options::default()).map_err(|e| e.to_string())?;
        Ok(Self {
            connection,
            tally,
            puts,
        })
    }

    fn channel(&self, args: &Args) -> Result<Ends, String> {
        let spec = ChannelSpec {
            ring_lines: args.ring,
            ..ChannelSpec::default()
        };
        self.connection.channel("count", spec).map_err(|e| e.to_string())
    }

    /// Lines of rings, lines beside them, and what the link has posted.
    fn now(&self) -> (u64, u64, SendCounts) {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (
            read(&self.puts.ring),
            read(&self.puts.beside),
            self.tally.counts(),
        )
    }
}

/// Counts, and holds the bar: a message of up to 48 bytes is one request that carries it, and nobody waits for a
/// completion where the ring is too short to fill the send queue.
pub(super) fn count(args: &Args, report: &mut Report) -> Result<(), String> {
    let venue = Venue::new("rdma", &mut Rng::new(args.seed))?;
    let sides = [Side::open(&venue, args)?, Side::open(&venue, args)?];
    let (mut near, mut far) = (sides[0].channel(args)?, sides[1].channel(args)?);
    near.0.wait_connected(WATCHDOG).map_err(|e| e.to_string())?;
    far.0.wait_connected(WATCHDOG).map_err(|e| e.to_string())?;
    let before = [sides[0].now(), sides[1].now()];
    let received = exchange(args, &mut near, &mut far)?;
    let after = [sides[0].now(), sides[1].now()];
    let depth = u64::from(RdmaOptions::default().depth);
    let mut found = Vec::new();
    for (way, (b, a)) in ["forward", "back"].into_iter().zip(before.iter().zip(&after)) {
        let (ring, beside) = (a.0 - b.0, a.1 - b.1);
        let (sent, sent_before) = (&a.2, &b.2);
        let lines = sent.lines - sent_before.lines;
        let waits = sent.waits - sent_before.waits;
        let carries_messages = way == "forward" || args.pingpong;
        let messages = if carries_messages { received } else { 0 };
        // What is beside the rings is a request each, or less where it left with another.
        let per_message = lines.saturating_sub(beside) as f64 / messages.max(1) as f64;
        found.push(json!({
            "way": way,
            "ring_lines_stored": ring,
            "lines_beside": beside,
            "requests": sent.requests - sent_before.requests,
            "requests_for_lines": lines,
            "requests_per_message": if carries_messages { per_message.into() } else { serde_json::Value::Null },
            "inline": sent.inline - sent_before.inline,
            "signalled": sent.signalled - sent_before.signalled,
            "waits": waits,
            "most_under_way": sent.most_under_way,
        }));
        if carries_messages && args.size <= 48 && args.batch == 1 {
            if lines > messages + beside {
                report.violation(format!(
                    "{way}: {lines} requests for {messages} messages and {beside} lines beside them"
                ));
            }
            if sent.inline - sent_before.inline < messages {
                report.violation(format!(
                    "{way}: not every message was carried by its request itself"
                ));
            }
            if ring != messages {
                report.violation(format!("{way}: {ring} lines stored for {messages} messages"));
            }
        }
        if (args.pingpong || args.ring <= depth / 4) && waits > 0 {
            report.violation(format!("{way}: {waits} times a sender waited for a completion"));
        }
        if sent.most_under_way > depth {
            report.violation(format!(
                "{way}: {} requests under way, and {depth} places",
                sent.most_under_way
            ));
        }
    }
    if received != args.messages {
        report.violation(format!("{received} of {} messages received", args.messages));
    }
    report.set("ways", found);
    Ok(())
}
