//! A record: one line that a session stores for the other, sealed for one place and one life of the link.
//!
//! ```text
//! 0..7   payload
//! 7      kind (8 bits) | 0 (24 bits) | check << 32
//! ```
//!
//! The check covers payload, kind, line number and the four numbers that name the life, so a torn, stale, misplaced,
//! blank or scribbled line is no record.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use ntb_mem::line::{LINE_WORDS, Line};

use super::check::Check;

/// Words of payload.
pub(crate) const PAYLOAD: usize = LINE_WORDS - 1;

/// What a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum RecordKind {
    Beat = 1,
    Hello = 2,
    Channel = 3,
}

fn check(direction: u64, at: u64, payload: &[u64; PAYLOAD], kind: u64) -> u32 {
    let body = payload
        .iter()
        .zip(0..)
        .fold(Check::default(), |check, (word, i)| check.word(i, *word));
    body.word(7, kind).word(8, at).word(9, direction).finish()
}

/// The record of `payload` at line `at`; `direction` is [`super::identity::Direction::id`].
pub(crate) fn seal(direction: u64, at: u64, kind: RecordKind, payload: &[u64; PAYLOAD]) -> Line {
    let [a, b, c, d, e, f, g] = *payload;
    let kind = kind as u64;
    let check = check(direction, at, payload, kind);
    Line([a, b, c, d, e, f, g, kind | u64::from(check) << 32])
}

/// The payload, if `line`, read at `at`, is a record of this kind, direction and life.
pub(crate) fn open(direction: u64, at: u64, kind: RecordKind, line: &Line) -> Option<[u64; PAYLOAD]> {
    let [a, b, c, d, e, f, g, last] = line.0;
    let payload = [a, b, c, d, e, f, g];
    let kind = kind as u64;
    let sound = last as u32 == kind as u32 && (last >> 32) as u32 == check(direction, at, &payload, kind);
    sound.then_some(payload)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn only_the_whole_line_in_its_place_and_life_opens(
            payload: [u64; PAYLOAD], direction: u64, at in 0u64..256, word in 0usize..8, flip in 1u64..,
        ) {
            let line = seal(direction, at, RecordKind::Beat, &payload);
            prop_assert_eq!(open(direction, at, RecordKind::Beat, &line), Some(payload));
            prop_assert_eq!(open(direction ^ flip, at, RecordKind::Beat, &line), None);
            prop_assert_eq!(open(direction, at + 1, RecordKind::Beat, &line), None);
            prop_assert_eq!(open(direction, at, RecordKind::Hello, &line), None);
            let mut torn = line;
            torn.0[word] ^= flip;
            prop_assert_eq!(open(direction, at, RecordKind::Beat, &torn), None);
        }
    }

    #[test]
    fn blank_lines_are_no_records() {
        for kind in [RecordKind::Beat, RecordKind::Hello, RecordKind::Channel] {
            assert_eq!(open(5, 0, kind, &Line::ZERO), None);
            assert_eq!(open(5, 0, kind, &Line([u64::MAX; 8])), None);
        }
    }
}
