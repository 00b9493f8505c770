//! What travels on an authenticated stream: frames that the far side applies to its memory, registers and doorbells.
//! `docs/wire.md` has the bytes. Nothing here does I/O.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use ntb_mem::line::{LINE_BYTES, Line};

use crate::link::{REGISTERS, Registers};

/// Version of the frames, in the greeting.
pub const VERSION: u8 = 1;
/// Bytes before the payload of a frame.
pub const HEADER_BYTES: usize = 16;
/// Longest payload of a frame in bytes. A multiple of a line: longer runs are split.
pub const PAYLOAD_MAX: usize = 1 << 16;

const LINE: u8 = 1;
const BYTES: u8 = 2;
const REGISTERS_SET: u8 = 3;
const RING: u8 = 4;

/// A frame as it was taken from a stream. Nothing in it has been checked against anybody's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// Store this line there, its last word last.
    Line(u64, Line),
    /// Store these bytes, from the start of a line on, the last line filled up with zeros. At least one.
    Bytes(u64, &'a [u8]),
    /// Write the registers.
    Registers(Registers),
    /// Ring a doorbell.
    Ring(u32),
}

/// Why bytes are no frame. The stream is of no use any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadFrame {
    /// A kind that there is not.
    #[error("a frame of the unknown kind {0}")]
    Kind(u8),
    /// A length that frames of this kind do not have.
    #[error("a frame of kind {kind} with {length} bytes")]
    Length {
        /// Its kind.
        kind: u8,
        /// What it says its payload has.
        length: u32,
    },
}

fn header(out: &mut Vec<u8>, kind: u8, length: u32, at: u64) {
    let mut bytes = [0; HEADER_BYTES];
    let [k, _, _, _, rest @ ..] = &mut bytes;
    *k = kind;
    let (l, a) = rest.split_at_mut(4);
    l.copy_from_slice(&length.to_le_bytes());
    a.copy_from_slice(&at.to_le_bytes());
    out.extend_from_slice(&bytes);
}

/// Appends a frame that stores a line.
#[inline]
pub fn put_line(out: &mut Vec<u8>, line: u64, content: &Line) {
    header(out, LINE, LINE_BYTES as u32, line);
    out.extend_from_slice(&content.to_bytes());
}

/// Appends the frame that stores `bytes`, [`PAYLOAD_MAX`] of them at most.
pub fn put_bytes(out: &mut Vec<u8>, line: u64, bytes: &[u8]) {
    debug_assert!((1..=PAYLOAD_MAX).contains(&bytes.len()));
    header(out, BYTES, bytes.len() as u32, line);
    out.extend_from_slice(bytes);
}

/// Appends a frame that writes the registers.
pub fn put_registers(out: &mut Vec<u8>, registers: &Registers) {
    header(out, REGISTERS_SET, 4 * REGISTERS as u32, 0);
    for register in registers {
        out.extend_from_slice(&register.to_le_bytes());
    }
}

/// Appends a frame that rings a doorbell.
pub fn put_ring(out: &mut Vec<u8>, doorbell: u32) {
    header(out, RING, 0, u64::from(doorbell));
}

/// The frame at the start of `bytes` and how long it is; `None` when it is not all there.
#[inline]
pub fn parse(bytes: &[u8]) -> Result<Option<(Frame<'_>, usize)>, BadFrame> {
    let Some((head, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        return Ok(None);
    };
    let [kind, _, _, _, l0, l1, l2, l3, at @ ..] = *head;
    let length = u32::from_le_bytes([l0, l1, l2, l3]);
    let at = u64::from_le_bytes(at);
    let right = match kind {
        LINE => length == LINE_BYTES as u32,
        BYTES => (1..=PAYLOAD_MAX as u32).contains(&length),
        REGISTERS_SET => length == 4 * REGISTERS as u32,
        RING => length == 0,
        _ => return Err(BadFrame::Kind(kind)),
    };
    if !right {
        return Err(BadFrame::Length { kind, length });
    }
    let Some(payload) = rest.get(..length as usize) else {
        return Ok(None);
    };
    let frame = match kind {
        LINE => Frame::Line(at, Line::from_bytes(payload)),
        BYTES => Frame::Bytes(at, payload),
        REGISTERS_SET => {
            let mut registers = [0; REGISTERS];
            for (register, bytes) in registers.iter_mut().zip(payload.chunks_exact(4)) {
                *register = u32::from_le_bytes(bytes.try_into().unwrap_or_default());
            }
            Frame::Registers(registers)
        }
        // Numbers that there are not ring nothing, however large.
        _ => Frame::Ring(u32::try_from(at).unwrap_or(u32::MAX)),
    };
    Ok(Some((frame, HEADER_BYTES + length as usize)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> (Vec<u8>, Vec<usize>) {
        let mut out = Vec::new();
        let mut ends = Vec::new();
        put_line(&mut out, 7, &Line([1, 2, 3, 4, 5, 6, 7, u64::MAX]));
        ends.push(out.len());
        put_bytes(&mut out, u64::MAX, b"xyz");
        ends.push(out.len());
        put_registers(&mut out, &std::array::from_fn(|i| i as u32 * 3));
        ends.push(out.len());
        put_ring(&mut out, 15);
        ends.push(out.len());
        put_bytes(&mut out, 0, &vec![9; PAYLOAD_MAX]);
        ends.push(out.len());
        (out, ends)
    }

    #[test]
    fn frames_come_out_as_they_went_in_wherever_the_stream_is_cut() {
        let (bytes, ends) = all();
        let mut at = 0;
        for (i, end) in ends.iter().enumerate() {
            for cut in [at, at + 1, at + HEADER_BYTES - 1, *end - 1] {
                assert_eq!(parse(&bytes[at..cut]), Ok(None));
            }
            let (frame, length) = parse(&bytes[at..]).unwrap().unwrap();
            assert_eq!(at + length, *end);
            match (i, frame) {
                (0, Frame::Line(7, line)) => assert_eq!(line.0[7], u64::MAX),
                (1, Frame::Bytes(u64::MAX, b"xyz")) | (3, Frame::Ring(15)) => {}
                (2, Frame::Registers(r)) => assert_eq!(r[7], 21),
                (4, Frame::Bytes(0, long)) => {
                    assert!(long.len() == PAYLOAD_MAX && long[PAYLOAD_MAX - 1] == 9);
                }
                (_, other) => panic!("{other:?}"),
            }
            at = *end;
        }
    }

    #[test]
    fn what_is_no_frame_is_refused_before_its_payload_is_waited_for() {
        for (kind, length) in [(0, 64), (5, 0), (255, 0)] {
            let mut out = Vec::new();
            header(&mut out, kind, length, 0);
            assert_eq!(parse(&out), Err(BadFrame::Kind(kind)));
        }
        let bad = [
            (1, 63),
            (1, 65),
            (2, 0),
            (2, PAYLOAD_MAX as u32 + 1),
            (2, u32::MAX),
            (3, 31),
            (4, 1),
        ];
        for (kind, length) in bad {
            let mut out = Vec::new();
            header(&mut out, kind, length, 0);
            assert_eq!(parse(&out), Err(BadFrame::Length { kind, length }));
        }
    }
}
