//! A PCI function in another process, over the vfio-user protocol.
//!
//! Every call is bounded by a time-out and every reply is checked: error flag, command, length, echoed fields.
//! After a time-out or a broken message the stream cannot be trusted any more, so every later call answers
//! [`PciError::Gone`]; connecting again is the way back.

pub mod capabilities;
mod connection;
mod function;
pub mod proto;
pub(super) mod regions;
pub mod socket;

use std::{
    collections::BTreeSet,
    fmt, io,
    os::fd::BorrowedFd,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use zerocopy::{FromZeros, IntoBytes};

use self::{
    capabilities::{Capabilities, DEFAULT_MAX_TRANSFER},
    connection::Connection,
    proto::{Command, RegionAccess, flags, irq, region},
    regions::Region,
    socket::{MAX_FDS, Message, Socket},
};
use super::{Bar, OpenError, PciError, config};

/// Time-outs of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// For a socket to appear and be listened on.
    pub connect: Duration,
    /// For the answer to one request.
    pub request: Duration,
    /// For a reset.
    pub reset: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            request: Duration::from_secs(2),
            reset: Duration::from_secs(10),
        }
    }
}

/// A function served at a Unix socket.
pub struct VfioUser {
    name: String,
    connection: Mutex<Connection>,
    timeouts: Timeouts,
    server: Capabilities,
    resettable: bool,
    vectors: u16,
    config_size: u32,
    bars: [Option<Region>; 6],
}

