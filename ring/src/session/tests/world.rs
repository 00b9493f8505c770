//! Two sessions, two memories, and a wire between them that does whatever a test asks of it. Time is simulated.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use ntb_mem::line::Line;

use super::super::*;
use crate::{
    link::{LinkState, LinkStatus, engine::Inbound, engine::Order},
    wire::mark::LaneKey,
};

pub(super) const LINES: u64 = 256 + 64 * 40;

pub(super) fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Inbound memory; can be made to read as all ones.
#[derive(Clone)]
pub(super) struct Memory {
    words: Arc<Vec<AtomicU64>>,
    ones: bool,
}

impl Memory {
    fn new(lines: u64) -> Self {
        Self {
            words: Arc::new((0..lines * 8).map(|_| AtomicU64::new(0)).collect()),
            ones: false,
        }
    }

    pub(super) fn store(&self, word: usize, value: u64) {
        self.words[word].store(value, Ordering::Relaxed);
    }
}

impl Inbound for Memory {
    fn lines(&self) -> u64 {
        self.words.len() as u64 / 8
    }

    fn load(&self, index: usize, order: Ordering) -> u64 {
        if self.ones {
            u64::MAX
        } else {
            self.words[index].load(order)
        }
    }
}

/// Random numbers of a test.
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def1)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = crate::wire::hash::step(self.0, 1);
        self.0
    }

    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub(super) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

enum What {
    Word(usize, u64),
    Line(u64, Line),
    Register(usize, u32),
    Ring,
}

struct Op {
    at: Duration,
    to: usize,
    what: What,
}

/// One end: a process that may be dead, and the memory and registers that outlive it.
pub(super) struct Side {
    pub(super) session: Option<Session>,
    pub(super) memory: Memory,
    pub(super) registers: Registers,
    pub(super) events: Vec<Event>,
    pub(super) up: HashMap<ChannelId, Lanes>,
    pub(super) ups: Vec<(ChannelId, Lanes)>,
    pub(super) downs: Vec<(ChannelId, CloseReason)>,
    pub(super) drains_ended: Vec<ChannelId>,
    pub(super) order: Order,
    /// Its stores and rings are lost; its registers are not.
    pub(super) transmit_dead: bool,
    /// Lose that many of the next stores and register writes.
    pub(super) lose: u32,
    /// Its stores from this line on go nowhere.
    pub(super) mapped: u64,
    /// Does nothing, as if stopped.
    pub(super) paused: bool,
    /// Whether readers report that they have drained.
    pub(super) drains: bool,
    pub(super) puts: u64,
    pub(super) reach: u64,
    pub(super) tweak: fn(&mut Own),
    step_at: Duration,
    may_store: bool,
    told: Option<SessionState>,
    tags: HashMap<u64, u16>,
    specs: Vec<(String, ChannelSpec)>,
    /// Number of each of them in this process; `None` while it waits to be opened again.
    ids: Vec<Option<ChannelId>>,
}

/// What the wire does to what it carries.
#[derive(Clone, Copy, Default)]
pub(super) struct Faults {
    /// Latest arrival after sending.
    pub(super) delay: Duration,
    /// Later stores may arrive earlier, and words of a line apart.
    pub(super) scramble: bool,
    /// Percent of stores and register writes lost.
    pub(super) lost: u64,
}

pub(super) struct World {
    pub(super) now: Duration,
    pub(super) sides: [Side; 2],
    pub(super) faults: Faults,
    pub(super) dice: Dice,
    pub(super) link: LinkStatus,
    /// Silence until the peer is reported as silent, and until it is given up.
    pub(super) patience: (Duration, Duration),
    wire: Vec<Op>,
    /// Key of one end to key of the other, over all lives.
    partners: HashMap<(u16, u32, u32), LaneKey>,
    lanes: HashMap<(u16, u32, u32), Lanes>,
    /// A channel may come up only over a control page that has been cleared.
    pub(super) must_be_clear: bool,
}

fn key(key: LaneKey) -> (u16, u32, u32) {
    (key.tag(), key.start, key.guard)
}

