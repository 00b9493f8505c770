//! Messaging over posted-write links.
//!
//! - [`link`]: what a ring needs of a transport, and the transports.
//! - [`wire`]: everything both hosts must agree on, byte by byte.
//! - [`address`]: how links are named.
//! - [`session`]: one link's life as a state machine without I/O.
//! - [`queue`]: the single-producer single-consumer ring.

pub mod address;
// Models are of the ring; what makes system calls has no place in them.
#[cfg(not(loom))]
pub mod channel;
pub mod link;
pub mod queue;
pub mod session;
pub mod wire;
