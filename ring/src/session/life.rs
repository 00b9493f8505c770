//! One life of the link, from the moment both sides have seen each other's registers: data path, greeting, beats.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use std::time::Duration;

use ntb_mem::line::Line;

use super::{
    clock::{Earliest, Retry},
    greeting::Own,
    types::{Action, Event, Mismatch, PeerInfo, SessionConfig, SessionState},
};
use crate::{
    link::engine::{Inbound, Order},
    wire::{
        beat::{AGREED, Beat, CLOSED, HELLO_TAKEN, REFUSED},
        hello::{Hello, HelloLines},
        identity::{Direction, Identity},
        layout::{BEAT_LINE, CHANNELS_FIRST_LINE, HELLO_LINE},
        page::PAGE_LINES,
        pattern::{Pattern, next_number},
        registers::{Phase, Report},
    },
};

#[derive(Debug)]
pub(super) struct Life {
    transmit: Direction,
    receive: Direction,
    transmit_id: u64,
    receive_id: u64,
    /// The peer's registers, as last seen.
    report: Report,
    /// Number of the newest pattern stored, 0 for none; and whether the peer has found one.
    pattern: u16,
    /// Highest number stored in this life: numbers go round.
    highest: u16,
    transmits: bool,
    /// Number of the peer's pattern found in place, 0 for none.
    found: u16,
    probe: Retry,
    greeting: Retry,
    /// What the peer's last beat said.
    beat_in: Option<Beat>,
    /// What this side's last beat said, and when the next is due.
    beat_out: Beat,
    beat_due: Duration,
    hello: Option<(Order, PeerInfo)>,
    refusal: Refusal,
    running: bool,
    heard: Duration,
    silent: bool,
}

/// Whether the two sides fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    None,
    /// They do not, but speak the same version, so that the peer can be told.
    Told,
    /// They have no version in common: nothing is stored.
    Version,
}

/// What the life works with in one step.
#[derive(Clone, Copy)]
pub(super) struct Step<'a> {
    pub(super) now: Duration,
    pub(super) inbound: &'a dyn Inbound,
    /// Lines that this side's engines reach, where both directions have memory.
    pub(super) reach: Option<u64>,
    pub(super) config: &'a SessionConfig,
    pub(super) own: &'a Own,
}

impl Life {
    pub(super) fn new(me: Identity, report: Report, now: Duration, retry: Duration) -> Self {
        let transmit = Direction {
            writer: me,
            reader: report.who,
        };
        let receive = Direction {
            writer: report.who,
            reader: me,
        };
        Self {
            transmit,
            receive,
            transmit_id: transmit.id(),
            receive_id: receive.id(),
            report,
            pattern: 0,
            highest: 0,
            transmits: false,
            found: 0,
            probe: Retry::new(retry),
            greeting: Retry::new(retry),
            beat_in: None,
            beat_out: Beat {
                count: 0,
                flags: 0,
                found: 0,
                table: 0,
            },
            beat_due: Duration::ZERO,
            hello: None,
            refusal: Refusal::None,
            running: false,
            heard: now,
            silent: false,
        }
    }

    pub(super) fn peer(&self) -> Identity {
        self.report.who
    }

    pub(super) fn peer_info(&self) -> Option<&PeerInfo> {
        self.hello.as_ref().map(|(_, info)| info)
    }

    pub(super) fn is_running(&self) -> bool {
        self.running
    }

    /// Numbers for this side's registers: newest pattern, and the peer's pattern found.
    pub(super) fn patterns(&self) -> (u16, u16) {
        (self.pattern, self.found)
    }

    /// Identifiers of both directions, and lines and order of the peer: what the channel table needs.
    pub(super) fn directions(&self) -> (u64, u64, u64, Order) {
        let order = self.hello.as_ref().map_or(Order::Relaxed, |(order, _)| *order);
        (self.transmit_id, self.receive_id, self.peer_lines(), order)
    }

    /// What the peer has taken in of this side's table.
    pub(super) fn acknowledged(&self) -> Option<u32> {
        self.beat_in.map(|beat| beat.table)
    }

    /// Lines of the peer's memory.
    fn peer_lines(&self) -> u64 {
        u64::from(self.report.pages) * PAGE_LINES
    }

    /// True while this side may store into the peer's memory.
    fn may_store(&self, step: Step<'_>) -> bool {
        step.reach.is_some() && self.report.phase == Phase::Ready && self.refusal != Refusal::Version
    }

    pub(super) fn state(&self, windows: bool) -> SessionState {
        if self.refusal != Refusal::None {
            SessionState::Refused
        } else if self.running {
            SessionState::Running
        } else if !windows || self.report.phase != Phase::Ready {
            SessionState::PeerSeen
        } else if self.transmits && self.found != 0 {
            SessionState::Verified
        } else {
            SessionState::WindowsSet {
                transmit: self.transmits,
                receive: self.found != 0,
            }
        }
    }

