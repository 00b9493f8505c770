//! Framed messages with descriptors over a stream socket, every wait bounded.

use std::{
    io,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixStream},
    },
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, recvmsg, sendmsg,
    },
};
use zerocopy::{FromZeros, IntoBytes};

use super::proto::{HEADER_BYTES, Header, flags};

/// Descriptors that one message can bring or take.
pub const MAX_FDS: usize = 16;
/// Longest message that is accepted.
pub const MAX_MESSAGE: usize = (1 << 20) + 8192;

/// Why a message could not be sent or received. After any of these the stream is out of step and of no more use.
#[derive(Debug)]
pub enum SocketError {
    /// Not in time.
    Timeout,
    /// The other side closed.
    Closed,
    /// The kernel refused.
    Io(io::Error),
    /// A header that cannot be.
    Malformed(String),
}

/// A message that came in.
#[derive(Debug)]
pub struct Message {
    /// Its header.
    pub header: Header,
    /// What follows it.
    pub payload: Vec<u8>,
    /// Descriptors that came with it.
    pub fds: Vec<OwnedFd>,
}

/// A connected stream.
#[derive(Debug)]
pub struct Socket(UnixStream);

impl Socket {
    /// Connects to a path, or to an abstract name written `@NAME`.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let address = match path.to_str().and_then(|p| p.strip_prefix('@')) {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(path)?,
        };
        Self::new(UnixStream::connect_addr(&address)?)
    }

    /// A stream that is connected already.
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self(stream))
    }

    /// Sends header, head and data as one message, with descriptors. The size in the header is filled in.
    pub fn send(
        &self,
        mut header: Header,
        head: &[u8],
        data: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<(), SocketError> {
        let total = HEADER_BYTES + head.len() + data.len();
        header.size =
            u32::try_from(total).map_err(|_| SocketError::Malformed("message too long".to_owned()))?;
        let parts = [header.as_bytes(), head, data];
        let mut sent = 0;
        while sent < total {
            // What is left of each part.
            let mut skip = sent;
            let rest = parts.map(|part| {
                let here = skip.min(part.len());
                skip -= here;
                io::IoSlice::new(part.get(here..).unwrap_or(&[]))
            });
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if sent == 0 && !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(SocketError::Malformed(format!(
                    "{} descriptors in one message",
                    fds.len()
                )));
            }
            match sendmsg(&self.0, &rest, &mut control, SendFlags::NOSIGNAL) {
                Ok(n) => sent += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, deadline)?,
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(SocketError::Closed),
                Err(e) => return Err(SocketError::Io(e.into())),
            }
        }
        Ok(())
    }

    /// Receives the next message.
    pub fn receive(&self, deadline: Instant) -> Result<Message, SocketError> {
        let mut header = Header::new_zeroed();
        let mut fds = Vec::new();
        self.fill(header.as_mut_bytes(), &mut fds, deadline)?;
        let size = header.size as usize;
        if !(HEADER_BYTES..=MAX_MESSAGE).contains(&size) {
            return Err(SocketError::Malformed(format!("a message of {size} bytes")));
        }
        let mut payload = vec![0; size - HEADER_BYTES];
        self.fill(&mut payload, &mut fds, deadline)?;
        Ok(Message { header, payload, fds })
    }

    fn fill(
        &self,
        mut buffer: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        deadline: Instant,
    ) -> Result<(), SocketError> {
        while !buffer.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let received = recvmsg(
                &self.0,
                &mut [io::IoSliceMut::new(buffer)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            );
            // Descriptors that nobody takes are closed here.
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(more) = message {
                    fds.extend(more);
                }
            }
            if fds.len() > MAX_FDS {
                return Err(SocketError::Malformed(format!(
                    "{} descriptors in one message",
                    fds.len()
                )));
            }
            match received {
                Ok(message) if message.bytes == 0 => return Err(SocketError::Closed),
                Ok(message) => buffer = buffer.get_mut(message.bytes..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::IN, deadline)?,
                Err(Errno::CONNRESET) => return Err(SocketError::Closed),
                Err(e) => return Err(SocketError::Io(e.into())),
            }
        }
        Ok(())
    }

    fn wait(&self, what: PollFlags, deadline: Instant) -> Result<(), SocketError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(SocketError::Timeout);
        }
        let mut fds = [PollFd::new(&self.0, what)];
        match poll(&mut fds, Some(&timespec(left))) {
            Ok(0) => Err(SocketError::Timeout),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(SocketError::Io(e.into())),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Whether the sender of this header waits for a reply.
pub fn wants_reply(header: &Header) -> bool {
    header.flags & flags::NO_REPLY == 0
}

fn timespec(d: Duration) -> Timespec {
    Timespec {
        tv_sec: d.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: d.subsec_nanos().into(),
    }
}
