//! What went wrong for users of other systems, held against this one. Each test is named after the fault it would show.

use std::{
    sync::{Arc, Barrier},
    time::{Duration, Instant},
};

use ntb_mem::region::Pages;
use ntb_ring::{
    channel::{ConnectError, Connection, Options, Receiver, RecvFailure, SendFailure, Sender, Wait},
    link::{
        Link, LinkKind, Wrapped,
        auth::Secret,
        combining::{Combining, CombiningOptions, StorePath},
        pair::{PairControl, PairLink, PairOptions, pair},
        select::{self, LinkOptions},
    },
    session::{ChannelSpec, SessionState},
};

/// A watchdog, never a measure.
const LONG: Duration = Duration::from_secs(60);

fn connect(link: impl Link + 'static) -> Connection {
    Connection::open(Box::new(link), &Options::default()).unwrap()
}

fn links(window_bytes: u64) -> (PairLink, PairLink, PairControl) {
    let (a, b) = pair(&PairOptions {
        window_bytes,
        pages: Pages::Normal,
    })
    .unwrap();
    let control = a.control();
    (a, b, control)
}

fn spec(ring_lines: u64) -> ChannelSpec {
    ChannelSpec {
        ring_lines,
        ..ChannelSpec::default()
    }
}

/// Both sides of a channel, connected.
fn both(a: &Connection, b: &Connection, ring_lines: u64) -> ((Sender, Receiver), (Sender, Receiver)) {
    let mut near = a.channel("case", spec(ring_lines)).unwrap();
    let mut far = b.channel("case", spec(ring_lines)).unwrap();
    for (tx, rx) in [&mut near, &mut far] {
        tx.wait_connected(LONG).unwrap();
        rx.wait_connected(LONG).unwrap();
    }
    (near, far)
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (seed as usize).wrapping_mul(131).wrapping_add(i * 7) as u8)
        .collect()
}

#[test]
fn a_time_out_names_the_step_that_is_missing() {
    // Nobody speaks at the other end of a link that is up.
    let (a, _b, control) = links(1 << 20);
    let a = connect(a);
    let start = Instant::now();
    while a.state() != SessionState::CableUp {
        assert!(start.elapsed() < LONG);
    }
    let e = a.wait_running(Duration::from_millis(100)).unwrap_err();
    let ConnectError::TimedOut {
        state: SessionState::CableUp,
        ..
    } = e
    else {
        panic!("{e}")
    };
    assert!(
        e.to_string().contains("no program speaks at the other end"),
        "{e}"
    );
    assert_eq!(e.exit(), 4);
    // And then the link itself goes.
    control.cut();
    let start = Instant::now();
    while a.state() == SessionState::CableUp {
        assert!(start.elapsed() < LONG);
    }
    let e = a.wait_running(Duration::from_millis(10)).unwrap_err();
    assert!(e.to_string().contains("link"), "{e}");
}

#[test]
fn a_thousand_link_losses_take_no_memory() {
    let maps = || {
        std::fs::read_to_string("/proc/self/maps")
            .unwrap()
            .lines()
            .filter(|l| l.contains("ntb-"))
            .count()
    };
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let (a, b, control) = links(1 << 20);
    let (a, b) = (connect(a), connect(b));
    let ((mut tx, _arx), (_btx, mut rx)) = both(&a, &b, 64);
    let mut buf = [0; 64];
    let mut before = None;
    for cycle in 0..1000u64 {
        control.flap(1).unwrap();
        if cycle % 50 == 0 {
            // Each cycle reconnects; traffic is tried after some of them. What is sent in the moment of the loss is lost.
            let start = Instant::now();
            loop {
                let _ = tx.try_send(&cycle.to_le_bytes());
                match rx.recv(&mut buf, Duration::from_millis(1)) {
                    Ok(_) if buf[..8] == cycle.to_le_bytes() => break,
                    _ => assert!(start.elapsed() < LONG),
                }
            }
        }
        if cycle == 100 {
            before = Some((maps(), descriptors()));
        }
    }
    let start = Instant::now();
    while before.unwrap() < (maps(), descriptors()) {
        assert!(
            start.elapsed() < LONG,
            "grown from {before:?} to {:?}",
            (maps(), descriptors())
        );
    }
    while a.stats().losses < 1000 {
        assert!(start.elapsed() < LONG, "{} losses counted", a.stats().losses);
    }
    assert_eq!(a.stats().losses, 1000);
}

