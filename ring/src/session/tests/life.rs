//! Starts, deaths, silence, refusals.

use std::time::Duration;

use super::{
    super::*,
    world::{Faults, LINES, World, ms},
};
use crate::link::engine::Inbound;

fn spec() -> ChannelSpec {
    ChannelSpec {
        ring_lines: 64,
        check: false,
        smaller_if_different: false,
    }
}

fn running_pair(seed: u64) -> World {
    let mut w = World::new(seed);
    w.start(0);
    w.start(1);
    w.open(0, "a", spec());
    w.open(1, "a", spec());
    w.run_to_running(ms(1000));
    w.run_for(ms(50));
    w.assert_channels_match();
    w
}

#[test]
fn either_side_may_start_first_and_every_state_is_told_in_order() {
    for first in 0..2 {
        let mut w = World::new(first as u64);
        w.start(first);
        w.run_for(ms(60_000));
        assert_eq!(w.state(first), SessionState::CableUp);
        assert_eq!(w.count(first, "waiting"), 60);
        w.start(1 - first);
        w.run_to_running(ms(100));
        for side in 0..2 {
            let told: Vec<&Event> = w.sides[side]
                .events
                .iter()
                .filter(|e| e.name() != "waiting")
                .collect();
            let states: Vec<SessionState> = told
                .iter()
                .filter_map(|e| if let Event::State(s) = e { Some(*s) } else { None })
                .collect();
            assert!(states.is_sorted(), "{states:?}");
            assert_eq!(states[0], SessionState::CableUp);
            assert!(
                states
                    .iter()
                    .any(|s| matches!(s, SessionState::WindowsSet { .. }))
            );
            let Some(Event::Running(peer)) = told.last() else {
                panic!("{told:?}")
            };
            assert_eq!(peer.node, ["right", "left"][side]);
            assert_eq!(peer.package, env!("CARGO_PKG_VERSION"));
            assert!(told.contains(&&Event::State(SessionState::Verified)));
        }
    }
}

#[test]
fn a_running_link_neither_spins_nor_tells_anything() {
    let mut w = running_pair(1);
    let (events, puts) = (w.sides[0].events.len(), w.sides[0].puts);
    w.run_for(ms(10_000));
    assert_eq!(w.sides[0].events.len(), events);
    let beats = w.sides[0].puts - puts;
    assert!((900..=1001).contains(&beats), "{beats} beats in 10 s");
}

#[test]
fn first_writes_lost_on_either_side() {
    for lose in [1, 2, 5, 50] {
        for side in 0..2 {
            let mut w = World::new(lose.into());
            w.sides[side].lose = lose;
            w.start(0);
            w.start(1);
            w.open(0, "a", spec());
            w.open(1, "a", spec());
            w.run_until(ms(5000), World::is_settled);
            assert!(w.is_settled(), "lost {lose} of {side}");
            w.assert_channels_match();
        }
    }
}

#[test]
fn left_overs_of_an_earlier_run_have_no_effect() {
    for seed in 0..20 {
        let mut w = World::new(seed);
        w.scribble(0);
        w.scribble(1);
        w.start(0);
        w.run_for(ms(100));
        assert_eq!(w.state(0), SessionState::CableUp);
        assert_eq!(w.sides[0].puts, 0);
        w.start(1);
        w.open(0, "a", spec());
        w.open(1, "a", spec());
        w.run_until(ms(2000), World::is_settled);
        w.assert_channels_match();
        assert_eq!(w.count(0, "peer-restarted"), 0);
    }
}

/// Memory and registers hold all that a dead pair left: both sides start new on top of it.
#[test]
fn both_restart_over_the_memory_of_the_last_run() {
    let mut w = running_pair(3);
    w.kill(0);
    w.kill(1);
    w.run_for(ms(10));
    w.start(0);
    w.run_for(ms(3000));
    assert_eq!(
        w.state(0),
        SessionState::CableUp,
        "a dead peer was taken for a live one"
    );
    w.start(1);
    assert!(w.run_until(ms(10_000), World::is_settled));
    w.assert_channels_match();
}

#[test]
fn one_dead_direction_is_told_apart() {
    for dead in 0..2 {
        let mut w = World::new(4);
        w.sides[dead].transmit_dead = true;
        w.start(0);
        w.start(1);
        w.run_for(ms(2500));
        let told = |transmit, receive| SessionState::WindowsSet { transmit, receive };
        assert_eq!(w.state(dead), told(false, true));
        assert_eq!(w.state(1 - dead), told(true, false));
        assert!(w.state(dead).missing().contains("transmit dead, receive alive"));
        assert!(w.count(dead, "waiting") >= 2);
        w.sides[dead].transmit_dead = false;
        w.run_to_running(ms(1000));
        assert_eq!(w.count(0, "peer-gone") + w.count(1, "peer-gone"), 0);
    }
}

