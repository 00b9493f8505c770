//! From a peer that has been met to a connection: whether both fit, the queue pair, and where memory lies.

use std::{
    net::IpAddr,
    os::fd::{AsFd as _, BorrowedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    account::Remote,
    device::Device,
    error::failed,
    exchange::{Exchange, Hello, Message, VERSION},
    options::{Manager, RdmaOptions},
    verbs::{Fabric, Meeting, Prepare, Queue, TOKEN_BYTES},
};
use crate::link::{LinkError, ends::WINDOW_MAX};

/// Time that all of it may take.
const PATIENCE: Duration = Duration::from_secs(8);
/// Time that rdma_cm may take where there is a way around it: enough for the kernel to ask a second time, after 4.3 s.
const MANAGER_PATIENCE: Duration = Duration::from_secs(5);

/// How far the queue pair is.
#[derive(Debug)]
enum Stage {
    /// It is to say where it can be called.
    Offer { ip: Option<IpAddr> },
    /// rdma_cm is at work.
    Meeting(Box<dyn Meeting>),
    /// It is to say what its queue pair is.
    Queue(Arc<dyn Queue>),
    /// Connected; it is to say where its memory lies.
    Memory(Arc<dyn Queue>),
}

/// Why joining has ended.
#[derive(Debug)]
pub(super) enum Trouble {
    /// With this peer now; perhaps not the next time.
    Passing(String),
    /// rdma_cm does not come to an end, and can be done without.
    Silent,
    /// For good: the two sides do not fit.
    Final(LinkError),
}

/// A connection that is being made.
#[derive(Debug)]
pub(super) struct Joining {
    exchange: Exchange,
    stage: Stage,
    /// A message for a later stage, come early: each side sends its memory as soon as its own queue pair is connected.
    memory: Option<Remote>,
    deadline: Instant,
    /// When rdma_cm is given up.
    manager_deadline: Option<Instant>,
    mtu: u32,
}

/// What came of it.
#[derive(Debug)]
pub(super) struct Joined {
    pub(super) exchange: Exchange,
    pub(super) queue: Arc<dyn Queue>,
    pub(super) remote: Remote,
}

impl Joining {
    /// Begins with a peer that has said `hello` and was told [`own_hello`].
    pub(super) fn new(
        exchange: Exchange,
        hello: &Hello,
        device: &Device,
        options: &RdmaOptions,
        mtu: u32,
    ) -> Result<Self, Trouble> {
        let manager = fit(hello, device, options, mtu).map_err(Trouble::Final)?;
        let mut joining = Self {
            exchange,
            stage: Stage::Offer { ip: hello.ip },
            memory: None,
            deadline: Instant::now() + PATIENCE,
            manager_deadline: (!hello.needs_manager && !own_hello(device, options, mtu).needs_manager)
                .then(|| Instant::now() + MANAGER_PATIENCE),
            mtu,
        };
        let wish = device.wish(options, mtu);
        match (manager, joining.exchange.is_caller()) {
            (true, true) => {}
            (true, false) => {
                let token = token().map_err(Trouble::Passing)?;
                let meeting = device.adapter.listen(&wish, token, prepare(device));
                let meeting = meeting.map_err(passing)?;
                let port = meeting.port();
                joining.say(&Message::Offer { port, token })?;
                joining.stage = Stage::Meeting(meeting);
            }
            (false, _) => {
                let queue = device.adapter.queue(&wish).map_err(passing)?;
                let posted = device.buffers.post_all(&*queue);
                posted.map_err(|e| Trouble::Passing(format!("no receives can be posted: {e}")))?;
                joining.say(&Message::Queue(queue.address()))?;
                joining.stage = Stage::Queue(queue);
            }
        }
        Ok(joining)
    }

    /// Goes on without blocking.
    pub(super) fn poll(
        mut self,
        device: &Device,
        options: &RdmaOptions,
    ) -> Result<Result<Joined, Self>, Trouble> {
        self.exchange.flush().map_err(Trouble::Passing)?;
        if let Stage::Meeting(meeting) = &mut self.stage
            && let Some(queue) = meeting.poll().map_err(passing)?
        {
            self.connected(queue, device)?;
        }
        while let Some(message) = self.exchange.next().map_err(Trouble::Passing)? {
            self.hear(message, device, options)?;
        }
        if let (Stage::Memory(queue), Some(remote)) = (&self.stage, self.memory) {
            let queue = Arc::clone(queue);
            return Ok(Ok(Joined {
                exchange: self.exchange,
                queue,
                remote,
            }));
        }
        if matches!(self.stage, Stage::Meeting(_))
            && self.manager_deadline.is_some_and(|t| Instant::now() > t)
        {
            return Err(Trouble::Silent);
        }
        if Instant::now() > self.deadline {
            return Err(Trouble::Passing(format!(
                "no connection within {} s: the stage was {}",
                PATIENCE.as_secs(),
                self.stage_name()
            )));
        }
        Ok(Err(self))
    }

    fn stage_name(&self) -> &'static str {
        match self.stage {
            Stage::Offer { .. } => "the peer's offer",
            Stage::Meeting(_) => "rdma_cm",
            Stage::Queue(_) => "the peer's queue pair",
            Stage::Memory(_) => "the peer's memory",
        }
    }

    fn hear(&mut self, message: Message, device: &Device, options: &RdmaOptions) -> Result<(), Trouble> {
        match (message, &self.stage) {
            (Message::Offer { port, token }, Stage::Offer { ip }) => {
                let Some(ip) = ip.or(self.exchange.peer_ip()) else {
                    return Err(Trouble::Passing("the peer has no address to call".to_owned()));
                };
                let wish = device.wish(options, self.mtu);
                let meeting = device.adapter.call(&wish, (ip, port), token, prepare(device));
                self.stage = Stage::Meeting(meeting.map_err(passing)?);
                Ok(())
            }
            (Message::Queue(peer), Stage::Queue(queue)) => {
                let queue = Arc::clone(queue);
                queue.connect(&peer).map_err(passing)?;
                self.connected(queue, device)
            }
            (Message::Memory(remote), _) if self.memory.is_none() => {
                let (_, _, bytes) = remote.window;
                if remote.receives == 0 {
                    return Err(Trouble::Passing("the peer has no receives posted".to_owned()));
                }
                if !(ntb_mem::line::LINE_BYTES as u64..=WINDOW_MAX).contains(&bytes) {
                    return Err(Trouble::Passing(format!(
                        "the peer's window of {bytes} bytes cannot be"
                    )));
                }
                self.memory = Some(remote);
                Ok(())
            }
            (message, _) => Err(Trouble::Passing(format!(
                "the peer says something out of turn while this side waits for {}: {message:?}",
                self.stage_name()
            ))),
        }
    }

    /// The queue pair is connected: now the peer may know where memory lies.
    fn connected(&mut self, queue: Arc<dyn Queue>, device: &Device) -> Result<(), Trouble> {
        self.say(&Message::Memory(device.told()))?;
        self.stage = Stage::Memory(queue);
        Ok(())
    }

    fn say(&mut self, message: &Message) -> Result<(), Trouble> {
        self.exchange.send(message).map_err(Trouble::Passing)
    }

    /// What wakes this side.
    pub(super) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let mut all = vec![self.exchange.as_fd()];
        if let Stage::Meeting(meeting) = &self.stage {
            all.push(meeting.news());
        }
        all
    }
}

