//! Two ends that choose a transport together: they meet at `HOST:PORT`, prove the secret, tell each other what they have,
//! and take the best that both have.
//!
//! A transport that depends on more than this machine, a bridge or RDMA, is tried before it is settled on: each end says whether it
//! is connected with the other, and if either is not, both strike it and choose again.
//!
//! The stream of the meeting is kept. Where TCP is chosen it becomes the link; otherwise its end tells that the
//! peer has gone, and this side looks for the next one at the same place. The transport stays the one it was: who
//! comes later is told it, and is refused if it cannot be had there.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

mod bridges;
pub(crate) mod here;
pub mod offer;
#[cfg(test)]
mod tests;
mod trial;

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use ntb_mem::{line::LINE_BYTES, region::View};
use rustix::event::{PollFd, Timespec};

use super::{
    Doorbell, Link, LinkError, LinkEvent, LinkFacts, LinkKind, LinkStatus, Pump, Registers,
    engine::{Engine, Order},
    meet::{Arrival, Guest, Meeting, Met, Place},
    tcp::TcpLink,
};
use offer::{Answer, Offer, Refusal};
use trial::Trial;

/// How long the meeting goes unlooked-at while the link is served.
const LOOK: Duration = Duration::from_millis(20);
/// Longest sleep while nobody has come yet.
const NAP: Duration = Duration::from_millis(50);

/// What this end has, and how it opens what was chosen.
pub(crate) trait Openers {
    /// Makes the link of the chosen transport; `soft_name` is the name for soft links.
    fn open(&mut self, kind: LinkKind, soft_name: &str) -> Result<Box<dyn Link>, LinkError>;
    /// How long a bridge or RDMA may take until both ends are connected. RDMA goes around an rdma_cm that is silent after
    /// five seconds.
    fn patience(&self) -> Duration {
        Duration::from_secs(15)
    }
    /// Makes the link over TCP whose streams come from the meeting.
    fn open_tcp(&mut self) -> Result<TcpLink, LinkError>;
}

#[derive(Debug)]
enum Inner {
    Tcp(Box<TcpLink>),
    Other(Box<dyn Link>),
}

/// A link whose transport both ends have chosen.
#[derive(Debug)]
pub(crate) struct AutoLink {
    meeting: Meeting,
    inner: Inner,
    /// What was settled: one transport, and the name where it is a soft link.
    settled: Offer,
    /// The stream of the meeting, where it is not the link.
    presence: Option<Met>,
    /// The link over TCP had a peer when last looked at.
    had_peer: bool,
    round_trip: Option<Duration>,
    events: VecDeque<LinkEvent>,
}

/// What came of one arrival.
#[allow(clippy::large_enum_variant, reason = "lives for a moment")]
enum Settled {
    /// The stream, the transport, and the peer's word on itself.
    With(Met, LinkKind, Offer, Vec<String>),
    /// Who came was told that there is nothing in common, and this is why.
    NothingInCommon(String),
    Not,
}

