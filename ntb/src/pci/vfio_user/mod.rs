//! A PCI function in another process, over the vfio-user protocol.
//!
//! Every call is bounded by a time-out and every reply is checked: error flag, command, length, echoed fields.
//! After a time-out or a broken message the stream cannot be trusted any more, so every later call answers
//! [`PciError::Gone`]; connecting again is the way back.

pub mod capabilities;
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
    proto::{Command, Header, RegionAccess, flags, irq, region},
    regions::Region,
    socket::{MAX_FDS, Message, Socket, SocketError},
};
use super::{
    Bar, BarInfo, BarMap, CacheType, DmaMemory, Isolation, OpenError, PciError, PciFunction, ResetPlan,
    config, iova::IovaRange,
};

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

struct Connection {
    socket: Socket,
    next_id: u16,
    /// Why the stream is of no more use.
    broken: Option<String>,
    /// Vectors that are connected.
    connected: BTreeSet<u16>,
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
        this.vectors = this.msix_vectors()?;
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

    fn msix_vectors(&self) -> Result<u16, PciError> {
        let ask = proto::IrqInfo {
            argsz: size_of::<proto::IrqInfo>() as u32,
            index: irq::MSIX,
            ..proto::IrqInfo::new_zeroed()
        };
        let reply = self.call(Command::DeviceGetIrqInfo, ask.as_bytes(), &[], &[])?;
        let (info, _) = proto::split::<proto::IrqInfo>(&reply.payload)
            .ok_or_else(|| protocol_error("a short interrupt info"))?;
        u16::try_from(info.count)
            .ok()
            .filter(|n| *n <= 2048)
            .ok_or_else(|| protocol_error(format!("{} MSI-X vectors", info.count)))
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
        self.set_irqs(flags, start, fds.len() as u32, fds)
    }

