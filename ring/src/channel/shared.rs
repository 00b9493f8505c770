//! What the two ends of a channel share with the service thread.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use ntb_mem::{
    region::View,
    sync::{Arc, AtomicBool, AtomicU32, AtomicU64, Ordering},
};

use crate::{
    link::{Doorbell, Pump, engine::Engine},
    queue::{Consumer, Producer},
    session::{ChannelId, CloseReason, PeerInfo, SessionState},
};

pub(super) type Tx = Producer<Engine, View>;
pub(super) type Rx = Consumer<Engine, View>;

/// A channel, between its ends and the service thread.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) id: ChannelId,
    /// Rises with every change of `life`; the ends compare it on every call.
    /// E1 service: store, release, after the change / E2 ends: load, acquire, before they look.
    pub(super) epoch: AtomicU64,
    life: Mutex<Life>,
    /// Epoch of the latest change after which the ring may be written for a new life: what a reader still takes out of
    /// it for an earlier one is void. R1 service: store, release, before the new life is announced / R2 reader: load,
    /// acquire, after its last load of a message.
    pub(super) reset: AtomicU64,
    /// Epoch of the latest end of a life that the reader has taken everything of.
    pub(super) drained: AtomicU64,
    /// Set by a reader that has posted an arm: the service rings the peer so that it looks.
    pub(super) armed: AtomicBool,
    /// Set by an end that found corrupt peer data.
    pub(super) corrupt: AtomicBool,
    /// Directions in which a device is at work: bits of [`super::device`]. Set before it starts and cleared after it has
    /// stopped, by the end; the service looks before it lets a next life begin.
    pub(super) device: AtomicU32,
    /// Ends that are alive. The channel is closed with the last.
    pub(super) ends: AtomicU32,
    /// True while the receiving end is alive.
    pub(super) has_reader: AtomicBool,
    pub(super) common: Arc<Common>,
}

/// One life of a channel.
#[derive(Debug)]
pub(super) struct Life {
    pub(super) up: bool,
    /// Why the life before ended.
    pub(super) ended: Option<CloseReason>,
    /// A life came and went that the reader never took up: it is to be told.
    pub(super) untold: bool,
    /// The ends to be taken up.
    pub(super) tx: Option<Tx>,
    pub(super) rx: Option<Rx>,
    /// Where a reader that sleeps is rung.
    pub(super) doorbell: Option<Doorbell>,
    /// What brings the peer's stores into this side's memory, where they do not come by themselves.
    pub(super) pump: Option<Arc<dyn Pump>>,
    pub(super) peer: Arc<PeerInfo>,
    /// For devices.
    pub(super) parts: Option<super::device::Parts>,
}

/// What all of a connection shares.
#[derive(Debug)]
pub(super) struct Common {
    pub(super) status: Mutex<Status>,
    pub(super) changed: Condvar,
    /// Wakes the service thread.
    pub(super) bell: Doorbell,
}

/// What the service thread last published.
#[derive(Debug)]
pub(super) struct Status {
    pub(super) state: SessionState,
    pub(super) peer: Option<Arc<PeerInfo>>,
    pub(super) refused: Option<String>,
    pub(super) failed: Option<super::ConnectError>,
    pub(super) events: std::collections::VecDeque<crate::session::Event>,
    pub(super) events_dropped: u64,
    pub(super) stats: super::ServiceStats,
}

/// Locks, also after a panic elsewhere: everything guarded here is consistent between statements.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) fn new(id: ChannelId, common: Arc<Common>) -> Self {
        let nobody = PeerInfo {
            node: String::new(),
            pid: 0,
            incarnation: 0,
            package: String::new(),
        };
        Self {
            id,
            epoch: AtomicU64::new(0),
            life: Mutex::new(Life {
                up: false,
                ended: None,
                untold: false,
                tx: None,
                rx: None,
                doorbell: None,
                pump: None,
                peer: Arc::new(nobody),
                parts: None,
            }),
            reset: AtomicU64::new(0),
            drained: AtomicU64::new(0),
            armed: AtomicBool::new(false),
            corrupt: AtomicBool::new(false),
            device: AtomicU32::new(0),
            ends: AtomicU32::new(2),
            has_reader: AtomicBool::new(true),
            common,
        }
    }

    pub(super) fn life(&self) -> MutexGuard<'_, Life> {
        lock(&self.life)
    }

    /// Changes the life and tells the ends (E1).
    pub(super) fn change(&self, change: impl FnOnce(&mut Life)) {
        let mut life = self.life();
        change(&mut life);
        self.epoch
            .store(self.epoch.load(Ordering::Relaxed) + 1, Ordering::Release);
        if let Some(doorbell) = &life.doorbell {
            doorbell.ring(); // a sleeping reader is to look
        }
    }

    /// State of the whole connection, for error messages.
    pub(super) fn state(&self) -> SessionState {
        lock(&self.common.status).state
    }

    /// One of the two ends goes.
    pub(super) fn end_dropped(&self) {
        self.ends.fetch_sub(1, Ordering::AcqRel);
        self.common.bell.ring();
    }
}
