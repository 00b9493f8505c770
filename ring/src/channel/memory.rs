//! The memory that the peer writes, as one piece: ordinary memory, and what another owner exports behind it.

use std::sync::atomic::Ordering;

use ntb_mem::{line::LINE_WORDS, region::View};

use crate::{
    link::{Link, engine::Inbound},
    wire::page::PAGE_LINES,
};

#[derive(Debug)]
pub(super) struct Memory {
    own: View,
    exported: Option<View>,
}

impl Memory {
    pub(super) fn of(link: &dyn Link) -> Self {
        Self {
            own: link.inbound(),
            exported: link.exported(),
        }
    }

    /// Lines of ordinary memory, and of what is exported.
    pub(super) fn lines(&self) -> (u64, u64) {
        (self.own.lines(), self.exported.as_ref().map_or(0, View::lines))
    }

    /// A channel's memory: its control page and a ring of `ring_lines` lines.
    pub(super) fn channel(&self, first: u64, ring_lines: u64) -> Option<View> {
        let lines = PAGE_LINES.checked_add(ring_lines)?;
        match (first.checked_sub(self.own.lines()), &self.exported) {
            (Some(first), Some(exported)) => exported.part(first, lines),
            _ => self.own.part(first, lines),
        }
    }
}

impl Inbound for Memory {
    fn lines(&self) -> u64 {
        let (own, exported) = Self::lines(self);
        own + exported
    }

    fn load(&self, index: usize, order: Ordering) -> u64 {
        let own = self.own.lines() as usize * LINE_WORDS;
        match (index.checked_sub(own), &self.exported) {
            (Some(index), Some(exported)) => exported.load(index, order),
            _ => self.own.load(index, order),
        }
    }
}
