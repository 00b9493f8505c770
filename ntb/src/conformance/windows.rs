//! The cases of the port suite that are about memory windows.

use std::sync::Arc;

use ntb_mem::region::{Pages, Region};

use super::{
    port::{PortFixture, flush, word},
    wait_until,
};
use crate::{
    pci::DmaSpace,
    window::{Aperture, ApertureChoice, InboundWindow},
};

/// A size that every window takes.
pub(super) const SMALL: u64 = 64 << 10;

pub(super) fn windows_carry(fixture: &dyn PortFixture) {
    let ports = fixture.open().link_up();
    for (port, peer) in ports.each() {
        let space = DmaSpace::new(Arc::clone(peer.function())).expect("space");
        let inbound: Vec<_> = (0..peer.windows().len())
            .map(|i| InboundWindow::allocate(peer, &space, i, SMALL, Pages::Normal).expect("inbound"))
            .collect();
        for (i, window) in inbound.iter().enumerate() {
            let aperture = Aperture::open(&**port, i, ApertureChoice::Best).expect("aperture");
            let end = window.bytes();
            for at in [0, 8, 4096 - 8, 4096, end / 2, end - 64, end - 8] {
                let value = 0x1111_0000_0000_0000 * (i as u64 + 1) + at;
                aperture.write(at, &value.to_le_bytes()).expect("write");
                wait_until("a store through the window", || {
                    word(window.region(), at) == value
                });
            }
            let line: Vec<u8> = (0..64).collect();
            aperture.write(64, &line).expect("write");
            let last = u64::from_le_bytes([56, 57, 58, 59, 60, 61, 62, 63]);
            wait_until("a line through the window", || word(window.region(), 120) == last);
            for other in inbound.iter().filter(|o| o.index() != i) {
                let value = word(other.region(), end / 2);
                assert!(
                    value == 0 || value >> 60 == other.index() as u64 + 1,
                    "windows are one: {value:#x}"
                );
            }
        }
    }
}

pub(super) fn windows_are_no_wider_than_asked(fixture: &dyn PortFixture) {
    let ports = fixture.open().link_up();
    for (port, peer) in ports.each() {
        let space = DmaSpace::new(Arc::clone(peer.function())).expect("space");
        for (i, info) in peer.windows().iter().enumerate() {
            let region = Arc::new(Region::allocate(2 * SMALL, Pages::Normal).expect("memory"));
            let window = InboundWindow::over(peer, &space, i, &region, SMALL).expect("inbound");
            let aperture = Aperture::open(&**port, i, ApertureChoice::Best).expect("aperture");
            aperture.write(SMALL - 8, &7u64.to_le_bytes()).expect("write");
            wait_until("the last word", || word(&region, SMALL - 8) == 7);
            if info.bytes > SMALL {
                aperture
                    .write(SMALL, &8u64.to_le_bytes())
                    .expect("a posted write cannot fail");
                flush(&**port, &**peer);
                assert_eq!(word(&region, SMALL), 0, "the peer reaches more than the window");
            }
            drop(window);
        }
    }
}

pub(super) fn closed_windows_are_closed(fixture: &dyn PortFixture) {
    let ports = fixture.open().link_up();
    let (port, peer) = (&ports.a, &ports.b);
    let space = DmaSpace::new(Arc::clone(peer.function())).expect("space");
    for (i, info) in peer.windows().iter().enumerate() {
        let region = Arc::new(Region::allocate(SMALL, Pages::Normal).expect("memory"));
        // Mapped all along, so that nothing but the window keeps the peer out.
        let mapping = space.map(&region, info.address_align).expect("map");
        let aperture = Aperture::open(&**port, i, ApertureChoice::Best).expect("aperture");
        let store = |value: u64| {
            let stored = aperture.write(0, &value.to_le_bytes());
            stored.expect("a posted write cannot fail");
        };
        for life in 1..=3u64 {
            peer.open_window(i, mapping.iova(), SMALL).expect("open");
            store(life);
            wait_until("a store into the open window", || word(&region, 0) == life);
            peer.close_window(i).expect("close");
            store(0xDEAD);
            flush(&**port, &**peer);
            assert_eq!(word(&region, 0), life, "a store went through a closed window");
        }
        peer.close_window(i).expect("closing a closed window");
        // The same memory again, by the guard, closed in both of its ways.
        for by_hand in [true, false] {
            let window = InboundWindow::over(peer, &space, i, &region, SMALL).expect("inbound");
            store(9);
            wait_until("a store into the reopened window", || word(&region, 0) == 9);
            if by_hand {
                window.close().expect("close");
            } else {
                drop(window);
            }
            store(0xDEAD);
            flush(&**port, &**peer);
            assert_eq!(
                word(&region, 0),
                9,
                "a store went through a window that was let go"
            );
        }
    }
}

pub(super) fn window_limits_are_checked(fixture: &dyn PortFixture) {
    let ports = fixture.open();
    let p = &ports.a;
    for (i, info) in p.windows().iter().enumerate() {
        let name = |iova, bytes| p.open_window(i, iova, bytes).map_err(|e| e.name());
        let good = info.address_align.max(1 << 40);
        assert_eq!(name(good, 0), Err("bad-window-size"));
        assert_eq!(name(good, info.bytes + info.size_align), Err("bad-window-size"));
        assert_eq!(name(good, info.size_align + 1), Err("bad-window-size"));
        assert_eq!(name(0, info.size_align), Err("bad-window-address"));
        assert_eq!(
            name(good + info.address_align / 2, info.size_align),
            Err("bad-window-address")
        );
    }
    let space = DmaSpace::new(Arc::clone(p.function())).expect("space");
    let too_large = p.windows()[0].bytes + 1;
    let e =
        InboundWindow::allocate(p, &space, 0, too_large, Pages::Normal).expect_err("larger than the window");
    assert_eq!(e.name(), "bad-window-size");
    assert!(
        e.to_string().contains(&format!("{:#x}", p.windows()[0].bytes)),
        "no limit in: {e}"
    );
    let aperture = Aperture::open(&**p, 0, ApertureChoice::Best).expect("aperture");
    let e = aperture
        .write(aperture.bytes(), &[0; 8])
        .expect_err("behind the aperture");
    assert_eq!(e.name(), "out-of-aperture");
}

pub(super) fn data_is_ahead_of_doorbell(fixture: &dyn PortFixture) {
    let ports = fixture.open().link_up();
    let (port, peer) = (&ports.a, &ports.b);
    let space = DmaSpace::new(Arc::clone(peer.function())).expect("space");
    let window = InboundWindow::allocate(peer, &space, 0, SMALL, Pages::Normal).expect("inbound");
    let aperture = Aperture::open(&**port, 0, ApertureChoice::Best).expect("aperture");
    peer.unmask_doorbells(1).expect("unmask");
    for round in 1..=50u64 {
        aperture.write(8 * round, &round.to_le_bytes()).expect("write");
        port.ring_peer(1).expect("ring");
        wait_until("the doorbell", || peer.take_doorbells(1).expect("take") == 1);
        assert_eq!(
            word(window.region(), 8 * round),
            round,
            "the doorbell overtook the data"
        );
    }
}
