use std::time::Duration;

use ntb_emu::model::Action;
use ntb_linux::transport::{Event, Loss, Sent, Step, Transport, TransportOptions};

use crate::rig::{Bridges, FAMILIES, WATCHDOG, WINDOW, every, until};

struct Both([Transport; 2]);

impl Both {
    fn open(bridges: &Bridges, options: &TransportOptions) -> Self {
        Self([0, 1].map(|side| Transport::open(&bridges.port(side), options).unwrap()))
    }

    fn connect(bridges: &Bridges, options: &TransportOptions) -> Self {
        let mut both = Self::open(bridges, options);
        both.come_up();
        both
    }

    fn come_up(&mut self) {
        until("both are up", || {
            every(&mut self.0, |side| {
                side.poll().unwrap();
                side.step() == Step::Up
            })
        });
    }

    /// Sends from `from`, and the other side gets it.
    fn carry(&mut self, from: usize, payload: &[u8]) {
        let mut got = Vec::new();
        until("it is sent", || self.0[from].send(payload).unwrap() == Sent::Yes);
        let start = std::time::Instant::now();
        while !self.0[1 - from].receive(&mut got).unwrap() {
            assert!(start.elapsed() < WATCHDOG, "never arrives: {:#?}", self.0);
        }
        assert_eq!(got, payload);
    }
}

fn payload(n: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (n * 31 + i * 7) as u8).collect()
}

/// Small frames, of an odd size so that headers lie anywhere, many laps of the ring.
#[test]
fn frames_of_every_size_go_both_ways() {
    for family in FAMILIES {
        let bridges = Bridges::with_window(family, 1 << 16);
        let options = TransportOptions {
            frame: 3001,
            ..TransportOptions::default()
        };
        let mut both = Both::connect(&bridges, &options);
        let largest = both.0[0].largest().unwrap();
        assert_eq!(largest, 3001 - 12);
        for n in 0..100 {
            both.carry(n % 2, &payload(n, [1, largest, n + 1][n % 3]));
        }
        for side in &both.0 {
            let counters = side.counters();
            assert_eq!(
                (counters.sent, counters.received, counters.connections),
                (50, 50, 1)
            );
            assert_eq!((counters.malformed, counters.out_of_turn), (0, 0));
        }
        let error = both.0[0].send(&vec![0; largest + 1]).unwrap_err();
        assert_eq!(error.name(), "bad-length");
        assert_eq!(both.0[0].send(&[]).unwrap_err().name(), "bad-length");
    }
}

#[test]
fn a_full_ring_holds_all_frames_but_one() {
    let bridges = Bridges::new("intel-spr");
    let mut both = Both::connect(&bridges, &TransportOptions::default());
    // 1 MiB and frames of 64 KiB: 15 of them.
    assert_eq!(both.0[0].free(), 14);
    for n in 0..14 {
        assert_eq!(both.0[0].send(&payload(n, 100)).unwrap(), Sent::Yes);
    }
    assert_eq!(both.0[0].send(&[1]).unwrap(), Sent::Full);
    let mut got = Vec::new();
    for n in 0..14 {
        until("it arrives", || both.0[1].receive(&mut got).unwrap());
        assert_eq!(got, payload(n, 100));
    }
    until("credit comes", || both.0[0].free() == 14);
    assert_eq!(both.0[0].counters().full, 1);
}

/// What the kernel's module does when an interface goes down and up.
#[test]
fn a_client_that_closes_is_noticed_and_may_come_back() {
    let bridges = Bridges::new("amd");
    let mut both = Both::connect(&bridges, &TransportOptions::default());
    both.carry(0, b"before");
    both.0[1].close().unwrap();
    let mut lost = None;
    until("the other side notices", || {
        let mut got = Vec::new();
        both.0[0].receive(&mut got).unwrap();
        lost = lost.or(both.0[0].poll().unwrap());
        lost.is_some()
    });
    assert_eq!(lost, Some(Event::Down(Loss::Closed)));
    assert_eq!(both.0[0].send(b"x").unwrap_err().class().code(), 5);
    assert!(
        both.0[0].missing().contains("ntb_netdev"),
        "{}",
        both.0[0].missing()
    );
}

