//! Clients that a server must survive: it neither crashes nor hangs, and the next client is served.

mod common;

use std::{
    io::Write,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use common::{Client, PATIENCE, Served, serve};
use ntb::pci::vfio_user::proto::{self, Command, DmaMap, DmaUnmap, Header, IrqSet, RegionAccess, flags};
use ntb_emu::{model::PairConfig, server::Limits};
use ntb_mem::region::{Pages, Region};
use rustix::{
    event::{EventfdFlags, eventfd},
    io::Errno,
};
use zerocopy::IntoBytes;

const EINVAL: Result<Vec<u8>, u32> = Err(22);

fn header(size: u32, command: u16, flags: u32) -> Vec<u8> {
    Header {
        id: 9,
        command,
        size,
        flags,
        error: 0,
    }
    .as_bytes()
    .to_vec()
}

fn short() -> Served {
    let limits = Limits {
        hello: Duration::from_millis(100),
        message: Duration::from_millis(100),
    };
    serve("intel-spr", PairConfig::default(), limits)
}

fn errno(e: Errno) -> Result<Vec<u8>, u32> {
    Err(e.raw_os_error() as u32)
}

#[test]
fn streams_out_of_step_are_closed() {
    let served = Served::spr();
    let cases: [(&str, Vec<u8>); 6] = [
        ("shorter than its header", header(15, 4, 0)),
        ("size zero", header(0, 4, 0)),
        ("larger than the limit", header(u32::MAX, 4, 0)),
        ("just over the limit", header((1 << 20) + 65, 10, 0)),
        ("a reply", header(16, 4, flags::REPLY)),
        ("a kind that is none", header(16, 4, 7)),
    ];
    for (what, bytes) in cases {
        let mut client = served.client(0);
        client.stream.write_all(&bytes).unwrap();
        eprintln!("{what}");
        client.is_closed();
        served.still_serves();
    }
    let report = served.emulator.control().report();
    assert_eq!(report.server_a.faults, 6);
    assert!(report.server_a.last_fault.unwrap().contains("never sent"));
}

#[test]
fn the_first_message_must_be_a_version() {
    let served = Served::spr();
    let mut payloads: Vec<Vec<u8>> = vec![
        vec![],
        vec![0, 0, 0],
        vec![9, 0, 0, 0], // major version 9
        b"\0\0\0\0{".to_vec(),
        b"\0\0\0\0[]\0".to_vec(),
        b"\0\0\0\0{\"a\":\xFF}\0".to_vec(),
    ];
    payloads.push([&[0; 4][..], &vec![b'['; 4000]].concat()); // deeply nested
    payloads.push([&[0; 4][..], &vec![b' '; 1 << 20]].concat());
    for payload in payloads {
        let mut client = served.connect(0);
        let answer = client.call(Command::Version, &payload, &[]);
        assert!(
            answer.unwrap().is_err(),
            "{:?}",
            &payload[..payload.len().min(16)]
        );
        client.is_closed();
        served.still_serves();
    }
    for command in 2..=14 {
        let mut client = served.connect(0);
        client.send(command, 0, &[0; 16], &[]).unwrap();
        assert!(client.answer(command).unwrap().is_err());
        client.is_closed();
    }
    served.still_serves();
}

#[test]
fn payloads_of_the_wrong_size_are_refused_and_the_stream_stays_in_step() {
    let served = Served::spr();
    let mut client = served.client(0);
    for command in 1..=20u16 {
        for len in [0, 1, 3, 4, 15, 17, 19, 23, 31, 33, 100] {
            // Nothing to be wrong with: an empty reset, and a longer question than is understood.
            if (command == Command::DeviceReset as u16 && len == 0)
                || (command == Command::DeviceGetInfo as u16 && len > 16)
            {
                continue;
            }
            client.send(command, 0, &vec![0xFF; len], &[]).unwrap();
            let answer = client.answer(command).unwrap();
            assert!(answer.is_err(), "command {command} with {len} bytes: {answer:?}");
        }
    }
    assert_eq!(client.read(proto::region::CONFIG, 0, 2), [0x86, 0x80]);
}

#[test]
fn accesses_outside_regions_are_refused() {
    let served = Served::spr();
    let mut client = served.client(0);
    let cases: [(u64, u32, u32); 12] = [
        (0, 0, 0),
        (0x1_0000, 0, 1),
        (0xFFFF, 0, 2),
        (u64::MAX, 0, 1),
        (u64::MAX - 3, 0, 8),
        (0, 0, u32::MAX),
        (0, 0, 0x1_0001),
        (0, 1, 4), // upper half of a 64-bit BAR
        (0, 6, 4), // no ROM
        (0, 9, 4),
        (0, u32::MAX, 4),
        (4095, 7, 2),
    ];
    for (offset, region, count) in cases {
        let access = RegionAccess {
            offset,
            region,
            count,
        };
        let answer = client.call(Command::RegionRead, access.as_bytes(), &[]).unwrap();
        assert!(answer.is_err(), "{access:?}: {answer:?}");
        // The same as a write, with as much data as it says, where that can be sent.
        let data = vec![0xAA; count.min(0x1_0001) as usize];
        let payload = [access.as_bytes(), &data].concat();
        let answer = client.call(Command::RegionWrite, &payload, &[]).unwrap();
        assert!(answer.is_err(), "{access:?}: {answer:?}");
    }
    // A window larger than a message: a read beyond the transfer limit is refused, not allocated.
    let big = serve(
        "intel-spr",
        PairConfig {
            window_bytes: 1 << 32,
            ..PairConfig::default()
        },
        Limits::default(),
    );
    let mut client = big.client(0);
    let access = RegionAccess {
        offset: 0,
        region: 2,
        count: 1 << 30,
    };
    let answer = client.call(Command::RegionRead, access.as_bytes(), &[]).unwrap();
    assert_eq!(answer, errno(Errno::MSGSIZE));
}

#[test]
fn half_messages_time_out() {
    let served = short();
    let halves: [&[u8]; 3] = [
        &[1],
        &header(16 + 64, 10, 0),
        &[&header(16 + 64, 10, 0)[..], &[0; 40]].concat(),
    ];
    for half in halves {
        let mut client = served.client(0);
        client.stream.write_all(half).unwrap();
        client.is_closed(); // while this side stays open
        served.still_serves();
    }
    // Not a word.
    let mut client = served.connect(0);
    client.is_closed();
    served.still_serves();
    // Left in the middle of a message.
    let mut client = served.client(0);
    client.stream.write_all(&header(16 + 64, 10, 0)).unwrap();
    drop(client);
    served.still_serves();
}

#[test]
fn a_client_that_takes_no_replies_is_dropped() {
    let served = short();
    let mut client = served.client(0);
    let access = RegionAccess {
        offset: 0,
        region: 0,
        count: 0x1_0000,
    };
    let begin = Instant::now();
    // Replies of 64 KiB pile up until the socket is full; then this end's own writes fail.
    client
        .stream
        .set_write_timeout(Some(Duration::from_millis(50)))
        .unwrap();
    while client
        .send(Command::RegionRead as u16, 0, access.as_bytes(), &[])
        .is_ok()
    {
        assert!(begin.elapsed() < PATIENCE, "it reads on for ever");
    }
    served.still_serves();
    assert!(served.emulator.control().report().server_a.faults >= 1);
}

#[test]
fn a_second_client_is_turned_away_at_once_and_the_first_is_not_disturbed() {
    let served = Served::spr();
    let mut first = served.client(0);
    for _ in 0..50 {
        let mut second = served.connect(0);
        second.is_closed();
    }
    assert_eq!(first.read(proto::region::CONFIG, 0, 2), [0x86, 0x80]);
    assert_eq!(served.emulator.control().report().server_a.refused, 50);
    let _other_side = served.client(1);
    drop(first);
    served.still_serves();
}

#[test]
fn descriptors_that_nobody_asked_for_do_not_pile_up() {
    let served = Served::spr();
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let fd: OwnedFd = eventfd(0, EventfdFlags::empty()).unwrap();
    let mut client = served.client(0);
    let info = [16u32, 0, 0, 0];
    let eight = [&fd; 8];
    let before = open();
    for _ in 0..200 {
        client
            .call(Command::DeviceGetInfo, info.as_bytes(), &eight)
            .unwrap()
            .unwrap();
    }
    // Other tests of this program open some too; 1600 they do not.
    assert!(open() < before + 400, "descriptors leak");
    // More than announced with one message.
    let many = [&fd; 40];
    let _ = client.call(Command::DeviceGetInfo, info.as_bytes(), &many);
    client.is_closed();
    served.still_serves();
}

fn set_irqs(client: &mut Client, set: IrqSet, data: &[u8], fds: &[&OwnedFd]) -> Result<Vec<u8>, u32> {
    let payload = [set.as_bytes(), data].concat();
    client.call(Command::DeviceSetIrqs, &payload, fds).unwrap()
}

#[test]
fn interrupts_are_assigned_within_bounds_only() {
    let served = Served::spr();
    let mut client = served.client(0);
    let fd: OwnedFd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    let trigger = proto::IRQ_SET_ACTION_TRIGGER;
    let eventfd_data = trigger | proto::IRQ_SET_DATA_EVENTFD;
    let none = trigger | proto::IRQ_SET_DATA_NONE;
    let set = |flags, index, start, count| IrqSet {
        argsz: 20,
        flags,
        index,
        start,
        count,
    };
    for bad in [
        set(eventfd_data, 2, 33, 1),
        set(eventfd_data, 2, 32, 2),
        set(eventfd_data, 2, u32::MAX, 1),
        set(eventfd_data, 2, 0, u32::MAX),
        set(eventfd_data, 2, 1, u32::MAX),
        set(eventfd_data, 0, 0, 1),
        set(eventfd_data, 5, 0, 1),
        set(eventfd_data, u32::MAX, 0, 1),
        set(eventfd_data, 2, 0, 2), // two vectors, one descriptor
        set(trigger, 2, 0, 1),
        set(0, 2, 0, 1),
        set(!0x18, 2, 0, 1),
        set(trigger | proto::IRQ_SET_DATA_BOOL, 2, 0, 1), // no data
        set(none, 2, 40, 1),
    ] {
        assert_eq!(set_irqs(&mut client, bad, &[], &[&fd]), EINVAL, "{bad:?}");
    }
    let mask = set(proto::IRQ_SET_DATA_NONE | proto::IRQ_SET_ACTION_MASK, 2, 0, 1);
    assert_eq!(set_irqs(&mut client, mask, &[], &[]), errno(Errno::NOTTY));
    assert_eq!(
        set_irqs(&mut client, set(eventfd_data, 2, 0, 1), &[], &[&pipe]),
        EINVAL,
        "a pipe counts no events"
    );

    // In runs, one at a time, with gaps, as QEMU does it.
    assert!(set_irqs(&mut client, set(eventfd_data, 2, 32, 1), &[], &[&fd]).is_ok());
    assert!(set_irqs(&mut client, set(eventfd_data, 2, 4, 3), &[], &[&fd, &fd, &fd]).is_ok());
    assert!(set_irqs(&mut client, set(eventfd_data, 2, 0, 4), &[], &[]).is_ok());
    assert!(set_irqs(&mut client, set(none, 2, 0, 33), &[], &[]).is_ok());
    let mut count = [0; 8];
    rustix::io::read(&fd, &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 4, "four vectors have a descriptor");
    let some = set(trigger | proto::IRQ_SET_DATA_BOOL, 2, 4, 3);
    assert!(set_irqs(&mut client, some, &[1, 0, 1], &[]).is_ok());
    rustix::io::read(&fd, &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 2);
    // All away.
    assert!(set_irqs(&mut client, set(none, 2, 0, 0), &[], &[]).is_ok());
    assert!(set_irqs(&mut client, set(none, 2, 0, 33), &[], &[]).is_ok());
    assert!(rustix::io::read(&fd, &mut count).is_err());
}

#[test]
fn maps_are_checked_and_end_with_the_client() {
    let served = Served::spr();
    let region = Region::allocate(1 << 20, Pages::Normal).unwrap();
    let fd = region.descriptor().try_clone_to_owned().unwrap();
    let map = |iova, size, offset, flags| DmaMap {
        argsz: 32,
        flags,
        offset,
        iova,
        size,
    };
    let mut client = served.client(0);
    for bad in [
        map(0x1000, 0, 0, 3),
        map(0x1000, 1, 0, 3),
        map(0x1001, 0x1000, 0, 3),
        map(0x1000, 0x1000, 7, 3),
        map(u64::MAX - 0xFFF, 0x2000, 0, 3),
        map(0x1000, 0x1000, u64::MAX - 0xFFF, 3),
        map(0x1000, 0x20_0000, 0, 3), // more than the descriptor has
        map(0x1000, 0x1000, 0x10_0000, 3),
        map(0x1000, 0x1000, 0, 0),
        map(0x1000, 0x1000, 0, 4),
    ] {
        let answer = client.call(Command::DmaMap, bad.as_bytes(), &[&fd]).unwrap();
        assert_eq!(answer, EINVAL, "{bad:?}");
    }
    let good = map(0x1000, 0x1000, 0, 3);
    assert_eq!(
        client
            .call(Command::DmaMap, good.as_bytes(), &[&fd, &fd])
            .unwrap(),
        EINVAL
    );
    assert!(
        client
            .call(Command::DmaMap, good.as_bytes(), &[&fd])
            .unwrap()
            .is_ok()
    );
    assert_eq!(
        client.call(Command::DmaMap, good.as_bytes(), &[&fd]).unwrap(),
        errno(Errno::EXIST)
    );
    let unmap = |iova, size, flags| DmaUnmap {
        argsz: 24,
        flags,
        iova,
        size,
    };
    for bad in [
        unmap(0x1000, 0, 0),
        unmap(0x1000, 0x800, 0),
        unmap(u64::MAX, 2, 0),
        unmap(0x1000, 0x1000, 8),
        unmap(0x1000, 0x1000, proto::DMA_UNMAP_ALL),
    ] {
        let answer = client.call(Command::DmaUnmap, bad.as_bytes(), &[]).unwrap();
        assert_eq!(answer, EINVAL, "{bad:?}");
    }
    assert_eq!(served.emulator.control().report().pair.a.maps_now, 1);
    drop(client);
    let mut client = served.client(0);
    assert_eq!(served.emulator.control().report().pair.a.maps_now, 0);
    // The limit holds, and reaching it is an answer.
    for i in 0..65_535u64 {
        let m = map(i * 0x1000, 0x1000, 0, 3);
        client
            .send(Command::DmaMap as u16, flags::NO_REPLY, m.as_bytes(), &[])
            .unwrap();
    }
    let over = map(1 << 40, 0x1000, 0, 3);
    assert_eq!(
        client.call(Command::DmaMap, over.as_bytes(), &[]).unwrap(),
        errno(Errno::NOSPC)
    );
    let all = unmap(0, 0, proto::DMA_UNMAP_ALL);
    assert!(
        client
            .call(Command::DmaUnmap, all.as_bytes(), &[])
            .unwrap()
            .is_ok()
    );
    assert_eq!(served.emulator.control().report().pair.a.maps_now, 0);
}

#[test]
fn garbage_never_brings_it_down() {
    let served = short();
    let mut seed = 0x1234_5678_9ABC_DEF1u64;
    let mut random = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    for round in 0..200 {
        let mut client = if round % 4 == 0 {
            served.connect(0)
        } else {
            served.client(0)
        };
        for _ in 0..random() % 20 {
            let len = random() % 80;
            let payload: Vec<u8> = (0..len)
                .map(|_| {
                    if random() % 3 == 0 {
                        0xFF
                    } else {
                        (random() % 8) as u8
                    }
                })
                .collect();
            let command = (random() % 18) as u16;
            if client.send(command, flags::NO_REPLY, &payload, &[]).is_err() {
                break;
            }
        }
        let tail: Vec<u8> = (0..random() % 40).map(|_| random() as u8).collect();
        let _ = client.stream.write_all(&tail);
    }
    served.still_serves();
}

#[test]
fn stopping_does_not_wait_for_clients() {
    let served = Served::spr();
    let mut a = served.client(0);
    let mut b = served.connect(1); // silent
    drop(served);
    a.is_closed();
    b.is_closed();
}