#[test]
fn a_direction_that_dies_while_running_ends_the_life_and_is_told_apart() {
    let mut w = running_pair(23);
    w.sides[1].transmit_dead = true;
    w.run_for(ms(10_000));
    for side in 0..2 {
        assert_eq!(w.sides[side].downs, [(ChannelId(0), CloseReason::PeerGone)]);
        assert_eq!(w.count(side, "peer-gone"), 1);
    }
    assert!(
        w.state(1).missing().contains("transmit dead, receive alive"),
        "{:?}",
        w.state(1)
    );
    assert!(
        w.state(0).missing().contains("transmit alive, receive dead"),
        "{:?}",
        w.state(0)
    );
    w.sides[1].transmit_dead = false;
    assert!(w.run_until(w.now + ms(1000), World::is_settled));
    w.assert_channels_match();
}

/// Registers that another writer, or another time, has left while the link runs.
#[test]
fn registers_of_others_and_of_earlier_lives_have_no_effect() {
    let mut w = running_pair(25);
    w.link_down(); // so that the peer has had an earlier life
    w.link_up();
    w.run_for(ms(500));
    let present = Report::decode(&w.sides[0].registers).unwrap();
    let events = w.sides[0].events.len();
    let earlier = Identity {
        life: present.who.life - 1,
        ..present.who
    };
    let other = Identity {
        incarnation: 5,
        life: 1,
    };
    for (who, echo) in [(earlier, present.echo), (other, present.echo ^ 1), (other, 0)] {
        let left_over = Report { who, echo, ..present };
        w.sides[0].registers = left_over.encode();
        w.session(0);
        w.run_for(ms(1000));
        assert_eq!(w.state(0), SessionState::Running);
    }
    assert_eq!(w.sides[0].events.len(), events);
    // With the echo of this very life it is the peer's successor.
    w.sides[0].registers = Report {
        who: other,
        ..present
    }
    .encode();
    w.session(0);
    w.run_for(ms(1));
    assert_eq!(w.count(0, "peer-restarted"), 1);
}

#[test]
fn a_side_does_not_pair_with_its_own_registers() {
    let mut w = World::new(26);
    w.start(0);
    for _ in 0..50 {
        w.run_for(ms(20));
        let session = w.sides[0].session.as_ref().unwrap();
        w.sides[0].registers = session.registers().encode();
        w.session(0);
    }
    assert_eq!(w.state(0), SessionState::CableUp);
}

#[test]
fn old_beats_do_not_keep_a_dead_peer_alive() {
    let mut w = running_pair(27);
    let mut beats = Vec::new();
    for _ in 0..2 {
        beats.push(w.sides[0].memory.load_line(0));
        w.run_for(ms(30));
    }
    assert_ne!(beats[0], beats[1]);
    w.kill(1);
    for i in 0..120 {
        for (word, value) in beats[i % 2].0.iter().enumerate() {
            w.sides[0].memory.store(word, *value);
        }
        w.session(0);
        w.run_for(ms(50));
    }
    assert_eq!(w.state(0), SessionState::PeerGone);
}

#[test]
fn memory_that_is_mapped_in_part_is_not_verified() {
    for mapped in [LINES - 1, LINES / 2, 257] {
        let mut w = World::new(28);
        w.sides[0].mapped = mapped;
        w.start(0);
        w.start(1);
        w.run_for(ms(2000));
        assert!(
            w.state(0).missing().contains("transmit dead, receive alive"),
            "{mapped}"
        );
    }
}

#[test]
fn a_pattern_that_was_never_stored_cannot_have_been_found() {
    let mut w = World::new(31);
    w.sides[0].transmit_dead = true;
    w.start(0);
    w.start(1);
    w.run_for(ms(50));
    let report = Report::decode(&w.sides[0].registers).unwrap();
    let claim = Report { found: 999, ..report };
    w.sides[0].registers = claim.encode();
    w.session(0);
    w.run_for(Duration::from_micros(100));
    assert!(w.state(0).missing().contains("transmit dead"), "{:?}", w.state(0));
}

#[test]
fn a_goodbye_by_registers_alone_is_enough() {
    let mut w = running_pair(29);
    w.sides[1].transmit_dead = true;
    let mut actions = Vec::new();
    w.session(1).shutdown(&mut actions);
    w.carry_out(1, actions);
    w.run_for(ms(50));
    assert_eq!(w.sides[0].downs, [(ChannelId(0), CloseReason::ClosedByPeer)]);
}

