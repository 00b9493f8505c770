//! A link over RDMA: InfiniBand, RoCE v2 and iWARP, by the verbs of a reliable connection.
//!
//! The sides meet over TCP, prove a shared secret ([`super::auth`]), and tell each other what they need for a queue pair, which
//! rdma_cm connects where both have it. From then on the stream is silent; its end says that the peer has died. Everything
//! else is RDMA:
//!
//! | what | how |
//! | --- | --- |
//! | lines | writes into the peer's window, unsignalled but for every quarter of the queue; small ones carry their data |
//! | registers, count of receives | writes into the peer's control memory |
//! | doorbells | a write with immediate (iWARP: a message), sent only when the session rings: when a reader sleeps |
//!
//! Nothing is ever read from the peer.
//!
//! # What makes a message complete
//!
//! One write gives no order inside itself, and of several only a completion *at the receiver* says that all are there. So
//! the order is relaxed: every message carries a check over all of it. In strict mode ([`RdmaOptions::strict`]) each run
//! of lines is announced by its completion, arrives in memory that no ring looks at, and is copied to where the ring is:
//! the only way that the standards promise, at the price of a completion and a copy.
//!
//! # Life
//!
//! | phase | reported as |
//! | --- | --- |
//! | no device, port down, or nobody met | cable down |
//! | met, and the queue pair under way | cable up |
//! | both memories known, the caller heard | windows set |
//!
//! The stream's end, a failed request (retries exhausted), a port that goes down, an address that changes and a device that
//! goes away end the connection; each is an event. The queue pair is destroyed first, so that nothing of an old life arrives
//! in the next.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

mod account;
mod device;
mod engine;
mod error;
mod exchange;
mod joining;
mod meet;
mod mirror;
#[cfg(test)]
mod model;
mod options;
mod pump;
mod receive;
mod send;
mod sys;
#[cfg(test)]
mod tests;
mod verbs;

use std::{
    collections::VecDeque,
    os::fd::AsFd as _,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::{Duration, Instant},
};

use ntb_mem::region::View;
use rustix::event::PollFlags;

use super::{
    DOORBELLS, Doorbell, Link, LinkError, LinkEvent, LinkFacts, LinkKind, LinkState, LinkStatus, Registers,
    auth::{Purpose, Secret},
    doorbell::sleep_on_any,
    ends::NO_REGISTERS,
    engine::{Engine, Order},
    meet::{Counts, Meeting, Place},
};
pub use account::SendCounts;
use device::{Device, Own};
use engine::RdmaEngine;
use exchange::Exchange;
use joining::Joining;
pub use options::{Manager, RdmaOptions};
use pump::Pump;
use receive::Inbox;
use send::Wire;
pub use sys::{Found, probe};
pub use verbs::{Fabric, Memory, Port};
use verbs::{Notice, Open, Queue, RETRY_EXHAUSTED, Unusable};

/// Pause between two attempts to open a device that has gone, and to look at a port that is down.
const DEVICE_PAUSE: Duration = Duration::from_millis(100);
/// Most events kept for a caller that does not fetch them.
const EVENTS_MAX: usize = 64;
/// Requests that a queue has to take.
const DEPTH_LEAST: u32 = 4;
/// Packets are not made smaller than this for want of answers.
const MTU_LEAST: u32 = 1024;
/// Largest packet there is.
const MTU_MOST: u32 = 4096;

/// The connection of the moment.
#[derive(Debug)]
struct Connected {
    // Fields drop in order: the queue pair ends before the stream tells the peer.
    wire: Arc<Wire>,
    queue: Arc<dyn Queue>,
    exchange: Exchange,
    mtu: u32,
}

/// A link over RDMA.
#[derive(Debug)]
pub struct RdmaLink {
    // Fields drop in order: the pump, then queue pairs, then the device with what is registered at it.
    _pump: Option<Pump>,
    connected: Option<Connected>,
    joining: Option<Joining>,
    device: Option<Device>,
    open: Opener,
    own: Own,
    inbox: Arc<Inbox>,
    doorbells: [Doorbell; DOORBELLS as usize],
    meeting: Meeting,
    options: RdmaOptions,
    /// Largest packet for the next connection.
    mtu: u32,
    /// When to look at the device again, and whether it could be used the last time.
    look_again: Option<Instant>,
    usable: bool,
    last_trouble: Option<String>,
    losses: u64,
    tally: Tally,
    events: VecDeque<LinkEvent>,
}

