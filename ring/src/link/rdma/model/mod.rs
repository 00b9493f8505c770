//! Devices in software, in this process: for tests without hardware, kernel modules or rights.
//!
//! Stricter than the kernel's software devices where those are lenient and hardware is not: a place in the send queue comes
//! back only when the completion of a later signalled request was taken; a message that finds no receive breaks the
//! connection; data that a request does not carry itself is read when it is delivered, not when it is posted; and within
//! one write, words can be made to arrive in any order and part of them late.

#![allow(
    unsafe_code,
    reason = "requests name memory by address, as they do to a device"
)]

mod queue;

use std::{
    collections::{HashMap, VecDeque},
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use ntb_mem::{line::LINE_WORDS, region::View};
use rustix::{event::EventfdFlags, io::Errno};

use super::{
    error::{MemoryKind, failed, not_registered, refused},
    verbs::{
        Adapter, Fabric, Meeting, Memory, Notice, Port, Prepare, Queue, QueueAddress, QueueWish, Registered,
        TOKEN_BYTES, Unusable,
    },
};
use crate::link::{LinkError, doorbell::ring_event, random::Random};
use queue::{ModelQueue, Pair};

/// How the devices of a model behave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Behaviour {
    pub(crate) fabric: Fabric,
    /// Granted at most.
    pub(crate) depth: u32,
    pub(crate) inline: u32,
    pub(crate) has_manager: bool,
    /// Whether anything comes of what is asked of rdma_cm.
    pub(crate) manager_answers: bool,
    /// Whether completions can be taken; they wait until then.
    pub(crate) drains: bool,
    /// Of a million writes, how many arrive with their words out of order and in two parts.
    pub(crate) torn: u32,
    /// Of a million looks at a request that waits to be carried out, how many leave it waiting. Whoever calls the model
    /// has it look, and a thread of the model's does.
    pub(crate) delayed: u32,
    /// Bytes that may be registered; nothing more.
    pub(crate) memlock: u64,
    pub(crate) seed: u64,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self {
            fabric: Fabric::Roce,
            depth: 128,
            inline: 220,
            has_manager: true,
            manager_answers: true,
            drains: true,
            torn: 0,
            delayed: 0,
            memlock: 1 << 30,
            seed: 1,
        }
    }
}

/// What joins the devices.
#[derive(Clone, Debug)]
pub(crate) struct Model(Arc<Mutex<State>>);

#[derive(Debug)]
pub(super) struct State {
    behaviour: Behaviour,
    random: Random,
    next: u32,
    ports: HashMap<u32, PortState>,
    registered: HashMap<u32, (View, bool)>,
    pinned: u64,
    pairs: HashMap<u32, Pair>,
    /// Sides that listen, by port: the token, and whether it has been met.
    listeners: HashMap<u16, ListenerState>,
    /// Parts of writes that are on their way: memory, word and value.
    late: Vec<(View, usize, u64)>,
    counts: Counts,
}

/// What the devices have seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) writes: u64,
    pub(crate) messages: u64,
    /// Posts for which the send queue had no place left: a bug of the program.
    pub(crate) overruns: u64,
    /// Most places taken in one send queue.
    pub(crate) deepest: u64,
    pub(crate) torn: u64,
    /// Messages that found no receive: a bug of the program.
    pub(crate) unready: u64,
    /// Requests that named memory they may not, and memory given up while requests still named it.
    pub(crate) violations: u64,
}

#[derive(Debug)]
struct PortState {
    up: bool,
    gone: bool,
    gid: [u8; 16],
    notices: VecDeque<Notice>,
    event: Arc<OwnedFd>,
}

#[derive(Debug)]
struct ListenerState {
    token: [u8; TOKEN_BYTES],
    calls: Vec<u32>,
    event: Arc<OwnedFd>,
}

