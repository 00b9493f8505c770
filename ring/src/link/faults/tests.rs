use std::time::Instant;

use ntb_mem::{
    line::LINE_WORDS,
    region::{Pages, View},
};
use proptest::prelude::*;

use super::*;
use crate::{
    link::{
        Link, Wrapped,
        conformance::WATCHDOG,
        engine::Inbound,
        pair::{PairLink, PairOptions, pair},
    },
    queue::{Consumer, Lane, Producer, RecvError},
    wire::mark::LaneKey,
};

/// What reaches the wire, in order.
#[derive(Clone, Debug, Default)]
struct Log(Arc<Mutex<Vec<(u64, Line)>>>);

const LINES: u64 = 32;

impl StoreEngine for Log {
    fn order(&self) -> Order {
        Order::Ordered
    }
    fn lines(&self) -> u64 {
        LINES
    }
    fn put(&mut self, line: u64, content: &Line) {
        lock(&self.0).push((line, *content));
    }
    fn barrier(&mut self) {}
    fn flush(&mut self) {}
}

impl Log {
    fn engine(&self) -> Engine {
        Engine::Other(Box::new(self.clone()))
    }

    fn take(&self) -> Vec<(u64, Line)> {
        std::mem::take(&mut lock(&self.0))
    }
}

fn all(seed: u64, keep_order: bool) -> FaultOptions {
    FaultOptions {
        seed,
        keep_order,
        delay: 200_000,
        hold: 200_000,
        split: 200_000,
        blank: 200_000,
        late: 200_000,
        scribble: 0,
    }
}

fn content(n: u64) -> Line {
    Line(std::array::from_fn(|i| (n + 1) << 8 | i as u64))
}

fn settle(faults: &Faults) {
    for _ in 0..100 {
        faults.pump();
    }
}

#[derive(Clone, Debug)]
enum Step {
    Put(u64),
    Barrier,
    Flush,
    Pump,
    Replace,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    proptest::collection::vec(
        prop_oneof![
            8 => (0..LINES).prop_map(Step::Put),
            1 => Just(Step::Barrier),
            1 => Just(Step::Flush),
            1 => Just(Step::Pump),
            1 => Just(Step::Replace),
        ],
        1..300,
    )
}

/// What reached the wire.
type Arrivals = Vec<(u64, Line)>;
/// Per put its line and the barriers before it.
type Puts = Vec<(u64, u64)>;

fn run(options: FaultOptions, steps: &[Step]) -> (Arrivals, Puts) {
    let (faults, log) = (Faults::new(options), Log::default());
    let mut engine = faults.wrap(log.engine());
    let (mut puts, mut epoch) = (Vec::new(), 0);
    for step in steps {
        match step {
            Step::Put(line) => {
                engine.put(*line, &content(puts.len() as u64));
                puts.push((*line, epoch));
            }
            Step::Barrier => {
                engine.barrier();
                epoch += 1;
            }
            Step::Flush => engine.flush(),
            Step::Pump => faults.pump(),
            Step::Replace => {
                // Another life: everything of the old one is out by then.
                engine = faults.wrap(log.engine());
                epoch += 1;
            }
        }
    }
    engine.flush();
    settle(&faults);
    (log.take(), puts)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// After a flush and some time, each place holds what was put there last.
    #[test]
    fn everything_arrives_in_the_end(seed: u64, keep_order: bool, steps in steps()) {
        let (wire, puts) = run(all(seed, keep_order), &steps);
        for line in 0..LINES {
            let last = puts.iter().rposition(|p| p.0 == line).map(|n| content(n as u64));
            let arrived = wire.iter().rev().find(|w| w.0 == line).map(|w| w.1);
            prop_assert_eq!(arrived, last);
        }
    }

    /// Where fences are kept, no word 7 comes ahead of the other words, and nothing ahead of what a barrier separates it from.
    #[test]
    fn kept_fences_are_kept(seed: u64, steps in steps()) {
        let (wire, puts) = run(FaultOptions { late: 0, ..all(seed, true) }, &steps);
        let (mut newest, mut seen) = (0, std::collections::BTreeSet::new());
        for (_, image) in &wire {
            let mark = image.0[LINE_WORDS - 1];
            if mark == 0 || mark == u64::MAX {
                continue;
            }
            let n = (mark >> 8) - 1;
            prop_assert_eq!(image.0[..7].iter().filter(|w| **w >> 8 < n + 1).count(), 0, "{:?}", image);
            // A part of a later put may show the whole of the put before it once more.
            if *image == content(n) && seen.insert(n) {
                let epoch = puts[n as usize].1;
                prop_assert!(epoch >= newest, "put {} of epoch {} after epoch {}", n, epoch, newest);
                newest = epoch;
            }
        }
    }

    #[test]
    fn a_seed_decides_everything(seed: u64, keep_order: bool, steps in steps()) {
        prop_assert_eq!(run(all(seed, keep_order), &steps), run(all(seed, keep_order), &steps));
    }
}

