//! Random deaths, restarts, flaps, losses, delays and scribbles; the world checks its rules on every action.

use super::{
    super::*,
    world::{Faults, LINES, World, ms},
};

fn open_all(w: &mut World) {
    for (name, ring_lines) in [("a", 64), ("b", 4), ("c", 256)] {
        for side in 0..2 {
            let spec = ChannelSpec {
                ring_lines,
                check: ring_lines == 4,
                smaller_if_different: false,
            };
            w.open(side, name, spec);
        }
    }
}

/// One random thing happens.
fn disturb(w: &mut World) {
    let side = w.dice.below(2) as usize;
    match w.dice.below(16) {
        0 | 1 => {
            if w.sides[side].session.is_some() {
                w.kill(side);
            }
        }
        2..=4 => {
            if w.sides[side].session.is_none() {
                if w.dice.chance(50) {
                    w.new_memory(side);
                }
                w.start(side);
            }
        }
        5 => w.link_down(),
        6 | 7 => w.link_up(),
        8 => {
            w.faults = Faults {
                delay: ms(w.dice.below(20)),
                scramble: w.dice.chance(50),
                lost: w.dice.below(30),
            };
        }
        9 => w.sides[side].paused = !w.sides[side].paused,
        10 => w.sides[side].drains = !w.sides[side].drains,
        11 => {
            w.link_down();
            w.link_up();
        }
        12 => {
            w.link_down();
            w.link.state = LinkState::CableUp;
        }
        13 | 14 => {
            if w.sides[side].session.is_some() {
                let at = w.dice.below(3) as usize;
                w.reopen(side, at);
            }
        }
        _ => {
            let up: Vec<ChannelId> = w.sides[side].up.keys().copied().collect();
            if let Some(id) = up.first()
                && w.sides[side].session.is_some()
            {
                w.session(side).corrupt(*id);
            }
        }
    }
}

fn calm(w: &mut World) {
    w.faults = Faults {
        delay: Duration::from_micros(1),
        ..Faults::default()
    };
    for side in 0..2 {
        w.sides[side].paused = false;
        w.sides[side].transmit_dead = false;
        if w.sides[side].session.is_none() {
            w.start(side);
        }
    }
    w.link_up();
    w.run_for(ms(25)); // what is still on its way arrives
    w.run_to_running(ms(20_000));
    w.run_for(ms(100)); // closed channels are acknowledged, so that there is room
    for side in 0..2 {
        w.open_missing(side);
    }
}

#[test]
fn whatever_happens_both_sides_run_again() {
    let mut reasons = std::collections::HashMap::new();
    let mut told = std::collections::HashMap::new();
    for seed in 0..400 {
        let mut w = World::new(seed);
        if seed % 2 == 1 {
            w.patience = (ms(60), ms(300));
        }
        w.start(0);
        w.start(1);
        open_all(&mut w);
        for _ in 0..60 {
            let pause = if w.dice.chance(10) { 400 } else { 12 };
            let pause = w.dice.below(pause);
            w.run_for(ms(pause));
            disturb(&mut w);
        }
        calm(&mut w);
        let end = w.now + ms(15_000);
        let settled = w.run_until(end, World::is_settled);
        assert!(settled, "seed {seed}: {:?} {:?}", w.state(0), w.state(1));
        w.run_for(ms(1000));
        assert!(w.is_settled(), "seed {seed} does not stay settled");
        w.assert_channels_match();
        for side in &w.sides {
            for (_, reason) in &side.downs {
                *reasons.entry(reason.name()).or_insert(0) += 1;
            }
            for event in &side.events {
                *told.entry(event.name()).or_insert(0) += 1;
            }
        }
    }
    // The disturbances reach every way in which a life can end.
    for reason in [
        "closed-by-peer",
        "peer-gone",
        "peer-restarted",
        "link-lost",
        "corrupt-peer-data",
    ] {
        assert!(
            reasons.get(reason).is_some_and(|n| *n >= 20),
            "{reason}: {reasons:?}"
        );
    }
    for event in [
        "running",
        "peer-restarted",
        "peer-gone",
        "link-lost",
        "peer-silent",
    ] {
        assert!(told.get(event).is_some_and(|n| *n >= 3), "{event}: {told:?}");
    }
}

/// Two sides that restart against each other at every short interval still settle.
#[test]
fn restarts_in_lockstep_settle() {
    for seed in 0..100 {
        let mut w = World::new(seed);
        w.start(0);
        w.start(1);
        open_all(&mut w);
        for _ in 0..40 {
            let pause = Duration::from_micros(w.dice.below(3000));
            w.run_for(pause);
            let side = w.dice.below(2) as usize;
            w.kill(side);
            w.start(side);
        }
        assert!(w.run_until(w.now + ms(1000), World::is_settled), "seed {seed}");
        w.assert_channels_match();
    }
}

/// A peer that stores random bytes anywhere, among them records that are sealed right.
#[test]
fn random_bytes_everywhere_never_panic_and_never_stop_the_next_peer() {
    for seed in 0..40 {
        let mut w = World::new(seed);
        w.start(0);
        w.start(1);
        open_all(&mut w);
        w.run_for(ms(w.now.as_millis() as u64 % 40));
        for _ in 0..200 {
            for _ in 0..200 {
                let near = if w.dice.chance(70) { 256 * 8 } else { LINES * 8 };
                let (word, value) = (w.dice.below(near) as usize, w.dice.next());
                let value = if w.dice.chance(20) { u64::MAX } else { value };
                w.sides[0].memory.store(word, value);
            }
            let at = w.dice.below(8) as usize;
            w.sides[0].registers[at] = w.dice.next() as u32;
            w.run_for(ms(1));
        }
        w.kill(1);
        w.run_for(ms(6000));
        w.start(1);
        assert!(w.run_until(w.now + ms(5000), World::is_settled), "seed {seed}");
        w.assert_channels_match();
    }
}

/// The fuzz target on random data, which gets as far as channels that work.
#[test]
fn arbitrary_inputs_keep_every_promise() {
    let mut up = 0;
    for seed in 0..1500 {
        let mut dice = super::world::Dice::new(seed);
        let data: Vec<u8> = (0..4000).map(|_| dice.next() as u8).collect();
        up += fuzz(&data);
    }
    assert!(up >= 20, "{up} channels came up");
}
