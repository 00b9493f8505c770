//! Typed register access, and the dump.

use std::{fmt, sync::Arc};

use super::{
    Family, NtbError,
    regs::{Access, Readable, Reg, RegMap, Space, W1c, Width, Writable},
};
use crate::pci::{Bar, Function, PciError, PciFunction, config};

/// Whether every register access is traced (feature `trace-registers`). A constant: when off, nothing is left of it.
const TRACE: bool = cfg!(feature = "trace-registers");

/// The registers of a function in one BAR.
#[derive(Clone, Debug)]
pub struct Regs {
    function: Arc<dyn PciFunction>,
    bar: Bar,
}

impl Regs {
    /// Registers of a port of this family, whose BAR must be long enough.
    pub fn new(function: Arc<dyn PciFunction>, family: Family) -> Result<Self, NtbError> {
        let (bar, map_end) = family.registers();
        let available = function.bar_or_error(bar)?.bytes;
        if available < map_end {
            return Err(NtbError::TooSmall {
                device: function.name().to_owned(),
                what: "the register BAR",
                needed: map_end,
                available,
            });
        }
        Ok(Self { function, bar })
    }

    /// The function.
    pub fn function(&self) -> &Arc<dyn PciFunction> {
        &self.function
    }

    /// Reads a register.
    pub fn read<W: Width, A: Readable>(&self, reg: Reg<W, A>) -> Result<W, PciError> {
        let value = self.function.read(self.bar, reg.offset().into())?;
        if TRACE {
            tracing::trace!(target: "ntb::reg", "{} R {} = {value:#x}", self.function.name(), reg.name());
        }
        Ok(value)
    }

    /// Reads a register that is never all ones on a live device.
    pub fn read_live<W: Width, A: Readable>(&self, reg: Reg<W, A>) -> Result<W, NtbError> {
        let value = self.read(reg)?;
        if value == W::ALL_ONES {
            return Err(self.gone(reg.name()));
        }
        Ok(value)
    }

    /// Reads a register that may hold all ones: then `witness`, which may not, tells whether anybody is there.
    pub fn read_witnessed<W, A, V, B>(&self, reg: Reg<W, A>, witness: Reg<V, B>) -> Result<W, NtbError>
    where
        W: Width,
        A: Readable,
        V: Width,
        B: Readable,
    {
        let value = self.read(reg)?;
        if value == W::ALL_ONES {
            self.read_live(witness)?;
        }
        Ok(value)
    }

    /// Writes a register.
    pub fn write<W: Width, A: Writable>(&self, reg: Reg<W, A>, value: W) -> Result<(), PciError> {
        if TRACE {
            tracing::trace!(target: "ntb::reg", "{} W {} = {value:#x}", self.function.name(), reg.name());
        }
        self.function.write(self.bar, reg.offset().into(), value)
    }

    /// Clears bits of a register that clears what is written as one.
    pub fn clear<W: Width>(&self, reg: Reg<W, W1c>, bits: W) -> Result<(), PciError> {
        if TRACE {
            tracing::trace!(target: "ntb::reg", "{} C {} = {bits:#x}", self.function.name(), reg.name());
        }
        self.function.write(self.bar, reg.offset().into(), bits)
    }

    /// Writes a register and demands that it reads back the same. `hint` says what a difference means.
    pub fn write_back<W: Width, A: Readable + Writable>(
        &self,
        reg: Reg<W, A>,
        value: W,
        hint: &'static str,
    ) -> Result<(), NtbError> {
        self.write(reg, value)?;
        let read = self.read(reg)?;
        if read == value {
            return Ok(());
        }
        if read == W::ALL_ONES {
            return Err(self.gone(reg.name()));
        }
        Err(NtbError::NotTaken {
            device: self.function.name().to_owned(),
            register: reg.name(),
            wrote: value.to_u64(),
            read: read.to_u64(),
            hint,
        })
    }

    /// The error that nobody answers.
    pub fn gone(&self, register: &'static str) -> NtbError {
        NtbError::Gone {
            device: self.function.name().to_owned(),
            register,
        }
    }
}

/// A register's value in a [`dump`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dumped {
    /// The manual's name; the index for registers of a bank.
    pub name: String,
    /// Where it is.
    pub offset: u32,
    /// Bytes.
    pub width: u32,
    /// What it holds; `None` where a read would have an effect or gives nothing.
    pub value: Option<u64>,
}

impl fmt::Display for Dumped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#06x} {:<18}", self.offset, self.name)?;
        match self.value {
            Some(value) => write!(f, " {value:#0digits$x}", digits = 2 + 2 * self.width as usize),
            None => f.write_str(" -"),
        }
    }
}

/// Reads every register of a map that can be read without effect.
pub fn dump(function: &dyn PciFunction, map: &RegMap) -> Result<Vec<Dumped>, PciError> {
    let mut out = Vec::new();
    for reg in map.regs {
        for i in 0..reg.count {
            let offset = reg.offset + i * reg.step;
            let value = match reg.access {
                Access::Wo | Access::ReadSets => None,
                Access::Ro | Access::Rw | Access::W1c => {
                    Some(read_any(function, map.space, offset, reg.width)?)
                }
            };
            let name = if reg.count > 1 {
                format!("{}[{i}]", reg.name)
            } else {
                reg.name.to_owned()
            };
            out.push(Dumped {
                name,
                offset,
                width: reg.width,
                value,
            });
        }
    }
    Ok(out)
}

fn read_any(function: &dyn PciFunction, space: Space, offset: u32, width: u32) -> Result<u64, PciError> {
    match space {
        Space::Config => match width {
            1 => config::read8(function, offset).map(u64::from),
            2 => config::read16(function, offset).map(u64::from),
            _ => config::read32(function, offset).map(u64::from),
        },
        Space::Bar(bar) => {
            let bar = Bar::new(bar).unwrap_or(Bar::B0);
            let at = u64::from(offset);
            match width {
                1 => function.read::<u8>(bar, at).map(u64::from),
                2 => function.read::<u16>(bar, at).map(u64::from),
                4 => function.read::<u32>(bar, at).map(u64::from),
                _ => function.read::<u64>(bar, at),
            }
        }
    }
}
