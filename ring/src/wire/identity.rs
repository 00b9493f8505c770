//! Who wrote something, for whom, and in which life of the link.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use super::hash;

const ECHO: u64 = 0x6563_686f;
const PAIR: u64 = 0x7061_6972;

/// One side in one of its lives: a new incarnation at each start, a new life at each loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) incarnation: u64,
    /// 24 bits.
    pub(crate) life: u32,
}

/// Bits of a life number.
const LIFE_MASK: u32 = 0xff_ffff;

impl Identity {
    /// The same incarnation's next life.
    pub(crate) fn next(self) -> Self {
        Self {
            life: self.life.wrapping_add(1) & LIFE_MASK,
            ..self
        }
    }

    /// What the other side writes to say that it has seen this identity; never zero.
    pub(crate) fn echo(self) -> u32 {
        hash::fold32(hash::hash(ECHO, &[self.incarnation, u64::from(self.life)]))
    }

    /// True when `self` is an earlier life of the incarnation that `other` is a life of.
    pub(crate) fn is_before(self, other: Self) -> bool {
        let ahead = other.life.wrapping_sub(self.life) & LIFE_MASK;
        self.incarnation == other.incarnation && ahead != 0 && ahead <= LIFE_MASK >> 1
    }
}

/// One direction of one life of the link: enters the check of everything the writer stores for the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Direction {
    pub(crate) writer: Identity,
    pub(crate) reader: Identity,
}

impl Direction {
    /// 64 bits that stand for all four numbers.
    pub(crate) fn id(self) -> u64 {
        hash::hash(
            PAIR,
            &[
                self.writer.incarnation,
                u64::from(self.writer.life),
                self.reader.incarnation,
                u64::from(self.reader.life),
            ],
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lives_of_one_incarnation_are_ordered_across_the_wrap() {
        let at = |life| Identity { incarnation: 9, life };
        assert!(at(1).is_before(at(2)));
        assert!(!at(2).is_before(at(1)));
        assert!(!at(2).is_before(at(2)));
        assert!(at(LIFE_MASK).is_before(at(0)));
        assert_eq!(at(LIFE_MASK).next(), at(0));
        assert!(!at(0).is_before(Identity {
            incarnation: 8,
            life: 5
        }));
    }

    #[test]
    fn a_direction_differs_from_its_reverse_and_from_every_neighbour() {
        let (a, b) = (
            Identity {
                incarnation: 1,
                life: 2,
            },
            Identity {
                incarnation: 2,
                life: 1,
            },
        );
        let id = |writer, reader| Direction { writer, reader }.id();
        let all = [
            id(a, b),
            id(b, a),
            id(a.next(), b),
            id(a, b.next()),
            id(b.next(), a),
        ];
        for (i, x) in all.iter().enumerate() {
            assert!(all.iter().skip(i + 1).all(|y| x != y));
        }
    }
}
