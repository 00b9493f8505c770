//! Intel Xeon "Gen4" register file: Ice Lake, Sapphire Rapids, Emerald Rapids, Granite Rapids.
//!
//! Both ends of a back-to-back link see the same map. Names: `ntb_hw_gen4.h` of Linux.

use crate::register_map;

register_map! {
    /// Registers in BAR0.
    pub MAP "intel-gen4" in Bar(0), 0x0000..0x10000 {
        /// NTB control: snoop bits of each window and direction, link-down bit.
        NTBCNTL: u32 Rw @ 0x0000;
        /// Inbound translation of memory window 0.
        IM23XBASE: u64 Rw @ 0x0010;
        /// Inbound limit of memory window 0: own base address of BAR2 + length.
        IM23XLMT: u64 Rw @ 0x0018;
        /// Inbound translation of memory window 1.
        IM45XBASE: u64 Rw @ 0x0020;
        /// Inbound limit of memory window 1: own base address of BAR4 + length.
        IM45XLMT: u64 Rw @ 0x0028;
        /// Latched doorbells (bits 0..=31) and link change (bit 32).
        IM_INT_STATUS: u64 W1c @ 0x0040;
        /// Mask of the same bits, 1 = masked.
        IM_INT_DISABLE: u64 Rw @ 0x0048;
        /// MSI-X vector that status bit n raises.
        INTVEC: [u8; 33] Rw @ 0x0050 step 1;
        /// log2 of the size of memory window 0 (Ice Lake).
        IM23XBASEIDX: u16 Rw @ 0x0074;
        /// log2 of the size of memory window 1 (Ice Lake).
        IM45XBASEIDX: u16 Rw @ 0x0076;
        /// Own scratchpads: the peer writes them through its [`EM_SPAD`].
        IM_SPAD: [u32; 16] Rw @ 0x0080 step 4;
        /// Hardware semaphore: a read takes it.
        SPAD_SEM: u32 ReadSets @ 0x00C0;
        /// Scratchpad that survives reset.
        SPAD_STICKY: u32 Rw @ 0x00C4;
        /// Writing 1 sets status bit n at the peer.
        IM_DOORBELL: [u32; 32] Wo @ 0x0100 step 4;
        /// Base address of the external BAR of memory window 0.
        EMBAR1_BASE: u64 Rw @ 0x3018;
        /// Base address of the external BAR of memory window 1.
        EMBAR2_BASE: u64 Rw @ 0x3020;
        /// Latency tolerance reporting: 0 active, 1 idle (Sapphire Rapids and later).
        LTR_SWSEL: u8 Rw @ 0x30EC;
        /// Latency tolerated while active.
        LTR_ACTIVE: u32 Rw @ 0x30F0;
        /// Latency tolerated while idle.
        LTR_IDLE: u32 Rw @ 0x30F4;
        /// The peer's scratchpads.
        EM_SPAD: [u32; 16] Rw @ 0x8080 step 4;
        /// Link control in PCIe format; bit 4 disables the link.
        LINK_CTRL: u16 Rw @ 0xB050;
        /// Link status in PCIe format; bit 13 is "data link active".
        LINK_STATUS: u16 Ro @ 0xB052;
        /// Slot status in PCIe format; bit 8 must be cleared before the link interrupt can be.
        SLOTSTS: u16 W1c @ 0xB05A;
        /// Port definition 0: link training.
        PPD0: u32 Rw @ 0xB0D4;
        /// Port definition 1: topology.
        PPD1: u32 Ro @ 0xB4C0;
        /// LTSSM state jump.
        LTSSMSTATEJMP: u32 Rw @ 0xF040;
    }
    gaps {
        0x0004..0x0010, 0x0030..0x0040, 0x0071..0x0074, 0x0078..0x0080, 0x00C8..0x0100, 0x0180..0x3018,
        0x3028..0x30EC, 0x30ED..0x30F0, 0x30F8..0x8080, 0x80C0..0xB050, 0xB054..0xB05A, 0xB05C..0xB0D4,
        0xB0D8..0xB4C0, 0xB4C4..0xF040, 0xF044..0x10000,
    }
}

