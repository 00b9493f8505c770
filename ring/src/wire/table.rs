//! The channel table: one record a channel, in the reader's lines from [`super::layout::TABLE_LINE`] on.
//!
//! ```text
//! 0..4   name, 1 to 32 bytes, filled up with zeros
//! 4      first page (4 KiB) of the channel in the writer's inbound memory | start << 32
//! 5      guard | generation (16 bits) << 32 | echo (16 bits) << 48
//! 6      tag (16 bits) | log2 of ring lines (8) | flags (8) | doorbell (8) | state (8) | 0
//! ```
//!
//! Start, guard and tag are the key of all that the reader stores into this channel, chosen for the pair of
//! generations in this entry; with an echo of 0 there is no such pair yet and they are 0. Flags: 1 check, 2 smaller ring
//! if different, 4 (for information) the ring lies in another device's memory. State: 1 open, 2 closed.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use ntb_mem::line::Line;

use super::{
    check::Check,
    layout::TABLE_LINE,
    mark::LaneKey,
    page::PAGE_LINES,
    record::{self, RecordKind},
};
use crate::queue::{MAX_RING_LINES, MIN_RING_LINES};

/// Longest name of a channel in bytes.
pub(crate) const NAME_MAX: usize = 32;

const CHECK: u8 = 1;
const SMALLER: u8 = 2;
const EXPORTED: u8 = 4;
const OPEN: u8 = 1;
const CLOSED: u8 = 2;

/// A channel's name as it stands in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Name([u8; NAME_MAX]);

impl Name {
    /// `None` when the name is empty, too long or has a zero byte.
    pub(crate) fn new(name: &str) -> Option<Self> {
        let mut bytes = [0; NAME_MAX];
        bytes.get_mut(..name.len())?.copy_from_slice(name.as_bytes());
        (!name.is_empty() && !name.bytes().any(|b| b == 0)).then_some(Self(bytes))
    }

    /// The name as text.
    pub(crate) fn text(&self) -> String {
        let end = self.0.iter().position(|b| *b == 0).unwrap_or(NAME_MAX);
        String::from_utf8_lossy(self.0.get(..end).unwrap_or(&[])).into_owned()
    }
}

/// One entry, all fields in range; whether the memory lies inside the window is for the reader to see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: Name,
    pub(crate) open: bool,
    /// Rises with each opening of a channel at the writer; never 0.
    pub(crate) generation: u16,
    /// Generation of the reader's channel of this name with which the writer is ready to run; 0 for none.
    pub(crate) echo: u16,
    pub(crate) key: Option<LaneKey>,
    pub(crate) first_page: u32,
    pub(crate) ring_lines: u64,
    pub(crate) check: bool,
    pub(crate) smaller_if_different: bool,
    pub(crate) doorbell: u32,
    /// The ring lies in memory of another owner.
    pub(crate) exported: bool,
}

impl Entry {
    /// First line of the channel in the writer's inbound memory.
    pub(crate) fn first_line(&self) -> u64 {
        u64::from(self.first_page) * PAGE_LINES
    }

    /// True when this entry can have been posted in place of `old`, and not before it: within a generation only the pair
    /// changes and closing is final, so a line that was overtaken by a later one, or that a broken peer changed, is not
    /// taken in.
    pub(crate) fn follows(&self, old: &Self) -> bool {
        if self.generation != old.generation {
            return !is_older(self.generation, old.generation);
        }
        let unchanged = Self {
            open: self.open,
            echo: self.echo,
            key: self.key,
            ..*old
        };
        *self == unchanged && (old.open || !self.open)
    }

    pub(crate) fn encode(&self, direction: u64, slot: u64) -> Line {
        let mut payload = [0; record::PAYLOAD];
        for (word, eight) in payload.iter_mut().zip(self.name.0.chunks_exact(8)) {
            *word = u64::from_le_bytes(eight.try_into().unwrap_or([0; 8]));
        }
        let (tag, start, guard) = self.key.map_or((0, 0, 0), |k| (k.tag(), k.start, k.guard));
        let flag = |on, bit| if on { bit } else { 0 };
        let flags = flag(self.check, CHECK)
            | flag(self.smaller_if_different, SMALLER)
            | flag(self.exported, EXPORTED);
        let [.., memory, pair, shape] = &mut payload;
        *memory = u64::from(self.first_page) | u64::from(start) << 32;
        *pair = u64::from(guard) | u64::from(self.generation) << 32 | u64::from(self.echo) << 48;
        *shape = u64::from(tag)
            | u64::from(self.ring_lines.trailing_zeros()) << 16
            | u64::from(flags) << 24
            | u64::from(self.doorbell as u8) << 32
            | u64::from(if self.open { OPEN } else { CLOSED }) << 40;
        record::seal(direction, TABLE_LINE + slot, RecordKind::Channel, &payload)
    }

