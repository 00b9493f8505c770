//! One PCI function, whoever provides it: the kernel, a device emulator on a socket, or a fake in the process.
//!
//! [`PciFunction`] is the seam. It is object-safe; a driver holds an `Arc<dyn PciFunction>` and cannot tell the
//! backends apart. Its required methods move bytes; the checks, and everything that follows from the PCI
//! specification, are written once: [`config`] for configuration space, [`Function`] for registers.
//!
//! Guards ([`BarMap`], [`DmaMapping`]) hold the function open, so a mapping cannot outlive the
//! device it belongs to; the device closes when the last guard is gone.

mod bar_map;
pub mod config;
mod dma;
mod error;
mod event;
pub mod fake;
mod fault;
pub mod iova;
pub mod machine;
mod open_error;
pub mod vfio;
pub mod vfio_user;

use std::{fmt, os::fd::BorrowedFd, sync::Arc};

pub use bar_map::{BarMap, MappedArea};
pub use dma::{DmaMapping, DmaMemory, DmaSpace};
pub use error::{Areas, ExitClass, PciError};
pub use event::EventFd;
pub use open_error::{GroupMember, OpenError, bind_command};

use crate::hw::regs::Width;
use iova::IovaRange;

/// Number of a base address register, 0 to 5.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bar(u8);

impl Bar {
    /// BAR0: the registers of every NTB.
    pub const B0: Self = Self(0);
    /// BAR1.
    pub const B1: Self = Self(1);
    /// BAR2: the first memory window, mostly.
    pub const B2: Self = Self(2);
    /// BAR3.
    pub const B3: Self = Self(3);
    /// BAR4: the second memory window, mostly.
    pub const B4: Self = Self(4);
    /// BAR5.
    pub const B5: Self = Self(5);
    /// All six.
    pub const ALL: [Self; 6] = [Self(0), Self(1), Self(2), Self(3), Self(4), Self(5)];

    /// BAR `index`; `None` above 5.
    pub const fn new(index: u8) -> Option<Self> {
        if index < 6 { Some(Self(index)) } else { None }
    }

    /// 0 to 5.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A part of a BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl Area {
    /// The byte behind the last; saturates.
    pub const fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }

    /// Whether all of `bytes` from `offset` lie inside.
    pub const fn contains(&self, offset: u64, bytes: u64) -> bool {
        match offset.checked_add(bytes) {
            Some(end) => offset >= self.offset && end <= self.end(),
            None => false,
        }
    }
}

/// Facts about a BAR that do not change while the function is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BarInfo {
    /// Which.
    pub bar: Bar,
    /// Size in bytes, never zero.
    pub bytes: u64,
    /// Whether writes may be combined by bridges and mappings may be write-combining.
    pub prefetchable: bool,
    /// The areas that can be mapped, ascending and apart; empty where accesses are trapped.
    pub mappable: Vec<Area>,
}

/// Memory type of a mapping, as the processor treats stores to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CacheType {
    /// Stores gather in combining buffers and leave as bursts.
    WriteCombining,
    /// Each store is a bus write.
    Uncached,
    /// Plain memory behind an emulated BAR.
    WriteBack,
}

impl fmt::Display for CacheType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::WriteCombining => "write-combining",
            Self::Uncached => "uncached",
            Self::WriteBack => "write-back",
        })
    }
}

/// What stands between the device and the memory of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isolation {
    /// An IOMMU: the device reaches what was mapped and nothing else.
    Iommu,
    /// Nothing: the device reaches all memory. Only by explicit option; results are marked with it.
    None,
    /// The device is software that reaches what was mapped.
    Software,
}

/// Something that happens to the function as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Notice {
    /// An error that cannot be corrected was reported; the kernel may reset the function.
    Error,
    /// The function is about to be taken away: everything must be let go.
    Release,
}

impl Notice {
    /// Interrupt index that VFIO gives it.
    fn interrupt(self) -> u32 {
        match self {
            Self::Error => vfio_user::proto::irq::ERROR,
            Self::Release => vfio_user::proto::irq::REQUEST,
        }
    }
}

