//! Lines on their way into requests.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use ntb_mem::line::{LINE_BYTES, Line};

use super::{
    account::{Posted, RUNS_MAX, Run},
    send::Wire,
};
use crate::link::engine::{Order, StoreEngine};

/// Most bytes that are gathered into one request.
const BATCH_MOST: usize = 16 << 10;

/// An engine over one connection. Lines are gathered until the flush, or until a batch is full: lines that follow each other
/// make one run, and all runs leave with one doorbell. A message of one line is one request.
#[derive(Debug)]
pub(super) struct RdmaEngine {
    wire: Arc<Wire>,
    /// Gathered lines, and the runs that they make.
    bytes: Vec<u8>,
    runs: Vec<Run>,
    /// Bytes that make a batch full, and whether that is fixed.
    batch: usize,
    pinned: bool,
    stall: Duration,
}

impl RdmaEngine {
    pub(super) fn new(wire: Arc<Wire>, batch: Option<u32>, stall: Duration) -> Self {
        let most = BATCH_MOST.min(wire.longest);
        Self {
            bytes: Vec::with_capacity(most + LINE_BYTES),
            runs: Vec::with_capacity(RUNS_MAX),
            batch: batch
                .map_or(wire.inline, |bytes| bytes as usize)
                .clamp(LINE_BYTES, most),
            pinned: batch.is_some(),
            stall,
            wire,
        }
    }

    /// Adds to what is gathered; it fits.
    fn gather(&mut self, line: u64, bytes: &[u8]) {
        let padded = bytes.len().next_multiple_of(LINE_BYTES);
        let from = self.bytes.len();
        if let Some(last) = self.runs.last_mut() {
            if last.line + (last.bytes / LINE_BYTES) as u64 == line {
                last.bytes += padded;
                self.append(bytes, padded);
                return;
            }
            // The line that completes a message comes last and lies first: one request carries it too where it is short,
            // unless the order of the lines is what makes it complete.
            if !self.wire.strict
                && line + 1 == last.line
                && padded == LINE_BYTES
                && last.bytes + padded <= self.wire.inline
            {
                let at = last.from;
                last.line = line;
                last.bytes += padded;
                self.append(bytes, padded);
                if let Some(run) = self.bytes.get_mut(at..) {
                    run.rotate_right(padded);
                }
                return;
            }
        }
        self.append(bytes, padded);
        self.runs.push(Run {
            line,
            from,
            bytes: padded,
        });
    }

    fn append(&mut self, bytes: &[u8], padded: usize) {
        self.bytes.extend_from_slice(bytes);
        self.bytes.resize(self.bytes.len() + padded - bytes.len(), 0);
    }

    fn has_room(&self, bytes: usize) -> bool {
        self.bytes.len() + bytes <= self.batch && self.runs.len() < self.wire.runs_most
    }

    /// Posts what is gathered.
    fn send(&mut self) {
        if self.runs.is_empty() {
            return;
        }
        let busy = post(&self.wire, &self.bytes, &self.runs, self.stall);
        self.bytes.clear();
        self.runs.clear();
        if self.pinned {
            return;
        }
        // While requests wait for the wire, fewer and larger ones are worth more than leaving early.
        match busy {
            32.. => self.batch = (self.batch * 2).min(BATCH_MOST.min(self.wire.longest)),
            0..8 => self.batch = (self.batch / 2).max(self.wire.inline.max(LINE_BYTES)),
            _ => {}
        }
    }
}

/// Posts runs, waiting for room where there is none. Returns how full the queue is then, in 64ths.
fn post(wire: &Wire, bytes: &[u8], runs: &[Run], stall: Duration) -> u32 {
    let mut full_since: Option<Instant> = None;
    loop {
        match wire.post_runs(bytes, runs) {
            Posted::Done { busy } => return busy,
            Posted::Ended => return 0,
            // A peer that pauses is not dead: the beats of the session decide that.
            Posted::Unanswered => full_since = None,
            Posted::Full => {
                let since = full_since.get_or_insert_with(Instant::now);
                if since.elapsed() > stall {
                    wire.fail("the device completes nothing any more");
                    return 0;
                }
            }
        }
        std::thread::yield_now();
    }
}

impl StoreEngine for RdmaEngine {
    fn order(&self) -> Order {
        match self.wire.strict {
            true => Order::Ordered,
            false => Order::Relaxed,
        }
    }

    fn lines(&self) -> u64 {
        self.wire.lines
    }

    fn put(&mut self, line: u64, content: &Line) {
        assert!(line < self.wire.lines, "line outside the peer's memory");
        // The line that completes what is gathered leaves with it.
        let completes = self.runs.last().is_some_and(|last| line + 1 == last.line);
        let room = match completes {
            true => self.runs.len() < self.wire.runs_most,
            false => self.has_room(LINE_BYTES),
        };
        if !room {
            self.send();
        }
        self.gather(line, &content.to_bytes());
    }

    fn put_bytes(&mut self, line: u64, bytes: &[u8]) {
        let lines = bytes.len().div_ceil(LINE_BYTES) as u64;
        let end = line.checked_add(lines);
        assert!(
            end.is_some_and(|end| end <= self.wire.lines),
            "lines outside the peer's memory"
        );
        if !self.has_room(bytes.len().next_multiple_of(LINE_BYTES)) {
            self.send();
        }
        if bytes.len() < BATCH_MOST.min(self.wire.longest) / 2 {
            return self.gather(line, bytes);
        }
        // Straight into the mirror.
        self.send();
        let longest = self.wire.longest / LINE_BYTES * LINE_BYTES;
        for (piece, from) in bytes.chunks(longest).zip((0..).step_by(longest)) {
            let run = Run {
                line: line + (from / LINE_BYTES) as u64,
                from: 0,
                bytes: piece.len().next_multiple_of(LINE_BYTES),
            };
            post(&self.wire, piece, &[run], self.stall);
        }
    }

    fn barrier(&mut self) {}

    fn flush(&mut self) {
        self.send();
    }
}
