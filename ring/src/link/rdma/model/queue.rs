//! Queue pairs of a model.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use rustix::io::Errno;

use super::{
    super::{
        error::refused,
        verbs::{
            Granted, Piece, Queue, QueueAddress, QueueWish, RETRY_EXHAUSTED, Received, Request, Sent, Verb,
        },
    },
    Behaviour, Model, State, address,
};
use crate::link::{LinkError, doorbell::ring_event};

const FLUSHED: u32 = 5;
const REMOTE_ACCESS: u32 = 10;
const LOCAL_PROTECTION: u32 = 4;
const NOT_READY: u32 = 13;

/// A queue pair as the model sees it.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) device: u32,
    depth: u64,
    inline: u32,
    peer: Option<u32>,
    /// Packets vanish.
    pub(super) cut: bool,
    broken: bool,
    /// Posted and not carried out yet, with the data that they carry themselves.
    waiting: VecDeque<(Request, Option<Vec<u64>>)>,
    /// Requests posted, and how many of them have given their place back.
    posted: u64,
    freed: u64,
    /// Completions with the count of requests posted when theirs was.
    sent: VecDeque<(Sent, u64)>,
    receives: VecDeque<(u64, Piece)>,
    received: VecDeque<Received>,
    armed: bool,
    arrivals: Arc<OwnedFd>,
}

impl Pair {
    pub(super) fn new(device: u32, wish: &QueueWish, behaviour: &Behaviour, arrivals: Arc<OwnedFd>) -> Self {
        Self {
            device,
            depth: u64::from(wish.depth.min(behaviour.depth)),
            inline: wish.inline.min(behaviour.inline),
            peer: None,
            cut: false,
            broken: false,
            waiting: VecDeque::new(),
            posted: 0,
            freed: 0,
            sent: VecDeque::new(),
            receives: VecDeque::new(),
            received: VecDeque::new(),
            armed: false,
            arrivals,
        }
    }

    pub(super) fn granted(&self) -> Granted {
        Granted {
            depth: self.depth as u32,
            inline: self.inline,
        }
    }

    /// Whether a request that waits, or a receive, names memory of this side by that key.
    pub(super) fn names(&self, key: u32) -> bool {
        let mut waiting = self.waiting.iter();
        waiting.any(|(request, data)| data.is_none() && request.data.lkey == key)
            || self.receives.iter().any(|(_, buffer)| buffer.lkey == key)
    }

    fn receive(&mut self, received: Received) {
        self.received.push_back(received);
        if self.armed {
            self.armed = false;
            ring_event(&self.arrivals);
        }
    }
}

/// A side's handle of a queue pair.
#[derive(Debug)]
pub(super) struct ModelQueue {
    pub(super) model: Model,
    pub(super) number: u32,
    pub(super) granted: Granted,
    pub(super) gid: [u8; 16],
    pub(super) arrivals: Arc<OwnedFd>,
}

impl ModelQueue {
    pub(super) fn is_connected(&self) -> bool {
        let state = self.model.lock();
        state
            .pairs
            .get(&self.number)
            .is_some_and(|pair| pair.peer.is_some())
    }

    /// Joins it with another, both ways.
    pub(super) fn join(&self, other: u32) {
        let mut state = self.model.lock();
        for (one, peer) in [(self.number, other), (other, self.number)] {
            if let Some(pair) = state.pairs.get_mut(&one) {
                pair.peer = Some(peer);
                ring_event(&pair.arrivals);
            }
        }
    }
}

impl Drop for ModelQueue {
    fn drop(&mut self) {
        self.model.lock().pairs.remove(&self.number);
    }
}

/// Why a request fails.
type Fault = u32;