    /// `None` for anything but an entry of this life whose fields are all in range.
    pub(crate) fn decode(direction: u64, slot: u64, line: &Line) -> Option<Self> {
        let [n0, n1, n2, n3, memory, pair, shape] =
            record::open(direction, TABLE_LINE + slot, RecordKind::Channel, line)?;
        let mut name = [0; NAME_MAX];
        for (eight, word) in name.chunks_exact_mut(8).zip([n0, n1, n2, n3]) {
            eight.copy_from_slice(&word.to_le_bytes());
        }
        let [_, _, log2, flags, doorbell, state, ..] = shape.to_le_bytes();
        let ring_lines = 1u64.checked_shl(u32::from(log2))?;
        let (tag, generation, echo) = (shape as u16, (pair >> 32) as u16, (pair >> 48) as u16);
        let key = match (echo, tag) {
            (0, _) => None,
            (_, 1..=0xfffe) => Some(LaneKey::new(tag, (memory >> 32) as u32, pair as u32)),
            _ => return None,
        };
        let in_range = (MIN_RING_LINES..=MAX_RING_LINES).contains(&ring_lines)
            && generation != 0
            && matches!(state, OPEN | CLOSED)
            && n0 as u8 != 0
            && u32::from(doorbell) < crate::link::DOORBELLS;
        in_range.then_some(Self {
            name: Name(name),
            open: state == OPEN,
            generation,
            echo,
            key,
            first_page: memory as u32,
            ring_lines,
            check: flags & CHECK != 0,
            smaller_if_different: flags & SMALLER != 0,
            doorbell: doorbell.into(),
            exported: flags & EXPORTED != 0,
        })
    }
}

/// Over the last words of the entries of a table, 0 where there is none: what the reader's beat returns when it has
/// taken all of them in.
pub(crate) fn digest(last_words: &[u64]) -> u32 {
    let present = last_words.iter().zip(0..).filter(|(word, _)| **word != 0);
    present
        .fold(Check::default(), |check, (word, slot)| check.word(slot, *word))
        .finish()
}

/// True when generation `a` is older than `b`, across the wrap.
fn is_older(a: u16, b: u16) -> bool {
    a != b && b.wrapping_sub(a) <= u16::MAX >> 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn sample() -> Entry {
        Entry {
            name: Name::new("quotes").unwrap(),
            open: true,
            generation: 3,
            echo: 2,
            key: Some(LaneKey::new(0x1234, 0x89ab_cdef, 0xdead_beef)),
            first_page: 4,
            ring_lines: 1024,
            check: true,
            smaller_if_different: false,
            doorbell: 5,
            exported: false,
        }
    }

    #[test]
    fn round_trip_in_its_slot_only() {
        for entry in [
            sample(),
            Entry {
                echo: 0,
                key: None,
                ..sample()
            },
            Entry {
                open: false,
                check: false,
                smaller_if_different: true,
                exported: true,
                ..sample()
            },
        ] {
            let line = entry.encode(9, 63);
            assert_eq!(Entry::decode(9, 63, &line), Some(entry));
            assert_eq!(Entry::decode(9, 62, &line), None);
            assert_eq!(Entry::decode(8, 63, &line), None);
        }
    }

    #[test]
    fn names() {
        assert!(Name::new("").is_none());
        assert!(Name::new("a\0b").is_none());
        assert!(Name::new(&"x".repeat(33)).is_none());
        assert_eq!(Name::new(&"x".repeat(32)).unwrap().text(), "x".repeat(32));
    }

    #[test]
    fn an_entry_follows_only_what_it_can_replace() {
        let old = sample();
        let next = Entry {
            generation: 4,
            first_page: 9,
            ..old
        };
        assert!(next.follows(&old) && !old.follows(&next));
        let closed = Entry { open: false, ..old };
        assert!(closed.follows(&old) && !old.follows(&closed));
        assert!(Entry { echo: 9, ..old }.follows(&old));
        assert!(!Entry { first_page: 9, ..old }.follows(&old));
        assert!(!Entry { ring_lines: 4, ..old }.follows(&old));
        assert!(
            !Entry {
                name: Name::new("x").unwrap(),
                ..old
            }
            .follows(&old)
        );
    }

    #[test]
    fn generations_are_ordered_across_the_wrap() {
        assert!(is_older(1, 2) && !is_older(2, 1) && !is_older(2, 2));
        assert!(is_older(0xffff, 1) && !is_older(1, 0xffff));
    }

    proptest! {
        /// A peer can seal whatever it likes: what decodes is in range.
        #[test]
        fn sealed_nonsense_is_in_range_or_nothing(payload: [u64; 7]) {
            let line = record::seal(1, TABLE_LINE, RecordKind::Channel, &payload);
            if let Some(e) = Entry::decode(1, 0, &line) {
                prop_assert!(e.ring_lines.is_power_of_two() && e.ring_lines <= MAX_RING_LINES);
                prop_assert!(e.generation != 0 && e.doorbell < 16);
                prop_assert!(e.echo == 0 || e.key.is_some());
            }
        }
    }
}
