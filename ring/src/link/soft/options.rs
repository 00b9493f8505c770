//! Parameters and counts of a soft link.

use ntb_mem::region::Pages;

use crate::link::ends::WINDOW_BYTES;

/// Parameters of a soft link. Each side has its own.
#[derive(Clone, Debug)]
pub struct SoftOptions {
    /// Bytes of this side's memory, a multiple of 64; 64 MiB by default. Normal pages take up memory only where they are written.
    pub window_bytes: u64,
    /// Pages that this side's memory stands on. Between users normal pages are used always.
    pub pages: Pages,
    /// Processes of other users that are in this group, by their effective or a supplementary group id, may be peers
    /// too. A peer of another user can store anything into this side's memory, as any peer can.
    pub group: Option<u32>,
}

impl Default for SoftOptions {
    fn default() -> Self {
        Self {
            window_bytes: WINDOW_BYTES,
            pages: Pages::default(),
            group: None,
        }
    }
}

/// What a soft link has turned away. Each connection that did not become the peer is in exactly one of these, but for
/// `accept_failed`, which counts attempts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Neither the same user nor in the group.
    pub refused_permission: u64,
    /// Came while two were connected.
    pub refused_taken: u64,
    /// Another version of the greeting.
    pub refused_version: u64,
    /// Memory or descriptors that cannot be used.
    pub refused_unfit: u64,
    /// Refused this side and closed.
    pub refused_by_caller: u64,
    /// Said something that is no greeting, or spoke after it.
    pub malformed: u64,
    /// Did not greet in time, or were pushed out by a crowd.
    pub dropped_silent: u64,
    /// Closed before they greeted or before they were answered.
    pub gone_early: u64,
    /// Connections that could not be taken up for want of descriptors.
    pub accept_failed: u64,
}
