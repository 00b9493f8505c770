//! A control socket: one command a line, one answer a line.
//!
//! `stats` answers with all counts as JSON; anything else is an action as in a scenario and answers `ok`, or `error`
//! and what is wrong.

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::{fd::AsFd, unix::net::UnixStream},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    net::{SocketFlags, accept_with},
};

use crate::{
    emulator::Control,
    server::{Endpoint, ListenError, listen::Listener},
};

/// Longest command.
const MAX_LINE: u64 = 1024;
/// How long a client may be silent before the next one is served.
const PATIENCE: Duration = Duration::from_secs(5);

/// A control socket, ready to serve.
#[derive(Debug)]
pub struct ControlSocket {
    listener: Listener,
}

impl ControlSocket {
    /// Listens at `endpoint`.
    ///
    /// # Errors
    /// When it cannot be had.
    pub fn bind(endpoint: Endpoint) -> Result<Self, ListenError> {
        Ok(Self {
            listener: Listener::bind(endpoint)?,
        })
    }

    /// Serves clients, one after the other, until `stop` is readable.
    ///
    /// # Errors
    /// When the kernel refuses to wait.
    pub fn serve(&self, control: Control<'_>, stop: impl AsFd) -> Result<(), Errno> {
        loop {
            let mut fds = [
                PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN),
            ];
            rustix::io::retry_on_intr(|| poll(&mut fds, None))?;
            if !fds[1].revents().is_empty() {
                return Ok(());
            }
            if let Ok(client) = accept_with(self.listener.as_fd(), SocketFlags::CLOEXEC) {
                let _ = talk(control, UnixStream::from(client)); // a client that goes away is its own affair
            }
        }
    }
}

fn talk(control: Control<'_>, client: UnixStream) -> std::io::Result<()> {
    client.set_read_timeout(Some(PATIENCE))?;
    client.set_write_timeout(Some(PATIENCE))?;
    let mut writer = client.try_clone()?;
    let mut reader = BufReader::new(client);
    loop {
        let mut line = String::new();
        if reader.by_ref().take(MAX_LINE).read_line(&mut line)? == 0 {
            return Ok(());
        }
        let answer = match line.trim() {
            "stats" => serde_json::to_string(&control.report())?,
            action => match control.act_text(action) {
                Ok(()) => "ok".to_owned(),
                Err(e) => format!("error {}", e.problem),
            },
        };
        writeln!(writer, "{answer}")?;
    }
}
