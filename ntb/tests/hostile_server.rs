//! The vfio-user client against servers that break the protocol: an error every time, in bounded time, and never a
//! wrong value.

use std::{
    io::{Read, Write},
    os::{fd::AsFd, unix::net::UnixStream},
    path::Path,
    sync::Arc,
    time::Duration,
};

use ntb::pci::{
    Bar, DmaMemory, DmaSpace, EventFd, Function, OpenError, PciError, PciFunction, config,
    vfio_user::{
        Timeouts, VfioUser,
        proto::{
            self, Command, DeviceInfo, Header, IrqInfo, IrqSet, RegionAccess, RegionInfo, Version, flags,
        },
        socket::Socket,
    },
};
use ntb_mem::region::{Pages, Region};
use proptest::prelude::*;
use zerocopy::{FromBytes, IntoBytes};

/// A reply before it is sent.
struct Reply {
    header: Header,
    payload: Vec<u8>,
    /// Bytes that go out before it.
    before: Vec<u8>,
    /// So many bytes of it are sent, then nothing more.
    cut: Option<usize>,
}

impl Reply {
    fn refuse(&mut self, errno: u32) {
        self.header.flags |= flags::ERROR;
        self.header.error = errno;
        self.payload.clear();
    }
}

/// A small device behind a hook that may spoil each reply.
struct Server {
    space: Vec<u8>,
    bar: Vec<u8>,
}

impl Server {
    fn new() -> Self {
        let mut space = vec![0; 4096];
        space[0..4].copy_from_slice(&[0x86, 0x80, 0x7E, 0x34]);
        space[0x10] = 0xC;
        Self {
            space,
            bar: vec![0; 4096],
        }
    }

    fn answer(&mut self, header: &Header, payload: &[u8]) -> Vec<u8> {
        match Command::from_number(header.command).unwrap() {
            Command::Version => {
                let version = Version { major: 0, minor: 1 };
                [version.as_bytes(), b"{\"capabilities\":{\"max_msg_fds\":4}}\0"].concat()
            }
            Command::DeviceGetInfo => DeviceInfo {
                argsz: 16,
                flags: proto::DEVICE_PCI | proto::DEVICE_RESET,
                num_regions: 9,
                num_irqs: 5,
            }
            .as_bytes()
            .to_vec(),
            Command::DeviceGetRegionInfo => {
                let mut info = RegionInfo::read_from_bytes(&payload[..32]).unwrap();
                info.flags = proto::REGION_READ | proto::REGION_WRITE;
                info.size = match info.index {
                    0 => self.bar.len() as u64,
                    7 => 4096,
                    _ => 0,
                };
                info.as_bytes().to_vec()
            }
            Command::DeviceGetIrqInfo => {
                let mut info = IrqInfo::read_from_bytes(payload).unwrap();
                info.count = 33;
                info.as_bytes().to_vec()
            }
            Command::RegionRead => {
                let ask = RegionAccess::read_from_bytes(payload).unwrap();
                let memory = if ask.region == 7 { &self.space } else { &self.bar };
                let at = ask.offset as usize;
                [payload, &memory[at..at + ask.count as usize]].concat()
            }
            Command::RegionWrite => {
                let (ask, data) = RegionAccess::read_from_prefix(payload).unwrap();
                let memory = if ask.region == 7 {
                    &mut self.space
                } else {
                    &mut self.bar
                };
                memory[ask.offset as usize..][..data.len()].copy_from_slice(data);
                ask.as_bytes().to_vec()
            }
            Command::DmaUnmap => payload.to_vec(),
            _ => Vec::new(),
        }
    }

    fn run(mut self, mut stream: UnixStream, mut spoil: impl FnMut(Command, &[u8], &mut Reply)) {
        let mut header = Header::read_from_bytes(&[0; 16]).unwrap();
        while stream.read_exact(header.as_mut_bytes()).is_ok() {
            let mut payload = vec![0; header.size as usize - 16];
            if stream.read_exact(&mut payload).is_err() {
                return;
            }
            // Replies of the client to what the server asked.
            if header.flags & flags::TYPE_MASK == flags::REPLY {
                continue;
            }
            let answer = self.answer(&header, &payload);
            if header.flags & flags::NO_REPLY != 0 {
                continue;
            }
            let mut reply = Reply {
                header: Header {
                    flags: flags::REPLY,
                    ..header
                },
                payload: answer,
                before: Vec::new(),
                cut: None,
            };
            reply.header.size = 0;
            spoil(
                Command::from_number(header.command).unwrap(),
                &payload,
                &mut reply,
            );
            if reply.header.size == 0 {
                reply.header.size = 16 + reply.payload.len() as u32;
            }
            let bytes = [&reply.before, reply.header.as_bytes(), &reply.payload].concat();
            let end = reply.cut.unwrap_or(bytes.len()).min(bytes.len());
            if stream.write_all(&bytes[..end]).is_err() {
                return;
            }
        }
    }
}

