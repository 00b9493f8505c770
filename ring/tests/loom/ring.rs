//! Messages cross a ring whole, once and in order.

use loom::thread;
use ntb_ring::link::engine::Order;

use crate::{Pick, check, content, pair, receive};

/// Sends messages of `lens` from position `start` of a ring of four lines, the wire and the reader running along.
fn crossing(order: Order, pick: Pick, start: u64, lens: &'static [usize], preemptions: usize) {
    check(preemptions, move || {
        let mut p = pair(4, order, pick);
        p.advance(start);
        let (mut producer, mut consumer, there) = (p.producer, p.consumer, p.there);
        let writer = thread::spawn(move || {
            for (n, len) in lens.iter().enumerate() {
                producer.try_send(0, &content(n as u64, *len)).unwrap();
            }
            producer
        });
        // A long message is its lines and its barrier.
        let puts = lens
            .iter()
            .map(|len| if *len > 56 { 1 + len.div_ceil(64) } else { 1 })
            .sum();
        let wire = thread::spawn(move || there.steps(puts));
        let mut got = 0;
        for _ in 0..lens.len() {
            receive(&mut consumer, start, lens, &mut got);
        }
        writer.join().unwrap();
        let mut there = wire.join().unwrap();
        there.settle();
        while receive(&mut consumer, start, lens, &mut got) {}
        assert_eq!(got, lens.len(), "a message was lost");
    });
}

#[test]
fn three_single_lines_across_the_end_of_the_ring() {
    crossing(Order::Ordered, Pick::First, 3, &[8, 48, 56], 4);
}

#[test]
fn three_single_lines_that_overtake_each_other() {
    crossing(Order::Ordered, Pick::Last, 3, &[8, 8, 8], 4);
}

#[test]
fn a_long_message_across_the_end_of_the_ring() {
    crossing(Order::Ordered, Pick::First, 2, &[72, 8], 4);
}

#[test]
fn a_long_message_whose_lines_overtake_each_other() {
    crossing(Order::Ordered, Pick::Last, 2, &[128, 8], 4);
}

#[test]
fn relaxed_single_lines() {
    crossing(Order::Relaxed, Pick::First, 3, &[8, 8, 8], 2);
}

#[test]
fn a_relaxed_long_message() {
    crossing(Order::Relaxed, Pick::First, 2, &[72, 8], 3);
}
