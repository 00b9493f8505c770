//! Requests and replies on one stream.

use std::{
    collections::BTreeSet,
    io,
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

use zerocopy::FromZeros;

use super::{
    super::PciError,
    proto::{Command, Header, flags},
    protocol_error,
    socket::{self, Message, Socket, SocketError},
};

pub(super) struct Connection {
    pub(super) socket: Socket,
    pub(super) next_id: u16,
    /// Why the stream is of no more use.
    pub(super) broken: Option<String>,
    /// Vectors that are connected.
    pub(super) connected: BTreeSet<u16>,
}

impl Connection {
    pub(super) fn call(
        &mut self,
        name: &str,
        command: Command,
        head: &[u8],
        data: &[u8],
        fds: &[BorrowedFd<'_>],
        timeout: Duration,
    ) -> Result<Message, PciError> {
        let deadline = Instant::now() + timeout;
        let id = self.send(name, command, 0, head, data, fds, deadline)?;
        loop {
            let message = match self.socket.receive(deadline) {
                Ok(message) => message,
                Err(e) => return Err(self.broke(name, command, e, timeout)),
            };
            if message.header.flags & flags::TYPE_MASK != flags::REPLY {
                self.refuse(name, &message.header, deadline)?;
                continue;
            }
            if message.header.id != id || message.header.command != command as u16 {
                let what = format!(
                    "reply {} to command {} while {id} to {command} was awaited",
                    message.header.id, message.header.command
                );
                return Err(self.broke(name, command, SocketError::Malformed(what), timeout));
            }
            if message.header.flags & flags::ERROR != 0 {
                let errno = match i32::try_from(message.header.error) {
                    Ok(n) if n > 0 => n,
                    _ => rustix::io::Errno::IO.raw_os_error(),
                };
                return Err(PciError::io(
                    format!("{command} on {name}"),
                    io::Error::from_raw_os_error(errno),
                ));
            }
            return Ok(message);
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the parts of one message")]
    pub(super) fn send(
        &mut self,
        name: &str,
        command: Command,
        flags: u32,
        head: &[u8],
        data: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<u16, PciError> {
        if let Some(why) = &self.broken {
            return Err(PciError::Gone {
                what: format!("{name}: {why}"),
            });
        }
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        let header = Header {
            id,
            command: command as u16,
            flags,
            ..Header::new_zeroed()
        };
        let left = deadline.saturating_duration_since(Instant::now());
        match self.socket.send(header, head, data, fds, deadline) {
            Ok(()) => Ok(id),
            Err(e) => Err(self.broke(name, command, e, left)),
        }
    }

    /// Servers may ask clients for their memory; this one hands memory out by descriptor only.
    fn refuse(&mut self, name: &str, asked: &Header, deadline: Instant) -> Result<(), PciError> {
        if !socket::wants_reply(asked) {
            return Ok(());
        }
        let header = Header {
            id: asked.id,
            command: asked.command,
            flags: flags::REPLY | flags::ERROR,
            error: rustix::io::Errno::OPNOTSUPP.raw_os_error() as u32,
            ..Header::new_zeroed()
        };
        let left = deadline.saturating_duration_since(Instant::now());
        self.socket
            .send(header, &[], &[], &[], deadline)
            .map_err(|e| self.broke(name, Command::DmaRead, e, left))
    }

    fn broke(&mut self, name: &str, command: Command, error: SocketError, timeout: Duration) -> PciError {
        let what = format!("{command} on {name}");
        let (note, error) = match error {
            SocketError::Timeout => (
                format!("no answer to {what} within {timeout:?}"),
                PciError::Timeout { what, after: timeout },
            ),
            SocketError::Closed => (
                "the server closed the connection".to_owned(),
                PciError::Gone {
                    what: format!("{what}: the server closed the connection"),
                },
            ),
            SocketError::Malformed(how) => (format!("broken message: {how}"), protocol_error(how)),
            SocketError::Io(e) => (format!("{what}: {e}"), PciError::io(what, e)),
        };
        self.broken.get_or_insert(note);
        error
    }
}
