//! The receiving end.

use std::{
    sync::atomic::Ordering::{Acquire, Relaxed, Release},
    time::{Duration, Instant},
};

use ntb_mem::{
    line::{LINE_BYTES, LINE_WORDS, Line},
    sync::{self, Arc, Counter},
};

use super::{
    Lane, Position, credit_latest, credit_step,
    message::{InPlace, Message, Payload},
};
use crate::{
    link::engine::{Inbound, Order, StoreEngine},
    wire::{
        check::Check,
        line::{self, Decoded, Head, INLINE_MAX},
        mark::{Kind, small_after, widen48},
        page,
    },
};

mod direct;

/// Why nothing was received. The lane is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecvError {
    /// No complete message is there.
    #[error("no message has arrived")]
    Empty,
    /// The next message is longer than the buffer; it stays.
    #[error("the next message has {needed} bytes, the buffer has {given}: give a larger one")]
    TooSmall {
        /// Length of the message in bytes.
        needed: usize,
        /// Length of the buffer in bytes.
        given: usize,
    },
    /// The next message has not the size asked for; it stays.
    #[error("the next message has {found} bytes, messages of {wanted} bytes were asked for")]
    OtherSize {
        /// Length of the message in bytes.
        found: usize,
        /// Length asked for in bytes.
        wanted: usize,
    },
    /// The peer stored something that is no message. Nothing more is received in this life of the lane.
    #[error("corrupt data from the peer at message {seq}: {why}")]
    Corrupt {
        /// Sequence of the message that was due.
        seq: u64,
        /// What is wrong.
        why: &'static str,
    },
}

/// What a consumer has counted. Exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConsumerStats {
    /// Messages received.
    pub messages: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Lines of the ring they took.
    pub lines: u64,
    /// Credits posted.
    pub credits: u64,
    /// Times a message was seen whose check did not hold yet.
    pub incomplete: u64,
}

/// How long a message whose mark has arrived may stay incomplete before it counts as corrupt, by default.
pub const INCOMPLETE_DEADLINE: Duration = Duration::from_millis(500);

/// Empty polls between two looks whether the producer waits for a credit: so few that it makes no difference to it.
/// Models look every time.
const LOOK_EVERY: u32 = if cfg!(loom) { 1 } else { 16 };

/// Empty polls between two looks for messages that were sent and have not arrived.
const OVERDUE_EVERY: u32 = 4096;

/// A block (message or run) whose lines are complete and partly consumed.
#[derive(Clone, Copy)]
struct Block {
    head: Head,
    /// Messages of it that were consumed.
    done: u32,
    /// Inline bytes, when it has no further lines.
    line: Line,
    /// The payload was checked and copied into `scratch`.
    checked: bool,
}

/// How a line that completes one small message may be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// By its ending alone: the link is ordered.
    Plain,
    /// When its check holds.
    Checked,
    /// Not at all: a block is open, or the peer's data is corrupt.
    Special,
}

impl Next {
    fn of(order: Order) -> Self {
        match order {
            Order::Ordered => Self::Plain,
            Order::Relaxed => Self::Checked,
        }
    }
}

/// What a look at the ring gave.
enum Peek {
    /// The next message, in one line: sound, with its type and length.
    Line(Line, u32, usize),
    /// Nothing.
    Empty,
    /// Nothing, and it is time for what is done when there is nothing.
    Idle,
    /// One of the open block.
    Block,
    /// A line whose mark is due, and that is no sound message by itself.
    Other(Line),
}

/// What [`Consumer::try_recv_plain`] gave.
#[derive(Clone, Copy)]
pub(crate) enum Polled {
    Received(Received),
    Empty,
    /// For [`Consumer::try_recv`] to find out. Nothing has been consumed.
    Other,
}

