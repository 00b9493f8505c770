//! Framing: whole messages from and to a byte stream that also carries descriptors.
//!
//! Nothing is believed: sizes are bounded before memory is taken, a message once begun must arrive within a
//! deadline, surplus descriptors end the connection, and every descriptor that is not asked for is closed.

use std::{
    io::IoSliceMut,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use ntb::pci::vfio_user::proto::{HEADER_BYTES, Header};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, recvmsg, send},
};
use zerocopy::FromBytes;

/// Most descriptors taken with one message; advertised to the client.
pub const MAX_FDS: usize = 16;
/// Most payload of one region access; advertised to the client.
pub const MAX_DATA: usize = 1 << 20;
/// Largest message taken: a region write of [`MAX_DATA`] with its headers.
pub const MAX_MESSAGE: usize = MAX_DATA + 64;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum End {
    /// The client closed it.
    #[error("the client closed the connection")]
    Closed,
    /// The server is shutting down.
    #[error("the server is shutting down")]
    Shutdown,
    /// The client closed it in the middle of a message.
    #[error("the client left in the middle of a message")]
    Truncated,
    /// A message was begun and not finished, or a reply not taken.
    #[error("the client did not finish {what} within {limit:?}")]
    Late {
        /// What was waited for.
        what: &'static str,
        /// The limit.
        limit: Duration,
    },
    /// The stream cannot be in step any more.
    #[error("protocol violation: {what}")]
    Violation {
        /// What the client did.
        what: &'static str,
    },
    /// The kernel refused a call.
    #[error("{step} on the client's socket failed: {errno}")]
    Kernel {
        /// The call.
        step: &'static str,
        /// What the kernel said.
        errno: Errno,
    },
}

impl End {
    /// Whether the client did something that a correct one does not.
    pub fn is_fault(&self) -> bool {
        !matches!(self, Self::Closed | Self::Shutdown)
    }
}

/// A message as it arrived.
#[derive(Debug)]
pub struct Message {
    /// Its header; `size` has been checked.
    pub header: Header,
    /// Its descriptors.
    pub fds: Vec<OwnedFd>,
}

/// A byte stream with descriptors: the client's socket, or a buffer in tests.
pub trait Transport {
    /// Receives up to `buf.len()` bytes and any descriptors, waiting no longer than `deadline` (`None`: for ever).
    /// 0 bytes mean that the other end closed.
    fn receive(
        &mut self,
        buf: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        deadline: Option<Instant>,
    ) -> Result<usize, End>;
    /// Sends everything, waiting no longer than `deadline`.
    fn send(&mut self, bytes: &[u8], deadline: Instant) -> Result<(), End>;
}

/// How long a client may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// From connecting to the end of the version message.
    pub hello: Duration,
    /// From the first byte of a message to its last, and for taking a reply.
    pub message: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            hello: Duration::from_secs(5),
            message: Duration::from_secs(5),
        }
    }
}

/// Reads one message; its payload goes to `payload`, whose memory is used again.
///
/// `first_by` limits the wait for the first byte.
pub fn read_message(
    transport: &mut impl Transport,
    payload: &mut Vec<u8>,
    first_by: Option<(Instant, Duration)>,
    limit: Duration,
) -> Result<Message, End> {
    let mut fds = Vec::new();
    let mut head = [0u8; HEADER_BYTES];
    let late = |what, limit| {
        move |end| {
            if let End::Late { .. } = end {
                End::Late { what, limit }
            } else {
                end
            }
        }
    };

    let (first_deadline, first_limit) = first_by.map_or((None, Duration::ZERO), |(at, l)| (Some(at), l));
    let n = transport
        .receive(&mut head, &mut fds, first_deadline)
        .map_err(late("its first message", first_limit))?;
    if n == 0 {
        return Err(End::Closed);
    }
    let deadline = Instant::now() + limit;
    let mut have = n;
    while let Some(rest) = head.get_mut(have..).filter(|r| !r.is_empty()) {
        have += more(transport, rest, &mut fds, deadline).map_err(late("a message header", limit))?;
    }
    let Ok(header) = Header::read_from_bytes(&head) else {
        return Err(End::Violation {
            what: "a header that is none",
        });
    };
    let size = header.size as usize;
    if size < HEADER_BYTES {
        return Err(End::Violation {
            what: "a message shorter than its header",
        });
    }
    if size > MAX_MESSAGE {
        return Err(End::Violation {
            what: "a message larger than the limit announced",
        });
    }
    payload.clear();
    payload.resize(size - HEADER_BYTES, 0);
    let mut have = 0;
    while let Some(rest) = payload.get_mut(have..).filter(|r| !r.is_empty()) {
        have += more(transport, rest, &mut fds, deadline).map_err(late("a message", limit))?;
    }
    Ok(Message { header, fds })
}

