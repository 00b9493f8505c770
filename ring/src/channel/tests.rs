use std::time::{Duration, Instant};

use ntb_mem::region::Pages;

use super::*;
use crate::{
    link::pair::{PairControl, PairLink, PairOptions, pair},
    session::{ChannelSpec, CloseReason, Event, OpenError, SessionState},
};

/// A watchdog, never a measure.
const LONG: Duration = Duration::from_secs(30);

fn options() -> PairOptions {
    PairOptions {
        window_bytes: 1 << 20,
        pages: Pages::Normal,
    }
}

fn links() -> (PairLink, PairLink, PairControl) {
    let (a, b) = pair(&options()).unwrap();
    let control = a.control();
    (a, b, control)
}

fn open(link: PairLink, name: &str) -> Connection {
    Connection::open(
        Box::new(link),
        &Options {
            node: name.to_owned(),
            ..Options::default()
        },
    )
    .unwrap()
}

const SMALL: ChannelSpec = ChannelSpec {
    ring_lines: 64,
    check: false,
    smaller_if_different: false,
};

fn channel(connection: &Connection) -> (Sender, Receiver) {
    connection.channel("test", SMALL).unwrap()
}

/// Repeats until it gives something.
fn until<T>(mut f: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(t) = f() {
            return t;
        }
        assert!(start.elapsed() < LONG, "stuck");
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Receives until the end of the life is told, and returns what came before it.
fn rest(rx: &mut Receiver) -> (Vec<Vec<u8>>, Lost) {
    let mut got = Vec::new();
    let mut buf = [0; 4096];
    let lost = until(|| match rx.try_recv(&mut buf) {
        Ok(r) => {
            got.push(buf[..r.len].to_vec());
            None
        }
        Err(RecvFailure::Lost(lost)) => Some(lost),
        Err(_) => None,
    });
    (got, lost)
}

fn lost(tx: &mut Sender) -> Lost {
    until(|| match tx.try_send(b"x") {
        Err(SendFailure::Lost(lost)) => Some(lost),
        _ => None,
    })
}

#[test]
fn messages_cross_both_ways() {
    let (a, b, _) = links();
    let (a, b) = (open(a, "alice"), open(b, "bob"));
    let ((mut atx, mut arx), (mut btx, mut brx)) = (channel(&a), channel(&b));
    assert_eq!(a.wait_running(LONG).unwrap().node, "bob");
    let mut buf = [0; 4096];
    for i in 0..1000u64 {
        let bytes = vec![i as u8; (i * 7 % 3000) as usize];
        atx.send(&bytes, LONG).unwrap();
        let got = brx.recv(&mut buf, LONG).unwrap();
        assert_eq!((got.seq, &buf[..got.len]), (i, &bytes[..]));
        btx.send_typed(9, &buf[..8], LONG).unwrap();
        assert_eq!(arx.recv(&mut buf, LONG).unwrap().message_type, 9);
    }
    assert_eq!(atx.stats().messages, 1000);
    assert_eq!(brx.stats().messages, 1000);
    assert_eq!(atx.hold_up().unwrap().reader.node, "bob");
}

#[test]
fn values_and_packed_values() {
    let (a, b, _) = links();
    let (a, b) = (open(a, "a"), open(b, "b"));
    let ((mut tx, _), (_, mut rx)) = (channel(&a), channel(&b));
    tx.wait_connected(LONG).unwrap();
    tx.try_send_value(5, &0x0102_0304_0506_0708u64).unwrap();
    assert_eq!(until(|| rx.try_recv_value::<u64>().ok()), 0x0102_0304_0506_0708);
    assert_eq!(tx.try_send_values(&[1u32, 2, 3, 4, 5]).unwrap(), 5);
    for i in 1..=5u32 {
        assert_eq!(until(|| rx.try_recv_value::<u32>().ok()), i);
    }
    assert_eq!(rx.try_recv_value::<u32>(), Err(RecvFailure::Empty));
    tx.try_send(&[1, 2, 3]).unwrap();
    let other = until(|| match rx.try_recv_value::<u64>() {
        Err(RecvFailure::Empty) => None,
        other => Some(other),
    });
    assert_eq!(other, Err(RecvFailure::OtherSize { found: 3, wanted: 8 }));
}

#[test]
fn a_full_ring_names_the_reader() {
    let (a, b, _) = links();
    let (a, b) = (open(a, "a"), open(b, "slow"));
    let ((mut tx, _arx), (_btx, mut rx)) = (channel(&a), channel(&b));
    tx.wait_connected(LONG).unwrap();
    let mut sent = 0;
    let full = loop {
        match tx.try_send(&[1; 40]) {
            Ok(_) => sent += 1,
            Err(e) => break e,
        }
    };
    assert_eq!(sent, 64);
    let SendFailure::Full {
        unread_lines: 64,
        ref reader,
        ..
    } = full
    else {
        panic!("{full}")
    };
    assert_eq!(reader.node, "slow");
    assert!(matches!(
        tx.send(b"x", Duration::from_millis(5)),
        Err(SendFailure::TimedOut { .. })
    ));
    assert!(matches!(
        tx.try_send(&[0; 100_000]),
        Err(SendFailure::TooLong { max: 4032, .. })
    ));
    let mut buf = [0; 64];
    for _ in 0..64 {
        rx.recv(&mut buf, LONG).unwrap();
    }
    tx.send(b"again", LONG).unwrap();
}

#[test]
fn what_is_consumed_can_be_waited_for() {
    let (a, b, _) = links();
    let (a, b) = (open(a, "a"), open(b, "b"));
    let ((mut tx, _), (_, mut rx)) = (channel(&a), channel(&b));
    let seq = tx.send(b"first", LONG).unwrap();
    assert!(matches!(
        tx.wait_consumed(seq, Duration::from_millis(20)),
        Err(SendFailure::TimedOut { .. })
    ));
    let reader = std::thread::spawn(move || {
        let mut buf = [0; 64];
        rx.recv(&mut buf, LONG).unwrap();
        let _ = rx.recv(&mut buf, Duration::from_millis(300));
        rx
    });
    tx.wait_consumed(seq, LONG).unwrap();
    reader.join().unwrap();
}

#[test]
fn a_sleeping_reader_is_woken_by_each_message() {
    let (a, b, _) = links();
    let (a, b) = (open(a, "a"), open(b, "b"));
    let ((mut tx, _), (_, mut rx)) = (channel(&a), channel(&b));
    tx.wait_connected(LONG).unwrap();
    rx.set_wait(Wait::SpinSleep { spins: 10 });
    let reader = std::thread::spawn(move || {
        let mut buf = [0; 64];
        for i in 0..200 {
            assert_eq!(rx.recv(&mut buf, LONG).unwrap().seq, i);
        }
        rx.sleeps()
    });
    for i in 0..200u64 {
        tx.send(&i.to_le_bytes(), LONG).unwrap();
        std::thread::sleep(Duration::from_micros(i * 13 % 900));
    }
    assert!(reader.join().unwrap() > 0, "it never slept");
}

#[test]
fn what_arrived_before_the_loss_is_given_out_and_the_loss_told_once() {
    let (a, b, control) = links();
    let (a, b) = (open(a, "a"), open(b, "b"));
    let ((mut atx, mut arx), (mut btx, mut brx)) = (channel(&a), channel(&b));
    atx.wait_connected(LONG).unwrap();
    btx.wait_connected(LONG).unwrap();
    for i in 0..5u8 {
        atx.try_send(&[i]).unwrap();
    }
    let mut buf = [0; 64];
    brx.recv(&mut buf, LONG).unwrap();
    control.cut();
    let (got, why) = rest(&mut brx);
    assert_eq!(got, [[1], [2], [3], [4]]);
    assert_eq!(
        why,
        Lost {
            reason: CloseReason::LinkLost,
            certain: 5,
            sent: 5
        }
    );
    let why = lost(&mut atx);
    assert_eq!((why.reason, why.sent), (CloseReason::LinkLost, 5));
    assert!(why.certain <= 1);
    assert!(matches!(
        atx.try_send(b"x"),
        Err(SendFailure::NotConnected(SessionState::LinkLost))
    ));
    assert_eq!(lost(&mut btx).reason, CloseReason::LinkLost);
    assert!(matches!(rest(&mut arx), (got, _) if got.is_empty()));

    control.restore().unwrap();
    assert_eq!(atx.send(b"new", LONG).unwrap(), 0, "sequences start anew");
    assert_eq!(brx.recv(&mut buf, LONG).unwrap().seq, 0);
    assert_eq!(&buf[..3], b"new");
    assert_eq!(atx.stats().messages, 6);
    assert_eq!(brx.stats().messages, 6);
    assert_eq!(a.stats().losses, 1);
}

#[test]
fn a_restarted_peer_is_another_and_the_survivor_goes_on() {
    let (a, b, control) = links();
    let a = open(a, "survivor");
    let (mut atx, mut arx) = channel(&a);
    let mut b = Some(b);
    let mut buf = [0; 64];
    let mut incarnations = std::collections::HashSet::new();
    for life in 0..20u64 {
        let link = b.take().unwrap_or_else(|| control.replace(&options()).unwrap());
        let b = open(link, "mortal");
        let (mut btx, mut brx) = channel(&b);
        btx.send(&life.to_le_bytes(), LONG).unwrap();
        let got = until(|| match arx.recv(&mut buf, LONG) {
            Ok(got) => Some(got),
            Err(RecvFailure::Lost(_)) => None,
            Err(e) => panic!("{e}"),
        });
        assert_eq!(got.seq, 0);
        assert_eq!(buf[..8], life.to_le_bytes());
        until(|| match atx.send(&life.to_le_bytes(), LONG) {
            Ok(_) => Some(()),
            Err(SendFailure::Lost(_)) => None,
            Err(e) => panic!("{e}"),
        });
        brx.recv(&mut buf, LONG).unwrap();
        assert_eq!(buf[..8], life.to_le_bytes());
        incarnations.insert(a.peer().unwrap().incarnation);
        // Left unread: it must not be taken for a message of the next life.
        let _ = atx.try_send(b"stale");
        let _ = btx.try_send(b"stale");
        let (_, lost) = {
            drop((btx, brx, b));
            rest(&mut arx)
        };
        assert_ne!(lost.reason, CloseReason::Corrupt);
    }
    assert_eq!(incarnations.len(), 20);
    assert_eq!(a.stats().incarnations, 20);
}

#[test]
fn an_unread_life_does_not_hold_up_the_next_for_ever() {
    let (a, b, control) = links();
    let (a, b) = (open(a, "a"), open(b, "b"));
    let ((mut atx, mut arx), (mut btx, brx)) = (channel(&a), channel(&b));
    atx.wait_connected(LONG).unwrap(); // the channel is up at `a` too, and its reader has not looked
    btx.send(b"old", LONG).unwrap();
    drop((btx, brx, b)); // the reader at `a` does not look
    let b = open(control.replace(&options()).unwrap(), "b2");
    let (mut btx, _brx) = channel(&b);
    btx.send(b"new", LONG).unwrap();
    let mut buf = [0; 64];
    // The old message may be given out if it was still there; then the loss is told; then the new one comes.
    let mut seen = Vec::new();
    until(|| match arx.try_recv(&mut buf) {
        Ok(got) => {
            seen.push(buf[..got.len].to_vec());
            (buf[..got.len] == *b"new").then_some(())
        }
        Err(RecvFailure::Lost(_)) => {
            seen.push(b"lost".to_vec());
            None
        }
        Err(_) => None,
    });
    assert!(
        seen == [&b"lost"[..], b"new"] || seen == [&b"old"[..], b"lost", b"new"],
        "{seen:?}"
    );
}

#[test]
fn flaps_are_counted_and_end_in_one_running_life() {
    let (a, b, control) = links();
    let (a, b) = (open(a, "a"), open(b, "b"));
    let ((mut tx, _arx), (_btx, mut rx)) = (channel(&a), channel(&b));
    tx.wait_connected(LONG).unwrap();
    control.flap(7).unwrap();
    lost(&mut tx);
    until(|| (a.state() == SessionState::Running && b.state() == SessionState::Running).then_some(()));
    assert_eq!((a.stats().losses, b.stats().losses), (7, 7));
    let mut buf = [0; 64];
    until(|| tx.send(b"alive", LONG).ok());
    until(|| rx.recv(&mut buf, LONG).ok());
}

#[test]
fn events_tell_the_story_in_order() {
    let (a, b, control) = links();
    let a = open(a, "a");
    let b = open(b, "b");
    a.wait_running(LONG).unwrap();
    control.cut();
    control.restore().unwrap();
    until(|| (a.stats().losses == 1 && a.state() == SessionState::Running).then_some(()));
    drop(b);
    let mut names = Vec::new();
    until(|| {
        if let Some(event) = a.next_event(Duration::from_millis(1)) {
            names.push(event.name());
        }
        names.contains(&"peer-gone").then_some(())
    });
    let at = |name: &str| {
        names
            .iter()
            .position(|n| *n == name)
            .unwrap_or_else(|| panic!("no {name} in {names:?}"))
    };
    assert!(at("running") < at("link-lost"), "{names:?}");
    assert!(at("link-lost") < at("peer-gone"), "{names:?}");
}

#[test]
fn channels_of_different_shape_are_refused_on_both_sides_and_the_others_go_on() {
    let (a, b, _) = links();
    let (a, b) = (open(a, "a"), open(b, "b"));
    let ((mut tx, _), (_, mut rx)) = (channel(&a), channel(&b));
    let _x = a
        .channel(
            "odd",
            ChannelSpec {
                ring_lines: 128,
                ..SMALL
            },
        )
        .unwrap();
    let _y = b
        .channel(
            "odd",
            ChannelSpec {
                ring_lines: 256,
                ..SMALL
            },
        )
        .unwrap();
    for (connection, ours, theirs) in [(&a, "128", "256"), (&b, "256", "128")] {
        let differs = until(|| match connection.next_event(Duration::from_millis(1)) {
            Some(Event::ChannelRefused { name, differs }) if name == "odd" => Some(differs),
            _ => None,
        });
        assert!(
            differs
                .iter()
                .any(|m| m.ours.contains(ours) && m.theirs.contains(theirs)),
            "{differs:?}"
        );
    }
    tx.send(b"fine", LONG).unwrap();
    rx.recv(&mut [0; 64], LONG).unwrap();
}

#[test]
fn impossible_channels_are_refused_at_once() {
    let (a, _b, _) = links();
    let a = open(a, "a");
    let _kept = channel(&a);
    assert!(matches!(a.channel("test", SMALL), Err(OpenError::BadName { .. })));
    assert!(matches!(a.channel("", SMALL), Err(OpenError::BadName { .. })));
    assert!(matches!(
        a.channel(
            "x",
            ChannelSpec {
                ring_lines: 3,
                ..SMALL
            }
        ),
        Err(OpenError::BadRing { .. })
    ));
    let e = a
        .channel(
            "big",
            ChannelSpec {
                ring_lines: 1 << 20,
                ..SMALL
            },
        )
        .unwrap_err();
    assert!(matches!(e, OpenError::NoRoom { .. }), "{e}");
}

struct Stop<'a>(&'a std::sync::atomic::AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}

