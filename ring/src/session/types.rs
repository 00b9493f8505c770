//! What goes into a session and what comes out.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use std::time::Duration;

use ntb_mem::line::Line;

use crate::{
    link::{LinkEvent, LinkStatus, Registers, engine::Inbound},
    queue::Lane,
    wire::line::Order,
};

/// Parameters of a session. Both sides may differ in all of them but where the documentation of a field says so.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// Name of this node, as the peer prints it; cut to 63 bytes.
    pub node: String,
    /// Process id, for the peer's messages.
    pub pid: u32,
    /// Random, new at each start of the process (or of the link object): tells a restart from a pause.
    pub incarnation: u64,
    /// Seed of the random values of this session (keys, nonces, test lines).
    pub seed: u64,
    /// What this side's engine keeps in order.
    pub order: Order,
    /// Time between two beats of this side.
    pub beat_interval: Duration,
    /// Silence after which the peer is reported as silent. A pause is not a death: nothing else happens.
    pub silent_after: Duration,
    /// Silence after which the peer is given up, where the link itself does not notice its death.
    pub gone_after: Duration,
    /// Time between two attempts at a handshake step that is not answered.
    pub retry_interval: Duration,
    /// How long unread messages of a dead peer hold up the next life of their channel.
    pub drain_timeout: Duration,
}

impl SessionConfig {
    /// The defaults: beats every 10 ms, silent after 200 ms, given up after 5 s, retries every 5 ms, drained for 200 ms.
    pub fn new(node: &str, incarnation: u64, seed: u64, order: Order) -> Self {
        Self {
            node: node.to_owned(),
            pid: std::process::id(),
            incarnation,
            seed,
            order,
            beat_interval: Duration::from_millis(10),
            silent_after: Duration::from_millis(200),
            gone_after: Duration::from_secs(5),
            retry_interval: Duration::from_millis(5),
            drain_timeout: Duration::from_millis(200),
        }
    }
}

/// Where a link stands. Told apart everywhere: API, tools, logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SessionState {
    /// Nothing at the other end.
    CableDown,
    /// The wire is up, no peer has spoken.
    CableUp,
    /// A peer has spoken.
    PeerSeen,
    /// Both directions have memory behind them; which directions are verified so far.
    WindowsSet {
        /// What this side stores arrives.
        transmit: bool,
        /// What the peer stores arrives.
        receive: bool,
    },
    /// Both directions are verified; greetings are being compared.
    Verified,
    /// Channels work.
    Running,
    /// The peer has gone; waiting for it or for its successor.
    PeerGone,
    /// The link was lost; waiting for it to return.
    LinkLost,
    /// The two sides do not fit each other. Ends when the peer is replaced.
    Refused,
}

impl SessionState {
    /// The stable name.
    pub fn name(self) -> &'static str {
        match self {
            Self::CableDown => "cable-down",
            Self::CableUp => "cable-up",
            Self::PeerSeen => "peer-seen",
            Self::WindowsSet { .. } => "windows-set",
            Self::Verified => "data-path-verified",
            Self::Running => "running",
            Self::PeerGone => "peer-gone",
            Self::LinkLost => "link-lost",
            Self::Refused => "refused",
        }
    }

    /// The step that is missing for the link to run, in words.
    pub fn missing(self) -> &'static str {
        match self {
            Self::CableDown => "link: nothing answers at the other end",
            Self::CableUp => "peer: the link is up but no program speaks at the other end",
            Self::PeerSeen => "windows: the peer speaks but its memory is not mapped yet",
            Self::WindowsSet {
                transmit: false,
                receive: false,
            } => "data path: nothing stored has arrived either way",
            Self::WindowsSet {
                transmit: false,
                receive: true,
            } => {
                "data path: transmit dead, receive alive (check the requester-id table and IOMMU of the peer)"
            }
            Self::WindowsSet {
                transmit: true,
                receive: false,
            } => {
                "data path: transmit alive, receive dead (check the requester-id table and IOMMU of this host)"
            }
            Self::WindowsSet { .. } | Self::Verified => {
                "greeting: the peer has not sent its version and layout yet"
            }
            Self::Running => "nothing: the link is running",
            Self::PeerGone => "peer: it has gone and not come back",
            Self::LinkLost => "link: it was lost and has not come back",
            Self::Refused => "agreement: the peer's version or layout differs",
        }
    }
}

