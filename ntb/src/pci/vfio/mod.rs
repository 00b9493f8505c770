//! A PCI function through the kernel's VFIO.
//!
//! vfio-ioctls opens containers, groups, character devices and maps memory; the rest is in `ioctl`, since that crate
//! drops the errors of register access, of interrupts and of reset, and knows no I/O address ranges.
//!
//! Memory types: the registers' BAR is mapped uncached through VFIO. A window's BAR is never touched through VFIO
//! before its write-combining mapping through sysfs is made, and never while that exists: the first mapping or access
//! fixes the memory type of the whole BAR.

#![allow(unsafe_code, reason = "mapping process memory for DMA")]

mod ioctl;
mod open;

use std::{
    fs::{File, OpenOptions},
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::fs::FileExt,
    },
    path::Path,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use memmap2::MmapOptions;

pub use self::open::{Interface, VfioOptions};
use self::open::{Keeper, Opened};
use super::{
    Area, Bar, BarInfo, BarMap, CacheType, DmaMemory, Function, Isolation, MappedArea, OpenError, PciError,
    PciFunction, ResetPlan, config,
    iova::IovaRange,
    machine::{Device, Machine, PciAddress},
    vfio_user::proto::{self, irq, region},
    vfio_user::regions,
};
use crate::hw::regs::Width;

/// A function held through VFIO.
#[derive(Debug)]
pub struct Vfio {
    // Fields drop in order: the register mapping before the device.
    registers: Option<BarMap>,
    name: String,
    machine: Machine,
    device: Device,
    bars: [Option<BarFile>; 6],
    config_offset: u64,
    config_size: u32,
    vectors: u16,
    enabled: Mutex<bool>,
    ranges: Vec<IovaRange>,
    page: u64,
    opened: Arc<Opened>,
}

#[derive(Debug)]
struct BarFile {
    info: BarInfo,
    /// Where in the device's file it starts.
    offset: u64,
    /// Memory type that the BAR has been given by a mapping or access.
    fixed: Mutex<Fixed>,
}

#[derive(Debug, Default)]
struct Fixed {
    uncached: bool,
    combining: Weak<()>,
}

impl Vfio {
    /// Opens a function, or says why not.
    pub fn open(
        machine: &Machine,
        address: PciAddress,
        options: &VfioOptions,
    ) -> Result<Arc<Self>, OpenError> {
        let device = machine.device(address).ok_or_else(|| OpenError::NoDevice {
            address: address.to_string(),
            hint: what_there_is(machine),
        })?;
        let opened = Arc::new(Opened::open(machine, &device, options)?);
        Ok(Arc::new(Self::describe(machine, device, &opened)?))
    }

    fn describe(machine: &Machine, device: Device, opened: &Arc<Opened>) -> Result<Self, PciError> {
        let fd = opened.file.as_fd();
        let failed = |what: &'static str| move |e: io::Error| PciError::io(what, e);
        let region = |index| -> Result<(proto::RegionInfo, Vec<Area>), PciError> {
            let answer = ioctl::region_info(fd, index).map_err(failed("asking for a region"))?;
            regions::describe(index, &answer)
        };
        let (config, _) = region(region::CONFIG)?;
        let vectors = ioctl::vectors(fd, irq::MSIX).map_err(failed("asking for interrupts"))?;
        let (ranges, page) = opened.ranges()?;
        let mut this = Self {
            registers: None,
            name: device.address().to_string(),
            machine: machine.clone(),
            bars: [const { None }; 6],
            config_offset: config.offset,
            config_size: if config.size >= 4096 { 4096 } else { 256 },
            vectors: u16::try_from(vectors).unwrap_or(0),
            enabled: Mutex::new(false),
            ranges,
            page,
            device,
            opened: Arc::clone(opened),
        };
        for bar in Bar::ALL {
            let (info, mappable) = region(bar.index() as u32)?;
            let resource = this.device.resource(bar);
            if let Some(slot) = this.bars.get_mut(bar.index()).filter(|_| info.size > 0) {
                *slot = Some(BarFile {
                    info: BarInfo {
                        bar,
                        bytes: info.size,
                        prefetchable: resource.is_some_and(|r| r.prefetchable),
                        mappable,
                    },
                    offset: info.offset,
                    fixed: Mutex::default(),
                });
            }
        }
        config::wake(&this)?;
        // Accesses to memory that is not decoded would be fatal.
        let command = config::read16(&this, config::COMMAND)?;
        config::write16(&this, config::COMMAND, command | config::COMMAND_MEMORY)?;
        this.registers = this.map_uncached(Bar::B0).ok();
        Ok(this)
    }

