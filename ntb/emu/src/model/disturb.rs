//! What can go wrong, on demand: actions, when a script takes them, and their standing effects on a direction.

use std::time::Duration;

use rustix::io::Errno;

use super::{
    config::{aer, pcie},
    irq::IrqKind,
    side::{Both, SideId},
    state::{Actor, State, Timer},
};

/// How grave an injected PCIe error is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// Corrected by the link: counted only.
    Correctable,
    /// A request was lost, the link works.
    NonFatal,
    /// The link cannot be trusted.
    Fatal,
}

/// Something a scenario does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// Pulls the cable.
    LinkDown,
    /// Plugs it in.
    LinkUp,
    /// Pulls it and plugs it in after a time.
    LinkFlap(Duration),
    /// Changes the speed, 1 to 5, while the link stays up.
    Speed(u8),
    /// Changes the number of lanes, while the link stays up.
    Width(u8),
    /// Loses everything that this side sends (or stops losing it) while the link stays up.
    Dead {
        /// The sender.
        from: SideId,
        /// Start or stop.
        dead: bool,
    },
    /// Delays everything that this side sends, in order; zero ends it.
    Delay {
        /// The sender.
        from: SideId,
        /// How long.
        time: Duration,
    },
    /// Loses this side's next writes to registers of the other (scratchpads).
    LoseRegisters {
        /// The sender.
        from: SideId,
        /// How many.
        count: u64,
    },
    /// Turns this side's next writes to registers of the other into all ones.
    BlankRegisters {
        /// The sender.
        from: SideId,
        /// How many.
        count: u64,
    },
    /// Loses this side's next doorbells.
    LoseDoorbells {
        /// The sender.
        from: SideId,
        /// How many.
        count: u64,
    },
    /// Splits every `every`-th store of more than `bytes` bytes: the rest arrives `time` later, or before the next
    /// access that is not combined. `every` 0 ends it.
    HoldLines {
        /// The sender.
        from: SideId,
        /// Bytes that arrive at once.
        bytes: usize,
        /// How long the rest takes.
        time: Duration,
        /// Which stores.
        every: u64,
    },
    /// Takes a function out of its slot.
    Remove(SideId),
    /// Puts it back, as after power-on.
    Return(SideId),
    /// Reports a PCIe error at a side.
    Error {
        /// Where.
        side: SideId,
        /// How grave.
        severity: Severity,
    },
    /// Asks a side's client to let the device go.
    RequestRemoval(SideId),
    /// Refuses a side's k-th next mapping.
    RefuseMap {
        /// Whose.
        side: SideId,
        /// 1 is the next one.
        nth: u64,
        /// What the client is told.
        errno: Errno,
    },
}

/// Standing effects on one direction.
#[derive(Debug, Default)]
pub(super) struct Disturb {
    pub(super) dead: bool,
    pub(super) delay: Duration,
    lose_registers: u64,
    blank_registers: u64,
    lose_doorbells: u64,
    hold: Option<(Hold, u64)>,
    stores: u64,
}

/// How a store is split.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hold {
    pub(super) bytes: usize,
    pub(super) time: Duration,
}

fn take_one(count: &mut u64) -> bool {
    let any = *count > 0;
    *count = count.saturating_sub(1);
    any
}

impl Disturb {
    pub(super) fn drops_register(&mut self) -> bool {
        take_one(&mut self.lose_registers)
    }

    pub(super) fn blanks_register(&mut self) -> bool {
        take_one(&mut self.blank_registers)
    }

    pub(super) fn drops_doorbell(&mut self) -> bool {
        take_one(&mut self.lose_doorbells)
    }

    /// How to split a store of `len` bytes, if it is to be split.
    pub(super) fn hold(&mut self, len: usize) -> Option<Hold> {
        let (hold, every) = self.hold.filter(|(h, _)| h.bytes < len)?;
        self.stores += 1;
        self.stores.is_multiple_of(every).then_some(hold)
    }
}

