//! What goes wrong on bridges, one thing at a time.

use std::time::{Duration, Instant};

use ntb::hw::regs::{amd, intel_gen3, intel_gen4};
use ntb_emu::model::{Action, SideId, disturb::Severity};
use ntb_mem::line::Line;
use ntb_ring::link::{
    Link, LinkEvent, LinkState, REGISTERS,
    conformance::{Rig, WATCHDOG},
    engine::{EngineChoice, Inbound, Order, StoreEngine},
    ntb::NtbOptions,
    select::{self, LinkOptions},
};
use rustix::io::Errno;

use crate::rig::{Bridges, Joined, Trouble, WINDOW};

const FAMILIES: [&str; 6] = ["intel-spr", "intel-icx", "intel-gnr", "intel-skx", "amd", "epf"];

fn line(n: u64) -> Line {
    Line([n | 1; 8])
}

fn wait_for(link: &dyn Link, at: u64, content: &Line) {
    let start = Instant::now();
    while Inbound::load_line(&link.inbound(), at) != *content {
        assert!(start.elapsed() < WATCHDOG, "line {at} never arrived");
        std::thread::yield_now();
    }
}

fn events(link: &mut dyn Link) -> Vec<LinkEvent> {
    std::iter::from_fn(|| link.next_event()).collect()
}

/// Values that an earlier owner has left in the scratchpads are not seen.
#[test]
fn stale_scratchpads_are_cleared_at_the_start() {
    for family in FAMILIES {
        let bridges = Bridges::new(family);
        let first = match family {
            "amd" => amd::SPAD.offset(),
            "epf" => 0x200, // where the emulated endpoint puts them
            "intel-skx" => intel_gen3::IM_SPAD.offset(),
            _ => intel_gen4::IM_SPAD.offset(),
        };
        let control = bridges.control();
        let port = control.pair().port(SideId::A);
        port.config_write(4, &[2, 0]); // memory decoding on
        let at = |i: u64| u64::from(first) + 4 * i;
        for i in 0..REGISTERS as u64 {
            port.bar_write(0, at(i), &[0xA5; 4]);
            let mut held = [0; 4];
            port.bar_read(0, at(i), &mut held);
            assert_eq!(held, [0xA5; 4], "{family}: the test itself");
        }
        let near = bridges.open(0);
        let far = Some(bridges.open(1));
        let joined = Joined::of(near, far, bridges).up();
        assert_eq!(joined.near.registers(), [0; REGISTERS], "{family}");
    }
}

/// All windows of a port are used, as one memory.
#[test]
fn windows_are_joined() {
    for family in FAMILIES {
        let windows = if family == "epf" { 1 } else { 2 };
        let joined = Joined::new(family, Trouble::Cable).up();
        let mut engine = joined.near.outbound().unwrap();
        let lines = engine.lines();
        assert_eq!(lines, windows * WINDOW / 64, "{family}");
        for at in [WINDOW / 64 - 1, WINDOW / 64]
            .into_iter()
            .filter(|at| *at < lines)
        {
            engine.put(at, &line(at));
            engine.flush();
            wait_for(joined.far.as_ref().unwrap(), at, &line(at));
        }
    }
}

/// A side whose memory is smaller than the windows shows exactly that; what is stored beyond goes nowhere.
#[test]
fn nothing_lands_beyond_the_memory() {
    for family in FAMILIES {
        let bridges = Bridges::new(family);
        let near = bridges.open(0);
        let options = NtbOptions {
            window_bytes: 2 * 4096,
            ..NtbOptions::default()
        };
        let far = bridges.try_open(1, &options).unwrap();
        assert_eq!(far.inbound().lines(), 128);
        let joined = Joined::of(near, Some(far), bridges).up();
        let mut engine = joined.near.outbound().unwrap();
        let last = engine.lines() - 1;
        for at in [127, 128, WINDOW / 64 - 1, last] {
            engine.put(at, &line(at));
        }
        engine.put(3, &line(3));
        engine.flush();
        let far = joined.far.as_ref().unwrap();
        wait_for(far, 3, &line(3));
        wait_for(far, 127, &line(127));
        let stats = joined.bridges.report().pair.a_to_b;
        assert_eq!((stats.outside_window, stats.fault_unmapped), (3, 0), "{family}");
    }
}

/// Sizes that cannot be are refused, with the size; more than there is is cut to what there is.
#[test]
fn window_sizes() {
    let bridges = Bridges::new("intel-spr");
    for bytes in [0, 63] {
        let options = NtbOptions {
            window_bytes: bytes,
            ..NtbOptions::default()
        };
        let e = bridges.try_open(0, &options).unwrap_err();
        assert_eq!((e.name, e.exit), ("link-memory", 2));
        assert!(e.what.contains(&format!("{bytes} bytes")), "{e}");
    }
    let options = NtbOptions {
        window_bytes: 64 * 77,
        ..NtbOptions::default()
    };
    assert_eq!(
        bridges.try_open(0, &options).unwrap().inbound().lines(),
        128,
        "whole pages"
    );
    assert_eq!(bridges.open(0).inbound().lines(), 2 * WINDOW / 64);
}

