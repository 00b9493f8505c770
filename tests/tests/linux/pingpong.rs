use std::time::Duration;

use ntb_emu::model::Action;
use ntb_linux::pingpong::PingPong;

use crate::rig::{Bridges, FAMILIES, every, until};

const PAUSE: Duration = Duration::from_millis(2);

#[test]
fn counts_advance_on_both_sides() {
    for family in FAMILIES {
        let bridges = Bridges::new(family);
        let mut sides = [0, 1].map(|side| PingPong::open(&bridges.port(side), PAUSE).unwrap());
        let mut last = [None; 2];
        until(family, || {
            for (side, last) in sides.iter_mut().zip(&mut last) {
                *last = side.poll().unwrap().or(*last);
            }
            last.iter().all(|pong| pong.is_some_and(|pong| pong.heard >= 10))
        });
        for pong in last.into_iter().flatten() {
            // Both begin, and each answers: the peer's count is never far from this side's.
            assert!(pong.value.abs_diff(pong.heard) <= 10, "{family}: {pong:?}");
        }
    }
}

#[test]
fn the_game_goes_on_after_the_cable_was_pulled() {
    let bridges = Bridges::new("intel-spr");
    let mut sides = [0, 1].map(|side| PingPong::open(&bridges.port(side), PAUSE).unwrap());
    let play = |sides: &mut [PingPong; 2], rings: u32| {
        let mut heard = [0; 2];
        until("rings", || {
            for (side, heard) in sides.iter_mut().zip(&mut heard) {
                *heard += u32::from(side.poll().unwrap().is_some());
            }
            heard.iter().all(|heard| *heard >= rings)
        });
    };
    play(&mut sides, 5);
    bridges.control().act(Action::LinkDown);
    until("the loss is seen", || {
        every(&mut sides, |side| {
            side.poll().unwrap();
            !side.is_up()
        })
    });
    assert!(sides[0].missing().contains("link is down"));
    bridges.control().act(Action::LinkUp);
    play(&mut sides, 5);
}
