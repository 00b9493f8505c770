//! A vfio-user client that says exactly what a test wants said.

#![allow(
    missing_docs,
    unreachable_pub,
    missing_debug_implementations,
    reason = "shared by test programs, not published"
)]
#![allow(dead_code, reason = "each test program uses its part")]

use std::{
    io::{IoSlice, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixStream},
    },
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use ntb::pci::vfio_user::proto::{self, Command, HEADER_BYTES, Header, flags};
use ntb_emu::{
    EmuConfig, Emulator,
    model::{Family, PairConfig, family},
    server::{Endpoint, Limits},
};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use zerocopy::{FromBytes, IntoBytes};

/// How long anything that must happen may take.
pub const PATIENCE: Duration = Duration::from_secs(30);

static NEXT: AtomicU64 = AtomicU64::new(0);

/// An emulator at two names of its own.
pub struct Served {
    pub emulator: Emulator,
    pub names: [String; 2],
}

pub fn serve(name: &str, pair: PairConfig, limits: Limits) -> Served {
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let names = ["a", "b"].map(|side| format!("ntb-emu-raw-{}-{n}-{side}", std::process::id()));
    let [a, b] = names.clone().map(Endpoint::Abstract);
    let config = EmuConfig {
        pair,
        limits,
        ..EmuConfig::new(find(name), a, b)
    };
    Served {
        emulator: Emulator::start(config).unwrap(),
        names,
    }
}

pub fn find(name: &str) -> &'static dyn Family {
    family(name).unwrap()
}

impl Served {
    pub fn spr() -> Self {
        serve("intel-spr", PairConfig::default(), Limits::default())
    }

    /// Connects without a word.
    pub fn connect(&self, side: usize) -> Client {
        let address = SocketAddr::from_abstract_name(&self.names[side]).unwrap();
        let stream = UnixStream::connect_addr(&address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Client { stream, id: 0 }
    }

    /// Connects and greets; tries again while the last client is being worked off.
    pub fn client(&self, side: usize) -> Client {
        let begin = Instant::now();
        loop {
            let mut client = self.connect(side);
            if client.greet().is_ok() {
                return client;
            }
            assert!(begin.elapsed() < PATIENCE, "no client is taken any more");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// That a correct client is served, which is what nothing may prevent.
    pub fn still_serves(&self) {
        let mut client = self.client(0);
        assert_eq!(client.read(proto::region::CONFIG, 0, 4), [0x86, 0x80, 0x7E, 0x34]);
    }
}

/// The answer of a server, or that it closed.
pub type Answer = Result<Result<Vec<u8>, u32>, std::io::Error>;

pub struct Client {
    pub stream: UnixStream,
    id: u16,
}

impl Client {
    pub fn greet(&mut self) -> std::io::Result<()> {
        let mut payload = proto::Version {
            major: 0,
            minor: proto::VERSION_MINOR,
        }
        .as_bytes()
        .to_vec();
        payload.extend(b"{\"capabilities\":{\"max_msg_fds\":8}}\0");
        self.call(Command::Version, &payload, &[])?
            .map(drop)
            .map_err(|e| std::io::Error::from_raw_os_error(e as i32))
    }

    /// Sends one command and takes its answer.
    pub fn call(&mut self, command: Command, payload: &[u8], fds: &[&OwnedFd]) -> Answer {
        self.send(command as u16, flags::COMMAND, payload, fds)?;
        self.answer(command as u16)
    }

    pub fn send(
        &mut self,
        command: u16,
        flags: u32,
        payload: &[u8],
        fds: &[&OwnedFd],
    ) -> std::io::Result<()> {
        self.id = self.id.wrapping_add(1);
        let header = Header {
            id: self.id,
            command,
            size: (HEADER_BYTES + payload.len()) as u32,
            flags,
            error: 0,
        };
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend_from_slice(payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let borrowed: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        if !borrowed.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
        }
        let n = sendmsg(
            &self.stream,
            &[IoSlice::new(&bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        )?;
        self.stream.write_all(&bytes[n..])
    }

    pub fn answer(&mut self, command: u16) -> Answer {
        let mut head = [0; HEADER_BYTES];
        self.stream.read_exact(&mut head)?;
        let header = Header::read_from_bytes(&head).unwrap();
        let mut payload = vec![0; header.size as usize - HEADER_BYTES];
        self.stream.read_exact(&mut payload)?;
        assert_eq!((header.id, header.command), (self.id, command));
        assert_eq!(header.flags & flags::TYPE_MASK, flags::REPLY);
        if header.flags & flags::ERROR != 0 {
            assert!(payload.is_empty());
            assert_ne!(header.error, 0, "an error without a number");
            return Ok(Err(header.error));
        }
        Ok(Ok(payload))
    }

    pub fn read(&mut self, region: u32, offset: u64, count: u32) -> Vec<u8> {
        let access = proto::RegionAccess {
            offset,
            region,
            count,
        };
        let reply = self
            .call(Command::RegionRead, access.as_bytes(), &[])
            .unwrap()
            .unwrap();
        reply[size_of::<proto::RegionAccess>()..].to_vec()
    }

    pub fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        let access = proto::RegionAccess {
            offset,
            region,
            count: data.len() as u32,
        };
        let mut payload = access.as_bytes().to_vec();
        payload.extend_from_slice(data);
        self.call(Command::RegionWrite, &payload, &[]).unwrap().unwrap();
    }

    /// That the server has closed this connection.
    pub fn is_closed(&mut self) {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset, "{e}"),
        }
    }
}
