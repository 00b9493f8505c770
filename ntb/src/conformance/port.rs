//! What every [`NtbPort`] must do, shown on two of them that face each other.

use std::{sync::Arc, sync::atomic::Ordering, time::Duration};

use ntb_mem::region::{Pages, Region};

use super::{
    readable, wait_until,
    windows::{
        SMALL, closed_windows_are_closed, data_is_ahead_of_doorbell, window_limits_are_checked,
        windows_are_no_wider_than_asked, windows_carry,
    },
};
use crate::{
    hw::{LinkState, NtbPort},
    pci::{DmaSpace, config},
    window::{Aperture, ApertureChoice, InboundWindow},
};

/// Two ports, with their cable.
#[derive(Debug)]
pub struct Ports {
    /// One end.
    pub a: Arc<dyn NtbPort>,
    /// The other.
    pub b: Arc<dyn NtbPort>,
}

/// Makes pairs of ports for the cases.
pub trait PortFixture {
    /// Two ports that face each other, both freshly opened. All earlier ones are gone.
    fn open(&self) -> Ports;

    /// Opens one end anew while the other stays: `true` for [`Ports::a`]. The earlier port of that end is gone.
    fn reopen(&self, a: bool) -> Arc<dyn NtbPort>;
}

/// A case with its name.
type Case = (&'static str, fn(&dyn PortFixture));

/// The suite.
pub const PORT_CASES: &[Case] = &[
    ("starts-quiet", starts_quiet),
    ("ports-are-told-apart", ports_are_told_apart),
    ("link-needs-both", link_needs_both),
    ("link-events-arrive", link_events_arrive),
    ("scratchpads-cross", scratchpads_cross),
    ("scratchpads-hold-all-ones", scratchpads_hold_all_ones),
    ("doorbells-cross", doorbells_cross),
    ("doorbells-mask-and-refire", doorbells_mask_and_refire),
    ("doorbells-merge", doorbells_merge),
    ("wrong-numbers-are-refused", wrong_numbers_are_refused),
    ("windows-carry", windows_carry),
    ("windows-are-no-wider-than-asked", windows_are_no_wider_than_asked),
    ("closed-windows-are-closed", closed_windows_are_closed),
    ("window-limits-are-checked", window_limits_are_checked),
    ("data-is-ahead-of-doorbell", data_is_ahead_of_doorbell),
    ("quiesce-quiets", quiesce_quiets),
    ("reopen-leaves-nothing-behind", reopen_leaves_nothing_behind),
];

pub(super) type End = Arc<dyn NtbPort>;

impl Ports {
    pub(super) fn each(&self) -> [(&End, &End); 2] {
        [(&self.a, &self.b), (&self.b, &self.a)]
    }

    pub(super) fn link_up(self) -> Self {
        for (port, _) in self.each() {
            port.enable_link().expect("enable");
        }
        for (port, _) in self.each() {
            wait_until("link up", || port.link().expect("link").is_up());
        }
        self
    }
}

/// Everything that `from` stored before is at `to` after this, as far as posted writes on one path keep order.
pub(super) fn flush(from: &dyn NtbPort, to: &dyn NtbPort) {
    let last = from.scratchpads() - 1;
    for mark in [0x5EED_0001, 0x5EED_0002] {
        from.set_peer_scratchpad(last, mark).expect("write");
        wait_until("a scratchpad behind the data", || {
            to.scratchpad(last).expect("read") == mark
        });
    }
}

pub(super) fn word(region: &Arc<Region>, at: u64) -> u64 {
    region.view().load((at / 8) as usize, Ordering::Acquire)
}

fn starts_quiet(fixture: &dyn PortFixture) {
    let ports = fixture.open();
    for (port, _) in ports.each() {
        assert_eq!(port.link().expect("link"), LinkState::Down);
        assert_eq!(port.doorbells().expect("doorbells"), 0);
        assert_eq!(port.masked_doorbells(), port.doorbell_bits());
        assert!(
            !readable(port.doorbell_event()),
            "a doorbell event before any doorbell"
        );
        for i in 0..port.scratchpads() {
            assert_eq!(port.scratchpad(i).expect("scratchpad"), 0, "scratchpad {i}");
        }
    }
}

fn ports_are_told_apart(fixture: &dyn PortFixture) {
    let ports = fixture.open();
    for (port, peer) in ports.each() {
        assert_eq!(port.role().port(), peer.role().peer_port());
        assert_eq!(port.family(), peer.family());
        assert_eq!(port.windows().len(), peer.windows().len());
        assert!(!port.windows().is_empty());
        assert!(port.doorbell_bits() != 0 && port.scratchpads() >= 8);
    }
}

fn link_needs_both(fixture: &dyn PortFixture) {
    let ports = fixture.open();
    for (one, other) in ports.each() {
        one.enable_link().expect("enable");
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(one.link().expect("link"), LinkState::Down, "up with one end only");
        assert_eq!(
            other.link().expect("link"),
            LinkState::Down,
            "up with one end only"
        );
        other.enable_link().expect("enable");
        for port in [one, other] {
            wait_until("link up", || port.link().expect("link").is_up());
        }
        one.disable_link().expect("disable");
        for port in [one, other] {
            wait_until("link down", || !port.link().expect("link").is_up());
        }
        other.disable_link().expect("disable");
    }
}

fn link_events_arrive(fixture: &dyn PortFixture) {
    let ports = fixture.open();
    let expect = |up: bool| {
        for (port, _) in ports.each() {
            wait_until("a link event", || {
                // The event may come in pieces (retraining); what counts is the state that it leads to.
                readable(port.link_event()) && port.take_link_report().expect("report").state.is_up() == up
                    || port.link().expect("link").is_up() == up && !readable(port.link_event())
            });
        }
    };
    let interrupts = |port: &dyn NtbPort| port.take_link_report().expect("report").interrupts;
    for (port, _) in ports.each() {
        interrupts(&**port);
    }
    ports.a.enable_link().expect("enable");
    ports.b.enable_link().expect("enable");
    wait_until("an event at the end that asked first", || {
        readable(ports.a.link_event())
    });
    expect(true);
    ports.b.disable_link().expect("disable");
    wait_until("an event at the other end", || readable(ports.a.link_event()));
    let report = ports.a.take_link_report().expect("report");
    assert!(report.interrupts > 0, "{report:?}");
    assert!(!report.state.is_up(), "{report:?}");
    assert_eq!(
        ports.a.take_link_report().expect("report").interrupts,
        0,
        "reported twice"
    );
    expect(false);
}

fn scratchpads_cross(fixture: &dyn PortFixture) {
    let ports = fixture.open().link_up();
    for (port, peer) in ports.each() {
        let n = port.scratchpads();
        for i in 0..n {
            port.set_peer_scratchpad(i, 0xA000_0000 + i as u32)
                .expect("write");
            peer.set_peer_scratchpad(i, 0xB000_0000 + i as u32)
                .expect("write");
        }
        for i in 0..n {
            let (theirs, ours) = (0xA000_0000 + i as u32, 0xB000_0000 + i as u32);
            wait_until("a scratchpad", || peer.scratchpad(i).expect("read") == theirs);
            wait_until("a scratchpad", || port.scratchpad(i).expect("read") == ours);
            assert_eq!(
                port.peer_scratchpad(i).expect("read"),
                theirs,
                "the peer's, seen from here"
            );
        }
        port.set_scratchpad(0, 7).expect("write");
        assert_eq!(port.scratchpad(0).expect("read"), 7);
        wait_until("an own scratchpad at the peer", || {
            peer.peer_scratchpad(0).expect("read") == 7
        });
        assert_eq!(
            peer.scratchpad(0).expect("read"),
            0xA000_0000,
            "the two sides' scratchpads are one"
        );
    }
}

fn scratchpads_hold_all_ones(fixture: &dyn PortFixture) {
    let ports = fixture.open().link_up();
    ports.a.set_peer_scratchpad(1, u32::MAX).expect("write");
    wait_until("all ones", || {
        ports.b.scratchpad(1).expect("a live device") == u32::MAX
    });
    assert_eq!(ports.a.peer_scratchpad(1).expect("link is up"), u32::MAX);
}

fn doorbells_cross(fixture: &dyn PortFixture) {
    let ports = fixture.open().link_up();
    for (port, peer) in ports.each() {
        for bit in (0..64)
            .map(|n| 1u64 << n)
            .filter(|b| peer.doorbell_bits() & b != 0)
        {
            port.ring_peer(bit).expect("ring");
            wait_until("a doorbell", || peer.doorbells().expect("read") != 0);
            assert_eq!(peer.doorbells().expect("read"), bit);
            assert_eq!(port.doorbells().expect("read"), 0, "rung at this end too");
            peer.clear_doorbells(bit).expect("clear");
            assert_eq!(peer.doorbells().expect("read"), 0);
        }
        let all = peer.doorbell_bits();
        port.ring_peer(all).expect("ring");
        wait_until("all doorbells", || peer.doorbells().expect("read") == all);
        peer.clear_doorbells(all & !2).expect("clear");
        assert_eq!(peer.doorbells().expect("read"), all & 2, "clearing is by bit");
        peer.clear_doorbells(2).expect("clear");
    }
}

fn doorbells_mask_and_refire(fixture: &dyn PortFixture) {
    let ports = fixture.open().link_up();
    for (port, peer) in ports.each() {
        peer.unmask_doorbells(1).expect("unmask");
        port.ring_peer(2).expect("ring");
        wait_until("a masked doorbell", || peer.doorbells().expect("read") == 2);
        assert!(!readable(peer.doorbell_event()), "a masked doorbell fired");
        peer.unmask_doorbells(2).expect("unmask");
        wait_until("the event of a doorbell unmasked late", || {
            readable(peer.doorbell_event())
        });
        assert_eq!(peer.take_doorbells(u64::MAX).expect("take"), 2);
        assert!(!readable(peer.doorbell_event()));
        port.ring_peer(1).expect("ring");
        wait_until("the event of an unmasked doorbell", || {
            readable(peer.doorbell_event())
        });
        assert_eq!(peer.take_doorbells(1).expect("take"), 1);
        peer.mask_doorbells(3).expect("mask");
        assert_eq!(peer.masked_doorbells(), peer.doorbell_bits());
        port.ring_peer(1).expect("ring");
        wait_until("a masked doorbell", || peer.doorbells().expect("read") == 1);
        assert!(!readable(peer.doorbell_event()), "a doorbell masked again fired");
        peer.clear_doorbells(1).expect("clear");
        peer.unmask_doorbells(1).expect("unmask");
        assert!(!readable(peer.doorbell_event()), "a cleared doorbell fired");
    }
}

fn doorbells_merge(fixture: &dyn PortFixture) {
    let ports = fixture.open().link_up();
    ports.b.unmask_doorbells(1).expect("unmask");
    for _ in 0..3 {
        ports.a.ring_peer(1).expect("ring");
    }
    flush(&*ports.a, &*ports.b);
    wait_until("the event", || readable(ports.b.doorbell_event()));
    assert_eq!(ports.b.take_doorbells(1).expect("take"), 1);
    // Clear, then look again: the next ring must fire anew.
    ports.a.ring_peer(1).expect("ring");
    wait_until("the event again", || readable(ports.b.doorbell_event()));
    assert_eq!(ports.b.take_doorbells(1).expect("take"), 1);
}

fn wrong_numbers_are_refused(fixture: &dyn PortFixture) {
    let ports = fixture.open();
    let (p, n) = (&ports.a, ports.a.scratchpads());
    let bad = !p.doorbell_bits();
    let names = [
        p.scratchpad(n).map(drop),
        p.set_scratchpad(usize::MAX, 0),
        p.peer_scratchpad(n).map(drop),
        p.set_peer_scratchpad(n, 0),
        p.ring_peer(bad),
        p.clear_doorbells(bad),
        p.mask_doorbells(bad),
        p.unmask_doorbells(bad),
        p.close_window(p.windows().len()),
        p.open_window(usize::MAX, 1 << 40, 4096),
    ]
    .map(|r| r.map_err(|e| e.name()));
    let spad = Err("bad-scratchpad");
    let db = Err("bad-doorbell");
    let window = Err("no-window");
    assert_eq!(names, [spad, spad, spad, spad, db, db, db, db, window, window]);
    assert_eq!(
        p.masked_doorbells(),
        p.doorbell_bits(),
        "a refused call changed the mask"
    );
}

fn quiesce_quiets(fixture: &dyn PortFixture) {
    let ports = fixture.open().link_up();
    let (port, peer) = (&ports.a, &ports.b);
    peer.unmask_doorbells(1).expect("unmask");
    port.set_peer_scratchpad(0, 9).expect("write");
    port.ring_peer(1).expect("ring");
    wait_until("the doorbell", || peer.doorbells().expect("read") == 1);
    peer.quiesce().expect("quiesce");
    assert_eq!(peer.doorbells().expect("read"), 0);
    assert_eq!(peer.masked_doorbells(), peer.doorbell_bits());
    assert_eq!(peer.scratchpad(0).expect("read"), 0);
    wait_until("link down at the other end", || {
        !port.link().expect("link").is_up()
    });
    peer.quiesce().expect("twice is as good as once");
}

fn reopen_leaves_nothing_behind(fixture: &dyn PortFixture) {
    let Ports { a, b } = fixture.open().link_up();
    let space = DmaSpace::new(Arc::clone(b.function())).expect("space");
    let region = Arc::new(Region::allocate(SMALL, Pages::Normal).expect("memory"));
    let window = InboundWindow::over(&b, &space, 0, &region, SMALL).expect("inbound");
    let aperture = Aperture::open(&*a, 0, ApertureChoice::Best).expect("aperture");
    aperture.write(0, &1u64.to_le_bytes()).expect("write");
    a.set_peer_scratchpad(0, 1).expect("write");
    wait_until("the store", || {
        word(&region, 0) == 1 && b.scratchpad(0).expect("read") == 1
    });
    // In the order of a program that forgot to close anything itself.
    drop((space, window, b));
    let b = fixture.reopen(false);
    assert_eq!(
        b.scratchpad(0).expect("read"),
        0,
        "a scratchpad of the earlier life"
    );
    assert!(config::bus_master(&**b.function()).expect("read"));
    let ports = Ports { a, b }.link_up();
    aperture
        .write(0, &2u64.to_le_bytes())
        .expect("a posted write cannot fail");
    flush(&*ports.a, &*ports.b);
    assert_eq!(word(&region, 0), 1, "a window of the earlier life is open");
}
