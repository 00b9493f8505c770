//! Both ends in one process, driven in turn, over the loopback.
use std::{io::Write, net::TcpListener, sync::atomic::Ordering};

use ntb_mem::line::Line;

use super::*;
use crate::link::{
    conformance::{Rig, WATCHDOG, until},
    engine::{Inbound, StoreEngine},
};

mod hostile;

/// A port that is free now.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

fn options() -> TcpOptions {
    TcpOptions {
        window_bytes: 1 << 16,
        pages: Pages::Normal,
        secret: Secret::new(b"of the tests").unwrap(),
        busy_poll: None,
    }
}

fn open(port: u16) -> TcpLink {
    TcpLink::open("127.0.0.1", port, &options()).unwrap()
}

fn up(link: &mut TcpLink) -> bool {
    link.poll().unwrap().state == LinkState::WindowsSet
}

fn join(a: &mut TcpLink, b: &mut TcpLink) {
    until(|| up(a) & up(b));
}

struct TcpRig {
    port: u16,
    near: TcpLink,
    far: Option<TcpLink>,
    /// Which side listens: the near one is polled first, or the far one.
    far_first: bool,
}

impl TcpRig {
    fn new(far_first: bool) -> Self {
        let port = free_port();
        let (mut near, mut far) = (open(port), open(port));
        if far_first {
            far.poll().unwrap();
        } else {
            near.poll().unwrap();
        }
        Self {
            port,
            near,
            far: Some(far),
            far_first,
        }
    }
}

impl Rig for TcpRig {
    fn near(&mut self) -> &mut dyn Link {
        &mut self.near
    }

    fn far(&mut self) -> Option<&mut dyn Link> {
        self.far.as_mut().map(|f| f as &mut dyn Link)
    }

    fn lose(&mut self) {
        self.far = None;
    }

    fn restore(&mut self) {
        let mut far = open(self.port);
        if self.far_first {
            far.poll().unwrap();
        }
        self.far = Some(far);
    }
}

mod near_listens {
    crate::link_conformance!(super::TcpRig::new(false));
}

mod far_listens {
    crate::link_conformance!(super::TcpRig::new(true));
}

#[test]
fn without_a_peer_there_is_nothing() {
    let mut link = open(free_port());
    for _ in 0..3 {
        let status = link.poll().unwrap();
        assert_eq!((status.state, status.losses), (LinkState::CableDown, 0));
        assert_eq!(link.registers(), NO_REGISTERS);
        assert!(link.outbound().is_none() && link.pump().is_none());
        link.write_registers(&[1; 8]);
        link.ring(0);
        assert!(!link.doorbell(0).take());
    }
}

#[test]
fn a_network_is_refused_without_a_secret() {
    let without = TcpOptions {
        secret: Secret::none(),
        ..options()
    };
    for host in ["0.0.0.0", "::", "192.0.2.1"] {
        let e = TcpLink::open(host, 9, &without).unwrap_err();
        assert_eq!((e.name, e.exit), ("secret-needed", 6), "{e}");
        assert!(e.what.contains("NTB_SECRET"), "{e}");
        TcpLink::open(host, 9, &options()).unwrap();
    }
    let port = free_port();
    let mut a = TcpLink::open("127.0.0.1", port, &without).unwrap();
    let mut b = TcpLink::open("127.0.0.1", port, &without).unwrap();
    join(&mut a, &mut b);
}

#[test]
fn the_one_that_called_listens_when_the_other_dies() {
    let port = free_port();
    let (mut a, mut b) = (open(port), open(port));
    join(&mut a, &mut b);
    for losses in 1..=4 {
        // Whoever has been there longest dies.
        drop(std::mem::replace(&mut a, b));
        b = open(port);
        join(&mut a, &mut b);
        assert_eq!(a.poll().unwrap().losses, 1, "loss {losses} of its own peer");
        assert_eq!(b.poll().unwrap().losses, 0);
    }
}

#[test]
fn a_silent_peer_gives_way_to_one_that_comes_anew() {
    let port = free_port();
    let (mut a, mut b) = (open(port), open(port));
    a.poll().unwrap();
    join(&mut a, &mut b);
    let mut next = open(port); // the old one is there, but nothing comes from it any more
    until(|| up(&mut a) & up(&mut next));
    assert_eq!(a.poll().unwrap().losses, 1);
    until(|| !up(&mut b));
}

