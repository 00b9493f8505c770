//! Patterns that prove a direction of the data path: derived from the life of the link and a number, different in
//! every line.
//!
//! Word `i` of the pattern in line `n` is `step(step(seed, n), i)` with `seed = hash("pattern", [direction, number])`; the low 16
//! bits of word 0 are the number itself, so that the reader needs nothing but its own memory. Lines written: the first
//! and the last of channel memory, and [`RANDOM_LINES`] between them at places derived from the seed.

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

use super::{hash, layout::CHANNELS_FIRST_LINE};

const DOMAIN: u64 = 0x7061_7474_6572_6e00;
/// Lines at random places.
pub const RANDOM_LINES: u64 = 6;

/// Pattern `number` of one direction of one life.
#[derive(Clone, Copy, Debug)]
pub struct Pattern {
    seed: u64,
    number: u16,
}

impl Pattern {
    /// `number` is neither 0 nor 0xffff.
    pub fn new(direction: u64, number: u16) -> Self {
        Self {
            seed: hash::hash(DOMAIN, &[direction, u64::from(number)]),
            number,
        }
    }

    /// The lines to look at in a memory of `lines` lines, which are more than [`CHANNELS_FIRST_LINE`].
    pub(crate) fn places(self, lines: u64) -> impl Iterator<Item = u64> {
        self.places_from(CHANNELS_FIRST_LINE, lines)
    }

    /// The lines to look at from line `first` on in a memory of `lines` lines: the first, the last, and some between.
    pub fn places_from(self, first: u64, lines: u64) -> impl Iterator<Item = u64> {
        let span = lines.saturating_sub(first).max(1);
        let random = (0..RANDOM_LINES).map(move |i| hash::step(self.seed, !i) % span);
        [0, span - 1].into_iter().chain(random).map(move |at| first + at)
    }

    /// What line `at` holds.
    pub fn line(self, at: u64) -> Line {
        let base = hash::step(self.seed, at);
        let mut words = [0; LINE_WORDS];
        for (word, i) in words.iter_mut().zip(0..) {
            *word = hash::step(base, i);
        }
        let [first, ..] = &mut words;
        *first = *first & !0xffff | u64::from(self.number);
        Line(words)
    }

    /// The number that a pattern in the first line of channel memory claims to have; `None` for blank memory.
    pub fn claimed(first_word: u64) -> Option<u16> {
        let number = first_word as u16;
        (number != 0 && number != u16::MAX).then_some(number)
    }
}

/// The number after `number`: 1 to 0xfffe, round and round.
pub fn next_number(number: u16) -> u16 {
    if number >= 0xfffe { 1 } else { number + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_inside_and_the_content_names_its_place() {
        for lines in [320, 321, 4096, 1 << 30] {
            let p = Pattern::new(7, 3);
            let places: Vec<u64> = p.places(lines).collect();
            assert_eq!(places.len() as u64, 2 + RANDOM_LINES);
            assert_eq!(places[..2], [CHANNELS_FIRST_LINE, lines - 1]);
            assert!(places.iter().all(|at| (CHANNELS_FIRST_LINE..lines).contains(at)));
        }
        let (a, b) = (Pattern::new(7, 3), Pattern::new(8, 3));
        assert_ne!(a.line(300), a.line(301));
        assert_ne!(a.line(300), b.line(300));
        assert_eq!(Pattern::claimed(a.line(256).0[0]), Some(3));
        assert_eq!(Pattern::claimed(0), None);
        assert_eq!(Pattern::claimed(u64::MAX), None);
    }

    #[test]
    fn numbers_avoid_blank_values() {
        assert_eq!(next_number(0), 1);
        assert_eq!(next_number(0xfffd), 0xfffe);
        assert_eq!(next_number(0xfffe), 1);
        assert_eq!(next_number(0xffff), 1);
    }
}
