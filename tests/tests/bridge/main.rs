//! Links over bridges, on emulated ports of every family: the conformance suite of links, and what goes wrong on bridges.

mod channels;
mod choice;
mod conformance;
mod rig;
mod trouble;
