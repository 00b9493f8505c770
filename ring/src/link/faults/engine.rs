//! One engine under faults.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex},
};

use ntb_mem::{
    line::{LINE_WORDS, Line},
    sync::Ordering::Relaxed,
};

use super::{Places, Shared, add, lock};
use crate::link::{
    engine::{Engine, Order, StoreEngine},
    random::Random,
};

/// Calls or pumps that a delayed line takes at most.
const LONGEST_DELAY: u64 = 32;
/// Lines or parts under way at most; beyond that they arrive at once.
const PENDING_MAX: usize = 256;
/// Lines that an engine remembers for a later life.
const SAVED_MAX: usize = 64;

/// The engine as the ring sees it. The state is shared with the pump.
pub(super) struct FaultEngine {
    state: Arc<Mutex<State>>,
    order: Order,
    lines: u64,
}

impl FaultEngine {
    pub(super) fn new(state: Arc<Mutex<State>>, order: Order, lines: u64) -> Self {
        Self { state, order, lines }
    }
}

impl StoreEngine for FaultEngine {
    fn order(&self) -> Order {
        self.order
    }

    fn lines(&self) -> u64 {
        self.lines
    }

    fn put(&mut self, line: u64, content: &Line) {
        lock(&self.state).put(line, content);
    }

    fn barrier(&mut self) {
        lock(&self.state).barrier();
    }

    fn flush(&mut self) {
        lock(&self.state).flush();
    }
}

impl Drop for FaultEngine {
    fn drop(&mut self) {
        lock(&self.state).finish();
    }
}

/// When something under way arrives.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Due {
    Now,
    /// After so many calls or pumps.
    After(u64),
    AtFlush,
}

/// A line, or its state after some of its words have arrived.
#[derive(Debug)]
struct Unit {
    line: u64,
    image: Line,
    due: Due,
    /// Barriers before it.
    epoch: u64,
}

#[derive(Debug)]
pub(super) struct State {
    inner: Engine,
    order: Order,
    id: u32,
    shared: Arc<Shared>,
    places: Arc<Places>,
    random: Random,
    /// In the order they were put.
    pending: Vec<Unit>,
    epoch: u64,
    /// What this engine has put last at lines it puts in parts.
    shadow: HashMap<u64, Line>,
    /// What it has put last at some lines, to arrive once more in a later life.
    saved: BTreeMap<u64, Line>,
}

impl State {
    pub(super) fn new(
        inner: Engine,
        order: Order,
        id: u32,
        shared: Arc<Shared>,
        places: Arc<Places>,
    ) -> Self {
        // Streams of neighbouring numbers have nothing in common.
        let seed = Random::new(shared.options.seed ^ u64::from(id) << 32).next();
        Self {
            inner,
            order,
            id,
            shared,
            places,
            random: Random::new(seed),
            pending: Vec::new(),
            epoch: 0,
            shadow: HashMap::new(),
            saved: BTreeMap::new(),
        }
    }

    fn put(&mut self, line: u64, content: &Line) {
        assert!(line < self.inner.lines(), "line outside the peer's memory");
        let shared = Arc::clone(&self.shared);
        add(&shared.counters.puts);
        if shared.dead.load(Relaxed) {
            add(&shared.counters.vanished);
            return;
        }
        let quiet = shared.quiet.load(Relaxed);
        let options = &shared.options;
        let mut chance = |ppm| !quiet && self.random.chance(ppm);
        let (late, blank, split, scribble) = (
            chance(options.late),
            chance(options.blank),
            chance(options.split),
            chance(options.scribble),
        );
        self.claim(line);
        if late && self.saved.len() < SAVED_MAX || self.saved.contains_key(&line) {
            self.saved.insert(line, *content);
        }
        if late {
            self.deliver_old();
        }
        if scribble {
            add(&shared.counters.scribbled);
            let place = self.random.below(self.inner.lines());
            let noise = Line(std::array::from_fn(|_| self.random.next()));
            self.inner.put(place, &noise);
        }
        if blank {
            add(&shared.counters.blanked);
            let value = if self.random.chance(500_000) { u64::MAX } else { 0 };
            self.send(line, Line([value; LINE_WORDS]), quiet);
        }
        if split {
            add(&shared.counters.split);
            self.send_parts(line, content);
        }
        self.send(line, *content, quiet);
        if options.split > 0 {
            self.shadow.insert(line, *content);
        }
        self.tick();
    }

    /// Makes this engine the last writer of a line. What an old life left for it arrives now or never.
    fn claim(&mut self, line: u64) {
        let places = Arc::clone(&self.places);
        let mut shard = places.shard(line);
        let before = places.writers[line as usize].swap(self.id, Relaxed);
        if let Some((writer, old)) = shard.remove(&line)
            && writer == before
        {
            add(&self.shared.counters.late);
            self.inner.put(line, &old);
        }
    }

