//! The protocols of the kernel's clients with this implementation at both ends, over emulated bridges of every family.
//! That the kernel understands the same is for the lab to show.

mod perf;
mod pingpong;
mod rig;
mod transport;
