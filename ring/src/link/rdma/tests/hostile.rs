//! Strangers before RDMA, and peers that know the secret and do not keep to the rules.

use std::{cell::Cell, io::Write, net::TcpStream};

use super::{options, place};
use crate::link::{
    Link, LinkEvent, LinkState,
    auth::{Handshake, Purpose, Role, Secret, Session},
    conformance::until,
    meet::{
        Counts,
        tests::{Venue, free_port, link_strangers},
    },
    rdma::{
        RdmaLink,
        account::Remote,
        exchange::{Hello, Message, VERSION},
        model::{Behaviour, Model},
        verbs::{QueueAddress, TOKEN_BYTES},
    },
};

/// Every end has a device of its own.
struct Rdma {
    model: Model,
    devices: Cell<u32>,
}

impl Rdma {
    fn new() -> Self {
        Self {
            model: Model::new(Behaviour::default()),
            devices: Cell::new(0),
        }
    }
}

impl Venue for Rdma {
    type Link = RdmaLink;
    const PURPOSE: Purpose = Purpose::Rdma;

    fn open(&self, port: u16, secret: &Secret) -> RdmaLink {
        let (model, device) = (self.model.clone(), self.devices.get());
        self.devices.set(device + 1);
        RdmaLink::over(
            place(port, secret),
            &options(),
            Box::new(move || model.open(device)),
        )
        .unwrap()
    }

    fn counts(link: &RdmaLink) -> Counts {
        link.meet_counts()
    }
}

link_strangers!(Rdma::new());

fn up(link: &mut RdmaLink) -> bool {
    link.poll().unwrap().state == LinkState::WindowsSet
}

/// Somebody who knows the secret and has called `link`.
fn insider(port: u16, link: &mut RdmaLink, secret: &Secret) -> (TcpStream, Session) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_nonblocking(true).unwrap();
    let mut handshake = Handshake::new(Role::Initiator, Purpose::Rdma, secret).unwrap();
    let mut session = None;
    until(|| {
        assert!(!up(link));
        session = session.take().or(handshake.drive(&mut stream).unwrap());
        session.is_some()
    });
    (stream, session.unwrap())
}

/// Peers that know the secret and then say what they like: the side that hears it says so, and takes the next.
#[test]
fn a_peer_that_breaks_the_rules_is_let_go_and_the_next_one_taken() {
    let venue = Rdma::new();
    let (port, secret) = (free_port(), Secret::new(b"of the tests").unwrap());
    let mut link = venue.open(port, &secret);
    link.poll().unwrap();
    let hello = |has_manager| {
        Message::Hello(Hello {
            version: VERSION,
            fabric: 2,
            has_manager,
            strict: false,
            needs_manager: false,
            ip: None,
        })
    };
    let memory = |bytes, receives| {
        Message::Memory(Remote {
            window: (0x1000, 5, bytes),
            control: (0x2000, 6),
            receives,
        })
    };
    let queue = Message::Queue(QueueAddress {
        number: 77,
        first_packet: u32::MAX,
        lid: 1,
        gid: [0xff; 16],
        mtu: 0,
    });
    let offer = Message::Offer {
        port: 1,
        token: [0; TOKEN_BYTES],
    };
    let encode = |all: &[&Message]| all.iter().map(|m| m.encode()).collect::<Vec<_>>();
    let mut other_version = hello(true).encode();
    other_version[1] = 9;
    let cases: [(Vec<Vec<u8>>, &str); 11] = [
        // What is said twice in a row is told once.
        (vec![vec![]], "does not greet"),
        (vec![other_version], "version of the exchange"),
        (vec![vec![0xff; 1000]], "does not greet"),
        (vec![hello(true).encode(), vec![9; 20]], "unknown"),
        (encode(&[&offer]), "does not greet"),
        (encode(&[&hello(true), &hello(true)]), "out of turn"),
        (encode(&[&hello(true), &offer]), "out of turn"),
        (encode(&[&hello(false), &queue, &queue]), "out of turn"),
        (encode(&[&hello(false), &memory(0, 64)]), "window of 0 bytes"),
        (encode(&[&hello(false), &memory(u64::MAX, 64)]), "cannot be"),
        (encode(&[&hello(false), &memory(1 << 20, 0)]), "no receives"),
    ];
    for (says, needle) in cases {
        let (mut stream, mut session) = insider(port, &mut link, &secret);
        for message in says {
            stream.write_all(&session.seal(&message).unwrap()).unwrap();
        }
        let mut why = String::new();
        until(|| {
            assert!(!up(&mut link));
            while let Some(LinkEvent::Transport { why: said, .. }) = link.next_event() {
                why = said;
            }
            why.contains(needle)
        });
    }
    // Altered on the way: the check says so.
    let (mut stream, mut session) = insider(port, &mut link, &secret);
    stream
        .write_all(&session.seal(&hello(false).encode()).unwrap())
        .unwrap();
    let mut sealed = session.seal(&queue.encode()).unwrap();
    sealed[6] ^= 1;
    stream.write_all(&sealed).unwrap();
    until(|| {
        assert!(!up(&mut link));
        link.next_event()
            .is_some_and(|event| event.to_string().contains("something else than a peer"))
    });
    let mut honest = venue.open(port, &secret);
    until(|| up(&mut link) & up(&mut honest));
    assert_eq!(venue.model.counts().violations, 0);
}
