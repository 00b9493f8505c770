//! A register-accurate pair of PCIe Non-Transparent Bridge ports in software.
//!
//! Two ports joined by a link, each served over the vfio-user protocol: to this project's driver, and to QEMU's
//! `vfio-user-pci`, in whose guests the Linux NTB drivers bind to it. Offered to everybody who tests software
//! for such bridges.
//!
//! ```no_run
//! use ntb_emu::{EmuConfig, Emulator, model};
//!
//! let spr = model::family("intel-spr").expect("it is on the list");
//! let config = EmuConfig::new(spr, "@demo-a".parse()?, "@demo-b".parse()?);
//! let emulator = Emulator::start(config)?;
//! // ... connect a client to each end, then:
//! emulator.control().act_text("link flap 20ms")?;
//! println!("{}", emulator.control().report().pair.a_to_b.window_writes);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! - [`model`]: the devices: registers, windows, interrupts, link. Knows nothing of sockets.
//! - [`server`]: the vfio-user server, which no client can crash, hang or starve.
//! - [`scenario`]: what goes wrong and when, as text.
//! - [`emulator`]: all of it together.

pub mod control;
pub mod emulator;
pub mod model;
pub mod scenario;
pub mod server;

pub use emulator::{Control, EmuConfig, EmuError, Emulator, Report};
