//! What two ends that choose a transport together say to each other, and how they choose. `docs/wire.md` has the bytes.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use crate::{
    address::SOFT_NAME_MAX,
    link::{LinkKind, ends::WINDOW_MAX},
};

/// Version of these messages.
pub const VERSION: u8 = 1;
/// The order of preference.
pub const ORDER: [LinkKind; 4] = [LinkKind::Ntb, LinkKind::Rdma, LinkKind::Soft, LinkKind::Tcp];
/// Longest reason that is sent, in bytes.
const REASON_MAX: usize = 120;
/// Longest message: six reasons fit, and there are three at most.
pub const BYTES_MAX: usize = 1000;
/// Longest text of a refusal in bytes: it is all that follows the head.
const REFUSAL_MAX: usize = BYTES_MAX - 4;

const OFFER: u8 = 1;
const AGREED: u8 = 2;
const REFUSED: u8 = 3;
const WORKS: u8 = 4;
const FAILS: u8 = 5;

fn code(kind: LinkKind) -> u8 {
    match kind {
        LinkKind::Ntb => 0,
        LinkKind::Rdma => 1,
        LinkKind::Soft => 2,
        LinkKind::Tcp => 3,
    }
}

/// What one end has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Its process.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// Bytes of the memory that it would have on a link over TCP.
    pub window_bytes: u64,
    /// The same for two processes that can meet under a name: machine, boot and network namespace.
    pub machine: u64,
    /// Transports that it can use.
    pub kinds: Vec<LinkKind>,
    /// Why not the others.
    pub reasons: Vec<(LinkKind, String)>,
    /// Name of the soft link that it has settled on already.
    pub soft_name: Option<String>,
}

/// What the end that was called says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// This transport. What else it says of itself is as in its offer.
    Agreed(LinkKind, Offer),
    /// None.
    Refused(Refusal, String),
}

/// Why none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is a peer already.
    Taken,
    /// The two have no transport in common.
    NothingInCommon,
    /// The offer is none.
    Unfit,
}

/// What each end says of the transport that both have agreed on, once it has tried it with the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// It is connected.
    Works,
    /// It cannot be had after all; why.
    Fails(String),
}

/// Bytes that are no message of this kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadOffer {
    /// Not of this form.
    #[error("the peer's offer of transports is none")]
    Malformed,
    /// Of another version.
    #[error(
        "the peer speaks version {0} of the choice of transports, this side version {VERSION}: build both from the same release"
    )]
    Version(u8),
}

impl Offer {
    /// The transport that both ends choose, when `theirs` is the other's offer; and, for the one line about it, why nothing
    /// that is preferred to it.
    pub fn choose(&self, theirs: &Self) -> (Option<LinkKind>, Vec<String>) {
        let mut why = Vec::new();
        for kind in ORDER {
            match (self.kinds.contains(&kind), theirs.kinds.contains(&kind)) {
                (true, true) if kind == LinkKind::Soft && self.machine != theirs.machine => {
                    why.push("the peer is on another machine".to_owned());
                }
                (true, true) if kind == LinkKind::Soft && self.uid != theirs.uid => {
                    why.push("the peer is of another user".to_owned());
                }
                (true, true) => return (Some(kind), why),
                (false, _) => why.push(self.reason(kind)),
                (true, false) => why.push(format!("at the peer: {}", theirs.reason(kind))),
            }
        }
        (None, why)
    }

    fn reason(&self, kind: LinkKind) -> String {
        self.reasons
            .iter()
            .find(|(k, _)| *k == kind)
            .map_or_else(|| format!("{} not offered", kind.name()), |(_, why)| why.clone())
    }

    /// As it is sealed and sent.
    pub fn encode(&self) -> Vec<u8> {
        self.write(OFFER, 0)
    }

    fn write(&self, what: u8, chosen: u8) -> Vec<u8> {
        let mask = self.kinds.iter().fold(0u8, |mask, kind| mask | 1 << code(*kind));
        let mut out = vec![what, VERSION, chosen, mask];
        out.extend(self.pid.to_le_bytes());
        out.extend(self.uid.to_le_bytes());
        out.extend(0u32.to_le_bytes());
        out.extend(self.window_bytes.to_le_bytes());
        out.extend(self.machine.to_le_bytes());
        text(
            &mut out,
            self.soft_name.as_deref().unwrap_or_default(),
            SOFT_NAME_MAX,
        );
        for (kind, why) in &self.reasons {
            out.push(code(*kind));
            text(&mut out, why, REASON_MAX);
        }
        out
    }
}

/// A length and as much of the text as may be sent, cut between two characters.
fn text(out: &mut Vec<u8>, text: &str, most: usize) {
    let part = cut(text, most);
    out.push(part.len() as u8); // `most` is below 256
    out.extend(part.as_bytes());
}

