//! Channels by name: any order, any number, geometry, closing and opening again.

use super::{
    super::*,
    world::{LINES, World, ms},
};

fn spec(ring_lines: u64) -> ChannelSpec {
    ChannelSpec {
        ring_lines,
        check: false,
        smaller_if_different: false,
    }
}

fn linked(seed: u64) -> World {
    let mut w = World::new(seed);
    w.start(0);
    w.start(1);
    w.run_to_running(ms(1000));
    w
}

#[test]
fn both_sides_open_in_any_order_at_any_time() {
    let mut w = linked(1);
    let a0 = w.open(0, "a", spec(64));
    w.run_for(ms(100));
    let b1 = w.open(1, "b", spec(128));
    let c1 = w.open(1, "c", spec(4));
    w.run_for(ms(100));
    assert!(w.sides[0].up.is_empty() && w.sides[1].up.is_empty());
    let c0 = w.open(0, "c", spec(4));
    let a1 = w.open(1, "a", spec(64));
    let b0 = w.open(0, "b", spec(128));
    assert!(w.run_until(w.now + ms(20), World::is_settled));
    for (x, y) in [(a0, a1), (b0, b1), (c0, c1)] {
        let (x, y) = (w.sides[0].up[&x], w.sides[1].up[&y]);
        assert_eq!(x.transmit, y.receive);
        assert_eq!(x.receive, y.transmit);
    }
    let bases: Vec<u64> = w.sides[0].up.values().map(|l| l.inbound_base).collect();
    assert!(bases.iter().all(|b| b % 64 == 0 && *b >= 256));
}

#[test]
fn sixty_four_channels_work_and_a_sixty_fifth_is_refused() {
    let mut w = linked(2);
    let small = spec(4);
    for side in 0..2 {
        for i in 0..64 {
            // The window of these tests takes 20: every other one is closed again.
            match w.session(side).open(&format!("ch{i}"), small) {
                Ok(_) => {}
                Err(OpenError::NoRoom { needed, free, .. }) => {
                    assert_eq!(needed, 8192);
                    assert!(free < needed);
                    assert_eq!(i, (LINES - 256) / 128);
                    break;
                }
                Err(e) => panic!("{e}"),
            }
        }
    }
    w.run_for(ms(50));
    w.assert_channels_match();
    assert_eq!(w.sides[0].up.len() as u64, (LINES - 256) / 128);

    let config = SessionConfig::new("n", 1, 2, crate::link::engine::Order::Ordered);
    let mut session = Session::new(config, 1 << 20).unwrap();
    for i in 0..64 {
        session.open(&format!("{i}"), small).unwrap();
    }
    assert!(matches!(
        session.open("x", small),
        Err(OpenError::TooMany { max: 64 })
    ));
}

#[test]
fn geometry_that_differs_is_refused_on_both_sides_and_the_others_go_on() {
    let mut w = linked(3);
    w.open(0, "good", spec(64));
    w.open(1, "bad", spec(128));
    w.open(0, "bad", spec(64));
    w.open(1, "good", spec(64));
    w.run_for(ms(500));
    w.assert_channels_match();
    assert_eq!(w.sides[0].up.len(), 1);
    for (side, text) in [
        (0, "ring lines: ours 64, theirs 128"),
        (1, "ring lines: ours 128, theirs 64"),
    ] {
        let refused: Vec<&Event> = w.sides[side]
            .events
            .iter()
            .filter(|e| e.name() == "channel-refused")
            .collect();
        let [Event::ChannelRefused { name, differs }] = refused[..] else {
            panic!("{refused:?}")
        };
        assert_eq!(name, "bad");
        assert_eq!(differs[0].to_string(), text);
    }
}

#[test]
fn a_refused_channel_works_once_one_side_opens_it_right() {
    let mut w = linked(4);
    let wrong = w.open(0, "x", spec(64));
    w.open(1, "x", spec(128));
    w.run_for(ms(50));
    w.close(0, wrong);
    w.open(0, "x", spec(128));
    w.run_for(ms(50));
    w.assert_channels_match();
    assert_eq!(w.sides[0].up.len(), 1);
}

