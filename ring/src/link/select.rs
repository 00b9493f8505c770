//! From an address to a link.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use ntb_mem::region::Pages;

use super::{
    Link, LinkError, LinkKind,
    auth::{Purpose, Secret},
    auto::{AutoLink, here::Here},
    ends::WINDOW_BYTES,
    engine::EngineChoice,
    meet::Place,
    soft::{SoftLink, SoftOptions},
    tcp::{TcpLink, TcpOptions},
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
    /// With [`Address::Auto`]: only the best transport that this machine has hardware for will do, a bridge or else an RDMA
    /// device; an error otherwise.
    pub strict: bool,
    /// Bridge that [`Address::Auto`] looks at. By default every one of the machine that can be used: the first that has
    /// something at its other end is taken. Where cables join several bridges of the same two hosts, name one.
    pub bridge: Option<Address>,
    /// How long [`Address::Auto`] with a host waits for the other end to choose with; 90 s by default.
    pub meet_within: Duration,
    /// How long the kernel polls the network device for a TCP link: [`TcpOptions::busy_poll`].
    pub busy_poll: Option<Duration>,
}

impl Default for LinkOptions {
    fn default() -> Self {
        Self {
            window_bytes: WINDOW_BYTES,
            pages: Pages::default(),
            engine: EngineChoice::default(),
            group: None,
            secret: Secret::none(),
            strict: false,
            bridge: None,
            meet_within: Duration::from_secs(90),
            #[cfg(feature = "rdma")]
            rdma: super::rdma::RdmaOptions::default(),
            sysfs: PathBuf::from("/sys"),
            soft_name: "auto".to_owned(),
            busy_poll: None,
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
    /// Where both ends chose by [`Address::Auto`] and this one called: what a round trip over TCP took at the most when they
    /// met, with threads that sleep and proofs to be made. A link that costs more stands in the wrong place of the order.
    pub tcp_round_trip: Option<Duration>,
}

impl Opened {
    fn of(link: Box<dyn Link>, chosen: String) -> Self {
        Self {
            link,
            chosen,
            tcp_round_trip: None,
        }
    }
}

/// Opens the link that `address` names. A named transport is used exactly or refused.
///
/// [`Address::Auto`] takes the best that there is, and says in [`Opened::chosen`] why nothing better. Without a host that is
/// a bridge with something at its other end, or else a soft link called [`LinkOptions::soft_name`]. With a host the other
/// end is waited for, as long as [`LinkOptions::meet_within`], and both choose the first of bridge, RDMA, soft (on one
/// machine) and TCP that both have. All others return at once; the peer may come later.
pub fn open(address: &Address, options: &LinkOptions) -> Result<Opened, LinkError> {
    open_while(address, options, &mut || true)
}

/// As [`open`], given up when `go_on`, called every few milliseconds while the other end is waited for, returns false.
pub fn open_while(
    address: &Address,
    options: &LinkOptions,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<Opened, LinkError> {
    let named = || format!("{address}: named by the user");
    match address {
        Address::Soft(name) => Ok(Opened::of(soft(name, options)?, named())),
        Address::Ntb(_) | Address::Emulated(_) => Ok(Opened::of(bridge(address, options)?, named())),
        Address::Rdma(host, port, more) => rdma(address, (host, *port), more, options),
        Address::Tcp(host, port) => Ok(Opened::of(tcp(host, *port, options)?, named())),
        Address::Auto(meeting) => auto(meeting.as_ref(), options, go_on),
    }
}

pub(super) fn soft(name: &str, options: &LinkOptions) -> Result<Box<dyn Link>, LinkError> {
    let options = SoftOptions {
        window_bytes: options.window_bytes,
        pages: options.pages,
        group: options.group,
    };
    Ok(Box::new(SoftLink::open(name, &options)?))
}

fn tcp(host: &str, port: u16, options: &LinkOptions) -> Result<Box<dyn Link>, LinkError> {
    Ok(Box::new(TcpLink::open(host, port, &tcp_options(options))?))
}

pub(super) fn tcp_options(options: &LinkOptions) -> TcpOptions {
    TcpOptions {
        window_bytes: options.window_bytes,
        pages: options.pages,
        secret: options.secret.clone(),
        busy_poll: options.busy_poll,
    }
}

#[cfg(feature = "ntb")]
pub(super) fn bridge(address: &Address, options: &LinkOptions) -> Result<Box<dyn Link>, LinkError> {
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
    ntb.open.machine = machine(options);
    Ok(Box::new(NtbLink::open(&port, &ntb)?))
}

/// The machine whose sysfs the options name.
#[cfg(feature = "ntb")]
pub(super) fn machine(options: &LinkOptions) -> ::ntb::pci::machine::Machine {
    ::ntb::pci::machine::Machine::at(options.sysfs.parent().unwrap_or(Path::new("/")))
}

#[cfg(not(feature = "ntb"))]
pub(super) fn bridge(address: &Address, _options: &LinkOptions) -> Result<Box<dyn Link>, LinkError> {
    Err(not_built(address, "bridges (NTB)"))
}

#[cfg(feature = "rdma")]
fn rdma(
    address: &Address,
    (host, port): (&str, u16),
    more: &str,
    options: &LinkOptions,
) -> Result<Opened, LinkError> {
    let rdma = rdma_options(options).with(more).map_err(|e| LinkError {
        what: format!("{address}: {}", e.what),
        ..e
    })?;
    let link = super::rdma::RdmaLink::open(host, port, &options.secret, &rdma)?;
    let leaves_by = link.port().map(ToString::to_string).unwrap_or_default();
    let chosen = format!("{address}: named by the user; by {leaves_by}; {rdma}");
    Ok(Opened::of(Box::new(link), chosen))
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
fn rdma(
    address: &Address,
    _at: (&str, u16),
    _more: &str,
    _options: &LinkOptions,
) -> Result<Opened, LinkError> {
    Err(not_built(address, "RDMA"))
}

#[cfg(not(all(feature = "ntb", feature = "rdma")))]
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

fn auto(
    meeting: Option<&(String, u16)>,
    options: &LinkOptions,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<Opened, LinkError> {
    let at = meeting.map(|(host, port)| (host.as_str(), *port));
    let (mut here, offer) = Here::look(options, at);
    let reasons: Vec<_> = offer.reasons.iter().map(|(_, why)| why.clone()).collect();
    let nothing = |reasons: &[String]| LinkError {
        name: "no-transport",
        exit: 3,
        what: format!(
            "no transport can be had that would do, strictly: {}",
            reasons.join("; ")
        ),
        errno: None,
    };
    if offer.kinds.is_empty() {
        return Err(nothing(&reasons));
    }
    if let Some((host, port)) = at {
        let place =
            Place::new(Purpose::Auto, host, port, &options.secret, options.busy_poll).map_err(|e| {
                LinkError {
                    what: format!("{}; looked for here: {}", e.what, reasons.join("; ")),
                    ..e
                }
            })?;
        let (link, chosen) = AutoLink::meet(place, offer, &mut here, options.meet_within, go_on)?;
        return Ok(Opened {
            tcp_round_trip: link.tcp_round_trip(),
            link: Box::new(link),
            chosen,
        });
    }
    let mut reasons = reasons;
    if offer.kinds.contains(&LinkKind::Ntb) {
        match here.take_bridge() {
            Ok(link) => {
                let chosen = format!("{}: the best there is", link.facts().address);
                return Ok(Opened::of(link, chosen));
            }
            Err(e) => reasons.insert(0, e.what),
        }
    }
    if !offer.kinds.contains(&LinkKind::Soft) {
        return Err(nothing(&reasons));
    }
    let name = &options.soft_name;
    let chosen = format!(
        "soft:{name}: the peer is taken to be on this machine; {}",
        reasons.join("; ")
    );
    Ok(Opened::of(soft(name, options)?, chosen))
}

/// Why RDMA cannot be used here; `None` when it can.
pub fn rdma_unavailable(options: &LinkOptions) -> Option<String> {
    no_rdma(options).map(|(_, why)| why)
}

/// Why there is no link over RDMA, and whether there is a device for it all the same.
#[cfg(feature = "rdma")]
pub(super) fn no_rdma(options: &LinkOptions) -> Option<(bool, String)> {
    use super::rdma::{Found, probe};
    match probe(&rdma_options(options), None) {
        Found::Usable(_) => None,
        Found::Unavailable(why) => {
            let device = names(&options.sysfs.join("class/infiniband")).into_iter().next();
            Some((device.is_some(), format!("RDMA unavailable: {why}")))
        }
    }
}

#[cfg(not(feature = "rdma"))]
pub(super) fn no_rdma(options: &LinkOptions) -> Option<(bool, String)> {
    Some(match names(&options.sysfs.join("class/infiniband")).first() {
        None => (false, "no RDMA device, and RDMA not built in".to_owned()),
        Some(device) => (true, format!("RDMA device {device} not used: RDMA not built in")),
    })
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
            let folder = self.0.join("sys/bus/pci/devices").join(address);
            std::fs::create_dir_all(&folder).unwrap();
            let files = [
                ("vendor", vendor),
                ("device", device),
                ("class", class),
                ("revision", "0x10"),
            ];
            for (file, text) in files {
                std::fs::write(folder.join(file), format!("{text}\n")).unwrap();
            }
        }

        fn options(&self) -> LinkOptions {
            LinkOptions {
                window_bytes: 1 << 16,
                sysfs: self.0.join("sys"),
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
        let some = open(&parse("auto"), &sysfs.options()).unwrap();
        assert_eq!(some.link.facts().kind, LinkKind::Soft);
        // Every one, and no other function.
        for bridge in [
            "bridge 0000:81:00.0 (intel-spr 8086:347e) cannot be used: ntb:0000:81:00.0: ",
            "; bridge 0000:82:00.0 (NTB 11f8:8546) cannot be used: Switchtec",
        ] {
            let told = cfg!(feature = "ntb") == some.chosen.contains(bridge);
            assert!(told, "{}", some.chosen);
        }
        assert!(!some.chosen.contains("0000:83:00.0") && !some.chosen.contains('\n'));

        let named = LinkOptions {
            soft_name: format!("auto-named-{}", std::process::id()),
            ..sysfs.options()
        };
        let own = open(&parse("auto"), &named).unwrap();
        assert_eq!(own.link.facts().address, format!("soft:{}", named.soft_name));
    }

    #[test]
    fn strictly_nothing_less_than_the_best_will_do() {
        let sysfs = Sysfs::new("strict");
        let strict = |sysfs: &Sysfs| LinkOptions {
            strict: true,
            meet_within: Duration::from_millis(50),
            ..sysfs.options()
        };
        for text in ["auto", "auto:127.0.0.1:4711"] {
            let e = open(&parse(text), &strict(&sysfs)).unwrap_err();
            assert_eq!((e.name, e.exit), ("no-transport", 3), "{e}");
            assert!(
                e.what.contains("no bridge (NTB)") && e.what.contains("RDMA"),
                "{e}"
            );
        }
        sysfs.device("0000:81:00.0", "0x8086", "0x347e", "0x068000");
        let e = open(&parse("auto"), &strict(&sysfs)).unwrap_err();
        assert_eq!(e.name, "no-transport", "{e}");
        let told = "0000:81:00.0 (intel-spr 8086:347e) cannot be used";
        assert_eq!(e.what.contains(told), cfg!(feature = "ntb"), "{e}");
    }

    #[test]
    fn a_network_needs_a_secret_for_the_choice_too() {
        let sysfs = Sysfs::new("far");
        let e = open(&parse("auto:192.0.2.1:9"), &sysfs.options()).unwrap_err();
        assert_eq!((e.name, e.exit), ("secret-needed", 6));
        assert!(
            e.what.contains("192.0.2.1") && e.what.contains("no bridge (NTB)"),
            "{e}"
        );
    }

    #[test]
    fn both_ends_choose_by_the_address_that_both_are_given() {
        let sysfs = Sysfs::new("meet");
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let address = parse(&format!("auto:127.0.0.1:{port}"));
        let (a, b) = std::thread::scope(|scope| {
            let one = || scope.spawn(|| open(&address, &sysfs.options()).unwrap());
            let (a, b) = (one(), one());
            (a.join().unwrap(), b.join().unwrap())
        });
        assert_eq!(a.link.facts().kind, LinkKind::Soft);
        assert_eq!(a.link.facts().address, b.link.facts().address);
        assert!(
            a.chosen.contains("no bridge (NTB) on this machine") && !a.chosen.contains('\n'),
            "{}",
            a.chosen
        );
    }

    #[test]
    fn a_named_transport_is_used_exactly_or_refused() {
        let options = LinkOptions::default();
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
