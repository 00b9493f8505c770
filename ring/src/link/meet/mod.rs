//! How two ends meet at `HOST:PORT`: whoever can listen there does, the other calls; both prove that they know the
//! secret; each says one sealed thing, and then the stream is theirs.
//!
//! Both ends give the same address. Where it is one of this machine and free, this side listens; where it is somebody
//! else's, or taken, this side calls. So either may start first, and when the one that listens dies on a machine that both
//! are on, the other takes its place.
//!
//! Strangers get little: a bounded number of connections at a time that have not proved themselves, each for a bounded time
//! and with a bounded number of bytes, and none of it touches a stream that is in use.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

mod call;
mod listen;
pub(in crate::link) mod socket;
#[cfg(test)]
pub(in crate::link) mod tests;

use std::{
    net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs, UdpSocket},
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

use rustix::{event::PollFlags, io::Errno};

use super::{
    LinkError,
    auth::{AuthError, Opener, Purpose, Secret, Session},
};
use call::{Call, Progress};
pub use listen::Counts;
pub(crate) use listen::Guest;
use listen::Listener;

/// Pause after an attempt that was not answered properly.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// Attempts that may fail for what could be chance, such as a crowd of strangers, before it counts as final.
const STRIKES: u32 = 8;
/// Longest sleep while nothing can wake this side that would be news to it.
const SEEKING_PAUSE: Duration = Duration::from_millis(10);
/// Shortest time between two words about strangers.
const STRANGERS_EVERY: Duration = Duration::from_secs(1);

/// Where and how to meet.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// As the user wrote it, for messages: `tcp:HOST:PORT`.
    pub(crate) address: String,
    pub(crate) purpose: Purpose,
    pub(crate) secret: Secret,
    pub(crate) targets: Vec<SocketAddr>,
    /// See [`crate::link::tcp::TcpOptions::busy_poll`].
    pub(crate) busy_poll: Option<Duration>,
}

impl Place {
    /// Looks the host up, and refuses addresses that a network can reach unless there is a secret.
    pub(crate) fn new(
        purpose: Purpose,
        host: &str,
        port: u16,
        secret: &Secret,
        busy_poll: Option<Duration>,
    ) -> Result<Self, LinkError> {
        let bracketed = if host.contains(':') {
            format!("[{host}]")
        } else {
            host.to_owned()
        };
        let address = format!("{}:{bracketed}:{port}", purpose.name());
        let targets: Vec<SocketAddr> = (host, port)
            .to_socket_addrs()
            .map_err(|e| LinkError {
                name: "no-such-host",
                exit: 4,
                what: format!("{address}: the address of host '{host}' cannot be found: {e}"),
                errno: e.raw_os_error(),
            })?
            .collect();
        if let (Some(open), false) = (targets.iter().find(|t| !t.ip().is_loopback()), secret.is_some()) {
            return Err(LinkError {
                name: "secret-needed",
                exit: 6,
                what: format!(
                    "{address}: {} is not an address of the loopback, where anybody on the network could be the peer: give \
                     both ends the same secret (option --secret-file, or NTB_SECRET in the environment)",
                    open.ip()
                ),
                errno: None,
            });
        }
        if let Some(time) = busy_poll {
            socket::try_busy_poll(&address, time)?;
        }
        Ok(Self {
            address,
            purpose,
            secret: secret.clone(),
            targets,
            busy_poll,
        })
    }

    /// The address of this machine that the peer is met by, where there is a way to it.
    pub(crate) fn own_address(&self) -> Option<IpAddr> {
        let target = self.targets.first().filter(|t| !t.ip().is_unspecified())?;
        let any: IpAddr = match target {
            SocketAddr::V4(_) => IpAddr::from([0; 4]),
            SocketAddr::V6(_) => IpAddr::from([0; 16]),
        };
        // Nothing is sent: the kernel says which address a packet would leave by, and that is the target if it is here.
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect(target).ok()?;
        socket.local_addr().ok().map(|own| own.ip())
    }
}

/// A stream to somebody who has proved to be a peer, once each has said its one thing. Whoever wants to say more in sealed
/// messages goes on with `session` and `opener`.
#[derive(Debug)]
pub(crate) struct Met {
    pub(crate) stream: TcpStream,
    pub(crate) session: Session,
    pub(crate) opener: Opener,
    /// What a round trip took at the most, threads asleep and proofs included; of the side that called.
    pub(crate) round_trip: Option<Duration>,
}

/// Somebody who has proved to be a peer.
#[derive(Debug)]
pub(crate) enum Arrival {
    /// Called here and said this; it waits for an answer.
    Guest(Guest, Vec<u8>),
    /// Was called, and has answered what this side said.
    Host(Met, Vec<u8>),
}

#[derive(Debug)]
enum Role {
    /// Neither listens nor calls.
    Seeking,
    Calling(Box<Call>),
    /// Has called and got through.
    Called,
    /// Listens, whether it has a peer or not.
    Listening(Listener),
}

/// One end, looking for the other for as long as it lives.
#[derive(Debug)]
pub(crate) struct Meeting {
    place: Place,
    role: Role,
    /// Which of the addresses is called next.
    next: usize,
    strikes: u32,
    not_before: Option<Instant>,
    /// Since when those who are called have had another peer.
    taken_since: Option<Instant>,
    counts: Counts,
    /// Strangers last told of, and when.
    told: (u64, Option<Instant>),
}

