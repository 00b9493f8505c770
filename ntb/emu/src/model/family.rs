//! What tells one family of bridges from another.

use std::fmt;

use super::{
    config::{BarSpec, ConfigSpec},
    regfile::RegFile,
    side::SideId,
    state::{Actor, State},
};

/// Where a window leads: what the exposing side's registers say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// Bus address that offset 0 of the window becomes.
    pub base: u64,
    /// Bytes let through from offset 0.
    pub bytes: u64,
}

/// A family's registers and rules. All state is in [`State`]; accesses arrive in naturally aligned pieces.
pub trait Family: fmt::Debug + Sync {
    /// Name for people and files.
    fn name(&self) -> &'static str;
    /// Configuration space.
    fn config(&self) -> ConfigSpec;
    /// Base address registers, for windows of `window_bytes`.
    fn bars(&self, window_bytes: u64) -> Vec<BarSpec>;
    /// Which window a BAR is, if it is one.
    fn window_of(&self, bar: u8) -> Option<usize>;
    /// The registers in BAR0 after power-on; what lies in configuration space is added to `config`.
    fn power_on(&self, side: SideId, window_bytes: u64, config: &mut RegFile) -> RegFile;
    /// A load from a register BAR.
    fn read(&self, st: &mut State, side: SideId, bar: u8, at: u64, out: &mut [u8]);
    /// A store to a register BAR.
    fn write(&self, st: &mut State, side: SideId, bar: u8, at: u64, data: &[u8]);
    /// Where accesses of `from` to a window go; `None` while it is closed.
    fn translation(&self, st: &State, from: SideId, window: usize) -> Option<Translation>;
    /// Registers that say where accesses of a side to a window go, as offset and bytes, where they are that side's own and
    /// the other side writes them: a write that is lost on its way leaves them leading elsewhere.
    fn window_registers(&self, _window: usize) -> &'static [(u32, u32)] {
        &[]
    }
    /// Whether this side's registers ask for the link.
    fn wants_link(&self, st: &State, side: SideId) -> bool;
    /// Whether anything can cross.
    fn connected(&self, st: &State) -> bool;
    /// The link has come or gone.
    fn link_changed(&self, st: &mut State, side: SideId, by: Actor);
    /// Speed or width have changed, without the link going down.
    fn lanes_changed(&self, st: &mut State, side: SideId);
    /// The function is about to be reset.
    fn before_reset(&self, _st: &mut State, _side: SideId) {}
    /// The other side has written `len` bytes of `side`'s registers.
    fn peer_wrote(&self, _st: &mut State, _side: SideId, _offset: u32, _len: usize) {}
    /// Doorbells rung by the other side have arrived.
    fn doorbells(&self, st: &mut State, side: SideId, bits: u64);
    /// An access has missed `side`'s window.
    fn missed(&self, _st: &mut State, _side: SideId) {}
}
