use std::sync::Arc;

use ntb_mem::region::{Pages, Region, View};
use proptest::prelude::*;

use super::{consumer::Polled, *};
use crate::{
    link::engine::{Order, WriteBack},
    wire::page::PAGE_LINES,
};

type P = Producer<WriteBack, View>;
type C = Consumer<WriteBack, View>;

fn memory(ring_lines: u64) -> View {
    Arc::new(Region::allocate((PAGE_LINES + ring_lines) * 64, Pages::Normal).unwrap()).view()
}

fn pair_from(ring_lines: u64, order: Order, first_seq: u64, start: u32) -> (P, C) {
    let (at_consumer, at_producer) = (memory(ring_lines), memory(ring_lines));
    let lane = Lane {
        ring_lines,
        consumer_base: 0,
        producer_base: 0,
        to_consumer: LaneKey::new(0x4711, start, 0x600d_600d),
        to_producer: LaneKey::new(0x0815, 1, 2),
        first_seq,
    };
    let part = |v: &View, at, n| v.part(at, n).unwrap();
    (
        Producer::new(
            WriteBack::new(at_consumer.clone()),
            part(&at_producer, 0, PAGE_LINES),
            lane,
            order,
        ),
        Consumer::new(
            WriteBack::new(at_producer),
            part(&at_consumer, 0, PAGE_LINES),
            part(&at_consumer, PAGE_LINES, ring_lines),
            lane,
            order,
        ),
    )
}

fn pair(ring_lines: u64, order: Order) -> (P, C) {
    pair_from(ring_lines, order, 0, 0)
}

const ORDERS: [Order; 2] = [Order::Ordered, Order::Relaxed];

fn pattern(seq: u64, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (seq.wrapping_mul(31) as usize).wrapping_add(i * 7) as u8)
        .collect()
}

fn recv_vec(c: &mut C) -> Result<(u64, Vec<u8>), RecvError> {
    c.try_recv_with(|m| (m.seq, m.to_vec()))
}

#[test]
fn messages_of_every_size_pass_at_every_offset() {
    for order in ORDERS {
        let lines = 8;
        let max = max_message(lines) as usize;
        for len in 0..=max {
            let (mut p, mut c) = pair(lines, order);
            for seq in 0..2 * lines {
                let bytes = pattern(seq, len);
                // Advance by one line first, so that every start offset occurs for lengths of any line count.
                p.try_send(0, &[]).unwrap();
                assert_eq!(recv_vec(&mut c).unwrap().1, [0u8; 0]);
                while let Err(SendError::Full { .. }) = p.try_send(3, &bytes) {
                    assert_eq!(c.try_recv(&mut []), Err(RecvError::Empty)); // sees that the producer is starved
                }
                assert_eq!(recv_vec(&mut c).unwrap(), (2 * seq + 1, bytes));
            }
            assert_eq!(c.try_recv(&mut []), Err(RecvError::Empty));
        }
        let (mut p, _c) = pair(lines, order);
        assert_eq!(
            p.try_send(0, &vec![0; max + 1]),
            Err(SendError::TooLong {
                len: max as u64 + 1,
                max: max as u64
            })
        );
    }
}

#[test]
fn blank_payloads_are_delivered() {
    for order in ORDERS {
        for byte in [0x00, 0xff] {
            for len in [1, 8, 48, 56, 64, 400] {
                let (mut p, mut c) = pair(16, order);
                p.try_send(0, &vec![byte; len]).unwrap();
                assert_eq!(recv_vec(&mut c).unwrap().1, vec![byte; len]);
            }
        }
    }
}

#[test]
fn sequences_survive_every_boundary() {
    let boundaries = [0, 1 << 16, 1 << 32, 1 << 47, 1 << 48, 1 << 63, 0u64];
    for order in ORDERS {
        for boundary in boundaries {
            for start in [0, u32::MAX - 20, 0x7fff_fff0] {
                let first = boundary.wrapping_sub(20);
                let (mut p, mut c) = pair_from(8, order, first, start);
                for i in 0..200u64 {
                    let seq = first.wrapping_add(i);
                    assert_eq!(p.try_send(1, &pattern(seq, 100)).unwrap(), seq);
                    assert_eq!(recv_vec(&mut c).unwrap(), (seq, pattern(seq, 100)));
                }
                c.give_back();
                assert_eq!(p.consumed_seq(), first.wrapping_add(200));
                assert_eq!(c.stats().messages, 200);
            }
        }
    }
}

