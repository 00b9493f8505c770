//! A user-space driver for PCIe Non-Transparent Bridges.
//!
//! Three layers, each behind a seam that has several implementations:
//!
//! - [`pci`]: one PCI function: configuration space, BARs, interrupts, DMA ([`pci::PciFunction`]).
//! - [`hw`]: one NTB port on top of it: link, windows, doorbells, scratchpads.
//!
//! Nothing here knows of rings or messages. Whatever a peer or a device answers is checked; all ones is taken
//! for "nobody answered" before it is taken for anything else.

pub mod hw;
pub mod pci;
