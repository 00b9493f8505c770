//! The receiving half of a connection: doorbells that ring, and in strict mode runs of lines that have become complete.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use ntb_mem::{
    line::LINE_BYTES,
    region::{Pages, Region, View},
};
use rustix::{event::epoll, io::Errno};

use super::{
    send::Wire,
    verbs::{Adapter, Memory, Piece, Queue, Received, Registered, status_name},
};
use crate::link::{
    DOORBELLS, Doorbell, LinkError,
    doorbell::{Hub, ring_event},
    ends::memory_error,
    engine::Inbound as _,
};

/// Receives that are posted: for doorbells, and for runs in strict mode.
pub(super) const RECEIVES: u32 = 64;
pub(super) const RECEIVES_STRICT: u32 = 512;
/// Bytes of each: an announcement has eight.
const BUFFER_BYTES: u64 = 64;
/// Rung by the side that called when its queue pair is connected: on iWARP it has to speak first.
pub(super) const GREETING: u32 = 31;

/// Buffers of the receives.
#[derive(Clone, Debug)]
pub(super) struct Buffers {
    view: View,
    registered: Arc<dyn Registered>,
    pub(super) count: u32,
}

impl Buffers {
    pub(super) fn new(adapter: &dyn Adapter, count: u32) -> Result<Self, LinkError> {
        let region = Region::allocate(u64::from(count) * BUFFER_BYTES, Pages::Normal);
        let region = Arc::new(region.map_err(|e| memory_error(&e))?);
        Ok(Self {
            view: region.view(),
            registered: adapter.register(Memory::Local(region), false)?,
            count,
        })
    }

    fn piece(&self, id: u64) -> Piece {
        Piece {
            address: self.registered.memory().address() + id * BUFFER_BYTES,
            bytes: BUFFER_BYTES as u32,
            lkey: self.registered.lkey(),
        }
    }

    /// Posts all of them on a new queue.
    pub(super) fn post_all(&self, queue: &dyn Queue) -> Result<(), Errno> {
        (0..u64::from(self.count)).try_for_each(|id| queue.post_receive(id, self.piece(id)))
    }

    fn announced(&self, id: u64) -> u64 {
        let word = id * BUFFER_BYTES / 8;
        self.view
            .load(word as usize, std::sync::atomic::Ordering::Acquire)
    }
}

/// Where everything that arrives with a completion is taken up, by whoever looks first.
#[derive(Debug)]
pub(super) struct Inbox {
    /// Readable while the connection's arrivals are.
    arrivals: OwnedFd,
    /// What sleepers sleep on, by number.
    locals: Vec<Arc<OwnedFd>>,
    state: Mutex<Option<Receiving>>,
}

#[derive(Debug)]
struct Receiving {
    queue: Arc<dyn Queue>,
    wire: Arc<Wire>,
    buffers: Buffers,
    /// In strict mode: where runs arrive, and where they are copied once they are complete.
    runs: Option<(View, View)>,
    /// Receives posted again since the connection was made, and the count that the peer was told last.
    again: u64,
    told: u64,
    greeted: bool,
    failed: Option<String>,
}

