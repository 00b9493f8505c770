//! What crosses the link: posted writes in order, reads that push them, translation at the far end, and what a
//! scenario does to all of it.

use std::{collections::VecDeque, time::Instant};

use super::{
    disturb::{Counted, Hold},
    dma::Faults,
    regfile::touches,
    side::SideId,
    state::{State, Timer},
};

/// Most refused stores that are kept for a client: it is told of a fault, not of every store.
const MOST_REFUSED: usize = 16;

/// Most windows that a family has.
const WINDOWS_MAX: usize = 4;

/// Something on its way to the other side.
#[derive(Debug)]
pub(super) enum Posted {
    Window {
        window: usize,
        offset: u64,
        data: Vec<u8>,
    },
    Register {
        offset: u32,
        data: Vec<u8>,
        /// Not as it was sent.
        altered: bool,
    },
    Doorbells {
        bits: u64,
    },
}

impl Posted {
    /// What it takes to remember it, nearly.
    fn bytes(&self) -> usize {
        size_of::<Self>()
            + match self {
                Self::Window { data, .. } | Self::Register { data, .. } => data.len(),
                Self::Doorbells { .. } => 0,
            }
    }
}

/// Most bytes of writes that wait in one queue: what is older arrives early rather than memory running out.
const MAX_WAITING: usize = 64 << 20;

/// Writes that arrive later, in order, with the one timer that they need.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    items: VecDeque<(Instant, Posted)>,
    bytes: usize,
    timer: Option<Instant>,
}

impl Waiting {
    fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Adds one; answers when a timer has to go off for it.
    fn push(&mut self, due: Instant, what: Posted) -> Option<Instant> {
        // Never overtakes: the delay may have become shorter since.
        let due = self.items.back().map_or(due, |(last, _)| (*last).max(due));
        self.bytes += what.bytes();
        self.items.push_back((due, what));
        self.want_timer()
    }

    fn want_timer(&mut self) -> Option<Instant> {
        let (due, _) = self.items.front()?;
        if self.timer.is_some_and(|at| at <= *due) {
            return None;
        }
        self.timer = Some(*due);
        self.timer
    }

    /// The timer has gone off; answers when the next has to.
    fn timer_done(&mut self) -> Option<Instant> {
        self.timer = None;
        self.want_timer()
    }

    /// The oldest, if it is due, or if too many bytes wait; without `now`, in any case.
    fn pop(&mut self, now: Option<Instant>) -> Option<Posted> {
        let (due, _) = self.items.front()?;
        if self.bytes <= MAX_WAITING && now.is_some_and(|now| *due > now) {
            return None;
        }
        let (_, what) = self.items.pop_front()?;
        self.bytes -= what.bytes();
        Some(what)
    }

    /// Forgets all; answers how many they were.
    pub(super) fn clear(&mut self) -> u64 {
        self.bytes = 0;
        std::mem::take(&mut self.items).len() as u64
    }
}

impl State {
    pub(super) fn window_write(&mut self, from: SideId, window: usize, offset: u64, data: &[u8]) {
        let packets = self.wire.write(offset, data.len() as u64);
        let stats = &mut self.ways[from].stats;
        stats.window_writes += 1;
        stats.window_write_bytes += data.len() as u64;
        stats.window_write_packets += packets;
        self.script.note(Counted::Writes(from));
        if !self.passes(from) {
            return;
        }
        let way = &mut self.ways[from];
        if let Some(Hold { bytes, time }) = way.disturb.hold(data.len()) {
            let (now, later) = data.split_at(bytes);
            way.stats.held += 1;
            let rest = Posted::Window {
                window,
                offset: offset + bytes as u64,
                data: later.to_vec(),
            };
            if let Some(at) = way.held.push(Instant::now() + time, rest) {
                self.at(at, Timer::Release(from));
            }
            self.release_due(from, Instant::now());
            self.send_window(from, window, offset, now);
            return;
        }
        self.send_window(from, window, offset, data);
    }

    fn send_window(&mut self, from: SideId, window: usize, offset: u64, data: &[u8]) {
        if self.direct(from) {
            self.arrive_window(from, window, offset, data);
        } else {
            let data = data.to_vec();
            self.enqueue(from, Posted::Window { window, offset, data });
        }
    }

