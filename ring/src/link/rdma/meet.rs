//! How the two sides find each other before RDMA can be used: over TCP, with proof of the shared secret.
//!
//! At an address of this machine the first side listens and the other calls; at one of another machine this side calls, again
//! and again until somebody listens. Whoever has not proved itself costs a place in a short queue for a moment, and nothing
//! that it sends is looked at but the proof.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket},
    os::fd::{AsFd, BorrowedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, sockopt},
};

use super::error::failed;
use crate::link::{
    LinkError,
    auth::{AuthError, Handshake, Purpose, Role, Secret, Session},
};

/// Connections that may be proving themselves at a time.
const CROWD: usize = 8;
/// Time that one may take for it.
const PATIENCE: Duration = Duration::from_secs(2);
/// Pause after a call that found nobody.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// Time after which a host that does not acknowledge anything is dead to the stream.
const USER_TIMEOUT_MS: u32 = 10_000;

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
    Connecting(TcpStream, Instant),
    Proving(Guest),
    /// Has called and been heard.
    Called,
    Listening(TcpListener, Vec<Guest>),
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
    name: String,
    addresses: Vec<SocketAddr>,
    /// Whether one of them is of this machine.
    local: bool,
    secret: Secret,
    state: State,
    not_before: Option<Instant>,
    counts: MeetCounts,
}

impl Meet {
    /// Finds the host's addresses. Without a secret only the loopback will do.
    pub(super) fn new(host: &str, port: u16, secret: &Secret) -> Result<Self, LinkError> {
        let name = format!("rdma:{host}:{port}");
        let addresses: Vec<SocketAddr> = (host.trim_matches(['[', ']']), port)
            .to_socket_addrs()
            .map_err(|e| LinkError {
                name: "no-such-host",
                exit: 4,
                what: format!("{name}: the address of host '{host}' cannot be found: {e}"),
                errno: e.raw_os_error(),
            })?
            .collect();
        if !secret.is_some() && !addresses.iter().all(|address| address.ip().is_loopback()) {
            return Err(failed(
                "secret-needed",
                2,
                format!(
                    "{name}: without a shared secret a link over RDMA meets at loopback addresses only: give both ends the same \
                     secret"
                ),
            ));
        }
        Ok(Self {
            local: addresses.iter().any(|address| is_own(address.ip())),
            name,
            addresses,
            secret: secret.clone(),
            state: State::Seeking,
            not_before: None,
            counts: MeetCounts::default(),
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn counts(&self) -> MeetCounts {
        self.counts
    }

    /// The address of this machine that the peer is met by: what the device should have too.
    pub(super) fn own_address(&self) -> Option<IpAddr> {
        let address = self.addresses.first()?;
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
        if self.local {
            match TcpListener::bind(self.addresses.as_slice()) {
                Ok(listener) => {
                    let _ = listener.set_nonblocking(true);
                    self.state = State::Listening(listener, Vec::new());
                    return Ok(());
                }
                Err(e) if e.kind() == io::ErrorKind::AddrInUse => {}
                Err(e) => {
                    return Err(LinkError {
                        name: "rdma-meeting",
                        exit: 6,
                        what: format!("{}: no peer can be waited for there: {e}", self.name),
                        errno: e.raw_os_error(),
                    });
                }
            }
        }
        let to = self.addresses.first().copied().map(reachable);
        match to.map(connect) {
            Some(Ok(stream)) => self.state = State::Connecting(stream, Instant::now()),
            _ => self.pause(),
        }
        Ok(())
    }

    fn connecting(&mut self) -> Result<(), LinkError> {
        let State::Connecting(stream, since) = std::mem::replace(&mut self.state, State::Seeking) else {
            return Ok(());
        };
        let mut fds = [PollFd::new(&stream, PollFlags::OUT)];
        let ready = rustix::event::poll(
            &mut fds,
            Some(&Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            }),
        );
        let refused = sockopt::socket_error(&stream).is_ok_and(|result| result.is_err());
        if refused || since.elapsed() > PATIENCE {
            self.pause();
        } else if ready == Ok(0) {
            self.state = State::Connecting(stream, since);
        } else if stream.peer_addr().ok() == stream.local_addr().ok() {
            self.pause(); // connected to itself, as can happen on the loopback when nobody listens
        } else {
            let guest = self.guest(stream, Role::Initiator);
            self.state = guest.map_or(State::Seeking, State::Proving);
        }
        Ok(())
    }

    fn guest(&self, stream: TcpStream, role: Role) -> Option<Guest> {
        stream.set_nonblocking(true).ok()?;
        stream.set_nodelay(true).ok()?;
        sockopt::set_socket_keepalive(&stream, true).ok()?;
        let _ = sockopt::set_tcp_user_timeout(&stream, USER_TIMEOUT_MS);
        Some(Guest {
            handshake: Handshake::new(role, Purpose::Rdma, &self.secret).ok()?,
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
            Err(e) => Err(e.into_link_error(&self.name)),
        }
    }

    fn hear(&mut self, taken: bool) -> Option<Met> {
        let State::Listening(listener, guests) = &mut self.state else {
            return None;
        };
        let mut new = Vec::new();
        while new.len() < CROWD
            && let Ok((stream, _)) = listener.accept()
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

/// Begins to connect.
fn connect(to: SocketAddr) -> Result<TcpStream, Errno> {
    let family = match to {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(TcpStream::from(socket)),
        Err(e) => Err(e),
    }
}
