//! What the targets of the ring share: a cursor over the input, memory, and an engine that checks its bounds.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering},
};

use ntb_mem::line::Line;
use ntb_ring::{
    link::engine::{Inbound, Order, StoreEngine},
    queue::Lane,
    wire::{mark::LaneKey, page::CREDIT},
};

/// The input, read from the front; zeros past its end.
pub struct Data<'a>(pub &'a [u8]);

impl Data<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (now, later) = self.0.split_at(N.min(self.0.len()));
        self.0 = later;
        let mut out = [0; N];
        out[..now.len()].copy_from_slice(now);
        out
    }

    pub fn byte(&mut self) -> u8 {
        self.take::<1>()[0]
    }

    pub fn half(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    pub fn word(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

/// Inbound memory; every access is checked by the vector.
#[derive(Clone)]
pub struct Memory(Arc<Vec<AtomicU64>>);

impl Memory {
    pub fn new(lines: u64) -> Self {
        Self(Arc::new((0..lines * 8).map(|_| AtomicU64::new(0)).collect()))
    }

    /// Stores a word somewhere.
    pub fn store(&self, index: usize, value: u64) {
        self.0[index % self.0.len()].store(value, Ordering::Relaxed);
    }
}

impl Inbound for Memory {
    fn lines(&self) -> u64 {
        self.0.len() as u64 / 8
    }

    fn load(&self, index: usize, order: Ordering) -> u64 {
        self.0[index].load(order)
    }
}

/// An engine that stores nowhere but within its bounds, and remembers the credits it was given.
pub struct Engine {
    lines: u64,
    credits: Arc<Mutex<Vec<u64>>>,
}

impl Engine {
    pub fn new(lines: u64) -> Self {
        Self {
            lines,
            credits: Arc::default(),
        }
    }

    /// Counts of consumed lines stored as credits.
    #[allow(
        dead_code,
        reason = "each target includes this file, and not every one looks at credits"
    )]
    pub fn credits(&self) -> Arc<Mutex<Vec<u64>>> {
        Arc::clone(&self.credits)
    }
}

impl StoreEngine for Engine {
    fn order(&self) -> Order {
        Order::Ordered
    }

    fn lines(&self) -> u64 {
        self.lines
    }

    fn put(&mut self, line: u64, content: &Line) {
        assert!(line < self.lines, "a store outside the peer's memory");
        if line == CREDIT {
            self.credits.lock().unwrap().push(content.0[0] & 0xffff_ffff_ffff);
        }
    }

    fn barrier(&mut self) {}

    fn flush(&mut self) {}
}

/// A lane between memories that start at line 0.
pub fn lane(ring_lines: u64, to_consumer: LaneKey) -> Lane {
    Lane {
        ring_lines,
        consumer_base: 0,
        producer_base: 0,
        to_consumer,
        to_producer: LaneKey::new(0x0815, 1, 2),
        first_seq: 0,
    }
}
