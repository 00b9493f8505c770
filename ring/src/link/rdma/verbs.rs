//! What the link needs of an RDMA device, as a seam: real devices are behind it (`sys`), and one in software, in this
//! process, for tests (`model`).
//!
//! All of it is set-up and control but for three calls of a [`Queue`]: `post`, `sent` and `received`.

use std::{
    net::IpAddr,
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};

use ntb_mem::region::Region;
use rustix::io::Errno;

use crate::link::LinkError;

/// What kind of wire a port is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Fabric {
    /// InfiniBand.
    InfiniBand = 1,
    /// RDMA over Converged Ethernet, version 2.
    Roce = 2,
    /// iWARP: RDMA over TCP. No write with immediate; connections by rdma_cm only.
    Iwarp = 3,
}

impl Fabric {
    /// As printed.
    pub fn name(self) -> &'static str {
        match self {
            Self::InfiniBand => "InfiniBand",
            Self::Roce => "RoCE v2",
            Self::Iwarp => "iWARP",
        }
    }

    pub(crate) fn from_number(number: u8) -> Option<Self> {
        [Self::InfiniBand, Self::Roce, Self::Iwarp]
            .into_iter()
            .find(|fabric| *fabric as u8 == number)
    }

    /// Whether a write can carry an immediate.
    pub(crate) fn has_immediate(self) -> bool {
        self != Self::Iwarp
    }
}

/// One device, port and source address: what a connection leaves by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Name of the device, such as `mlx5_0`.
    pub device: String,
    /// Number of the port, from 1.
    pub port: u8,
    /// Its wire.
    pub fabric: Fabric,
    /// Index of the source address in the port's table of GIDs.
    pub gid_index: u8,
    /// That address.
    pub gid: [u8; 16],
    /// Address for rdma_cm, where the port has one.
    pub ip: Option<IpAddr>,
    /// Why this one.
    pub why: String,
}

impl std::fmt::Display for Port {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} port {} ({}", self.device, self.port, self.fabric.name())?;
        if self.fabric != Fabric::Iwarp {
            let gid = std::net::Ipv6Addr::from(self.gid);
            write!(f, ", GID {} {gid}", self.gid_index)?;
        }
        if let Some(ip) = self.ip {
            write!(f, ", address {ip}")?;
        }
        write!(f, "): {}", self.why)
    }
}

/// Sizes and numbers of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueWish {
    /// Send requests under way at most.
    pub(crate) depth: u32,
    /// Bytes of a request that carries its data itself.
    pub(crate) inline: u32,
    /// Receives posted.
    pub(crate) receives: u32,
    /// Service level (InfiniBand) and traffic class (RoCE).
    pub(crate) service_level: u8,
    pub(crate) traffic_class: u8,
    /// Exponent of the time-out for an acknowledgement: 4.096 µs times two to the power of it.
    pub(crate) timeout: u8,
    /// Resends after that, and after "receiver not ready"; 7 of the latter is without end.
    pub(crate) retries: u8,
    pub(crate) rnr_retries: u8,
    /// Bytes of a packet at most.
    pub(crate) mtu: u32,
}

/// What was granted of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Granted {
    pub(crate) depth: u32,
    pub(crate) inline: u32,
}

/// What the other side must know of a queue pair that is connected without rdma_cm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueAddress {
    pub(crate) number: u32,
    /// Number of the first packet, 24 bits.
    pub(crate) first_packet: u32,
    pub(crate) lid: u16,
    pub(crate) gid: [u8; 16],
    pub(crate) mtu: u32,
}

/// Local memory of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) address: u64,
    pub(crate) bytes: u32,
    pub(crate) lkey: u32,
}

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    /// Writes to the peer's memory.
    Write { address: u64, rkey: u32 },
    /// The same, and completes a receive of the peer's with this number.
    WriteImmediate { address: u64, rkey: u32, number: u32 },
    /// Fills a receive of the peer's.
    Send,
}