impl Meeting {
    pub(crate) fn new(place: Place) -> Self {
        Self {
            place,
            role: Role::Seeking,
            next: 0,
            strikes: 0,
            not_before: None,
            taken_since: None,
            counts: Counts::default(),
            told: (0, None),
        }
    }

    pub(crate) fn place(&self) -> &Place {
        &self.place
    }

    /// As the user wrote it.
    pub(crate) fn address(&self) -> &str {
        &self.place.address
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    /// Whether this side is the one that is called.
    pub(crate) fn was_called(&self) -> bool {
        matches!(self.role, Role::Listening(_))
    }

    /// Counts a guest that was told that there is a peer already.
    pub(crate) fn count_taken(&mut self) {
        self.counts.taken += 1;
    }

    /// Goes on without waiting. `greeting` is what this side says when it calls. An error is final.
    pub(crate) fn poll(&mut self, greeting: &[u8]) -> Result<Vec<Arrival>, LinkError> {
        if let Role::Listening(listener) = &mut self.role {
            let guests = listener.poll(&self.place, &mut self.counts);
            return Ok(guests
                .into_iter()
                .map(|(guest, said)| Arrival::Guest(guest, said))
                .collect());
        }
        if matches!(self.role, Role::Seeking) {
            self.seek(greeting)?;
        }
        let Role::Calling(call) = &mut self.role else {
            return Ok(Vec::new());
        };
        match call.drive() {
            Ok(Progress::Waiting) => Ok(Vec::new()),
            Ok(Progress::Answered(met, said)) => {
                self.role = Role::Called;
                self.strikes = 0;
                Ok(vec![Arrival::Host(*met, said)])
            }
            Ok(Progress::Nobody) => {
                self.strikes = 0;
                self.pause();
                Ok(Vec::new())
            }
            Ok(Progress::TimedOut) => {
                self.pause();
                Ok(Vec::new())
            }
            Err(e @ (AuthError::Version { .. } | AuthError::Purpose { .. })) => {
                Err(e.into_link_error(&self.place.address))
            }
            Err(e) => {
                self.strikes += 1;
                if self.strikes >= STRIKES {
                    return Err(e.into_link_error(&self.place.address));
                }
                self.pause();
                Ok(Vec::new())
            }
        }
    }

    /// Looks for the peer again, after one that was called was lost or has said something unfit. Who listens goes on.
    pub(crate) fn again(&mut self) {
        if !matches!(self.role, Role::Listening(_)) {
            self.pause();
        }
    }

    /// Whoever was called has a peer already: looks for it again, since that one may have died without its knowing yet.
    /// False when it has been so for longer than `patience`.
    pub(crate) fn again_if_taken(&mut self, patience: Duration) -> bool {
        let since = *self.taken_since.get_or_insert_with(Instant::now);
        self.again();
        since.elapsed() < patience
    }

    /// There is a peer now: what was said of others being taken is over.
    pub(crate) fn settled(&mut self) {
        self.taken_since = None;
    }

    /// Strangers who have come since the last time, in words, and not too often.
    pub(crate) fn news_of_strangers(&mut self) -> Option<String> {
        let (told, when) = self.told;
        let all = self.counts.strangers();
        if all <= told || when.is_some_and(|t| t.elapsed() < STRANGERS_EVERY) {
            return None;
        }
        self.told = (all, Some(Instant::now()));
        Some(format!(
            "{} connections turned away; {} in all had another secret or none",
            all - told,
            self.counts.wrong_secret
        ))
    }

    fn pause(&mut self) {
        self.role = Role::Seeking;
        self.not_before = Some(Instant::now() + RETRY_PAUSE);
    }

    /// Listens if that can be, and calls otherwise.
    fn seek(&mut self, greeting: &[u8]) -> Result<(), LinkError> {
        if self.not_before.is_some_and(|t| Instant::now() < t) {
            return Ok(());
        }
        self.not_before = None;
        let mut taken = Vec::new();
        for target in &self.place.targets {
            match socket::listen(target) {
                Ok(socket) => {
                    self.role = Role::Listening(Listener::new(socket));
                    return Ok(());
                }
                Err(Errno::ADDRINUSE) => taken.push(*target),
                Err(e @ (Errno::MFILE | Errno::NFILE)) => {
                    return Err(socket::error(&self.place.address, "listening", e));
                }
                Err(_) => {} // not an address of this machine, mostly: then it is the other side's
            }
        }
        let candidates = if taken.is_empty() {
            &self.place.targets
        } else {
            &taken
        };
        let target = candidates.get(self.next % candidates.len().max(1));
        self.next = self.next.wrapping_add(1);
        let Some(target) = target else {
            return Ok(());
        };
        match Call::start(&self.place, target, greeting) {
            Ok(call) => self.role = Role::Calling(Box::new(call)),
            Err(e @ (Errno::MFILE | Errno::NFILE)) => {
                return Err(socket::error(&self.place.address, "connecting", e));
            }
            Err(_) => self.pause(), // no way there at the moment
        }
        Ok(())
    }

    /// What to be woken by, and after how long at the latest.
    pub(crate) fn wakers(&self) -> (Vec<(BorrowedFd<'_>, PollFlags)>, Option<Duration>) {
        match &self.role {
            Role::Seeking => (Vec::new(), Some(SEEKING_PAUSE)),
            Role::Calling(call) => (call.waker().into_iter().collect(), None),
            Role::Called => (Vec::new(), None),
            Role::Listening(listener) => listener.wakers(),
        }
    }
}
