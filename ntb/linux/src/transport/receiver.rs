//! The receiving half of a queue pair: frames that the peer has written into this side's memory.

use std::sync::atomic::{Ordering, fence};

use ntb_mem::region::View;

use super::layout::{HEADER_BYTES, Slot};

/// The frame is complete.
pub(super) const DONE: u32 = 1;
/// The peer's client has closed the queue pair.
pub(super) const LINK_DOWN: u32 = 2;

/// What the next frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Not there yet.
    Nothing,
    /// A payload, which is in the caller's buffer. Credit is due for this frame.
    Payload {
        /// Index of the frame that may be written again.
        consumed: u32,
    },
    /// A frame whose length no frame can have: dropped. Credit is due for it.
    Malformed {
        /// Index of the frame that may be written again.
        consumed: u32,
        /// Length that its header claims.
        length: u32,
    },
    /// A frame that is not the next one of this connection. It stays until the peer writes over it, as in the kernel.
    OutOfTurn {
        /// Count of the frame expected.
        expected: u32,
        /// Count that it has.
        found: u32,
    },
    /// The peer has closed the queue pair.
    Closed,
}

/// Reads frames.
#[derive(Debug)]
pub struct Receiver {
    view: View,
    slot: Slot,
    next: u32,
    packets: u32,
}

impl Receiver {
    /// Over the inbound memory of a window, in which `slot` must lie. Frames of earlier uses of the memory are wiped.
    ///
    /// `None` when the slot does not lie in the memory.
    pub fn new(view: View, slot: Slot) -> Option<Self> {
        let end = slot.trailer.checked_add(4)?;
        let frames_end = slot.frame_at(slot.frames);
        if end > view.words() as u64 * 8 || frames_end > slot.trailer {
            return None;
        }
        let this = Self {
            view,
            slot,
            next: 0,
            packets: 0,
        };
        for index in 0..slot.frames {
            let at = this.slot.header_at(index) as usize;
            this.view.store_bytes(at, &[0; HEADER_BYTES as usize]);
        }
        Some(this)
    }

    /// The slot.
    pub fn slot(&self) -> &Slot {
        &self.slot
    }

    /// Begins a new connection. Frames that are there stay, since they may be the first of it; but not those that closed
    /// the last one, which would close this one when their turn comes.
    pub fn restart(&mut self) {
        self.next = 0;
        self.packets = 0;
        for index in 0..self.slot.frames {
            let mut header = [0; HEADER_BYTES as usize];
            let at = self.slot.header_at(index) as usize;
            self.view.copy_out(at, &mut header);
            let [_, _, flags] = fields(&header);
            if flags & LINK_DOWN != 0 {
                self.clear(at + 8);
            }
        }
    }

    /// Looks at the next frame; its payload replaces what is in `buffer`.
    pub fn poll(&mut self, buffer: &mut Vec<u8>) -> Arrival {
        let frame = self.slot.frame_at(self.next) as usize;
        let header = self.slot.header_at(self.next) as usize;
        let flags = header + 8;
        // One byte, which no misaligned header tears. The peer's flags are its last write to the frame; acquire: what it
        // wrote before them is read after them.
        let word = self.view.load(flags / 8, Ordering::Acquire);
        if word >> (8 * (flags % 8)) & u64::from(DONE) == 0 {
            return Arrival::Nothing;
        }
        let mut copied = [0; HEADER_BYTES as usize];
        self.view.copy_out(header, &mut copied);
        let [version, length, flag] = fields(&copied);
        if flag & LINK_DOWN != 0 {
            self.clear(flags);
            return Arrival::Closed;
        }
        if version != self.packets {
            return Arrival::OutOfTurn {
                expected: self.packets,
                found: version,
            };
        }
        let consumed = self.next;
        let good = length > 0 && length <= self.slot.largest();
        buffer.clear();
        if good {
            buffer.resize(length as usize, 0);
            self.view.copy_out(frame, buffer);
        }
        self.clear(flags);
        self.packets = self.packets.wrapping_add(1);
        self.next = self.slot.after(self.next);
        match good {
            true => Arrival::Payload { consumed },
            false => Arrival::Malformed { consumed, length },
        }
    }

    /// The flags go only after the payload was copied, and before the credit that lets the peer write here again.
    fn clear(&self, flags: usize) {
        fence(Ordering::AcqRel);
        self.view.store_bytes(flags, &[0; 4]);
    }
}

/// Version, length, flags.
pub(super) fn fields(header: &[u8; HEADER_BYTES as usize]) -> [u32; 3] {
    let [a, b, c, d, e, f, g, h, i, j, k, l] = *header;
    [[a, b, c, d], [e, f, g, h], [i, j, k, l]].map(u32::from_le_bytes)
}

