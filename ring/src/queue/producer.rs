//! The sending end.

use std::sync::atomic::Ordering::{Acquire, Release};

use ntb_mem::{
    line::{LINE_BYTES, LINE_WORDS, Line},
    sync::{self, Arc, Counter},
};

use super::{Lane, Position, credit_step};
use crate::{
    link::engine::{Inbound, Order, StoreEngine},
    wire::{
        check::Check,
        line::{self, BARE_MAX, INLINE_MAX, SMALL_MAX},
        mark::{Kind, small_after, widen48},
        page,
    },
};

/// Why a message was not sent. Nothing of it has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The consumer has not given back enough room.
    #[error(
        "the ring is full: {needed} lines are needed, {free} are free; the reader has {unread_lines} lines unread"
    )]
    Full {
        /// Lines the message takes.
        needed: u64,
        /// Lines free, as far as the last credit tells.
        free: u64,
        /// Lines sent and not credited: what the reader holds.
        unread_lines: u64,
    },
    /// The message is longer than the ring ever takes.
    #[error(
        "a message of {len} bytes cannot be sent: this ring takes {max} bytes at most; open the channel with a larger ring"
    )]
    TooLong {
        /// Length of the message (of the run, for runs of packed messages).
        len: u64,
        /// Largest possible.
        max: u64,
    },
    /// The peer stored a credit that cannot be.
    #[error("the peer broke the protocol: it credits {credit} lines, between {low} and {high} are possible")]
    CorruptCredit {
        /// What it stored.
        credit: u64,
        /// Lines credited before.
        low: u64,
        /// Lines sent.
        high: u64,
    },
}

/// Refusals after which a producer asks again for the credit it waits for: many milliseconds of spinning, so that a
/// reader that is merely slow is hardly ever asked twice.
const REPOST_AFTER: u32 = 1 << 20;

/// What a producer has counted. Exact: every call is in exactly one of `messages` and `refused`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProducerStats {
    /// Messages sent.
    pub messages: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Lines stored into the ring.
    pub lines: u64,
    /// Sends refused because the ring was full.
    pub refused: u64,
    /// Times the consumer was told that the producer is starved.
    pub starved: u64,
    /// Credits taken up.
    pub credits: u64,
}

/// The sending end of one life of a lane.
pub struct Producer<E, I> {
    engine: E,
    control: I,
    lane: Lane,
    order: Order,
    mask: u64,
    ring_at: u64,
    /// Lines stored so far. `head - credit` is at most `ring_lines`.
    head: u64,
    /// Line that comes next, as the engine counts, and lines known to be free: made ready behind the send before.
    at: u64,
    free: u64,
    /// Sequence of the next message, and [`LaneKey::small`](crate::wire::mark::LaneKey) of it.
    seq: u64,
    small_next: u64,
    /// Lines the consumer has given back, as last read: never ahead of the truth.
    credit: u64,
    /// Count of consumed lines last posted as wanted, refusals since, and times it was posted.
    wanted: Option<u64>,
    waiting: u32,
    attempt: u64,
    /// Refusals since the last credit.
    refused_in_a_row: u32,
    sent: Arc<Counter>,
    staging: Vec<u8>,
    stats: ProducerStats,
}

impl<E, I> std::fmt::Debug for Producer<E, I> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Producer")
            .field("lane", &self.lane)
            .field("head", &self.head)
            .field("seq", &self.seq)
            .finish()
    }
}

impl<E: StoreEngine, I: Inbound> Producer<E, I> {
    /// The producer of `lane`. `control` is this side's own control page of the channel. `order` is what both sides
    /// agreed on: it may be [`Order::Relaxed`] on an engine that would give more.
    pub fn new(engine: E, control: I, lane: Lane, order: Order) -> Self {
        debug_assert!(lane.ring_lines.is_power_of_two());
        Self {
            engine,
            control,
            order,
            mask: lane.ring_lines - 1,
            ring_at: lane.consumer_base + page::PAGE_LINES,
            head: 0,
            at: lane.consumer_base + page::PAGE_LINES,
            free: lane.ring_lines,
            seq: lane.first_seq,
            small_next: lane.to_consumer.small(lane.first_seq),
            credit: 0,
            wanted: None,
            waiting: 0,
            attempt: 0,
            refused_in_a_row: 0,
            sent: sync::counter(lane.first_seq),
            staging: Vec::new(),
            stats: ProducerStats::default(),
            lane,
        }
    }

