//! `ntb-ping`.

pub mod measure;
pub mod message;
