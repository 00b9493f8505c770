//! The sending half of a queue pair: frames into the peer's memory, and the credit that it writes into this side's.

use ntb::hw::NtbError;
use ntb_mem::region::View;

use super::{
    layout::Slot,
    receiver::{DONE, LINK_DOWN},
};
use crate::outbound::Outbound;

/// Whether a frame was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// It is on its way.
    Yes,
    /// The ring is full: nothing was sent.
    Full,
}

/// Writes frames.
#[derive(Debug)]
pub(super) struct Sender {
    outbound: Outbound,
    /// The peer's slot.
    slot: Slot,
    /// Own memory in which the peer writes which frame it has consumed last, and where.
    view: View,
    credit: u64,
    head: u32,
    packets: u32,
}

impl Sender {
    /// Into `slot` of a window; `credit` is the offset of the consumer's index in own memory `view`.
    pub(super) fn new(outbound: Outbound, slot: Slot, view: View, credit: u64) -> Option<Self> {
        let fits = credit.checked_add(4)? <= view.words() as u64 * 8
            && slot.trailer.checked_add(4)? <= outbound.bytes();
        let mut this = Self {
            outbound,
            slot,
            view,
            credit,
            head: 0,
            packets: 0,
        };
        fits.then(|| {
            this.restart();
            this
        })
    }

    pub(super) fn slot(&self) -> &Slot {
        &self.slot
    }

    /// Begins a new connection: all frames but one may be written.
    pub(super) fn restart(&mut self) {
        self.head = 0;
        self.packets = 0;
        let last = self.slot.frames - 1;
        self.view.store_bytes(self.credit as usize, &last.to_le_bytes());
    }

    /// Frames that may be written now. An index that the peer cannot mean counts as a full ring.
    pub(super) fn free(&self) -> u32 {
        let mut bytes = [0; 4];
        self.view.copy_out(self.credit as usize, &mut bytes);
        let tail = u32::from_le_bytes(bytes);
        match tail {
            _ if tail >= self.slot.frames => 0,
            _ if tail >= self.head => tail - self.head,
            _ => self.slot.frames + tail - self.head,
        }
    }

    /// Writes a frame. The payload is 1 to [`Slot::largest`] bytes.
    pub(super) fn send(&mut self, payload: &[u8]) -> Result<Sent, NtbError> {
        if self.free() == 0 {
            return Ok(Sent::Full);
        }
        let length = u32::try_from(payload.len()).unwrap_or(0);
        self.outbound.store(self.slot.frame_at(self.head), payload)?;
        self.finish(length, DONE)
    }

    /// Tells the peer that this side closes the queue pair.
    pub(super) fn send_closed(&mut self) -> Result<Sent, NtbError> {
        match self.free() {
            0 => Ok(Sent::Full),
            _ => self.finish(0, DONE | LINK_DOWN),
        }
    }

    /// The header: the flags alone and last.
    fn finish(&mut self, length: u32, flags: u32) -> Result<Sent, NtbError> {
        let header = self.slot.header_at(self.head);
        let first = u64::from(self.packets) | u64::from(length) << 32;
        self.outbound.store(header, &first.to_le_bytes())?;
        self.outbound.store(header + 8, &flags.to_le_bytes())?;
        self.head = self.slot.after(self.head);
        self.packets = self.packets.wrapping_add(1);
        Ok(Sent::Yes)
    }

    /// Lets the peer write the frame again that was consumed last. `trailer` is the place of the consumer's index in the
    /// peer's memory: the end of the slot that this side sends into.
    pub(super) fn give_credit(&self, consumed: u32) -> Result<(), NtbError> {
        self.outbound.store(self.slot.trailer, &consumed.to_le_bytes())
    }
}
