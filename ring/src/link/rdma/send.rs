//! The sending half of a connection, as engines and the link share it.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicU32, Ordering},
};

use ntb_mem::{line::LINE_BYTES, region::View};

use super::{
    account::{GRANT_WORD, Posted, RUNS_MAX, Remote, Run, SendCounts, Sending},
    mirror::Mirror,
    verbs::Queue,
};

/// The sending half, shared by the engines and the link.
#[derive(Debug)]
pub(super) struct Wire {
    state: Mutex<Option<Sending>>,
    ended: AtomicBool,
    /// Bytes of a request that carries its data itself.
    pub(super) inline: usize,
    /// Longest run that one request takes.
    pub(super) longest: usize,
    /// Lines of the peer's window.
    pub(super) lines: u64,
    pub(super) strict: bool,
    /// Runs that are posted together at most: they must fit in the queue beside others.
    pub(super) runs_most: usize,
    /// Doorbells to be rung when there is room, a bit each.
    rings: AtomicU32,
}

/// Parts of a new sending half.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) queue: Arc<dyn Queue>,
    pub(super) mirror: Mirror,
    pub(super) remote: Remote,
    pub(super) control: View,
    pub(super) immediate: bool,
    pub(super) strict: bool,
    /// At most so many of what the device grants.
    pub(super) depth: u32,
    pub(super) inline: u32,
}

impl Wire {
    pub(super) fn new(parts: Parts) -> Self {
        let granted = parts.queue.granted();
        Self {
            ended: AtomicBool::new(false),
            inline: granted.inline.min(parts.inline) as usize,
            longest: parts.mirror.longest() as usize,
            lines: parts.remote.window.2 / LINE_BYTES as u64,
            strict: parts.strict,
            runs_most: (granted.depth.min(parts.depth) as usize / 4).clamp(1, RUNS_MAX),
            rings: AtomicU32::new(0),
            state: Mutex::new(Some(Sending::new(parts))),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Sending>> {
        // Nothing is left half done under this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    /// Ends the connection for everybody: engines that are left send nothing. What is returned is to be dropped last of all
    /// that has the queue pair: the memory that requests read from stays registered until there is none.
    #[must_use]
    pub(super) fn end(&self) -> Option<Sending> {
        self.ended.store(true, Ordering::Relaxed);
        self.lock().take()
    }

    /// Posts runs of lines of the peer's window, in order.
    pub(super) fn post_runs(&self, bytes: &[u8], runs: &[Run]) -> Posted {
        if self.has_ended() {
            return Posted::Ended;
        }
        match &mut *self.lock() {
            Some(sending) => sending.post_runs(self.inline, self.strict, bytes, runs),
            None => Posted::Ended,
        }
    }

    /// Writes the peer's registers, now or as soon as there is room.
    pub(super) fn post_registers(&self, registers: [u8; 32]) {
        if let Some(sending) = &mut *self.lock() {
            sending.hold_registers(registers);
        }
    }

    /// Tells the peer how many receives were posted again. False when there is no room for it now.
    pub(super) fn post_grant(&self, count: u64) -> bool {
        match &mut *self.lock() {
            Some(sending) => {
                let bytes = count.to_le_bytes();
                sending.post_control((GRANT_WORD * 8) as u64, &bytes)
            }
            None => true,
        }
    }

    /// Rings a doorbell of the peer's, now or as soon as there is room; any number beyond the doorbells is a greeting.
    pub(super) fn ring(&self, number: u32) {
        self.rings.fetch_or(1 << number.min(31), Ordering::Relaxed);
        self.post_rings();
    }

    fn post_rings(&self) {
        let mut state = self.lock();
        let Some(sending) = &mut *state else { return };
        let wanted = self.rings.swap(0, Ordering::Relaxed);
        for number in (0..32).filter(|number| wanted >> number & 1 == 1) {
            if !sending.post_ring(number) {
                self.rings.fetch_or(1 << number, Ordering::Relaxed);
            }
        }
    }

    /// Takes completions and posts what had to wait. An error when the connection has failed.
    pub(super) fn poll(&self) -> Result<(), String> {
        if let Some(sending) = &mut *self.lock() {
            sending.reap()?;
            sending.post_registers();
        }
        if self.rings.load(Ordering::Relaxed) != 0 {
            self.post_rings();
        }
        Ok(())
    }

    /// Gives the connection up: the next [`Wire::poll`] says so.
    pub(super) fn fail(&self, why: &str) {
        if let Some(sending) = &mut *self.lock() {
            sending.fail(why.to_owned());
        }
    }

    pub(super) fn longest_done(&self) -> u64 {
        self.lock().as_ref().map_or(0, Sending::longest_done)
    }

    pub(super) fn counts(&self) -> SendCounts {
        self.lock().as_ref().map(Sending::counts).unwrap_or_default()
    }
}
