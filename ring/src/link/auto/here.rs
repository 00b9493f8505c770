//! What this machine has for a link, and why not the rest.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::{Openers, offer::Offer};
use crate::{
    address::Address,
    link::{
        Link, LinkError, LinkKind, LinkState,
        select::{self, LinkOptions},
        tcp::TcpLink,
    },
};

/// How long a bridge is waited for to show that something is at its other end.
const CABLE: Duration = Duration::from_secs(1);

/// What there is, and how to open it.
pub(crate) struct Here<'a> {
    options: &'a LinkOptions,
    /// Where RDMA and TCP meet their peer.
    meeting: Option<(&'a str, u16)>,
    bridge: Option<Box<dyn Link>>,
}

impl<'a> Here<'a> {
    /// Looks for everything: opens a bridge where there is one, and asks for RDMA devices.
    pub(crate) fn look(options: &'a LinkOptions, meeting: Option<(&'a str, u16)>) -> (Self, Offer) {
        let mut here = Self {
            options,
            meeting,
            bridge: None,
        };
        let mut offer = Offer {
            pid: std::process::id(),
            uid: rustix::process::geteuid().as_raw(),
            window_bytes: options.window_bytes,
            machine: machine(),
            kinds: Vec::new(),
            reasons: Vec::new(),
            soft_name: None,
        };
        // The best that there is hardware for, usable or not: strictly, nothing else will do.
        let mut best = None;
        let mut note = |offer: &mut Offer, kind, found: Result<(), (bool, String)>| match found {
            Ok(()) => {
                best = best.or(Some(kind));
                offer.kinds.push(kind);
            }
            Err((is_there, why)) => {
                if is_there {
                    best = best.or(Some(kind));
                }
                offer.reasons.push((kind, why));
            }
        };
        let bridge = here.find_bridge();
        note(&mut offer, LinkKind::Ntb, bridge);
        let rdma = match select::no_rdma(options) {
            None if meeting.is_some() => Ok(()),
            None => Err((
                true,
                "RDMA needs an address to meet at: auto:HOST:PORT".to_owned(),
            )),
            Some(found) => Err(found),
        };
        note(&mut offer, LinkKind::Rdma, rdma);
        offer.kinds.push(LinkKind::Soft);
        if meeting.is_some() {
            offer.kinds.push(LinkKind::Tcp);
        }
        if options.strict {
            for kind in std::mem::take(&mut offer.kinds) {
                if Some(kind) == best {
                    offer.kinds.push(kind);
                } else if matches!(kind, LinkKind::Soft | LinkKind::Tcp) {
                    offer.reasons.push((
                        kind,
                        format!("{} only as a fall-back, and strictly there is none", kind.name()),
                    ));
                } else {
                    offer
                        .reasons
                        .push((kind, format!("{} is not the best here", kind.name())));
                }
            }
        }
        (here, offer)
    }

    /// Opens the first bridge. What there is otherwise: whether it is there, and what is wrong with it.
    fn find_bridge(&mut self) -> Result<(), (bool, String)> {
        let (address, about) = match &self.options.bridge {
            Some(address) => (address.clone(), address.to_string()),
            None => {
                let all = select::bridges(&self.options.sysfs);
                let Some((bdf, family)) = all.first() else {
                    return Err((false, "no bridge (NTB) on this machine".to_owned()));
                };
                let more = match all.len() {
                    1 => String::new(),
                    n => format!(" and {} more", n - 1),
                };
                (Address::Ntb(bdf.clone()), format!("{bdf} ({family}){more}"))
            }
        };
        match select::bridge(&address, self.options) {
            Ok(link) => {
                self.bridge = Some(link);
                Ok(())
            }
            Err(e) => Err((
                true,
                format!("bridge {about} cannot be used: {}", e.what.replace('\n', " ")),
            )),
        }
    }

    /// The bridge, once something is at its other end.
    pub(crate) fn take_bridge(&mut self) -> Result<Box<dyn Link>, LinkError> {
        let Some(mut link) = self.bridge.take() else {
            return Err(LinkError {
                name: "no-device",
                exit: 3,
                what: "no bridge (NTB) to be had any more".to_owned(),
                errno: None,
            });
        };
        let start = Instant::now();
        while link.poll()?.state == LinkState::CableDown {
            if start.elapsed() >= CABLE {
                return Err(LinkError {
                    name: "cable-down",
                    exit: 4,
                    what: format!(
                        "bridge {}: cable down, or nothing runs at its other end",
                        link.facts().address
                    ),
                    errno: None,
                });
            }
            link.wait(Duration::from_millis(5));
        }
        Ok(link)
    }
}

impl Openers for Here<'_> {
    fn open(&mut self, kind: LinkKind, soft_name: &str) -> Result<Box<dyn Link>, LinkError> {
        match (kind, self.meeting) {
            (LinkKind::Ntb, _) => self.take_bridge(),
            (LinkKind::Rdma, Some((host, port))) => {
                // The meeting goes on at its port: RDMA meets at the next.
                let port = port.checked_add(1).unwrap_or(port - 1);
                select::open(&Address::Rdma(host.to_owned(), port, String::new()), self.options)
                    .map(|opened| opened.link)
            }
            _ => select::soft(soft_name, self.options),
        }
    }

    fn open_tcp(&mut self) -> Result<TcpLink, LinkError> {
        let (host, port) = self.meeting.unwrap_or_default();
        TcpLink::for_meeting(
            Address::Tcp(host.to_owned(), port).to_string(),
            &select::tcp_options(self.options),
        )
    }
}

/// The same number in processes that can meet on an abstract socket: same boot of the same machine, same network namespace.
fn machine() -> u64 {
    let mut hash = Sha256::new();
    hash.update(std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default());
    let namespace = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    hash.update(namespace.as_os_str().as_encoded_bytes());
    let [a, b, c, d, e, f, g, h, ..]: [u8; 32] = hash.finalize().into();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}
