//! A pair of ports behind one lock, with the thread that keeps its time.

use std::{
    os::fd::OwnedFd,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rustix::io::Errno;

use super::{
    account::Snapshot,
    config::CONFIG_BYTES,
    disturb::{Action, Counted, Script, Step},
    dma::DmaAccess,
    family::Family,
    irq::{Guard, IrqKind},
    side::{Both, SideId},
    state::{Actor, State},
};

/// How a pair is made.
#[derive(Clone, Debug)]
pub struct PairConfig {
    /// Bytes of each memory window: a power of two, 4 KiB at least.
    pub window_bytes: u64,
    /// Most payload of a packet, for the accounting.
    pub max_payload: u64,
    /// How long training takes once both ends ask for the link.
    pub train_time: Duration,
    /// What goes wrong, and when.
    pub steps: Vec<Step>,
    /// Decides what `steps` leave open.
    pub seed: u64,
    /// Hands stores that a client's mappings refuse to that client, as it would see them on its bus: its own IOMMU then
    /// reports the fault. For clients that take writes to their memory over the socket, as QEMU does.
    pub tell_refused: bool,
}

impl Default for PairConfig {
    fn default() -> Self {
        Self {
            window_bytes: 1 << 20,
            max_payload: 256,
            train_time: Duration::ZERO,
            steps: Vec::new(),
            seed: 0,
            tell_refused: false,
        }
    }
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
    stop: Mutex<bool>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something under the lock, and what a script hangs on it.
    fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        let result = f(&mut state);
        state.run_script();
        if std::mem::take(&mut state.timers_changed) {
            self.wake.notify_one();
        }
        result
    }
}

/// Two ports joined by a link.
#[derive(Debug)]
pub struct Pair {
    shared: Arc<Shared>,
    ports: Both<Arc<Port>>,
    threads: Vec<JoinHandle<()>>,
    watch_stop: Option<mpsc::Sender<()>>,
}

