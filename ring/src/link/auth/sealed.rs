//! The few messages that follow the exchange, each with a check.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use std::io::Read;

use super::{
    AuthError, Role, TAG_BYTES,
    handshake::{self},
    tag, tag_is,
};

/// Most bytes of a sealed message's content.
pub const SEALED_MAX: usize = 1024;

/// An authenticated stream's key. Made by [`super::Handshake::drive`].
pub struct Session {
    role: Role,
    key: [u8; TAG_BYTES],
    sealed: u64,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("role", &self.role)
            .field("sealed", &self.sealed)
            .finish_non_exhaustive()
    }
}

impl Session {
    pub(super) fn new(role: Role, key: [u8; TAG_BYTES]) -> Self {
        Self { role, key, sealed: 0 }
    }

    /// Which side this one was.
    pub fn role(&self) -> Role {
        self.role
    }

    /// A message for the stream: the length of `content` (32 bits), `content`, a check. `None` when it is longer than
    /// [`SEALED_MAX`]. Messages must be sent in the order they were sealed in.
    pub fn seal(&mut self, content: &[u8]) -> Option<Vec<u8>> {
        let len = u32::try_from(content.len())
            .ok()
            .filter(|n| *n as usize <= SEALED_MAX)?;
        let mut message = len.to_le_bytes().to_vec();
        message.extend_from_slice(content);
        let check = tag(
            &self.key,
            &[&[self.role.code()], &self.sealed.to_le_bytes(), &message],
        );
        self.sealed += 1;
        message.extend_from_slice(&check);
        Some(message)
    }

    /// What reads the peer's sealed messages.
    pub fn opener(&self) -> Opener {
        Opener {
            from: self.role.other(),
            key: self.key,
            opened: 0,
            buffer: vec![0; 4],
            done: 0,
        }
    }
}

/// Reads sealed messages from a stream, and not a byte more.
pub struct Opener {
    from: Role,
    key: [u8; TAG_BYTES],
    opened: u64,
    buffer: Vec<u8>,
    done: usize,
}

impl std::fmt::Debug for Opener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opener")
            .field("opened", &self.opened)
            .finish_non_exhaustive()
    }
}

impl Opener {
    /// The next message's content, or `None` when the stream would block first.
    pub fn next(&mut self, stream: &mut impl Read) -> Result<Option<Vec<u8>>, AuthError> {
        loop {
            let complete = handshake::read(stream, &mut self.buffer, &mut self.done);
            match complete {
                Ok(true) => {}
                Ok(false) => return Ok(None),
                Err(error) => {
                    return Err(AuthError::Stream {
                        step: "waiting for a message",
                        error,
                    });
                }
            }
            if let Ok(len) = <[u8; 4]>::try_from(self.buffer.as_slice()) {
                let len = u32::from_le_bytes(len) as usize;
                if len > SEALED_MAX {
                    return Err(AuthError::Malformed("a message is too long"));
                }
                self.buffer.resize(4 + len + TAG_BYTES, 0);
                continue;
            }
            let message = std::mem::replace(&mut self.buffer, vec![0; 4]);
            self.done = 0;
            let (signed, check) = message
                .split_at_checked(message.len().saturating_sub(TAG_BYTES))
                .unwrap_or_default();
            let parts: [&[u8]; 3] = [&[self.from.code()], &self.opened.to_le_bytes(), signed];
            if !tag_is(&self.key, &parts, check) {
                return Err(AuthError::Malformed("the check of a message does not hold"));
            }
            self.opened += 1;
            return Ok(signed.get(4..).map(<[u8]>::to_vec));
        }
    }
}
