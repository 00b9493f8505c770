//! Ends of a channel whose lines a device stores and takes out: a GPU's kernels, for instance.
//!
//! The device is told where the lane lies, under which keys it runs and how far it has come ([`Sender::lend`],
//! [`Receiver::lend`]); this side's end stays with whoever drives the device, which says when the device sets out and how far it
//! has come when it has stopped. Between the two the end itself must not be used. The peer needs nothing special: the lines are
//! those of every lane with checks.
//!
//! While a device is at work no next life of the channel begins: its stores would land in memory that is another's by then. So
//! whoever drives it must see to it that it stops by itself when nothing comes from the peer.

use ntb_mem::{
    region::View,
    sync::{Arc, Ordering, fence},
};

use super::{Receiver, RecvFailure, SendFailure, Sender, shared::lock};
use crate::{
    link::{
        LinkKind, Pump,
        engine::{Direct, Order, StoreEngine},
    },
    queue::{Lane, Position},
    session::{Lanes, Place},
    wire::page::PAGE_LINES,
};

/// Bits of [`super::shared::Shared::device`].
pub(super) const SENDING: u32 = 1;
pub(super) const RECEIVING: u32 = 2;

/// Where a channel's memory is at this side, for devices.
#[derive(Clone, Debug)]
pub(super) struct Parts {
    pub(super) lanes: Lanes,
    /// Control page and ring.
    pub(super) own: View,
}

/// One direction of a channel's present life, for a device.
#[derive(Clone, Debug)]
pub struct LentLane {
    /// Keys and length. Its lines count in the memory of the whole link: those of `own` and `direct` begin with the channel.
    pub lane: Lane,
    /// What both sides agreed on. A device that cannot keep lines whole needs [`Order::Relaxed`], which any channel has that
    /// is opened with checks.
    pub order: Order,
    /// How far this end has come.
    pub position: Position,
    /// This side's control page and ring, as this processor reaches them.
    pub own: View,
    /// Where they lie.
    pub own_place: Place,
    /// The peer's control page and ring, where they are mapped into this process.
    pub direct: Option<Direct>,
    /// Where the peer says that they lie.
    pub peer_place: Place,
    /// What somebody of this side has to call while the device waits, on links where nothing arrives by itself.
    pub pump: Option<Arc<dyn Pump>>,
}

impl LentLane {
    fn new(parts: Parts, transmit: bool, position: Position, engine: &impl StoreEngine) -> Self {
        let Parts { lanes, own } = parts;
        let (lane, order, peer_base) = match transmit {
            true => (lanes.transmit, lanes.transmit_order, lanes.transmit.consumer_base),
            false => (lanes.receive, lanes.receive_order, lanes.receive.producer_base),
        };
        Self {
            lane,
            order,
            position,
            own,
            own_place: lanes.own_place,
            // Whole pages, as sessions give them out: registering takes nothing less.
            direct: engine.direct(
                peer_base,
                PAGE_LINES + lane.ring_lines.next_multiple_of(PAGE_LINES),
            ),
            peer_place: lanes.peer_place,
            pump: None,
        }
    }
}

impl Sender {
    /// The sending direction of the present life.
    pub fn lend(&mut self) -> Result<LentLane, SendFailure> {
        self.turn()?;
        let parts = self.shared.life().parts.clone();
        match (&mut self.tx, parts) {
            (Some(tx), Some(parts)) => {
                let position = tx.position();
                Ok(LentLane::new(parts, true, position, tx.engine_mut()))
            }
            _ => Err(SendFailure::NotConnected(self.shared.state())),
        }
    }

    /// A device sets out to send up to `messages` messages. From now on sleeping readers are rung for them.
    pub fn device_starts(&mut self, messages: u64) -> Result<(), SendFailure> {
        self.shared.device.fetch_or(SENDING, Ordering::AcqRel);
        match self.lend() {
            Ok(_) => {
                if let Some(tx) = &mut self.tx {
                    tx.expect_sent(messages);
                }
                self.shared.common.bell.ring();
                Ok(())
            }
            Err(e) => {
                self.shared.device.fetch_and(!SENDING, Ordering::AcqRel);
                Err(e)
            }
        }
    }

