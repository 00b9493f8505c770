//! What the kernel says about this machine in its file systems, or what a described machine says.
//!
//! All paths are below a root, so that a tree of files can stand in for a machine in tests and in recordings.

use std::{
    collections::BTreeSet,
    fmt, fs, io,
    path::{Path, PathBuf},
    str::FromStr,
};

use super::{
    Bar, GroupMember, OpenError,
    config::{Identity, LinkRate},
};
use crate::hw::Family;

/// Address of a PCI function: domain, bus, device, function.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            domain,
            bus,
            device,
            function,
        } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

impl fmt::Debug for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A text that is no PCI address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not a PCI address: write DOMAIN:BUS:DEVICE.FUNCTION or BUS:DEVICE.FUNCTION, as lspci -D shows it"
)]
pub struct BadAddress(String);

impl FromStr for PciAddress {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<Self, BadAddress> {
        let parse = || {
            let (rest, function) = text.rsplit_once('.')?;
            let (rest, device) = rest.rsplit_once(':')?;
            let (domain, bus) = rest.split_once(':').unwrap_or(("0", rest));
            // from_str_radix takes a sign.
            let hex = |s: &str| {
                (!s.starts_with('+'))
                    .then(|| u32::from_str_radix(s, 16).ok())
                    .flatten()
            };
            Some(Self {
                domain: hex(domain)?,
                bus: u8::try_from(hex(bus)?).ok()?,
                device: u8::try_from(hex(device)?).ok().filter(|d| *d < 32)?,
                function: u8::try_from(hex(function)?).ok().filter(|f| *f < 8)?,
            })
        };
        parse().ok_or_else(|| BadAddress(text.to_owned()))
    }
}

/// A machine: the one this runs on, or a tree of files that describes one.
#[derive(Clone, Debug)]
pub struct Machine {
    root: PathBuf,
}

impl Default for Machine {
    fn default() -> Self {
        Self::at("/")
    }
}

impl Machine {
    /// The machine whose `/sys`, `/dev` and `/proc` lie below `root`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Where an absolute path of the machine really is.
    pub fn path(&self, absolute: impl AsRef<Path>) -> PathBuf {
        let absolute = absolute.as_ref();
        self.root.join(absolute.strip_prefix("/").unwrap_or(absolute))
    }

    /// A text file, trimmed; `None` when it cannot be read.
    pub fn text(&self, absolute: impl AsRef<Path>) -> Option<String> {
        let text = fs::read_to_string(self.path(absolute)).ok()?;
        Some(text.trim().to_owned())
    }

    /// All PCI functions, by address.
    pub fn functions(&self) -> Vec<Device> {
        let mut found: Vec<Device> = names(&self.path("/sys/bus/pci/devices"))
            .iter()
            .filter_map(|name| self.device(name.parse().ok()?))
            .collect();
        found.sort_by_key(|d| d.address);
        found
    }

    /// The function at an address, if there is one.
    pub fn device(&self, address: PciAddress) -> Option<Device> {
        let dir = PathBuf::from(format!("/sys/bus/pci/devices/{address}"));
        self.path(&dir).exists().then(|| Device {
            machine: self.clone(),
            address,
            dir,
        })
    }

    /// The NTBs of the machine: those that can be driven, and those that are known but cannot.
    pub fn bridges(&self) -> Vec<Device> {
        let known = |d: &Device| {
            let id = d.identity();
            id.is_some_and(|id| Family::of(&id).is_some() || Family::why_unsupported(&id).is_some())
        };
        self.functions().into_iter().filter(known).collect()
    }

    /// The active kernel lockdown mode; `None` when lockdown is off or unknown.
    pub fn lockdown(&self) -> Option<String> {
        let text = self.text("/sys/kernel/security/lockdown")?;
        let mode = text.split_once('[')?.1.split_once(']')?.0;
        (mode != "none").then(|| mode.to_owned())
    }

    /// Processes that hold a file open, as far as this user may see, each with its name.
    pub fn holders(&self, node: &Path) -> Vec<String> {
        let mut found = Vec::new();
        for pid in names(&self.path("/proc")) {
            if pid.parse::<u32>().is_err() {
                continue;
            }
            let fds = self.path(format!("/proc/{pid}/fd"));
            let holds = |fd: &String| fs::read_link(fds.join(fd)).is_ok_and(|to| to == node);
            if names(&fds).iter().any(holds) {
                let name = self
                    .text(format!("/proc/{pid}/comm"))
                    .unwrap_or_else(|| "?".to_owned());
                found.push(format!("process {pid} ({name})"));
            }
        }
        found
    }