/// A number drawn from a range by the seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range<T> {
    /// Least.
    pub min: T,
    /// Greatest.
    pub max: T,
}

impl Range<u64> {
    fn draw(self, rng: &mut Rng) -> u64 {
        match (self.max - self.min).checked_add(1) {
            Some(span) => self.min + rng.next() % span,
            None => rng.next(),
        }
    }
}

impl Range<Duration> {
    fn draw(self, rng: &mut Rng) -> Duration {
        let nanos = |d: Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
        let range = Range {
            min: nanos(self.min),
            max: nanos(self.max),
        };
        Duration::from_nanos(range.draw(rng))
    }
}

/// What a script counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// Stores to windows by the side.
    Writes(SideId),
    /// Mappings by the side's client.
    Maps(SideId),
}

/// When a step is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Before anything else.
    Start,
    /// So long after the link first came up.
    At(Range<Duration>),
    /// Again and again from then on.
    Every {
        /// From one time to the next.
        period: Range<Duration>,
        /// How often; `None` for ever.
        times: Option<u64>,
    },
    /// When so many have been counted.
    After {
        /// How many.
        count: Range<u64>,
        /// Of what.
        what: Counted,
    },
}

/// One step of a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// When.
    pub when: When,
    /// What.
    pub action: Action,
}

/// SplitMix64: reproducible from the seed, and nothing else is asked of it.
#[derive(Clone, Debug)]
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }
}

/// The steps of a scenario and how far they have come.
#[derive(Debug)]
pub(super) struct Script {
    steps: Vec<Step>,
    /// Per step: how many more to count, or how many more times; `None` when done or without limit.
    left: Vec<Option<u64>>,
    rng: Rng,
    started: bool,
    counting: bool,
    ready: Vec<Action>,
    refuse: Both<Option<(u64, Errno)>>,
    done: u64,
}

impl Script {
    pub(super) fn new(steps: Vec<Step>, seed: u64) -> Self {
        let mut rng = Rng(seed);
        let mut ready = Vec::new();
        let left: Vec<_> = steps
            .iter()
            .map(|step| match step.when {
                When::Start => {
                    ready.push(step.action);
                    None
                }
                When::At(_) => None,
                When::Every { times, .. } => times,
                When::After { count, .. } => Some(count.draw(&mut rng).max(1)),
            })
            .collect();
        let counting = steps.iter().any(|s| matches!(s.when, When::After { .. }));
        Self {
            steps,
            left,
            rng,
            started: false,
            counting,
            ready,
            refuse: Both::default(),
            done: 0,
        }
    }

    pub(super) fn done(&self) -> u64 {
        self.done
    }

    /// Counts one of `what`; steps that waited for it become ready.
    pub(super) fn note(&mut self, what: Counted) {
        if !self.counting {
            return;
        }
        for (step, left) in self.steps.iter().zip(&mut self.left) {
            if let (When::After { what: w, .. }, Some(n)) = (step.when, left.as_mut())
                && w == what
            {
                *n -= 1;
                if *n == 0 {
                    *left = None;
                    self.ready.push(step.action);
                }
            }
        }
    }

    /// Whether this mapping is to be refused, and how.
    pub(super) fn refuses_map(&mut self, side: SideId) -> Option<Errno> {
        let (nth, errno) = self.refuse[side].as_mut()?;
        *nth = nth.saturating_sub(1);
        if *nth > 0 {
            return None;
        }
        let errno = *errno;
        self.refuse[side] = None;
        Some(errno)
    }
}

impl State {
    /// Starts the script's clock, once, and does what is ready.
    pub(super) fn run_script(&mut self) {
        if self.link.up && !self.script.started {
            self.script.started = true;
            for i in 0..self.script.steps.len() {
                self.schedule(i);
            }
        }
        while !self.script.ready.is_empty() {
            for action in std::mem::take(&mut self.script.ready) {
                self.act(action);
            }
        }
    }

