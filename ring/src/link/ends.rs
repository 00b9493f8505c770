//! The two ends of a link by shared memory of one machine: what a side makes once, and what it got from its peer.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use ntb_mem::{
    line::LINE_BYTES,
    region::{Pages, Region, RegionError},
};

use super::{
    DOORBELLS, Doorbell, LinkError, REGISTERS, Registers,
    doorbell::{PeerBell, sleep_on},
    engine::{Engine, WriteBack},
};

/// Descriptors that one side hands to the other: window, registers, doorbells in ascending order.
pub(crate) const DESCRIPTORS: usize = 2 + DOORBELLS as usize;

/// Largest window that is taken from a peer: 1 TiB, far beyond use and far below what address space has.
pub(crate) const WINDOW_MAX: u64 = 1 << 40;

/// Bytes of window by default.
pub(crate) const WINDOW_BYTES: u64 = 64 << 20;

/// What this side makes once: its memory that the peer writes, its registers, its doorbells.
#[derive(Debug)]
pub(crate) struct Own {
    window: Arc<Region>,
    registers: Arc<Region>,
    bells: [Doorbell; DOORBELLS as usize],
}

impl Own {
    /// Allocates everything. Nothing of it has a name.
    pub(crate) fn new(window_bytes: u64, pages: Pages) -> Result<Self, LinkError> {
        if window_bytes > WINDOW_MAX {
            return Err(LinkError {
                name: "link-memory",
                exit: 2,
                what: format!("a window of {window_bytes} bytes was asked for: {WINDOW_MAX} are the most"),
                errno: None,
            });
        }
        let window = Region::allocate(window_bytes, pages).map_err(|e| memory_error(&e))?;
        let registers = Region::allocate(LINE_BYTES as u64, Pages::Normal).map_err(|e| memory_error(&e))?;
        let bells = (0..DOORBELLS)
            .map(|_| Doorbell::shared())
            .collect::<Result<Vec<_>, _>>()
            .map_err(|errno| LinkError {
                name: "link-limits",
                exit: 6,
                what: format!(
                    "a link needs {} open files more and cannot have them ({errno}): raise the limit with 'ulimit -n'",
                    2 * DOORBELLS + 2
                ),
                errno: Some(errno.raw_os_error()),
            })?;
        let Ok(bells) = bells.try_into() else {
            unreachable!("DOORBELLS of them were made")
        };
        Ok(Self {
            window: Arc::new(window),
            registers: Arc::new(registers),
            bells,
        })
    }

    pub(crate) fn window(&self) -> &Arc<Region> {
        &self.window
    }

    /// What to hand to the peer, [`DESCRIPTORS`] long.
    pub(crate) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        [self.window.descriptor(), self.registers.descriptor()]
            .into_iter()
            .chain(self.bells.iter().filter_map(Doorbell::handle))
            .collect()
    }

    /// This side's registers as the peer has written them.
    pub(crate) fn registers(&self) -> Registers {
        let view = self.registers.view();
        let mut out = [0; REGISTERS];
        for (i, pair) in out.chunks_exact_mut(2).enumerate() {
            let word = view.load(i, Ordering::Acquire); // pairs with `Peer::write_registers`
            for (slot, shift) in pair.iter_mut().zip([0, 32]) {
                *slot = (word >> shift) as u32;
            }
        }
        out
    }

    /// Clears the registers for a new connection, before the peer that it is with can write them.
    pub(crate) fn clear_registers(&self) {
        let view = self.registers.view();
        for i in 0..REGISTERS / 2 {
            view.store(i, 0, Ordering::Release);
        }
    }

    /// Doorbell `number`; higher numbers than there are give doorbell 0.
    pub(crate) fn doorbell(&self, number: u32) -> Doorbell {
        let [first, ..] = &self.bells;
        self.bells.get(number as usize).unwrap_or(first).clone()
    }

    /// Sleeps until doorbell 0 or one of `others`, or until `timeout`; takes doorbell 0's rings.
    pub(crate) fn wait(&self, others: &[BorrowedFd<'_>], timeout: Duration) {
        let [bell, ..] = &self.bells;
        let mut fds = vec![bell.as_fd()];
        fds.extend_from_slice(others);
        if sleep_on(&fds, timeout) {
            bell.take();
        }
    }
}