#[test]
fn small_messages_use_space_in_proportion() {
    let (mut p, mut c) = pair(1024, Order::Ordered);
    for i in 0..1000 {
        p.try_send(0, &pattern(i, 54)).unwrap();
    }
    assert_eq!(p.stats().lines, 1000);
    for i in 0..1000 {
        assert_eq!(recv_vec(&mut c).unwrap(), (i, pattern(i, 54)));
    }
}

#[test]
fn a_full_ring_refuses_counts_and_loses_nothing() {
    for order in ORDERS {
        let (mut p, mut c) = pair(4, order);
        for i in 0..4 {
            p.try_send(0, &pattern(i, 20)).unwrap();
        }
        assert_eq!(
            p.try_send(0, &[1]),
            Err(SendError::Full {
                needed: 1,
                free: 0,
                unread_lines: 4
            })
        );
        assert_eq!(p.stats().refused, 1);
        for i in 0..4 {
            assert_eq!(recv_vec(&mut c).unwrap(), (i, pattern(i, 20)));
        }
        assert_eq!(p.try_send(0, &[1]).unwrap(), 4);
    }
}

#[test]
fn credits_are_few() {
    let (mut p, mut c) = pair(256, Order::Ordered);
    let mut buf = [0; 48];
    for _ in 0..64_000 {
        p.try_send(0, &[5; 48]).unwrap();
        c.try_recv(&mut buf).unwrap();
    }
    assert!(c.stats().credits * 64 < 64_000, "{} credits", c.stats().credits);
    // A producer that is faster than the consumer, and so nearly always starved, gets no more of them.
    let (mut p, mut c) = pair(256, Order::Ordered);
    let mut sent = 0;
    while sent < 64_000 {
        while p.try_send(0, &[5; 48]).is_ok() {
            sent += 1;
        }
        c.try_recv(&mut buf).unwrap();
    }
    assert!(c.stats().credits * 64 < 64_000, "{} credits", c.stats().credits);
    assert_eq!(p.stats().starved, 0);
}

#[test]
fn a_claim_is_invisible_until_committed_and_leaves_no_trace_when_dropped() {
    for order in ORDERS {
        let (mut p, mut c) = pair(16, order);
        for len in [0, 10, 48, 49, 500] {
            let mut claim = p.claim(len).unwrap();
            claim.bytes().fill(9);
            assert_eq!(recv_vec(&mut c), Err(RecvError::Empty));
            let _ = claim;
            assert_eq!(recv_vec(&mut c), Err(RecvError::Empty));
            let mut claim = p.claim(len).unwrap();
            claim.bytes().fill(8);
            let seq = claim.commit(77);
            assert_eq!(recv_vec(&mut c).unwrap(), (seq, vec![8; len]));
            c.give_back();
        }
    }
}

#[test]
fn packed_runs_arrive_as_single_messages() {
    for order in ORDERS {
        for size in [1, 7, 8, 16, 20, 24, 32, 48, 54, 64, 100, 333] {
            let (mut p, mut c) = pair(64, order);
            let all: Vec<u8> = (0..200u64).flat_map(|i| pattern(i, size)).collect();
            let (mut sent, mut got) = (0, Vec::new());
            let mut buf = vec![0; size * 13];
            while got.len() < all.len() {
                if sent < 200 {
                    match p.try_send_packed(6, size, &all[sent * size..]) {
                        Ok(n) => sent += n,
                        Err(SendError::Full { .. }) => {}
                        Err(e) => panic!("{e}"),
                    }
                }
                match c.try_recv_packed(size, &mut buf) {
                    Ok(n) => got.extend_from_slice(&buf[..n * size]),
                    Err(RecvError::Empty) => {}
                    Err(e) => panic!("{e}"),
                }
            }
            assert_eq!(got, all, "size {size}");
            assert_eq!((p.stats().messages, c.stats().messages), (200, 200));
            if size <= 20 {
                assert!(p.stats().lines < 120, "size {size}: {} lines", p.stats().lines);
            }
        }
    }
}

