//! What one side says of itself, and all in which two sides can fail to fit.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use super::types::{Mismatch, SessionConfig};
use crate::wire::{
    hello::Hello,
    layout::{
        FEATURES_REQUIRED, FEATURES_UNDERSTOOD, ITEM_NAMES, ITEM_VALUES, ITEMS, MIN_WINDOW_LINES,
        WIRE_VERSION_MAX, WIRE_VERSION_MIN, fingerprint,
    },
};

/// This side, as the other has to know it.
#[derive(Clone, Debug)]
pub(super) struct Own {
    pub(super) versions: (u8, u8),
    pub(super) required: u64,
    pub(super) understood: u64,
    pub(super) items: [u32; ITEMS],
    pub(super) window_lines: u64,
}

impl Own {
    pub(super) fn new(window_lines: u64) -> Self {
        Self {
            versions: (WIRE_VERSION_MIN, WIRE_VERSION_MAX),
            required: FEATURES_REQUIRED,
            understood: FEATURES_UNDERSTOOD,
            items: ITEM_VALUES,
            window_lines,
        }
    }

    pub(super) fn hello(&self, config: &SessionConfig, reach_lines: u64) -> Hello {
        Hello {
            versions: self.versions,
            order: config.order,
            pid: config.pid,
            required: self.required,
            understood: self.understood,
            fingerprint: fingerprint(&self.items),
            window_lines: self.window_lines,
            reach_lines,
            items: self.items,
            node: config.node.clone(),
            package: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    /// `None` when there is a version that both speak.
    pub(super) fn compare_versions(&self, theirs: (u8, u8)) -> Option<Mismatch> {
        let ((our_min, our_max), (min, max)) = (self.versions, theirs);
        (our_min.max(min) > our_max.min(max))
            .then(|| Mismatch::new("wire version", &span(self.versions), &span(theirs)))
    }

    /// `None` when the peer's memory of `lines` lines is large enough, and all of it within `reach`.
    pub(super) fn compare_memory(&self, lines: u64, reach: u64) -> Option<Mismatch> {
        if lines < MIN_WINDOW_LINES {
            let theirs = format_args!("{lines}, at least {MIN_WINDOW_LINES} are needed");
            return Some(Mismatch::new(
                "lines of inbound memory",
                &self.window_lines,
                &theirs,
            ));
        }
        (reach < lines).then(|| {
            let ours = format_args!("{reach} can be reached: make the peer's window smaller");
            Mismatch::new("lines of the peer's memory", &ours, &lines)
        })
    }

    /// All in which a greeting does not fit this side.
    pub(super) fn compare(&self, hello: &Hello) -> Vec<Mismatch> {
        let mut differs = Vec::new();
        for ((name, ours), theirs) in ITEM_NAMES.iter().zip(self.items).zip(hello.items) {
            if ours != theirs {
                differs.push(Mismatch::new(name, &ours, &theirs));
            }
        }
        let (ours, theirs) = (fingerprint(&self.items), hello.fingerprint);
        if differs.is_empty() && ours != theirs {
            differs.push(Mismatch::new(
                "layout fingerprint",
                &format_args!("{ours:#010x}"),
                &format_args!("{theirs:#010x}"),
            ));
        }
        if hello.required & !self.understood != 0 {
            differs.push(Mismatch::new(
                "features",
                &format_args!("understood {:#x}", self.understood),
                &format_args!("required {:#x}", hello.required),
            ));
        }
        if self.required & !hello.understood != 0 {
            differs.push(Mismatch::new(
                "features",
                &format_args!("required {:#x}", self.required),
                &format_args!("understood {:#x}", hello.understood),
            ));
        }
        differs
    }
}

fn span((min, max): (u8, u8)) -> String {
    if min == max {
        min.to_string()
    } else {
        format!("{min} to {max}")
    }
}