    pub(super) fn window_read(&mut self, from: SideId, window: usize, offset: u64, out: &mut [u8]) {
        let (request, completion) = self.wire.read(offset, out.len() as u64);
        let stats = &mut self.ways[from].stats;
        stats.window_reads += 1;
        stats.window_read_bytes += out.len() as u64;
        stats.window_read_packets += request;
        out.fill(0xFF);
        if !self.read_passes(from) {
            return;
        }
        self.ways[from.peer()].stats.completion_packets += completion;
        let Some((address, n)) = self.translate(from, window, offset, out.len()) else {
            return;
        };
        let peer = &self.sides[from.peer()];
        if let Some(out) = out.get_mut(..n) {
            let faults = peer.memory.read(address, out);
            self.fault(from, window, faults);
        }
    }

    /// A write to registers of the other side.
    pub(super) fn post_register(&mut self, from: SideId, offset: u32, data: &[u8]) {
        let packets = self.wire.write(offset.into(), data.len() as u64);
        let stats = &mut self.ways[from].stats;
        stats.register_writes += 1;
        stats.register_write_packets += packets;
        self.release(from);
        if !self.passes(from) {
            if self.ways[from].disturb.dead {
                self.misled(from.peer(), offset, data.len(), true);
            }
            return;
        }
        let way = &mut self.ways[from];
        let mut data = data.to_vec();
        if way.disturb.drops_register() {
            way.stats.lost_injected += 1;
            self.misled(from.peer(), offset, data.len(), true);
            return;
        }
        let altered = way.disturb.blanks_register();
        if altered {
            way.stats.altered += 1;
            data.fill(0xFF);
        }
        let register = Posted::Register {
            offset,
            data,
            altered,
        };
        self.send(from, register);
    }

    /// Doorbells, as bits of the other side's status.
    pub(super) fn post_doorbells(&mut self, from: SideId, bits: u64) {
        let packets = self.wire.write(0, 4);
        let stats = &mut self.ways[from].stats;
        stats.doorbells += 1;
        stats.register_write_packets += packets;
        self.release(from);
        if !self.passes(from) {
            return;
        }
        let way = &mut self.ways[from];
        if way.disturb.drops_doorbell() {
            way.stats.lost_injected += 1;
            return;
        }
        self.send(from, Posted::Doorbells { bits });
    }

    /// A read of registers of the other side: all ones when nobody answers.
    pub(super) fn read_peer(&mut self, from: SideId, offset: u32, out: &mut [u8]) {
        self.ways[from].stats.register_reads += 1;
        out.fill(0xFF);
        if self.read_passes(from) {
            self.sides[from.peer()].regs.read(offset.into(), out);
        }
    }

    /// Whether anything sent now arrives at all.
    fn passes(&mut self, from: SideId) -> bool {
        let open = self.family.connected(self);
        let way = &mut self.ways[from];
        if !open {
            way.stats.lost_link_down += 1;
        } else if way.disturb.dead {
            way.stats.lost_injected += 1;
        } else {
            return true;
        }
        false
    }

    /// Whether a read is answered; it pushes what was posted before it, both ways, ahead of itself.
    fn read_passes(&mut self, from: SideId) -> bool {
        if !self.passes(from) || self.ways[from.peer()].disturb.dead {
            return false;
        }
        for side in [from, from.peer()] {
            self.release(side);
            self.deliver_due(side, None);
        }
        true
    }

    fn direct(&self, from: SideId) -> bool {
        let way = &self.ways[from];
        way.queue.is_empty() && way.disturb.delay.is_zero()
    }

    fn send(&mut self, from: SideId, what: Posted) {
        if self.direct(from) {
            self.arrive(from, what);
        } else {
            self.enqueue(from, what);
        }
    }

    fn enqueue(&mut self, from: SideId, what: Posted) {
        let now = Instant::now();
        let way = &mut self.ways[from];
        way.stats.delayed += 1;
        if let Some(at) = way.queue.push(now + way.disturb.delay, what) {
            self.at(at, Timer::Deliver(from));
        }
        self.deliver_due(from, Some(now));
    }

    fn deliver_due(&mut self, from: SideId, now: Option<Instant>) {
        while let Some(what) = self.ways[from].queue.pop(now) {
            self.arrive(from, what);
        }
    }