impl Pair {
    /// Makes a pair of `family`.
    ///
    /// # Errors
    /// `EAGAIN` when no thread can be started.
    pub fn new(family: &'static dyn Family, config: PairConfig) -> Result<Self, Errno> {
        let guard = Arc::new(Guard::default());
        let script = Script::new(config.steps, config.seed);
        let mut state = State::new(
            family,
            config.window_bytes,
            config.max_payload,
            config.train_time,
            Arc::clone(&guard),
            script,
        );
        state.tell_refused = config.tell_refused;
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            wake: Condvar::new(),
            stop: Mutex::new(false),
        });
        shared.with(|_| ());
        let mut bar_bytes = [0; 6];
        for bar in family.bars(config.window_bytes) {
            if let Some(bytes) = bar_bytes.get_mut(usize::from(bar.index)) {
                *bytes = bar.bytes;
            }
        }
        let ports = Both::from_fn(|side| {
            Arc::new(Port {
                shared: Arc::clone(&shared),
                side,
                bar_bytes,
            })
        });
        let (watch_stop, stopped) = mpsc::channel();
        let mut pair = Self {
            shared: Arc::clone(&shared),
            ports,
            threads: Vec::new(),
            watch_stop: Some(watch_stop),
        };
        let spawn = |name: &str, f: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new()
                .name(name.to_owned())
                .spawn(f)
                .map_err(|_| Errno::AGAIN)
        };
        pair.threads
            .push(spawn("emu-time", Box::new(move || keep_time(&shared)))?);
        let watch = move || {
            while stopped.recv_timeout(Duration::from_millis(250)) == Err(mpsc::RecvTimeoutError::Timeout) {
                guard.rescue();
            }
        };
        pair.threads.push(spawn("emu-watch", Box::new(watch))?);
        Ok(pair)
    }

    /// One of its ports.
    pub fn port(&self, side: SideId) -> &Arc<Port> {
        &self.ports[side]
    }

    /// Does something to it.
    pub fn act(&self, action: Action) {
        self.shared.with(|state| state.act(action));
    }

    /// Everything counted so far.
    pub fn snapshot(&self) -> Snapshot {
        self.shared.lock().snapshot()
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        *self.shared.stop.lock().unwrap_or_else(PoisonError::into_inner) = true;
        {
            // Under the lock, so that the time keeper is either before its look at `stop` or waiting.
            let _state = self.shared.lock();
            self.shared.wake.notify_all();
        }
        self.watch_stop = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn keep_time(shared: &Shared) {
    let mut state = shared.lock();
    while !*shared.stop.lock().unwrap_or_else(PoisonError::into_inner) {
        let next = state.advance(Instant::now());
        state.timers_changed = false;
        state = match next {
            None => shared.wake.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(due) => {
                let left = due.saturating_duration_since(Instant::now());
                shared
                    .wake
                    .wait_timeout(state, left)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0
            }
        };
    }
}

/// One port: what a host can do to it. Every call is atomic towards the other side.
#[derive(Debug)]
pub struct Port {
    shared: Arc<Shared>,
    side: SideId,
    bar_bytes: [u64; 6],
}

impl Port {
    fn with<T>(&self, f: impl FnOnce(&mut State, SideId) -> T) -> T {
        self.shared.with(|state| f(state, self.side))
    }

    /// Which end it is.
    pub fn side(&self) -> SideId {
        self.side
    }

    /// Bytes of a BAR, 0 when it is not there.
    pub fn bar_bytes(&self, bar: u8) -> u64 {
        self.bar_bytes.get(usize::from(bar)).copied().unwrap_or(0)
    }

    /// Bytes of configuration space.
    pub fn config_bytes(&self) -> u64 {
        CONFIG_BYTES as u64
    }

    /// Vectors of a kind.
    pub fn vectors(&self, kind: IrqKind) -> u32 {
        self.with(|s, side| vectors(s, side, kind).count())
    }

    /// Loads from configuration space.
    pub fn config_read(&self, offset: u64, out: &mut [u8]) {
        self.with(|s, side| s.config_read(side, offset, out));
    }

    /// Stores to configuration space.
    pub fn config_write(&self, offset: u64, data: &[u8]) {
        self.with(|s, side| s.config_write(side, offset, data));
    }

    /// Configuration space as `lspci -F` reads it, at address 0000:00:00.0 for side A and 0000:01:00.0 for side B.
    pub fn config_dump(&self) -> String {
        use std::fmt::Write;
        let mut bytes = vec![0; CONFIG_BYTES];
        self.config_read(0, &mut bytes);
        let bus = match self.side {
            SideId::A => 0,
            SideId::B => 1,
        };
        let family = self.with(|s, _| s.family.name());
        let mut text = format!("0000:{bus:02x}:00.0 {family} side {}\n", self.side);
        for (line, bytes) in bytes.chunks(16).enumerate() {
            let _ = write!(text, "{:02x}:", line * 16); // a String takes everything
            for byte in bytes {
                let _ = write!(text, " {byte:02x}");
            }
            text.push('\n');
        }
        text
    }

    /// Loads from a BAR.
    pub fn bar_read(&self, bar: u8, offset: u64, out: &mut [u8]) {
        self.with(|s, side| s.bar_read(side, bar, offset, out));
    }

    /// Stores to a BAR.
    pub fn bar_write(&self, bar: u8, offset: u64, data: &[u8]) {
        self.with(|s, side| s.bar_write(side, bar, offset, data));
    }

    /// Makes memory of this side's host reachable for the device.
    ///
    /// # Errors
    /// As for an IOMMU; see [`super::dma::ClientMemory::map`]. Or what a scenario says.
    pub fn dma_map(
        &self,
        iova: u64,
        size: u64,
        offset: u64,
        access: DmaAccess,
        descriptor: Option<OwnedFd>,
    ) -> Result<(), Errno> {
        self.with(|s, side| {
            s.sides[side].stats.maps += 1;
            s.script.note(Counted::Maps(side));
            if let Some(errno) = s.script.refuses_map(side) {
                s.sides[side].stats.maps_refused += 1;
                return Err(errno);
            }
            s.sides[side].memory.map(iova, size, offset, access, descriptor)
        })
    }

    /// Takes memory back; answers how many bytes were mapped.
    ///
    /// # Errors
    /// `EINVAL` when the range would cut a mapping in two.
    pub fn dma_unmap(&self, iova: u64, size: u64) -> Result<u64, Errno> {
        self.with(|s, side| s.sides[side].memory.unmap(iova, size))
    }

    /// Takes all memory back; answers how many bytes were mapped.
    pub fn dma_unmap_all(&self) -> u64 {
        self.with(|s, side| s.sides[side].memory.clear())
    }

    /// Gives a vector its event descriptor, or takes it away.
    ///
    /// # Errors
    /// `EINVAL` for a vector that is not there or a descriptor that is no event counter.
    pub fn set_vector(&self, kind: IrqKind, vector: u32, target: Option<OwnedFd>) -> Result<(), Errno> {
        self.with(|s, side| vectors(s, side, kind).set(vector, target))
    }

    /// Takes all event descriptors of a kind away.
    pub fn clear_vectors(&self, kind: IrqKind) {
        self.with(|s, side| vectors(s, side, kind).clear());
    }

    /// Raises a vector for the client's own test.
    pub fn trigger(&self, kind: IrqKind, vector: u32) {
        self.with(|s, side| s.trigger(side, kind, vector));
    }

    /// Function reset.
    pub fn reset(&self, by: Actor) {
        self.with(|s, side| s.reset(side, by));
    }

    /// Stores that were refused since the last call, with the address that they were aimed at: at most 8 bytes of each,
    /// and not all when there are many. None unless [`PairConfig::tell_refused`] is set.
    pub fn take_refused(&self) -> Vec<(u64, Vec<u8>)> {
        self.with(|s, side| std::mem::take(&mut s.sides[side].refused))
    }

    /// A host has opened the function.
    pub fn attach(&self) {
        self.with(|s, side| {
            s.sides[side].attached = true;
            s.update_link(Actor::Client);
        });
    }

    /// The host has closed it: reset, memory and interrupts let go.
    pub fn detach(&self) {
        self.with(|s, side| {
            s.sides[side].attached = false;
            s.reset(side, Actor::Client);
            s.sides[side].memory.clear();
            s.sides[side].refused.clear();
            for kind in [IrqKind::Msix, IrqKind::Error, IrqKind::Request] {
                vectors(s, side, kind).clear();
            }
        });
    }
}

fn vectors(s: &mut State, side: SideId, kind: IrqKind) -> &mut super::irq::Vectors {
    let side = &mut s.sides[side];
    match kind {
        IrqKind::Msix => &mut side.msix,
        IrqKind::Error => &mut side.error,
        IrqKind::Request => &mut side.request,
    }
}
