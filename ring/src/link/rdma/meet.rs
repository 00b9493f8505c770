//! How the two sides find each other before RDMA can be used: over TCP, with proof of the shared secret.
//!
//! At an address of this machine the first side listens and the other calls; at one of another machine this side calls, again
//! and again until somebody listens. Whoever has not proved itself costs a place in a short queue for a moment, and nothing
//! that it sends is looked at but the proof.

use std::{
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{io::Errno, net::sockopt};

use crate::link::{
    LinkError,
    auth::{AuthError, Handshake, Purpose, Role, Secret, Session},
    meet::{Place, socket},
};

/// Connections that may be proving themselves at a time.
const CROWD: usize = 8;
/// Time that one may take for it.
const PATIENCE: Duration = Duration::from_secs(2);
/// Pause after a call that found nobody.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// A stream to a peer that has proved itself.
#[derive(Debug)]
pub(super) struct Met {
    pub(super) stream: TcpStream,
    pub(super) session: Session,
}

/// A stream that is proving itself.
#[derive(Debug)]
struct Guest {
    stream: TcpStream,
    handshake: Handshake,
    since: Instant,
}

#[derive(Debug)]
enum State {
    /// Neither listens nor calls.
    Seeking,
    Connecting(OwnedFd, Instant),
    Proving(Guest),
    /// Has called and been heard.
    Called,
    Listening(OwnedFd, Vec<Guest>),
}

/// What was turned away while meeting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MeetCounts {
    /// Connections that could not prove themselves or said something else.
    pub refused: u64,
    /// Connections closed at once because too many were proving themselves.
    pub crowded: u64,
}

/// The meeting place.
#[derive(Debug)]
pub(super) struct Meet {
    place: Place,
    /// Whether one of its addresses is of this machine.
    local: bool,
    state: State,
    not_before: Option<Instant>,
    counts: MeetCounts,
}

