//! The control page: one per channel and direction of control, at the front of the channel's memory.
//!
//! Each line has one writer, the peer; the owner of the memory only reads. Every word that carries meaning is a
//! control word of its own ([`super::mark::LaneKey`]): 48 bits of value under the tag that the owner gave to this life. So
//! a torn line is still a set of sound words, and anything blank, stale or scribbled is ignored.

/// Lines of a control page: one 4 KiB page.
pub const PAGE_LINES: u64 = 64;

/// Consumer to producer. Word 0: lines consumed so far. Word 1: messages consumed so far.
pub const CREDIT: u64 = 0;
/// Producer to consumer. Word 0: the count of consumed lines the producer waits for. Word 1: which attempt at it this is,
/// so that a credit which did not get through is asked for again.
pub const STARVED: u64 = 1;
/// Consumer to the producer's service. Word 0: number of this arm, rising. Word 1: messages consumed.
pub const ARM: u64 = 2;
/// Producer's service to consumer. Word 0: number of the arm answered. Word 1: messages sent when it was seen.
pub const ECHO: u64 = 3;
/// Consumer's service to producer. Word 0: messages consumed.
pub const PROGRESS: u64 = 4;
/// Producer's service to consumer. Word 0: messages sent, so that one which never arrives is noticed.
pub const SENT: u64 = 5;

/// Lines above: cleared by the peer before a life, so that nothing left in them is taken for a control word.
pub(crate) const USED_LINES: u64 = SENT + 1;
