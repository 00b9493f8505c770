//! Two ends in one process that choose together, with what they have made up.
use std::net::TcpListener;

use ntb_mem::{line::Line, region::Pages};

use super::*;
use crate::link::{
    LinkState,
    auth::{Handshake, Purpose, Role, Secret},
    conformance::{WATCHDOG, until},
    engine::{Inbound, StoreEngine},
    soft::{SoftLink, SoftOptions},
    tcp::TcpOptions,
};

const WINDOW: u64 = 1 << 16;

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

fn place(port: u16) -> Place {
    let secret = Secret::new(b"auto").unwrap();
    Place::new(Purpose::Auto, "127.0.0.1", port, &secret, None).unwrap()
}

fn offer(kinds: &[LinkKind]) -> Offer {
    Offer {
        pid: std::process::id(),
        uid: 1,
        window_bytes: WINDOW,
        machine: 1,
        kinds: kinds.to_vec(),
        reasons: offer::ORDER
            .into_iter()
            .filter(|k| !kinds.contains(k))
            .map(|k| (k, format!("no {} here", k.name())))
            .collect(),
        soft_name: None,
    }
}

/// Opens soft links and links over TCP, whatever is asked for; cannot open what it is told not to, or opens what meets nobody.
struct Made {
    broken: Option<LinkKind>,
    lonely: Option<LinkKind>,
}

impl Made {
    fn new() -> Self {
        Self {
            broken: None,
            lonely: None,
        }
    }
}

impl Openers for Made {
    fn open(&mut self, kind: LinkKind, soft_name: &str) -> Result<Box<dyn Link>, LinkError> {
        if self.broken == Some(kind) {
            return Err(LinkError {
                name: "cable-down",
                exit: 4,
                what: format!("{}: cable down", kind.name()),
                errno: None,
            });
        }
        let options = SoftOptions {
            window_bytes: WINDOW,
            pages: Pages::Normal,
            group: None,
        };
        let mut name = soft_name.to_owned();
        if self.lonely == Some(kind) {
            name = format!("{name}-{:x}", random()?);
        }
        Ok(Box::new(SoftLink::open(&name, &options)?))
    }

    fn patience(&self) -> Duration {
        match self.lonely {
            Some(_) => Duration::from_millis(100),
            None => WATCHDOG,
        }
    }

    fn open_tcp(&mut self) -> Result<TcpLink, LinkError> {
        let options = TcpOptions {
            window_bytes: WINDOW,
            pages: Pages::Normal,
            ..TcpOptions::default()
        };
        TcpLink::for_meeting("tcp:of the meeting".to_owned(), &options)
    }
}

type Met = Result<(AutoLink, String), LinkError>;

/// Both ends meet, each in a thread of its own.
fn meet(port: u16, a: Offer, b: Offer) -> (Met, Met) {
    std::thread::scope(|scope| {
        let one = |mine: Offer| {
            scope.spawn(move || AutoLink::meet(place(port), mine, &mut Made::new(), WATCHDOG, &mut || true))
        };
        let (a, b) = (one(a), one(b));
        (a.join().unwrap(), b.join().unwrap())
    })
}

fn up(link: &mut AutoLink) -> bool {
    link.poll().unwrap().state == LinkState::WindowsSet
}

fn carries(a: &mut AutoLink, b: &mut AutoLink) {
    until(|| up(a) & up(b));
    let line = Line([0x5a5a; 8]);
    let mut engine = a.outbound().unwrap();
    engine.put(3, &line);
    engine.flush();
    until(|| up(a) & up(b) && Inbound::load_line(&b.inbound(), 3) == line);
}

use LinkKind::{Ntb, Rdma, Soft, Tcp};

#[test]
fn both_end_at_the_best_that_both_have() {
    for (ours, theirs, expected) in [
        (vec![Soft, Tcp], vec![Soft, Tcp], Soft),
        (vec![Tcp], vec![Soft, Tcp], Tcp),
        (vec![Rdma, Soft, Tcp], vec![Tcp], Tcp),
    ] {
        let (a, b) = meet(free_port(), offer(&ours), offer(&theirs));
        let ((mut a, why_a), (mut b, why_b)) = (a.unwrap(), b.unwrap());
        assert_eq!((a.facts().kind, b.facts().kind), (expected, expected));
        carries(&mut a, &mut b);
        carries(&mut b, &mut a);
        for why in [why_a, why_b] {
            assert!(why.contains("no ntb here") && !why.contains('\n'), "{why}");
        }
        let event = a.next_event();
        assert!(
            matches!(
                event,
                Some(LinkEvent::Transport {
                    name: "transport-chosen",
                    ..
                })
            ),
            "{event:?}"
        );
    }
}