#[test]
fn a_message_of_another_size_stays() {
    let (mut p, mut c) = pair(16, Order::Ordered);
    p.try_send_packed(0, 8, &[1; 80]).unwrap();
    p.try_send(0, &[2; 9]).unwrap();
    let mut buf = [0; 200];
    assert_eq!(c.try_recv_packed(8, &mut buf).unwrap(), 10);
    assert_eq!(
        c.try_recv_packed(8, &mut buf),
        Err(RecvError::OtherSize { found: 9, wanted: 8 })
    );
    assert_eq!(
        c.try_recv(&mut buf[..8]),
        Err(RecvError::TooSmall { needed: 9, given: 8 })
    );
    assert_eq!(c.try_recv(&mut buf).unwrap().len, 9);
}

#[test]
fn words_of_a_message_in_place() {
    let (mut p, mut c) = pair(16, Order::Ordered);
    let bytes = pattern(1, 300);
    p.try_send(0, &bytes).unwrap();
    c.try_recv_with(|m| {
        assert_eq!(
            m.word(0),
            Some(u64::from_le_bytes(bytes[..8].try_into().unwrap()))
        );
        let mut last = [0; 8];
        last[..4].copy_from_slice(&bytes[296..]);
        assert_eq!(m.word(37), Some(u64::from_le_bytes(last)));
        assert_eq!(m.word(38), None);
        assert_eq!(m.word(usize::MAX), None);
    })
    .unwrap();
}

#[test]
fn nothing_blank_stale_or_foreign_is_taken_for_a_message() {
    for order in ORDERS {
        let (mut p, mut c) = pair(8, order);
        let engine = p.engine_mut();
        for value in [u64::MAX, 0, 1, 0x5555_5555_5555_5555] {
            for line in 0..8 {
                crate::link::engine::StoreEngine::put(
                    engine,
                    PAGE_LINES + line,
                    &ntb_mem::line::Line([value; 8]),
                );
            }
            assert_eq!(recv_vec(&mut c), Err(RecvError::Empty));
        }
        // A line of another life: same sequence, other tag.
        let foreign = LaneKey::new(0x4712, 0, 0x600d_600d);
        let line =
            crate::wire::line::encode_single(foreign, order, crate::wire::mark::Kind::Small, 0, 0, b"old");
        crate::link::engine::StoreEngine::put(p.engine_mut(), PAGE_LINES, &line);
        assert_eq!(recv_vec(&mut c), Err(RecvError::Empty));
        p.try_send(0, b"new").unwrap();
        assert_eq!(recv_vec(&mut c).unwrap().1, b"new");
    }
}

#[test]
fn a_credit_that_cannot_be_is_an_error() {
    let (mut p, mut c) = pair(4, Order::Ordered);
    for _ in 0..4 {
        p.try_send(0, &[]).unwrap();
    }
    let mut line = ntb_mem::line::Line::ZERO;
    line.0[0] = LaneKey::new(0x0815, 1, 2).seal(5);
    crate::link::engine::StoreEngine::put(c.engine_mut(), crate::wire::page::CREDIT, &line);
    assert_eq!(
        p.try_send(0, &[]),
        Err(SendError::CorruptCredit {
            credit: 5,
            low: 0,
            high: 4
        })
    );
    // All ones and zeros are not credits at all.
    for blank in [0, u64::MAX] {
        line.0[0] = blank;
        crate::link::engine::StoreEngine::put(c.engine_mut(), crate::wire::page::CREDIT, &line);
        assert!(matches!(p.try_send(0, &[]), Err(SendError::Full { .. })));
    }
}

#[test]
fn a_corrupt_credit_in_the_middle_of_a_run_counts_no_refusal() {
    let (mut p, mut c) = pair(8, Order::Ordered);
    let mut line = ntb_mem::line::Line::ZERO;
    line.0[0] = LaneKey::new(0x0815, 1, 2).seal(100);
    crate::link::engine::StoreEngine::put(c.engine_mut(), crate::wire::page::CREDIT, &line);
    let sent = p.try_send_packed(0, 64, &[7; 64 * 20]).unwrap();
    assert!((1..8).contains(&sent), "{sent}");
    assert_eq!(p.stats().refused, 0);
    assert!(matches!(
        p.try_send_packed(0, 64, &[7; 64 * 20]),
        Err(SendError::CorruptCredit { credit: 100, .. })
    ));
}