#[test]
fn two_full_directions_of_small_messages_never_lock_each_other_up() {
    let (a, b, _) = links(4 << 20);
    let (a, b) = (connect(a), connect(b));
    let (near, far) = both(&a, &b, 2048); // 128 KiB: messages of up to 64 KiB and more would fit
    let total = 100_000u64;
    let full = Arc::new(Barrier::new(2));
    let side = |(mut tx, mut rx): (Sender, Receiver)| {
        let full = Arc::clone(&full);
        move || {
            let (mut sent, mut got) = (0, 0);
            let mut buf = [0; 64];
            let start = Instant::now();
            // First only sending, until nothing goes any more.
            while sent < total && tx.try_send(&pattern(sent, 54)).is_ok() {
                sent += 1;
            }
            assert_eq!(sent, 2048, "a message of 54 bytes takes one line");
            full.wait(); // the other has filled its ring before this side makes room in it
            while got < total {
                assert!(start.elapsed() < LONG, "stuck at {sent} sent, {got} received");
                if sent < total && tx.try_send(&pattern(sent, 54)).is_ok() {
                    sent += 1;
                }
                match rx.try_recv(&mut buf) {
                    Ok(r) => {
                        assert_eq!(buf[..r.len], pattern(got, 54));
                        got += 1;
                    }
                    Err(RecvFailure::Empty) => std::thread::yield_now(),
                    Err(e) => panic!("{e}"),
                }
            }
            while sent < total {
                assert!(start.elapsed() < LONG);
                sent += u64::from(tx.try_send(&pattern(sent, 54)).is_ok());
            }
            (tx.stats().messages, rx.stats().messages)
        }
    };
    let (near, far) = (std::thread::spawn(side(near)), std::thread::spawn(side(far)));
    assert_eq!(near.join().unwrap(), (total, total));
    assert_eq!(far.join().unwrap(), (total, total));
}

