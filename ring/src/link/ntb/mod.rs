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
mod engine;
mod error;
mod health;
mod joined;

use std::{
    cell::Cell,
    collections::VecDeque,
    os::fd::AsFd,
    sync::Arc,
    time::{Duration, Instant},
};

use ntb::{
    address::{OpenOptions, PortAddress},
    hw::{self, Family, LinkReport, NtbError, NtbPort},
    pci::{DmaSpace, EventFd, Notice, PciError, config},
};
use ntb_mem::{
    cpu::CpuFeatures,
    export::Exportable,
    line::LINE_BYTES,
    region::{Pages, Region, View},
};

use super::{
    DOORBELLS, Doorbell, Link, LinkError, LinkEvent, LinkFacts, LinkKind, LinkState, LinkStatus, REGISTERS,
    Registers,
    doorbell::sleep_on,
    ends::{NO_REGISTERS, WINDOW_BYTES, memory_error},
    engine::{Engine, EngineChoice, Order},
};
use bells::Bells;
use engine::{Method, Outbound};
use error::link_error;
use health::Health;
use joined::{Inbound, capacity, joined, ordinary};

/// Time without news of the link after which an up is believed.
const SETTLE: Duration = Duration::from_millis(2);
/// Time between two looks at the link's register without an interrupt, while it is down and while it is up.
const LOOK_DOWN: Duration = Duration::from_millis(10);
const LOOK_UP: Duration = Duration::from_millis(50);
/// Time between two attempts at what was refused.
const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// Time for which windows that cannot be opened on a link that is up are tried again before that ends the link.
const WINDOWS_PATIENCE: Duration = Duration::from_secs(2);
/// Most events kept for a caller that does not fetch them.
const EVENTS_MAX: usize = 64;

/// Parameters of a link over a bridge.
#[derive(Clone, Debug)]
pub struct NtbOptions {
    /// Bytes of this side's memory that the peer writes, a multiple of 64; 64 MiB by default. Cut to what the windows
    /// of the bridge show: [`Link::inbound`] has the result.
    pub window_bytes: u64,
    /// Pages that this memory stands on.
    pub pages: Pages,
    /// Memory of another owner, a GPU's for instance, that the peer reaches through the last window; the windows before show
    /// ordinary memory. All of it is shown, so its length must be one that the window takes.
    pub export: Option<Arc<dyn Exportable>>,
    /// Lines at the end of the ordinary memory that the session leaves alone: [`NtbLink::spare`].
    pub spare_lines: u64,
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
            spare_lines: 0,
            engine: EngineChoice::default(),
            cpu: CpuFeatures::detect(),
            open: OpenOptions::default(),
        }
    }
}

/// An open port.
#[derive(Debug)]
struct Device {
    // Fields drop in order: the port quiets the device, which nothing else holds then.
    space: Arc<DmaSpace>,
    port: Arc<dyn NtbPort>,
    health: Health,
    /// Signalled when the kernel, or whoever serves the device, wants it back.
    wanted_back: EventFd,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Gone { retry: Instant },
    Down,
    Settling { since: Instant },
    Up { retry: Instant },
    Set,
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
        let outbound = Outbound::open(&*device.port, &name, options.cpu, options.engine)?;
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

    /// The lines that the session leaves alone, at the end of the ordinary memory ([`NtbOptions::spare_lines`]). The peer
    /// reaches them from line [`Link::inbound`]`.lines()` of this side's memory on.
    pub fn spare(&self) -> View {
        let all = self.region.view();
        let first = self.session_lines();
        let lines = (self.bytes / LINE_BYTES as u64).saturating_sub(first);
        all.part(first, lines).unwrap_or(all)
    }

    /// Where the memory that the peer exports begins, as the lines of this side's engines count, and how many lines its window
    /// has; `None` while the device does not answer.
    pub fn peer_export(&self) -> Option<(u64, u64)> {
        let windows = joined(self.device.as_ref()?.port.windows());
        let (last, before) = windows.split_last()?;
        let line = |bytes: u64| bytes / LINE_BYTES as u64;
        Some((line(capacity(before)), line(last.bytes)))
    }

    fn session_lines(&self) -> u64 {
        (self.bytes / LINE_BYTES as u64).saturating_sub(self.options.spare_lines)
    }

    /// Lets doorbells in and asks for the link.
    fn start(&mut self) -> Result<(), NtbError> {
        if let Some(device) = &self.device {
            self.bells.attach(&device.port)?;
            device.port.enable_link()?;
        }
        Ok(())
    }

    fn tell(&mut self, event: LinkEvent) {
        if self.events.len() < EVENTS_MAX {
            self.events.push_back(event);
        }
    }

    fn is_up(&self) -> bool {
        matches!(self.phase, Phase::Up { .. } | Phase::Set)
    }