fn more(
    transport: &mut impl Transport,
    rest: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    deadline: Instant,
) -> Result<usize, End> {
    match transport.receive(rest, fds, Some(deadline))? {
        0 => Err(End::Truncated),
        n => Ok(n),
    }
}

/// A client's socket; `stop` becomes readable when the server shuts down.
#[derive(Debug)]
pub struct Socket<'a> {
    socket: BorrowedFd<'a>,
    stop: BorrowedFd<'a>,
}

impl<'a> Socket<'a> {
    /// Speaks over `socket`.
    pub fn new(socket: BorrowedFd<'a>, stop: BorrowedFd<'a>) -> Self {
        Self { socket, stop }
    }

    fn wait(&self, what: PollFlags, deadline: Option<Instant>) -> Result<(), End> {
        loop {
            let mut fds = [
                PollFd::from_borrowed_fd(self.socket, what),
                PollFd::from_borrowed_fd(self.stop, PollFlags::IN),
            ];
            let timeout = deadline.map(|at| timespec(at.saturating_duration_since(Instant::now())));
            match poll(&mut fds, timeout.as_ref()) {
                Ok(0) => {
                    return Err(End::Late {
                        what: "a message",
                        limit: Duration::ZERO, // the caller knows it
                    });
                }
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(End::Kernel { step: "poll", errno }),
            }
            let [socket, stop] = &fds;
            if !stop.revents().is_empty() {
                return Err(End::Shutdown);
            }
            if !socket.revents().is_empty() {
                return Ok(());
            }
        }
    }
}

/// A duration as `poll` takes it.
pub(crate) fn timespec(d: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(d.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(d.subsec_nanos()),
    }
}

impl Transport for Socket<'_> {
    fn receive(
        &mut self,
        buf: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        deadline: Option<Instant>,
    ) -> Result<usize, End> {
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let got = recvmsg(self.socket, &mut [IoSliceMut::new(buf)], &mut control, flags);
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    fds.extend(rights);
                }
            }
            match got {
                Ok(m) if m.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MAX_FDS => {
                    return Err(End::Violation {
                        what: "more descriptors in a message than announced",
                    });
                }
                Ok(m) => return Ok(m.bytes),
                Err(Errno::AGAIN) => self.wait(PollFlags::IN, deadline)?,
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Ok(0),
                Err(errno) => {
                    return Err(End::Kernel {
                        step: "recvmsg",
                        errno,
                    });
                }
            }
        }
    }

    fn send(&mut self, mut bytes: &[u8], deadline: Instant) -> Result<(), End> {
        while !bytes.is_empty() {
            match send(self.socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(n) => bytes = bytes.get(n..).unwrap_or_default(),
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, Some(deadline))?,
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(End::Closed),
                Err(errno) => return Err(End::Kernel { step: "send", errno }),
            }
        }
        Ok(())
    }
}

/// Whether the other end has closed its side.
pub(crate) fn hung_up(socket: impl AsFd) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::RDHUP)];
    let none = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    matches!(poll(&mut fds, Some(&none)), Ok(n) if n > 0)
}
