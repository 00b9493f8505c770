//! Where a server listens: a path, an abstract name, or a socket that is connected already.

use std::{
    fmt,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with},
};

/// A place to be served at.
#[derive(Clone, Debug)]
pub enum Endpoint {
    /// A socket in the file system.
    Path(PathBuf),
    /// An abstract name, written `@NAME`.
    Abstract(String),
    /// One end of a connected stream socket; served once.
    Connected(Arc<OwnedFd>),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Abstract(name) => write!(f, "@{name}"),
            Self::Connected(_) => write!(f, "a connected socket"),
        }
    }
}

impl FromStr for Endpoint {
    type Err = ListenError;

    /// `@NAME` is an abstract name, anything else a path.
    fn from_str(text: &str) -> Result<Self, ListenError> {
        match text.strip_prefix('@') {
            Some("") => Err(ListenError::BadAddress {
                address: text.to_owned(),
            }),
            Some(name) => Ok(Self::Abstract(name.to_owned())),
            None if text.is_empty() => Err(ListenError::BadAddress {
                address: text.to_owned(),
            }),
            None => Ok(Self::Path(PathBuf::from(text))),
        }
    }
}

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// Not an address.
    #[error("'{address}' is not a socket address: give a path of at most 107 bytes or '@NAME'")]
    BadAddress {
        /// What was given.
        address: String,
    },
    /// Another server answers there.
    #[error("{address} is in use by a running server: stop it or choose another path")]
    InUse {
        /// The address.
        address: String,
    },
    /// Something that is not a socket lies there.
    #[error("{address} exists and is not a socket: remove it or choose another path")]
    NotASocket {
        /// The path.
        address: String,
    },
    /// The kernel refused.
    #[error("{step} {address} failed: {errno}")]
    Bind {
        /// The call.
        step: &'static str,
        /// The address.
        address: String,
        /// What the kernel said.
        errno: Errno,
    },
    /// The kernel refused something that has no address.
    #[error("{step} failed: {errno}")]
    Kernel {
        /// The call.
        step: &'static str,
        /// What the kernel said.
        errno: Errno,
    },
}

impl ListenError {
    /// A stable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::BadAddress { .. } => "bad-socket-address",
            Self::InUse { .. } => "socket-in-use",
            Self::NotASocket { .. } => "path-is-no-socket",
            Self::Bind { .. } => "socket-bind",
            Self::Kernel { .. } => "socket-kernel",
        }
    }
}

/// A listening socket that removes its path when dropped, unless somebody has replaced it.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    file: Option<(PathBuf, u64, u64)>,
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Listener {
    pub(crate) fn bind(endpoint: Endpoint) -> Result<Self, ListenError> {
        let address = endpoint.to_string();
        let bad = |_| ListenError::BadAddress {
            address: address.clone(),
        };
        let (name, path) = match endpoint {
            Endpoint::Path(path) => {
                let name = SocketAddrUnix::new(&path).map_err(bad)?;
                remove_stale(&path, &name)?;
                (name, Some(path))
            }
            Endpoint::Abstract(name) => (
                SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(bad)?,
                None,
            ),
            Endpoint::Connected(_) => return Err(bad(Errno::INVAL)),
        };
        let failed = |step: &'static str| {
            let address = address.clone();
            move |errno| match errno {
                Errno::ADDRINUSE => ListenError::InUse { address },
                errno => ListenError::Bind { step, address, errno },
            }
        };
        let socket = stream_socket().map_err(failed("opening a socket for"))?;
        bind(&socket, &name).map_err(failed("binding"))?;
        listen(&socket, 8).map_err(failed("listening at"))?;
        let file = path.and_then(|path| {
            let meta = std::fs::symlink_metadata(&path).ok()?;
            Some((path, meta.dev(), meta.ino()))
        });
        Ok(Self { socket, file })
    }
}

fn stream_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Removes a socket that nobody answers at any more.
fn remove_stale(path: &Path, name: &SocketAddrUnix) -> Result<(), ListenError> {
    let address = || path.display().to_string();
    match std::fs::symlink_metadata(path) {
        Err(_) => return Ok(()), // nothing there, or binding will say what is wrong
        Ok(meta) if !meta.file_type().is_socket() => {
            return Err(ListenError::NotASocket { address: address() });
        }
        Ok(_) => {}
    }
    let probe = stream_socket().map_err(|errno| ListenError::Kernel {
        step: "opening a socket",
        errno,
    })?;
    match connect(&probe, name) {
        Err(Errno::CONNREFUSED | Errno::NOENT) => {}
        // Connected, or its queue is full.
        Ok(()) | Err(_) => return Err(ListenError::InUse { address: address() }),
    }
    match std::fs::remove_file(path) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(ListenError::Bind {
            step: "removing the stale socket",
            address: address(),
            errno: Errno::from_io_error(&e).unwrap_or(Errno::IO),
        }),
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some((path, dev, ino)) = &self.file
            && std::fs::symlink_metadata(path).is_ok_and(|m| m.dev() == *dev && m.ino() == *ino)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}
