//! Faults from a seed, put under whole channels: engines that delay, hold back, tear and reorder what is stored.
//!
//! [`Faults::hook`] wraps the engines of any link ([`super::Wrapped`]). What it does by default is what a bad wire and a
//! bad memory path may do, so that everything must still arrive: nothing is lost, and two stores to one place never
//! overtake each other. [`FaultOptions::scribble`] and [`Faults::set_dead`] go beyond that.
//!
//! Delayed lines wait in the wrapper. Later calls release them, and so does [`Faults::pump`], which somebody has to call
//! now and then ([`Faults::pump_every`]), since the last line of a burst has no later call.
//!
//! Losses of the whole link come from [`super::pair::PairControl`].

mod engine;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc},
    thread::JoinHandle,
    time::Duration,
};

use ntb_mem::{
    line::Line,
    sync::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
};

use super::{
    EngineHook,
    engine::{Engine, Order, StoreEngine},
};
use engine::{FaultEngine, State};

/// What to do, and how often: each chance is in parts per million of the lines put.
#[derive(Clone, Debug, Default)]
pub struct FaultOptions {
    /// Determines every decision of an engine, together with the order in which engines are made.
    pub seed: u64,
    /// Fences are kept: what is put before a barrier arrives before what is put after, and a line's word 7 after its
    /// others. Without it everything may be reordered, and engines are [`Order::Relaxed`].
    pub keep_order: bool,
    /// A line arrives late, up to 32 calls or pumps later.
    pub delay: u32,
    /// A line is held back until the next flush.
    pub hold: u32,
    /// A line arrives in parts, of words in any order.
    pub split: u32,
    /// A line of all ones, or of zeros, arrives in the place of a line just before it.
    pub blank: u32,
    /// A line arrives once more, late, in a later life: when its engine has been dropped and before another has put
    /// anything in its place.
    pub late: u32,
    /// Random bytes arrive at a random place of the peer's memory. Destroys whatever is there.
    pub scribble: u32,
}

/// What was done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounts {
    /// Lines put.
    pub puts: u64,
    /// Lines or parts that arrived late.
    pub delayed: u64,
    /// Lines or parts held back until a flush.
    pub held: u64,
    /// Lines or parts that overtook another.
    pub reordered: u64,
    /// Lines that arrived in parts.
    pub split: u64,
    /// Lines before which a blank one arrived.
    pub blanked: u64,
    /// Lines of an old life that arrived in a new one.
    pub late: u64,
    /// Lines of random bytes.
    pub scribbled: u64,
    /// Lines that vanished because the direction was dead.
    pub vanished: u64,
    /// Late lines that never arrived, since another engine had written to their place meanwhile.
    pub superseded: u64,
}

/// Counters behind [`FaultCounts`]; statistics only, so that nothing is ordered by them.
#[derive(Debug, Default)]
struct Counters {
    puts: AtomicU64,
    delayed: AtomicU64,
    held: AtomicU64,
    reordered: AtomicU64,
    split: AtomicU64,
    blanked: AtomicU64,
    late: AtomicU64,
    scribbled: AtomicU64,
    vanished: AtomicU64,
    superseded: AtomicU64,
}

fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
}

/// Injects faults into all engines that go through its hook: one direction of one link.
#[derive(Clone, Debug)]
pub struct Faults(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    options: FaultOptions,
    counters: Counters,
    dead: AtomicBool,
    quiet: AtomicBool,
    engines: Mutex<Engines>,
}

#[derive(Debug, Default)]
struct Engines {
    made: u32,
    live: Vec<Weak<Mutex<State>>>,
    places: Option<Arc<Places>>,
}

/// What is known of each line of the peer's memory, over all lives.
#[derive(Debug)]
struct Places {
    /// Number of the engine that put the line last. Written and read under the line's shard.
    writers: Vec<AtomicU32>,
    /// Lines of engines that were dropped, to arrive late.
    shards: [Mutex<BTreeMap<u64, (u32, Line)>>; SHARDS],
}

