//! The thread that shows runs of lines in strict mode as soon as they are complete: readers poll memory and no queue.

use std::{
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use super::{error::failed, receive::Inbox};
use crate::link::{Doorbell, LinkError, doorbell::sleep_on};

/// A running pump; dropping it ends the thread.
#[derive(Debug)]
pub(super) struct Pump {
    stop: Arc<AtomicBool>,
    bell: Doorbell,
    thread: Option<JoinHandle<()>>,
}

impl Pump {
    pub(super) fn start(inbox: &Arc<Inbox>) -> Result<Self, LinkError> {
        let cannot =
            |e: &dyn std::fmt::Display| failed("link-limits", 6, format!("no thread for strict mode: {e}"));
        let stop = Arc::new(AtomicBool::new(false));
        let bell = Doorbell::local().map_err(|e| cannot(&e))?;
        let (inbox, stopped, woken) = (Arc::clone(inbox), Arc::clone(&stop), bell.clone());
        let run = move || {
            while !stopped.load(Ordering::Acquire) {
                if sleep_on(&[inbox.arrivals().as_fd(), woken.as_fd()], Duration::from_secs(1)) {
                    inbox.wake();
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("ntb-rdma-strict".to_owned())
            .spawn(run);
        Ok(Self {
            stop,
            bell,
            thread: Some(thread.map_err(|e| cannot(&e))?),
        })
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.bell.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
