//! Control block of the Linux endpoint NTB (`pci-epf-ntb`, `pci-epf-vntb`), as the host sees it in its configuration BAR.
//!
//! Scratchpads follow at [`SPAD_OFFSET`]; where the peer's scratchpads share the BAR, they stand right behind them.

use crate::register_map;

register_map! {
    /// The control block.
    pub MAP "epf" in Bar(0), 0x000..0x134 {
        /// Command; the firmware zeroes it when it has taken it.
        COMMAND: u32 Rw @ 0x00;
        /// Argument of the command.
        ARGUMENT: u32 Rw @ 0x04;
        /// Outcome of the last command.
        CMD_STATUS: u16 Rw @ 0x08;
        /// Bit 0: link up.
        LINK_STATUS: u16 Ro @ 0x0A;
        /// Topology; not used by drivers.
        TOPOLOGY: u32 Ro @ 0x0C;
        /// Address of the window to configure, low half.
        LOWER_ADDR: u32 Rw @ 0x10;
        /// High half.
        UPPER_ADDR: u32 Rw @ 0x14;
        /// Size of the window to configure, low half.
        LOWER_SIZE: u32 Rw @ 0x18;
        /// High half.
        UPPER_SIZE: u32 Rw @ 0x1C;
        /// Memory windows, 1 to 4.
        MW_COUNT: u32 Ro @ 0x20;
        /// Where window 0 starts in its BAR.
        MW1_OFFSET: u32 Ro @ 0x24;
        /// Where the own scratchpads start in the configuration BAR.
        SPAD_OFFSET: u32 Ro @ 0x28;
        /// Scratchpads per side.
        SPAD_COUNT: u32 Ro @ 0x2C;
        /// Bytes between two doorbells in the doorbell BAR.
        DB_ENTRY_SIZE: u32 Ro @ 0x30;
        /// Value to write to ring slot n.
        DB_DATA: [u32; 32] Ro @ 0x34 step 4;
        /// Offset within slot n.
        DB_OFFSET: [u32; 32] Ro @ 0xB4 step 4;
    }
    gaps {}
}

/// Command: configure the doorbell with so many vectors.
pub const CMD_CONFIGURE_DOORBELL: u32 = 1;
/// Command: tear the doorbell down.
pub const CMD_TEARDOWN_DOORBELL: u32 = 2;
/// Command: configure a memory window.
pub const CMD_CONFIGURE_MW: u32 = 3;
/// Command: tear a memory window down.
pub const CMD_TEARDOWN_MW: u32 = 4;
/// Command: link up.
pub const CMD_LINK_UP: u32 = 5;
/// Command: link down.
pub const CMD_LINK_DOWN: u32 = 6;
/// Argument of the doorbell command: vectors are MSI-X.
pub const ARG_MSIX: u32 = 1 << 16;
/// Outcome: good.
pub const STATUS_OK: u16 = 1;
/// Outcome: refused.
pub const STATUS_ERROR: u16 = 2;
/// LINK_STATUS: up.
pub const LINK_UP: u16 = 1 << 0;
/// MSI-X vectors: least.
pub const MSIX_VECTORS_MIN: u16 = 4;
/// MSI-X vectors: most.
pub const MSIX_VECTORS_MAX: u16 = 32;
/// Memory windows: most.
pub const MW_MAX: u32 = 4;
/// Interrupt slot of the link event.
pub const SLOT_LINK: u32 = 0;
/// Interrupt slot of doorbell 0; slot 1 is never used.
pub const SLOT_DOORBELL0: u32 = 2;
/// PCI class that a function must have: memory, RAM.
pub const CLASS: u32 = 0x05_0000;
