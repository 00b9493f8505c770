//! What a process is doing at this very instant, in a word that survives it.

use std::{
    os::fd::{AsRawFd, OwnedFd},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use ntb_mem::{
    line::Line,
    region::{Pages, Region, View},
};
use ntb_ring::{
    link::engine::{Engine, Order, StoreEngine},
    wire::page::{self, PAGE_LINES},
};

/// Where a kill can hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Phase {
    Handshake = 0,
    Claim = 1,
    Commit = 2,
    Receive = 3,
    Credit = 4,
    Sleep = 5,
}

pub(crate) const PHASES: [(Phase, &str); 6] = [
    (Phase::Handshake, "handshake"),
    (Phase::Claim, "claim"),
    (Phase::Commit, "commit"),
    (Phase::Receive, "receive"),
    (Phase::Credit, "credit"),
    (Phase::Sleep, "sleep"),
];

/// A page shared between a campaign and one of its processes.
#[derive(Clone, Debug)]
pub(crate) struct Board {
    region: Arc<Region>,
    view: View,
}

/// Words of the board.
const PHASE: usize = 0;
const RECEIVED: usize = 1;
const SENT: usize = 2;
const RUNNING: usize = 3;

impl Board {
    pub(crate) fn new() -> Result<Self, ntb_mem::region::RegionError> {
        let region = Arc::new(Region::allocate(4096, Pages::Normal)?);
        Ok(Self {
            view: region.view(),
            region,
        })
    }

    /// The board that the parent handed over as descriptor `fd`.
    pub(crate) fn from_fd(fd: OwnedFd) -> Result<Self, ntb_mem::region::RegionError> {
        let region = Arc::new(Region::from_peer(fd, 4096)?);
        Ok(Self {
            view: region.view(),
            region,
        })
    }

    /// The descriptor number for a child, which must inherit it.
    pub(crate) fn inheritable(&self) -> std::io::Result<OwnedFd> {
        let fd = rustix::io::dup(self.region.descriptor())?;
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::empty())?;
        debug_assert!(fd.as_raw_fd() > 2);
        Ok(fd)
    }

    pub(crate) fn set(&self, phase: Phase) {
        self.view.store(PHASE, phase as u64, Ordering::Release);
    }

    pub(crate) fn phase(&self) -> u64 {
        self.view.load(PHASE, Ordering::Acquire)
    }

    pub(crate) fn count(&self, sent: u64, received: u64) {
        self.view.store(SENT, sent, Ordering::Relaxed);
        self.view.store(RECEIVED, received, Ordering::Release);
    }

    pub(crate) fn received(&self) -> u64 {
        self.view.load(RECEIVED, Ordering::Acquire)
    }

    pub(crate) fn sent(&self) -> u64 {
        self.view.load(SENT, Ordering::Acquire)
    }

    pub(crate) fn set_running(&self, lives: u64) {
        self.view.store(RUNNING, lives, Ordering::Release);
    }

    pub(crate) fn running(&self) -> u64 {
        self.view.load(RUNNING, Ordering::Acquire)
    }

    pub(crate) fn reset(&self) {
        for word in [PHASE, RECEIVED, SENT, RUNNING] {
            self.view.store(word, 0, Ordering::Release);
        }
    }
}

/// Notes on the board what is being stored, and lingers in the middle of it, so that a kill can hit there.
#[derive(Debug)]
pub(crate) struct Probe {
    inner: Engine,
    board: Board,
    /// Where channels start: lines below are the session's.
    first_channel: u64,
    ring_lines: u64,
}

impl Probe {
    pub(crate) fn wrap(inner: Engine, board: Board, first_channel: u64, ring_lines: u64) -> Engine {
        Engine::Other(Box::new(Self {
            inner,
            board,
            first_channel,
            ring_lines,
        }))
    }

    /// Line of a channel's memory, for a link whose channels all have the same ring.
    fn place(&self, line: u64) -> Option<u64> {
        line.checked_sub(self.first_channel)
            .map(|l| l % (PAGE_LINES + self.ring_lines))
    }

    /// Long enough for a kill to hit; longer where a phase is rare.
    fn linger(phase: Phase) {
        let time = Duration::from_micros(if phase == Phase::Credit { 40 } else { 2 });
        let start = Instant::now();
        while start.elapsed() < time {
            std::hint::spin_loop();
        }
    }

    fn during(&mut self, phase: Phase, store: impl FnOnce(&mut Engine)) {
        let before = self.board.phase();
        self.board.set(phase);
        Self::linger(phase);
        store(&mut self.inner);
        Self::linger(phase);
        if let Some((phase, _)) = PHASES.iter().find(|(p, _)| *p as u64 == before) {
            self.board.set(*phase);
        }
    }
}

impl StoreEngine for Probe {
    fn order(&self) -> Order {
        self.inner.order()
    }

    fn lines(&self) -> u64 {
        self.inner.lines()
    }

    fn put(&mut self, line: u64, content: &Line) {
        match self.place(line) {
            Some(page::CREDIT) => self.during(Phase::Credit, |e| e.put(line, content)),
            Some(page::ARM) => self.during(Phase::Sleep, |e| e.put(line, content)),
            Some(l) if l >= PAGE_LINES => self.during(Phase::Commit, |e| e.put(line, content)),
            _ => self.inner.put(line, content),
        }
    }

    fn put_bytes(&mut self, line: u64, bytes: &[u8]) {
        // In two halves, so that a kill leaves half a message behind.
        let half = bytes.len() / 128 * 64;
        self.during(Phase::Commit, |e| e.put_bytes(line, &bytes[..half]));
        self.during(Phase::Commit, |e| {
            e.put_bytes(line + half as u64 / 64, &bytes[half..]);
        });
    }

    fn barrier(&mut self) {
        self.inner.barrier();
    }

    fn flush(&mut self) {
        self.inner.flush();
    }
}