#[test]
fn without_anything_in_common_both_are_told_why() {
    let port = free_port();
    std::thread::scope(|scope| {
        let called = scope.spawn(move || {
            AutoLink::meet(
                place(port),
                offer(&[Ntb]),
                &mut Made::new(),
                Duration::from_secs(3),
                &mut || true,
            )
        });
        let caller = scope.spawn(move || {
            AutoLink::meet(
                place(port),
                offer(&[Tcp]),
                &mut Made::new(),
                Duration::from_secs(3),
                &mut || true,
            )
        });
        let errors = [
            called.join().unwrap().unwrap_err(),
            caller.join().unwrap().unwrap_err(),
        ];
        for e in errors {
            assert_eq!((e.name, e.exit), ("no-transport-in-common", 3), "{e}");
            // What either lacks, whichever of them says so.
            assert!(
                e.what.contains("no ntb here") && e.what.contains("no tcp here"),
                "{e}"
            );
        }
    });
}

/// Who has settled on a transport goes on with it, and says who could not have it.
#[test]
fn a_third_that_cannot_have_what_was_settled_is_refused_and_the_link_goes_on() {
    let port = free_port();
    let (a, b) = meet(port, offer(&[Tcp]), offer(&[Tcp]));
    let (mut a, mut b) = (a.unwrap().0, b.unwrap().0);
    carries(&mut a, &mut b);
    drop(b);
    until(|| !up(&mut a));
    let refused = std::thread::scope(|scope| {
        let third = scope.spawn(move || {
            AutoLink::meet(
                place(port),
                offer(&[Soft]),
                &mut Made::new(),
                WATCHDOG,
                &mut || true,
            )
        });
        until(|| {
            a.poll().unwrap();
            third.is_finished()
        });
        third.join().unwrap().unwrap_err()
    });
    assert_eq!(refused.name, "no-transport-in-common", "{refused}");
    until(|| {
        matches!(
            a.next_event(),
            Some(LinkEvent::Transport {
                name: "no-transport-in-common",
                ..
            })
        )
    });
}

/// A peer that answers with something else than both would choose is not followed.
#[test]
fn who_is_called_cannot_dictate() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let e = std::thread::scope(|scope| {
        let caller = scope.spawn(move || {
            AutoLink::meet(
                place(port),
                offer(&[Soft, Tcp]),
                &mut Made::new(),
                WATCHDOG,
                &mut || true,
            )
        });
        let (mut stream, _) = listener.accept().unwrap();
        let secret = Secret::new(b"auto").unwrap();
        let mut handshake = Handshake::new(Role::Responder, Purpose::Auto, &secret).unwrap();
        let mut session = handshake.drive(&mut stream).unwrap().unwrap();
        session.opener().next(&mut stream).unwrap().unwrap();
        let answer = Answer::Agreed(Tcp, offer(&[Soft, Tcp])).encode();
        std::io::Write::write_all(&mut stream, &session.seal(&answer).unwrap()).unwrap();
        caller.join().unwrap().unwrap_err()
    });
    assert_eq!((e.name, e.exit), ("transport-not-agreed", 7), "{e}");
    assert!(e.what.contains("tcp") && e.what.contains("soft"), "{e}");
}

#[test]
fn the_side_that_called_knows_what_tcp_costs_at_the_most() {
    let (a, b) = meet(free_port(), offer(&[Soft, Tcp]), offer(&[Soft, Tcp]));
    let known: Vec<_> = [a, b]
        .into_iter()
        .filter_map(|end| end.unwrap().0.tcp_round_trip())
        .collect();
    assert!(
        matches!(known[..], [time] if time > Duration::ZERO && time < WATCHDOG),
        "{known:?}"
    );
}

#[test]
fn nobody_there_names_what_was_looked_for() {
    let e = AutoLink::meet(
        place(free_port()),
        offer(&[Tcp]),
        &mut Made::new(),
        Duration::from_millis(50),
        &mut || true,
    )
    .unwrap_err();
    assert_eq!((e.name, e.exit), ("no-peer", 4));
    assert!(
        e.what
            .contains("no ntb here; no rdma here; no soft here; to be had: tcp"),
        "{e}"
    );
    let e = AutoLink::meet(
        place(free_port()),
        offer(&[Tcp]),
        &mut Made::new(),
        WATCHDOG,
        &mut || false,
    )
    .unwrap_err();
    assert_eq!(e.name, "interrupted");
}

