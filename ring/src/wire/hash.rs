//! A 64-bit hash of a few words: identities, patterns and fingerprints are derived with it.
//!
//! The same multiply-xorshift step as in [`super::check`], chained, so that order matters. Not a secret: it tells lives
//! apart that differ by accident, and keeps nobody out.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

const MULTIPLY: u64 = 0xbb67_ae85_84ca_a73b;
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// Adds `word` to the hash `state`; a bijection in each argument.
#[inline]
pub(crate) fn step(state: u64, word: u64) -> u64 {
    let mut t = (state ^ word).wrapping_mul(MULTIPLY);
    t ^= t >> 32;
    t = t.wrapping_mul(SPREAD);
    t ^ (t >> 29)
}

/// The hash of `words`, started from `domain` so that different uses never share values.
pub(crate) fn hash(domain: u64, words: &[u64]) -> u64 {
    words
        .iter()
        .fold(step(SPREAD, domain), |state, word| step(state, *word))
}

/// Upper and lower half of `wide` folded, never 0 and never all ones: for fields in which those mean "nothing".
pub(crate) fn fold32(wide: u64) -> u32 {
    match (wide ^ (wide >> 32)) as u32 {
        0 => 1,
        u32::MAX => 2,
        folded => folded,
    }
}