impl World {
    /// Both dead, link up.
    pub(super) fn new(seed: u64) -> Self {
        let side = |order| Side {
            session: None,
            memory: Memory::new(LINES),
            registers: [0; 8],
            events: Vec::new(),
            up: HashMap::new(),
            ups: Vec::new(),
            downs: Vec::new(),
            drains_ended: Vec::new(),
            order,
            transmit_dead: false,
            lose: 0,
            mapped: LINES,
            paused: false,
            drains: true,
            puts: 0,
            reach: LINES,
            tweak: |_| {},
            step_at: Duration::ZERO,
            may_store: false,
            told: None,
            tags: HashMap::new(),
            specs: Vec::new(),
            ids: Vec::new(),
        };
        Self {
            now: ms(1),
            sides: [side(Order::Ordered), side(Order::Relaxed)],
            faults: Faults {
                delay: Duration::from_micros(1),
                ..Faults::default()
            },
            dice: Dice::new(seed),
            link: LinkStatus {
                state: LinkState::WindowsSet,
                losses: 0,
            },
            patience: (ms(200), ms(5000)),
            wire: Vec::new(),
            partners: HashMap::new(),
            lanes: HashMap::new(),
            must_be_clear: false,
        }
    }

    /// Starts a process at `side`, with the channels that its last one had.
    pub(super) fn start(&mut self, side: usize) {
        let incarnation = self.dice.next();
        let seed = self.dice.next();
        let s = &mut self.sides[side];
        let mut config = SessionConfig::new(["left", "right"][side], incarnation, seed, s.order);
        (config.silent_after, config.gone_after) = self.patience;
        let mut session = Session::new(config, LINES).unwrap();
        (s.tweak)(&mut session.own);
        let open = |(name, spec): &(String, ChannelSpec)| session.open(name, *spec).ok();
        s.ids = s.specs.iter().map(open).collect();
        s.session = Some(session);
        s.step_at = self.now;
        s.may_store = false;
        s.told = None;
        s.tags.clear();
        s.up.clear();
    }

    pub(super) fn kill(&mut self, side: usize) {
        self.sides[side].session = None;
        self.sides[side].up.clear();
    }

    pub(super) fn open(&mut self, side: usize, name: &str, spec: ChannelSpec) -> ChannelId {
        let s = &mut self.sides[side];
        s.specs.push((name.to_owned(), spec));
        s.step_at = self.now;
        let id = s.session.as_mut().unwrap().open(name, spec).unwrap();
        s.ids.push(Some(id));
        id
    }

    /// Closes channel `at` of `side`, and opens it again at once where there is room.
    pub(super) fn reopen(&mut self, side: usize, at: usize) {
        if let Some(id) = self.sides[side].ids[at].take() {
            self.close(side, id);
        }
        self.open_missing(side);
    }

    pub(super) fn open_missing(&mut self, side: usize) {
        let s = &mut self.sides[side];
        let Some(session) = &mut s.session else { return };
        for (id, (name, spec)) in s.ids.iter_mut().zip(&s.specs) {
            if id.is_none() {
                *id = session.open(name, *spec).ok();
                s.step_at = self.now;
            }
        }
    }

    pub(super) fn close(&mut self, side: usize, id: ChannelId) {
        let s = &mut self.sides[side];
        s.session.as_mut().unwrap().close(id);
        s.up.remove(&id);
        s.step_at = self.now;
    }

    pub(super) fn session(&mut self, side: usize) -> &mut Session {
        self.sides[side].step_at = self.now;
        self.sides[side].session.as_mut().unwrap()
    }

    pub(super) fn state(&self, side: usize) -> SessionState {
        self.sides[side].session.as_ref().unwrap().state()
    }

    /// The link goes down; registers read all ones, what is on the wire is lost.
    pub(super) fn link_down(&mut self) {
        self.link.state = LinkState::CableDown;
        self.link.losses += 1;
        self.wire.clear();
        self.wake_both();
    }

    pub(super) fn link_up(&mut self) {
        self.link.state = LinkState::WindowsSet;
        self.wake_both();
    }

    pub(super) fn wake_both(&mut self) {
        for side in &mut self.sides {
            side.step_at = self.now;
        }
    }

    /// Fills memory and registers of both sides with what an earlier run might have left.
    pub(super) fn scribble(&mut self, side: usize) {
        for word in 0..(LINES * 8) as usize {
            let value = self.dice.next();
            self.sides[side].memory.store(word, value);
        }
        for i in 0..8 {
            self.sides[side].registers[i] = self.dice.next() as u32;
        }
    }

    /// The same for channel memory alone.
    pub(super) fn scribble_channels(&mut self, side: usize) {
        for word in 256 * 8..(LINES * 8) as usize {
            let value = self.dice.next();
            self.sides[side].memory.store(word, value);
        }
    }

