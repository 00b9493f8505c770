//! The pair's state and its rules, whatever the family: one lock's worth, so that what one side sends is in place
//! at the other before anything it sends later.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    account::{DirectionStats, LinkStats, Snapshot, WireModel},
    config::{self, pcie},
    cross::Waiting,
    disturb::{Disturb, Script},
    family::Family,
    irq::{Guard, IrqKind},
    regfile::pieces,
    side::{Both, Side, SideId},
};

/// Who caused a reset or a link change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Actor {
    /// Software at either end.
    Client,
    /// The cable, or a scenario that plays it.
    Cable,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    Deliver(SideId),
    Release(SideId),
    Trained(u64),
    CableUp,
    Step(usize),
}

/// The physical link.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) cable: bool,
    pub(super) speed: u8,
    pub(super) width: u8,
    pub(super) up: bool,
    training: Option<u64>,
    trainings: u64,
    train_time: Duration,
}

/// From one side towards the other.
#[derive(Debug, Default)]
pub(super) struct Direction {
    pub(super) stats: DirectionStats,
    pub(super) disturb: Disturb,
    pub(super) queue: Waiting,
    pub(super) held: Waiting,
}

/// Everything under the pair's lock.
#[derive(Debug)]
pub struct State {
    pub(super) family: &'static dyn Family,
    pub(super) sides: Both<Side>,
    /// By sender.
    pub(super) ways: Both<Direction>,
    pub(super) link: Link,
    pub(super) script: Script,
    pub(super) window_bytes: u64,
    pub(super) wire: WireModel,
    /// Whether refused stores are kept for the client that they were aimed at.
    pub(super) tell_refused: bool,
    guard: Arc<Guard>,
    timers: BinaryHeap<Reverse<(Instant, u64, Timer)>>,
    timer_seq: u64,
    /// Set when the timer thread has to look again.
    pub(super) timers_changed: bool,
}

impl State {
    pub(super) fn new(
        family: &'static dyn Family,
        window_bytes: u64,
        max_payload: u64,
        train_time: Duration,
        guard: Arc<Guard>,
        script: Script,
    ) -> Self {
        let spec = family.config();
        let sides = Both::from_fn(|side| {
            let mut config = config::build(&spec, &family.bars(window_bytes));
            let regs = family.power_on(side, window_bytes, &mut config);
            Side::new(spec, config, regs)
        });
        let (speed, width) = spec.link;
        Self {
            family,
            sides,
            ways: Both::default(),
            link: Link {
                cable: true,
                speed,
                width,
                up: false,
                training: None,
                trainings: 0,
                train_time,
            },
            script,
            window_bytes,
            wire: WireModel::new(max_payload),
            tell_refused: false,
            guard,
            timers: BinaryHeap::new(),
            timer_seq: 0,
            timers_changed: false,
        }
    }

    // --- Link ---

    /// Speed and width as a PCIe link status register shows them, 0 while down.
    pub(super) fn link_status(&self) -> u16 {
        if self.link.up {
            1 << 13 | u16::from(self.link.width) << 4 | u16::from(self.link.speed)
        } else {
            0
        }
    }

    /// Looks whether the link can be up, and takes it there or down.
    pub(super) fn update_link(&mut self, by: Actor) {
        let family = self.family;
        let able = self.link.cable
            && SideId::BOTH
                .into_iter()
                .all(|s| self.sides[s].live() && family.wants_link(self, s));
        if !able {
            self.link.training = None;
            if self.link.up {
                self.set_link(false, by);
            }
        } else if !self.link.up && self.link.training.is_none() {
            if self.link.train_time.is_zero() {
                self.set_link(true, by);
            } else {
                self.link.trainings += 1;
                self.link.training = Some(self.link.trainings);
                self.after(self.link.train_time, Timer::Trained(self.link.trainings));
            }
        }
    }

    fn set_link(&mut self, up: bool, by: Actor) {
        self.link.up = up;
        self.link.training = None;
        for side in SideId::BOTH {
            let stats = &mut self.sides[side].stats;
            if up {
                stats.link_ups += 1;
            } else {
                stats.link_downs += 1;
                let way = &mut self.ways[side];
                way.stats.lost_link_down += way.queue.clear() + way.held.clear();
            }
        }
        let family = self.family;
        for side in SideId::BOTH {
            family.link_changed(self, side, by);
        }
    }

    /// Resets a function; the other side sees its link go.
    pub(super) fn reset(&mut self, side: SideId, by: Actor) {
        let family = self.family;
        family.before_reset(self, side);
        self.sides[side].reset();
        self.update_link(by);
    }

    // --- Interrupts ---

    /// Raises an MSI-X vector, which is a memory write of the function.
    pub(super) fn raise(&mut self, side: SideId, vector: u32) {
        let s = &mut self.sides[side];
        if s.masters() {
            s.msix.raise(vector, &self.guard);
        } else {
            s.stats.interrupts_lost += 1;
        }
    }

    /// Raises an event that software outside the function reports.
    pub(super) fn raise_event(&mut self, side: SideId, kind: IrqKind) {
        let s = &mut self.sides[side];
        match kind {
            IrqKind::Msix => {}
            IrqKind::Error => s.error.raise(0, &self.guard),
            IrqKind::Request => s.request.raise(0, &self.guard),
        }
    }

