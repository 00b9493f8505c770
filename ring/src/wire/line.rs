//! Lines of a ring: encoding, and decoding of what may be anything.
//!
//! ```text
//! word      Small                  Bare                   Long, Packed
//! 0..6      payload, zero filled   payload                word 0: size u32 | count u32 << 32
//!                                                         words 1..6: payload where it fits (40 bytes)
//! 6         type u32 | guard u32   payload                type u32 | guard u32
//! 7         mark                   mark                   mark
//! ```
//!
//! Bytes of Long and Packed that do not fit in the line lie, all of them, from the next line of the ring on. On
//! relaxed links the check stands in the guard's place and covers every word of the line but itself (positions 0 to
//! 7, type alone at 6), then the payload words of the lines that follow (from position 8).

use ntb_mem::line::Line;

use super::{
    check::Check,
    mark::{IDENTITY_MASK, Kind, LaneKey, kind_and_len, mark},
};

/// Largest message of a [`Kind::Small`] line, in bytes.
pub const SMALL_MAX: usize = 48;
/// Largest message of a [`Kind::Bare`] line, in bytes.
pub const BARE_MAX: usize = 56;
/// Bytes that a [`Kind::Long`] or [`Kind::Packed`] line carries itself when all of them fit.
pub const INLINE_MAX: usize = 40;

/// What makes a message complete on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// A line's last word becomes visible after its others, and a line after those that a barrier separates from it.
    Ordered,
    /// Nothing is promised within or between lines: the check decides.
    Relaxed,
}

/// The head of a message or of a run of messages: what the completing line says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) kind: Kind,
    /// The application's type.
    pub(crate) message_type: u32,
    /// Bytes of each message.
    pub(crate) size: u32,
    /// Messages, at least 1.
    pub(crate) count: u32,
    /// Lines after this one that belong to it.
    pub(crate) extra_lines: u64,
}

/// What decoding a line gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decoded {
    /// Not the line waited for: nothing has arrived.
    Absent,
    /// The mark is the one waited for, the rest makes no sense: still arriving, or corrupt.
    Unsound(&'static str),
    /// A head whose own line is sound. On relaxed links the check is still to be verified.
    Sound(Head),
}

/// Lines that `bytes` of payload take beside the completing one.
#[inline(always)]
pub(crate) fn extra_lines(kind: Kind, bytes: u64) -> u64 {
    match kind {
        Kind::Small | Kind::Bare => 0,
        _ if bytes <= INLINE_MAX as u64 => 0,
        _ => bytes.div_ceil(64),
    }
}

/// A single-line message; `bytes` has been found to fit `kind`.
#[inline(always)]
pub(crate) fn encode_single(
    key: LaneKey,
    order: Order,
    kind: Kind,
    seq: u64,
    message_type: u32,
    bytes: &[u8],
) -> Line {
    let mut line = Line::from_bytes(bytes);
    line.0[7] = mark(key, kind, seq, bytes.len() as u8);
    if kind == Kind::Small {
        seal(&mut line, key, order, message_type, Check::default());
    }
    line
}

/// The line that completes `count` messages of `size` bytes; `tail` is the check over the lines that follow.
#[inline]
#[allow(clippy::too_many_arguments, reason = "the fields of a line, each once")]
pub(crate) fn encode_head(
    key: LaneKey,
    order: Order,
    kind: Kind,
    seq: u64,
    message_type: u32,
    (size, count): (u32, u32),
    inline: &[u8],
    tail: Check,
) -> Line {
    let mut line = Line::ZERO;
    line.0[0] = u64::from(size) | u64::from(count) << 32;
    let payload = Line::from_bytes(inline);
    line.0[1..6].copy_from_slice(&payload.0[..5]);
    line.0[7] = mark(key, kind, seq, 0);
    seal(&mut line, key, order, message_type, tail);
    line
}

#[inline(always)]
fn seal(line: &mut Line, key: LaneKey, order: Order, message_type: u32, tail: Check) {
    let seal = match order {
        Order::Ordered => key.guard,
        Order::Relaxed => line_check(line, message_type, tail),
    };
    line.0[6] = u64::from(message_type) | u64::from(seal) << 32;
}

/// The check of a line whose payload lines sum to `tail`.
#[inline(always)]
pub(crate) fn line_check(line: &Line, message_type: u32, tail: Check) -> u32 {
    let mut check = tail.word(6, u64::from(message_type)).word(7, line.0[7]);
    for i in 0..6 {
        check = check.word(i, line.0[i as usize]);
    }
    check.finish()
}

/// True when the check of a line that carries a message whole holds.
#[inline(always)]
pub(crate) fn checks(line: &Line, message_type: u32) -> bool {
    line_check(line, message_type, Check::default()) == (line.0[6] >> 32) as u32
}

/// True when `mark` is that of message `seq` in this life of the lane.
#[inline(always)]
pub(crate) fn is_due(mark: u64, key: LaneKey, seq: u64) -> bool {
    mark & IDENTITY_MASK == key.identity(seq)
}

