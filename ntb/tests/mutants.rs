//! The port suite catches broken drivers and broken devices: each mutant by the case that is named for it.

mod spr_pair;

use std::{
    os::fd::BorrowedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use ntb::{
    conformance::{PORT_CASES, PortFixture, Ports, with_patience},
    hw::{Family, LinkReport, LinkState, NtbError, NtbPort, Role, WindowInfo},
    pci::{PciFunction, config::LinkRate},
};
use spr_pair::{Flaw, Pair};

/// What is wrong with a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutation {
    WindowOnePageTooWide,
    TranslationNotCleared,
    TranslationNotChecked,
    DownTakenForUp,
    MaskForgotten,
    ClearsAllDoorbells,
    RingsTheNeighbour,
    TakesWithoutClearing,
    ScratchpadsShifted,
    QuiesceLeavesScratchpads,
    LinkReportRepeats,
}

/// A port with one thing wrong.
#[derive(Debug)]
struct Mutant {
    good: Arc<dyn NtbPort>,
    mutation: Mutation,
}

impl Mutant {
    fn is(&self, mutation: Mutation) -> bool {
        self.mutation == mutation
    }
}

impl NtbPort for Mutant {
    fn family(&self) -> Family {
        self.good.family()
    }
    fn function(&self) -> &Arc<dyn PciFunction> {
        self.good.function()
    }
    fn role(&self) -> Role {
        self.good.role()
    }
    fn enable_link(&self) -> Result<(), NtbError> {
        self.good.enable_link()
    }
    fn disable_link(&self) -> Result<(), NtbError> {
        self.good.disable_link()
    }
    fn link(&self) -> Result<LinkState, NtbError> {
        match self.good.link()? {
            LinkState::Down if self.is(Mutation::DownTakenForUp) => {
                Ok(LinkState::Up(LinkRate::from_bits(0xFFFF)))
            }
            state => Ok(state),
        }
    }
    fn take_link_report(&self) -> Result<LinkReport, NtbError> {
        let mut report = self.good.take_link_report()?;
        report.interrupts += u64::from(self.is(Mutation::LinkReportRepeats));
        Ok(report)
    }
    fn link_event(&self) -> BorrowedFd<'_> {
        self.good.link_event()
    }
    fn windows(&self) -> &[WindowInfo] {
        self.good.windows()
    }
    fn open_window(&self, window: usize, iova: u64, bytes: u64) -> Result<(), NtbError> {
        let more = if self.is(Mutation::WindowOnePageTooWide) {
            4096
        } else {
            0
        };
        match self.good.open_window(window, iova, bytes + more) {
            Err(NtbError::BadWindowSize { .. } | NtbError::BadWindowAddress { .. })
                if self.is(Mutation::TranslationNotChecked) =>
            {
                Ok(())
            }
            other => other,
        }
    }
    fn close_window(&self, window: usize) -> Result<(), NtbError> {
        if self.is(Mutation::TranslationNotCleared) && window < self.windows().len() {
            return Ok(());
        }
        self.good.close_window(window)
    }
    fn doorbell_bits(&self) -> u64 {
        self.good.doorbell_bits()
    }
    fn ring_peer(&self, bits: u64) -> Result<(), NtbError> {
        let neighbour = bits << 1 & self.doorbell_bits();
        if self.is(Mutation::RingsTheNeighbour) && neighbour != 0 {
            return self.good.ring_peer(neighbour);
        }
        self.good.ring_peer(bits)
    }
    fn doorbells(&self) -> Result<u64, NtbError> {
        self.good.doorbells()
    }
    fn clear_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        let valid = bits & !self.doorbell_bits() == 0;
        if self.is(Mutation::ClearsAllDoorbells) && valid {
            return self.good.clear_doorbells(self.doorbell_bits());
        }
        self.good.clear_doorbells(bits)
    }
    fn mask_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        if self.is(Mutation::MaskForgotten) && bits & !self.doorbell_bits() == 0 {
            return Ok(());
        }
        self.good.mask_doorbells(bits)
    }
    fn unmask_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        self.good.unmask_doorbells(bits)
    }
    fn masked_doorbells(&self) -> u64 {
        self.good.masked_doorbells()
    }
    fn doorbell_event(&self) -> BorrowedFd<'_> {
        self.good.doorbell_event()
    }
    fn take_doorbells(&self, bits: u64) -> Result<u64, NtbError> {
        if self.is(Mutation::TakesWithoutClearing) {
            return Ok(self.good.doorbells()? & bits);
        }
        self.good.take_doorbells(bits)
    }
    fn scratchpads(&self) -> usize {
        self.good.scratchpads()
    }
    fn scratchpad(&self, index: usize) -> Result<u32, NtbError> {
        self.good.scratchpad(index)
    }
    fn set_scratchpad(&self, index: usize, value: u32) -> Result<(), NtbError> {
        self.good.set_scratchpad(index, value)
    }
    fn peer_scratchpad(&self, index: usize) -> Result<u32, NtbError> {
        self.good.peer_scratchpad(index)
    }
    fn set_peer_scratchpad(&self, index: usize, value: u32) -> Result<(), NtbError> {
        let shifted = index < self.scratchpads() && self.is(Mutation::ScratchpadsShifted);
        let index = if shifted {
            (index + 1) % self.scratchpads()
        } else {
            index
        };
        self.good.set_peer_scratchpad(index, value)
    }
    fn quiesce(&self) -> Result<(), NtbError> {
        let kept = self.good.scratchpad(0)?;
        self.good.quiesce()?;
        if self.is(Mutation::QuiesceLeavesScratchpads) {
            self.good.set_scratchpad(0, kept)?;
        }
        Ok(())
    }
}