/// Memory registered with a link's device, until this is dropped.
#[derive(Clone, Debug)]
pub struct Registration(Arc<dyn verbs::Registered>);

impl Registration {
    /// What the peer calls its first byte.
    pub fn address(&self) -> u64 {
        self.0.memory().address()
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> u64 {
        self.0.memory().bytes()
    }

    /// The key that the peer's requests must show.
    pub fn key(&self) -> u32 {
        self.0.rkey()
    }
}

/// A look at what the connection of a link's moment has counted, wherever the link is. All zeros while there is none.
#[derive(Clone, Debug, Default)]
pub struct Tally(Arc<Mutex<Weak<Wire>>>);

impl Tally {
    /// What has been counted.
    pub fn counts(&self) -> SendCounts {
        let wire = self.0.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        wire.map(|wire| wire.counts()).unwrap_or_default()
    }

    fn follow(&self, wire: &Arc<Wire>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(wire);
    }
}

struct Opener(Open);

impl std::fmt::Debug for Opener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Opener")
    }
}

impl RdmaLink {
    /// Opens this side of the link that meets at `host` and `port`: finds the device, allocates the memory and registers it.
    /// The peer is met in [`Link::poll`].
    pub fn open(host: &str, port: u16, secret: &Secret, options: &RdmaOptions) -> Result<Self, LinkError> {
        let place = Place::new(Purpose::Rdma, host.trim_matches(['[', ']']), port, secret, None)?;
        let wanted = place.own_address();
        let choice = options.clone();
        let named_after = place.address.clone();
        Self::over(place, options, Box::new(move || sys::open(&choice, wanted)))
            .map_err(|e| named(&named_after, e))
    }

    fn over(place: Place, options: &RdmaOptions, mut open: Open) -> Result<Self, LinkError> {
        options.check()?;
        let own = Own::new(options)?;
        let device = Device::new(open()?, &own)?;
        options.check_for(device.adapter.port().fabric)?;
        let (inbox, doorbells) = Inbox::new().map_err(|errno| LinkError {
            name: "link-limits",
            exit: 6,
            what: format!(
                "a link needs {} open files more ({errno}): raise the limit with 'ulimit -n'",
                2 * DOORBELLS + 8
            ),
            errno: Some(errno.raw_os_error()),
        })?;
        let pump = match options.strict {
            true => Some(Pump::start(&inbox)?),
            false => None,
        };
        Ok(Self {
            _pump: pump,
            connected: None,
            joining: None,
            device: Some(device),
            open: Opener(open),
            own,
            inbox,
            doorbells,
            meeting: Meeting::new(place),
            options: options.clone(),
            mtu: MTU_MOST,
            look_again: None,
            usable: true,
            last_trouble: None,
            losses: 0,
            tally: Tally::default(),
            events: VecDeque::new(),
        })
    }

    /// What connections leave by; `None` while the device is gone.
    pub fn port(&self) -> Option<&Port> {
        self.device.as_ref().map(|device| device.adapter.port())
    }

    /// What the connection of the moment has counted.
    pub fn counts(&self) -> SendCounts {
        self.tally.counts()
    }

    /// The same for whoever has given the link away.
    pub fn tally(&self) -> Tally {
        self.tally.clone()
    }

    /// Who was turned away so far.
    pub fn meet_counts(&self) -> Counts {
        self.meeting.counts()
    }

    /// Registers further memory with the link's device, such as that of a GPU, for the peer to write to where `remote`.
    pub fn register(&self, memory: Memory, remote: bool) -> Result<Registration, LinkError> {
        let device = self
            .device
            .as_ref()
            .ok_or_else(|| error::unavailable("the device is gone"))?;
        device.adapter.register(memory, remote).map(Registration)
    }

    fn tell(&mut self, event: LinkEvent) {
        if self.events.len() < EVENTS_MAX {
            self.events.push_back(event);
        }
    }