/// What one call of the session sees.
pub struct Inputs<'a> {
    /// From [`crate::link::Link::poll`].
    pub link: LinkStatus,
    /// From [`crate::link::Link::registers`].
    pub registers: Registers,
    /// From [`crate::link::Link::inbound`].
    pub inbound: &'a dyn Inbound,
    /// Length of the peer's memory in lines, once engines can be had.
    pub outbound_lines: Option<u64>,
}

impl std::fmt::Debug for Inputs<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inputs")
            .field("link", &self.link)
            .field("registers", &self.registers)
            .finish()
    }
}

/// What the caller is to do, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Write the peer's registers.
    WriteRegisters(Registers),
    /// Store a line into the peer's memory; flush after the last of a run, before any action of another kind.
    Put {
        /// Line in the outbound memory.
        line: u64,
        /// What to store.
        content: Line,
    },
    /// Ring the peer's doorbell 0, so that it looks at once.
    Ring,
    /// A channel has both its sides: its ends may be made.
    ChannelUp(ChannelId, Lanes),
    /// A channel's life has ended. Its ends learn of it by their own next call; what the reader has not taken yet stays
    /// where it is until [`super::Session::reader_drained`] or [`Action::DrainEnded`].
    ChannelDown(ChannelId, CloseReason),
    /// The reader of the channel's ended life has taken too long: what it has not taken is given up, and from now on the
    /// peer may store over it.
    DrainEnded(ChannelId),
    /// Tell the application.
    Event(Event),
}

/// Number of a channel at this side, stable over all lives of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChannelId(pub u32);

/// What both sides of a channel have to agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelSpec {
    /// Lines of the ring in each direction: a power of two.
    pub ring_lines: u64,
    /// Every message carries a check, also where the link keeps stores in order.
    pub check: bool,
    /// Take the smaller of the two rings instead of failing when they differ. Works when either side asks for it.
    pub smaller_if_different: bool,
}

/// Where this side's rings of a channel lie. The peer is told, and need not do the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Place {
    /// In ordinary memory of this host: [`crate::link::Link::inbound`].
    #[default]
    Ordinary,
    /// In memory of another owner: [`crate::link::Link::exported`].
    Exported,
}

impl Default for ChannelSpec {
    /// Rings of 4096 lines (256 KiB) in each direction, without checks where the link keeps order.
    fn default() -> Self {
        Self {
            ring_lines: 4096,
            check: false,
            smaller_if_different: false,
        }
    }
}

/// Both directions of one life of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lanes {
    /// This side produces.
    pub transmit: Lane,
    /// Order under which `transmit` runs.
    pub transmit_order: Order,
    /// This side consumes.
    pub receive: Lane,
    /// Order under which `receive` runs.
    pub receive_order: Order,
    /// First line of the channel in this side's inbound memory: control page, then `receive.ring_lines` lines.
    pub inbound_base: u64,
    /// The peer's doorbell for a reader of this channel that sleeps there. Readers of different channels have different
    /// ones, 1 to 15; 0, the service thread's, where a side has more than 15 channels.
    pub peer_doorbell: u32,
    /// This side's doorbell for its own sleeping reader; 0 as above.
    pub own_doorbell: u32,
    /// Where this side's ring lies.
    pub own_place: Place,
    /// Where the peer's ring lies, as it says.
    pub peer_place: Place,
}

/// Why a channel's life ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// The peer closed this channel, or its process ended in order.
    ClosedByPeer,
    /// The peer died, or was given up after silence.
    PeerGone,
    /// The peer was replaced by a new incarnation.
    PeerRestarted,
    /// The link was lost.
    LinkLost,
    /// The peer stored something that cannot be.
    Corrupt,
    /// The connection was closed at this side.
    ClosedByUs,
}

impl CloseReason {
    /// The stable name.
    pub fn name(self) -> &'static str {
        match self {
            Self::ClosedByPeer => "closed-by-peer",
            Self::PeerGone => "peer-gone",
            Self::PeerRestarted => "peer-restarted",
            Self::LinkLost => "link-lost",
            Self::Corrupt => "corrupt-peer-data",
            Self::ClosedByUs => "closed",
        }
    }
}

