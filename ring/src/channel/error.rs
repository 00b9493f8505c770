//! What can go wrong on a channel. Every error has a stable name and an exit class.

use std::sync::Arc;

use crate::session::{CloseReason, PeerInfo, SessionState};

/// The end of one life of a channel, told once to each of its ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    /// Why.
    pub reason: CloseReason,
    /// Messages of this life that the peer is known to have consumed (sender), or that were received (receiver).
    pub certain: u64,
    /// Messages of this life that were sent. Those from `certain` on may or may not have been consumed. At the
    /// receiver the same as `certain`.
    pub sent: u64,
}

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}: {} messages are known to have been consumed",
            self.reason.name(),
            self.certain
        )?;
        match self.sent.wrapping_sub(self.certain) {
            0 => Ok(()),
            n => write!(f, ", {n} sent after them are uncertain"),
        }
    }
}

/// Why a message was not sent. Nothing of it has left.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendFailure {
    /// The reader has not given back enough room.
    #[error(
        "the ring is full: {needed} lines are needed, {free} are free; {unread_lines} lines are unread by '{}' (process {})",
        reader.node, reader.pid
    )]
    Full {
        /// Lines the message takes.
        needed: u64,
        /// Lines free.
        free: u64,
        /// Lines that the reader holds.
        unread_lines: u64,
        /// Who holds the ring up.
        reader: Arc<PeerInfo>,
    },
    /// The message is longer than this channel takes.
    #[error(
        "a message of {len} bytes is too long: this channel takes {max} bytes at most; open it with a larger ring"
    )]
    TooLong {
        /// Its length in bytes.
        len: u64,
        /// Largest possible.
        max: u64,
    },
    /// The channel has no peer now.
    #[error("not connected, missing {}", .0.missing())]
    NotConnected(SessionState),
    /// The life that earlier messages belonged to has ended. Told once; later calls belong to the next life.
    #[error("the peer was lost ({0})")]
    Lost(Lost),
    /// The time given has run out.
    #[error("no room within the time given: {unread_lines} lines are unread by '{}' (process {})", reader.node, reader.pid)]
    TimedOut {
        /// Lines that the reader holds.
        unread_lines: u64,
        /// Who holds the ring up.
        reader: Arc<PeerInfo>,
    },
}

impl SendFailure {
    /// The stable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Full { .. } => "ring-full",
            Self::TooLong { .. } => "message-too-long",
            Self::NotConnected(_) => "not-connected",
            Self::Lost(lost) => lost.reason.name(),
            Self::TimedOut { .. } => "timed-out",
        }
    }
}

/// Why nothing was received.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecvFailure {
    /// No complete message is there.
    #[error("no message has arrived")]
    Empty,
    /// The next message is longer than the buffer; it stays.
    #[error("the next message has {needed} bytes, the buffer has {given}: give a larger one")]
    TooSmall {
        /// Its length in bytes.
        needed: usize,
        /// Length of the buffer in bytes.
        given: usize,
    },
    /// The next message has not the size asked for; it stays.
    #[error("the next message has {found} bytes, messages of {wanted} bytes were asked for")]
    OtherSize {
        /// Its length in bytes.
        found: usize,
        /// Length asked for in bytes.
        wanted: usize,
    },
    /// A device cannot go on within a packed block: messages of it have been received by the processor.
    #[error("a packed block was received in part: receive the rest of it before a device does")]
    WithinBlock,
    /// The channel has no peer now.
    #[error("not connected, missing {}", .0.missing())]
    NotConnected(SessionState),
    /// The life that earlier messages belonged to has ended, and all of it that arrived has been given out. Told once.
    #[error("the peer was lost ({0})")]
    Lost(Lost),
    /// The time given has run out.
    #[error("no message within the time given")]
    TimedOut,
}

impl RecvFailure {
    /// The stable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::TooSmall { .. } => "buffer-too-small",
            Self::OtherSize { .. } => "other-size",
            Self::WithinBlock => "within-block",
            Self::NotConnected(_) => "not-connected",
            Self::Lost(lost) => lost.reason.name(),
            Self::TimedOut => "timed-out",
        }
    }
}

/// Why a connection is not running.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The time given has run out; the missing step is named.
    #[error("not connected within {waited_ms} ms, missing {}", state.missing())]
    TimedOut {
        /// How long was waited, in milliseconds.
        waited_ms: u64,
        /// How far the link has come.
        state: SessionState,
    },
    /// The two sides do not fit each other.
    #[error("the peer does not fit: {0}")]
    Refused(String),
    /// The link has ended for good.
    #[error("the link has failed: {what}")]
    LinkFailed {
        /// Stable name.
        name: &'static str,
        /// Exit class.
        exit: u8,
        /// In words.
        what: String,
    },
    /// The service thread could not be started.
    #[error("the service thread could not be started: {0}")]
    NoThread(String),
}

impl ConnectError {
    /// The stable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::TimedOut { .. } => "connect-timed-out",
            Self::Refused(_) => "refused",
            Self::LinkFailed { name, .. } => name,
            Self::NoThread(_) => "no-thread",
        }
    }

    /// Exit class of the tools.
    pub fn exit(&self) -> u8 {
        match self {
            Self::TimedOut { .. } => 4,
            Self::Refused(_) => 7,
            Self::LinkFailed { exit, .. } => *exit,
            Self::NoThread(_) => 6,
        }
    }
}