#[test]
fn only_the_reader_that_is_rung_wakes() {
    let (a, b, _) = links(4 << 20);
    let (a, b) = (connect(a), connect(b));
    let mut senders = Vec::new();
    let mut readers = Vec::new();
    for i in 0..8 {
        let name = format!("q{i}");
        let (mut tx, rx) = a.channel(&name, spec(64)).unwrap();
        let (far, mut reader) = b.channel(&name, spec(64)).unwrap();
        reader.set_wait(Wait::SpinSleep { spins: 1 });
        tx.wait_connected(LONG).unwrap();
        senders.push((tx, rx, far));
        readers.push(reader);
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = readers
            .iter_mut()
            .map(|reader| {
                scope.spawn(move || {
                    let mut buf = [0; 64];
                    let got = reader.recv(&mut buf, LONG).unwrap();
                    (got.seq, reader.sleeps())
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(50)); // so that they are asleep, most likely
        for (k, thread) in threads.into_iter().enumerate().rev() {
            senders[k].0.try_send(&[k as u8]).unwrap();
            let (seq, sleeps) = thread.join().unwrap();
            assert_eq!(seq, 0);
            assert!(sleeps <= 3, "reader {k} was woken {sleeps} times for one message");
        }
    });
}

#[test]
fn a_large_window_is_not_touched_at_start() {
    let resident = || {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
    };
    let before = resident();
    let (a, b, _) = links(1 << 30);
    let (a, b) = (connect(a), connect(b));
    let ((mut tx, _arx), (_btx, mut rx)) = both(&a, &b, 1 << 20);
    tx.send(b"first", LONG).unwrap();
    rx.recv(&mut [0; 64], LONG).unwrap();
    let grown = resident().saturating_sub(before);
    assert!(
        grown < 64 << 20,
        "{grown} bytes became resident for two windows of a gibibyte"
    );
}

#[test]
fn memory_that_cannot_be_had_is_said_and_the_next_try_works() {
    let options = |window_bytes| LinkOptions {
        window_bytes,
        ..LinkOptions::default()
    };
    let address = format!("soft:case-memory-{}", std::process::id())
        .parse()
        .unwrap();
    for impossible in [0, 1, 63, 1 << 62] {
        let e = select::open(&address, &options(impossible))
            .map(drop)
            .unwrap_err();
        assert!(e.what.contains(&impossible.to_string()), "{e}");
        assert!([2, 6].contains(&e.exit), "{e}: {}", e.exit);
    }
    select::open(&address, &options(1 << 20)).unwrap();
}

#[test]
fn a_blocked_sender_wakes_when_the_reader_goes() {
    let (a, b, _) = links(1 << 20);
    let (a, b) = (connect(a), connect(b));
    let ((mut tx, _arx), far) = both(&a, &b, 64);
    let mut sent = 0;
    while tx.try_send(&[1; 40]).is_ok() {
        sent += 1;
    }
    let blocked = std::thread::spawn(move || (tx.send(&[2; 40], LONG), tx));
    std::thread::sleep(Duration::from_millis(20));
    drop((far, b));
    let (result, _tx) = blocked.join().unwrap();
    let Err(SendFailure::Lost(lost)) = result else {
        panic!("{result:?}")
    };
    assert_eq!((lost.sent, lost.certain), (sent, 0));
}

#[test]
fn a_sender_without_a_reader_says_so_at_once() {
    let (a, _b, _) = links(1 << 20);
    let a = connect(a);
    let (mut tx, mut rx) = a.channel("lonely", spec(64)).unwrap();
    assert!(matches!(tx.try_send(b"x"), Err(SendFailure::NotConnected(_))));
    assert!(matches!(
        rx.try_recv(&mut [0; 8]),
        Err(RecvFailure::NotConnected(_))
    ));
    assert!(matches!(
        tx.send(b"x", Duration::from_millis(5)),
        Err(SendFailure::NotConnected(_))
    ));
}

#[test]
fn an_idle_link_stays_up() {
    let (a, b) = pair(&PairOptions {
        window_bytes: 1 << 20,
        pages: Pages::Normal,
    })
    .unwrap();
    // Time scaled down: ten times the silence after which a peer is given up.
    let options = Options {
        beat_interval: Duration::from_millis(5),
        silent_after: Duration::from_millis(100),
        gone_after: Duration::from_secs(20),
        ..Options::default()
    };
    let a = Connection::open(Box::new(a), &options).unwrap();
    let b = Connection::open(Box::new(b), &options).unwrap();
    let ((mut tx, _arx), (_btx, mut rx)) = both(&a, &b, 64);
    std::thread::sleep(Duration::from_secs(1));
    tx.send(b"after the silence", LONG).unwrap();
    rx.recv(&mut [0; 64], LONG).unwrap();
    assert_eq!((a.stats().losses, a.stats().incarnations), (0, 1));
}

#[test]
fn sizes_from_a_byte_to_eight_mebibytes() {
    let (a, b, _) = links(32 << 20);
    let (a, b) = (connect(a), connect(b));
    let ((mut tx, _arx), (_btx, mut rx)) = both(&a, &b, 1 << 18);
    let mut sizes = vec![8 << 20, (8 << 20) - 1];
    for power in 0..23 {
        sizes.extend([(1usize << power) - 1, 1 << power, (1 << power) + 1]);
    }
    let mut buf = vec![0; 8 << 20];
    for (i, size) in sizes.into_iter().enumerate() {
        let bytes = pattern(i as u64, size);
        tx.send(&bytes, LONG).unwrap();
        let got = rx.recv(&mut buf, LONG).unwrap();
        assert!(got.len == size && buf[..size] == bytes, "size {size}");
    }
}

#[test]
fn one_message_then_silence_arrives_from_every_kind_of_memory() {
    for path in [
        StorePath::Combining64,
        StorePath::Combining8,
        StorePath::Direct64,
        StorePath::Uncached8,
    ] {
        let (a, b, _) = links(1 << 20);
        let model = Combining::new(CombiningOptions::new(path, 7));
        let order = model.order(a.order());
        let (a, b) = (connect(Wrapped::new(a, order, model.hook())), connect(b));
        let ((mut tx, _arx), (_btx, mut rx)) = both(&a, &b, 64);
        let mut buf = [0; 256];
        for size in 1..=256 {
            let bytes = pattern(size as u64, size);
            tx.try_send(&bytes).unwrap();
            // Nothing else is sent: what stays in a buffer here would never arrive.
            let got = rx.recv(&mut buf, LONG).unwrap();
            assert_eq!(buf[..got.len], bytes, "{} bytes by {}", size, path.name());
        }
    }
}

#[test]
fn a_claim_held_for_long_is_never_visible() {
    let (a, b, _) = links(1 << 20);
    let (a, b) = (connect(a), connect(b));
    let ((mut tx, _arx), (_btx, mut rx)) = both(&a, &b, 64);
    let mut buf = [0; 64];
    let mut claim = tx.claim(40).unwrap();
    claim.bytes().fill(3);
    assert_eq!(
        rx.recv(&mut buf, Duration::from_millis(300)),
        Err(RecvFailure::TimedOut)
    );
    claim.commit(0);
    assert_eq!(rx.recv(&mut buf, LONG).unwrap().len, 40);
}

/// An address of the loopback whose port is free now.
fn tcp_address() -> ntb_ring::address::Address {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    format!("tcp:127.0.0.1:{port}").parse().unwrap()
}

/// Both ends of a link over TCP, being served.
fn tcp_connections(window_bytes: u64) -> (Connection, Connection) {
    let address = tcp_address();
    let options = LinkOptions {
        window_bytes,
        secret: Secret::new(b"of the cases").unwrap(),
        ..LinkOptions::default()
    };
    let open = || connect(select::open(&address, &options).unwrap().link);
    (open(), open())
}

#[test]
fn a_named_transport_is_never_another() {
    let options = LinkOptions {
        window_bytes: 1 << 20,
        sysfs: "/nowhere".into(),
        ..LinkOptions::default()
    };
    let soft = format!("soft:case-named-{}", std::process::id()).parse().unwrap();
    for (address, kind) in [(soft, LinkKind::Soft), (tcp_address(), LinkKind::Tcp)] {
        let opened = select::open(&address, &options).unwrap();
        assert_eq!(opened.link.facts().kind, kind);
        assert_eq!(opened.link.facts().address, address.to_string());
        let connection = connect(opened.link);
        assert_eq!(connection.stats().transport, Some(kind), "in the statistics");
        assert!(opened.chosen.contains("named by the user"), "{}", opened.chosen);
    }
    // What this machine has not is refused, though others could be had.
    for text in ["ntb:0000:81:00.0", "rdma:127.0.0.1:9"] {
        let e = select::open(&text.parse().unwrap(), &options).unwrap_err();
        assert_eq!(e.exit, 3, "{e}");
    }
    assert!(
        "carrier-pigeon:coop"
            .parse::<ntb_ring::address::Address>()
            .is_err()
    );
}

#[test]
fn without_hardware_the_choice_says_so_and_a_strict_one_fails() {
    let options = LinkOptions {
        window_bytes: 1 << 20,
        sysfs: "/nowhere".into(),
        soft_name: format!("case-auto-{}", std::process::id()),
        ..LinkOptions::default()
    };
    let opened = select::open(&"auto".parse().unwrap(), &options).unwrap();
    assert_eq!(opened.link.facts().kind, LinkKind::Soft);
    assert!(
        opened.chosen.contains("no bridge (NTB)") && opened.chosen.contains("RDMA"),
        "{}",
        opened.chosen
    );
    assert_eq!(opened.chosen.lines().count(), 1);
    let strict = LinkOptions {
        strict: true,
        meet_within: Duration::from_millis(100),
        ..options
    };
    for text in ["auto", "auto:127.0.0.1:9"] {
        let e = select::open(&text.parse().unwrap(), &strict).unwrap_err();
        assert_eq!((e.name, e.exit), ("no-transport", 3), "{e}");
        assert!(
            e.what.contains("no bridge (NTB)") && e.what.contains("RDMA"),
            "{e}"
        );
    }
}

#[test]
fn a_peer_that_dies_in_the_middle_ends_each_call_and_nothing_else() {
    let (a, b) = tcp_connections(4 << 20);
    let (c, d) = tcp_connections(4 << 20);
    let ((mut other_tx, _crx), (_dtx, mut other_rx)) = both(&c, &d, 64);
    let mut ends = Vec::new();
    for name in ["one", "two"] {
        let (tx, rx) = a.channel(name, spec(64)).unwrap();
        let mut far = b.channel(name, spec(64)).unwrap();
        far.0.wait_connected(LONG).unwrap();
        ends.push((tx, rx, far));
    }
    for (tx, ..) in &mut ends {
        tx.wait_connected(LONG).unwrap();
        while tx.try_send(&[1; 40]).is_ok() {}
    }
    drop(b);
    let start = Instant::now();
    while a.stats().losses == 0 && a.state() == SessionState::Running {
        assert!(start.elapsed() < LONG);
    }
    std::thread::scope(|scope| {
        for (tx, rx, _far) in &mut ends {
            scope.spawn(move || {
                for _ in 0..1000 {
                    let e = tx.try_send(&[2; 40]).unwrap_err();
                    assert!(
                        matches!(
                            e,
                            SendFailure::Lost(_) | SendFailure::NotConnected(_) | SendFailure::Full { .. }
                        ),
                        "{e}"
                    );
                }
            });
            scope.spawn(move || {
                for _ in 0..1000 {
                    assert!(rx.try_recv(&mut [0; 64]).is_err());
                }
            });
        }
    });
    for i in 0..100u8 {
        other_tx.send(&[i; 8], LONG).unwrap();
        other_rx.recv(&mut [0; 64], LONG).unwrap();
    }
    assert_eq!((c.stats().losses, d.stats().losses), (0, 0));
}

#[test]
fn an_idle_link_over_tcp_stays_up() {
    let (a, b) = tcp_connections(1 << 20);
    let ((mut tx, _arx), (_btx, mut rx)) = both(&a, &b, 64);
    std::thread::sleep(Duration::from_secs(3)); // keep-alive asks after one
    tx.send(b"after the silence", LONG).unwrap();
    rx.recv(&mut [0; 64], LONG).unwrap();
    assert_eq!((a.stats().losses, a.stats().incarnations), (0, 1));
}

#[test]
fn sizes_from_a_byte_to_eight_mebibytes_over_tcp() {
    let (a, b) = tcp_connections(32 << 20);
    let ((mut tx, _arx), (_btx, mut rx)) = both(&a, &b, 1 << 18);
    let receiver = std::thread::spawn(move || {
        let mut buf = vec![0; 8 << 20];
        let mut seen = Vec::new();
        while seen.last() != Some(&(8 << 20)) {
            let got = rx.recv(&mut buf, LONG).unwrap();
            assert!(
                buf[..got.len] == pattern(seen.len() as u64, got.len),
                "size {}",
                got.len
            );
            seen.push(got.len);
        }
        seen
    });
    let mut sizes = Vec::new();
    for power in 0..23 {
        sizes.extend([(1usize << power) - 1, 1 << power, (1 << power) + 1]);
    }
    sizes.push(8 << 20);
    for (i, size) in sizes.iter().enumerate() {
        tx.send(&pattern(i as u64, *size), LONG).unwrap();
    }
    assert_eq!(receiver.join().unwrap(), sizes);
}

/// Nothing of it is linked: what is not there is found out when it is asked for.
#[test]
fn programs_start_without_libraries_of_rdma_and_gpus() {
    let folder = std::env::current_exe().unwrap();
    let folder = folder.parent().and_then(std::path::Path::parent).unwrap();
    let mut looked_at = 0;
    for name in ["ntb-ping", "ntb-check", "ntb-emu", "campaign", "lab"] {
        let program = folder.join(name);
        if !program.exists() {
            continue; // not built together with this test
        }
        // The loader lists what a program needs before it starts.
        let output = std::process::Command::new("ldd").arg(&program).output().unwrap();
        let needs = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{needs}");
        for library in ["libibverbs", "librdmacm", "libcuda"] {
            assert!(!needs.contains(library), "{name} needs {library}: {needs}");
        }
        looked_at += 1;
    }
    assert!(
        looked_at > 0,
        "no program beside this test, in {}",
        folder.display()
    );
}
