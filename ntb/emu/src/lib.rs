//! A pair of PCIe Non-Transparent Bridge ports in software.
#![allow(missing_docs)]
pub mod model;
pub mod server;
