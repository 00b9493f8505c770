//! Configuration space: checked access, capability walk, and what the PCI specification says about the header.
//!
//! Offsets: PCI Express Base Specification, chapter 7.

use super::{Bar, PciError, PciFunction};
use crate::hw::regs::Width;

/// Vendor id, 16 bits.
pub const VENDOR_ID: u32 = 0x00;
/// Device id, 16 bits.
pub const DEVICE_ID: u32 = 0x02;
/// Command, 16 bits.
pub const COMMAND: u32 = 0x04;
/// Status, 16 bits.
pub const STATUS: u32 = 0x06;
/// Revision, 8 bits.
pub const REVISION: u32 = 0x08;
/// Class code, 24 bits from here.
pub const CLASS: u32 = 0x09;
/// First base address register.
pub const BAR0: u32 = 0x10;
/// Pointer to the first capability, 8 bits.
pub const CAPABILITIES: u32 = 0x34;
/// First byte of the extended capabilities.
pub const EXTENDED: u32 = 0x100;

/// Command: memory space.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// Command: bus master.
pub const COMMAND_MASTER: u16 = 1 << 2;
/// Command: INTx disable.
pub const COMMAND_INTX_OFF: u16 = 1 << 10;
/// Status: there is a capability list.
pub const STATUS_CAPABILITIES: u16 = 1 << 4;

/// Capability id: power management.
pub const CAP_POWER: u8 = 0x01;
/// Capability id: PCI Express.
pub const CAP_PCIE: u8 = 0x10;
/// Capability id: MSI-X.
pub const CAP_MSIX: u8 = 0x11;
/// Extended capability id: advanced error reporting.
pub const EXT_AER: u16 = 0x0001;

macro_rules! access {
    ($($read:ident $write:ident $t:ty;)*) => {$(
        /// Reads this many bits, checked for bounds and alignment.
        pub fn $read(f: &(impl PciFunction + ?Sized), offset: u32) -> Result<$t, PciError> {
            let mut data = [0; size_of::<$t>()];
            check(f, offset, data.len())?;
            f.raw_config_read(offset, &mut data)?;
            Ok(<$t>::from_le_bytes(data))
        }
        /// Writes this many bits, checked for bounds and alignment.
        pub fn $write(f: &(impl PciFunction + ?Sized), offset: u32, value: $t) -> Result<(), PciError> {
            check(f, offset, size_of::<$t>())?;
            f.raw_config_write(offset, &value.to_le_bytes())
        }
    )*};
}
access! {
    read8 write8 u8;
    read16 write16 u16;
    read32 write32 u32;
}

fn check(f: &(impl PciFunction + ?Sized), offset: u32, bytes: usize) -> Result<(), PciError> {
    let size = f.config_size();
    let fits = offset.checked_add(bytes as u32).is_some_and(|end| end <= size);
    if fits && offset.is_multiple_of(bytes as u32) {
        return Ok(());
    }
    Err(PciError::BadConfigAccess { offset, bytes, size })
}

/// A capability that the walk found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capability {
    /// Capability id.
    pub id: u8,
    /// Where it starts.
    pub offset: u32,
}

/// An extended capability that the walk found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtendedCapability {
    /// Capability id.
    pub id: u16,
    /// Its version.
    pub version: u8,
    /// Where it starts.
    pub offset: u32,
}

/// The standard capability list. A list that loops or points into the header is an error, not a hang.
pub fn capabilities(f: &(impl PciFunction + ?Sized)) -> Result<Vec<Capability>, PciError> {
    if read16(f, STATUS)? & STATUS_CAPABILITIES == 0 {
        return Ok(Vec::new());
    }
    let broken = |at, why| PciError::BadCapabilities {
        list: "standard",
        at,
        why,
    };
    let mut found = Vec::new();
    let mut seen = [false; 64];
    let mut from = CAPABILITIES;
    let mut at = u32::from(read8(f, CAPABILITIES)? & !3);
    while at != 0 {
        if at < 0x40 {
            return Err(broken(from, "it points into the header"));
        }
        // at is a multiple of four below 256.
        match seen.get_mut(at as usize / 4) {
            Some(slot) if !*slot => *slot = true,
            _ => return Err(broken(from, "it loops")),
        }
        let head = read16(f, at)?;
        if head == u16::ALL_ONES {
            return Err(broken(at, "it reads all ones"));
        }
        let [id, next] = head.to_le_bytes();
        found.push(Capability { id, offset: at });
        from = at + 1;
        at = u32::from(next & !3);
    }
    Ok(found)
}

