//! Strangers beside a stream that is in use, and peers that know the secret and do not keep to the rules.
use std::net::TcpStream;

use super::*;
use crate::link::{
    auth::{Handshake, Role},
    meet::tests::{Venue, link_strangers},
};

struct Tcp;

impl Venue for Tcp {
    type Link = TcpLink;
    const PURPOSE: Purpose = Purpose::Tcp;

    fn open(&self, port: u16, secret: &Secret) -> TcpLink {
        let secret = secret.clone();
        TcpLink::open("127.0.0.1", port, &TcpOptions { secret, ..options() }).unwrap()
    }

    fn counts(link: &TcpLink) -> Counts {
        link.counts()
    }
}

link_strangers!(Tcp);

fn call(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_nonblocking(true).unwrap();
    stream
}

/// An authenticated peer that then sends what it likes.
fn peer(stream: &mut TcpStream, link: &mut TcpLink) -> TcpStream {
    let mut handshake = Handshake::new(Role::Initiator, Purpose::Tcp, &options().secret).unwrap();
    let mut session = None;
    until(|| {
        assert!(!up(link));
        session = session.take().or(handshake.drive(stream).unwrap());
        session.is_some()
    });
    let mut session = session.unwrap();
    let greeting = Message::Greeting(Greeting {
        window_bytes: 1 << 16,
        pid: 1,
    });
    stream
        .write_all(&session.seal(&greeting.encode()).unwrap())
        .unwrap();
    until(|| up(link));
    stream.try_clone().unwrap()
}

#[test]
fn a_peer_that_breaks_the_rules_loses_the_link_and_nothing_else_happens() {
    let port = free_port();
    let mut link = open(port);
    link.poll().unwrap();
    let lines = link.inbound().lines();
    let mut outside = Vec::new();
    frame::put_line(&mut outside, lines, &Line([7; 8]));
    let mut far_outside = Vec::new();
    frame::put_line(&mut far_outside, u64::MAX, &Line([7; 8]));
    let mut over_the_end = Vec::new();
    frame::put_bytes(&mut over_the_end, lines - 1, &[7; 65]);
    let mut wrapped = Vec::new();
    frame::put_bytes(&mut wrapped, u64::MAX, &[7; 65]);
    let attacks: [(&str, Vec<u8>); 6] = [
        ("outside", outside),
        ("outside", far_outside),
        ("outside", over_the_end),
        ("outside", wrapped),
        ("no frame", vec![0xff; 64]),
        ("no frame", vec![0; 64]),
    ];
    for (losses, (why, bytes)) in (1..).zip(attacks) {
        let mut stream = call(port);
        let mut peer = peer(&mut stream, &mut link);
        peer.write_all(&bytes).unwrap();
        until(|| !up(&mut link));
        assert_eq!(link.poll().unwrap().losses, losses);
        let event = link.next_event();
        assert!(
            matches!(&event, Some(LinkEvent::Transport { why: said, .. }) if said.contains(why)),
            "{event:?}"
        );
    }
    let mut other = open(port);
    join(&mut link, &mut other);
}

/// Greetings that cannot be used, from somebody who knows the secret.
#[test]
fn an_unfit_greeting_is_answered_with_a_refusal() {
    let port = free_port();
    let mut link = open(port);
    link.poll().unwrap();
    for greeting in [
        vec![],
        vec![1; 15],
        Message::Greeting(Greeting {
            window_bytes: 65,
            pid: 1,
        })
        .encode()
        .to_vec(),
        vec![1, 200, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0],
    ] {
        let mut stream = call(port);
        let mut handshake = Handshake::new(Role::Initiator, Purpose::Tcp, &options().secret).unwrap();
        let mut session = None;
        until(|| {
            assert!(!up(&mut link));
            session = session.take().or(handshake.drive(&mut stream).unwrap());
            session.is_some()
        });
        let mut session = session.unwrap();
        stream.write_all(&session.seal(&greeting).unwrap()).unwrap();
        let mut opener = session.opener();
        let mut answer = None;
        until(|| {
            assert!(!up(&mut link));
            answer = opener.next(&mut stream).unwrap();
            answer.is_some()
        });
        assert_eq!(
            greeting::decode(&answer.unwrap()),
            Ok(Message::Refusal(Reason::Unfit)),
            "{greeting:?}"
        );
    }
}