    pub(super) fn new_memory(&mut self, side: usize) {
        self.sides[side].memory = Memory::new(LINES);
    }

    pub(super) fn all_ones(&mut self, on: bool) {
        for side in &mut self.sides {
            side.memory.ones = on;
        }
    }

    pub(super) fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        self.run_until(end, |_| false);
        self.now = end;
    }

    /// Runs until `done` holds or until `end`; says which.
    pub(super) fn run_until(&mut self, end: Duration, done: impl Fn(&Self) -> bool) -> bool {
        loop {
            if done(self) {
                return true;
            }
            let arrival = self.wire.iter().map(|op| op.at).min();
            let steps = self.sides.iter().filter(|s| s.session.is_some() && !s.paused);
            let next = steps.map(|s| s.step_at).chain(arrival).min();
            let Some(next) = next.filter(|at| *at <= end) else {
                return false;
            };
            self.now = self.now.max(next);
            self.deliver();
            for side in 0..2 {
                let s = &self.sides[side];
                if s.session.is_some() && !s.paused && s.step_at <= self.now {
                    self.step(side);
                }
            }
        }
    }

    pub(super) fn run_to_running(&mut self, within: Duration) {
        let end = self.now + within;
        let running =
            |w: &Self| (0..2).all(|s| w.sides[s].session.is_some() && w.state(s) == SessionState::Running);
        assert!(
            self.run_until(end, running),
            "{:?} {:?}; {:?} {:?}",
            self.state(0),
            self.state(1),
            self.sides[0].events,
            self.sides[1].events
        );
    }

    fn deliver(&mut self) {
        let (due, later) = std::mem::take(&mut self.wire)
            .into_iter()
            .partition(|op| op.at <= self.now);
        self.wire = later;
        let mut due: Vec<Op> = due;
        due.sort_by_key(|op| op.at); // stable: what was sent first arrives first
        if self.link.state == LinkState::CableDown {
            return;
        }
        for op in due {
            let side = &mut self.sides[op.to];
            match op.what {
                What::Word(word, value) => side.memory.store(word, value),
                What::Line(line, content) => {
                    for (i, word) in content.0.iter().enumerate() {
                        side.memory.store(line as usize * 8 + i, *word);
                    }
                }
                What::Register(i, value) => side.registers[i] = value,
                What::Ring => side.step_at = self.now,
            }
        }
    }

    fn step(&mut self, side: usize) {
        let mut actions = Vec::new();
        let (now, link) = (self.now, self.link);
        let s = &mut self.sides[side];
        let Some(session) = &mut s.session else { return };
        let down = link.state == LinkState::CableDown;
        let inputs = Inputs {
            link,
            registers: if down { [u32::MAX; 8] } else { s.registers },
            inbound: &s.memory,
            outbound_lines: (link.state == LinkState::WindowsSet).then_some(s.reach),
        };
        session.step(now, &inputs, &mut actions);
        // A wait has a granularity; and nothing may spin.
        s.step_at = now + session.next_wakeup(now).max(Duration::from_micros(50));
        self.carry_out(side, actions);
    }

    pub(super) fn carry_out(&mut self, side: usize, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Put { line, content } => self.put(side, line, content),
                Action::WriteRegisters(registers) => {
                    if self.is_lost(side) {
                        continue;
                    }
                    // One after the other, in order.
                    let mut at = self.arrival();
                    for (i, value) in registers.into_iter().enumerate() {
                        if self.faults.scramble {
                            at = at.max(self.arrival());
                        }
                        self.send(at, side, What::Register(i, value));
                    }
                }
                Action::Ring => {
                    if !self.sides[side].transmit_dead {
                        let at = self.arrival();
                        self.send(at, side, What::Ring);
                    }
                }
                Action::ChannelUp(id, lanes) => self.channel_up(side, id, lanes),
                Action::ChannelDown(id, reason) => {
                    let s = &mut self.sides[side];
                    assert!(s.up.remove(&id).is_some(), "down but not up");
                    s.downs.push((id, reason));
                    if s.drains {
                        s.session.as_mut().unwrap().reader_drained(id);
                        s.step_at = self.now;
                    }
                }
                Action::DrainEnded(id) => self.sides[side].drains_ended.push(id),
                Action::Event(event) => self.event(side, event),
            }
        }
    }

    fn is_lost(&mut self, side: usize) -> bool {
        let lose = &mut self.sides[side].lose;
        if *lose > 0 {
            *lose -= 1;
            return true;
        }
        self.dice.chance(self.faults.lost)
    }

    fn arrival(&mut self) -> Duration {
        let delay = self.faults.delay.as_nanos() as u64;
        let after = if self.faults.scramble {
            self.dice.below(delay + 1)
        } else {
            delay
        };
        self.now + Duration::from_nanos(after)
    }

    fn send(&mut self, at: Duration, from: usize, what: What) {
        self.wire.push(Op {
            at,
            to: 1 - from,
            what,
        });
    }

    fn put(&mut self, side: usize, line: u64, content: Line) {
        let s = &mut self.sides[side];
        assert!(s.may_store, "a store while nobody is known to be there");
        assert!(line < s.reach.min(LINES), "a store outside the peer's memory");
        s.puts += 1;
        if self.is_lost(side) || self.sides[side].transmit_dead || line >= self.sides[side].mapped {
            return;
        }
        if self.faults.scramble {
            for (i, word) in content.0.into_iter().enumerate() {
                let at = self.arrival();
                self.send(at, side, What::Word(line as usize * 8 + i, word));
            }
        } else {
            let at = self.arrival();
            self.send(at, side, What::Line(line, content));
        }
    }

    fn channel_up(&mut self, side: usize, id: ChannelId, lanes: Lanes) {
        // One key of one side pairs with one key of the other, ever: no two lives share one.
        let (own, theirs) = (lanes.receive.to_consumer, lanes.transmit.to_consumer);
        assert_eq!(own, lanes.transmit.to_producer);
        assert_eq!(theirs, lanes.receive.to_producer);
        assert!(self.partners.insert(key(own), theirs).is_none_or(|k| k == theirs));
        assert!(self.partners.insert(key(theirs), own).is_none_or(|k| k == own));
        assert!(self.lanes.insert(key(own), lanes).is_none(), "a key used twice");
        if let Some(other) = self.lanes.get(&key(theirs)) {
            assert_eq!(other.transmit, lanes.receive);
            assert_eq!(other.receive, lanes.transmit);
            assert_eq!(other.transmit_order, lanes.receive_order);
            assert_eq!(other.peer_doorbell, lanes.own_doorbell);
        }
        if self.must_be_clear {
            for line in lanes.transmit.consumer_base..lanes.transmit.consumer_base + 6 {
                assert_eq!(
                    self.sides[1 - side].memory.load_line(line),
                    Line::ZERO,
                    "left over"
                );
            }
        }
        let s = &mut self.sides[side];
        let tag = s.tags.insert(lanes.inbound_base, own.tag());
        assert_ne!(
            tag,
            Some(own.tag()),
            "a tag used twice in a row over the same memory"
        );
        assert!(s.up.insert(id, lanes).is_none(), "up twice");
        s.ups.push((id, lanes));
    }

    fn event(&mut self, side: usize, event: Event) {
        let s = &mut self.sides[side];
        match &event {
            Event::State(state) => assert_ne!(s.told.replace(*state), Some(*state), "told twice"),
            Event::Running(_) => {
                assert_ne!(
                    s.told.replace(SessionState::Running),
                    Some(SessionState::Running),
                    "running twice"
                );
            }
            Event::LinkLost { .. } | Event::PeerGone(_) | Event::Refused(_) => s.told = None,
            _ => {}
        }
        match &event {
            Event::PeerGone(_) | Event::LinkLost { .. } => s.may_store = false,
            Event::State(state) => s.may_store = *state >= SessionState::PeerSeen,
            Event::Refused(_) | Event::Running(_) => s.may_store = true,
            _ => {}
        }
        s.events.push(event);
    }

    pub(super) fn count(&self, side: usize, name: &str) -> usize {
        self.sides[side]
            .events
            .iter()
            .filter(|e| e.name() == name)
            .count()
    }

    /// Every channel that both sides have is up on both, with the same lanes.
    pub(super) fn assert_channels_match(&self) {
        assert_eq!(self.sides[0].up.len(), self.sides[1].up.len());
        for lanes in self.sides[0].up.values() {
            let other = self.sides[1].up.values().find(|l| l.receive == lanes.transmit);
            assert_eq!(other.map(|l| l.transmit), Some(lanes.receive));
        }
    }

    pub(super) fn is_settled(&self) -> bool {
        (0..2).all(|s| {
            self.sides[s].session.is_some()
                && self.state(s) == SessionState::Running
                && self.sides[s].up.len() == self.sides[s].specs.len()
        })
    }
}