const QUICK: Timeouts = Timeouts {
    connect: Duration::from_millis(200),
    request: Duration::from_millis(200),
    reset: Duration::from_millis(200),
};

fn client(spoil: impl FnMut(Command, &[u8], &mut Reply) + Send + 'static) -> Result<Arc<VfioUser>, PciError> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::thread::spawn(move || Server::new().run(theirs, spoil));
    VfioUser::from_socket("server", Socket::new(ours).unwrap(), QUICK)
}

/// A client of a server that is good until it is asked for this, then does that.
fn spoiled(when: Command, mut how: impl FnMut(&mut Reply) + Send + 'static) -> Arc<VfioUser> {
    let mut ready = false;
    let client = client(move |command, payload, reply| {
        // The scratch register, or what comes after it.
        let mark = command == Command::RegionWrite && payload.ends_with(&[0x5A; 4]);
        if mark {
            ready = true;
        } else if ready && command == when {
            how(reply);
        }
    })
    .unwrap();
    client.write::<u32>(Bar::B0, 0, 0x5A5A_5A5A).unwrap();
    client
}

fn read(client: &VfioUser) -> Result<u32, &'static str> {
    client.read::<u32>(Bar::B0, 0).map_err(|e| e.name())
}

#[test]
fn a_good_server_is_understood() {
    let client = client(|_, _, _| {}).unwrap();
    assert_eq!(config::identity(&*client).unwrap().device, 0x347E);
    client.write::<u32>(Bar::B0, 8, 7).unwrap();
    client.bar_post(Bar::B0, 12, &[1; 64]).unwrap();
    assert_eq!(client.read::<u64>(Bar::B0, 8).unwrap(), 0x0101_0101_0000_0007);
    assert_eq!(client.vectors(), 33);
}

#[test]
fn an_error_reply_is_an_error_and_the_connection_goes_on() {
    let client = spoiled(Command::RegionRead, |r| r.refuse(22));
    let e = client.read::<u32>(Bar::B0, 0).unwrap_err();
    assert!(
        matches!(&e, PciError::Io { source, .. } if source.raw_os_error() == Some(22)),
        "{e}"
    );
    client.write::<u32>(Bar::B0, 0, 1).unwrap();

    let region = Region::allocate(4096, Pages::Normal).unwrap();
    for (when, errno) in [
        (Command::DmaMap, 12),
        (Command::DmaMap, 0),
        (Command::DmaMap, u32::MAX),
    ] {
        let client = spoiled(when, move |r| r.refuse(errno));
        client
            .dma_map(&DmaMemory::region(&region), 1 << 32)
            .expect_err("a refused map is no success");
    }
    spoiled(Command::DmaUnmap, |r| r.refuse(2))
        .dma_unmap(1 << 32, 4096)
        .expect_err("a refused unmap");
    spoiled(Command::DeviceReset, |r| r.refuse(5))
        .reset()
        .expect_err("a refused reset");
    let event = EventFd::new().unwrap();
    let client = spoiled(Command::DeviceSetIrqs, |r| r.refuse(22));
    client
        .set_vectors(&[(0, event.as_fd())])
        .expect_err("refused vectors");
}

#[test]
fn a_map_that_the_server_refuses_leaves_the_address_space_whole() {
    let mut refusals = 3;
    let client: Arc<dyn PciFunction> = spoiled(Command::DmaMap, move |r| {
        if refusals > 0 {
            refusals -= 1;
            r.refuse(12);
        }
    });
    let space = DmaSpace::new(Arc::clone(&client)).unwrap();
    let region = Arc::new(Region::allocate(4096, Pages::Normal).unwrap());
    for _ in 0..3 {
        space.map(&region, 0).expect_err("refused");
    }
    space.map(&region, 0).unwrap();
}

