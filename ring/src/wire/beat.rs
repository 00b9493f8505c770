//! The beat: "this process lives, and this is what it has taken in".
//!
//! ```text
//! 0   incarnation of the writer
//! 1   incarnation of the reader
//! 2   life of the writer | life of the reader << 32
//! 3   number of the beat, rising
//! 4   flags (16 bits) | number of the reader's pattern found in place << 16 | digest of the reader's table << 32
//! 5   0
//! 6   0
//! ```

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
    identity::{Direction, Identity},
    layout::BEAT_LINE,
    record::{self, RecordKind},
};

/// The writer has taken the reader's greeting.
pub(crate) const HELLO_TAKEN: u16 = 1;
/// The writer found nothing in it that does not fit.
pub(crate) const AGREED: u16 = 2;
/// The writer refuses to go on.
pub(crate) const REFUSED: u16 = 4;
/// The writer says goodbye.
pub(crate) const CLOSED: u16 = 8;

/// One beat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Beat {
    pub(crate) count: u64,
    pub(crate) flags: u16,
    pub(crate) found: u16,
    /// Over all entries of the reader's table that the writer has taken in ([`super::table::digest`]).
    pub(crate) table: u32,
}

impl Beat {
    pub(crate) fn encode(&self, direction: Direction) -> Line {
        let Direction { writer, reader } = direction;
        record::seal(
            direction.id(),
            BEAT_LINE,
            RecordKind::Beat,
            &[
                writer.incarnation,
                reader.incarnation,
                u64::from(writer.life) | u64::from(reader.life) << 32,
                self.count,
                u64::from(self.flags) | u64::from(self.found) << 16 | u64::from(self.table) << 32,
                0,
                0,
            ],
        )
    }

    /// `None` for anything but a beat of this life.
    pub(crate) fn decode(direction: Direction, line: &Line) -> Option<Self> {
        let [writer, reader, lives, count, state, ..] =
            record::open(direction.id(), BEAT_LINE, RecordKind::Beat, line)?;
        let said = Direction {
            writer: Identity {
                incarnation: writer,
                life: lives as u32,
            },
            reader: Identity {
                incarnation: reader,
                life: (lives >> 32) as u32,
            },
        };
        (said == direction).then_some(Self {
            count,
            flags: state as u16,
            found: (state >> 16) as u16,
            table: (state >> 32) as u32,
        })
    }
}
