//! What scenarios do to a running pair.

#[path = "common/bench.rs"]
mod bench;

use std::time::{Duration, Instant};

use bench::{
    Access::{R, W},
    Bench, bar_at, byte, enable_gen4, probe_gen4, run,
};
use ntb_emu::{
    model::{DmaAccess, IrqKind, PairConfig, SideId, SideId::A, SideId::B},
    scenario::{parse, parse_action},
};
use ntb_mem::region::Region;
use rustix::{
    event::{EventfdFlags, eventfd},
    io::Errno,
};

const PATIENCE: Duration = Duration::from_secs(30);

fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < PATIENCE, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A running pair with this scenario; the link interrupts are taken.
fn up(scenario: &str, seed: u64) -> Bench {
    let config = PairConfig {
        steps: parse(scenario).unwrap(),
        seed,
        ..PairConfig::default()
    };
    let bench = Bench::with("intel-spr", config);
    probe_gen4(&bench, A, 0x0200);
    probe_gen4(&bench, B, 0x4200);
    for side in SideId::BOTH {
        enable_gen4(&bench, side);
    }
    for side in SideId::BOTH {
        clear_link(&bench, side);
        let _ = bench.fired(side);
    }
    bench
}

fn clear_link(bench: &Bench, side: SideId) {
    bench.w(side, 0xB05A, 2, 0x100);
    bench.w(side, 0x40, 8, 1 << 32);
}

fn act(bench: &Bench, text: &str) {
    bench.pair.act(parse_action(text).unwrap());
}

fn link(bench: &Bench, side: SideId) -> u64 {
    bench.r(side, 0xB052, 2)
}

/// Memory of B behind window 0 of A.
fn window(bench: &Bench) -> Region {
    let region = bench.memory(B, 0x10_0000, 0x10_0000);
    run(
        bench,
        B,
        &[W(0x10, 8, 0x10_0000), W(0x18, 8, bar_at(B, 2) + 0x10_0000)],
    );
    region
}

fn store(bench: &Bench, at: u64, value: u8) {
    bench.port(A).bar_write(2, at, &[value; 64]);
}

#[test]
fn a_flap_is_seen_twice_by_both() {
    let bench = up("at 1ms link flap 5ms", 1);
    wait("the flap", || {
        let s = bench.pair.snapshot();
        s.a.link_downs == 1 && s.b.link_ups == 2
    });
    for side in SideId::BOTH {
        assert_eq!(link(&bench, side), 0x2104);
        // One edge of the latch: nobody has cleared it between.
        assert_eq!(bench.fired(side), [(32, 1)]);
    }
    assert_eq!(bench.pair.snapshot().actions, 1);
}

#[test]
fn timed_steps_repeat_as_often_as_they_say() {
    let bench = up("every 1ms..3ms x5 link width 8\nat 0 link speed 3", 7);
    wait("six actions", || bench.pair.snapshot().actions == 6);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(bench.pair.snapshot().actions, 6);
    for side in SideId::BOTH {
        assert_eq!(link(&bench, side), 0x2083, "the link stays up");
        assert_eq!(bench.fired(side), [], "without an interrupt");
    }
}

#[test]
fn steps_wait_for_counts_and_the_seed_decides() {
    let counts = |seed: u64| {
        let bench = up("after 10..60 writes a>b link down", seed);
        let n = (1..=60).find(|_| {
            store(&bench, 0, 1);
            link(&bench, A) == 0
        });
        n.unwrap()
    };
    let first: Vec<_> = (0..8).map(counts).collect();
    assert!(first.iter().all(|n| (10..=60).contains(n)));
    assert!(first.iter().any(|n| *n != first[0]), "the seed decides nothing");
    assert_eq!(first, (0..8).map(counts).collect::<Vec<_>>(), "not reproducible");
}

