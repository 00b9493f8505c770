//! One connection: its stream, what goes out of it, and what comes in by it.
//!
//! No thread stands between the stream and who waits for a message. Whoever polls, a receiver or the service thread,
//! reads the stream itself and applies what came to this side's memory, under a lock that only one at a time takes and
//! nobody waits for; whoever sends writes to it itself. While receivers poll, the service thread keeps away from
//! the stream and sleepers are not watching it (`arrivals.rs`), so that a message does not wake who has no part in it.

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
    net::TcpStream,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering},
    },
};

use ntb_mem::{line::LINE_BYTES, region::View};
use rustix::{
    io::Errno,
    net::{RecvFlags, SendFlags},
};

use super::{
    arrivals::Arrivals,
    frame::{self, BadFrame, Frame, PAYLOAD_MAX},
};
use crate::link::{Pump, Registers, doorbell::ring_event};

/// Bytes read in one go, and the room for a frame that is not all there yet.
const READ_BYTES: usize = 4 * PAYLOAD_MAX;
/// Reads in one go, so that a peer that sends without end keeps nobody from its other work.
const READS: usize = 16;
/// Bytes that may wait for a peer that does not read, beyond its own window.
const BACKLOG_EXTRA: u64 = 4 << 20;

/// Why a connection has ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Ended {
    #[error("the peer has closed the connection")]
    Closed,
    #[error("the connection broke: {0}")]
    Broken(Errno),
    #[error("the peer sent what is no frame: {0}")]
    BadFrame(#[from] BadFrame),
    #[error("the peer stored outside this side's memory, at line {0}")]
    Outside(u64),
    #[error("the peer does not read: {0} bytes wait for it")]
    Backlog(u64),
    #[error("this side has closed the connection")]
    ByUs,
}

/// One connection. Engines outlive it and then store nothing.
#[derive(Debug)]
pub(super) struct Conn {
    stream: TcpStream,
    window: View,
    peer_lines: u64,
    arrivals: Arc<Arrivals>,
    bells: Vec<Arc<OwnedFd>>,
    registers: Mutex<Registers>,
    incoming: Mutex<Incoming>,
    outgoing: Mutex<Outgoing>,
    /// Set with the reason, which `ended` holds; nothing is stored or sent from then on.
    dead: AtomicBool,
    ended: Mutex<Option<Ended>>,
    /// Bytes wait to be sent.
    backlogged: AtomicBool,
    /// A receiver has polled since the service thread last looked. Whoever sets it sees to it that sleepers do not watch
    /// the stream.
    polled: AtomicBool,
    /// Something has arrived since the service thread last asked.
    heard: AtomicBool,
}

#[derive(Debug)]
struct Incoming {
    buffer: Box<[u8]>,
    filled: usize,
}

