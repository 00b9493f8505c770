//! Which memory type an aperture really has: by the kernel's table where it can be read, else by measuring.
//!
//! A mapping that was asked for write-combining may be uncached all the same (another mapping came first, a hypervisor
//! decides otherwise), and then small messages cost eight writes instead of one and bulk runs at a tenth of the rate.

#![allow(unsafe_code, reason = "stores to the aperture")]

use std::{
    fmt,
    time::{Duration, Instant},
};

use ntb_mem::{
    line::{LINE_BYTES, Line},
    store::{self, Width},
};

use super::{Aperture, ApertureKind};
use crate::{
    hw::NtbError,
    pci::{CacheType, machine::Machine},
};

/// How a memory type was found out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Evidence {
    /// The kernel's table of page attributes says so.
    Table,
    /// Stores were timed: whole lines against the same lines in eight separate writes.
    Measured {
        /// Time per whole line.
        line: Duration,
        /// Time per line of eight writes.
        words: Duration,
    },
    /// The mapping was asked for so, and nobody could say more.
    Asked,
}

/// The memory type of an aperture.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryType {
    /// The type that stores meet.
    pub cache: CacheType,
    /// How that is known.
    pub evidence: Evidence,
}

impl fmt::Display for MemoryType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.evidence {
            Evidence::Table => write!(f, "{} (by the kernel's table)", self.cache),
            Evidence::Measured { line, words } => {
                write!(
                    f,
                    "{} (measured: {line:?} per line, {words:?} in eight writes)",
                    self.cache
                )
            }
            Evidence::Asked => write!(f, "{} (as asked for; not verified)", self.cache),
        }
    }
}

impl MemoryType {
    /// What to do when this is the slow type; `None` when it is not.
    pub fn remedy(&self) -> Option<&'static str> {
        (self.cache == CacheType::Uncached).then_some(
            "stores are uncached: eight bus writes per line, and a tenth of the bandwidth. Open the port as root, so \
             that resourceN_wc in sysfs can be mapped; keep Secure Boot's lockdown off; let nothing else map the BAR \
             first. A processor with movdir64b stores whole lines all the same",
        )
    }
}

/// File with the kernel's table; for root, with debugfs mounted.
const TABLE: &str = "/sys/kernel/debug/x86/pat_memtype_list";
/// Whole lines are combined when they are so many times faster than their eight words one by one. One burst against
/// eight writes makes four or more on hardware; an uncached mapping makes about one.
const RATIO: u32 = 2;
/// Lines per timing.
const LINES: u64 = 16;
/// Timings, of which the best counts: interrupts only ever add.
const ROUNDS: usize = 32;

/// Finds out the memory type of an aperture whose BAR lies at `physical` (zero when unknown).
///
/// Where the kernel's table cannot be read, stores a few lines of zeros to the aperture from `offset` on: memory at
/// the peer that nobody uses yet. `None` on trapped apertures, which have no memory type.
pub fn find_out(
    machine: &Machine,
    aperture: &Aperture,
    physical: u64,
    offset: u64,
) -> Result<Option<MemoryType>, NtbError> {
    let ApertureKind::Mapped(asked) = aperture.kind() else {
        return Ok(None);
    };
    if asked == CacheType::WriteBack {
        let evidence = Evidence::Asked;
        return Ok(Some(MemoryType {
            cache: asked,
            evidence,
        }));
    }
    let listed = machine.text(TABLE).and_then(|table| look_up(&table, physical));
    if let Some(cache) = listed.filter(|_| physical != 0) {
        let evidence = Evidence::Table;
        return Ok(Some(MemoryType { cache, evidence }));
    }
    let (line, words) = measure(aperture, offset)?;
    Ok(Some(MemoryType {
        cache: classify(line, words),
        evidence: Evidence::Measured { line, words },
    }))
}

fn classify(line: Duration, words: Duration) -> CacheType {
    if line * RATIO <= words {
        CacheType::WriteCombining
    } else {
        CacheType::Uncached
    }
}

