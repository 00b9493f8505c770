//! A PCI function as the kernel describes it.

use std::{fs, path::PathBuf};

use super::{
    super::{
        Bar, GroupMember, OpenError, PciError, bind_command,
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

    fn link_name(&self, name: &str) -> Option<String> {
        let to = fs::read_link(self.directory().join(name)).ok()?;
        Some(to.file_name()?.to_str()?.to_owned())
    }

    /// Refuses, in words, a function that cannot be opened through VFIO as things are.
    pub(in crate::pci) fn check(&self, no_iommu: bool) -> Result<(), OpenError> {
        let address = self.address.to_string();
        let driver = self.driver();
        if driver.as_deref() != Some("vfio-pci") {
            return Err(OpenError::WrongDriver {
                bind: bind_command(&address),
                address,
                driver,
            });
        }
        for bar in Bar::ALL {
            if let Some(resource) = self.resource(bar).filter(|r| !r.placed) {
                return Err(OpenError::Pci(PciError::BarNotPlaced {
                    bar,
                    device: address,
                    bytes: resource.bytes,
                }));
            }
        }
        let Some(group) = self.group() else {
            return Err(if no_iommu {
                OpenError::NoIommuModeOff { address }
            } else {
                OpenError::NoIommu { address }
            });
        };
        let members = self.group_members();
        if members.iter().any(|m| m.in_the_way) {
            return Err(OpenError::GroupNotViable {
                address,
                group,
                members,
            });
        }
        Ok(())
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
