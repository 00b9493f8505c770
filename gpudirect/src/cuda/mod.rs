//! NVIDIA GPUs, by the driver's own interface, loaded at run time.
//!
//! Constants and types come from `cudarc`. Its loader and its wrappers are not used: they panic where the library or a symbol
//! is missing, and they read results as a Rust enumeration, which a newer driver's number would make undefined behaviour. So
//! each symbol is looked up here once, results are numbers, and unknown ones are errors with that number.

mod codes;
mod device;
mod library;
mod running;

pub use device::Cuda;
pub use library::{Driver, SYMBOLS};
