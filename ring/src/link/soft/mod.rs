//! A link between two processes of one machine, which needs no hardware.
//!
//! The sides meet on an abstract socket made from the link's name: whoever comes first listens, the other calls. Each
//! makes its own memory once and hands the descriptors over; from then on nothing goes through the socket, whose end
//! tells that the peer has died. Then the one that listens goes on listening, and the one that called becomes the
//! listener, so that a peer that is restarted finds it. Nothing has a name in any file system, so a process killed at
//! any moment leaves nothing.
//!
//! Who may connect is decided by the peer's credentials as the kernel tells them: the same effective user, or, where
//! [`SoftOptions::group`] says so, members of a group.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

mod credentials;
mod error;
pub mod greeting;
mod listener;
mod options;
mod policy;
mod socket;
#[cfg(test)]
mod tests;

use std::{
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use ntb_mem::region::{Pages, View};
use rustix::{io::Errno, net::SocketAddrUnix};

use super::{
    Doorbell, Link, LinkError, LinkFacts, LinkKind, LinkState, LinkStatus, Registers,
    doorbell::sleep_on,
    ends::{NO_REGISTERS, Own, Peer, Unfit},
    engine::{Engine, Order},
};
use credentials::Credentials;
use greeting::{Greeting, Malformed, Message, Reason};
use listener::{Candidate, Listener};
pub use options::{Counts, SoftOptions};
use policy::Policy;
use socket::{Heard, Socket};

/// What this side does to find its peer.
#[derive(Debug)]
enum Role {
    /// Neither holds the name nor calls.
    Seeking,
    /// Has greeted the holder of the name and waits for its greeting.
    Calling { socket: Socket, holder: Credentials },
    /// Has called and is connected.
    Called,
    /// Holds the name, connected or not.
    Listening(Listener),
}

/// The peer of the moment.
#[derive(Debug)]
struct Connected {
    socket: Socket,
    who: Credentials,
    /// Tells of the process's death, where the kernel can; the socket does not while a child that it forked has a copy.
    process: Option<OwnedFd>,
    peer: Peer,
}

impl Connected {
    fn new(socket: Socket, who: Credentials, peer: Peer) -> Self {
        Self {
            socket,
            who,
            process: who.process(),
            peer,
        }
    }

    fn process_ended(&self) -> bool {
        self.process
            .as_ref()
            .is_some_and(|p| sleep_on(&[p.as_fd()], Duration::ZERO))
    }
}

/// A link under a name on this machine.
#[derive(Debug)]
pub struct SoftLink {
    name: String,
    address: SocketAddrUnix,
    policy: Policy,
    own: Own,
    role: Role,
    connected: Option<Connected>,
    losses: u64,
    counts: Counts,
    /// No attempt before this moment, after one that ended oddly.
    not_before: Option<Instant>,
}

/// Pause after a call that was not answered properly.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// Longest sleep while nothing can wake this side that would be news to it.
const SEEKING_PAUSE: Duration = Duration::from_millis(5);

impl SoftLink {
    /// Makes this side of the link called `name`. Its memory is allocated here; the peer is met in [`Link::poll`].
    pub fn open(name: &str, options: &SoftOptions) -> Result<Self, LinkError> {
        let address = socket::address(name).map_err(|e| error::bad_name(name, e))?;
        // A hole punched by its owner into huge pages makes the next store of ours fail when the pool is empty, so that
        // a peer of another user could kill this process: between users there are none.
        let pages = match options.group {
            Some(_) if options.pages == Pages::Huge => return Err(error::huge_between_users(name)),
            Some(_) => Pages::Normal,
            None => options.pages,
        };
        Ok(Self {
            name: name.to_owned(),
            address,
            policy: Policy {
                own: Credentials::own(),
                group: options.group,
            },
            own: Own::new(options.window_bytes, pages)?,
            role: Role::Seeking,
            connected: None,
            losses: 0,
            counts: Counts::default(),
            not_before: None,
        })
    }

    /// What was turned away so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Process id of the peer by the kernel's word; `None` when there is no peer, 0 when it has no id here.
    pub fn peer_pid(&self) -> Option<u32> {
        self.connected.as_ref().map(|c| c.who.pid)
    }

    /// Notices the end of the peer.
    fn check_peer(&mut self) {
        let Some(connected) = &self.connected else { return };
        match socket::receive(&connected.socket) {
            Heard::Nothing if !connected.process_ended() => return,
            Heard::Nothing | Heard::Gone => {}
            _ => self.counts.malformed += 1, // nothing is said after the greetings
        }
        self.connected = None; // drops the peer's memory and doorbells
        self.losses += 1;
        if matches!(self.role, Role::Called) {
            self.role = Role::Seeking;
        }
    }

    fn seek(&mut self) -> Result<(), LinkError> {
        if self.not_before.is_some_and(|t| Instant::now() < t) {
            return Ok(());
        }
        self.not_before = None;
        match socket::connect(&self.address) {
            Ok(socket) => self.call(socket),
            Err(Errno::CONNREFUSED) => match socket::listen(&self.address) {
                Ok(socket) => {
                    self.role = Role::Listening(Listener::new(socket));
                    Ok(())
                }
                Err(Errno::ADDRINUSE) => Ok(()), // somebody else was faster: call next time
                Err(e) => Err(error::socket(&self.name, "listening", e)),
            },
            Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(()), // the holder's queue is full
            Err(e) => Err(error::socket(&self.name, "connecting", e)),
        }
    }

    /// Greets the holder of the name.
    fn call(&mut self, socket: Socket) -> Result<(), LinkError> {
        let holder =
            Credentials::of_peer(&socket).map_err(|e| error::socket(&self.name, "asking who holds it", e))?;
        if !self.policy.permits(&socket, holder) {
            let _ = socket::send(&socket, &self.policy.refusal(Reason::Permission, [0; 2]), &[]);
            return Err(error::held_by_stranger(&self.name, holder, &self.policy));
        }
        self.own.clear_registers();
        match socket::send(&socket, &self.greeting(), &self.own.descriptors()) {
            // Closed already: what it said before that is to be heard.
            Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => self.role = Role::Calling { socket, holder },
            Err(_) => self.pause(), // too many descriptors are under way
        }
        Ok(())
    }

    fn greeting(&self) -> Message {
        Message::Greeting(Greeting {
            window_bytes: self.own.window().bytes(),
            pid: self.policy.own.pid,
        })
    }

    fn pause(&mut self) {
        self.role = Role::Seeking;
        self.not_before = Some(Instant::now() + RETRY_PAUSE);
    }

    /// Hears the answer to a call.
    fn hear_answer(&mut self) -> Result<(), LinkError> {
        let Role::Calling { socket, .. } = &self.role else {
            return Ok(());
        };
        let heard = socket::receive(socket);
        if matches!(heard, Heard::Nothing) {
            return Ok(());
        }
        let Role::Calling { socket, holder } = std::mem::replace(&mut self.role, Role::Seeking) else {
            return Ok(());
        };
        match heard {
            Heard::Nothing => {}
            Heard::Gone => self.counts.gone_early += 1,
            Heard::Message(Message::Greeting(greeting), fds) => match self.peer_from(holder, greeting, fds) {
                Ok(peer) => {
                    self.connected = Some(Connected::new(socket, holder, peer));
                    self.role = Role::Called;
                }
                Err(_) => {
                    self.counts.refused_unfit += 1;
                    self.pause();
                }
            },
            Heard::Message(Message::Refusal(refusal), _) => {
                return Err(error::refused(&self.name, &refusal, holder, self.policy.own));
            }
            Heard::Malformed(Malformed::Version(theirs)) => {
                return Err(error::version(&self.name, theirs, holder));
            }
            Heard::Limits => return Err(error::limits(&self.name)),
            // Whatever it is that holds the name, it cannot end this link by talking nonsense.
            Heard::Malformed(_) => {
                self.counts.malformed += 1;
                self.pause();
            }
        }
        Ok(())
    }

    /// Answers a connection that has greeted as a peer does.
    fn answer(&mut self, candidate: Candidate) {
        let Candidate {
            socket,
            who,
            greeting,
            fds,
        } = candidate;
        let refuse = |reason, holders| {
            let _ = socket::send(&socket, &self.policy.refusal(reason, holders), &[]);
        };
        if let Some(connected) = &self.connected {
            self.counts.refused_taken += 1;
            refuse(Reason::Taken, [self.policy.own.pid, connected.who.pid]);
            return;
        }
        let peer = match self.peer_from(who, greeting, fds) {
            Ok(peer) => peer,
            Err(_) => {
                self.counts.refused_unfit += 1;
                refuse(Reason::Unfit, [self.policy.own.pid, 0]);
                return;
            }
        };
        self.own.clear_registers();
        match socket::send(&socket, &self.greeting(), &self.own.descriptors()) {
            Ok(()) => self.connected = Some(Connected::new(socket, who, peer)),
            Err(_) => self.counts.gone_early += 1,
        }
    }

    /// Takes up a peer's memory.
    fn peer_from(&self, who: Credentials, greeting: Greeting, fds: Vec<OwnedFd>) -> Result<Peer, Unfit> {
        if who.uid != self.policy.own.uid && fds.iter().any(on_huge_pages) {
            return Err(Unfit::HugeBetweenUsers);
        }
        Peer::new(fds, greeting.window_bytes)
    }
}

/// Whether a memory file stands on reserved huge pages.
fn on_huge_pages(fd: &OwnedFd) -> bool {
    const HUGETLBFS_MAGIC: u32 = 0x9584_58f6; // linux/magic.h
    rustix::fs::fstatfs(fd).is_ok_and(|s| s.f_type as u32 == HUGETLBFS_MAGIC)
}

impl Link for SoftLink {
    fn facts(&self) -> LinkFacts {
        LinkFacts {
            kind: LinkKind::Soft,
            address: format!("soft:{}", self.name),
            page_bytes: self.own.window().page_bytes(),
            engine: "write-back",
        }
    }

    fn order(&self) -> Order {
        Order::Ordered
    }

    fn poll(&mut self) -> Result<LinkStatus, LinkError> {
        // A connection may be that of a peer that was started after the old one had died. So connections are taken up
        // first and the old peer is looked at afterwards: nobody finds the name taken by a dead process.
        let candidates = match &mut self.role {
            Role::Listening(listener) => listener.poll(&self.policy, &mut self.counts),
            _ => Vec::new(),
        };
        self.check_peer();
        for candidate in candidates {
            self.answer(candidate);
        }
        if matches!(self.role, Role::Seeking) {
            self.seek()?;
        }
        self.hear_answer()?;
        Ok(LinkStatus {
            state: match self.connected {
                Some(_) => LinkState::WindowsSet,
                None => LinkState::CableDown,
            },
            losses: self.losses,
        })
    }

    fn wait(&self, timeout: Duration) {
        let (mut fds, mut timeout) = (Vec::new(), timeout);
        match &self.role {
            Role::Seeking => timeout = timeout.min(SEEKING_PAUSE),
            Role::Calling { socket, .. } => fds.push(socket.as_fd()),
            Role::Called => {}
            Role::Listening(listener) => fds.extend(listener.descriptors()),
        }
        if let Some(connected) = &self.connected {
            fds.push(connected.socket.as_fd());
            fds.extend(connected.process.as_ref().map(AsFd::as_fd));
        }
        self.own.wait(&fds, timeout);
    }

    fn registers(&self) -> Registers {
        match self.connected {
            Some(_) => self.own.registers(),
            None => NO_REGISTERS,
        }
    }

    fn write_registers(&mut self, registers: &Registers) {
        if let Some(connected) = &self.connected {
            connected.peer.write_registers(registers);
        }
    }

    fn inbound(&self) -> View {
        self.own.window().view()
    }

    fn outbound(&self) -> Option<Engine> {
        self.connected.as_ref().map(|c| c.peer.engine())
    }

    fn ring(&mut self, doorbell: u32) {
        if let Some(connected) = &self.connected {
            connected.peer.ring(doorbell);
        }
    }

    fn doorbell(&self, number: u32) -> Doorbell {
        self.own.doorbell(number)
    }
}