    /// New registers of the peer.
    pub(super) fn report(&mut self, report: Report, step: Step<'_>, actions: &mut Vec<Action>) {
        // What was compared at the start of the life stays as it was then.
        let report = Report {
            pages: self.report.pages,
            versions: self.report.versions,
            ..report
        };
        if report != self.report {
            self.report = report;
            self.hear(step.now, actions);
        }
        self.see_found(report.found);
    }

    /// The two sides' versions, before anything is stored.
    pub(super) fn compare_versions(&mut self, own: &Own, actions: &mut Vec<Action>) {
        if let Some(differs) = own.compare_versions(self.report.versions) {
            self.refusal = Refusal::Version;
            actions.push(Action::Event(Event::Refused(vec![differs])));
        }
    }

    /// True when the peer's beat says goodbye.
    pub(super) fn is_closed_by_beat(&self, inbound: &dyn Inbound) -> bool {
        read(inbound, BEAT_LINE)
            .and_then(|line| Beat::decode(self.receive, &line))
            .is_some_and(|beat| beat.flags & CLOSED != 0)
    }

    /// Takes in what lies in this side's memory.
    pub(super) fn listen(&mut self, step: Step<'_>, actions: &mut Vec<Action>) {
        if self.refusal == Refusal::Version {
            return;
        }
        let beat = read(step.inbound, BEAT_LINE).and_then(|line| Beat::decode(self.receive, &line));
        // A beat that was overtaken by a later one says nothing.
        let fresh = |beat: &Beat| {
            let last = self.beat_in.map_or(0, |last| last.count);
            beat.count.wrapping_sub(last) as i64 > 0
        };
        if let Some(beat) = beat.filter(fresh) {
            self.beat_in = Some(beat);
            self.hear(step.now, actions);
            self.see_found(beat.found);
        }
        if self.found == 0 {
            self.look_for_pattern(step);
        }
        if self.found != 0 && self.hello.is_none() {
            self.look_for_hello(step, actions);
        }
        self.settle(step, actions);
    }

    /// Compares what both sides have said so far.
    fn settle(&mut self, step: Step<'_>, actions: &mut Vec<Action>) {
        if self.running || self.refusal != Refusal::None {
            return;
        }
        let memory = |reach| step.own.compare_memory(self.peer_lines(), reach);
        if let Some(differs) = step.reach.and_then(memory) {
            return self.refuse(vec![differs], actions);
        }
        let Some(beat) = self.beat_in else { return };
        let greeted = self.hello.is_some();
        if beat.flags & REFUSED != 0 && (greeted || beat.flags & HELLO_TAKEN == 0) {
            let theirs = "refused: the peer's own message says why";
            let differs = Mismatch::new("agreement", &"accepted", &theirs);
            return self.refuse(vec![differs], actions);
        }
        if self.transmits
            && beat.flags & AGREED != 0
            && let Some((_, info)) = &self.hello
        {
            self.running = true;
            actions.push(Action::Event(Event::Running(info.clone())));
        }
    }

    fn refuse(&mut self, differs: Vec<Mismatch>, actions: &mut Vec<Action>) {
        self.refusal = Refusal::Told;
        actions.push(Action::Event(Event::Refused(differs)));
    }

    fn hear(&mut self, now: Duration, actions: &mut Vec<Action>) {
        if self.silent {
            self.silent = false;
            let silent = now.saturating_sub(self.heard);
            actions.push(Action::Event(Event::PeerBack { silent }));
        }
        self.heard = now;
    }

    /// The peer says that it has found pattern `number`.
    fn see_found(&mut self, number: u16) {
        if number != 0 && number <= self.highest {
            self.transmits = true;
        }
    }

    fn look_for_pattern(&mut self, step: Step<'_>) {
        let lines = step.own.window_lines;
        let first = read(step.inbound, CHANNELS_FIRST_LINE);
        let Some(number) = first.and_then(|line| Pattern::claimed(line.0.first().copied()?)) else {
            return;
        };
        let pattern = Pattern::new(self.receive_id, number);
        let in_place = |at| read(step.inbound, at).is_some_and(|line| line == pattern.line(at));
        if pattern.places(lines).all(in_place) {
            self.found = number;
        }
    }

    fn look_for_hello(&mut self, step: Step<'_>, actions: &mut Vec<Action>) {
        let mut lines = HelloLines::default();
        for (line, at) in lines.iter_mut().zip(HELLO_LINE..) {
            let Some(content) = read(step.inbound, at) else {
                return;
            };
            *line = content;
        }
        let Some(hello) = Hello::decode(self.receive_id, &lines) else {
            return;
        };
        let differs = step.own.compare(&hello);
        let info = PeerInfo {
            node: hello.node,
            pid: hello.pid,
            incarnation: self.receive.writer.incarnation,
            package: hello.package,
        };
        self.hello = Some((hello.order, info));
        if !differs.is_empty() && self.refusal == Refusal::None {
            self.refuse(differs, actions);
        }
    }

