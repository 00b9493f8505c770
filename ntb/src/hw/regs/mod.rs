//! Register definitions: one typed map per family, shared by driver, emulator and dump.
//!
//! A map is written with [`register_map!`](crate::register_map). Every byte of its range belongs to exactly one
//! register or one named gap; the compiler refuses a map with an overlap, a hole that is not declared, a
//! register that is not naturally aligned, or an end that does not match. Width and access kind are part of a
//! register's type, so a write to a read-only register or a 32-bit read of a 16-bit one does not compile.
//!
//! Names are those of the manuals and of the Linux drivers, so that logs can be compared.

pub mod amd;
pub mod epf;
pub mod intel_gen3;
pub mod intel_gen4;

use std::marker::PhantomData;

/// A width in which registers are accessed: `u8`, `u16`, `u32`, `u64`.
pub trait Width: Copy + Eq + std::fmt::LowerHex + std::fmt::Debug + sealed::Sealed + 'static {
    /// Bytes accessed at once.
    const BYTES: u32;
    /// All bits set: what a dead link or device answers.
    const ALL_ONES: Self;
    /// The value, widened.
    fn to_u64(self) -> u64;
    /// The low bits of `value`.
    fn from_u64(value: u64) -> Self;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! width {
    ($($t:ty)*) => {$(
        impl sealed::Sealed for $t {}
        impl Width for $t {
            const BYTES: u32 = size_of::<$t>() as u32;
            const ALL_ONES: Self = <$t>::MAX;
            fn to_u64(self) -> u64 {
                u64::from(self)
            }
            fn from_u64(value: u64) -> Self {
                value as $t
            }
        }
    )*};
}
width!(u8 u16 u32 u64);

/// What software may do with a register, as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads only; writes are ignored by the device.
    Ro,
    /// Reads give what was written.
    Rw,
    /// Writes have an effect; reads give zero or nothing of use.
    Wo,
    /// Reads give latched bits; writing ones clears them.
    W1c,
    /// A read changes the register (a semaphore): never dumped.
    ReadSets,
}

/// An access kind as a type; see [`Access`].
pub trait AccessKind: sealed::Sealed + 'static {
    /// The same as a value.
    const ACCESS: Access;
}
/// Kinds that may be read without side effect.
pub trait Readable: AccessKind {}
/// Kinds that take plain writes.
pub trait Writable: AccessKind {}

macro_rules! kind {
    ($($(#[$doc:meta])* $name:ident: $($cap:ident)*;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub enum $name {}
        impl sealed::Sealed for $name {}
        impl AccessKind for $name {
            const ACCESS: Access = Access::$name;
        }
        $(impl $cap for $name {})*
    )*};
}
kind! {
    /// See [`Access::Ro`].
    Ro: Readable;
    /// See [`Access::Rw`].
    Rw: Readable Writable;
    /// See [`Access::Wo`].
    Wo: Writable;
    /// See [`Access::W1c`].
    W1c: Readable;
    /// See [`Access::ReadSets`].
    ReadSets: ;
}

/// One register: where it is, how wide, what may be done with it.
#[derive(Debug)]
pub struct Reg<W, A> {
    offset: u32,
    name: &'static str,
    kind: PhantomData<fn() -> (W, A)>,
}

impl<W, A> Clone for Reg<W, A> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<W, A> Copy for Reg<W, A> {}

impl<W: Width, A: AccessKind> Reg<W, A> {
    /// A register at `offset` bytes from the start of its space. Prefer [`register_map!`](crate::register_map).
    pub const fn new(name: &'static str, offset: u32) -> Self {
        Self {
            offset,
            name,
            kind: PhantomData,
        }
    }

    /// Bytes from the start of the BAR or of configuration space.
    pub const fn offset(self) -> u32 {
        self.offset
    }

    /// The manual's name.
    pub const fn name(self) -> &'static str {
        self.name
    }

    /// The same register in another copy of the block, `by` bytes further (a peer's view).
    pub const fn shifted(self, by: u32) -> Self {
        Self {
            offset: self.offset + by,
            ..self
        }
    }
}