impl Inbox {
    /// Without a connection yet, and the doorbells to give away.
    pub(super) fn new() -> Result<(Arc<Self>, [Doorbell; DOORBELLS as usize]), Errno> {
        let inbox = Arc::new(Self {
            arrivals: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            locals: Doorbell::locals()?,
            state: Mutex::new(None),
        });
        let hub = Arc::clone(&inbox) as Arc<dyn Hub>;
        let doorbells = Doorbell::handed_all(&inbox.locals, inbox.arrivals.as_fd(), &hub)?;
        Ok((inbox, doorbells))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Receiving>> {
        // Nothing is left half done under this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes up a connection whose receives are posted.
    pub(super) fn attach(
        &self,
        queue: Arc<dyn Queue>,
        wire: Arc<Wire>,
        buffers: Buffers,
        runs: Option<(View, View)>,
    ) -> Result<(), Errno> {
        let mut state = self.lock();
        let (data, flags) = (epoll::EventData::new_u64(0), epoll::EventFlags::IN);
        epoll::add(&self.arrivals, queue.arrivals(), data, flags)?;
        queue.arm()?;
        *state = Some(Receiving {
            queue,
            wire,
            buffers,
            runs,
            again: 0,
            told: 0,
            greeted: false,
            failed: None,
        });
        Ok(())
    }

    /// Lets a connection go.
    pub(super) fn detach(&self) {
        if let Some(receiving) = self.lock().take() {
            let _ = epoll::delete(&self.arrivals, receiving.queue.arrivals());
        }
    }

    /// Rings of an earlier connection are none of this one's.
    pub(super) fn forget_rings(&self) {
        for local in &self.locals {
            let _ = rustix::io::read(local, &mut [0; 8]);
        }
    }

    /// Takes up what has arrived.
    pub(super) fn poll(&self) -> Result<(), String> {
        match &mut *self.lock() {
            Some(receiving) => receiving.take(&self.locals),
            None => Ok(()),
        }
    }

    /// Whether the side that called has been heard.
    pub(super) fn is_greeted(&self) -> bool {
        self.lock().as_ref().is_some_and(|receiving| receiving.greeted)
    }

    /// Takes up what has arrived, after a sleep on [`Inbox::arrivals`]. Failures are told by the next poll.
    pub(super) fn wake(&self) {
        if let Some(receiving) = &mut *self.lock() {
            if let Err(errno) = receiving.queue.arm() {
                receiving
                    .failed
                    .get_or_insert(format!("the completion queue is broken: {errno}"));
            }
            let _ = receiving.take(&self.locals);
        }
    }

    pub(super) fn arrivals(&self) -> &OwnedFd {
        &self.arrivals
    }
}

impl Hub for Inbox {
    fn hand_out(&self) {
        self.wake();
    }
}

impl Receiving {
    fn take(&mut self, locals: &[Arc<OwnedFd>]) -> Result<(), String> {
        let mut received = [Received::default(); 16];
        while self.failed.is_none() {
            match self.queue.received(&mut received) {
                Ok(0) => break,
                Ok(n) => received.iter().take(n).for_each(|one| self.take_one(one, locals)),
                Err(errno) => self.failed = Some(format!("the completion queue is broken: {errno}")),
            }
        }
        if self.again - self.told >= u64::from(self.buffers.count / 4) && self.wire.post_grant(self.again) {
            self.told = self.again;
        }
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn take_one(&mut self, received: &Received, locals: &[Arc<OwnedFd>]) {
        if received.status != 0 {
            let status = received.status;
            self.failed.get_or_insert_with(|| {
                format!("a receive failed: {} (status {status})", status_name(status))
            });
            return;
        }
        let (number, lines) = match received.immediate {
            Some(number) => (number, received.bytes / LINE_BYTES as u32),
            None => {
                let word = self
                    .buffers
                    .announced(received.id.min(u64::from(self.buffers.count) - 1));
                (word as u32, (word >> 32) as u32)
            }
        };
        match (lines, &self.runs) {
            (0, _) if number == GREETING => self.greeted = true,
            (0, _) => {
                if let Some(local) = locals.get(number as usize) {
                    ring_event(local);
                }
            }
            // The completion is what says that these lines are whole; now they may be seen, in order.
            (lines, Some((landing, window))) => {
                let end = window.lines().min(u64::from(number) + u64::from(lines));
                for line in u64::from(number)..end {
                    window.store_line(line, &landing.load_line(line));
                }
            }
            (_, None) => {
                self.failed = Some("the peer announces lines though this is no strict link".to_owned());
            }
        }
        if let Err(errno) = self
            .queue
            .post_receive(received.id, self.buffers.piece(received.id))
        {
            self.failed = Some(format!("the device refuses a receive: {errno}"));
        }
        self.again += 1;
    }
}
