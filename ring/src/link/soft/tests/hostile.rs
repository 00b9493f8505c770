//! Peers that do not keep to the rules.

use proptest::prelude::*;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::*;

fn raw(name: &str) -> Socket {
    let address = socket::address(name).unwrap();
    let mut connected = None;
    until(|| {
        connected = socket::connect(&address).ok();
        connected.is_some()
    });
    connected.unwrap()
}

fn send_raw(socket: &Socket, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let _ = rustix::net::sendmsg(socket, &[std::io::IoSlice::new(bytes)], &mut control, flags);
}

/// A listening link, proven afterwards to be as good as new.
fn survives(test: impl FnOnce(&mut SoftLink, &str)) -> Counts {
    let name = unique();
    let mut link = open(&name);
    link.poll().unwrap();
    test(&mut link, &name);
    let mut peer = open(&name);
    until(|| up(&mut link) & up(&mut peer));
    link.counts()
}

fn good_greeting(window_bytes: u64) -> [u8; BYTES] {
    Message::Greeting(Greeting { window_bytes, pid: 1 }).encode()
}

#[test]
fn nonsense_is_dropped_and_counted() {
    let counts = survives(|link, name| {
        for bytes in [
            &b"x"[..],
            &[0; 64],
            &[0xff; 64],
            &[0; 65],
            &[7; 4000],
            &good_greeting(64)[..40],
        ] {
            let socket = raw(name);
            send_raw(&socket, bytes, &[]);
            until(|| {
                assert!(!up(link));
                matches!(socket::receive(&socket), Heard::Gone)
            });
        }
    });
    assert_eq!(counts.malformed, 6, "{counts:?}");
}

