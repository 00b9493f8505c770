//! NTB ports: the operations that every family of bridges has, in the field's own words.
//!
//! [`NtbPort`] is the seam; [`open`] picks the implementation by PCI id. A port starts quiet: bus master off,
//! link down, windows closed and read back, doorbells masked and cleared, own scratchpads zero; only then may the
//! device reach memory at all.
//!
//! All ones is what a dead device or link answers. Every register read is checked for it before it is taken for
//! anything else.

pub mod access;
mod amd;
mod epf;
mod error;
mod events;
pub mod family;
pub mod fuzz;
pub mod inferred;
mod intel_gen3;
mod intel_gen4;
mod latched;
pub mod mode;
pub mod regs;

use std::{fmt, os::fd::BorrowedFd, sync::Arc};

pub use error::NtbError;
pub use family::Family;

use crate::pci::{
    Bar, PciFunction,
    config::{self, LinkRate},
};

/// State of the link as the hardware reports it. Says nothing about whether a peer's software runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// No data link.
    Down,
    /// Data link active at this rate.
    Up(LinkRate),
}

impl LinkState {
    /// Whether the data link is active.
    pub fn is_up(self) -> bool {
        matches!(self, Self::Up(_))
    }
}

impl fmt::Display for LinkState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Down => f.write_str("down"),
            Self::Up(rate) => write!(f, "up, {rate}"),
        }
    }
}

/// What the hardware told about the link since the last look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkReport {
    /// The state now.
    pub state: LinkState,
    /// Link interrupts since the last report. More than the state shows when the link flapped in between.
    pub interrupts: u64,
    /// The peer's side was reset or told that it goes away.
    pub peer_left: bool,
}

/// What a memory window can do. Fixed while the port is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowInfo {
    /// BAR through which this side reaches the peer's memory.
    pub bar: Bar,
    /// Where in the BAR the window starts.
    pub offset: u64,
    /// Largest amount of memory, in bytes, that can be let in, and the length of the aperture.
    pub bytes: u64,
    /// The I/O address of inbound memory must be a multiple of this.
    pub address_align: u64,
    /// The length of inbound memory must be a multiple of this.
    pub size_align: u64,
}

/// Which end of the link this is. Decides port numbers and nothing else above the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Upstream device, or primary side: port 0.
    Upstream,
    /// Downstream device, or secondary side: port 1.
    Downstream,
    /// The hardware does not tell the ends apart: both are port 0.
    Symmetric,
}

impl Role {
    /// Own port number.
    pub fn port(self) -> u32 {
        u32::from(self == Self::Downstream)
    }

    /// Port number of the peer.
    pub fn peer_port(self) -> u32 {
        u32::from(self == Self::Upstream)
    }
}

/// One port of a bridge, open and exclusively held.
///
/// Methods take `&self` and may be called from any thread. State that the peer or the device changes at any time:
/// link, doorbells, scratchpads of both sides. Each method makes a bounded number of accesses; none of them crosses
/// the link except those whose name says `peer`.
pub trait NtbPort: Send + Sync + fmt::Debug {
    /// Family of the hardware.
    fn family(&self) -> Family;

    /// The PCI function underneath.
    fn function(&self) -> &Arc<dyn PciFunction>;

    /// Which end this is.
    fn role(&self) -> Role;

    /// Asks for the link. It comes up when both ends have asked and a cable joins them.
    fn enable_link(&self) -> Result<(), NtbError>;

    /// Takes the link down, for both ends.
    fn disable_link(&self) -> Result<(), NtbError>;

    /// The link's state now.
    fn link(&self) -> Result<LinkState, NtbError>;

    /// Takes what link interrupts have told, acknowledges them, and gives the state after that.
    fn take_link_report(&self) -> Result<LinkReport, NtbError>;

    /// Becomes readable when the link's state may have changed; reset by [`NtbPort::take_link_report`].
    fn link_event(&self) -> BorrowedFd<'_>;

    /// The memory windows.
    fn windows(&self) -> &[WindowInfo];

    /// Lets the peer into `bytes` bytes at I/O address `iova` through window `window`, and reads back that the
    /// hardware took it. Memory there must be mapped before and stay until [`NtbPort::close_window`].
    fn open_window(&self, window: usize, iova: u64, bytes: u64) -> Result<(), NtbError>;

    /// Closes a window and reads back that it is closed. Closing a closed window is fine.
    fn close_window(&self, window: usize) -> Result<(), NtbError>;

    /// The doorbell bits that clients may use.
    fn doorbell_bits(&self) -> u64;

    /// Rings these doorbells at the peer. Ringing one that is set already may raise no interrupt.
    fn ring_peer(&self, bits: u64) -> Result<(), NtbError>;

    /// Own doorbells that are set, masked ones included.
    fn doorbells(&self) -> Result<u64, NtbError>;

    /// Clears own doorbells, and returns when the device has done it. Whoever waits on memory must look at it again
    /// after this: then no doorbell is lost.
    fn clear_doorbells(&self, bits: u64) -> Result<(), NtbError>;

    /// Keeps these doorbells from raising the event; in force when this returns.
    fn mask_doorbells(&self, bits: u64) -> Result<(), NtbError>;

