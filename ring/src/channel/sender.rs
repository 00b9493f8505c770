//! The sending end of a channel.

use std::{
    ops::AddAssign,
    time::{Duration, Instant},
};

use ntb_mem::sync::{Arc, Ordering};
use zerocopy::{Immutable, IntoBytes};

use super::{
    Lost, SendFailure,
    device::{SENDING, ended},
    shared::{Shared, Tx},
    wait::{CLOCK_EVERY, NAP, Wait},
};
use crate::{
    link::{Pump, engine::Engine},
    queue::{Claim, ProducerStats, SendError},
    session::{CloseReason, PeerInfo},
};

/// Counts of a sender over all lives of its channel. Exact.
pub type SenderStats = ProducerStats;

impl AddAssign for ProducerStats {
    fn add_assign(&mut self, other: Self) {
        self.messages += other.messages;
        self.bytes += other.bytes;
        self.lines += other.lines;
        self.refused += other.refused;
        self.starved += other.starved;
        self.credits += other.credits;
    }
}

/// Who holds a sender up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HoldUp {
    /// The process that reads the other end.
    pub reader: Arc<PeerInfo>,
    /// Messages sent that it is not known to have consumed.
    pub unread_messages: u64,
}

/// The sending end of a channel. One thread uses it at a time.
#[derive(Debug)]
pub struct Sender {
    pub(super) shared: Arc<Shared>,
    pub(super) epoch: u64,
    pub(super) tx: Option<Tx>,
    /// What brings credits in, where they do not come by themselves.
    pump: Option<Arc<dyn Pump>>,
    peer: Arc<PeerInfo>,
    ended: SenderStats,
    wait: Wait,
    /// What the slow way of [`Sender::try_send_typed`] gave: not returned by that call, so that the result of the fast
    /// way stays in registers.
    outcome: Result<u64, SendFailure>,
}

