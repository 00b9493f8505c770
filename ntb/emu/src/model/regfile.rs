//! A block of registers as bytes with access rules per bit: any width, any alignment, byte lanes honoured.

use ntb::hw::regs::{Access, Reg, RegMap, Width};

/// A register block: what reads give, which bits take writes, which are cleared by writing ones.
#[derive(Clone, Debug)]
pub struct RegFile {
    value: Vec<u8>,
    reset: Vec<u8>,
    writable: Vec<u8>,
    clears: Vec<u8>,
    known: Vec<bool>,
}

impl RegFile {
    /// `bytes` bytes that read as zero and ignore writes.
    pub fn new(bytes: usize) -> Self {
        Self {
            value: vec![0; bytes],
            reset: vec![0; bytes],
            writable: vec![0; bytes],
            clears: vec![0; bytes],
            known: vec![false; bytes],
        }
    }

    /// Adds every register of a map: read-write ones take all bits, write-only ones read as zero.
    pub fn with_map(mut self, map: &RegMap) -> Self {
        for reg in map.regs {
            for i in 0..reg.count {
                let offset = reg.offset + i * reg.step;
                let (writable, clears) = match reg.access {
                    Access::Rw | Access::ReadSets => (u64::MAX, 0),
                    Access::W1c => (0, u64::MAX),
                    Access::Ro | Access::Wo => (0, 0),
                };
                self.define(offset, reg.width, writable, clears, 0);
            }
        }
        self
    }

    /// Defines `width` bytes at `offset`: bits that take writes, bits that a one clears, value after reset.
    /// Bytes outside the block are ignored.
    pub fn define(&mut self, offset: u32, width: u32, writable: u64, clears: u64, reset: u64) {
        let lanes = writable
            .to_le_bytes()
            .into_iter()
            .zip(clears.to_le_bytes())
            .zip(reset.to_le_bytes())
            .take(width as usize);
        for (i, ((w, c), r)) in (offset as usize..).zip(lanes) {
            if let (Some(value), Some(reset), Some(writable), Some(clears), Some(known)) = (
                self.value.get_mut(i),
                self.reset.get_mut(i),
                self.writable.get_mut(i),
                self.clears.get_mut(i),
                self.known.get_mut(i),
            ) {
                (*value, *reset, *writable, *clears, *known) = (r, r, w, c, true);
            }
        }
    }

    /// Bytes of the block.
    pub fn bytes(&self) -> u64 {
        self.value.len() as u64
    }

    /// Whether every byte of the range belongs to a register.
    pub fn knows(&self, offset: u64, len: usize) -> bool {
        self.range(offset, len)
            .and_then(|r| self.known.get(r))
            .is_some_and(|k| k.iter().all(|&k| k))
    }

    fn range(&self, offset: u64, len: usize) -> Option<std::ops::Range<usize>> {
        let start = usize::try_from(offset).ok()?;
        Some(start..start.checked_add(len)?)
    }