#[test]
fn the_check_must_be_the_same_and_makes_both_directions_relaxed() {
    let mut w = linked(5);
    let checked = ChannelSpec {
        check: true,
        ..spec(64)
    };
    w.open(0, "x", checked);
    w.open(1, "x", spec(64));
    w.open(0, "y", checked);
    w.open(1, "y", checked);
    w.open(0, "z", spec(64));
    w.open(1, "z", spec(64));
    w.run_for(ms(50));
    assert_eq!(w.count(0, "channel-refused"), 1);
    assert_eq!(w.count(1, "channel-refused"), 1);
    use crate::link::engine::Order::{Ordered, Relaxed};
    let mut orders: Vec<_> = w.sides[0]
        .ups
        .iter()
        .map(|(id, l)| (*id, l.transmit_order, l.receive_order))
        .collect();
    orders.sort_by_key(|(id, ..)| *id);
    // Side 0 keeps order, side 1 does not.
    assert_eq!(
        orders,
        [(ChannelId(1), Relaxed, Relaxed), (ChannelId(2), Ordered, Relaxed)]
    );
}

#[test]
fn the_smaller_ring_is_taken_when_either_side_asks_for_it() {
    for asking in 0..2 {
        let mut w = linked(6);
        for (side, lines) in [(0, 256), (1, 64)] {
            w.open(
                side,
                "x",
                ChannelSpec {
                    smaller_if_different: side == asking,
                    ..spec(lines)
                },
            );
        }
        w.run_for(ms(50));
        w.assert_channels_match();
        for side in 0..2 {
            let lanes = w.sides[side].up.values().next().unwrap();
            assert_eq!(lanes.transmit.ring_lines, 64);
            assert_eq!(lanes.receive.ring_lines, 64);
        }
    }
}

#[test]
fn closing_one_channel_ends_it_at_the_peer_and_opening_again_makes_a_new_life() {
    let mut w = linked(7);
    let other = w.open(0, "other", spec(64));
    w.open(1, "other", spec(64));
    let id = w.open(0, "x", spec(64));
    let peer = w.open(1, "x", spec(64));
    w.run_for(ms(50));
    let before = w.sides[1].up[&peer];
    for quickly in [false, true] {
        let open = w.sides[0].session.as_ref().unwrap();
        assert!(open.state() == SessionState::Running);
        let old = *w.sides[0].up.keys().find(|k| **k != other).unwrap();
        w.close(0, old);
        if !quickly {
            w.run_for(ms(50));
            assert_eq!(w.sides[1].downs.last(), Some(&(peer, CloseReason::ClosedByPeer)));
            assert_eq!(w.sides[1].up.len(), 1);
        }
        w.open(0, "x", spec(64));
        w.run_for(ms(50));
        w.assert_channels_match();
        assert_eq!(w.sides[1].up.len(), 2);
        assert_ne!(
            w.sides[1].up[&peer].receive.to_consumer,
            before.receive.to_consumer
        );
    }
    assert_ne!(id, other);
    assert_eq!(w.sides[1].downs.len(), 2);
}

#[test]
fn an_unread_channel_is_not_given_to_the_peer_again_before_it_is_drained() {
    let mut w = linked(8);
    let id = w.open(0, "x", spec(64));
    let peer = w.open(1, "x", spec(64));
    w.run_for(ms(50));
    w.sides[1].drains = false;
    w.close(0, id);
    w.open(0, "x", spec(64));
    w.run_for(ms(100));
    assert!(w.sides[0].up.is_empty());
    w.session(1).reader_drained(peer);
    w.run_for(ms(20));
    assert_eq!(w.sides[0].up.len(), 1);
    w.assert_channels_match();
}

