//! A model of the path from a processor's stores to the packets on a bridge, to count what a ring would cost there.
//!
//! The model is fed with the stores that an engine for each kind of mapping makes ([`StorePath`]) and keeps
//! write-combining buffers as processors do: stores to one 64-byte line merge; a buffer leaves as one write when it is
//! full; it leaves early, word by word, when another line needs it or for no reason at all (interrupts); a fence empties
//! all. What leaves goes on to the engine below, at that moment and in those pieces, so that real traffic flows and a
//! flush that was forgotten is a message that never arrives.
//!
//! Sources: Intel SDM volume 3, "Write Combining" (a partly filled buffer leaves as one write per 8-byte chunk); overhead
//! of a memory write with 64-bit addresses: 24 bytes (PCIe base specification: 2 framing, 6 data link, 16 header).

#[cfg(test)]
mod tests;

use std::{collections::HashMap, sync::Arc};

use ntb_mem::{
    line::{LINE_BYTES, LINE_WORDS, Line},
    sync::{AtomicU64, Ordering::Relaxed},
};

use super::{
    EngineHook,
    engine::{Engine, Order, StoreEngine},
    random::Random,
};

/// Bytes that a posted write takes on the wire beside its payload.
pub const TLP_OVERHEAD: u64 = 24;

/// The kinds of mapping, and the stores that an engine makes on each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StorePath {
    /// Write-combining; a line is one 64-byte streaming store (AVX-512). Fence at barrier and flush.
    Combining64,
    /// Write-combining; a line is eight 8-byte streaming stores, ascending. Fence at barrier and flush.
    Combining8,
    /// `movdir64b`: a line is one 64-byte direct store, past the buffers. Fence at barrier.
    Direct64,
    /// Uncached: a line is eight 8-byte stores, ascending, each a write of its own. Never a fence: they stay in order.
    Uncached8,
}

impl StorePath {
    /// The stable name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Combining64 => "wc64",
            Self::Combining8 => "wc",
            Self::Direct64 => "movdir64b",
            Self::Uncached8 => "uc8",
        }
    }

    /// What engines on it keep in order: whole lines and fences do, whatever may leave in pieces does not.
    pub fn order(self) -> Order {
        match self {
            Self::Direct64 => Order::Ordered,
            Self::Combining64 | Self::Combining8 | Self::Uncached8 => Order::Relaxed,
        }
    }

    fn in_pieces(self) -> bool {
        matches!(self, Self::Combining8 | Self::Uncached8)
    }

    fn fence_at_barrier(self) -> bool {
        self != Self::Uncached8
    }

    fn fence_at_flush(self) -> bool {
        matches!(self, Self::Combining64 | Self::Combining8)
    }
}

/// Tells which lines of the peer's memory take credits.
pub type IsCredit = Arc<dyn Fn(u64) -> bool + Send + Sync>;

/// Parameters of the model.
#[derive(Clone)]
pub struct CombiningOptions {
    /// Kind of mapping.
    pub path: StorePath,
    /// Write-combining buffers of an engine; processors have 4 to 12 a core.
    pub buffers: usize,
    /// Chance, in parts per million of stores, that a buffer leaves early right after a store to it.
    pub early_eviction: u32,
    /// Determines which do.
    pub seed: u64,
    /// Which lines are counted as credits; none by default.
    pub is_credit: Option<IsCredit>,
}

impl CombiningOptions {
    /// Ten buffers, one store in ten thousand followed by an early eviction.
    pub fn new(path: StorePath, seed: u64) -> Self {
        Self {
            path,
            buffers: 10,
            early_eviction: 100,
            seed,
            is_credit: None,
        }
    }
}

impl std::fmt::Debug for CombiningOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CombiningOptions")
            .field("path", &self.path)
            .field("buffers", &self.buffers)
            .field("early_eviction", &self.early_eviction)
            .field("seed", &self.seed)
            .finish_non_exhaustive()
    }
}

