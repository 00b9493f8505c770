//! The account of a connection's requests.
//!
//! Requests are numbered from 1. A device gives the place of an unsignalled request back only when a later signalled one has
//! been taken from the completion queue, and fails posts with "no memory" when there is none left; software devices give
//! places back by themselves and so hide a program that forgets. So nobody's word is taken: at most `depth` requests are
//! posted beyond the last one whose completion was taken, every quarter of the depth one is signalled, and so is one for
//! every quarter of the mirror. Whatever is full, something signalled is then always under way.
//!
//! Receives are accounted for too: a message that finds none posted ends a connection on iWARP and stalls it elsewhere. The
//! peer says by a write how many it has posted again.

use std::sync::{Arc, atomic::Ordering};

use ntb_mem::{line::LINE_BYTES, region::View};

use super::{
    mirror::Mirror,
    send::Parts,
    verbs::{Piece, Queue, Request, Sent, Verb, status_name},
};

/// The peer's registered memory, as it has told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Remote {
    /// Window: address, key, bytes.
    pub(super) window: (u64, u32, u64),
    /// Control memory: address and key; see [`CONTROL_BYTES`].
    pub(super) control: (u64, u32),
    /// Receives that it has posted.
    pub(super) receives: u32,
}

/// Bytes of control memory, which each side has for the other to write: the registers in its first line, and in the first
/// word of the second how many receives have been posted again since the connection was made.
pub(super) const CONTROL_BYTES: u64 = 4096;
/// Word of the count of receives.
pub(super) const GRANT_WORD: usize = 8;

/// Runs that are posted together at most.
pub(super) const RUNS_MAX: usize = 8;

/// Where the lines of a run go, and where in the engine's bytes they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) line: u64,
    pub(super) from: usize,
    pub(super) bytes: usize,
}

/// What has been counted on the sending side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendCounts {
    /// Work requests posted.
    pub requests: u64,
    /// Those of them that write lines of the peer's window; the others are registers, rings and counts of receives.
    pub lines: u64,
    /// Calls to the device: one or more requests each.
    pub doorbells: u64,
    /// Requests that carried their data themselves.
    pub inline: u64,
    /// Requests whose completion was asked for.
    pub signalled: u64,
    /// Attempts to post that found no room and had to wait for a completion.
    pub waits: u64,
    /// Requests under way at most.
    pub most_under_way: u64,
}

/// How a post ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Posted {
    /// The device has it. `busy`: how full the queue is, in 64ths.
    Done { busy: u32 },
    /// No room until something completes.
    Full,
    /// No room until the peer has taken up what it was told.
    Unanswered,
    /// The connection has ended; nothing was and will be sent.
    Ended,
}

/// Everything about the queue that one poster at a time may touch.
#[derive(Debug)]
pub(super) struct Sending {
    // Fields drop in order: the queue pair, then what its requests read.
    queue: Arc<dyn Queue>,
    mirror: Mirror,
    remote: Remote,
    immediate: bool,
    depth: u64,
    /// Numbers of the last request posted, of the last signalled one, and of the last one known complete.
    posted: u64,
    signalled: u64,
    done: u64,
    /// Bytes of the mirror handed out when one was last signalled.
    mirrored: u64,
    /// Receives of the peer's that were used, and this side's control memory where it says how many there are.
    told: u64,
    control: View,
    registers: Option<[u8; 32]>,
    failed: Option<String>,
    counts: SendCounts,
}

impl Sending {
    pub(super) fn new(parts: Parts) -> Self {
        Self {
            depth: u64::from(parts.queue.granted().depth.min(parts.depth)),
            queue: parts.queue,
            mirror: parts.mirror,
            remote: parts.remote,
            immediate: parts.immediate,
            posted: 0,
            signalled: 0,
            done: 0,
            mirrored: 0,
            told: 0,
            control: parts.control,
            registers: None,
            failed: None,
            counts: SendCounts::default(),
        }
    }

