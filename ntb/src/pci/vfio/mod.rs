//! A PCI function through the kernel's VFIO.
//!
//! vfio-ioctls opens containers, groups, character devices and maps memory; the rest is in `ioctl`, since that crate
//! drops the errors of register access, of interrupts and of reset, and knows no I/O address ranges.
//!
//! Memory types: the registers' BAR is mapped uncached through VFIO. A window's BAR is never touched through VFIO
//! before its write-combining mapping through sysfs is made, and never while that exists: the first mapping or access
//! fixes the memory type of the whole BAR.

#![allow(unsafe_code, reason = "mapping process memory for DMA")]

mod explain;
mod function;
mod ioctl;
mod open;

use std::{
    fs::{File, OpenOptions},
    io,
    os::fd::AsFd,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use memmap2::MmapOptions;

pub use self::open::{Interface, VfioOptions};
use self::{explain::explain_combining, open::Opened};
use super::{
    Area, Bar, BarInfo, BarMap, CacheType, MappedArea, OpenError, PciError, config,
    iova::IovaRange,
    machine::{Device, Machine, PciAddress},
    vfio_user::{
        proto::{self, irq, region},
        regions,
    },
};

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