impl Sender {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let peer = Arc::clone(&shared.life().peer);
        Self {
            shared,
            epoch: 0,
            tx: None,
            pump: None,
            peer,
            ended: SenderStats::default(),
            wait: Wait::default(),
            outcome: Ok(0),
        }
    }

    /// Chooses how blocking calls wait for room.
    ///
    /// [`Wait::SpinSleep`] naps for 50 us at a time, since credits ring no bell.
    pub fn set_wait(&mut self, wait: Wait) {
        self.wait = wait;
    }

    /// Sends one message, or none of it. Returns its sequence in this life of the channel.
    #[inline(always)]
    pub fn try_send(&mut self, bytes: &[u8]) -> Result<u64, SendFailure> {
        self.try_send_typed(0, bytes)
    }

    /// Sends one message with a type of the application's. Type 0 is the same as none.
    #[inline(always)]
    pub fn try_send_typed(&mut self, message_type: u32, bytes: &[u8]) -> Result<u64, SendFailure> {
        if self.epoch == self.shared.epoch.load(Ordering::Acquire) // E2
            && let Some(tx) = &mut self.tx
            && let Some(seq) = tx.try_send_line(message_type, bytes)
        {
            return Ok(seq);
        }
        self.try_send_other(message_type, bytes);
        std::mem::replace(&mut self.outcome, Ok(0))
    }

    /// [`Sender::try_send_typed`] in every case, into `outcome`.
    #[inline(never)]
    fn try_send_other(&mut self, message_type: u32, bytes: &[u8]) {
        let result = match self.tx() {
            Ok(tx) => tx.try_send(message_type, bytes),
            Err(e) => {
                self.outcome = Err(e);
                return;
            }
        };
        self.outcome = match result {
            Ok(seq) => Ok(seq),
            Err(e) => self.again(e, |tx| tx.try_send(message_type, bytes)),
        };
    }

    /// Sends a value by its bytes.
    #[inline(always)]
    pub fn try_send_value<T: IntoBytes + Immutable>(
        &mut self,
        message_type: u32,
        value: &T,
    ) -> Result<u64, SendFailure> {
        self.try_send_typed(message_type, value.as_bytes())
    }

    /// Sends messages of `size` bytes each that lie back to back in `bytes`, packed into as few lines as possible: as many
    /// as there is room for. Returns how many went.
    ///
    /// # Panics
    /// When `size` is zero or `bytes` is not a multiple of it.
    #[inline]
    pub fn try_send_packed(&mut self, size: usize, bytes: &[u8]) -> Result<usize, SendFailure> {
        let result = self.tx()?.try_send_packed(0, size, bytes);
        match result {
            Ok(sent) => Ok(sent),
            Err(e) => self.again(e, |tx| tx.try_send_packed(0, size, bytes)),
        }
    }

    /// Sends values packed, as [`Sender::try_send_packed`].
    ///
    /// # Panics
    /// When `T` has no bytes.
    #[inline]
    pub fn try_send_values<T: IntoBytes + Immutable>(&mut self, values: &[T]) -> Result<usize, SendFailure> {
        self.try_send_packed(size_of::<T>(), values.as_bytes())
    }

    /// Stores a message without pushing it out of this side's buffers: cheaper per message on combining memory. Call
    /// [`Sender::flush`] after the last of a batch, or it may stay here.
    #[inline]
    pub fn enqueue(&mut self, message_type: u32, bytes: &[u8]) -> Result<u64, SendFailure> {
        let result = self.tx()?.enqueue(message_type, bytes);
        match result {
            Ok(seq) => Ok(seq),
            Err(e) => self.again(e, |tx| tx.enqueue(message_type, bytes)),
        }
    }

    /// Pushes out what [`Sender::enqueue`] left.
    #[inline]
    pub fn flush(&mut self) {
        if let Some(tx) = &mut self.tx {
            tx.flush();
        }
    }

    /// Staging memory for a message of `len` bytes: fill it, then commit. Dropped, it leaves no trace.
    pub fn claim(&mut self, len: usize) -> Result<ChannelClaim<'_>, SendFailure> {
        self.turn()?;
        let (shared, peer) = (&self.shared, &self.peer);
        match &mut self.tx {
            Some(tx) => match &self.pump {
                Some(pump) => tx.claim_after(len, || pump.pump()),
                None => tx.claim(len),
            }
            .map(ChannelClaim)
            .map_err(|e| explain(shared, peer, e)),
            None => Err(SendFailure::NotConnected(shared.state())),
        }
    }

    /// Sends one message, waiting for room and for the peer as long as `timeout`.
    pub fn send(&mut self, bytes: &[u8], timeout: Duration) -> Result<u64, SendFailure> {
        self.send_typed(0, bytes, timeout)
    }

    /// As [`Sender::send`], with a type.
    pub fn send_typed(
        &mut self,
        message_type: u32,
        bytes: &[u8],
        timeout: Duration,
    ) -> Result<u64, SendFailure> {
        match self.try_send_typed(message_type, bytes) {
            Err(e @ (SendFailure::Full { .. } | SendFailure::NotConnected(_))) => {
                self.until(timeout, e, |s| match s.try_send_typed(message_type, bytes) {
                    Err(e @ (SendFailure::Full { .. } | SendFailure::NotConnected(_))) => Err(e),
                    other => Ok(other),
                })
            }
            other => other,
        }
    }

    /// Waits until the channel has a peer.
    pub fn wait_connected(&mut self, timeout: Duration) -> Result<(), SendFailure> {
        let first = SendFailure::NotConnected(self.shared.state());
        self.until(timeout, first, |s| match s.tx() {
            Ok(_) => Ok(Ok(())),
            Err(e @ SendFailure::NotConnected(_)) => Err(e),
            Err(e) => Ok(Err(e)),
        })
    }

    /// Waits until the peer has consumed the message of sequence `seq`.
    pub fn wait_consumed(&mut self, seq: u64, timeout: Duration) -> Result<(), SendFailure> {
        let first = SendFailure::NotConnected(self.shared.state());
        let mut asked = false;
        self.until(timeout, first, |s| {
            let peer = Arc::clone(&s.peer);
            let tx = match s.tx() {
                Ok(tx) => tx,
                Err(e) => return Ok(Err(e)),
            };
            let (consumed, sent) = (tx.consumed_seq(), tx.next_seq());
            if consumed.wrapping_sub(seq) as i64 > 0 {
                return Ok(Ok(()));
            }
            if !asked {
                tx.request_credit();
                asked = true;
            }
            Err(SendFailure::Full {
                needed: 0,
                free: 0,
                unread_lines: sent.wrapping_sub(consumed),
                reader: peer,
            })
        })
    }

    /// Largest message in bytes, while connected.
    pub fn max_message(&self) -> Option<u64> {
        self.tx.as_ref().map(Tx::max_message)
    }

    /// Who reads the other end, and how far behind it is, by its last credit; `None` while not connected.
    pub fn hold_up(&self) -> Option<HoldUp> {
        let tx = self.tx.as_ref()?;
        let unread_messages = tx.next_seq().wrapping_sub(tx.consumed_seq());
        Some(HoldUp {
            reader: Arc::clone(&self.peer),
            unread_messages,
        })
    }

    /// Counts over all lives.
    pub fn stats(&self) -> SenderStats {
        let mut stats = self.ended;
        if let Some(tx) = &self.tx {
            stats += tx.stats();
        }
        stats
    }

    /// The engine of this life, for counters and fault injection.
    pub fn engine_mut(&mut self) -> Option<&mut Engine> {
        self.tx.as_mut().map(Tx::engine_mut)
    }

    /// The producer of the current life, after taking up what has changed.
    #[inline(always)]
    fn tx(&mut self) -> Result<&mut Tx, SendFailure> {
        self.turn()?;
        match &mut self.tx {
            Some(tx) => Ok(tx),
            None => Err(SendFailure::NotConnected(self.shared.state())),
        }
    }

    #[inline(always)]
    pub(super) fn turn(&mut self) -> Result<(), SendFailure> {
        if self.epoch == self.shared.epoch.load(Ordering::Acquire) {
            return Ok(()); // E2
        }
        self.turn_slow()
    }

    /// Takes up the next life, and tells the end of the one before.
    #[cold]
    fn turn_slow(&mut self) -> Result<(), SendFailure> {
        let mut life = self.shared.life();
        self.epoch = self.shared.epoch.load(Ordering::Relaxed);
        let ended = self.tx.take();
        if life.up {
            self.tx = life.tx.take();
            self.peer = Arc::clone(&life.peer);
            self.pump.clone_from(&life.pump);
        }
        let reason = life.ended.unwrap_or(CloseReason::PeerGone);
        drop(life);
        match ended {
            None => Ok(()),
            Some(tx) => {
                self.ended += tx.stats();
                Err(SendFailure::Lost(Lost {
                    reason,
                    certain: tx.consumed_seq(),
                    sent: tx.next_seq(),
                }))
            }
        }
    }

    /// Nothing went: where credits have to be fetched they are, and if any came it is tried once more.
    #[cold]
    fn again<T>(
        &mut self,
        e: SendError,
        mut attempt: impl FnMut(&mut Tx) -> Result<T, SendError>,
    ) -> Result<T, SendFailure> {
        if let (SendError::Full { .. }, Some(pump), Some(tx)) = (&e, &self.pump, &mut self.tx)
            && pump.pump()
        {
            let result = attempt(tx);
            return result.map_err(|e| self.explain(e));
        }
        Err(self.explain(e))
    }

    #[cold]
    fn explain(&self, e: SendError) -> SendFailure {
        explain(&self.shared, &self.peer, e)
    }

    /// Repeats `attempt` until it gives something final, waiting in between.
    fn until<T>(
        &mut self,
        timeout: Duration,
        mut last: SendFailure,
        mut attempt: impl FnMut(&mut Self) -> Result<Result<T, SendFailure>, SendFailure>,
    ) -> Result<T, SendFailure> {
        let start = Instant::now();
        let mut n = 0u32;
        loop {
            if let Some(pump) = &self.pump {
                pump.pump();
            }
            match attempt(self) {
                Ok(done) => return done,
                Err(e) => {
                    last = if n == 0 || n.is_multiple_of(CLOCK_EVERY) {
                        e
                    } else {
                        last
                    }
                }
            }
            let asleep = self.wait.step(n) || self.tx.is_none();
            if asleep {
                std::thread::sleep(NAP);
            }
            if (asleep || n.is_multiple_of(CLOCK_EVERY)) && start.elapsed() >= timeout {
                return Err(match last {
                    SendFailure::Full {
                        unread_lines, reader, ..
                    } => SendFailure::TimedOut { unread_lines, reader },
                    other => other,
                });
            }
            n = n.saturating_add(1);
        }
    }
}

fn explain(shared: &Shared, peer: &Arc<PeerInfo>, e: SendError) -> SendFailure {
    match e {
        SendError::Full {
            needed,
            free,
            unread_lines,
        } => SendFailure::Full {
            needed,
            free,
            unread_lines,
            reader: Arc::clone(peer),
        },
        SendError::TooLong { len, max } => SendFailure::TooLong { len, max },
        SendError::CorruptCredit { .. } => {
            shared.corrupt.store(true, Ordering::Release);
            shared.common.bell.ring();
            SendFailure::NotConnected(shared.state())
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.flush();
        ended(&self.shared, SENDING);
        self.shared.end_dropped();
    }
}

/// A message being written in local staging memory.
#[derive(Debug)]
pub struct ChannelClaim<'a>(Claim<'a, Engine, ntb_mem::region::View>);

impl ChannelClaim<'_> {
    /// The bytes to fill. Their content is what an earlier claim left: write all of them.
    pub fn bytes(&mut self) -> &mut [u8] {
        self.0.bytes()
    }

    /// Sends the message and returns its sequence.
    pub fn commit(self, message_type: u32) -> u64 {
        self.0.commit(message_type)
    }
}
