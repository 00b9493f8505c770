//! The channels of one link: their memory, and the table through which both sides pair them by name.
//!
//! Each opening has a generation. A side writes the generation of the peer's channel of the same name as an echo
//! into its own entry when it is ready to run with exactly that one, together with a key chosen for this pair. A channel
//! is up at a side when the peer's entry echoes this side's generation and the peer has taken this side's entry in: so
//! both ends of a life hold the same two keys, whichever side opened first and however often either closes and opens
//! again.

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

use ntb_mem::line::{LINE_WORDS, Line};

use super::{
    clock::{Earliest, Retry},
    random::Random,
    types::{Action, ChannelId, ChannelSpec, CloseReason, Event, Lanes, Mismatch, OpenError, Place},
};
use crate::{
    link::{
        DOORBELLS,
        engine::{Inbound, Order},
    },
    queue::{Lane, MAX_RING_LINES, MIN_RING_LINES},
    wire::{
        layout::{CHANNELS_FIRST_LINE, MAX_CHANNELS, TABLE_LINE},
        mark::LaneKey,
        page::{PAGE_LINES, USED_LINES},
        table::{Entry, Name, digest},
    },
};

/// What the table needs to know of the life of the link it works in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Context {
    pub(super) now: Duration,
    pub(super) transmit: u64,
    pub(super) receive: u64,
    /// Lines of the peer's memory.
    pub(super) peer_lines: u64,
    pub(super) own_order: Order,
    pub(super) peer_order: Order,
    pub(super) drain_timeout: Duration,
}

#[derive(Debug)]
struct Channel {
    id: ChannelId,
    name: Name,
    spec: ChannelSpec,
    place: Place,
    /// A device of this side is at work in it.
    held: bool,
    /// First line of its memory in the inbound window, and how many lines it has.
    first_line: u64,
    lines: u64,
    doorbell: u32,
    generation: u16,
    closing: bool,
    /// The peer's channel it is paired with.
    pair: Option<Pair>,
    /// Generation of the peer's channel that does not fit, once reported.
    refused: Option<u16>,
    /// Until when unread messages of the life that ended hold up the next.
    draining: Option<Duration>,
    /// The entry has changed since it was posted.
    dirty: bool,
}

#[derive(Clone, Copy, Debug)]
struct Pair {
    /// Slot of the peer's entry.
    slot: usize,
    /// Its generation.
    generation: u16,
    /// What the peer stores into this channel runs under it.
    key: LaneKey,
    ring_lines: u64,
    up: bool,
}

#[derive(Debug)]
pub(super) struct Channels {
    slots: [Option<Channel>; MAX_CHANNELS],
    /// Lines of ordinary memory, and of all memory: what is exported lies between.
    own_lines: u64,
    window_lines: u64,
    next_id: u32,
    generation: u16,
    tag: u16,
    /// Last words of what was posted in this life of the link, 0 for nothing.
    posted: [u64; MAX_CHANNELS],
    acknowledged: bool,
    retry: Retry,
    /// What the peer has posted in this life, and the last words of it.
    peer: [Option<Entry>; MAX_CHANNELS],
    taken: [u64; MAX_CHANNELS],
}

impl Channels {
    pub(super) fn new(own_lines: u64, window_lines: u64, retry: Duration, random: &mut Random) -> Self {
        Self {
            slots: [const { None }; MAX_CHANNELS],
            own_lines,
            window_lines,
            next_id: 0,
            generation: 0,
            tag: random.next() as u16,
            posted: [0; MAX_CHANNELS],
            acknowledged: true,
            retry: Retry::new(retry),
            peer: [None; MAX_CHANNELS],
            taken: [0; MAX_CHANNELS],
        }
    }