    /// Lets a line of an old life arrive at some place that nobody has put anything in since.
    fn deliver_old(&mut self) {
        let places = Arc::clone(&self.places);
        let mut shard = places.shard(self.random.next());
        let Some((line, (writer, old))) = shard.pop_first() else {
            return;
        };
        if places.writers[line as usize].load(Relaxed) == writer {
            add(&self.shared.counters.late);
            self.inner.put(line, &old);
        }
    }

    /// The states of a line as its words arrive, but for the last.
    fn send_parts(&mut self, line: u64, content: &Line) {
        let mut image = self.shadow.get(&line).copied().unwrap_or_default();
        let mut arrived = 0u64;
        for _ in 0..1 + self.random.below(3) {
            arrived |= self.random.next();
            if self.order == Order::Ordered {
                arrived &= !(1 << (LINE_WORDS - 1));
            }
            for (i, (slot, word)) in image.0.iter_mut().zip(content.0).enumerate() {
                if arrived >> i & 1 == 1 {
                    *slot = word;
                }
            }
            self.send(line, image, false);
        }
    }

    /// Puts something under way.
    fn send(&mut self, line: u64, image: Line, quiet: bool) {
        let options = &self.shared.options;
        let due = if !quiet && self.random.chance(options.delay) {
            add(&self.shared.counters.delayed);
            Due::After(1 + self.random.below(LONGEST_DELAY))
        } else if !quiet && self.random.chance(options.hold) {
            add(&self.shared.counters.held);
            Due::AtFlush
        } else {
            Due::Now
        };
        if due == Due::Now && self.pending.is_empty() {
            self.deliver(line, &image);
            return;
        }
        self.pending.push(Unit {
            line,
            image,
            due,
            epoch: self.epoch,
        });
    }

    /// One call, or one pump, has passed.
    pub(super) fn tick(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let overfull = self.pending.len() > PENDING_MAX;
        for unit in &mut self.pending {
            unit.due = match unit.due {
                _ if overfull => Due::Now,
                Due::After(n) if n > 1 => Due::After(n - 1),
                Due::AtFlush => Due::AtFlush,
                _ => Due::Now,
            };
        }
        self.release();
    }

    fn barrier(&mut self) {
        self.epoch += 1;
        self.inner.barrier();
        self.tick();
    }

    fn flush(&mut self) {
        for unit in &mut self.pending {
            if unit.due == Due::AtFlush {
                unit.due = Due::Now;
            }
        }
        self.tick();
        self.inner.flush();
    }

    /// Lets arrive what is due, in random order, but for what has to wait for another: a later state of the same line,
    /// and, where fences are kept, what was put after a barrier.
    fn release(&mut self) {
        loop {
            let first_epoch = self.pending.first().map_or(0, |u| u.epoch);
            let mut ready = Vec::new();
            for (i, unit) in self.pending.iter().enumerate() {
                let waits = self.order == Order::Ordered && unit.epoch != first_epoch
                    || self.pending[..i].iter().any(|u| u.line == unit.line);
                if unit.due == Due::Now && !waits {
                    ready.push(i);
                }
            }
            if ready.is_empty() {
                return;
            }
            let pick = ready[self.random.below(ready.len() as u64) as usize];
            if pick > 0 {
                add(&self.shared.counters.reordered);
            }
            let unit = self.pending.remove(pick);
            self.deliver_barred(&unit);
        }
    }

    /// Delivers with the fences of the engine below, since the units before it may be of an earlier epoch.
    fn deliver_barred(&mut self, unit: &Unit) {
        if self.order == Order::Ordered {
            self.inner.barrier();
        }
        self.deliver(unit.line, &unit.image);
    }

    fn deliver(&mut self, line: u64, image: &Line) {
        let places = Arc::clone(&self.places);
        let _shard = places.shard(line);
        if places.writers[line as usize].load(Relaxed) == self.id {
            self.inner.put(line, image);
        } else {
            add(&self.shared.counters.superseded);
        }
    }

    /// The engine is dropped: everything arrives, and what was saved is left to a later life.
    fn finish(&mut self) {
        for unit in &mut self.pending {
            unit.due = Due::Now;
            if self.shared.options.late > 0 {
                // Where the link was lost it does not arrive now, but may in the next life.
                self.saved.insert(unit.line, unit.image);
            }
        }
        self.release();
        self.inner.flush();
        for (line, content) in std::mem::take(&mut self.saved) {
            self.places.shard(line).insert(line, (self.id, content));
        }
    }
}
