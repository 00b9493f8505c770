//! The mark: the last word of every line that completes something.
//!
//! ```text
//! bits  0..32  sequence of the (first) message, low 32 bits, counted from the lane's start value
//! bits 32..48  tag: which life of the lane the line belongs to
//! bits 48..53  kind, never 0 and never 31
//! bits 53..56  flags (stamp, correlation, priority): reserved, zero
//! bits 56..64  length of a single-line message in bytes, otherwise zero
//! ```
//!
//! Because of the kind a mark is never all zeros and never all ones, whatever sequence and tag are.

/// What a line is. Values are part of the wire format; those without an encoder yet are reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// One message of up to 48 bytes, with type and guard (or check).
    Small = 1,
    /// One message of 49 to 56 bytes and type 0, on ordered links only.
    Bare = 2,
    /// Completes one message whose bytes lie in the lines that follow.
    Long = 3,
    /// Completes several messages of one size and type, in this line or in those that follow.
    Packed = 4,
    /// Reserved: skip to the end of the ring.
    Padding = 5,
    /// Reserved: part of a message larger than the ring.
    Fragment = 6,
    /// Reserved: a message of the session on this lane.
    Control = 7,
    /// Reserved: end of the stream.
    EndOfStream = 8,
    /// Reserved: messages were left out here.
    GapMark = 9,
    /// Reserved: no message before this time will follow.
    Watermark = 10,
    /// Reserved: the bytes lie outside the ring.
    OutOfLine = 11,
}

impl Kind {
    /// Kinds that this version can decode; `None` for reserved and unknown ones.
    #[inline(always)]
    pub(crate) fn decode(bits: u8) -> Option<Self> {
        match bits {
            1 => Some(Self::Small),
            2 => Some(Self::Bare),
            3 => Some(Self::Long),
            4 => Some(Self::Packed),
            _ => None,
        }
    }
}

/// What the receiver of a lane assigns to one life of it, so that nothing written for another life is taken for its
/// own: not a late write of a dead process, and not payload that happens to look like a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneKey {
    tag: u16,
    /// Added to the 64-bit sequence before its low 32 bits go on the wire.
    pub start: u32,
    /// Stands beside the type in lines of ordered links, where the check stands on relaxed ones.
    pub guard: u32,
}

impl LaneKey {
    /// A key with `tag`, which is mapped into 1..=0xfffe: control words are checked by the tag alone, so it is
    /// neither all zeros nor all ones.
    pub const fn new(tag: u16, start: u32, guard: u32) -> Self {
        let tag = match tag {
            0 => 1,
            0xffff => 0xfffe,
            t => t,
        };
        Self { tag, start, guard }
    }

    /// The tag, 1 to 0xfffe.
    #[inline(always)]
    pub fn tag(self) -> u16 {
        self.tag
    }

    /// Tag and wire sequence as they stand in bits 0..48 of the mark of message `seq`.
    #[inline(always)]
    pub(crate) fn identity(self, seq: u64) -> u64 {
        u64::from(self.tag) << 32 | u64::from((seq as u32).wrapping_add(self.start))
    }

    /// Bits 0 to 56 of the mark of message `seq` when it is of kind [`Kind::Small`]: all but the length.
    #[inline(always)]
    pub(crate) fn small(self, seq: u64) -> u64 {
        self.identity(seq) | (Kind::Small as u64) << 48
    }

    /// A control word: 48 bits of value under the tag.
    #[inline(always)]
    pub(crate) fn seal(self, value: u64) -> u64 {
        u64::from(self.tag) << 48 | value & CONTROL_MASK
    }

    /// The 48-bit value of a control word of this life; `None` for anything else, all zeros and all ones included.
    #[inline(always)]
    pub(crate) fn open(self, word: u64) -> Option<u64> {
        (word >> 48 == u64::from(self.tag)).then_some(word & CONTROL_MASK)
    }
}