    pub(super) fn counts(&self) -> SendCounts {
        self.counts
    }

    /// Longest run of those that were written from registered memory that is known to have arrived, in bytes.
    pub(super) fn longest_done(&self) -> u64 {
        self.mirror.longest_done()
    }

    pub(super) fn fail(&mut self, why: String) {
        self.failed.get_or_insert(why);
    }

    /// Takes completions. An error when the connection has failed.
    pub(super) fn reap(&mut self) -> Result<(), String> {
        let mut sent = [Sent::default(); 16];
        while self.failed.is_none() {
            match self.queue.sent(&mut sent) {
                Ok(0) => break,
                Ok(n) => sent.iter().take(n).for_each(|one| self.take(*one)),
                Err(errno) => self.fail(format!("the completion queue is broken: {errno}")),
            }
        }
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn take(&mut self, sent: Sent) {
        if sent.status != 0 {
            // Whatever follows was flushed because of the first.
            return self.fail(format!("{} (status {})", status_name(sent.status), sent.status));
        }
        // One queue completes in order, so that every earlier request is complete too.
        if sent.id > self.done && sent.id <= self.posted {
            self.done = sent.id;
            self.mirror.release(sent.id);
        }
    }

    fn under_way(&self) -> u64 {
        self.posted - self.done
    }

    /// Whether `requests` can be posted, with `mirrored` bytes of the mirror.
    fn has_room(&mut self, requests: u64, mirrored: u64) -> bool {
        let fits =
            |s: &Self| s.under_way() + requests <= s.depth && (mirrored == 0 || s.mirror.has_room(mirrored));
        // Completions are looked for long before there is need, so that need hardly ever comes.
        if self.under_way() + requests > self.depth / 2 || !fits(self) {
            let _ = self.reap(); // an error is told by the next poll
        }
        fits(self)
    }

    /// Receives of the peer's that nothing was sent to yet.
    fn untold(&self) -> u64 {
        let posted_again = self.control.load(GRANT_WORD, Ordering::Acquire);
        // A torn or made-up count is no more than what was used.
        u64::from(self.remote.receives) + posted_again.min(self.told) - self.told
    }

    /// Posts requests that there is room for. Numbers and signals are given here.
    fn post(&mut self, requests: &mut [Request]) -> bool {
        for request in &mut *requests {
            self.posted += 1;
            request.id = self.posted;
            let mirrored = self.mirror.handed_out() - self.mirrored;
            request.signalled =
                self.posted - self.signalled >= self.depth / 4 || mirrored >= self.mirror.longest();
            if request.signalled {
                self.signalled = self.posted;
                self.mirrored = self.mirror.handed_out();
                self.counts.signalled += 1;
            }
            self.counts.inline += u64::from(request.inline && request.data.bytes > 0);
        }
        self.counts.requests += requests.len() as u64;
        self.counts.doorbells += 1;
        self.counts.most_under_way = self.counts.most_under_way.max(self.under_way());
        match self.queue.post(requests) {
            Ok(()) => true,
            Err(errno) => {
                self.fail(format!("the device refuses a request: {errno}"));
                false
            }
        }
    }

    /// Posts runs of lines of the peer's window, in order. In strict mode each run is announced.
    pub(super) fn post_runs(&mut self, inline: usize, strict: bool, bytes: &[u8], runs: &[Run]) -> Posted {
        if self.failed.is_some() {
            return Posted::Ended;
        }
        let each = match strict && !self.immediate {
            true => 2,
            false => 1,
        };
        let mirrored = runs
            .iter()
            .map(|run| run.bytes)
            .filter(|run| *run > inline || *run > bytes.len());
        let mirrored = mirrored.map(|run| run as u64).sum();
        if strict && self.untold() < runs.len() as u64 {
            return Posted::Unanswered;
        }
        if !self.has_room(runs.len() as u64 * each, mirrored) {
            self.counts.waits += 1;
            return if self.failed.is_some() {
                Posted::Ended
            } else {
                Posted::Full
            };
        }
        let mut requests = [EMPTY; 2 * RUNS_MAX];
        let mut words = [[0; 8]; RUNS_MAX];
        let mut count = 0;
        for (run, word) in runs.iter().zip(&mut words) {
            // A run may end inside its last line, which the mirror fills up.
            let Some(data) = bytes.get(run.from..bytes.len().min(run.from + run.bytes)) else {
                continue;
            };
            let (address, rkey) = (
                self.remote.window.0 + run.line * LINE_BYTES as u64,
                self.remote.window.1,
            );
            let is_inline = run.bytes <= inline && data.len() == run.bytes;
            let request = Request {
                verb: match strict && self.immediate {
                    true => Verb::WriteImmediate {
                        address,
                        rkey,
                        number: run.line as u32,
                    },
                    false => Verb::Write { address, rkey },
                },
                data: match is_inline {
                    true => piece(data),
                    false => self.mirror.hold(self.posted + count as u64 + 1, data, run.bytes),
                },
                inline: is_inline,
                ..EMPTY
            };
            let mut add = |request| {
                if let Some(slot) = requests.get_mut(count) {
                    *slot = request;
                    count += 1;
                }
            };
            add(request);
            if each == 2 {
                *word = announcement(run.line as u32, (run.bytes / LINE_BYTES) as u32);
                add(message(word));
            }
        }
        if strict {
            self.told += runs.len() as u64;
        }
        self.counts.lines += runs.len() as u64;
        let posted = requests
            .get_mut(..count)
            .is_some_and(|requests| self.post(requests));
        match posted {
            true => Posted::Done {
                busy: (self.under_way() * 64 / self.depth) as u32,
            },
            false => Posted::Ended,
        }
    }

    /// Writes to the peer's control memory. False when there is no room now.
    pub(super) fn post_control(&mut self, at: u64, bytes: &[u8]) -> bool {
        if self.failed.is_some() || !self.has_room(1, 0) {
            return false;
        }
        let (address, rkey) = self.remote.control;
        self.post(&mut [Request {
            verb: Verb::Write {
                address: address + at,
                rkey,
            },
            data: piece(bytes),
            ..EMPTY
        }])
    }

    /// Posts registers that are waiting for room.
    pub(super) fn post_registers(&mut self) {
        if let Some(registers) = self.registers
            && self.post_control(0, &registers)
        {
            self.registers = None;
        }
    }

    pub(super) fn hold_registers(&mut self, registers: [u8; 32]) {
        self.registers = Some(registers);
        self.post_registers();
    }

    /// Rings one of the peer's doorbells. False when there is no room now.
    pub(super) fn post_ring(&mut self, number: u32) -> bool {
        if self.failed.is_some() {
            return true; // nobody to ring for
        }
        if self.untold() == 0 || !self.has_room(1, 0) {
            return false;
        }
        self.told += 1;
        let (address, rkey) = self.remote.control;
        let word = announcement(number, 0);
        self.post(&mut [match self.immediate {
            true => Request {
                verb: Verb::WriteImmediate {
                    address,
                    rkey,
                    number,
                },
                ..EMPTY
            },
            false => message(&word),
        }]);
        true
    }
}

const EMPTY: Request = Request {
    id: 0,
    verb: Verb::Send,
    data: Piece {
        address: 0,
        bytes: 0,
        lkey: 0,
    },
    inline: true,
    signalled: false,
};

fn piece(bytes: &[u8]) -> Piece {
    Piece {
        address: bytes.as_ptr() as u64,
        bytes: bytes.len() as u32,
        lkey: 0,
    }
}

fn message(word: &[u8; 8]) -> Request {
    Request {
        data: piece(word),
        ..EMPTY
    }
}

/// What a message says that stands in for an immediate: a line and how many, or a doorbell and zero.
pub(super) fn announcement(number: u32, lines: u32) -> [u8; 8] {
    (u64::from(lines) << 32 | u64::from(number)).to_le_bytes()
}
