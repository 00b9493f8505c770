//! `ntb_transport`, version 4: queue pairs that carry frames.
//!
//! # How a connection comes about
//!
//! | step | what this side does | what it waits for |
//! | --- | --- | --- |
//! | [`Step::Link`] | asks for the link | the link |
//! | [`Step::Greeting`] | tells the peer, every 10 ms, its window sizes, counts and version | the peer's |
//! | [`Step::Joining`] | has memory behind its windows and sets its ready bit at the peer | the peer's ready bit |
//! | [`Step::Up`] | sends and receives | |
//!
//! The kernel wipes the headers of its ring when it has understood the greeting: nothing is sent before its ready bit
//! is there.
//!
//! # How it ends
//!
//! By the link; by a frame with the link-down flag, or a ready bit taken back, when the peer's client closes; or by a
//! new greeting, when the peer's module has begun anew without a loss of the link that this side has seen. A link that
//! was down too shortly to be seen down leaves one side waiting for a greeting that never comes: it takes the link down
//! itself. The version word is wiped once it has been understood, so that a new greeting shows.

pub mod layout;
mod receiver;
mod sender;

use std::{
    fmt,
    os::fd::BorrowedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use ntb::{hw::NtbPort, pci::DmaSpace, window::InboundWindow};
use ntb_mem::region::Pages;

use crate::{
    LinuxError,
    link::{Change, Watch},
    outbound::Outbound,
};
use layout::{DEFAULT_FRAME, Shape, scratchpad};
#[cfg(any(test, fuzzing))]
pub use receiver::check_hostile;
pub use receiver::{Arrival, Receiver};
use sender::Sender;
pub use sender::Sent;

/// Name of the kernel's client, for messages.
const CLIENT: &str = "ntb_transport";
/// Time between two steps of the handshake, as in the kernel.
const STEP: Duration = Duration::from_millis(10);
/// Time between two looks at whether the peer's client is still there.
const WATCH: Duration = Duration::from_millis(50);
/// After this long without a ready bit the greeting is said again: the peer may have wiped it with the rest of an
/// earlier life.
const REPEAT: Duration = Duration::from_millis(500);
/// How long the frame that closes a queue pair may come after the ready bit is gone.
const LEAVE: Duration = Duration::from_millis(300);
/// How long a greeting is waited for after the link was down for a moment. A peer that has not noticed says none: then the
/// link is taken down for it to see.
const NOTICE: Duration = Duration::from_secs(2);
/// How long a peer that has greeted anew is given until its ring is set up again. Its old ready bit is there meanwhile.
const BEGIN_ANEW: Duration = Duration::from_millis(100);

/// Parameters of a transport.
#[derive(Clone, Debug)]
pub struct TransportOptions {
    /// The queue pair to use. The kernel's clients take the lowest that is free: `ntb_netdev` has 0.
    pub queue: usize,
    /// Largest frame in bytes, its 12 bytes of header included: `transport_mtu` of the kernel's module.
    pub frame: u32,
    /// `max_num_clients` of the kernel's module; 0 for no limit.
    pub clients: u8,
    /// Largest part of each window that is used: `max_mw_size` of the kernel's module at the peer should be the same.
    pub window_bytes: u64,
}

impl Default for TransportOptions {
    fn default() -> Self {
        Self {
            queue: 0,
            frame: DEFAULT_FRAME,
            clients: 0,
            window_bytes: 256 << 20,
        }
    }
}

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The link is down.
    Link,
    /// The link is up; the peer has said nothing that can be understood.
    Greeting,
    /// Memory is there on both sides; the peer's client is not ready.
    Joining,
    /// Frames go both ways.
    Up,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Link => "the link is down. Check the cable, and that a driver of the peer has its port",
            Self::Greeting => "the link is up and the peer says nothing. Load ntb_transport there",
            Self::Joining => {
                "ntb_transport answers and nobody uses the queue pair. Load ntb_netdev there, and bring its interface up"
            }
            Self::Up => "up",
        })
    }
}