#[test]
fn memory_of_a_closed_channel_is_used_again_only_after_the_peer_knows() {
    let mut w = linked(9);
    let id = w.open(0, "x", spec(64));
    w.open(1, "x", spec(64));
    w.run_for(ms(50));
    let base = w.sides[0].up[&id].inbound_base;
    w.sides[1].paused = true;
    w.close(0, id);
    let y = w.open(0, "y", spec(64));
    w.open(1, "y", spec(64));
    w.run_for(ms(100));
    w.sides[1].paused = false;
    w.run_for(ms(50));
    assert_ne!(w.sides[0].up[&y].inbound_base, base);
    w.run_for(ms(50));
    let z = w.open(0, "z", spec(64));
    w.open(1, "z", spec(64));
    w.run_for(ms(50));
    assert_eq!(w.sides[0].up[&z].inbound_base, base);
}

/// Neither a pattern nor payload of an earlier channel is there to be taken for a control word, however slow the wire.
#[test]
fn a_channel_comes_up_over_a_cleared_control_page() {
    let mut w = World::new(10);
    w.must_be_clear = true;
    w.scribble(0);
    w.scribble(1);
    w.faults.delay = ms(7);
    w.start(0);
    w.start(1);
    let id = w.open(0, "x", spec(64));
    w.run_for(ms(3000));
    assert_eq!(w.state(0), SessionState::Running);
    w.open(1, "x", spec(64)); // side 0 learns of both, the channel and that it is paired, at the same moment
    assert!(w.run_until(w.now + ms(5000), World::is_settled));
    w.close(0, id);
    w.run_for(ms(300));
    w.scribble_channels(0);
    w.open(0, "y", spec(256));
    w.open(1, "y", spec(256));
    w.run_for(ms(300));
    assert_eq!(w.sides[0].up.len(), 1);
}

#[test]
fn names_and_rings_that_cannot_be_are_refused() {
    let config = SessionConfig::new("n", 1, 2, crate::link::engine::Order::Ordered);
    let mut session = Session::new(config, LINES).unwrap();
    for name in ["", "a\0b", &"x".repeat(33)] {
        assert!(matches!(
            session.open(name, spec(64)),
            Err(OpenError::BadName { .. })
        ));
    }
    for lines in [0, 1, 2, 3, 63, 65, 1 << 27, u64::MAX] {
        assert!(matches!(
            session.open("x", spec(lines)),
            Err(OpenError::BadRing { lines: l, .. }) if l == lines
        ));
    }
    session.open("x", spec(4)).unwrap();
    assert!(matches!(
        session.open("x", spec(4)),
        Err(OpenError::BadName { .. })
    ));
    let e = session.open("y", spec(1 << 26)).unwrap_err().to_string();
    assert!(e.contains(&((64 + (1u64 << 26)) * 64).to_string()), "{e}");
}

#[test]
fn channels_in_exported_memory_lie_behind_the_ordinary_part_and_fill_nothing_of_it() {
    let config = SessionConfig::new("n", 1, 2, crate::link::engine::Order::Ordered);
    let with = |own, exported| Session::with_export(config.clone(), own, exported);
    let mut none = with(LINES, 0).unwrap();
    assert!(matches!(
        none.open_at("x", spec(64), Place::Exported),
        Err(OpenError::NoExport { .. })
    ));
    // Each part has room for what it has room for, and the other is not asked.
    let mut session = with(256 + 128, 256).unwrap();
    for name in ["a", "b"] {
        session.open_at(name, spec(64), Place::Exported).unwrap();
    }
    assert!(matches!(
        session.open_at("c", spec(64), Place::Exported),
        Err(OpenError::NoRoom { free: 0, .. })
    ));
    session.open("c", spec(64)).unwrap();
    assert!(matches!(
        session.open("d", spec(64)),
        Err(OpenError::NoRoom { free: 0, .. })
    ));
    // The parts meet at a page, and the session's own lines are ordinary memory.
    for own in [LINES + 1, 128] {
        assert!(
            matches!(with(own, 256), Err(OpenError::BadWindow { .. })),
            "{own}"
        );
    }
}