#[derive(Debug, Default)]
struct Outgoing {
    backlog: Vec<u8>,
    /// Bytes at the start of the backlog that are out.
    sent: usize,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is left half done under these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Conn {
    /// Takes over an authenticated stream. `window` is this side's memory, `peer_lines` the length of the peer's.
    pub(super) fn new(
        stream: TcpStream,
        window: View,
        peer_lines: u64,
        arrivals: Arc<Arrivals>,
        bells: Vec<Arc<OwnedFd>>,
    ) -> Self {
        Self {
            stream,
            window,
            peer_lines,
            arrivals,
            bells,
            registers: Mutex::new(Registers::default()),
            incoming: Mutex::new(Incoming {
                buffer: vec![0; READ_BYTES].into_boxed_slice(),
                filled: 0,
            }),
            outgoing: Mutex::default(),
            dead: AtomicBool::new(false),
            ended: Mutex::new(None),
            backlogged: AtomicBool::new(false),
            polled: AtomicBool::new(false),
            heard: AtomicBool::new(true),
        }
    }

    pub(super) fn peer_lines(&self) -> u64 {
        self.peer_lines
    }

    /// This side's registers, as the peer has written them.
    pub(super) fn registers(&self) -> Registers {
        *lock(&self.registers)
    }

    /// Whether it has ended.
    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Why it has ended, if it has.
    pub(super) fn ended(&self) -> Option<Ended> {
        self.dead
            .load(Ordering::Acquire)
            .then(|| lock(&self.ended).clone().unwrap_or(Ended::ByUs))
    }

    /// Whether something has arrived since this was last asked.
    pub(super) fn take_heard(&self) -> bool {
        self.heard.swap(false, Ordering::Relaxed)
    }

    /// Ends it: nothing of it is stored into this side's memory after this returns.
    pub(super) fn end(&self, why: Ended) {
        self.die(why);
        drop(lock(&self.incoming)); // whoever is storing is done
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }

    /// Takes up what is there, so that closing does not throw away what the peer has yet to get, and closes.
    pub(super) fn say_goodbye(&self) {
        self.take_up();
        self.drain();
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
        self.end(Ended::ByUs);
    }

    fn die(&self, why: Ended) {
        let mut ended = lock(&self.ended);
        if ended.is_none() {
            *ended = Some(why);
            self.dead.store(true, Ordering::Release);
            drop(ended);
            // Its end stays readable for ever: nobody who sleeps is to be woken by it again and again.
            self.arrivals.leave(self);
            self.wake_service();
        }
    }

    fn wake_service(&self) {
        if let Some(bell) = self.bells.first() {
            ring_event(bell);
        }
    }

    // ---- out ----

    /// Sends whole frames. What the stream does not take waits in memory; nobody ever blocks.
    pub(super) fn send(&self, bytes: &[u8]) {
        if bytes.is_empty() || self.dead.load(Ordering::Relaxed) {
            return;
        }
        let mut out = lock(&self.outgoing);
        let mut rest = bytes;
        if out.backlog.is_empty() {
            match self.write(rest) {
                Some(n) => rest = rest.get(n..).unwrap_or_default(),
                None => return,
            }
            if rest.is_empty() {
                return;
            }
            self.backlogged.store(true, Ordering::Release);
            self.wake_service(); // it is to wait until the stream takes more
        }
        out.backlog.extend_from_slice(rest);
        self.drain_locked(&mut out);
        let waiting = (out.backlog.len() - out.sent) as u64;
        if waiting
            > self
                .peer_lines
                .saturating_mul(LINE_BYTES as u64)
                .saturating_add(BACKLOG_EXTRA)
        {
            drop(out);
            self.die(Ended::Backlog(waiting));
        }
    }

    /// Whether bytes wait to be sent.
    pub(super) fn is_backlogged(&self) -> bool {
        self.backlogged.load(Ordering::Acquire)
    }

    /// Sends on what waits.
    pub(super) fn drain(&self) {
        if self.is_backlogged() && !self.dead.load(Ordering::Relaxed) {
            self.drain_locked(&mut lock(&self.outgoing));
        }
    }

    fn drain_locked(&self, out: &mut Outgoing) {
        while let Some(rest) = out.backlog.get(out.sent..).filter(|r| !r.is_empty()) {
            match self.write(rest) {
                Some(0) | None => {
                    // Now and then, so that each byte is moved once or twice and not each time.
                    if out.sent > out.backlog.len() / 2 {
                        out.backlog.drain(..out.sent);
                        out.sent = 0;
                    }
                    return;
                }
                Some(n) => out.sent += n,
            }
        }
        out.backlog.clear();
        out.sent = 0;
        self.backlogged.store(false, Ordering::Release);
    }

    /// Bytes that the stream took; `None` when the connection is at its end.
    fn write(&self, bytes: &[u8]) -> Option<usize> {
        loop {
            return match rustix::net::send(&self.stream, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(n) => Some(n),
                Err(Errno::WOULDBLOCK) => Some(0),
                Err(Errno::INTR) => continue,
                // What the peer sent before it went is still to be read: its end is found there.
                Err(Errno::PIPE | Errno::CONNRESET) => None,
                Err(e) => {
                    self.die(Ended::Broken(e));
                    None
                }
            };
        }
    }

    // ---- in ----

    /// Reads what is there and applies it. True when something came. Returns at once when somebody else is at it.
    pub(super) fn take_up(&self) -> bool {
        if self.dead.load(Ordering::Acquire) {
            return false;
        }
        let mut incoming = match self.incoming.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(e)) => e.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        if self.dead.load(Ordering::Acquire) {
            return false;
        }
        let mut came = false;
        for _ in 0..READS {
            let Incoming { buffer, filled } = &mut *incoming;
            let room = buffer.get_mut(*filled..).unwrap_or_default();
            let space = room.len();
            let n = match rustix::net::recv(&self.stream, room, RecvFlags::DONTWAIT) {
                Ok((0, _)) => {
                    self.die(Ended::Closed);
                    break;
                }
                Ok((n, _)) => n,
                Err(Errno::WOULDBLOCK | Errno::INTR) => break,
                Err(Errno::CONNRESET) => {
                    self.die(Ended::Closed);
                    break;
                }
                Err(e) => {
                    self.die(Ended::Broken(e));
                    break;
                }
            };
            came = true;
            *filled += n;
            match self.apply(buffer.get(..*filled).unwrap_or_default()) {
                Ok(used) => {
                    buffer.copy_within(used..*filled, 0);
                    *filled -= used;
                }
                Err(why) => {
                    self.die(why);
                    break;
                }
            }
            if n < space {
                break;
            }
        }
        if came && !self.heard.load(Ordering::Relaxed) {
            self.heard.store(true, Ordering::Relaxed);
        }
        came
    }

    /// Applies the whole frames at the start of `bytes` and returns how long they are.
    fn apply(&self, bytes: &[u8]) -> Result<usize, Ended> {
        let mut used = 0;
        while let Some((frame, length)) = frame::parse(bytes.get(used..).unwrap_or_default())? {
            match frame {
                Frame::Line(line, content) => {
                    if line >= self.window.lines() {
                        return Err(Ended::Outside(line));
                    }
                    self.window.store_line(line, &content); // word 7 with release, after all that came before
                }
                Frame::Bytes(line, bytes) => {
                    let lines = bytes.len().div_ceil(LINE_BYTES) as u64;
                    if line
                        .checked_add(lines)
                        .is_none_or(|end| end > self.window.lines())
                    {
                        return Err(Ended::Outside(line));
                    }
                    self.window.copy_in(line as usize * LINE_BYTES, bytes);
                }
                Frame::Registers(registers) => {
                    *lock(&self.registers) = registers;
                    self.wake_service();
                }
                Frame::Ring(number) => {
                    if let Some(bell) = self.bells.get(number as usize) {
                        ring_event(bell);
                    }
                }
            }
            used += length;
        }
        Ok(used)
    }

    /// Whether a receiver has polled since this was last asked.
    pub(super) fn take_polled(&self) -> bool {
        self.polled.load(Ordering::Relaxed) && self.polled.swap(false, Ordering::Relaxed)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Pump for Conn {
    fn pump(&self) -> bool {
        if !self.polled.load(Ordering::Relaxed) {
            self.polled.store(true, Ordering::Relaxed);
            self.arrivals.leave(self);
        }
        self.drain();
        self.take_up()
    }

    fn rest(&self) {
        // In this order: a receiver that still polls finds the flag down afterwards and has sleepers leave again. They
        // are woken by their own rings then, which it hands out.
        self.arrivals.watch(self);
        self.polled.store(false, Ordering::Relaxed);
    }
}
