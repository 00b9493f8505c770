//! The loops that measure. Time, the link and the waiting are inputs, so that the same loops run under a fake clock.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use std::collections::VecDeque;

use super::message::{self, Kind};
use crate::{
    exit::Failure,
    pace::Schedule,
    stats::{Latencies, SequenceCheck},
};

/// One end of a link, with a clock, as the loops see it.
pub trait Port {
    /// Sends a message, or says why not.
    fn try_send(&mut self, message: &[u8]) -> Result<(), Hold>;

    /// Receives a message into the front of `into` and gives its length, or says why not.
    fn try_recv(&mut self, into: &mut [u8]) -> Result<usize, Hold>;

    /// Nanoseconds since a moment of the implementation's choice; never goes back.
    fn ns(&mut self) -> u64;

    /// Nothing was there, `polls` times in a row: waits as the user wants it, for a message or until `until_ns`.
    fn idle(&mut self, polls: u64, until_ns: u64);

    /// Called every [`LOOK_NS`] or so, and never while an exchange younger than that is being timed. False ends the run.
    fn look(&mut self, progress: Progress) -> bool;
}

/// Why nothing was sent or received.
#[derive(Debug, PartialEq, Eq)]
pub enum Hold {
    /// The ring is full, or empty.
    NotNow,
    /// The channel is down.
    Down,
    /// This cannot be waited out.
    Broken(Box<Failure>),
}

/// How far a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Messages sent.
    pub sent: u64,
    /// Replies received.
    pub received: u64,
    /// Nanoseconds since the run started.
    pub elapsed_ns: u64,
    /// What the loop is waiting for, and for how long already.
    pub waiting: Option<(Awaited, u64)>,
}

/// What a loop waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// Room in the ring.
    Room,
    /// A reply.
    Reply,
}

/// What to measure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// Bytes of a message.
    pub size: usize,
    /// Messages to send; unlimited when `None`.
    pub count: Option<u64>,
    /// Nanoseconds after which nothing more is sent.
    pub duration_ns: Option<u64>,
    /// Messages a second; as fast as it goes when `None`.
    pub rate_hz: Option<f64>,
    /// [`Kind::Echo`] for round trips, [`Kind::Stream`] for one way.
    pub kind: Kind,
    /// Waiting for longer than this ends the run.
    pub stall_ns: u64,
}

/// How a loop ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Ended {
    /// All that was planned was done.
    Done,
    /// [`Port::look`] said so.
    Stopped,
    /// The channel is down; the run can go on once it is up again.
    Down,
    /// What was waited for did not come within [`Plan::stall_ns`].
    Stalled {
        /// What it was.
        awaited: Awaited,
        /// How long it was waited for.
        waited_ns: u64,
    },
    /// The link does not work.
    Broken(Box<Failure>),
}

impl From<Hold> for Ended {
    fn from(hold: Hold) -> Self {
        match hold {
            Hold::Broken(failure) => Self::Broken(failure),
            Hold::NotNow | Hold::Down => Self::Down,
        }
    }
}

/// Nanoseconds between two calls of [`Port::look`].
pub const LOOK_NS: u64 = 10_000_000;
/// Empty polls between two readings of the clock.
const POLLS_A_READING: u64 = 64;
/// Messages of a stream between two readings of the clock.
const STREAM_A_READING: u64 = 64;

/// A measurement under way.
#[derive(Debug)]
pub struct Run {
    plan: Plan,
    first: u64,
    next: u64,
    started: Option<u64>,
    ended: u64,
    schedule: Option<Schedule>,
    /// Sent and not answered: sequence and when it was really sent.
    outstanding: VecDeque<(u64, u64)>,
    check: SequenceCheck,
    last_ns: u64,
    looked: u64,
    outbox: Vec<u8>,
    inbox: Vec<u8>,
    /// From the planned sending (from the real one, where nothing was planned) to the reply.
    pub response: Latencies,
    /// From the real sending to the reply; recorded in paced runs only.
    pub service: Latencies,
    /// Replies whose bytes were not those sent.
    pub corrupt: u64,
    /// Longest time between two looks at the clock: this thread did not run, or was held up, for that long.
    pub largest_gap_ns: u64,
    /// Messages that were due before the end and were not sent.
    pub unsent: u64,
}