/// Registers in configuration space that firmware sets.
pub mod cfg {
    crate::register_map! {
        /// Registers in configuration space.
        pub MAP "intel-gen4-config" in Config, 0xC4..0xC8 {
            /// log2 of the size of BAR2 on this side.
            IMBAR23SZ: u8 Ro @ 0xC4;
            /// log2 of the size of BAR4 on this side.
            IMBAR45SZ: u8 Ro @ 0xC5;
            /// log2 of the size of BAR2 on the external side.
            EMBAR23SZ: u8 Ro @ 0xC6;
            /// log2 of the size of BAR4 on the external side.
            EMBAR45SZ: u8 Ro @ 0xC7;
        }
        gaps {}
    }
}

/// Bytes of BAR0.
pub const BAR0_BYTES: u64 = 0x10000;
/// MSI-X table within BAR0: where the firmware of the earlier generations puts it; unused by registers here.
pub const MSIX_TABLE_OFFSET: u32 = 0x2000;
/// MSI-X pending bits within BAR0.
pub const MSIX_PBA_OFFSET: u32 = 0x2800;
/// MSI-X vectors: one per doorbell and one for the link.
pub const MSIX_VECTORS: u16 = 33;
/// Scratchpads per side.
pub const SPADS: usize = 16;
/// Doorbells for clients.
pub const DOORBELLS: u32 = 32;
/// Status bit of a link change.
pub const LINK_BIT: u32 = 32;
/// All doorbell bits.
pub const DOORBELL_MASK: u64 = 0xFFFF_FFFF;

/// NTBCNTL: snoop both windows both ways; what link-enable writes.
pub const NTBCNTL_SNOOP: u32 = 0x154;
/// NTBCNTL: link down.
pub const NTBCNTL_LINK_DOWN: u32 = 1 << 16;
/// LINK_CTRL: link disable.
pub const LINK_CTRL_DISABLE: u16 = 1 << 4;
/// LINK_STATUS: data link layer active.
pub const LINK_STATUS_ACTIVE: u16 = 1 << 13;
/// SLOTSTS: data link layer state changed.
pub const SLOTSTS_DLLSCS: u16 = 1 << 8;
/// PPD0: start link training; reads as 1 once taken.
pub const PPD0_TRAIN: u32 = 1 << 3;
/// PPD0: clear training.
pub const PPD0_CLEAR_TRAIN: u32 = 1 << 0;
/// LTR_ACTIVE as the Linux driver sets it: 0 µs.
pub const LTR_ACTIVE_VALUE: u32 = 0x8800_8800;
/// LTR_IDLE as the Linux driver sets it: 600 µs.
pub const LTR_IDLE_VALUE: u32 = 0x8A58_8A58;
/// LTR_SWSEL: active values are reported.
pub const LTR_SWSEL_ACTIVE: u8 = 0;
/// LTR_SWSEL: idle values are reported.
pub const LTR_SWSEL_IDLE: u8 = 1;
/// IMxxXBASEIDX after a clear on Ice Lake.
pub const BASEIDX_CLOSED: u16 = 0xFFFF;

/// PPD1 on Ice Lake: mask of the topology bits.
pub const ICX_PPD1_MASK: u32 = 0x1300;
/// PPD1 on Ice Lake: back-to-back, upstream device.
pub const ICX_PPD1_B2B_USD: u32 = 0x0200;
/// PPD1 on Ice Lake: back-to-back, downstream device.
pub const ICX_PPD1_B2B_DSD: u32 = 0x1200;
/// PPD1 from Sapphire Rapids on: mask of the topology bits.
pub const SPR_PPD1_MASK: u32 = 0x4700;
/// PPD1 from Sapphire Rapids on: back-to-back, upstream device.
pub const SPR_PPD1_B2B_USD: u32 = 0x0200;
/// PPD1 from Sapphire Rapids on: back-to-back, downstream device.
pub const SPR_PPD1_B2B_DSD: u32 = 0x4200;

/// INTVEC\[n\] after reset: n + 1, and 0 for the link bit.
pub const fn intvec_reset(n: usize) -> u8 {
    if n < DOORBELLS as usize { n as u8 + 1 } else { 0 }
}
