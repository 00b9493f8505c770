//! Sleeping never loses a wake-up: arm, echo and ring over delay queues.
//!
//! The reader arms, sleeps once the arm is answered by "sleep", and is woken by the doorbell alone. The writer's service
//! thread answers and rings. Failure is a reader that sleeps, no ring on its way, and a message that it has not received.
//!
//! The writer and its service thread put through queues of their own, and have no order between them. A wire is driven by
//! the thread that reads what it delivers; what it finds on the way may be as old as the model checker likes, which is
//! the delay.

use loom::thread;
use ntb_ring::{
    link::engine::Order,
    queue::{Alarm, Answer, Consumer, Producer},
};

use crate::{
    C, Pick, TO_CONSUMER, TO_PRODUCER, check, content, receive,
    wire::{Memory, Part, Sender, Wire, lane, wire},
};

/// The service thread of the writer's side.
struct Service {
    alarm: Alarm<Sender, Part>,
    bell: Sender,
    back: Wire,
}

impl Service {
    fn go_on(&mut self, steps: usize) {
        for _ in 0..steps {
            self.back.step();
        }
        if self.alarm.poll() {
            self.bell.ring();
        }
    }
}

/// The side of the reader.
struct Reader {
    consumer: C,
    /// From the writer, from its service thread, and the doorbell.
    wires: [Wire; 3],
    lens: &'static [usize],
    got: usize,
    asleep: bool,
}

impl Reader {
    fn arrive(&mut self, steps: usize) {
        for _ in 0..steps {
            for wire in &mut self.wires {
                wire.step();
            }
        }
    }

    fn receive(&mut self) -> bool {
        receive(&mut self.consumer, 0, self.lens, &mut self.got)
    }

    /// What a blocking receive does, but for its patience: looks, arms, looks again until answered, sleeps.
    fn go_on(&mut self, steps: usize) {
        if self.asleep {
            return;
        }
        self.arrive(steps);
        if self.receive() {
            return;
        }
        self.consumer.arm();
        self.arrive(steps);
        self.asleep = !self.receive() && self.consumer.answer() == Answer::Sleep;
    }
}

/// The reader arms `arms` times at most while `lens` are sent; `steps` items arrive by each wire at a time.
fn sleeping(order: Order, pick: Pick, lens: &'static [usize], arms: usize, steps: usize, preemptions: usize) {
    check(preemptions, move || {
        let (at_consumer, at_producer) = (Memory::new(4), Memory::new(0));
        let lane = lane(4, TO_CONSUMER, TO_PRODUCER);
        let (data, data_wire) = wire(&at_consumer, order, pick);
        let (echo, echo_wire) = wire(&at_consumer, order, pick);
        let (bell, bell_wire) = wire(&at_consumer, order, pick);
        let (arm, back) = wire(&at_producer, order, pick);
        let mut producer = Producer::new(data, at_producer.control(), lane, order);
        let alarm = Alarm::new(echo, at_producer.control(), lane, producer.sent_counter());
        let parts = |wire: Wire| {
            if order == Order::Relaxed {
                wire.by_word()
            } else {
                wire
            }
        };
        let mut service = Service {
            alarm,
            bell,
            back: parts(back),
        };
        let consumer = Consumer::new(arm, at_consumer.control(), at_consumer.ring(), lane, order);
        let wires = [data_wire, parts(echo_wire), bell_wire];
        let mut reader = Reader {
            consumer,
            wires,
            lens,
            got: 0,
            asleep: false,
        };

        let writer = thread::spawn(move || {
            for (n, len) in lens.iter().enumerate() {
                producer.try_send(0, &content(n as u64, *len)).unwrap();
            }
        });
        let serving = thread::spawn(move || {
            service.go_on(steps);
            service.go_on(steps);
            service
        });
        for _ in 0..arms {
            reader.go_on(steps);
        }
        writer.join().unwrap();
        let mut service = serving.join().unwrap();
        // Everything on the way arrives, and both sides go on as long as that changes anything.
        for _ in 0..4 {
            service.back.settle();
            service.go_on(0);
            reader.wires.iter_mut().for_each(Wire::settle);
            if reader.asleep && at_consumer.rung() {
                reader.asleep = false;
            }
            while !reader.asleep && reader.receive() {}
            if !reader.asleep {
                reader.consumer.arm();
                service.back.settle();
                service.go_on(0);
                reader.wires.iter_mut().for_each(Wire::settle);
                reader.asleep = !reader.receive() && reader.consumer.answer() == Answer::Sleep;
            }
        }
        assert_eq!(
            reader.got,
            lens.len(),
            "asleep with a message there and no ring on its way"
        );
        assert!(
            reader.asleep,
            "nothing is left to receive, and no sleep is granted"
        );
    });
}

#[test]
fn one_message_against_one_arm() {
    sleeping(Order::Ordered, Pick::First, &[8], 1, 1, 3);
}

#[test]
fn one_message_against_two_arms() {
    sleeping(Order::Ordered, Pick::First, &[8], 2, 1, 2);
}

#[test]
fn two_messages_against_two_arms() {
    sleeping(Order::Ordered, Pick::First, &[8, 8], 2, 1, 2);
}

#[test]
fn relaxed_words_of_arm_and_echo() {
    sleeping(Order::Relaxed, Pick::First, &[8], 1, 2, 2);
}

#[test]
fn relaxed_words_of_arm_and_echo_the_other_way_round() {
    sleeping(Order::Relaxed, Pick::Last, &[8], 1, 2, 2);
}