    pub(super) fn open(
        &mut self,
        name: &str,
        spec: ChannelSpec,
        place: Place,
    ) -> Result<ChannelId, OpenError> {
        let bad = |why| OpenError::BadName {
            name: name.to_owned(),
            why,
        };
        let wire = Name::new(name).ok_or_else(|| bad("1 to 32 bytes without a zero byte are needed"))?;
        if self.live().any(|c| c.name == wire && !c.closing) {
            return Err(bad("a channel of this name is open already"));
        }
        if !spec.ring_lines.is_power_of_two() || !(MIN_RING_LINES..=MAX_RING_LINES).contains(&spec.ring_lines)
        {
            return Err(OpenError::BadRing {
                lines: spec.ring_lines,
                min: MIN_RING_LINES,
                max: MAX_RING_LINES,
            });
        }
        if self.slots.iter().all(Option::is_some) {
            return Err(OpenError::TooMany {
                max: MAX_CHANNELS as u32,
            });
        }
        let lines = PAGE_LINES + spec.ring_lines.next_multiple_of(PAGE_LINES);
        if place == Place::Exported && self.own_lines == self.window_lines {
            return Err(OpenError::NoExport {
                name: name.to_owned(),
            });
        }
        let first_line = self.find_room(lines, place).map_err(|free| OpenError::NoRoom {
            name: name.to_owned(),
            needed: lines * 64,
            free: free * 64,
        })?;
        let doorbell = (1..DOORBELLS)
            .find(|number| self.live().all(|c| c.doorbell != *number))
            .unwrap_or(0);
        let id = ChannelId(self.next_id);
        self.next_id = self.next_id.wrapping_add(1);
        self.generation = self.generation.checked_add(1).unwrap_or(1);
        let channel = Channel {
            id,
            name: wire,
            spec,
            place,
            held: false,
            first_line,
            lines,
            doorbell,
            generation: self.generation,
            closing: false,
            pair: None,
            refused: None,
            draining: None,
            dirty: true,
        };
        if let Some(slot) = self.slots.iter_mut().find(|slot| slot.is_none()) {
            *slot = Some(channel);
        }
        Ok(id)
    }

    /// The first run of `lines` free lines at `place`, page by page, or the length of the longest free run.
    fn find_room(&self, lines: u64, place: Place) -> Result<u64, u64> {
        let (first, end) = match place {
            Place::Ordinary => (CHANNELS_FIRST_LINE, self.own_lines),
            Place::Exported => (self.own_lines, self.window_lines),
        };
        let end = end - end % PAGE_LINES;
        let (mut at, mut longest) = (first, 0);
        loop {
            let next = self
                .live()
                .filter(|c| c.place == place && c.first_line >= at)
                .min_by_key(|c| c.first_line);
            let gap_end = next.map_or(end, |c| c.first_line);
            let gap = gap_end.saturating_sub(at);
            if gap >= lines {
                return Ok(at);
            }
            longest = longest.max(gap);
            match next {
                Some(c) => at = c.first_line + c.lines,
                None => return Err(longest),
            }
        }
    }

    /// This side has dropped its ends.
    pub(super) fn close(&mut self, id: ChannelId) {
        for (slot, posted) in self.slots.iter_mut().zip(&self.posted) {
            if let Some(channel) = slot.as_mut().filter(|c| c.id == id) {
                channel.closing = true;
                channel.dirty = true;
                channel.draining = None;
                // The memory is given to another channel only when the peer has seen that this one is closed.
                if *posted == 0 {
                    *slot = None;
                }
            }
        }
    }

    pub(super) fn reader_drained(&mut self, id: ChannelId) {
        for channel in self.slots.iter_mut().flatten().filter(|c| c.id == id) {
            channel.draining = None;
        }
    }

    /// True when that is news.
    pub(super) fn hold(&mut self, id: ChannelId, held: bool) -> bool {
        let mut slots = self.slots.iter_mut().flatten();
        slots
            .find(|c| c.id == id)
            .is_some_and(|c| std::mem::replace(&mut c.held, held) != held)
    }

    pub(super) fn is_up(&self, id: ChannelId) -> bool {
        let up = |c: &Channel| !c.closing && c.pair.is_some_and(|pair| pair.up);
        self.live().any(|c| c.id == id && up(c))
    }

    fn live(&self) -> impl Iterator<Item = &Channel> {
        self.slots.iter().flatten()
    }

    /// True while unread messages of an ended life, or a device that is still at work in it, hold up the next one.
    pub(super) fn is_draining(&self) -> bool {
        self.live()
            .any(|c| c.draining.is_some() || c.held && c.pair.is_none())
    }

    /// Gives up what is unread for too long.
    pub(super) fn expire_drains(&mut self, now: Duration, actions: &mut Vec<Action>) {
        for channel in self.slots.iter_mut().flatten() {
            if channel.draining.is_some_and(|until| now >= until) {
                channel.draining = None;
                actions.push(Action::DrainEnded(channel.id));
            }
        }
    }

    /// The life of the link has ended, and with it that of every channel.
    pub(super) fn end_life(&mut self, reason: CloseReason, drained_by: Duration, actions: &mut Vec<Action>) {
        for slot in &mut self.slots {
            let Some(channel) = slot else { continue };
            if channel.closing {
                *slot = None;
                continue;
            }
            channel.dirty = true;
            channel.refused = None;
            if channel.pair.take().is_some_and(|pair| pair.up) {
                channel.draining = Some(drained_by);
                actions.push(Action::ChannelDown(channel.id, reason));
            }
        }
        self.posted = [0; MAX_CHANNELS];
        self.peer = [None; MAX_CHANNELS];
        self.taken = [0; MAX_CHANNELS];
        self.acknowledged = true;
        self.retry.restart();
    }