    fn tell_transport(&mut self, name: &'static str, why: impl Into<String>) {
        let why = why.into();
        self.tell(LinkEvent::Transport { name, why });
    }

    /// Whether both directions work.
    fn is_set(&self) -> bool {
        self.connected
            .as_ref()
            .is_some_and(|c| c.exchange.is_caller() || self.inbox.is_greeted())
    }

    /// Ends the connection of the moment, or what was to become one.
    fn lose(&mut self, name: &'static str, why: impl Into<String>) {
        let was_set = self.is_set();
        self.mtu = MTU_MOST;
        self.joining = None;
        self.inbox.detach();
        if let Some(connected) = self.connected.take() {
            let last = connected.wire.end();
            drop(connected);
            drop(last);
        }
        self.meeting.again();
        if was_set {
            self.losses += 1;
            self.tell_transport(name, why);
        }
    }

    fn lose_device(&mut self, why: String) {
        self.lose("rdma-device-gone", why.clone());
        if self.device.take().is_some() {
            self.tell(LinkEvent::DeviceGone { why });
        }
        self.look_again = Some(Instant::now() + DEVICE_PAUSE);
    }

    /// The port has another address: it is chosen anew, with that one or another.
    fn lose_address(&mut self, why: String) {
        self.tell_transport("rdma-address-changed", why.clone());
        self.lose("rdma-lost", why);
        self.device = None;
        self.look_again = Some(Instant::now() + DEVICE_PAUSE);
    }

    /// Hears what the device tells by itself.
    fn hear_device(&mut self) {
        while let Some(notice) = self.device.as_ref().and_then(|d| d.adapter.next_notice()) {
            match notice {
                Notice::DeviceGone => {
                    self.lose_device("the device says that it is gone or broken".to_owned());
                }
                Notice::PortUp => {
                    self.look_again = None;
                    self.tell_transport("rdma-port-up", "the port is up");
                }
                Notice::PortDown => {
                    self.tell_transport("rdma-port-down", "the port is down");
                    self.lose("rdma-lost", "the port is down");
                    self.look_again = None;
                }
                Notice::AddressesChanged => {
                    if let Some(Err(Unusable::Changed(why))) =
                        self.device.as_ref().map(|d| d.adapter.is_usable())
                    {
                        self.lose_address(why);
                    }
                }
                Notice::Other(_) => {}
            }
        }
    }

    /// Opens a device that was gone.
    fn seek_device(&mut self) -> bool {
        let busy = self.connected.is_some() || self.joining.is_some();
        let now = Instant::now();
        if let Some(device) = &self.device {
            if !busy && self.look_again.is_none_or(|t| now >= t) {
                self.look_again = Some(now + DEVICE_PAUSE);
                let usable = device.adapter.is_usable();
                self.usable = usable.is_ok();
                // No device tells of every change.
                match usable {
                    Err(Unusable::Changed(why)) => self.lose_address(why),
                    Err(Unusable::Gone(why)) => self.lose_device(why),
                    Err(Unusable::Down(_)) | Ok(()) => {}
                }
            }
            return busy || self.usable;
        }
        if self.look_again.is_some_and(|t| now < t) {
            return false;
        }
        self.look_again = Some(now + DEVICE_PAUSE);
        match (self.open.0)().and_then(|adapter| Device::new(adapter, &self.own)) {
            Ok(device) => {
                self.device = Some(device);
                self.look_again = None;
                self.tell(LinkEvent::DeviceBack);
                true
            }
            Err(_) => false,
        }
    }

    /// Looks after the connection of the moment.
    fn check_peer(&mut self) {
        let Some(connected) = &mut self.connected else {
            return;
        };
        let sent = connected.wire.poll();
        let lost = match sent.and_then(|()| self.inbox.poll()) {
            Err(why) => Some(("rdma-broken", why)),
            Ok(()) => match (connected.exchange.is_alive(), connected.queue.ended()) {
                (Err(why), _) => Some(("rdma-peer-gone", why)),
                (Ok(()), Some(why)) => Some(("rdma-ended", why)),
                (Ok(()), None) => None,
            },
        };
        let Some((name, why)) = lost else { return };
        let (mtu, carried) = (connected.mtu, connected.wire.longest_done());
        let exhausted = why.contains(verbs::status_name(RETRY_EXHAUSTED));
        self.lose(name, why);
        if exhausted && mtu > MTU_LEAST && carried < u64::from(mtu) {
            // Perhaps the way does not take packets as large as both ends do: none was seen to arrive.
            self.mtu = mtu / 2;
        }
    }
}