    /// Sequence that the next message gets.
    pub fn next_seq(&self) -> u64 {
        self.seq
    }

    /// How far this end has come.
    pub fn position(&self) -> Position {
        Position {
            lines: self.head,
            seq: self.seq,
            credit: self.credit,
        }
    }

    /// Goes on from where a device has come that stored the lines in between; false when it cannot have come there.
    pub(crate) fn go_on_from(&mut self, position: Position) -> bool {
        if !position.follows(self.position(), self.lane.ring_lines) {
            return false;
        }
        self.wanted = None;
        (self.head, self.seq, self.credit) = (position.lines, position.seq, position.credit);
        self.at = self.ring_at + (self.head & self.mask);
        self.free = self.lane.ring_lines - self.head.wrapping_sub(self.credit);
        self.small_next = self.lane.to_consumer.small(self.seq);
        self.sent.store(self.seq, Release);
        true
    }

    /// Up to `messages` more will be sent by a device: a reader that is about to sleep is told that there is more.
    pub(crate) fn expect_sent(&mut self, messages: u64) {
        self.sent.store(self.seq.wrapping_add(messages), Release);
    }

    /// Counts so far.
    pub fn stats(&self) -> ProducerStats {
        ProducerStats {
            messages: self.seq.wrapping_sub(self.lane.first_seq),
            lines: self.head,
            ..self.stats
        }
    }

    /// Largest message in bytes.
    pub fn max_message(&self) -> u64 {
        self.lane.max_message()
    }

    /// The count of messages sent, for the thread that answers arms ([`super::Alarm`]).
    pub fn sent_counter(&self) -> Arc<Counter> {
        Arc::clone(&self.sent)
    }

    /// The engine, for counters and fault injection.
    pub fn engine_mut(&mut self) -> &mut E {
        &mut self.engine
    }

    /// Sends one message, or none of it. Returns its sequence.
    #[inline(always)]
    pub fn try_send(&mut self, message_type: u32, bytes: &[u8]) -> Result<u64, SendError> {
        let seq = self.enqueue(message_type, bytes)?;
        self.engine.flush();
        Ok(seq)
    }

    /// As [`Producer::try_send`] for a message that fits a line when there is known to be room; `None` otherwise.
    #[inline(always)]
    pub(crate) fn try_send_line(&mut self, message_type: u32, bytes: &[u8]) -> Option<u64> {
        if bytes.len() > SMALL_MAX || self.free == 0 {
            return None;
        }
        let seq = self.put_single(Kind::Small, message_type, bytes);
        self.engine.flush();
        Some(seq)
    }

    /// Stores one message without pushing it out of this side's buffers: [`Producer::flush`] after the last of a batch.
    #[inline(always)]
    pub fn enqueue(&mut self, message_type: u32, bytes: &[u8]) -> Result<u64, SendError> {
        if bytes.len() > SMALL_MAX {
            return self.enqueue_larger(message_type, bytes);
        }
        self.enqueue_single(Kind::Small, message_type, bytes)
    }

    #[inline(always)]
    fn enqueue_single(&mut self, kind: Kind, message_type: u32, bytes: &[u8]) -> Result<u64, SendError> {
        self.reserve(1)?;
        Ok(self.put_single(kind, message_type, bytes))
    }

    /// Stores a message of one line for which there is room.
    #[inline(always)]
    fn put_single(&mut self, kind: Kind, message_type: u32, bytes: &[u8]) -> u64 {
        let seq = self.seq;
        let at = self.at;
        if self.order == Order::Ordered && kind == Kind::Small {
            let seal = u64::from(message_type) | u64::from(self.lane.to_consumer.guard) << 32;
            let mark = self.small_next | (bytes.len() as u64) << 56;
            self.engine.put_small(at, bytes, seal, mark); // P1
        } else {
            self.put_encoded(at, kind, message_type, bytes);
        }
        self.small_next = small_after(self.small_next);
        self.advance(1, 1, bytes.len() as u64);
        seq
    }

