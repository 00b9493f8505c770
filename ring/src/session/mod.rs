//! One link's life as a state machine without I/O: `(now, inputs) -> actions`.
//!
//! The caller reads the link's status, registers and inbound memory, and carries the actions out; time is an input. So
//! the whole life of a link, deaths and restarts included, runs in tests with a fake clock.

mod types;

pub use types::{
    Action, ChannelId, ChannelSpec, CloseReason, Event, Inputs, Lanes, Mismatch, OpenError, PeerInfo,
    SessionConfig, SessionState,
};