#[test]
fn every_fault_happens_and_is_counted() {
    let steps: Vec<_> = (0..20_000u64)
        .map(|n| match n % 50 {
            13 => Step::Barrier,
            20 => Step::Flush,
            49 if n % 1000 == 999 => Step::Replace,
            _ => Step::Put(n * 7 % LINES),
        })
        .collect();
    for keep_order in [false, true] {
        let (faults, log) = (
            Faults::new(FaultOptions {
                scribble: 10_000,
                ..all(1, keep_order)
            }),
            Log::default(),
        );
        let mut engine = faults.wrap(log.engine());
        for step in &steps {
            match step {
                Step::Put(line) => engine.put(*line, &content(*line)),
                Step::Barrier => engine.barrier(),
                Step::Flush => engine.flush(),
                Step::Replace => engine = faults.wrap(log.engine()),
                Step::Pump => {}
            }
        }
        let c = faults.counts();
        for count in [
            c.delayed,
            c.held,
            c.reordered,
            c.split,
            c.blanked,
            c.late,
            c.scribbled,
        ] {
            assert!(count > 100, "{c:?}");
        }
        assert_eq!(
            (c.vanished, c.puts),
            (
                0,
                steps.iter().filter(|s| matches!(s, Step::Put(_))).count() as u64
            )
        );
    }
}

#[test]
fn without_fences_a_mark_does_arrive_ahead_of_its_words() {
    let steps: Vec<_> = (0..2000).map(|n| Step::Put(n % LINES)).collect();
    let (wire, _) = run(all(3, false), &steps);
    let torn = wire
        .iter()
        .filter(|(_, i)| i.0[7] != u64::MAX && i.0[..7].iter().any(|w| *w >> 8 < i.0[7] >> 8));
    assert!(torn.count() > 100);
}

#[test]
fn order_is_reported_as_it_is() {
    let relaxed = Faults::new(all(0, false));
    let ordered = Faults::new(all(0, true));
    assert_eq!(relaxed.wrap(Log::default().engine()).order(), Order::Relaxed);
    assert_eq!(ordered.wrap(Log::default().engine()).order(), Order::Ordered);
    assert_eq!(ordered.order(Order::Relaxed), Order::Relaxed);
}

#[test]
fn a_dead_direction_loses_everything_until_it_is_revived() {
    let (faults, log) = (Faults::new(FaultOptions::default()), Log::default());
    let mut engine = faults.wrap(log.engine());
    faults.set_dead(true);
    engine.put_bytes(0, &[1; 200]);
    engine.flush();
    assert_eq!(log.take(), []);
    faults.set_dead(false);
    engine.put(1, &content(1));
    assert_eq!(log.take(), [(1, content(1))]);
    assert_eq!(faults.counts().vanished, 4);
}

#[test]
fn an_old_life_arrives_late_but_never_on_top_of_the_new_one() {
    let options = FaultOptions {
        late: 1_000_000,
        ..FaultOptions::default()
    };
    let (faults, log) = (Faults::new(options), Log::default());
    let mut old = faults.wrap(log.engine());
    old.put(3, &content(0));
    old.put(3, &content(1));
    old.put(9, &content(2));
    let mut new = faults.wrap(log.engine());
    new.put(9, &content(3)); // before the old one ends: nothing of it may arrive there any more
    drop(old);
    log.take();
    new.put(3, &content(4));
    assert_eq!(log.take(), [(3, content(1)), (3, content(4))]);
    for n in 0..1000 {
        new.put(5, &content(n));
    }
    assert!(log.take().iter().all(|(line, _)| *line == 5));
    assert_eq!(faults.counts().late, 1);
}

#[test]
fn what_an_old_engine_delays_does_not_overwrite_the_new() {
    let options = FaultOptions {
        hold: 1_000_000,
        ..FaultOptions::default()
    };
    let (faults, log) = (Faults::new(options), Log::default());
    let mut old = faults.wrap(log.engine());
    old.put(3, &content(0));
    let mut new = faults.wrap(log.engine());
    new.put(3, &content(1));
    new.flush();
    drop(old);
    assert_eq!(log.take(), [(3, content(1))]);
    assert_eq!(faults.counts().superseded, 1);
}

