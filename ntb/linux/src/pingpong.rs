//! `ntb_pingpong`: a count in the peer's first scratchpad and a doorbell, back and forth with a pause.
//!
//! A side's doorbell is the bit of its own port number. The ringer writes its count first; who is rung counts one more
//! and rings back after its pause. Both sides begin when the link comes up.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use ntb::hw::NtbPort;

use crate::{
    LinuxError,
    link::{Change, Watch},
};

/// Name of the kernel's client, for messages.
const CLIENT: &str = "ntb_pingpong";
/// Scratchpad with the ringer's count.
const COUNT: usize = 0;

/// A ring of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pong {
    /// Rings heard so far, this one included.
    pub heard: u32,
    /// The peer's count, as it says.
    pub value: u32,
}

/// One side of the game.
#[derive(Debug)]
pub struct PingPong {
    watch: Watch,
    port: Arc<dyn NtbPort>,
    pause: Duration,
    ping_at: Option<Instant>,
    heard: u32,
}

impl PingPong {
    /// Takes a quiet port and asks for the link. `pause` is the time between hearing and ringing: `delay_ms` of the
    /// kernel's module.
    pub fn open(port: &Arc<dyn NtbPort>, pause: Duration) -> Result<Self, LinuxError> {
        let needed = 1 << port.role().port() | 1 << port.role().peer_port();
        let few = |what, needed, found| LinuxError::TooFew {
            device: port.function().name().to_owned(),
            client: CLIENT,
            what,
            needed,
            found,
        };
        let bits: u64 = port.doorbell_bits();
        if bits & needed != needed {
            return Err(few("doorbells", needed.ilog2().into(), bits.count_ones().into()));
        }
        if port.scratchpads() == 0 {
            return Err(few("scratchpads", 1, 0));
        }
        port.unmask_doorbells(own_bit(&**port))?;
        Ok(Self {
            watch: Watch::start(port)?,
            port: Arc::clone(port),
            pause,
            ping_at: None,
            heard: 0,
        })
    }

    /// Whether the link is up.
    pub fn is_up(&self) -> bool {
        self.watch.is_up()
    }

    /// What is missing while nothing is heard.
    pub fn missing(&self) -> &'static str {
        match self.is_up() {
            false => "the link is down. Check the cable, and that a driver of the peer has its port",
            true => "the link is up and nobody rings. Load ntb_pingpong there",
        }
    }

    /// Does what is due; a ring that was heard is returned. Call it every few milliseconds.
    pub fn poll(&mut self) -> Result<Option<Pong>, LinuxError> {
        let now = Instant::now();
        match self.watch.look(now)? {
            Change::Nothing => {}
            Change::Up | Change::Flap => self.ping_at = Some(now + self.pause),
            Change::Lost => self.ping_at = None,
        }
        let bit = own_bit(&*self.port);
        let rung = self.watch.is_up() && self.port.take_doorbells(bit)? & bit != 0;
        if rung {
            self.heard = self.heard.wrapping_add(1);
            self.ping_at = Some(now + self.pause);
        }
        if self.ping_at.is_some_and(|at| at <= now) {
            self.ping_at = None;
            self.port.set_peer_scratchpad(COUNT, self.heard)?;
            self.port.ring_peer(1 << self.port.role().peer_port())?;
        }
        if !rung {
            return Ok(None);
        }
        Ok(Some(Pong {
            heard: self.heard,
            value: self.port.scratchpad(COUNT)?,
        }))
    }

    /// The error that nothing was heard.
    pub fn no_peer(&self, waited: Duration) -> LinuxError {
        LinuxError::NoPeer {
            client: CLIENT,
            step: self.missing().to_owned(),
            waited,
        }
    }
}

fn own_bit(port: &dyn NtbPort) -> u64 {
    1 << port.role().port()
}