/// One work request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// Comes back in its completion, if it is signalled.
    pub(crate) id: u64,
    pub(crate) verb: Verb,
    /// `bytes` may be zero.
    pub(crate) data: Piece,
    /// The data is copied out while the request is posted, and needs no registration.
    pub(crate) inline: bool,
    pub(crate) signalled: bool,
}

/// How a request ended: a status of `ibv_wc_status`, 0 for success.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sent {
    pub(crate) id: u64,
    pub(crate) status: u32,
}

/// What arrived in a receive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Received {
    /// Number of the receive: which buffer.
    pub(crate) id: u64,
    pub(crate) status: u32,
    /// Bytes written or sent.
    pub(crate) bytes: u32,
    /// The number that a write carried.
    pub(crate) immediate: Option<u32>,
}

/// A queue pair with its completion queues, for use by several threads: one at a time sends, one at a time receives. Dropping it ends it: nothing more is read from or written to memory by it.
pub(crate) trait Queue: Send + Sync + std::fmt::Debug {
    fn granted(&self) -> Granted;

    /// For the other side, where it is not rdma_cm that connects.
    fn address(&self) -> QueueAddress;

    /// Connects it to the peer's, without rdma_cm.
    fn connect(&self, peer: &QueueAddress) -> Result<(), LinkError>;

    /// Hands requests to the device, in order and all with one doorbell. An error leaves it open how many were taken:
    /// the connection is then of no use any more.
    fn post(&self, requests: &[Request]) -> Result<(), Errno>;

    /// Posts a receive.
    fn post_receive(&self, id: u64, buffer: Piece) -> Result<(), Errno>;

    /// Takes completions of sends; an error if the completion queue itself is broken.
    fn sent(&self, out: &mut [Sent]) -> Result<usize, Errno>;

    /// Takes completions of receives.
    fn received(&self, out: &mut [Received]) -> Result<usize, Errno>;

    /// Readable when a receive has completed since it was last armed.
    fn arrivals(&self) -> BorrowedFd<'_>;

    /// Clears [`Queue::arrivals`] and asks for the next. What has completed before may not ring any more: look after.
    fn arm(&self) -> Result<(), Errno>;

    /// What the connection manager has said since: `Some` when the connection has ended.
    fn ended(&self) -> Option<String>;

    /// Readable when [`Queue::ended`] may have news, where there is such a descriptor.
    fn news(&self) -> Option<BorrowedFd<'_>>;
}

/// A queue pair that is being connected by rdma_cm.
pub(crate) trait Meeting: Send + std::fmt::Debug {
    /// Goes on without blocking; the queue once it is connected.
    fn poll(&mut self) -> Result<Option<Arc<dyn Queue>>, LinkError>;

    /// Readable when there is something to go on with.
    fn news(&self) -> BorrowedFd<'_>;

    /// Port that a listening side can be reached at; 0 for a calling side.
    fn port(&self) -> u16;
}

/// Memory to be registered.
#[derive(Debug)]
pub enum Memory {
    /// Of this process, by its address.
    Local(Arc<Region>),
    /// Behind a dma-buf, such as memory of a GPU: descriptor, offset in it and bytes. `address` is what the peer will call
    /// it by; it must lie as far into a page as the offset does.
    DmaBuf {
        /// The buffer.
        descriptor: Arc<OwnedFd>,
        /// First byte of it.
        offset: u64,
        /// How many.
        bytes: u64,
        /// What the peer will call the first.
        address: u64,
    },
    /// Of another device, at an address that the kernel's peer-memory modules know. Whoever makes one keeps it mapped for
    /// as long as it is registered.
    Peer {
        /// Of the first byte.
        address: u64,
        /// How many.
        bytes: u64,
    },
}

impl Memory {
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Local(region) => region.bytes(),
            Self::DmaBuf { bytes, .. } | Self::Peer { bytes, .. } => *bytes,
        }
    }

    pub(crate) fn address(&self) -> u64 {
        match self {
            Self::Local(region) => region.as_ptr() as u64,
            Self::DmaBuf { address, .. } | Self::Peer { address, .. } => *address,
        }
    }
}