/// What a call of [`Transport::poll`] has brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Frames can be sent and received.
    Up,
    /// They no longer can.
    Down(Loss),
}

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// The link went down.
    Link,
    /// The peer's client closed the queue pair.
    Closed,
    /// The peer's module began anew.
    Restarted,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Link => "the link went down",
            Self::Closed => "the peer closed the queue pair",
            Self::Restarted => "the peer began anew",
        })
    }
}

/// Counts since the transport was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Frames sent.
    pub sent: u64,
    /// Frames received.
    pub received: u64,
    /// Times that the ring was full.
    pub full: u64,
    /// Frames with a length that cannot be.
    pub malformed: u64,
    /// Times that a frame was met that was not the next one.
    pub out_of_turn: u64,
    /// Times that the connection came up.
    pub connections: u64,
}

/// The halves of the queue pair, while the peer's windows are known.
#[derive(Debug)]
struct Pair {
    sizes: Vec<u64>,
    receiver: Receiver,
    sender: Sender,
}

/// One queue pair of a transport.
#[derive(Debug)]
pub struct Transport {
    // Fields drop in order: views and apertures, then windows with their mappings, then the port.
    pair: Option<Pair>,
    inbound: Vec<InboundWindow>,
    space: Arc<DmaSpace>,
    watch: Watch,
    port: Arc<dyn NtbPort>,
    shape: Shape,
    options: TransportOptions,
    own_sizes: Vec<u64>,
    step: Step,
    since: Instant,
    next: Instant,
    retrain_at: Option<Instant>,
    /// Since when the ready bit is gone.
    leaving: Option<Instant>,
    disagreement: Option<LinuxError>,
    pending: Option<Loss>,
    counters: Counters,
}

impl Transport {
    /// Takes a quiet port and asks for the link. [`Transport::poll`] does the rest.
    pub fn open(port: &Arc<dyn NtbPort>, options: &TransportOptions) -> Result<Self, LinuxError> {
        let windows = port.windows();
        let scratchpads = port.scratchpads();
        let bits = port.doorbell_bits();
        let shape = Shape::of(windows.len(), scratchpads, bits, options.clients).ok_or_else(|| {
            let (what, needed, found) = match (windows.len(), scratchpads) {
                (0, _) => ("memory windows", 1, 0),
                (_, ..6) => ("scratchpads", 6, scratchpads as u64),
                _ => ("doorbells", 2, bits.count_ones().into()),
            };
            LinuxError::TooFew {
                device: port.function().name().to_owned(),
                client: CLIENT,
                what,
                needed,
                found,
            }
        })?;
        if options.queue >= shape.queues {
            return Err(LinuxError::NoQueue {
                queue: options.queue,
                queues: shape.queues,
            });
        }
        let own_sizes: Vec<u64> = windows
            .iter()
            .take(shape.windows)
            .map(|info| info.bytes.min(options.window_bytes))
            .collect();
        let space = DmaSpace::new(Arc::clone(port.function())).map_err(ntb::hw::NtbError::from)?;
        let bit = 1 << options.queue;
        port.clear_doorbells(bit)?;
        port.unmask_doorbells(bit)?;
        let now = Instant::now();
        let this = Self {
            pair: None,
            inbound: Vec::new(),
            space,
            watch: Watch::start(port)?,
            port: Arc::clone(port),
            shape,
            options: options.clone(),
            own_sizes,
            step: Step::Link,
            since: now,
            next: now,
            retrain_at: None,
            leaving: None,
            disagreement: None,
            pending: None,
            counters: Counters::default(),
        };
        // Refused here rather than once a peer has come.
        this.slot(&this.own_sizes)?;
        Ok(this)
    }

    /// How far the connection has come.
    pub fn step(&self) -> Step {
        self.step
    }

