//! Where things lie in the inbound memory, and the versions and features both sides compare.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use super::{hash, page};

/// Oldest wire version that this build speaks.
pub const WIRE_VERSION_MIN: u8 = 1;
/// Newest wire version that this build speaks. Separate from the version of the package.
pub const WIRE_VERSION_MAX: u8 = 1;

/// Features that a peer has to understand to talk to this build.
pub const FEATURES_REQUIRED: u64 = 0;
/// Features that this build understands.
pub const FEATURES_UNDERSTOOD: u64 = 0;

/// Line of the beat.
pub const BEAT_LINE: u64 = 0;
/// First line of the greeting.
pub const HELLO_LINE: u64 = 1;
/// Lines of the greeting.
pub const HELLO_PARTS: u64 = 4;
/// First line of the channel table: one line a channel.
pub const TABLE_LINE: u64 = 64;
/// Channels that fit in the table.
pub const MAX_CHANNELS: usize = 64;
/// First line of channel memory; everything before belongs to the session.
pub const CHANNELS_FIRST_LINE: u64 = 256;

const _: () = assert!(HELLO_LINE + HELLO_PARTS <= TABLE_LINE);
const _: () = assert!(TABLE_LINE + MAX_CHANNELS as u64 <= CHANNELS_FIRST_LINE);

/// Smallest inbound memory that a session can work with: the reserved part and one page.
pub const MIN_WINDOW_LINES: u64 = CHANNELS_FIRST_LINE + page::PAGE_LINES;

/// Values that must be the same on both sides.
pub(crate) const ITEMS: usize = 10;
/// Their names, as errors print them.
pub(crate) const ITEM_NAMES: [&str; ITEMS] = [
    "bytes of a line",
    "first line of the channel table",
    "channels of the table",
    "first line of channel memory",
    "lines of a control page",
    "check",
    "layout of ring lines",
    "layout of marks",
    "layout of control pages",
    "log2 of the longest ring",
];
/// This build's values.
pub(crate) const ITEM_VALUES: [u32; ITEMS] = [
    ntb_mem::line::LINE_BYTES as u32,
    TABLE_LINE as u32,
    MAX_CHANNELS as u32,
    CHANNELS_FIRST_LINE as u32,
    page::PAGE_LINES as u32,
    1, // `check`: multiply-xorshift sum
    1, // `line`
    1, // `mark`
    1, // `page`
    crate::queue::MAX_RING_LINES.trailing_zeros(),
];

/// The layout in one number: the hash of all items in order.
pub(crate) fn fingerprint(items: &[u32; ITEMS]) -> u32 {
    let wide = items
        .iter()
        .fold(hash::hash(0x6c61_796f_7574, &[]), |state, item| {
            hash::step(state, u64::from(*item))
        });
    hash::fold32(wide)
}