#[test]
fn silence_is_a_time_out_and_then_the_device_is_gone() {
    for cut in [0, 1, 15, 16, 17, 30] {
        let client = spoiled(Command::RegionRead, move |r| r.cut = Some(cut));
        assert_eq!(read(&client), Err("device-timeout"), "cut after {cut} bytes");
        let e = client.read::<u32>(Bar::B0, 0).unwrap_err();
        assert_eq!(e.name(), "device-gone");
        assert!(
            e.to_string().contains("no answer"),
            "the first cause is lost: {e}"
        );
        assert!(client.write::<u32>(Bar::B0, 0, 1).is_err());
    }
}

#[test]
fn wrong_replies_are_told_and_give_no_value() {
    type Spoil = fn(&mut Reply);
    let ways: [(&str, Spoil); 9] = [
        ("another id", |r| r.header.id ^= 1),
        ("another command", |r| r.header.command ^= 3),
        ("a size below the header", |r| r.header.size = 15),
        ("an endless size", |r| r.header.size = u32::MAX),
        ("no payload", |r| r.payload.clear()),
        ("a byte too few", |r| r.payload.truncate(19)),
        ("a byte too many", |r| r.payload.push(0)),
        ("another offset", |r| r.payload[0] ^= 4),
        ("another region", |r| r.payload[8] ^= 1),
    ];
    for (what, how) in ways {
        let client = spoiled(Command::RegionRead, how);
        assert_eq!(read(&client), Err("device-protocol"), "{what}");
    }
    let client = spoiled(Command::RegionWrite, |r| r.payload[12] -= 1);
    let e = client.write::<u32>(Bar::B0, 0, 1).unwrap_err();
    assert_eq!(e.name(), "device-protocol", "a write that was not taken whole");
    let client = spoiled(Command::DmaUnmap, |r| r.payload[16] ^= 0x10);
    assert_eq!(
        client.dma_unmap(1 << 32, 4096).unwrap_err().name(),
        "device-protocol"
    );
}

#[test]
fn requests_of_the_server_are_answered_and_do_not_disturb() {
    let client = spoiled(Command::RegionRead, |r| {
        let ask = Header {
            id: 99,
            command: Command::DmaRead as u16,
            size: 32,
            flags: 0,
            error: 0,
        };
        r.before = [ask.as_bytes(), &[0; 16]].concat();
    });
    assert_eq!(read(&client), Ok(0x5A5A_5A5A));
    assert_eq!(read(&client), Ok(0x5A5A_5A5A));
}

#[test]
fn what_a_server_says_of_itself_is_checked() {
    type Spoil = fn(&mut Reply);
    let at_start = |when: Command, how: Spoil| {
        client(move |command, _, reply| {
            if command == when {
                how(reply);
            }
        })
        .map(drop)
        .map_err(|e| e.name())
    };
    let region = Command::DeviceGetRegionInfo;
    assert_eq!(
        at_start(Command::Version, |r| r.payload[0] = 1),
        Err("device-version")
    );
    assert_eq!(
        at_start(Command::Version, |r| r.payload[2] = 9),
        Err("device-version")
    );
    assert_eq!(
        at_start(Command::Version, |r| r.payload.truncate(3)),
        Err("device-protocol")
    );
    assert_eq!(
        at_start(Command::Version, |r| r.payload.truncate(9)),
        Err("device-protocol")
    );
    assert_eq!(
        at_start(Command::DeviceGetInfo, |r| r.payload[4] = 0),
        Err("device-protocol")
    );
    assert_eq!(
        at_start(Command::DeviceGetInfo, |r| r.payload[8] = 7),
        Err("device-protocol")
    );
    assert_eq!(
        at_start(Command::DeviceGetIrqInfo, |r| r.payload[13] = 0xFF),
        Err("device-protocol")
    );
    assert_eq!(at_start(region, |r| r.payload[8] ^= 1), Err("device-protocol"));
    assert_eq!(
        at_start(region, |r| r.payload[16..24].fill(0xFF)),
        Err("device-protocol")
    );
    assert_eq!(
        at_start(region, |r| r.payload[16..24].fill(0)),
        Err("device-protocol"),
        "no configuration space"
    );
    assert_eq!(
        at_start(region, |r| r.payload.truncate(31)),
        Err("device-protocol")
    );
    assert_eq!(
        at_start(Command::RegionRead, |r| r.cut = Some(0)),
        Err("device-timeout")
    );
}