#[test]
fn descriptors_that_do_not_fit_are_refused() {
    let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let own = Own::new(1 << 16, Pages::Normal).unwrap();
    let good = own.descriptors();
    let swapped: Vec<_> = good.iter().rev().copied().collect();
    let hole = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&hole, 1 << 16).unwrap();
    let mut unsealed = good.clone();
    unsealed[0] = hole.as_fd();
    let mut no_bell = good.clone();
    no_bell[DESCRIPTORS - 1] = event.as_fd();
    let cases: [(&[BorrowedFd<'_>], u64); 10] = [
        (&[], 1 << 16),
        (&good[..1], 1 << 16),
        (&good[..DESCRIPTORS - 1], 1 << 16),
        (&swapped, 1 << 16),
        (&unsealed, 1 << 16),
        (&no_bell, 1 << 16),
        (&good, 0),
        (&good, 1 << 15),
        (&good, 1 << 17),
        (&good, u64::MAX),
    ];
    let counts = survives(|link, name| {
        for (fds, window_bytes) in cases {
            let socket = raw(name);
            send_raw(&socket, &good_greeting(window_bytes), fds);
            let mut refusal = None;
            until(|| {
                assert!(!up(link));
                refusal = match socket::receive(&socket) {
                    Heard::Message(Message::Refusal(r), _) => Some(r.reason),
                    Heard::Nothing => None,
                    _ => panic!("neither refused nor left waiting"),
                };
                refusal.is_some()
            });
            assert_eq!(refusal, Some(Reason::Unfit));
        }
    });
    assert_eq!(counts.refused_unfit, 10, "{counts:?}");
}

#[test]
fn too_many_descriptors_never_arrive() {
    in_child("hostile::too_many_descriptors_never_arrive", || {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let many = vec![event.as_fd(); 253];
        let before = open_descriptors();
        let counts = survives(|link, name| {
            for count in [DESCRIPTORS + 1, 100, 253] {
                let socket = raw(name);
                send_raw(&socket, &good_greeting(1 << 16), &many[..count]);
                until(|| {
                    assert!(!up(link));
                    matches!(socket::receive(&socket), Heard::Gone)
                });
            }
        });
        assert_eq!(counts.malformed + counts.refused_unfit, 3, "{counts:?}");
        assert_eq!(open_descriptors(), before);
    });
}

#[test]
fn another_version_is_told_ours() {
    let counts = survives(|link, name| {
        let socket = raw(name);
        let mut bytes = good_greeting(1 << 16);
        bytes[8] = 99;
        send_raw(&socket, &bytes, &[]);
        let mut heard = None;
        until(|| {
            assert!(!up(link));
            heard = match socket::receive(&socket) {
                Heard::Message(Message::Refusal(r), _) => Some((r.reason, r.version)),
                _ => None,
            };
            heard.is_some()
        });
        assert_eq!(heard, Some((Reason::Version, VERSION)));
    });
    assert_eq!(counts.refused_version, 1);
}

#[test]
fn a_crowd_of_silent_callers_keeps_nobody_out() {
    let counts = survives(|link, name| {
        let address = socket::address(name).unwrap();
        let mut crowd = Vec::new();
        for _ in 0..200 {
            // A full queue is a full queue.
            if let Ok(socket) = socket::connect(&address) {
                crowd.push(socket);
            }
            link.poll().unwrap();
        }
        assert!(crowd.len() > 100);
        let mut peer = open(name);
        join(link, &mut peer);
        drop(peer);
        until(|| !up(link));
    });
    assert!(counts.dropped_silent > 80, "{counts:?}");
}

#[test]
fn a_peer_that_talks_after_its_greeting_is_dropped() {
    let own = Own::new(1 << 16, Pages::Normal).unwrap();
    let counts = survives(|link, name| {
        let socket = raw(name);
        send_raw(&socket, &good_greeting(own.window().bytes()), &own.descriptors());
        until(|| up(link));
        send_raw(&socket, &[1; 64], &[]);
        until(|| !up(link));
        assert_eq!(link.poll().unwrap().losses, 1);
    });
    assert_eq!(counts.malformed, 1);
}

/// Whoever holds the name and does not speak properly: the caller does not give up, nor wait for it.
#[test]
fn a_listener_that_talks_nonsense_is_outlived() {
    let name = unique();
    let listener = socket::listen(&socket::address(&name).unwrap()).unwrap();
    let mut link = open(&name);
    let mut answered = 0;
    until(|| {
        assert!(!up(&mut link));
        if let Some(socket) = socket::accept(&listener).unwrap() {
            answered += 1;
            match answered {
                1 => send_raw(&socket, &[3; 64], &[]),
                2 => send_raw(&socket, &good_greeting(1 << 16), &[]),
                3 => drop(socket),
                _ => return true,
            }
        }
        false
    });
    drop(listener);
    let mut peer = open(&name);
    join(&mut link, &mut peer);
    let counts = link.counts();
    assert_eq!((counts.malformed, counts.refused_unfit), (1, 1), "{counts:?}");
}

#[test]
fn a_refusal_of_a_caller_does_not_end_the_listener() {
    let counts = survives(|link, name| {
        let socket = raw(name);
        let refusal = link.policy.refusal(Reason::Taken, [1, 2]);
        send_raw(&socket, &refusal.encode(), &[]);
        until(|| {
            link.poll().unwrap();
            link.counts().refused_by_caller == 1
        });
    });
    assert_eq!(counts.refused_by_caller, 1);
}

/// Refusals are told in words by the side that was refused.
#[test]
fn refusals_are_typed_errors() {
    for (reason, name, exit, words) in [
        (Reason::Taken, "soft-name-taken", 6, "process 11 and process 12"),
        (
            Reason::Permission,
            "soft-permission",
            6,
            "requires that user or group 4242",
        ),
        (Reason::Version, "soft-version-mismatch", 7, "version 9"),
        (Reason::Unfit, "soft-memory-refused", 7, "normal pages"),
        (Reason::Limits, "link-limits", 6, "ulimit"),
    ] {
        let link_name = unique();
        let listener = socket::listen(&socket::address(&link_name).unwrap()).unwrap();
        let mut link = open(&link_name);
        let refusal = Message::Refusal(Refusal {
            reason,
            holders: [11, 12],
            owner: 1234,
            group: Some(4242),
            version: 9,
        });
        let mut error = None;
        until(|| {
            error = link.poll().err();
            if let Some(socket) = socket::accept(&listener).unwrap() {
                send_raw(&socket, &refusal.encode(), &[]);
            }
            error.is_some()
        });
        let error = error.unwrap();
        assert_eq!((error.name, error.exit), (name, exit));
        assert!(error.what.contains(words), "{error}");
        assert!(error.what.contains(&link_name), "{error}");
    }
}

/// A refusal that comes ahead of the greeting is heard all the same.
#[test]
fn a_refusal_at_once_is_heard_at_the_first_call() {
    const CALLS: usize = 300;
    let name = unique();
    let listener = socket::listen(&socket::address(&name).unwrap()).unwrap();
    let refusal = open(&unique())
        .policy
        .refusal(Reason::Permission, [0; 2])
        .encode();
    let refusing = std::thread::spawn(move || {
        let mut refused = 0;
        until(|| {
            if let Some(socket) = socket::accept(&listener).unwrap() {
                send_raw(&socket, &refusal, &[]);
                refused += 1;
            }
            refused == CALLS
        });
        listener
    });
    let mut link = open(&name);
    for _ in 0..CALLS {
        let mut error = None;
        until(|| {
            error = link.poll().err();
            error.is_some()
        });
        assert_eq!(error.unwrap().name, "soft-permission");
    }
    // Had a call gone unheard, this side would still be missing an answer.
    drop(refusing.join().unwrap());
    assert_eq!((link.counts.gone_early, link.not_before), (0, None));
}

#[test]
fn other_users_are_refused_unless_they_are_in_the_group() {
    let own = Credentials::own();
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let socket = OwnedFd::from(socket);
    let policy = |uid, group| Policy {
        own: Credentials { uid, ..own },
        group,
    };
    let stranger = own.uid.wrapping_add(1);
    let absent = (1..).find(|g| *g != own.gid && !credentials::peer_has_group(&socket, *g).unwrap());
    assert!(policy(own.uid, None).permits(&socket, own));
    assert!(
        policy(own.uid, absent).permits(&socket, own),
        "the same user needs no group"
    );
    assert!(!policy(stranger, None).permits(&socket, own));
    assert!(!policy(stranger, absent).permits(&socket, own));
    assert!(policy(stranger, Some(own.gid)).permits(&socket, own));
    // A listener of that other user refuses us, in words; and we refuse one that we do not accept.
    let name = unique();
    let (mut listener, mut caller) = (open(&name), open(&name));
    listener.policy = policy(stranger, absent);
    listener.poll().unwrap();
    let mut error = None;
    until(|| {
        error = caller.poll().err();
        listener.poll().unwrap();
        error.is_some()
    });
    let error = error.unwrap();
    assert_eq!((error.name, error.exit), ("soft-permission", 6));
    let group = absent.unwrap();
    assert!(
        error
            .what
            .contains(&format!("requires that user or group {group}")),
        "{error}"
    );
    assert_eq!(listener.counts().refused_permission, 1);
    let mut picky = open(&name);
    picky.policy = policy(stranger, None);
    let error = picky.poll().unwrap_err();
    assert_eq!(error.name, "soft-permission");
    assert!(error.what.contains(&format!("user {}", own.uid)), "{error}");
    until(|| {
        listener.poll().unwrap();
        listener.counts().refused_permission == 2
    });
}

#[test]
fn between_users_there_are_no_huge_pages() {
    let huge = SoftOptions {
        pages: Pages::Huge,
        group: Some(0),
        ..options()
    };
    assert_eq!(
        SoftLink::open("x", &huge).unwrap_err().name,
        "soft-huge-between-users"
    );
    let any = SoftOptions {
        pages: Pages::HugeIfAny,
        group: Some(0),
        ..options()
    };
    let link = SoftLink::open(&unique(), &any).unwrap();
    assert_eq!(link.facts().page_bytes, rustix::param::page_size() as u64);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Any bytes with any descriptors, at any stage.
    #[test]
    fn random_talk_is_survived(talk in proptest::collection::vec(
        (proptest::collection::vec(any::<u8>(), 0..100), 0usize..20, any::<bool>(), any::<bool>()), 1..12)) {
        let own = Own::new(1 << 16, Pages::Normal).unwrap();
        let all = own.descriptors();
        survives(|link, name| {
            let mut sockets = vec![raw(name)];
            for (bytes, fds, fresh, damaged_greeting) in &talk {
                if *fresh {
                    link.poll().unwrap();
                    sockets.push(raw(name));
                }
                let mut greeting = good_greeting(1 << 16);
                let bytes = if *damaged_greeting {
                    for (slot, byte) in greeting.iter_mut().skip(16).zip(bytes) {
                        *slot = *byte;
                    }
                    &greeting[..]
                } else {
                    &bytes[..]
                };
                send_raw(sockets.last().unwrap(), bytes, &all[..(*fds).min(all.len())]);
                link.poll().unwrap();
            }
            drop(sockets);
            until(|| !up(link));
        });
    }
}
