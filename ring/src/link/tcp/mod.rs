//! A link over TCP: the last resort, and what the others are compared with.
//!
//! The same rings as everywhere: a put is a frame that the far side applies to its memory. There is no thread between the
//! stream and who waits for a message (see `conn.rs`), so that a round trip costs little more than the kernel's own. Both
//! ends prove that they know a shared secret before anything else is said; frames themselves are neither encrypted
//! nor signed. `docs/wire.md` has the bytes, `docs/transports.md` what it gives and costs.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

mod arrivals;
mod conn;
mod engine;
pub mod frame;
pub mod greeting;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod vectors;

use std::{
    cell::Cell,
    collections::VecDeque,
    net::TcpStream,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use ntb_mem::{
    line::LINE_BYTES,
    region::{Pages, Region, View},
};
use rustix::{event::PollFlags, io::Errno};

pub use super::meet::Counts;
use super::{
    DOORBELLS, Doorbell, Link, LinkError, LinkEvent, LinkFacts, LinkKind, LinkState, LinkStatus, Pump,
    Registers,
    auth::{Purpose, Secret},
    doorbell::{Hub, sleep_on_any, take_event},
    ends::{NO_REGISTERS, WINDOW_BYTES, WINDOW_MAX, memory_error},
    engine::{Engine, Order},
    meet::{Arrival, Guest, Meeting, Place},
};
use arrivals::Arrivals;
use conn::{Conn, Ended};
use engine::TcpEngine;
use greeting::{Greeting, Message, Reason};

/// Silence of a peer after which another that knows the secret takes its place: many heartbeats.
const REPLACEABLE: Duration = Duration::from_secs(2);
/// How long a caller is told that there is a peer already before it gives up: the other side may not have noticed yet that
/// its old peer has died.
const TAKEN_PATIENCE: Duration = Duration::from_secs(4);
/// How often the service thread looks after a stream that receivers read.
const LOOK: Duration = Duration::from_millis(2);

/// Parameters of a link over TCP. Each side has its own.
#[derive(Clone, Debug)]
pub struct TcpOptions {
    /// Bytes of this side's memory that the peer's frames are applied to, a multiple of 64; 64 MiB by default.
    pub window_bytes: u64,
    /// Pages that it stands on.
    pub pages: Pages,
    /// What both sides must know. Without one, only addresses of the loopback are taken, and every process of the machine
    /// may be the peer.
    pub secret: Secret,
    /// How long the kernel polls the network device for a read that finds nothing (`SO_BUSY_POLL`); not at all by
    /// default. Of use with a device of its own queue per connection; takes a right or a sysctl.
    pub busy_poll: Option<Duration>,
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self {
            window_bytes: WINDOW_BYTES,
            pages: Pages::default(),
            secret: Secret::none(),
            busy_poll: None,
        }
    }
}

/// What a side has once, whoever its peer is: its memory and its doorbells.
#[derive(Debug)]
struct Own {
    window: Arc<Region>,
    arrivals: Arc<Arrivals>,
    /// What each doorbell is in this process.
    bells: Vec<Arc<OwnedFd>>,
    doorbells: [Doorbell; DOORBELLS as usize],
}

impl Own {
    fn new(window_bytes: u64, pages: Pages) -> Result<Self, LinkError> {
        if window_bytes > WINDOW_MAX {
            return Err(LinkError {
                name: "link-memory",
                exit: 2,
                what: format!("a window of {window_bytes} bytes was asked for: {WINDOW_MAX} are the most"),
                errno: None,
            });
        }
        let window = Region::allocate(window_bytes, pages).map_err(|e| memory_error(&e))?;
        let limits = |errno: Errno| LinkError {
            name: "link-limits",
            exit: 6,
            what: format!(
                "a link over TCP needs {} open files more and cannot have them ({errno}): raise the limit with 'ulimit -n'",
                2 * DOORBELLS + 2
            ),
            errno: Some(errno.raw_os_error()),
        };
        let arrivals = Arc::new(Arrivals::new().map_err(limits)?);
        let bells = Doorbell::locals().map_err(limits)?;
        let hub = Arc::clone(&arrivals) as Arc<dyn Hub>;
        let doorbells = Doorbell::handed_all(&bells, arrivals.fd(), &hub).map_err(limits)?;
        Ok(Self {
            window: Arc::new(window),
            arrivals,
            bells,
            doorbells,
        })
    }
}

/// A link over TCP.
#[derive(Debug)]
pub struct TcpLink {
    own: Own,
    address: String,
    /// How peers are found; none where somebody else finds them and hands their streams over.
    meeting: Option<Meeting>,
    conn: Option<Arc<Conn>>,
    losses: u64,
    heard: Instant,
    events: VecDeque<LinkEvent>,
    /// Receivers polled lately: they read the stream.
    polled: Cell<bool>,
}

