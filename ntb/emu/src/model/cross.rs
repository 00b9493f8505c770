//! What crosses the link: posted writes in order, reads that push them, translation at the far end, and what a
//! scenario does to all of it.

use std::time::{Duration, Instant};

use super::{
    disturb::{Counted, Hold},
    dma::Faults,
    side::SideId,
    state::{State, Timer},
};

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
    },
    Doorbells {
        bits: u64,
    },
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
            way.held.push_back((Instant::now() + time, rest));
            self.after(time, Timer::Release(from));
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
            self.fault(from, faults);
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
            return;
        }
        let way = &mut self.ways[from];
        let mut data = data.to_vec();
        if way.disturb.drops_register() {
            way.stats.lost_injected += 1;
            return;
        }
        if way.disturb.blanks_register() {
            way.stats.altered += 1;
            data.fill(0xFF);
        }
        self.send(from, Posted::Register { offset, data });
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
            self.deliver_until(side, None);
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
        let way = &mut self.ways[from];
        way.stats.delayed += 1;
        let delay: Duration = way.disturb.delay;
        // Never overtakes: the delay may have become shorter since.
        let due = way.queue.back().map_or(Instant::now() + delay, |(last, _)| {
            (*last).max(Instant::now() + delay)
        });
        way.queue.push_back((due, what));
        self.at(due, Timer::Deliver(from));
    }

    pub(super) fn deliver_until(&mut self, from: SideId, now: Option<Instant>) {
        while let Some((due, _)) = self.ways[from].queue.front()
            && now.is_none_or(|now| *due <= now)
            && let Some((_, what)) = self.ways[from].queue.pop_front()
        {
            self.arrive(from, what);
        }
    }

    /// Lets go of the second halves of lines: an access that is not combined pushes them out.
    fn release(&mut self, from: SideId) {
        while let Some((_, what)) = self.ways[from].held.pop_front() {
            self.send(from, what);
        }
    }

    fn arrive(&mut self, from: SideId, what: Posted) {
        let family = self.family;
        match what {
            Posted::Window { window, offset, data } => self.arrive_window(from, window, offset, &data),
            Posted::Register { offset, data } => {
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
            self.fault(from, faults);
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

    fn fault(&mut self, from: SideId, faults: Faults) {
        let stats = &mut self.ways[from].stats;
        stats.fault_unmapped += faults.unmapped;
        stats.fault_forbidden += faults.forbidden;
        stats.fault_unreachable += faults.unreachable;
    }

    /// Lets go of the second halves that are due.
    pub(super) fn release_until(&mut self, from: SideId, now: Instant) {
        while let Some((due, _)) = self.ways[from].held.front()
            && *due <= now
            && let Some((_, what)) = self.ways[from].held.pop_front()
        {
            self.send(from, what);
        }
    }
}