    /// Windows and queue pairs.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Counts since the start.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Largest payload of a frame to the peer.
    pub fn largest(&self) -> Result<usize, LinuxError> {
        Ok(self.slot(&self.own_sizes)?.largest() as usize)
    }

    /// Why there is no connection yet, in words: what the peer disagrees about, or the step that is missing.
    pub fn missing(&self) -> String {
        match &self.disagreement {
            Some(error) => error.to_string(),
            None => self.step.to_string(),
        }
    }

    /// Does what is due, and tells of one change. Call it every few milliseconds, and after [`Transport::wait`].
    pub fn poll(&mut self) -> Result<Option<Event>, LinuxError> {
        let now = Instant::now();
        match self.watch.look(now)? {
            Change::Nothing => {}
            Change::Up => self.enter(Step::Greeting, now),
            Change::Flap => return Ok(self.greet_again(now)),
            Change::Lost => return self.lose_link(now),
        }
        if let Some(loss) = self.pending.take() {
            return Ok(Some(self.lose(loss, now)));
        }
        if now < self.next {
            return Ok(None);
        }
        self.next = now + STEP;
        match self.step {
            Step::Link => Ok(None),
            Step::Greeting => self.greet(now).map(|()| None),
            Step::Joining => self.join(now),
            Step::Up => self.look_after(now),
        }
    }

    /// Polls until the connection is up.
    pub fn connect(&mut self, timeout: Duration) -> Result<(), LinuxError> {
        let start = Instant::now();
        while self.step != Step::Up {
            self.poll()?;
            if start.elapsed() >= timeout && self.step != Step::Up {
                return Err(match self.disagreement.take() {
                    Some(error) => error,
                    None => LinuxError::NoPeer {
                        client: CLIENT,
                        step: self.missing(),
                        waited: timeout,
                    },
                });
            }
            self.wait(None, STEP / 2)?;
        }
        Ok(())
    }

    /// Sends a frame and rings.
    pub fn send(&mut self, payload: &[u8]) -> Result<Sent, LinuxError> {
        let down = self.down();
        let Some(pair) = self.pair.as_mut().filter(|_| self.step == Step::Up) else {
            return Err(down);
        };
        let largest = pair.sender.slot().largest() as usize;
        if payload.is_empty() || payload.len() > largest {
            return Err(LinuxError::BadLength {
                bytes: payload.len(),
                largest,
            });
        }
        let sent = pair.sender.send(payload)?;
        match sent {
            Sent::Yes => {
                self.port.ring_peer(1 << self.options.queue)?;
                self.counters.sent += 1;
            }
            Sent::Full => self.counters.full += 1,
        }
        Ok(sent)
    }

    /// Takes the next frame's payload into `buffer`, in place of what is there; false when there is none now.
    pub fn receive(&mut self, buffer: &mut Vec<u8>) -> Result<bool, LinuxError> {
        loop {
            let Some(pair) = self.pair.as_mut().filter(|_| self.step == Step::Up) else {
                return Ok(false);
            };
            let consumed = match pair.receiver.poll(buffer) {
                Arrival::Nothing => return Ok(false),
                Arrival::OutOfTurn { .. } => {
                    self.counters.out_of_turn += 1;
                    return Ok(false);
                }
                Arrival::Closed => {
                    self.pending = Some(Loss::Closed);
                    self.step = Step::Joining;
                    return Ok(false);
                }
                Arrival::Malformed { consumed, .. } => {
                    self.counters.malformed += 1;
                    pair.sender.give_credit(consumed)?;
                    continue;
                }
                Arrival::Payload { consumed } => consumed,
            };
            pair.sender.give_credit(consumed)?;
            self.counters.received += 1;
            return Ok(true);
        }
    }

    /// Frames that can be sent now.
    pub fn free(&self) -> u32 {
        match (&self.pair, self.step) {
            (Some(pair), Step::Up) => pair.sender.free(),
            _ => 0,
        }
    }

