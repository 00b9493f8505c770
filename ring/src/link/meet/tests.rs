//! Strangers beside a stream that is in use: tests of every link whose two ends meet at a port.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    time::Duration,
};

use ntb_mem::line::Line;

use super::Counts;
use crate::link::{
    Link, LinkState,
    auth::{HELLO_BYTES, MAGIC, PROOF_BYTES, Purpose, Secret},
    conformance::until,
    engine::{Engine, Inbound, StoreEngine},
};

/// Links of one kind.
pub(in crate::link) trait Venue {
    type Link: Link;
    const PURPOSE: Purpose;

    /// An end at that port of the loopback.
    fn open(&self, port: u16, secret: &Secret) -> Self::Link;

    fn counts(link: &Self::Link) -> Counts;
}

/// A test of each rule, over that venue.
macro_rules! link_strangers {
    ($venue:expr) => {
        use $crate::link::meet::tests as strangers;

        #[test]
        fn strangers_get_nothing_and_the_stream_beside_them_loses_nothing() {
            strangers::strange_bytes(&$venue);
        }
        #[test]
        fn another_secret_gets_nothing() {
            strangers::another_secret(&$venue);
        }
        #[test]
        fn a_recording_of_a_peer_gets_nothing() {
            strangers::recording(&$venue);
        }
        #[test]
        fn a_flood_of_connections_is_capped_and_a_peer_finds_its_way_through() {
            strangers::flood(&$venue);
        }
        #[test]
        fn a_third_that_knows_the_secret_is_told_that_there_are_two() {
            strangers::third(&$venue);
        }
    };
}

pub(in crate::link) use link_strangers;

pub(in crate::link) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

fn secret() -> Secret {
    Secret::new(b"of the tests").unwrap()
}

fn up(link: &mut impl Link) -> bool {
    link.poll().unwrap().state == LinkState::WindowsSet
}

/// Two ends and a counter that goes from one to the other.
struct Stream<V: Venue> {
    a: V::Link,
    b: V::Link,
    engine: Engine,
    sent: u64,
    seen: u64,
}

impl<V: Venue> Stream<V> {
    fn new(venue: &V, port: u16) -> Self {
        let (mut a, mut b) = (venue.open(port, &secret()), venue.open(port, &secret()));
        a.poll().unwrap(); // listens
        until(|| up(&mut a) & up(&mut b));
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
        V::counts(&self.a)
    }

    /// What a stranger hears until it is closed on.
    fn hear_out(&mut self, stranger: &mut TcpStream) -> Vec<u8> {
        let mut heard = Vec::new();
        let mut buffer = [0; 256];
        until(|| {
            self.step();
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
}

fn call(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_nonblocking(true).unwrap();
    stream
}

pub(in crate::link) fn strange_bytes<V: Venue>(venue: &V) {
    let port = free_port();
    let mut stream = Stream::new(venue, port);
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
        let heard = stream.hear_out(&mut stranger);
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

pub(in crate::link) fn another_secret<V: Venue>(venue: &V) {
    let port = free_port();
    let mut stream = Stream::new(venue, port);
    for secret in [Secret::new(b"another").unwrap(), Secret::none()] {
        let mut wrong = venue.open(port, &secret);
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

pub(in crate::link) fn recording<V: Venue>(venue: &V) {
    // What a peer says to somebody who records it: a relay between both.
    let port = free_port();
    let mut server = venue.open(port, &secret());
    server.poll().unwrap();
    let relay = TcpListener::bind("127.0.0.1:0").unwrap();
    let relay_port = relay.local_addr().unwrap().port();
    let mut client = venue.open(relay_port, &secret());
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
    let mut stream = Stream::new(venue, port);
    for _ in 0..5 {
        let mut replayer = call(port);
        replayer.write_all(&recorded).unwrap();
        assert!(stream.hear_out(&mut replayer).len() <= HELLO_BYTES);
    }
    assert_eq!(stream.finish().wrong_secret, 5);
}

/// Far more connections than are kept, opened at once and held.
pub(in crate::link) fn flood<V: Venue>(venue: &V) {
    let port = free_port();
    let mut stream = Stream::new(venue, port);
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

pub(in crate::link) fn third<V: Venue>(venue: &V) {
    let port = free_port();
    let mut stream = Stream::new(venue, port);
    let mut third = venue.open(port, &secret());
    let mut error = None;
    until(|| {
        stream.step();
        error = third.poll().err();
        error.is_some()
    });
    let error = error.unwrap();
    let name = format!("{}-taken", V::PURPOSE.name());
    assert_eq!((error.name, error.exit), (&*name, 6), "{error}");
    assert!(stream.finish().taken > 10);
}