/// What this side says of itself.
pub(super) fn own_hello(device: &Device, options: &RdmaOptions, mtu: u32) -> Hello {
    let port = device.adapter.port();
    let needs_manager = options.manager == Manager::Only || port.fabric == Fabric::Iwarp;
    Hello {
        version: VERSION,
        fabric: port.fabric as u8,
        has_manager: device.has_manager(options, mtu),
        strict: options.strict,
        needs_manager,
        ip: port.ip,
    }
}

/// Whether the two sides fit, and if so whether rdma_cm connects them. Both find the same.
fn fit(peer: &Hello, device: &Device, options: &RdmaOptions, mtu: u32) -> Result<bool, LinkError> {
    let own = own_hello(device, options, mtu);
    let mismatch = |what: &str, ours: String, theirs: String| {
        Err(failed(
            "rdma-mismatch",
            7,
            format!("{what}: this side {ours}, the peer {theirs}; both ends must have the same"),
        ))
    };
    if peer.version != VERSION {
        return mismatch(
            "version of the exchange before RDMA",
            VERSION.to_string(),
            peer.version.to_string(),
        );
    }
    let fabric = device.adapter.port().fabric;
    if peer.fabric() != Some(fabric) {
        let theirs = peer.fabric().map_or("something unknown", Fabric::name);
        return mismatch("kind of wire", fabric.name().to_owned(), theirs.to_owned());
    }
    if peer.strict != own.strict {
        let name = |strict| if strict { "strict" } else { "by check" };
        return mismatch(
            "completion of messages",
            name(own.strict).to_owned(),
            name(peer.strict).to_owned(),
        );
    }
    let manager = own.has_manager && peer.has_manager;
    if !manager && (own.needs_manager || peer.needs_manager) {
        return Err(failed(
            "rdma-no-manager",
            3,
            "rdma_cm is needed and not both sides offer it: it takes librdmacm.so.1, the module rdma_ucm and /dev/infiniband/rdma_cm, \
             an answer when it was last tried, and neither mtu nor sl set, which it finds by itself",
        ));
    }
    Ok(manager)
}

fn passing(e: LinkError) -> Trouble {
    Trouble::Passing(e.what)
}

fn prepare(device: &Device) -> Prepare {
    let buffers = device.buffers.clone();
    Box::new(move |queue| buffers.post_all(queue))
}

fn token() -> Result<[u8; TOKEN_BYTES], String> {
    let mut token = [0; TOKEN_BYTES];
    match rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty()) {
        Ok(TOKEN_BYTES) => Ok(token),
        other => Err(format!("no random numbers: {other:?}")),
    }
}
