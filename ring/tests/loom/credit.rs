//! Room comes back: a producer that is held up goes on, whatever way credit and starved word cross.

use loom::thread;
use ntb_ring::{link::engine::Order, queue::SendError};

use crate::{P, Pair, Pick, check, content, pair, receive};

/// Sends what is left of `lens`, as long as there is room.
fn send(producer: &mut P, lens: &[usize], sent: &mut usize) -> bool {
    let Some(len) = lens.get(*sent) else { return false };
    match producer.try_send(0, &content(*sent as u64, *len)) {
        Ok(_) => {
            *sent += 1;
            true
        }
        Err(SendError::Full { .. }) => false,
        Err(e) => panic!("{e}"),
    }
}

/// The first `full` messages of `lens` fill the ring and have arrived; the rest is offered while the reader reads.
fn held_up(order: Order, pick: Pick, start: u64, full: usize, lens: &'static [usize], preemptions: usize) {
    check(preemptions, move || {
        let mut p = pair(4, order, pick);
        p.advance(start);
        let Pair {
            mut producer,
            mut consumer,
            mut there,
            back,
        } = p;
        let (mut sent, mut got) = (0, 0);
        while sent < full {
            assert!(send(&mut producer, lens, &mut sent));
        }
        there.settle();
        let writer = thread::spawn(move || {
            for _ in 0..2 {
                send(&mut producer, lens, &mut sent);
            }
            (producer, sent)
        });
        let wire = thread::spawn(move || there.steps(2));
        let wire_back = thread::spawn(move || back.steps(1));
        for _ in 0..full.min(3) {
            receive(&mut consumer, start, lens, &mut got);
        }
        let (mut producer, mut sent) = writer.join().unwrap();
        let (mut there, mut back) = (wire.join().unwrap(), wire_back.join().unwrap());
        // Each side goes on calling; a word that was lost would hold both up for ever.
        for _ in 0..4 * lens.len() {
            send(&mut producer, lens, &mut sent);
            there.settle();
            receive(&mut consumer, start, lens, &mut got);
            back.settle();
        }
        assert_eq!(
            (sent, got),
            (lens.len(), lens.len()),
            "sent and received, of what was to be"
        );
    });
}

#[test]
fn single_lines_into_a_full_ring() {
    held_up(Order::Ordered, Pick::First, 1, 4, &[8; 6], 3);
}

#[test]
fn the_largest_message_into_a_full_ring() {
    held_up(Order::Ordered, Pick::First, 0, 4, &[8, 8, 8, 8, 192], 3);
}

#[test]
fn the_largest_message_behind_one_line() {
    held_up(Order::Ordered, Pick::Last, 2, 1, &[8, 192, 8], 3);
}

#[test]
fn relaxed_single_lines_into_a_full_ring() {
    held_up(Order::Relaxed, Pick::First, 1, 4, &[8; 6], 2);
}

#[test]
fn the_largest_relaxed_message_behind_two_lines() {
    held_up(Order::Relaxed, Pick::First, 1, 2, &[8, 8, 192], 2);
}