/// Both stop, and the one that is continued first must not blame the other for its own absence.
#[test]
fn ones_own_pause_is_not_the_peers_silence() {
    let mut w = running_pair(30);
    w.sides[1].paused = true;
    w.run_for(ms(20)); // its last beat is taken in
    w.sides[0].paused = true;
    w.run_for(ms(4800));
    w.sides[0].paused = false;
    w.run_for(ms(150));
    assert_eq!(w.count(0, "peer-silent"), 0);
    w.run_for(ms(1000));
    assert_eq!(w.count(0, "peer-silent"), 1);
    assert_eq!(w.count(0, "peer-gone"), 0);
    w.sides[1].paused = false;
    w.run_for(ms(100));
    assert_eq!(w.count(0, "peer-back"), 1);
    assert_eq!(w.count(1, "peer-silent"), 0);
}

#[test]
fn corrupt_data_left_over_from_an_ended_life_does_not_end_the_present_one() {
    let mut w = running_pair(24);
    w.session(0).corrupt(ChannelId(5));
    w.sides[0].drains = false;
    w.link_down();
    w.link_up();
    w.run_for(ms(20));
    w.session(0).corrupt(ChannelId(0));
    assert!(w.run_until(w.now + ms(1000), World::is_settled));
    w.run_for(ms(1000));
    assert_eq!(w.count(0, "peer-gone") + w.count(1, "peer-gone"), 0);
}

#[test]
fn a_killed_peer_is_given_up_and_its_successor_welcomed() {
    let mut w = running_pair(5);
    w.kill(1);
    w.run_for(ms(300));
    assert_eq!(w.count(0, "peer-silent"), 1);
    w.run_for(ms(6000));
    assert_eq!(w.state(0), SessionState::PeerGone);
    assert_eq!(w.count(0, "peer-gone"), 1);
    assert_eq!(w.sides[0].downs.len(), 1);
    assert_eq!(w.sides[0].downs[0].1, CloseReason::PeerGone);
    let puts = w.sides[0].puts;
    w.run_for(ms(5000));
    assert_eq!(w.sides[0].puts, puts, "stores into a window without a peer");
    w.start(1);
    w.run_to_running(ms(1000));
    assert_eq!(w.count(0, "peer-restarted"), 1);
    assert_eq!(w.count(0, "running"), 2);
    w.run_for(ms(50));
    w.assert_channels_match();
}

#[test]
fn a_quick_restart_is_noticed_as_such_within_a_second() {
    for survivor in 0..2 {
        let mut w = running_pair(6);
        w.kill(1 - survivor);
        w.new_memory(1 - survivor);
        w.start(1 - survivor);
        let now = w.now;
        w.run_for(ms(1));
        assert!(w.run_until(now + ms(1000), World::is_settled));
        assert_eq!(w.sides[survivor].downs[0].1, CloseReason::PeerRestarted);
        assert_eq!(w.count(survivor, "peer-restarted"), 1);
        assert_eq!(w.count(survivor, "peer-gone"), 0);
        w.assert_channels_match();
    }
}

#[test]
fn a_pause_is_not_a_death() {
    let mut w = running_pair(7);
    w.sides[1].paused = true;
    w.run_for(ms(3000));
    assert_eq!(w.count(0, "peer-silent"), 1);
    w.sides[1].paused = false;
    w.run_for(ms(100));
    assert_eq!(w.count(0, "peer-back"), 1);
    assert_eq!(w.state(0), SessionState::Running);
    assert_eq!(w.count(0, "running"), 1);
    assert_eq!(
        w.count(1, "peer-silent"),
        0,
        "its own pause is not the peer's silence"
    );
}

#[test]
fn silent_for_a_minute_and_back() {
    let mut w = running_pair(8);
    w.sides[1].paused = true;
    w.run_for(ms(60_000));
    assert_eq!(w.count(0, "peer-silent"), 1);
    assert_eq!(w.count(0, "peer-gone"), 1);
    w.sides[1].paused = false;
    w.run_to_running(ms(1000));
    w.run_for(ms(100));
    assert_eq!(w.count(0, "peer-restarted"), 0, "the same incarnation");
    assert_eq!(w.count(0, "running"), 2);
    assert_eq!(w.count(1, "running"), 2);
    assert_eq!(w.sides[1].downs.last().unwrap().1, CloseReason::PeerGone);
    w.assert_channels_match();
}

