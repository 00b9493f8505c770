//! The side that listens: takes connections up and hears them out. Never waits for any of them.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use std::{
    io::Write,
    net::TcpStream,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::event::PollFlags;

use super::{Met, Place, socket};
use crate::link::auth::{AuthError, Handshake, Opener, Role, Session};

/// Connections taken up in one go, and kept that have not proved themselves yet. Peers do so as soon as they are
/// connected, so that more than a few at a time are a flood.
pub(crate) const CROWD: usize = 16;
/// How long a connection may take to prove itself and to say what it wants.
pub(crate) const GUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause after a crowd, so that a flood of connections costs a bounded part of a processor.
const REST: Duration = Duration::from_millis(2);

/// What a listener has turned away. Each connection that did not become a peer is in exactly one of these, but for
/// `accept_failed`, which counts attempts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Had another secret, or none.
    pub wrong_secret: u64,
    /// Said something that is not of the exchange.
    pub malformed: u64,
    /// Of another version, or came for something else.
    pub unfit: u64,
    /// Took too long, or were pushed out by a crowd.
    pub dropped_silent: u64,
    /// Closed before they had proved anything.
    pub gone_early: u64,
    /// Connections that could not be taken up for want of descriptors.
    pub accept_failed: u64,
    /// Knew the secret, and were told that there is a peer already.
    pub taken: u64,
}

impl Counts {
    /// All that were turned away without having proved that they know the secret.
    pub fn strangers(&self) -> u64 {
        self.wrong_secret + self.malformed + self.unfit + self.dropped_silent + self.gone_early
    }
}

/// A connection that has proved itself and said what it wants.
#[derive(Debug)]
pub(crate) struct Guest(Met);

impl Guest {
    /// Answers, and gives the stream: what comes on it from now on is not of the meeting. `None` when the guest has gone.
    pub(crate) fn answer(mut self, said: &[u8]) -> Option<Met> {
        let message = self.0.session.seal(said)?;
        // A few bytes into an empty socket: what does not go at once does not go.
        self.0.stream.write_all(&message).ok()?;
        Some(self.0)
    }
}

#[derive(Debug)]
struct Candidate {
    stream: TcpStream,
    state: State,
    since: Instant,
}

#[derive(Debug)]
enum State {
    Proving(Handshake),
    Saying(Session, Opener),
}

enum Heard {
    Nothing,
    Said(Vec<u8>),
    Failed(AuthError),
}

impl Candidate {
    fn hear(&mut self) -> Heard {
        loop {
            match &mut self.state {
                State::Proving(handshake) => match handshake.drive(&mut self.stream) {
                    Ok(None) => return Heard::Nothing,
                    Ok(Some(session)) => {
                        let opener = session.opener();
                        self.state = State::Saying(session, opener);
                    }
                    Err(e) => return Heard::Failed(e),
                },
                State::Saying(_, opener) => {
                    return match opener.next(&mut self.stream) {
                        Ok(None) => Heard::Nothing,
                        Ok(Some(said)) => Heard::Said(said),
                        Err(e) => Heard::Failed(e),
                    };
                }
            }
        }
    }
}

/// A socket that listens, and who has come.
#[derive(Debug)]
pub(super) struct Listener {
    socket: OwnedFd,
    candidates: Vec<Candidate>,
    /// Nothing is taken up before this moment.
    resting: Option<Instant>,
}

