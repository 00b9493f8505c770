//! Opening a function through VFIO, and the reasons why that fails.

use std::{
    fs::{File, OpenOptions},
    io,
    mem::ManuallyDrop,
    os::fd::{AsFd, OwnedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use iommufd_ioctls::IommuFd;
use vfio_ioctls::{VfioContainer, VfioDevice, VfioError, VfioIommufd, VfioOps};

use super::{
    super::{Isolation, OpenError, PciError, iova::IovaRange, machine::Device, machine::Machine},
    explain::{Failed, explain, is_busy},
    ioctl,
};

/// Which interface of the kernel to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Interface {
    /// Container and group, IOMMU type 1: takes BARs of other devices as memory too.
    #[default]
    Group,
    /// Character device and iommufd.
    Iommufd,
    /// No IOMMU: the device reaches all memory. A fault of the peer or of this program can destroy anything.
    NoIommu,
}

/// How to open.
#[derive(Clone, Copy, Debug)]
pub struct VfioOptions {
    /// Which interface.
    pub interface: Interface,
    /// How long a node may be missing or busy.
    pub patience: Duration,
}

impl Default for VfioOptions {
    fn default() -> Self {
        Self {
            interface: Interface::Group,
            patience: Duration::from_secs(5),
        }
    }
}

/// An open device with what keeps it open. Fields drop in order: the device before its container.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) file: File,
    pub(super) keeper: Keeper,
}

/// What the device belongs to.
pub(super) enum Keeper {
    Group {
        _device: Held,
        container: Arc<VfioContainer>,
    },
    Iommufd {
        _device: Held,
        space: Arc<VfioIommufd>,
    },
    NoIommu {
        _group: OwnedFd,
        _container: OwnedFd,
    },
}

impl std::fmt::Debug for Keeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Group { .. } => "group",
            Self::Iommufd { .. } => "iommufd",
            Self::NoIommu { .. } => "no-IOMMU",
        })
    }
}

/// A device of vfio-ioctls, whose drop panics when the device has vanished in the meantime.
pub(super) struct Held(ManuallyDrop<VfioDevice>);

impl Held {
    fn new(device: VfioDevice) -> Self {
        Self(ManuallyDrop::new(device))
    }
}

impl Drop for Held {
    #[allow(unsafe_code, reason = "drops by hand, to catch a panic of the drop")]
    fn drop(&mut self) {
        // SAFETY: dropped here and nowhere else; not used after.
        let dropped = catch_unwind(AssertUnwindSafe(|| unsafe { ManuallyDrop::drop(&mut self.0) }));
        if dropped.is_err() {
            tracing::warn!("the device vanished while it was open: the kernel has taken it back");
        }
    }
}

impl Opened {
    /// Opens a function. What stands in the way is found out before the kernel is asked, since its own answers say
    /// little.
    pub(super) fn open(machine: &Machine, device: &Device, options: &VfioOptions) -> Result<Self, OpenError> {
        device.check(options.interface == Interface::NoIommu)?;
        let node = node_of(device, options.interface)?;
        wait_for_node(machine, &node, options.patience)?;
        let until = Instant::now() + options.patience;
        loop {
            let attempt = match options.interface {
                Interface::Group => open_group(device),
                Interface::Iommufd => open_cdev(device),
                Interface::NoIommu => open_bare(machine, device, &node),
            };
            match attempt {
                Ok(opened) => return Ok(opened),
                // The old owner may be on its way out.
                Err(e) if is_busy(&e) && Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(100));
                }
                Err(e) => return Err(explain(machine, device, &node, options.patience, &e)),
            }
        }
    }

    pub(super) fn isolation(&self) -> Isolation {
        match self.keeper {
            Keeper::NoIommu { .. } => Isolation::None,
            _ => Isolation::Iommu,
        }
    }

    /// I/O addresses that may be mapped, and the smallest page.
    pub(super) fn ranges(&self) -> Result<(Vec<IovaRange>, u64), PciError> {
        let failed = |e: io::Error| PciError::io("asking for I/O address ranges", e);
        match &self.keeper {
            Keeper::Group { container, .. } => {
                let fd = ioctl::duplicate(&**container).map_err(failed)?;
                let (ranges, page) = ioctl::container_ranges(fd.as_fd()).map_err(failed)?;
                Ok((ranges.unwrap_or_else(old_kernel_ranges), page))
            }
            Keeper::Iommufd { space: iommufd, .. } => {
                let fd = ioctl::duplicate(&**iommufd.iommufd()).map_err(failed)?;
                let ranges = ioctl::ioas_ranges(fd.as_fd(), iommufd.ioas().id()).map_err(failed)?;
                Ok((ranges, 4096))
            }
            Keeper::NoIommu { .. } => Ok((
                vec![IovaRange {
                    start: 0,
                    last: u64::MAX,
                }],
                4096,
            )),
        }
    }
}

/// Kernels before 5.4 do not report ranges: what every x86 IOMMU has, without the interrupt window.
fn old_kernel_ranges() -> Vec<IovaRange> {
    vec![
        IovaRange {
            start: 0,
            last: 0xFEDF_FFFF,
        },
        IovaRange {
            start: 0xFEF0_0000,
            last: (1 << 39) - 1,
        },
    ]
}

