//! NTB ports.

pub mod inferred;
pub mod regs;
