//! The check that completes a message on paths which do not keep stores in order.
//!
//! A sum over 64-bit words, each mixed with its position: any change of a single word changes the 64-bit sum, an
//! exchange of two words does too, and the fold to 32 bits lets one in 2^32 of other changes pass. Only xor,
//! multiply, add and shift, no dependency between words: a GPU computes it as easily as a CPU. The mixing step is
//! that of multiply-xorshift hashes (as in MurmurHash3's finaliser); the constants are odd 64-bit fractions of the
//! golden ratio and of the square root of three.

const POSITION: u64 = 0x9e37_79b9_7f4a_7c15;
const MIX: u64 = 0xbb67_ae85_84ca_a73b;

/// An unfinished check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Check(u64);

impl Check {
    /// Adds the word that stands at `position`.
    #[inline(always)]
    #[must_use]
    pub fn word(self, position: u64, word: u64) -> Self {
        Self(self.0.wrapping_add(mix(key(position), word)))
    }

    /// Adds the words of `bytes`, the first at `position`; a last partial word is filled with zeros.
    #[must_use]
    pub fn bytes(self, position: u64, bytes: &[u8]) -> Self {
        let mut key = key(position);
        // Four sums at a time: the multiplications of neighbouring words overlap.
        let mut sums = [self.0, 0, 0, 0];
        let mut blocks = bytes.chunks_exact(32);
        for block in &mut blocks {
            for (sum, word) in sums.iter_mut().zip(block.chunks_exact(8)) {
                *sum = sum.wrapping_add(mix(key, u64::from_le_bytes(word.try_into().unwrap_or([0; 8]))));
                key = key.wrapping_add(POSITION);
            }
        }
        for word in blocks.remainder().chunks(8) {
            let mut padded = [0; 8];
            padded[..word.len()].copy_from_slice(word);
            sums[0] = sums[0].wrapping_add(mix(key, u64::from_le_bytes(padded)));
            key = key.wrapping_add(POSITION);
        }
        Self(sums.into_iter().fold(0, u64::wrapping_add))
    }

    /// The 32-bit check.
    #[inline(always)]
    pub fn finish(self) -> u32 {
        let t = self.0.wrapping_mul(MIX);
        (t ^ (t >> 32)) as u32
    }
}

/// What tells position `position` from the others.
#[inline(always)]
fn key(position: u64) -> u64 {
    position.wrapping_add(1).wrapping_mul(POSITION)
}

/// A permutation of the word, another one for each key.
#[inline(always)]
fn mix(key: u64, word: u64) -> u64 {
    let t = (word ^ key).wrapping_mul(MIX);
    t ^ (t >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn vectors() {
        assert_eq!(Check::default().finish(), 0);
        let abc = Check::default().bytes(0, b"abcdefgh01234567xyz").finish();
        let words = Check::default()
            .word(2, u64::from_le_bytes(*b"xyz\0\0\0\0\0"))
            .word(0, u64::from_le_bytes(*b"abcdefgh"))
            .word(1, u64::from_le_bytes(*b"01234567"))
            .finish();
        assert_eq!(abc, words);
        assert_eq!(abc, 0x76dd_e524);
        assert_eq!(Check::default().word(0, 0).finish(), 0x18f1_d0f4);
    }

    proptest! {
        #[test]
        fn one_changed_word_always_shows_in_the_sum(words: Vec<u64>, at: prop::sample::Index, flip in 1u64..) {
            prop_assume!(!words.is_empty());
            let sum = |w: &[u64]| w.iter().zip(0..).fold(Check::default(), |c, (w, i)| c.word(i, *w)).0;
            let mut other = words.clone();
            other[at.index(words.len())] ^= flip;
            prop_assert_ne!(sum(&words), sum(&other));
        }

        #[test]
        fn exchanged_words_show(a: u64, b: u64, i in 0u64..64, j in 0u64..64) {
            prop_assume!(a != b && i != j);
            let x = Check::default().word(i, a).word(j, b);
            let y = Check::default().word(i, b).word(j, a);
            prop_assert_ne!(x.0, y.0);
        }
    }
}
