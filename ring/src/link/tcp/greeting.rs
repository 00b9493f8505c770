//! What two authenticated ends say before the first frame. `docs/wire.md` has the bytes.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use ntb_mem::line::LINE_BYTES;

use super::frame::VERSION;
use crate::link::{LinkError, ends::WINDOW_MAX};

/// Bytes of either message.
pub const BYTES: usize = 16;

const GREETING: u8 = 1;
const REFUSAL: u8 = 2;

/// What one side tells the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// Bytes of its memory.
    pub window_bytes: u64,
    /// Its process, for messages.
    pub pid: u32,
}

/// Why somebody who knows the secret is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// There is a peer already.
    Taken,
    /// Its greeting cannot be used.
    Unfit,
}

/// Either message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// From the side that called, and the answer of the other.
    Greeting(Greeting),
    /// Instead of the answer.
    Refusal(Reason),
}

/// Why a greeting cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadGreeting {
    /// It is none.
    #[error("the peer's greeting is none")]
    Malformed,
    /// Of another version of the frames.
    #[error(
        "the peer speaks version {0} of the frames, this side version {VERSION}: build both from the same release"
    )]
    Version(u8),
    /// A window that cannot be.
    #[error("the peer's window has {0} bytes: 64 to {WINDOW_MAX} are needed, in lines of 64")]
    Window(u64),
}

impl BadGreeting {
    pub(super) fn into_link_error(self, address: &str) -> LinkError {
        LinkError {
            name: match self {
                Self::Version(_) => "tcp-version-mismatch",
                _ => "tcp-greeting",
            },
            exit: 7,
            what: format!("{address}: {self}"),
            errno: None,
        }
    }
}

impl Message {
    /// As it is sealed and sent.
    pub fn encode(&self) -> [u8; BYTES] {
        let (kind, detail, pid, window) = match self {
            Self::Greeting(g) => (GREETING, VERSION, g.pid, g.window_bytes),
            Self::Refusal(Reason::Taken) => (REFUSAL, 1, std::process::id(), 0),
            Self::Refusal(Reason::Unfit) => (REFUSAL, 2, std::process::id(), 0),
        };
        let mut out = [0; BYTES];
        let bytes = [kind, detail, 0, 0]
            .into_iter()
            .chain(pid.to_le_bytes())
            .chain(window.to_le_bytes());
        for (to, from) in out.iter_mut().zip(bytes) {
            *to = from;
        }
        out
    }
}

/// Reads a message that came sealed.
pub fn decode(bytes: &[u8]) -> Result<Message, BadGreeting> {
    let Ok([kind, detail, _, _, p0, p1, p2, p3, window @ ..]) = <[u8; BYTES]>::try_from(bytes) else {
        return Err(BadGreeting::Malformed);
    };
    match (kind, detail) {
        (GREETING, VERSION) => {
            let window_bytes = u64::from_le_bytes(window);
            if window_bytes == 0
                || window_bytes > WINDOW_MAX
                || !window_bytes.is_multiple_of(LINE_BYTES as u64)
            {
                return Err(BadGreeting::Window(window_bytes));
            }
            Ok(Message::Greeting(Greeting {
                window_bytes,
                pid: u32::from_le_bytes([p0, p1, p2, p3]),
            }))
        }
        (GREETING, other) => Err(BadGreeting::Version(other)),
        (REFUSAL, 1) => Ok(Message::Refusal(Reason::Taken)),
        (REFUSAL, _) => Ok(Message::Refusal(Reason::Unfit)),
        _ => Err(BadGreeting::Malformed),
    }
}

pub(super) fn refused(address: &str, reason: Reason) -> LinkError {
    match reason {
        Reason::Taken => LinkError {
            name: "tcp-taken",
            exit: 6,
            what: format!(
                "{address} is taken: two have met there and a link has two ends; use another port or end one of them"
            ),
            errno: None,
        },
        Reason::Unfit => LinkError {
            name: "tcp-greeting",
            exit: 7,
            what: format!(
                "{address}: the peer cannot use this side's greeting: build both from the same release, and give both windows \
                 of 64 bytes to 1 TiB"
            ),
            errno: None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_and_anything_else_is_refused() {
        let greeting = Message::Greeting(Greeting {
            window_bytes: 1 << 20,
            pid: 77,
        });
        for message in [
            greeting,
            Message::Refusal(Reason::Taken),
            Message::Refusal(Reason::Unfit),
        ] {
            assert_eq!(decode(&message.encode()), Ok(message));
        }
        let bytes = greeting.encode();
        assert_eq!(decode(&bytes[..15]), Err(BadGreeting::Malformed));
        assert_eq!(decode(&[&bytes[..], &[0]].concat()), Err(BadGreeting::Malformed));
        let mut other = bytes;
        other[1] = 9;
        assert_eq!(decode(&other), Err(BadGreeting::Version(9)));
        for window_bytes in [0, 63, 65, WINDOW_MAX + 64, u64::MAX] {
            let bytes = Message::Greeting(Greeting { window_bytes, pid: 1 }).encode();
            assert_eq!(decode(&bytes), Err(BadGreeting::Window(window_bytes)));
        }
    }
}