    /// Silence: reported, then the end. True when the peer is to be given up.
    pub(super) fn watch(&mut self, step: Step<'_>, actions: &mut Vec<Action>) -> bool {
        if self.refusal == Refusal::Version {
            return false; // registers alone do not beat; ends when the peer is replaced
        }
        let silent = step.now.saturating_sub(self.heard);
        if silent >= step.config.gone_after {
            return true;
        }
        if self.running && !self.silent && silent >= step.config.silent_after {
            self.silent = true;
            actions.push(Action::Event(Event::PeerSilent { silent }));
        }
        false
    }

    /// This side itself has stood still for `gap`: what it did not look at is not the peer's silence.
    pub(super) fn forgive(&mut self, gap: Duration, now: Duration) {
        self.heard = self.heard.saturating_add(gap).min(now);
    }

    /// Stores what is due: pattern, greeting, beat. True when the peer should look at once.
    pub(super) fn speak(&mut self, step: Step<'_>, table: u32, actions: &mut Vec<Action>) -> bool {
        if !self.may_store(step) {
            return false;
        }
        let mut urgent = false;
        let reachable = step.reach.is_some_and(|reach| reach >= self.peer_lines());
        if !self.transmits && reachable && self.refusal == Refusal::None && self.probe.is_due(step.now) {
            self.pattern = next_number(self.pattern);
            self.highest = self.highest.max(self.pattern);
            let pattern = Pattern::new(self.transmit_id, self.pattern);
            for line in pattern.places(self.peer_lines()) {
                let content = pattern.line(line);
                actions.push(Action::Put { line, content });
            }
            self.probe.done(step.now);
            urgent = true;
        }
        let taken = self.beat_in.is_some_and(|beat| beat.flags & HELLO_TAKEN != 0);
        if self.transmits && !taken && self.greeting.is_due(step.now) {
            let hello = step.own.hello(step.config, step.reach.unwrap_or(0));
            let lines = hello.encode(self.transmit_id);
            for (content, line) in lines.into_iter().zip(HELLO_LINE..) {
                actions.push(Action::Put { line, content });
            }
            self.greeting.done(step.now);
            urgent = true;
        }
        self.beat(step, table, actions) || urgent
    }

    fn beat(&mut self, step: Step<'_>, table: u32, actions: &mut Vec<Action>) -> bool {
        let next = Beat {
            count: self.beat_out.count,
            flags: self.flags(),
            found: self.found,
            table,
        };
        let changed = next != self.beat_out;
        if !changed && step.now < self.beat_due {
            return false;
        }
        self.beat_out = next;
        self.beat_due = step.now.saturating_add(step.config.beat_interval);
        self.put_beat(actions);
        changed
    }

    fn put_beat(&mut self, actions: &mut Vec<Action>) {
        self.beat_out.count = self.beat_out.count.wrapping_add(1);
        actions.push(Action::Put {
            line: BEAT_LINE,
            content: self.beat_out.encode(self.transmit),
        });
    }

    fn flags(&self) -> u16 {
        match (&self.hello, self.refusal) {
            (None, Refusal::None) => 0,
            (Some(_), Refusal::None) => HELLO_TAKEN | AGREED,
            (None, _) => REFUSED,
            (Some(_), _) => HELLO_TAKEN | REFUSED,
        }
    }

    /// The last beat.
    pub(super) fn goodbye(&mut self, may_store: bool, actions: &mut Vec<Action>) {
        if may_store && self.report.phase == Phase::Ready && self.refusal != Refusal::Version {
            self.beat_out.flags |= CLOSED;
            self.put_beat(actions);
        }
    }

    /// Deadlines of this life.
    pub(super) fn note_deadlines(&self, step: Step<'_>, earliest: &mut Earliest) {
        if self.refusal == Refusal::Version {
            return;
        }
        if self.may_store(step) {
            earliest.note(self.beat_due);
            if !self.transmits {
                earliest.note(self.probe.due());
            } else if !self.running {
                earliest.note(self.greeting.due());
            }
        }
        earliest.note(self.heard.saturating_add(step.config.gone_after));
        if self.running && !self.silent {
            earliest.note(self.heard.saturating_add(step.config.silent_after));
        }
    }
}

/// A line of this side's memory, if it is that long.
fn read(inbound: &dyn Inbound, line: u64) -> Option<Line> {
    (line < inbound.lines()).then(|| inbound.load_line(line))
}