    /// The timer of delayed writes has gone off.
    pub(super) fn deliver(&mut self, from: SideId, now: Instant) {
        self.deliver_due(from, Some(now));
        if let Some(at) = self.ways[from].queue.timer_done() {
            self.at(at, Timer::Deliver(from));
        }
    }

    /// Lets go of the second halves of lines: an access that is not combined pushes them out.
    fn release(&mut self, from: SideId) {
        while let Some(what) = self.ways[from].held.pop(None) {
            self.send(from, what);
        }
    }

    fn release_due(&mut self, from: SideId, now: Instant) {
        while let Some(what) = self.ways[from].held.pop(Some(now)) {
            self.send(from, what);
        }
    }

    /// The timer of second halves has gone off.
    pub(super) fn release_timer(&mut self, from: SideId, now: Instant) {
        self.release_due(from, now);
        if let Some(at) = self.ways[from].held.timer_done() {
            self.at(at, Timer::Release(from));
        }
    }

    fn arrive(&mut self, from: SideId, what: Posted) {
        let family = self.family;
        match what {
            Posted::Window { window, offset, data } => self.arrive_window(from, window, offset, &data),
            Posted::Register {
                offset,
                data,
                altered,
            } => {
                self.misled(from.peer(), offset, data.len(), altered);
                self.sides[from.peer()].regs.write(offset.into(), &data);
                family.peer_wrote(self, from.peer(), offset, data.len());
            }
            Posted::Doorbells { bits } => family.doorbells(self, from.peer(), bits),
        }
    }

    fn arrive_window(&mut self, from: SideId, window: usize, offset: u64, data: &[u8]) {
        let Some((address, n)) = self.translate(from, window, offset, data.len()) else {
            return;
        };
        if let Some(data) = data.get(..n) {
            let faults = self.sides[from.peer()].memory.write(address, data);
            self.fault(from, window, faults);
            let refused = faults.refused.filter(|_| self.tell_refused);
            if let Some((at, len)) = refused {
                let data = data.get(at..at + len.min(8)).unwrap_or_default();
                let told = &mut self.sides[from.peer()].refused;
                if told.len() < MOST_REFUSED {
                    told.push((address.wrapping_add(at as u64), data.to_vec()));
                }
            }
        }
    }

    /// Bus address at the other side, and how many of `len` bytes the window lets through.
    fn translate(&mut self, from: SideId, window: usize, offset: u64, len: usize) -> Option<(u64, usize)> {
        let peer = from.peer();
        if !self.sides[peer].masters() {
            self.ways[from].stats.not_master += 1;
            return None;
        }
        let open = self.family.translation(self, from, window);
        let room = open.map_or(0, |t| t.bytes.min(self.window_bytes).saturating_sub(offset));
        let n = room.min(len as u64);
        if n < len as u64 {
            self.ways[from].stats.outside_window += 1;
            let family = self.family;
            family.missed(self, peer);
        }
        let base = open.filter(|_| n > 0)?.base;
        // Upper address bits are replaced, so the sum wraps where the bus does.
        Some((base.wrapping_add(offset), n as usize))
    }

    /// The other side's write to `len` bytes of `side`'s registers did not arrive as it was sent, or did.
    fn misled(&mut self, side: SideId, offset: u32, len: usize, misled: bool) {
        let registers = (0..WINDOWS_MAX).flat_map(|window| self.family.window_registers(window));
        for word in registers.flat_map(|&(at, bytes)| (at..at + bytes).step_by(4)) {
            if touches(offset.into(), len, word, 4) {
                let words = &mut self.sides[side].misled;
                match misled {
                    true => words.insert(word),
                    false => words.remove(&word),
                };
            }
        }
    }

    fn fault(&mut self, from: SideId, window: usize, faults: Faults) {
        let words = &self.sides[from].misled;
        let mut registers = self.family.window_registers(window).iter();
        let misled = registers.any(|&(at, bytes)| words.range(at..at + bytes).next().is_some());
        let stats = &mut self.ways[from].stats;
        if misled {
            stats.fault_misled += faults.unmapped + faults.forbidden;
        } else {
            stats.fault_unmapped += faults.unmapped;
            stats.fault_forbidden += faults.forbidden;
        }
        stats.fault_unreachable += faults.unreachable;
    }
}