/// What a reset would do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResetPlan {
    /// The method that would be used, in words; `None` when there is no way to reset the function.
    pub method: Option<String>,
    /// What else it would hit, each with the driver that holds it.
    pub also: Vec<String>,
}

/// One PCI function, open and exclusively held.
///
/// All methods take `&self`: implementations serialise what must be. Any of them may fail at any time, since the
/// device can be pulled; none blocks without bound. Offsets and lengths are checked by the callers in [`Function`]
/// and [`config`], and again by implementations as far as memory safety depends on them.
pub trait PciFunction: Send + Sync + fmt::Debug {
    /// Name for messages: a PCI address, a socket path.
    fn name(&self) -> &str;

    /// Bytes of configuration space that can be accessed: 256 or 4096.
    fn config_size(&self) -> u32;

    /// One read of 1, 2 or 4 naturally aligned bytes. Use [`config::read8`] and its kin.
    fn raw_config_read(&self, offset: u32, data: &mut [u8]) -> Result<(), PciError>;

    /// One write of 1, 2 or 4 naturally aligned bytes. Use [`config::write8`] and its kin.
    fn raw_config_write(&self, offset: u32, data: &[u8]) -> Result<(), PciError>;

    /// Facts about a BAR; `None` where there is none (upper halves of 64-bit BARs included).
    fn bar(&self, bar: Bar) -> Option<&BarInfo>;

    /// Bus address of the BAR as the device sees it now: what Intel's limit registers count from. It may be zero on
    /// an emulated device that nobody enumerated.
    fn bar_address(&self, bar: Bar) -> Result<u64, PciError>;

    /// One register read of 1, 2, 4 or 8 naturally aligned bytes. Use [`Function::read`].
    fn raw_read(&self, bar: Bar, offset: u64, bytes: u32) -> Result<u64, PciError>;

    /// One register write. Use [`Function::write`].
    fn raw_write(&self, bar: Bar, offset: u64, bytes: u32, value: u64) -> Result<(), PciError>;

    /// Reads any bytes of a BAR, without a promise about access widths.
    fn bar_read(&self, bar: Bar, offset: u64, data: &mut [u8]) -> Result<(), PciError>;

    /// Writes any bytes of a BAR and waits until the backend has passed them on. On emulated devices this is how a
    /// trapped window is written: one call is one write of the window.
    fn bar_write(&self, bar: Bar, offset: u64, data: &[u8]) -> Result<(), PciError>;

    /// Like [`PciFunction::bar_write`] but without waiting: as a posted write, it is ordered before every later
    /// access, and failures are not reported.
    fn bar_post(&self, bar: Bar, offset: u64, data: &[u8]) -> Result<(), PciError> {
        self.bar_write(bar, offset, data)
    }

    /// Maps what can be mapped of a BAR with the memory type asked for.
    ///
    /// Refused with [`PciError::NoSuchMapping`] where the type cannot be had; a software device gives
    /// [`CacheType::WriteBack`] whatever is asked.
    fn map_bar(self: Arc<Self>, bar: Bar, wanted: CacheType) -> Result<BarMap, PciError>;

    /// MSI-X vectors of the function.
    fn vectors(&self) -> u16;

