//! What `ntb-ping` sends: a header where the size allows one, then bytes that follow from the sequence number.
//!
//! ```text
//! word 0   sequence                         all words little-endian
//! word 1   stamp: the sender's clock in nanoseconds, echoed as it is
//! word 2   magic u32 << 32 | kind
//! word 3.. data: pattern of the sequence;   control: operation, then its values
//! ```
//!
//! Messages below [`HEADER_BYTES`] are data without a header: bytes of the pattern alone, their sequence that of their
//! arrival.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

/// Bytes of the header; the smallest message that has one.
pub const HEADER_BYTES: usize = 24;
/// Bytes of a control message.
pub const CONTROL_BYTES: usize = 96;
const CONTROL_WORDS: usize = CONTROL_BYTES / 8;
const MAGIC: u64 = 0x4e50_4731 << 32; // "NPG1"

/// What a message is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// To be sent back.
    Echo,
    /// To be counted.
    Stream,
    /// Agreement between the two ends.
    Control,
}

impl Kind {
    fn code(self) -> u64 {
        match self {
            Self::Echo => 1,
            Self::Stream => 2,
            Self::Control => 3,
        }
    }
}

/// A header that makes sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Sequence of the message.
    pub seq: u64,
    /// The sender's clock in nanoseconds.
    pub stamp: u64,
    /// What it is for.
    pub kind: Kind,
}

/// Word `index` of the pattern of message `seq`.
#[inline(always)]
fn pattern(seq: u64, index: u64) -> u64 {
    // Odd multipliers spread both numbers over all bits; the rotation makes words of neighbouring messages unlike.
    (seq.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index.wrapping_mul(0xc2b2_ae3d_27d4_eb4f))
        .rotate_left(29)
        .wrapping_add(index)
}

/// Fills a message. `stamp` is written by [`set_stamp`], so that it can be taken last.
#[inline]
pub fn fill(message: &mut [u8], seq: u64, kind: Kind) {
    let body = match message.split_first_chunk_mut::<HEADER_BYTES>() {
        Some((header, body)) => {
            let (words, _) = header.as_chunks_mut::<8>();
            for (slot, word) in words.iter_mut().zip([seq, 0, MAGIC | kind.code()]) {
                *slot = word.to_le_bytes();
            }
            body
        }
        None => message,
    };
    let (words, rest) = body.as_chunks_mut::<8>();
    let mut index = 0;
    for slot in words {
        *slot = pattern(seq, index).to_le_bytes();
        index += 1;
    }
    for (slot, byte) in rest.iter_mut().zip(pattern(seq, index).to_le_bytes()) {
        *slot = byte;
    }
}

/// Writes the stamp into a message that has a header.
#[inline(always)]
pub fn set_stamp(message: &mut [u8], stamp: u64) {
    if message.len() >= HEADER_BYTES
        && let Some(slot) = message.get_mut(8..16)
    {
        slot.copy_from_slice(&stamp.to_le_bytes());
    }
}

/// The header of a message; `None` when it has none or one that makes no sense.
#[inline]
pub fn header(message: &[u8]) -> Option<Header> {
    let header = message.first_chunk::<HEADER_BYTES>()?;
    let (words, _) = header.as_chunks::<8>();
    let &[seq, stamp, last] = words else { return None };
    let kind = match u64::from_le_bytes(last) ^ MAGIC {
        1 => Kind::Echo,
        2 => Kind::Stream,
        3 => Kind::Control,
        _ => return None,
    };
    Some(Header {
        seq: u64::from_le_bytes(seq),
        stamp: u64::from_le_bytes(stamp),
        kind,
    })
}

/// True when all bytes behind the header (all bytes, where there is none) are those of message `seq`.
#[inline]
pub fn verify(message: &[u8], seq: u64) -> bool {
    let body = message.get(HEADER_BYTES..).unwrap_or(message);
    let (words, rest) = body.as_chunks::<8>();
    let mut different = 0;
    let mut index = 0;
    for word in words {
        different |= u64::from_le_bytes(*word) ^ pattern(seq, index);
        index += 1;
    }
    let last = pattern(seq, index).to_le_bytes();
    different == 0 && rest.iter().zip(last).all(|(a, b)| *a == b)
}

/// What the two ends tell each other beside the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// Client: who are you. `cpu` is the processor the far end is asked to run on.
    Hello {
        /// Processor asked for.
        cpu: Option<u32>,
    },
    /// Server: this is who I am.
    Welcome {
        /// Its process id.
        pid: u32,
        /// Processor its thread is pinned to.
        cpu: Option<u32>,
        /// Errors of pinning: the kernel's number, 0 for none.
        pin_errno: u32,
        /// Its receiving thread sleeps while it waits, and needs to be rung.
        sleeps: bool,
    },
    /// Client: messages of `size` bytes follow, the first numbered `first`. Stay awake, count from zero.
    Start {
        /// Bytes of a message.
        size: u64,
        /// Sequence of the first.
        first: u64,
        /// What to do with those that have no header.
        kind: Kind,
    },
    /// Client: that was all.
    End,
    /// Server: what came since the start.
    Report(Counted),
}

