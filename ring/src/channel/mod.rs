//! What applications use: connections with named channels over any link.
//!
//! ```no_run
//! use std::time::Duration;
//! use ntb_ring::{
//!     channel::{Connection, Options},
//!     link::select::{self, LinkOptions},
//!     session::ChannelSpec,
//! };
//!
//! let opened = select::open(&"soft:demo".parse()?, &LinkOptions::default())?;
//! let connection = Connection::open(opened.link, &Options::default())?;
//! let (mut tx, mut rx) = connection.channel("quotes", ChannelSpec::default())?;
//! tx.wait_connected(Duration::from_secs(60))?;
//! tx.send(b"hello", Duration::from_secs(1))?;
//! let mut buf = [0; 64];
//! let got = rx.recv(&mut buf, Duration::from_secs(1))?;
//! println!("{:?}", &buf[..got.len]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A channel is a ring in each direction. Its two ends at one side, [`Sender`] and [`Receiver`], may live in different
//! threads; neither can be shared. They outlive the peer: when it dies, the next call of each end says so once, with what
//! is known of the messages under way, and when it comes back they go on with a new life.

mod connection;
mod device;
mod error;
mod memory;
mod receiver;
mod sender;
mod service;
mod shared;
mod wait;

pub use connection::{Connection, Options};
pub use device::LentLane;
pub use error::{ConnectError, Lost, RecvFailure, SendFailure};
pub use receiver::{Receiver, ReceiverStats};
pub use sender::{ChannelClaim, HoldUp, Sender, SenderStats};
pub use service::{Driver, ServiceStats};
pub use wait::Wait;

#[cfg(test)]
mod tests;
