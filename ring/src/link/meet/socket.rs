//! Sockets of a meeting, as they have to be for links.

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
    net::{SocketAddr, TcpStream},
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, sockopt},
};

use crate::link::LinkError;

/// Connections that wait to be taken up.
const BACKLOG: i32 = 64;
/// Silence after which the kernel asks the other kernel whether it is there, and pause between two questions. A process
/// that is stopped is answered for by its kernel: a pause is not a death.
const KEEP_ALIVE: Duration = Duration::from_secs(1);
/// Questions without an answer that end a connection.
const KEEP_ALIVE_COUNT: u32 = 5;
/// How long sent bytes may go unacknowledged.
const UNACKNOWLEDGED_MS: u32 = 6000;

fn new_socket(address: &SocketAddr) -> Result<OwnedFd, Errno> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(family, SocketType::STREAM, flags, None)
}

/// Binds the address and listens there.
pub(in crate::link) fn listen(address: &SocketAddr) -> Result<OwnedFd, Errno> {
    let socket = new_socket(address)?;
    // Connections of an earlier life that the kernel still remembers do not hold up the next.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Takes the next connection; `None` when there is none.
pub(in crate::link) fn accept(listener: &OwnedFd) -> Result<Option<TcpStream>, Errno> {
    match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        Ok(socket) => Ok(Some(TcpStream::from(socket))),
        // What went wrong with one that was not taken up yet is handed out here: it is its matter alone.
        Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => Err(Errno::MFILE),
        Err(_) => Ok(None),
    }
}

/// Starts connecting: the socket is writable once it has come to something.
pub(in crate::link) fn connect(address: &SocketAddr) -> Result<OwnedFd, Errno> {
    let socket = new_socket(address)?;
    match rustix::net::connect(&socket, address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(e) => Err(e),
    }
}

/// Whether connecting has come to something, good or bad.
pub(in crate::link) fn is_writable(fd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::OUT)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(n) if n > 0)
}

/// Whether both ends are one and the same socket, as happens when nobody listens on a port of the range that callers get
/// theirs from.
pub(in crate::link) fn is_itself(stream: &TcpStream) -> bool {
    match (stream.local_addr(), stream.peer_addr()) {
        (Ok(a), Ok(b)) => a == b,
        _ => false,
    }
}

/// Sets a connection up for messages: no delay, keep-alive, busy polling where asked for.
pub(in crate::link) fn prepare(stream: &TcpStream, busy_poll: Option<Duration>) -> Result<(), Errno> {
    sockopt::set_tcp_nodelay(stream, true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEP_ALIVE)?;
    sockopt::set_tcp_keepintvl(stream, KEEP_ALIVE)?;
    sockopt::set_tcp_keepcnt(stream, KEEP_ALIVE_COUNT)?;
    sockopt::set_tcp_user_timeout(stream, UNACKNOWLEDGED_MS)?;
    match busy_poll {
        Some(time) => set_busy_poll(stream, time),
        None => Ok(()),
    }
}

#[allow(unsafe_code, reason = "a socket option that the system call crate lacks")]
fn set_busy_poll(socket: impl AsFd, time: Duration) -> Result<(), Errno> {
    use std::os::fd::AsRawFd;
    let value = libc::c_int::try_from(time.as_micros()).unwrap_or(libc::c_int::MAX);
    // SAFETY: the value outlives the call and the length is its own.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_BUSY_POLL,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result == 0 {
        return Ok(());
    }
    let code = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    Err(Errno::from_raw_os_error(code))
}

/// Tries the option before anybody has come, so that a refusal is told at once.
pub(super) fn try_busy_poll(address: &str, time: Duration) -> Result<(), LinkError> {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    new_socket(&any)
        .and_then(|socket| set_busy_poll(&socket, time))
        .map_err(|e| LinkError {
            name: "busy-poll-refused",
            exit: 6,
            what: format!(
                "{address}: busy polling of {} us was asked for and refused ({e}): it takes CAP_NET_ADMIN, or set it for \
                 all sockets with 'sysctl net.core.busy_read={}'",
                time.as_micros(),
                time.as_micros()
            ),
            errno: Some(e.raw_os_error()),
        })
}

pub(in crate::link) fn error(address: &str, step: &str, errno: Errno) -> LinkError {
    let (name, remedy) = match errno {
        Errno::MFILE | Errno::NFILE => ("link-limits", ": raise the limit on open files with 'ulimit -n'"),
        _ => ("tcp-socket", ""),
    };
    LinkError {
        name,
        exit: 6,
        what: format!("{address}: {step} failed ({errno}){remedy}"),
        errno: Some(errno.raw_os_error()),
    }
}