    fn schedule(&mut self, step: usize) {
        let after = match self.script.steps.get(step).map(|s| s.when) {
            Some(When::At(time) | When::Every { period: time, .. }) => time.draw(&mut self.script.rng),
            _ => return,
        };
        self.after(after, Timer::Step(step));
    }

    /// Takes a timed step, and sets its next time if it has one.
    pub(super) fn run_step(&mut self, index: usize) {
        let Some(step) = self.script.steps.get(index).copied() else {
            return;
        };
        let mut again = matches!(step.when, When::Every { .. });
        if let Some(Some(left)) = self.script.left.get_mut(index) {
            if *left == 0 {
                return;
            }
            *left -= 1;
            again &= *left > 0;
        }
        self.act(step.action);
        if again {
            self.schedule(index);
        }
    }

    /// Does it now.
    pub(super) fn act(&mut self, action: Action) {
        self.script.done += 1;
        match action {
            Action::LinkDown => self.cable(false),
            Action::LinkUp => self.cable(true),
            Action::LinkFlap(time) => {
                self.cable(false);
                self.after(time, Timer::CableUp);
            }
            Action::Speed(speed) => self.lanes(speed, self.link.width),
            Action::Width(width) => self.lanes(self.link.speed, width),
            Action::Dead { from, dead } => self.ways[from].disturb.dead = dead,
            Action::Delay { from, time } => self.ways[from].disturb.delay = time,
            Action::LoseRegisters { from, count } => self.ways[from].disturb.lose_registers = count,
            Action::BlankRegisters { from, count } => self.ways[from].disturb.blank_registers = count,
            Action::LoseDoorbells { from, count } => self.ways[from].disturb.lose_doorbells = count,
            Action::HoldLines {
                from,
                bytes,
                time,
                every,
            } => {
                self.ways[from].disturb.hold = (every > 0).then_some((Hold { bytes, time }, every));
            }
            Action::Remove(side) => {
                self.sides[side].present = false;
                self.update_link(Actor::Cable);
            }
            Action::Return(side) => {
                let s = &mut self.sides[side];
                if !s.present {
                    s.present = true;
                    s.power_cycle();
                    self.update_link(Actor::Cable);
                }
            }
            Action::Error { side, severity } => self.report_error(side, severity),
            Action::RequestRemoval(side) => self.raise_event(side, IrqKind::Request),
            Action::RefuseMap { side, nth, errno } => {
                self.script.refuse[side] = Some((nth.max(1), errno));
            }
        }
    }

    fn cable(&mut self, plugged: bool) {
        self.link.cable = plugged;
        self.update_link(Actor::Cable);
    }

    fn lanes(&mut self, speed: u8, width: u8) {
        self.link.speed = speed;
        self.link.width = width;
        let family = self.family;
        for side in SideId::BOTH {
            family.lanes_changed(self, side);
        }
    }

    fn report_error(&mut self, side: SideId, severity: Severity) {
        let s = &mut self.sides[side];
        let (register, bit, status) = match severity {
            Severity::Correctable => (aer::CORRECTABLE, aer::BAD_TLP, 1 << 0),
            Severity::NonFatal => (aer::UNCORRECTABLE, aer::COMPLETION_TIMEOUT, 1 << 1),
            Severity::Fatal => (aer::UNCORRECTABLE, aer::DATA_LINK_PROTOCOL, 1 << 2),
        };
        let masked = match severity {
            Severity::Correctable => 0,
            _ => s.config.get(s.aer(aer::UNCORRECTABLE_MASK), 4),
        };
        for (at, width, bits) in [
            (s.aer(register), 4, u64::from(bit)),
            (s.pcie(pcie::DEVSTA), 2, status),
        ] {
            let held = s.config.get(at, width);
            s.config.set(at, width, held | bits);
        }
        if severity != Severity::Correctable && masked & u64::from(bit) == 0 {
            self.raise_event(side, IrqKind::Error);
        }
    }
}