    fn bar_file(&self, bar: Bar) -> Result<&BarFile, PciError> {
        let file = self.bars.get(bar.index()).and_then(Option::as_ref);
        file.ok_or_else(|| PciError::NoBar {
            bar,
            device: self.name.clone(),
        })
    }

    /// Marks the BAR uncached, or says why that cannot be.
    fn fix_uncached(&self, bar: Bar) -> Result<&BarFile, PciError> {
        let file = self.bar_file(bar)?;
        let mut fixed = file.fixed.lock().unwrap_or_else(PoisonError::into_inner);
        if fixed.combining.strong_count() > 0 {
            return Err(self.no_mapping(
                bar,
                CacheType::Uncached,
                "it is mapped write-combining, and a BAR has one memory type at a time".to_owned(),
            ));
        }
        fixed.uncached = true;
        Ok(file)
    }

    fn map_uncached(&self, bar: Bar) -> Result<BarMap, PciError> {
        let file = self.bar_file(bar)?;
        if file.info.mappable.is_empty() {
            let why = "the kernel lets no part of it be mapped (smaller than a page?)".to_owned();
            return Err(self.no_mapping(bar, CacheType::Uncached, why));
        }
        self.fix_uncached(bar)?;
        let mut areas = Vec::new();
        for area in &file.info.mappable {
            areas.push(map_area(&self.opened.file, file.offset + area.offset, area)?);
        }
        Ok(BarMap::new(
            bar,
            CacheType::Uncached,
            areas,
            Arc::clone(&self.opened),
        ))
    }

    fn map_combining(&self, bar: Bar) -> Result<BarMap, PciError> {
        let file = self.bar_file(bar)?;
        let path = self.device.combining_file(bar);
        let refuse = |why| self.no_mapping(bar, CacheType::WriteCombining, why);
        let mut fixed = file.fixed.lock().unwrap_or_else(PoisonError::into_inner);
        if fixed.uncached {
            return Err(refuse(
                "it was mapped or accessed uncached before, and a BAR has one memory type: open it anew"
                    .to_owned(),
            ));
        }
        let whole = Area {
            offset: 0,
            bytes: file.info.bytes,
        };
        let mapped = OpenOptions::new().read(true).write(true).open(&path);
        let mapped = mapped.and_then(|f| map_file(&f, 0, &whole));
        let area = mapped.map_err(|e| refuse(explain_combining(&self.machine, &self.device, &path, &e)))?;
        // Alive exactly as long as the mapping.
        let token = Arc::new(());
        fixed.combining = Arc::downgrade(&token);
        let keep = (token, Arc::clone(&self.opened));
        Ok(BarMap::new(bar, CacheType::WriteCombining, vec![area], keep))
    }

    fn no_mapping(&self, bar: Bar, wanted: CacheType, why: String) -> PciError {
        PciError::NoSuchMapping {
            bar,
            device: self.name.clone(),
            wanted,
            why,
        }
    }

    /// The error of an access through the device's file.
    fn access_error(&self, what: &str, source: io::Error) -> PciError {
        PciError::io(format!("{what} of {}", self.name), source)
    }
}