/// The pair of fakes, with both ports spoiled.
struct Spoiled {
    pair: Pair,
    mutation: Mutation,
}

impl Spoiled {
    fn spoil(&self, good: Arc<dyn NtbPort>) -> Arc<dyn NtbPort> {
        Arc::new(Mutant {
            good,
            mutation: self.mutation,
        })
    }
}

impl PortFixture for Spoiled {
    fn open(&self) -> Ports {
        let Ports { a, b } = self.pair.open();
        Ports {
            a: self.spoil(a),
            b: self.spoil(b),
        }
    }
    fn reopen(&self, a: bool) -> Arc<dyn NtbPort> {
        self.spoil(self.pair.reopen(a))
    }
}

/// Whether the case of this name fails.
fn caught(case: &str, fixture: &dyn PortFixture) -> bool {
    let (_, run) = PORT_CASES
        .iter()
        .find(|(name, _)| *name == case)
        .unwrap_or_else(|| panic!("no case {case}"));
    // The panics are what is wanted; their texts are noise.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| ()));
    let result = catch_unwind(AssertUnwindSafe(|| {
        with_patience(Duration::from_secs(1), || run(fixture));
    }));
    std::panic::set_hook(hook);
    result.is_err()
}

#[test]
fn every_mutant_is_caught_by_name() {
    use Mutation::*;
    let drivers = [
        (WindowOnePageTooWide, "windows-are-no-wider-than-asked"),
        (TranslationNotCleared, "closed-windows-are-closed"),
        (TranslationNotChecked, "window-limits-are-checked"),
        (DownTakenForUp, "starts-quiet"),
        (MaskForgotten, "doorbells-mask-and-refire"),
        (ClearsAllDoorbells, "doorbells-cross"),
        (ScratchpadsShifted, "scratchpads-cross"),
        (QuiesceLeavesScratchpads, "quiesce-quiets"),
        (LinkReportRepeats, "link-events-arrive"),
        (RingsTheNeighbour, "doorbells-cross"),
        (TakesWithoutClearing, "doorbells-mask-and-refire"),
    ];
    let mut survivors = Vec::new();
    for (mutation, case) in drivers {
        let pair = Pair::default();
        if !caught(case, &Spoiled { pair, mutation }) {
            survivors.push(format!("{mutation:?} gets through {case}"));
        }
    }
    let devices = [
        (Flaw::NoRefire, "doorbells-mask-and-refire"),
        (Flaw::ClearsWhole, "doorbells-cross"),
        (Flaw::LimitIgnored, "windows-are-no-wider-than-asked"),
        (Flaw::WindowsAreOne, "windows-carry"),
        (Flaw::UpWithOneEnd, "link-needs-both"),
        (Flaw::LinkIsSilent, "link-events-arrive"),
        (Flaw::DoorbellFirst, "data-is-ahead-of-doorbell"),
    ];
    for (flaw, case) in devices {
        if !caught(case, &Pair::with(flaw)) {
            survivors.push(format!("{flaw:?} gets through {case}"));
        }
    }
    assert!(survivors.is_empty(), "{survivors:#?}");
    // And the suite is not simply red.
    for case in [
        "windows-carry",
        "doorbells-mask-and-refire",
        "data-is-ahead-of-doorbell",
    ] {
        assert!(!caught(case, &Pair::default()), "{case} fails without a flaw");
    }
}
