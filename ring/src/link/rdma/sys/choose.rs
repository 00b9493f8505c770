//! Which device, port and address a connection leaves by, from what sysfs says.

use std::{
    fs,
    net::{IpAddr, Ipv6Addr},
    path::Path,
};

use super::{
    super::{
        error::{failed, unavailable},
        options::RdmaOptions,
        verbs::{Fabric, Port, Unusable},
    },
    abi::NODE_RNIC,
};
use crate::link::LinkError;

/// One entry of a port's table of GIDs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Gid {
    index: u8,
    address: [u8; 16],
    is_v2: bool,
}

/// One port as sysfs describes it.
#[derive(Clone, Debug)]
struct Seen {
    device: String,
    port: u8,
    fabric: Fabric,
    active: bool,
    state: String,
    gids: Vec<Gid>,
    /// Network interfaces on it.
    interfaces: Vec<String>,
}

impl Seen {
    fn ip_of(gid: &Gid) -> Option<IpAddr> {
        let address = Ipv6Addr::from(gid.address);
        match address.to_ipv4_mapped() {
            Some(ip) => Some(IpAddr::V4(ip)),
            None if is_link_local(address) => None,
            None => Some(IpAddr::V6(address)),
        }
    }
}

fn is_link_local(address: Ipv6Addr) -> bool {
    address.segments().first().is_some_and(|s| s & 0xffc0 == 0xfe80)
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn number(path: &Path) -> u32 {
    let text = text(path);
    text.split(':')
        .next()
        .and_then(|n| n.trim().parse().ok())
        .unwrap_or(0)
}

/// All ports, in order.
fn ports(sysfs: &Path) -> Vec<Seen> {
    let class = sysfs.join("class/infiniband");
    let mut all = Vec::new();
    for device in names(&class) {
        let folder = class.join(&device);
        let is_rnic = number(&folder.join("node_type")) == NODE_RNIC;
        for port in names(&folder.join("ports"))
            .iter()
            .filter_map(|name| name.parse().ok())
        {
            let folder = folder.join("ports").join(u8::to_string(&port));
            let state = text(&folder.join("state"));
            all.push(Seen {
                device: device.clone(),
                port,
                fabric: match (is_rnic, text(&folder.join("link_layer")).as_str()) {
                    (true, _) => Fabric::Iwarp,
                    (false, "InfiniBand") => Fabric::InfiniBand,
                    (false, _) => Fabric::Roce,
                },
                active: state.starts_with('4'),
                state,
                gids: gids(&folder),
                interfaces: interfaces(&class.join(&device), &folder),
            });
        }
    }
    all
}

fn gids(port: &Path) -> Vec<Gid> {
    (0..=u8::MAX)
        .map_while(|index| {
            let address = fs::read_to_string(port.join("gids").join(index.to_string())).ok()?;
            // Reading the kind of an entry that is not in use fails.
            let kind = text(&port.join("gid_attrs/types").join(index.to_string()));
            Some(address.trim().parse::<Ipv6Addr>().ok().map(|address| Gid {
                index,
                address: address.octets(),
                is_v2: kind.contains("v2"),
            }))
        })
        .flatten()
        .filter(|gid| gid.address != [0; 16])
        .collect()
}

fn interfaces(device: &Path, port: &Path) -> Vec<String> {
    let mut all: Vec<String> = names(&port.join("gid_attrs/ndevs"))
        .iter()
        .map(|index| text(&port.join("gid_attrs/ndevs").join(index)))
        .chain([text(&device.join("parent"))])
        .chain(names(&device.join("device/net")))
        .filter(|name| !name.is_empty())
        .collect();
    all.sort();
    all.dedup();
    all
}

/// How well an entry suits; the least is the best.
fn rank(gid: &Gid, wanted: Option<IpAddr>) -> u8 {
    let address = Ipv6Addr::from(gid.address);
    let ip = Seen::ip_of(gid);
    match (gid.is_v2, wanted) {
        (_, _) if is_link_local(address) => 9,
        (true, Some(_)) if ip == wanted => 0,
        (true, _) if matches!(ip, Some(IpAddr::V4(_))) => 1,
        (true, _) => 2,
        (false, _) => 8,
    }
}

/// Chooses. `wanted` is the address of this machine that the peer is met by; `addresses` says which addresses an
/// interface has.
pub(super) fn choose(
    options: &RdmaOptions,
    wanted: Option<IpAddr>,
    addresses: &dyn Fn(&str) -> Vec<IpAddr>,
) -> Result<Port, LinkError> {
    let all = ports(&options.sysfs);
    if all.is_empty() {
        return Err(unavailable(no_device(&options.sysfs)));
    }
    let described = all
        .iter()
        .map(|p| format!("{} port {} ({}, {})", p.device, p.port, p.fabric.name(), p.state))
        .collect::<Vec<_>>()
        .join("; ");
    let fits = |p: &&Seen| {
        options.device.as_ref().is_none_or(|device| *device == p.device)
            && options.port.is_none_or(|port| port == p.port)
    };
    let wished: Vec<&Seen> = all.iter().filter(fits).collect();
    if wished.is_empty() {
        let device = options.device.as_deref().unwrap_or("any device");
        let port = options
            .port
            .map_or(String::new(), |port| format!(", port {port}"));
        return Err(failed(
            "rdma-no-device",
            3,
            format!("RDMA unavailable: {device}{port} is not there; there are: {described}"),
        ));
    }
    let mut best: Option<(u8, Port)> = None;
    let mut reasons = Vec::new();
    for seen in wished {
        if !seen.active {
            reasons.push(format!(
                "{} port {} is not active ({})",
                seen.device, seen.port, seen.state
            ));
            continue;
        }
        match suit(seen, options, wanted, addresses) {
            Ok((rank, port)) if best.as_ref().is_none_or(|(least, _)| rank < *least) => {
                best = Some((rank, port));
            }
            Ok(_) => {}
            Err(why) => reasons.push(why),
        }
    }
    best.map(|(_, port)| port).ok_or_else(|| {
        failed(
            "rdma-no-port",
            3,
            format!("RDMA unavailable: no port can be used: {}", reasons.join("; ")),
        )
    })
}

/// The best address of a port and how well it suits, or why there is none.
fn suit(
    seen: &Seen,
    options: &RdmaOptions,
    wanted: Option<IpAddr>,
    addresses: &dyn Fn(&str) -> Vec<IpAddr>,
) -> Result<(u8, Port), String> {
    let make = |gid: &Gid, ip, why: &str| Port {
        device: seen.device.clone(),
        port: seen.port,
        fabric: seen.fabric,
        gid_index: gid.index,
        gid: gid.address,
        ip,
        why: why.to_owned(),
    };
    let own: Vec<IpAddr> = seen.interfaces.iter().flat_map(|i| addresses(i)).collect();
    let interface_ip = wanted
        .filter(|ip| own.contains(ip))
        .or_else(|| own.iter().copied().find(IpAddr::is_ipv4))
        .or_else(|| own.first().copied());
    if let Some(index) = options.gid_index {
        let gid = seen
            .gids
            .iter()
            .find(|gid| gid.index == index)
            .ok_or_else(|| format!("{} port {} has no GID of index {index}", seen.device, seen.port))?;
        // Only RoCE's are IP addresses; others merely look like some.
        let ip = match seen.fabric {
            Fabric::Roce => Seen::ip_of(gid).or(interface_ip),
            Fabric::InfiniBand | Fabric::Iwarp => interface_ip,
        };
        return Ok((0, make(gid, ip, "index named by the user")));
    }
    if seen.fabric == Fabric::Roce {
        let best = seen.gids.iter().min_by_key(|gid| (rank(gid, wanted), gid.index));
        let Some(gid) = best.filter(|gid| rank(gid, wanted) < 8) else {
            return Err(format!(
                "{} port {} has no RoCE v2 GID but link-local ones: give its interface an address",
                seen.device, seen.port
            ));
        };
        let (rank, ip) = (rank(gid, wanted), Seen::ip_of(gid));
        let why = match rank {
            0 => "RoCE v2 GID of the address that the peer is met by",
            1 => "first RoCE v2 GID with an IPv4 address",
            _ => "first RoCE v2 GID with a global address",
        };
        return Ok((rank, make(gid, ip, why)));
    }
    let empty = Gid {
        index: 0,
        address: [0; 16],
        is_v2: false,
    };
    let gid = seen.gids.first().unwrap_or(&empty);
    let suits = wanted.is_some() && interface_ip == wanted;
    let why = match suits {
        true => "its interface has the address that the peer is met by",
        false => "first port that is active",
    };
    Ok((if suits { 0 } else { 3 }, make(gid, interface_ip, why)))
}

/// Whether a port is still what it was when it was chosen. `addresses` as for [`choose`].
pub(super) fn is_unchanged(
    sysfs: &Path,
    port: &Port,
    addresses: &dyn Fn(&str) -> Vec<IpAddr>,
) -> Result<(), Unusable> {
    let device = sysfs.join("class/infiniband").join(&port.device);
    let seen = device.join("ports").join(port.port.to_string());
    let state = text(&seen.join("state"));
    if !state.starts_with('4') {
        return Err(match state.as_str() {
            "" => Unusable::Gone(format!("device {} is gone", port.device)),
            state => Unusable::Down(format!(
                "{} port {} is not active ({state})",
                port.device, port.port
            )),
        });
    }
    if port.fabric != Fabric::Iwarp {
        let now = text(&seen.join("gids").join(port.gid_index.to_string()));
        if !now.parse::<Ipv6Addr>().is_ok_and(|gid| gid.octets() == port.gid) {
            return Err(Unusable::Changed(format!(
                "GID {} of {} has changed to {now}",
                port.gid_index, port.device
            )));
        }
    }
    // RoCE's GIDs are addresses, and entries go with them; elsewhere the interface says what rdma_cm can be called by.
    let has = |ip: IpAddr| {
        let all = interfaces(&device, &seen);
        all.iter().any(|interface| addresses(interface).contains(&ip))
    };
    match port.ip {
        Some(ip) if port.fabric != Fabric::Roce && !has(ip) => Err(Unusable::Changed(format!(
            "{} has no address {ip} any more",
            port.device
        ))),
        _ => Ok(()),
    }
}

/// Why sysfs shows no device.
fn no_device(sysfs: &Path) -> &'static str {
    match sysfs.join("class/infiniband").is_dir() {
        true => "no RDMA device; a software one is made with 'rdma link add rxe0 type rxe netdev INTERFACE'",
        false => "the kernel has no RDMA (no /sys/class/infiniband): load ib_uverbs and the device's module",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// A sysfs of our own, removed at the end.
    struct Sysfs(PathBuf);

    impl Drop for Sysfs {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    impl Sysfs {
        fn new(test: &str) -> Self {
            let path = std::env::temp_dir().join(format!("ntb-rdma-{}-{test}", std::process::id()));
            fs::create_dir_all(path.join("class/infiniband")).unwrap();
            Self(path)
        }

        fn write(&self, device: &str, file: &str, text: &str) {
            let path = self.0.join("class/infiniband").join(device).join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }

        fn device(&self, name: &str, node: &str, layer: &str, state: &str) {
            self.write(name, "node_type", node);
            self.write(name, "ports/1/link_layer", layer);
            self.write(name, "ports/1/state", state);
        }

        fn gid(&self, name: &str, index: u8, gid: &str, kind: &str, interface: &str) {
            self.write(name, &format!("ports/1/gids/{index}"), gid);
            if !kind.is_empty() {
                self.write(name, &format!("ports/1/gid_attrs/types/{index}"), kind);
                self.write(name, &format!("ports/1/gid_attrs/ndevs/{index}"), interface);
            }
        }

        fn choose(
            &self,
            wanted: Option<&str>,
            change: impl FnOnce(&mut RdmaOptions),
        ) -> Result<Port, LinkError> {
            let mut options = RdmaOptions {
                sysfs: self.0.clone(),
                ..RdmaOptions::default()
            };
            change(&mut options);
            let wanted = wanted.map(|ip| ip.parse().unwrap());
            choose(&options, wanted, &|interface| match interface {
                "eth0" => vec!["10.0.0.1".parse().unwrap()],
                "eth1" => vec!["10.0.1.1".parse().unwrap()],
                _ => vec![],
            })
        }
    }

    fn roce(sysfs: &Sysfs, name: &str, interface: &str, ip: &str) {
        sysfs.device(name, "1: CA", "Ethernet", "4: ACTIVE");
        sysfs.gid(
            name,
            0,
            "fe80:0000:0000:0000:5054:00ff:fe12:3456",
            "IB/RoCE v1",
            interface,
        );
        sysfs.gid(
            name,
            1,
            "fe80:0000:0000:0000:5054:00ff:fe12:3456",
            "RoCE v2",
            interface,
        );
        sysfs.gid(
            name,
            2,
            &format!("0000:0000:0000:0000:0000:ffff:{ip}"),
            "IB/RoCE v1",
            interface,
        );
        sysfs.gid(
            name,
            3,
            &format!("0000:0000:0000:0000:0000:ffff:{ip}"),
            "RoCE v2",
            interface,
        );
        sysfs.gid(name, 4, "0000:0000:0000:0000:0000:0000:0000:0000", "", interface);
        sysfs.gid(
            name,
            5,
            "2001:0db8:0000:0000:0000:0000:0000:0001",
            "RoCE v2",
            interface,
        );
    }

    #[test]
    fn nothing_is_told_from_no_device() {
        let sysfs = Sysfs::new("none");
        let e = sysfs.choose(None, |_| {}).unwrap_err();
        assert_eq!((e.name, e.exit), ("rdma-unavailable", 3));
        assert!(e.what.contains("no RDMA device"), "{e}");
        let e = sysfs
            .choose(None, |o| o.sysfs = PathBuf::from("/nowhere"))
            .unwrap_err();
        assert!(e.what.contains("the kernel has no RDMA"), "{e}");
    }

    #[test]
    fn the_address_that_the_peer_is_met_by_decides() {
        let sysfs = Sysfs::new("roce");
        roce(&sysfs, "mlx5_0", "eth0", "0a00:0001");
        roce(&sysfs, "mlx5_1", "eth1", "0a00:0101");
        let port = sysfs.choose(Some("10.0.1.1"), |_| {}).unwrap();
        assert_eq!((port.device.as_str(), port.gid_index), ("mlx5_1", 3));
        assert_eq!(port.ip, Some("10.0.1.1".parse().unwrap()));
        let port = sysfs.choose(None, |_| {}).unwrap();
        assert_eq!(
            (port.device.as_str(), port.gid_index),
            ("mlx5_0", 3),
            "IPv4 before IPv6"
        );
        let port = sysfs
            .choose(Some("2001:db8::1"), |o| o.device = Some("mlx5_1".into()))
            .unwrap();
        assert_eq!((port.device.as_str(), port.gid_index), ("mlx5_1", 5));
        let port = sysfs.choose(Some("10.0.1.1"), |o| o.gid_index = Some(1)).unwrap();
        assert_eq!((port.device.as_str(), port.gid_index), ("mlx5_0", 1));
        assert!(
            port.why.contains("named by the user") && port.to_string().contains("GID 1 fe80"),
            "{port}"
        );
        let e = sysfs.choose(None, |o| o.gid_index = Some(4)).unwrap_err();
        assert!(e.what.contains("no GID of index 4"), "{e}");
        let e = sysfs
            .choose(None, |o| o.device = Some("mlx5_9".into()))
            .unwrap_err();
        assert!(
            e.what.contains("mlx5_9") && e.what.contains("mlx5_1 port 1"),
            "{e}"
        );
    }

    #[test]
    fn ports_that_are_down_or_have_no_address_are_named() {
        let sysfs = Sysfs::new("down");
        sysfs.device("rxe0", "1: CA", "Ethernet", "1: DOWN");
        sysfs.device("rxe1", "1: CA", "Ethernet", "4: ACTIVE");
        sysfs.gid(
            "rxe1",
            0,
            "fe80:0000:0000:0000:5054:00ff:fe12:3456",
            "RoCE v2",
            "eth0",
        );
        let e = sysfs.choose(None, |_| {}).unwrap_err();
        assert_eq!(e.name, "rdma-no-port");
        assert!(e.what.contains("rxe0 port 1 is not active (1: DOWN)"), "{e}");
        assert!(e.what.contains("rxe1 port 1 has no RoCE v2 GID"), "{e}");
    }

    #[test]
    fn iwarp_and_infiniband_go_by_their_interfaces() {
        let sysfs = Sysfs::new("iwarp");
        sysfs.device("siw0", "4: RNIC", "Ethernet", "4: ACTIVE");
        sysfs.gid(
            "siw0",
            0,
            "5254:0012:3456:0000:0000:0000:0000:0000",
            "IB/RoCE v1",
            "eth0",
        );
        sysfs.device("ib0", "1: CA", "InfiniBand", "4: ACTIVE");
        sysfs.gid(
            "ib0",
            0,
            "fe80:0000:0000:0000:0002:c903:0000:0001",
            "IB/RoCE v1",
            "eth1",
        );
        let port = sysfs.choose(Some("10.0.0.1"), |_| {}).unwrap();
        assert_eq!((port.device.as_str(), port.fabric), ("siw0", Fabric::Iwarp));
        assert_eq!(port.ip, Some("10.0.0.1".parse().unwrap()));
        let named = sysfs.choose(Some("10.0.0.1"), |o| {
            (o.device, o.gid_index) = (Some("siw0".to_owned()), Some(0));
        });
        let named = named.unwrap();
        assert_eq!((named.device.as_str(), named.ip), ("siw0", port.ip));
        // The address is the interface's, and goes with it.
        let with = |own: &'static str| {
            is_unchanged(&sysfs.0, &port, &move |interface| match interface {
                "eth0" => vec![own.parse().unwrap()],
                _ => vec![],
            })
        };
        assert_eq!(with("10.0.0.1"), Ok(()));
        assert!(matches!(with("10.0.0.9"), Err(Unusable::Changed(why)) if why.contains("10.0.0.1")));
        sysfs.write("siw0", "ports/1/state", "1: DOWN");
        assert!(matches!(with("10.0.0.1"), Err(Unusable::Down(why)) if why.contains("not active")));
        fs::remove_dir_all(sysfs.0.join("class/infiniband/siw0")).unwrap();
        assert!(matches!(with("10.0.0.1"), Err(Unusable::Gone(why)) if why.contains("siw0")));
        let port = sysfs.choose(Some("10.0.1.1"), |_| {}).unwrap();
        assert_eq!((port.device.as_str(), port.fabric), ("ib0", Fabric::InfiniBand));
        assert_eq!(port.gid_index, 0);
    }
}