    pub(super) fn trigger(&mut self, side: SideId, kind: IrqKind, vector: u32) {
        let s = &mut self.sides[side];
        match kind {
            IrqKind::Msix => s.msix.raise(vector, &self.guard),
            IrqKind::Error => s.error.raise(vector, &self.guard),
            IrqKind::Request => s.request.raise(vector, &self.guard),
        }
    }

    // --- Accesses by a client ---

    pub(super) fn bar_read(&mut self, side: SideId, bar: u8, offset: u64, out: &mut [u8]) {
        if !self.sides[side].answers() {
            self.sides[side].stats.unanswered += 1;
            out.fill(0xFF);
            return;
        }
        let family = self.family;
        if let Some(window) = family.window_of(bar) {
            self.window_read(side, window, offset, out);
            return;
        }
        self.sides[side].stats.register_reads += 1;
        if bar == 0 && !self.sides[side].regs.knows(offset, out.len()) {
            self.sides[side].stats.reserved_accesses += 1;
        }
        let mut rest = out;
        for (at, size) in pieces(offset, rest.len()) {
            let (piece, tail) = rest.split_at_mut(size);
            rest = tail;
            family.read(self, side, bar, at, piece);
        }
    }

    pub(super) fn bar_write(&mut self, side: SideId, bar: u8, offset: u64, data: &[u8]) {
        if !self.sides[side].answers() {
            self.sides[side].stats.unanswered += 1;
            return;
        }
        let family = self.family;
        if let Some(window) = family.window_of(bar) {
            self.window_write(side, window, offset, data);
            return;
        }
        self.sides[side].stats.register_writes += 1;
        if bar == 0 && !self.sides[side].regs.knows(offset, data.len()) {
            self.sides[side].stats.reserved_accesses += 1;
        }
        let mut rest = data;
        for (at, size) in pieces(offset, data.len()) {
            let (piece, tail) = rest.split_at(size);
            rest = tail;
            family.write(self, side, bar, at, piece);
        }
    }

    pub(super) fn config_read(&self, side: SideId, offset: u64, out: &mut [u8]) {
        if self.sides[side].present {
            self.sides[side].config.read(offset, out);
        } else {
            out.fill(0xFF);
        }
    }

    pub(super) fn config_write(&mut self, side: SideId, offset: u64, data: &[u8]) {
        if !self.sides[side].present {
            return;
        }
        let s = &mut self.sides[side];
        let control = u64::from(s.pcie(pcie::DEVCTL));
        // The bit that starts a reset reads as zero, so it is looked for in what was written.
        let high = (control + 1)
            .checked_sub(offset)
            .and_then(|i| usize::try_from(i).ok());
        let flr = high
            .and_then(|i| data.get(i))
            .is_some_and(|b| u16::from(*b) << 8 & pcie::DEVCTL_FLR != 0);
        s.config.write(offset, data);
        if flr {
            self.reset(side, Actor::Client);
        } else {
            self.update_link(Actor::Client); // power state
        }
    }

    // --- Time ---

    pub(super) fn after(&mut self, time: Duration, what: Timer) {
        self.at(Instant::now() + time, what);
    }

    pub(super) fn at(&mut self, due: Instant, what: Timer) {
        self.timer_seq += 1;
        self.timers.push(Reverse((due, self.timer_seq, what)));
        self.timers_changed = true;
    }

    /// Does what is due; answers when to come again.
    pub(super) fn advance(&mut self, now: Instant) -> Option<Instant> {
        self.run_script();
        while let Some(Reverse((due, _, _))) = self.timers.peek() {
            if *due > now {
                return Some(*due);
            }
            let Some(Reverse((_, _, what))) = self.timers.pop() else {
                break;
            };
            match what {
                Timer::Deliver(from) => self.deliver(from, now),
                Timer::Release(from) => self.release_timer(from, now),
                Timer::Trained(which) => {
                    if self.link.training == Some(which) {
                        self.set_link(true, Actor::Client);
                    }
                }
                Timer::CableUp => {
                    self.link.cable = true;
                    self.update_link(Actor::Cable);
                }
                Timer::Step(step) => self.run_step(step),
            }
            self.run_script();
        }
        None
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        let side = |id: SideId| {
            let s = &self.sides[id];
            let mut stats = s.stats;
            stats.interrupts = s.msix.raised() + s.error.raised() + s.request.raised();
            stats.interrupts_lost += s.msix.lost() + s.error.lost() + s.request.lost();
            stats.maps_now = s.memory.mappings() as u64;
            stats.maps_unreachable = s.memory.unreachable_maps();
            stats.attached = s.attached;
            stats
        };
        Snapshot {
            family: self.family.name(),
            wire_model: self.wire,
            link: LinkStats {
                up: self.link.up,
                speed: self.link.speed,
                width: self.link.width,
            },
            a_to_b: self.ways.a.stats,
            b_to_a: self.ways.b.stats,
            a: side(SideId::A),
            b: side(SideId::B),
            actions: self.script.done(),
        }
    }
}