fn cut(text: &str, most: usize) -> &str {
    let end = (0..=most.min(text.len()))
        .rev()
        .find(|n| text.is_char_boundary(*n))
        .unwrap_or(0);
    text.get(..end).unwrap_or_default()
}

impl Answer {
    /// As it is sealed and sent.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Agreed(kind, about) => about.write(AGREED, code(*kind)),
            Self::Refused(why, said) => {
                let code = match why {
                    Refusal::Taken => 1,
                    Refusal::NothingInCommon => 2,
                    Refusal::Unfit => 3,
                };
                let mut out = vec![REFUSED, VERSION, code, 0];
                out.extend(cut(said, REFUSAL_MAX).as_bytes());
                out
            }
        }
    }

    /// Reads an answer that came sealed.
    pub fn decode(bytes: &[u8]) -> Result<Self, BadOffer> {
        let mut input = Input(bytes);
        let (what, detail, mask) = head(&mut input)?;
        match what {
            AGREED => {
                let kind = ORDER
                    .into_iter()
                    .find(|k| code(*k) == detail)
                    .ok_or(BadOffer::Malformed)?;
                Ok(Self::Agreed(kind, read(input, mask)?))
            }
            REFUSED => {
                let why = match detail {
                    1 => Refusal::Taken,
                    2 => Refusal::NothingInCommon,
                    _ => Refusal::Unfit,
                };
                Ok(Self::Refused(why, printable(input.0).ok_or(BadOffer::Malformed)?))
            }
            _ => Err(BadOffer::Malformed),
        }
    }
}

impl Word {
    /// As it is sealed and sent.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Works => vec![WORKS, VERSION, 0, 0],
            Self::Fails(why) => {
                let mut out = vec![FAILS, VERSION, 0, 0];
                out.extend(cut(why, REFUSAL_MAX).as_bytes());
                out
            }
        }
    }

    /// Reads a word that came sealed.
    pub fn decode(bytes: &[u8]) -> Result<Self, BadOffer> {
        let mut input = Input(bytes);
        match head(&mut input)? {
            (WORKS, _, _) => Ok(Self::Works),
            (FAILS, _, _) => printable(input.0).map(Self::Fails).ok_or(BadOffer::Malformed),
            _ => Err(BadOffer::Malformed),
        }
    }
}

/// Reads an offer that came sealed.
pub fn decode(bytes: &[u8]) -> Result<Offer, BadOffer> {
    let mut input = Input(bytes);
    match head(&mut input)? {
        (OFFER, _, mask) => read(input, mask),
        _ => Err(BadOffer::Malformed),
    }
}

fn head(input: &mut Input<'_>) -> Result<(u8, u8, u8), BadOffer> {
    let [what, version, detail, mask] = input.take().ok_or(BadOffer::Malformed)?;
    if version != VERSION {
        return Err(BadOffer::Version(version));
    }
    Ok((what, detail, mask))
}

fn read(mut input: Input<'_>, mask: u8) -> Result<Offer, BadOffer> {
    let mut offer = || {
        let pid = u32::from_le_bytes(input.take()?);
        let uid = u32::from_le_bytes(input.take()?);
        let _reserved: [u8; 4] = input.take()?;
        let window_bytes = u64::from_le_bytes(input.take()?);
        let machine = u64::from_le_bytes(input.take()?);
        let name = input.text()?;
        let sound = window_bytes > 0 && window_bytes <= WINDOW_MAX && window_bytes.is_multiple_of(64);
        if !sound || name.len() > SOFT_NAME_MAX || !name.bytes().all(|b| b.is_ascii_graphic()) {
            return None;
        }
        let mut reasons = Vec::new();
        while !input.0.is_empty() {
            let [kind] = input.take()?;
            let why = input.text()?;
            let kind = ORDER.into_iter().find(|k| code(*k) == kind)?;
            if reasons.len() == ORDER.len() {
                return None;
            }
            reasons.push((kind, why));
        }
        Some(Offer {
            pid,
            uid,
            window_bytes,
            machine,
            kinds: ORDER.into_iter().filter(|k| mask & 1 << code(*k) != 0).collect(),
            reasons,
            soft_name: Some(name).filter(|n| !n.is_empty()),
        })
    };
    offer().ok_or(BadOffer::Malformed)
}

/// Bytes still to be read.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (now, later) = self.0.split_first_chunk::<N>()?;
        self.0 = later;
        Some(*now)
    }

    fn text(&mut self) -> Option<String> {
        let [len] = self.take()?;
        let (now, later) = self.0.split_at_checked(usize::from(len))?;
        self.0 = later;
        printable(now)
    }
}

