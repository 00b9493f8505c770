//! From an address to a link.

use std::{
    net::{IpAddr, ToSocketAddrs, UdpSocket},
    path::{Path, PathBuf},
};

use ntb_mem::region::Pages;

use super::{
    Link, LinkError,
    auth::Secret,
    ends::WINDOW_BYTES,
    engine::EngineChoice,
    soft::{SoftLink, SoftOptions},
};
use crate::address::Address;

/// Parameters of a link, whichever it will be.
#[derive(Clone, Debug)]
pub struct LinkOptions {
    /// Bytes of this side's memory that the peer writes, a multiple of 64; 64 MiB by default. A bridge whose windows are
    /// smaller gives what they have.
    pub window_bytes: u64,
    /// Pages that this memory stands on.
    pub pages: Pages,
    /// How lines are stored, on links over bridges.
    pub engine: EngineChoice,
    /// Through which interface of the kernel a bridge is opened.
    #[cfg(feature = "ntb")]
    pub vfio: ::ntb::pci::vfio::Interface,
    /// Group whose members may be peers on a soft link, besides the same user: [`SoftOptions::group`].
    pub group: Option<u32>,
    /// What is particular to links over RDMA; windows, pages and sysfs are those given here.
    #[cfg(feature = "rdma")]
    pub rdma: super::rdma::RdmaOptions,
    /// Where sysfs is mounted.
    pub sysfs: PathBuf,
    /// Name of the soft link that [`Address::Auto`] without a host ends at when there is nothing better; `auto` by
    /// default. Both ends must give the same.
    pub soft_name: String,
    /// What the peer must know too, on links whose peer comes over a network.
    pub secret: Secret,
}

impl Default for LinkOptions {
    fn default() -> Self {
        Self {
            window_bytes: WINDOW_BYTES,
            pages: Pages::default(),
            engine: EngineChoice::default(),
            #[cfg(feature = "ntb")]
            vfio: ::ntb::pci::vfio::Interface::default(),
            group: None,
            secret: Secret::none(),
            #[cfg(feature = "rdma")]
            rdma: super::rdma::RdmaOptions::default(),
            sysfs: PathBuf::from("/sys"),
            soft_name: "auto".to_owned(),
        }
    }
}

/// A link, and why it is this one.
#[derive(Debug)]
pub struct Opened {
    /// The link.
    pub link: Box<dyn Link>,
    /// One line: what was chosen, and why nothing better.
    pub chosen: String,
}

/// Opens the link that `address` names. A named transport is used exactly or refused.
///
/// [`Address::Auto`] takes the best that this version can drive: it looks for bridges and RDMA devices and says in
/// [`Opened::chosen`] why they were not taken. Without a host, or with one that is this machine, that is a soft link
/// called [`LinkOptions::soft_name`], or `auto-PORT`.
pub fn open(address: &Address, options: &LinkOptions) -> Result<Opened, LinkError> {
    match address {
        Address::Soft(name) => {
            let link = soft(name, options)?;
            Ok(Opened {
                link,
                chosen: format!("{address}: named by the user"),
            })
        }
        Address::Ntb(_) | Address::Emulated(_) => Ok(Opened {
            link: bridge(address, options)?,
            chosen: format!("{address}: named by the user"),
        }),
        Address::Rdma(host, port) => rdma(address, host, *port, options),
        Address::Tcp(..) => Err(not_built(address, "TCP")),
        Address::Auto(meeting) => auto(meeting.as_ref(), options),
    }
}

fn soft(name: &str, options: &LinkOptions) -> Result<Box<dyn Link>, LinkError> {
    let options = SoftOptions {
        window_bytes: options.window_bytes,
        pages: options.pages,
        group: options.group,
    };
    Ok(Box::new(SoftLink::open(name, &options)?))
}

