//! Enough of Ethernet, ARP (RFC 826), IPv4 (RFC 791) and ICMP (RFC 792) to ping the kernel's interface and to be pinged by
//! it, without a network stack.

use std::net::Ipv4Addr;

/// A hardware address.
pub type Mac = [u8; 6];

const BROADCAST: Mac = [0xFF; 6];
const TYPE_IPV4: u16 = 0x0800;
const TYPE_ARP: u16 = 0x0806;
/// Hardware type Ethernet, protocol IPv4, lengths of their addresses.
const ARP_HEAD: [u8; 6] = [0, 1, 8, 0, 6, 4];
const ARP_REQUEST: u16 = 1;
const ARP_REPLY: u16 = 2;
const ECHO_REPLY: u8 = 0;
const ECHO_REQUEST: u8 = 8;
const PROTOCOL_ICMP: u8 = 1;
/// Bytes of an Ethernet header.
pub const ETHERNET_BYTES: usize = 14;
/// Bytes of an IPv4 header without options.
const IPV4_BYTES: usize = 20;
/// Bytes of an echo's header.
const ECHO_BYTES: usize = 8;
/// Bytes of an echo's frame beside its data.
pub const ECHO_OVERHEAD: usize = ETHERNET_BYTES + IPV4_BYTES + ECHO_BYTES;

/// Who this side is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    /// Hardware address.
    pub mac: Mac,
    /// Address.
    pub ip: Ipv4Addr,
}

impl Host {
    /// A host with this address and a hardware address made of it, which is locally administered.
    pub fn new(ip: Ipv4Addr) -> Self {
        let [a, b, c, d] = ip.octets();
        Self {
            mac: [2, b'n', a, b, c, d],
            ip,
        }
    }
}

/// What a frame is to this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meaning<'a> {
    /// Somebody asks for this host's hardware address, or pings it: here is the reply.
    Answer(Vec<u8>),
    /// The hardware address of a host, which was asked for.
    Resolved(Host),
    /// The reply to a ping of this host.
    EchoReply {
        /// Who replies.
        from: Ipv4Addr,
        /// Identifier of the ping.
        id: u16,
        /// Its number.
        sequence: u16,
        /// Its data.
        data: &'a [u8],
    },
    /// Something else, for somebody else, or no frame at all.
    Nothing,
}

/// Reads a frame.
pub fn understand<'a>(own: &Host, frame: &'a [u8]) -> Meaning<'a> {
    ethernet(own, frame).unwrap_or(Meaning::Nothing)
}

/// The question for the hardware address of `ip`.
pub fn arp_request(own: &Host, ip: Ipv4Addr) -> Vec<u8> {
    arp(own, ARP_REQUEST, &Host { mac: [0; 6], ip }, BROADCAST)
}

/// A ping.
pub fn echo_request(own: &Host, to: &Host, id: u16, sequence: u16, data: &[u8]) -> Vec<u8> {
    echo(own, to, ECHO_REQUEST, id, sequence, data)
}

fn ethernet<'a>(own: &Host, frame: &'a [u8]) -> Option<Meaning<'a>> {
    let (to, rest) = frame.split_first_chunk::<6>()?;
    let (from, rest) = rest.split_first_chunk::<6>()?;
    let (kind, body) = rest.split_first_chunk::<2>()?;
    if *to != own.mac && *to != BROADCAST {
        return None;
    }
    match u16::from_be_bytes(*kind) {
        TYPE_ARP => understand_arp(own, body),
        TYPE_IPV4 => understand_ipv4(own, *from, body),
        _ => None,
    }
}

fn understand_arp<'a>(own: &Host, body: &[u8]) -> Option<Meaning<'a>> {
    let (head, rest) = body.split_first_chunk::<6>()?;
    let (operation, rest) = rest.split_first_chunk::<2>()?;
    let (mac, rest) = rest.split_first_chunk::<6>()?;
    let (ip, rest) = rest.split_first_chunk::<4>()?;
    let (_, rest) = rest.split_first_chunk::<6>()?;
    let (target, _) = rest.split_first_chunk::<4>()?;
    if *head != ARP_HEAD || Ipv4Addr::from(*target) != own.ip {
        return None;
    }
    let other = Host {
        mac: *mac,
        ip: Ipv4Addr::from(*ip),
    };
    match u16::from_be_bytes(*operation) {
        ARP_REQUEST => Some(Meaning::Answer(arp(own, ARP_REPLY, &other, other.mac))),
        ARP_REPLY => Some(Meaning::Resolved(other)),
        _ => None,
    }
}

fn understand_ipv4<'a>(own: &Host, from: Mac, body: &'a [u8]) -> Option<Meaning<'a>> {
    let header_bytes = usize::from(body.first()? & 0x0F) * 4;
    let length = usize::from(u16::from_be_bytes(*body.get(2..)?.first_chunk::<2>()?));
    // Frames may be padded, so the length counts; header and packet must be whole, and no fragment.
    let packet = body.get(..length)?;
    let header = packet.get(..header_bytes)?;
    let fragment = u16::from_be_bytes(*header.get(6..)?.first_chunk::<2>()?) & 0x3FFF;
    let good =
        body.first()? >> 4 == 4 && header_bytes >= IPV4_BYTES && fragment == 0 && checksum(header) == 0;
    if !good || *header.get(9)? != PROTOCOL_ICMP {
        return None;
    }
    let source = Ipv4Addr::from(*header.get(12..)?.first_chunk::<4>()?);
    let target = Ipv4Addr::from(*header.get(16..)?.first_chunk::<4>()?);
    let message = packet.get(header_bytes..)?;
    let (head, data) = message.split_first_chunk::<ECHO_BYTES>()?;
    if target != own.ip || checksum(message) != 0 {
        return None;
    }
    let [kind, code, _, _, i, d, s, q] = *head;
    let (id, sequence) = (u16::from_be_bytes([i, d]), u16::from_be_bytes([s, q]));
    let to = Host {
        mac: from,
        ip: source,
    };
    match (kind, code) {
        (ECHO_REQUEST, 0) => Some(Meaning::Answer(echo(own, &to, ECHO_REPLY, id, sequence, data))),
        (ECHO_REPLY, 0) => Some(Meaning::EchoReply {
            from: source,
            id,
            sequence,
            data,
        }),
        _ => None,
    }
}