#[test]
fn what_turns_out_to_be_unusable_is_struck_and_both_choose_again() {
    let port = free_port();
    std::thread::scope(|scope| {
        let one = || {
            scope.spawn(move || {
                let mut made = Made::new();
                made.broken = Some(Ntb);
                AutoLink::meet(
                    place(port),
                    offer(&[Ntb, Soft, Tcp]),
                    &mut made,
                    WATCHDOG,
                    &mut || true,
                )
            })
        };
        let (a, b) = (one(), one());
        let ((mut a, why), (mut b, _)) = (a.join().unwrap().unwrap(), b.join().unwrap().unwrap());
        assert_eq!(a.facts().kind, Soft);
        assert!(why.contains("cable down"), "{why}");
        carries(&mut a, &mut b);
    });
}

/// Whatever keeps one end from it, both strike it.
#[test]
fn what_only_one_end_cannot_have_is_struck_by_both() {
    for (broken, lonely, needle) in [
        (Some(Rdma), None, "cable down"),
        (None, Some(Rdma), "did not connect"),
    ] {
        let port = free_port();
        std::thread::scope(|scope| {
            let one = |made: Made| {
                scope.spawn(move || {
                    let mut made = made;
                    AutoLink::meet(
                        place(port),
                        offer(&[Rdma, Soft, Tcp]),
                        &mut made,
                        WATCHDOG,
                        &mut || true,
                    )
                })
            };
            let (a, b) = (one(Made { broken, lonely }), one(Made::new()));
            let ((mut a, why_a), (mut b, why_b)) = (a.join().unwrap().unwrap(), b.join().unwrap().unwrap());
            assert_eq!((a.facts().kind, b.facts().kind), (Soft, Soft));
            assert!(
                why_a.contains(needle) && why_b.contains(needle),
                "{why_a} / {why_b}"
            );
            carries(&mut a, &mut b);
        });
    }
}

/// What both can have is tried, kept, and open to whoever comes later.
#[test]
fn what_works_is_settled_on_by_both() {
    let port = free_port();
    let (a, b) = meet(port, offer(&[Rdma, Tcp]), offer(&[Rdma, Tcp]));
    let ((mut a, why), (mut b, _)) = (a.unwrap(), b.unwrap());
    assert!(why.contains("no ntb here"), "{why}");
    assert!(matches!((&a.inner, &b.inner), (Inner::Other(_), Inner::Other(_))));
    carries(&mut a, &mut b);
    drop(b);
    until(|| !up(&mut a));
    let newcomer = std::thread::scope(|scope| {
        let mine = offer(&[Rdma, Tcp]);
        let thread =
            scope.spawn(move || AutoLink::meet(place(port), mine, &mut Made::new(), WATCHDOG, &mut || true));
        until(|| {
            a.poll().unwrap();
            thread.is_finished()
        });
        thread.join().unwrap()
    });
    let mut b = newcomer.unwrap().0;
    carries(&mut a, &mut b);
}

/// The transport stays what it was, over deaths of either end.
#[test]
fn who_comes_later_is_told_what_was_chosen() {
    for kinds in [vec![Soft, Tcp], vec![Tcp]] {
        let port = free_port();
        let (a, b) = meet(port, offer(&kinds), offer(&kinds));
        let (mut a, mut b) = (a.unwrap().0, b.unwrap().0);
        carries(&mut a, &mut b);
        for round in 1..=4 {
            // The one that has been there longer dies.
            drop(std::mem::replace(&mut a, b));
            let newcomer = std::thread::scope(|scope| {
                let mine = offer(&[Soft, Tcp]);
                let thread = scope.spawn(move || {
                    AutoLink::meet(place(port), mine, &mut Made::new(), WATCHDOG, &mut || true)
                });
                until(|| {
                    a.poll().unwrap();
                    thread.is_finished()
                });
                thread.join().unwrap()
            });
            b = newcomer.unwrap().0;
            carries(&mut a, &mut b);
            assert_eq!(a.poll().unwrap().losses, 1, "round {round}");
        }
    }
}