impl State {
    /// Lets every queue pair go on, as far as chance has it.
    pub(super) fn work(&mut self) {
        let mut busy: Vec<u32> = self
            .pairs
            .iter()
            .filter(|(_, pair)| !pair.waiting.is_empty())
            .map(|(number, _)| *number)
            .collect();
        busy.sort_unstable(); // the same seed, the same order
        for number in busy {
            while !self.random.chance(self.behaviour.delayed) {
                let pair = self.pairs.get_mut(&number);
                let Some((request, data)) = pair.and_then(|pair| pair.waiting.pop_front()) else {
                    break;
                };
                let status = self.carry_out(number, &request, data).err().unwrap_or(0);
                if let Some(pair) = self.pairs.get_mut(&number) {
                    pair.broken |= status != 0;
                    if request.signalled || status != 0 {
                        let sent = Sent {
                            id: request.id,
                            status,
                        };
                        let place = pair.posted - pair.waiting.len() as u64;
                        pair.sent.push_back((sent, place));
                    }
                }
            }
        }
    }

    /// Carries a request out.
    fn carry_out(&mut self, number: u32, request: &Request, data: Option<Vec<u64>>) -> Result<(), Fault> {
        let Some(pair) = self.pairs.get(&number) else {
            return Err(FLUSHED);
        };
        let (device, peer, inline) = (pair.device, pair.peer, pair.inline);
        if pair.broken {
            return Err(FLUSHED);
        }
        let reaches = |state: &Self, device: u32| state.ports.get(&device).is_some_and(|p| p.up && !p.gone);
        let far = peer
            .and_then(|peer| self.pairs.get(&peer))
            .map(|pair| pair.device);
        let alive = far.is_some_and(|far| reaches(self, far)) && reaches(self, device);
        let (Some(peer), true, false) = (peer, alive, pair.cut) else {
            return Err(RETRY_EXHAUSTED);
        };
        if request.inline && request.data.bytes > inline {
            return Err(LOCAL_PROTECTION);
        }
        let words = match data {
            Some(words) => words,
            None => self.fetch(request)?,
        };
        match request.verb {
            Verb::Write { address, rkey } => self.write(address, rkey, &words, request.data.bytes),
            Verb::WriteImmediate {
                address,
                rkey,
                number,
            } => {
                self.write(address, rkey, &words, request.data.bytes)?;
                self.message(peer, &[], request.data.bytes, Some(number))
            }
            Verb::Send => self.message(peer, &words, request.data.bytes, None),
        }
    }

    /// The words of registered memory that a request names, read now.
    fn fetch(&mut self, request: &Request) -> Result<Vec<u64>, Fault> {
        let Piece { address, bytes, lkey } = request.data;
        let inside = self.registered.get(&lkey).and_then(|(view, _)| {
            let first = address.checked_sub(view.as_ptr() as u64)? / 8;
            let end = first + u64::from(bytes) / 8;
            (end <= view.words() as u64).then_some((view, first))
        });
        let Some((view, first)) = inside else {
            self.counts.violations += 1;
            return Err(LOCAL_PROTECTION);
        };
        Ok((0..u64::from(bytes) / 8)
            .map(|i| view.load((first + i) as usize, std::sync::atomic::Ordering::Acquire))
            .collect())
    }

    fn write(&mut self, address: u64, rkey: u32, words: &[u64], bytes: u32) -> Result<(), Fault> {
        let target = self.registered.get(&rkey).and_then(|(view, remote)| {
            let first = address.checked_sub(view.as_ptr() as u64)? / 8;
            let end = first + u64::from(bytes) / 8;
            (*remote && end <= view.words() as u64).then_some((view.clone(), first as usize))
        });
        let Some((view, first)) = target else {
            self.counts.violations += 1;
            return Err(REMOTE_ACCESS);
        };
        self.deliver(&view, first, words);
        Ok(())
    }

