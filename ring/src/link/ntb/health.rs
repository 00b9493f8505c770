//! What the function says of its wire besides up and down: rate, and errors reported to its advanced error reporting
//! capability.

use std::time::{Duration, Instant};

use ntb::pci::{
    PciFunction,
    config::{self, LinkRate},
};

use crate::link::{LinkEvent, WireRate};

/// Time between two looks at the error registers.
const ERRORS_EVERY: Duration = Duration::from_millis(100);
/// Offsets of the status registers in the capability (PCI Express base specification, advanced error reporting).
const UNCORRECTABLE: u32 = 0x04;
const CORRECTABLE: u32 = 0x10;

#[derive(Debug)]
pub(super) struct Health {
    /// Offset of the capability.
    errors: Option<u32>,
    next: Instant,
    rate: Option<WireRate>,
}

impl Health {
    pub(super) fn new(function: &dyn PciFunction) -> Self {
        let errors = config::extended_capabilities(function)
            .unwrap_or_default()
            .into_iter()
            .find(|c| c.id == config::EXT_AER)
            .map(|c| c.offset);
        let mut this = Self {
            errors,
            next: Instant::now() + ERRORS_EVERY,
            rate: None,
        };
        this.take_errors(function); // of earlier lives
        this
    }

    /// The link has gone: the rate that it comes back with is no change.
    pub(super) fn forget_rate(&mut self) {
        self.rate = None;
    }

    /// The rate as it is now; told when it is another than before.
    pub(super) fn rate(&mut self, rate: LinkRate) -> Option<LinkEvent> {
        let now = WireRate {
            generation: rate.generation,
            lanes: rate.lanes,
        };
        let before = self.rate.replace(now)?;
        (before != now).then_some(LinkEvent::Rate { before, now })
    }

    /// Errors since the last look, when it is time for one.
    pub(super) fn errors(&mut self, function: &dyn PciFunction, now: Instant) -> Option<LinkEvent> {
        if now < self.next {
            return None;
        }
        self.next = now + ERRORS_EVERY;
        self.take_errors(function)
    }

    /// Reads and clears the error bits. A register that cannot be read, or reads all ones, says nothing.
    fn take_errors(&mut self, function: &dyn PciFunction) -> Option<LinkEvent> {
        let base = self.errors?;
        let take = |offset| {
            let at = base + offset;
            let bits = config::read32(function, at)
                .ok()
                .filter(|bits| *bits != u32::MAX)?;
            if bits != 0 {
                config::write32(function, at, bits).ok()?;
            }
            Some(bits)
        };
        let correctable = take(CORRECTABLE).unwrap_or(0);
        let uncorrectable = take(UNCORRECTABLE).unwrap_or(0);
        (correctable | uncorrectable != 0).then_some(LinkEvent::Errors {
            correctable,
            uncorrectable,
        })
    }
}
