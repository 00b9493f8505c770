//! The protocols of the Linux kernel's NTB clients, spoken by the user-space driver: one host of a pair can be moved to
//! user space while the other still runs the kernel's modules.
//!
//! | module | speaks to | what goes over |
//! | --- | --- | --- |
//! | [`pingpong`] | `ntb_pingpong` | a count in a scratchpad and a doorbell |
//! | [`perf`] | `ntb_perf` | bytes into a memory window, after a greeting by scratchpads |
//! | [`transport`] | `ntb_transport`, version 4 | frames through queue pairs |
//! | [`netdev`] | `ntb_netdev` over a queue pair | Ethernet frames: to a TAP device, or answered here |
//!
//! A port serves one client at a time, as in the kernel. Clients are driven by their caller: call `poll` often, and
//! `wait` where there is one between calls. Nothing is spawned.
//!
//! Everything the peer writes is hostile until it is copied and checked: scratchpads, frame headers, consumer
//! indexes, and the packets in the frames. Numbers on the wire are little-endian.
//!
//! Layouts and constants are those that the kernel's drivers use (`drivers/ntb/ntb_transport.c`, `drivers/ntb/test/`,
//! `drivers/net/ntb_netdev.c` of Linux 6.12), restated.

// Every module here faces a peer: none of them may be made to panic.
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

mod error;
mod link;
pub mod netdev;
mod outbound;
pub mod perf;
pub mod pingpong;
pub mod transport;

pub use error::LinuxError;
