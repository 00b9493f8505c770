//! Whom a soft link accepts as its peer.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use std::os::fd::AsFd;

use super::{
    credentials::{Credentials, peer_has_group},
    greeting::{self, Message, Reason, Refusal},
};

/// Whom to accept.
#[derive(Debug)]
pub(super) struct Policy {
    pub(super) own: Credentials,
    pub(super) group: Option<u32>,
}

impl Policy {
    pub(super) fn permits(&self, socket: impl AsFd, who: Credentials) -> bool {
        who.uid == self.own.uid
            || self
                .group
                .is_some_and(|group| who.gid == group || peer_has_group(socket, group).unwrap_or(false))
    }

    pub(super) fn refusal(&self, reason: Reason, holders: [u32; 2]) -> Message {
        Message::Refusal(Refusal {
            reason,
            holders,
            owner: self.own.uid,
            group: self.group,
            version: greeting::VERSION,
        })
    }
}
