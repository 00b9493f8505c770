//! The two ends, and what stands at each of them.

use std::{
    collections::BTreeSet,
    fmt,
    ops::{Index, IndexMut},
};

use super::{
    account::SideStats,
    config::{self, ConfigSpec, header, pm},
    dma::ClientMemory,
    irq::Vectors,
    regfile::RegFile,
};

/// One end of the pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SideId {
    /// The first: upstream device, primary side.
    A,
    /// The second: downstream device, secondary side.
    B,
}

impl SideId {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::A, Self::B];

    /// The other one.
    pub const fn peer(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

impl fmt::Display for SideId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::A => "a",
            Self::B => "b",
        })
    }
}

/// One of something per side.
#[derive(Clone, Debug, Default)]
pub struct Both<T> {
    /// Side A's.
    pub a: T,
    /// Side B's.
    pub b: T,
}

impl<T> Both<T> {
    /// Makes one per side.
    pub fn from_fn(mut make: impl FnMut(SideId) -> T) -> Self {
        Self {
            a: make(SideId::A),
            b: make(SideId::B),
        }
    }
}

impl<T> Index<SideId> for Both<T> {
    type Output = T;
    fn index(&self, side: SideId) -> &T {
        match side {
            SideId::A => &self.a,
            SideId::B => &self.b,
        }
    }
}

impl<T> IndexMut<SideId> for Both<T> {
    fn index_mut(&mut self, side: SideId) -> &mut T {
        match side {
            SideId::A => &mut self.a,
            SideId::B => &mut self.b,
        }
    }
}

/// What a port without translation registers remembers of the commands it was given.
#[derive(Clone, Debug, Default)]
pub struct Firmware {
    /// Software asked for the link.
    pub link_asked: bool,
    /// Vectors configured, 0 for none.
    pub vectors: u32,
    /// Inbound windows: address and length.
    pub windows: [Option<(u64, u64)>; 4],
}

/// One end: its function, and what its client has lent it.
#[derive(Debug)]
pub struct Side {
    /// Configuration space.
    pub config: RegFile,
    /// Registers in BAR0.
    pub regs: RegFile,
    /// State of a firmware-driven port.
    pub firmware: Firmware,
    /// Message-signalled vectors.
    pub msix: Vectors,
    /// The error event.
    pub error: Vectors,
    /// The removal request event.
    pub request: Vectors,
    /// The client's memory.
    pub memory: ClientMemory,
    /// Stores that this memory's mappings refused, for a client that wants to be told.
    pub refused: Vec<(u64, Vec<u8>)>,
    /// Words of its registers that the other side wrote otherwise than they are, by offset: of what a window is made of
    /// only, see [`Family::window_registers`](super::family::Family::window_registers).
    pub misled: BTreeSet<u32>,
    /// A client is connected.
    pub attached: bool,
    /// The function is in its slot.
    pub present: bool,
    /// Counts.
    pub stats: SideStats,
    spec: ConfigSpec,
}

impl Side {
    /// A side after power-on.
    pub fn new(spec: ConfigSpec, config: RegFile, regs: RegFile) -> Self {
        Self {
            config,
            regs,
            firmware: Firmware::default(),
            msix: Vectors::new(spec.vectors.into()),
            error: Vectors::new(1),
            request: Vectors::new(1),
            memory: ClientMemory::default(),
            refused: Vec::new(),
            misled: BTreeSet::new(),
            attached: false,
            present: true,
            stats: SideStats::default(),
            spec,
        }
    }

    fn command(&self) -> u16 {
        self.config.get(header::COMMAND, 2) as u16
    }

    /// Whether the function is in full power.
    pub fn in_d0(&self) -> bool {
        let csr = self.config.get(u32::from(self.spec.pm_at) + pm::CSR, 2) as u16;
        csr & pm::CSR_STATE == 0
    }

    /// Whether memory accesses to its BARs are answered.
    pub fn answers(&self) -> bool {
        self.present && self.in_d0() && self.command() & header::COMMAND_MEMORY != 0
    }

    /// Whether it may send memory requests into its host, interrupts among them.
    pub fn masters(&self) -> bool {
        self.present && self.in_d0() && self.command() & header::COMMAND_MASTER != 0
    }

    /// Whether somebody drives it.
    pub fn live(&self) -> bool {
        self.present && self.attached && self.in_d0()
    }

    /// Base address last written to the 64-bit BAR `index`.
    pub fn bar_base(&self, index: u8) -> u64 {
        self.config.get(header::BAR0 + 4 * u32::from(index), 8) & !0xF
    }

    /// Offset of a register of the PCIe capability.
    pub fn pcie(&self, register: u32) -> u32 {
        u32::from(self.spec.pcie_at) + register
    }

    /// Offset of a register of the error-reporting capability.
    pub fn aer(&self, register: u32) -> u32 {
        u32::from(self.spec.aer_at) + register
    }

    /// As after power-on, whatever was before.
    pub fn power_cycle(&mut self) {
        self.config.reset();
        self.regs.reset();
        self.firmware = Firmware::default();
        self.misled.clear();
        self.stats.resets += 1;
    }

    /// Function-level reset: all registers, and all of configuration space but what errors leave behind and the BARs.
    ///
    /// Hardware clears the BARs too, and the host puts them back. A virtual machine monitor answers reads of them from a
    /// copy of its own, so that its guest sees nothing to put back: they would stay zero here, and limits, which are
    /// addresses behind a BAR, would open more than was asked for.
    pub fn reset(&mut self) {
        let errors = [
            self.aer(config::aer::UNCORRECTABLE),
            self.aer(config::aer::UNCORRECTABLE_MASK),
            self.aer(config::aer::SEVERITY),
            self.aer(config::aer::CORRECTABLE),
        ];
        let sticky: Vec<_> = errors
            .into_iter()
            .chain((0..6).map(|i| header::BAR0 + 4 * i))
            .map(|at| (at, self.config.get(at, 4)))
            .collect();
        self.power_cycle();
        for (at, value) in sticky {
            self.config.set(at, 4, value);
        }
    }
}
