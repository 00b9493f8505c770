//! The ring: single producer, single consumer, one life of a lane, over a link of posted writes.
//!
//! # Algorithm
//!
//! The ring lies in the consumer's memory. The producer stores, the consumer loads; nothing is ever read across the
//! link. Positions count lines and never wrap (64 bits); a line's place is its position modulo the ring.
//!
//! A message of up to 48 bytes is one line that carries its own mark (FastForward's idea of testing the slot itself,
//! PPoPP 2008, with a sequence instead of an empty value, so that nothing has to be cleared). Larger messages, and
//! runs of messages sent together, put their bytes into the lines *after* the first one and then store the first
//! line, whose mark completes them. The consumer looks at one word: the mark of the line it expects next.
//!
//! Room comes back by credits: the consumer posts the count of lines it has consumed into the producer's memory,
//! once per quarter of the ring (when a poll finds nothing, or a sixteenth of the ring later), when the producer has posted
//! that it is starved and waits for exactly that count, and before it sleeps. Never once per message.
//!
//! # Pairs
//!
//! | store | load |
//! | --- | --- |
//! | P1 producer: word 7 of a line, release | C1 consumer: that word, acquire, before the line's other words |
//! | P2 producer: barrier between payload lines and the completing line | C1, before the payload lines |
//! | C2 consumer: credit words, after its last load of the lines credited | P3 producer: credit word, acquire, before it stores over them |
//! | P4 producer: starved word | C3 consumer: that word, on every receive and every empty poll |
//!
//! On relaxed paths P1 and P2 order nothing and the check in the completing line decides instead; credit words are
//! single words and monotonic, so they need no order. `docs/memory-model.md` has the table per engine.

mod consumer;
mod message;
mod producer;
mod sleep;

pub(crate) use consumer::Polled;
pub use consumer::{Consumer, ConsumerStats, INCOMPLETE_DEADLINE, Received, RecvError};
pub use message::Message;
pub use producer::{Claim, Producer, ProducerStats, SendError};
pub use sleep::{Alarm, Answer};

use crate::wire::mark::LaneKey;

/// Where one direction of a channel lies, and under which keys it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Lines of the ring: a power of two, 4 to 2^26.
    pub ring_lines: u64,
    /// First line of the consumer's channel memory, as the producer's engine counts: control page, then ring.
    pub consumer_base: u64,
    /// First line of the producer's channel memory, as the consumer's engine counts: control page of the credits.
    pub producer_base: u64,
    /// Key that the consumer gave for all that the producer writes.
    pub to_consumer: LaneKey,
    /// Key that the producer gave for all that the consumer writes.
    pub to_producer: LaneKey,
    /// Sequence of the first message of this life.
    pub first_seq: u64,
}

/// Fewest lines of a ring.
pub const MIN_RING_LINES: u64 = 4;
/// Most lines of a ring (4 GiB).
pub const MAX_RING_LINES: u64 = 1 << 26;

/// How far an end of a lane has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Lines stored, or consumed.
    pub lines: u64,
    /// Sequence of the next message.
    pub seq: u64,
    /// Lines given back by the consumer: as the producer has read them, or as the consumer has posted them.
    pub credit: u64,
}

impl Position {
    /// Whether an end may have come here from `before`, on a ring of `ring_lines` lines.
    fn follows(self, before: Self, ring_lines: u64) -> bool {
        let moved = |now: u64, then: u64| now.wrapping_sub(then);
        let lines = moved(self.lines, before.lines);
        // A block of many messages can be a single line.
        let messages = moved(self.seq, before.seq);
        (lines as i64) >= 0
            && (messages as i64) >= 0
            && (lines > 0 || messages == 0)
            && moved(self.credit, before.credit) as i64 >= 0
            && moved(self.lines, self.credit) <= ring_lines
    }
}

impl Lane {
    /// Largest message in bytes: all lines of the ring but the one that completes it.
    pub fn max_message(&self) -> u64 {
        max_message(self.ring_lines)
    }
}

/// Largest message in bytes that a ring of `ring_lines` lines takes, at whatever place it starts.
pub const fn max_message(ring_lines: u64) -> u64 {
    (ring_lines - 1) * 64
}

/// Consumed lines after which the consumer posts a credit without being asked, at one of the next polls that find nothing:
/// just above a quarter of the ring.
pub(crate) const fn credit_step(ring_lines: u64) -> u64 {
    ring_lines / 4 + 1
}

/// Consumed lines after which it does so even if there is more to receive. A little later than [`credit_step`]: a reader
/// that answers what it has received answers first, for stores leave in order and the answer would wait for the credit.
pub(crate) const fn credit_latest(ring_lines: u64) -> u64 {
    let later = ring_lines / 16;
    credit_step(ring_lines) + if later > 1 { later } else { 1 }
}

#[cfg(test)]
mod tests;