/// A peer that does not read: what is sent to it waits in memory, up to a bound, and nobody blocks.
#[test]
fn a_peer_that_does_not_read_holds_nobody_up() {
    let port = free_port();
    let (mut a, mut b) = (open(port), open(port));
    join(&mut a, &mut b);
    let mut engine = a.outbound().unwrap();
    let lines = engine.lines();
    let bytes = vec![5; 16 << 10];
    let mut n = 0u64;
    until(|| {
        engine.put_bytes(n % 16, &bytes);
        engine.flush();
        n += 1;
        !up(&mut a)
    });
    assert!(
        matches!(a.next_event(), Some(LinkEvent::Transport { why, .. }) if why.contains("does not read"))
    );
    // Less than that waits and arrives.
    let mut b = {
        drop(b);
        open(port)
    };
    join(&mut a, &mut b);
    let mut engine = a.outbound().unwrap();
    for round in 0..128u64 {
        engine.put_bytes(0, &bytes);
        engine.put(lines - 1, &Line([round; 8]));
        engine.flush();
    }
    until(|| {
        assert!(up(&mut a) & up(&mut b));
        b.inbound().load_line(lines - 1) == Line([127; 8])
    });
}

#[test]
fn long_runs_arrive_whole() {
    let port = free_port();
    let large = || {
        let options = TcpOptions {
            window_bytes: 4 << 20,
            ..options()
        };
        TcpLink::open("127.0.0.1", port, &options).unwrap()
    };
    let (mut a, mut b) = (large(), large());
    join(&mut a, &mut b);
    let mut engine = a.outbound().unwrap();
    let bytes: Vec<u8> = (0..3_000_001u32).map(|i| (i >> 3) as u8 ^ i as u8).collect();
    engine.put_bytes(3, &bytes);
    engine.put(0, &Line([1; 8]));
    engine.flush();
    until(|| {
        assert!(up(&mut a) & up(&mut b));
        b.inbound().load(7, Ordering::Acquire) == 1
    });
    let mut out = vec![0; bytes.len()];
    Inbound::copy_out(&b.inbound(), 3 * 64, &mut out);
    assert!(out == bytes);
}

/// Without a service thread in between: who polls reads the stream.
#[test]
fn whoever_pumps_gets_what_came() {
    let port = free_port();
    let (mut a, mut b) = (open(port), open(port));
    join(&mut a, &mut b);
    let pump = b.pump().unwrap();
    let mut engine = a.outbound().unwrap();
    for round in 1..100u64 {
        engine.put(2, &Line([round; 8]));
        engine.flush();
        let view = b.inbound();
        until(|| {
            pump.pump();
            Inbound::load_line(&view, 2) == Line([round; 8])
        });
    }
    drop(a);
    until(|| !up(&mut b));
    assert!(!pump.pump(), "nothing comes of a connection that has ended");
}

/// A packet costs who polls nothing for others that sleep, and wakes them when nobody polls.
#[test]
fn sleepers_watch_the_stream_only_while_nobody_polls() {
    let port = free_port();
    let (mut a, mut b) = (open(port), open(port));
    join(&mut a, &mut b);
    let watched = |b: &TcpLink| b.own.arrivals.is_watched();
    assert!(watched(&b), "nobody has polled yet");
    let pump = b.pump().unwrap();
    pump.pump();
    assert!(!watched(&b));
    let mut engine = a.outbound().unwrap();
    engine.put(2, &Line([1; 8]));
    engine.flush();
    let bell = b.doorbell(3);
    pump.rest();
    assert!(watched(&b));
    assert!(
        crate::link::doorbell::sleep_on(&[bell.as_fd()], WATCHDOG),
        "it came before or after"
    );
    pump.pump();
    assert!(!watched(&b));
    // Of one receiver that sleeps and one that polls, the first is woken by its own ring.
    pump.rest();
    pump.pump();
    a.ring(3);
    until(|| {
        pump.pump();
        bell.take()
    });
    pump.rest();
    drop(a);
    until(|| !up(&mut b));
    pump.rest();
    assert!(!watched(&b), "the end of a stream would wake them for ever");
}