/// Drives a receiver over memory that says anything: for fuzzing. `data` is the memory of a window.
#[cfg(any(test, fuzzing))]
#[allow(
    clippy::missing_panics_doc,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test"
)]
pub fn check_hostile(frame: u32, data: &[u8]) {
    use ntb_mem::region::{Pages, Region};

    use super::layout::Shape;
    const BYTES: u64 = 4096;
    let region = std::sync::Arc::new(Region::allocate(BYTES, Pages::Normal).unwrap());
    let shape = Shape {
        windows: 1,
        queues: 1,
    };
    let Some(slot) = shape.slot(0, BYTES, frame) else {
        return;
    };
    let mut receiver = Receiver::new(region.view(), slot).unwrap();
    region
        .view()
        .store_bytes(0, data.get(..BYTES as usize).unwrap_or(data));
    let mut buffer = Vec::new();
    for _ in 0..2 * slot.frames {
        match receiver.poll(&mut buffer) {
            Arrival::Payload { consumed } => {
                assert!(consumed < slot.frames && !buffer.is_empty());
                assert!(buffer.len() <= slot.largest() as usize);
            }
            Arrival::Malformed { consumed, length } => {
                assert!(consumed < slot.frames);
                assert!(length == 0 || length > slot.largest());
            }
            Arrival::OutOfTurn { expected, found } => assert_ne!(expected, found),
            Arrival::Nothing | Arrival::Closed => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ntb_mem::region::{Pages, Region};
    use proptest::prelude::*;

    use super::*;
    use crate::transport::layout::Shape;

    fn rig(bytes: u64, frame: u32) -> (View, Slot, Receiver) {
        let region = Arc::new(Region::allocate(bytes, Pages::Normal).unwrap());
        let slot = Shape {
            windows: 1,
            queues: 1,
        }
        .slot(0, bytes, frame)
        .unwrap();
        let view = region.view();
        (view.clone(), slot, Receiver::new(view, slot).unwrap())
    }

    fn write(view: &View, slot: &Slot, index: u32, payload: &[u8], header: [u32; 3]) {
        view.store_bytes(slot.frame_at(index) as usize, payload);
        let bytes: Vec<u8> = header.iter().flat_map(|v| v.to_le_bytes()).collect();
        view.store_bytes(slot.header_at(index) as usize, &bytes);
    }

    #[test]
    fn frames_come_in_order_around_the_ring() {
        // Frames of 1365 bytes: headers at odd addresses.
        let (view, slot, mut receiver) = rig(4096, 1365);
        assert_eq!(slot.frames, 2);
        let mut buffer = vec![9];
        assert_eq!(receiver.poll(&mut buffer), Arrival::Nothing);
        for n in 0..7u32 {
            let index = n % slot.frames;
            let payload = vec![n as u8 + 1; 1 + n as usize * 100];
            write(&view, &slot, index, &payload, [n, payload.len() as u32, DONE]);
            assert_eq!(receiver.poll(&mut buffer), Arrival::Payload { consumed: index });
            assert_eq!(buffer, payload);
            assert_eq!(receiver.poll(&mut buffer), Arrival::Nothing);
        }
    }

    #[test]
    fn what_cannot_be_is_dropped_or_left() {
        let (view, slot, mut receiver) = rig(4096, 1000);
        let mut buffer = Vec::new();
        write(&view, &slot, 0, &[1], [1, 1, DONE]);
        let wrong = Arrival::OutOfTurn {
            expected: 0,
            found: 1,
        };
        assert_eq!(receiver.poll(&mut buffer), wrong);
        assert_eq!(receiver.poll(&mut buffer), wrong, "it stays");
        for length in [0, slot.largest() + 1, u32::MAX] {
            receiver.restart();
            write(&view, &slot, 0, &[1], [0, length, DONE]);
            let gone = Arrival::Malformed { consumed: 0, length };
            assert_eq!(receiver.poll(&mut buffer), gone);
        }
        write(&view, &slot, 1, &[], [77, 0, DONE | LINK_DOWN]);
        assert_eq!(receiver.poll(&mut buffer), Arrival::Closed);
        assert_eq!(receiver.poll(&mut buffer), Arrival::Nothing);
        // One that was never reached closes nothing later.
        write(&view, &slot, 0, &[1], [0, 1, DONE]);
        write(&view, &slot, 1, &[], [1, 0, DONE | LINK_DOWN]);
        receiver.restart();
        assert_eq!(receiver.poll(&mut buffer), Arrival::Payload { consumed: 0 });
        assert_eq!(receiver.poll(&mut buffer), Arrival::Nothing);
    }

    #[test]
    fn a_slot_outside_the_memory_is_refused() {
        let (view, slot, _) = rig(4096, 1000);
        let too_far = Slot { base: 4096, ..slot };
        assert!(Receiver::new(view.clone(), too_far).is_none());
        let behind = Slot {
            trailer: u64::MAX - 1,
            ..slot
        };
        assert!(Receiver::new(view, behind).is_none());
    }

    proptest! {
        #[test]
        fn any_memory_is_borne(frame in 0u32..5000, data in proptest::collection::vec(any::<u8>(), 0..4096)) {
            check_hostile(frame, &data);
        }
    }
}