impl Model {
    pub(crate) fn new(behaviour: Behaviour) -> Self {
        let state = Arc::new(Mutex::new(State {
            behaviour,
            random: Random::new(behaviour.seed),
            next: 1,
            ports: HashMap::new(),
            registered: HashMap::new(),
            pinned: 0,
            pairs: HashMap::new(),
            listeners: HashMap::new(),
            late: Vec::new(),
            counts: Counts::default(),
        }));
        if behaviour.delayed > 0 {
            // A device goes on by itself.
            let device = Arc::downgrade(&state);
            std::thread::spawn(move || {
                while let Some(state) = device.upgrade() {
                    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
                    state.work();
                    state.settle();
                    drop(state);
                    std::thread::sleep(Duration::from_micros(50));
                }
            });
        }
        Self(state)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the device called `name`, which is made when it was not there. Fails while it is gone.
    pub(crate) fn open(&self, name: u32) -> Result<Arc<dyn Adapter>, LinkError> {
        let event = Arc::new(event()?);
        let mut state = self.lock();
        let fabric = state.behaviour.fabric;
        let port = state.ports.entry(name).or_insert_with(|| PortState {
            up: true,
            gone: false,
            gid: gid(name, 0),
            notices: VecDeque::new(),
            event,
        });
        if port.gone {
            return Err(failed("rdma-no-device", 3, format!("model{name} is gone")));
        }
        Ok(Arc::new(ModelAdapter {
            model: self.clone(),
            name,
            port: Port {
                device: format!("model{name}"),
                port: 1,
                fabric,
                gid_index: 1,
                gid: port.gid,
                ip: Some(IpAddr::from([127, 0, 0, 1])),
                why: "the only one".to_owned(),
            },
            event: Arc::clone(&port.event),
        }))
    }

    pub(crate) fn counts(&self) -> Counts {
        self.lock().counts
    }

    /// Sets how the devices behave from now on.
    pub(crate) fn behave(&self, change: impl FnOnce(&mut Behaviour)) {
        change(&mut self.lock().behaviour);
    }

    /// Takes a port down or up. Requests under way and later fail as if retries had been exhausted.
    pub(crate) fn set_port(&self, name: u32, up: bool) {
        let mut state = self.lock();
        if let Some(port) = state.ports.get_mut(&name) {
            port.up = up;
            port.tell(if up { Notice::PortUp } else { Notice::PortDown });
        }
    }

    /// Gives a port another address.
    pub(crate) fn change_gid(&self, name: u32, generation: u8) {
        if let Some(port) = self.lock().ports.get_mut(&name) {
            port.gid = gid(name, generation);
            port.tell(Notice::AddressesChanged);
        }
    }

    /// Removes a device, or brings it back.
    pub(crate) fn set_gone(&self, name: u32, gone: bool) {
        let mut state = self.lock();
        if let Some(port) = state.ports.get_mut(&name) {
            port.gone = gone;
            if gone {
                port.tell(Notice::DeviceGone);
            }
        }
    }

    /// Cuts connections silently: packets vanish until `whole` again, without a notice.
    pub(crate) fn exhaust_retries(&self, name: u32) {
        let mut state = self.lock();
        for pair in state.pairs.values_mut().filter(|pair| pair.device == name) {
            pair.cut = true;
        }
    }
}

impl PortState {
    fn tell(&mut self, notice: Notice) {
        self.notices.push_back(notice);
        ring_event(&self.event);
    }
}

fn gid(name: u32, generation: u8) -> [u8; 16] {
    let mut gid = [0; 16];
    gid[10..12].fill(0xff);
    gid[12..].copy_from_slice(&[10, generation, 0, name as u8]);
    gid
}

pub(super) fn event() -> Result<OwnedFd, LinkError> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|errno| refused("an event descriptor", errno))
}

/// A device of a model, opened by one side.
#[derive(Debug)]
struct ModelAdapter {
    model: Model,
    name: u32,
    port: Port,
    event: Arc<OwnedFd>,
}

#[derive(Debug)]
struct ModelRegistered {
    model: Model,
    memory: Memory,
    key: u32,
}

impl Registered for ModelRegistered {
    fn memory(&self) -> &Memory {
        &self.memory
    }
    fn lkey(&self) -> u32 {
        self.key
    }
    fn rkey(&self) -> u32 {
        self.key
    }
}