    /// What this side's beat says it has taken in.
    pub(super) fn taken_digest(&self) -> u32 {
        digest(&self.taken)
    }

    /// The peer's beat says what it has taken in.
    pub(super) fn acknowledge(&mut self, taken: u32) {
        self.acknowledged = taken == digest(&self.posted);
        if self.acknowledged {
            for slot in &mut self.slots {
                slot.take_if(|c| c.closing && !c.dirty);
            }
        }
    }

    /// Takes in what the peer has posted, pairs channels, and posts what has changed or is not acknowledged. True when
    /// something was posted.
    pub(super) fn step(
        &mut self,
        context: Context,
        inbound: &dyn Inbound,
        random: &mut Random,
        actions: &mut Vec<Action>,
    ) -> bool {
        self.read(context, inbound);
        for slot in 0..MAX_CHANNELS {
            self.unpair(slot, context, actions);
            self.pair(slot, context, random, actions);
        }
        self.post(context, actions)
    }

    /// Deadlines of this table.
    pub(super) fn note_deadlines(&self, earliest: &mut Earliest) {
        for channel in self.live() {
            if let Some(until) = channel.draining {
                earliest.note(until);
            }
        }
        if !self.acknowledged {
            earliest.note(self.retry.due());
        }
    }

    fn read(&mut self, context: Context, inbound: &dyn Inbound) {
        if inbound.lines() < CHANNELS_FIRST_LINE {
            return;
        }
        let slots = self.peer.iter_mut().zip(&mut self.taken);
        for ((entry, taken), (slot, line)) in slots.zip((0..).zip(TABLE_LINE..)) {
            let last = line as usize * LINE_WORDS + LINE_WORDS - 1;
            if inbound.load(last, std::sync::atomic::Ordering::Acquire) == *taken {
                continue;
            }
            let line = inbound.load_line(line);
            let Some(new) = Entry::decode(context.receive, slot, &line) else {
                continue;
            };
            if entry.is_none_or(|old| new.follows(&old)) {
                *entry = Some(new);
                *taken = line.0.last().copied().unwrap_or(0);
            }
        }
    }

    /// Ends the pair of channel `slot` when the peer's channel is no longer the one it was made with.
    fn unpair(&mut self, slot: usize, context: Context, actions: &mut Vec<Action>) {
        let peer = &self.peer;
        let Some(channel) = self.slots.get_mut(slot).and_then(Option::as_mut) else {
            return;
        };
        let Some(pair) = channel.pair else { return };
        let stands = peer
            .get(pair.slot)
            .and_then(Option::as_ref)
            .is_some_and(|e| e.open && e.generation == pair.generation);
        if stands {
            return;
        }
        channel.pair = None;
        channel.dirty = true;
        if pair.up && !channel.closing {
            channel.draining = Some(context.now.saturating_add(context.drain_timeout));
            actions.push(Action::ChannelDown(channel.id, CloseReason::ClosedByPeer));
        }
    }

    /// Pairs channel `slot` with the peer's channel of its name, and brings it up once the peer has done the same.
    fn pair(&mut self, slot: usize, context: Context, random: &mut Random, actions: &mut Vec<Action>) {
        let peer = &self.peer;
        let Some(channel) = self.slots.get_mut(slot).and_then(Option::as_mut) else {
            return;
        };
        if channel.closing || channel.held || channel.draining.is_some() || channel.pair.is_some_and(|p| p.up)
        {
            return;
        }
        let fits = |e: &Option<Entry>| e.as_ref().is_some_and(|e| e.open && e.name == channel.name);
        let at = match channel.pair {
            Some(pair) => Some(pair.slot),
            None => peer.iter().position(fits),
        };
        let Some((at, entry)) = at.and_then(|at| Some((at, (*peer.get(at)?)?))) else {
            return;
        };
        if channel.pair.is_none() {
            if channel.refused == Some(entry.generation) {
                return;
            }
            let differs = compare(channel.spec, &entry, context.peer_lines);
            if !differs.is_empty() {
                channel.refused = Some(entry.generation);
                actions.push(Action::Event(Event::ChannelRefused {
                    name: channel.name.text(),
                    differs,
                }));
                return;
            }
            channel.dirty = true;
            channel.pair = Some(Pair {
                slot: at,
                generation: entry.generation,
                key: new_key(&mut self.tag, random),
                ring_lines: channel.spec.ring_lines.min(entry.ring_lines),
                up: false,
            });
            // Whatever lies in the control page (payload of another channel, a pattern) must not be taken for a
            // control word of the new key. The peer reads the page only once it has seen the entry posted after this.
            for line in (entry.first_line()..).take(USED_LINES as usize) {
                let content = Line::ZERO;
                actions.push(Action::Put { line, content });
            }
        }
        // Once this side's entry has been taken in, what was stored before it has landed too: the cleared control page.
        let answered = self.acknowledged && !channel.dirty;
        if answered
            && entry.echo == channel.generation
            && let (Some(pair), Some(peer_key)) = (&mut channel.pair, entry.key)
        {
            pair.up = true;
            let pair = *pair;
            let lanes = lanes(channel, pair, &entry, peer_key, context);
            actions.push(Action::ChannelUp(channel.id, lanes));
        }
    }