/// Who the peer is, as it says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    /// Its node name; not to be trusted, printable.
    pub node: String,
    /// Its process id, on its machine.
    pub pid: u32,
    /// Its incarnation.
    pub incarnation: u64,
    /// Version of its package, for information.
    pub package: String,
}

/// Two sides that do not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// What differs, such as `wire version` or `ring lines`.
    pub item: &'static str,
    /// This side's value.
    pub ours: String,
    /// The peer's value.
    pub theirs: String,
}

impl Mismatch {
    pub(super) fn new(
        item: &'static str,
        ours: &dyn std::fmt::Display,
        theirs: &dyn std::fmt::Display,
    ) -> Self {
        Self {
            item,
            ours: ours.to_string(),
            theirs: theirs.to_string(),
        }
    }
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: ours {}, theirs {}", self.item, self.ours, self.theirs)
    }
}

/// What the application is told. Exactly one event a change, in order: states that have an event of their own (running,
/// peer gone, link lost, refused) come as that and not as [`Event::State`] too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The state has changed.
    State(SessionState),
    /// The link came up, or lost `losses` times since the last look, came up again.
    LinkLost {
        /// Losses since the last event of this kind.
        losses: u64,
    },
    /// Channels work from now on.
    Running(PeerInfo),
    /// Nothing has been heard from the peer for the configured time. It may be paused.
    PeerSilent {
        /// Since when.
        silent: Duration,
    },
    /// The peer is heard again; nothing was lost.
    PeerBack {
        /// How long it was silent.
        silent: Duration,
    },
    /// The peer has gone.
    PeerGone(CloseReason),
    /// Another incarnation has taken the peer's place.
    PeerRestarted {
        /// The one before.
        old: u64,
        /// The new one.
        new: u64,
    },
    /// The two sides do not fit; all that differs.
    Refused(Vec<Mismatch>),
    /// The two sides of a channel do not fit; the others go on.
    ChannelRefused {
        /// Its name.
        name: String,
        /// All that differs.
        differs: Vec<Mismatch>,
    },
    /// A handshake step has not been answered for a second: which one.
    Waiting(SessionState),
    /// The device below the link has something to tell that is no change of state.
    Device(LinkEvent),
}

impl Event {
    /// The stable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::State(state) => state.name(),
            Self::LinkLost { .. } => "link-lost",
            Self::Running(_) => "running",
            Self::PeerSilent { .. } => "peer-silent",
            Self::PeerBack { .. } => "peer-back",
            Self::PeerGone(_) => "peer-gone",
            Self::PeerRestarted { .. } => "peer-restarted",
            Self::Refused(_) => "refused",
            Self::ChannelRefused { .. } => "channel-refused",
            Self::Waiting(_) => "waiting",
            Self::Device(event) => event.name(),
        }
    }
}

/// Why a channel cannot be opened at this side.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// The name is empty, too long or taken.
    #[error("channel name '{name}' cannot be used: {why}")]
    BadName {
        /// The name.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The ring size is not a power of two in range.
    #[error("a ring of {lines} lines cannot be: it must be a power of two from {min} to {max}")]
    BadRing {
        /// Lines asked for.
        lines: u64,
        /// Fewest.
        min: u64,
        /// Most.
        max: u64,
    },
    /// The inbound memory has no room left.
    #[error(
        "no room for channel '{name}': {needed} bytes are needed, {free} are free; open the link with a larger window or fewer channels"
    )]
    NoRoom {
        /// The name.
        name: String,
        /// Bytes needed.
        needed: u64,
        /// Largest free run in bytes.
        free: u64,
    },
    /// The link exports no memory of another owner.
    #[error(
        "channel '{name}' is to lie in memory of another owner, and this link exports none: open a link over a bridge with such \
         memory behind its last window"
    )]
    NoExport {
        /// The name.
        name: String,
    },
    /// The connection has ended.
    #[error("the connection has ended")]
    Ended,
    /// The inbound memory is too small for a session, or larger than 2^32 pages.
    #[error("an inbound memory of {lines} lines cannot be used: at least {min} and at most 2^38 are needed")]
    BadWindow {
        /// Lines it has.
        lines: u64,
        /// Fewest.
        min: u64,
    },
    /// Every channel number is in use.
    #[error("no more than {max} channels fit on a link")]
    TooMany {
        /// The limit.
        max: u32,
    },
}