/// The receiving end of one life of a lane.
pub struct Consumer<E, I> {
    ring: I,
    control: I,
    engine: E,
    lane: Lane,
    order: Order,
    next: Next,
    mask: u64,
    /// Lines consumed. The next head stands at this position.
    tail: u64,
    /// Sequence of the next message, and [`LaneKey::small`](crate::wire::mark::LaneKey) of it.
    seq: u64,
    small_due: u64,
    /// Bytes of a small message that was received and is yet to be accounted for, plus one; zero when there is none. What
    /// a reader sends in answer does not wait for the accounts: the next call settles them.
    owed: u64,
    /// Lines given back.
    credited: u64,
    /// Consumed lines that are given back when nothing else is to be done, and at the latest.
    credit_step: u64,
    credit_latest: u64,
    /// Raw starved words last seen, and the count they ask for while not yet given.
    starved: [u64; 2],
    wanted: Option<u64>,
    /// Empty polls since the last message, and since when a message that was sent has not arrived.
    empty_polls: u32,
    overdue: Option<(u64, Instant)>,
    block: Option<Block>,
    scratch: Vec<u8>,
    incomplete: Option<(u64, Instant)>,
    deadline: Duration,
    corrupt: Option<&'static str>,
    arm: u64,
    consumed: Arc<Counter>,
    stats: ConsumerStats,
}

impl<E, I> std::fmt::Debug for Consumer<E, I> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Consumer")
            .field("lane", &self.lane)
            .field("tail", &self.tail)
            .field("seq", &self.seq)
            .finish()
    }
}

impl<E: StoreEngine, I: Inbound> Consumer<E, I> {
    /// The consumer of `lane`: `ring` are its lines and `control` its control page, both in this side's memory.
    pub fn new(engine: E, control: I, ring: I, lane: Lane, order: Order) -> Self {
        debug_assert!(lane.ring_lines.is_power_of_two() && ring.lines() == lane.ring_lines);
        Self {
            ring,
            control,
            engine,
            order,
            next: Next::of(order),
            mask: lane.ring_lines - 1,
            tail: 0,
            seq: lane.first_seq,
            small_due: lane.to_consumer.small(lane.first_seq),
            owed: 0,
            credited: 0,
            credit_step: credit_step(lane.ring_lines),
            credit_latest: credit_latest(lane.ring_lines),
            starved: [0; 2],
            wanted: None,
            empty_polls: 0,
            overdue: None,
            block: None,
            scratch: Vec::new(),
            incomplete: None,
            deadline: INCOMPLETE_DEADLINE,
            corrupt: None,
            arm: 0,
            consumed: sync::counter(lane.first_seq),
            stats: ConsumerStats::default(),
            lane,
        }
    }

    /// Sequence of the message that comes next.
    pub fn next_seq(&self) -> u64 {
        self.seq.wrapping_add(self.owed.min(1))
    }

    /// How far this end has come, all accounts settled: no credit of before follows those of a device. `None` within a block
    /// of packed messages.
    pub fn position(&mut self) -> Option<Position> {
        self.settle();
        self.block.is_none().then_some(Position {
            lines: self.tail,
            seq: self.seq,
            credit: self.credited,
        })
    }

    /// Goes on from where a device has come that consumed the lines in between; false when it cannot have come there.
    pub(crate) fn go_on_from(&mut self, position: Position) -> bool {
        let before = self.position();
        if !before.is_some_and(|before| position.follows(before, self.lane.ring_lines)) {
            return false;
        }
        (self.tail, self.seq, self.credited) = (position.lines, position.seq, position.credit);
        self.small_due = self.lane.to_consumer.small(self.seq);
        (self.incomplete, self.overdue) = (None, None);
        self.consumed.store(self.seq, Release);
        true
    }

    /// Counts so far.
    pub fn stats(&self) -> ConsumerStats {
        ConsumerStats {
            messages: self.next_seq().wrapping_sub(self.lane.first_seq),
            bytes: self.stats.bytes.wrapping_add(self.owed.saturating_sub(1)),
            lines: self.tail.wrapping_add(self.owed.min(1)),
            ..self.stats
        }
    }