#[test]
fn an_end_goes_on_from_where_a_device_has_come_and_from_nowhere_else() {
    for first_seq in [0, u64::MAX - 2] {
        let (mut p, mut c) = pair_from(8, Order::Relaxed, first_seq, 0);
        let (mut twin, mut twin_reads) = pair_from(8, Order::Relaxed, first_seq, 0);
        for len in [1, 100, 48] {
            p.try_send(0, &pattern(5, len)).unwrap();
            twin.try_send(0, &pattern(5, len)).unwrap();
            recv_vec(&mut c).unwrap();
            recv_vec(&mut twin_reads).unwrap();
        }
        let before = p.position();
        assert_eq!((before.lines, before.seq), (5, first_seq.wrapping_add(3)));
        let moved = |lines, messages, credit| Position {
            lines: before.lines.wrapping_add(lines),
            seq: before.seq.wrapping_add(messages),
            credit: before.credit.wrapping_add(credit),
        };
        // Back, messages out of nothing, more than the ring takes, more credit than was sent.
        let back = u64::MAX;
        for wrong in [
            moved(back, 0, 0),
            moved(0, back, 0),
            moved(0, 1, 0),
            moved(9, 1, 0),
            moved(1, 1, back),
            moved(1, 1, 7),
        ] {
            assert!(!p.go_on_from(wrong), "{wrong:?}");
        }
        assert_eq!(p.position(), before, "nothing came of it");
        // The twin stands for the device: what it has sent counts, and the next message goes behind it.
        twin.try_send(0, &pattern(6, 8)).unwrap();
        assert!(p.go_on_from(twin.position()));
        assert_eq!(p.position(), twin.position());
        assert_eq!((p.stats().messages, p.stats().lines), (4, 6));
        recv_vec(&mut twin_reads).unwrap();
        let here = twin_reads.position().unwrap();
        assert!(c.go_on_from(here) && c.next_seq() == p.next_seq());
        assert!(!c.go_on_from(Position {
            lines: here.lines - 1,
            ..here
        }));
        p.expect_sent(7);
        assert_eq!(
            p.sent_counter().load(std::sync::atomic::Ordering::Relaxed),
            p.next_seq().wrapping_add(7)
        );
    }
}

/// A credit of before the device, posted after the device's own, would take back what the device gave.
#[test]
fn an_end_that_is_lent_has_settled_its_accounts() {
    let (mut p, mut c) = pair(8, Order::Relaxed);
    p.try_send(0, &[1; 8]).unwrap();
    let mut buf = [0; 64];
    assert!(matches!(c.try_recv_checked(&mut buf), Polled::Received(_)));
    let whole_ring = pattern(1, 7 * 64);
    assert!(matches!(p.try_send(0, &whole_ring), Err(SendError::Full { .. })));
    let lent = c.position().unwrap();
    assert_eq!(
        (lent.lines, lent.seq, lent.credit),
        (1, 1, 1),
        "credited as asked"
    );
    p.try_send(0, &whole_ring).unwrap();
    let credits = c.stats().credits;
    let device = Position {
        lines: 9,
        seq: 2,
        credit: 9,
    };
    assert!(c.go_on_from(device));
    c.give_back();
    assert_eq!(c.stats().credits, credits, "the device has given it back");
}

#[test]
fn an_incomplete_message_is_waited_for_then_corrupt() {
    let (mut p, mut c) = pair(8, Order::Relaxed);
    c.set_incomplete_deadline(std::time::Duration::ZERO);
    p.try_send(0, &[3; 48]).unwrap();
    let mut line = crate::wire::line::encode_single(
        LaneKey::new(0x4711, 0, 0x600d_600d),
        Order::Relaxed,
        crate::wire::mark::Kind::Small,
        0,
        0,
        &[3; 48],
    );
    line.0[2] ^= 1;
    crate::link::engine::StoreEngine::put(p.engine_mut(), PAGE_LINES, &line);
    assert_eq!(recv_vec(&mut c), Err(RecvError::Empty));
    assert!(matches!(recv_vec(&mut c), Err(RecvError::Corrupt { seq: 0, .. })));
    assert_eq!(c.stats().messages, 0);
}