fn frame(own: &Host, to: Mac, kind: u16) -> Vec<u8> {
    let mut all = Vec::new();
    all.extend(to);
    all.extend(own.mac);
    all.extend(kind.to_be_bytes());
    all
}

fn arp(own: &Host, operation: u16, target: &Host, to: Mac) -> Vec<u8> {
    let mut all = frame(own, to, TYPE_ARP);
    all.extend(ARP_HEAD);
    all.extend(operation.to_be_bytes());
    all.extend(own.mac);
    all.extend(own.ip.octets());
    all.extend(target.mac);
    all.extend(target.ip.octets());
    all
}

fn echo(own: &Host, to: &Host, kind: u8, id: u16, sequence: u16, data: &[u8]) -> Vec<u8> {
    let mut message = vec![kind, 0, 0, 0];
    message.extend(id.to_be_bytes());
    message.extend(sequence.to_be_bytes());
    message.extend(data);
    put_checksum(&mut message, 2);
    // What does not fit an IPv4 packet does not fit a frame of the default size either: the length saturates, and the
    // packet is one that nobody takes.
    let length = u16::try_from(IPV4_BYTES + message.len()).unwrap_or(u16::MAX);
    let mut header = vec![0x45, 0];
    header.extend(length.to_be_bytes());
    header.extend([0, 0, 0x40, 0, 64, PROTOCOL_ICMP, 0, 0]);
    header.extend(own.ip.octets());
    header.extend(to.ip.octets());
    put_checksum(&mut header, 10);
    let mut all = frame(own, to.mac, TYPE_IPV4);
    all.extend(header);
    all.extend(message);
    all
}

fn put_checksum(bytes: &mut [u8], at: usize) {
    let sum = checksum(bytes).to_be_bytes();
    if let Some(place) = bytes.get_mut(at..at + 2) {
        place.copy_from_slice(&sum);
    }
}

/// The internet checksum (RFC 1071): 0 over bytes that hold their own.
fn checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 = 0;
    for pair in bytes.chunks(2) {
        let high = pair.first().copied().unwrap_or(0);
        let low = pair.get(1).copied().unwrap_or(0);
        sum += u32::from(u16::from_be_bytes([high, low]));
        // At most 0xFFFF + 1 after this.
        sum = (sum & 0xFFFF) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hosts() -> [Host; 2] {
        [
            Host::new(Ipv4Addr::new(10, 0, 0, 1)),
            Host::new(Ipv4Addr::new(10, 0, 0, 2)),
        ]
    }

    #[test]
    fn a_host_is_found_and_pinged() {
        let [a, b] = hosts();
        let Meaning::Answer(reply) = understand(&b, &arp_request(&a, b.ip)) else {
            panic!("no answer")
        };
        assert_eq!(understand(&a, &reply), Meaning::Resolved(b));
        for data in [&b""[..], b"x", b"some data of odd length"] {
            let ping = echo_request(&a, &b, 7, 65535, data);
            assert_eq!(ping.len(), ECHO_OVERHEAD + data.len());
            let Meaning::Answer(mut pong) = understand(&b, &ping) else {
                panic!("no answer")
            };
            // Short frames may arrive padded.
            pong.extend([0; 20]);
            let expected = Meaning::EchoReply {
                from: b.ip,
                id: 7,
                sequence: 65535,
                data,
            };
            assert_eq!(understand(&a, &pong), expected);
        }
    }

    #[test]
    fn what_is_not_for_this_host_is_nothing() {
        let [a, b] = hosts();
        let c = Host::new(Ipv4Addr::new(10, 0, 0, 3));
        assert_eq!(understand(&c, &arp_request(&a, b.ip)), Meaning::Nothing);
        let ping = echo_request(&a, &b, 1, 1, b"data");
        assert_eq!(understand(&c, &ping), Meaning::Nothing);
        for at in ETHERNET_BYTES..ping.len() {
            let mut wrong = ping.clone();
            wrong[at] ^= 0x40;
            assert_eq!(understand(&b, &wrong), Meaning::Nothing, "byte {at}");
        }
        for length in 0..ping.len() {
            assert_eq!(
                understand(&b, &ping[..length]),
                Meaning::Nothing,
                "cut at {length}"
            );
        }
    }

    /// The example of RFC 1071, section 3.
    #[test]
    fn the_checksum_is_the_internets() {
        assert_eq!(
            checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]),
            !0xddf2
        );
        assert_eq!(checksum(&[0xff]), 0x00ff);
    }

    proptest! {
        #[test]
        fn any_frame_is_borne(frame in proptest::collection::vec(any::<u8>(), 0..100)) {
            let [a, _] = hosts();
            let mut ours = a.mac.to_vec();
            ours.extend([0; 6]);
            ours.extend([8, 0, 0x45]);
            ours.extend(&frame);
            let _ = understand(&a, &frame);
            let _ = understand(&a, &ours);
        }
    }
}
