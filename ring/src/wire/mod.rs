//! Everything that both hosts must agree on, byte by byte. `docs/wire.md` says the same in prose with test vectors.
//!
//! All fields are little-endian and of fixed width. Nothing here knows how bytes travel.

pub(crate) mod beat;
pub mod check;
#[cfg(fuzzing)]
pub mod fuzz;
pub(crate) mod hash;
pub(crate) mod hello;
pub(crate) mod identity;
pub mod layout;
pub mod line;
pub mod mark;
pub mod page;
pub mod pattern;
pub(crate) mod record;
pub(crate) mod registers;
pub(crate) mod table;
#[cfg(test)]
mod vectors;
