//! The line: 64 bytes, eight little-endian 64-bit words, aligned to its size.

/// Bytes in a line. One cache line, one write-combining buffer, one posted write.
pub const LINE_BYTES: usize = 64;
/// 64-bit words in a line.
pub const LINE_WORDS: usize = 8;

/// A line held in local memory, ready to be stored somewhere or copied out from somewhere.
///
/// Words hold the value that a little-endian 64-bit load of the memory gives, on every host.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
#[repr(C, align(64))]
pub struct Line(pub [u64; LINE_WORDS]);

const _: () = assert!(size_of::<Line>() == LINE_BYTES && align_of::<Line>() == LINE_BYTES);

impl Line {
    /// A line of zeros.
    pub const ZERO: Self = Self([0; LINE_WORDS]);

    /// The line whose memory image is `bytes`, followed by zeros.
    ///
    /// Bytes past the 64th are ignored.
    #[inline(always)]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut line = Self::ZERO;
        line.fill_from(bytes);
        line
    }

    /// Overwrites the first `bytes.len()` bytes of the line's memory image, at most 64.
    #[inline(always)]
    pub fn fill_from(&mut self, bytes: &[u8]) {
        let mut words = bytes.chunks_exact(8);
        let mut at = 0;
        for (slot, word) in self.0.iter_mut().zip(&mut words) {
            *slot = u64::from_le_bytes(word.try_into().unwrap_or([0; 8]));
            at += 1;
        }
        let rest = words.remainder();
        if let Some(slot) = self.0.get_mut(at)
            && !rest.is_empty()
        {
            let mut word = slot.to_le_bytes();
            word[..rest.len()].copy_from_slice(rest);
            *slot = u64::from_le_bytes(word);
        }
    }

    /// The line's memory image.
    #[inline]
    pub fn to_bytes(self) -> [u8; LINE_BYTES] {
        let mut bytes = [0; LINE_BYTES];
        for (slot, word) in bytes.chunks_exact_mut(8).zip(self.0) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

impl std::fmt::Debug for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Line[")?;
        for (i, word) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(" ")?;
            }
            write!(f, "{word:016x}")?;
        }
        f.write_str("]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_words_agree_for_every_length() {
        let bytes: Vec<u8> = (1..=64).collect();
        for len in 0..=64 {
            let line = Line::from_bytes(&bytes[..len]);
            let image = line.to_bytes();
            assert_eq!(&image[..len], &bytes[..len]);
            assert!(
                image[len..].iter().all(|b| *b == 0),
                "length {len} wrote past its end"
            );
        }
    }

    #[test]
    fn filling_leaves_the_rest_alone() {
        let mut line = Line([u64::MAX; 8]);
        line.fill_from(&[0; 11]);
        assert_eq!(
            line.0,
            [
                0,
                0xffff_ffff_ff00_0000,
                u64::MAX,
                u64::MAX,
                u64::MAX,
                u64::MAX,
                u64::MAX,
                u64::MAX
            ]
        );
    }

    #[test]
    fn too_many_bytes_are_cut() {
        assert_eq!(Line::from_bytes(&[7; 80]), Line::from_bytes(&[7; 64]));
    }
}
