//! The device models: registers, windows, interrupts, link. Nothing here knows how a host reaches them.
//!
//! | module | what |
//! | --- | --- |
//! | [`pair`] | two ports, their lock and their clock: the interface |
//! | `state`, `cross` | link, interrupts, time; what crosses the link, whatever the family |
//! | [`mod@family`] | what a family adds; one file each: [`intel_gen4`], [`intel_gen3`], [`amd`], [`epf`] |
//! | [`config`], [`regfile`] | configuration space; registers with access rules per bit |
//! | [`dma`] | the hosts' memory by bus address |
//! | [`irq`] | event descriptors |
//! | [`account`] | packets, bytes and events counted |
//! | [`disturb`] | what can go wrong, and when |

#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing
)]
#![cfg_attr(
    test,
    allow(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

pub mod account;
pub mod amd;
pub mod config;
mod cross;
pub mod disturb;
pub mod dma;
pub mod epf;
pub mod family;
mod intel;
pub mod intel_gen3;
pub mod intel_gen4;
pub mod irq;
pub mod pair;
pub mod regfile;
pub mod side;
mod state;

pub use account::Snapshot;
pub use disturb::Action;
pub use dma::{DmaAccess, MAX_DMA_MAPS};
pub use family::Family;
pub use irq::IrqKind;
pub use pair::{Pair, PairConfig, Port};
pub use side::SideId;
pub use state::{Actor, State};

/// Every family, in the order in which they are offered.
pub static FAMILIES: [&dyn Family; 6] = [
    &intel_gen4::SPR,
    &intel_gen4::ICX,
    &intel_gen4::GNR,
    &intel_gen3::SKX,
    &amd::AMD,
    &epf::EPF,
];

/// The family of this name.
pub fn family(name: &str) -> Option<&'static dyn Family> {
    FAMILIES.into_iter().find(|f| f.name() == name)
}