/// A bank of `N` registers of the same kind, `STEP` bytes apart.
#[derive(Debug)]
pub struct RegBank<W, A, const N: usize, const STEP: u32> {
    first: Reg<W, A>,
}

impl<W, A, const N: usize, const STEP: u32> Clone for RegBank<W, A, N, STEP> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<W, A, const N: usize, const STEP: u32> Copy for RegBank<W, A, N, STEP> {}

impl<W: Width, A: AccessKind, const N: usize, const STEP: u32> RegBank<W, A, N, STEP> {
    /// Registers in the bank.
    pub const LEN: usize = N;

    /// A bank whose first register is at `offset`.
    pub const fn new(name: &'static str, offset: u32) -> Self {
        Self {
            first: Reg::new(name, offset),
        }
    }

    /// Register `index`; `None` past the end.
    pub const fn get(self, index: usize) -> Option<Reg<W, A>> {
        if index < N {
            Some(self.first.shifted(index as u32 * STEP))
        } else {
            None
        }
    }

    /// Which register of the bank lies at `offset`, if one starts there.
    pub const fn index_of(self, offset: u32) -> Option<usize> {
        if offset < self.first.offset || !(offset - self.first.offset).is_multiple_of(STEP) {
            return None;
        }
        let index = ((offset - self.first.offset) / STEP) as usize;
        if index < N { Some(index) } else { None }
    }

    /// Offset of the first register.
    pub const fn offset(self) -> u32 {
        self.first.offset
    }

    /// The registers in order.
    pub fn iter(self) -> impl Iterator<Item = Reg<W, A>> {
        (0..N as u32).map(move |i| self.first.shifted(i * STEP))
    }

    /// The same bank `by` bytes further.
    pub const fn shifted(self, by: u32) -> Self {
        Self {
            first: self.first.shifted(by),
        }
    }
}

/// A register or bank as data, for the dump and for emulators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegInfo {
    /// The manual's name.
    pub name: &'static str,
    /// Offset of the (first) register.
    pub offset: u32,
    /// Bytes per register.
    pub width: u32,
    /// What may be done with it.
    pub access: Access,
    /// Registers in the bank, 1 for a single one.
    pub count: u32,
    /// Bytes from one register of the bank to the next.
    pub step: u32,
}

impl RegInfo {
    /// The offset behind the last register.
    pub const fn end(&self) -> u32 {
        self.offset + (self.count - 1) * self.step + self.width
    }
}

/// Bytes that belong to no register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// First byte.
    pub start: u32,
    /// The byte behind the last.
    pub end: u32,
}

/// Where a map lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// In the memory of this BAR.
    Bar(u8),
    /// In configuration space.
    Config,
}

/// A family's registers as data.
#[derive(Clone, Copy, Debug)]
pub struct RegMap {
    /// Name of the family.
    pub name: &'static str,
    /// Where the offsets count from.
    pub space: Space,
    /// First byte described.
    pub start: u32,
    /// The byte behind the last described.
    pub end: u32,
    /// Every register, by ascending offset.
    pub regs: &'static [RegInfo],
    /// Everything between them.
    pub gaps: &'static [Gap],
}

impl RegMap {
    /// The register or bank that covers byte `offset`.
    pub fn at(&self, offset: u32) -> Option<&RegInfo> {
        self.regs
            .iter()
            .find(|r| (r.offset..r.end()).contains(&offset) && (offset - r.offset) % r.step < r.width)
    }