/// The extended capability list; empty where configuration space has 256 bytes.
pub fn extended_capabilities(f: &(impl PciFunction + ?Sized)) -> Result<Vec<ExtendedCapability>, PciError> {
    let broken = |at, why| PciError::BadCapabilities {
        list: "extended",
        at,
        why,
    };
    let mut found = Vec::new();
    if f.config_size() <= EXTENDED {
        return Ok(found);
    }
    let mut seen = [false; 1024];
    let mut from = EXTENDED;
    let mut at = EXTENDED;
    while at != 0 {
        if at < EXTENDED {
            return Err(broken(from, "it points into the first 256 bytes"));
        }
        // at is a multiple of four below 4096.
        match seen.get_mut(at as usize / 4) {
            Some(slot) if !*slot => *slot = true,
            _ => return Err(broken(from, "it loops")),
        }
        let head = read32(f, at)?;
        // A function without extended capabilities has zero or all ones here.
        if at == EXTENDED && (head == 0 || head == u32::ALL_ONES) {
            break;
        }
        if head == u32::ALL_ONES {
            return Err(broken(at, "it reads all ones"));
        }
        found.push(ExtendedCapability {
            id: head as u16,
            version: (head >> 16) as u8 & 0xF,
            offset: at,
        });
        from = at;
        at = head >> 20 & !3;
    }
    Ok(found)
}

/// Offset of the first standard capability with this id.
pub fn find(f: &(impl PciFunction + ?Sized), id: u8) -> Result<Option<u32>, PciError> {
    Ok(capabilities(f)?.iter().find(|c| c.id == id).map(|c| c.offset))
}

/// Identity of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Vendor.
    pub vendor: u16,
    /// Device.
    pub device: u16,
    /// Revision.
    pub revision: u8,
    /// Class, subclass and programming interface, 24 bits.
    pub class: u32,
}

/// Who the function is; [`PciError::Gone`] when nobody answers.
pub fn identity(f: &(impl PciFunction + ?Sized)) -> Result<Identity, PciError> {
    let vendor = read16(f, VENDOR_ID)?;
    if vendor == u16::ALL_ONES {
        return Err(PciError::Gone {
            what: format!("{}: the vendor id reads all ones", f.name()),
        });
    }
    let class = read32(f, REVISION)?;
    Ok(Identity {
        vendor,
        device: read16(f, DEVICE_ID)?,
        revision: class as u8,
        class: class >> 8,
    })
}

/// Speed and width of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkRate {
    /// Generation: 1 is 2.5 GT/s, 2 is 5, 3 is 8, 4 is 16, 5 is 32, 6 is 64.
    pub generation: u8,
    /// Lanes.
    pub lanes: u8,
}

impl LinkRate {
    /// From the low 10 bits of a link status or link capabilities register.
    pub const fn from_bits(bits: u16) -> Self {
        Self {
            generation: (bits & 0xF) as u8,
            lanes: (bits >> 4 & 0x3F) as u8,
        }
    }

    /// Transfers per second and lane, in units of 10^8.
    pub const fn decitransfers(self) -> u32 {
        match self.generation {
            1 => 25,
            2 => 50,
            3 => 80,
            4 => 160,
            5 => 320,
            6 => 640,
            _ => 0,
        }
    }
}

impl std::fmt::Display for LinkRate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let d = self.decitransfers();
        write!(f, "x{} {}.{} GT/s", self.lanes, d / 10, d % 10)
    }
}

/// The PCIe link of the function itself: now, and as the hardware could.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PcieLink {
    /// Negotiated; `None` while the link is down or where the function does not say.
    pub current: Option<LinkRate>,
    /// Largest that the function can.
    pub possible: LinkRate,
}

/// Link facts from the PCIe capability; `None` where the function has none.
pub fn pcie_link(f: &(impl PciFunction + ?Sized)) -> Result<Option<PcieLink>, PciError> {
    let Some(cap) = find(f, CAP_PCIE)? else {
        return Ok(None);
    };
    let possible = read32(f, cap + 0x0C)?;
    let status = read16(f, cap + 0x12)?;
    let rate = LinkRate::from_bits(status);
    let answered = status != u16::ALL_ONES && rate.lanes != 0 && rate.generation != 0;
    Ok(Some(PcieLink {
        current: answered.then_some(rate),
        possible: LinkRate::from_bits(possible as u16),
    }))
}

/// Errors that the function has latched since they were last cleared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ErrorStatus {
    /// Corrected by hardware; bits of the AER correctable error status.
    pub correctable: u32,
    /// Not corrected, and the link is still to be trusted.
    pub non_fatal: u32,
    /// Not corrected, and the link is not to be trusted.
    pub fatal: u32,
}