    fn set_irqs(&self, flags: u32, start: u16, count: u32, fds: &[BorrowedFd<'_>]) -> Result<(), PciError> {
        let ask = proto::IrqSet {
            argsz: size_of::<proto::IrqSet>() as u32,
            flags,
            index: irq::MSIX,
            start: start.into(),
            count,
        };
        self.call(Command::DeviceSetIrqs, ask.as_bytes(), &[], fds)
            .map(drop)
    }
}

impl Connection {
    fn call(
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
    fn send(
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

impl PciFunction for VfioUser {
    fn name(&self) -> &str {
        &self.name
    }

    fn config_size(&self) -> u32 {
        self.config_size
    }

    fn raw_config_read(&self, offset: u32, data: &mut [u8]) -> Result<(), PciError> {
        self.read_region(region::CONFIG, offset.into(), data)
    }

    fn raw_config_write(&self, offset: u32, data: &[u8]) -> Result<(), PciError> {
        self.write_region(region::CONFIG, offset.into(), data, true)
    }

    fn bar(&self, bar: Bar) -> Option<&BarInfo> {
        self.bars.get(bar.index())?.as_ref().map(|r| &r.info)
    }

    fn bar_address(&self, bar: Bar) -> Result<u64, PciError> {
        config::bar_address(self, bar)
    }

    fn raw_read(&self, bar: Bar, offset: u64, bytes: u32) -> Result<u64, PciError> {
        let mut value = [0; 8];
        if let Some(part) = value.get_mut(..bytes as usize) {
            self.read_region(bar.index() as u32, offset, part)?;
        }
        Ok(u64::from_le_bytes(value))
    }

    fn raw_write(&self, bar: Bar, offset: u64, bytes: u32, value: u64) -> Result<(), PciError> {
        let value = value.to_le_bytes();
        let part = value.get(..bytes as usize).unwrap_or(&value);
        self.write_region(bar.index() as u32, offset, part, true)
    }

    fn bar_read(&self, bar: Bar, offset: u64, data: &mut [u8]) -> Result<(), PciError> {
        self.read_region(bar.index() as u32, offset, data)
    }

    fn bar_write(&self, bar: Bar, offset: u64, data: &[u8]) -> Result<(), PciError> {
        self.write_region(bar.index() as u32, offset, data, true)
    }

    fn bar_post(&self, bar: Bar, offset: u64, data: &[u8]) -> Result<(), PciError> {
        self.write_region(bar.index() as u32, offset, data, false)
    }

    fn map_bar(self: Arc<Self>, bar: Bar, wanted: CacheType) -> Result<BarMap, PciError> {
        let region = self.bars.get(bar.index()).and_then(Option::as_ref);
        let region = region.ok_or_else(|| PciError::NoBar {
            bar,
            device: self.name.clone(),
        })?;
        let areas = region.map()?;
        if areas.is_empty() {
            return Err(PciError::NoSuchMapping {
                bar,
                device: self.name.clone(),
                wanted,
                why: "the server traps every access to it; use region writes".to_owned(),
            });
        }
        Ok(BarMap::new(bar, CacheType::WriteBack, areas, Arc::clone(&self)))
    }

    fn vectors(&self) -> u16 {
        self.vectors
    }

    fn set_vectors(&self, vectors: &[(u16, BorrowedFd<'_>)]) -> Result<(), PciError> {
        let sorted = super::sorted_vectors(vectors, self.vectors)?;
        let now: BTreeSet<u16> = sorted.iter().map(|(v, _)| *v).collect();
        let before = {
            let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut connection.connected, now.clone())
        };
        if sorted.is_empty() {
            let flags = proto::IRQ_SET_DATA_NONE | proto::IRQ_SET_ACTION_TRIGGER;
            return if before.is_empty() {
                Ok(())
            } else {
                self.set_irqs(flags, 0, 0, &[])
            };
        }
        let flags = proto::IRQ_SET_DATA_EVENTFD | proto::IRQ_SET_ACTION_TRIGGER;
        for gone in before.difference(&now) {
            self.set_irqs(flags, *gone, 1, &[])?;
        }
        // Runs of consecutive vectors, no longer than the server can take descriptors.
        let limit = usize::try_from(self.server.max_fds)
            .unwrap_or(MAX_FDS)
            .clamp(1, MAX_FDS);
        let mut run: Vec<BorrowedFd<'_>> = Vec::new();
        let mut start = 0;
        for (vector, fd) in sorted {
            if run.len() == limit || (!run.is_empty() && vector != start + run.len() as u16) {
                self.connect_run(start, &run)?;
                run.clear();
            }
            if run.is_empty() {
                start = vector;
            }
            run.push(fd);
        }
        self.connect_run(start, &run)
    }

    fn iova_ranges(&self) -> Result<Vec<IovaRange>, PciError> {
        // As an IOMMU with 48 bits on x86 reports them, so that the interrupt window stays a hole here too.
        Ok(vec![
            IovaRange {
                start: 0,
                last: 0xFEDF_FFFF,
            },
            IovaRange {
                start: 0xFEF0_0000,
                last: (1 << 48) - 1,
            },
        ])
    }

    fn dma_page(&self) -> u64 {
        4096
    }

    fn isolation(&self) -> Isolation {
        Isolation::Software
    }

    fn dma_map(&self, memory: &DmaMemory<'_>, iova: u64) -> Result<(), PciError> {
        let (fd, offset) = memory.descriptor().ok_or_else(|| PciError::Unsupported {
            what: "mapping memory that has no descriptor".to_owned(),
            device: self.name.clone(),
        })?;
        let ask = proto::DmaMap {
            argsz: size_of::<proto::DmaMap>() as u32,
            flags: proto::DMA_READ | proto::DMA_WRITE,
            offset,
            iova,
            size: memory.bytes(),
        };
        self.call(Command::DmaMap, ask.as_bytes(), &[], &[fd]).map(drop)
    }

    fn dma_unmap(&self, iova: u64, bytes: u64) -> Result<(), PciError> {
        let ask = proto::DmaUnmap {
            argsz: size_of::<proto::DmaUnmap>() as u32,
            flags: 0,
            iova,
            size: bytes,
        };
        let reply = self.call(Command::DmaUnmap, ask.as_bytes(), &[], &[])?;
        match proto::split::<proto::DmaUnmap>(&reply.payload) {
            Some((done, _)) if (done.iova, done.size) == (iova, bytes) => Ok(()),
            _ => Err(protocol_error("an unmap of another range than asked for")),
        }
    }

    fn reset_plan(&self) -> Result<ResetPlan, PciError> {
        Ok(ResetPlan {
            method: self.resettable.then(|| "device reset of the server".to_owned()),
            also: Vec::new(),
        })
    }

    fn reset(&self) -> Result<(), PciError> {
        super::check_reset(&self.name, &self.reset_plan()?)?;
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        connection
            .call(
                &self.name,
                Command::DeviceReset,
                &[],
                &[],
                &[],
                self.timeouts.reset,
            )
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
