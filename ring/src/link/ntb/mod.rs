//! A link over a Non-Transparent Bridge, real (`ntb:BDF`) or emulated (`emu:PATH`): the driver cannot tell which.
//!
//! The eight registers are scratchpads, and doorbells are doorbells. All memory windows that can be joined make up the
//! inbound memory (see module `joined`); it is allocated once and stays for as long as the link object.
//!
//! # Life
//!
//! | phase | what is so | reported as |
//! | --- | --- | --- |
//! | gone | the device does not answer; it is opened anew until it does | cable down |
//! | down | port quiet, link asked for, memory mapped for the device, windows closed | cable down |
//! | settling | link up, but news of changes may be under way | cable down |
//! | up | link up, windows could not be opened yet | cable up |
//! | set | windows open, engines to be had | windows set |
//!
//! A loss goes back to *down*: engines are revoked, windows closed and read back, memory unmapped and mapped anew at another
//! address (it stays mapped where windows are closed at the peer's end of the wire: AMD), own scratchpads cleared. Link changes arrive by interrupt, and are looked for in the register as well; all
//! ones in any register is a device that has gone, whatever the bits would mean.
//!
//! Losses are counted as exactly as hardware tells: link changes that come faster than their interrupt is taken merge into
//! one on most bridges.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

mod bells;
mod device;
mod engine;
mod error;
mod health;
mod joined;
mod life;

use std::{
    cell::Cell,
    collections::VecDeque,
    os::fd::AsFd,
    sync::Arc,
    time::{Duration, Instant},
};

use ntb::{
    address::{OpenOptions, PortAddress},
    hw::{NtbError, NtbPort},
};
use ntb_mem::{
    cpu::CpuFeatures,
    export::Exportable,
    line::LINE_BYTES,
    region::{Pages, Region, View},
};

use super::{
    DOORBELLS, Doorbell, Link, LinkError, LinkEvent, LinkFacts, LinkKind, LinkState, LinkStatus, Registers,
    doorbell::sleep_on,
    ends::{NO_REGISTERS, WINDOW_BYTES},
    engine::{Engine, EngineChoice, Order},
};
use bells::Bells;
use device::{Device, allocate};
use engine::{Method, Outbound};
use error::link_error;
use joined::Inbound;
use life::Phase;

/// Parameters of a link over a bridge.
#[derive(Clone, Debug)]
pub struct NtbOptions {
    /// Bytes of this side's memory that the peer writes, a multiple of 64; 64 MiB by default. Cut to what the windows
    /// of the bridge show: [`Link::inbound`] has the result.
    ///
    /// With an export it is what the windows before the last one show, all of it, whatever is given here: there must be no gap
    /// between the two.
    pub window_bytes: u64,
    /// Pages that this memory stands on.
    pub pages: Pages,
    /// Memory of another owner, a GPU's for instance, that the peer reaches through the last window; the windows before show
    /// ordinary memory. All of it is shown, so its length must be one that the window takes. Channels can be opened in it
    /// ([`crate::session::Place::Exported`]).
    pub export: Option<Arc<dyn Exportable>>,
    /// How lines are stored.
    pub engine: EngineChoice,
    /// What the processor can do; found out by default.
    pub cpu: CpuFeatures,
    /// How the function is opened.
    pub open: OpenOptions,
}

impl Default for NtbOptions {
    fn default() -> Self {
        Self {
            window_bytes: WINDOW_BYTES,
            pages: Pages::default(),
            export: None,
            engine: EngineChoice::default(),
            cpu: CpuFeatures::detect(),
            open: OpenOptions::default(),
        }
    }
}

/// A link over a bridge.
#[derive(Debug)]
pub struct NtbLink {
    // Fields drop in order: engines are revoked, windows closed and memory unmapped, then the port ends.
    outbound: Option<Outbound>,
    inbound: Option<Inbound>,
    device: Option<Device>,
    address: PortAddress,
    options: NtbOptions,
    region: Arc<Region>,
    bytes: u64,
    method: Method,
    bells: Arc<Bells>,
    doorbells: [Doorbell; DOORBELLS as usize],
    distinct: u32,
    phase: Phase,
    next_look: Instant,
    /// Something has failed where it could not be dealt with: look at the device at once.
    suspect: Cell<bool>,
    /// Since when windows are refused, and how the last attempt went.
    refused: Option<(Instant, LinkError)>,
    losses: u64,
    events: VecDeque<LinkEvent>,
}