#[test]
fn all_ones_for_five_seconds_mean_nothing() {
    let mut w = running_pair(9);
    w.all_ones(true);
    w.run_for(ms(4900));
    assert_eq!(w.count(0, "peer-silent"), 1);
    assert_eq!(w.sides[0].downs, []);
    w.all_ones(false);
    w.run_for(ms(100));
    assert_eq!(w.count(0, "peer-back"), 1);
    let mut w = World::new(10);
    w.all_ones(true);
    w.start(0);
    w.start(1);
    w.run_for(ms(4000));
    assert!(w.state(0) < SessionState::Verified);
    w.all_ones(false);
    w.run_to_running(ms(500));
}

#[test]
fn flaps_within_a_millisecond_are_counted_and_reconnect_once() {
    for flaps in 1..=4 {
        let mut w = running_pair(11);
        for _ in 0..flaps {
            w.link_down();
            w.link_up();
        }
        let now = w.now;
        w.run_for(ms(1));
        assert!(w.run_until(now + ms(1000), World::is_settled));
        w.run_for(ms(1000));
        for side in 0..2 {
            let losses: Vec<u64> = w.sides[side]
                .events
                .iter()
                .filter_map(|e| match e {
                    Event::LinkLost { losses } => Some(*losses),
                    _ => None,
                })
                .collect();
            assert_eq!(losses, [flaps]);
            assert_eq!(w.count(side, "running"), 2);
            assert_eq!(w.sides[side].downs.len(), 1);
            assert_eq!(w.sides[side].downs[0].1, CloseReason::LinkLost);
        }
        w.assert_channels_match();
    }
}

#[test]
fn a_link_that_stays_down_is_waited_for() {
    let mut w = running_pair(12);
    w.link_down();
    w.run_for(ms(10_000));
    assert_eq!(w.state(0), SessionState::LinkLost);
    assert_eq!(w.count(0, "link-lost"), 1);
    assert!(w.count(0, "waiting") >= 9);
    w.link_up();
    w.run_to_running(ms(500));
}

#[test]
fn goodbye_ends_the_peers_channels_in_order() {
    let mut w = running_pair(13);
    let mut actions = Vec::new();
    w.session(1).shutdown(&mut actions);
    w.carry_out(1, actions);
    w.run_for(ms(5));
    w.kill(1);
    w.run_for(ms(100));
    assert_eq!(w.sides[0].downs[0].1, CloseReason::ClosedByPeer);
    assert!(
        w.sides[0]
            .events
            .contains(&Event::PeerGone(CloseReason::ClosedByPeer))
    );
    assert_eq!(w.count(0, "peer-silent"), 0);
    w.start(1);
    w.run_to_running(ms(1000));
}

#[test]
fn a_goodbye_is_heard_though_the_link_falls_with_it() {
    let mut w = running_pair(14);
    let mut actions = Vec::new();
    w.session(1).shutdown(&mut actions);
    w.carry_out(1, actions);
    w.sides[0].paused = true;
    w.run_for(ms(5));
    w.kill(1);
    w.link_down();
    w.sides[0].paused = false;
    w.run_for(ms(5));
    assert_eq!(w.sides[0].downs, [(ChannelId(0), CloseReason::ClosedByPeer)]);
    assert_eq!(w.state(0), SessionState::LinkLost);
}

#[test]
fn corrupt_data_ends_the_life_for_both_and_is_held_off() {
    let mut w = running_pair(15);
    w.session(0).corrupt(ChannelId(0));
    w.run_for(ms(50));
    for side in 0..2 {
        assert_eq!(w.sides[side].downs[0].1, CloseReason::Corrupt);
        assert!(
            w.sides[side]
                .events
                .contains(&Event::PeerGone(CloseReason::Corrupt))
        );
        assert_eq!(w.count(side, "running"), 1, "before the hold is over");
    }
    assert!(w.run_until(w.now + ms(1000), World::is_settled));
    w.session(0).corrupt(ChannelId(0));
    w.run_for(ms(150));
    assert_eq!(w.count(0, "running"), 2, "the second hold is longer");
    assert!(w.run_until(w.now + ms(1000), World::is_settled));
    w.assert_channels_match();
}

fn refusal(w: &World, side: usize) -> Vec<Mismatch> {
    let refused = w.sides[side].events.iter().find_map(|e| match e {
        Event::Refused(list) => Some(list.clone()),
        _ => None,
    });
    refused.unwrap_or_else(|| panic!("{:?}", w.sides[side].events))
}