    /// Refuses, at compile time, a map that does not tile its range exactly.
    ///
    /// # Panics
    /// When the map is wrong: the message says how. Called by [`register_map!`](crate::register_map) in a constant.
    #[allow(
        clippy::indexing_slicing,
        clippy::panic,
        reason = "runs in the compiler, which turns a panic into an error"
    )]
    pub const fn check(&self) {
        let mut at = self.start;
        let (mut r, mut g) = (0, 0);
        while at < self.end {
            if r < self.regs.len() && self.regs[r].offset == at {
                let reg = &self.regs[r];
                assert!(
                    reg.offset.is_multiple_of(reg.width),
                    "a register is not naturally aligned"
                );
                assert!(
                    reg.count > 0 && reg.step >= reg.width,
                    "registers of a bank overlap"
                );
                assert!(
                    reg.step.is_multiple_of(reg.width),
                    "a bank's step breaks its alignment"
                );
                at = reg.end();
                r += 1;
            } else if g < self.gaps.len() && self.gaps[g].start == at {
                assert!(self.gaps[g].end > at, "an empty gap");
                at = self.gaps[g].end;
                g += 1;
            } else {
                panic!("bytes that belong to no register and no declared gap, or an overlap");
            }
        }
        assert!(
            at == self.end,
            "the last register or gap passes the end of the map"
        );
        assert!(
            r == self.regs.len() && g == self.gaps.len(),
            "an entry is out of order or outside the map"
        );
    }
}

/// Defines a register map: typed constants and a [`RegMap`] named `MAP`, checked at compile time.
///
/// ```
/// ntb::register_map! {
///     /// A tiny device.
///     pub MAP "tiny" in Bar(0), 0x0..0x20 {
///         /// Control.
///         CTRL: u32 Rw @ 0x0;
///         /// Doorbells, one bit each.
///         DB: [u32; 2] Wo @ 0x8 step 8;
///     }
///     gaps { 0x4..0x8, 0x14..0x20 }
/// }
/// assert_eq!(DB.get(1).unwrap().offset(), 0x10);
/// assert_eq!(MAP.at(0x2).unwrap().name, "CTRL");
/// ```
#[macro_export]
macro_rules! register_map {
    (
        $(#[$mdoc:meta])*
        $vis:vis $map:ident $mname:literal in $space:ident $(($bar:literal))?, $start:literal..$end:literal {
            $($(#[$doc:meta])* $name:ident: $ty:tt $kind:ident @ $off:literal $(step $step:literal)?;)*
        }
        gaps { $($gs:literal..$ge:literal),* $(,)? }
    ) => {
        $($crate::register_map!(@one ($vis) $(#[$doc])* $name: $ty $kind @ $off $(step $step)?);)*

        $(#[$mdoc])*
        $vis const $map: $crate::hw::regs::RegMap = $crate::hw::regs::RegMap {
            name: $mname,
            space: $crate::hw::regs::Space::$space $(($bar))?,
            start: $start,
            end: $end,
            regs: &[$($crate::register_map!(@info $name: $ty $kind @ $off $(step $step)?)),*],
            gaps: &[$($crate::hw::regs::Gap { start: $gs, end: $ge }),*],
        };
        const _: () = $map.check();
    };
    (@one ($vis:vis) $(#[$doc:meta])* $name:ident: [$w:ident; $n:literal] $kind:ident @ $off:literal step $step:literal) => {
        $(#[$doc])*
        $vis const $name: $crate::hw::regs::RegBank<$w, $crate::hw::regs::$kind, $n, $step> =
            $crate::hw::regs::RegBank::new(stringify!($name), $off);
    };
    (@one ($vis:vis) $(#[$doc:meta])* $name:ident: $w:ident $kind:ident @ $off:literal) => {
        $(#[$doc])*
        $vis const $name: $crate::hw::regs::Reg<$w, $crate::hw::regs::$kind> =
            $crate::hw::regs::Reg::new(stringify!($name), $off);
    };
    (@info $name:ident: [$w:ident; $n:literal] $kind:ident @ $off:literal step $step:literal) => {
        $crate::hw::regs::RegInfo {
            name: stringify!($name),
            offset: $off,
            width: size_of::<$w>() as u32,
            access: $crate::hw::regs::Access::$kind,
            count: $n,
            step: $step,
        }
    };
    (@info $name:ident: $w:ident $kind:ident @ $off:literal) => {
        $crate::hw::regs::RegInfo {
            name: stringify!($name),
            offset: $off,
            width: size_of::<$w>() as u32,
            access: $crate::hw::regs::Access::$kind,
            count: 1,
            step: size_of::<$w>() as u32,
        }
    };
}