impl Run {
    /// A run whose first message has the sequence `first`.
    pub fn new(plan: Plan, first: u64) -> Self {
        Self {
            plan,
            first,
            next: first,
            started: None,
            ended: 0,
            schedule: None,
            outstanding: VecDeque::with_capacity(1024),
            check: SequenceCheck::new(first),
            last_ns: 0,
            looked: 0,
            outbox: vec![0; plan.size],
            inbox: vec![0; plan.size.max(message::CONTROL_BYTES)],
            response: Latencies::default(),
            service: Latencies::default(),
            corrupt: 0,
            largest_gap_ns: 0,
            unsent: 0,
        }
    }

    /// Sequence of the next message.
    pub fn next_seq(&self) -> u64 {
        self.next
    }

    /// Messages sent.
    pub fn sent(&self) -> u64 {
        self.next.wrapping_sub(self.first)
    }

    /// Messages of this life of the channel that replies are still due for.
    pub fn unanswered(&self) -> u64 {
        self.outstanding.len() as u64
    }

    /// Those of them that were sent less than `ns` before the end: under way, not lost.
    pub fn under_way(&self, ns: u64) -> u64 {
        let young = |sent: u64| self.ended.saturating_sub(sent) < ns;
        self.outstanding.iter().filter(|(_, sent)| young(*sent)).count() as u64
    }

    /// What has arrived.
    pub fn check(&self) -> &SequenceCheck {
        &self.check
    }

    /// Nanoseconds from the start to the last thing that happened.
    pub fn elapsed_ns(&self) -> u64 {
        self.started.map_or(0, |s| self.ended.saturating_sub(s))
    }

    /// Runs until the plan is done or something ends it. After [`Ended::Down`] it can be called again: the schedule goes
    /// on as if nothing had happened, what was on its way is lost.
    pub fn drive(&mut self, port: &mut impl Port) -> Ended {
        let now = port.ns();
        self.last_ns = now;
        self.looked = now;
        let start = *self.started.get_or_insert(now);
        if self.schedule.is_none() {
            self.schedule = self.plan.rate_hz.map(|rate| Schedule::new(start, rate));
        }
        let ended = match (self.plan.kind, self.schedule) {
            (Kind::Echo, None) => self.exchange(port),
            (Kind::Echo, Some(schedule)) => self.paced(port, schedule),
            _ => self.stream(port),
        };
        self.ended = self.last_ns;
        match ended {
            Ok(()) => Ended::Done,
            Err(e) => {
                if e == Ended::Down {
                    self.outstanding.clear();
                }
                e
            }
        }
    }

    /// After [`Ended::Stopped`]: takes up the replies that still come within `ns`.
    pub fn drain(&mut self, port: &mut impl Port, ns: u64) {
        let end = port.ns().saturating_add(ns);
        while self.plan.kind == Kind::Echo && self.check.received < self.sent() && port.ns() < end {
            match port.try_recv(&mut self.inbox) {
                Ok(len) => {
                    let now = port.ns();
                    let expected = self
                        .outstanding
                        .front()
                        .map_or(self.next.wrapping_sub(1), |(seq, _)| *seq);
                    match (self.accept(len, expected), self.schedule) {
                        (Some(seq), Some(schedule)) => self.record(schedule, seq, now),
                        (Some(seq), None) => self.outstanding.retain(|(waiting, _)| *waiting != seq),
                        (None, _) => {}
                    }
                }
                Err(Hold::NotNow) => port.idle(u64::MAX, end),
                Err(_) => return,
            }
        }
    }

