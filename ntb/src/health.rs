//! Watches a function for what no interrupt of the bridge tells: removal, errors, lanes that fall away.

use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

use crate::{
    hw::{LinkState, NtbError, NtbPort},
    pci::{
        EventFd, Notice, PciError, PciFunction,
        config::{self, ErrorStatus, LinkRate},
    },
};

/// Something that happened to the function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthEvent {
    /// It answers nothing but ones. Said once; [`HealthEvent::Back`] follows when it answers again.
    Gone,
    /// It answers again, in the state after a reset: see [`crate::hw::restart`].
    Back,
    /// The kernel or the emulator wants it back: let go of it.
    ReleaseWanted,
    /// The kernel reported an error that cannot be corrected.
    ErrorReported,
    /// Errors were latched since the last look. Correctable ones are only to be counted; after the others, what was
    /// sent may be lost.
    Errors(ErrorStatus),
    /// The link runs at another speed or width than at the last look. Up and down are not told here: see
    /// [`NtbPort::take_link_report`].
    LinkRate {
        /// Before.
        from: LinkRate,
        /// Now.
        to: LinkRate,
    },
}

/// The watch over one function. Call [`Watch::look`] at every heartbeat, and when [`Watch::event`] becomes readable.
#[derive(Debug)]
pub struct Watch {
    port: Option<Arc<dyn NtbPort>>,
    function: Arc<dyn PciFunction>,
    error: EventFd,
    release: EventFd,
    gone: bool,
    rate: Option<LinkRate>,
    /// Bits that could not be cleared, so that they are reported once.
    stuck: ErrorStatus,
}

impl Watch {
    /// Begins to watch a function, and the PCIe link that it sits on. What was latched before is cleared and not
    /// reported.
    pub fn new(function: &Arc<dyn PciFunction>) -> Result<Self, PciError> {
        Self::start(None, function)
    }

    /// Begins to watch a port: its function, and the link between the two hosts.
    pub fn over(port: &Arc<dyn NtbPort>) -> Result<Self, PciError> {
        Self::start(Some(Arc::clone(port)), port.function())
    }

    fn start(port: Option<Arc<dyn NtbPort>>, function: &Arc<dyn PciFunction>) -> Result<Self, PciError> {
        let mut this = Self {
            port,
            function: Arc::clone(function),
            error: EventFd::new()?,
            release: EventFd::new()?,
            gone: false,
            rate: None,
            stuck: ErrorStatus::default(),
        };
        // Backends without these notices are watched by looking alone.
        function.set_notice(Notice::Error, Some(this.error.as_fd()))?;
        function.set_notice(Notice::Release, Some(this.release.as_fd()))?;
        this.new_errors()?;
        this.rate = this.rate_now()?;
        Ok(this)
    }

    /// Descriptors that become readable on a notice: look then, rather than at the next heartbeat.
    pub fn event(&self) -> [BorrowedFd<'_>; 2] {
        [self.error.as_fd(), self.release.as_fd()]
    }

    /// What happened since the last look. Reads a few configuration registers, all on this side of the link.
    pub fn look(&mut self) -> Result<Vec<HealthEvent>, PciError> {
        let mut events = Vec::new();
        if self.release.take()? > 0 {
            events.push(HealthEvent::ReleaseWanted);
        }
        if self.error.take()? > 0 {
            events.push(HealthEvent::ErrorReported);
        }
        match config::identity(&*self.function) {
            Err(PciError::Gone { .. }) => {
                if !self.gone {
                    events.push(HealthEvent::Gone);
                }
                self.gone = true;
                return Ok(events);
            }
            other => other.map(drop)?,
        }
        if std::mem::take(&mut self.gone) {
            events.push(HealthEvent::Back);
        }
        // It may vanish between two reads: the next look says so.
        let looked = self
            .new_errors()
            .and_then(|errors| Ok((errors, self.rate_now()?)));
        let (errors, rate) = match looked {
            Err(PciError::Gone { .. } | PciError::BadCapabilities { .. }) => return Ok(events),
            other => other?,
        };
        if errors != ErrorStatus::default() {
            events.push(HealthEvent::Errors(errors));
        }
        if let Some(to) = rate
            && let Some(from) = self.rate.replace(to)
            && from != to
        {
            events.push(HealthEvent::LinkRate { from, to });
        }
        Ok(events)
    }