/// A text, so that nothing of a peer's gets at a terminal.
fn printable(bytes: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(bytes).ok()?;
    Some(
        text.chars()
            .map(|c| if c.is_control() { '?' } else { c })
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(kinds: &[LinkKind]) -> Offer {
        Offer {
            pid: 7,
            uid: 1000,
            window_bytes: 1 << 20,
            machine: 5,
            kinds: kinds.to_vec(),
            reasons: ORDER
                .into_iter()
                .filter(|k| !kinds.contains(k))
                .map(|k| (k, format!("no {}", k.name())))
                .collect(),
            soft_name: None,
        }
    }

    use LinkKind::{Ntb, Rdma, Soft, Tcp};

    #[test]
    fn the_best_that_both_have_is_chosen_and_the_rest_explained() {
        let all = offer(&ORDER);
        assert_eq!(all.choose(&all), (Some(Ntb), vec![]));
        let (chosen, why) = all.choose(&offer(&[Tcp]));
        assert_eq!(chosen, Some(Tcp));
        assert_eq!(
            why,
            [
                "at the peer: no ntb",
                "at the peer: no rdma",
                "at the peer: no soft"
            ]
        );
        let (chosen, why) = offer(&[Rdma, Soft, Tcp]).choose(&all);
        assert_eq!((chosen, why), (Some(Rdma), vec!["no ntb".to_owned()]));
        assert_eq!(offer(&[Soft, Tcp]).choose(&all).0, Some(Soft));
        let elsewhere = Offer {
            machine: 6,
            ..all.clone()
        };
        let (chosen, why) = offer(&[Soft, Tcp]).choose(&elsewhere);
        assert_eq!(chosen, Some(Tcp));
        assert_eq!(why[2], "the peer is on another machine");
        let stranger = Offer {
            uid: 1,
            ..all.clone()
        };
        assert_eq!(offer(&[Soft, Tcp]).choose(&stranger).0, Some(Tcp));
        let (none, why) = offer(&[Ntb]).choose(&offer(&[Rdma, Tcp]));
        assert_eq!(none, None);
        assert_eq!(why.len(), 4);
    }

    #[test]
    fn both_ends_choose_the_same() {
        for a in 0..16u8 {
            for b in 0..16u8 {
                let of = |mask: u8| -> Vec<_> {
                    ORDER.into_iter().filter(|k| mask & 1 << code(*k) != 0).collect()
                };
                let (a, b) = (offer(&of(a)), offer(&of(b)));
                assert_eq!(a.choose(&b).0, b.choose(&a).0);
            }
        }
    }

    #[test]
    fn messages_come_back_and_fit() {
        let mut full = offer(&[Tcp]);
        full.soft_name = Some("x".repeat(SOFT_NAME_MAX));
        for reason in &mut full.reasons {
            reason.1 = "ä".repeat(200);
        }
        let bytes = full.encode();
        assert!(bytes.len() <= BYTES_MAX);
        let back = decode(&bytes).unwrap();
        assert_eq!(back.reasons[0].1, "ä".repeat(REASON_MAX / 2));
        assert_eq!(
            (back.kinds, back.soft_name),
            (full.kinds.clone(), full.soft_name.clone())
        );
        let plain = offer(&[Soft, Tcp]);
        assert_eq!(decode(&plain.encode()), Ok(plain.clone()));
        for answer in [
            Answer::Agreed(Soft, plain),
            Answer::Refused(Refusal::Taken, String::new()),
            Answer::Refused(Refusal::NothingInCommon, "no ntb; ".repeat(100)),
        ] {
            assert_eq!(Answer::decode(&answer.encode()), Ok(answer));
        }
        for word in [Word::Works, Word::Fails("no way there".to_owned())] {
            assert_eq!(Word::decode(&word.encode()), Ok(word));
        }
        assert!(Word::Fails("ä".repeat(2000)).encode().len() <= BYTES_MAX);
        assert_eq!(Word::decode(&offer(&[Tcp]).encode()), Err(BadOffer::Malformed));
    }

    #[test]
    fn anything_else_is_refused() {
        let bytes = offer(&[Soft]).encode();
        for cut in 0..bytes.len() {
            let short = decode(&bytes[..cut]);
            assert!(short.is_err() || short.unwrap().reasons.len() < 3, "{cut}");
        }
        for at in [0, 1] {
            let mut other = bytes.clone();
            other[at] = 77;
            assert!(decode(&other).is_err());
        }
        let mut name = offer(&[Soft]);
        name.soft_name = Some("a b".to_owned());
        assert_eq!(decode(&name.encode()), Err(BadOffer::Malformed));
        let mut window = offer(&[Soft]);
        window.window_bytes = u64::MAX;
        assert_eq!(decode(&window.encode()), Err(BadOffer::Malformed));
        let mut reason = offer(&[Tcp]);
        reason.reasons[0].1 = "bad\x1b[31m\n".to_owned();
        assert!(
            decode(&reason.encode()).unwrap().reasons[0]
                .1
                .starts_with("bad?[31m?")
        );
    }
}
