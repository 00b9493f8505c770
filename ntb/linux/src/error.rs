//! What can go wrong between this side and a client of the kernel.

use std::time::Duration;

use ntb::{hw::NtbError, pci::ExitClass};
use rustix::io::Errno;

/// A failure of a client. [`LinuxError::name`] is stable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinuxError {
    /// The port below failed.
    #[error(transparent)]
    Ntb(#[from] NtbError),
    /// The hardware has less than the protocol takes.
    #[error("{device}: the protocol of {client} takes {needed} {what}, and this port has {found}")]
    TooFew {
        /// The function.
        device: String,
        /// The kernel's client.
        client: &'static str,
        /// What there is too little of.
        what: &'static str,
        /// Needed.
        needed: u64,
        /// There are.
        found: u64,
    },
    /// A queue pair that does not exist.
    #[error(
        "queue pair {queue} does not exist: windows, scratchpads and doorbells of this port make {queues}"
    )]
    NoQueue {
        /// Asked for.
        queue: usize,
        /// How many there are.
        queues: usize,
    },
    /// The two sides count or measure differently.
    #[error("{what}: {own} here, {peer} at the peer. {remedy}")]
    Disagree {
        /// What.
        what: &'static str,
        /// Here.
        own: u64,
        /// As the peer says.
        peer: u64,
        /// What to do.
        remedy: &'static str,
    },
    /// A window is too small for two frames.
    #[error(
        "{bytes} bytes of memory window {window} are too little for a ring of frames of up to {frame} bytes: make the \
         windows larger in the firmware, or the frames smaller on both sides (transport_mtu of ntb_transport)"
    )]
    RingTooSmall {
        /// The window.
        window: usize,
        /// What the queue pair has of it.
        bytes: u64,
        /// Frame size asked for.
        frame: u32,
    },
    /// The peer wants more memory exposed than was allowed.
    #[error(
        "the peer's memory window {window} is {asked} bytes, and {limit} bytes of this machine's memory may be exposed in \
         it: allow more here, or load the kernel's module with max_mw_size={limit} at the peer"
    )]
    TooMuchMemory {
        /// The window.
        window: usize,
        /// Announced by the peer.
        asked: u64,
        /// Allowed.
        limit: u64,
    },
    /// Nobody came to the other end, or did not come far enough.
    #[error("{client} of the peer was waited for for {waited:?}: {step}")]
    NoPeer {
        /// The kernel's client.
        client: &'static str,
        /// How far it came, and what is missing.
        step: String,
        /// How long was waited.
        waited: Duration,
    },
    /// The connection ended.
    #[error("the connection to {client} of the peer is down: {step}")]
    Down {
        /// The kernel's client.
        client: &'static str,
        /// How far it has come again, and what is missing.
        step: String,
    },
    /// A payload that no frame holds.
    #[error("{bytes} bytes do not fit a frame: 1 to {largest} do")]
    BadLength {
        /// Bytes given.
        bytes: usize,
        /// Largest payload.
        largest: usize,
    },
    /// The TAP device could not be had.
    #[error("TAP device {name}: {step}: {errno}. {remedy}")]
    Tap {
        /// The interface.
        name: String,
        /// The step that failed.
        step: &'static str,
        /// What the kernel said.
        errno: Errno,
        /// What to do.
        remedy: &'static str,
    },
}

impl LinuxError {
    /// Stable name of the kind of error.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Ntb(e) => e.name(),
            Self::TooFew { .. } => "too-few",
            Self::NoQueue { .. } => "no-queue",
            Self::Disagree { .. } => "peer-disagrees",
            Self::RingTooSmall { .. } => "ring-too-small",
            Self::TooMuchMemory { .. } => "too-much-memory",
            Self::NoPeer { .. } => "no-peer",
            Self::Down { .. } => "connection-down",
            Self::BadLength { .. } => "bad-length",
            Self::Tap { .. } => "tap",
        }
    }

    /// Exit class.
    pub fn class(&self) -> ExitClass {
        match self {
            Self::Ntb(e) => e.class(),
            Self::TooFew { .. } => ExitClass::NoHardware,
            Self::NoQueue { .. } | Self::BadLength { .. } => ExitClass::Usage,
            Self::Disagree { .. } | Self::RingTooSmall { .. } => ExitClass::Mismatch,
            Self::TooMuchMemory { .. } | Self::Tap { .. } => ExitClass::Permission,
            Self::NoPeer { .. } => ExitClass::NoPeer,
            Self::Down { .. } => ExitClass::LinkLost,
        }
    }
}