#[allow(
    clippy::cast_ptr_alignment,
    reason = "mappings start on pages, and the offset is a multiple of a line"
)]
/// Time per line, stored whole and stored as eight writes that cannot combine.
fn measure(aperture: &Aperture, offset: u64) -> Result<(Duration, Duration), NtbError> {
    let bytes = LINES * LINE_BYTES as u64;
    // The first whole line: streaming stores demand it.
    let offset = offset.next_multiple_of(LINE_BYTES as u64);
    let base = aperture.pointer(offset, bytes)?.cast::<u64>();
    let width = Width::widest(ntb_mem::cpu::CpuFeatures::detect());
    let lines = || (0..LINES as usize).map(|i| base.wrapping_add(i * 8));
    let mut best = [Duration::MAX; 2];
    for _ in 0..ROUNDS {
        store::drain();
        let start = Instant::now();
        for line in lines() {
            // SAFETY: `pointer` gave the bytes of all lines, mapped as long as the aperture; mappings start on pages and
            // windows on pages within, so lines are aligned. The width is one that the processor has.
            unsafe { store::combined(line, &Line::ZERO, width) };
        }
        store::drain();
        let whole = start.elapsed();
        let start = Instant::now();
        for line in lines() {
            for word in 0..8 {
                // SAFETY: as above.
                unsafe { line.wrapping_add(word).write_volatile(0) };
                store::drain();
            }
        }
        let words = start.elapsed();
        for (best, now) in best.iter_mut().zip([whole, words]) {
            *best = (*best).min(now);
        }
    }
    let [whole, words] = best.map(|t| t / LINES as u32);
    Ok((whole, words))
}

/// The type that the table gives for an address. Two forms are known, of older and newer kernels.
fn look_up(table: &str, physical: u64) -> Option<CacheType> {
    let number = |t: &str| u64::from_str_radix(t.trim().trim_start_matches("0x"), 16).ok();
    table.lines().find_map(|line| {
        let (range, kind, inclusive) = if let Some((kind, range)) = line.split_once(" @ ") {
            (range, kind, false)
        } else {
            let (range, kind) = line.split_once("[mem ")?.1.split_once(']')?;
            (range, kind, true)
        };
        let (start, end) = range.split_once('-')?;
        let (start, end) = (number(start)?, number(end)?);
        let inside = start <= physical
            && if inclusive {
                physical <= end
            } else {
                physical < end
            };
        if !inside {
            return None;
        }
        match kind.trim() {
            "write-combining" => Some(CacheType::WriteCombining),
            "uncached" | "uncached-minus" => Some(CacheType::Uncached),
            "write-back" => Some(CacheType::WriteBack),
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_the_table_are_read() {
        let old = "PAT memtype list:\nwrite-back @ 0x0-0x1000\nuncached-minus @ 0xfe000000-0xfe010000\n\
                   write-combining @ 0x380000000000-0x380040000000\n";
        let new = "PAT memtype list:\nPAT: [mem 0x00000000fe000000-0x00000000fe00ffff] uncached-minus\n\
                   PAT: [mem 0x0000380000000000-0x000038003fffffff] write-combining\n";
        for table in [old, new] {
            assert_eq!(look_up(table, 0xFE00_0000), Some(CacheType::Uncached));
            assert_eq!(look_up(table, 0x3800_3FFF_FFFF), Some(CacheType::WriteCombining));
            assert_eq!(look_up(table, 0x3800_4000_0000), None, "behind the end");
        }
        assert_eq!(look_up("nonsense @ x-y\n[mem 1]\n", 1), None);
    }

    #[test]
    fn combining_is_told_by_the_ratio() {
        let ns = Duration::from_nanos;
        assert_eq!(classify(ns(12), ns(160)), CacheType::WriteCombining);
        assert_eq!(classify(ns(150), ns(170)), CacheType::Uncached);
        let slow = MemoryType {
            cache: CacheType::Uncached,
            evidence: Evidence::Asked,
        };
        assert!(slow.remedy().is_some_and(|r| r.contains("resourceN_wc")));
    }
}
