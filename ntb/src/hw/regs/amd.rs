//! AMD NTB register file, one side. The peer's block is visible [`PEER`] bytes further in the same BAR.
//!
//! Names: `ntb_hw_amd.h` of Linux.

use crate::register_map;

register_map! {
    /// Registers in BAR0.
    pub MAP "amd" in Bar(0), 0x0200..0x04A4 {
        /// NTB control.
        CNTL: u32 Rw @ 0x0200;
        /// NTB status.
        STA: u32 Ro @ 0x0204;
        /// Scratchpad multiplexer.
        SPAD_MUX: u32 Rw @ 0x020C;
        /// Scratchpads, one set shared by both sides: the primary side owns the first eight.
        SPAD: [u32; 16] Rw @ 0x0210 step 4;
        /// Side (bit 0) and readiness (bit 1).
        SIDEINFO: u32 Rw @ 0x0408;
        /// Length of window BAR1.
        BAR1LMT: u32 Rw @ 0x0414;
        /// Length in bytes of window BAR2/3.
        BAR23LMT: u64 Rw @ 0x0418;
        /// Length in bytes of window BAR4/5.
        BAR45LMT: u64 Rw @ 0x0420;
        /// Translation of accesses through this side's BAR1.
        BAR1XLAT: u64 Rw @ 0x0430;
        /// Translation of accesses through this side's BAR2/3: programmed by the peer.
        BAR23XLAT: u64 Rw @ 0x0438;
        /// Translation of accesses through this side's BAR4/5: programmed by the peer.
        BAR45XLAT: u64 Rw @ 0x0440;
        /// Doorbell function mode.
        DBFM: u32 Rw @ 0x0450;
        /// Writing bits rings them at the peer.
        DBREQ: u16 Wo @ 0x0454;
        /// Mirror of the peer's doorbell status.
        MIRRDBSTAT: u16 Ro @ 0x0458;
        /// Doorbell mask, 1 = masked.
        DBMASK: u16 Rw @ 0x045C;
        /// Latched doorbells.
        DBSTAT: u16 W1c @ 0x0460;
        /// Event mask, 1 = masked.
        INTMASK: u32 Rw @ 0x0470;
        /// Latched events.
        INTSTAT: u32 W1c @ 0x0474;
        /// Power-management status: bit 0 wake-up done.
        PMESTAT: u32 Rw @ 0x0480;
        /// Acknowledgement of events.
        SMUACK: u32 Rw @ 0x04A0;
    }
    gaps {
        0x0208..0x020C, 0x0250..0x0408, 0x040C..0x0414, 0x0428..0x0430, 0x0448..0x0450, 0x0456..0x0458,
        0x045A..0x045C, 0x045E..0x0460, 0x0462..0x0470, 0x0478..0x0480, 0x0484..0x04A0,
    }
}

/// Distance from a register of the 0x400 block to the peer's copy of it.
pub const PEER: u32 = 0x400;
/// Bytes that BAR0 must have.
pub const BAR0_BYTES: u64 = 0x1000;
/// MSI-X vectors: 16 doorbells, then events.
pub const MSIX_VECTORS: u16 = 24;
/// The least number of MSI-X vectors.
pub const MSIX_VECTORS_MIN: u16 = 16;
/// MSI-X vector of the first event.
pub const EVENT_VECTOR: u16 = 16;
/// Scratchpads per side.
pub const SPADS: usize = 8;
/// Doorbells for clients.
pub const DOORBELLS: u32 = 15;
/// All doorbell bits for clients.
pub const DOORBELL_MASK: u64 = 0x7FFF;
/// The doorbell by which a driver says that it goes away.
pub const DOORBELL_GONE: u16 = 1 << 15;

/// CNTL: register control towards the secondary side.
pub const CNTL_REG_CTL: u32 = 0x0030_0000;
/// SIDEINFO: secondary side.
pub const SIDEINFO_SECONDARY: u32 = 1 << 0;
/// SIDEINFO: driver ready.
pub const SIDEINFO_READY: u32 = 1 << 1;
/// INTSTAT: peer was flushed.
pub const INT_PEER_FLUSH: u32 = 1 << 0;
/// INTSTAT: peer was reset.
pub const INT_PEER_RESET: u32 = 1 << 1;
/// INTSTAT: peer went to D3.
pub const INT_PEER_D3: u32 = 1 << 2;
/// INTSTAT: turn-off message.
pub const INT_PME_TO: u32 = 1 << 3;
/// INTSTAT: peer came back to D0.
pub const INT_PEER_D0: u32 = 1 << 4;
/// INTSTAT: link up.
pub const INT_LINK_UP: u32 = 1 << 5;
/// INTSTAT: link down.
pub const INT_LINK_DOWN: u32 = 1 << 6;
/// INTMASK: every event masked.
pub const INT_ALL: u32 = 0x7F;