    /// Locked memory that this process may have and has, in bytes; `None` in the first place for no limit.
    pub fn locked_memory(&self) -> (Option<u64>, u64) {
        let limits = self.text("/proc/self/limits").unwrap_or_default();
        let limit = limits
            .lines()
            .find_map(|l| l.strip_prefix("Max locked memory"))
            .and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        let status = self.text("/proc/self/status").unwrap_or_default();
        let locked: u64 = status
            .lines()
            .find_map(|l| l.strip_prefix("VmLck:"))
            .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
            .unwrap_or(0);
        (limit, locked * 1024)
    }
}

/// A PCI function as sysfs shows it.
#[derive(Clone, Debug)]
pub struct Device {
    machine: Machine,
    address: PciAddress,
    dir: PathBuf,
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
    pub(super) fn check(&self, no_iommu: bool) -> Result<(), OpenError> {
        let address = self.address.to_string();
        let driver = self.driver();
        if driver.as_deref() != Some("vfio-pci") {
            return Err(OpenError::WrongDriver {
                bind: super::bind_command(&address),
                address,
                driver,
            });
        }
        for bar in Bar::ALL {
            if let Some(resource) = self.resource(bar).filter(|r| !r.placed) {
                return Err(OpenError::Pci(super::PciError::BarNotPlaced {
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

/// Names in a directory; empty when it cannot be read.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten();
    let names: BTreeSet<String> = entries
        .filter_map(|e: io::Result<fs::DirEntry>| e.ok()?.file_name().into_string().ok())
        .collect();
    names.into_iter().collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::{
        os::unix::fs::symlink,
        sync::atomic::{AtomicU32, Ordering},
    };

    /// Address of the bridge on described machines.
    pub(in crate::pci) const NTB: &str = "0000:81:00.0";

    /// A machine in a directory that goes away with it.
    pub(in crate::pci) struct Described {
        root: PathBuf,
    }

    impl Drop for Described {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.root);
        }
    }

    impl Described {
        pub(in crate::pci) fn empty() -> Self {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let n = NEXT.fetch_add(1, Ordering::Relaxed);
            let root = std::env::temp_dir().join(format!("ntb-machine-{}-{n}", std::process::id()));
            fs::create_dir_all(&root).unwrap();
            Self { root }
        }

        /// A Sapphire Rapids bridge alone in group 42, held by vfio-pci, with its node.
        pub(in crate::pci) fn spr() -> Self {
            Self::empty()
                .function(NTB, "0x8086", "0x347e", "0x10", "0x068000", Some("vfio-pci"))
                .group(NTB, 42)
                .file(
                    &format!("/sys/bus/pci/devices/{NTB}/resource"),
                    "0x0000384000000000 0x000038400000ffff 0x000000000014220c\n\
                     0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                     0x0000380000000000 0x000038003fffffff 0x000000000014220c\n\
                     0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                     0x0000382000000000 0x000038203fffffff 0x000000000014220c\n",
                )
                .file("/dev/vfio/42", "")
        }

        pub(in crate::pci) fn machine(&self) -> Machine {
            Machine::at(&self.root)
        }

        pub(in crate::pci) fn file(self, path: &str, text: &str) -> Self {
            let path = self.machine().path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
            self
        }

        pub(in crate::pci) fn link(self, path: &str, to: &str) -> Self {
            let path = self.machine().path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let _ = fs::remove_file(&path);
            symlink(to, path).unwrap();
            self
        }

        pub(in crate::pci) fn function(
            self,
            at: &str,
            vendor: &str,
            device: &str,
            revision: &str,
            class: &str,
            driver: Option<&str>,
        ) -> Self {
            let dir = format!("/sys/bus/pci/devices/{at}");
            let mut this = self
                .file(&format!("{dir}/vendor"), vendor)
                .file(&format!("{dir}/device"), device)
                .file(&format!("{dir}/revision"), revision)
                .file(&format!("{dir}/class"), class);
            if let Some(driver) = driver {
                this = this.link(
                    &format!("{dir}/driver"),
                    &format!("../../../../bus/pci/drivers/{driver}"),
                );
            }
            this
        }

        pub(in crate::pci) fn group(self, at: &str, group: u32) -> Self {
            self.link(
                &format!("/sys/bus/pci/devices/{at}/iommu_group"),
                &format!("../../../kernel/iommu_groups/{group}"),
            )
            .link(
                &format!("/sys/kernel/iommu_groups/{group}/devices/{at}"),
                &format!("../../../../devices/{at}"),
            )
        }

        pub(in crate::pci) fn ntb(&self) -> Device {
            self.machine().device(NTB.parse().unwrap()).unwrap()
        }
    }

    fn refusal(described: &Described, no_iommu: bool) -> OpenError {
        described.ntb().check(no_iommu).expect_err("a refusal")
    }

    #[test]
    fn a_good_machine_is_not_refused() {
        let described = Described::spr();
        described.ntb().check(false).unwrap();
        let bridges = described.machine().bridges();
        assert_eq!(bridges.len(), 1);
        assert_eq!(
            Family::of(&bridges[0].identity().unwrap()),
            Some(Family::IntelSpr)
        );
        let window = bridges[0].resource(Bar::B2).unwrap();
        assert_eq!((window.start, window.bytes), (0x3800_0000_0000, 1 << 30));
        assert!(window.placed && window.prefetchable);
        assert_eq!(bridges[0].resource(Bar::B1), None);
    }

    #[test]
    fn another_driver_or_none_is_named_with_the_bind_command() {
        for driver in [Some("ntb_hw_intel"), Some("uio_pci_generic"), None] {
            let described = Described::empty()
                .function(NTB, "0x8086", "0x347e", "0x10", "0x068000", driver)
                .group(NTB, 42);
            let e = refusal(&described, false);
            assert_eq!(e.name(), "wrong-driver");
            let text = e.to_string();
            assert!(text.contains(driver.unwrap_or("no driver")), "{text}");
            assert!(
                text.contains(&format!("/sys/bus/pci/devices/{NTB}/driver_override")),
                "{text}"
            );
        }
    }

    #[test]
    fn a_group_that_is_not_viable_lists_its_members() {
        let described = Described::spr()
            .function(
                "0000:80:01.0",
                "0x8086",
                "0x352a",
                "0x04",
                "0x060400",
                Some("pcieport"),
            )
            .function(
                "0000:81:00.1",
                "0x8086",
                "0x0001",
                "0x00",
                "0x020000",
                Some("ice"),
            )
            .function("0000:81:00.2", "0x8086", "0x0002", "0x00", "0x020000", None)
            .group("0000:80:01.0", 42)
            .group("0000:81:00.1", 42)
            .group("0000:81:00.2", 42);
        let e = refusal(&described, false);
        assert_eq!(e.name(), "group-not-viable");
        assert_eq!(e.class(), crate::pci::ExitClass::Permission);
        let text = e.to_string();
        for part in [
            "group 42",
            "0000:80:01.0 is with pcieport",
            "0000:81:00.1 is with ice (in the way)",
        ] {
            assert!(text.contains(part), "'{part}' is not in: {text}");
        }
        assert!(text.contains("0000:81:00.2 is with no driver;"), "{text}");
        assert!(text.contains("devices/0000:81:00.1/driver_override"), "{text}");
        assert!(
            !text.contains("devices/0000:81:00.2/driver_override"),
            "rebinds what is not in the way: {text}"
        );
    }

    #[test]
    fn a_machine_without_iommu_is_told_apart_by_what_was_asked() {
        let described =
            Described::empty().function(NTB, "0x8086", "0x347e", "0x10", "0x068000", Some("vfio-pci"));
        let e = refusal(&described, false);
        assert_eq!(e.name(), "no-iommu");
        assert!(e.to_string().contains("intel_iommu=on"), "{e}");
        let e = refusal(&described, true);
        assert_eq!(e.name(), "no-iommu-mode-off");
        assert!(e.to_string().contains("enable_unsafe_noiommu_mode"), "{e}");
    }

    #[test]
    fn a_bar_that_was_not_placed_is_refused() {
        let described = Described::spr().file(
            &format!("/sys/bus/pci/devices/{NTB}/resource"),
            "0x384000000000 0x38400000ffff 0x14220c\n0x0 0x0 0x0\n0x0 0x3fffffffff 0x2014220c\n",
        );
        let e = refusal(&described, false);
        assert_eq!(e.name(), "bar-not-placed");
        assert!(e.to_string().contains("above 4G"), "{e}");
    }

    #[test]
    fn holders_of_a_node_are_named() {
        let described = Described::spr()
            .link("/proc/77/fd/5", "/dev/vfio/42")
            .file("/proc/77/comm", "ntb-ping\n")
            .link("/proc/78/fd/5", "/dev/null");
        assert_eq!(
            described.machine().holders(Path::new("/dev/vfio/42")),
            ["process 77 (ntb-ping)"]
        );
    }

    #[test]
    fn link_rates_are_read() {
        let dir = format!("/sys/bus/pci/devices/{NTB}");
        let described = Described::spr()
            .file(&format!("{dir}/current_link_speed"), "16.0 GT/s PCIe")
            .file(&format!("{dir}/current_link_width"), "8")
            .file(&format!("{dir}/max_link_speed"), "32.0 GT/s PCIe")
            .file(&format!("{dir}/max_link_width"), "16");
        let (now, best) = described.ntb().link();
        assert_eq!(now.unwrap().to_string(), "x8 16.0 GT/s");
        assert_eq!(best.unwrap().to_string(), "x16 32.0 GT/s");
        assert_eq!(Described::spr().ntb().link(), (None, None));
    }
}
