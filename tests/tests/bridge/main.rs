//! Links over bridges, on emulated ports of every family: the conformance suite of links, and what goes wrong on bridges.

mod channels;
mod conformance;
mod rig;
mod trouble;
