//! GPU memory at either end of a link.
//!
//! - [`seam`]: what is needed of a GPU, whoever made it. [`cuda`]: NVIDIA's.
//! - [`memory`]: memory of a GPU, and how a bridge is let into it.
//! - [`gdrcopy`]: another way to have GPU memory mapped.
//! - [`aperture`]: a bridge's aperture, and memory of the host, as kernels reach them.
//! - [`inbound`]: a window onto memory of a GPU; [`proof`]: its way, shown to carry data before it is used.
//! - [`local`]: messages between a GPU and the processor of one machine; [`across`]: a trial between two hosts.
//! - [`ends`]: ring ends on a GPU. [`channel`]: ends of a session's channels on a GPU.
//! - [`kernels`]: device code, its arguments and its state.
//!
//! No program needs a GPU or its driver to be built or started: the driver's library is looked for at run time, and whatever
//! is missing is an error that says so.

pub mod across;
pub mod aperture;
pub mod channel;
pub mod cuda;
pub mod ends;
mod error;
pub mod gdrcopy;
pub mod inbound;
pub mod kernels;
pub mod local;
pub mod memory;
mod pace;
pub mod proof;
pub mod seam;
mod stage;

pub use error::GpuError;