/// The store that a wish stands for is what the wire sees.
#[test]
fn engines_store_as_they_are_told() {
    let order = Order::Relaxed;
    for (wish, name, writes) in [
        (EngineChoice::Auto, "trapped-64", 1),
        (EngineChoice::WriteCombining, "trapped-64", 1),
        (EngineChoice::Movdir64b, "trapped-64", 1),
        (EngineChoice::Uncached8, "trapped-8", 8),
    ] {
        let bridges = Bridges::new("intel-spr");
        let options = NtbOptions {
            engine: wish,
            ..NtbOptions::default()
        };
        let near = bridges.try_open(0, &options).unwrap();
        assert_eq!((near.facts().engine, near.order()), (name, order));
        let far = bridges.open(1);
        let joined = Joined::of(near, Some(far), bridges).up();
        let mut engine = joined.near.outbound().unwrap();
        assert_eq!(engine.order(), order);
        for at in 0..10 {
            engine.put(at, &line(at));
        }
        engine.flush();
        wait_for(joined.far.as_ref().unwrap(), 9, &line(9));
        let stats = joined.bridges.report().pair.a_to_b;
        assert_eq!(stats.window_writes, 10 * writes, "{wish:?}");
        assert_eq!(stats.window_write_packets.tlps, 10 * writes, "{wish:?}");
        assert_eq!(stats.window_reads, 0, "{wish:?}");
    }
}

/// A direction that is dead while the link is up is no loss, and the other one works.
#[test]
fn one_direction_dead() {
    for family in ["intel-spr", "intel-icx", "intel-skx", "epf"] {
        let mut joined = Joined::new(family, Trouble::Cable).up();
        joined.bridges.act(Action::Dead {
            from: SideId::A,
            dead: true,
        });
        let mut to_far = joined.near.outbound().unwrap();
        let mut to_near = joined.far.as_ref().unwrap().outbound().unwrap();
        to_far.put(1, &line(1));
        to_near.put(2, &line(2));
        wait_for(&joined.near, 2, &line(2));
        let [near, far] = joined.poll();
        assert_eq!((near.losses, far.losses), (0, 0), "{family}");
        assert_eq!(
            Inbound::load_line(&joined.far.as_ref().unwrap().inbound(), 1),
            Line::ZERO
        );
        joined.bridges.act(Action::Dead {
            from: SideId::A,
            dead: false,
        });
        to_far.put(1, &line(5));
        wait_for(joined.far.as_ref().unwrap(), 1, &line(5));
    }
}

/// Registers that arrive as all ones are values; they do not make the device look gone.
#[test]
fn registers_of_all_ones_are_values() {
    for family in FAMILIES {
        let mut joined = Joined::new(family, Trouble::Cable).up();
        joined.bridges.act(Action::BlankRegisters {
            from: SideId::B,
            count: 3,
        });
        joined.far.as_mut().unwrap().write_registers(&[7; REGISTERS]);
        let mut expected = [7; REGISTERS];
        expected[..3].fill(u32::MAX);
        assert_eq!(joined.near.registers(), expected, "{family}");
        let [near, far] = joined.poll();
        assert_eq!((near.state, near.losses), (LinkState::WindowsSet, 0), "{family}");
        assert_eq!((far.state, far.losses), (LinkState::WindowsSet, 0), "{family}");
    }
}

/// Writes of registers and doorbells that are lost do no harm to the next ones.
#[test]
fn lost_registers_and_doorbells() {
    for family in FAMILIES {
        let mut joined = Joined::new(family, Trouble::Cable).up();
        joined.bridges.act(Action::LoseRegisters {
            from: SideId::B,
            count: 8,
        });
        joined.bridges.act(Action::LoseDoorbells {
            from: SideId::B,
            count: 1,
        });
        let far = joined.far.as_mut().unwrap();
        far.write_registers(&[7; REGISTERS]);
        far.ring(3);
        assert_eq!(joined.near.registers(), [0; REGISTERS], "{family}");
        let bell = joined.near.doorbell(3);
        assert!(!bell.take(), "{family}");
        let far = joined.far.as_mut().unwrap();
        far.write_registers(&[8; REGISTERS]);
        far.ring(3);
        assert!(bell.wait(WATCHDOG), "{family}");
        assert_eq!(joined.near.registers(), [8; REGISTERS], "{family}");
    }
}

