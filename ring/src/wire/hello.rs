//! The greeting: what both sides compare before channels work. Four records.
//!
//! ```text
//! part 0   0  oldest wire version (8) | newest wire version (8) | order (8: 1 ordered, 2 relaxed) | 0 | process id << 32
//!          1  features that the reader has to understand
//!          2  features that the writer understands
//!          3  layout fingerprint (32) | 0
//!          4  lines of the writer's inbound memory
//!          5  lines of the reader's memory that the writer can reach
//!          6  0
//! part 1   layout items, 32 bits each, 14 places, unused ones 0
//! part 2   node name, bytes 0 to 55
//! part 3   node name, bytes 56 to 63; package version, 48 bytes
//! ```
//!
//! Texts are UTF-8, filled up with zeros. Order is what the writer's stores keep.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use ntb_mem::line::Line;

use super::{
    layout::{HELLO_LINE, HELLO_PARTS, ITEMS},
    line::Order,
    record::{self, PAYLOAD, RecordKind},
};

/// Longest node name in bytes.
pub(crate) const NODE_MAX: usize = 63;
/// Longest package version in bytes.
const PACKAGE_MAX: usize = 48;

/// A greeting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) versions: (u8, u8),
    pub(crate) order: Order,
    pub(crate) pid: u32,
    pub(crate) required: u64,
    pub(crate) understood: u64,
    pub(crate) fingerprint: u32,
    pub(crate) window_lines: u64,
    pub(crate) reach_lines: u64,
    pub(crate) items: [u32; ITEMS],
    /// Cut to [`NODE_MAX`] bytes on the wire.
    pub(crate) node: String,
    pub(crate) package: String,
}

/// The greeting as it lies in memory.
pub(crate) type HelloLines = [Line; HELLO_PARTS as usize];

impl Hello {
    pub(crate) fn encode(&self, direction: u64) -> HelloLines {
        let order = match self.order {
            Order::Ordered => 1,
            Order::Relaxed => 2,
        };
        let numbers = [
            u64::from(self.versions.0)
                | u64::from(self.versions.1) << 8
                | order << 16
                | u64::from(self.pid) << 32,
            self.required,
            self.understood,
            u64::from(self.fingerprint),
            self.window_lines,
            self.reach_lines,
            0,
        ];
        let mut items = [0; PAYLOAD];
        for (word, pair) in items.iter_mut().zip(self.items.chunks(2)) {
            let mut halves = pair.iter();
            let low = halves.next().copied().unwrap_or(0);
            let high = halves.next().copied().unwrap_or(0);
            *word = u64::from(low) | u64::from(high) << 32;
        }
        let mut texts = [0; PAYLOAD * 16];
        put_text(texts.get_mut(..NODE_MAX), &self.node);
        put_text(texts.get_mut(64..), &self.package);
        let (name, rest) = texts.split_at(PAYLOAD * 8);
        let mut at = HELLO_LINE;
        [numbers, items, words(name), words(rest)].map(|payload| {
            let line = record::seal(direction, at, RecordKind::Hello, &payload);
            at += 1;
            line
        })
    }

    /// `None` until every part of the greeting of this life is there.
    pub(crate) fn decode(direction: u64, lines: &HelloLines) -> Option<Self> {
        let mut parts = [[0; PAYLOAD]; HELLO_PARTS as usize];
        for ((part, line), at) in parts.iter_mut().zip(lines).zip(HELLO_LINE..) {
            *part = record::open(direction, at, RecordKind::Hello, line)?;
        }
        let [numbers, packed, name, rest] = parts;
        let [head, required, understood, layout, window_lines, reach_lines, _] = numbers;
        let mut items = [0; ITEMS];
        for (item, i) in items.iter_mut().zip(0..) {
            let word = packed.get(i / 2).copied().unwrap_or(0);
            *item = (word >> (32 * (i % 2))) as u32;
        }
        let mut texts = [0; PAYLOAD * 16];
        for (slot, word) in texts.chunks_exact_mut(8).zip(name.iter().chain(&rest)) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        Some(Self {
            versions: (head as u8, (head >> 8) as u8),
            order: match (head >> 16) as u8 {
                1 => Order::Ordered,
                _ => Order::Relaxed, // what is safe whatever the peer meant
            },
            pid: (head >> 32) as u32,
            required,
            understood,
            fingerprint: layout as u32,
            window_lines,
            reach_lines,
            items,
            node: text(texts.get(..64)),
            package: text(texts.get(64..)),
        })
    }
}

fn put_text(slot: Option<&mut [u8]>, text: &str) {
    let Some(slot) = slot else { return };
    let end = text.floor_char_boundary(slot.len().min(PACKAGE_MAX.max(NODE_MAX)));
    for (to, from) in slot.iter_mut().zip(text.bytes().take(end)) {
        *to = from;
    }
}

/// What a peer says its name is, made fit for a terminal.
fn text(bytes: Option<&[u8]>) -> String {
    let bytes = bytes.unwrap_or(&[]);
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(bytes.get(..end).unwrap_or(&[]))
        .chars()
        .map(|c| {
            if c.is_control() {
                char::REPLACEMENT_CHARACTER
            } else {
                c
            }
        })
        .collect()
}

fn words(bytes: &[u8]) -> [u64; PAYLOAD] {
    let mut out = [0; PAYLOAD];
    for (word, eight) in out.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(eight.try_into().unwrap_or([0; 8]));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::layout::{ITEM_VALUES, fingerprint};

    pub(crate) fn sample() -> Hello {
        Hello {
            versions: (1, 2),
            order: Order::Relaxed,
            pid: 4711,
            required: 0,
            understood: 5,
            fingerprint: fingerprint(&ITEM_VALUES),
            window_lines: 32768,
            reach_lines: 65536,
            items: ITEM_VALUES,
            node: "left".to_owned(),
            package: "0.1.0".to_owned(),
        }
    }

    #[test]
    fn round_trip_and_missing_parts() {
        let lines = sample().encode(9);
        assert_eq!(Hello::decode(9, &lines), Some(sample()));
        assert_eq!(Hello::decode(8, &lines), None);
        for missing in 0..lines.len() {
            let mut torn = lines;
            torn[missing] = Line::ZERO;
            assert_eq!(Hello::decode(9, &torn), None);
            let mut doubled = lines;
            doubled[missing] = lines[(missing + 1) % lines.len()];
            assert_eq!(Hello::decode(9, &doubled), None);
        }
    }

    #[test]
    fn names_are_cut_at_a_character_and_made_printable() {
        let mut hello = sample();
        hello.node = "é".repeat(40);
        hello.package = "v".repeat(80);
        let seen = Hello::decode(1, &hello.encode(1)).unwrap();
        assert_eq!(seen.node, "é".repeat(31));
        assert_eq!(seen.package, "v".repeat(48));
        hello.node = "a\u{1b}[2Jb".to_owned();
        assert_eq!(Hello::decode(1, &hello.encode(1)).unwrap().node, "a\u{fffd}[2Jb");
    }
}
