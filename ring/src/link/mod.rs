//! What a ring needs of a transport, and the transports.
//!
//! A [`Link`] is the control side: memory for each direction, a few registers, doorbells, and the state of the wire. The
//! data side is a [`engine::StoreEngine`], and on transports that no memory is mapped over, a [`Pump`]. Links know nothing
//! of sessions, channels or rings.

pub mod auth;
pub mod auto;
pub mod combining;
#[doc(hidden)]
pub mod conformance;
mod doorbell;
mod ends;
pub mod engine;
pub mod faults;
mod meet;
#[cfg(feature = "ntb")]
pub mod ntb;
pub mod pair;
mod random;
#[cfg(feature = "rdma")]
pub mod rdma;
pub mod select;
pub mod soft;
pub mod tcp;
mod wrapped;

use std::{sync::Arc, time::Duration};

use ntb_mem::region::View;

pub use doorbell::Doorbell;
use engine::Engine;
pub use wrapped::{EngineHook, Wrapped};

/// Registers that each side can write at the other: as many scratchpads as every bridge has.
pub const REGISTERS: usize = 8;

/// The contents of one side's registers.
pub type Registers = [u32; REGISTERS];

/// Doorbells of a link: number 0 wakes the service thread, the others wake sleeping readers. See
/// [`Link::distinct_doorbells`].
pub const DOORBELLS: u32 = 16;

/// Which transport a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// Two processes of one machine, or two ends in one process.
    Soft,
    /// A non-transparent bridge, real or emulated.
    Ntb,
    /// RDMA verbs.
    Rdma,
    /// TCP.
    Tcp,
}

impl LinkKind {
    /// The stable name, as in addresses and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Soft => "soft",
            Self::Ntb => "ntb",
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
        }
    }
}

/// What the transport itself knows of its state. The session tells the rest apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LinkState {
    /// Nothing at the other end.
    CableDown,
    /// The wire is up; registers can be exchanged.
    CableUp,
    /// Both directions have memory behind them: [`Link::outbound`] gives engines.
    WindowsSet,
}

/// What [`Link::poll`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkStatus {
    /// The state now.
    pub state: LinkState,
    /// How often the link has been lost since it was opened. Two quick losses count as two, so that a flap between
    /// two polls is not missed.
    pub losses: u64,
}

/// Speed and width of a wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireRate {
    /// Generation of PCI Express, 1 to 6: 2.5, 5, 8, 16, 32, 64 GT/s a lane.
    pub generation: u8,
    /// Lanes.
    pub lanes: u8,
}

impl std::fmt::Display for WireRate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "generation {}, {} lanes", self.generation, self.lanes)
    }
}

/// Something about the device below a link that is not a change of its state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkEvent {
    /// The wire runs at another speed or width than before, without having been down.
    Rate {
        /// Until now.
        before: WireRate,
        /// From now on.
        now: WireRate,
    },
    /// The device has reported PCI Express errors: bits of its advanced error reporting status registers that were not
    /// set when last looked at.
    Errors {
        /// Errors that the wire has corrected.
        correctable: u32,
        /// Errors by which something was lost.
        uncorrectable: u32,
    },
    /// The device does not answer any more; it is looked for until it does. The link is down meanwhile.
    DeviceGone {
        /// What showed it.
        why: String,
    },
    /// The device answers again and was started anew.
    DeviceBack,
    /// Something about the transport that has a name of its own, such as `rdma-port-down`.
    Transport {
        /// The stable name.
        name: &'static str,
        /// What was seen.
        why: String,
    },
    /// The wire is up, but this side's memory could not be shown to the peer; tried again.
    WindowsRefused {
        /// By whom, and why.
        why: String,
    },
}

impl std::fmt::Display for LinkEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Rate { before, now } => write!(f, "{now}; until now {before}"),
            Self::Errors {
                correctable,
                uncorrectable,
            } => write!(
                f,
                "correctable {correctable:#x}, uncorrectable {uncorrectable:#x}"
            ),
            Self::DeviceGone { why } => f.write_str(why),
            Self::DeviceBack => f.write_str("started anew"),
            Self::Transport { why, .. } | Self::WindowsRefused { why } => f.write_str(why),
        }
    }
}