/// Type and length of the message that a line whose mark [`is_due`] carries whole; `None` for everything else, sound or
/// not. On relaxed links the check is still to be verified.
#[inline(always)]
pub(crate) fn single(line: &Line, key: LaneKey, order: Order) -> Option<(u32, usize)> {
    let (kind, len) = kind_and_len(line.0[7]);
    let len = usize::from(len);
    if kind == Kind::Small as u8 {
        let whole = len <= SMALL_MAX && (order == Order::Relaxed || (line.0[6] >> 32) as u32 == key.guard);
        return whole.then_some((line.0[6] as u32, len));
    }
    let whole = kind == Kind::Bare as u8 && order == Order::Ordered && len > SMALL_MAX && len <= BARE_MAX;
    whole.then_some((0, len))
}

/// Type and length of message `seq` when `line` is the [`Kind::Long`] one that completes it on an ordered link; the length
/// may be any.
#[inline(always)]
pub(crate) fn long(line: &Line, key: LaneKey, seq: u64) -> Option<(u32, usize)> {
    let sound = line.0[7] == mark(key, Kind::Long, seq, 0)
        && (line.0[6] >> 32) as u32 == key.guard
        && line.0[0] >> 32 == 1;
    sound.then_some((line.0[6] as u32, line.0[0] as u32 as usize))
}

/// Decodes a line whose mark [`is_due`]; every field is checked against the lane's limits.
pub(crate) fn decode(line: &Line, key: LaneKey, order: Order, ring_lines: u64, max_message: u64) -> Decoded {
    let (kind, len) = kind_and_len(line.0[7]);
    let Some(kind) = Kind::decode(kind) else {
        return Decoded::Unsound("unknown line kind");
    };
    if let Some((message_type, len)) = single(line, key, order) {
        return Decoded::Sound(Head {
            kind,
            message_type,
            size: len as u32,
            count: 1,
            extra_lines: 0,
        });
    }
    if kind == Kind::Bare {
        return Decoded::Unsound("bad length of a bare line");
    }
    if order == Order::Ordered && (line.0[6] >> 32) as u32 != key.guard {
        return Decoded::Absent; // payload of an earlier lap that looks like a mark
    }
    if kind == Kind::Small {
        return Decoded::Unsound("bad length of a small line");
    }
    let message_type = line.0[6] as u32;
    let (size, count) = (line.0[0] as u32, (line.0[0] >> 32) as u32);
    let bytes = u64::from(size) * u64::from(count); // at most 2^64 - 2^33 + 1
    let extra = extra_lines(kind, bytes);
    let limits = len == 0
        && u64::from(size) <= max_message
        && extra < ring_lines
        && match kind {
            Kind::Packed => count >= 1 && size >= 1,
            _ => count == 1,
        };
    if !limits {
        return Decoded::Unsound("size or count beyond the ring");
    }
    Decoded::Sound(Head {
        kind,
        message_type,
        size,
        count,
        extra_lines: extra,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEY: LaneKey = LaneKey::new(0x1234, 0xffff_fff0, 0xdead_beef);

    #[test]
    fn small_lines_of_every_length_round_trip() {
        for order in [Order::Ordered, Order::Relaxed] {
            for len in 0..=SMALL_MAX {
                let payload: Vec<u8> = (0..len as u8).collect();
                let line = encode_single(KEY, order, Kind::Small, 40, 9, &payload);
                assert!(is_due(line.0[7], KEY, 40));
                assert!(!is_due(line.0[7], KEY, 41));
                let Decoded::Sound(head) = decode(&line, KEY, order, 256, 8192) else {
                    panic!("{len}")
                };
                assert_eq!((head.size as usize, head.message_type, head.count), (len, 9, 1));
                assert_eq!(&line.to_bytes()[..len], &payload[..]);
                if order == Order::Relaxed {
                    assert_eq!(line_check(&line, 9, Check::default()), (line.0[6] >> 32) as u32);
                }
            }
        }
    }

    #[test]
    fn a_payload_line_that_forges_the_mark_is_absent_without_the_guard() {
        let mut line = Line([0x55; 8]);
        line.0[7] = mark(KEY, Kind::Small, 3, 48);
        assert_eq!(decode(&line, KEY, Order::Ordered, 256, 8192), Decoded::Absent);
    }

    proptest! {
        /// Whatever a peer stores, decoding gives a head inside the lane's limits or none.
        #[test]
        fn decoding_never_exceeds_the_ring(
            words: [u64; 8],
            near in prop::option::of((0u64..6000, 0u64..4)),
            kind in prop_oneof![3u8..5, 0u8..32],
            len in prop_oneof![Just(0u8), any::<u8>()],
            ordered: bool,
        ) {
            let order = if ordered { Order::Ordered } else { Order::Relaxed };
            let mut line = Line(words);
            if let Some((size, count)) = near {
                line.0[0] = size | count << 32; // at the limits, where random words hardly ever are
            }
            line.0[7] = KEY.identity(5) | u64::from(kind) << 48 | u64::from(len) << 56;
            line.0[6] = line.0[6] as u32 as u64 | u64::from(KEY.guard) << 32;
            if let Decoded::Sound(h) = decode(&line, KEY, order, 64, 4032) {
                prop_assert!(h.count >= 1);
                prop_assert!(u64::from(h.size) <= 4032);
                prop_assert!(h.extra_lines < 64);
                let bytes = u64::from(h.size) * u64::from(h.count);
                prop_assert!(bytes <= 56 || bytes <= h.extra_lines * 64);
            }
        }
    }
}
