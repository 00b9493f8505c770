//! The socket two sides of a soft link meet on: abstract, of whole messages, never blocking.

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
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags,
        SocketType,
    },
};

use super::greeting::{self, Malformed, Message};
use crate::link::ends::DESCRIPTORS;

/// Connections that the kernel keeps for a listener that is not looking.
const BACKLOG: i32 = 32;

/// A socket that ends when it is dropped, also where a child that was forked meanwhile still has a copy of its descriptor.
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

impl Drop for Socket {
    fn drop(&mut self) {
        // Fails where the other side has ended it first.
        let _ = rustix::net::shutdown(&self.0, Shutdown::Both);
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The place where the sides of `soft:NAME` meet. Nothing in any file system.
pub(super) fn address(name: &str) -> Result<SocketAddrUnix, Errno> {
    SocketAddrUnix::new_abstract_name(format!("ntb-soft:{name}").as_bytes())
}

fn socket() -> Result<Socket, Errno> {
    rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .map(Socket)
}

/// Connects to whoever listens there.
pub(super) fn connect(address: &SocketAddrUnix) -> Result<Socket, Errno> {
    let socket = socket()?;
    rustix::net::connect(&socket, address)?;
    Ok(socket)
}

/// Listens there, when nobody does.
pub(super) fn listen(address: &SocketAddrUnix) -> Result<Socket, Errno> {
    let socket = socket()?;
    rustix::net::bind(&socket, address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Takes the next connection; `None` when there is none.
pub(super) fn accept(listener: &Socket) -> Result<Option<Socket>, Errno> {
    match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        Ok(socket) => Ok(Some(Socket(socket))),
        Err(Errno::WOULDBLOCK | Errno::INTR | Errno::CONNABORTED) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Sends a message, with descriptors or without.
pub(super) fn send(socket: &Socket, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOBIG);
    }
    let bytes = message.encode();
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags).map(drop)
}

/// What a socket gave.
pub(super) enum Heard {
    /// Nothing yet.
    Nothing,
    /// The other side has closed it or died.
    Gone,
    /// A whole message and all its descriptors.
    Message(Message, Vec<OwnedFd>),
    /// Something else; what came with it is closed.
    Malformed(Malformed),
    /// A message with fewer descriptors than were sent with it: this process may open no more files.
    Limits,
}

/// Takes the next message from a socket. Descriptors beyond the room for [`DESCRIPTORS`] never reach this process.
pub(super) fn receive(socket: &Socket) -> Heard {
    // One byte more than any message has, so that a longer one is seen to be longer.
    let mut bytes = [0; greeting::BYTES + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let mut attempt =
        || rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags);
    // Who closes a socket with our message unread resets it; the error comes ahead of what it sent before.
    let result = match attempt() {
        Err(Errno::CONNRESET) => attempt(),
        other => other,
    };
    let got = match result {
        Ok(got) => got,
        Err(Errno::WOULDBLOCK | Errno::INTR) => return Heard::Nothing,
        Err(_) => return Heard::Gone,
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.bytes == 0 {
        return Heard::Gone;
    }
    if got.flags.contains(ReturnFlags::CTRUNC) {
        return if fds.len() < DESCRIPTORS {
            Heard::Limits
        } else {
            Heard::Malformed(Malformed::Field("number of descriptors"))
        };
    }
    let bytes = bytes.get(..got.bytes).unwrap_or_default();
    match Message::decode(bytes) {
        Ok(message) => Heard::Message(message, fds),
        Err(why) => Heard::Malformed(why),
    }
}