    #[inline(never)]
    fn put_encoded(&mut self, at: u64, kind: Kind, message_type: u32, bytes: &[u8]) {
        let key = self.lane.to_consumer;
        let content = line::encode_single(key, self.order, kind, self.seq, message_type, bytes);
        self.engine.put(at, &content); // P1
    }

    #[inline(never)]
    fn enqueue_larger(&mut self, message_type: u32, bytes: &[u8]) -> Result<u64, SendError> {
        if bytes.len() <= BARE_MAX && message_type == 0 && self.order == Order::Ordered {
            return self.enqueue_single(Kind::Bare, message_type, bytes);
        }
        self.enqueue_long(message_type, bytes)
    }

    /// Pushes out what [`Producer::enqueue`] left in buffers.
    #[inline]
    pub fn flush(&mut self) {
        self.engine.flush();
    }

    /// Sends messages of `size` bytes each that lie back to back in `bytes`, packed: as many as there is room for.
    /// Returns how many went, at least one.
    ///
    /// A run never takes more than a quarter of the ring, so that the reader starts while the next one is written.
    ///
    /// # Panics
    /// When `size` is zero or `bytes` is not a multiple of it.
    pub fn try_send_packed(
        &mut self,
        message_type: u32,
        size: usize,
        bytes: &[u8],
    ) -> Result<usize, SendError> {
        assert!(
            size > 0 && bytes.len().is_multiple_of(size),
            "bytes are not whole messages"
        );
        let total = bytes.len() / size;
        let mut done = 0;
        while done < total {
            let sent = match self.enqueue_run(message_type, size, &bytes[done * size..]) {
                Ok(n) => n,
                Err(e) if done == 0 => return Err(e),
                Err(SendError::Full { .. }) => {
                    // The refusal is of messages the caller will offer again: it is counted then.
                    self.stats.refused -= 1;
                    break;
                }
                Err(_) => break, // the same error meets the next call
            };
            done += sent;
        }
        self.engine.flush();
        Ok(done)
    }

    /// Sends the first messages of `bytes` in the way that takes fewest lines, and returns how many.
    fn enqueue_run(&mut self, message_type: u32, size: usize, bytes: &[u8]) -> Result<usize, SendError> {
        let run_bytes = (self.lane.ring_lines as usize / 4).saturating_sub(1) * LINE_BYTES;
        let longest = (run_bytes.max(INLINE_MAX) / size).min(u32::MAX as usize);
        let mut count = (bytes.len() / size).min(longest);
        let lines_for = |count: usize| 1 + line::extra_lines(Kind::Packed, (count * size) as u64);
        let free = self.free_lines(lines_for(count))?;
        if lines_for(count) > free {
            // Fewer now, rather than none.
            let payload =
                (free.saturating_sub(1) as usize * LINE_BYTES).max(if free > 0 { INLINE_MAX } else { 0 });
            count = payload / size;
        }
        let kind = if size <= SMALL_MAX {
            Kind::Small
        } else {
            Kind::Long
        };
        let one_by_one = count as u64 * (1 + line::extra_lines(kind, size as u64));
        if count < 2 || lines_for(count) >= one_by_one {
            return self.enqueue(message_type, &bytes[..size]).map(|_| 1);
        }
        self.put_block(
            Kind::Packed,
            message_type,
            (size as u32, count as u32),
            &bytes[..count * size],
        );
        Ok(count)
    }

    fn enqueue_long(&mut self, message_type: u32, bytes: &[u8]) -> Result<u64, SendError> {
        let len = bytes.len() as u64;
        if len > self.lane.max_message() {
            return Err(SendError::TooLong {
                len,
                max: self.lane.max_message(),
            });
        }
        self.reserve(1 + line::extra_lines(Kind::Long, len))?;
        let seq = self.seq;
        self.put_block(Kind::Long, message_type, (len as u32, 1), bytes);
        Ok(seq)
    }

