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

    /// The line of words 0 to 6 and word 7.
    #[inline(always)]
    pub const fn from_parts(body: [u64; LINE_WORDS - 1], last: u64) -> Self {
        let [a, b, c, d, e, f, g] = body;
        Self([a, b, c, d, e, f, g, last])
    }

    /// The line whose memory image is `bytes`, followed by zeros.
    ///
    /// Bytes past the 64th are ignored.
    // Word by word in registers, spelt out: as a loop it becomes a library copy through the stack, whose wide loads wait
    // for the narrow stores before them.
    #[inline(always)]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut line = Self::ZERO;
        let _ = line.take_word::<0>(bytes)
            && line.take_word::<1>(bytes)
            && line.take_word::<2>(bytes)
            && line.take_word::<3>(bytes)
            && line.take_word::<4>(bytes)
            && line.take_word::<5>(bytes)
            && line.take_word::<6>(bytes)
            && line.take_word::<7>(bytes);
        line
    }

    /// Sets word `I` from its place in `bytes`; false when they end in it.
    #[inline(always)]
    fn take_word<const I: usize>(&mut self, bytes: &[u8]) -> bool {
        if let Some(word) = bytes.get(8 * I..).and_then(<[u8]>::first_chunk) {
            self.0[I] = u64::from_le_bytes(*word);
            return true;
        }
        if let Some(rest @ [_, ..]) = bytes.get(8 * I..) {
            self.0[I] = last_word(rest);
        }
        false
    }

    /// Copies the first `dst.len()` bytes of the line's memory image out, at most 64.
    #[inline(always)]
    pub fn copy_to(&self, dst: &mut [u8]) {
        let _ = self.give_word::<0>(dst)
            && self.give_word::<1>(dst)
            && self.give_word::<2>(dst)
            && self.give_word::<3>(dst)
            && self.give_word::<4>(dst)
            && self.give_word::<5>(dst)
            && self.give_word::<6>(dst)
            && self.give_word::<7>(dst);
    }

    /// Copies word `I` to its place in `dst`; false when it ends in it.
    #[inline(always)]
    fn give_word<const I: usize>(&self, dst: &mut [u8]) -> bool {
        let word = self.0[I].to_le_bytes();
        let Some(rest) = dst.get_mut(8 * I..) else {
            return false;
        };
        if let Some(slot) = rest.first_chunk_mut() {
            *slot = word;
            return true;
        }
        if !rest.is_empty() {
            give_last(rest, word);
        }
        false
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

/// The word that begins with `bytes`, fewer than 8. Out of line: most messages are whole words.
#[inline(never)]
fn last_word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    for (slot, byte) in word.iter_mut().zip(bytes) {
        *slot = *byte;
    }
    u64::from_le_bytes(word)
}

#[inline(never)]
fn give_last(dst: &mut [u8], word: [u8; 8]) {
    for (slot, byte) in dst.iter_mut().zip(word) {
        *slot = byte;
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
    fn copying_out_takes_every_length_and_no_byte_more() {
        let bytes: Vec<u8> = (1..=64).collect();
        let line = Line::from_bytes(&bytes);
        for len in 0..=64 {
            let mut out = [0xee; 80];
            line.copy_to(&mut out[..len]);
            assert_eq!(out[..len], bytes[..len]);
            assert_eq!(out[len..], [0xee; 80][len..]);
        }
        let mut out = [0xee; 80];
        line.copy_to(&mut out);
        assert_eq!(out[64..], [0xee; 16]);
    }

    #[test]
    fn too_many_bytes_are_cut() {
        assert_eq!(Line::from_bytes(&[7; 80]), Line::from_bytes(&[7; 64]));
    }
}
