//! A small interpreter of PTX: what the device code of this project uses, and nothing else. Anything unknown is refused when the
//! text is parsed, so that a kernel never runs differently from what it says.
//!
//! One block, its threads one after the other between barriers, memory through [`Memory`]. Loads and stores get the order that
//! the text asks for, as the host's processor understands it. So this shows what the code computes and in which order it
//! publishes; it shows nothing about a GPU's memory system.

mod parse;
mod run;

use std::{fmt, sync::atomic::Ordering};

pub use parse::Module;
pub use run::run;

/// Memory that kernels reach by address.
pub trait Memory {
    /// Loads 1, 4 or 8 bytes at an address that is a multiple of that.
    fn load(&self, at: u64, bytes: u32, order: Ordering) -> Result<u64, Fault>;
    /// Stores as many.
    fn store(&self, at: u64, bytes: u32, value: u64, order: Ordering) -> Result<(), Fault>;
}

/// Why a kernel was stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// An access outside of what it may reach, or misaligned.
    Address {
        /// Where.
        at: u64,
        /// How many bytes.
        bytes: u32,
        /// Whether it was a store.
        store: bool,
    },
    /// There is no such kernel, or it takes other arguments.
    Call(String),
    /// Some threads wait at a barrier and others have ended: undefined on a GPU.
    Barrier,
    /// Division by zero: undefined on a GPU.
    Division,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}