    /// Stores a block for which there is room: payload lines, barrier, completing line.
    fn put_block(&mut self, kind: Kind, message_type: u32, (size, count): (u32, u32), bytes: &[u8]) {
        let extra = line::extra_lines(kind, bytes.len() as u64);
        let (inline, tail) = if extra == 0 {
            (bytes, &[][..])
        } else {
            (&[][..], bytes)
        };
        let mut check = Check::default();
        if extra > 0 {
            if self.order == Order::Relaxed {
                check = check.bytes(LINE_WORDS as u64, tail);
            }
            let first = (self.head + 1) & self.mask;
            let to_end = (self.lane.ring_lines - first) as usize * LINE_BYTES;
            let (a, b) = tail.split_at(tail.len().min(to_end));
            self.engine.put_bytes(self.ring_at + first, a);
            if !b.is_empty() {
                self.engine.put_bytes(self.ring_at, b);
            }
            self.engine.barrier(); // P2
        }
        let head = line::encode_head(
            self.lane.to_consumer,
            self.order,
            kind,
            self.seq,
            message_type,
            (size, count),
            inline,
            check,
        );
        self.engine.put(self.at, &head); // P1
        self.advance(1 + extra, u64::from(count), bytes.len() as u64);
        self.small_next = self.lane.to_consumer.small(self.seq);
    }

    #[inline(always)]
    fn advance(&mut self, lines: u64, messages: u64, bytes: u64) {
        self.head = self.head.wrapping_add(lines);
        self.free -= lines;
        self.at = self.ring_at + (self.head & self.mask);
        self.seq = self.seq.wrapping_add(messages);
        self.sent.store(self.seq, Release);
        self.stats.bytes += bytes;
    }

    /// Makes sure that `lines` are free.
    #[inline(always)]
    fn reserve(&mut self, lines: u64) -> Result<(), SendError> {
        if self.free >= lines {
            return Ok(());
        }
        self.reserve_slow(lines)
    }

    #[cold]
    fn reserve_slow(&mut self, lines: u64) -> Result<(), SendError> {
        let free = self.free_lines(lines)?;
        if free >= lines {
            return Ok(());
        }
        self.stats.refused += 1;
        self.starve(self.head.wrapping_add(lines).wrapping_sub(self.lane.ring_lines));
        Err(SendError::Full {
            needed: lines,
            free,
            unread_lines: self.head.wrapping_sub(self.credit),
        })
    }

    /// Lines free, taking up a new credit when the known ones leave fewer than `wanted`.
    fn free_lines(&mut self, wanted: u64) -> Result<u64, SendError> {
        if self.free < wanted {
            self.take_credit()?;
        }
        Ok(self.free)
    }

    /// Reads the credit in this side's own memory. True when it has moved.
    pub fn take_credit(&mut self) -> Result<bool, SendError> {
        let word = self.control.load((page::CREDIT as usize) * LINE_WORDS, Acquire); // P3
        let Some(value) = self.lane.to_producer.open(word) else {
            return Ok(false); // none yet in this life
        };
        let credit = widen48(value, self.credit);
        let (gained, outstanding) = (
            credit.wrapping_sub(self.credit),
            self.head.wrapping_sub(self.credit),
        );
        if gained > outstanding {
            return Err(SendError::CorruptCredit {
                credit,
                low: self.credit,
                high: self.head,
            });
        }
        self.credit = credit;
        self.free += gained;
        if gained > 0 {
            self.refused_in_a_row = 0;
            self.stats.credits += 1;
        }
        Ok(gained > 0)
    }

    /// Messages that the consumer is known to have consumed, by its last credit or by what its service has said since.
    pub fn consumed_seq(&self) -> u64 {
        let first = self.lane.first_seq;
        // Each is a count of its own that never goes back; what cannot be is ignored.
        [(page::CREDIT, 1), (page::PROGRESS, 0)]
            .iter()
            .filter_map(|(line, word)| {
                let word = self.control.load(*line as usize * LINE_WORDS + word, Acquire);
                let seq = widen48(self.lane.to_producer.open(word)?, self.seq);
                let consumed = seq.wrapping_sub(first);
                (consumed <= self.seq.wrapping_sub(first)).then_some(consumed)
            })
            .max()
            .map_or(first, |consumed| first.wrapping_add(consumed))
    }

