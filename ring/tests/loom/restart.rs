//! Lives of a lane: what an old one left on the wire is never taken for the new one's.
//!
//! The side that receives chooses the key of each life and hands it over; the models hand it over through a mailbox
//! word that arrives, like all else, some time after it was stored.

use std::{sync::Arc, time::Duration};

use loom::{sync::atomic::Ordering::Acquire, thread};
use ntb_mem::line::{LINE_WORDS, Line};
use ntb_ring::{
    link::engine::{Inbound, Order, StoreEngine},
    queue::{Consumer, Lane, Producer, SendError},
    wire::mark::LaneKey,
};

use crate::{
    C, P, Pick, TO_CONSUMER, TO_PRODUCER, check, content, receive,
    wire::{MAILBOX, Memory, Sender, lane, wire},
};

/// The keys of the second life: the sequences on the wire are the same as in the first.
const NEW_TO_CONSUMER: LaneKey = LaneKey::new(0x4712, 0xffff_fffe, 0x600d_600e);
const NEW_TO_PRODUCER: LaneKey = LaneKey::new(0x0816, 0, 0);

/// The writer dies with `old` messages on the wire; its successor sends `new` while they land, at any time. None of them
/// is received, in no state. One that lands on a line of the new life takes it away: keeping the two lives apart in time
/// is the handshake's part, below.
fn old_lines_land_late(order: Order, old: &'static [usize], new: &'static [usize], preemptions: usize) {
    check(preemptions, move || {
        let (at_consumer, at_producer) = (Memory::new(4), Memory::new(0));
        let (old_engine, mut old_wire) = wire(&at_consumer, order, Pick::First);
        let (engine, mut there) = wire(&at_consumer, order, Pick::First);
        let (back, _) = wire(&at_producer, order, Pick::First);
        let mut dead = Producer::new(
            old_engine,
            at_producer.control(),
            lane(4, TO_CONSUMER, TO_PRODUCER),
            order,
        );
        for (n, len) in old.iter().enumerate() {
            dead.try_send(0, &content(9 + n as u64, *len)).unwrap();
        }
        drop(dead);
        let life = lane(4, NEW_TO_CONSUMER, NEW_TO_PRODUCER);
        let mut consumer = Consumer::new(back, at_consumer.control(), at_consumer.ring(), life, order);
        consumer.set_incomplete_deadline(Duration::MAX);
        let mut producer = Producer::new(engine, at_producer.control(), life, order);
        let writer = thread::spawn(move || {
            for (n, len) in new.iter().enumerate() {
                producer.try_send(0, &content(n as u64, *len)).unwrap();
            }
        });
        let wires = thread::spawn(move || {
            for _ in 0..2 {
                old_wire.step();
                there.step();
            }
            (old_wire, there)
        });
        let mut got = 0;
        for _ in 0..3 {
            receive(&mut consumer, 0, new, &mut got);
        }
        writer.join().unwrap();
        let (mut old_wire, mut there) = wires.join().unwrap();
        there.settle();
        receive(&mut consumer, 0, new, &mut got);
        old_wire.settle();
        while receive(&mut consumer, 0, new, &mut got) {}
    });
}

#[test]
fn old_single_lines_are_never_received() {
    old_lines_land_late(Order::Ordered, &[8, 8], &[8, 8], 3);
}

#[test]
fn old_relaxed_lines_are_never_received() {
    old_lines_land_late(Order::Relaxed, &[8, 8], &[8], 2);
}

#[test]
fn an_old_long_message_is_never_received() {
    old_lines_land_late(Order::Ordered, &[72], &[8, 8], 3);
}

/// A credit of the old life that lands late frees nothing in the new one.
#[test]
fn old_credits_free_nothing() {
    check(3, || {
        let order = Order::Ordered;
        let (at_consumer, at_producer) = (Memory::new(4), Memory::new(0));
        let (engine, mut there) = wire(&at_consumer, order, Pick::First);
        let (old_back, old_back_wire) = wire(&at_producer, order, Pick::First);
        let (back, back_wire) = wire(&at_producer, order, Pick::First);
        // The old reader had consumed everything, and said so as it died.
        let old_life = lane(4, TO_CONSUMER, TO_PRODUCER);
        let (old_engine, mut old_there) = wire(&at_consumer, order, Pick::First);
        let mut old_producer = Producer::new(old_engine, at_producer.control(), old_life, order);
        let mut dead = Consumer::new(
            old_back,
            at_consumer.control(),
            at_consumer.ring(),
            old_life,
            order,
        );
        for n in 0..4 {
            old_producer.try_send(0, &content(n, 8)).unwrap();
        }
        old_there.settle();
        let mut got = 0;
        while receive(&mut dead, 0, &[8; 4], &mut got) {}
        dead.give_back();
        drop(dead);

        let life = lane(4, NEW_TO_CONSUMER, NEW_TO_PRODUCER);
        let mut producer = Producer::new(engine, at_producer.control(), life, order);
        let mut consumer = Consumer::new(back, at_consumer.control(), at_consumer.ring(), life, order);
        for n in 0..4 {
            producer.try_send(0, &content(n, 8)).unwrap();
        }
        there.settle();
        let late = thread::spawn(move || old_back_wire.steps(3));
        let wire_back = thread::spawn(move || back_wire.steps(1));
        let writer = thread::spawn(move || {
            for _ in 0..2 {
                // Room only when the new reader has given it.
                if let Err(e) = producer.try_send(0, &content(4, 8)) {
                    assert!(matches!(e, SendError::Full { .. }), "{e}");
                } else {
                    return true;
                }
            }
            false
        });
        let mut got = 0;
        for _ in 0..2 {
            receive(&mut consumer, 0, &[8; 5], &mut got);
        }
        let sent = writer.join().unwrap();
        assert!(
            !sent || consumer.stats().credits > 0,
            "room without a credit of this life"
        );
        late.join().unwrap();
        wire_back.join().unwrap();
    });
}