#[test]
fn one_direction_can_die() {
    let bench = up("", 0);
    let region = window(&bench);
    act(&bench, "dead a>b");
    store(&bench, 0, 1);
    run(
        &bench,
        A,
        &[
            W(0x8080, 4, 5),
            W(0x100, 4, 1),
            R(0x8080, 4, 0xFFFF_FFFF),
            R(0xB052, 2, 0x2104),
        ],
    );
    run(
        &bench,
        B,
        &[
            R(0x80, 4, 0),
            R(0x40, 8, 0),
            W(0x8080, 4, 6),
            R(0x8080, 4, 0xFFFF_FFFF),
        ],
    );
    run(&bench, A, &[R(0x80, 4, 6)]);
    assert_eq!(byte(&region, 0), 0);
    act(&bench, "alive a>b");
    store(&bench, 0, 1);
    assert_eq!(byte(&region, 0), 1);
    // Three posted, one read request, one completion.
    let s = bench.pair.snapshot();
    assert_eq!((s.a_to_b.lost_injected, s.b_to_a.lost_injected), (4, 0));
}

#[test]
fn delayed_writes_arrive_in_order_and_reads_push_them() {
    let bench = up("", 0);
    let region = window(&bench);
    act(&bench, "delay a>b 30s");
    store(&bench, 0, 1);
    run(&bench, A, &[W(0x8080, 4, 5), W(0x104, 4, 1)]);
    run(&bench, B, &[R(0x80, 4, 0), R(0x40, 8, 0)]);
    assert_eq!(byte(&region, 0), 0);
    run(&bench, A, &[R(0x8084, 4, 0)]);
    run(&bench, B, &[R(0x80, 4, 5), R(0x40, 8, 2)]);
    assert_eq!(byte(&region, 0), 1);
    act(&bench, "delay a>b 2ms");
    store(&bench, 64, 2);
    run(&bench, A, &[W(0x8080, 4, 6)]);
    act(&bench, "delay a>b 0");
    run(&bench, A, &[W(0x100, 4, 1)]); // behind the others, although nothing is delayed any more
    wait("the doorbell", || bench.r(B, 0x40, 8) == 3);
    assert_eq!(byte(&region, 64), 2);
    run(&bench, B, &[R(0x80, 4, 6)]);
    // What is on its way when the link goes is lost.
    act(&bench, "delay a>b 30s");
    store(&bench, 128, 3);
    act(&bench, "link down");
    act(&bench, "link up");
    act(&bench, "delay a>b 0");
    store(&bench, 192, 4);
    assert_eq!((byte(&region, 128), byte(&region, 192)), (0, 4));
    assert_eq!(bench.pair.snapshot().a_to_b.lost_link_down, 1);
}

#[test]
fn delayed_writes_do_not_use_up_memory() {
    let bench = up("", 0);
    let region = window(&bench);
    act(&bench, "delay a>b 86400s");
    for i in 0..150u8 {
        bench.port(A).bar_write(2, 0, &vec![i + 1; 1 << 19]);
    }
    let arrived = byte(&region, 0);
    assert!(
        (20..150).contains(&arrived),
        "{arrived} of 150 half-MiB writes have made room"
    );
}

#[test]
fn handshake_writes_are_lost_or_blanked() {
    let bench = up(
        "start spads a>b lose 1\nstart spads b>a ones 1\nstart doorbells a>b lose 1",
        0,
    );
    run(
        &bench,
        A,
        &[W(0x8080, 4, 1), W(0x8084, 4, 2), W(0x100, 4, 1), W(0x104, 4, 1)],
    );
    run(
        &bench,
        B,
        &[
            R(0x80, 4, 0),
            R(0x84, 4, 2),
            R(0x40, 8, 2),
            W(0x8080, 4, 3),
            W(0x8084, 4, 4),
        ],
    );
    run(&bench, A, &[R(0x80, 4, 0xFFFF_FFFF), R(0x84, 4, 4)]);
    let s = bench.pair.snapshot();
    assert_eq!((s.a_to_b.lost_injected, s.b_to_a.altered), (2, 1));
}

