//! I/O addresses: which may be used, and which are in use.

use std::{collections::BTreeMap, fmt};

use super::PciError;
use crate::hw::inferred::LOWEST_IOVA;

/// A range of I/O addresses, last address included, so that it can reach the top of the address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct IovaRange {
    /// First address.
    pub start: u64,
    /// Last address.
    pub last: u64,
}

impl IovaRange {
    /// The range of `bytes` from `start`; `None` when empty or past the end of the address space.
    pub fn new(start: u64, bytes: u64) -> Option<Self> {
        let last = start.checked_add(bytes.checked_sub(1)?)?;
        Some(Self { start, last })
    }

    /// Length in bytes; saturates for the whole address space.
    pub fn bytes(&self) -> u64 {
        (self.last - self.start).saturating_add(1)
    }

    /// Whether all of `other` lies inside.
    pub fn covers(&self, other: &Self) -> bool {
        self.start <= other.start && other.last <= self.last
    }
}

impl fmt::Display for IovaRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..={:#x}", self.start, self.last)
    }
}

/// Chooses I/O addresses from the reported ranges: page-granular, never in a hole, never below
/// [`LOWEST_IOVA`], next fit from a random start, so that addresses differ from those of an earlier run and
/// late writes of that run hit nothing.
#[derive(Debug)]
pub struct IovaAllocator {
    /// Free ranges by start; apart, never adjacent.
    free: BTreeMap<u64, u64>,
    /// Ranges handed out, by start.
    used: BTreeMap<u64, u64>,
    page: u64,
    next: u64,
}

impl IovaAllocator {
    /// An allocator over `ranges` in pages of `page` bytes (a power of two), beginning its search at `start`.
    ///
    /// Ranges may overlap or touch; they are merged and cut to whole pages.
    pub fn new(ranges: &[IovaRange], page: u64, start: u64) -> Self {
        let page = page.max(1).next_power_of_two();
        let mut sorted: Vec<IovaRange> = ranges
            .iter()
            .filter_map(|r| {
                let first = r.start.max(LOWEST_IOVA).checked_next_multiple_of(page)?;
                // The byte behind the last whole page, less one; wraps only when the range ends with the space.
                let last = match r.last.checked_add(1) {
                    Some(end) => (end & !(page - 1)).checked_sub(1)?,
                    None => u64::MAX,
                };
                (first <= last).then_some(IovaRange { start: first, last })
            })
            .collect();
        sorted.sort_unstable();
        let mut free: BTreeMap<u64, u64> = BTreeMap::new();
        for range in sorted {
            match free.last_entry() {
                Some(mut e) if e.get().saturating_add(1) >= range.start => {
                    let last = (*e.get()).max(range.last);
                    e.insert(last);
                }
                _ => {
                    free.insert(range.start, range.last);
                }
            }
        }
        Self {
            free,
            used: BTreeMap::new(),
            page,
            next: start,
        }
    }

    /// Granularity in bytes.
    pub fn page(&self) -> u64 {
        self.page
    }

    /// Hands out `bytes` (rounded up to whole pages) at a multiple of `align` (a power of two).
    pub fn allocate(&mut self, bytes: u64, align: u64) -> Result<IovaRange, PciError> {
        let align = align.max(self.page);
        let no_room = |free: &BTreeMap<u64, u64>| PciError::NoIova {
            bytes,
            align,
            largest: largest(free),
        };
        let rounded = match bytes.checked_next_multiple_of(self.page) {
            Some(b) if b > 0 && align.is_power_of_two() => b,
            _ => return Err(no_room(&self.free)),
        };
        let fit = |from: u64, last: u64| -> Option<IovaRange> {
            let start = from.checked_next_multiple_of(align)?;
            IovaRange::new(start, rounded).filter(|r| r.last <= last)
        };
        let next = self.next;
        let found = self
            .free
            .iter()
            .find_map(|(&start, &last)| (last >= next).then(|| fit(start.max(next), last)).flatten())
            .or_else(|| self.free.iter().find_map(|(&start, &last)| fit(start, last)))
            .ok_or_else(|| no_room(&self.free))?;
        self.take(found);
        self.next = found.last.wrapping_add(1);
        Ok(found)
    }

    /// Takes exactly this range, for memory whose address is given.
    pub fn reserve(&mut self, range: IovaRange) -> Result<(), PciError> {
        let whole_pages =
            range.start.is_multiple_of(self.page) && range.last.wrapping_add(1).is_multiple_of(self.page);
        let inside = self
            .free
            .range(..=range.start)
            .next_back()
            .is_some_and(|(&start, &last)| IovaRange { start, last }.covers(&range));
        if range.start > range.last || !whole_pages || !inside {
            let why = "they are not whole free pages of what the IOMMU reported";
            return Err(PciError::BadIova { range, why });
        }
        self.take(range);
        Ok(())
    }

    /// Gives back a range that was handed out, whole.
    pub fn release(&mut self, range: IovaRange) -> Result<(), PciError> {
        if self.used.get(&range.start) != Some(&range.last) {
            let why = "they were not handed out as one range";
            return Err(PciError::BadIova { range, why });
        }
        self.used.remove(&range.start);
        let mut merged = range;
        if let Some((&start, &last)) = self.free.range(..range.start).next_back()
            && last.checked_add(1) == Some(range.start)
        {
            self.free.remove(&start);
            merged.start = start;
        }
        if let Some(after) = range.last.checked_add(1)
            && let Some(last) = self.free.remove(&after)
        {
            merged.last = last;
        }
        self.free.insert(merged.start, merged.last);
        Ok(())
    }

    /// Free ranges, ascending.
    pub fn free(&self) -> impl Iterator<Item = IovaRange> {
        self.free.iter().map(|(&start, &last)| IovaRange { start, last })
    }

    /// `range` lies in one free range.
    fn take(&mut self, range: IovaRange) {
        let Some((&start, &last)) = self.free.range(..=range.start).next_back() else {
            return;
        };
        self.free.remove(&start);
        if start < range.start {
            self.free.insert(start, range.start - 1);
        }
        if range.last < last {
            self.free.insert(range.last + 1, last);
        }
        self.used.insert(range.start, range.last);
    }
}

fn largest(free: &BTreeMap<u64, u64>) -> u64 {
    free.iter()
        .map(|(&start, &last)| IovaRange { start, last }.bytes())
        .max()
        .unwrap_or(0)
}
