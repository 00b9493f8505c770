//! What the kernel says about this machine in its file systems, or what a described machine says.
//!
//! All paths are below a root, so that a tree of files can stand in for a machine in tests and in recordings.

mod device;
#[cfg(test)]
pub(crate) mod tests;

use std::{
    collections::BTreeSet,
    fmt, fs, io,
    path::{Path, PathBuf},
    str::FromStr,
};

pub use device::{Device, Resource};

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

    /// Names in a directory, in order; none when it cannot be read.
    pub fn names(&self, absolute: impl AsRef<Path>) -> Vec<String> {
        names(&self.path(absolute))
    }

    /// Last part of what a symbolic link points to.
    pub fn link_name(&self, absolute: impl AsRef<Path>) -> Option<String> {
        let to = fs::read_link(self.path(absolute)).ok()?;
        Some(to.file_name()?.to_str()?.to_owned())
    }

    /// Whether this user may read and write a file. Root may do so with every file that anyone may.
    pub fn may_use(&self, absolute: impl AsRef<Path>) -> bool {
        use rustix::fs::Access;
        use std::os::unix::fs::MetadataExt;
        let path = self.path(absolute);
        // A described machine says with no mode at all that nobody may.
        fs::metadata(&path).is_ok_and(|m| m.mode() & 0o666 != 0)
            && rustix::fs::access(&path, Access::READ_OK | Access::WRITE_OK).is_ok()
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

    /// Memory that programs can still have, free huge pages included, in bytes; `None` when the kernel does not say.
    pub fn available_memory(&self) -> Option<u64> {
        let text = self.text("/proc/meminfo")?;
        let number = |key: &str| -> Option<u64> {
            let rest = text.lines().find_map(|l| l.strip_prefix(key))?;
            rest.split_whitespace().next()?.parse().ok()
        };
        let huge = number("HugePages_Free:").unwrap_or(0) * number("Hugepagesize:").unwrap_or(0);
        Some(number("MemAvailable:")?.saturating_add(huge).saturating_mul(1024))
    }
}

/// Names in a directory; empty when it cannot be read.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten();
    let names: BTreeSet<String> = entries
        .filter_map(|e: io::Result<fs::DirEntry>| e.ok()?.file_name().into_string().ok())
        .collect();
    names.into_iter().collect()
}