    /// Asks the consumer for a credit as soon as it has consumed everything sent so far.
    pub fn request_credit(&mut self) {
        self.post_starved(self.head);
    }

    /// Tells the consumer that this side cannot go on before `want` lines are consumed, unless the credit that comes by
    /// itself, after a quarter of the ring, is enough.
    fn starve(&mut self, want: u64) {
        let by_itself = credit_step(self.lane.ring_lines);
        let (wanted, unread) = (
            want.wrapping_sub(self.credit),
            self.head.wrapping_sub(self.credit),
        );
        self.refused_in_a_row = self.refused_in_a_row.saturating_add(1);
        if wanted > by_itself || unread < by_itself || self.refused_in_a_row > REPOST_AFTER {
            self.post_starved(want);
        }
    }

    /// Posts that this side waits until so many lines are consumed: once per count, and again after many refusals in
    /// case the answer was lost on the way.
    fn post_starved(&mut self, want: u64) {
        if self.wanted == Some(want) {
            self.waiting += 1;
            if self.waiting < REPOST_AFTER {
                return;
            }
        }
        self.wanted = Some(want);
        self.waiting = 0;
        self.attempt = self.attempt.wrapping_add(1);
        let key = self.lane.to_consumer;
        let mut content = Line::ZERO;
        content.0[0] = key.seal(want);
        content.0[1] = key.seal(self.attempt);
        self.engine.put(self.lane.consumer_base + page::STARVED, &content); // P4
        self.engine.flush();
        self.stats.starved += 1;
    }

    /// Staging memory for a message of `len` bytes, to be filled and committed. Nothing is visible to the peer before
    /// [`Claim::commit`], and a dropped claim leaves no trace. Room in the ring is held from now on.
    ///
    /// The first claims allocate the staging memory; once the largest has been claimed, none does.
    pub fn claim(&mut self, len: usize) -> Result<Claim<'_, E, I>, SendError> {
        self.claim_after(len, || false)
    }

    /// As [`Producer::claim`], where credits have to be fetched: when there is no room, `fetch` is called and, if it
    /// says that something came, room is looked for once more.
    pub fn claim_after(
        &mut self,
        len: usize,
        fetch: impl FnOnce() -> bool,
    ) -> Result<Claim<'_, E, I>, SendError> {
        let bytes = len as u64;
        if bytes > self.lane.max_message() {
            return Err(SendError::TooLong {
                len: bytes,
                max: self.lane.max_message(),
            });
        }
        let kind = if len <= SMALL_MAX { Kind::Small } else { Kind::Long };
        let lines = 1 + line::extra_lines(kind, bytes);
        match self.reserve(lines) {
            Err(SendError::Full { .. }) if fetch() => self.reserve(lines)?,
            other => other?,
        }
        if self.staging.len() < len {
            self.staging.resize(len, 0);
        }
        Ok(Claim { producer: self, len })
    }
}

/// A message being written in local staging memory.
pub struct Claim<'a, E, I> {
    producer: &'a mut Producer<E, I>,
    len: usize,
}

impl<E, I> std::fmt::Debug for Claim<'_, E, I> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Claim").field("len", &self.len).finish()
    }
}

impl<E: StoreEngine, I: Inbound> Claim<'_, E, I> {
    /// The bytes to fill. Their content is what an earlier claim left: write all of them.
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.producer.staging[..self.len]
    }

    /// Sends the message and returns its sequence. Cannot fail: the room has been held since the claim.
    pub fn commit(self, message_type: u32) -> u64 {
        let staging = std::mem::take(&mut self.producer.staging);
        let sent = self.producer.try_send(message_type, &staging[..self.len]);
        self.producer.staging = staging;
        debug_assert!(sent.is_ok(), "room was reserved by the claim");
        sent.unwrap_or(self.producer.seq)
    }
}
