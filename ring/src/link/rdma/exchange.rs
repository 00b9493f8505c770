//! What the two sides tell each other over the authenticated stream, byte by byte. All numbers are little-endian. The hellos
//! are what each says while meeting; the rest follows.
//!
//! ```text
//! hello   1 | version u16 | fabric u8 | flags u8 (1 rdma_cm, 2 strict, 4 rdma_cm only) | ip version u8 (0, 4, 6) | ip 16
//! offer   2 | port u16 | token 32                     from the side that was called: call by rdma_cm
//! queue   3 | number u32 | first packet u32 | lid u16 | gid 16 | mtu u32      without rdma_cm, both
//! memory  4 | window address u64, key u32, bytes u64 | control address u64, key u32 | receives u32
//! taken   5                                           instead of the hello of a side that has a peer already
//! ```

use std::{
    io::{ErrorKind, Read, Write},
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd},
};

use super::{
    account::Remote,
    verbs::{Fabric, QueueAddress, TOKEN_BYTES},
};
use crate::link::{
    auth::{AuthError, Role},
    meet::Met,
};

/// Version of what is said here and of what follows over RDMA.
pub(super) const VERSION: u16 = 1;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    Hello(Hello),
    Offer { port: u16, token: [u8; TOKEN_BYTES] },
    Queue(QueueAddress),
    Memory(Remote),
    Taken,
}

/// What a side is and wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) version: u16,
    pub(super) fabric: u8,
    pub(super) has_manager: bool,
    pub(super) strict: bool,
    /// Will not be connected without rdma_cm.
    pub(super) needs_manager: bool,
    pub(super) ip: Option<IpAddr>,
}

impl Hello {
    pub(super) fn fabric(&self) -> Option<Fabric> {
        Fabric::from_number(self.fabric)
    }
}

impl Message {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        match self {
            Self::Hello(hello) => {
                out.push(1);
                out.extend(hello.version.to_le_bytes());
                out.push(hello.fabric);
                let flags = [hello.has_manager, hello.strict, hello.needs_manager];
                out.push(
                    flags
                        .iter()
                        .rev()
                        .fold(0, |byte, flag| byte << 1 | u8::from(*flag)),
                );
                let (version, bytes) = match hello.ip {
                    None => (0, [0; 16]),
                    Some(IpAddr::V4(ip)) => (4, ip.to_ipv6_mapped().octets()),
                    Some(IpAddr::V6(ip)) => (6, ip.octets()),
                };
                out.push(version);
                out.extend(bytes);
            }
            Self::Offer { port, token } => {
                out.push(2);
                out.extend(port.to_le_bytes());
                out.extend(token);
            }
            Self::Queue(queue) => {
                out.push(3);
                out.extend(queue.number.to_le_bytes());
                out.extend(queue.first_packet.to_le_bytes());
                out.extend(queue.lid.to_le_bytes());
                out.extend(queue.gid);
                out.extend(queue.mtu.to_le_bytes());
            }
            Self::Memory(memory) => {
                out.push(4);
                out.extend(memory.window.0.to_le_bytes());
                out.extend(memory.window.1.to_le_bytes());
                out.extend(memory.window.2.to_le_bytes());
                out.extend(memory.control.0.to_le_bytes());
                out.extend(memory.control.1.to_le_bytes());
                out.extend(memory.receives.to_le_bytes());
            }
            Self::Taken => out.push(5),
        }
        out
    }

    /// `None` for what is no message of this version. A hello of any version is one: its first fields stay.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = Fields(bytes);
        let message = match rest.u8()? {
            1 => {
                let (version, fabric, flags, ip_version) = (rest.u16()?, rest.u8()?, rest.u8()?, rest.u8()?);
                let ip = std::net::Ipv6Addr::from(rest.bytes::<16>()?);
                return Some(Self::Hello(Hello {
                    version,
                    fabric,
                    has_manager: flags & 1 != 0,
                    strict: flags & 2 != 0,
                    needs_manager: flags & 4 != 0,
                    ip: match ip_version {
                        4 => ip.to_ipv4_mapped().map(IpAddr::V4),
                        6 => Some(IpAddr::V6(ip)),
                        _ => None,
                    },
                }));
            }
            2 => Self::Offer {
                port: rest.u16()?,
                token: rest.bytes()?,
            },
            3 => Self::Queue(QueueAddress {
                number: rest.u32()?,
                first_packet: rest.u32()?,
                lid: rest.u16()?,
                gid: rest.bytes()?,
                mtu: rest.u32()?,
            }),
            4 => Self::Memory(Remote {
                window: (rest.u64()?, rest.u32()?, rest.u64()?),
                control: (rest.u64()?, rest.u32()?),
                receives: rest.u32()?,
            }),
            5 => Self::Taken,
            _ => return None,
        };
        rest.0.is_empty().then_some(message)
    }
}

struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*taken)
    }
    fn u8(&mut self) -> Option<u8> {
        self.bytes::<1>().map(|[b]| b)
    }
    fn u16(&mut self) -> Option<u16> {
        self.bytes().map(u16::from_le_bytes)
    }
    fn u32(&mut self) -> Option<u32> {
        self.bytes().map(u32::from_le_bytes)
    }
    fn u64(&mut self) -> Option<u64> {
        self.bytes().map(u64::from_le_bytes)
    }
}

/// The stream while it carries messages, and afterwards, when its end says that the peer has died.
#[derive(Debug)]
pub(super) struct Exchange {
    met: Met,
    out: Vec<u8>,
}

impl Exchange {
    pub(super) fn new(met: Met) -> Self {
        Self { met, out: Vec::new() }
    }

    /// Whether this side has called the other.
    pub(super) fn is_caller(&self) -> bool {
        self.met.session.role() == Role::Initiator
    }

    /// The peer's address on the stream.
    pub(super) fn peer_ip(&self) -> Option<IpAddr> {
        self.met.stream.peer_addr().ok().map(|address| address.ip())
    }

    /// Sends a message as far as the stream takes it.
    pub(super) fn send(&mut self, message: &Message) -> Result<(), String> {
        if let Some(sealed) = self.met.session.seal(&message.encode()) {
            self.out.extend(sealed);
        }
        self.flush()
    }

    pub(super) fn flush(&mut self) -> Result<(), String> {
        while !self.out.is_empty() {
            match self.met.stream.write(&self.out) {
                Ok(n) => drop(self.out.drain(..n)),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(format!("the peer cannot be told anything: {e}")),
            }
        }
        Ok(())
    }

    /// The next message, if it is there.
    pub(super) fn next(&mut self) -> Result<Option<Message>, String> {
        match self.met.opener.next(&mut self.met.stream) {
            Ok(None) => Ok(None),
            Ok(Some(content)) => match Message::decode(&content) {
                Some(message) => Ok(Some(message)),
                None => Err("the peer says something unknown".to_owned()),
            },
            Err(AuthError::Stream { error, .. }) if error.kind() == ErrorKind::UnexpectedEof => {
                Err("the peer has closed the connection".to_owned())
            }
            Err(e) => Err(e.to_string()),
        }
    }

    /// Whether the stream still stands, now that nothing more is said.
    pub(super) fn is_alive(&mut self) -> Result<(), String> {
        match self.met.stream.read(&mut [0; 1]) {
            Ok(0) => Err("the peer has closed the connection".to_owned()),
            Ok(_) => Err("the peer says something though all is said".to_owned()),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(()),
            Err(e) => Err(format!("the peer has died: {e}")),
        }
    }
}

impl AsFd for Exchange {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.met.stream.as_fd()
    }
}