/// Why a write-combining mapping through sysfs was refused, and what to do.
fn explain_combining(machine: &Machine, device: &Device, path: &Path, error: &io::Error) -> String {
    let lockdown = machine.lockdown();
    let path = path.display();
    match (error.raw_os_error(), lockdown) {
        (Some(libc::ENOENT), _) => format!(
            "{path} does not exist: the BAR is not prefetchable, or the kernel has no write-combining mappings"
        ),
        (Some(libc::EPERM | libc::EACCES), Some(mode)) => format!(
            "kernel lockdown ('{mode}', from Secure Boot) forbids {path}: stores will be uncached; turn Secure \
             Boot off for write-combining"
        ),
        (Some(libc::EPERM | libc::EACCES), None) => {
            format!("no permission for {path}: run as root, or have a helper pass the descriptor")
        }
        (Some(libc::EINVAL | libc::EBUSY), _) => format!(
            "the kernel refuses {path} ({error}): another mapping of the BAR has another memory type. Driver {} \
             holds the device; unbind what else maps it, and open it anew",
            device.driver().unwrap_or_else(|| "none".to_owned())
        ),
        _ => format!("{path}: {error}"),
    }
}

/// Why memory could not be mapped for DMA.
fn explain_map(machine: &Machine, bytes: u64, source: io::Error) -> PciError {
    match source.raw_os_error() {
        Some(libc::ENOMEM) => {
            let (limit, locked) = machine.locked_memory();
            let needed = locked.saturating_add(bytes);
            match limit.filter(|l| needed > *l) {
                Some(allowed) => PciError::Memlock { needed, allowed },
                None => PciError::io(format!("mapping {bytes} bytes for DMA"), source),
            }
        }
        Some(libc::ENOSPC) => {
            let file = "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit";
            let limit = machine.text(file).and_then(|t| t.parse().ok()).unwrap_or(65535);
            PciError::TooManyMappings {
                limit,
                parameter: "vfio_iommu_type1.dma_entry_limit",
            }
        }
        _ => PciError::io(format!("mapping {bytes} bytes for DMA"), source),
    }
}

fn map_area(file: &File, at: u64, area: &Area) -> Result<MappedArea, PciError> {
    map_file(file, at, area).map_err(|e| PciError::io(format!("mapping {:#x} bytes of a BAR", area.bytes), e))
}

fn map_file(file: &File, at: u64, area: &Area) -> io::Result<MappedArea> {
    let length = usize::try_from(area.bytes).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))?;
    let map = MmapOptions::new().offset(at).len(length).map_raw(file)?;
    Ok(MappedArea::file(area.offset, map))
}

/// What to look at when the address is wrong.
fn what_there_is(machine: &Machine) -> String {
    let bridges: Vec<String> = machine
        .bridges()
        .iter()
        .map(|d| d.address().to_string())
        .collect();
    if bridges.is_empty() {
        return "no NTB is visible on this machine. Is the port set to NTB in the firmware set-up, and did the machine \
                see it at boot ('lspci -nn')?"
            .to_owned();
    }
    format!("the NTBs here are {}", bridges.join(", "))
}

impl PciFunction for Vfio {
    fn name(&self) -> &str {
        &self.name
    }

    fn config_size(&self) -> u32 {
        self.config_size
    }

    fn raw_config_read(&self, offset: u32, data: &mut [u8]) -> Result<(), PciError> {
        let at = self.config_offset + u64::from(offset);
        let read = self.opened.file.read_exact_at(data, at);
        read.map_err(|e| self.access_error("a read of configuration space", e))
    }

    fn raw_config_write(&self, offset: u32, data: &[u8]) -> Result<(), PciError> {
        let at = self.config_offset + u64::from(offset);
        let written = self.opened.file.write_all_at(data, at);
        written.map_err(|e| self.access_error("a write of configuration space", e))
    }

    fn bar(&self, bar: Bar) -> Option<&BarInfo> {
        self.bars.get(bar.index())?.as_ref().map(|f| &f.info)
    }

    fn bar_address(&self, bar: Bar) -> Result<u64, PciError> {
        // VFIO shows a virtual BAR register; the bridge compares with the real one.
        let resource = self.device.resource(bar).ok_or_else(|| PciError::NoBar {
            bar,
            device: self.name.clone(),
        })?;
        Ok(resource.start)
    }

    fn raw_read(&self, bar: Bar, offset: u64, bytes: u32) -> Result<u64, PciError> {
        if let Some(map) = self.registers.as_ref().filter(|m| m.bar() == bar) {
            match load(map, offset, bytes) {
                Err(PciError::Hole { .. }) => {}
                other => return other,
            }
        }
        let mut value = [0; 8];
        if let Some(part) = value.get_mut(..bytes as usize) {
            self.bar_read(bar, offset, part)?;
        }
        Ok(u64::from_le_bytes(value))
    }

