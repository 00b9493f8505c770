//! Models of the ring, its credits, its sleep and its restarts: every interleaving of small cases, with a wire between
//! the two sides.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p ntb-ring --test loom --release
//! ```
//!
//! Each model has a part in which the threads run against each other for a bounded number of steps, and must see nothing
//! wrong, and a part after they have been joined, in which everything on the way is delivered and whatever was owed must
//! arrive: from no state that can be reached is there a way into one where a side waits for ever.
//!
//! `LOOM_MAX_PREEMPTIONS` overrides the bound on preemptions that each model sets for itself.

#![cfg(loom)]

mod credit;
mod restart;
mod ring;
mod sleep;
mod wire;

use ntb_ring::{
    link::engine::Order,
    queue::{Consumer, Producer, RecvError},
    wire::mark::LaneKey,
};
use wire::{Memory, Part, Pick, Sender, Wire};

type P = Producer<Sender, Part>;
type C = Consumer<Sender, Part>;

const TO_CONSUMER: LaneKey = LaneKey::new(0x4711, 0xffff_fffe, 0x600d_600d);
const TO_PRODUCER: LaneKey = LaneKey::new(0x0815, 0, 0);

/// Both ends of a lane and the wires between them.
struct Pair {
    producer: P,
    consumer: C,
    /// Producer to consumer.
    there: Wire,
    /// Consumer to producer.
    back: Wire,
}

fn pair(ring_lines: u64, order: Order, pick: Pick) -> Pair {
    let (at_consumer, at_producer) = (Memory::new(ring_lines), Memory::new(0));
    let (to_consumer, there) = wire::wire(&at_consumer, order, pick);
    let (to_producer, back) = wire::wire(&at_producer, order, pick);
    let lane = wire::lane(ring_lines, TO_CONSUMER, TO_PRODUCER);
    let mut consumer = Consumer::new(
        to_producer,
        at_consumer.control(),
        at_consumer.ring(),
        lane,
        order,
    );
    consumer.set_incomplete_deadline(std::time::Duration::MAX);
    Pair {
        producer: Producer::new(to_consumer, at_producer.control(), lane, order),
        consumer,
        there,
        back,
    }
}

impl Pair {
    /// Sends and receives `lines` single lines, so that the models start somewhere in the ring, over old content.
    fn advance(&mut self, lines: u64) {
        for i in 0..lines {
            self.producer.try_send(7, &[0xa0 + i as u8; 48]).unwrap();
        }
        self.there.settle();
        let mut buf = [0; 48];
        for _ in 0..lines {
            self.consumer.try_recv(&mut buf).unwrap();
        }
        self.consumer.give_back();
        self.back.settle();
    }
}

/// Content of message `n`: few words are not zero, and no two messages have one in common.
fn content(n: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for at in [0, 56, 64, 120] {
        if let Some(word) = bytes.get_mut(at..at + 8) {
            word.copy_from_slice(&(0x0101 * (n + 1) + (at as u64) << 32).to_le_bytes());
        }
    }
    bytes
}

/// Receives the message that is due, if it is there; anything but it is a failure. `lens` are the lengths by number.
fn receive(consumer: &mut C, first_seq: u64, lens: &[usize], got: &mut usize) -> bool {
    let mut buf = [0; 256];
    match consumer.try_recv(&mut buf) {
        Ok(r) => {
            assert!(*got < lens.len(), "more than was sent");
            assert_eq!(r.seq, first_seq + *got as u64);
            assert_eq!(
                &buf[..r.len],
                content(*got as u64, lens[*got]),
                "message {got} is torn or stale"
            );
            *got += 1;
            true
        }
        Err(RecvError::Empty) => false,
        Err(e) => panic!("{e}"),
    }
}

/// Runs `model` under loom with at most `preemptions` of them in a run.
fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 20_000;
    builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
    builder.check(model);
}
