//! The secret that two ends share.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use std::{fmt, io::Read, path::Path};

use sha2::{Digest, Sha256};

/// Longest secret in bytes.
pub const SECRET_MAX: usize = 1024;

/// Variable of the environment that [`Secret::from_env`] reads.
pub const SECRET_ENV: &str = "NTB_SECRET";

/// A secret that both ends of a link are given. Never printed: its `Debug` says whether there is one.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    given: bool,
    /// A hash, since keys of HMAC that differ only in zeros at the end are one and the same.
    key: [u8; 32],
}

impl Default for Secret {
    fn default() -> Self {
        Self::none()
    }
}

/// Why something is no secret.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// It is empty.
    #[error("the secret is empty: 1 to {SECRET_MAX} bytes are needed, best 32 random ones")]
    Empty,
    /// It is too long.
    #[error("the secret is longer than {SECRET_MAX} bytes")]
    TooLong,
    /// The file cannot be read.
    #[error("the file with the secret, '{path}', cannot be read: {error}")]
    File {
        /// Its path.
        path: String,
        /// What the kernel said.
        error: std::io::Error,
    },
}

impl Secret {
    /// No secret. Peers are let in without one; links give this up where a network could reach them.
    pub fn none() -> Self {
        Self {
            given: false,
            key: key_of(&[]),
        }
    }

    /// The secret of these bytes, 1 to [`SECRET_MAX`] of them.
    pub fn new(bytes: &[u8]) -> Result<Self, SecretError> {
        match bytes.len() {
            0 => Err(SecretError::Empty),
            n if n > SECRET_MAX => Err(SecretError::TooLong),
            _ => Ok(Self {
                given: true,
                key: key_of(bytes),
            }),
        }
    }

    /// The secret in a file: all of it, but for one line end at its end.
    pub fn from_file(path: &Path) -> Result<Self, SecretError> {
        let file = |error| SecretError::File {
            path: path.display().to_string(),
            error,
        };
        let mut bytes = Vec::new();
        std::fs::File::open(path)
            .and_then(|f| f.take(SECRET_MAX as u64 + 3).read_to_end(&mut bytes))
            .map_err(file)?;
        let text = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
        Self::new(text.strip_suffix(b"\r").unwrap_or(text))
    }

    /// The secret in the environment ([`SECRET_ENV`]); none where the variable is not set.
    pub fn from_env() -> Result<Self, SecretError> {
        use std::os::unix::ffi::OsStrExt;
        match std::env::var_os(SECRET_ENV) {
            None => Ok(Self::none()),
            Some(text) => Self::new(text.as_bytes()),
        }
    }

    /// Whether there is one.
    pub fn is_some(&self) -> bool {
        self.given
    }

    /// The key of the exchange. Without a secret it is that of no bytes, which no secret has.
    pub(super) fn key(&self) -> &[u8] {
        &self.key
    }
}

fn key_of(secret: &[u8]) -> [u8; 32] {
    let mut hash = Sha256::new_with_prefix(b"ntb-secret\0\0\0\0\0\0");
    hash.update(secret);
    hash.finalize().into()
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.given {
            "Secret(given)"
        } else {
            "Secret(none)"
        })
    }
}
