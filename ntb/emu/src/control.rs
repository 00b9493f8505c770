//! A control socket: one command a line, one answer a line.
//!
//! `stats` answers with all counts as JSON; anything else is an action as in a scenario and answers `ok`, or `error`
//! and what is wrong.

use std::{
    io::{ErrorKind, Read, Write},
    os::{fd::AsFd, unix::net::UnixStream},
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
const MAX_LINE: usize = 1024;
/// Most clients at a time.
const MAX_CLIENTS: usize = 16;

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

    /// Serves clients, all at the same time, until `stop` is readable.
    ///
    /// # Errors
    /// When the kernel refuses to wait.
    pub fn serve(&self, control: Control<'_>, stop: impl AsFd) -> Result<(), Errno> {
        let mut clients: Vec<Client> = Vec::new();
        loop {
            let mut fds = vec![
                PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN),
            ];
            fds.extend(
                clients
                    .iter()
                    .map(|c| PollFd::from_borrowed_fd(c.stream.as_fd(), PollFlags::IN)),
            );
            rustix::io::retry_on_intr(|| poll(&mut fds, None))?;
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            let [stopped, connecting, talking @ ..] = &ready[..] else {
                return Ok(());
            };
            if *stopped {
                return Ok(());
            }
            let mut talking = talking.iter();
            // One that goes away, or does not take its answers, is its own affair.
            clients.retain_mut(|c| talking.next() != Some(&true) || c.talk(control).unwrap_or(false));
            if *connecting
                && let Ok(client) = accept_with(
                    self.listener.as_fd(),
                    SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
                )
                && clients.len() < MAX_CLIENTS
            {
                clients.push(Client {
                    stream: UnixStream::from(client),
                    line: Vec::new(),
                });
            }
        }
    }
}

#[derive(Debug)]
struct Client {
    stream: UnixStream,
    line: Vec<u8>,
}

impl Client {
    /// Works off what has come; whether it is still there.
    fn talk(&mut self, control: Control<'_>) -> std::io::Result<bool> {
        let mut bytes = [0; MAX_LINE];
        let n = match self.stream.read(&mut bytes) {
            Ok(0) => return Ok(false),
            Ok(n) => n,
            Err(e) if e.kind() == ErrorKind::WouldBlock || e.kind() == ErrorKind::Interrupted => {
                return Ok(true);
            }
            Err(e) => return Err(e),
        };
        self.line.extend(bytes.iter().take(n));
        while let Some(end) = self.line.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.line.drain(..=end).collect();
            let answer = match String::from_utf8_lossy(&line).trim() {
                "stats" => serde_json::to_string(&control.report())?,
                action => match control.act_text(action) {
                    Ok(()) => "ok".to_owned(),
                    Err(e) => format!("error {}", e.problem),
                },
            };
            self.stream.write_all((answer + "\n").as_bytes())?;
        }
        Ok(self.line.len() < MAX_LINE)
    }
}