/// What the far end counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Messages that came for the first time.
    pub received: u64,
    /// Messages that had come before.
    pub duplicated: u64,
    /// Messages that came after later ones.
    pub out_of_order: u64,
    /// Messages whose bytes were not those sent.
    pub corrupt: u64,
    /// From the first to the last of them, in nanoseconds of the far end's clock.
    pub span_ns: u64,
}

impl Control {
    /// Encodes it.
    pub fn encode(self) -> [u8; CONTROL_BYTES] {
        let cpu = |c: Option<u32>| c.map_or(u64::MAX, u64::from);
        let values: [u64; 6] = match self {
            Self::Hello { cpu: wish } => [1, cpu(wish), 0, 0, 0, 0],
            Self::Welcome {
                pid,
                cpu: at,
                pin_errno,
                sleeps,
            } => [2, pid.into(), cpu(at), pin_errno.into(), sleeps.into(), 0],
            Self::Start { size, first, kind } => [3, size, first, kind.code(), 0, 0],
            Self::End => [4, 0, 0, 0, 0, 0],
            Self::Report(c) => [5, c.received, c.duplicated, c.out_of_order, c.corrupt, c.span_ns],
        };
        let mut out = [0; CONTROL_BYTES];
        fill(&mut out, 0, Kind::Control);
        if let Some(body) = out.get_mut(HEADER_BYTES..) {
            let (words, _) = body.as_chunks_mut::<8>();
            let all = values.into_iter().chain(std::iter::repeat(0));
            for (slot, value) in words.iter_mut().zip(all) {
                *slot = value.to_le_bytes();
            }
        }
        out
    }

    /// Decodes one; `None` for what is none.
    pub fn decode(message: &[u8]) -> Option<Self> {
        let message: &[u8; CONTROL_BYTES] = message.try_into().ok()?;
        if header(message)?.kind != Kind::Control {
            return None;
        }
        let (words, _) = message.as_chunks::<8>();
        let words: &[[u8; 8]; CONTROL_WORDS] = words.try_into().ok()?;
        let [_, _, _, op, a, b, c, d, e, ..] = words.map(u64::from_le_bytes);
        let cpu = |n| u32::try_from(n).ok();
        Some(match op {
            1 => Self::Hello { cpu: cpu(a) },
            2 => Self::Welcome {
                pid: u32::try_from(a).ok()?,
                cpu: cpu(b),
                pin_errno: u32::try_from(c).ok()?,
                sleeps: d != 0,
            },
            3 => Self::Start {
                size: a,
                first: b,
                kind: match c {
                    1 => Kind::Echo,
                    2 => Kind::Stream,
                    _ => return None,
                },
            },
            4 => Self::End,
            5 => Self::Report(Counted {
                received: a,
                duplicated: b,
                out_of_order: c,
                corrupt: d,
                span_ns: e,
            }),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_is_verified_and_every_bit_counts() {
        for size in (1..200).chain([4096, 4097]) {
            let mut m = vec![0; size];
            fill(&mut m, 77, Kind::Echo);
            set_stamp(&mut m, 5);
            assert!(verify(&m, 77));
            assert_eq!(header(&m).is_some(), size >= HEADER_BYTES);
            if let Some(h) = header(&m) {
                assert_eq!((h.seq, h.stamp, h.kind), (77, 5, Kind::Echo));
            }
            let from = if size < HEADER_BYTES { 0 } else { HEADER_BYTES };
            for at in from..size {
                m[at] ^= 1 << (at % 8);
                assert!(!verify(&m, 77), "byte {at} of {size}");
                m[at] ^= 1 << (at % 8);
            }
            assert!(size == HEADER_BYTES || !verify(&m, 78));
        }
    }

    #[test]
    fn control_messages_come_back_as_they_were() {
        let counted = Counted {
            received: 1,
            duplicated: 2,
            out_of_order: 3,
            corrupt: 4,
            span_ns: u64::MAX,
        };
        for c in [
            Control::Hello { cpu: None },
            Control::Hello { cpu: Some(7) },
            Control::Welcome {
                pid: 9,
                cpu: Some(0),
                pin_errno: 22,
                sleeps: true,
            },
            Control::Start {
                size: 48,
                first: u64::MAX,
                kind: Kind::Stream,
            },
            Control::End,
            Control::Report(counted),
        ] {
            assert_eq!(Control::decode(&c.encode()), Some(c));
        }
    }

    #[test]
    fn anything_may_arrive() {
        let good = Control::End.encode();
        for at in 0..CONTROL_BYTES {
            for bit in 0..8 {
                let mut m = good;
                m[at] ^= 1 << bit;
                let _ = Control::decode(&m);
            }
            assert_eq!(Control::decode(&good[..at]), None);
        }
        assert_eq!(header(&[0xff; 64]), None);
        assert_eq!(header(&[0; 64]), None);
    }
}