#[test]
fn a_server_that_is_missing_late_or_busy_is_told_apart() {
    let name = format!("@ntb-hostile-{}", std::process::id());
    let e = VfioUser::open(Path::new(&name), QUICK).unwrap_err();
    assert_eq!(e.name(), "node-missing");
    assert!(
        e.to_string().contains(&name) && e.to_string().contains("ntb-emu"),
        "{e}"
    );

    use std::os::{linux::net::SocketAddrExt, unix::net};
    let address = net::SocketAddr::from_abstract_name(&name[1..]).unwrap();
    let late = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        let listener = net::UnixListener::bind_addr(&address).unwrap();
        // The first client is served, every other one is shown the door.
        let (stream, _) = listener.accept().unwrap();
        let served = std::thread::spawn(move || Server::new().run(stream, |_, _, _| {}));
        while !served.is_finished() {
            drop(listener.accept());
        }
    });
    let patient = Timeouts {
        connect: Duration::from_secs(20),
        ..QUICK
    };
    let first = VfioUser::open(Path::new(&name), patient).unwrap();
    let e = VfioUser::open(Path::new(&name), QUICK).unwrap_err();
    assert!(matches!(&e, OpenError::NodeBusy { .. }), "{e}");
    let pid = std::process::id().to_string();
    assert!(e.to_string().contains(&pid), "the holder is not named: {e}");
    assert_eq!(first.vectors(), 33);
    drop(first);
    // One more connection, so that the server sees that nobody is left.
    while !late.is_finished() {
        let _ = VfioUser::open(Path::new(&name), QUICK);
    }
    late.join().unwrap();
}

#[test]
fn vectors_go_out_in_runs_that_the_server_can_take() {
    let (tell, told) = std::sync::mpsc::channel();
    let client = client(move |command, payload, _| {
        if command == Command::DeviceSetIrqs {
            let set = IrqSet::read_from_bytes(payload).unwrap();
            tell.send((set.flags & proto::IRQ_SET_DATA_NONE != 0, set.start, set.count))
                .unwrap();
        }
    })
    .unwrap();
    let event = EventFd::new().unwrap();
    let some: Vec<_> = [0u16, 1, 2, 3, 4, 9, 32].map(|v| (v, event.as_fd())).into();
    client.set_vectors(&some).unwrap();
    // The server takes four descriptors per message.
    assert_eq!(
        told.try_iter().collect::<Vec<_>>(),
        [(false, 0, 4), (false, 4, 1), (false, 9, 1), (false, 32, 1)]
    );
    client.set_vectors(&some[1..3]).unwrap();
    let gone: Vec<_> = told.try_iter().collect();
    assert_eq!(gone.last(), Some(&(false, 1, 2)));
    assert!(
        gone.contains(&(false, 0, 1)) && gone.contains(&(false, 32, 1)),
        "left connected: {gone:?}"
    );
    client.set_vectors(&[]).unwrap();
    assert_eq!(told.try_iter().collect::<Vec<_>>(), [(true, 0, 0)]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Any spoiled reply at any point: an answer in bounded time, and no panic.
    #[test]
    fn spoiled_replies_are_survived(
        at in 0usize..40,
        flips in proptest::collection::vec((0usize..64, 0u8..8), 1..4),
        cut in proptest::option::of(0usize..48),
    ) {
        let mut n = 0;
        let made = client(move |_, _, reply| {
            n += 1;
            if n - 1 != at {
                return;
            }
            for (byte, bit) in &flips {
                if *byte < 16 {
                    reply.header.size = 16 + reply.payload.len() as u32;
                    reply.header.as_mut_bytes()[*byte] ^= 1 << bit;
                } else if let Some(b) = reply.payload.get_mut(byte - 16) {
                    *b ^= 1 << bit;
                }
            }
            reply.cut = cut;
        });
        if let Ok(client) = made {
            let function: Arc<dyn PciFunction> = client;
            let _ = config::quiesce(&*function);
            let _ = function.read::<u64>(Bar::B0, 0);
            let _ = ntb::hw::open(&function);
        }
    }
}