/// What the AER capability has latched; `None` where the function has none.
pub fn errors(f: &(impl PciFunction + ?Sized)) -> Result<Option<ErrorStatus>, PciError> {
    let found = extended_capabilities(f)?;
    let Some(aer) = found.iter().find(|c| c.id == EXT_AER).map(|c| c.offset) else {
        return Ok(None);
    };
    let uncorrectable = read32(f, aer + 0x04)?;
    let severity = read32(f, aer + 0x0C)?;
    let correctable = read32(f, aer + 0x10)?;
    if (uncorrectable, correctable) == (u32::ALL_ONES, u32::ALL_ONES) {
        return Err(PciError::Gone {
            what: format!("{}: the error status reads all ones", f.name()),
        });
    }
    Ok(Some(ErrorStatus {
        correctable,
        non_fatal: uncorrectable & !severity,
        fatal: uncorrectable & severity,
    }))
}

/// Clears latched errors.
pub fn clear_errors(f: &(impl PciFunction + ?Sized), status: &ErrorStatus) -> Result<(), PciError> {
    let found = extended_capabilities(f)?;
    if let Some(aer) = found.iter().find(|c| c.id == EXT_AER).map(|c| c.offset) {
        write32(f, aer + 0x04, status.non_fatal | status.fatal)?;
        write32(f, aer + 0x10, status.correctable)?;
    }
    Ok(())
}

/// Number of MSI-X vectors by the capability; 0 where there is none.
pub fn msix_vectors(f: &(impl PciFunction + ?Sized)) -> Result<u16, PciError> {
    match find(f, CAP_MSIX)? {
        Some(cap) => Ok((read16(f, cap + 2)? & 0x7FF) + 1),
        None => Ok(0),
    }
}

/// Turns bus mastering on or off and reads it back.
pub fn set_bus_master(f: &(impl PciFunction + ?Sized), on: bool) -> Result<(), PciError> {
    let old = read16(f, COMMAND)?;
    if old == u16::ALL_ONES {
        return Err(PciError::Gone {
            what: format!("{}: the command register reads all ones", f.name()),
        });
    }
    let new = if on {
        old | COMMAND_MASTER | COMMAND_MEMORY
    } else {
        old & !COMMAND_MASTER
    };
    write16(f, COMMAND, new)?;
    let read = read16(f, COMMAND)?;
    let mask = if on {
        COMMAND_MASTER | COMMAND_MEMORY
    } else {
        COMMAND_MASTER
    };
    if read & mask != new & mask {
        return Err(PciError::NotTaken {
            what: "PCI command register",
            wrote: new.into(),
            read: read.into(),
        });
    }
    Ok(())
}

/// Whether the function may reach memory.
pub fn bus_master(f: &(impl PciFunction + ?Sized)) -> Result<bool, PciError> {
    Ok(read16(f, COMMAND)? & COMMAND_MASTER != 0)
}

/// Brings the function to power state D0 and keeps it there as far as configuration space can.
pub fn wake(f: &(impl PciFunction + ?Sized)) -> Result<(), PciError> {
    let Some(cap) = find(f, CAP_POWER)? else {
        return Ok(());
    };
    let pmcsr = read16(f, cap + 4)?;
    if pmcsr & 3 != 0 {
        write16(f, cap + 4, pmcsr & !3)?;
    }
    Ok(())
}

/// First step of every start: no DMA of an earlier owner, no legacy interrupt; memory decoding on, in D0.
///
/// Interrupts by message are turned off by the caller through [`PciFunction::set_vectors`] with nothing.
pub fn quiesce(f: &(impl PciFunction + ?Sized)) -> Result<(), PciError> {
    set_bus_master(f, false)?;
    wake(f)?;
    let command = read16(f, COMMAND)?;
    write16(f, COMMAND, command | COMMAND_MEMORY | COMMAND_INTX_OFF)
}

/// Whether a BAR register that reads `low` is the lower half of a 64-bit one.
pub fn is_wide(bar: Bar, low: u32) -> bool {
    low & 0x7 == 0x4 && bar != Bar::B5
}

/// Address that a BAR's registers hold, flag bits removed; the upper half is added for 64-bit BARs.
pub fn bar_address(f: &(impl PciFunction + ?Sized), bar: Bar) -> Result<u64, PciError> {
    let at = BAR0 + 4 * bar.index() as u32;
    let low = read32(f, at)?;
    let high = if is_wide(bar, low) { read32(f, at + 4)? } else { 0 };
    Ok(u64::from(high) << 32 | u64::from(low & !0xF))
}