    /// The count of messages consumed, for another thread to read.
    pub fn consumed_counter(&self) -> Arc<Counter> {
        Arc::clone(&self.consumed)
    }

    /// The engine, for counters and fault injection.
    pub fn engine_mut(&mut self) -> &mut E {
        &mut self.engine
    }

    /// Sets how long a message whose mark is there may stay incomplete.
    pub fn set_incomplete_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    /// Nothing there: false when it is time for what is done then. The poll that finds nothing is the one whose length a
    /// message has to wait for.
    #[inline(always)]
    fn poll_again(&mut self) -> bool {
        let polls = self.empty_polls.wrapping_add(1);
        if polls.is_multiple_of(LOOK_EVERY) {
            return false;
        }
        self.empty_polls = polls;
        true
    }

    /// Receives one message into `buf` and returns its length, type and sequence.
    #[inline(never)]
    pub fn try_recv(&mut self, buf: &mut [u8]) -> Result<Received, RecvError> {
        let looked = self.peek();
        if let Peek::Other(content) = &looked
            && let Some(received) = self.take_long(content, buf)
        {
            return Ok(received);
        }
        self.visit_what(&looked, |m| {
            let needed = m.len();
            if needed > buf.len() {
                let given = buf.len();
                return (Err(RecvError::TooSmall { needed, given }), false);
            }
            let received = Received {
                len: m.copy_to(0, buf),
                message_type: m.message_type,
                seq: m.seq,
            };
            (Ok(received), true)
        })?
    }

