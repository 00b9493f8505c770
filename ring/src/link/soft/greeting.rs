//! What the two sides of a soft link say to each other on their socket: one message each, 64 bytes.
//!
//! ```text
//! bytes  0..8   "NTB-SOFT"
//! bytes  8..12  version of this layout, little-endian like all that follows
//! bytes 12..16  kind: 1 greeting, 2 refusal
//! greeting      16..24 bytes of window, 24..28 process id, 28..32 doorbells, 32..64 zero
//! refusal       16..20 reason, 20..24 and 24..28 process ids of the holders, 28..32 user id of the refusing side,
//!               32..36 group that it requires (all ones: none), 36..40 version it has, 40..64 zero
//! ```
//!
//! The first 16 bytes, and a refusal's layout, are the same in all versions. With a greeting go the descriptors of
//! window, registers and doorbells, in this order.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use crate::link::DOORBELLS;

/// Version of the layout.
pub const VERSION: u32 = 1;
/// Length of every message in bytes.
pub const BYTES: usize = 64;

const MAGIC: u64 = u64::from_le_bytes(*b"NTB-SOFT");

/// One message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// Here is my memory.
    Greeting(Greeting),
    /// You are not taken as a peer.
    Refusal(Refusal),
}

/// The memory that goes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// Length of the window in bytes.
    pub window_bytes: u64,
    /// Process id, as the peer says.
    pub pid: u32,
}

/// Why a peer is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The reason.
    pub reason: Reason,
    /// Processes that hold the name; 0 where unknown.
    pub holders: [u32; 2],
    /// Effective user of the refusing side.
    pub owner: u32,
    /// Group that the refusing side requires of other users' processes.
    pub group: Option<u32>,
    /// Version of the refusing side.
    pub version: u32,
}

/// Reasons of a [`Refusal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Reason {
    /// Two processes have met under the name already.
    Taken = 1,
    /// Neither the same user nor in the group.
    Permission = 2,
    /// Another version of this layout.
    Version = 3,
    /// The memory that was handed over cannot be used.
    Unfit = 4,
    /// The refusing side has reached a limit on open files or memory.
    Limits = 5,
}

/// Why bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Not even the beginning of one.
    #[error("{0} bytes that are no greeting")]
    Alien(usize),
    /// Another version.
    #[error("version {0}, this side has {VERSION}")]
    Version(u32),
    /// Something of it cannot be.
    #[error("a greeting whose {0} cannot be")]
    Field(&'static str),
}

impl Message {
    /// The bytes of it.
    pub fn encode(&self) -> [u8; BYTES] {
        let head = MAGIC as u128 | u128::from(VERSION) << 64;
        let mut words = [0u32; BYTES / 4];
        match self {
            Self::Greeting(g) => {
                fill(
                    &mut words,
                    head | 1 << 96,
                    &[
                        g.window_bytes as u32,
                        (g.window_bytes >> 32) as u32,
                        g.pid,
                        DOORBELLS,
                    ],
                );
            }
            Self::Refusal(r) => {
                fill(
                    &mut words,
                    head | 2 << 96,
                    &[
                        r.reason as u32,
                        r.holders[0],
                        r.holders[1],
                        r.owner,
                        r.group.unwrap_or(u32::MAX),
                        r.version,
                    ],
                );
            }
        }
        let mut bytes = [0; BYTES];
        for (slot, word) in bytes.chunks_exact_mut(4).zip(words) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads a message that a peer sent. Every value is possible; the caller checks those that stand for memory.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let alien = Malformed::Alien(bytes.len());
        let bytes: &[u8; BYTES] = bytes.try_into().map_err(|_| alien)?;
        let word = |at: usize| {
            let mut word = [0; 4];
            for (slot, byte) in word.iter_mut().zip(bytes.iter().skip(at)) {
                *slot = *byte;
            }
            u32::from_le_bytes(word)
        };
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if long(0) != MAGIC {
            return Err(alien);
        }
        let (version, kind) = (word(8), word(12));
        if kind == 2 {
            return Ok(Self::Refusal(Refusal {
                reason: match word(16) {
                    1 => Reason::Taken,
                    2 => Reason::Permission,
                    3 => Reason::Version,
                    4 => Reason::Unfit,
                    5 => Reason::Limits,
                    _ => return Err(Malformed::Field("reason")),
                },
                holders: [word(20), word(24)],
                owner: word(28),
                group: Some(word(32)).filter(|g| *g != u32::MAX),
                version: word(36),
            }));
        }
        if version != VERSION {
            return Err(Malformed::Version(version));
        }
        if kind != 1 {
            return Err(Malformed::Field("kind"));
        }
        if word(28) != DOORBELLS {
            return Err(Malformed::Field("number of doorbells"));
        }
        Ok(Self::Greeting(Greeting {
            window_bytes: long(16),
            pid: word(24),
        }))
    }
}

fn fill(words: &mut [u32; BYTES / 4], head: u128, body: &[u32]) {
    let head = (0..4).map(|i| (head >> (32 * i)) as u32);
    for (slot, value) in words.iter_mut().zip(head.chain(body.iter().copied())) {
        *slot = value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_layout_is_the_documented_one() {
        let bytes = Message::Greeting(Greeting {
            window_bytes: 0x0102_0304_0506_0708,
            pid: 0x1112_1314,
        })
        .encode();
        assert_eq!(&bytes[..16], b"NTB-SOFT\x01\0\0\0\x01\0\0\0");
        assert_eq!(
            &bytes[16..32],
            &[8, 7, 6, 5, 4, 3, 2, 1, 0x14, 0x13, 0x12, 0x11, 16, 0, 0, 0]
        );
        assert_eq!(&bytes[32..], &[0; 32]);
    }

    proptest! {
        #[test]
        fn what_is_said_is_what_is_heard(window_bytes: u64, pid: u32, holders: [u32; 2], owner: u32,
                                         group in proptest::option::of(0..u32::MAX), version: u32, reason in 0usize..5) {
            let greeting = Message::Greeting(Greeting { window_bytes, pid });
            prop_assert_eq!(Message::decode(&greeting.encode()), Ok(greeting));
            let reason = [Reason::Taken, Reason::Permission, Reason::Version, Reason::Unfit, Reason::Limits][reason];
            let refusal = Message::Refusal(Refusal { reason, holders, owner, group, version });
            prop_assert_eq!(Message::decode(&refusal.encode()), Ok(refusal));
        }

        #[test]
        fn random_bytes_are_read_without_harm(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Message::decode(&bytes);
        }

        #[test]
        fn a_damaged_head_is_noticed(at in 0usize..16, flip in 1u8..) {
            let good = Message::Greeting(Greeting { window_bytes: 1 << 20, pid: 7 });
            let mut bytes = good.encode();
            bytes[at] ^= flip;
            let read = Message::decode(&bytes);
            prop_assert!(!matches!(read, Ok(Message::Greeting(_))), "{:?}", read);
        }
    }
}
