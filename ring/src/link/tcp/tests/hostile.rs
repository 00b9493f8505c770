//! Strangers beside a stream that is in use, and peers that know the secret and do not keep to the rules.
use std::net::TcpStream;

use super::*;
use crate::link::auth::{Handshake, MAGIC, Role};

/// Two ends and a counter that goes from one to the other.
struct Stream {
    a: TcpLink,
    b: TcpLink,
    engine: Engine,
    sent: u64,
    seen: u64,
}

impl Stream {
    fn new(port: u16) -> Self {
        let (mut a, mut b) = (open(port), open(port));
        a.poll().unwrap(); // listens
        join(&mut a, &mut b);
        let engine = b.outbound().unwrap();
        Self {
            a,
            b,
            engine,
            sent: 0,
            seen: 0,
        }
    }

    /// Sends the next line; none may be missing or late by more than what is under way.
    fn step(&mut self) {
        self.sent += 1;
        self.engine.put(self.sent % 64, &Line([self.sent; 8]));
        self.engine.flush();
        assert!(up(&mut self.a) & up(&mut self.b), "the stream is left alone");
        let view = self.a.inbound();
        while Inbound::load_line(&view, (self.seen + 1) % 64) == Line([self.seen + 1; 8]) {
            self.seen += 1;
        }
        assert!(
            self.sent - self.seen < 60,
            "{} of {} arrived",
            self.seen,
            self.sent
        );
    }

    fn finish(mut self) -> Counts {
        until(|| {
            if self.seen < self.sent {
                self.sent -= 1; // only looks
                self.step();
            }
            self.seen == self.sent
        });
        assert_eq!(self.a.poll().unwrap().losses + self.b.poll().unwrap().losses, 0);
        self.a.counts()
    }
}

fn call(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_nonblocking(true).unwrap();
    stream
}

/// What a stranger hears until it is closed on.
fn hear_out(stream: &mut Stream, stranger: &mut TcpStream) -> Vec<u8> {
    let mut heard = Vec::new();
    let mut buffer = [0; 256];
    until(|| {
        stream.step();
        match stranger.read(&mut buffer) {
            Ok(0) => true,
            Ok(n) => {
                heard.extend(&buffer[..n]);
                false
            }
            Err(e) => e.kind() != std::io::ErrorKind::WouldBlock,
        }
    });
    heard
}

#[test]
fn strangers_get_nothing_and_the_stream_beside_them_loses_nothing() {
    let port = free_port();
    let mut stream = Stream::new(port);
    for round in 0..40u8 {
        let mut stranger = call(port);
        let said: Vec<u8> = match round % 4 {
            0 => (0..200)
                .map(|i| (i as u8).wrapping_mul(round | 1).wrapping_add(round))
                .collect(),
            1 => [&MAGIC[..], &[1, 0, 1, 1, 0, 0, 0, 0], &[round; 32], &[round; 400]].concat(),
            2 => b"GET / HTTP/1.1\r\nHost: here\r\n\r\n                                   ".to_vec(),
            _ => MAGIC.to_vec(), // and then nothing
        };
        let _ = stranger.write_all(&said);
        let heard = hear_out(&mut stream, &mut stranger);
        assert!(
            heard.len() <= HELLO_BYTES,
            "{} bytes were told to a stranger",
            heard.len()
        );
    }
    let counts = stream.finish();
    assert_eq!(counts.strangers(), 40, "{counts:?}");
    assert!(
        counts.wrong_secret >= 10 && counts.malformed >= 10 && counts.dropped_silent >= 10,
        "{counts:?}"
    );
}

#[test]
fn another_secret_gets_nothing() {
    let port = free_port();
    let mut stream = Stream::new(port);
    for secret in [Secret::new(b"another").unwrap(), Secret::none()] {
        let options = TcpOptions { secret, ..options() };
        let mut wrong = TcpLink::open("127.0.0.1", port, &options).unwrap();
        let mut error = None;
        until(|| {
            stream.step();
            error = wrong.poll().err();
            error.is_some()
        });
        let error = error.unwrap();
        assert_eq!((error.name, error.exit), ("auth-secret-mismatch", 6), "{error}");
        assert!(!error.what.contains("another"), "{error}");
    }
    assert!(stream.finish().wrong_secret >= 2);
}

#[test]
fn a_recording_of_a_peer_gets_nothing() {
    // What a peer says to somebody who records it: a relay between both.
    let port = free_port();
    let mut server = open(port);
    server.poll().unwrap();
    let relay = TcpListener::bind("127.0.0.1:0").unwrap();
    let relay_port = relay.local_addr().unwrap().port();
    let mut client = open(relay_port);
    let mut recorded = Vec::new();
    let mut ends: Option<(TcpStream, TcpStream)> = None;
    relay.set_nonblocking(true).unwrap();
    until(|| {
        if ends.is_none()
            && let Ok((to_client, _)) = relay.accept()
        {
            to_client.set_nonblocking(true).unwrap();
            ends = Some((to_client, call(port)));
        }
        if let Some((client_side, server_side)) = &mut ends {
            let mut buffer = [0; 4096];
            if let Ok(n @ 1..) = client_side.read(&mut buffer) {
                recorded.extend(&buffer[..n]);
                server_side.write_all(&buffer[..n]).unwrap();
            }
            if let Ok(n @ 1..) = server_side.read(&mut buffer) {
                client_side.write_all(&buffer[..n]).unwrap();
            }
        }
        up(&mut client) & up(&mut server)
    });
    drop((client, ends));
    until(|| !up(&mut server));
    assert!(recorded.len() >= HELLO_BYTES + PROOF_BYTES);
    drop(server);
    let mut stream = Stream::new(port);
    for _ in 0..5 {
        let mut replayer = call(port);
        replayer.write_all(&recorded).unwrap();
        assert!(hear_out(&mut stream, &mut replayer).len() <= HELLO_BYTES);
    }
    assert_eq!(stream.finish().wrong_secret, 5);
}

/// Far more connections than are kept, opened at once and held.
#[test]
fn a_flood_of_connections_is_capped_and_a_peer_finds_its_way_through() {
    let port = free_port();
    let mut stream = Stream::new(port);
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    let mut held = Vec::new();
    for _ in 0..200 {
        // The backlog may be full: who is not let in has not even got so far.
        let address = ([127, 0, 0, 1], port).into();
        if let Ok(stranger) = TcpStream::connect_timeout(&address, Duration::from_millis(20)) {
            held.push(stranger);
        }
        stream.step();
    }
    for _ in 0..200 {
        stream.step();
        // Other tests open descriptors too, but not this many.
        assert!(
            descriptors() < before + held.len() + 16 + 200,
            "they are all kept"
        );
    }
    let counts = stream.finish();
    assert!(
        counts.dropped_silent + counts.gone_early >= held.len().saturating_sub(64 + 16) as u64,
        "{counts:?}"
    );
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
