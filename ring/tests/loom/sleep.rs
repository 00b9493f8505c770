//! Sleeping never loses a wake-up: arm, echo and ring over two delay queues.
//!
//! The reader arms, sleeps once the arm is answered by "sleep", and is woken by the doorbell alone. The writer's service
//! thread answers and rings. Failure is a reader that sleeps, no ring on its way, and a message that it has not received.

use loom::{sync::atomic::Ordering::Acquire, thread};
use ntb_ring::{
    link::engine::Order,
    queue::{Alarm, Answer, Consumer, Producer},
};

use crate::{
    Pick, TO_CONSUMER, TO_PRODUCER, check, content, receive,
    wire::{Memory, Part, Sender, Wire, lane, wire},
};

type A = Alarm<Sender, Part>;

/// One round of the service thread.
fn serve(alarm: &mut A, bell: &mut Sender) -> bool {
    let ring = alarm.poll();
    if ring {
        bell.ring();
    }
    ring
}

/// The reader arms `arms` times at most while `lens` are sent, and then sleeps or stays awake.
fn sleeping(order: Order, lens: &'static [usize], arms: usize, preemptions: usize) {
    check(preemptions, move || {
        let (at_consumer, at_producer) = (Memory::new(4), Memory::new(0));
        let lane = lane(4, TO_CONSUMER, TO_PRODUCER);
        // The writer's two threads put through engines of their own, and have no order between them.
        let (data, mut data_wire) = wire(&at_consumer, order, Pick::First);
        let (echo, mut echo_wire) = wire(&at_consumer, order, Pick::First);
        let (mut bell, mut bell_wire) = wire(&at_consumer, order, Pick::First);
        let (back, back_wire) = wire(&at_producer, order, Pick::First);
        let mut producer = Producer::new(data, at_producer.control(), lane, order);
        let mut alarm = Alarm::new(echo, at_producer.control(), lane, producer.sent_counter());
        let mut consumer = Consumer::new(back, at_consumer.control(), at_consumer.ring(), lane, order);

        let writer = thread::spawn(move || {
            for (n, len) in lens.iter().enumerate() {
                producer.try_send(0, &content(n as u64, *len)).unwrap();
            }
        });
        let service = thread::spawn(move || {
            for _ in 0..2 {
                serve(&mut alarm, &mut bell);
            }
            (alarm, bell)
        });
        let there = thread::spawn(move || {
            echo_wire.step();
            data_wire.step();
            bell_wire.step();
            echo_wire.step();
            (data_wire, echo_wire, bell_wire)
        });
        let back = thread::spawn(move || back_wire.steps(2 * arms));
        let mut got = 0;
        let mut asleep = false;
        for _ in 0..arms {
            if asleep || receive(&mut consumer, 0, lens, &mut got) {
                continue;
            }
            consumer.arm();
            // A message may end the wait for the answer, as may patience.
            asleep = !receive(&mut consumer, 0, lens, &mut got) && consumer.answer() == Answer::Sleep;
        }
        writer.join().unwrap();
        let (mut alarm, mut bell) = service.join().unwrap();
        let mut wires: [Wire; 4] = {
            let (a, b, c) = there.join().unwrap();
            [a, b, c, back.join().unwrap()]
        };
        let mut settle = || {
            wires.iter_mut().for_each(Wire::settle);
            serve(&mut alarm, &mut bell);
            wires.iter_mut().for_each(Wire::settle);
        };
        settle();
        settle();
        if !asleep && got < lens.len() {
            // Still awake: goes on as a reader that blocks does.
            while !asleep && receive(&mut consumer, 0, lens, &mut got) {}
            consumer.arm();
            settle();
            asleep = consumer.answer() == Answer::Sleep;
        }
        let woken = at_consumer.bell.load(Acquire) > 0;
        if asleep && !woken {
            assert_eq!(
                got,
                lens.len(),
                "asleep with a message there and no ring on its way"
            );
        } else {
            while receive(&mut consumer, 0, lens, &mut got) {}
            assert_eq!(got, lens.len(), "a message was lost");
        }
    });
}

#[test]
fn one_message_against_one_arm() {
    sleeping(Order::Ordered, &[8], 1, 3);
}

#[test]
fn one_message_against_two_arms() {
    sleeping(Order::Ordered, &[8], 2, 2);
}

#[test]
fn two_messages_against_two_arms() {
    sleeping(Order::Ordered, &[8, 8], 2, 2);
}

#[test]
fn relaxed_words_of_arm_and_echo() {
    sleeping(Order::Relaxed, &[8], 2, 2);
}
