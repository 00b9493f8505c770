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

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, atomic::Ordering};

    use ntb_mem::region::{Pages, View, remote_loads};
    use proptest::prelude::*;

    use super::*;
    use crate::{
        link::{
            Link, Wrapped,
            pair::{PairLink, PairOptions, pair},
        },
        queue::{Consumer, Lane, Producer, RecvError},
        wire::{mark::LaneKey, page},
    };

    const PATHS: [StorePath; 4] = [
        StorePath::Combining64,
        StorePath::Combining8,
        StorePath::Direct64,
        StorePath::Uncached8,
    ];
    const LINES: u64 = 32;

    /// What reaches the wire, in order.
    #[derive(Clone, Debug, Default)]
    struct Log(Arc<Mutex<Vec<(u64, Line)>>>);

    impl StoreEngine for Log {
        fn order(&self) -> Order {
            Order::Ordered
        }
        fn lines(&self) -> u64 {
            LINES
        }
        fn put(&mut self, line: u64, content: &Line) {
            self.0.lock().unwrap().push((line, *content));
        }
        fn barrier(&mut self) {}
        fn flush(&mut self) {}
    }

    fn model(options: CombiningOptions) -> (Combining, Engine, Log) {
        let (model, log) = (Combining::new(options), Log::default());
        let engine = model.wrap(Engine::Other(Box::new(log.clone())));
        (model, engine, log)
    }

    fn exact(path: StorePath) -> CombiningOptions {
        CombiningOptions {
            early_eviction: 0,
            ..CombiningOptions::new(path, 1)
        }
    }

    #[test]
    fn a_line_costs_what_its_path_costs() {
        for (path, tlps, bytes, stores, fences) in [
            (StorePath::Combining64, 1, 88, 1, 1),
            (StorePath::Combining8, 1, 88, 8, 1),
            (StorePath::Direct64, 1, 88, 1, 0),
            (StorePath::Uncached8, 8, 256, 8, 0),
        ] {
            let (model, mut engine, log) = model(exact(path));
            engine.put(3, &Line([7; 8]));
            engine.flush();
            let t = model.traffic();
            assert_eq!(
                (t.lines, t.tlps, t.wire_bytes, t.stores, t.fences, t.partial),
                (1, tlps, bytes, stores, fences, 0),
                "{path:?}"
            );
            assert_eq!(log.0.lock().unwrap().last(), Some(&(3, Line([7; 8]))));
            engine.barrier();
            let fenced = model.traffic() - t;
            assert_eq!(fenced.fences, u64::from(path != StorePath::Uncached8));
            assert_eq!(fenced.tlps, 0);
        }
    }

    #[test]
    fn a_buffer_that_leaves_early_leaves_word_by_word() {
        let (model, mut engine, log) = model(CombiningOptions {
            early_eviction: 1_000_000,
            ..exact(StorePath::Combining8)
        });
        engine.put(5, &Line(std::array::from_fn(|i| i as u64 + 1)));
        let t = model.traffic();
        assert_eq!((t.tlps, t.partial, t.wire_bytes), (8, 8, 256));
        let log = log.0.lock().unwrap();
        assert_eq!(
            log[2],
            (5, Line([1, 2, 3, 0, 0, 0, 0, 0])),
            "the words that have left so far"
        );
    }

    #[test]
    fn few_buffers_and_many_lines_evict_each_other() {
        let (model, mut engine, log) = model(CombiningOptions {
            buffers: 2,
            ..exact(StorePath::Combining8)
        });
        // Half-filled lines cannot be had through the engine: fill them by the path's own stores.
        let Engine::Other(_) = &mut engine else {
            unreachable!()
        };
        drop(engine);
        let mut raw = CombiningEngine {
            inner: Engine::Other(Box::new(log.clone())),
            order: Order::Relaxed,
            random: Random::new(1),
            options: Arc::clone(&model.options),
            counters: Arc::clone(&model.counters),
            buffers: Vec::new(),
            arrived: HashMap::new(),
        };
        for line in 0..3 {
            for word in 0..3 {
                raw.combine(line, &Line([9; 8]), 1 << word);
            }
        }
        assert_eq!(
            model.traffic().tlps,
            3,
            "one of the first two has left, in three words"
        );
        raw.flush();
        assert_eq!(model.traffic().tlps, 9);
        assert_eq!(model.traffic().partial, 3);
    }

    #[test]
    fn stores_to_a_word_that_waits_are_merged() {
        let (model, engine, log) = model(exact(StorePath::Combining8));
        drop(engine);
        let mut raw = CombiningEngine {
            inner: Engine::Other(Box::new(log.clone())),
            order: Order::Relaxed,
            random: Random::new(1),
            options: Arc::clone(&model.options),
            counters: Arc::clone(&model.counters),
            buffers: Vec::new(),
            arrived: HashMap::new(),
        };
        for value in 1..=5 {
            raw.combine(4, &Line([value; 8]), 1);
        }
        assert!(log.0.lock().unwrap().is_empty(), "it waits");
        raw.fence();
        assert_eq!(*log.0.lock().unwrap(), [(4, Line([5, 0, 0, 0, 0, 0, 0, 0]))]);
        assert_eq!((model.traffic().stores, model.traffic().tlps), (5, 1));
    }

    proptest! {
        /// Whatever is evicted when: after a flush everything is at the peer, and the counts add up.
        #[test]
        fn everything_has_left_after_a_flush(seed: u64, path in 0usize..4, early in 0u32..500_000, buffers in 1usize..12,
                                             puts in proptest::collection::vec(0..LINES, 1..200)) {
            let (model, mut engine, log) = model(CombiningOptions {
                early_eviction: early, buffers, ..CombiningOptions::new(PATHS[path], seed)
            });
            let mut last = HashMap::new();
            for (n, line) in puts.iter().enumerate() {
                let content = Line(std::array::from_fn(|i| (n as u64) << 8 | i as u64));
                engine.put(*line, &content);
                last.insert(*line, content);
            }
            engine.flush();
            let log = log.0.lock().unwrap();
            for (line, content) in last {
                prop_assert_eq!(log.iter().rev().find(|p| p.0 == line).map(|p| p.1), Some(content));
            }
            let t = model.traffic();
            prop_assert_eq!(t.tlps, log.len() as u64);
            prop_assert_eq!(t.lines, puts.len() as u64);
            prop_assert_eq!(t.wire_bytes, TLP_OVERHEAD * t.tlps + 64 * t.lines, "every word leaves once");
        }
    }

    type End = (Producer<Engine, View>, Consumer<Engine, View>);

    /// One lane over a pair whose both directions go through models.
    fn lane(models: &[Combining; 2], ring_lines: u64) -> (End, [Wrapped<PairLink>; 2]) {
        let options = PairOptions {
            window_bytes: 1 << 17,
            pages: Pages::Normal,
        };
        let (a, b) = pair(&options).unwrap();
        let wrap = |link: PairLink, m: &Combining| {
            let order = m.order(link.order());
            Wrapped::new(link, order, m.hook())
        };
        let (a, b) = (wrap(a, &models[0]), wrap(b, &models[1]));
        let lane = Lane {
            ring_lines,
            consumer_base: 256,
            producer_base: 256,
            to_consumer: LaneKey::new(7, 11, 0x1234_5678),
            to_producer: LaneKey::new(9, 5, 0x8765_4321),
            first_seq: 0,
        };
        let control = |link: &Wrapped<PairLink>| link.inbound().part(256, 64).unwrap();
        let ring = b.inbound().part(256 + 64, ring_lines).unwrap();
        let producer = Producer::new(a.outbound().unwrap(), control(&a), lane, a.order());
        let consumer = Consumer::new(b.outbound().unwrap(), control(&b), ring, lane, a.order());
        ((producer, consumer), [a, b])
    }

    /// The ring's bill per small message, credits included, on every path.
    #[test]
    fn a_small_message_costs_one_line_and_hardly_a_credit() {
        let is_credit: IsCredit = Arc::new(|line| line == 256 + page::CREDIT);
        for path in PATHS {
            let models = [1, 2].map(|seed| {
                Combining::new(CombiningOptions {
                    is_credit: Some(Arc::clone(&is_credit)),
                    ..CombiningOptions::new(path, seed)
                })
            });
            let ((mut producer, mut consumer), _links) = lane(&models, 256);
            let (mut sent, mut received) = (0u64, 0u64);
            let mut buf = [0; 48];
            while received < 50_000 {
                if sent < 50_000 && producer.try_send(0, &[sent as u8; 48]).is_ok() {
                    sent += 1;
                }
                match consumer.try_recv(&mut buf) {
                    Ok(got) => {
                        assert_eq!((got.seq, buf), (received, [received as u8; 48]));
                        received += 1;
                    }
                    Err(RecvError::Empty) => {}
                    Err(e) => panic!("{e}"),
                }
            }
            let [forth, back] = models.map(|m| m.traffic());
            let tlps = (forth.tlps + back.tlps) as f64 / sent as f64;
            let bar = if path == StorePath::Uncached8 { 8.4 } else { 1.05 };
            assert!(tlps <= bar, "{path:?}: {tlps} writes a message");
            assert!(back.credits * 64 < sent, "{path:?}: {} credits", back.credits);
            assert!(back.credits > 0 && forth.credits == 0);
            assert_eq!(forth.lines, sent);
        }
        assert_eq!(
            remote_loads().unwrap_or(0),
            0,
            "nothing in this crate reads a peer's memory"
        );
    }

    /// A message in a buffer has not left: the ring flushes, and the model would show it if it did not.
    #[test]
    fn what_is_not_flushed_does_not_arrive_where_buffers_hold_it() {
        let (a, b) = pair(&PairOptions {
            window_bytes: 4096,
            pages: Pages::Normal,
        })
        .unwrap();
        let model = Combining::new(exact(StorePath::Combining8));
        let mut raw = CombiningEngine {
            inner: a.outbound().unwrap(),
            order: Order::Relaxed,
            random: Random::new(1),
            options: Arc::clone(&model.options),
            counters: Arc::clone(&model.counters),
            buffers: Vec::new(),
            arrived: HashMap::new(),
        };
        raw.combine(0, &Line([1; 8]), 0x7f);
        assert_eq!(b.inbound().load(0, Ordering::Acquire), 0);
        raw.flush();
        assert_eq!(b.inbound().load(0, Ordering::Acquire), 1);
    }
}
