//! Something a thread can sleep on until the peer rings.

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
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll},
    io::Errno,
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType},
};

use super::DOORBELLS;

/// Something a thread can sleep on until the peer rings.
#[derive(Clone, Debug)]
pub struct Doorbell(Arc<Bell>);

#[derive(Debug)]
enum Bell {
    /// An event descriptor, rung by the kernel or by this process.
    Event(OwnedFd),
    /// A pair of datagram sockets of which another process holds a copy of `ring`.
    ///
    /// Not an event descriptor: whether one of those blocks stands in the file description that both processes share,
    /// so a hostile peer could make a read or a write of ours sleep for ever. On sockets each call says for itself
    /// that it does not block.
    Shared { wake: OwnedFd, ring: OwnedFd },
    /// One of several doorbells whose rings arrive at one place: `wake` is readable when anything has arrived there or
    /// `local` was rung. Whoever wakes first hands the rings out, so that no thread stands between device and sleeper.
    Handed {
        local: Arc<OwnedFd>,
        wake: OwnedFd,
        hub: Arc<dyn Hub>,
    },
}

/// Where the rings of several doorbells arrive together.
pub(crate) trait Hub: Send + Sync + std::fmt::Debug {
    /// Takes what has arrived and rings the local descriptors that it is for.
    fn hand_out(&self);
}

/// Rings taken up in one go: more than a datagram socket ever queues by default, and a bound for a peer that rings
/// without end.
const TAKE_MAX: usize = 1024;

impl Doorbell {
    /// A doorbell over an event descriptor (counter semantics, non-blocking).
    pub fn new(fd: OwnedFd) -> Self {
        Self(Arc::new(Bell::Event(fd)))
    }

    /// A doorbell for use within this process.
    pub(crate) fn local() -> Result<Self, Errno> {
        rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self::new)
    }

    /// A doorbell whose rings arrive at `arrivals` together with others, from where `hub` hands them on to `local`.
    fn handed(local: Arc<OwnedFd>, arrivals: BorrowedFd<'_>, hub: Arc<dyn Hub>) -> Result<Self, Errno> {
        let wake = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for fd in [local.as_fd(), arrivals] {
            epoll::add(&wake, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        Ok(Self(Arc::new(Bell::Handed { local, wake, hub })))
    }

    /// What [`Doorbell::handed_all`] hands rings on to: one for each doorbell of a link.
    pub(crate) fn locals() -> Result<Vec<Arc<OwnedFd>>, Errno> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        (0..DOORBELLS)
            .map(|_| rustix::event::eventfd(0, flags).map(Arc::new))
            .collect()
    }

    /// All doorbells of a link, as [`Doorbell::handed`]; `locals` are those of [`Doorbell::locals`].
    pub(crate) fn handed_all(
        locals: &[Arc<OwnedFd>],
        arrivals: BorrowedFd<'_>,
        hub: &Arc<dyn Hub>,
    ) -> Result<[Self; DOORBELLS as usize], Errno> {
        let doorbells: Vec<_> = locals
            .iter()
            .map(|local| Self::handed(Arc::clone(local), arrivals, Arc::clone(hub)))
            .collect::<Result<_, _>>()?;
        doorbells.try_into().map_err(|_| Errno::INVAL)
    }

    /// A doorbell that another process of this machine can be given: see [`Doorbell::handle`].
    pub(crate) fn shared() -> Result<Self, Errno> {
        let (wake, ring) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )?;
        Ok(Self(Arc::new(Bell::Shared { wake, ring })))
    }

    /// What to hand to the process that is to ring, for its [`PeerBell`]. Gives away nothing but ringing.
    pub(crate) fn handle(&self) -> Option<BorrowedFd<'_>> {
        match &*self.0 {
            Bell::Event(_) | Bell::Handed { .. } => None,
            Bell::Shared { ring, .. } => Some(ring.as_fd()),
        }
    }

    /// Sleeps until rung or until `timeout`; takes all pending rings. True when there was one.
    pub fn wait(&self, timeout: Duration) -> bool {
        let start = Instant::now();
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            if sleep_on(&[self.as_fd()], left) && self.take() {
                return true;
            }
            if left.is_zero() {
                return false; // woken for others until then
            }
        }
    }

    /// Takes all pending rings without sleeping. True when there was one.
    pub fn take(&self) -> bool {
        match &*self.0 {
            Bell::Event(fd) => take_event(fd),
            Bell::Handed { local, hub, .. } => {
                hub.hand_out();
                take_event(local)
            }
            Bell::Shared { wake, .. } => {
                let mut byte = [0; 1];
                (0..TAKE_MAX)
                    .take_while(|_| rustix::net::recv(wake, &mut byte, RecvFlags::DONTWAIT).is_ok())
                    .count()
                    > 0
            }
        }
    }

    /// Rings it from this process.
    pub fn ring(&self) {
        match &*self.0 {
            Bell::Event(fd) => ring_event(fd),
            Bell::Handed { local, .. } => ring_event(local),
            Bell::Shared { ring, .. } => ring_socket(ring),
        }
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &*self.0 {
            Bell::Event(fd) | Bell::Shared { wake: fd, .. } | Bell::Handed { wake: fd, .. } => fd.as_fd(),
        }
    }
}