    fn raw_write(&self, bar: Bar, offset: u64, bytes: u32, value: u64) -> Result<(), PciError> {
        if let Some(map) = self.registers.as_ref().filter(|m| m.bar() == bar) {
            match store(map, offset, bytes, value) {
                Err(PciError::Hole { .. }) => {}
                other => return other,
            }
        }
        let value = value.to_le_bytes();
        self.bar_write(bar, offset, value.get(..bytes as usize).unwrap_or(&value))
    }

    fn bar_read(&self, bar: Bar, offset: u64, data: &mut [u8]) -> Result<(), PciError> {
        self.check_access(bar, offset, data.len() as u64)?;
        let at = self.fix_uncached(bar)?.offset + offset;
        let read = self.opened.file.read_exact_at(data, at);
        read.map_err(|e| self.access_error("a read of a BAR", e))
    }

    fn bar_write(&self, bar: Bar, offset: u64, data: &[u8]) -> Result<(), PciError> {
        self.check_access(bar, offset, data.len() as u64)?;
        let at = self.fix_uncached(bar)?.offset + offset;
        let written = self.opened.file.write_all_at(data, at);
        written.map_err(|e| self.access_error("a write of a BAR", e))
    }

    fn map_bar(self: Arc<Self>, bar: Bar, wanted: CacheType) -> Result<BarMap, PciError> {
        match wanted {
            CacheType::WriteCombining => self.map_combining(bar),
            CacheType::Uncached => self.map_uncached(bar),
            CacheType::WriteBack => Err(self.no_mapping(
                bar,
                wanted,
                "only emulated devices have write-back BARs".to_owned(),
            )),
        }
    }

    fn vectors(&self) -> u16 {
        self.vectors
    }