/// A mapping that is refused at the start is the error of the start; later it is tried again.
#[test]
fn refused_mappings() {
    for family in FAMILIES {
        let bridges = Bridges::new(family);
        let refuse = Action::RefuseMap {
            side: SideId::A,
            nth: 1,
            errno: Errno::NOMEM,
        };
        bridges.act(refuse);
        let e = bridges.try_open(0, &NtbOptions::default()).unwrap_err();
        assert_eq!(e.errno, Some(Errno::NOMEM.raw_os_error()), "{family}: {e}");
        assert!(e.what.contains("emu:@"), "{e}");

        let far = Some(bridges.open(1));
        let mut joined = Joined::of(bridges.open(0), far, bridges).up();
        if family == "amd" {
            continue; // maps once
        }
        events(&mut joined.near);
        joined.bridges.act(refuse);
        joined.lose();
        joined.until("loss", |near, far| near.losses == 1 && far.losses == 1);
        joined.restore();
        let joined = &mut joined.up();
        let told = events(&mut joined.near);
        assert!(
            matches!(&told[..], [LinkEvent::WindowsRefused { .. }]),
            "{family}: {told:?}"
        );
        assert_eq!(
            joined.near.poll().unwrap().losses,
            1,
            "{family}: a refusal is no loss"
        );
        assert_eq!(joined.bridges.report().pair.a.maps_refused, 2, "{family}");
    }
}

/// A mapping that goes on being refused ends the link, with the kernel's number.
#[test]
fn mappings_refused_for_ever() {
    let mut joined = Joined::new("intel-spr", Trouble::Cable).up();
    let refuse = |joined: &Joined| {
        joined.bridges.act(Action::RefuseMap {
            side: SideId::A,
            nth: 1,
            errno: Errno::NOSPC,
        });
    };
    joined.lose();
    joined.until("loss", |near, _| near.losses == 1);
    joined.restore();
    let start = Instant::now();
    let e = loop {
        refuse(&joined);
        match joined.near.poll() {
            Err(e) => break e,
            Ok(status) => assert!(status.state < LinkState::WindowsSet),
        }
        assert!(start.elapsed() < WATCHDOG, "never gave up");
        std::thread::sleep(Duration::from_millis(1));
    };
    assert_eq!(e.errno, Some(Errno::NOSPC.raw_os_error()), "{e}");
}

/// Removal of the function, its return, and what is told about it.
#[test]
fn surprise_removal_is_told() {
    for family in FAMILIES {
        let mut joined = Joined::new(family, Trouble::NearDevice).up();
        let bell = joined.near.doorbell(2);
        joined.lose();
        joined.until("removal seen", |near, _| near.state == LinkState::CableDown);
        let told = events(&mut joined.near);
        assert!(
            matches!(&told[..], [LinkEvent::DeviceGone { .. }]),
            "{family}: {told:?}"
        );
        assert_eq!(joined.near.registers(), [u32::MAX; REGISTERS]);
        joined.restore();
        let mut joined = joined.up();
        assert_eq!(events(&mut joined.near), [LinkEvent::DeviceBack], "{family}");
        assert_eq!(joined.near.poll().unwrap().losses, 1, "{family}");
        // A doorbell of before is one of now.
        joined.far.as_mut().unwrap().ring(2);
        assert!(bell.wait(WATCHDOG), "{family}");
    }
}

/// The emulator's end is a removal of both devices; another one in its place brings them back.
#[test]
fn a_new_emulator_takes_the_old_ones_place() {
    let bridges = Bridges::new("amd");
    let mut joined = Joined::of(bridges.open(0), Some(bridges.open(1)), bridges).up();
    joined.bridges.restart();
    joined.until("return", |near, far| {
        near.losses == 1
            && far.losses == 1
            && near.state == LinkState::WindowsSet
            && far.state == LinkState::WindowsSet
    });
    let mut engine = joined.near.outbound().unwrap();
    engine.put(4, &line(4));
    wait_for(joined.far.as_ref().unwrap(), 4, &line(4));
}

/// Lane changes and errors of the wire are told, and are no losses.
#[test]
fn rate_and_errors_are_told() {
    for family in ["intel-spr", "intel-icx", "intel-gnr", "intel-skx", "amd"] {
        let mut joined = Joined::new(family, Trouble::Cable).up();
        let start = Instant::now();
        joined.bridges.act(Action::Width(4));
        joined.bridges.act(Action::Error {
            side: SideId::A,
            severity: Severity::Correctable,
        });
        joined.bridges.act(Action::Error {
            side: SideId::A,
            severity: Severity::NonFatal,
        });
        let mut told = Vec::new();
        while told.len() < 2 {
            joined.poll();
            told.extend(events(&mut joined.near));
            assert!(start.elapsed() < WATCHDOG, "{family}: {told:?}");
        }
        told.sort_by_key(LinkEvent::name);
        let [
            LinkEvent::Errors {
                correctable,
                uncorrectable,
            },
            LinkEvent::Rate { before, now },
        ] = &told[..]
        else {
            panic!("{family}: {told:?}")
        };
        assert!(*correctable != 0 && *uncorrectable != 0, "{family}: {told:?}");
        assert!(before.lanes > 4 && now.lanes == 4, "{family}: {told:?}");
        assert_eq!(joined.poll()[0].losses, 0, "{family}");
    }
}