    /// Speed and width; `None` while the link is down.
    fn rate_now(&self) -> Result<Option<LinkRate>, PciError> {
        let Some(port) = &self.port else {
            return Ok(config::pcie_link(&*self.function)?.and_then(|link| link.current));
        };
        match port.link() {
            Ok(LinkState::Up(rate)) => Ok(Some(rate)),
            Err(NtbError::Pci(e)) => Err(e),
            // A port that is gone shows at the next look.
            Ok(LinkState::Down) | Err(_) => Ok(None),
        }
    }

    /// Latched errors that were not reported yet; clears what can be cleared.
    fn new_errors(&mut self) -> Result<ErrorStatus, PciError> {
        let Some(now) = config::errors(&*self.function)? else {
            return Ok(ErrorStatus::default());
        };
        let before = self.stuck;
        if now != ErrorStatus::default() {
            config::clear_errors(&*self.function, &now)?;
        }
        self.stuck = config::errors(&*self.function)?.unwrap_or_default();
        Ok(ErrorStatus {
            correctable: now.correctable & !before.correctable,
            non_fatal: now.non_fatal & !before.non_fatal,
            fatal: now.fatal & !before.fatal,
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        for notice in [Notice::Error, Notice::Release] {
            // A function that is gone has nothing left to disconnect.
            let _ = self.function.set_notice(notice, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        hw::regs::amd,
        pci::fake::{Fake, FakeConfig, RegisterFile},
    };

    fn watched(aer: bool) -> (Arc<Fake>, Watch) {
        let mut config = FakeConfig::new("a", 0x1022, 0x14C0).link(0x1104, 0x0000_2105);
        if aer {
            config.put(0x100, &0x0001_0001u32.to_le_bytes());
            config.put(0x10C, &0x0006_2030u32.to_le_bytes());
            config.put(0x110, &0x0000_0001u32.to_le_bytes());
        }
        let fake = Fake::new(config, RegisterFile::new(&amd::MAP, 0x1000));
        let function: Arc<dyn PciFunction> = Arc::clone(&fake) as _;
        let watch = Watch::new(&function).unwrap();
        (fake, watch)
    }

    #[test]
    fn a_quiet_function_gives_no_events() {
        for aer in [true, false] {
            let (_fake, mut watch) = watched(aer);
            assert_eq!(watch.look().unwrap(), []);
            assert_eq!(watch.look().unwrap(), []);
        }
    }

    #[test]
    fn removal_and_return_are_told_once_each() {
        let (fake, mut watch) = watched(true);
        fake.set_removed(true);
        assert_eq!(watch.look().unwrap(), [HealthEvent::Gone]);
        assert_eq!(watch.look().unwrap(), []);
        fake.set_removed(false);
        assert_eq!(watch.look().unwrap(), [HealthEvent::Back]);
        assert_eq!(watch.look().unwrap(), []);
    }

    #[test]
    fn errors_are_told_by_kind_even_where_they_cannot_be_cleared() {
        let (fake, mut watch) = watched(true);
        // The fake's status keeps its bits, as where the kernel does not let them be cleared.
        fake.set_config(0x104, &0x0010_0010u32.to_le_bytes());
        fake.set_config(0x110, &0x0000_0041u32.to_le_bytes());
        let told = HealthEvent::Errors(ErrorStatus {
            correctable: 0x40,
            non_fatal: 0x0010_0000,
            fatal: 0x10,
        });
        assert_eq!(watch.look().unwrap(), [told]);
        assert_eq!(watch.look().unwrap(), [], "told twice");
        fake.set_config(0x110, &0u32.to_le_bytes());
        assert_eq!(watch.look().unwrap(), []);
        fake.set_config(0x110, &0x40u32.to_le_bytes());
        assert_eq!(
            watch.look().unwrap().len(),
            1,
            "a new error of a kind seen before"
        );
    }

    #[test]
    fn lanes_that_fall_away_and_notices_are_told() {
        let (fake, mut watch) = watched(false);
        fake.set_config(0x52, &0x1084u16.to_le_bytes());
        let [HealthEvent::LinkRate { from, to }] = watch.look().unwrap()[..] else {
            panic!("no event");
        };
        assert_eq!(from.to_string(), "x16 16.0 GT/s");
        assert_eq!(to.to_string(), "x8 16.0 GT/s");
        // Down and up again at the same rate is no change of rate.
        fake.set_config(0x52, &0u16.to_le_bytes());
        assert_eq!(watch.look().unwrap(), []);
        fake.set_config(0x52, &0x1084u16.to_le_bytes());
        assert_eq!(watch.look().unwrap(), []);
        fake.notify(Notice::Release);
        fake.notify(Notice::Error);
        assert_eq!(
            watch.look().unwrap(),
            [HealthEvent::ReleaseWanted, HealthEvent::ErrorReported]
        );
    }
}
