//! A link with its service thread, from the application's side.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use ntb_mem::sync::Arc;

use super::{
    ConnectError, Receiver, Sender,
    service::{Command, Driver, ServiceStats},
    shared::{Common, Shared, Status, lock},
};
use crate::{
    link::{Link, LinkFacts},
    session::{ChannelSpec, Event, OpenError, PeerInfo, Place, SessionConfig, SessionState},
};

/// How a connection is run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name of this node for the peer's messages; the host name and process id by default.
    pub node: String,
    /// Processor to pin the service thread to.
    pub service_cpu: Option<usize>,
    /// Time between two heartbeats.
    pub beat_interval: Duration,
    /// Silence after which the peer is reported as silent.
    pub silent_after: Duration,
    /// Silence after which it is given up.
    pub gone_after: Duration,
    /// How long unread messages of a dead peer hold up its successor.
    pub drain_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        let session = SessionConfig::new("", 0, 0, crate::link::engine::Order::Ordered);
        Self {
            node: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            service_cpu: None,
            beat_interval: session.beat_interval,
            silent_after: session.silent_after,
            gone_after: session.gone_after,
            drain_timeout: session.drain_timeout,
        }
    }
}

/// A link that is being served. Dropping it says goodbye to the peer and ends its channels.
#[derive(Debug)]
pub struct Connection {
    common: Arc<Common>,
    commands: mpsc::Sender<Command>,
    facts: LinkFacts,
    thread: Option<JoinHandle<()>>,
}

impl Connection {
    /// Starts serving `link` on a thread of its own. Returns at once; the peer may come later.
    pub fn open(link: Box<dyn Link>, options: &Options) -> Result<Self, ConnectError> {
        let (mut connection, mut driver) = Self::with_driver(link, options)?;
        let cpu = options.service_cpu;
        let thread = std::thread::Builder::new()
            .name("ntb-service".to_owned())
            .spawn(move || {
                if let Some(cpu) = cpu {
                    let mut set = rustix::thread::CpuSet::new();
                    set.set(cpu);
                    let _ = rustix::thread::sched_setaffinity(None, &set); // a wish; the facts show where it runs
                }
                driver.run();
            })
            .map_err(|e| ConnectError::NoThread(e.to_string()))?;
        connection.thread = Some(thread);
        Ok(connection)
    }

    /// As [`Connection::open`], without a thread: the caller calls [`Driver::poll`] often, at least once per heartbeat, and
    /// as often as wake-ups, handshakes and reconnects are to be quick.
    pub fn with_driver(link: Box<dyn Link>, options: &Options) -> Result<(Self, Driver), ConnectError> {
        let facts = link.facts();
        let common = Arc::new(Common {
            status: Mutex::new(Status {
                state: SessionState::CableDown,
                peer: None,
                refused: None,
                failed: None,
                events: VecDeque::new(),
                events_dropped: 0,
                stats: ServiceStats::default(),
            }),
            changed: Condvar::new(),
            bell: link.doorbell(0),
        });
        let (commands, receiver) = mpsc::channel();
        let driver = Driver::new(link, options, Arc::clone(&common), receiver)?;
        Ok((
            Self {
                common,
                commands,
                facts,
                thread: None,
            },
            driver,
        ))
    }

    /// Opens a channel at this side. It connects when the peer has opened one of the same name and shape, in either order.
    pub fn channel(&self, name: &str, spec: ChannelSpec) -> Result<(Sender, Receiver), OpenError> {
        self.channel_at(name, spec, Place::Ordinary)
    }

    /// As [`Connection::channel`], with this side's ring at `place`.
    pub fn channel_at(
        &self,
        name: &str,
        spec: ChannelSpec,
        place: Place,
    ) -> Result<(Sender, Receiver), OpenError> {
        let (answer, result) = mpsc::channel();
        let gone = || OpenError::Ended;
        self.commands
            .send(Command::Open {
                name: name.to_owned(),
                spec,
                place,
                answer,
            })
            .map_err(|_| gone())?;
        self.common.bell.ring();
        let shared: Arc<Shared> = result.recv().map_err(|_| gone())??;
        Ok((Sender::new(Arc::clone(&shared)), Receiver::new(shared)))
    }

    /// What to print about the link.
    pub fn facts(&self) -> &LinkFacts {
        &self.facts
    }

    /// Where the link stands.
    pub fn state(&self) -> SessionState {
        lock(&self.common.status).state
    }

    /// The peer, while there is one.
    pub fn peer(&self) -> Option<Arc<PeerInfo>> {
        lock(&self.common.status).peer.clone()
    }

    /// Counts of the service thread.
    pub fn stats(&self) -> ServiceStats {
        lock(&self.common.status).stats
    }

    /// The next event, waiting as long as `timeout` for one. At most 1024 are kept: the oldest are dropped and counted in
    /// [`ServiceStats::events_dropped`].
    pub fn next_event(&self, timeout: Duration) -> Option<Event> {
        let end = Instant::now() + timeout;
        let mut status = lock(&self.common.status);
        loop {
            if let Some(event) = status.events.pop_front() {
                return Some(event);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || status.failed.is_some() {
                return None;
            }
            status = wait(&self.common.changed, status, left);
        }
    }

    /// Waits until channels work.
    pub fn wait_running(&self, timeout: Duration) -> Result<Arc<PeerInfo>, ConnectError> {
        let start = Instant::now();
        let mut status = lock(&self.common.status);
        loop {
            if let (SessionState::Running, Some(peer)) = (status.state, &status.peer) {
                return Ok(Arc::clone(peer));
            }
            if let Some(failed) = &status.failed {
                return Err(failed.clone());
            }
            if let (SessionState::Refused, Some(why)) = (status.state, &status.refused) {
                return Err(ConnectError::Refused(why.clone()));
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                let waited_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
                return Err(ConnectError::TimedOut {
                    waited_ms,
                    state: status.state,
                });
            }
            status = wait(&self.common.changed, status, left);
        }
    }
}

fn wait<'a>(
    changed: &Condvar,
    status: std::sync::MutexGuard<'a, Status>,
    left: Duration,
) -> std::sync::MutexGuard<'a, Status> {
    changed
        .wait_timeout(status, left)
        .unwrap_or_else(std::sync::PoisonError::into_inner)
        .0
}

impl Drop for Connection {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Shutdown); // the driver may have gone first
        self.common.bell.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