impl Listener {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            candidates: Vec::new(),
            resting: None,
        }
    }

    /// Takes connections up and returns those that have said what they want, in the order they came.
    pub(super) fn poll(&mut self, place: &Place, counts: &mut Counts) -> Vec<(Guest, Vec<u8>)> {
        let mut guests = Vec::new();
        self.hear(counts, &mut guests);
        if self.resting.is_some_and(|t| Instant::now() < t) {
            return guests;
        }
        self.resting = Some(Instant::now() + REST);
        for _ in 0..CROWD {
            match socket::accept(&self.socket) {
                Ok(Some(stream)) => self.admit(stream, place, counts),
                Ok(None) => {
                    self.resting = None;
                    break;
                }
                Err(_) => {
                    counts.accept_failed += 1; // what waits in the backlog goes on waiting
                    break;
                }
            }
        }
        self.hear(counts, &mut guests);
        guests
    }

    fn admit(&mut self, stream: TcpStream, place: &Place, counts: &mut Counts) {
        let handshake = Handshake::new(Role::Responder, place.purpose, &place.secret);
        let (Ok(handshake), Ok(())) = (handshake, socket::prepare(&stream, place.busy_poll)) else {
            counts.gone_early += 1;
            return;
        };
        if self.candidates.len() >= CROWD {
            counts.dropped_silent += 1;
            self.candidates.remove(0);
        }
        self.candidates.push(Candidate {
            stream,
            state: State::Proving(handshake),
            since: Instant::now(),
        });
    }

    fn hear(&mut self, counts: &mut Counts, guests: &mut Vec<(Guest, Vec<u8>)>) {
        for mut candidate in std::mem::take(&mut self.candidates) {
            match candidate.hear() {
                Heard::Nothing if candidate.since.elapsed() < GUEST_TIMEOUT => {
                    self.candidates.push(candidate);
                }
                Heard::Nothing => counts.dropped_silent += 1,
                Heard::Said(said) => {
                    if let State::Saying(session, opener) = candidate.state {
                        let met = Met {
                            stream: candidate.stream,
                            session,
                            opener,
                            round_trip: None,
                        };
                        guests.push((Guest(met), said));
                    }
                }
                Heard::Failed(AuthError::Proof | AuthError::Refused) => counts.wrong_secret += 1,
                Heard::Failed(AuthError::Malformed(_)) => counts.malformed += 1,
                Heard::Failed(AuthError::Version { .. } | AuthError::Purpose { .. }) => counts.unfit += 1,
                Heard::Failed(AuthError::Stream { .. }) => counts.gone_early += 1,
            }
        }
    }

    /// What to be woken by, and after how long at the latest.
    pub(super) fn wakers(&self) -> (Vec<(BorrowedFd<'_>, PollFlags)>, Option<Duration>) {
        let mut fds: Vec<_> = self
            .candidates
            .iter()
            .map(|c| (c.stream.as_fd(), PollFlags::IN))
            .collect();
        if self.resting.is_none() {
            fds.push((self.socket.as_fd(), PollFlags::IN));
        }
        let rest = self.resting.map(|_| REST);
        (fds, rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::{
        auth::{Purpose, Secret},
        conformance::until,
    };

    #[test]
    fn a_crowd_that_says_nothing_is_kept_as_small_as_it_may_be() {
        let socket = socket::listen(&([127, 0, 0, 1], 0).into()).unwrap();
        let address = rustix::net::getsockname(&socket).unwrap();
        let address = std::net::SocketAddr::try_from(address).unwrap();
        let secret = Secret::new(b"of the tests").unwrap();
        let place = Place::new(Purpose::Tcp, "127.0.0.1", address.port(), &secret, None).unwrap();
        let all = 3 * CROWD; // fits in the backlog
        let silent: Vec<_> = (0..all).map(|_| TcpStream::connect(address).unwrap()).collect();
        let (mut listener, mut counts) = (Listener::new(socket), Counts::default());
        until(|| {
            assert!(listener.poll(&place, &mut counts).is_empty());
            assert!(
                listener.candidates.len() <= CROWD,
                "{} are kept",
                listener.candidates.len()
            );
            counts.dropped_silent as usize + listener.candidates.len() == all
        });
        // Who came first had the most time, and was pushed out.
        for mut early in silent.into_iter().take(all - CROWD) {
            // What it was greeted with, and the end.
            let mut heard = Vec::new();
            let ended = std::io::Read::read_to_end(&mut early, &mut heard);
            assert!(ended.is_ok() && heard.len() <= crate::link::auth::HELLO_BYTES);
        }
    }
}