impl AutoLink {
    /// Meets the peer, within `patience` and for as long as `go_on` says so, and opens what both choose. Gives the link and
    /// why it is this one.
    pub(crate) fn meet(
        place: Place,
        mut mine: Offer,
        openers: &mut dyn Openers,
        patience: Duration,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<(Self, String), LinkError> {
        let mut meeting = Meeting::new(place);
        let until = Instant::now().checked_add(patience);
        // Made first, since its memory may be larger than what was asked for.
        let mut tcp = match mine.kinds.contains(&LinkKind::Tcp) {
            true => Some(openers.open_tcp()?),
            false => None,
        };
        if let Some(link) = &tcp {
            mine.window_bytes = link.inbound().lines() * LINE_BYTES as u64;
        }
        if mine.soft_name.is_none() {
            mine.soft_name = Some(format!("auto-{}-{:016x}", mine.pid, random()?));
        }
        loop {
            let (met, kind, theirs, why) = agree(&mut meeting, &mine, until, go_on)?;
            let round_trip = met.round_trip;
            // The name is that of the side that was called, unless the other had settled on one before.
            let called = match meeting.was_called() {
                true => mine.soft_name.clone(),
                false => theirs.soft_name.clone(),
            };
            let name = theirs.settled_name().or(called).unwrap_or_default();
            let (inner, presence) = match kind {
                LinkKind::Tcp => {
                    let mut link = tcp.take().map_or_else(|| openers.open_tcp(), Ok)?;
                    link.adopt(met.stream, theirs.window_bytes);
                    (Inner::Tcp(Box::new(link)), None)
                }
                LinkKind::Soft => (Inner::Other(openers.open(kind, &name)?), Some(met)),
                LinkKind::Ntb | LinkKind::Rdma => {
                    let end = Instant::now() + openers.patience();
                    let end = until.map_or(end, |until| end.min(until));
                    match trial::run(openers.open(kind, &name), met, end, go_on) {
                        Trial::Works(link, met) => (Inner::Other(link), Some(met)),
                        // It looked usable and is not: both know, and choose again.
                        Trial::Fails(why) => {
                            mine.kinds.retain(|k| *k != kind);
                            mine.reasons.push((kind, why));
                            meeting.again();
                            continue;
                        }
                        Trial::PeerGone => {
                            meeting.again();
                            continue;
                        }
                    }
                }
            };
            mine.kinds = vec![kind];
            mine.soft_name = Some(name);
            let had_peer = kind == LinkKind::Tcp;
            let mut link = Self {
                meeting,
                inner,
                settled: mine,
                presence,
                had_peer,
                round_trip,
                events: VecDeque::new(),
            };
            let why = match why.as_slice() {
                [] => "the best there is".to_owned(),
                why => why.join("; "),
            };
            let address = link.facts().address;
            let chosen = format!("{address}: chosen with the peer, process {}; {why}", theirs.pid);
            link.events.push_back(LinkEvent::Transport {
                name: "transport-chosen",
                why: chosen.clone(),
            });
            return Ok((link, chosen));
        }
    }

    /// What a round trip took over the stream of the meeting, at the most: [`Met::round_trip`].
    pub(crate) fn tcp_round_trip(&self) -> Option<Duration> {
        self.round_trip
    }

    fn link(&self) -> &dyn Link {
        match &self.inner {
            Inner::Tcp(link) => &**link,
            Inner::Other(link) => &**link,
        }
    }

    fn link_mut(&mut self) -> &mut dyn Link {
        match &mut self.inner {
            Inner::Tcp(link) => &mut **link,
            Inner::Other(link) => &mut **link,
        }
    }

    /// Notices that the stream of the meeting has ended, and looks for whoever comes next.
    fn check_presence(&mut self) {
        if let Some(met) = &mut self.presence {
            let gone = match met.opener.next(&mut met.stream) {
                Ok(None) => false,
                // Of one that has come later: its word on what was settled long ago.
                Ok(Some(said)) => offer::Word::decode(&said).is_err(),
                Err(_) => true,
            };
            if gone {
                self.presence = None;
                self.meeting.again();
            }
        }
        if let Inner::Tcp(link) = &self.inner {
            let has_peer = link.has_peer();
            if self.had_peer && !has_peer {
                self.meeting.again();
            }
            self.had_peer = has_peer;
        }
    }

    fn take(&mut self, settled: Settled) {
        let (mut met, kind, theirs) = match settled {
            Settled::With(met, kind, theirs, _) => (met, kind, theirs),
            Settled::NothingInCommon(why) => {
                let name = "no-transport-in-common";
                self.events.push_back(LinkEvent::Transport { name, why });
                return;
            }
            Settled::Not => return,
        };
        self.events.push_back(LinkEvent::Transport {
            name: "transport-agreed",
            why: format!("{} with process {}, as before", kind.name(), theirs.pid),
        });
        match &mut self.inner {
            Inner::Tcp(link) => {
                link.adopt(met.stream, theirs.window_bytes);
                self.had_peer = true;
            }
            Inner::Other(_) => {
                if matches!(kind, LinkKind::Ntb | LinkKind::Rdma) {
                    trial::say(&mut met, &offer::Word::Works);
                }
                self.presence = Some(met);
            }
        }
    }
}

impl Offer {
    /// The name that it has settled on: an end that has nothing but soft links left.
    fn settled_name(&self) -> Option<String> {
        (self.kinds == [LinkKind::Soft])
            .then(|| self.soft_name.clone())
            .flatten()
    }
}

/// Waits for somebody to choose with.
fn agree(
    meeting: &mut Meeting,
    mine: &Offer,
    until: Option<Instant>,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<(Met, LinkKind, Offer, Vec<String>), LinkError> {
    let start = Instant::now();
    let address = meeting.place().address.clone();
    loop {
        for arrival in meeting.poll(&mine.encode())? {
            let settled = match arrival {
                Arrival::Guest(guest, said) => answer(guest, &said, mine, None),
                Arrival::Host(met, said) => match heard(meeting, mine, &said, &address)? {
                    Some((kind, theirs, why)) => Settled::With(met, kind, theirs, why),
                    None => Settled::Not,
                },
            };
            match settled {
                Settled::With(met, kind, theirs, why) => return Ok((met, kind, theirs, why)),
                Settled::NothingInCommon(why) => {
                    return Err(nothing_in_common(&address, "as this side sees it", &why));
                }
                Settled::Not => {}
            }
        }
        let interrupted = !go_on();
        if interrupted || until.is_some_and(|until| Instant::now() >= until) {
            return Err(LinkError {
                name: if interrupted { "interrupted" } else { "no-peer" },
                exit: 4,
                what: format!(
                    "{address}: nobody has come within {:.1} s to choose a transport with{}; looked for here: {}; start the \
                     other end with the same address",
                    start.elapsed().as_secs_f64(),
                    meeting
                        .news_of_strangers()
                        .map_or_else(String::new, |news| format!(" ({news})")),
                    looked_for(mine)
                ),
                errno: None,
            });
        }
        let (fds, limit) = meeting.wakers();
        let mut fds: Vec<_> = fds
            .iter()
            .map(|(fd, flags)| PollFd::from_borrowed_fd(*fd, *flags))
            .collect();
        let time = Timespec {
            tv_sec: 0,
            tv_nsec: limit.unwrap_or(NAP).min(NAP).subsec_nanos().into(),
        };
        let _ = rustix::event::poll(&mut fds, Some(&time));
    }
}

fn nothing_in_common(address: &str, who: &str, why: &str) -> LinkError {
    LinkError {
        name: "no-transport-in-common",
        exit: 3,
        what: format!("{address}: the two ends have no transport in common; {who}: {why}"),
        errno: None,
    }
}

/// A number that nobody else has.
fn random() -> Result<u64, LinkError> {
    let mut bytes = [0; 8];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(8) => Ok(u64::from_ne_bytes(bytes)),
        other => Err(LinkError {
            name: "no-random",
            exit: 6,
            what: "the system has no random numbers to give".to_owned(),
            errno: other.err().map(|e| e.raw_os_error()),
        }),
    }
}

/// What this end has not, in one line.
fn looked_for(mine: &Offer) -> String {
    let why: Vec<_> = mine.reasons.iter().map(|(_, why)| why.as_str()).collect();
    let have: Vec<_> = mine.kinds.iter().map(|k| k.name()).collect();
    let have = format!("to be had: {}", have.join(", "));
    [&why[..], &[have.as_str()]].concat().join("; ")
}

/// Chooses with somebody who called here, and answers.
fn answer(guest: Guest, said: &[u8], mine: &Offer, busy: Option<bool>) -> Settled {
    let refuse = |guest: Guest, why, text: String| {
        let _ = guest.answer(&Answer::Refused(why, text).encode());
        Settled::Not
    };
    let theirs = match offer::decode(said) {
        Ok(theirs) => theirs,
        Err(e) => return refuse(guest, Refusal::Unfit, e.to_string()),
    };
    if busy == Some(true) {
        return refuse(guest, Refusal::Taken, String::new());
    }
    let (chosen, why) = mine.choose(&theirs);
    let Some(kind) = chosen else {
        let why = why.join("; ");
        let _ = refuse(guest, Refusal::NothingInCommon, why.clone());
        return Settled::NothingInCommon(why);
    };
    let mut about = mine.clone();
    if let (LinkKind::Soft, Some(name)) = (kind, theirs.settled_name()) {
        about.soft_name = Some(name);
    }
    match guest.answer(&Answer::Agreed(kind, about).encode()) {
        Some(met) => Settled::With(met, kind, theirs, why),
        None => Settled::Not,
    }
}

/// Takes up what the end that was called has chosen: it must be what this end chooses too.
fn heard(
    meeting: &mut Meeting,
    mine: &Offer,
    said: &[u8],
    address: &str,
) -> Result<Option<(LinkKind, Offer, Vec<String>)>, LinkError> {
    let error = |name, exit, what: String| LinkError {
        name,
        exit,
        what: format!("{address}: {what}"),
        errno: None,
    };
    match Answer::decode(said) {
        Ok(Answer::Agreed(kind, theirs)) => {
            let (chosen, why) = mine.choose(&theirs);
            if chosen != Some(kind) {
                return Err(error(
                    "transport-not-agreed",
                    7,
                    format!(
                        "the peer has chosen {} and this side would choose {}: build both from the same release",
                        kind.name(),
                        chosen.map_or("nothing", LinkKind::name)
                    ),
                ));
            }
            Ok(Some((kind, theirs, why)))
        }
        // Its old peer may have died without its knowing yet.
        Ok(Answer::Refused(Refusal::Taken, _)) => {
            meeting.again();
            Ok(None)
        }
        Ok(Answer::Refused(Refusal::NothingInCommon, why)) => {
            Err(nothing_in_common(address, "as the peer sees it", &why))
        }
        Ok(Answer::Refused(Refusal::Unfit, why)) => Err(error(
            "transport-not-agreed",
            7,
            format!("the peer cannot read this side's offer: {why}"),
        )),
        Err(e) => Err(error("transport-not-agreed", 7, e.to_string())),
    }
}

impl Link for AutoLink {
    fn facts(&self) -> LinkFacts {
        self.link().facts()
    }

