//! One client's session: command after command, each checked whole before the device sees it.

use std::{
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use ntb::pci::vfio_user::proto::{self, Command, HEADER_BYTES, Header, flags};
use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{
    device::{Device, Region, Space},
    stream::{End, Limits, MAX_DATA, MAX_FDS, Message, Transport, read_message},
};
use crate::model::MAX_DMA_MAPS;

/// Largest version message: a text of capabilities has no business being longer.
const MAX_VERSION_TEXT: usize = 4096;

/// Serves a client until it leaves, misbehaves or the server stops. The device is attached for as long.
pub fn serve(device: &Device, transport: &mut impl Transport, limits: Limits) -> End {
    let mut session = Session {
        device,
        greeted: false,
        reply: Vec::new(),
        told: 0,
    };
    device.attach();
    let end = session.run(transport, limits);
    device.detach();
    end
}

struct Session<'d> {
    device: &'d Device,
    greeted: bool,
    reply: Vec<u8>,
    /// Commands of ours that the client may still answer.
    told: u32,
}

impl Session<'_> {
    fn run(&mut self, transport: &mut impl Transport, limits: Limits) -> End {
        let mut payload = Vec::new();
        let hello = (Instant::now() + limits.hello, limits.hello);
        loop {
            let first_by = (!self.greeted).then_some(hello);
            let step = read_message(transport, &mut payload, first_by, limits.message)
                .and_then(|message| self.message(transport, message, &payload, limits.message));
            if let Err(end) = step.and_then(|()| self.tell_refused(transport, limits.message)) {
                return end;
            }
        }
    }

    fn message(
        &mut self,
        transport: &mut impl Transport,
        message: Message,
        payload: &[u8],
        limit: Duration,
    ) -> Result<(), End> {
        let Message { header, fds } = message;
        // An answer is not asked for, but QEMU sends one where the write fails, which is to be expected.
        if header.flags & flags::TYPE_MASK == flags::REPLY
            && header.command == Command::DmaWrite as u16
            && self.told > 0
        {
            self.told -= 1;
            return Ok(());
        }
        if header.flags & flags::TYPE_MASK != flags::COMMAND {
            return Err(End::Violation {
                what: "a reply to a command that was never sent",
            });
        }
        self.reply.clear();
        self.reply.extend_from_slice(&[0; HEADER_BYTES]);
        let before = self.greeted;
        let result = self.dispatch(header.command, payload, fds);
        if header.flags & flags::NO_REPLY == 0 {
            self.answer(transport, header, result, limit)?;
        }
        if !before && !self.greeted {
            return Err(End::Violation {
                what: "no valid version message at the start",
            });
        }
        Ok(())
    }

    /// Shows the client the stores that its mappings refused, as its bus would.
    fn tell_refused(&mut self, transport: &mut impl Transport, limit: Duration) -> Result<(), End> {
        for (address, data) in self.device.take_refused() {
            let count = data.len() as u64; // at most 8
            self.reply.clear();
            let head = Header {
                id: 0,
                command: Command::DmaWrite as u16,
                size: (HEADER_BYTES + 16) as u32 + count as u32,
                flags: flags::COMMAND | flags::NO_REPLY,
                error: 0,
            };
            self.put(&head);
            self.put(&address);
            self.put(&count);
            self.reply.extend_from_slice(&data);
            self.told = self.told.saturating_add(1);
            transport.send(&self.reply, Instant::now() + limit)?;
        }
        Ok(())
    }

    fn answer(
        &mut self,
        transport: &mut impl Transport,
        header: Header,
        result: Result<(), Errno>,
        limit: Duration,
    ) -> Result<(), End> {
        let (error, kind) = match result {
            Ok(()) => (0, flags::REPLY),
            Err(errno) => {
                self.reply.truncate(HEADER_BYTES);
                (errno.raw_os_error().unsigned_abs(), flags::REPLY | flags::ERROR)
            }
        };
        let head = Header {
            id: header.id,
            command: header.command,
            size: u32::try_from(self.reply.len()).unwrap_or(u32::MAX), // bounded by MAX_DATA
            flags: kind,
            error,
        };
        if let Some(at) = self.reply.get_mut(..HEADER_BYTES) {
            at.copy_from_slice(head.as_bytes());
        }
        let late = |end| match end {
            End::Late { .. } => End::Late {
                what: "taking a reply",
                limit,
            },
            end => end,
        };
        transport.send(&self.reply, Instant::now() + limit).map_err(late)
    }

    fn dispatch(&mut self, command: u16, payload: &[u8], fds: Vec<OwnedFd>) -> Result<(), Errno> {
        let command = Command::from_number(command).ok_or(Errno::NOSYS)?;
        match (command, self.greeted) {
            (Command::Version, false) => self.version(payload),
            (Command::Version, true) | (_, false) => Err(Errno::INVAL),
            (Command::DmaMap, _) => self.dma_map(payload, fds),
            (Command::DmaUnmap, _) => self.dma_unmap(payload),
            (Command::DeviceGetInfo, _) => self.device_info(payload),
            (Command::DeviceGetRegionInfo, _) => self.region_info(payload),
            (Command::DeviceGetIrqInfo, _) => self.irq_info(payload),
            (Command::DeviceSetIrqs, _) => self.set_irqs(payload, fds),
            (Command::RegionRead, _) => self.region_read(payload),
            (Command::RegionWrite, _) => self.region_write(payload),
            (Command::DeviceReset, _) => {
                empty(payload)?;
                self.device.reset();
                Ok(())
            }
            // Client memory is reached through its descriptors, and every register access is a message.
            (Command::DeviceGetRegionIoFds | Command::DmaRead | Command::DmaWrite, _) => {
                Err(Errno::OPNOTSUPP)
            }
            _ => Err(Errno::NOSYS),
        }
    }

    fn put(&mut self, payload: &(impl IntoBytes + Immutable)) {
        self.reply.extend_from_slice(payload.as_bytes());
    }

    fn version(&mut self, payload: &[u8]) -> Result<(), Errno> {
        let (version, text) = prefix::<proto::Version>(payload)?;
        if version.major != proto::VERSION_MAJOR {
            return Err(Errno::INVAL);
        }
        if !text.is_empty() {
            let json = text.strip_suffix(&[0]).unwrap_or(text);
            if json.len() > MAX_VERSION_TEXT {
                return Err(Errno::MSGSIZE);
            }
            let parsed: serde_json::Value = serde_json::from_slice(json).map_err(|_| Errno::INVAL)?;
            if !parsed.is_object() {
                return Err(Errno::INVAL);
            }
        }
        self.put(&proto::Version {
            major: proto::VERSION_MAJOR,
            minor: version.minor.min(proto::VERSION_MINOR),
        });
        let capabilities = serde_json::json!({ "capabilities": {
            "max_msg_fds": MAX_FDS,
            "max_data_xfer_size": MAX_DATA,
            "max_dma_maps": MAX_DMA_MAPS,
            "pgsizes": 4096,
        }});
        self.reply.extend_from_slice(capabilities.to_string().as_bytes());
        self.reply.push(0);
        self.greeted = true;
        Ok(())
    }

    fn dma_map(&mut self, payload: &[u8], mut fds: Vec<OwnedFd>) -> Result<(), Errno> {
        let map: proto::DmaMap = exact(payload)?;
        let known = proto::DMA_READ | proto::DMA_WRITE;
        if map.flags & !known != 0 || map.flags & known == 0 || fds.len() > 1 {
            return Err(Errno::INVAL);
        }
        self.device.map(&map, fds.pop())
    }

    fn dma_unmap(&mut self, payload: &[u8]) -> Result<(), Errno> {
        let unmap: proto::DmaUnmap = exact(payload)?;
        if unmap.flags & !proto::DMA_UNMAP_ALL != 0 {
            return Err(Errno::INVAL);
        }
        let size = self.device.unmap(&unmap)?;
        self.put(&proto::DmaUnmap { size, ..unmap });
        Ok(())
    }

    fn device_info(&mut self, payload: &[u8]) -> Result<(), Errno> {
        let (asked, _) = prefix::<proto::DeviceInfo>(payload)?;
        if (asked.argsz as usize) < size_of::<proto::DeviceInfo>() {
            return Err(Errno::INVAL);
        }
        self.put(&proto::DeviceInfo {
            argsz: size_of::<proto::DeviceInfo>() as u32,
            flags: proto::DEVICE_PCI | proto::DEVICE_RESET,
            num_regions: proto::region::COUNT,
            num_irqs: proto::irq::COUNT,
        });
        Ok(())
    }

    fn region_info(&mut self, payload: &[u8]) -> Result<(), Errno> {
        let (asked, _) = prefix::<proto::RegionInfo>(payload)?;
        if (asked.argsz as usize) < size_of::<proto::RegionInfo>() {
            return Err(Errno::INVAL);
        }
        let region = self.device.region(asked.index).ok_or(Errno::INVAL)?;
        let there = region.bytes > 0;
        self.put(&proto::RegionInfo {
            argsz: size_of::<proto::RegionInfo>() as u32,
            flags: if there {
                proto::REGION_READ | proto::REGION_WRITE
            } else {
                0
            },
            index: asked.index,
            cap_offset: 0,
            size: region.bytes,
            offset: 0,
        });
        Ok(())
    }

    fn irq_info(&mut self, payload: &[u8]) -> Result<(), Errno> {
        let (asked, _) = prefix::<proto::IrqInfo>(payload)?;
        if (asked.argsz as usize) < size_of::<proto::IrqInfo>() {
            return Err(Errno::INVAL);
        }
        let count = self.device.vectors(asked.index).ok_or(Errno::INVAL)?;
        self.put(&proto::IrqInfo {
            argsz: size_of::<proto::IrqInfo>() as u32,
            flags: if count > 0 { proto::IRQ_EVENTFD } else { 0 },
            index: asked.index,
            count,
        });
        Ok(())
    }

    fn set_irqs(&mut self, payload: &[u8], fds: Vec<OwnedFd>) -> Result<(), Errno> {
        let (set, data) = prefix::<proto::IrqSet>(payload)?;
        let vectors = self.device.vectors(set.index).ok_or(Errno::INVAL)?;
        let end = set.start.checked_add(set.count).ok_or(Errno::INVAL)?;
        if end > vectors && (set.count > 0 || set.start > 0) {
            return Err(Errno::INVAL);
        }
        const TRIGGER: u32 = proto::IRQ_SET_ACTION_TRIGGER;
        const EVENTFD: u32 = proto::IRQ_SET_DATA_EVENTFD | TRIGGER;
        const NONE: u32 = proto::IRQ_SET_DATA_NONE | TRIGGER;
        const BOOL: u32 = proto::IRQ_SET_DATA_BOOL | TRIGGER;
        match set.flags {
            NONE if set.count == 0 && vectors == 0 => Ok(()), // nothing to take away
            NONE if set.count == 0 => self.device.disable(set.index),
            EVENTFD if fds.is_empty() => {
                let none = std::iter::repeat_with(|| None).take(set.count as usize); // at most `vectors`
                self.device.assign(set.index, set.start, none)
            }
            EVENTFD if fds.len() == set.count as usize => {
                self.device
                    .assign(set.index, set.start, fds.into_iter().map(Some))
            }
            NONE => (set.start..end).try_for_each(|v| self.device.trigger(set.index, v)),
            BOOL if data.len() == set.count as usize => (set.start..end)
                .zip(data)
                .filter(|&(_, &wanted)| wanted != 0)
                .try_for_each(|(v, _)| self.device.trigger(set.index, v)),
            // As the kernel: masking of message-signalled interrupts is not offered.
            f if f & (proto::IRQ_SET_ACTION_MASK | proto::IRQ_SET_ACTION_UNMASK) != 0 => Err(Errno::NOTTY),
            _ => Err(Errno::INVAL),
        }
    }

    fn checked(&self, access: proto::RegionAccess) -> Result<Region, Errno> {
        let region = self.device.region(access.region).ok_or(Errno::INVAL)?;
        let end = access
            .offset
            .checked_add(u64::from(access.count))
            .ok_or(Errno::INVAL)?;
        if region.space == Space::None || access.count == 0 || end > region.bytes {
            return Err(Errno::INVAL);
        }
        if access.count as usize > MAX_DATA {
            return Err(Errno::MSGSIZE);
        }
        Ok(region)
    }

    fn region_read(&mut self, payload: &[u8]) -> Result<(), Errno> {
        let access: proto::RegionAccess = exact(payload)?;
        let region = self.checked(access)?;
        self.put(&access);
        let start = self.reply.len();
        self.reply.resize(start + access.count as usize, 0);
        let out = self.reply.get_mut(start..).unwrap_or_default();
        self.device.read(region.space, access.offset, out);
        Ok(())
    }

    fn region_write(&mut self, payload: &[u8]) -> Result<(), Errno> {
        let (access, data) = prefix::<proto::RegionAccess>(payload)?;
        if data.len() != access.count as usize {
            return Err(Errno::INVAL);
        }
        let region = self.checked(access)?;
        self.device.write(region.space, access.offset, data);
        self.put(&access);
        Ok(())
    }
}

/// A payload that is exactly a `T`.
fn exact<T: FromBytes + Immutable + KnownLayout>(payload: &[u8]) -> Result<T, Errno> {
    T::read_from_bytes(payload).map_err(|_| Errno::INVAL)
}

/// A payload that starts with a `T`, and what follows.
fn prefix<T: FromBytes + Immutable + KnownLayout>(payload: &[u8]) -> Result<(T, &[u8]), Errno> {
    T::read_from_prefix(payload).map_err(|_| Errno::INVAL)
}

fn empty(payload: &[u8]) -> Result<(), Errno> {
    if payload.is_empty() {
        Ok(())
    } else {
        Err(Errno::INVAL)
    }
}
