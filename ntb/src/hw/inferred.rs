//! Hardware behaviour that no public document or driver states, in one place, so that real hardware can correct it.
//!
//! Each constant says what was assumed and what would be seen if the assumption were wrong. Driver and emulator
//! use these and no private copies.

/// Revision of device 8086:347E from which the register file is that of Sapphire Rapids.
///
/// Below it, from [`ICX_FIRST_REVISION`], it is Ice Lake. Stated by the Linux driver for both; that Emerald Rapids
/// shares id and behaviour with Sapphire Rapids is inferred. If wrong: PPD1 shows a topology that is refused.
pub const SPR_FIRST_REVISION: u8 = 0x10;
/// First revision of device 8086:347E that is Ice Lake.
pub const ICX_FIRST_REVISION: u8 = 0x02;

/// A translation base of zero closes an Intel window: nothing is let in.
///
/// The drivers clear windows so; that hardware then drops accesses, rather than letting them through to address
/// zero, is inferred. The driver therefore never maps memory at I/O address zero, and also sets the limit to
/// the BAR's base, which makes the window zero bytes long.
pub const INTEL_XBASE_CLOSED: u64 = 0;

/// A translation of zero closes an AMD window, as a length of zero does. The driver writes both.
pub const AMD_XLAT_CLOSED: u64 = 0;

/// AMD: a peer's block that reads all ones while the own side answers means that there is no peer, so nothing comes
/// in through its BAR and the window counts as closed. If wrong: a stale translation survives; the IOMMU still
/// refuses what it points to.
pub const AMD_PEER_SILENT_IS_CLOSED: bool = true;

/// AMD: an access through a side's BAR uses that side's own XLAT and LMT registers, which the peer programs through
/// its view of them. If wrong: data path verification fails in both directions.
pub const AMD_XLAT_IS_PROGRAMMED_BY_PEER: bool = true;

/// Link status of a Sapphire Rapids or Ice Lake link that is up at 16 GT/s and 16 lanes.
pub const LINK_STATUS_GEN4_X16: u16 = 0x2104;
/// Link status of a Skylake link that is up at 8 GT/s and 8 lanes.
pub const LINK_STATUS_GEN3_X8: u16 = 0x2083;

/// Least I/O address that the driver hands to a bridge: see [`INTEL_XBASE_CLOSED`].
pub const LOWEST_IOVA: u64 = 0x10_0000;

/// How long training may take from the moment that both ends ask for it before the driver says that the cable or
/// the peer is missing. PCIe allows 100 ms after reset; bridges with retimers are seen to take up to a second.
pub const LINK_TRAINING: std::time::Duration = std::time::Duration::from_secs(1);

/// An endpoint's firmware polls its command word every 5 ms and must answer within this time.
pub const EPF_COMMAND: std::time::Duration = std::time::Duration::from_secs(1);

/// Whether a doorbell rung while its bit is still set raises another interrupt. Assumed not: the status is a latch
/// and interrupts are its edges. A driver must work either way; if wrong, more interrupts are seen.
pub const DOORBELL_FIRES_WHEN_SET_ALREADY: bool = false;

/// NTBCNTL of Skylake after reset: external configuration locked, link disabled. If wrong: the link is seen up
/// before a driver has asked for it.
pub const GEN3_NTBCNTL_RESET: u32 = 0x3;