    /// Sleeps until the peer rings, the link changes, `other` can be read, or `timeout` has passed. Look for frames again
    /// after it.
    pub fn wait(&mut self, other: Option<BorrowedFd<'_>>, timeout: Duration) -> Result<(), LinuxError> {
        self.watch.sleep(1 << self.options.queue, other, timeout)?;
        Ok(())
    }

    /// Tells the peer's client that this side goes.
    pub fn close(&mut self) -> Result<(), LinuxError> {
        if let Some(pair) = self.pair.as_mut().filter(|_| self.watch.is_up()) {
            self.port.set_peer_scratchpad(scratchpad::READY, 0)?;
            if self.step == Step::Up && pair.sender.send_closed()? == Sent::Yes {
                self.port.ring_peer(1 << self.options.queue)?;
            }
        }
        self.step = Step::Link;
        Ok(())
    }

    fn down(&self) -> LinuxError {
        LinuxError::Down {
            client: CLIENT,
            step: self.missing(),
        }
    }

    /// This queue pair's slot in windows of these sizes.
    fn slot(&self, sizes: &[u64]) -> Result<layout::Slot, LinuxError> {
        let window = self.shape.window_of(self.options.queue);
        let bytes = sizes.get(window).copied().unwrap_or(0);
        self.shape
            .slot(self.options.queue, bytes, self.options.frame)
            .ok_or(LinuxError::RingTooSmall {
                window,
                bytes,
                frame: self.options.frame,
            })
    }

    fn enter(&mut self, step: Step, now: Instant) {
        self.step = step;
        self.since = now;
        self.next = now;
    }

    fn greet(&mut self, now: Instant) -> Result<(), LinuxError> {
        for (index, value) in layout::announcement(&self.shape, &self.own_sizes) {
            self.port.set_peer_scratchpad(index, value)?;
        }
        if now < self.since {
            return Ok(());
        }
        let words = scratchpad::size_high(self.shape.windows);
        let own = (0..words)
            .map(|index| self.port.scratchpad(index))
            .collect::<Result<Vec<_>, _>>()?;
        if self.retrain_at.is_some_and(|at| at <= now) {
            self.retrain_at = None;
            self.port.disable_link()?;
            self.port.enable_link()?;
            return Ok(());
        }
        // The kernel goes on trying as well: its module may be loaded anew with other parameters.
        let sizes = match layout::understand(&self.shape, &own) {
            Ok(Some(sizes)) => sizes,
            Ok(None) => return Ok(()),
            Err(error) => {
                self.disagreement = Some(error);
                return Ok(());
            }
        };
        self.set_up(sizes)?;
        self.disagreement = None;
        self.retrain_at = None;
        self.port.set_scratchpad(scratchpad::VERSION, 0)?;
        self.enter(Step::Joining, now);
        Ok(())
    }

    /// Memory for the peer, and both halves of the queue pair.
    fn set_up(&mut self, sizes: Vec<u64>) -> Result<(), LinuxError> {
        if let Some(pair) = self.pair.as_mut().filter(|pair| pair.sizes == sizes) {
            pair.receiver.restart();
            pair.sender.restart();
            return Ok(());
        }
        let theirs = self.slot(&sizes)?;
        let ours = self.slot(&self.own_sizes)?;
        for (window, (bytes, info)) in sizes.iter().zip(self.port.windows()).enumerate() {
            let limit = info.bytes.min(self.options.window_bytes);
            if *bytes > limit {
                return Err(LinuxError::TooMuchMemory {
                    window,
                    asked: *bytes,
                    limit,
                });
            }
        }
        self.pair = None;
        self.inbound.clear();
        for (window, bytes) in sizes.iter().enumerate() {
            let inbound = InboundWindow::allocate(&self.port, &self.space, window, *bytes, Pages::default())?;
            self.inbound.push(inbound);
        }
        let window = self.shape.window_of(self.options.queue);
        let Some(inbound) = self.inbound.get(window) else {
            return Ok(());
        };
        let outbound = Outbound::open(&*self.port, window)?;
        let too_small = || LinuxError::RingTooSmall {
            window,
            bytes: inbound.bytes(),
            frame: self.options.frame,
        };
        let receiver = Receiver::new(inbound.view(), theirs).ok_or_else(too_small)?;
        let sender = Sender::new(outbound, ours, inbound.view(), theirs.trailer).ok_or_else(too_small)?;
        self.pair = Some(Pair {
            sizes,
            receiver,
            sender,
        });
        Ok(())
    }