/// The writer's end before and after it has its key.
struct Writer {
    engine: Option<Sender>,
    memory: Arc<Memory>,
    producer: Option<P>,
    sent: usize,
}

/// Incarnations of the writer.
const OLD: u64 = 1;
const NEW: u64 = 2;
const MAILBOX_WORD: usize = MAILBOX as usize * LINE_WORDS;
const LENS: [usize; 2] = [8, 8];

fn mail(word: u64) -> Line {
    Line([word, 0, 0, 0, 0, 0, 0, 0])
}

fn life(tag: u16) -> Lane {
    lane(4, LaneKey::new(tag, 0, 5), NEW_TO_PRODUCER)
}

impl Writer {
    /// Takes a key that answers this incarnation's hello, then sends.
    fn go_on(&mut self) {
        let word = self.memory.control().load(MAILBOX_WORD, Acquire);
        if word >> 32 == NEW
            && let Some(engine) = self.engine.take()
        {
            let control = self.memory.control();
            self.producer = Some(Producer::new(engine, control, life(word as u16), Order::Ordered));
        }
        if let Some(producer) = &mut self.producer
            && self.sent < LENS.len()
        {
            producer
                .try_send(0, &content(self.sent as u64, LENS[self.sent]))
                .unwrap();
            self.sent += 1;
        }
    }
}

/// The reader's end: a new key, and a consumer under it, for each incarnation it sees come.
struct Reader {
    answers: Sender,
    memory: Arc<Memory>,
    seen: u64,
    tag: u16,
    consumer: Option<C>,
    got: usize,
}

impl Reader {
    fn go_on(&mut self) {
        let incarnation = self.memory.control().load(MAILBOX_WORD, Acquire);
        if incarnation != self.seen {
            self.seen = incarnation;
            self.tag += 1;
            let (credits, _) = wire(&self.memory, Order::Ordered, Pick::First); // none is due here
            let (control, ring) = (self.memory.control(), self.memory.ring());
            self.consumer = Some(Consumer::new(
                credits,
                control,
                ring,
                life(self.tag),
                Order::Ordered,
            ));
            self.got = 0;
            self.answers
                .put(MAILBOX, &mail(incarnation << 32 | u64::from(self.tag)));
            self.answers.flush();
        }
        // What the old life sent is its own reader's.
        if let Some(consumer) = &mut self.consumer
            && self.seen == NEW
        {
            receive(consumer, 0, &LENS, &mut self.got);
        }
    }
}

/// The handshake's part: the new writer's hello travels behind all that the old one stored, the reader makes the new
/// life's key when it sees it, and the writer sends under the key that answers its own hello, not under one that answers
/// its predecessor's. Then nothing of the old life is received, and nothing of the new one is lost.
#[test]
fn the_key_that_answers_the_hello_keeps_lives_apart() {
    check(2, || {
        let (at_consumer, at_producer) = (Memory::new(4), Memory::new(0));
        // One path from the writer's host: what the dead process stored is ahead of its successor's hello.
        let (mut engine, there) = wire(&at_consumer, Order::Ordered, Pick::First);
        let (answers, back) = wire(&at_producer, Order::Ordered, Pick::First);
        engine.put(MAILBOX, &mail(OLD));
        engine.barrier();
        let mut dead = Producer::new(engine.clone(), at_producer.control(), life(1), Order::Ordered);
        dead.try_send(0, &content(9, 8)).unwrap();
        drop(dead);
        engine.barrier();
        engine.put(MAILBOX, &mail(NEW));
        engine.flush();
        let mut writer = Writer {
            engine: Some(engine),
            memory: at_producer,
            producer: None,
            sent: 0,
        };
        let mut reader = Reader {
            answers,
            memory: at_consumer,
            seen: 0,
            tag: 1,
            consumer: None,
            got: 0,
        };
        let there = thread::spawn(move || there.steps(4));
        let back = thread::spawn(move || back.steps(2));
        let writer = thread::spawn(move || {
            writer.go_on();
            writer.go_on();
            writer
        });
        for _ in 0..3 {
            reader.go_on();
        }
        let mut writer = writer.join().unwrap();
        let (mut there, mut back) = (there.join().unwrap(), back.join().unwrap());
        for _ in 0..5 {
            there.settle();
            reader.go_on();
            back.settle();
            writer.go_on();
        }
        assert_eq!(reader.got, LENS.len(), "a message of the new life was lost");
    });
}