#[test]
fn threads_that_poll_while_the_peer_is_replaced_are_never_harmed() {
    let (a, b, control) = links();
    let a = open(a, "a");
    let stop = std::sync::atomic::AtomicBool::new(false);
    let names = ["w", "x", "y", "z"];
    let mut ends: Vec<_> = names.iter().map(|n| a.channel(n, SMALL).unwrap()).collect();
    let mut b = Some(b);
    std::thread::scope(|scope| {
        for (tx, rx) in &mut ends {
            let stop = &stop;
            scope.spawn(move || {
                let mut buf = [0; 4096];
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let _ = rx.try_recv(&mut buf);
                    let _ = tx.try_send(&buf[..100]);
                    std::thread::yield_now();
                }
            });
        }
        let _stop = Stop(&stop); // also when an assertion fails
        for _ in 0..50 {
            let link = b.take().unwrap_or_else(|| control.replace(&options()).unwrap());
            let b = open(link, "b");
            let (mut tx, _rx) = b.channel("x", SMALL).unwrap();
            until(|| tx.send(&[7; 100], LONG).ok());
        }
    });
}

#[test]
fn a_driver_may_be_polled_by_the_caller() {
    let (a, b, _) = links();
    let (a, mut da) = Connection::with_driver(Box::new(a), &Options::default()).unwrap();
    let (b, mut db) = Connection::with_driver(Box::new(b), &Options::default()).unwrap();
    // Opening asks the driver and waits for its answer, so it is done from another thread.
    let opener = std::thread::spawn(move || (channel(&a), channel(&b), a, b));
    until(|| {
        da.poll();
        db.poll();
        opener.is_finished().then_some(())
    });
    let ((mut tx, _arx), (_btx, mut rx), a, _b) = opener.join().unwrap();
    until(|| {
        da.poll();
        db.poll();
        tx.try_send(b"driven").ok()
    });
    assert_eq!(rx.try_recv(&mut [0; 64]).unwrap().len, 6);
    assert_eq!(a.state(), SessionState::Running);
}