    /// Looks at the device when there is news or it is time to.
    fn look(&mut self, now: Instant) {
        let Some(device) = &self.device else { return };
        let news = self.suspect.take() || sleep_on(&[device.port.link_event()], Duration::ZERO);
        if !news && now < self.next_look {
            return;
        }
        let report = match device.is_ours().and_then(|()| device.is_as_started()) {
            Ok(()) if news || !(self.is_up() && is_across(device.port.family())) => {
                device.port.take_link_report().map(Some)
            }
            Ok(()) => Ok(None),
            Err(e) => Err(e),
        };
        match report {
            Ok(report) => self.take_report(report, now),
            Err(e) => self.lose_device(&e, now),
        }
        self.next_look = now + if self.is_up() { LOOK_UP } else { LOOK_DOWN };
    }

    fn take_report(&mut self, report: Option<LinkReport>, now: Instant) {
        if let Some(report) = report {
            self.take_state(report, now);
        }
        let Some(device) = &mut self.device else { return };
        let function = &**device.port.function();
        let rate = match report.map(|report| report.state) {
            Some(hw::LinkState::Up(rate)) => Some(rate),
            Some(hw::LinkState::Down) => None,
            None => config::pcie_link(function)
                .ok()
                .flatten()
                .and_then(|link| link.current),
        };
        let changed = rate.and_then(|rate| device.health.rate(rate));
        let errors = device.health.errors(function, now);
        changed
            .into_iter()
            .chain(errors)
            .for_each(|event| self.tell(event));
    }

    fn take_state(&mut self, report: LinkReport, now: Instant) {
        let up = report.state.is_up();
        let changed = report.interrupts > 0 || report.peer_left;
        if self.is_up() && (changed || !up) {
            // Two interrupts a loss where the hardware does not join them.
            let changes = report.interrupts + u64::from(!up);
            self.lose((changes / 2).max(1));
        }
        self.phase = match self.phase {
            Phase::Down | Phase::Settling { .. } if !up => Phase::Down,
            Phase::Settling { since } if !changed => Phase::Settling { since },
            Phase::Down | Phase::Settling { .. } => Phase::Settling { since: now },
            other => other,
        };
    }

    /// Ends this life of the link.
    fn lose(&mut self, losses: u64) {
        if self.is_up() {
            self.losses += losses;
        }
        self.phase = Phase::Down;
        self.outbound = None;
        self.close_inbound();
        self.refused = None;
        if let Some(device) = &mut self.device {
            device.health.forget_rate();
            for index in 0..REGISTERS {
                // What the peer wrote in this life must not be there in the next.
                if device.port.set_scratchpad(index, 0).is_err() {
                    self.suspect.set(true);
                }
            }
        }
    }

    fn close_inbound(&mut self) {
        match (&mut self.inbound, &self.device) {
            // Its windows are closed in the peer's registers, which a dead wire does not reach: whatever the peer stores
            // before it notices the loss must find memory, and not the error log of this host.
            (Some(inbound), Some(device)) if is_across(device.port.family()) => inbound.close(),
            _ => self.inbound = None,
        }
    }

    fn lose_device(&mut self, why: &NtbError, now: Instant) {
        let why = why.to_string();
        let was_up = self.is_up();
        self.outbound = None;
        self.inbound = None;
        self.refused = None;
        self.bells.detach();
        self.device = None;
        self.losses += u64::from(was_up);
        self.phase = Phase::Gone {
            retry: now + RETRY_PAUSE,
        };
        self.tell(LinkEvent::DeviceGone { why });
    }

    /// Opens the device anew.
    fn seek_device(&mut self, now: Instant) -> Result<(), LinkError> {
        let Phase::Gone { retry } = self.phase else {
            return Ok(());
        };
        if now < retry {
            return Ok(());
        }
        self.phase = Phase::Gone {
            retry: now + RETRY_PAUSE,
        };
        let Ok(device) = Device::open(&self.address, &self.options.open) else {
            return Ok(());
        };
        let room = capacity(ordinary(device.port.windows(), self.options.export.is_some()));
        if room < self.bytes {
            return Err(LinkError {
                name: "windows-shrunk",
                exit: 7,
                what: format!(
                    "{} has come back with windows of {room} bytes together, and the link's memory has {}: start the program \
                     anew to use the device as it is now",
                    self.address, self.bytes
                ),
                errno: None,
            });
        }
        self.distinct = bells::distinct(device.port.doorbell_bits());
        self.device = Some(device);
        if self.start().is_err() {
            self.bells.detach();
            self.device = None;
            return Ok(());
        }
        self.phase = Phase::Down;
        self.next_look = now;
        self.tell(LinkEvent::DeviceBack);
        Ok(())
    }

    /// Opens the windows once the link has settled.
    fn rise(&mut self, now: Instant) -> Result<(), LinkError> {
        match self.phase {
            Phase::Settling { since } if now.duration_since(since) >= SETTLE => {}
            Phase::Up { retry } if now >= retry => {}
            _ => return Ok(()),
        }
        match self.set_windows() {
            Ok(()) => {
                self.refused = None;
                self.phase = Phase::Set;
                Ok(())
            }
            Err(e) => {
                self.close_inbound();
                self.outbound = None;
                self.phase = Phase::Up {
                    retry: now + RETRY_PAUSE,
                };
                self.suspect.set(true);
                let since = match self.refused.take() {
                    Some((since, _)) => since,
                    None => {
                        self.tell(LinkEvent::WindowsRefused { why: e.what.clone() });
                        now
                    }
                };
                if now.duration_since(since) >= WINDOWS_PATIENCE {
                    return Err(e);
                }
                self.refused = Some((since, e));
                Ok(())
            }
        }
    }