#[test]
fn held_lines_arrive_in_two_parts() {
    let bench = up("", 0);
    let region = window(&bench);
    act(&bench, "hold a>b 24 for 30s every 2");
    store(&bench, 0, 1);
    store(&bench, 64, 2);
    store(&bench, 128, 3); // overtakes the rest of the second
    assert_eq!((byte(&region, 0), byte(&region, 63)), (1, 1));
    assert_eq!(
        (byte(&region, 64), byte(&region, 87), byte(&region, 88)),
        (2, 2, 0)
    );
    assert_eq!(byte(&region, 191), 3);
    // What is not combined pushes it out first.
    run(&bench, A, &[W(0x100, 4, 1)]);
    run(&bench, B, &[R(0x40, 8, 1)]);
    assert_eq!(byte(&region, 127), 2);
    act(&bench, "hold a>b 60 for 1ms");
    store(&bench, 256, 4);
    wait("the rest", || byte(&region, 256 + 63) == 4);
    act(&bench, "hold a>b off");
    store(&bench, 512, 5);
    assert_eq!(byte(&region, 512 + 63), 5);
    assert_eq!(bench.pair.snapshot().a_to_b.held, 2);
}

#[test]
fn errors_are_reported_where_pcie_reports_them() {
    let bench = up("", 0);
    let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    bench
        .port(A)
        .set_vector(IrqKind::Error, 0, Some(event.try_clone().unwrap()))
        .unwrap();
    let events = || {
        let mut bytes = [0; 8];
        rustix::io::read(&event, &mut bytes).map_or(0, |_| u64::from_ne_bytes(bytes))
    };
    act(&bench, "error a correctable");
    assert_eq!(
        (events(), bench.cfg(A, 0x110, 4), bench.cfg(A, 0x4A, 2)),
        (0, 1 << 6, 1)
    );
    act(&bench, "error a nonfatal");
    assert_eq!(
        (events(), bench.cfg(A, 0x104, 4), bench.cfg(A, 0x4A, 2)),
        (1, 1 << 14, 3)
    );
    act(&bench, "error a fatal");
    assert_eq!(
        (events(), bench.cfg(A, 0x104, 4), bench.cfg(A, 0x4A, 2)),
        (1, 1 << 14 | 1 << 4, 7)
    );
    assert_eq!(bench.cfg(B, 0x104, 4), 0);
    bench.port(A).config_write(0x104, &(1u32 << 14).to_le_bytes());
    assert_eq!(bench.cfg(A, 0x104, 4), 1 << 4, "a one clears");
    bench.port(A).config_write(0x108, &(1u32 << 4).to_le_bytes());
    act(&bench, "error a fatal");
    assert_eq!(events(), 0, "masked");
    let request = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    bench
        .port(A)
        .set_vector(IrqKind::Request, 0, Some(request.try_clone().unwrap()))
        .unwrap();
    act(&bench, "request a");
    assert!(rustix::io::read(&request, &mut [0; 8]).is_ok());
}

#[test]
fn the_kth_mapping_is_refused() {
    let bench = up("start refuse-map b 3 ENOSPC", 0);
    let access = DmaAccess {
        read: true,
        write: true,
    };
    let results: Vec<_> = (0..5)
        .map(|i| bench.port(B).dma_map(i << 20, 4096, 0, access, None))
        .collect();
    assert_eq!(results, [Ok(()), Ok(()), Err(Errno::NOSPC), Ok(()), Ok(())]);
    assert_eq!(bench.pair.snapshot().b.maps_refused, 1);
}

#[test]
fn training_takes_its_time_and_can_be_broken_off() {
    let config = PairConfig {
        train_time: Duration::from_millis(20),
        ..PairConfig::default()
    };
    let bench = Bench::with("intel-spr", config);
    for side in SideId::BOTH {
        enable_gen4(&bench, side);
    }
    assert_eq!(link(&bench, A), 0);
    run(&bench, A, &[W(0xB050, 2, 0x10)]);
    std::thread::sleep(Duration::from_millis(40));
    assert_eq!(link(&bench, A), 0, "came up although one end gave up");
    run(&bench, A, &[W(0xB050, 2, 0)]);
    wait("the link", || {
        link(&bench, A) == 0x2104 && link(&bench, B) == 0x2104
    });
    assert_eq!(bench.pair.snapshot().a.link_ups, 1);
}
