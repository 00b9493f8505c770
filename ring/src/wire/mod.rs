//! Everything that both hosts must agree on, byte by byte. `docs/wire.md` says the same in prose with test vectors.
//!
//! All fields are little-endian and of fixed width. Nothing here knows how bytes travel.

pub mod check;
pub mod line;
pub mod mark;
pub mod page;
