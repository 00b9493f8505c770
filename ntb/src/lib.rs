//! A user-space driver for PCIe Non-Transparent Bridges.
//!
//! Layers:
//!
//! - [`pci`]: one PCI function: configuration space, BARs, interrupts, DMA ([`pci::PciFunction`]).
//! - [`hw`]: one NTB port on top of it: link, windows, doorbells, scratchpads.
//! - [`window`]: memory that the peer reaches, and the aperture onto the peer's.
//! - [`health`]: removal, errors, lanes that fall away.
//! - [`address`]: where a port is: `ntb:BDF`, `emu:PATH`.
//!
//! [`conformance`] has the test suites that every implementation of a seam must pass.
//!
//! Nothing here knows of rings or messages. Whatever a peer or a device answers is checked; all ones is taken
//! for "nobody answered" before it is taken for anything else.

// Every module here faces a device or a peer: none of them may be made to panic.
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

pub mod address;
pub mod conformance;
pub mod health;
pub mod hw;
pub mod pci;
pub mod window;
