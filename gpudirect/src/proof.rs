//! Proof before use: a pattern that depends on its place goes the whole way, and both ends compare, before the first message.
//!
//! Success codes are not believed: a mapping can be made between two devices whose stores never meet, be it by an access control
//! bit in a switch or by a translation that points elsewhere. The pattern is the one with which a link's own data path is
//! proven (docs/wire.md), from line 0 on of the memory.

use ntb_mem::line::{LINE_BYTES, Line};
use ntb_ring::wire::pattern::Pattern;

use crate::GpuError;

/// What keeps a path from carrying data.
pub(crate) const LOOK_FOR: &str = "look for access control (ACS) between the two devices, for different root ports or sockets, and \
                                   for the IOMMU's faults in the kernel log; 'ntb-check' lists them";

/// A pattern over a memory, the same at both ends when they agree on the four numbers.
#[derive(Clone, Copy, Debug)]
pub struct Proof {
    pattern: Pattern,
    number: u16,
    lines: u64,
}

impl Proof {
    /// `direction` names this direction of this life; `number` tells one attempt from the next; the memory has `lines` lines.
    pub fn new(direction: u64, number: u16, lines: u64) -> Self {
        Self {
            pattern: Pattern::new(direction, number),
            number,
            lines,
        }
    }

    /// What the sender stores, and at which lines: the first, the last, and some between.
    pub fn lines(&self) -> Vec<(u64, Line)> {
        let pattern = self.pattern;
        pattern
            .places_from(0, self.lines)
            .map(|at| (at, pattern.line(at)))
            .collect()
    }

    /// Holds what has arrived against it. `read` copies bytes out of the memory.
    pub fn verify(
        &self,
        mut read: impl FnMut(u64, &mut [u8]) -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        let (mut wrong, mut blank, mut first) = (0, 0, None);
        let lines = self.lines();
        for (at, expected) in &lines {
            let mut bytes = [0; LINE_BYTES];
            read(at * LINE_BYTES as u64, &mut bytes)?;
            if bytes != expected.to_bytes() {
                wrong += 1;
                blank += u32::from(bytes.iter().all(|b| *b == 0) || bytes.iter().all(|b| *b == 0xff));
                first = first.or(Some(*at));
            }
        }
        let Some(first) = first else { return Ok(()) };
        Err(GpuError::new(
            "gpu-path-unproven",
            5,
            format!(
                "of pattern {}, {wrong} of {} lines are not there, {blank} of these are blank; the first is line {first} of {}. The \
                 path was set up without an error and does not carry data: {LOOK_FOR}",
                self.number,
                lines.len(),
                self.lines
            ),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_line_anywhere_is_found() {
        let proof = Proof::new(7, 3, 1000);
        let mut memory = vec![0u8; 64_000];
        let read = |memory: &[u8]| {
            let memory = memory.to_vec();
            move |at: u64, to: &mut [u8]| {
                to.copy_from_slice(&memory[at as usize..at as usize + to.len()]);
                Ok(())
            }
        };
        let e = proof.verify(read(&memory)).unwrap_err();
        assert_eq!((e.name, e.exit), ("gpu-path-unproven", 5));
        assert!(
            e.what.contains("8 of 8 lines") && e.what.contains("8 of these are blank"),
            "{e}"
        );
        for (at, line) in proof.lines() {
            memory[at as usize * 64..][..64].copy_from_slice(&line.to_bytes());
        }
        proof.verify(read(&memory)).unwrap();
        assert!(
            Proof::new(7, 4, 1000).verify(read(&memory)).is_err(),
            "another attempt's"
        );
        assert!(
            Proof::new(8, 3, 1000).verify(read(&memory)).is_err(),
            "another direction's"
        );
        for (at, _) in proof.lines() {
            for byte in [0, 63] {
                let mut one = memory.clone();
                one[at as usize * 64 + byte] ^= 1;
                assert!(proof.verify(read(&one)).is_err(), "line {at}, byte {byte}");
            }
        }
    }
}