    fn set_vectors(&self, vectors: &[(u16, BorrowedFd<'_>)]) -> Result<(), PciError> {
        let sorted = super::sorted_vectors(vectors, self.vectors)?;
        let mut enabled = self.enabled.lock().unwrap_or_else(PoisonError::into_inner);
        let device = self.opened.file.as_fd();
        // Kernels without dynamic MSI-X cannot grow a set in place.
        if *enabled {
            let off = ioctl::set_vectors(device, irq::MSIX, &[]);
            off.map_err(|e| self.access_error("turning the interrupts off", e))?;
            *enabled = false;
        }
        let Some((last, _)) = sorted.last() else {
            return Ok(());
        };
        let mut fds = vec![-1; usize::from(*last) + 1];
        for (vector, fd) in &sorted {
            if let Some(slot) = fds.get_mut(usize::from(*vector)) {
                *slot = fd.as_raw_fd();
            }
        }
        let on = ioctl::set_vectors(device, irq::MSIX, &fds);
        on.map_err(|e| self.access_error("connecting the interrupts", e))?;
        *enabled = true;
        Ok(())
    }

    fn iova_ranges(&self) -> Result<Vec<IovaRange>, PciError> {
        Ok(self.ranges.clone())
    }

    fn dma_page(&self) -> u64 {
        self.page
    }

    fn isolation(&self) -> Isolation {
        self.opened.isolation()
    }

    fn own_address(&self, memory: &DmaMemory<'_>) -> Result<Option<u64>, PciError> {
        match self.opened.keeper {
            Keeper::NoIommu { .. } => physical_address(&self.machine, memory).map(Some),
            _ => Ok(None),
        }
    }

    fn dma_map(&self, memory: &DmaMemory<'_>, iova: u64) -> Result<(), PciError> {
        let bytes = memory.bytes();
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        let address = std::ptr::with_exposed_provenance_mut::<u8>(memory.address());
        let result = match &self.opened.keeper {
            // SAFETY: whoever made a `DmaMemory` vouches that no reference to it exists while it is mapped: regions
            // never give one out, and `DmaMemory::raw` demands it.
            Keeper::Group { container, .. } => unsafe { container.vfio_dma_map(iova, length, address) },
            // SAFETY: as above.
            Keeper::Iommufd { space, .. } => unsafe { space.vfio_dma_map(iova, length, address) },
            Keeper::NoIommu { .. } => return Ok(()),
        };
        result.map_err(|e| explain_map(&self.machine, bytes, dma_errno(&e)))
    }

    fn dma_unmap(&self, iova: u64, bytes: u64) -> Result<(), PciError> {
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        let result = match &self.opened.keeper {
            Keeper::Group { container, .. } => container.vfio_dma_unmap(iova, length),
            Keeper::Iommufd { space, .. } => space.vfio_dma_unmap(iova, length),
            Keeper::NoIommu { .. } => return Ok(()),
        };
        result.map_err(|e| PciError::io(format!("unmapping {bytes} bytes ({e})"), dma_errno(&e)))
    }

    fn reset_plan(&self) -> Result<ResetPlan, PciError> {
        let device = self.opened.file.as_fd();
        let flags = ioctl::device_flags(device).map_err(|e| self.access_error("asking for the device", e))?;
        if flags & proto::DEVICE_RESET != 0 {
            return Ok(ResetPlan {
                method: Some("reset of the function alone".to_owned()),
                also: Vec::new(),
            });
        }
        let hits = ioctl::hot_reset_hits(device).unwrap_or_default();
        let own = self.device.address();
        let also: Vec<String> = hits
            .iter()
            .filter_map(|d| {
                let text = format!(
                    "{:04x}:{:02x}:{:02x}.{}",
                    d.segment,
                    d.bus,
                    d.devfn >> 3,
                    d.devfn & 7
                );
                let address: PciAddress = text.parse().ok().filter(|a| *a != own)?;
                let driver = self.machine.device(address).and_then(|d| d.driver());
                Some(format!(
                    "{address} ({})",
                    driver.map_or("no driver".to_owned(), |d| format!("driver {d}"))
                ))
            })
            .collect();
        Ok(ResetPlan {
            method: (!also.is_empty()).then(|| "reset of the whole bus".to_owned()),
            also,
        })
    }

    fn reset(&self) -> Result<(), PciError> {
        super::check_reset(&self.name, &self.reset_plan()?)?;
        if let Some(file) = self.bars.iter().flatten().find(|f| {
            let fixed = f.fixed.lock().unwrap_or_else(PoisonError::into_inner);
            fixed.combining.strong_count() > 0
        }) {
            let why =
                "it is mapped write-combining, which the kernel does not take away before a reset".to_owned();
            return Err(self.no_mapping(file.info.bar, CacheType::WriteCombining, why));
        }
        // The kernel restores configuration space after a reset, bus mastering included.
        config::set_bus_master(self, false)?;
        let done = ioctl::reset(self.opened.file.as_fd());
        done.map_err(|e| self.access_error("reset", e))?;
        config::wake(self)
    }
}

fn load(map: &BarMap, offset: u64, bytes: u32) -> Result<u64, PciError> {
    match bytes {
        1 => map.load::<u8>(offset).map(Width::to_u64),
        2 => map.load::<u16>(offset).map(Width::to_u64),
        4 => map.load::<u32>(offset).map(Width::to_u64),
        _ => map.load::<u64>(offset),
    }
}

fn store(map: &BarMap, offset: u64, bytes: u32, value: u64) -> Result<(), PciError> {
    match bytes {
        1 => map.store(offset, value as u8),
        2 => map.store(offset, value as u16),
        4 => map.store(offset, value as u32),
        _ => map.store(offset, value),
    }
}

/// What the kernel said to a map or unmap.
fn dma_errno(error: &vfio_ioctls::VfioError) -> io::Error {
    use iommufd_ioctls::IommufdError::{IommuIoasMap, IommuIoasUnmap};
    use vfio_ioctls::VfioError;
    match error {
        VfioError::IommuDmaMap(e)
        | VfioError::IommuDmaUnmap(e)
        | VfioError::IommufdIoctlError(IommuIoasMap(e) | IommuIoasUnmap(e)) => {
            io::Error::from_raw_os_error(e.errno())
        }
        other => io::Error::other(other.to_string()),
    }
}

/// Physical address of memory that is contiguous there, which one huge page is.
fn physical_address(machine: &Machine, memory: &DmaMemory<'_>) -> Result<u64, PciError> {
    const PAGE: u64 = 4096;
    const PRESENT: u64 = 1 << 63;
    const FRAME: u64 = (1 << 55) - 1;
    let file =
        File::open(machine.path("/proc/self/pagemap")).map_err(|e| PciError::io("opening pagemap", e))?;
    let first_page = memory.address() as u64 / PAGE;
    let mut start = 0;
    for page in 0..memory.bytes().div_ceil(PAGE) {
        let mut entry = [0; 8];
        let at = (first_page + page) * 8;
        file.read_exact_at(&mut entry, at)
            .map_err(|e| PciError::io("reading pagemap", e))?;
        let entry = u64::from_ne_bytes(entry);
        let frame = entry & FRAME;
        if entry & PRESENT == 0 || frame == 0 {
            let hidden = io::Error::from_raw_os_error(libc::EPERM);
            return Err(PciError::io(
                "finding physical addresses (needs root, and memory that was touched)",
                hidden,
            ));
        }
        if page == 0 {
            start = frame;
        } else if frame != start + page {
            return Err(PciError::BadIova {
                range: IovaRange {
                    start: start * PAGE,
                    last: (start + page) * PAGE - 1,
                },
                why: "without an IOMMU, memory must be contiguous: use one huge page",
            });
        }
    }
    Ok(start * PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pci::machine::tests::{Described, NTB};

    fn errno(n: i32) -> io::Error {
        io::Error::from_raw_os_error(n)
    }

    #[test]
    fn refused_combining_names_the_cause() {
        let described = Described::spr().file(
            "/sys/kernel/security/lockdown",
            "none [integrity] confidentiality",
        );
        let machine = described.machine();
        let device = machine.device(NTB.parse().unwrap()).unwrap();
        let path = device.combining_file(Bar::B2);
        let why = |n| explain_combining(&machine, &device, &path, &errno(n));
        assert!(
            why(libc::EPERM).contains("lockdown ('integrity'"),
            "{}",
            why(libc::EPERM)
        );
        assert!(why(libc::ENOENT).contains("not prefetchable"));
        let conflict = why(libc::EINVAL);
        assert!(
            conflict.contains("vfio-pci") && conflict.contains("unbind"),
            "{conflict}"
        );
        let open = Described::spr().file(
            "/sys/kernel/security/lockdown",
            "[none] integrity confidentiality",
        );
        let machine = open.machine();
        let device = machine.device(NTB.parse().unwrap()).unwrap();
        let why = explain_combining(&machine, &device, &path, &errno(libc::EACCES));
        assert!(why.contains("root") && !why.contains("lockdown"), "{why}");
    }

    #[test]
    fn a_small_limit_on_locked_memory_is_named_with_both_amounts() {
        let described = Described::spr()
            .file(
                "/proc/self/limits",
                "Limit  Soft Limit  Hard Limit  Units\nMax locked memory         65536   65536   bytes",
            )
            .file("/proc/self/status", "VmLck:\t      16 kB");
        let machine = described.machine();
        let e = explain_map(&machine, 1 << 26, errno(libc::ENOMEM));
        assert_eq!(e.name(), "memlock-too-small");
        let text = e.to_string();
        assert!(
            text.contains("67125248") && text.contains("65536") && text.contains("ulimit -l"),
            "{text}"
        );
        // Out of memory for another reason is not blamed on the limit.
        let e = explain_map(&machine, 4096, errno(libc::ENOMEM));
        assert_eq!(e.name(), "device-io");
    }

    #[test]
    fn too_many_mappings_name_the_parameter() {
        let described =
            Described::spr().file("/sys/module/vfio_iommu_type1/parameters/dma_entry_limit", "1000");
        let machine = described.machine();
        let e = explain_map(&machine, 4096, errno(libc::ENOSPC));
        assert_eq!(e.name(), "too-many-mappings");
        assert!(
            e.to_string().contains("1000 ") && e.to_string().contains("dma_entry_limit"),
            "{e}"
        );
    }
}