    fn join(&mut self, now: Instant) -> Result<Option<Event>, LinuxError> {
        let bit = 1 << self.options.queue;
        self.port.set_peer_scratchpad(scratchpad::READY, bit)?;
        let ready = self.port.scratchpad(scratchpad::READY)?;
        if ready & bit == 0 || ready == u32::MAX {
            if now.duration_since(self.since) >= REPEAT {
                self.since = now;
                for (index, value) in layout::announcement(&self.shape, &self.own_sizes) {
                    self.port.set_peer_scratchpad(index, value)?;
                }
            }
            return Ok(None);
        }
        // The peer greets until it has understood this side, and is ready after that: a greeting that is there now was
        // the last one, and one that appears from here on is a new one.
        if self.port.scratchpad(scratchpad::VERSION)? != 0 {
            self.port.set_scratchpad(scratchpad::VERSION, 0)?;
            return Ok(None);
        }
        self.enter(Step::Up, now);
        self.leaving = None;
        self.counters.connections += 1;
        Ok(Some(Event::Up))
    }

    /// Notices a peer that went without a frame to say so.
    fn look_after(&mut self, now: Instant) -> Result<Option<Event>, LinuxError> {
        self.next = now + WATCH;
        if self.port.scratchpad(scratchpad::VERSION)? == layout::VERSION {
            return Ok(Some(self.lose(Loss::Restarted, now)));
        }
        let ready = self.port.scratchpad(scratchpad::READY)?;
        if ready & 1 << self.options.queue != 0 {
            self.leaving = None;
            return Ok(None);
        }
        // A frame that says so follows the bit: taken in its turn it leaves nothing behind. With a full ring there is none.
        match self.leaving {
            None => self.leaving = Some(now),
            Some(since) if now.duration_since(since) < LEAVE => {}
            Some(_) => return Ok(Some(self.lose(Loss::Closed, now))),
        }
        Ok(None)
    }

    fn lose(&mut self, loss: Loss, now: Instant) -> Event {
        if let Some(pair) = &mut self.pair {
            pair.receiver.restart();
            pair.sender.restart();
        }
        match loss {
            Loss::Restarted => {
                self.enter(Step::Greeting, now);
                self.since = now + BEGIN_ANEW;
            }
            Loss::Closed | Loss::Link => self.enter(Step::Joining, now),
        }
        Event::Down(loss)
    }

    /// After a link that was down for a moment: windows may have been closed with it. What the peer has written since stays.
    fn greet_again(&mut self, now: Instant) -> Option<Event> {
        let was_up = self.step == Step::Up || self.pending.take().is_some();
        self.pair = None;
        self.inbound.clear();
        self.enter(Step::Greeting, now);
        self.since = now + BEGIN_ANEW;
        self.retrain_at = Some(now + NOTICE);
        was_up.then_some(Event::Down(Loss::Link))
    }

    fn lose_link(&mut self, now: Instant) -> Result<Option<Event>, LinuxError> {
        let was_up = self.step == Step::Up || self.pending.take().is_some();
        self.pair = None;
        self.inbound.clear();
        self.retrain_at = None;
        // What the peer wrote in this life must not be there in the next.
        for index in 0..self.port.scratchpads() {
            self.port.set_scratchpad(index, 0)?;
        }
        self.enter(Step::Link, now);
        Ok(was_up.then_some(Event::Down(Loss::Link)))
    }
}

impl Drop for Transport {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::debug!(%error, "a queue pair could not be closed");
        }
    }
}