/// What one direction of a link has taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Lines put, credits included.
    pub lines: u64,
    /// Stores made for them.
    pub stores: u64,
    /// Posted writes that left.
    pub tlps: u64,
    /// Their payload and overhead.
    pub wire_bytes: u64,
    /// Fences executed.
    pub fences: u64,
    /// Buffers that left before they were full.
    pub partial: u64,
    /// Lines put that carry credits.
    pub credits: u64,
}

#[derive(Debug, Default)]
struct Counters {
    lines: AtomicU64,
    stores: AtomicU64,
    tlps: AtomicU64,
    wire_bytes: AtomicU64,
    fences: AtomicU64,
    partial: AtomicU64,
    credits: AtomicU64,
}

/// The model under all engines that go through its hook: one direction of one link. Each engine has buffers of its own,
/// as if it ran on a core of its own.
#[derive(Clone, Debug)]
pub struct Combining {
    options: Arc<CombiningOptions>,
    counters: Arc<Counters>,
    made: Arc<AtomicU64>,
}

impl Combining {
    /// A model as `options` say.
    ///
    /// # Panics
    /// When there is not one buffer.
    pub fn new(options: CombiningOptions) -> Self {
        assert!(
            options.buffers > 0,
            "a processor has at least one write-combining buffer"
        );
        Self {
            options: Arc::new(options),
            counters: Arc::default(),
            made: Arc::default(),
        }
    }

    /// What engines keep in order that are made from engines of order `inner`.
    pub fn order(&self, inner: Order) -> Order {
        match inner {
            Order::Ordered => self.options.path.order(),
            Order::Relaxed => Order::Relaxed,
        }
    }

    /// For [`super::Wrapped::new`].
    pub fn hook(&self) -> EngineHook {
        let this = self.clone();
        Box::new(move |engine| this.wrap(engine))
    }

    /// Puts the model over one engine.
    pub fn wrap(&self, engine: Engine) -> Engine {
        let number = self.made.fetch_add(1, Relaxed);
        Engine::Other(Box::new(CombiningEngine {
            order: self.order(engine.order()),
            inner: engine,
            random: Random::new(Random::new(self.options.seed ^ number << 32).next()),
            options: Arc::clone(&self.options),
            counters: Arc::clone(&self.counters),
            buffers: Vec::new(),
            arrived: HashMap::new(),
        }))
    }

    /// What has left so far. What waits in a buffer has not.
    pub fn traffic(&self) -> Traffic {
        let c = &self.counters;
        Traffic {
            lines: c.lines.load(Relaxed),
            stores: c.stores.load(Relaxed),
            tlps: c.tlps.load(Relaxed),
            wire_bytes: c.wire_bytes.load(Relaxed),
            fences: c.fences.load(Relaxed),
            partial: c.partial.load(Relaxed),
            credits: c.credits.load(Relaxed),
        }
    }
}

impl std::ops::Sub for Traffic {
    type Output = Self;

    /// The traffic between two looks.
    fn sub(self, before: Self) -> Self {
        Self {
            lines: self.lines - before.lines,
            stores: self.stores - before.stores,
            tlps: self.tlps - before.tlps,
            wire_bytes: self.wire_bytes - before.wire_bytes,
            fences: self.fences - before.fences,
            partial: self.partial - before.partial,
            credits: self.credits - before.credits,
        }
    }
}

/// A buffer that holds some words of a line.
#[derive(Clone, Copy, Debug)]
struct Buffer {
    line: u64,
    words: Line,
    /// Bit i: word i is in it.
    filled: u8,
}

/// One engine over the model.
struct CombiningEngine {
    inner: Engine,
    order: Order,
    random: Random,
    options: Arc<CombiningOptions>,
    counters: Arc<Counters>,
    /// Oldest first.
    buffers: Vec<Buffer>,
    /// Lines as they stand at the peer, where they may leave in pieces.
    arrived: HashMap<u64, Line>,
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Relaxed);
}

