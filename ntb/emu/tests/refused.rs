//! A client that wants to be told is shown the stores that its mappings refuse, as its bus would.

mod common;

use std::io::{Read as _, Write as _};

use common::{Client, serve};
use ntb::pci::vfio_user::proto::{Command, HEADER_BYTES, Header, flags, region};
use ntb_emu::{model::PairConfig, server::Limits};
use zerocopy::{FromBytes as _, IntoBytes as _};

/// Awake and asking for the link, as the kernel's driver does.
fn enable(client: &mut Client, host: u64) {
    for bar in [0, 2, 4] {
        let at = host + 0x4000_0000 * bar;
        client.write(region::CONFIG, 0x10 + 4 * bar, &at.to_le_bytes());
    }
    client.write(region::CONFIG, 0x04, &6u16.to_le_bytes());
    client.write(0, 0x0, &0x154u32.to_le_bytes());
    client.write(0, 0xB050, &0u16.to_le_bytes());
    client.write(0, 0xB0D4, &8u32.to_le_bytes());
}

#[test]
fn refused_stores_are_shown_to_the_client() {
    let pair = PairConfig {
        tell_refused: true,
        ..PairConfig::default()
    };
    let served = serve("intel-spr", pair, Limits::default());
    let (mut a, mut b) = (served.client(0), served.client(1));
    let host = 0x7C_0000_0000;
    enable(&mut a, 0x38_0000_0000);
    enable(&mut b, host);
    // A window open onto addresses that nothing is mapped at.
    let bar2 = host + 0x8000_0000;
    b.write(0, 0x10, &0x1234_5000u64.to_le_bytes());
    b.write(0, 0x18, &(bar2 + 0x2000).to_le_bytes());
    a.write(2, 0x18, &[0x5A; 8]);
    // Beyond the window: refused by the port, which tells nobody.
    a.write(2, 0x2000, &[0x5B; 8]);
    assert_eq!(served.emulator.control().report().pair.a_to_b.fault_unmapped, 1);

    // Behind the answer of the next command.
    assert_eq!(b.read(region::CONFIG, 0, 4), [0x86, 0x80, 0x7E, 0x34]);
    let mut message = [0; HEADER_BYTES + 24];
    b.stream.read_exact(&mut message).unwrap();
    let header = Header::read_from_bytes(&message[..HEADER_BYTES]).unwrap();
    assert_eq!(header.command, Command::DmaWrite as u16);
    assert_eq!(header.size as usize, message.len());
    assert_eq!(header.flags, flags::COMMAND | flags::NO_REPLY);
    let mut expected = 0x1234_5018u64.to_le_bytes().to_vec();
    expected.extend(8u64.to_le_bytes());
    expected.extend([0x5A; 8]);
    assert_eq!(message[HEADER_BYTES..], expected);

    // An answer to it is allowed, once.
    let answer = Header {
        flags: flags::REPLY | flags::ERROR,
        size: HEADER_BYTES as u32,
        error: 14,
        ..header
    };
    b.stream.write_all(answer.as_bytes()).unwrap();
    assert_eq!(b.read(region::CONFIG, 0, 2), [0x86, 0x80]);
    b.stream.write_all(answer.as_bytes()).unwrap();
    b.is_closed();
    drop(a);
}

#[test]
fn nobody_is_told_who_did_not_ask() {
    let served = serve("intel-spr", PairConfig::default(), Limits::default());
    let (mut a, mut b) = (served.client(0), served.client(1));
    enable(&mut a, 0x38_0000_0000);
    enable(&mut b, 0x7C_0000_0000);
    b.write(0, 0x10, &0x1234_5000u64.to_le_bytes());
    b.write(0, 0x18, &0x7C_8000_2000u64.to_le_bytes());
    a.write(2, 0, &[1; 8]);
    assert_eq!(served.emulator.control().report().pair.a_to_b.fault_unmapped, 1);
    // The next bytes are the next answer.
    for _ in 0..3 {
        assert_eq!(b.read(region::CONFIG, 0, 2), [0x86, 0x80]);
    }
}