#[test]
fn the_cable_and_a_new_process_begin_a_new_connection() {
    for family in ["intel-spr", "amd"] {
        let bridges = Bridges::new(family);
        let options = TransportOptions::default();
        let mut both = Both::connect(&bridges, &options);
        for n in 0..20 {
            both.carry(n % 2, &payload(n, 200));
        }
        bridges.control().act(Action::LinkDown);
        let mut seen = [false; 2];
        until("both notice", || {
            for (side, seen) in both.0.iter_mut().zip(&mut seen) {
                *seen |= side.poll().unwrap() == Some(Event::Down(Loss::Link));
            }
            seen == [true; 2]
        });
        bridges.control().act(Action::LinkUp);
        both.come_up();
        for n in 0..20 {
            both.carry(n % 2, &payload(n, 300));
        }
        let Both([near, far]) = both;
        drop(far);
        let far = Transport::open(&bridges.port(1), &options).unwrap();
        let mut both = Both([near, far]);
        until("the first side notices", || both.0[0].poll().unwrap().is_some());
        both.come_up();
        for n in 0..20 {
            both.carry(n % 2, &payload(n, 400));
        }
        let report = bridges.control().report();
        assert_eq!(
            report.pair.a_to_b.window_reads + report.pair.b_to_a.window_reads,
            0,
            "{family}"
        );
    }
}

/// A peer that greets again without a loss of the link: its module was loaded anew faster than this side looks.
#[test]
fn a_new_greeting_begins_a_new_connection() {
    let bridges = Bridges::new("intel-spr");
    let mut side = Transport::open(&bridges.port(0), &TransportOptions::default()).unwrap();
    let peer = bridges.port(1);
    peer.enable_link().unwrap();
    let greet = |side: &mut Transport| {
        for (index, value) in [
            (4, 0),
            (5, WINDOW as u32),
            (6, 0),
            (7, WINDOW as u32),
            (3, 2),
            (2, 2),
            (0, 4),
            (1, 1),
        ] {
            peer.set_peer_scratchpad(index, value).unwrap();
        }
        let mut events = Vec::new();
        until("it is up", || {
            events.extend(side.poll().unwrap());
            events.last() == Some(&Event::Up)
        });
        events
    };
    until("the link", || {
        side.poll().unwrap();
        side.step() == Step::Greeting
    });
    assert_eq!(greet(&mut side), [Event::Up]);
    for (index, expected) in [(0, 4), (1, 1), (2, 2), (3, 2), (4, 0), (5, WINDOW as u32)] {
        assert_eq!(peer.scratchpad(index).unwrap(), expected, "what this side says");
    }
    assert_eq!(greet(&mut side), [Event::Down(Loss::Restarted), Event::Up]);
}

#[test]
fn a_peer_that_does_not_fit_is_named() {
    let bridges = Bridges::new("intel-spr");
    let mut side = Transport::open(&bridges.port(0), &TransportOptions::default()).unwrap();
    let peer = bridges.port(1);
    peer.enable_link().unwrap();
    until("the link", || {
        side.poll().unwrap();
        side.step() == Step::Greeting
    });
    let say = |words: [(usize, u32); 3]| {
        for (index, value) in words {
            peer.set_peer_scratchpad(index, value).unwrap();
        }
    };
    say([(3, 2), (2, 1), (0, 4)]);
    let error = side.connect(Duration::from_millis(200)).unwrap_err();
    assert_eq!((error.name(), error.class().code()), ("peer-disagrees", 7));
    assert!(
        error.to_string().contains("queue pairs: 2 here, 1 at the peer"),
        "{error}"
    );
    // A window of 4 GiB, of which nothing can be exposed.
    say([(4, 1), (6, 1), (2, 2)]);
    let error = side.connect(Duration::from_millis(500)).unwrap_err();
    assert!(
        ["too-much-memory", "ring-too-small"].contains(&error.name()),
        "{error}"
    );
}

#[test]
fn ports_and_options_that_do_not_fit_are_refused_at_once() {
    let bridges = Bridges::with_window("intel-spr", 1 << 16);
    let port = bridges.port(0);
    let refused = |options: TransportOptions| Transport::open(&port, &options).unwrap_err();
    let queue = refused(TransportOptions {
        queue: 2,
        ..TransportOptions::default()
    });
    assert_eq!((queue.name(), queue.class().code()), ("no-queue", 2));
    let frame = refused(TransportOptions {
        frame: 12,
        ..TransportOptions::default()
    });
    assert_eq!((frame.name(), frame.class().code()), ("ring-too-small", 7));
}