impl CombiningEngine {
    /// A posted write of whole words leaves: those of `filled`, a run of one or all of them.
    fn tlp(&mut self, buffer: &Buffer, filled: u8) {
        add(&self.counters.tlps, 1);
        add(
            &self.counters.wire_bytes,
            TLP_OVERHEAD + 8 * u64::from(filled.count_ones()),
        );
        if filled == u8::MAX {
            if self.options.path.in_pieces() {
                self.arrived.insert(buffer.line, buffer.words);
            }
            self.inner.put(buffer.line, &buffer.words);
            return;
        }
        let image = self.arrived.entry(buffer.line).or_default();
        for (i, (slot, word)) in image.0.iter_mut().zip(buffer.words.0).enumerate() {
            if filled >> i & 1 == 1 {
                *slot = word;
            }
        }
        let image = *image;
        self.inner.put(buffer.line, &image);
    }

    /// A buffer leaves: as one write when it is full, otherwise word by word.
    fn evict(&mut self, at: usize) {
        let buffer = self.buffers.remove(at);
        if buffer.filled == u8::MAX {
            return self.tlp(&buffer, u8::MAX);
        }
        add(&self.counters.partial, 1);
        for i in 0..LINE_WORDS {
            let word = buffer.filled & 1 << i;
            if word != 0 {
                self.tlp(&buffer, word);
            }
        }
    }

    /// A store to write-combining memory, of the words of `filled`.
    fn combine(&mut self, line: u64, content: &Line, filled: u8) {
        add(&self.counters.stores, 1);
        let at = match self.buffers.iter().position(|b| b.line == line) {
            Some(at) => at,
            None => {
                if self.buffers.len() == self.options.buffers {
                    let victim = self.random.below(self.buffers.len() as u64);
                    self.evict(victim as usize);
                }
                self.buffers.push(Buffer {
                    line,
                    words: Line::ZERO,
                    filled: 0,
                });
                self.buffers.len() - 1
            }
        };
        let buffer = &mut self.buffers[at];
        for (i, (slot, word)) in buffer.words.0.iter_mut().zip(content.0).enumerate() {
            if filled >> i & 1 == 1 {
                *slot = word;
            }
        }
        buffer.filled |= filled;
        if buffer.filled == u8::MAX || self.random.chance(self.options.early_eviction) {
            self.evict(at);
        }
    }

    /// A store past the buffers.
    fn direct(&mut self, line: u64, content: &Line, filled: u8) {
        add(&self.counters.stores, 1);
        let buffer = Buffer {
            line,
            words: *content,
            filled,
        };
        self.tlp(&buffer, filled);
    }

    fn fence(&mut self) {
        add(&self.counters.fences, 1);
        while !self.buffers.is_empty() {
            self.evict(0);
        }
    }
}

impl StoreEngine for CombiningEngine {
    fn order(&self) -> Order {
        self.order
    }

    fn lines(&self) -> u64 {
        self.inner.lines()
    }

    fn put(&mut self, line: u64, content: &Line) {
        assert!(line < self.inner.lines(), "line outside the peer's memory");
        add(&self.counters.lines, 1);
        if self
            .options
            .is_credit
            .as_ref()
            .is_some_and(|is_credit| is_credit(line))
        {
            add(&self.counters.credits, 1);
        }
        let words = (0..LINE_WORDS).map(|i| 1u8 << i);
        match self.options.path {
            StorePath::Combining64 => self.combine(line, content, u8::MAX),
            StorePath::Combining8 => words.for_each(|word| self.combine(line, content, word)),
            StorePath::Direct64 => self.direct(line, content, u8::MAX),
            StorePath::Uncached8 => words.for_each(|word| self.direct(line, content, word)),
        }
    }

    fn barrier(&mut self) {
        if self.options.path.fence_at_barrier() {
            self.fence();
        }
        self.inner.barrier();
    }

    fn flush(&mut self) {
        if self.options.path.fence_at_flush() {
            self.fence();
        }
        self.inner.flush();
    }
}

impl Drop for CombiningEngine {
    /// A thread that stops using a window leaves its buffers to the processor, which empties them before long.
    fn drop(&mut self) {
        while !self.buffers.is_empty() {
            self.evict(0);
        }
    }
}

const _: () = assert!(LINE_BYTES == 8 * LINE_WORDS);
