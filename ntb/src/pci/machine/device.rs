//! A PCI function as the kernel describes it.

use std::{fs::File, io, os::unix::fs::FileExt, path::PathBuf, sync::Arc};

use memmap2::MmapOptions;

use super::{
    super::{
        Bar, BarMap, CacheType, GroupMember, MappedArea, OpenError, PciError, bind_command,
        config::{Identity, LinkRate},
    },
    Machine, PciAddress, names,
};

/// A PCI function as sysfs shows it.
#[derive(Clone, Debug)]
pub struct Device {
    pub(super) machine: Machine,
    pub(super) address: PciAddress,
    pub(super) dir: PathBuf,
}

impl Device {
    /// Its address.
    pub fn address(&self) -> PciAddress {
        self.address
    }

    /// Its directory in sysfs, on this machine's own file system.
    pub fn directory(&self) -> PathBuf {
        self.machine.path(&self.dir)
    }

    /// A text file of its directory.
    pub fn text(&self, name: &str) -> Option<String> {
        self.machine.text(self.dir.join(name))
    }

    /// Who it is; `None` when the kernel does not say.
    pub fn identity(&self) -> Option<Identity> {
        let hex = |name| u32::from_str_radix(self.text(name)?.trim_start_matches("0x"), 16).ok();
        Some(Identity {
            vendor: u16::try_from(hex("vendor")?).ok()?,
            device: u16::try_from(hex("device")?).ok()?,
            revision: u8::try_from(hex("revision").unwrap_or(0)).ok()?,
            class: hex("class")?,
        })
    }

    /// Driver that holds it.
    pub fn driver(&self) -> Option<String> {
        self.link_name("driver")
    }

    /// IOMMU group.
    pub fn group(&self) -> Option<u32> {
        self.link_name("iommu_group")?.parse().ok()
    }

    /// Name of its character device for iommufd.
    pub fn cdev(&self) -> Option<String> {
        names(&self.directory().join("vfio-dev")).into_iter().next()
    }

    /// Everything in its IOMMU group, itself included.
    pub fn group_members(&self) -> Vec<GroupMember> {
        let Some(group) = self.group() else {
            return Vec::new();
        };
        let mut members: Vec<GroupMember> = names(
            &self
                .machine
                .path(format!("/sys/kernel/iommu_groups/{group}/devices")),
        )
        .iter()
        .filter_map(|name| self.machine.device(name.parse().ok()?))
        .map(|d| {
            let driver = d.driver();
            GroupMember {
                address: d.address.to_string(),
                in_the_way: driver.as_deref().is_some_and(|d| !harmless(d)),
                driver,
            }
        })
        .collect();
        members.sort_by(|a, b| a.address.cmp(&b.address));
        members
    }

    /// A BAR as the kernel placed it.
    pub fn resource(&self, bar: Bar) -> Option<Resource> {
        let text = self.text("resource")?;
        let mut fields = text.lines().nth(bar.index())?.split_whitespace();
        let mut hex = || u64::from_str_radix(fields.next()?.trim_start_matches("0x"), 16).ok();
        let (start, last, flags) = (hex()?, hex()?, hex()?);
        // Memory, and not the empty line of an absent BAR.
        (flags & RESOURCE_MEMORY != 0 && last > start).then(|| Resource {
            start,
            bytes: last - start + 1,
            placed: start != 0 && flags & RESOURCE_UNSET == 0,
            prefetchable: flags & RESOURCE_PREFETCHABLE != 0,
        })
    }

    /// File that maps a BAR write-combining.
    pub fn combining_file(&self, bar: Bar) -> PathBuf {
        self.directory().join(format!("resource{bar}_wc"))
    }

    /// Why a BAR cannot be mapped write-combining, as far as that shows without trying; `None` when nothing speaks
    /// against it.
    pub fn combining_refusal(&self, bar: Bar) -> Option<PciError> {
        let path = self.combining_file(bar);
        let errno = if !path.exists() {
            libc::ENOENT
        } else if self.machine.lockdown().is_some() {
            libc::EPERM
        } else if !self.machine.may_use(self.dir.join(format!("resource{bar}_wc"))) {
            libc::EACCES
        } else {
            return None;
        };
        Some(self.refused_combining(bar, &io::Error::from_raw_os_error(errno)))
    }

    /// Why a write-combining mapping through sysfs was refused with this error, and what to do.
    pub(in crate::pci) fn refused_combining(&self, bar: Bar, error: &io::Error) -> PciError {
        let device = self.address.to_string();
        let path = self.combining_file(bar);
        let path = path.display();
        let why = match (error.raw_os_error(), self.machine.lockdown()) {
            (Some(libc::ENOENT), _) => format!(
                "{path} does not exist: the BAR is not prefetchable, or the kernel has no write-combining mappings"
            ),
            (Some(libc::EPERM | libc::EACCES), Some(mode)) => {
                return PciError::Lockdown { bar, device, mode };
            }
            (Some(libc::EPERM | libc::EACCES), None) => {
                format!("no permission for {path}: run as root, or have a helper pass the descriptor")
            }
            (Some(libc::EINVAL | libc::EBUSY), _) => format!(
                "the kernel refuses {path} ({error}): another mapping of the BAR has another memory type. Driver {} \
                 holds the device; unbind what else maps it, and open it anew",
                self.driver().unwrap_or_else(|| "none".to_owned())
            ),
            _ => format!("{path}: {error}"),
        };
        PciError::NoSuchMapping {
            bar,
            device,
            wanted: CacheType::WriteCombining,
            why,
        }
    }