    /// Receives one message and lets `f` read it where it is; it is consumed when `f` returns.
    #[inline]
    pub fn try_recv_with<R>(&mut self, f: impl FnOnce(&Message<'_, I>) -> R) -> Result<R, RecvError> {
        self.visit(|m| (f(m), true))
    }

    /// Receives messages of exactly `size` bytes into `out`, back to back, as many as are there and fit. Returns how
    /// many; an error only when the first cannot be had. A message of another size ends the batch.
    ///
    /// # Panics
    /// When `size` is zero.
    pub fn try_recv_packed(&mut self, size: usize, out: &mut [u8]) -> Result<usize, RecvError> {
        assert!(size > 0, "messages of no bytes cannot be packed");
        let mut done = 0;
        while out.len() - done * size >= size {
            let rest = &mut out[done * size..];
            let got = match self.run(size, rest) {
                Some(n) => Ok(n),
                None => self
                    .visit(|m| match m.len() {
                        len if len == size => (Ok(m.copy_to(0, &mut rest[..size]) / size), true),
                        found => (Err(RecvError::OtherSize { found, wanted: size }), false),
                    })
                    .and_then(|r| r),
            };
            match got {
                Ok(n) => done += n,
                Err(_) if done > 0 => break,
                Err(e) => return Err(e),
            }
        }
        Ok(done)
    }

    /// Copies as much of the open packed block as fits `out`, if there is one of messages of `size` bytes.
    fn run(&mut self, size: usize, out: &mut [u8]) -> Option<usize> {
        let block = self.block.as_ref()?;
        if block.head.kind != Kind::Packed || block.head.size as usize != size {
            return None;
        }
        let n = (out.len() / size).min((block.head.count - block.done) as usize);
        let message = self.message_at(block, n * size);
        message.copy_to(0, &mut out[..n * size]);
        self.finish(n as u32);
        Some(n)
    }

    /// Looks whether the next message is there.
    #[inline(always)]
    fn peek(&mut self) -> Peek {
        self.settle();
        if self.block.is_some() {
            return Peek::Block;
        }
        let at = self.tail & self.mask;
        let mark = self.ring.load(at as usize * LINE_WORDS + LINE_WORDS - 1, Acquire); // C1
        if self.corrupt.is_some() {
            return Peek::Idle;
        }
        if !line::is_due(mark, self.lane.to_consumer, self.seq) {
            return if self.poll_again() {
                Peek::Empty
            } else {
                Peek::Idle
            };
        }
        let content = Line::from_parts(self.ring.load_body(at), mark);
        match line::single(&content, self.lane.to_consumer, self.order) {
            Some((message_type, len))
                if self.order == Order::Ordered || line::checks(&content, message_type) =>
            {
                Peek::Line(content, message_type, len)
            }
            _ => Peek::Other(content),
        }
    }

    /// The line whose mark is due does not carry a message whole, or makes no sense: opens the block it begins.
    fn begin_block(&mut self, content: Line) -> Result<(), RecvError> {
        match line::decode(
            &content,
            self.lane.to_consumer,
            self.order,
            self.lane.ring_lines,
            self.lane.max_message(),
        ) {
            Decoded::Sound(head) if matches!(head.kind, Kind::Small | Kind::Bare) => {
                Err(self.unsound("the check of a line does not hold"))
            }
            Decoded::Sound(head) => self.open_block(head, content),
            Decoded::Absent => Err(self.idle()),
            Decoded::Unsound(why) => Err(self.unsound(why)),
        }
    }

    /// Shows the next message to `f`; consumes it when `f` says so.
    #[inline(always)]
    fn visit<R>(&mut self, f: impl FnOnce(&Message<'_, I>) -> (R, bool)) -> Result<R, RecvError> {
        let looked = self.peek();
        self.visit_what(&looked, f)
    }

    #[inline(always)]
    fn visit_what<R>(
        &mut self,
        looked: &Peek,
        f: impl FnOnce(&Message<'_, I>) -> (R, bool),
    ) -> Result<R, RecvError> {
        match *looked {
            Peek::Empty => return Err(RecvError::Empty),
            Peek::Idle => return Err(self.idle()),
            Peek::Line(content, message_type, len) => {
                let message = Message {
                    seq: self.seq,
                    message_type,
                    payload: Payload::Line(content, len),
                };
                let (result, take) = f(&message);
                if take {
                    self.small_due = small_after(self.small_due);
                    self.consume(1, 1, len as u64);
                }
                return Ok(result);
            }
            Peek::Other(content) => self.begin_block(content)?,
            Peek::Block => {}
        }
        let Some(block) = self.block.as_ref() else {
            return Err(RecvError::Empty);
        };
        let message = self.message_at(block, block.head.size as usize);
        let (result, take) = f(&message);
        if take {
            self.finish(1);
        }
        Ok(result)
    }

    fn check_holds(&self, content: &Line, head: &Head, tail: Check) -> bool {
        line::line_check(content, head.message_type, tail) == (content.0[6] >> 32) as u32
    }

    /// Takes a block up once it is complete.
    fn open_block(&mut self, head: Head, content: Line) -> Result<(), RecvError> {
        let bytes = head.size as usize * head.count as usize;
        if head.extra_lines == 0 && bytes > INLINE_MAX {
            return Err(self.unsound("more bytes than lines"));
        }
        let mut checked = false;
        if self.order == Order::Relaxed {
            // The bytes checked are the bytes delivered: copy first, check the copy.
            let mut scratch = std::mem::take(&mut self.scratch);
            let mut tail = Check::default();
            if head.extra_lines > 0 {
                if scratch.len() < bytes {
                    scratch.resize(bytes, 0);
                }
                self.place(1, bytes).copy_out_all(&mut scratch[..bytes]);
                tail = tail.bytes(LINE_WORDS as u64, &scratch[..bytes]);
            }
            let holds = self.check_holds(&content, &head, tail);
            self.scratch = scratch;
            if !holds {
                return Err(self.unsound("the check of a message does not hold"));
            }
            checked = head.extra_lines > 0;
        }
        self.incomplete = None;
        self.block = Some(Block {
            head,
            done: 0,
            line: content,
            checked,
        });
        self.next = Next::Special;
        Ok(())
    }

    /// The bytes of the ring from the line `skip` after the current one.
    fn place(&self, skip: u64, len: usize) -> InPlace<'_, I> {
        let line = self.tail.wrapping_add(skip) & self.mask;
        InPlace {
            ring: &self.ring,
            ring_bytes: self.lane.ring_lines as usize * LINE_BYTES,
            from: line as usize * LINE_BYTES,
            len,
        }
    }

    /// The next message of `block`, or `len` bytes of messages.
    #[inline]
    fn message_at(&self, block: &Block, len: usize) -> Message<'_, I> {
        let skip = block.done as usize * block.head.size as usize;
        let payload = if block.head.extra_lines == 0 {
            let line = Line::from_bytes(&block.line.to_bytes()[8 + skip..8 + skip + len]);
            Payload::Line(line, len)
        } else if block.checked {
            Payload::Checked(&self.scratch[skip..skip + len])
        } else {
            let mut place = self.place(1, len);
            place.from = (place.from + skip) & (place.ring_bytes - 1);
            Payload::InPlace(place)
        };
        Message {
            seq: self.seq,
            message_type: block.head.message_type,
            payload,
        }
    }

    /// Marks `n` messages of the open block as consumed; its lines are given back with its last message.
    fn finish(&mut self, n: u32) {
        let Some(block) = &mut self.block else { return };
        block.done += n;
        let bytes = u64::from(n) * u64::from(block.head.size);
        let mut lines = 0;
        if block.done == block.head.count {
            lines = 1 + block.head.extra_lines;
            self.block = None;
            if self.corrupt.is_none() {
                self.next = Next::of(self.order);
            }
        }
        self.consume(lines, u64::from(n), bytes);
        self.small_due = self.lane.to_consumer.small(self.seq);
    }

    #[inline(always)]
    fn consume(&mut self, lines: u64, messages: u64, bytes: u64) {
        self.tail = self.tail.wrapping_add(lines);
        self.seq = self.seq.wrapping_add(messages);
        self.stats.bytes += bytes;
        self.empty_polls = 0;
        self.consumed.store(self.seq, Relaxed);
        if self.tail.wrapping_sub(self.credited) >= self.credit_latest {
            self.post_credit();
        }
        self.look_starved();
    }

    /// Nothing there: the moment to see whether the producer waits for a credit.
    #[inline(never)]
    fn idle(&mut self) -> RecvError {
        if self.tail.wrapping_sub(self.credited) >= self.credit_step {
            self.post_credit();
        }
        self.look_starved();
        self.empty_polls = self.empty_polls.wrapping_add(1);
        if self.empty_polls.is_multiple_of(OVERDUE_EVERY) {
            self.look_overdue();
        }
        match self.corrupt {
            Some(why) => RecvError::Corrupt { seq: self.seq, why },
            None => RecvError::Empty,
        }
    }

    #[inline(always)]
    fn look_starved(&mut self) {
        let at = page::STARVED as usize * LINE_WORDS;
        let words = [self.control.load(at, Acquire), self.control.load(at + 1, Acquire)]; // C3
        if words != self.starved {
            self.starved = words;
            self.wanted = self
                .lane
                .to_consumer
                .open(words[0])
                .map(|v| widen48(v, self.tail));
        }
        if let Some(wanted) = self.wanted
            && self.tail.wrapping_sub(wanted) as i64 >= 0
        {
            // Also when that much was credited before: then the credit has not got through.
            self.wanted = None;
            self.post_credit();
        }
    }

    /// Notices a message that the peer says it has sent and that does not come.
    #[cold]
    fn look_overdue(&mut self) {
        let word = self.control.load(page::SENT as usize * LINE_WORDS, Acquire);
        let behind = self
            .lane
            .to_consumer
            .open(word)
            .map(|v| widen48(v, self.seq))
            .is_some_and(|sent| sent.wrapping_sub(self.seq) as i64 > 0);
        self.overdue = match self.overdue {
            _ if !behind => None,
            Some((seq, since)) if seq == self.seq => {
                if since.elapsed() >= self.deadline {
                    self.next = Next::Special;
                    self.corrupt
                        .get_or_insert("a message that was sent has not arrived");
                }
                self.overdue
            }
            _ => Some((self.seq, Instant::now())),
        };
    }

    /// True when the mark of the next message is there, complete or not.
    pub fn has_arrived(&self) -> bool {
        let tail = self.tail.wrapping_add(self.owed.min(1));
        let at = (tail & self.mask) as usize * LINE_WORDS + LINE_WORDS - 1;
        let mark = self.ring.load(at, Acquire);
        self.block.is_some() || line::is_due(mark, self.lane.to_consumer, self.next_seq())
    }

    /// Gives back everything consumed so far, if anything.
    pub fn give_back(&mut self) {
        self.settle();
        if self.tail != self.credited {
            self.post_credit();
        }
    }

    #[inline(never)]
    fn post_credit(&mut self) {
        let key = self.lane.to_producer;
        let mut content = Line::ZERO;
        content.0[0] = key.seal(self.tail);
        content.0[1] = key.seal(self.seq);
        self.engine.barrier(); // C2: the lines credited have been read
        self.engine.put(self.lane.producer_base + page::CREDIT, &content);
        self.engine.flush();
        self.credited = self.tail;
        self.stats.credits += 1;
    }

    /// The due line does not make sense. On an ordered link that is corruption at once; elsewhere it may still be
    /// arriving, until the deadline.
    #[cold]
    fn unsound(&mut self, why: &'static str) -> RecvError {
        if self.corrupt.is_none() {
            self.stats.incomplete += 1;
            let late = match (self.order, self.incomplete) {
                (Order::Ordered, _) => true,
                (Order::Relaxed, Some((seq, since))) if seq == self.seq => since.elapsed() >= self.deadline,
                (Order::Relaxed, _) => {
                    self.incomplete = Some((self.seq, Instant::now()));
                    false
                }
            };
            if late {
                self.corrupt = Some(why);
                self.next = Next::Special;
            }
        }
        self.idle()
    }

    /// Announces that this side is about to sleep; answered through [`Consumer::answer`]. Gives room back first.
    pub fn arm(&mut self) {
        self.give_back();
        self.arm = self.arm.wrapping_add(1);
        let key = self.lane.to_producer;
        let mut content = Line::ZERO;
        content.0[0] = key.seal(self.arm);
        content.0[1] = key.seal(self.seq);
        self.engine.put(self.lane.producer_base + page::ARM, &content);
        self.engine.flush();
    }

    /// What the producer's side said to the last [`Consumer::arm`].
    pub fn answer(&self) -> super::Answer {
        let key = self.lane.to_consumer;
        let at = page::ECHO as usize * LINE_WORDS;
        let sent = key
            .open(self.control.load(at + 1, Acquire))
            .map(|v| widen48(v, self.next_seq()));
        let number = key.open(self.control.load(at, Acquire));
        match (number, sent) {
            (Some(n), Some(sent)) if n == self.arm & crate::wire::mark::CONTROL_MASK => {
                if sent == self.next_seq() {
                    super::Answer::Sleep
                } else {
                    super::Answer::Poll
                }
            }
            _ => super::Answer::None,
        }
    }
}

/// What [`Consumer::try_recv`] received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Bytes of the message, from the start of the buffer.
    pub len: usize,
    /// The application's type.
    pub message_type: u32,
    /// Its sequence.
    pub seq: u64,
}

impl<I: Inbound> InPlace<'_, I> {
    fn copy_out_all(&self, dst: &mut [u8]) {
        let message = Message {
            seq: 0,
            message_type: 0,
            payload: Payload::InPlace(InPlace { ..*self }),
        };
        message.copy_to(0, dst);
    }
}
