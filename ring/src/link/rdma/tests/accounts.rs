//! The account of requests, receives and the mirror.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use ntb_mem::line::Line;

use super::{Ends, options};
use crate::link::{
    Link, LinkState,
    conformance::{WATCHDOG, drive},
    engine::{Engine, Inbound, StoreEngine},
    rdma::{SendCounts, model::Behaviour, verbs::Fabric},
};

fn up(behaviour: Behaviour) -> Ends {
    let mut ends = Ends::new(behaviour, &options());
    bring_up(&mut ends);
    ends
}

pub(super) fn bring_up(ends: &mut Ends) {
    drive(ends, "both ends up", |rig| {
        let near = rig.near().poll().unwrap().state;
        let far = rig.far().map(|far| far.poll().unwrap().state);
        near == LinkState::WindowsSet && far == Some(LinkState::WindowsSet)
    });
}

fn engine(ends: &Ends) -> Engine {
    ends.near.outbound().unwrap()
}

/// What `f` has made the near end post.
fn posted(ends: &mut Ends, f: impl FnOnce(&mut Engine)) -> SendCounts {
    let before = ends.near.counts();
    let mut engine = engine(ends);
    f(&mut engine);
    let after = ends.near.counts();
    SendCounts {
        requests: after.requests - before.requests,
        lines: after.lines - before.lines,
        doorbells: after.doorbells - before.doorbells,
        inline: after.inline - before.inline,
        signalled: after.signalled - before.signalled,
        waits: after.waits - before.waits,
        most_under_way: after.most_under_way,
    }
}

fn line(n: u64) -> Line {
    Line(std::array::from_fn(|i| n << 8 | i as u64 | 1 << 60))
}

fn far_line(ends: &Ends, n: u64) -> Line {
    Inbound::load_line(&ends.far.as_ref().unwrap().inbound(), n)
}

#[test]
fn a_line_is_one_request_that_carries_itself_and_waits_for_nothing() {
    let mut ends = up(Behaviour::default());
    let counts = posted(&mut ends, |engine| {
        for n in 0..1000 {
            engine.put(n, &line(n));
            engine.flush();
        }
    });
    assert_eq!(
        (counts.requests, counts.doorbells, counts.inline, counts.waits),
        (1000, 1000, 1000, 0)
    );
    // Every quarter of a queue of 128.
    assert!((30..=33).contains(&counts.signalled), "{counts:?}");
    assert_eq!(far_line(&ends, 999), line(999));
}

#[test]
fn lines_that_follow_each_other_are_one_request() {
    let mut ends = up(Behaviour::default());
    let counts = posted(&mut ends, |engine| {
        for n in 10..13 {
            engine.put(n, &line(n));
        }
        engine.flush();
    });
    assert_eq!((counts.requests, counts.doorbells), (1, 1));
    // A message of two lines: the one that completes it is put last and lies first.
    let counts = posted(&mut ends, |engine| {
        engine.put_bytes(21, &line(21).to_bytes());
        engine.barrier();
        engine.put(20, &line(20));
        engine.flush();
    });
    assert_eq!((counts.requests, counts.doorbells, counts.inline), (1, 1, 1));
    for n in [10, 11, 12, 20, 21] {
        assert_eq!(far_line(&ends, n), line(n));
    }
    // Longer than a request carries: payload and completing line leave together, in that order.
    let counts = posted(&mut ends, |engine| {
        engine.put_bytes(31, &[7; 1000]);
        engine.barrier();
        engine.put(30, &line(30));
        engine.flush();
    });
    assert_eq!((counts.requests, counts.doorbells, counts.inline), (2, 1, 1));
}