#[test]
fn versions_without_overlap_name_both_and_store_nothing() {
    let mut w = World::new(16);
    w.sides[1].tweak = |own| own.versions = (2, 3);
    w.start(0);
    w.start(1);
    w.run_for(ms(20_000));
    for side in 0..2 {
        assert_eq!(w.state(side), SessionState::Refused);
        assert_eq!(w.count(side, "refused"), 1);
        assert_eq!(w.sides[side].puts, 0);
    }
    let text = refusal(&w, 0)[0].to_string();
    assert_eq!(text, "wire version: ours 1, theirs 2 to 3");
    w.kill(1);
    w.sides[1].tweak = |_| {};
    w.start(1);
    w.run_to_running(ms(1000));
}

#[test]
fn an_overlap_of_versions_is_enough() {
    let mut w = World::new(17);
    w.sides[1].tweak = |own| own.versions = (1, 2);
    w.start(0);
    w.start(1);
    w.run_to_running(ms(1000));
}

#[test]
fn layouts_that_differ_are_listed_with_both_values() {
    let mut w = World::new(18);
    w.sides[1].tweak = |own| {
        own.items[2] = 128;
        own.items[5] = 7;
    };
    w.start(0);
    w.start(1);
    w.run_for(ms(3000));
    for (side, texts) in [
        (
            0,
            [
                "channels of the table: ours 64, theirs 128",
                "check: ours 1, theirs 7",
            ],
        ),
        (
            1,
            [
                "channels of the table: ours 128, theirs 64",
                "check: ours 7, theirs 1",
            ],
        ),
    ] {
        assert_eq!(w.state(side), SessionState::Refused);
        let list: Vec<String> = refusal(&w, side).iter().map(Mismatch::to_string).collect();
        assert_eq!(list, texts);
        assert_eq!(w.count(side, "refused"), 1);
        assert_eq!(w.count(side, "running"), 0);
    }
}

#[test]
fn features_that_are_not_understood_are_refused_on_both_sides() {
    let mut w = World::new(19);
    w.sides[1].tweak = |own| {
        own.required = 4;
        own.understood = 4;
    };
    w.start(0);
    w.start(1);
    w.run_for(ms(1000));
    assert_eq!(
        refusal(&w, 0)[0].to_string(),
        "features: ours understood 0x0, theirs required 0x4"
    );
    assert_eq!(
        refusal(&w, 1)[0].to_string(),
        "features: ours required 0x4, theirs understood 0x0"
    );
}

#[test]
fn memory_that_cannot_be_reached_is_refused_on_both_sides() {
    let mut w = World::new(20);
    w.sides[0].reach = 1000;
    w.start(0);
    w.start(1);
    w.run_for(ms(1000));
    assert!(refusal(&w, 0)[0].to_string().contains("1000 can be reached"));
    assert_eq!(refusal(&w, 1)[0].item, "agreement");
}

#[test]
fn unread_messages_hold_up_the_next_life_until_drained_or_timed_out() {
    let mut w = running_pair(21);
    w.sides[0].drains = false;
    let now = w.now;
    w.link_down();
    w.link_up();
    w.run_for(ms(150));
    assert!(w.state(0) < SessionState::Verified, "{:?}", w.state(0));
    assert!(
        w.state(1) < SessionState::Verified,
        "patterns over unread messages"
    );
    assert!(w.run_until(now + ms(1000), World::is_settled));
    assert!(w.now >= now + ms(200));
    assert_eq!(w.sides[0].drains_ended, [ChannelId(0)]);
    let now = w.now;
    w.link_down();
    w.link_up();
    w.run_for(ms(20));
    w.session(0).reader_drained(ChannelId(0));
    assert!(w.run_until(now + ms(1000), World::is_settled));
    assert!(w.now < now + ms(150));
    assert_eq!(w.sides[0].drains_ended, [ChannelId(0)]);
}

#[test]
fn slow_wires_work_too() {
    for delay in [ms(5), ms(40), ms(150)] {
        let mut w = World::new(22);
        w.faults = Faults {
            delay,
            ..Faults::default()
        };
        w.start(0);
        w.start(1);
        w.open(0, "a", spec());
        w.open(1, "a", spec());
        assert!(w.run_until(ms(10_000), World::is_settled), "{delay:?}");
        assert_eq!(w.count(0, "running"), 1);
        w.run_for(Duration::from_secs(3));
        assert_eq!(w.count(0, "peer-silent"), 0);
    }
}

#[test]
fn windows_that_are_too_small_or_too_large_are_refused_at_once() {
    let config = || SessionConfig::new("n", 1, 2, crate::link::engine::Order::Ordered);
    for lines in [0, 1, 256, 319, 1 << 39, u64::MAX] {
        assert!(matches!(
            Session::new(config(), lines),
            Err(OpenError::BadWindow { lines: l, .. }) if l == lines
        ));
    }
    assert!(Session::new(config(), 320).is_ok());
}
