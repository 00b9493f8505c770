//! Messaging over posted-write links.
//!
//! - [`link`]: what a ring needs of a transport, and the transports.
//! - [`wire`]: everything both hosts must agree on, byte by byte.
//! - [`queue`]: the single-producer single-consumer ring.

pub mod link;
pub mod queue;
pub mod wire;