impl Drop for ModelRegistered {
    fn drop(&mut self) {
        let mut state = self.model.lock();
        if state.pairs.values().any(|pair| pair.names(self.key)) {
            state.counts.violations += 1;
        }
        state.registered.remove(&self.key);
        state.pinned -= self.memory.bytes();
    }
}

impl ModelAdapter {
    fn check(&self, state: &State) -> Result<(), Errno> {
        match state.ports.get(&self.name) {
            Some(port) if !port.gone => Ok(()),
            _ => Err(Errno::NODEV),
        }
    }

    fn make(&self, wish: &QueueWish) -> Result<Arc<ModelQueue>, LinkError> {
        let arrivals = Arc::new(event()?);
        let mut state = self.model.lock();
        self.check(&state)
            .map_err(|e| refused("making a queue pair", e))?;
        let number = state.number();
        let behaviour = state.behaviour;
        let pair = Pair::new(self.name, wish, &behaviour, Arc::clone(&arrivals));
        let granted = pair.granted();
        state.pairs.insert(number, pair);
        Ok(Arc::new(ModelQueue {
            model: self.model.clone(),
            number,
            granted,
            gid: self.port.gid,
            arrivals,
        }))
    }
}

impl State {
    fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    /// Delivers what is late.
    pub(super) fn settle(&mut self) {
        for (view, word, value) in std::mem::take(&mut self.late) {
            view.store(word, value, std::sync::atomic::Ordering::Relaxed);
        }
    }

    /// Writes words to a peer's memory. A torn write arrives in random order, and half of it when somebody next looks.
    pub(super) fn deliver(&mut self, view: &View, first: usize, words: &[u64]) {
        self.counts.writes += 1;
        self.settle();
        let mut order: Vec<usize> = (0..words.len()).collect();
        let torn = words.len() >= LINE_WORDS && self.random.chance(self.behaviour.torn);
        if torn {
            self.counts.torn += 1;
            for i in (1..order.len()).rev() {
                order.swap(i, self.random.below(i as u64 + 1) as usize);
            }
        }
        let late = if torn { order.len() / 2 } else { order.len() };
        for (i, at) in order.into_iter().enumerate() {
            match i < late {
                true => view.store(first + at, words[at], std::sync::atomic::Ordering::Release),
                false => self.late.push((view.clone(), first + at, words[at])),
            }
        }
    }
}

impl Adapter for ModelAdapter {
    fn port(&self) -> &Port {
        &self.port
    }

    fn is_usable(&self) -> Result<(), Unusable> {
        match self.model.lock().ports.get(&self.name) {
            Some(port) if port.gone => Err(Unusable::Gone("it is gone".to_owned())),
            Some(port) if !port.up => Err(Unusable::Down("the port is down".to_owned())),
            Some(port) if port.gid != self.port.gid => {
                Err(Unusable::Changed("the GID has changed".to_owned()))
            }
            _ => Ok(()),
        }
    }

    fn mtu(&self) -> u32 {
        1024
    }

    fn has_manager(&self) -> bool {
        self.model.lock().behaviour.has_manager
    }

    fn register(&self, memory: Memory, remote: bool) -> Result<Arc<dyn Registered>, LinkError> {
        let mut state = self.model.lock();
        let bytes = memory.bytes();
        let Memory::Local(region) = &memory else {
            let (kind, errno) = match memory {
                Memory::DmaBuf { .. } => (MemoryKind::DmaBuf, Errno::OPNOTSUPP),
                _ => (MemoryKind::Peer, Errno::FAULT),
            };
            return Err(not_registered(bytes, kind, errno));
        };
        self.check(&state).map_err(|e| refused("registering memory", e))?;
        if state.pinned + bytes > state.behaviour.memlock {
            return Err(not_registered(bytes, MemoryKind::Local, Errno::NOMEM));
        }
        state.pinned += bytes;
        let key = state.number() << 8;
        let view = region.view();
        state.registered.insert(key, (view, remote));
        drop(state);
        Ok(Arc::new(ModelRegistered {
            model: self.model.clone(),
            memory,
            key,
        }))
    }

