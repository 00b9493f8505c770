//! A register file that follows a [`RegMap`].

use super::{super::Bar, Model};
use crate::hw::regs::{Access, Reg, RegMap, Width};

/// What runs after a write: gets the file, offset, width and value.
type Hook = Box<dyn FnMut(&mut Registers, u64, u32, u64) + Send>;

/// Bytes of BAR0 with the access kinds of a map: read-only registers keep their value, W1C registers lose the bits
/// written, write-only ones read zero. Bytes outside the map are plain memory. Everything outside BAR0 reads zero.
pub struct RegisterFile {
    registers: Registers,
    at_reset: Vec<u8>,
    hook: Option<Hook>,
}

/// The bytes behind a [`RegisterFile`].
#[derive(Debug)]
pub struct Registers {
    map: &'static RegMap,
    bytes: Vec<u8>,
}

impl std::fmt::Debug for RegisterFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.registers.map.name.fmt(f)
    }
}

impl RegisterFile {
    /// `bytes` of zeros, for this map.
    pub fn new(map: &'static RegMap, bytes: usize) -> Self {
        Self {
            registers: Registers {
                map,
                bytes: vec![0; bytes],
            },
            at_reset: vec![0; bytes],
            hook: None,
        }
    }

    /// Value of a register at reset.
    #[must_use]
    pub fn preset<W: Width, A>(mut self, reg: Reg<W, A>, value: W) -> Self
    where
        A: crate::hw::regs::AccessKind,
    {
        self.registers.set(reg, value);
        self.at_reset.clone_from(&self.registers.bytes);
        self
    }

    /// Runs `hook` after every write to BAR0, with what was written.
    #[must_use]
    pub fn on_write(mut self, hook: impl FnMut(&mut Registers, u64, u32, u64) + Send + 'static) -> Self {
        self.hook = Some(Box::new(hook));
        self
    }
}

impl Registers {
    /// The value that the device holds, whatever software may see of it.
    pub fn get<W: Width, A: crate::hw::regs::AccessKind>(&self, reg: Reg<W, A>) -> W {
        W::from_u64(self.load(reg.offset().into(), W::BYTES))
    }

    /// Sets a value as the device itself does.
    pub fn set<W: Width, A: crate::hw::regs::AccessKind>(&mut self, reg: Reg<W, A>, value: W) {
        self.store(reg.offset().into(), W::BYTES, value.to_u64());
    }

    fn load(&self, offset: u64, bytes: u32) -> u64 {
        let mut word = [0; 8];
        for (at, place) in (offset as usize..).zip(word.iter_mut().take(bytes as usize)) {
            *place = self.bytes.get(at).copied().unwrap_or(0);
        }
        u64::from_le_bytes(word)
    }

    fn store(&mut self, offset: u64, bytes: u32, value: u64) {
        for (at, byte) in (offset as usize..).zip(value.to_le_bytes()).take(bytes as usize) {
            if let Some(place) = self.bytes.get_mut(at) {
                *place = byte;
            }
        }
    }

    fn access(&self, offset: u64) -> Access {
        let at = u32::try_from(offset).ok().and_then(|o| self.map.at(o));
        at.map_or(Access::Rw, |reg| reg.access)
    }
}

impl Model for RegisterFile {
    fn read(&mut self, bar: Bar, offset: u64, bytes: u32) -> u64 {
        if bar != Bar::B0 || self.registers.access(offset) == Access::Wo {
            return 0;
        }
        self.registers.load(offset, bytes)
    }

    fn write(&mut self, bar: Bar, offset: u64, bytes: u32, value: u64) {
        if bar != Bar::B0 {
            return;
        }
        match self.registers.access(offset) {
            Access::Ro | Access::Wo | Access::ReadSets => {}
            Access::Rw => self.registers.store(offset, bytes, value),
            Access::W1c => {
                let old = self.registers.load(offset, bytes);
                self.registers.store(offset, bytes, old & !value);
            }
        }
        if let Some(hook) = &mut self.hook {
            hook(&mut self.registers, offset, bytes, value);
        }
    }

    fn reset(&mut self) {
        self.registers.bytes.clone_from(&self.at_reset);
    }
}