impl fmt::Debug for VfioUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VfioUser")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl VfioUser {
    /// Connects to a path, or to an abstract name written `@NAME`, and learns what the device is.
    ///
    /// A socket that is not there yet is waited for, up to [`Timeouts::connect`].
    pub fn open(path: &Path, timeouts: Timeouts) -> Result<Arc<Self>, OpenError> {
        let name = path.display().to_string();
        let until = Instant::now() + timeouts.connect;
        loop {
            let socket = connect(path, timeouts.connect)?;
            let server = server_process(&socket);
            // A server that serves somebody else closes at once, or never answers.
            match Self::start(name.clone(), socket, timeouts) {
                Err(PciError::Gone { .. } | PciError::Timeout { .. }) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                Err(PciError::Gone { .. } | PciError::Timeout { .. }) => {
                    return Err(OpenError::NodeBusy {
                        node: name,
                        waited: timeouts.connect,
                        holders: vec![format!("another client of {server}")],
                    });
                }
                other => return Ok(other?),
            }
        }
    }

    /// A function at the far end of a stream that is connected already.
    pub fn from_socket(name: &str, socket: Socket, timeouts: Timeouts) -> Result<Arc<Self>, PciError> {
        Self::start(name.to_owned(), socket, timeouts)
    }

    fn start(name: String, socket: Socket, timeouts: Timeouts) -> Result<Arc<Self>, PciError> {
        let mut this = Self {
            name,
            connection: Mutex::new(Connection {
                socket,
                next_id: 0,
                broken: None,
                connected: BTreeSet::new(),
            }),
            timeouts,
            server: Capabilities::default(),
            resettable: false,
            vectors: 0,
            config_size: 0,
            bars: [const { None }; 6],
        };
        this.server = this.negotiate()?;
        let info = this.device_info()?;
        this.resettable = info.flags & proto::DEVICE_RESET != 0;
        this.vectors = this.vectors_of(irq::MSIX)?;
        let config = this.region_info(region::CONFIG)?;
        this.config_size = match config.bytes {
            4096.. => 4096,
            256.. => 256,
            n => return Err(protocol_error(format!("configuration space of {n} bytes"))),
        };
        for bar in Bar::ALL {
            let region = this.region_info(bar.index() as u32)?;
            if region.bytes > 0
                && let Some(slot) = this.bars.get_mut(bar.index())
            {
                *slot = Some(region);
            }
        }
        this.place_bars()?;
        for bar in Bar::ALL {
            let low = config::read32(&this, config::BAR0 + 4 * bar.index() as u32)?;
            if let Some(Some(region)) = this.bars.get_mut(bar.index()) {
                region.info.prefetchable = low & 0x8 != 0;
            }
        }
        Ok(Arc::new(this))
    }

    /// Gives addresses to BARs that have none, as firmware would: nobody else enumerates this device.
    fn place_bars(&self) -> Result<(), PciError> {
        // Where firmware puts prefetchable windows, and where 32-bit BARs must go.
        let (mut wide_next, mut narrow_next) = (1u64 << 40, 0xC000_0000_u64);
        for (bar, region) in Bar::ALL.into_iter().zip(&self.bars) {
            let Some(region) = region else { continue };
            let at = config::BAR0 + 4 * bar.index() as u32;
            let low = config::read32(self, at)?;
            let wide = config::is_wide(bar, low);
            let next = if wide { &mut wide_next } else { &mut narrow_next };
            let size = region.bytes.next_power_of_two();
            let address = next.next_multiple_of(size);
            *next = address.saturating_add(size);
            if config::bar_address(self, bar)? != 0 || (!wide && *next > 1 << 32) {
                continue;
            }
            config::write32(self, at, address as u32 | low & 0xF)?;
            if wide {
                config::write32(self, at + 4, (address >> 32) as u32)?;
            }
        }
        Ok(())
    }

    fn negotiate(&self) -> Result<Capabilities, PciError> {
        let version = proto::Version {
            major: proto::VERSION_MAJOR,
            minor: proto::VERSION_MINOR,
        };
        let ours = Capabilities {
            max_fds: MAX_FDS as u64,
            max_transfer: DEFAULT_MAX_TRANSFER,
        };
        let reply = self.call(Command::Version, version.as_bytes(), &ours.to_json(), &[])?;
        let (theirs, data) = proto::split::<proto::Version>(&reply.payload)
            .ok_or_else(|| protocol_error("a version reply without a version"))?;
        if theirs.major != version.major || theirs.minor > version.minor {
            return Err(PciError::Version {
                what: format!(
                    "{} speaks vfio-user {}.{}, this is {}.{}",
                    self.name, theirs.major, theirs.minor, version.major, version.minor
                ),
            });
        }
        Capabilities::from_json(data).ok_or_else(|| protocol_error("version data that is not valid JSON"))
    }

    fn device_info(&self) -> Result<proto::DeviceInfo, PciError> {
        let ask = proto::DeviceInfo {
            argsz: size_of::<proto::DeviceInfo>() as u32,
            ..proto::DeviceInfo::new_zeroed()
        };
        let reply = self.call(Command::DeviceGetInfo, ask.as_bytes(), &[], &[])?;
        let (info, _) = proto::split::<proto::DeviceInfo>(&reply.payload)
            .ok_or_else(|| protocol_error("a short device info"))?;
        if info.flags & proto::DEVICE_PCI == 0 || info.num_regions <= region::CONFIG {
            return Err(protocol_error(format!(
                "not a PCI device (flags {:#x}, {} regions)",
                info.flags, info.num_regions
            )));
        }
        Ok(info)
    }

    fn region_info(&self, index: u32) -> Result<Region, PciError> {
        let ask = proto::RegionInfo {
            argsz: 4096,
            index,
            ..proto::RegionInfo::new_zeroed()
        };
        let reply = self.call(Command::DeviceGetRegionInfo, ask.as_bytes(), &[], &[])?;
        Region::parse(index, reply)
    }

    fn vectors_of(&self, index: u32) -> Result<u16, PciError> {
        let ask = proto::IrqInfo {
            argsz: size_of::<proto::IrqInfo>() as u32,
            index,
            ..proto::IrqInfo::new_zeroed()
        };
        let reply = self.call(Command::DeviceGetIrqInfo, ask.as_bytes(), &[], &[])?;
        let (info, _) = proto::split::<proto::IrqInfo>(&reply.payload)
            .ok_or_else(|| protocol_error("a short interrupt info"))?;
        u16::try_from(info.count)
            .ok()
            .filter(|n| *n <= 2048)
            .ok_or_else(|| protocol_error(format!("{} vectors of interrupt {index}", info.count)))
    }

    /// One request and its reply.
    fn call(
        &self,
        command: Command,
        head: &[u8],
        data: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<Message, PciError> {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        connection.call(&self.name, command, head, data, fds, self.timeouts.request)
    }

    fn read_region(&self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), PciError> {
        let mut at = offset;
        for chunk in data.chunks_mut(self.transfer_limit()) {
            let ask = access(region, at, chunk.len());
            let reply = self.call(Command::RegionRead, ask.as_bytes(), &[], &[])?;
            match proto::split::<RegionAccess>(&reply.payload) {
                Some((head, bytes)) if head == ask && bytes.len() == chunk.len() => {
                    chunk.copy_from_slice(bytes);
                }
                _ => {
                    return Err(protocol_error(format!(
                        "a read of {} bytes at {at:#x} of region {region} was answered by something else",
                        chunk.len()
                    )));
                }
            }
            at += chunk.len() as u64;
        }
        Ok(())
    }

    fn write_region(&self, region: u32, offset: u64, data: &[u8], wait: bool) -> Result<(), PciError> {
        let mut at = offset;
        for chunk in data.chunks(self.transfer_limit()) {
            let ask = access(region, at, chunk.len());
            if wait {
                let reply = self.call(Command::RegionWrite, ask.as_bytes(), chunk, &[])?;
                if proto::split::<RegionAccess>(&reply.payload).is_none_or(|(head, _)| head != ask) {
                    return Err(protocol_error(format!(
                        "a write of {} bytes at {at:#x} of region {region} was not taken whole",
                        chunk.len()
                    )));
                }
            } else {
                let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
                let deadline = Instant::now() + self.timeouts.request;
                connection.send(
                    &self.name,
                    Command::RegionWrite,
                    flags::NO_REPLY,
                    ask.as_bytes(),
                    chunk,
                    &[],
                    deadline,
                )?;
            }
            at += chunk.len() as u64;
        }
        Ok(())
    }

    fn transfer_limit(&self) -> usize {
        let limit = self.server.max_transfer.min(DEFAULT_MAX_TRANSFER);
        usize::try_from(limit).unwrap_or(4096).max(1)
    }

    fn connect_run(&self, start: u16, fds: &[BorrowedFd<'_>]) -> Result<(), PciError> {
        let flags = proto::IRQ_SET_DATA_EVENTFD | proto::IRQ_SET_ACTION_TRIGGER;
        self.set_irqs(irq::MSIX, flags, start, fds.len() as u32, fds)
    }

    fn set_irqs(
        &self,
        index: u32,
        flags: u32,
        start: u16,
        count: u32,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), PciError> {
        let ask = proto::IrqSet {
            argsz: size_of::<proto::IrqSet>() as u32,
            flags,
            index,
            start: start.into(),
            count,
        };
        self.call(Command::DeviceSetIrqs, ask.as_bytes(), &[], fds)
            .map(drop)
    }
}

fn connect(path: &Path, wait: Duration) -> Result<Socket, OpenError> {
    let until = Instant::now() + wait;
    loop {
        let error = match Socket::connect(path) {
            Ok(socket) => return Ok(socket),
            Err(e) => e,
        };
        let late = matches!(
            error.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused | io::ErrorKind::WouldBlock
        );
        if late && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
            continue;
        }
        let node = path.display().to_string();
        return Err(match error.kind() {
            io::ErrorKind::PermissionDenied => OpenError::Permission {
                node,
                source: error,
                remedy: "run as the user who started the emulator".to_owned(),
            },
            _ if late => OpenError::NodeMissing {
                node,
                waited: wait,
                hint: "start ntb-emu first, with this socket path",
            },
            _ => PciError::io(format!("connecting to {node}"), error).into(),
        });
    }
}

/// The process that listens, for messages.
fn server_process(socket: &Socket) -> String {
    match rustix::net::sockopt::socket_peercred(socket) {
        Ok(peer) => format!("the server (process {})", peer.pid.as_raw_nonzero()),
        Err(_) => "the server".to_owned(),
    }
}

fn access(region: u32, offset: u64, bytes: usize) -> RegionAccess {
    RegionAccess {
        offset,
        region,
        count: u32::try_from(bytes).unwrap_or(u32::MAX),
    }
}

fn protocol_error(what: impl Into<String>) -> PciError {
    PciError::Protocol { what: what.into() }
}