#[cfg(feature = "ntb")]
fn bridge(address: &Address, options: &LinkOptions) -> Result<Box<dyn Link>, LinkError> {
    use super::ntb::{NtbLink, NtbOptions};
    let port = address
        .to_string()
        .parse()
        .map_err(|e: ::ntb::address::BadPortAddress| LinkError {
            name: "bad-address",
            exit: 2,
            what: e.to_string(),
            errno: None,
        })?;
    let mut ntb = NtbOptions {
        window_bytes: options.window_bytes,
        pages: options.pages,
        engine: options.engine,
        ..NtbOptions::default()
    };
    let root = options.sysfs.parent().unwrap_or(Path::new("/"));
    ntb.open.vfio.interface = options.vfio;
    ntb.open.machine = ::ntb::pci::machine::Machine::at(root);
    Ok(Box::new(NtbLink::open(&port, &ntb)?))
}

#[cfg(not(feature = "ntb"))]
fn bridge(address: &Address, _options: &LinkOptions) -> Result<Box<dyn Link>, LinkError> {
    Err(not_built(address, "bridges (NTB)"))
}

#[cfg(feature = "rdma")]
fn rdma(address: &Address, host: &str, port: u16, options: &LinkOptions) -> Result<Opened, LinkError> {
    let link = super::rdma::RdmaLink::open(host, port, &options.secret, &rdma_options(options))?;
    let leaves_by = link.port().map(ToString::to_string).unwrap_or_default();
    Ok(Opened {
        link: Box::new(link),
        chosen: format!("{address}: named by the user; by {leaves_by}"),
    })
}

#[cfg(feature = "rdma")]
fn rdma_options(options: &LinkOptions) -> super::rdma::RdmaOptions {
    super::rdma::RdmaOptions {
        window_bytes: options.window_bytes,
        pages: options.pages,
        sysfs: options.sysfs.clone(),
        ..options.rdma.clone()
    }
}

#[cfg(not(feature = "rdma"))]
fn rdma(address: &Address, _host: &str, _port: u16, _options: &LinkOptions) -> Result<Opened, LinkError> {
    Err(not_built(address, "RDMA"))
}

fn not_built(address: &Address, what: &str) -> LinkError {
    LinkError {
        name: "transport-not-built",
        exit: 3,
        what: format!(
            "{address} cannot be opened: links over {what} are not built in; between two processes of one machine \
             use soft:NAME"
        ),
        errno: None,
    }
}

fn auto(meeting: Option<&(String, u16)>, options: &LinkOptions) -> Result<Opened, LinkError> {
    let reasons = format!("{}; {}", no_bridge(&options.sysfs), no_rdma(options));
    let (name, here) = match meeting {
        None => (
            options.soft_name.clone(),
            "the peer is taken to be on this machine".to_owned(),
        ),
        Some((host, port)) if is_local(host)? => (format!("auto-{port}"), format!("{host} is this machine")),
        Some((host, _)) => {
            return Err(LinkError {
                name: "no-transport",
                exit: 3,
                what: format!(
                    "no way to {host}: {reasons}; links over TCP are not in this version, and a soft link reaches this \
                     machine only"
                ),
                errno: None,
            });
        }
    };
    Ok(Opened {
        link: soft(&name, options)?,
        chosen: format!("soft:{name}: {here}; {reasons}"),
    })
}

/// Whether `host` is this machine, by name or by one of its addresses.
fn is_local(host: &str) -> Result<bool, LinkError> {
    if host == "localhost" || rustix::system::uname().nodename().to_bytes() == host.as_bytes() {
        return Ok(true);
    }
    let addresses = (host, 0).to_socket_addrs().map_err(|e| LinkError {
        name: "no-such-host",
        exit: 4,
        what: format!("the address of host '{host}' cannot be found: {e}"),
        errno: e.raw_os_error(),
    })?;
    // Only an address of this machine can be bound.
    Ok(addresses
        .map(|a| a.ip())
        .any(|ip: IpAddr| UdpSocket::bind((ip, 0)).is_ok()))
}

/// Why there is no link over a bridge.
fn no_bridge(sysfs: &Path) -> String {
    match bridges(sysfs).as_slice() {
        [] => "no bridge (NTB) on this machine".to_owned(),
        [one, more @ ..] => {
            let and = match more.len() {
                0 => String::new(),
                n => format!(" and {n} more"),
            };
            format!("bridge {one}{and} not used, links over bridges are not in this version")
        }
    }
}