#[test]
fn a_queue_is_never_overrun_however_shallow() {
    for depth in [4, 7, 16, 128] {
        let mut ends = up(Behaviour {
            depth,
            ..Behaviour::default()
        });
        let counts = posted(&mut ends, |engine| {
            for n in 0..20_000u64 {
                let at = n % 512;
                match n % 3 {
                    0 => engine.put_bytes(at, &[n as u8; 700]),
                    _ => engine.put(at, &line(n)),
                }
                if n % 2 == 0 {
                    engine.flush();
                }
            }
            engine.put(900, &line(900));
            engine.flush();
        });
        let seen = ends.model.counts();
        assert_eq!((seen.overruns, seen.violations), (0, 0), "depth {depth}");
        assert!(seen.deepest <= u64::from(depth), "{seen:?}");
        assert!(counts.most_under_way <= u64::from(depth), "{counts:?}");
        assert_eq!(far_line(&ends, 900), line(900), "depth {depth}");
    }
}

/// What a program that trusts a software device would never notice: nothing completes.
#[test]
fn a_device_that_completes_nothing_ends_the_link_and_is_never_overrun() {
    let mut ends = up(Behaviour::default());
    ends.model.behave(|b| b.drains = false);
    let mut engine = engine(&ends);
    let start = Instant::now();
    for n in 0..1000 {
        engine.put(n, &line(n));
        engine.flush();
    }
    assert!(start.elapsed() >= ends.options.stall, "it has waited for room");
    let seen = ends.model.counts();
    assert_eq!(seen.overruns, 0);
    assert_eq!(seen.deepest, 128);
    let status = ends.near.poll().unwrap();
    assert_eq!(status.losses, 1);
    let event = ends.near.next_event().unwrap();
    assert!(event.to_string().contains("completes nothing"), "{event}");
    engine.put(0, &line(5)); // vanishes at once
    engine.flush();
}

#[test]
fn runs_of_every_size_arrive_whole_and_the_mirror_is_not_reused_too_early() {
    let mut ends = up(Behaviour {
        depth: 8,
        ..Behaviour::default()
    });
    for bytes in [
        1, 63, 64, 65, 219, 220, 221, 4096, 8191, 8192, 8193, 20_000, 40_000,
    ] {
        let data: Vec<u8> = (0..bytes).map(|i| (i * 7 + bytes) as u8).collect();
        let counts = posted(&mut ends, |engine| {
            for _ in 0..5 {
                engine.put_bytes(3, &data);
                engine.flush();
            }
        });
        let view = ends.far.as_ref().unwrap().inbound();
        let mut out = vec![0; bytes];
        Inbound::copy_out(&view, 3 * 64, &mut out);
        assert!(out == data, "{bytes} bytes");
        let mut padding = vec![0xff; bytes.next_multiple_of(64) - bytes];
        Inbound::copy_out(&view, 3 * 64 + bytes, &mut padding);
        assert!(padding.iter().all(|b| *b == 0), "{bytes} bytes are filled up");
        assert!(counts.requests >= 5);
    }
    assert_eq!(ends.model.counts().violations, 0);
}

#[test]
fn rings_never_find_a_peer_without_a_receive() {
    for fabric in [Fabric::Roce, Fabric::Iwarp] {
        let mut ends = up(Behaviour {
            fabric,
            inline: 80,
            ..Behaviour::default()
        });
        let bells: Vec<_> = (0..16).map(|n| ends.far.as_ref().unwrap().doorbell(n)).collect();
        // The far end does nothing for many times as many rings as it has receives.
        for n in 0..1000 {
            ends.near.ring(n % 16);
            ends.near.poll().unwrap();
        }
        assert_eq!(ends.model.counts().unready, 0);
        // None is lost for it: every doorbell has rung at last.
        let start = Instant::now();
        let mut rung = [false; 16];
        while !rung.iter().all(|r| *r) {
            ends.near.ring(0);
            ends.near.poll().unwrap();
            ends.far.as_mut().unwrap().poll().unwrap();
            for (bell, rung) in bells.iter().zip(&mut rung) {
                *rung |= bell.take();
            }
            assert!(start.elapsed() < WATCHDOG, "{rung:?}");
        }
        assert_eq!(ends.model.counts().unready, 0);
    }
}