    /// One message after the other.
    fn exchange(&mut self, port: &mut impl Port) -> Result<(), Ended> {
        loop {
            let now = self.last_ns;
            if !self.more(now) {
                return Ok(());
            }
            self.look(port, now, None)?;
            let seq = self.next;
            message::fill(&mut self.outbox, seq, Kind::Echo);
            let sent = self.read(port);
            message::set_stamp(&mut self.outbox, sent);
            self.send(port, sent)?;
            let mut polls = 0;
            loop {
                match port.try_recv(&mut self.inbox) {
                    Ok(len) => {
                        let now = self.read(port);
                        if self.accept(len, seq) == Some(seq) {
                            self.response.record(now.saturating_sub(sent));
                            break;
                        }
                    }
                    Err(Hold::NotNow) => {
                        polls += 1;
                        if let Err(end) = self.wait(port, polls, (Awaited::Reply, sent), u64::MAX) {
                            self.outstanding.push_back((seq, sent));
                            return Err(end);
                        }
                    }
                    Err(hold) => return Err(hold.into()),
                }
            }
        }
    }

    /// On a schedule, whatever the replies do.
    fn paced(&mut self, port: &mut impl Port, schedule: Schedule) -> Result<(), Ended> {
        let mut polls = 0;
        let mut heard = self.last_ns;
        let mut full_since = None;
        loop {
            let now = self.read(port);
            let mut busy = false;
            match port.try_recv(&mut self.inbox) {
                Ok(len) => {
                    let now = self.read(port);
                    let expected = self.outstanding.front().map_or(self.next, |(seq, _)| *seq);
                    if let Some(seq) = self.accept(len, expected) {
                        self.record(schedule, seq, now);
                    }
                    heard = now;
                    busy = true;
                }
                Err(Hold::NotNow) => {}
                Err(hold) => return Err(hold.into()),
            }
            let due = schedule.due(self.sent());
            let more = self.more(now);
            if more && now >= due {
                message::fill(&mut self.outbox, self.next, Kind::Echo);
                let sent = self.read(port);
                message::set_stamp(&mut self.outbox, sent);
                match port.try_send(&self.outbox) {
                    Ok(()) => {
                        if self.outstanding.is_empty() {
                            heard = sent; // the wait for a reply starts here
                        }
                        self.outstanding.push_back((self.next, sent));
                        self.next = self.next.wrapping_add(1);
                        full_since = None;
                        busy = true;
                    }
                    Err(Hold::NotNow) => full_since = full_since.or(Some(sent)),
                    Err(hold) => return Err(hold.into()),
                }
            }
            if !more && self.outstanding.is_empty() {
                self.count_unsent(schedule);
                return Ok(());
            }
            if busy {
                polls = 0;
                self.look(port, now, None)?;
                continue;
            }
            polls += 1;
            let until = if more { due } else { u64::MAX };
            match (self.outstanding.is_empty(), full_since) {
                (false, _) => self.wait(port, polls, (Awaited::Reply, heard), until)?,
                (true, Some(since)) => self.wait(port, polls, (Awaited::Room, since), u64::MAX)?,
                (true, None) => {
                    self.look(port, now, None)?;
                    port.idle(polls, until);
                }
            }
        }
    }

    /// One way.
    fn stream(&mut self, port: &mut impl Port) -> Result<(), Ended> {
        loop {
            let now = self.last_ns;
            if !self.more(now) {
                if let Some(schedule) = self.schedule {
                    self.count_unsent(schedule);
                }
                self.read(port);
                return Ok(());
            }
            if let Some(schedule) = self.schedule {
                let due = schedule.due(self.sent());
                let mut polls = 0;
                while self.read(port) < due {
                    polls += 1;
                    self.look(port, self.last_ns, None)?;
                    port.idle(polls, due);
                }
            } else if self.sent().is_multiple_of(STREAM_A_READING) {
                let now = self.read(port);
                self.look(port, now, None)?;
            }
            message::fill(&mut self.outbox, self.next, Kind::Stream);
            message::set_stamp(&mut self.outbox, self.last_ns);
            self.send(port, self.last_ns)?;
        }
    }

