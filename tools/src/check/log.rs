//! What the kernel has written about a function since boot.

use std::{
    fs::File,
    io::{ErrorKind, Read},
};

use ntb::pci::machine::Machine;
use rustix::fs::{Mode, OFlags};

/// Where the kernel's log is read.
pub const PATH: &str = "/dev/kmsg";

/// The kernel's log as far as it is kept; the reason in words when it cannot be read.
pub fn read(machine: &Machine) -> Result<Vec<String>, String> {
    let failed = |e: std::io::Error| match e.kind() {
        ErrorKind::PermissionDenied => "only root may read it on this machine".to_owned(),
        _ => e.to_string(),
    };
    // Without O_NONBLOCK the end of the log would be waited for.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let fd = rustix::fs::open(machine.path(PATH), flags, Mode::empty()).map_err(|e| failed(e.into()))?;
    let mut file = File::from(fd);
    let mut text = Vec::new();
    let mut record = vec![0; 64 * 1024];
    // More than any kernel's buffer has.
    const MOST: usize = 64 << 20;
    while text.len() < MOST {
        match file.read(&mut record) {
            Ok(0) => break,
            Ok(n) => text.extend(record.iter().take(n)),
            Err(e) if e.kind() == ErrorKind::WouldBlock => break,
            // Records were overwritten while they were read: the next ones are there.
            Err(e) if e.kind() == ErrorKind::BrokenPipe || e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(failed(e)),
        }
    }
    let text = String::from_utf8_lossy(&text);
    // Lines that begin with a space continue a record with facts for programs.
    let lines = text.lines().filter(|l| !l.starts_with(' '));
    Ok(lines
        .map(|l| l.split_once(';').map_or(l, |(_, message)| message).to_owned())
        .collect())
}

/// What the log says about one function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trouble {
    /// Accesses that the IOMMU refused.
    pub iommu: Vec<String>,
    /// Errors that PCIe reported.
    pub aer: Vec<String>,
}

impl Trouble {
    /// Picks out of the log what speaks of the function at `address`, in the form `0000:81:00.0`.
    pub fn of(address: &str, log: &[String]) -> Self {
        let mut found = Self::default();
        for line in log {
            if !names(line, address) {
                continue;
            }
            let iommu = ["DMAR", "AMD-Vi", "IO_PAGE_FAULT", "arm-smmu"]
                .iter()
                .any(|w| line.contains(w));
            let fault = ["fault", "Fault", "FAULT", "blocked", "INVALID_DEVICE_REQUEST"];
            if iommu && fault.iter().any(|w| line.contains(w)) {
                found.iommu.push(line.clone());
            } else if line.contains("AER") || line.contains("PCIe Bus Error") {
                found.aer.push(line.clone());
            }
        }
        found
    }
}

/// Whether a line speaks of a function: with its domain, or without where that is zero, as DMAR does.
fn names(line: &str, address: &str) -> bool {
    let short = address.strip_prefix("0000:").unwrap_or(address);
    line.match_indices(short).any(|(at, _)| {
        let (before, after) = (
            line.get(..at).unwrap_or_default(),
            line.get(at + short.len()..).unwrap_or_default(),
        );
        let zero_domain = before.strip_suffix("0000:").filter(|_| short != address);
        let before = zero_domain.unwrap_or(before);
        let longer = |c: char| c.is_ascii_hexdigit() || c == ':' || c == '.';
        !before.ends_with(longer) && !after.starts_with(|c: char| c.is_ascii_hexdigit())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(lines: &[&str]) -> Trouble {
        let lines: Vec<String> = lines.iter().map(|&l| l.to_owned()).collect();
        Trouble::of("0000:81:00.0", &lines)
    }

    #[test]
    fn faults_of_the_function_and_of_no_other_are_found() {
        let found = of(&[
            "DMAR: [DMA Write NO_PASID] Request device [81:00.0] fault addr 0xfe000000 [fault reason 0x05] PTE Write",
            "DMAR: [DMA Write NO_PASID] Request device [81:00.1] fault addr 0xfe000000 [fault reason 0x05] PTE Write",
            "vfio-pci 0000:81:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0011 address=0x1000 flags=0x0020]",
            "vfio-pci 10000:81:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0011 address=0x1000 flags=0x0020]",
            "vfio-pci 0000:81:00.0: PCIe Bus Error: severity=Correctable, type=Data Link Layer",
            "vfio-pci 0000:81:00.0: enabling device (0140 -> 0142)",
        ]);
        assert_eq!(found.iommu.len(), 2, "{found:?}");
        assert_eq!(found.aer.len(), 1, "{found:?}");
        assert!(
            found
                .iommu
                .iter()
                .all(|l| !l.contains("81:00.1") && !l.contains("10000:"))
        );
    }
}
