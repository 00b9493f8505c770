//! What the kernel's error numbers mean, in words, and where memory is without an IOMMU.

use std::{fs::File, io, os::unix::fs::FileExt, path::Path, time::Duration};

use iommufd_ioctls::IommufdError;
use vfio_ioctls::VfioError;

use super::super::{
    DmaMemory, OpenError, PciError,
    iova::IovaRange,
    machine::{Device, Machine},
};

/// Why memory could not be mapped for DMA.
pub(super) fn explain_map(machine: &Machine, bytes: u64, source: io::Error) -> PciError {
    match source.raw_os_error() {
        Some(libc::ENOMEM) => {
            let (limit, locked) = machine.locked_memory();
            let needed = locked.saturating_add(bytes);
            let available = machine.available_memory().filter(|available| bytes > *available);
            match (limit.filter(|l| needed > *l), available) {
                (Some(allowed), _) => PciError::Memlock { needed, allowed },
                (None, Some(available)) => PciError::NoMemory {
                    needed: bytes,
                    available,
                },
                (None, None) => PciError::io(format!("mapping {bytes} bytes for DMA"), source),
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

/// What the kernel said to a map or unmap.
pub(super) fn dma_errno(error: &VfioError) -> io::Error {
    use iommufd_ioctls::IommufdError::{IommuIoasMap, IommuIoasUnmap};
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
pub(super) fn physical_address(machine: &Machine, memory: &DmaMemory<'_>) -> Result<u64, PciError> {
    const PAGE: u64 = 4096;
    const PRESENT: u64 = 1 << 63;
    const FRAME: u64 = (1 << 55) - 1;
    let file =
        File::open(machine.path("/proc/self/pagemap")).map_err(|e| PciError::io("opening pagemap", e))?;
    // Pages that nobody has touched are nowhere yet. Kernels before 5.14 do not know the call: theirs must be touched.
    let at = std::ptr::with_exposed_provenance_mut(memory.address());
    // SAFETY: populates pages of a mapping that whoever made the `DmaMemory` vouches for, and changes no byte.
    let _ = unsafe {
        rustix::mm::madvise(
            at,
            usize::try_from(memory.bytes()).unwrap_or(0),
            rustix::mm::Advice::LinuxPopulateWrite,
        )
    };
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

/// A step that failed, with what the kernel said.
#[derive(Debug)]
pub(super) enum Failed {
    Vfio(VfioError),
    Step(&'static str, io::Error),
}

impl From<VfioError> for Failed {
    fn from(e: VfioError) -> Self {
        Self::Vfio(e)
    }
}

/// What the kernel said, as far as vfio-ioctls passes it on.
fn cause(failed: &Failed) -> Option<io::Error> {
    let errno = |e: &vmm_sys_util::errno::Error| io::Error::from_raw_os_error(e.errno());
    let copy = |e: &io::Error| e.raw_os_error().map(io::Error::from_raw_os_error);
    match failed {
        Failed::Step(_, e) | Failed::Vfio(VfioError::OpenContainer(e) | VfioError::OpenDeviceCdev(e)) => {
            copy(e)
        }
        Failed::Vfio(VfioError::OpenGroup(e, _)) => copy(e),
        Failed::Vfio(
            VfioError::ContainerSetIOMMU(e)
            | VfioError::GroupGetDeviceFD(e)
            | VfioError::VfioDeviceBindIommufd(e),
        ) => Some(errno(e)),
        Failed::Vfio(_) => None,
    }
}

pub(super) fn is_busy(failed: &Failed) -> bool {
    cause(failed).and_then(|e| e.raw_os_error()) == Some(libc::EBUSY)
}

pub(super) fn explain(
    machine: &Machine,
    device: &Device,
    node: &Path,
    waited: Duration,
    failed: &Failed,
) -> OpenError {
    let address = device.address().to_string();
    let node_text = node.display().to_string();
    let what = match failed {
        Failed::Vfio(VfioError::GroupViable) => {
            return OpenError::GroupNotViable {
                address,
                group: device.group().unwrap_or_default(),
                members: device.group_members(),
            };
        }
        Failed::Vfio(VfioError::VfioExtension | VfioError::VfioType1V2 | VfioError::VfioApiVersion) => {
            return OpenError::NoInterface {
                what: "VFIO with an IOMMU of type 1",
                hint: "load the module vfio_iommu_type1, and see that the IOMMU is on",
            };
        }
        Failed::Vfio(VfioError::NewVfioIommufd(IommufdError::OpenIommufd(e)))
            if e.kind() == io::ErrorKind::NotFound =>
        {
            return OpenError::NoInterface {
                what: "iommufd",
                hint: "it needs Linux 6.2 with CONFIG_IOMMUFD; use the group interface instead",
            };
        }
        Failed::Vfio(e) => format!("opening {address} through {node_text} ({e})"),
        Failed::Step(step, _) => format!("{step} for {address}"),
    };
    let Some(source) = cause(failed) else {
        return PciError::io(
            what,
            io::Error::other("the kernel's error number was not passed on"),
        )
        .into();
    };
    match source.raw_os_error() {
        Some(libc::EBUSY) => OpenError::NodeBusy {
            holders: machine.holders(node),
            node: node_text,
            waited,
        },
        Some(libc::EPERM) if matches!(failed, Failed::Vfio(VfioError::ContainerSetIOMMU(_))) => OpenError::Permission {
            node: node_text,
            source,
            remedy: "the platform has no interrupt remapping: enable it in the firmware set-up, or accept unsafe \
                     interrupts with the module parameter vfio_iommu_type1.allow_unsafe_interrupts=1"
                .to_owned(),
        },
        Some(libc::EACCES | libc::EPERM) => OpenError::Permission {
            remedy: format!("run as root, or give this user the node: 'chown $USER {node_text}' or a udev rule"),
            node: node_text,
            source,
        },
        _ => PciError::io(what, source).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pci::machine::tests::{Described, NTB};

    fn errno(n: i32) -> io::Error {
        io::Error::from_raw_os_error(n)
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
    fn a_window_larger_than_memory_is_named_with_both_amounts() {
        let described = Described::spr().file(
            "/proc/meminfo",
            "MemTotal: 524288 kB\nMemAvailable: 400000 kB\nHugePages_Free: 2\nHugepagesize: 2048 kB",
        );
        let available = 404_096 * 1024;
        let machine = described.machine();
        let e = explain_map(&machine, 1 << 30, errno(libc::ENOMEM));
        assert_eq!(
            (e.name(), e.class()),
            ("no-memory", crate::pci::ExitClass::Permission)
        );
        let text = e.to_string();
        for part in [
            "1073741824",
            &available.to_string(),
            "need not be filled",
            "firmware",
        ] {
            assert!(text.contains(part), "'{part}' is not in: {text}");
        }
        let e = explain_map(&machine, available, errno(libc::ENOMEM));
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

    #[test]
    fn what_the_kernel_says_is_explained() {
        let described = Described::spr()
            .link("/proc/77/fd/5", "/dev/vfio/42")
            .file("/proc/77/comm", "other");
        let node = Path::new("/dev/vfio/42");
        let why = |failed: Failed| {
            let machine = described.machine();
            explain(&machine, &described.ntb(), node, Duration::from_secs(5), &failed)
        };
        let io = io::Error::from_raw_os_error;
        let sys = vmm_sys_util::errno::Error::new;

        let e = why(Failed::Vfio(VfioError::OpenGroup(io(libc::EBUSY), "42".into())));
        assert_eq!(e.name(), "node-busy");
        assert!(
            ["process 77 (other)", "/dev/vfio/42", "5s", "end it first"]
                .iter()
                .all(|part| e.to_string().contains(part)),
            "{e}"
        );
        let e = why(Failed::Vfio(VfioError::OpenGroup(io(libc::EACCES), "42".into())));
        assert_eq!(e.name(), "no-permission");
        let e = why(Failed::Vfio(VfioError::GroupViable));
        assert_eq!(e.name(), "group-not-viable");
        let e = why(Failed::Vfio(VfioError::ContainerSetIOMMU(sys(libc::EPERM))));
        assert_eq!(e.name(), "no-permission");
        assert!(e.to_string().contains("interrupt remapping"), "{e}");
        let e = why(Failed::Vfio(VfioError::VfioExtension));
        assert_eq!(e.name(), "no-kernel-interface");
        let e = why(Failed::Vfio(VfioError::GroupGetDeviceFD(sys(libc::ENODEV))));
        assert_eq!(e.name(), "device-io");
        assert!(e.to_string().contains(NTB), "{e}");
    }
}