/// Why what a peer handed over is not used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unfit {
    #[error("{found} descriptors instead of {DESCRIPTORS}")]
    Count { found: usize },
    #[error("window of {0} bytes: not between 64 and {WINDOW_MAX}")]
    WindowSize(u64),
    #[error("{0}: {1}")]
    Memory(&'static str, RegionError),
    #[error("descriptor for doorbell {0} is no doorbell")]
    Bell(usize),
    #[error("huge pages of another user's process")]
    HugeBetweenUsers,
}

/// What the peer of one connection handed over. Dropping it revokes the peer's memory: engines that are left store
/// into private pages that nobody reads.
#[derive(Debug)]
pub(crate) struct Peer {
    window: Arc<Region>,
    registers: Arc<Region>,
    bells: Vec<PeerBell>,
}

impl Peer {
    /// Takes up what a peer's [`Own::descriptors`] should be, and checks that it is.
    pub(crate) fn new(fds: Vec<OwnedFd>, window_bytes: u64) -> Result<Self, Unfit> {
        let found = fds.len();
        if found != DESCRIPTORS {
            return Err(Unfit::Count { found });
        }
        if !(LINE_BYTES as u64..=WINDOW_MAX).contains(&window_bytes) {
            return Err(Unfit::WindowSize(window_bytes));
        }
        let page = rustix::param::page_size() as u64;
        let mut fds = fds.into_iter();
        let mut region = |what, bytes| {
            let fd = fds.next().ok_or(Unfit::Count { found })?;
            Region::from_peer(fd, bytes)
                .map(Arc::new)
                .map_err(|e| Unfit::Memory(what, e))
        };
        Ok(Self {
            window: region("window", window_bytes)?,
            registers: region("registers", page)?,
            bells: fds
                .enumerate()
                .map(|(i, fd)| PeerBell::from_peer(fd).ok_or(Unfit::Bell(i)))
                .collect::<Result<_, _>>()?,
        })
    }

    /// Writes the peer's registers, in ascending order.
    pub(crate) fn write_registers(&self, registers: &Registers) {
        let view = self.registers.view();
        for (i, pair) in registers.chunks_exact(2).enumerate() {
            let word = pair.iter().rev().fold(0, |w, r| w << 32 | u64::from(*r));
            view.store(i, word, Ordering::Release); // pairs with `Own::registers`
        }
    }

    /// Rings doorbell `number`; numbers that there are not ring nothing.
    pub(crate) fn ring(&self, number: u32) {
        if let Some(bell) = self.bells.get(number as usize) {
            bell.ring();
        }
    }

    pub(crate) fn engine(&self) -> Engine {
        Engine::WriteBack(WriteBack::new(self.window.view()))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Where the kernel refuses (too many mappings), late stores go on landing in memory of a peer that is dead or
        // has been told that the link is down; the tag in every mark keeps a living one from taking them for news.
        let _ = self.window.revoke();
        let _ = self.registers.revoke();
    }
}

/// Memory that cannot be had, as a link error.
pub(crate) fn memory_error(e: &RegionError) -> LinkError {
    let (exit, errno) = match e {
        RegionError::BadSize { .. } => (2, None),
        RegionError::NoHugePages { errno, .. } | RegionError::Kernel { errno, .. } => {
            (6, Some(errno.raw_os_error()))
        }
        RegionError::BadDescriptor { .. } => (7, None),
    };
    LinkError {
        name: "link-memory",
        exit,
        what: format!("no memory for the link: {e}"),
        errno,
    }
}

/// Registers of a link that is down.
pub(crate) const NO_REGISTERS: Registers = [u32::MAX; REGISTERS];