fn named(name: &str, mut e: LinkError) -> LinkError {
    e.what = format!("{name}: {}", e.what);
    e
}

impl Link for RdmaLink {
    fn facts(&self) -> LinkFacts {
        LinkFacts {
            kind: LinkKind::Rdma,
            address: self.meeting.address().to_owned(),
            page_bytes: self.own.window().page_bytes(),
            engine: match self.options.strict {
                true => "rdma-strict",
                false => "rdma-write",
            },
        }
    }

    fn order(&self) -> Order {
        match self.options.strict {
            true => Order::Ordered,
            false => Order::Relaxed,
        }
    }

    fn poll(&mut self) -> Result<LinkStatus, LinkError> {
        self.hear_device();
        self.check_peer();
        if self.seek_device() {
            self.join()?;
            self.meet()?;
        }
        Ok(LinkStatus {
            state: match (self.is_set(), self.connected.is_some() || self.joining.is_some()) {
                (true, _) => LinkState::WindowsSet,
                (false, true) => LinkState::CableUp,
                (false, false) => LinkState::CableDown,
            },
            losses: self.losses,
        })
    }

    fn wait(&self, timeout: Duration) {
        let [bell, ..] = &self.doorbells;
        let mut fds = vec![bell.as_fd()];
        fds.extend(self.device.as_ref().map(|d| d.adapter.notices()));
        fds.extend(self.joining.iter().flat_map(Joining::descriptors));
        if let Some(connected) = &self.connected {
            fds.push(connected.exchange.as_fd());
            fds.extend(connected.queue.news());
        }
        let mut fds: Vec<_> = fds.into_iter().map(|fd| (fd, PollFlags::IN)).collect();
        let timeout = if self.device.is_some() && self.usable {
            let (meeting, limit) = self.meeting.wakers();
            fds.extend(meeting);
            limit.map_or(timeout, |limit| timeout.min(limit))
        } else {
            timeout.min(DEVICE_PAUSE) // nobody is heard out without a device
        };
        if sleep_on_any(&fds, timeout) {
            bell.take();
        }
    }

    fn registers(&self) -> Registers {
        match self.is_set() {
            true => self.own.registers(),
            false => NO_REGISTERS,
        }
    }

    fn write_registers(&mut self, registers: &Registers) {
        if let (true, Some(connected)) = (self.is_set(), &self.connected) {
            let mut bytes = [0; 32];
            for (to, from) in bytes.chunks_exact_mut(4).zip(registers) {
                to.copy_from_slice(&from.to_le_bytes());
            }
            connected.wire.post_registers(bytes);
        }
    }

    fn inbound(&self) -> View {
        self.own.window().view()
    }

    fn outbound(&self) -> Option<Engine> {
        let connected = self.connected.as_ref().filter(|_| self.is_set())?;
        let wire = Arc::clone(&connected.wire);
        Some(Engine::Other(Box::new(RdmaEngine::new(
            wire,
            self.options.batch_bytes,
            self.options.stall,
        ))))
    }

    fn ring(&mut self, doorbell: u32) {
        if let (true, true, Some(connected)) = (doorbell < DOORBELLS, self.is_set(), &self.connected) {
            connected.wire.ring(doorbell);
        }
    }

    fn doorbell(&self, number: u32) -> Doorbell {
        let [first, ..] = &self.doorbells;
        self.doorbells.get(number as usize).unwrap_or(first).clone()
    }

    fn next_event(&mut self) -> Option<LinkEvent> {
        self.events.pop_front()
    }
}

impl Drop for RdmaLink {
    fn drop(&mut self) {
        self.lose("rdma-closed", "this side has closed the link");
    }
}