impl TcpLink {
    /// Makes this side of the link at `host` and `port`: a name or address of the machine that both ends name, this one or
    /// the peer's. Its memory is allocated and the name looked up here; the peer is met in [`Link::poll`].
    pub fn open(host: &str, port: u16, options: &TcpOptions) -> Result<Self, LinkError> {
        let place = Place::new(Purpose::Tcp, host, port, &options.secret, options.busy_poll)?;
        let address = place.address.clone();
        Self::make(address, Some(Meeting::new(place)), options)
    }

    /// A link whose peers are met by somebody else: [`TcpLink::adopt`].
    pub(super) fn for_meeting(address: String, options: &TcpOptions) -> Result<Self, LinkError> {
        Self::make(address, None, options)
    }

    fn make(address: String, meeting: Option<Meeting>, options: &TcpOptions) -> Result<Self, LinkError> {
        Ok(Self {
            own: Own::new(options.window_bytes, options.pages)?,
            address,
            meeting,
            conn: None,
            losses: 0,
            heard: Instant::now(),
            events: VecDeque::new(),
            polled: Cell::new(false),
        })
    }

    /// Takes a stream over whose peer has been met, and has said how many bytes its memory has.
    pub(super) fn adopt(&mut self, stream: TcpStream, window_bytes: u64) {
        self.lose(&Ended::ByUs); // one that is silent, if any
        self.connect(stream, window_bytes);
    }

    /// Whether there is a peer.
    pub(super) fn has_peer(&self) -> bool {
        self.conn.is_some()
    }

    /// Whether there is a peer that is not to give way to another.
    pub(super) fn is_busy(&self) -> bool {
        self.conn.is_some() && self.heard.elapsed() < REPLACEABLE
    }

    pub(super) fn status(&self) -> LinkStatus {
        LinkStatus {
            state: match self.conn {
                Some(_) => LinkState::WindowsSet,
                None => LinkState::CableDown,
            },
            losses: self.losses,
        }
    }

    /// What was turned away so far.
    pub fn counts(&self) -> Counts {
        self.meeting.as_ref().map(Meeting::counts).unwrap_or_default()
    }

    fn greeting(&self) -> Message {
        Message::Greeting(Greeting {
            window_bytes: self.own.window.bytes(),
            pid: std::process::id(),
        })
    }

    fn connect(&mut self, stream: TcpStream, window_bytes: u64) {
        let conn = Arc::new(Conn::new(
            stream,
            self.own.window.view(),
            window_bytes / LINE_BYTES as u64,
            Arc::clone(&self.own.arrivals),
            self.own.bells.clone(),
        ));
        self.own.arrivals.set(Some(&conn));
        self.conn = Some(conn);
        self.heard = Instant::now();
        if let Some(meeting) = &mut self.meeting {
            meeting.settled();
        }
    }

    /// Notices the end of the peer.
    fn check_peer(&mut self) {
        let Some(conn) = &self.conn else { return };
        conn.drain();
        if !self.polled.get() {
            conn.take_up();
        }
        if conn.take_heard() {
            self.heard = Instant::now();
        }
        if let Some(why) = conn.ended() {
            self.lose(&why);
        }
    }

    fn lose(&mut self, why: &Ended) {
        let Some(conn) = self.conn.take() else { return };
        conn.end(why.clone());
        self.own.arrivals.set(None);
        self.losses += 1;
        if !matches!(why, Ended::Closed | Ended::ByUs) {
            self.event("connection-lost", why.to_string());
        }
        self.look_again();
    }

    fn look_again(&mut self) {
        if let Some(meeting) = &mut self.meeting {
            meeting.again();
        }
    }

    fn event(&mut self, name: &'static str, why: String) {
        const KEPT: usize = 64;
        if self.events.len() < KEPT {
            self.events.push_back(LinkEvent::Transport { name, why });
        }
    }

    /// Answers somebody who knows the secret and came here.
    fn welcome(&mut self, guest: Guest, said: &[u8]) {
        let refuse = |guest: Guest, reason| {
            let _ = guest.answer(&Message::Refusal(reason).encode());
        };
        let theirs = match greeting::decode(said) {
            Ok(Message::Greeting(theirs)) => theirs,
            Ok(Message::Refusal(_)) => return, // for those who call
            Err(e) => {
                self.event("connection-lost", e.to_string());
                return refuse(guest, Reason::Unfit);
            }
        };
        if self.conn.is_some() {
            if self.is_busy() {
                if let Some(meeting) = &mut self.meeting {
                    meeting.count_taken();
                }
                return refuse(guest, Reason::Taken);
            }
            self.lose(&Ended::ByUs); // its network has gone, and it has come anew
        }
        let answer = self.greeting().encode();
        if let Some(met) = guest.answer(&answer) {
            self.connect(met.stream, theirs.window_bytes);
        }
    }

