//! The life of a link over a bridge: what is looked at, what ends a life, and what begins the next.

use std::time::{Duration, Instant};

use ntb::{
    hw::{self, Family, LinkReport, NtbError},
    pci::config,
};

use super::{
    NtbLink, bells,
    device::Device,
    engine::Outbound,
    error::link_error,
    joined::{Inbound, capacity, ordinary},
};
use crate::link::{LinkError, LinkEvent, REGISTERS, doorbell::sleep_on};

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

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Phase {
    Gone { retry: Instant },
    Down,
    Settling { since: Instant },
    Up { retry: Instant },
    Set,
}

impl NtbLink {
    /// Lets doorbells in and asks for the link.
    pub(super) fn start(&mut self) -> Result<(), NtbError> {
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

    pub(super) fn is_up(&self) -> bool {
        matches!(self.phase, Phase::Up { .. } | Phase::Set)
    }

    /// Looks at the device when there is news or it is time to.
    pub(super) fn look(&mut self, now: Instant) {
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
    pub(super) fn seek_device(&mut self, now: Instant) -> Result<(), LinkError> {
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
    pub(super) fn rise(&mut self, now: Instant) -> Result<(), LinkError> {
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
            None => Outbound::open(
                &*device.port,
                &device.space,
                &name,
                self.options.cpu,
                self.options.engine,
            )?,
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
    pub(super) fn deadline(&self) -> Instant {
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
