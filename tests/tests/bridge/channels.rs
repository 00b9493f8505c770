//! Whole channels over bridges.

use std::time::{Duration, Instant};

use ntb_emu::model::{Action, SideId};
use ntb_ring::{
    channel::{Connection, Options, Receiver, RecvFailure, Sender},
    link::conformance::WATCHDOG,
    session::{ChannelSpec, Event},
};

use crate::rig::Bridges;

/// Small enough for one window.
const SPEC: ChannelSpec = ChannelSpec {
    ring_lines: 128,
    check: false,
    smaller_if_different: false,
};

struct Node {
    connection: Connection,
    tx: Sender,
    rx: Receiver,
}

impl Node {
    fn new(bridges: &Bridges, side: usize) -> Self {
        let link = Box::new(bridges.open(side));
        let connection = Connection::open(link, &Options::default()).unwrap();
        let (tx, rx) = connection.channel("test", SPEC).unwrap();
        Self { connection, tx, rx }
    }

    /// Both ends in the same, newest life.
    fn connect(&mut self) {
        let start = Instant::now();
        while self.tx.wait_connected(WATCHDOG).is_err() || self.rx.wait_connected(WATCHDOG).is_err() {
            assert!(start.elapsed() < WATCHDOG, "never connected");
        }
    }

    fn event(&self, what: &str, wanted: impl Fn(&Event) -> bool) -> Event {
        let start = Instant::now();
        loop {
            if let Some(event) = self.connection.next_event(Duration::from_millis(100))
                && wanted(&event)
            {
                return event;
            }
            assert!(start.elapsed() < WATCHDOG, "no event: {what}");
        }
    }
}

fn message(n: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|i| (n.wrapping_mul(31) + i * 7) as u8)
        .collect()
}

/// Echoes `count` messages of growing sizes, and checks each.
fn ping_pong(a: &mut Node, b: &mut Node, count: u64) {
    let mut buf = vec![0; 8192];
    for n in 0..count {
        let sent = message(n, 1 + (n as usize * 37) % 3000);
        a.tx.send(&sent, WATCHDOG).unwrap();
        let got = b.rx.recv(&mut buf, WATCHDOG).unwrap();
        assert_eq!(buf[..got.len], sent);
        b.tx.send(&buf[..got.len], WATCHDOG).unwrap();
        let got = a.rx.recv(&mut buf, WATCHDOG).unwrap();
        assert_eq!(buf[..got.len], sent);
    }
}

const FAMILIES: [&str; 6] = ["intel-spr", "intel-icx", "intel-gnr", "intel-skx", "amd", "epf"];

/// Messages of all sizes go both ways, no load crosses the link, and every store hits memory that is mapped.
#[test]
fn messages_go_both_ways() {
    for family in FAMILIES {
        let bridges = Bridges::new(family);
        let (mut a, mut b) = (Node::new(&bridges, 0), Node::new(&bridges, 1));
        a.connect();
        b.connect();
        let before = bridges.report().pair;
        ping_pong(&mut a, &mut b, 200);
        let pair = bridges.report().pair;
        for (way, before) in [(pair.a_to_b, before.a_to_b), (pair.b_to_a, before.b_to_a)] {
            let registers = way.register_reads - before.register_reads;
            assert_eq!((way.window_reads, registers), (0, 0), "{family}");
            assert_eq!(
                way.fault_unmapped + way.fault_forbidden + way.not_master,
                0,
                "{family}"
            );
            assert_eq!(way.outside_window, 0, "{family}");
        }
        drop((a, b));
        let report = bridges.report();
        assert_eq!(
            (report.pair.a.maps_now, report.pair.b.maps_now),
            (0, 0),
            "{family}"
        );
        assert_eq!(
            (report.server_a.faults, report.server_b.faults),
            (0, 0),
            "{family}"
        );
    }
}

/// The cable is pulled and plugged in; the function leaves and comes back, or is wanted back; the peer dies and comes back.
#[test]
fn channels_return_after_every_loss() {
    for family in FAMILIES {
        let bridges = Bridges::new(family);
        let (mut a, mut b) = (Node::new(&bridges, 0), Node::new(&bridges, 1));
        let again = |a: &mut Node, b: &mut Node| {
            a.connect();
            b.connect();
            ping_pong(a, b, 20);
        };
        again(&mut a, &mut b);
        for (lose, restore) in [
            (Action::LinkDown, Action::LinkUp),
            (Action::Remove(SideId::A), Action::Return(SideId::A)),
            (Action::Remove(SideId::B), Action::Return(SideId::B)),
            // Let go of as asked, and taken up again at once where it is still there.
            (Action::RequestRemoval(SideId::A), Action::LinkUp),
            (Action::RequestRemoval(SideId::B), Action::LinkUp),
        ] {
            bridges.act(lose);
            for node in [&mut a, &mut b] {
                node.event("link lost", |e| matches!(e, Event::LinkLost { .. }));
                assert!(matches!(
                    node.rx.recv(&mut [0; 64], WATCHDOG),
                    Err(RecvFailure::Lost(_))
                ));
            }
            bridges.act(restore);
            again(&mut a, &mut b);
        }
        drop(b);
        a.event("peer gone", |e| {
            matches!(e, Event::PeerGone(_) | Event::LinkLost { .. })
        });
        let mut b = Node::new(&bridges, 1);
        again(&mut a, &mut b);
    }
}

/// Lines that arrive in two parts, late, are never delivered torn.
#[test]
fn held_lines_are_never_torn() {
    for family in FAMILIES {
        let bridges = Bridges::new(family);
        for from in SideId::BOTH {
            bridges.act(Action::HoldLines {
                from,
                bytes: 24,
                time: Duration::from_micros(300),
                every: 3,
            });
        }
        let (mut a, mut b) = (Node::new(&bridges, 0), Node::new(&bridges, 1));
        a.connect();
        b.connect();
        ping_pong(&mut a, &mut b, 60);
        assert!(bridges.report().pair.a_to_b.held > 60, "{family}");
    }
}

/// A delay of the wire delays, and nothing else.
#[test]
fn a_slow_wire() {
    let bridges = Bridges::new("intel-spr");
    for from in SideId::BOTH {
        bridges.act(Action::Delay {
            from,
            time: Duration::from_millis(2),
        });
    }
    let (mut a, mut b) = (Node::new(&bridges, 0), Node::new(&bridges, 1));
    a.connect();
    b.connect();
    ping_pong(&mut a, &mut b, 30);
}
