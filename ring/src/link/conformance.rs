//! What every link has to do, as tests that run on any of them: a [`Rig`] makes two ends and can break what joins them;
//! [`link_conformance!`](crate::link_conformance) makes a test of each rule.
//!
//! No test waits a fixed time or asserts an upper bound; [`WATCHDOG`] ends one that hangs.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use ntb_mem::line::Line;

use super::{
    DOORBELLS, Link, LinkState, LinkStatus, REGISTERS,
    engine::{Inbound, StoreEngine},
};

/// Longest time that anything may take.
pub const WATCHDOG: Duration = Duration::from_secs(30);

/// Two ends of a link and what joins them.
pub trait Rig {
    /// The end that stays.
    fn near(&mut self) -> &mut dyn Link;
    /// The other end; `None` while it is lost.
    fn far(&mut self) -> Option<&mut dyn Link>;
    /// Loses the link, as abruptly as the transport can: one loss.
    fn lose(&mut self);
    /// Lets it return, with the same far end or a new one.
    fn restore(&mut self);
}

/// Polls both ends until `done`.
pub fn drive(rig: &mut dyn Rig, what: &str, mut done: impl FnMut(&mut dyn Rig) -> bool) {
    within_watchdog(what, || done(rig));
}

/// Calls `done` until it says so.
#[track_caller]
pub fn until(done: impl FnMut() -> bool) {
    within_watchdog("see the line", done);
}

#[track_caller]
fn within_watchdog(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < WATCHDOG, "never happened: {what}");
        std::thread::yield_now();
    }
}

fn status(link: &mut dyn Link) -> LinkStatus {
    link.poll().expect("no error is final here")
}

fn both_up(rig: &mut dyn Rig) -> bool {
    let near = status(rig.near()).state;
    let far = rig.far().map(|far| status(far).state);
    near == LinkState::WindowsSet && far == Some(LinkState::WindowsSet)
}

fn bring_up(rig: &mut dyn Rig) {
    drive(rig, "both ends up", both_up);
}

fn bring_down(rig: &mut dyn Rig) {
    rig.lose();
    drive(rig, "loss noticed", |rig| {
        status(rig.near()).state < LinkState::WindowsSet
    });
}

