//! The registered memory that runs are written from when a request cannot carry them itself.
//!
//! A line of it is used again only when the device has said that the request which reads it is complete: until then a
//! retransmission may read it once more. (The line of the peer's ring that it goes to is used again only after the
//! consumer's credit; that rule is the ring's.)

use std::{collections::VecDeque, sync::Arc};

use ntb_mem::region::{Pages, Region, View};

use super::verbs::{Adapter, Memory, Piece, Registered};
use crate::link::{LinkError, ends::memory_error};

/// Smallest mirror: four pages.
const SMALLEST: u64 = 4 * 4096;

/// A ring of registered memory.
#[derive(Debug)]
pub(super) struct Mirror {
    view: View,
    registered: Arc<dyn Registered>,
    bytes: u64,
    /// Bytes handed out and given back since the start; both only grow, and their difference is at most `bytes`.
    head: u64,
    tail: u64,
    /// What a request leaves free once it is complete: its number, and `head` after it.
    held: VecDeque<(u64, u64)>,
    /// Longest run that is known to have arrived, in bytes; what a run leaves out at the end counts to it.
    longest_done: u64,
}

impl Mirror {
    /// Memory of at least `bytes`, registered.
    pub(super) fn new(adapter: &dyn Adapter, bytes: u64, pages: Pages) -> Result<Self, LinkError> {
        let bytes = bytes.max(SMALLEST).next_multiple_of(4096);
        let region = Arc::new(Region::allocate(bytes, pages).map_err(|e| memory_error(&e))?);
        Ok(Self {
            view: region.view(),
            registered: adapter.register(Memory::Local(region), false)?,
            bytes,
            head: 0,
            tail: 0,
            held: VecDeque::new(),
            longest_done: 0,
        })
    }

    /// Longest run that one request takes from it, in bytes. A quarter, so that there is room beside what is under way.
    pub(super) fn longest(&self) -> u64 {
        self.bytes / 4
    }

    /// Whether room is left for a run of `bytes`, whole lines, at most [`Mirror::longest`].
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        self.start_of(bytes) + bytes - self.tail <= self.bytes
    }

    /// Where a run of `bytes` would start: runs do not wrap.
    fn start_of(&self, bytes: u64) -> u64 {
        let at = self.head % self.bytes;
        match at + bytes > self.bytes {
            true => self.head + (self.bytes - at),
            false => self.head,
        }
    }

    /// Copies a run of whole lines in, the last one filled up with zeros, for the request with this number.
    /// [`Mirror::has_room`] has said that it fits.
    pub(super) fn hold(&mut self, request: u64, run: &[u8], bytes: usize) -> Piece {
        let start = self.start_of(bytes as u64);
        let at = start % self.bytes;
        self.view.copy_in(at as usize, run);
        self.head = start + bytes as u64;
        self.held.push_back((request, self.head));
        Piece {
            address: self.registered.memory().address() + at,
            bytes: bytes as u32,
            lkey: self.registered.lkey(),
        }
    }

    /// Takes back what the requests up to this number have held.
    pub(super) fn release(&mut self, done: u64) {
        while let Some((request, head)) = self.held.front().copied()
            && request <= done
        {
            self.longest_done = self.longest_done.max(head - self.tail);
            self.tail = head;
            self.held.pop_front();
        }
    }

    /// Longest run that has arrived.
    pub(super) fn longest_done(&self) -> u64 {
        self.longest_done
    }

    /// Bytes handed out so far.
    pub(super) fn handed_out(&self) -> u64 {
        self.head
    }
}
