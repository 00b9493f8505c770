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

use sha2::{Digest, Sha256};

use super::{Openers, bridges::Bridges, offer::Offer};
use crate::{
    address::Address,
    link::{
        Link, LinkError, LinkKind,
        select::{self, LinkOptions},
        tcp::TcpLink,
    },
};

/// What there is, and how to open it.
pub(crate) struct Here<'a> {
    options: &'a LinkOptions,
    /// Where RDMA and TCP meet their peer.
    meeting: Option<(&'a str, u16)>,
    bridges: Bridges,
}

impl<'a> Here<'a> {
    /// Looks for everything: opens the bridges that there are, and asks for RDMA devices.
    pub(crate) fn look(options: &'a LinkOptions, meeting: Option<(&'a str, u16)>) -> (Self, Offer) {
        let mut here = Self {
            options,
            meeting,
            bridges: Bridges::default(),
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
        let bridge = here.find_bridges();
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

    /// Opens every bridge that can be used. What there is otherwise: whether there is one, and what is wrong.
    fn find_bridges(&mut self) -> Result<(), (bool, String)> {
        self.bridges = Bridges::open(self.options)?;
        Ok(())
    }

    /// The first bridge that has something at its other end; all others are given back.
    pub(crate) fn take_bridge(&mut self) -> Result<Box<dyn Link>, LinkError> {
        std::mem::take(&mut self.bridges).connected()
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