#[test]
fn an_arm_is_answered_and_rung() {
    let (at_consumer, at_producer) = (memory(8), memory(8));
    let lane = Lane {
        ring_lines: 8,
        consumer_base: 0,
        producer_base: 0,
        to_consumer: LaneKey::new(3, 9, 9),
        to_producer: LaneKey::new(4, 9, 9),
        first_seq: u64::MAX - 1,
    };
    let page = |v: &View| v.part(0, PAGE_LINES).unwrap();
    let engine = |v: &View| WriteBack::new(v.clone());
    let mut p = Producer::new(engine(&at_consumer), page(&at_producer), lane, Order::Ordered);
    let ring = at_consumer.part(PAGE_LINES, 8).unwrap();
    let mut c = Consumer::new(
        engine(&at_producer),
        page(&at_consumer),
        ring,
        lane,
        Order::Ordered,
    );
    let mut alarm = Alarm::new(engine(&at_consumer), page(&at_producer), lane, p.sent_counter());

    assert!(!alarm.poll());
    c.arm();
    assert_eq!(c.answer(), Answer::None);
    assert!(!alarm.poll());
    assert_eq!(c.answer(), Answer::Sleep);
    assert!(alarm.is_waiting());
    p.try_send(0, &[1]).unwrap();
    assert!(alarm.poll());
    assert!(!alarm.poll(), "rung once per arm");
    c.arm();
    assert!(alarm.poll(), "a message is on its way");
    assert_eq!(c.answer(), Answer::Poll);
    recv_vec(&mut c).unwrap();
    c.arm();
    assert!(!alarm.poll());
    assert_eq!(c.answer(), Answer::Sleep);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Any mixture of sizes, single, claimed and packed, from any ring size and any start, arrives in order, once, whole.
    #[test]
    fn any_traffic_arrives_in_order(
        log_lines in 2u32..8,
        ordered: bool,
        first_seq: u64,
        start: u32,
        plan in prop::collection::vec((0usize..600, 0u8..3, 1usize..9), 1..60),
    ) {
        let lines = 1 << log_lines;
        let order = if ordered { Order::Ordered } else { Order::Relaxed };
        let (mut p, mut c) = pair_from(lines, order, first_seq, start);
        let max = max_message(lines) as usize;
        let mut expected = std::collections::VecDeque::new();
        let mut seq = first_seq;
        let mut next = first_seq;
        for (len, how, count) in plan {
            let len = len % (max + 1);
            let count = if how == 2 && len > 0 { count } else { 1 };
            let mut sent = 0;
            while sent < count {
                let bytes: Vec<u8> =
                    (sent..count).flat_map(|i| pattern(seq.wrapping_add((i - sent) as u64), len)).collect();
                let result = match how {
                    0 => p.try_send(9, &bytes).map(|_| 1),
                    1 => p.claim(len).map(|mut claim| {
                        claim.bytes().copy_from_slice(&bytes);
                        claim.commit(9);
                        1
                    }),
                    _ if len == 0 => p.try_send(9, &bytes).map(|_| 1),
                    _ => p.try_send_packed(9, len, &bytes),
                };
                match result {
                    Ok(n) => {
                        for _ in 0..n {
                            expected.push_back(pattern(seq, len));
                            seq = seq.wrapping_add(1);
                        }
                        sent += n;
                    }
                    Err(SendError::Full { .. }) => match recv_vec(&mut c) {
                        Ok((s, bytes)) => {
                            prop_assert_eq!(s, next);
                            prop_assert_eq!(Some(bytes), expected.pop_front());
                            next = next.wrapping_add(1);
                        }
                        Err(e) => prop_assert_eq!(e, RecvError::Empty),
                    },
                    Err(e) => return Err(TestCaseError::fail(e.to_string())),
                }
            }
        }
        while let Ok((s, bytes)) = recv_vec(&mut c) {
            prop_assert_eq!(s, next);
            prop_assert_eq!(Some(bytes), expected.pop_front());
            next = next.wrapping_add(1);
        }
        prop_assert!(expected.is_empty());
        prop_assert_eq!(next, seq);
        prop_assert_eq!(p.stats().messages, c.stats().messages);
        prop_assert_eq!(p.stats().bytes, c.stats().bytes);
    }
}