/// A doorbell of another process, as it handed it over.
#[derive(Debug)]
pub(crate) struct PeerBell(OwnedFd);

impl PeerBell {
    /// Takes a descriptor for what a [`Doorbell::handle`] is; `None` when it is anything but a local datagram socket
    /// whose other end has no name, such as one that would carry our rings to a system service.
    pub(crate) fn from_peer(fd: OwnedFd) -> Option<Self> {
        let local = rustix::net::sockopt::socket_domain(&fd) == Ok(AddressFamily::UNIX)
            && rustix::net::sockopt::socket_type(&fd) == Ok(SocketType::DGRAM);
        // An address that is a family and nothing else is that of a socket without a name; an error: not connected.
        // The address is not parsed, since the parser takes paths of the greatest length to be impossible.
        let nameless = matches!(rustix::net::getpeername(&fd),
            Ok(other) if other.as_ref().is_none_or(|o| o.addr_len() as usize == size_of::<u16>()));
        (local && nameless).then_some(Self(fd))
    }

    /// Rings it. Never blocks, whatever its owner has done to it.
    pub(crate) fn ring(&self) {
        ring_socket(&self.0);
    }
}

/// Takes what is pending on an event descriptor.
pub(crate) fn take_event(event: &OwnedFd) -> bool {
    let mut count = [0; 8];
    rustix::io::read(event, &mut count).is_ok()
}

/// Rings an event descriptor.
pub(crate) fn ring_event(event: &OwnedFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes()); // a full counter is a ring already
}

fn ring_socket(socket: &OwnedFd) {
    // A full queue is a ring already; a closed one has nobody to hear it.
    let _ = rustix::net::send(socket, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

/// Sleeps until one of `fds` is readable or until `timeout`. True when one is.
pub(crate) fn sleep_on(fds: &[BorrowedFd<'_>], timeout: Duration) -> bool {
    let fds: Vec<_> = fds.iter().map(|fd| (*fd, PollFlags::IN)).collect();
    sleep_on_any(&fds, timeout)
}

/// Sleeps until one of `fds` is ready or until `timeout`. True when one is.
pub(crate) fn sleep_on_any(fds: &[(BorrowedFd<'_>, PollFlags)], timeout: Duration) -> bool {
    let timeout = Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    let mut fds: Vec<_> = fds
        .iter()
        .map(|(fd, flags)| PollFd::from_borrowed_fd(*fd, *flags))
        .collect();
    matches!(rustix::event::poll(&mut fds, Some(&timeout)), Ok(n) if n > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT_ONCE: Duration = Duration::ZERO;
    const LONG: Duration = Duration::from_secs(20);

    fn both() -> [Doorbell; 2] {
        [Doorbell::local().unwrap(), Doorbell::shared().unwrap()]
    }

    #[test]
    fn many_rings_are_one_wake_up() {
        for bell in both() {
            assert!(!bell.wait(AT_ONCE));
            for _ in 0..2000 {
                bell.ring();
            }
            assert!(bell.wait(LONG));
            assert!(!bell.wait(AT_ONCE), "{bell:?}");
        }
    }

    #[test]
    fn a_peer_rings_through_what_it_was_handed_and_cannot_make_us_block() {
        let bell = Doorbell::shared().unwrap();
        let theirs = PeerBell::from_peer(bell.handle().unwrap().try_clone_to_owned().unwrap()).unwrap();
        // The peer clears the flag that it shares with us.
        for fd in [bell.handle().unwrap(), bell.as_fd()] {
            let flags = rustix::fs::fcntl_getfl(fd).unwrap();
            rustix::fs::fcntl_setfl(fd, flags - rustix::fs::OFlags::NONBLOCK).unwrap();
        }
        assert!(!bell.take());
        for _ in 0..2000 {
            theirs.ring();
            bell.ring();
        }
        assert!(bell.take());
        assert!(!bell.take());
    }

    #[test]
    fn an_owner_that_has_gone_is_rung_without_harm() {
        let bell = Doorbell::shared().unwrap();
        let theirs = PeerBell::from_peer(bell.handle().unwrap().try_clone_to_owned().unwrap()).unwrap();
        drop(bell);
        theirs.ring();
    }

    #[test]
    fn descriptors_that_are_no_doorbell_are_refused() {
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert!(PeerBell::from_peer(pipe).is_none());
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        assert!(PeerBell::from_peer(event).is_none());
        let (stream, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(PeerBell::from_peer(stream.into()).is_none());
        // One that leads to a service with a name.
        use std::os::linux::net::SocketAddrExt;
        let name = format!("ntb-test-bell-{}", std::process::id());
        let address = std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap();
        let _service = std::os::unix::net::UnixDatagram::bind_addr(&address).unwrap();
        let client = std::os::unix::net::UnixDatagram::unbound().unwrap();
        client.connect_addr(&address).unwrap();
        assert!(PeerBell::from_peer(client.into()).is_none());
        assert!(PeerBell::from_peer(std::os::unix::net::UnixDatagram::unbound().unwrap().into()).is_none());
    }
}