    fn order(&self) -> Order {
        self.link().order()
    }

    fn poll(&mut self) -> Result<LinkStatus, LinkError> {
        let status = self.link_mut().poll()?;
        self.check_presence();
        for arrival in self.meeting.poll(&self.settled.encode())? {
            let settled = match arrival {
                Arrival::Guest(guest, said) => {
                    let busy = match &self.inner {
                        Inner::Tcp(link) => Some(link.is_busy()),
                        Inner::Other(_) => None, // the link itself says whether there is room
                    };
                    answer(guest, &said, &self.settled, busy)
                }
                Arrival::Host(met, said) => {
                    let address = self.meeting.place().address.clone();
                    match heard(&mut self.meeting, &self.settled, &said, &address) {
                        Ok(Some((kind, theirs, why))) => Settled::With(met, kind, theirs, why),
                        Ok(None) => Settled::Not,
                        // Another end may come that can have it: this one was here first.
                        Err(e) => {
                            self.events.push_back(LinkEvent::Transport {
                                name: e.name,
                                why: e.what,
                            });
                            self.meeting.again();
                            Settled::Not
                        }
                    }
                }
            };
            self.take(settled);
        }
        if let Some(why) = self.meeting.news_of_strangers() {
            let name = "strangers";
            self.events.push_back(LinkEvent::Transport { name, why });
        }
        Ok(match &self.inner {
            Inner::Tcp(link) => link.status(),
            Inner::Other(_) => status,
        })
    }

    fn wait(&self, timeout: Duration) {
        match &self.inner {
            Inner::Tcp(link) => link.wait_with(Some(&self.meeting), timeout),
            Inner::Other(link) => link.wait(timeout.min(LOOK)),
        }
    }

    fn registers(&self) -> Registers {
        self.link().registers()
    }

    fn write_registers(&mut self, registers: &Registers) {
        self.link_mut().write_registers(registers);
    }

    fn inbound(&self) -> View {
        self.link().inbound()
    }

    fn exported(&self) -> Option<View> {
        self.link().exported()
    }

    fn outbound(&self) -> Option<Engine> {
        self.link().outbound()
    }

    fn ring(&mut self, doorbell: u32) {
        self.link_mut().ring(doorbell);
    }

    fn doorbell(&self, number: u32) -> Doorbell {
        self.link().doorbell(number)
    }

    fn distinct_doorbells(&self) -> u32 {
        self.link().distinct_doorbells()
    }

    fn next_event(&mut self) -> Option<LinkEvent> {
        self.events.pop_front().or_else(|| self.link_mut().next_event())
    }

    fn pump(&self) -> Option<Arc<dyn Pump>> {
        self.link().pump()
    }
}
