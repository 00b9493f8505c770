//! The automatic choice with bridges at hand: emulated ones, which both ends are told to look at.

use std::{net::TcpListener, path::PathBuf, time::Duration};

use ntb_emu::model::{Action, SideId};
use ntb_mem::line::Line;
use ntb_ring::{
    address::Address,
    link::{
        LinkError, LinkKind, LinkState,
        conformance::WATCHDOG,
        engine::{Inbound, StoreEngine},
        select::{self, LinkOptions, Opened},
    },
};

use crate::rig::{Bridges, WINDOW};

/// A place to meet at that is free now.
fn place() -> Address {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    format!("auto:127.0.0.1:{port}").parse().unwrap()
}

/// This end looks at that end of the bridges, and at nothing of this machine.
fn at(bridges: &Bridges, side: usize) -> LinkOptions {
    LinkOptions {
        window_bytes: WINDOW,
        bridge: Some(bridges.addresses[side].to_string().parse().unwrap()),
        meet_within: WATCHDOG,
        ..without_a_bridge()
    }
}

fn without_a_bridge() -> LinkOptions {
    LinkOptions {
        window_bytes: WINDOW,
        sysfs: PathBuf::from("/nowhere"),
        meet_within: WATCHDOG,
        ..LinkOptions::default()
    }
}

fn strictly(options: LinkOptions) -> LinkOptions {
    LinkOptions {
        strict: true,
        ..options
    }
}

fn choose(options: [LinkOptions; 2]) -> [Result<Opened, LinkError>; 2] {
    let address = place();
    let open = |options| {
        let address = &address;
        move || select::open(address, &options)
    };
    let [a, b] = options;
    std::thread::scope(|scope| {
        let (a, b) = (scope.spawn(open(a)), scope.spawn(open(b)));
        [a.join().unwrap(), b.join().unwrap()]
    })
}

/// Both ended at a link of this kind, for the same reason, and it carries a line.
fn carries(ends: [Result<Opened, LinkError>; 2], kind: LinkKind, reason: &str) {
    let [mut a, mut b] = ends.map(Result::unwrap);
    for end in [&a, &b] {
        assert_eq!(end.link.facts().kind, kind, "{}", end.chosen);
        assert!(
            end.chosen.contains(reason) && !end.chosen.contains('\n'),
            "{}",
            end.chosen
        );
    }
    let start = std::time::Instant::now();
    let mut until = |done: &mut dyn FnMut(&mut Opened, &mut Opened) -> bool| {
        while !done(&mut a, &mut b) {
            assert!(start.elapsed() < WATCHDOG, "never happened");
            std::thread::sleep(Duration::from_micros(200));
        }
    };
    let up = |end: &mut Opened| end.link.poll().unwrap().state == LinkState::WindowsSet;
    until(&mut |a, b| up(a) & up(b));
    let line = Line([0x00c0_ffee; 8]);
    until(&mut |a, b| {
        let mut engine = a.link.outbound().unwrap();
        engine.put(3, &line);
        engine.flush();
        up(a) & up(b) && b.link.inbound().load_line(3) == line
    });
}

#[test]
fn a_bridge_that_both_have_is_taken() {
    for family in ["intel-spr", "amd"] {
        let bridges = Bridges::new(family);
        carries(
            choose([at(&bridges, 0), at(&bridges, 1)]),
            LinkKind::Ntb,
            "the best there is",
        );
        // Strictly as well: it is the best.
        let bridges = Bridges::new(family);
        carries(
            choose([strictly(at(&bridges, 0)), strictly(at(&bridges, 1))]),
            LinkKind::Ntb,
            "the best there is",
        );
    }
}

#[test]
fn a_bridge_at_one_end_is_named_as_missing_at_the_other() {
    let bridges = Bridges::new("intel-spr");
    carries(
        choose([at(&bridges, 0), without_a_bridge()]),
        LinkKind::Soft,
        "no bridge (NTB) on this machine",
    );
}

#[test]
fn a_bridge_whose_cable_is_down_is_struck_from_both_offers() {
    let bridges = Bridges::new("intel-spr");
    bridges.act(Action::LinkDown);
    carries(
        choose([at(&bridges, 0), at(&bridges, 1)]),
        LinkKind::Soft,
        "cable down",
    );
}

#[test]
fn a_bridge_that_cannot_be_used_is_named_with_the_reason() {
    let bridges = Bridges::new("intel-spr");
    bridges.act(Action::RefuseMap {
        side: SideId::A,
        nth: 1,
        errno: rustix::io::Errno::NOMEM,
    });
    carries(
        choose([at(&bridges, 0), at(&bridges, 1)]),
        LinkKind::Soft,
        "cannot be used",
    );
}

/// Where one end will have nothing but its bridge, the other has none, and both say so.
#[test]
fn strictly_one_sided_there_is_nothing_in_common_and_both_ends_say_so() {
    let bridges = Bridges::new("intel-spr");
    for e in choose([strictly(at(&bridges, 0)), without_a_bridge()]).map(Result::unwrap_err) {
        assert_eq!((e.name, e.exit), ("no-transport-in-common", 3), "{e}");
        assert!(
            e.what.contains("no bridge (NTB) on this machine") && e.what.contains("strictly"),
            "{e}"
        );
    }
}

/// The best hardware that is there does not work: strictly, nothing takes its place.
#[test]
fn strictly_a_bridge_whose_cable_is_down_is_replaced_by_nothing() {
    let bridges = Bridges::new("intel-spr");
    bridges.act(Action::LinkDown);
    for e in choose([strictly(at(&bridges, 0)), strictly(at(&bridges, 1))]).map(Result::unwrap_err) {
        assert_eq!(e.exit, 3, "{e}");
        assert!(e.what.contains("cable down"), "{e}");
    }
    // Alone, without anybody to choose with.
    let e = select::open(&Address::Auto(None), &strictly(at(&bridges, 0))).unwrap_err();
    assert_eq!((e.name, e.exit), ("no-transport", 3), "{e}");
    assert!(e.what.contains("cable down"), "{e}");
}

#[test]
fn without_a_place_to_meet_a_bridge_with_something_at_its_other_end_is_taken() {
    let bridges = Bridges::new("intel-spr");
    let alone = |side| select::open(&Address::Auto(None), &at(&bridges, side));
    let ends = std::thread::scope(|scope| {
        let (a, b) = (scope.spawn(|| alone(0)), scope.spawn(|| alone(1)));
        [a.join().unwrap(), b.join().unwrap()]
    });
    carries(ends, LinkKind::Ntb, "the best there is");
}
