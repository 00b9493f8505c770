//! The bridges of this machine that a choice may fall on.

use std::time::{Duration, Instant};

use crate::{
    address::Address,
    link::{
        Link, LinkError, LinkState,
        select::{self, LinkOptions},
    },
};

/// How long bridges are waited for to show that something is at the other end of one.
const CABLE: Duration = Duration::from_secs(1);
/// How long those of lower address may come up later than the one that was first: where two cables join the same two hosts,
/// both ends take the same.
const TIE: Duration = Duration::from_millis(50);

/// A bridge that there is.
struct Candidate {
    address: Address,
    about: String,
    /// Why it is not worth opening.
    unusable: Option<&'static str>,
}

/// Those that could be opened, in the order of their addresses, and what is wrong with the others.
#[derive(Default)]
pub(super) struct Bridges {
    links: Vec<Box<dyn Link>>,
    refused: Vec<String>,
}

impl Bridges {
    /// Opens every bridge that can be used, or the one that the options name. Without any: whether there is one, and what is
    /// wrong with each.
    pub(super) fn open(options: &LinkOptions) -> Result<Self, (bool, String)> {
        let candidates = match &options.bridge {
            Some(address) => vec![Candidate {
                address: address.clone(),
                about: address.to_string(),
                unusable: None,
            }],
            None => candidates(options)?,
        };
        let mut all = Self::default();
        for candidate in candidates {
            let opened = match candidate.unusable {
                Some(why) => Err(why.to_owned()),
                None => select::bridge(&candidate.address, options).map_err(|e| e.what),
            };
            match opened {
                Ok(link) => all.links.push(link),
                Err(why) => {
                    let why = why.replace('\n', " ");
                    all.refused
                        .push(format!("bridge {} cannot be used: {why}", candidate.about));
                }
            }
        }
        match all.links.is_empty() {
            true => Err((true, all.refused.join("; "))),
            false => Ok(all),
        }
    }

    /// The first that has something at its other end; the others are closed.
    pub(super) fn connected(self) -> Result<Box<dyn Link>, LinkError> {
        let Self {
            mut links,
            mut refused,
        } = self;
        let start = Instant::now();
        let mut up_since = None;
        let mut failed = None;
        loop {
            let mut up = None;
            let mut lowest = true;
            let mut index = 0;
            while let Some(link) = links.get_mut(index) {
                match link.poll() {
                    Ok(status) if status.state != LinkState::CableDown => {
                        up = Some(index);
                        break;
                    }
                    Ok(_) => {
                        lowest = false;
                        index += 1;
                    }
                    Err(e) => {
                        refused.push(format!("bridge {}: {}", link.facts().address, e.what));
                        failed = Some(e);
                        drop(links.remove(index));
                    }
                }
            }
            if let Some(index) = up {
                let since = *up_since.get_or_insert_with(Instant::now);
                if lowest || since.elapsed() >= TIE {
                    return Ok(links.swap_remove(index));
                }
            }
            let last = match links.first() {
                None => return Err(failed.unwrap_or_else(none_left)),
                Some(first) => first,
            };
            if up.is_none() && start.elapsed() >= CABLE {
                let silent = links.iter().map(|link| {
                    format!(
                        "bridge {}: cable down, or nothing runs at its other end",
                        link.facts().address
                    )
                });
                let what: Vec<_> = silent.chain(refused).collect();
                return Err(LinkError {
                    name: "cable-down",
                    exit: 4,
                    what: what.join("; "),
                    errno: None,
                });
            }
            last.wait(Duration::from_millis(5));
        }
    }
}

/// What there is to say when there was nothing to begin with.
fn none_left() -> LinkError {
    LinkError {
        name: "no-device",
        exit: 3,
        what: "no bridge (NTB) to be had any more".to_owned(),
        errno: None,
    }
}

/// All bridges that the driver knows.
#[cfg(feature = "ntb")]
fn candidates(options: &LinkOptions) -> Result<Vec<Candidate>, (bool, String)> {
    use ::ntb::hw::Family;
    let all: Vec<_> = select::machine(options)
        .bridges()
        .iter()
        .filter_map(|device| {
            let id = device.identity()?;
            let bdf = device.address();
            let family = Family::of(&id).map_or("NTB", Family::name);
            Some(Candidate {
                address: Address::Ntb(bdf.to_string()),
                about: format!("{bdf} ({family} {:04x}:{:04x})", id.vendor, id.device),
                unusable: Family::why_unsupported(&id),
            })
        })
        .collect();
    match all.is_empty() {
        true => Err((false, "no bridge (NTB) on this machine".to_owned())),
        false => Ok(all),
    }
}

#[cfg(not(feature = "ntb"))]
fn candidates(_options: &LinkOptions) -> Result<Vec<Candidate>, (bool, String)> {
    Err((
        false,
        "no bridge (NTB): links over them are not built in".to_owned(),
    ))
}

#[cfg(test)]
mod tests {
    use ntb_mem::line::LINE_BYTES;

    use super::*;
    use crate::link::pair::{PairLink, PairOptions, pair};

    /// Bridges with windows of 1, 2, 3 and so on units, those connected that are said to be; and their other ends.
    fn bridges(connected: &[bool]) -> (Bridges, Vec<PairLink>) {
        let mut all = Bridges {
            links: Vec::new(),
            refused: vec!["bridge 0000:84:00.0 cannot be used: no group".to_owned()],
        };
        let mut far = Vec::new();
        for (units, connected) in (1..).zip(connected) {
            let options = PairOptions {
                window_bytes: units << 16,
                ..PairOptions::default()
            };
            let (a, b) = pair(&options).unwrap();
            if !connected {
                a.control().cut();
            }
            all.links.push(Box::new(a));
            far.push(b);
        }
        (all, far)
    }

    #[test]
    fn the_first_that_is_connected_is_taken_and_the_others_are_left() {
        for (connected, units) in [
            (&[true, true][..], 1),
            (&[false, true], 2),
            (&[false, false, true], 3),
            (&[false, true, true], 2),
        ] {
            let (all, mut far) = bridges(connected);
            let taken = all.connected().unwrap();
            assert_eq!(
                taken.inbound().lines(),
                (units << 16) / LINE_BYTES as u64,
                "{connected:?}"
            );
            for (i, end) in (1..).zip(&mut far) {
                let state = end.poll().unwrap().state;
                assert_eq!(state != LinkState::CableDown, i == units, "{connected:?} {i}");
            }
        }
    }

    #[test]
    fn nothing_at_any_other_end_names_every_bridge() {
        let (all, _far) = bridges(&[false, false]);
        let e = all.connected().unwrap_err();
        assert_eq!((e.name, e.exit), ("cable-down", 4), "{e}");
        assert_eq!(e.what.matches("cable down").count(), 2, "{e}");
        assert!(e.what.contains("0000:84:00.0 cannot be used: no group"), "{e}");
        let (none, _) = bridges(&[]);
        assert_eq!(none.connected().unwrap_err().name, "no-device");
    }
}
