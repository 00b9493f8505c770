//! A received message, before it is copied anywhere.

use ntb_mem::line::Line;

use crate::link::engine::Inbound;

/// One message as the consumer sees it.
///
/// It lives until the callback returns; its room is given back after that.
pub struct Message<'a, I> {
    /// 64-bit sequence on this lane, counted from the lane's first.
    pub seq: u64,
    /// The application's type, 0 if none was given.
    pub message_type: u32,
    pub(super) payload: Payload<'a, I>,
}

/// Where the bytes of a message are.
pub(super) enum Payload<'a, I> {
    /// In a local copy of its line.
    Line(Line, usize),
    /// In local memory, already checked.
    Checked(&'a [u8]),
    /// In inbound memory, complete; read through atomic accessors only.
    InPlace(InPlace<'a, I>),
}

/// Bytes in a ring, in one or two pieces.
pub(super) struct InPlace<'a, I> {
    pub(super) ring: &'a I,
    pub(super) ring_bytes: usize,
    pub(super) from: usize,
    pub(super) len: usize,
}

impl<I: Inbound> InPlace<'_, I> {
    fn copy_out(&self, from: usize, dst: &mut [u8]) {
        let at = (self.from + from) & (self.ring_bytes - 1);
        let first = dst.len().min(self.ring_bytes - at);
        let (a, b) = dst.split_at_mut(first);
        self.ring.copy_out(at, a);
        if !b.is_empty() {
            self.ring.copy_out(0, b);
        }
    }
}

impl<I: Inbound> Message<'_, I> {
    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        match &self.payload {
            Payload::Line(_, len) => *len,
            Payload::Checked(bytes) => bytes.len(),
            Payload::InPlace(p) => p.len,
        }
    }

    /// True for a message of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the part that starts at byte `from` into `dst` and returns how many bytes were copied: `dst` may be longer
    /// than what is left.
    ///
    /// Without a check word (ordered links), the bytes of a message above 56 bytes are read in place: a peer that breaks
    /// the protocol could change them between two calls, so check what was copied, not what will be copied.
    #[inline]
    pub fn copy_to(&self, from: usize, dst: &mut [u8]) -> usize {
        let n = self.len().saturating_sub(from).min(dst.len());
        if n == 0 {
            return 0;
        }
        let dst = &mut dst[..n];
        match &self.payload {
            Payload::Line(line, _) if from == 0 => line.copy_to(dst),
            Payload::Line(line, _) => dst.copy_from_slice(&line.to_bytes()[from..from + n]),
            Payload::Checked(bytes) => dst.copy_from_slice(&bytes[from..from + n]),
            Payload::InPlace(p) => p.copy_out(from, dst),
        }
        n
    }

    /// The message as a new vector: allocates.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        self.copy_to(0, &mut bytes);
        bytes
    }

    /// The 64-bit little-endian word at byte `8 * index`, the last one filled with zeros; `None` past the end.
    pub fn word(&self, index: usize) -> Option<u64> {
        let mut word = [0; 8];
        (index.checked_mul(8)? < self.len()).then(|| {
            self.copy_to(index * 8, &mut word);
            u64::from_le_bytes(word)
        })
    }
}

impl<I: Inbound> std::fmt::Debug for Message<'_, I> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Message")
            .field("seq", &self.seq)
            .field("message_type", &self.message_type)
            .field("len", &self.len())
            .finish()
    }
}
