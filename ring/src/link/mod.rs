//! What a ring needs of a transport.

pub mod engine;