#[test]
fn the_pump_delivers_what_no_later_call_would() {
    let options = FaultOptions {
        delay: 1_000_000,
        ..FaultOptions::default()
    };
    let (faults, log) = (Faults::new(options), Log::default());
    let mut engine = faults.wrap(log.engine());
    let pump = faults.pump_every(Duration::from_micros(200)).unwrap();
    engine.put(3, &content(0));
    engine.flush();
    let start = Instant::now();
    while lock(&log.0).is_empty() {
        assert!(start.elapsed() < WATCHDOG);
        std::thread::yield_now();
    }
    drop(pump);
    assert_eq!(log.take(), [(3, content(0))]);
}

type End = (Producer<Engine, View>, Consumer<Engine, View>);

/// One lane over a pair whose both directions are under faults.
fn lane(faults: &[Faults; 2]) -> (End, [Wrapped<PairLink>; 2]) {
    let options = PairOptions {
        window_bytes: 1 << 16,
        pages: Pages::Normal,
    };
    let (a, b) = pair(&options).unwrap();
    let wrap = |link: PairLink, f: &Faults| {
        let order = f.order(link.order());
        Wrapped::new(link, order, f.hook())
    };
    let (a, b) = (wrap(a, &faults[0]), wrap(b, &faults[1]));
    let lane = Lane {
        ring_lines: 64,
        consumer_base: 256,
        producer_base: 256,
        to_consumer: LaneKey::new(7, 0xffff_fff0, 0x1234_5678),
        to_producer: LaneKey::new(9, 5, 0x8765_4321),
        first_seq: 0,
    };
    let control = |link: &Wrapped<PairLink>| link.inbound().part(256, 64).unwrap();
    let ring = b.inbound().part(256 + 64, 64).unwrap();
    let producer = Producer::new(a.outbound().unwrap(), control(&a), lane, a.order());
    let consumer = Consumer::new(b.outbound().unwrap(), control(&b), ring, lane, a.order());
    ((producer, consumer), [a, b])
}

/// The ring loses nothing, doubles nothing and delivers nothing torn, whatever arrives when.
#[test]
fn a_ring_delivers_everything_under_faults() {
    for (seed, keep_order) in [(1, true), (2, true), (3, false), (4, false)] {
        let faults = [0, 1].map(|i| Faults::new(all(seed * 2 + i, keep_order)));
        let ((mut producer, mut consumer), links) = lane(&faults);
        assert_eq!(links[0].inner().facts().engine, "write-back");
        let message = |n: u64| -> Vec<u8> {
            let len = [8, 48, 49, 56, 57, 130, 1000, 0][n as usize % 8];
            (0..len)
                .map(|i| (n as u8).wrapping_mul(31).wrapping_add(i as u8))
                .collect()
        };
        let (mut sent, mut received) = (0, 0);
        let mut buf = vec![0; 4096];
        let start = Instant::now();
        while received < 20_000 {
            assert!(
                start.elapsed() < WATCHDOG,
                "stuck at {sent} sent, {received} received"
            );
            if sent < 20_000 && producer.try_send(0, &message(sent)).is_ok() {
                sent += 1;
            } else {
                faults[0].pump();
            }
            match consumer.try_recv(&mut buf) {
                Ok(got) => {
                    assert_eq!(got.seq, received);
                    assert_eq!(buf[..got.len], message(received)[..]);
                    received += 1;
                }
                Err(RecvError::Empty) => faults[1].pump(),
                Err(e) => panic!("{e}"),
            }
        }
        let counts = faults[0].counts();
        assert!(counts.reordered > 100 && counts.blanked > 1000, "{counts:?}");
    }
}

#[test]
fn scribbles_stay_inside_the_peers_memory() {
    let (a, b) = pair(&PairOptions {
        window_bytes: 4096,
        pages: Pages::Normal,
    })
    .unwrap();
    let faults = Faults::new(FaultOptions {
        scribble: 1_000_000,
        ..FaultOptions::default()
    });
    let mut engine = faults.wrap(a.outbound().unwrap());
    for _ in 0..10_000 {
        engine.put(0, &Line::ZERO);
    }
    let view = b.inbound();
    assert!(
        (1..64).all(|line| Inbound::load_line(&view, line) != Line::ZERO),
        "every line is hit"
    );
    assert_eq!(faults.counts().scribbled, 10_000);
}
