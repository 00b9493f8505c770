//! What goes wrong, and what the link says of it.

use std::time::{Duration, Instant};

use super::{Ends, accounts::bring_up, end, options, place, shared};
use crate::{
    channel::{self, Connection, SendFailure},
    link::{
        Link, LinkEvent, LinkState,
        auth::Secret,
        conformance::{WATCHDOG, drive},
        engine::StoreEngine as _,
        rdma::{
            Manager, RdmaLink, RdmaOptions,
            model::{Behaviour, Model},
            verbs::{Fabric, Memory},
        },
    },
    session::ChannelSpec,
};

fn up(behaviour: Behaviour) -> Ends {
    let mut ends = Ends::new(behaviour, &options());
    bring_up(&mut ends);
    ends
}

fn events(ends: &mut Ends) -> Vec<LinkEvent> {
    std::iter::from_fn(|| ends.near.next_event()).collect()
}

fn until_down(ends: &mut Ends) {
    drive(ends, "loss noticed", |rig| {
        let _ = rig.far().map(|far| far.poll().unwrap());
        rig.near().poll().unwrap().state < LinkState::WindowsSet
    });
}

/// Breaks the link, sees it lost once, mends it, and sees it return. Names of the near end's events.
fn broken_and_mended(ends: &mut Ends, hurt: impl Fn(&Model), mend: impl Fn(&Model)) -> Vec<&'static str> {
    let losses = ends.near.poll().unwrap().losses;
    hurt(&ends.model);
    until_down(ends);
    mend(&ends.model);
    bring_up(ends);
    assert_eq!(ends.near.poll().unwrap().losses, losses + 1);
    events(ends).iter().map(LinkEvent::name).collect()
}

#[test]
fn a_port_that_goes_down_ends_the_link_until_it_is_up() {
    let mut ends = up(Behaviour::default());
    let names = broken_and_mended(&mut ends, |m| m.set_port(1, false), |m| m.set_port(1, true));
    assert_eq!(names, ["rdma-port-down", "rdma-lost", "rdma-port-up"]);
    // Of the peer's port this side sees only that the peer has gone.
    let names = broken_and_mended(&mut ends, |m| m.set_port(2, false), |m| m.set_port(2, true));
    assert_eq!(names.first(), Some(&"rdma-peer-gone"), "{names:?}");
}

#[test]
fn an_address_that_changes_is_taken_up() {
    let mut ends = up(Behaviour::default());
    let before = ends.near.port().unwrap().gid;
    let names = broken_and_mended(&mut ends, |m| m.change_gid(1, 7), |_| {});
    assert!(
        names.starts_with(&["rdma-address-changed", "rdma-lost"]),
        "{names:?}"
    );
    let after = ends.near.port().unwrap();
    assert_ne!(after.gid, before);
    assert!(after.to_string().contains("10.7.0.1"), "{after}");
}

#[test]
fn an_rdma_cm_that_does_not_answer_is_gone_around() {
    let mut ends = Ends::new(
        Behaviour {
            manager_answers: false,
            ..Behaviour::default()
        },
        &options(),
    );
    bring_up(&mut ends);
    let mut told = events(&mut ends);
    told.extend(std::iter::from_fn(|| ends.far.as_mut()?.next_event()));
    assert!(
        told.iter().any(|event| matches!(event, LinkEvent::Transport { name: "rdma-not-connected", why } if why.contains("gone around"))),
        "{told:?}"
    );
}

/// rdma_cm finds packets and service level by itself: who wants others is connected without it.
#[test]
fn what_rdma_cm_cannot_be_told_is_had_without_it() {
    for change in [
        |o: &mut RdmaOptions| o.mtu = Some(512),
        |o: &mut RdmaOptions| o.service_level = 3,
    ] {
        let mut wished = options();
        change(&mut wished);
        let mut ends = Ends::new(
            Behaviour {
                manager_answers: false,
                ..Behaviour::default()
            },
            &wished,
        );
        bring_up(&mut ends);
        assert!(events(&mut ends).is_empty(), "nothing was waited for in vain");
    }
}

/// Who insists on it, or has no other way, goes on asking.
fn goes_on_asking(fabric: Fabric, manager: Manager) {
    let options = RdmaOptions { manager, ..options() };
    let behaviour = Behaviour {
        fabric,
        manager_answers: false,
        ..Behaviour::default()
    };
    let mut ends = Ends::new(behaviour, &options);
    drive(&mut ends, "given up", |rig| {
        let far = rig.far().unwrap();
        assert!(far.poll().unwrap().state < LinkState::WindowsSet);
        assert!(rig.near().poll().unwrap().state < LinkState::WindowsSet);
        let told: Vec<_> = std::iter::from_fn(|| rig.near().next_event()).collect();
        assert!(!format!("{told:?}").contains("gone around"), "{told:?}");
        // Whichever end is the first to give up.
        told.iter().any(|event| event.name() == "rdma-not-connected")
    });
    ends.model.behave(|b| b.manager_answers = true);
    bring_up(&mut ends);
}

#[test]
fn an_rdma_cm_that_is_insisted_on_is_asked_again() {
    goes_on_asking(Fabric::Roce, Manager::Only);
}