    fn post(&mut self, context: Context, actions: &mut Vec<Action>) -> bool {
        let again = !self.acknowledged && self.retry.is_due(context.now);
        let (mut posted, mut changed) = (false, false);
        let slots = self.slots.iter_mut().zip(&mut self.posted);
        for ((slot, last), (number, line)) in slots.zip((0..).zip(TABLE_LINE..)) {
            let Some(channel) = slot else { continue };
            if !channel.dirty && !again {
                continue;
            }
            let content = entry(channel).encode(context.transmit, number);
            changed |= channel.dirty;
            channel.dirty = false;
            *last = content.0.last().copied().unwrap_or(0);
            posted = true;
            actions.push(Action::Put { line, content });
        }
        if changed {
            self.acknowledged = false;
            self.retry.restart();
        }
        if posted {
            self.retry.done(context.now);
        }
        posted
    }
}

/// A key unlike the last 65533 of this side.
fn new_key(tag: &mut u16, random: &mut Random) -> LaneKey {
    *tag = match *tag {
        t @ 0..0xfffe => t + 1,
        _ => 1,
    };
    LaneKey::new(*tag, random.next() as u32, random.next() as u32)
}

fn entry(channel: &Channel) -> Entry {
    Entry {
        name: channel.name,
        open: !channel.closing,
        generation: channel.generation,
        echo: channel.pair.map_or(0, |p| p.generation),
        key: channel.pair.map(|p| p.key),
        first_page: (channel.first_line / PAGE_LINES) as u32,
        ring_lines: channel.spec.ring_lines,
        check: channel.spec.check,
        smaller_if_different: channel.spec.smaller_if_different,
        doorbell: channel.doorbell,
        exported: channel.place == Place::Exported,
    }
}

/// All in which a channel and the peer's channel of its name do not fit.
fn compare(ours: ChannelSpec, theirs: &Entry, peer_lines: u64) -> Vec<Mismatch> {
    let mut differs = Vec::new(); // allocates only when something is put in
    let either_smaller = ours.smaller_if_different || theirs.smaller_if_different;
    if ours.ring_lines != theirs.ring_lines && !either_smaller {
        differs.push(Mismatch::new("ring lines", &ours.ring_lines, &theirs.ring_lines));
    }
    if ours.check != theirs.check {
        differs.push(Mismatch::new(
            "check of every message",
            &ours.check,
            &theirs.check,
        ));
    }
    let first = theirs.first_line();
    let end = first.saturating_add(PAGE_LINES).saturating_add(theirs.ring_lines);
    if first < CHANNELS_FIRST_LINE || end > peer_lines {
        differs.push(Mismatch::new(
            "channel memory",
            &format_args!("lines {CHANNELS_FIRST_LINE} to {peer_lines} can be"),
            &format_args!("lines {first} to {end}"),
        ));
    }
    differs
}

fn lanes(channel: &Channel, pair: Pair, entry: &Entry, peer_key: LaneKey, context: Context) -> Lanes {
    let (own, theirs) = (channel.first_line, entry.first_line());
    let order = |order| if channel.spec.check { Order::Relaxed } else { order };
    Lanes {
        transmit: Lane {
            ring_lines: pair.ring_lines,
            consumer_base: theirs,
            producer_base: own,
            to_consumer: peer_key,
            to_producer: pair.key,
            first_seq: 0,
        },
        transmit_order: order(context.own_order),
        receive: Lane {
            ring_lines: pair.ring_lines,
            consumer_base: own,
            producer_base: theirs,
            to_consumer: pair.key,
            to_producer: peer_key,
            first_seq: 0,
        },
        receive_order: order(context.peer_order),
        inbound_base: own,
        peer_doorbell: entry.doorbell,
        own_doorbell: channel.doorbell,
        own_place: channel.place,
        peer_place: match entry.exported {
            true => Place::Exported,
            false => Place::Ordinary,
        },
    }
}