    fn queue(&self, wish: &QueueWish) -> Result<Arc<dyn Queue>, LinkError> {
        Ok(self.make(wish)?)
    }

    fn listen(
        &self,
        wish: &QueueWish,
        token: [u8; TOKEN_BYTES],
        prepare: Prepare,
    ) -> Result<Box<dyn Meeting>, LinkError> {
        let event = Arc::new(event()?);
        let mut state = self.model.lock();
        let port = 1024 + state.number() as u16;
        let listener = ListenerState {
            token,
            calls: Vec::new(),
            event: Arc::clone(&event),
        };
        state.listeners.insert(port, listener);
        drop(state);
        Ok(Box::new(ModelListener {
            adapter: ModelAdapter {
                model: self.model.clone(),
                name: self.name,
                port: self.port.clone(),
                event: Arc::clone(&self.event),
            },
            wish: *wish,
            port,
            prepare,
            event,
        }))
    }

    fn call(
        &self,
        wish: &QueueWish,
        to: (IpAddr, u16),
        token: [u8; TOKEN_BYTES],
        mut prepare: Prepare,
    ) -> Result<Box<dyn Meeting>, LinkError> {
        let queue = self.make(wish)?;
        prepare(&*queue).map_err(|e| refused("posting receives", e))?;
        let mut state = self.model.lock();
        let answers = state.behaviour.manager_answers;
        let refused = match state.listeners.get_mut(&to.1) {
            _ if !answers => false,
            Some(listener) if listener.token == token => {
                listener.calls.push(queue.number);
                ring_event(&listener.event);
                false
            }
            _ => true,
        };
        drop(state);
        Ok(Box::new(ModelCall { queue, refused }))
    }

    fn notices(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn next_notice(&self) -> Option<Notice> {
        let mut state = self.model.lock();
        let notice = state.ports.get_mut(&self.name)?.notices.pop_front();
        if notice.is_none() {
            let _ = rustix::io::read(&self.event, &mut [0; 8]);
        }
        notice
    }
}

#[derive(Debug)]
struct ModelCall {
    queue: Arc<ModelQueue>,
    refused: bool,
}

impl Meeting for ModelCall {
    fn poll(&mut self) -> Result<Option<Arc<dyn Queue>>, LinkError> {
        if self.refused {
            return Err(failed("rdma-rejected", 4, "the peer turned the call away"));
        }
        let connected = self.queue.is_connected();
        Ok(connected.then(|| Arc::clone(&self.queue) as Arc<dyn Queue>))
    }

    fn news(&self) -> BorrowedFd<'_> {
        self.queue.arrivals()
    }

    fn port(&self) -> u16 {
        0
    }
}

struct ModelListener {
    adapter: ModelAdapter,
    wish: QueueWish,
    port: u16,
    prepare: Prepare,
    event: Arc<OwnedFd>,
}

impl std::fmt::Debug for ModelListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ModelListener")
            .field("port", &self.port)
            .finish_non_exhaustive()
    }
}

impl Meeting for ModelListener {
    fn poll(&mut self) -> Result<Option<Arc<dyn Queue>>, LinkError> {
        let mut state = self.adapter.model.lock();
        let call = state.listeners.get_mut(&self.port).and_then(|l| l.calls.pop());
        drop(state);
        let Some(caller) = call else { return Ok(None) };
        let queue = self.adapter.make(&self.wish)?;
        (self.prepare)(&*queue).map_err(|e| refused("posting receives", e))?;
        queue.join(caller);
        Ok(Some(queue))
    }

    fn news(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for ModelListener {
    fn drop(&mut self) {
        self.adapter.model.lock().listeners.remove(&self.port);
    }
}

/// The address of a queue pair, which is its number here.
fn address(number: u32, gid: [u8; 16]) -> QueueAddress {
    QueueAddress {
        number,
        first_packet: 7,
        lid: 0,
        gid,
        mtu: 1024,
    }
}