impl Meet {
    /// Finds the host's addresses. Without a secret only the loopback will do.
    pub(super) fn new(host: &str, port: u16, secret: &Secret) -> Result<Self, LinkError> {
        let place = Place::new(Purpose::Rdma, host.trim_matches(['[', ']']), port, secret, None)?;
        Ok(Self {
            local: place.targets.iter().any(|address| is_own(address.ip())),
            place,
            state: State::Seeking,
            not_before: None,
            counts: MeetCounts::default(),
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.place.address
    }

    pub(super) fn counts(&self) -> MeetCounts {
        self.counts
    }

    /// The address of this machine that the peer is met by: what the device should have too.
    pub(super) fn own_address(&self) -> Option<IpAddr> {
        let address = self.place.targets.first()?;
        if self.local {
            return (!address.ip().is_unspecified()).then_some(address.ip());
        }
        // Nothing is sent: the kernel says which address a packet would leave by.
        let any: IpAddr = match address {
            SocketAddr::V4(_) => IpAddr::from([0; 4]),
            SocketAddr::V6(_) => IpAddr::from([0; 16]),
        };
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect(address).ok()?;
        socket.local_addr().ok().map(|own| own.ip())
    }

    /// The connection of the moment has ended: whoever called calls again.
    pub(super) fn over(&mut self) {
        if !matches!(self.state, State::Listening(..)) {
            self.pause();
        }
    }

    fn pause(&mut self) {
        self.state = State::Seeking;
        self.not_before = Some(Instant::now() + RETRY_PAUSE);
    }

    /// Goes on without blocking. `taken`: there is a peer already. Errors are final: the peer is there, and not one to be
    /// had.
    pub(super) fn poll(&mut self, taken: bool) -> Result<Option<Met>, LinkError> {
        if self.not_before.is_some_and(|t| Instant::now() < t) {
            return Ok(None);
        }
        self.not_before = None;
        match &mut self.state {
            State::Listening(..) => Ok(self.hear(taken)),
            _ if taken => Ok(None),
            State::Seeking | State::Called => self.seek().map(|()| None),
            State::Connecting(..) => self.connecting().map(|()| None),
            State::Proving(_) => self.prove(),
        }
    }

    fn seek(&mut self) -> Result<(), LinkError> {
        for target in self.place.targets.iter().filter(|_| self.local) {
            match socket::listen(target) {
                Ok(listener) => {
                    self.state = State::Listening(listener, Vec::new());
                    return Ok(());
                }
                Err(Errno::ADDRINUSE | Errno::ADDRNOTAVAIL) => {}
                Err(e) => return Err(socket::error(&self.place.address, "listening", e)),
            }
        }
        let to = self.place.targets.first().copied().map(reachable);
        match to.map(|to| socket::connect(&to)) {
            Some(Ok(fd)) => self.state = State::Connecting(fd, Instant::now()),
            _ => self.pause(),
        }
        Ok(())
    }

    fn connecting(&mut self) -> Result<(), LinkError> {
        let State::Connecting(fd, since) = std::mem::replace(&mut self.state, State::Seeking) else {
            return Ok(());
        };
        let refused = sockopt::socket_error(&fd).is_ok_and(|result| result.is_err());
        if refused || since.elapsed() > PATIENCE {
            self.pause();
        } else if !socket::is_writable(&fd) {
            self.state = State::Connecting(fd, since);
        } else {
            let stream = TcpStream::from(fd);
            if socket::is_itself(&stream) {
                self.pause();
            } else {
                let guest = self.guest(stream, Role::Initiator);
                self.state = guest.map_or(State::Seeking, State::Proving);
            }
        }
        Ok(())
    }

    fn guest(&self, stream: TcpStream, role: Role) -> Option<Guest> {
        socket::prepare(&stream, self.place.busy_poll).ok()?;
        Some(Guest {
            handshake: Handshake::new(role, self.place.purpose, &self.place.secret).ok()?,
            stream,
            since: Instant::now(),
        })
    }

    fn prove(&mut self) -> Result<Option<Met>, LinkError> {
        let State::Proving(mut guest) = std::mem::replace(&mut self.state, State::Called) else {
            return Ok(None);
        };
        match guest.handshake.drive(&mut guest.stream) {
            Ok(Some(session)) => Ok(Some(Met {
                stream: guest.stream,
                session,
            })),
            Ok(None) if guest.since.elapsed() < PATIENCE => {
                self.state = State::Proving(guest);
                Ok(None)
            }
            // Another caller may have been faster, or the peer is just going.
            Ok(None) | Err(AuthError::Stream { .. } | AuthError::Malformed(_)) => {
                self.pause();
                Ok(None)
            }
            Err(e) => Err(e.into_link_error(&self.place.address)),
        }
    }

    fn hear(&mut self, taken: bool) -> Option<Met> {
        let State::Listening(listener, guests) = &mut self.state else {
            return None;
        };
        let mut new = Vec::new();
        while new.len() < CROWD
            && let Ok(Some(stream)) = socket::accept(listener)
        {
            new.push(stream);
        }
        let mut waiting = std::mem::take(guests);
        for stream in new {
            match waiting.len() < CROWD {
                true => waiting.extend(self.guest(stream, Role::Responder)),
                false => self.counts.crowded += 1,
            }
        }
        let (mut met, mut kept) = (None, Vec::new());
        for mut guest in waiting {
            match guest.handshake.drive(&mut guest.stream) {
                Ok(Some(session)) if met.is_none() && !taken => {
                    met = Some(Met {
                        stream: guest.stream,
                        session,
                    });
                }
                Ok(Some(_)) => {} // it has a peer
                Ok(None) if guest.since.elapsed() < PATIENCE => kept.push(guest),
                Ok(None) | Err(_) => self.counts.refused += 1,
            }
        }
        if let State::Listening(_, guests) = &mut self.state {
            *guests = kept;
        }
        met
    }

    /// What wakes this side, besides time.
    pub(super) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        match &self.state {
            State::Seeking | State::Called => Vec::new(),
            State::Connecting(..) => Vec::new(), // becomes writable, which is not waited for
            State::Proving(guest) => vec![guest.stream.as_fd()],
            State::Listening(listener, guests) => {
                let guests = guests.iter().map(|guest| guest.stream.as_fd());
                std::iter::once(listener.as_fd()).chain(guests).collect()
            }
        }
    }

    /// Whether this side has to look again soon without being woken.
    pub(super) fn is_restless(&self) -> bool {
        !matches!(self.state, State::Listening(..) | State::Called)
    }
}

/// Whether an address is this machine's: only those can be bound.
fn is_own(ip: IpAddr) -> bool {
    ip.is_loopback() || ip.is_unspecified() || UdpSocket::bind((ip, 0)).is_ok()
}

/// Where to call a side that listens at any address.
fn reachable(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(a) if a.ip().is_unspecified() => SocketAddr::from(([127, 0, 0, 1], a.port())),
        SocketAddr::V6(a) if a.ip().is_unspecified() => {
            SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], a.port()))
        }
        other => other,
    }
}
