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
