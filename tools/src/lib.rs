//! What the tools are made of.
//!
//! - [`cli`]: options whose errors are one line that names the allowed range.
//! - [`stats`]: histograms whose percentiles are shown only when enough samples back them, sequence checks, histogram
//!   logs.
//! - [`pace`]: schedules that do not slip when the far end stalls.
//! - [`floor`]: the bare hand-off between two cores that everything else is compared with.
//! - [`noise`]: what the operating system took from a thread while it measured.
//! - [`environment`]: facts of the machine that change results.
//! - [`report`]: one structure, printed as text or as JSON.
//! - [`check`]: the program `ntb-check`: what a machine with a bridge lacks, and what to do.
//! - [`linux`]: `ntb-ping linux`: the protocols of a Linux kernel's NTB clients.
//! - [`ping`]: the program `ntb-ping`, which `bin/ntb-ping.rs` only calls.

pub mod check;
pub mod cli;
pub mod environment;
pub mod exit;
pub mod floor;
pub mod interrupt;
pub mod linux;
pub mod noise;
pub mod pace;
pub mod ping;
pub mod report;
pub mod stats;