impl LinkEvent {
    /// The stable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Rate { .. } => "wire-rate",
            Self::Errors { .. } => "wire-errors",
            Self::DeviceGone { .. } => "device-gone",
            Self::DeviceBack => "device-back",
            Self::Transport { name, .. } => name,
            Self::WindowsRefused { .. } => "windows-refused",
        }
    }
}

/// What is worth printing about a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkFacts {
    /// Transport.
    pub kind: LinkKind,
    /// Address in the notation of [`crate::address`].
    pub address: String,
    /// Page size behind the inbound memory in bytes.
    pub page_bytes: u64,
    /// How lines are stored, such as `write-back`.
    pub engine: &'static str,
}

/// Why a link could not be opened, or ended for good.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct LinkError {
    /// Stable name, such as `soft-name-taken`.
    pub name: &'static str,
    /// Exit class of the tools (design: 0 good, 2 usage, 3 no hardware, 4 no peer, 5 link lost, 6 permission or limits, 7
    /// version or layout).
    pub exit: u8,
    /// What was tried, needed and found, and what to do.
    pub what: String,
    /// The kernel's error number, where one was given.
    pub errno: Option<i32>,
}

/// The control side of a transport. Driven by one thread, the service thread; the data path does not come here.
pub trait Link: Send + std::fmt::Debug {
    /// What to print about it.
    fn facts(&self) -> LinkFacts;

    /// What its engines keep in order.
    fn order(&self) -> engine::Order;

    /// Drives the transport without blocking: accepts or connects, notices loss, takes up what arrived. An error is
    /// final for this link; loss of the peer is not an error.
    fn poll(&mut self) -> Result<LinkStatus, LinkError>;

    /// Sleeps until doorbell 0, until something happens on the transport, or until `timeout`.
    fn wait(&self, timeout: Duration);

    /// This side's registers, as the peer has written them. All ones where the link is down.
    fn registers(&self) -> Registers;

    /// Writes the peer's registers, in ascending order. Vanishes where the link is down.
    fn write_registers(&mut self, registers: &Registers);

    /// This side's memory that the peer writes. The same for as long as the link object lives.
    fn inbound(&self) -> View;

    /// Memory of another owner at this side that the peer writes as well, a GPU's for instance: where engines of the peer
    /// count on behind [`Link::inbound`]. The same for as long as the link object lives.
    fn exported(&self) -> Option<View> {
        None
    }

    /// A new engine onto the peer's memory; `None` below [`LinkState::WindowsSet`].
    ///
    /// An engine outlives a loss of the link: what it stores then goes nowhere.
    fn outbound(&self) -> Option<Engine>;

    /// Rings one of the peer's doorbells. Vanishes where the link is down.
    fn ring(&mut self, doorbell: u32);

    /// This side's doorbell `number`, below [`DOORBELLS`]; higher numbers give doorbell 0.
    fn doorbell(&self, number: u32) -> Doorbell;

    /// How many doorbells wake nobody but their own sleepers. Where this is below [`DOORBELLS`], doorbell 0 and those
    /// numbered from this on are one in hardware: each wakes with a ring of any of them. No ring is ever lost by it.
    fn distinct_doorbells(&self) -> u32 {
        DOORBELLS
    }

    /// What [`Link::poll`] has noticed besides the state, oldest first. Links without a device have nothing to tell.
    fn next_event(&mut self) -> Option<LinkEvent> {
        None
    }

    /// What to call while polling inbound memory, on transports where nothing arrives there by itself; for the peer of
    /// the moment, and without effect after its end.
    fn pump(&self) -> Option<Arc<dyn Pump>> {
        None
    }
}

/// Takes up what has arrived, on transports whose bytes somebody has to read before they are in inbound memory. So that
/// no thread stands between the wire and who waits for a message, whoever polls does it.
pub trait Pump: Send + Sync + std::fmt::Debug {
    /// Applies what is there to inbound memory, without waiting. True when there was something.
    fn pump(&self) -> bool;

    /// Who has pumped stops, to sleep: the service thread is to do it.
    fn rest(&self);
}