/// Bits of value in a control word.
pub(crate) const CONTROL_MASK: u64 = (1 << 48) - 1;
/// Bits of a mark that name life and sequence.
pub(crate) const IDENTITY_MASK: u64 = (1 << 48) - 1;

/// Widens the 48-bit value of a control word to the 64-bit counter nearest to `near`.
#[inline(always)]
pub(crate) fn widen48(value: u64, near: u64) -> u64 {
    let delta = value.wrapping_sub(near) << 16;
    near.wrapping_add(((delta as i64) >> 16) as u64)
}

/// The mark of a line.
#[inline(always)]
pub(crate) fn mark(key: LaneKey, kind: Kind, seq: u64, len: u8) -> u64 {
    key.identity(seq) | u64::from(kind as u8) << 48 | u64::from(len) << 56
}

/// True when two marks are of one message of one life, whatever their kinds.
#[inline(always)]
pub(crate) fn same_message(a: u64, b: u64) -> bool {
    (a ^ b) & IDENTITY_MASK == 0
}

/// [`LaneKey::small`] of the message after the one whose `small` is given.
#[inline(always)]
pub(crate) fn small_after(small: u64) -> u64 {
    small >> 32 << 32 | u64::from((small as u32).wrapping_add(1))
}

/// Kind bits (flags included, so that a set flag is an unknown kind) and length byte of a mark.
#[inline(always)]
pub(crate) fn kind_and_len(mark: u64) -> (u8, u8) {
    ((mark >> 48) as u8, (mark >> 56) as u8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn tags_avoid_all_zeros_and_all_ones() {
        assert_eq!(LaneKey::new(0, 0, 0).tag(), 1);
        assert_eq!(LaneKey::new(0xffff, 0, 0).tag(), 0xfffe);
    }

    proptest! {
        #[test]
        fn a_mark_is_never_blank(tag: u16, start: u32, seq: u64, kind in 1u8..=4, len: u8) {
            let m = mark(LaneKey::new(tag, start, 0), Kind::decode(kind).unwrap(), seq, len);
            prop_assert_ne!(m, 0);
            prop_assert_ne!(m, u64::MAX);
            prop_assert_eq!(kind_and_len(m), (kind, len));
        }

        #[test]
        fn small_marks_are_counted_up_as_they_are_made(tag: u16, start: u32, seq: u64, len in 0u8..49) {
            let key = LaneKey::new(tag, start, 0);
            prop_assert_eq!(small_after(key.small(seq)), key.small(seq.wrapping_add(1)));
            prop_assert_eq!(key.small(seq) | u64::from(len) << 56, mark(key, Kind::Small, seq, len));
        }

        #[test]
        fn control_words_open_only_under_their_tag(tag in 1u16..0xffff, other in 1u16..0xffff, value: u64) {
            let (a, b) = (LaneKey::new(tag, 0, 0), LaneKey::new(other, 0, 0));
            prop_assert_eq!(a.open(a.seal(value)), Some(value & CONTROL_MASK));
            prop_assert_eq!(b.open(a.seal(value)).is_some(), tag == other);
            prop_assert_eq!(a.open(0), None);
            prop_assert_eq!(a.open(u64::MAX), None);
        }

        #[test]
        fn widening_finds_the_nearest(near: u64, delta in -(1i64 << 46)..(1i64 << 46)) {
            let value = near.wrapping_add(delta as u64);
            prop_assert_eq!(widen48(value & CONTROL_MASK, near), value);
        }
    }

    #[test]
    fn neighbouring_sequences_differ_at_every_wrap() {
        let key = LaneKey::new(7, 5, 0);
        for seq in [
            0,
            u64::from(u32::MAX) - 6,
            u64::from(u32::MAX) - 5,
            u64::from(u32::MAX),
            u64::MAX - 1,
        ] {
            assert_ne!(key.identity(seq), key.identity(seq.wrapping_add(1)));
        }
    }
}
