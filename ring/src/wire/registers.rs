//! The eight registers: how two sides find each other before a single byte of memory is known to work.
//!
//! ```text
//! 0   magic 0x4e52 | oldest wire version << 16 | newest wire version << 24
//! 1   life of the writer (24 bits) | phase << 24 (4 bits) | why the life before ended << 28 (4 bits)
//! 2   incarnation of the writer, low half
//! 3   incarnation of the writer, high half
//! 4   echo: the identity of the reader that the writer has seen, 0 for none
//! 5   pages (4 KiB) of the writer's inbound memory
//! 6   number of the writer's newest pattern | number of the reader's pattern found in place << 16
//! 7   check over registers 0 to 6
//! ```
//!
//! This layout stays the same in every wire version, so that sides of different versions can still name both.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use super::{check::Check, identity::Identity};
use crate::link::{REGISTERS, Registers};

const MAGIC: u32 = 0x4e52;

/// What a side is ready for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Phase {
    /// Its memory must not be stored to yet.
    Waiting = 1,
    /// Its memory may be stored to.
    Ready = 2,
    /// It has said goodbye.
    Closed = 3,
}

/// Why a side ended the life before this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Ended {
    /// It is the first, or nothing was lost.
    None = 0,
    /// It lost the link.
    LinkLost = 1,
    /// It gave the peer up.
    PeerGone = 2,
    /// It found something in its memory that cannot be.
    Corrupt = 3,
}

/// One side's registers, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Report {
    /// Oldest and newest wire version.
    pub(crate) versions: (u8, u8),
    pub(crate) who: Identity,
    pub(crate) phase: Phase,
    pub(crate) ended: Ended,
    /// [`Identity::echo`] of the reader, 0 for none.
    pub(crate) echo: u32,
    pub(crate) pages: u32,
    pub(crate) pattern: u16,
    pub(crate) found: u16,
}

impl Report {
    pub(crate) fn encode(&self) -> Registers {
        let mut out = [
            MAGIC | u32::from(self.versions.0) << 16 | u32::from(self.versions.1) << 24,
            self.who.life | (self.phase as u32) << 24 | (self.ended as u32) << 28,
            self.who.incarnation as u32,
            (self.who.incarnation >> 32) as u32,
            self.echo,
            self.pages,
            u32::from(self.pattern) | u32::from(self.found) << 16,
            0,
        ];
        let check = check(&out);
        if let Some(last) = out.last_mut() {
            *last = check;
        }
        out
    }

    /// `None` for a set that is blank, half written or not of this protocol.
    pub(crate) fn decode(registers: &Registers) -> Option<Self> {
        let [head, life, low, high, echo, pages, patterns, sum] = *registers;
        if head & 0xffff != MAGIC || check(registers) != sum {
            return None;
        }
        Some(Self {
            versions: ((head >> 16) as u8, (head >> 24) as u8),
            who: Identity {
                incarnation: u64::from(low) | u64::from(high) << 32,
                life: life & 0xff_ffff,
            },
            phase: match life >> 24 & 0xf {
                1 => Phase::Waiting,
                2 => Phase::Ready,
                3 => Phase::Closed,
                _ => return None,
            },
            ended: match life >> 28 {
                1 => Ended::LinkLost,
                2 => Ended::PeerGone,
                3 => Ended::Corrupt,
                _ => Ended::None,
            },
            echo,
            pages,
            pattern: patterns as u16,
            found: (patterns >> 16) as u16,
        })
    }
}

fn check(registers: &Registers) -> u32 {
    let rest = registers.iter().take(REGISTERS - 1);
    rest.zip(0..)
        .fold(Check::default(), |check, (register, at)| {
            check.word(at, u64::from(*register))
        })
        .finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn sample() -> Report {
        Report {
            versions: (1, 3),
            who: Identity {
                incarnation: 0x0123_4567_89ab_cdef,
                life: 7,
            },
            phase: Phase::Ready,
            ended: Ended::Corrupt,
            echo: 0x5566_7788,
            pages: 512,
            pattern: 4,
            found: 9,
        }
    }

    #[test]
    fn round_trip_and_blank_sets() {
        assert_eq!(Report::decode(&sample().encode()), Some(sample()));
        assert_eq!(Report::decode(&[0; 8]), None);
        assert_eq!(Report::decode(&[u32::MAX; 8]), None);
    }

    proptest! {
        /// Registers are written one by one: every mixture of two sets is refused.
        #[test]
        fn half_written_sets_are_refused(written in 1usize..8, life in 8u32..1000, incarnation: u64) {
            let old = sample().encode();
            let mut new = sample();
            new.who = Identity { incarnation, life };
            new.found = 10;
            let mut mixed = old;
            mixed[..written].copy_from_slice(&new.encode()[..written]);
            prop_assume!(mixed[..7] != old[..7]);
            prop_assert_eq!(Report::decode(&mixed), None);
        }

        #[test]
        fn anything_may_stand_there(registers: [u32; 8]) {
            let _ = Report::decode(&registers);
        }
    }
}