    /// The device has stopped, and this is how far it has come. A position that cannot be ends this life of the link.
    pub fn device_stopped(&mut self, position: Position) {
        if self.tx.as_mut().is_some_and(|tx| !tx.go_on_from(position)) {
            self.shared.corrupt.store(true, Ordering::Release);
        }
        self.shared.device.fetch_and(!SENDING, Ordering::AcqRel);
        self.shared.common.bell.ring();
    }

    /// Whether the life of the last call still goes on.
    pub fn is_current(&self) -> bool {
        self.epoch == self.shared.epoch.load(Ordering::Acquire)
    }
}

impl Receiver {
    /// The receiving direction of the present life. What of an ended one had arrived and was not received is given up: see
    /// [`Receiver::device_starts`].
    pub fn lend(&mut self) -> Result<LentLane, RecvFailure> {
        if !self.is_current()
            && let Some(lost) = self.turn_for_device()
        {
            return Err(lost);
        }
        let parts = self.shared.life().parts.clone();
        let not_connected = || RecvFailure::NotConnected(self.shared.state());
        match (&mut self.rx, parts) {
            (Some(rx), Some(parts)) => {
                let position = rx.position().ok_or(RecvFailure::WithinBlock)?;
                Ok(LentLane {
                    pump: self.pump.clone(),
                    ..LentLane::new(parts, false, position, rx.engine_mut())
                })
            }
            _ => Err(not_connected()),
        }
    }

    /// What carries the channel at present: it decides which memory a device can be shown.
    pub fn transport(&self) -> Option<LinkKind> {
        lock(&self.shared.common.status).stats.transport
    }

    /// A device sets out to receive: in the life that was lent, also after its end, when what had arrived is still to be given
    /// out. What comes back has to be called while it waits, on links where nothing arrives by itself.
    pub fn device_starts(&mut self) -> Result<Option<Arc<dyn Pump>>, RecvFailure> {
        self.shared.device.fetch_or(RECEIVING, Ordering::AcqRel);
        if self.rx.is_some() {
            return Ok(self.pump.clone());
        }
        self.shared.device.fetch_and(!RECEIVING, Ordering::AcqRel);
        Err(RecvFailure::NotConnected(self.shared.state()))
    }

    /// The device found something that is no message. Ends this life of the link.
    pub fn device_found_corrupt(&self) {
        self.shared.corrupt.store(true, Ordering::Release);
        self.shared.common.bell.ring();
    }

    /// The device has stopped, and this is how far it has come. What it has consumed and not given back is given back here. A
    /// position that cannot be ends this life of the link. False when the life had ended and its ring may have been written for
    /// the next one before the device stopped: what it took is void then.
    pub fn device_stopped(&mut self, position: Position) -> bool {
        let current = self.is_current();
        let mut sound = true;
        if let Some(rx) = &mut self.rx {
            if current {
                sound = rx.go_on_from(position);
                rx.give_back();
            } else {
                fence(Ordering::Acquire);
                sound = self.shared.reset.load(Ordering::Relaxed) <= self.epoch && rx.go_on_from(position); // R2
            }
        }
        if current && !sound {
            self.shared.corrupt.store(true, Ordering::Release);
        }
        self.shared.device.fetch_and(!RECEIVING, Ordering::AcqRel);
        self.shared.common.bell.ring();
        sound
    }

    /// Whether the life of the last call still goes on.
    pub fn is_current(&self) -> bool {
        self.epoch == self.shared.epoch.load(Ordering::Acquire)
    }
}

/// Ends that go stop their devices first: nothing is under way by then.
pub(super) fn ended(shared: &Arc<super::shared::Shared>, bit: u32) {
    shared.device.fetch_and(!bit, Ordering::AcqRel);
}
