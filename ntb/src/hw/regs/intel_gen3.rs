//! Intel Xeon "Gen3" register file: Skylake and Cascade Lake.
//!
//! Topology and link status are in configuration space. Names: `ntb_hw_gen3.h` of Linux.

use crate::register_map;

register_map! {
    /// Registers in BAR0.
    pub MAP "intel-gen3" in Bar(0), 0x0000..0x4528 {
        /// NTB control: snoop bits, link disable, configuration lock-out.
        NTBCNTL: u32 Rw @ 0x0000;
        /// Inbound translation of memory window 0.
        IMBAR1XBASE: u64 Rw @ 0x0010;
        /// Inbound limit of memory window 0: own base address of BAR2 + length.
        IMBAR1XLMT: u64 Rw @ 0x0018;
        /// Inbound translation of memory window 1.
        IMBAR2XBASE: u64 Rw @ 0x0020;
        /// Inbound limit of memory window 1: own base address of BAR4 + length.
        IMBAR2XLMT: u64 Rw @ 0x0028;
        /// Latched doorbells and link change (bit 32; by erratum also bit 31).
        IM_INT_STATUS: u64 W1c @ 0x0040;
        /// Mask of the same bits, 1 = masked.
        IM_INT_DISABLE: u64 Rw @ 0x0048;
        /// Rolling count of inbound accesses that missed every window.
        USMEMMISS: u16 Ro @ 0x0070;
        /// Own scratchpads.
        IM_SPAD: [u32; 16] Rw @ 0x0080 step 4;
        /// MSI-X vector that status bit n raises.
        INTVEC: [u8; 33] Rw @ 0x00D0 step 1;
        /// Writing 1 sets status bit n at the peer.
        IM_DOORBELL: [u32; 32] Wo @ 0x0100 step 4;
        /// The peer's scratchpads.
        B2B_SPAD: [u32; 16] Rw @ 0x0180 step 4;
        /// External side: base of its register window.
        EMBAR0XBASE: u64 Rw @ 0x4008;
        /// External side: translation of window 0.
        EMBAR1XBASE: u64 Rw @ 0x4010;
        /// External side: limit of window 0.
        EMBAR1XLMT: u64 Rw @ 0x4018;
        /// External side: translation of window 1.
        EMBAR2XBASE: u64 Rw @ 0x4020;
        /// External side: limit of window 1.
        EMBAR2XLMT: u64 Rw @ 0x4028;
        /// External side: latched interrupts.
        EM_INT_STATUS: u64 W1c @ 0x4040;
        /// External side: interrupt mask.
        EM_INT_DISABLE: u64 Rw @ 0x4048;
        /// External side: scratchpads.
        EM_SPAD: [u32; 16] Rw @ 0x4080 step 4;
        /// External side: doorbells.
        EM_DOORBELL: [u32; 32] Wo @ 0x4100 step 4;
        /// PCI command register of the external side.
        SPCICMD: u16 Rw @ 0x4504;
        /// External side: address of its register BAR.
        EMBAR0: u64 Rw @ 0x4510;
        /// External side: address of the BAR of window 0.
        EMBAR1: u64 Rw @ 0x4518;
        /// External side: address of the BAR of window 1.
        EMBAR2: u64 Rw @ 0x4520;
    }
    gaps {
        0x0004..0x0010, 0x0030..0x0040, 0x0050..0x0070, 0x0072..0x0080, 0x00C0..0x00D0, 0x00F1..0x0100,
        0x01C0..0x4008, 0x4030..0x4040, 0x4050..0x4080, 0x40C0..0x4100, 0x4180..0x4504, 0x4506..0x4510,
    }
}

/// Registers in configuration space.
pub mod cfg {
    crate::register_map! {
        /// Registers in configuration space.
        pub MAP "intel-gen3-config" in Config, 0xD0..0x1A4 {
            /// log2 of the size of BAR2 on this side.
            IMBAR1SZ: u8 Ro @ 0xD0;
            /// log2 of the size of BAR4 on this side.
            IMBAR2SZ: u8 Ro @ 0xD1;
            /// log2 of the size of BAR2 on the external side.
            EMBAR1SZ: u8 Ro @ 0xD2;
            /// log2 of the size of BAR4 on the external side.
            EMBAR2SZ: u8 Ro @ 0xD3;
            /// Port definition: connection and side.
            PPD: u8 Ro @ 0xD4;
            /// Link status of the bridge link, in PCIe format, in extended configuration space.
            LINK_STATUS: u16 Ro @ 0x1A2;
        }
        gaps { 0xD5..0x1A2 }
    }
}

/// Bytes that BAR0 must have.
pub const BAR0_BYTES: u64 = 0x10000;
/// MSI-X table within BAR0.
pub const MSIX_TABLE_OFFSET: u32 = 0x2000;
/// MSI-X pending bits within BAR0.
pub const MSIX_PBA_OFFSET: u32 = 0x2800;
/// MSI-X vectors: one per status bit.
pub const MSIX_VECTORS: u16 = 33;
/// Scratchpads per side.
pub const SPADS: usize = 16;
/// Doorbells for clients: bit 31 is given to the link by the vector-32 erratum.
pub const DOORBELLS: u32 = 31;
/// Status bit of a link change.
pub const LINK_BIT: u32 = 32;
/// Bits to clear after a link change: the erratum's second bit with it.
pub const LINK_BITS: u64 = 1 << 32 | 1 << 31;
/// MSI-X vector that the link change is moved to, since vector 32 does not work.
pub const LINK_VECTOR: u8 = 31;
/// All doorbell bits for clients.
pub const DOORBELL_MASK: u64 = 0x7FFF_FFFF;

/// NTBCNTL: configuration lock-out of the external side.
pub const NTBCNTL_CFG_LOCK: u32 = 1 << 0;
/// NTBCNTL: link disable.
pub const NTBCNTL_LINK_DISABLE: u32 = 1 << 1;
/// NTBCNTL: snoop both windows both ways.
pub const NTBCNTL_SNOOP: u32 = 0x154;
/// LINK_STATUS: data link layer active.
pub const LINK_STATUS_ACTIVE: u16 = 1 << 13;
/// SPCICMD: memory and bus master.
pub const SPCICMD_VALUE: u16 = 0x0006;
/// PPD: mask of connection and side.
pub const PPD_MASK: u8 = 0x13;
/// PPD: back-to-back, upstream device.
pub const PPD_B2B_USD: u8 = 0x01;
/// PPD: back-to-back, downstream device.
pub const PPD_B2B_DSD: u8 = 0x11;
/// PPD: connection field of a transparent port.
pub const PPD_CONN_TRANSPARENT: u8 = 0;
/// PPD: connection field of a root-port (NTB/RP) port.
pub const PPD_CONN_RP: u8 = 2;
/// PPD: BARs split into 32-bit halves; no driver supports it on this generation.
pub const PPD_SPLIT: u8 = 1 << 6;

/// Link addresses of the external side that both drivers use: BAR0.
pub const B2B_BAR0: u64 = 0x1000_0000_0000_0000;
/// Link address of the external BAR of window 0.
pub const B2B_BAR2: u64 = 0x2000_0000_0000_0000;
/// Link address of the external BAR of window 1.
pub const B2B_BAR4: u64 = 0x4000_0000_0000_0000;

/// INTVEC\[n\] after reset: n + 1, and 0 for the link bit.
pub const fn intvec_reset(n: usize) -> u8 {
    if n < 32 { n as u8 + 1 } else { 0 }
}