/// Runs `f` on the near and the far end, then the other way round.
fn both_ways(rig: &mut dyn Rig, f: impl Fn(&mut dyn FnMut(Side, &mut dyn FnMut(&mut dyn Link)))) {
    for swapped in [false, true] {
        f(&mut |side, g| match (side == Side::To) ^ swapped {
            false => g(rig.near()),
            true => g(rig.far().expect("the far end is up")),
        });
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Side {
    From,
    To,
}

/// Registers are zero at first, arrive whole, and read as all ones while the link is down.
pub fn registers(rig: &mut dyn Rig) {
    bring_up(rig);
    both_ways(rig, |on| {
        on(Side::To, &mut |to| assert_eq!(to.registers(), [0; REGISTERS]));
        for round in [1u32, 0xffff_ffff, 7] {
            let written = std::array::from_fn(|i| round.wrapping_mul(i as u32 + 1));
            on(Side::From, &mut |from| from.write_registers(&written));
            let start = Instant::now();
            let mut seen = [0; REGISTERS];
            while seen != written {
                assert!(start.elapsed() < WATCHDOG, "{seen:x?} instead of {written:x?}");
                on(Side::To, &mut |to| {
                    status(to);
                    seen = to.registers();
                });
            }
        }
    });
    bring_down(rig);
    assert_eq!(rig.near().registers(), [u32::MAX; REGISTERS], "while it is down");
    rig.near().write_registers(&[3; REGISTERS]); // vanishes
    rig.restore();
    bring_up(rig);
    assert_eq!(rig.near().registers(), [0; REGISTERS], "of an earlier connection");
    let far = rig.far().expect("the far end is up");
    assert_eq!(far.registers(), [0; REGISTERS], "of an earlier connection");
}

fn pattern(line: u64, round: u64) -> Line {
    Line(std::array::from_fn(|i| {
        (line << 32 | round << 8 | i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
    }))
}

fn wait_for(link: &mut dyn Link, line: u64, content: &Line) {
    let view = link.inbound();
    let start = Instant::now();
    while Inbound::load_line(&view, line) != *content {
        assert!(start.elapsed() < WATCHDOG, "line {line} never arrived");
        status(link);
    }
}

/// Lines and runs of bytes arrive where they were put, at both ends of the memory, and nowhere else.
pub fn windows(rig: &mut dyn Rig) {
    bring_up(rig);
    both_ways(rig, |on| {
        let (mut engine, mut lines) = (None, 0);
        on(Side::From, &mut |from| engine = from.outbound());
        on(Side::To, &mut |to| lines = to.inbound().lines());
        let mut engine = engine.expect("an engine onto the peer's memory");
        on(Side::From, &mut |from| assert_eq!(from.order(), engine.order()));
        assert_eq!(engine.lines(), lines);
        for line in [0, 1, lines / 2, lines - 1] {
            let content = pattern(line, 1);
            engine.put(line, &content);
            engine.flush();
            on(Side::To, &mut |to| wait_for(to, line, &content));
        }
        let bytes: Vec<u8> = (0..200u8).collect();
        engine.put_bytes(8, &bytes);
        engine.barrier();
        engine.put(7, &pattern(7, 2));
        engine.flush();
        on(Side::To, &mut |to| {
            wait_for(to, 11, &Line::from_bytes(&bytes[192..]));
            wait_for(to, 7, &pattern(7, 2));
            let mut out = vec![0xff; 256 + 64];
            Inbound::copy_out(&to.inbound(), 8 * 64, &mut out);
            assert_eq!(out[..200], bytes[..]);
            assert!(out[200..].iter().all(|b| *b == 0), "bytes past the run");
        });
    });
}

/// A ring wakes the one doorbell that was rung; numbers that there are not ring nothing.
pub fn doorbells(rig: &mut dyn Rig) {
    bring_up(rig);
    both_ways(rig, |on| {
        let mut bells = Vec::new();
        on(Side::To, &mut |to| {
            bells = (0..DOORBELLS).map(|n| to.doorbell(n)).collect();
        });
        let (mut beyond, mut distinct) = (None, 0);
        on(Side::To, &mut |to| {
            beyond = Some(to.doorbell(DOORBELLS + 5));
            distinct = to.distinct_doorbells();
        });
        let shared = |number: u32| number == 0 || number >= distinct;
        for number in (0..DOORBELLS).rev() {
            on(Side::From, &mut |from| {
                for unknown in [DOORBELLS, DOORBELLS + 1, u32::MAX] {
                    from.ring(unknown);
                }
                from.ring(number);
                from.ring(number);
            });
            let bell = if number == 0 {
                beyond.as_ref()
            } else {
                bells.get(number as usize)
            };
            assert!(
                bell.expect("all are there").wait(WATCHDOG),
                "doorbell {number} never rang"
            );
            // Rings come in the order they are made, so that others would be there by now; on links that do not join
            // rings, the second one of this number, or of the number before, may only just have come.
            for (other, bell) in bells.iter().enumerate() {
                let one = shared(number) && shared(other as u32);
                assert!(
                    other == number as usize || bell.take() == one || other == number as usize + 1,
                    "doorbell {other} rang, or did not, for {number}"
                );
            }
            while bells[number as usize].take() {}
        }
    });
}

/// A loss is counted once, and the link returns as it was.
pub fn loss_and_return(rig: &mut dyn Rig) {
    bring_up(rig);
    let inbound = rig.near().inbound().as_ptr();
    for losses in 1..=3 {
        bring_down(rig);
        assert_eq!(status(rig.near()).losses, losses);
        assert!(rig.near().outbound().is_none());
        rig.near().ring(0); // vanishes
        rig.restore();
        bring_up(rig);
        assert_eq!(status(rig.near()).losses, losses);
        assert_eq!(rig.near().inbound().as_ptr(), inbound, "its own memory stays");
        let content = pattern(3, losses);
        let mut engine = rig.far().expect("up").outbound().expect("an engine");
        engine.put(3, &content);
        engine.flush();
        wait_for(rig.near(), 3, &content);
    }
}

/// Losses that nobody looked at in between are all counted.
pub fn flaps(rig: &mut dyn Rig) {
    bring_up(rig);
    for _ in 0..5 {
        rig.lose();
        rig.restore();
        bring_up(rig);
    }
    assert_eq!(status(rig.near()).losses, 5);
}

/// An engine outlives the loss; what it stores goes nowhere, and above all not to the next peer.
pub fn engines_survive(rig: &mut dyn Rig) {
    bring_up(rig);
    let mut old = rig.near().outbound().expect("an engine");
    old.put(5, &pattern(5, 1));
    old.flush();
    wait_for(rig.far().expect("up"), 5, &pattern(5, 1));
    bring_down(rig);
    let lines = old.lines();
    for line in [5, 0, lines - 1] {
        old.put(line, &pattern(line, 2));
    }
    old.put_bytes(6, &[0xaa; 130]);
    old.barrier();
    old.flush();
    rig.restore();
    bring_up(rig);
    old.put(5, &pattern(5, 3));
    old.flush();
    let mut new = rig.near().outbound().expect("an engine");
    new.put(9, &pattern(9, 4));
    new.flush();
    let far = rig.far().expect("up");
    wait_for(far, 9, &pattern(9, 4));
    let seen = Inbound::load_line(&far.inbound(), 5);
    assert!(seen == Line::ZERO || seen == pattern(5, 1), "{seen:?}");
    assert_eq!(far.inbound().load(6 * 8, Ordering::Acquire), 0);
}

/// A sleeping service thread wakes by doorbell 0, and by the loss of the link.
pub fn waiting(rig: &mut dyn Rig) {
    bring_up(rig);
    // Nothing pending may be left that would end the wait by itself.
    while rig.near().doorbell(0).take() {}
    rig.far().expect("up").ring(0);
    let start = Instant::now();
    rig.near().wait(WATCHDOG);
    assert!(start.elapsed() < WATCHDOG, "doorbell 0 did not wake");
    assert!(!rig.near().doorbell(0).take(), "the ring was left behind");
    rig.lose();
    drive(rig, "woken by the loss", |rig| {
        rig.near().wait(WATCHDOG);
        status(rig.near()).state < LinkState::WindowsSet
    });
    assert!(start.elapsed() < WATCHDOG, "the loss did not wake");
}

/// Makes a test of each rule, on rigs made by `$make`.
#[doc(hidden)]
#[macro_export]
macro_rules! link_conformance {
    ($make:expr) => {
        $crate::link_conformance!(@ $make, registers, windows, doorbells, loss_and_return, flaps, engines_survive, waiting);
    };
    (@ $make:expr, $($rule:ident),*) => {
        $(#[test]
        fn $rule() {
            $crate::link::conformance::$rule(&mut $make);
        })*
    };
}
