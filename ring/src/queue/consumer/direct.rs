//! The short ways: what most messages take. Everything else, and everything odd, is left to [`Consumer::visit`], which
//! finds nothing changed.

use std::sync::atomic::Ordering::Relaxed;

use ntb_mem::{
    line::{LINE_BYTES, Line},
    region::Small,
};

use super::{Consumer, Next, Peek, Polled, Received};
use crate::{
    link::engine::{Inbound, StoreEngine},
    wire::{
        line,
        mark::{Kind, same_message, small_after},
    },
};

impl<E: StoreEngine, I: Inbound> Consumer<E, I> {
    /// True when lines may be taken by their ending alone.
    #[inline(always)]
    pub(crate) fn is_plain(&self) -> bool {
        self.next == Next::Plain
    }

    /// The whole of [`Consumer::try_recv`] for a message of up to 48 bytes, and for none, while [`Consumer::is_plain`].
    #[inline(always)]
    pub(crate) fn try_recv_plain(&mut self, buf: &mut [u8]) -> Polled {
        self.settle();
        let guard = self.lane.to_consumer.guard;
        match self.ring.take_small(self.tail & self.mask, self.small_due, guard, buf) /* C1 */ {
            Small::Taken { len, lower } => self.consume_small(len, lower),
            Small::Not(mark) if !same_message(mark, self.small_due) && self.poll_again() => Polled::Empty,
            Small::Not(_) => Polled::Other,
        }
    }

    /// As [`Consumer::try_recv_plain`] where the check decides. The bytes checked are the bytes delivered.
    #[inline(never)]
    pub(crate) fn try_recv_checked(&mut self, buf: &mut [u8]) -> Polled {
        if self.next == Next::Special {
            return Polled::Other;
        }
        match self.peek() {
            Peek::Line(content, message_type, len) if len <= buf.len() => {
                content.copy_to(&mut buf[..len]);
                self.consume_small(len, message_type)
            }
            Peek::Empty => Polled::Empty,
            _ => Polled::Other,
        }
    }

    #[inline(always)]
    fn consume_small(&mut self, len: usize, message_type: u32) -> Polled {
        let seq = self.seq;
        self.owed = len as u64 + 1;
        self.consumed.store(seq.wrapping_add(1), Relaxed);
        Polled::Received(Received {
            len,
            message_type,
            seq,
        })
    }

    /// Accounts for the small message received last.
    #[inline(always)]
    pub(super) fn settle(&mut self) {
        if self.owed != 0 {
            let len = self.owed - 1;
            self.owed = 0;
            self.small_due = small_after(self.small_due);
            self.consume(1, 1, len);
        }
    }

    /// Receives the message of several lines that `content` completes, on an ordered link, if it is one and fits.
    #[inline]
    pub(super) fn take_long(&mut self, content: &Line, buf: &mut [u8]) -> Option<Received> {
        if self.next != Next::Plain {
            return None;
        }
        let (message_type, len) = line::long(content, self.lane.to_consumer, self.seq)?;
        let extra = line::extra_lines(Kind::Long, len as u64);
        if extra == 0 || len as u64 > self.lane.max_message() {
            return None;
        }
        let first = ((self.tail + 1) & self.mask) as usize * LINE_BYTES;
        let to_end = self.lane.ring_lines as usize * LINE_BYTES - first;
        let (front, back) = buf.get_mut(..len)?.split_at_mut(len.min(to_end));
        self.ring.copy_out(first, front);
        if !back.is_empty() {
            self.ring.copy_out(0, back);
        }
        let seq = self.seq;
        self.consume(1 + extra, 1, len as u64);
        self.small_due = small_after(self.small_due);
        Some(Received {
            len,
            message_type,
            seq,
        })
    }
}