/// Why there is no link over RDMA.
#[cfg(feature = "rdma")]
fn no_rdma(options: &LinkOptions) -> String {
    use super::rdma::{Found, probe};
    match probe(&rdma_options(options), None) {
        Found::Usable(port) => format!(
            "RDMA device {} not used, name it with rdma:HOST:PORT",
            port.device
        ),
        Found::Unavailable(why) => format!("RDMA unavailable: {why}"),
    }
}

#[cfg(not(feature = "rdma"))]
fn no_rdma(_options: &LinkOptions) -> String {
    "RDMA not built in".to_owned()
}

/// Entries of a folder in order; none where it cannot be read.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Bridges that there are, such as `0000:81:00.0 (Intel 8086:347e)`.
fn bridges(sysfs: &Path) -> Vec<String> {
    let devices = sysfs.join("bus/pci/devices");
    names(&devices)
        .into_iter()
        .filter_map(|address| {
            let read = |file: &str| {
                let text = std::fs::read_to_string(devices.join(&address).join(file)).ok()?;
                u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
            };
            let (vendor, device) = (read("vendor")?, read("device")?);
            let family = family(vendor, device, read("class").unwrap_or(0))?;
            Some(format!("{address} ({family} {vendor:04x}:{device:04x})"))
        })
        .collect()
}

