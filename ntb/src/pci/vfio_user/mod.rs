//! Devices served by another process over the vfio-user protocol.

pub mod proto;