impl NtbLink {
    /// Opens this side of the link over the port at `address`: quiets the device, asks for the link, allocates the memory
    /// and maps it. The peer is met in [`Link::poll`].
    pub fn open(address: &PortAddress, options: &NtbOptions) -> Result<Self, LinkError> {
        let name = address.to_string();
        let failed = |e: NtbError| link_error(&name, &e);
        let device = Device::open(address, &options.open).map_err(failed)?;
        let (region, bytes) = allocate(&*device.port, options)?;
        let outbound = Outbound::open(&*device.port, &device.space, &name, options.cpu, options.engine)?;
        let export = options.export.as_ref();
        let inbound = Inbound::map(&*device.port, &device.space, &region, export).map_err(failed)?;
        let (bells, doorbells) = Bells::new().map_err(|errno| error::limits(&name, errno))?;
        let now = Instant::now();
        let mut link = Self {
            method: outbound.method(),
            outbound: Some(outbound),
            inbound: Some(inbound),
            distinct: bells::distinct(device.port.doorbell_bits()),
            device: Some(device),
            address: address.clone(),
            options: options.clone(),
            region,
            bytes,
            bells,
            doorbells,
            phase: Phase::Down,
            next_look: now,
            suspect: Cell::new(false),
            refused: None,
            losses: 0,
            events: VecDeque::new(),
        };
        // The device was waited for once; from now on it is only looked for.
        link.options.open.timeouts.connect = Duration::ZERO;
        link.options.open.vfio.patience = Duration::ZERO;
        link.start().map_err(failed)?;
        Ok(link)
    }

    /// The port, while its device answers.
    pub fn port(&self) -> Option<&Arc<dyn NtbPort>> {
        self.device.as_ref().map(|device| &device.port)
    }
}

impl Link for NtbLink {
    fn facts(&self) -> LinkFacts {
        LinkFacts {
            kind: LinkKind::Ntb,
            address: self.address.to_string(),
            page_bytes: self.region.page_bytes(),
            engine: self.method.name(),
        }
    }

    fn order(&self) -> Order {
        self.method.order()
    }

    fn poll(&mut self) -> Result<LinkStatus, LinkError> {
        let now = Instant::now();
        self.seek_device(now)?;
        self.look(now);
        self.rise(now)?;
        Ok(LinkStatus {
            state: match self.phase {
                Phase::Gone { .. } | Phase::Down | Phase::Settling { .. } => LinkState::CableDown,
                Phase::Up { .. } => LinkState::CableUp,
                Phase::Set => LinkState::WindowsSet,
            },
            losses: self.losses,
        })
    }

    fn wait(&self, timeout: Duration) {
        let [bell, ..] = &self.doorbells;
        let left = self.deadline().saturating_duration_since(Instant::now());
        let mut fds = vec![bell.as_fd()];
        fds.extend(self.device.iter().map(|device| device.port.link_event()));
        if sleep_on(&fds, timeout.min(left)) {
            bell.take();
        }
    }

    fn registers(&self) -> Registers {
        let Some(device) = self.device.as_ref().filter(|_| self.is_up()) else {
            return NO_REGISTERS;
        };
        let mut out = NO_REGISTERS;
        for (index, slot) in out.iter_mut().enumerate() {
            match device.port.scratchpad(index) {
                Ok(value) => *slot = value,
                Err(_) => {
                    self.suspect.set(true);
                    return NO_REGISTERS;
                }
            }
        }
        out
    }

    fn write_registers(&mut self, registers: &Registers) {
        let Some(device) = self.device.as_ref().filter(|_| self.is_up()) else {
            return;
        };
        for (index, value) in registers.iter().enumerate() {
            if device.port.set_peer_scratchpad(index, *value).is_err() {
                self.suspect.set(true);
                return;
            }
        }
    }

    fn inbound(&self) -> View {
        let all = self.region.view();
        // Whole lines, and no more than the region has.
        all.part(0, self.bytes / LINE_BYTES as u64).unwrap_or(all)
    }

    fn exported(&self) -> Option<View> {
        self.options.export.as_ref().map(View::exported)
    }

    fn outbound(&self) -> Option<Engine> {
        self.outbound
            .as_ref()
            .filter(|_| self.phase == Phase::Set)
            .map(Outbound::engine)
    }

    fn ring(&mut self, doorbell: u32) {
        let Some(device) = self.device.as_ref().filter(|_| self.is_up()) else {
            return;
        };
        if doorbell >= DOORBELLS {
            return;
        }
        let bit = bells::bit(device.port.doorbell_bits(), doorbell);
        if device.port.ring_peer(bit).is_err() {
            self.suspect.set(true);
        }
    }

    fn doorbell(&self, number: u32) -> Doorbell {
        let [first, ..] = &self.doorbells;
        self.doorbells.get(number as usize).unwrap_or(first).clone()
    }

    fn distinct_doorbells(&self) -> u32 {
        self.distinct
    }

    fn next_event(&mut self) -> Option<LinkEvent> {
        self.events.pop_front()
    }
}

impl Drop for NtbLink {
    fn drop(&mut self) {
        // Doorbells may outlive the link; the port must not.
        self.bells.detach();
    }
}