    /// Connects exactly these vectors to these event descriptors, in place of whatever was connected; others are
    /// off. An empty list turns MSI-X off.
    fn set_vectors(&self, vectors: &[(u16, BorrowedFd<'_>)]) -> Result<(), PciError>;

    /// Connects an event descriptor to a notice, or disconnects it. False where the backend has no such notice.
    fn set_notice(&self, notice: Notice, event: Option<BorrowedFd<'_>>) -> Result<bool, PciError>;

    /// Ranges of I/O addresses that may be mapped, ascending and apart; reserved holes are left out.
    fn iova_ranges(&self) -> Result<Vec<IovaRange>, PciError>;

    /// Smallest page that can be mapped for DMA, in bytes.
    fn dma_page(&self) -> u64;

    /// What keeps the device from other memory.
    fn isolation(&self) -> Isolation;

    /// The address at which the device sees this memory whether we want it or not: where nothing translates. `None`
    /// where an address can be chosen.
    fn own_address(&self, _memory: &DmaMemory<'_>) -> Result<Option<u64>, PciError> {
        Ok(None)
    }

    /// Lets the device read and write `memory` at `iova`. Use [`DmaSpace::map`].
    fn dma_map(&self, memory: &DmaMemory<'_>, iova: u64) -> Result<(), PciError>;

    /// Takes the mapping of exactly this range away; nothing of the device reaches the memory after that.
    fn dma_unmap(&self, iova: u64, bytes: u64) -> Result<(), PciError>;

    /// What [`PciFunction::reset`] would do.
    fn reset_plan(&self) -> Result<ResetPlan, PciError>;

    /// Resets the function, or refuses with [`PciError::ResetHitsOthers`]. BAR maps of the write-combining kind must
    /// be gone before.
    fn reset(&self) -> Result<(), PciError>;
}

/// Typed, checked access on top of any [`PciFunction`].
pub trait Function: PciFunction {
    /// Facts about a BAR, or the error that there is none.
    fn bar_or_error(&self, bar: Bar) -> Result<&BarInfo, PciError> {
        self.bar(bar).ok_or_else(|| PciError::NoBar {
            bar,
            device: self.name().to_owned(),
        })
    }

    /// Checks an access against the BAR's size and, for registers, its alignment.
    fn check_access(&self, bar: Bar, offset: u64, bytes: u64) -> Result<(), PciError> {
        let size = self.bar_or_error(bar)?.bytes;
        if !(Area {
            offset: 0,
            bytes: size,
        })
        .contains(offset, bytes)
        {
            return Err(PciError::OutOfBar {
                bar,
                offset,
                bytes,
                size,
            });
        }
        Ok(())
    }

    /// One bus read of exactly the width of `W`.
    fn read<W: Width>(&self, bar: Bar, offset: u64) -> Result<W, PciError> {
        self.check_access(bar, offset, W::BYTES.into())?;
        check_aligned::<W>(bar, offset)?;
        self.raw_read(bar, offset, W::BYTES).map(W::from_u64)
    }

    /// One bus write of exactly the width of `W`.
    fn write<W: Width>(&self, bar: Bar, offset: u64, value: W) -> Result<(), PciError> {
        self.check_access(bar, offset, W::BYTES.into())?;
        check_aligned::<W>(bar, offset)?;
        self.raw_write(bar, offset, W::BYTES, value.to_u64())
    }
}

impl<T: PciFunction + ?Sized> Function for T {}

fn check_aligned<W: Width>(bar: Bar, offset: u64) -> Result<(), PciError> {
    if offset.is_multiple_of(W::BYTES.into()) {
        return Ok(());
    }
    Err(PciError::Misaligned {
        bar,
        offset,
        bytes: W::BYTES.into(),
    })
}

/// Vectors in ascending order, refused when one does not exist or is given twice.
fn sorted_vectors<'a>(
    vectors: &[(u16, BorrowedFd<'a>)],
    available: u16,
) -> Result<Vec<(u16, BorrowedFd<'a>)>, PciError> {
    let refused = |vector, why| PciError::BadVector {
        vector,
        why,
        available,
    };
    let mut sorted = vectors.to_vec();
    sorted.sort_by_key(|(v, _)| *v);
    if let Some((v, _)) = sorted.last()
        && *v >= available
    {
        return Err(refused(*v, "there is no such vector"));
    }
    match sorted.iter().zip(sorted.iter().skip(1)).find(|(a, b)| a.0 == b.0) {
        Some((twice, _)) => Err(refused(twice.0, "it is given twice")),
        None => Ok(sorted),
    }
}

/// Refuses a reset that would hit others, or that there is no way to do.
fn check_reset(device: &str, plan: &ResetPlan) -> Result<(), PciError> {
    if plan.method.is_none() {
        return Err(PciError::Unsupported {
            what: "reset".to_owned(),
            device: device.to_owned(),
        });
    }
    if plan.also.is_empty() {
        return Ok(());
    }
    Err(PciError::ResetHitsOthers {
        device: device.to_owned(),
        others: plan.also.clone(),
    })
}