    fn set_windows(&mut self) -> Result<(), LinkError> {
        let name = self.address.to_string();
        let failed = |e: NtbError| link_error(&name, &e);
        let Some(device) = &self.device else { return Ok(()) };
        let inbound = match &mut self.inbound {
            Some(mapped) => mapped,
            none => {
                let export = self.options.export.as_ref();
                let mapped = Inbound::map(&*device.port, &device.space, &self.region, export);
                none.insert(mapped.map_err(failed)?)
            }
        };
        inbound
            .open(&device.port, &self.region, self.bytes)
            .map_err(failed)?;
        let outbound = match self.outbound.take() {
            Some(outbound) => outbound,
            None => Outbound::open(&*device.port, &name, self.options.cpu, self.options.engine)?,
        };
        if outbound.method() != self.method {
            return Err(LinkError {
                name: "engine-changed",
                exit: 7,
                what: format!(
                    "{name}: lines were stored by {} and can be stored by {} only since the device came back: start the \
                     program anew to use it so",
                    self.method.name(),
                    outbound.method().name()
                ),
                errno: None,
            });
        }
        self.outbound = Some(outbound);
        Ok(())
    }

    /// When to look again at the latest.
    fn deadline(&self) -> Instant {
        match self.phase {
            Phase::Gone { retry } => retry,
            Phase::Up { retry } => retry.min(self.next_look),
            Phase::Settling { since } => (since + SETTLE).min(self.next_look),
            Phase::Down | Phase::Set => self.next_look,
        }
    }
}

/// Whether the registers that tell of the link, and those of the inbound windows, are the peer's. Then they are not read
/// while the link is up, so that no load crosses it: interrupts tell of changes, and heartbeats of a wire that has died
/// without one.
fn is_across(family: Family) -> bool {
    matches!(family, Family::Amd { .. })
}

impl Device {
    fn open(address: &PortAddress, options: &OpenOptions) -> Result<Self, NtbError> {
        let function = address.open(options)?;
        let port = hw::open(&function)?;
        if port.scratchpads() < REGISTERS {
            return Err(NtbError::TooSmall {
                device: function.name().to_owned(),
                what: "the number of scratchpads",
                needed: REGISTERS as u64,
                available: port.scratchpads() as u64,
            });
        }
        let space = DmaSpace::new(Arc::clone(&function))?;
        let health = Health::new(&*function);
        let wanted_back = EventFd::new()?;
        // Whoever holds a device on and on keeps the kernel from unplugging it, unbinding it and shutting down.
        function.set_notice(Notice::Release, Some(wanted_back.as_fd()))?;
        Ok(Self {
            space,
            port,
            health,
            wanted_back,
        })
    }

    /// An error when the device is to be let go.
    fn is_ours(&self) -> Result<(), NtbError> {
        match self.wanted_back.take()? {
            0 => Ok(()),
            _ => Err(NtbError::Pci(PciError::Gone {
                what: "it was wanted back, to be unplugged or for another driver, and was let go".to_owned(),
            })),
        }
    }

    /// Whether the function has been reset behind the driver, by a power cycle or by whoever may: its registers answer then,
    /// and nothing works.
    fn is_as_started(&self) -> Result<(), NtbError> {
        let function = &**self.port.function();
        if config::bus_master(function)? {
            return Ok(());
        }
        Err(NtbError::NotTaken {
            device: function.name().to_owned(),
            register: "bus master enable",
            wrote: 1,
            read: 0,
            hint: "the function was reset by somebody else, and is started anew",
        })
    }
}

/// The memory that the peer writes: as much as asked for, as far as the windows show it.
fn allocate(port: &dyn NtbPort, options: &NtbOptions) -> Result<(Arc<Region>, u64), LinkError> {
    let windows = ordinary(port.windows(), options.export.is_some());
    if let (Some(memory), false) = (&options.export, windows.iter().any(|info| info.bytes > 0)) {
        return Err(LinkError {
            name: "export-needs-window",
            exit: 3,
            what: format!(
                "{} is to be shown to the peer, and {} has no window to spare for it: the first one is the session's own",
                memory.kind(),
                port.function().name()
            ),
            errno: None,
        });
    }
    let asked = options.window_bytes;
    let unit = windows.iter().map(|info| info.size_align).max().unwrap_or(1);
    let bytes = match asked.is_multiple_of(LINE_BYTES as u64) {
        // Zero stays zero, for the error.
        true => asked.min(capacity(windows)).next_multiple_of(unit.max(1)),
        false => asked,
    };
    let region = Region::allocate(bytes, options.pages).map_err(|e| memory_error(&e))?;
    Ok((Arc::new(region), bytes))
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
        all.part(0, self.session_lines()).unwrap_or(all)
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
