//! Entry points for fuzzing what the rest of the crate keeps to itself.

use ntb_mem::line::Line;

use super::{
    line::{BARE_MAX, Decoded, Order, decode},
    mark::LaneKey,
};

/// Decodes the line in `data` (after a byte of options), as its receiver would.
///
/// # Panics
/// When decoding lets through what does not fit the lane.
pub fn line(data: &[u8]) {
    let Some((options, bytes)) = data.split_first() else {
        return;
    };
    let key = LaneKey::new(0x1234, 0, 0xdead_beef);
    let mut line = Line::from_bytes(bytes);
    if options & 1 != 0 {
        // Random bytes hardly ever have the right guard.
        line.0[6] = u64::from(line.0[6] as u32) | u64::from(key.guard) << 32;
    }
    let order = if options & 2 != 0 {
        Order::Ordered
    } else {
        Order::Relaxed
    };
    let ring_lines = 4 << (options >> 2) % 16;
    let max = (ring_lines - 1) * 64;
    if let Decoded::Sound(head) = decode(&line, key, order, ring_lines, max) {
        let bytes = u64::from(head.size) * u64::from(head.count);
        assert!(head.count >= 1 && u64::from(head.size) <= max);
        assert!(head.extra_lines < ring_lines);
        assert!(bytes <= BARE_MAX as u64 || bytes <= head.extra_lines * 64);
    }
}