/// The family of bridges that a PCI function belongs to. Ids: Linux `drivers/ntb/hw`, and for switches the class of
/// their NTB endpoints.
fn family(vendor: u32, device: u32, class: u32) -> Option<&'static str> {
    const INTEL: [u32; 19] = [
        0x3725, 0x3726, 0x3727, // JSF
        0x3c0d, 0x3c0e, 0x3c0f, // SNB
        0x0e0d, 0x0e0e, 0x0e0f, // IVT
        0x2f0d, 0x2f0e, 0x2f0f, // HSX
        0x6f0d, 0x6f0e, 0x6f0f, // BDX
        0x201c, // SKX
        0x347e, // ICX, SPR
        0x0db4, // GNR
        0x7868, // DMR
    ];
    const AMD: [u32; 7] = [0x145b, 0x148b, 0x14c0, 0x14c3, 0x155a, 0x17d4, 0x17d7];
    const NTB_ENDPOINT_CLASS: u32 = 0x068000;
    match vendor {
        0x8086 if INTEL.contains(&device) => Some("Intel"),
        0x1022 if AMD.contains(&device) => Some("AMD"),
        0x1d94 if device == 0x145b => Some("Hygon"),
        0x11f8 | 0x1055 if class == NTB_ENDPOINT_CLASS => Some("Switchtec"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sysfs of our own, removed at the end.
    struct Sysfs(PathBuf);

    impl Sysfs {
        fn new(test: &str) -> Self {
            let path = std::env::temp_dir().join(format!("ntb-select-{}-{test}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn device(&self, address: &str, vendor: &str, device: &str, class: &str) {
            let folder = self.0.join("bus/pci/devices").join(address);
            std::fs::create_dir_all(&folder).unwrap();
            for (file, text) in [("vendor", vendor), ("device", device), ("class", class)] {
                std::fs::write(folder.join(file), format!("{text}\n")).unwrap();
            }
        }

        fn options(&self) -> LinkOptions {
            LinkOptions {
                window_bytes: 1 << 16,
                sysfs: self.0.clone(),
                ..LinkOptions::default()
            }
        }
    }

    impl Drop for Sysfs {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn parse(text: &str) -> Address {
        text.parse().unwrap()
    }

    #[test]
    fn auto_says_what_there_is_and_why_it_is_not_used() {
        let sysfs = Sysfs::new("auto");
        let none = open(&parse("auto"), &sysfs.options()).unwrap();
        assert_eq!(none.link.facts().address, "soft:auto");
        assert!(
            none.chosen.contains("no bridge (NTB) on this machine; RDMA "),
            "{}",
            none.chosen
        );

        sysfs.device("0000:00:1f.0", "0x8086", "0x1234", "0x060100");
        sysfs.device("0000:81:00.0", "0x8086", "0x347e", "0x068000");
        sysfs.device("0000:82:00.0", "0x11f8", "0x8546", "0x068000");
        sysfs.device("0000:83:00.0", "0x11f8", "0x8546", "0x058000");
        sysfs.device("0000:84:00.0", "junk", "", "");
        let some = open(&parse("auto:localhost:4711"), &sysfs.options()).unwrap();
        assert_eq!(some.link.facts().address, "soft:auto-4711");
        assert!(
            some.chosen.contains("0000:81:00.0 (Intel 8086:347e) and 1 more"),
            "{}",
            some.chosen
        );
        assert!(!some.chosen.contains('\n'));

        let named = LinkOptions {
            soft_name: format!("auto-named-{}", std::process::id()),
            ..sysfs.options()
        };
        let own = open(&parse("auto"), &named).unwrap();
        assert_eq!(own.link.facts().address, format!("soft:{}", named.soft_name));
    }

    #[test]
    fn this_machine_is_known_by_its_addresses() {
        for host in ["localhost", "127.0.0.1", "127.1.2.3"] {
            assert!(is_local(host).unwrap(), "{host}");
        }
        assert!(
            !is_local("192.0.2.1").unwrap(),
            "an address kept for documentation"
        );
        let sysfs = Sysfs::new("far");
        let e = open(&parse("auto:192.0.2.1:9"), &sysfs.options()).unwrap_err();
        assert_eq!((e.name, e.exit), ("no-transport", 3));
        assert!(e.what.contains("192.0.2.1"), "{e}");
    }

    #[test]
    fn a_named_transport_is_used_exactly_or_refused() {
        let options = LinkOptions::default();
        let e = open(&parse("tcp:h:1"), &options).unwrap_err();
        assert_eq!((e.name, e.exit), ("transport-not-built", 3));
        assert!(
            e.what.contains("tcp:h:1") && e.what.contains("not built in"),
            "{e}"
        );
        let nowhere = LinkOptions {
            sysfs: PathBuf::from("/nowhere"),
            ..LinkOptions::default()
        };
        let e = open(&parse("rdma:127.0.0.1:1"), &nowhere).unwrap_err();
        assert_eq!(e.exit, 3, "{e}");
        let (name, needle) = match cfg!(feature = "rdma") {
            true => ("rdma-unavailable", "RDMA unavailable: the kernel has no RDMA"),
            false => ("transport-not-built", "not built in"),
        };
        assert!(e.name == name && e.what.contains(needle), "{e}");
        let name = format!("soft:select-{}", std::process::id());
        let soft = open(&parse(&name), &options).unwrap();
        assert_eq!(soft.link.facts().address, name);
    }

    #[cfg(feature = "ntb")]
    #[test]
    fn bridges_that_are_not_there_are_named() {
        let sysfs = Sysfs::new("bridge");
        let e = open(&parse("ntb:0000:81:00.0"), &sysfs.options()).unwrap_err();
        assert_eq!((e.name, e.exit), ("no-device", 3), "{e}");
        assert!(e.what.contains("0000:81:00.0"), "{e}");
        let e = open(&parse("ntb:nowhere"), &sysfs.options()).unwrap_err();
        assert_eq!((e.name, e.exit), ("bad-address", 2), "{e}");
        assert!(e.what.contains("nowhere"), "{e}");
    }

    #[test]
    fn windows_that_cannot_be_are_refused_with_the_sizes() {
        for (bytes, exit) in [(0, 2), (63, 2), (u64::MAX, 2), ((1 << 40) + 64, 2)] {
            let options = LinkOptions {
                window_bytes: bytes,
                ..LinkOptions::default()
            };
            let e = open(&parse("soft:none"), &options).unwrap_err();
            assert_eq!(e.exit, exit, "{e}");
            assert!(e.what.contains(&bytes.to_string()), "{e}");
        }
    }
}