    fn message(&mut self, peer: u32, words: &[u64], bytes: u32, immediate: Option<u32>) -> Result<(), Fault> {
        self.counts.messages += 1;
        // Completion of a message makes everything before it visible.
        self.settle();
        let Some((id, buffer)) = self
            .pairs
            .get_mut(&peer)
            .and_then(|pair| pair.receives.pop_front())
        else {
            self.counts.unready += 1;
            return Err(NOT_READY);
        };
        if let Some((view, _)) = self.registered.get(&buffer.lkey).cloned() {
            let first = (buffer.address - view.as_ptr() as u64) as usize / 8;
            for (i, word) in words.iter().enumerate() {
                view.store(first + i, *word, std::sync::atomic::Ordering::Release);
            }
        }
        if let Some(pair) = self.pairs.get_mut(&peer) {
            pair.receive(Received {
                id,
                status: 0,
                bytes,
                immediate,
            });
        }
        Ok(())
    }
}

/// The words that a request carries itself, read when it is posted.
fn carried(request: &Request) -> Vec<u64> {
    let Piece { address, bytes, .. } = request.data;
    (0..u64::from(bytes) / 8)
        .map(|i| {
            // SAFETY: whoever posts an inline request has its data readable until the call returns, which is after this;
            // a device reads it as bytes too.
            unsafe { ((address + i * 8) as *const u64).read_unaligned() }
        })
        .collect()
}

impl Queue for ModelQueue {
    fn granted(&self) -> Granted {
        self.granted
    }

    fn address(&self) -> QueueAddress {
        address(self.number, self.gid)
    }

    fn connect(&self, peer: &QueueAddress) -> Result<(), LinkError> {
        let mut state = self.model.lock();
        match state.pairs.get_mut(&self.number) {
            Some(pair) => {
                pair.peer = Some(peer.number);
                Ok(())
            }
            None => Err(refused("connecting a queue pair", Errno::INVAL)),
        }
    }

    fn post(&self, requests: &[Request]) -> Result<(), Errno> {
        let mut state = self.model.lock();
        for request in requests {
            let Some(pair) = state.pairs.get_mut(&self.number) else {
                return Err(Errno::NODEV);
            };
            if pair.posted - pair.freed >= pair.depth {
                state.counts.overruns += 1;
                return Err(Errno::NOMEM);
            }
            pair.posted += 1;
            let deep = pair.posted - pair.freed;
            let data = request.inline.then(|| carried(request));
            pair.waiting.push_back((*request, data));
            state.counts.deepest = state.counts.deepest.max(deep);
            state.work();
        }
        Ok(())
    }

    fn post_receive(&self, id: u64, buffer: Piece) -> Result<(), Errno> {
        let mut state = self.model.lock();
        let pair = state.pairs.get_mut(&self.number).ok_or(Errno::NODEV)?;
        pair.receives.push_back((id, buffer));
        Ok(())
    }

    fn sent(&self, out: &mut [Sent]) -> Result<usize, Errno> {
        let mut state = self.model.lock();
        state.work();
        state.settle();
        let drains = state.behaviour.drains;
        let pair = state.pairs.get_mut(&self.number).ok_or(Errno::NODEV)?;
        let mut count = 0;
        for slot in out.iter_mut().take(if drains { usize::MAX } else { 0 }) {
            let Some((sent, posted)) = pair.sent.pop_front() else {
                break;
            };
            pair.freed = posted;
            *slot = sent;
            count += 1;
        }
        Ok(count)
    }

    fn received(&self, out: &mut [Received]) -> Result<usize, Errno> {
        let mut state = self.model.lock();
        state.work();
        state.settle();
        let pair = state.pairs.get_mut(&self.number).ok_or(Errno::NODEV)?;
        let mut count = 0;
        for slot in out {
            let Some(received) = pair.received.pop_front() else {
                break;
            };
            *slot = received;
            count += 1;
        }
        Ok(count)
    }

    fn arrivals(&self) -> BorrowedFd<'_> {
        self.arrivals.as_fd()
    }

    fn arm(&self) -> Result<(), Errno> {
        let _ = rustix::io::read(&self.arrivals, &mut [0; 8]);
        let mut state = self.model.lock();
        state.pairs.get_mut(&self.number).ok_or(Errno::NODEV)?.armed = true;
        Ok(())
    }

    fn ended(&self) -> Option<String> {
        None
    }

    fn news(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