/// Registered memory. Dropping it ends the registration.
pub(crate) trait Registered: Send + Sync + std::fmt::Debug {
    fn memory(&self) -> &Memory;
    /// Key for requests of this side.
    fn lkey(&self) -> u32;
    /// Key for the peer.
    fn rkey(&self) -> u32;
}

/// Something that a device tells by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// The port is up.
    PortUp,
    /// The port is down: nothing leaves and nothing arrives.
    PortDown,
    /// The port's addresses have changed.
    AddressesChanged,
    /// The device is gone or broken.
    DeviceGone,
    /// Something else, by its number in `ibv_event_type`.
    Other(u32),
}

/// Why a port cannot be used at the moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Unusable {
    /// It is down, and may come back as it was.
    Down(String),
    /// Its device is not there any more: what was opened is of no use even when one of that name comes back.
    Gone(String),
    /// It has not the address any more that was chosen: it has to be chosen anew.
    Changed(String),
}

/// An open device.
pub(crate) trait Adapter: Send + Sync + std::fmt::Debug {
    /// What connections leave by.
    fn port(&self) -> &Port;

    /// Whether that port is up, and still has the address.
    fn is_usable(&self) -> Result<(), Unusable>;

    /// Largest packet of the port in bytes.
    fn mtu(&self) -> u32;

    /// Whether rdma_cm can be used.
    fn has_manager(&self) -> bool;

    /// Registers memory, for writes by the peer too where `remote`.
    fn register(&self, memory: Memory, remote: bool) -> Result<Arc<dyn Registered>, LinkError>;

    /// A queue pair to be connected by exchange of addresses.
    fn queue(&self, wish: &QueueWish) -> Result<Arc<dyn Queue>, LinkError>;

    /// Waits for a peer that shows `token`; all others are turned away. `receive` is called for a queue pair once it is
    /// made and before anything can arrive, to post receives.
    fn listen(
        &self,
        wish: &QueueWish,
        token: [u8; TOKEN_BYTES],
        receive: Prepare,
    ) -> Result<Box<dyn Meeting>, LinkError>;

    /// Calls a peer that waits at `to`.
    fn call(
        &self,
        wish: &QueueWish,
        to: (IpAddr, u16),
        token: [u8; TOKEN_BYTES],
        receive: Prepare,
    ) -> Result<Box<dyn Meeting>, LinkError>;

    /// Readable when there is a notice.
    fn notices(&self) -> BorrowedFd<'_>;

    /// The next notice, if there is one.
    fn next_notice(&self) -> Option<Notice>;
}

/// Bytes that a caller proves with, in a connection request, that it is the one that the bootstrap was with. As many as
/// fit beside a header in the 56 bytes that InfiniBand has for it.
pub(crate) const TOKEN_BYTES: usize = 32;

/// Posts receives on a new queue pair.
pub(crate) type Prepare = Box<dyn FnMut(&dyn Queue) -> Result<(), Errno> + Send>;

/// Opens a device: a real one, or one of a model.
pub(crate) type Open = Box<dyn FnMut() -> Result<Arc<dyn Adapter>, LinkError> + Send>;

/// Name of a status of `ibv_wc_status`.
pub(crate) fn status_name(status: u32) -> &'static str {
    match status {
        0 => "success",
        4 => "local protection error",
        5 => "flushed: the connection had broken before",
        9 => "the peer calls the request invalid",
        10 => "the peer allows no access to that memory",
        11 => "the peer could not carry it out",
        12 => "retries exhausted: the peer or the way to it is dead",
        13 => "the peer had no receive ready",
        19 => "fatal error of the device",
        _ => "error",
    }
}

/// `IBV_WC_RETRY_EXC_ERR`.
pub(crate) const RETRY_EXHAUSTED: u32 = 12;