fn open_group(device: &Device) -> Result<Opened, Failed> {
    let container = Arc::new(VfioContainer::new(None)?);
    let ops: Arc<dyn VfioOps> = Arc::clone(&container) as _;
    let held = VfioDevice::new(&device.directory(), ops, true)?;
    let file = ioctl::duplicate(&held)
        .map_err(|e| Failed::Step("dup", e))?
        .into();
    Ok(Opened {
        file,
        keeper: Keeper::Group {
            _device: Held::new(held),
            container,
        },
    })
}

fn open_cdev(device: &Device) -> Result<Opened, Failed> {
    let iommufd = IommuFd::new().map_err(|e| Failed::Vfio(VfioError::NewVfioIommufd(e)))?;
    let space = Arc::new(VfioIommufd::new(Arc::new(iommufd), None, None)?);
    let ops: Arc<dyn VfioOps> = Arc::clone(&space) as _;
    let held = VfioDevice::new(&device.directory(), ops, true)?;
    let file = ioctl::duplicate(&held)
        .map_err(|e| Failed::Step("dup", e))?
        .into();
    Ok(Opened {
        file,
        keeper: Keeper::Iommufd {
            _device: Held::new(held),
            space,
        },
    })
}

fn open_bare(machine: &Machine, device: &Device, node: &Path) -> Result<Opened, Failed> {
    let open = |path: &Path| {
        OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map(OwnedFd::from)
    };
    let container =
        open(&machine.path("/dev/vfio/vfio")).map_err(|e| Failed::Step("opening /dev/vfio/vfio", e))?;
    let group = open(&machine.path(node)).map_err(|e| Failed::Step("opening the group", e))?;
    let address = device.address().to_string();
    let fd = ioctl::open_without_iommu(container.as_fd(), group.as_fd(), &address)
        .map_err(|e| Failed::Step("opening the device without an IOMMU", e))?;
    Ok(Opened {
        file: fd.into(),
        keeper: Keeper::NoIommu {
            _group: group,
            _container: container,
        },
    })
}

/// The node that is opened, as a path of the machine.
fn node_of(device: &Device, interface: Interface) -> Result<PathBuf, OpenError> {
    let no_group = || OpenError::NoIommu {
        address: device.address().to_string(),
    };
    match interface {
        Interface::Group => device.group_node().ok_or_else(no_group),
        Interface::NoIommu => device.bare_node().ok_or_else(no_group),
        Interface::Iommufd => {
            let name = device.cdev().ok_or(OpenError::NoInterface {
                what: "VFIO character devices",
                hint: "they need Linux 6.6 with CONFIG_VFIO_DEVICE_CDEV; use the group interface instead",
            })?;
            Ok(format!("/dev/vfio/devices/{name}").into())
        }
    }
}

fn wait_for_node(machine: &Machine, node: &Path, patience: Duration) -> Result<(), OpenError> {
    let until = Instant::now() + patience;
    while !machine.path(node).exists() {
        if Instant::now() >= until {
            let bare = node.to_string_lossy().contains("noiommu");
            return Err(OpenError::NodeMissing {
                node: node.display().to_string(),
                waited: patience,
                hint: match bare {
                    true => "bind the function to vfio-pci again after switching no-IOMMU mode on",
                    false => {
                        "is the module vfio-pci loaded, and does udev (or the container) provide /dev/vfio?"
                    }
                },
            });
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pci::machine::tests::Described;

    fn open(described: &Described, options: &VfioOptions) -> OpenError {
        Opened::open(&described.machine(), &described.ntb(), options).expect_err("a refusal")
    }

    fn hasty(interface: Interface) -> VfioOptions {
        VfioOptions {
            interface,
            patience: Duration::from_millis(50),
        }
    }

    #[test]
    fn a_missing_node_is_waited_for_and_named() {
        let described = Described::spr();
        std::fs::remove_file(described.machine().path("/dev/vfio/42")).unwrap();
        let e = open(&described, &hasty(Interface::Group));
        assert_eq!(e.name(), "node-missing");
        assert!(e.to_string().contains("/dev/vfio/42"), "{e}");
        // One that comes late is found: what is refused then is something else.
        let path = described.machine().path("/dev/vfio/42");
        let udev = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            std::fs::write(path, "").unwrap();
        });
        wait_for_node(
            &described.machine(),
            Path::new("/dev/vfio/42"),
            Duration::from_secs(30),
        )
        .unwrap();
        udev.join().unwrap();
    }

    #[test]
    fn a_group_without_iommu_is_not_opened_unless_asked() {
        let described = Described::spr().file("/dev/vfio/noiommu-42", "");
        assert_eq!(open(&described, &hasty(Interface::Group)).name(), "no-iommu");
        let described = Described::spr();
        let e = open(&described, &hasty(Interface::NoIommu));
        assert_eq!(e.name(), "node-missing");
    }

    #[test]
    fn iommufd_without_character_devices_is_explained() {
        let e = open(&Described::spr(), &hasty(Interface::Iommufd));
        assert_eq!(e.name(), "no-kernel-interface");
        assert!(e.to_string().contains("6.6"), "{e}");
    }
}