#[test]
fn iwarp_asks_rdma_cm_again() {
    goes_on_asking(Fabric::Iwarp, Manager::Auto);
}

#[test]
fn a_device_that_is_removed_is_looked_for() {
    let mut ends = up(Behaviour::default());
    ends.model.set_gone(1, true);
    until_down(&mut ends);
    assert!(ends.near.port().is_none());
    ends.near.poll().unwrap();
    ends.model.set_gone(1, false);
    bring_up(&mut ends);
    let names: Vec<_> = events(&mut ends).iter().map(LinkEvent::name).collect();
    assert_eq!(names, ["rdma-device-gone", "device-gone", "device-back"]);
}

#[test]
fn a_path_that_dies_silently_is_told_by_the_retries() {
    let mut ends = up(Behaviour::default());
    ends.model.exhaust_retries(1);
    ends.near.write_registers(&[1; 8]);
    until_down(&mut ends);
    let told = events(&mut ends);
    assert!(
        matches!(&told[..], [LinkEvent::Transport { name: "rdma-broken", why }] if why.contains("retries exhausted")),
        "{told:?}"
    );
    bring_up(&mut ends);
}

#[test]
fn memory_stays_registered_as_long_as_a_request_may_read_it() {
    let mut ends = up(Behaviour::default());
    ends.model.behave(|b| b.delayed = 1_000_000); // nothing more is carried out
    let mut engine = ends.near.outbound().unwrap();
    engine.put_bytes(0, &[7; 1024]);
    engine.flush();
    ends.model.set_port(1, false);
    until_down(&mut ends);
    drop(engine);
    assert_eq!(ends.model.counts().violations, 0);
}

#[test]
fn limits_are_explained() {
    let model = Model::new(Behaviour {
        memlock: 1 << 16,
        ..Behaviour::default()
    });
    let opener = model.clone();
    let e = RdmaLink::over(
        place(1, &Secret::none()),
        &options(),
        Box::new(move || opener.open(1)),
    )
    .unwrap_err();
    assert_eq!((e.name, e.exit), ("rdma-memlock", 6));
    assert!(
        e.what.contains("bytes could not be registered") && e.what.contains("ulimit -l"),
        "{e}"
    );
    let ends = Ends::new(Behaviour::default(), &options());
    let own =
        std::sync::Arc::new(ntb_mem::region::Region::allocate(4096, ntb_mem::region::Pages::Normal).unwrap());
    let registered = ends.near.register(Memory::Local(own), true).unwrap();
    assert_ne!(registered.key(), 0);
    assert_eq!(registered.bytes(), 4096);
    let (read, _write) = rustix::pipe::pipe().unwrap();
    for (memory, name) in [
        (
            Memory::DmaBuf {
                descriptor: read.into(),
                offset: 0,
                bytes: 4096,
                address: 0,
            },
            "rdma-no-dma-buf",
        ),
        (
            Memory::Peer {
                address: 4096,
                bytes: 4096,
            },
            "rdma-no-peer-memory",
        ),
    ] {
        let e = ends.near.register(memory, true).unwrap_err();
        assert_eq!(e.name, name, "{e}");
    }
}

#[test]
fn options_that_cannot_be_are_refused() {
    let model = Model::new(Behaviour::default());
    for change in [
        |o: &mut RdmaOptions| o.mtu = Some(1500),
        |o: &mut RdmaOptions| o.retries = 8,
        |o: &mut RdmaOptions| o.service_level = 16,
    ] {
        let mut options = options();
        change(&mut options);
        let opener = model.clone();
        let e = RdmaLink::over(
            place(1, &Secret::none()),
            &options,
            Box::new(move || opener.open(1)),
        )
        .unwrap_err();
        assert_eq!((e.name, e.exit), ("bad-option", 2), "{e}");
    }
}

/// Polls both until one refuses for good.
fn refusal(near: &mut RdmaLink, far: &mut RdmaLink) -> crate::link::LinkError {
    let start = Instant::now();
    loop {
        for link in [&mut *near, &mut *far] {
            match link.poll() {
                Err(e) => return e,
                Ok(status) => assert!(status.state < LinkState::WindowsSet),
            }
        }
        assert!(start.elapsed() < WATCHDOG, "nobody refused");
        std::thread::yield_now();
    }
}

#[test]
fn ends_that_do_not_fit_say_in_what() {
    for (mine, theirs, needle) in [
        (
            options(),
            RdmaOptions {
                strict: true,
                ..options()
            },
            "strict",
        ),
        (
            RdmaOptions {
                manager: Manager::Only,
                ..options()
            },
            RdmaOptions {
                manager: Manager::Never,
                ..options()
            },
            "rdma_cm is needed",
        ),
    ] {
        let mut ends = Ends::new(Behaviour::default(), &mine);
        ends.far = Some(end(&ends.model, 2, ends.port, &theirs));
        let e = {
            let Ends { near, far, .. } = &mut ends;
            refusal(near, far.as_mut().unwrap())
        };
        assert!(
            e.what.contains(needle) && e.what.contains("rdma:127.0.0.1:"),
            "{e}"
        );
    }
}

