//! The side that was there first: takes connections up and hears their greetings. Never waits for any of them.

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
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use super::{
    Counts,
    credentials::Credentials,
    greeting::{Greeting, Malformed, Message, Reason},
    policy::Policy,
    socket::{self, Heard, Socket},
};

/// Connections taken up in one poll, and kept that have not greeted yet. A peer greets as soon as it is connected, so
/// that more than a few at a time are a flood.
const CROWD: usize = 16;
/// How long a connection may keep its greeting to itself.
const GREETING_TIMEOUT: Duration = Duration::from_secs(1);

/// A connection that has not greeted yet.
#[derive(Debug)]
struct Guest {
    socket: Socket,
    who: Credentials,
    since: Instant,
}

/// A connection that has greeted as a peer does.
#[derive(Debug)]
pub(super) struct Candidate {
    pub(super) socket: Socket,
    pub(super) who: Credentials,
    pub(super) greeting: Greeting,
    pub(super) fds: Vec<OwnedFd>,
}

/// A bound name.
#[derive(Debug)]
pub(super) struct Listener {
    socket: Socket,
    guests: Vec<Guest>,
    /// There is more than is taken up in one go, or nothing can be taken up: not to be woken by it for now.
    resting: bool,
}

impl Listener {
    pub(super) fn new(socket: Socket) -> Self {
        Self {
            socket,
            guests: Vec::new(),
            resting: false,
        }
    }

    /// Takes up connections and returns those that have greeted, in the order they came.
    pub(super) fn poll(&mut self, policy: &Policy, counts: &mut Counts) -> Vec<Candidate> {
        let mut greeted = Vec::new();
        self.hear(policy, counts, &mut greeted);
        self.resting = true;
        for _ in 0..CROWD {
            match socket::accept(&self.socket) {
                Ok(Some(socket)) => self.admit(socket, policy, counts),
                Ok(None) => {
                    self.resting = false;
                    break;
                }
                Err(_) => {
                    counts.accept_failed += 1; // too many open files, mostly: what waits in the backlog goes on waiting
                    break;
                }
            }
        }
        self.hear(policy, counts, &mut greeted);
        greeted
    }

    fn admit(&mut self, socket: Socket, policy: &Policy, counts: &mut Counts) {
        let permitted = Credentials::of_peer(&socket).map(|who| (who, policy.permits(&socket, who)));
        let Ok((who, true)) = permitted else {
            counts.refused_permission += 1;
            // The socket is new and its queue empty: this does not fail, and nothing hangs on it if it does.
            let _ = socket::send(&socket, &policy.refusal(Reason::Permission, [0; 2]), &[]);
            return;
        };
        if self.guests.len() >= CROWD {
            counts.dropped_silent += 1;
            self.guests.remove(0);
        }
        self.guests.push(Guest {
            socket,
            who,
            since: Instant::now(),
        });
    }

    fn hear(&mut self, policy: &Policy, counts: &mut Counts, greeted: &mut Vec<Candidate>) {
        for guest in std::mem::take(&mut self.guests) {
            match socket::receive(&guest.socket) {
                Heard::Nothing if guest.since.elapsed() < GREETING_TIMEOUT => self.guests.push(guest),
                Heard::Nothing => counts.dropped_silent += 1,
                Heard::Gone => counts.gone_early += 1,
                Heard::Message(Message::Greeting(greeting), fds) => greeted.push(Candidate {
                    socket: guest.socket,
                    who: guest.who,
                    greeting,
                    fds,
                }),
                // Refusals are for those who call; whoever says this to a listener cannot make it give up its name.
                Heard::Message(Message::Refusal(_), _) => counts.refused_by_caller += 1,
                Heard::Malformed(Malformed::Version(_)) => {
                    counts.refused_version += 1;
                    let _ = socket::send(&guest.socket, &policy.refusal(Reason::Version, [0; 2]), &[]);
                }
                Heard::Malformed(_) => counts.malformed += 1,
                Heard::Limits => {
                    counts.accept_failed += 1;
                    let _ = socket::send(&guest.socket, &policy.refusal(Reason::Limits, [0; 2]), &[]);
                }
            }
        }
    }

    /// What to be woken by.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let own = (!self.resting).then(|| self.socket.as_fd());
        own.into_iter()
            .chain(self.guests.iter().map(|g| g.socket.as_fd()))
    }
}