    /// Sends what is in the outbox, waiting for room since `since`.
    #[inline]
    fn send(&mut self, port: &mut impl Port, since: u64) -> Result<(), Ended> {
        let mut polls = 0;
        loop {
            match port.try_send(&self.outbox) {
                Ok(()) => {
                    self.next = self.next.wrapping_add(1);
                    return Ok(());
                }
                Err(Hold::NotNow) => {
                    polls += 1;
                    self.wait(port, polls, (Awaited::Room, since), u64::MAX)?;
                }
                Err(hold) => return Err(hold.into()),
            }
        }
    }

    /// Takes up the message in the inbox; its sequence when it is sound and new. `expected` is what a message without
    /// a header has to be.
    #[inline]
    fn accept(&mut self, len: usize, expected: u64) -> Option<u64> {
        let message = self.inbox.get(..len)?;
        let seq = match message::header(message) {
            Some(header) if header.kind == Kind::Control => return None, // a late answer to the agreement
            Some(header) => header.seq,
            None => expected,
        };
        if len != self.plan.size || !message::verify(message, seq) {
            self.corrupt += 1;
            return None;
        }
        self.check.observe(seq).then_some(seq)
    }

    fn record(&mut self, schedule: Schedule, seq: u64, now: u64) {
        while let Some((waiting, sent)) = self.outstanding.front().copied() {
            let ahead = seq.wrapping_sub(waiting);
            if ahead >= 1 << 63 {
                return; // it was given up when a later one arrived
            }
            self.outstanding.pop_front();
            if ahead == 0 {
                let planned = schedule.due(seq.wrapping_sub(self.first));
                self.response.record(now.saturating_sub(planned));
                self.service.record(now.saturating_sub(sent));
                return;
            }
        }
    }

    fn more(&self, now: u64) -> bool {
        let sent = self.sent();
        if self.plan.count.is_some_and(|count| sent >= count) {
            return false;
        }
        let (Some(duration), Some(start)) = (self.plan.duration_ns, self.started) else {
            return true;
        };
        // What is due before the end is sent even when it is late, but not for ever: not after the end.
        let over = now.saturating_sub(start) >= duration;
        !over && self.schedule.is_none_or(|s| sent < s.due_within(duration))
    }

    fn count_unsent(&mut self, schedule: Schedule) {
        let planned = match (self.plan.duration_ns, self.plan.count) {
            (Some(d), Some(c)) => schedule.due_within(d).min(c),
            (Some(d), None) => schedule.due_within(d),
            (None, Some(c)) => c,
            (None, None) => 0,
        };
        self.unsent = planned.saturating_sub(self.sent());
    }

    #[inline(always)]
    fn read(&mut self, port: &mut impl Port) -> u64 {
        let now = port.ns();
        self.largest_gap_ns = self.largest_gap_ns.max(now.saturating_sub(self.last_ns));
        self.last_ns = now;
        now
    }

    #[inline]
    fn wait(
        &mut self,
        port: &mut impl Port,
        polls: u64,
        (awaited, since): (Awaited, u64),
        until: u64,
    ) -> Result<(), Ended> {
        port.idle(polls, until);
        if polls.is_multiple_of(POLLS_A_READING) {
            let now = self.read(port);
            let waited_ns = now.saturating_sub(since);
            if waited_ns >= LOOK_NS {
                self.look(port, now, Some((awaited, waited_ns)))?;
            }
            if waited_ns >= self.plan.stall_ns {
                return Err(Ended::Stalled { awaited, waited_ns });
            }
        }
        Ok(())
    }

    #[inline]
    fn look(&mut self, port: &mut impl Port, now: u64, waiting: Option<(Awaited, u64)>) -> Result<(), Ended> {
        if now.saturating_sub(self.looked) < LOOK_NS {
            return Ok(());
        }
        self.looked = now;
        let go_on = port.look(Progress {
            sent: self.sent(),
            received: self.check.received,
            elapsed_ns: self.started.map_or(0, |s| now.saturating_sub(s)),
            waiting,
        });
        // What the look cost is no gap of the polling loop.
        self.last_ns = port.ns();
        if go_on { Ok(()) } else { Err(Ended::Stopped) }
    }
}

#[cfg(test)]
#[path = "measure_tests.rs"]
mod tests;