/// Flaps that nobody looked at in between: at least one is seen, and no more than there were.
#[test]
fn quick_flaps_are_seen() {
    for family in FAMILIES {
        let mut joined = Joined::new(family, Trouble::Cable).up();
        for _ in 0..4 {
            joined.lose();
            joined.restore();
        }
        let mut joined = joined.up();
        for (end, status) in joined.poll().into_iter().enumerate() {
            let exact = family == "epf";
            assert!(
                (1..=4).contains(&status.losses) && (!exact || status.losses == 4),
                "{family}, end {end}: {status:?}"
            );
        }
    }
}

/// The memory is mapped at another address in every life, and nothing is left mapped at the end; no store ever hits an
/// address that is not mapped.
#[test]
fn mappings_end_with_their_life() {
    for family in FAMILIES {
        let mut joined = Joined::new(family, Trouble::Cable).up();
        for losses in 1..4 {
            joined.lose();
            joined.until("loss", |near, far| near.losses == losses && far.losses == losses);
            let maps = joined.bridges.report().pair;
            let kept = u64::from(family == "amd"); // a cut wire leaves its windows open
            assert_eq!(
                (maps.a.maps_now, maps.b.maps_now),
                (kept, kept),
                "{family}: while it is down"
            );
            joined.restore();
            joined = joined.up();
        }
        let Joined {
            near, far, bridges, ..
        } = joined;
        let pair = bridges.report().pair;
        let maps = if family == "amd" { 1 } else { 4 };
        assert_eq!((pair.a.maps, pair.a.maps_now), (maps, 1), "{family}");
        drop(near);
        assert_eq!(bridges.report().pair.a.maps_now, 0, "{family}");
        drop(far);
    }
}

/// What a side stores before it notices a loss that the other has noticed never hits an address that is not mapped: the
/// window is closed, or where it is closed at the wrong end of a dead wire, there is memory behind it.
#[test]
fn stores_of_before_a_loss_is_noticed() {
    for family in FAMILIES {
        let mut joined = Joined::new(family, Trouble::Cable).up();
        let mut engine = joined.far.as_ref().unwrap().outbound().unwrap();
        joined.lose();
        let start = Instant::now();
        while joined.near.poll().unwrap().losses == 0 {
            assert!(start.elapsed() < WATCHDOG, "{family}");
        }
        joined.restore();
        engine.put(3, &line(3));
        engine.flush();
        let stats = loop {
            let stats = joined.bridges.report().pair.b_to_a;
            if stats.window_writes > 0 {
                break stats;
            }
            assert!(start.elapsed() < WATCHDOG, "{family}");
        };
        assert_eq!(stats.lost_link_down, 0, "{family}: the test itself");
        let open = family == "amd";
        assert_eq!(stats.outside_window, u64::from(!open), "{family}");
        let faults = stats.fault_unmapped + stats.fault_forbidden + stats.fault_misled;
        assert_eq!(faults, 0, "{family}");
    }
}

/// Sockets that are missing or taken, by the error's name.
#[test]
fn addresses_that_cannot_be_opened() {
    let mut options = NtbOptions::default();
    options.open.timeouts.connect = Duration::from_millis(100);
    let bridges = Bridges::new("epf");
    let first = bridges.try_open(0, &options).unwrap();
    let e = bridges.try_open(0, &options).unwrap_err();
    assert_eq!((e.name, e.exit), ("node-busy", 6), "{e}");
    drop(first);
    let missing = "emu:/nonexistent/ntb.sock".parse().unwrap();
    let e = ntb_ring::link::ntb::NtbLink::open(&missing, &options).unwrap_err();
    assert_eq!((e.name, e.exit), ("node-missing", 3), "{e}");
    assert!(e.what.contains("ntb-emu"), "{e}");
}

/// An address in text opens a link.
#[test]
fn by_address() {
    let bridges = Bridges::new("intel-icx");
    let options = LinkOptions {
        engine: EngineChoice::Uncached8,
        ..LinkOptions::default()
    };
    let text = bridges.addresses[0].to_string();
    let opened = select::open(&text.parse().unwrap(), &options).unwrap();
    let facts = opened.link.facts();
    assert_eq!((facts.kind.name(), facts.address), ("ntb", text.clone()));
    assert_eq!(facts.engine, "trapped-8");
    assert!(opened.chosen.contains(&text));
}
