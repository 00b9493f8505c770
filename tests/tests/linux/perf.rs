use std::time::Duration;

use ntb_emu::model::Action;
use ntb_linux::perf::{Perf, Step};

use crate::rig::{Bridges, FAMILIES, WINDOW, every, until};

fn ready(sides: &mut [Perf; 2], what: &str) {
    until(what, || every(sides, |side| side.poll().unwrap() == Step::Ready));
}

#[test]
fn both_sides_write_to_each_other() {
    for family in FAMILIES {
        let bridges = Bridges::new(family);
        let mut sides = [0, 1].map(|side| Perf::open(&bridges.port(side), WINDOW).unwrap());
        ready(&mut sides, family);
        for from in [0, 1] {
            // More than a lap: the last bytes written are at the front again.
            let total = WINDOW + 3000;
            let byte = |at: u64| (at % 251) as u8 + 1;
            let done = sides[from]
                .transfer(total, 10_000, |done, part| {
                    for (i, slot) in part.iter_mut().enumerate() {
                        *slot = byte(done + i as u64);
                    }
                })
                .unwrap();
            assert_eq!(done.bytes, total);
            let to = &sides[1 - from];
            assert_eq!(to.received(), (WINDOW, WINDOW / 64), "{family}");
            let mut seen = vec![0; 5000];
            to.exposed(0, &mut seen).unwrap();
            let expected = (0..5000).map(|at| byte(if at < 3000 { WINDOW + at } else { at }));
            assert!(expected.eq(seen.iter().copied()), "{family}: bytes as written");
            assert!(to.exposed(WINDOW as usize - 4999, &mut seen).is_none());
        }
        assert_eq!(sides.iter().map(Perf::unknown_commands).sum::<u64>(), 0);
    }
}

#[test]
fn a_lost_link_ends_a_transfer_and_the_next_one_begins_anew() {
    let bridges = Bridges::new("intel-spr");
    let mut sides = [0, 1].map(|side| Perf::open(&bridges.port(side), WINDOW).unwrap());
    ready(&mut sides, "first");
    bridges.control().act(Action::LinkDown);
    until("the loss is seen", || {
        every(&mut sides, |side| side.poll().unwrap() == Step::Link)
    });
    let error = sides[0].transfer(100, 100, |_, _| {}).unwrap_err();
    assert_eq!(error.name(), "connection-down");
    bridges.control().act(Action::LinkUp);
    ready(&mut sides, "second");
    sides[0].transfer(64, 64, |_, part| part.fill(1)).unwrap();
    assert_eq!(sides[1].received().1, 1);
}

/// Scratchpads that say what no peer means.
#[test]
fn commands_that_are_none_are_counted_and_too_much_memory_is_refused() {
    let bridges = Bridges::new("intel-spr");
    let mut side = Perf::open(&bridges.port(0), WINDOW).unwrap();
    let hostile = bridges.port(1);
    hostile.enable_link().unwrap();
    until("the link", || side.poll().unwrap() == Step::Size);
    // Commands of the downstream port are in the second mailbox.
    for (index, value) in [(4, 7), (5, 0), (3, 9)] {
        hostile.set_peer_scratchpad(index, value).unwrap();
    }
    until("it is counted", || {
        side.poll().unwrap();
        side.unknown_commands() == 1
    });
    for (index, value) in [(4, 0), (5, 1 << 20), (3, 0)] {
        hostile.set_peer_scratchpad(index, value).unwrap();
    }
    let mut refusal = None;
    until("it is refused", || {
        refusal = side.poll().err();
        refusal.is_some()
    });
    let refusal = refusal.unwrap();
    assert_eq!((refusal.name(), refusal.class().code()), ("too-much-memory", 6));
}

#[test]
fn nobody_there_is_said_in_words() {
    let bridges = Bridges::new("amd");
    let mut side = Perf::open(&bridges.port(0), WINDOW).unwrap();
    let error = side.connect(Duration::from_millis(50)).unwrap_err();
    assert_eq!((error.name(), error.class().code()), ("no-peer", 4));
    assert!(error.to_string().contains("link is down"), "{error}");
}
