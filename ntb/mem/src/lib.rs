//! Memory for links made of posted writes.
//!
//! A leaf crate: it knows lines, stores per memory type, mapped regions and the clock, and nothing of
//! bridges or rings.
//!
//! - [`sync`]: the one module that process-local atomics, fences and spin hints go through.
//! - [`mod@line`]: the 64-byte line, unit of everything that crosses a link.
//! - [`store`]: how a line is stored to each kind of memory, and what the processor offers for it.
//! - [`region`]: mapped memory that another party writes: allocation, views, revocation.
//! - [`export`]: memory that devices may be let into, whoever owns it.
//! - [`cpu`]: the processor features that stores depend on, injectable for tests.
//! - [`waive`]: what a test could not try, said so that it is counted.
//! - [`clock`]: time stamps from the cycle counter, or from the system clock where that one is not fit.
//!
//! Memory that a peer or a device writes is never a slice or a reference here: it is read and written
//! through atomics of fixed width ([`region::View`]) or through the store routines.

pub mod clock;
pub mod cpu;
pub mod export;
pub mod line;
pub mod region;
pub mod store;
pub mod sync;
pub mod waive;