    /// Link of the function now and at best; `None` where the kernel does not say.
    pub fn link(&self) -> (Option<LinkRate>, Option<LinkRate>) {
        let rate = |speed, width| {
            let speed = self.text(speed)?;
            let generation = match speed.split_whitespace().next()? {
                "2.5" => 1,
                "5.0" | "5" => 2,
                "8.0" | "8" => 3,
                "16.0" | "16" => 4,
                "32.0" | "32" => 5,
                "64.0" | "64" => 6,
                _ => return None,
            };
            let lanes = self.text(width)?.parse().ok().filter(|n| *n > 0)?;
            Some(LinkRate { generation, lanes })
        };
        (
            rate("current_link_speed", "current_link_width"),
            rate("max_link_speed", "max_link_width"),
        )
    }

    /// Node of its group in the container interface; `None` without an IOMMU group.
    pub fn group_node(&self) -> Option<PathBuf> {
        Some(format!("/dev/vfio/{}", self.group()?).into())
    }

    /// Node of its group where the kernel made one without an IOMMU.
    pub fn bare_node(&self) -> Option<PathBuf> {
        Some(format!("/dev/vfio/noiommu-{}", self.group()?).into())
    }

    /// Bytes of its configuration space; `None` when this user may not read that far.
    pub fn config_bytes<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        let file = File::open(self.directory().join("config")).ok()?;
        file.read_exact_at(&mut bytes, offset.into()).ok()?;
        Some(bytes)
    }

    /// Reads one register without opening the function: maps the page for the one load. Whoever asks makes sure that
    /// the function is awake and decodes memory, and that reading the register changes nothing. Needs root.
    pub fn peek(&self, bar: Bar, offset: u64) -> Result<u32, PciError> {
        const PAGE: u64 = 4096;
        let failed = |e: io::Error| PciError::io(format!("mapping BAR{bar} of {}", self.address), e);
        let path = self.directory().join(format!("resource{bar}"));
        let file = File::open(path).map_err(failed)?;
        let start = offset & !(PAGE - 1);
        if file.metadata().map_err(failed)?.len() < offset + 4 {
            return Err(PciError::NoBar {
                bar,
                device: self.address.to_string(),
            });
        }
        let map = MmapOptions::new()
            .offset(start)
            .len(PAGE as usize)
            .map_raw_read_only(&file);
        let map = map.map_err(failed)?;
        let area = MappedArea::file(start, map);
        BarMap::new(bar, CacheType::Uncached, vec![area], Arc::new(file)).load(offset)
    }

    fn link_name(&self, name: &str) -> Option<String> {
        self.machine.link_name(self.dir.join(name))
    }

    /// Refuses, in words, a function that cannot be opened through VFIO as things are.
    pub(in crate::pci) fn check(&self, no_iommu: bool) -> Result<(), OpenError> {
        self.refusals(no_iommu).into_iter().next().map_or(Ok(()), Err)
    }

    /// All that the kernel's view of the function has against opening it through VFIO as things are; opening gives the
    /// first.
    pub fn refusals(&self, no_iommu: bool) -> Vec<OpenError> {
        let mut found = Vec::new();
        let address = self.address.to_string();
        let driver = self.driver();
        if driver.as_deref() != Some("vfio-pci") {
            found.push(OpenError::WrongDriver {
                bind: bind_command(&address),
                address: address.clone(),
                driver,
            });
        }
        for bar in Bar::ALL {
            if let Some(resource) = self.resource(bar).filter(|r| !r.placed) {
                found.push(OpenError::Pci(PciError::BarNotPlaced {
                    bar,
                    device: address.clone(),
                    bytes: resource.bytes,
                }));
            }
        }
        let Some(group) = self.group() else {
            found.push(if no_iommu {
                OpenError::NoIommuModeOff { address }
            } else {
                OpenError::NoIommu { address }
            });
            return found;
        };
        // The kernel makes such groups where it has no IOMMU.
        if !no_iommu && self.bare_node().is_some_and(|n| self.machine.path(n).exists()) {
            found.push(OpenError::NoIommu {
                address: address.clone(),
            });
        }
        let members = self.group_members();
        if members.iter().any(|m| m.in_the_way) {
            found.push(OpenError::GroupNotViable {
                address,
                group,
                members,
            });
        }
        found
    }
}

/// A BAR as the kernel placed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resource {
    /// Physical address.
    pub start: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Whether it has an address at all.
    pub placed: bool,
    /// Whether it may be mapped write-combining.
    pub prefetchable: bool,
}

// linux/ioport.h
const RESOURCE_MEMORY: u64 = 0x200;
const RESOURCE_PREFETCHABLE: u64 = 0x2000;
const RESOURCE_UNSET: u64 = 0x2000_0000;

/// Drivers that leave a group viable: VFIO's own, and those that the kernel knows to do no DMA.
fn harmless(driver: &str) -> bool {
    driver.starts_with("vfio") || driver == "pci-stub" || driver == "pcieport"
}
