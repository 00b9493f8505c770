//! Two sessions over a simulated wire and a fake clock.

mod channels;
mod chaos;
mod life;
mod world;