    /// Takes up the answer of the side that was called.
    fn called(&mut self, stream: TcpStream, said: &[u8]) -> Result<(), LinkError> {
        match greeting::decode(said) {
            Ok(Message::Greeting(theirs)) => self.connect(stream, theirs.window_bytes),
            Ok(Message::Refusal(Reason::Taken)) => {
                if self
                    .meeting
                    .as_mut()
                    .is_some_and(|m| !m.again_if_taken(TAKEN_PATIENCE))
                {
                    return Err(greeting::refused(&self.address, Reason::Taken));
                }
            }
            Ok(Message::Refusal(reason)) => {
                return Err(greeting::refused(&self.address, reason));
            }
            Err(e) => return Err(e.into_link_error(&self.address)),
        }
        Ok(())
    }

    /// Sleeps as [`Link::wait`] does, also until somebody comes to `meeting`.
    pub(super) fn wait_with(&self, meeting: Option<&Meeting>, timeout: Duration) {
        let Some(bell) = self.own.bells.first() else {
            return;
        };
        let (mut fds, mut timeout) = (vec![(bell.as_fd(), PollFlags::IN)], timeout);
        if let Some((others, limit)) = meeting.map(Meeting::wakers) {
            fds.extend(others);
            timeout = limit.map_or(timeout, |limit| timeout.min(limit));
        }
        if let Some(conn) = &self.conn {
            let mut flags = PollFlags::empty();
            if self.polled.get() {
                timeout = timeout.min(LOOK);
            } else {
                flags |= PollFlags::IN;
            }
            if conn.is_backlogged() {
                flags |= PollFlags::OUT;
            }
            if !flags.is_empty() {
                fds.push((conn.fd(), flags));
            }
        }
        if sleep_on_any(&fds, timeout) {
            if let (Some(conn), false) = (&self.conn, self.polled.get()) {
                conn.take_up(); // what woke this thread may be a ring
            }
            take_event(bell);
        }
    }
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        if let Some(conn) = self.conn.take() {
            conn.say_goodbye();
            self.own.arrivals.set(None);
        }
    }
}

impl Link for TcpLink {
    fn facts(&self) -> LinkFacts {
        LinkFacts {
            kind: LinkKind::Tcp,
            address: self.address.clone(),
            page_bytes: self.own.window.page_bytes(),
            engine: "frames",
        }
    }

    fn order(&self) -> Order {
        Order::Ordered
    }

    fn poll(&mut self) -> Result<LinkStatus, LinkError> {
        self.polled
            .set(self.conn.as_ref().is_some_and(|c| c.take_polled()));
        self.check_peer();
        let greeting = self.greeting().encode();
        let arrivals = match &mut self.meeting {
            Some(meeting) => meeting.poll(&greeting)?,
            None => Vec::new(),
        };
        for arrival in arrivals {
            match arrival {
                Arrival::Guest(guest, said) => self.welcome(guest, &said),
                Arrival::Host(met, said) => self.called(met.stream, &said)?,
            }
        }
        if let Some(why) = self.meeting.as_mut().and_then(Meeting::news_of_strangers) {
            self.event("strangers", why);
        }
        Ok(self.status())
    }

    fn wait(&self, timeout: Duration) {
        self.wait_with(self.meeting.as_ref(), timeout);
    }

    fn registers(&self) -> Registers {
        self.conn.as_ref().map_or(NO_REGISTERS, |c| c.registers())
    }

    fn write_registers(&mut self, registers: &Registers) {
        if let Some(conn) = &self.conn {
            let mut frame = Vec::with_capacity(64);
            frame::put_registers(&mut frame, registers);
            conn.send(&frame);
        }
    }

    fn inbound(&self) -> View {
        self.own.window.view()
    }

    fn outbound(&self) -> Option<Engine> {
        let conn = self.conn.as_ref()?;
        Some(Engine::Other(Box::new(TcpEngine::new(Arc::clone(conn)))))
    }

    fn ring(&mut self, doorbell: u32) {
        if let Some(conn) = &self.conn {
            let mut frame = Vec::with_capacity(16);
            frame::put_ring(&mut frame, doorbell);
            conn.send(&frame);
        }
    }

    fn doorbell(&self, number: u32) -> Doorbell {
        let bells = &self.own.doorbells;
        match bells.get(number as usize).or(bells.first()) {
            Some(bell) => bell.clone(),
            None => unreachable!("DOORBELLS of them were made"),
        }
    }

    fn next_event(&mut self) -> Option<LinkEvent> {
        self.events.pop_front()
    }

    fn pump(&self) -> Option<Arc<dyn Pump>> {
        let conn = self.conn.as_ref()?;
        Some(Arc::clone(conn) as Arc<dyn Pump>)
    }
}