    /// Reads; bytes outside the block are all ones, as where nobody answers.
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        let held = self.range(offset, out.len()).and_then(|r| self.value.get(r));
        match held {
            Some(held) => out.copy_from_slice(held),
            None => out.fill(0xFF),
        }
    }

    /// Writes as software does: writable bits take the data, write-one-to-clear bits are cleared by ones.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let Some(range) = self.range(offset, data.len()) else {
            return;
        };
        let (Some(value), Some(writable), Some(clears)) = (
            self.value.get_mut(range.clone()),
            self.writable.get(range.clone()),
            self.clears.get(range),
        ) else {
            return;
        };
        for (((v, w), c), d) in value.iter_mut().zip(writable).zip(clears).zip(data) {
            *v = ((*v & !w) | (d & w)) & !(d & c);
        }
    }

    /// The value of `width` bytes (at most 8) at `offset`; zero outside.
    pub fn get(&self, offset: u32, width: u32) -> u64 {
        let mut bytes = [0; 8];
        for (b, i) in bytes.iter_mut().zip(offset as usize..).take(width as usize) {
            *b = self.value.get(i).copied().unwrap_or(0);
        }
        u64::from_le_bytes(bytes)
    }

    /// Sets `width` bytes as the device itself does, whatever their access rules.
    pub fn set(&mut self, offset: u32, width: u32, value: u64) {
        for (b, i) in value
            .to_le_bytes()
            .into_iter()
            .zip(offset as usize..)
            .take(width as usize)
        {
            if let Some(v) = self.value.get_mut(i) {
                *v = b;
            }
        }
    }

    /// [`RegFile::get`] by definition.
    pub fn reg<W: Width, A>(&self, reg: Reg<W, A>) -> W
    where
        A: ntb::hw::regs::AccessKind,
    {
        W::from_u64(self.get(reg.offset(), W::BYTES))
    }

    /// [`RegFile::set`] by definition.
    pub fn set_reg<W: Width, A>(&mut self, reg: Reg<W, A>, value: W)
    where
        A: ntb::hw::regs::AccessKind,
    {
        self.set(reg.offset(), W::BYTES, value.to_u64());
    }

    /// Changes what `reg` holds after reset, and now.
    pub fn reset_reg<W: Width, A>(&mut self, reg: Reg<W, A>, value: W)
    where
        A: ntb::hw::regs::AccessKind,
    {
        self.set_reg(reg, value);
        let start = reg.offset() as usize;
        for (b, i) in value
            .to_u64()
            .to_le_bytes()
            .into_iter()
            .zip(start..start + W::BYTES as usize)
        {
            if let Some(r) = self.reset.get_mut(i) {
                *r = b;
            }
        }
    }

    /// Back to the values after reset.
    pub fn reset(&mut self) {
        self.value.clone_from(&self.reset);
    }
}

/// Whether an access of `len` bytes at `offset` touches `width` bytes at `reg`.
pub fn touches(offset: u64, len: usize, reg: u32, width: u32) -> bool {
    let reg = u64::from(reg);
    offset < reg + u64::from(width) && reg < offset.saturating_add(len as u64)
}

/// Splits an access into naturally aligned pieces of 1, 2, 4 or 8 bytes, ascending: `(offset, bytes)`.
pub fn pieces(offset: u64, len: usize) -> impl Iterator<Item = (u64, usize)> {
    let end = offset.saturating_add(len as u64);
    let mut at = offset;
    std::iter::from_fn(move || {
        let left = end - at;
        if left == 0 {
            return None;
        }
        let by_address = if at == 0 {
            8
        } else {
            1 << at.trailing_zeros().min(3)
        };
        let by_length = 1 << left.ilog2().min(3);
        let size = by_address.min(by_length);
        let piece = (at, size as usize);
        at += size;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_aligned_and_cover() {
        assert_eq!(pieces(2, 8).collect::<Vec<_>>(), [(2, 2), (4, 4), (8, 2)]);
        assert_eq!(pieces(0, 16).collect::<Vec<_>>(), [(0, 8), (8, 8)]);
        assert_eq!(pieces(7, 2).collect::<Vec<_>>(), [(7, 1), (8, 1)]);
        assert_eq!(pieces(5, 0).count(), 0);
    }

    #[test]
    fn lanes_and_kinds() {
        let mut f = RegFile::new(16);
        f.define(0, 4, 0x00FF_FFFF, 0, 0x1122_3344);
        f.define(4, 4, 0, 0xFFFF_FFFF, 0xF0F0_F0F0);
        f.write(1, &[0xAA]);
        assert_eq!(f.get(0, 4), 0x1122_AA44);
        f.write(2, &[0xBB, 0xCC]); // the top byte takes no writes
        assert_eq!(f.get(0, 4), 0x11BB_AA44);
        f.write(4, &[0xFF, 0x0F, 0x30]);
        assert_eq!(f.get(4, 4), 0xF0C0_F000);
        f.write(8, &[1, 2, 3]); // reserved
        assert_eq!(f.get(8, 4), 0);
        let mut out = [0; 4];
        f.read(14, &mut out);
        assert_eq!(out, [0xFF; 4], "beyond the block nobody answers");
        f.write(u64::MAX, &[1, 2]);
        f.reset();
        assert_eq!(f.get(0, 8), 0xF0F0_F0F0_1122_3344);
        assert!(f.knows(0, 8) && !f.knows(7, 2) && !f.knows(u64::MAX, 2));
    }
}
