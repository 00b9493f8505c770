//! A vfio-user server for one device: our own, so that no client can crash, hang or starve it.
//!
//! One thread accepts, one serves the client there is. A second client is refused at once: its connection is
//! accepted and closed. When a client leaves, the function is reset and the next one is served.

#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing
)]
#![cfg_attr(
    test,
    allow(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

mod device;
pub mod listen;
pub mod script;
mod session;
pub mod stream;

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread::JoinHandle,
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    io::Errno,
    net::{SocketFlags, accept_with},
};

use crate::model::Port;
pub use device::Device;
use listen::Listener;
pub use listen::{Endpoint, ListenError};
pub use session::serve;
pub use stream::{End, Limits, Transport};

/// What a server has seen of its clients.
#[derive(Debug, Default)]
pub struct ServerStats {
    clients: AtomicU64,
    refused: AtomicU64,
    faults: AtomicU64,
    last_fault: Mutex<Option<String>>,
}

impl ServerStats {
    /// Clients served so far, the present one included.
    pub fn clients(&self) -> u64 {
        self.clients.load(Ordering::Relaxed)
    }

    /// Clients refused since another was being served.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Connections that ended in a fault of the client.
    pub fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }

    /// The last such fault in words.
    pub fn last_fault(&self) -> Option<String> {
        self.last_fault
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn ended(&self, end: &End) {
        if end.is_fault() {
            self.faults.fetch_add(1, Ordering::Relaxed);
            *self.last_fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(end.to_string());
        }
    }
}

/// A running server. Dropping it stops it and takes its socket away.
#[derive(Debug)]
pub struct Server {
    stop: Arc<OwnedFd>,
    stats: Arc<ServerStats>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves `port` at `endpoint` until dropped.
    pub fn start(endpoint: Endpoint, port: Arc<Port>, limits: Limits) -> Result<Self, ListenError> {
        let kernel = |step: &'static str| move |errno| ListenError::Kernel { step, errno };
        let stop =
            Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(kernel("eventfd"))?);
        let stats = Arc::new(ServerStats::default());
        let worker = Worker {
            device: Arc::new(Device::new(port)),
            stop: Arc::clone(&stop),
            stats: Arc::clone(&stats),
            limits,
        };
        let name = "emu-server".to_owned();
        let builder = std::thread::Builder::new().name(name);
        let thread = match endpoint {
            Endpoint::Connected(socket) => builder.spawn(move || worker.session(&socket)),
            other => {
                let listener = Listener::bind(other)?;
                builder.spawn(move || worker.accept_loop(&listener))
            }
        }
        .map_err(|e| ListenError::Kernel {
            step: "starting a thread",
            errno: Errno::from_io_error(&e).unwrap_or(Errno::AGAIN),
        })?;
        Ok(Self {
            stop,
            stats,
            thread: Some(thread),
        })
    }

    /// What it has seen.
    pub fn stats(&self) -> &ServerStats {
        &self.stats
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes()); // a counter that is full is readable too
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[derive(Clone)]
struct Worker {
    device: Arc<Device>,
    stop: Arc<OwnedFd>,
    stats: Arc<ServerStats>,
    limits: Limits,
}

impl Worker {
    fn session(&self, socket: &OwnedFd) {
        self.stats.clients.fetch_add(1, Ordering::Relaxed);
        let mut transport = stream::Socket::new(socket.as_fd(), self.stop.as_fd());
        let end = serve(&self.device, &mut transport, self.limits);
        self.stats.ended(&end);
        // Somebody else may hold the descriptor as well: shut down, so that the client sees the end.
        let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
    }

    fn accept_loop(self, listener: &Listener) {
        let mut present: Option<(Arc<OwnedFd>, JoinHandle<()>)> = None;
        while let Some(client) = self.accept(listener) {
            if let Some((socket, thread)) = present.take() {
                // A client that has gone is waited for: what it sent last is soon worked off.
                if !thread.is_finished() && !stream::hung_up(&*socket) {
                    self.stats.refused.fetch_add(1, Ordering::Relaxed);
                    present = Some((socket, thread));
                    continue; // dropping `client` closes it
                }
                let _ = thread.join();
            }
            let client = Arc::new(client);
            let (worker, socket) = (self.clone(), Arc::clone(&client));
            let spawned = std::thread::Builder::new()
                .name("emu-client".to_owned())
                .spawn(move || worker.session(&socket));
            present = spawned.ok().map(|thread| (client, thread)); // no thread to be had: refused
        }
        if let Some((_, thread)) = present {
            let _ = thread.join();
        }
    }

    /// The next connection; `None` when the server is to stop.
    fn accept(&self, listener: &Listener) -> Option<OwnedFd> {
        loop {
            let mut fds = [
                PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.stop.as_fd(), PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(_) => return None,
            }
            let [_, stop] = &fds;
            if !stop.revents().is_empty() {
                return None;
            }
            match accept_with(listener.as_fd(), SocketFlags::CLOEXEC) {
                Ok(client) => return Some(client),
                // Out of descriptors: give clients time to leave some.
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    std::thread::sleep(std::time::Duration::from_millis(50));
                }
                Err(_) => {} // the client has gone again
            }
        }
    }
}