#[test]
fn a_peer_without_the_secret_reaches_nothing() {
    let model = Model::new(Behaviour::default());
    let port = Ends::new(Behaviour::default(), &options()).port;
    let secret = |text: &[u8]| Secret::new(text).unwrap();
    let open = |device, secret: &Secret| {
        let model = model.clone();
        RdmaLink::over(
            place(port, secret),
            &options(),
            Box::new(move || model.open(device)),
        )
        .unwrap()
    };
    let mut near = open(1, &secret(b"right"));
    near.poll().unwrap();
    for wrong in [secret(b"wrong"), Secret::none()] {
        let mut far = open(2, &wrong);
        let e = refusal(&mut far, &mut near);
        assert_eq!((e.name, e.exit), ("auth-secret-mismatch", 6), "{e}");
        assert_eq!(model.counts().writes + model.counts().messages, 0);
    }
    assert_eq!(near.poll().unwrap().state, LinkState::CableDown);
    assert!(near.meet_counts().wrong_secret >= 2);
    let e = RdmaLink::open("192.0.2.1", port, &Secret::none(), &options()).unwrap_err();
    assert_eq!((e.name, e.exit), ("secret-needed", 6), "{e}");
}

/// Traffic of all sizes over torn writes, with every trouble there is: nothing is wrong, doubled or out of order, and what
/// is missing was said to be.
#[test]
fn traffic_survives_torn_writes_and_trouble() {
    for (fabric, strict, delayed, seed) in [
        (Fabric::Roce, false, 0, 1),
        (Fabric::Iwarp, false, 0, 2),
        (Fabric::Roce, true, 0, 3),
        (Fabric::Roce, false, 500_000, 4),
        (Fabric::Iwarp, true, 500_000, 5),
    ] {
        let behaviour = Behaviour {
            fabric,
            inline: if fabric == Fabric::Iwarp { 80 } else { 220 },
            torn: 100_000,
            delayed,
            seed,
            ..Behaviour::default()
        };
        let options = RdmaOptions {
            window_bytes: 1 << 18,
            strict,
            ..options()
        };
        let (model, near, far) = shared(Ends::new(behaviour, &options));
        let connection =
            |link: RdmaLink| Connection::open(Box::new(link), &channel::Options::default()).unwrap();
        let (near, far) = (connection(near), connection(far));
        let spec = ChannelSpec {
            ring_lines: 256,
            ..ChannelSpec::default()
        };
        let (mut tx, _) = near.channel("t", spec).unwrap();
        let (_, mut rx) = far.channel("t", spec).unwrap();
        let done = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let stop = std::sync::Arc::clone(&done);
        let reader = std::thread::spawn(move || {
            let (mut next, mut got, mut buf) = (0u64, 0u64, vec![0; 16384]);
            while !stop.load(std::sync::atomic::Ordering::Acquire) {
                if let Ok(r) = rx.recv(&mut buf, Duration::from_millis(1)) {
                    let number = u64::from_le_bytes(buf[..8].try_into().unwrap());
                    assert!(number >= next, "message {number} after {next}");
                    assert_eq!(r.len as u64, 8 + number * 37 % 5000, "length of {number}");
                    assert!(
                        buf[8..r.len].iter().all(|b| *b == number as u8),
                        "content of {number}"
                    );
                    next = number + 1;
                    got += 1;
                }
            }
            (next, got)
        });
        let (start, mut number, mut lost, mut troubles, mut last) = (Instant::now(), 0u64, 0u64, 0, 0);
        let mut message = vec![0; 8 + 5000];
        tx.wait_connected(WATCHDOG).unwrap();
        while number < 20_000 {
            assert!(start.elapsed() < 2 * WATCHDOG, "at {number}");
            let len = (8 + number * 37 % 5000) as usize;
            message[..8].copy_from_slice(&number.to_le_bytes());
            message[8..len].fill(number as u8);
            match tx.try_send(&message[..len]) {
                Ok(seq) => (number, last) = (number + 1, seq),
                Err(SendFailure::Lost(l)) => lost += l.sent - l.certain,
                Err(_) => std::thread::yield_now(),
            }
            if number / 4000 > troubles && number < 20_000 {
                troubles = number / 4000;
                match troubles {
                    1 => model.set_port(2, false),
                    2 => model.exhaust_retries(1),
                    3 => model.change_gid(1, 9),
                    _ => model.set_gone(2, true),
                }
                std::thread::sleep(Duration::from_millis(20));
                model.set_port(2, true);
                model.set_gone(2, false);
            }
        }
        tx.wait_consumed(last, WATCHDOG).unwrap();
        done.store(true, std::sync::atomic::Ordering::Release);
        let (next, got) = reader.join().unwrap();
        let seen = model.counts();
        assert!(
            got + lost >= number && next >= number - lost,
            "{got} arrived, {lost} uncertain, {number} sent"
        );
        assert_eq!(
            (seen.overruns, seen.unready, seen.violations),
            (0, 0, 0),
            "{seen:?}"
        );
        assert!(strict || seen.torn > 100, "{seen:?}");
    }
}