#[test]
fn a_batch_grows_while_requests_wait_and_can_be_pinned() {
    let mut ends = Ends::new(
        Behaviour::default(),
        &super::RdmaOptions {
            batch_bytes: Some(64),
            ..options()
        },
    );
    bring_up(&mut ends);
    let counts = posted(&mut ends, |engine| {
        for n in 0..8 {
            engine.put(n, &line(n));
        }
        engine.flush();
    });
    assert_eq!(counts.requests, 8, "a line each");
    let mut ends = Ends::new(
        Behaviour::default(),
        &super::RdmaOptions {
            mirror_bytes: 1 << 20,
            ..options()
        },
    );
    bring_up(&mut ends);
    ends.model.behave(|b| b.drains = false);
    // Nothing completes for a while: beyond half a queue, what is gathered gets longer and longer.
    let counts = posted(&mut ends, |engine| {
        for n in 0..4096 {
            engine.put(n % 1000, &line(n));
        }
        engine.flush();
    });
    assert!(counts.requests < 128 && counts.waits == 0, "{counts:?}");
    ends.model.behave(|b| b.drains = true);
    let counts = posted(&mut ends, |engine| {
        for n in 0..64 {
            engine.put(n * 2, &line(n));
            engine.flush();
        }
    });
    assert_eq!(counts.requests, 64);
}

#[test]
fn strict_runs_are_shown_in_order_and_not_before_they_are_complete() {
    let mut ends = Ends::new(
        Behaviour {
            torn: 500_000,
            ..Behaviour::default()
        },
        &super::RdmaOptions {
            strict: true,
            ..options()
        },
    );
    bring_up(&mut ends);
    let mut engine = engine(&ends);
    let view = ends.far.as_ref().unwrap().inbound();
    // As a ring does: a line is not written again before it was read.
    const LINES: u64 = 32;
    let read = Arc::new(AtomicU64::new(0));
    let consumed = Arc::clone(&read);
    let writer = std::thread::spawn(move || {
        for n in 1..20_000u64 {
            while n > consumed.load(Ordering::Acquire) + LINES {
                std::thread::yield_now();
            }
            engine.put(5 + n % LINES, &Line([n; 8]));
            engine.flush();
        }
    });
    let (start, mut last) = (Instant::now(), 0);
    while last < 19_999 {
        let due = last + 1;
        let seen = Inbound::load_line(&view, 5 + due % LINES);
        // Word 7 is read first: the others are of this message or of a later one, never of an earlier.
        assert!(seen.0.iter().all(|word| *word >= seen.0[7]), "torn: {seen:?}");
        assert!(
            seen.0[7] == due || seen.0[7] == due.saturating_sub(LINES),
            "{due}: {seen:?}"
        );
        if seen.0[7] == due {
            assert_eq!(seen, Line([due; 8]), "whole");
            last = due;
            read.store(last, Ordering::Release);
        }
        ends.near.poll().unwrap();
        assert!(start.elapsed() < WATCHDOG + Duration::from_secs(30), "at {last}");
    }
    writer.join().unwrap();
    let seen = ends.model.counts();
    assert!(seen.torn > 1000, "{seen:?}");
    assert_eq!((seen.unready, seen.overruns), (0, 0));
}

/// Why every message carries a check: a reader that trusts the last word of a line sees lines that never were.
#[test]
fn a_reader_that_trusts_the_last_word_is_fooled() {
    let ends = up(Behaviour {
        torn: 500_000,
        ..Behaviour::default()
    });
    let mut engine = engine(&ends);
    let mut fooled = 0;
    for n in 1..1000 {
        engine.put(5, &Line([n; 8]));
        engine.flush();
        let seen = far_line(&ends, 5);
        fooled += u32::from(seen.0[7] == n && seen != Line([n; 8]));
    }
    assert!(fooled > 10, "{fooled}");
}
