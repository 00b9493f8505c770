//! `ntb_netdev` of the kernel: each frame of queue pair 0 is one Ethernet frame, without check sequence.
//!
//! [`answer`] is a host of one address that answers the address resolution protocol and pings, and asks them itself;
//! [`tap`] hands frames to this machine's own network stack.

pub mod answer;
pub mod tap;