const SHARDS: usize = 64;

impl Places {
    fn new(lines: u64) -> Self {
        Self {
            writers: (0..lines).map(|_| AtomicU32::new(0)).collect(),
            shards: std::array::from_fn(|_| Mutex::default()),
        }
    }

    fn shard(&self, line: u64) -> MutexGuard<'_, BTreeMap<u64, (u32, Line)>> {
        lock(&self.shards[(line % SHARDS as u64) as usize])
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Faults {
    /// Faults as `options` say.
    pub fn new(options: FaultOptions) -> Self {
        Self(Arc::new(Shared {
            options,
            counters: Counters::default(),
            dead: AtomicBool::new(false),
            quiet: AtomicBool::new(false),
            engines: Mutex::default(),
        }))
    }

    /// What engines keep in order that are made from engines of order `inner`.
    pub fn order(&self, inner: Order) -> Order {
        if self.0.options.keep_order {
            inner
        } else {
            Order::Relaxed
        }
    }

    /// For [`super::Wrapped::new`].
    pub fn hook(&self) -> EngineHook {
        let this = self.clone();
        Box::new(move |engine| this.wrap(engine))
    }

    /// Puts the faults over one engine.
    pub fn wrap(&self, engine: Engine) -> Engine {
        let order = self.order(engine.order());
        let lines = engine.lines();
        let mut engines = lock(&self.0.engines);
        let places = match &engines.places {
            Some(places) if places.writers.len() as u64 == lines => Arc::clone(places),
            _ => Arc::new(Places::new(lines)),
        };
        engines.places = Some(Arc::clone(&places));
        engines.made = engines.made.wrapping_add(1);
        let state = Arc::new(Mutex::new(State::new(
            engine,
            order,
            engines.made,
            Arc::clone(&self.0),
            places,
        )));
        engines.live.retain(|e| e.strong_count() > 0);
        engines.live.push(Arc::downgrade(&state));
        drop(engines);
        Engine::Other(Box::new(FaultEngine::new(state, order, lines)))
    }

    /// With `true` everything put from now on vanishes: a direction that is dead while the other lives.
    pub fn set_dead(&self, dead: bool) {
        self.0.dead.store(dead, Relaxed);
    }

    /// With `true` no new faults are injected; what is under way still arrives.
    pub fn set_quiet(&self, quiet: bool) {
        self.0.quiet.store(quiet, Relaxed);
    }

    /// Lets delayed lines move on, as a later call would.
    pub fn pump(&self) {
        let live: Vec<_> = lock(&self.0.engines)
            .live
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        for state in live {
            lock(&state).tick();
        }
    }

    /// A thread that pumps until the handle is dropped.
    pub fn pump_every(&self, interval: Duration) -> std::io::Result<Pump> {
        let (stop, stopped) = mpsc::channel::<()>();
        let this = self.clone();
        let thread = std::thread::Builder::new()
            .name("fault-pump".to_owned())
            .spawn(move || {
                while stopped.recv_timeout(interval) == Err(mpsc::RecvTimeoutError::Timeout) {
                    this.pump();
                }
            })?;
        Ok(Pump {
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// What was done so far.
    pub fn counts(&self) -> FaultCounts {
        let c = &self.0.counters;
        FaultCounts {
            puts: c.puts.load(Relaxed),
            delayed: c.delayed.load(Relaxed),
            held: c.held.load(Relaxed),
            reordered: c.reordered.load(Relaxed),
            split: c.split.load(Relaxed),
            blanked: c.blanked.load(Relaxed),
            late: c.late.load(Relaxed),
            scribbled: c.scribbled.load(Relaxed),
            vanished: c.vanished.load(Relaxed),
            superseded: c.superseded.load(Relaxed),
        }
    }
}

/// The thread of [`Faults::pump_every`]; ends when dropped.
#[derive(Debug)]
pub struct Pump {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Pump {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
