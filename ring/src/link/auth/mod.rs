//! Who may be a peer over a network: both sides prove that they know a shared secret, without saying it.
//!
//! Used by every transport whose peer comes over a socket of a network: TCP links, the meeting of the automatic choice, the
//! exchange before RDMA. [`Handshake`] is a state machine over a byte stream; it reads no byte beyond its own messages. What
//! it ends in is a [`Session`], whose [`Session::seal`] and [`Opener`] carry the few messages that follow, each with a
//! check that only holders of the secret can make, which counts and knows its direction. `docs/wire.md` has the bytes.
//!
//! What it gives: a peer without the secret learns two random numbers and nothing else, and no message of it gets past
//! [`Handshake::drive`]. A recording is worth nothing, since both sides put in a random number of their own. What it does
//! not give: whoever listens can try secrets against a recording at leisure, so that a secret must be random and not a word.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

mod handshake;
mod sealed;
mod secret;
#[cfg(test)]
mod tests;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

pub use handshake::{HELLO_BYTES, Handshake, MAGIC, PROOF_BYTES, Purpose, Role, VERSION};
pub use sealed::{Opener, SEALED_MAX, Session};
pub use secret::{SECRET_ENV, SECRET_MAX, Secret, SecretError};

use super::LinkError;

/// Why a stream is no peer's. Nothing more is read from it or written to it.
#[derive(Debug, thiserror::Error)]
pub enum AuthError {
    /// The stream ended or failed.
    #[error("the connection broke while {step}: {error}")]
    Stream {
        /// What was being done.
        step: &'static str,
        /// What the kernel said.
        error: std::io::Error,
    },
    /// What came is no message of this exchange.
    #[error("something else than a peer is at the other end: {0}")]
    Malformed(&'static str),
    /// The other side speaks another version of this exchange.
    #[error(
        "the peer speaks version {theirs} of the authentication, this side version {VERSION}: build both from the same release"
    )]
    Version {
        /// The peer's version.
        theirs: u16,
    },
    /// The other side does not know the secret, or another one.
    #[error("the peer's secret is not this side's: give both ends the same")]
    Proof,
    /// The other side closed when it had seen this side's proof.
    #[error(
        "the peer refused this side's proof of the secret: give both ends the same, or none to either on one machine"
    )]
    Refused,
    /// Both know the secret, but the other side has come for something else.
    #[error("this side wants {ours} and the peer {theirs}: give both ends the same address")]
    Purpose {
        /// What this side is here for.
        ours: &'static str,
        /// What the peer is here for.
        theirs: &'static str,
    },
}

impl AuthError {
    /// The stable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Stream { .. } => "auth-broken",
            Self::Malformed(_) => "auth-malformed",
            Self::Version { .. } => "auth-version-mismatch",
            Self::Proof | Self::Refused => "auth-secret-mismatch",
            Self::Purpose { .. } => "auth-purpose-mismatch",
        }
    }

    /// As the error of the link at `address`.
    pub fn into_link_error(self, address: &str) -> LinkError {
        let exit = match self {
            Self::Stream { .. } | Self::Malformed(_) => 4,
            Self::Proof | Self::Refused => 6,
            Self::Version { .. } | Self::Purpose { .. } => 7,
        };
        let errno = match &self {
            Self::Stream { error, .. } => error.raw_os_error(),
            _ => None,
        };
        LinkError {
            name: self.name(),
            exit,
            what: format!("{address}: {self}"),
            errno,
        }
    }
}

/// Bytes of a check.
pub(super) const TAG_BYTES: usize = 32;

/// HMAC-SHA-256 (RFC 2104) of the parts one after the other.
fn keyed(key: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(key) else {
        unreachable!("a key of any length will do")
    };
    for part in parts {
        mac.update(part);
    }
    mac
}

fn tag(key: &[u8], parts: &[&[u8]]) -> [u8; TAG_BYTES] {
    keyed(key, parts).finalize().into_bytes().into()
}

/// Whether `found` is the tag, in a time that does not depend on where they differ.
fn tag_is(key: &[u8], parts: &[&[u8]], found: &[u8]) -> bool {
    keyed(key, parts).verify_slice(found).is_ok()
}
