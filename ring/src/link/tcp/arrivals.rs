//! Where sleepers are woken by what arrives, whichever connection it arrives on.
//!
//! Every sleeper of a link stands behind one descriptor for arrivals. A packet on a stream that is watched there tells each
//! of them, asleep or not, which takes longer than the whole way of a small message; so a stream is watched only
//! while nobody polls.

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
    sync::{Arc, Mutex},
};

use rustix::{event::epoll, io::Errno};

use super::conn::{Conn, lock};
use crate::link::doorbell::Hub;

/// The connection of the moment, and a descriptor that is readable when it is, as long as it is watched.
#[derive(Debug)]
pub(super) struct Arrivals {
    epoll: OwnedFd,
    moment: Mutex<Moment>,
}

#[derive(Debug, Default)]
struct Moment {
    conn: Option<Arc<Conn>>,
    watched: bool,
}

impl Arrivals {
    pub(super) fn new() -> Result<Self, Errno> {
        Ok(Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            moment: Mutex::default(),
        })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Sets the connection of the moment, and watches it.
    pub(super) fn set(&self, conn: Option<&Arc<Conn>>) {
        let mut moment = lock(&self.moment);
        self.stop(&mut moment);
        let before = std::mem::replace(&mut moment.conn, conn.cloned());
        self.start(&mut moment);
        drop(moment);
        drop(before);
    }

    /// Has sleepers woken by what arrives on `conn`, if it is the one of the moment and lives.
    pub(super) fn watch(&self, conn: &Conn) {
        let mut moment = lock(&self.moment);
        if moment.is(conn) {
            self.start(&mut moment);
        }
    }

    /// Has them woken by it no longer.
    pub(super) fn leave(&self, conn: &Conn) {
        let mut moment = lock(&self.moment);
        if moment.is(conn) {
            self.stop(&mut moment);
        }
    }

    fn start(&self, moment: &mut Moment) {
        let Some(conn) = moment.conn.as_ref().filter(|c| !moment.watched && !c.is_dead()) else {
            return;
        };
        // Only memory can be short for it; then sleepers are woken by the service thread alone.
        moment.watched = epoll::add(
            &self.epoll,
            conn.fd(),
            epoll::EventData::new_u64(0),
            epoll::EventFlags::IN,
        )
        .is_ok();
    }

    fn stop(&self, moment: &mut Moment) {
        if let (Some(conn), true) = (&moment.conn, moment.watched) {
            let _ = epoll::delete(&self.epoll, conn.fd());
            moment.watched = false;
        }
    }

    #[cfg(test)]
    pub(super) fn is_watched(&self) -> bool {
        lock(&self.moment).watched
    }
}

impl Moment {
    fn is(&self, conn: &Conn) -> bool {
        self.conn
            .as_ref()
            .is_some_and(|c| std::ptr::eq(&raw const **c, conn))
    }
}

impl Hub for Arrivals {
    fn hand_out(&self) {
        let conn = lock(&self.moment).conn.clone();
        if let Some(conn) = conn {
            conn.take_up();
        }
    }
}
