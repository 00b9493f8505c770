//! Watching the link the way all clients need it.

use std::{
    os::fd::BorrowedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use ntb::hw::{NtbError, NtbPort};
use rustix::event::{PollFd, PollFlags, Timespec};

/// Time without news of the link after which an up is believed.
const SETTLE: Duration = Duration::from_millis(20);
/// Time between two looks at the link.
const LOOK: Duration = Duration::from_millis(20);

/// What has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Nothing,
    /// The link is up and has been for a moment.
    Up,
    /// It is up, and was down for a moment: windows may have been closed, and the peer may have begun anew.
    Flap,
    /// It was up and is not.
    Lost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Down,
    Settling { since: Instant },
    Up,
}

/// The link of a port, asked for.
#[derive(Debug)]
pub(crate) struct Watch {
    port: Arc<dyn NtbPort>,
    phase: Phase,
    next: Instant,
}

impl Watch {
    /// Asks for the link.
    pub(crate) fn start(port: &Arc<dyn NtbPort>) -> Result<Self, NtbError> {
        port.enable_link()?;
        Ok(Self {
            port: Arc::clone(port),
            phase: Phase::Down,
            next: Instant::now(),
        })
    }

    pub(crate) fn is_up(&self) -> bool {
        self.phase == Phase::Up
    }

    /// Looks when it is time to.
    pub(crate) fn look(&mut self, now: Instant) -> Result<Change, NtbError> {
        if now < self.next {
            return Ok(Change::Nothing);
        }
        self.next = now + LOOK;
        let report = self.port.take_link_report()?;
        let news = report.interrupts > 0 || report.peer_left;
        let was_up = self.is_up();
        self.phase = match self.phase {
            _ if !report.state.is_up() => Phase::Down,
            Phase::Up if report.peer_left => Phase::Settling { since: now },
            Phase::Up => Phase::Up,
            Phase::Settling { since } if !news && now.duration_since(since) >= SETTLE => Phase::Up,
            Phase::Settling { since } if !news => Phase::Settling { since },
            Phase::Down | Phase::Settling { .. } => Phase::Settling { since: now },
        };
        Ok(match (was_up, self.is_up()) {
            (false, true) => Change::Up,
            (true, false) => Change::Lost,
            (true, true) if news => Change::Flap,
            _ => Change::Nothing,
        })
    }

    /// Sleeps until one of `doorbells` rings, the link changes, `other` can be read, or `timeout` has passed; clears the
    /// doorbells that rang. Whoever waits on memory looks at it again after this.
    pub(crate) fn sleep(
        &mut self,
        doorbells: u64,
        other: Option<BorrowedFd<'_>>,
        timeout: Duration,
    ) -> Result<u64, NtbError> {
        let limit = Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        let port = Arc::clone(&self.port);
        let mut fds = vec![
            PollFd::from_borrowed_fd(port.doorbell_event(), PollFlags::IN),
            PollFd::from_borrowed_fd(port.link_event(), PollFlags::IN),
        ];
        fds.extend(other.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        // An interrupted sleep is a short one.
        let _ = rustix::event::poll(&mut fds, Some(&limit));
        let readable = |index: usize| fds.get(index).is_some_and(|fd| !fd.revents().is_empty());
        if readable(1) {
            self.next = Instant::now();
        }
        if readable(0) {
            return port.take_doorbells(doorbells);
        }
        Ok(0)
    }
}