    /// Lets them raise it again; one that was set meanwhile raises it at once.
    fn unmask_doorbells(&self, bits: u64) -> Result<(), NtbError>;

    /// Doorbells that are masked.
    fn masked_doorbells(&self) -> u64;

    /// Becomes readable when an unmasked doorbell was rung; reset by [`NtbPort::take_doorbells`].
    fn doorbell_event(&self) -> BorrowedFd<'_>;

    /// Resets the event, then takes the doorbells out of `bits` that are set and clears them.
    fn take_doorbells(&self, bits: u64) -> Result<u64, NtbError>;

    /// Scratchpads per side.
    fn scratchpads(&self) -> usize;

    /// An own scratchpad: what the peer wrote there.
    fn scratchpad(&self, index: usize) -> Result<u32, NtbError>;

    /// Writes an own scratchpad.
    fn set_scratchpad(&self, index: usize, value: u32) -> Result<(), NtbError>;

    /// A scratchpad of the peer. Crosses the link: never on a data path. All ones may be a value or no answer;
    /// with the link down it is [`NtbError::LinkDown`].
    fn peer_scratchpad(&self, index: usize) -> Result<u32, NtbError>;

    /// Writes a scratchpad of the peer. Lost when the link is down.
    fn set_peer_scratchpad(&self, index: usize, value: u32) -> Result<(), NtbError>;

    /// Everything off: doorbells masked and cleared, windows closed and read back, link down, own scratchpads zero.
    /// The first step of every start, and the last of every end.
    fn quiesce(&self) -> Result<(), NtbError>;
}

/// Opens the port of a function, quiet, by its PCI id.
pub fn open(function: &Arc<dyn PciFunction>) -> Result<Arc<dyn NtbPort>, NtbError> {
    let identity = config::identity(&**function)?;
    let Some(family) = Family::of(&identity) else {
        if let Some(why) = Family::why_unsupported(&identity) {
            return Err(NtbError::WrongMode {
                device: function.name().to_owned(),
                found: why.to_owned(),
                remedy: "Use one of those that docs/hardware.md lists",
            });
        }
        return Err(NtbError::NotAnNtb {
            device: function.name().to_owned(),
            identity,
        });
    };
    stop(&**function)?;
    let port: Arc<dyn NtbPort> = match family {
        Family::IntelIcx | Family::IntelSpr | Family::IntelGnr => {
            Arc::new(intel_gen4::open(function, family)?)
        }
        Family::IntelSkx => Arc::new(intel_gen3::open(function, family)?),
        Family::Amd { windows } => Arc::new(amd::open(function, family, windows)?),
        Family::Epf { .. } => Arc::new(epf::Epf::open(function, family)?),
    };
    start(&*port)?;
    Ok(port)
}

/// Starts a port anew after its function was reset or came back: as [`open`] does, quiet and with nothing mapped.
pub fn restart(port: &dyn NtbPort) -> Result<(), NtbError> {
    stop(&**port.function())?;
    start(port)
}

/// The end of a port: everything off, so that the peer sees the link go down, and no memory reachable.
fn end(port: &dyn NtbPort) {
    let quiet = port.quiesce().and_then(|()| stop(&**port.function()));
    if let Err(error) = quiet {
        tracing::debug!(port = port.function().name(), %error, "a port could not be quieted at its end");
    }
}

fn stop(function: &dyn PciFunction) -> Result<(), NtbError> {
    config::quiesce(function)?;
    Ok(function.set_vectors(&[])?)
}

fn start(port: &dyn NtbPort) -> Result<(), NtbError> {
    port.quiesce()?;
    // Windows are closed and read back: nothing but interrupts can leave the device now.
    Ok(config::set_bus_master(&**port.function(), true)?)
}

/// A window's facts, or the error that there is no such window.
fn window(windows: &[WindowInfo], index: usize) -> Result<&WindowInfo, NtbError> {
    windows.get(index).ok_or(NtbError::NoWindow {
        window: index,
        windows: windows.len(),
    })
}

/// Checks address and length of inbound memory against what the window takes.
fn check_translation(windows: &[WindowInfo], index: usize, iova: u64, bytes: u64) -> Result<(), NtbError> {
    let info = window(windows, index)?;
    if bytes == 0 || bytes > info.bytes || !bytes.is_multiple_of(info.size_align) {
        return Err(NtbError::BadWindowSize {
            window: index,
            asked: bytes,
            limit: info.bytes,
            multiple: info.size_align,
        });
    }
    if iova == 0 || !iova.is_multiple_of(info.address_align) {
        return Err(NtbError::BadWindowAddress {
            window: index,
            address: iova,
            multiple: info.address_align,
        });
    }
    Ok(())
}

fn check_doorbells(bits: u64, valid: u64) -> Result<(), NtbError> {
    if bits & !valid == 0 {
        return Ok(());
    }
    Err(NtbError::BadDoorbell { bits, valid })
}

/// A value read from the peer; all ones with the link down is no value.
fn peer_answered(port: &dyn NtbPort, value: u32) -> Result<u32, NtbError> {
    if value == u32::MAX && !port.link()?.is_up() {
        return Err(NtbError::LinkDown {
            device: port.function().name().to_owned(),
            what: "reading a scratchpad of the peer",
        });
    }
    Ok(value)
}
