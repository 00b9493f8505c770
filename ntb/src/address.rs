//! Where a port is: on a bridge of this machine, or on an emulated one.

use std::{fmt, path::PathBuf, str::FromStr, sync::Arc};

use crate::pci::{
    OpenError, PciFunction,
    machine::{BadAddress, Machine, PciAddress},
    vfio::{Interface, Vfio, VfioOptions},
    vfio_user::{Timeouts, VfioUser},
};

/// The address of a port, as tools and configurations write it: `ntb:0000:81:00.0`, `emu:PATH`, `emu:@NAME`.
///
/// `ntb:0000:81:00.0,iommufd` opens a bridge through that interface of the kernel; `ntb:0000:81:00.0,no-iommu` without an
/// IOMMU, which lets the peer reach all memory of this machine. As part of the address the latter stands in every result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortAddress {
    /// A PCI function of this machine.
    Bridge(PciAddress),
    /// The same, opened through this interface of the kernel, whatever [`OpenOptions::vfio`] says.
    BridgeBy(PciAddress, Interface),
    /// A socket at which an emulator serves; a name that starts with `@` is abstract.
    Emulated(PathBuf),
}

/// A text that is no port address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadPortAddress {
    /// Neither kind.
    #[error("'{0}' is no port address: write ntb:BUS:DEVICE.FUNCTION, emu:PATH or emu:@NAME")]
    Kind(String),
    /// No such interface.
    #[error(
        "'{0}' is no way to open a bridge: write ntb:BUS:DEVICE.FUNCTION, and behind it nothing, ',iommufd' or ',no-iommu'"
    )]
    Interface(String),
    /// The PCI address is wrong.
    #[error(transparent)]
    Pci(#[from] BadAddress),
}

impl FromStr for PortAddress {
    type Err = BadPortAddress;

    fn from_str(text: &str) -> Result<Self, BadPortAddress> {
        if let Some(address) = text.strip_prefix("ntb:") {
            return Ok(match address.split_once(',') {
                None => Self::Bridge(address.parse()?),
                Some((address, "iommufd")) => Self::BridgeBy(address.parse()?, Interface::Iommufd),
                Some((address, "no-iommu")) => Self::BridgeBy(address.parse()?, Interface::NoIommu),
                Some((_, other)) => return Err(BadPortAddress::Interface(other.to_owned())),
            });
        }
        match text.strip_prefix("emu:") {
            Some(path) if !path.is_empty() && path != "@" => Ok(Self::Emulated(path.into())),
            _ => Err(BadPortAddress::Kind(text.to_owned())),
        }
    }
}

impl fmt::Display for PortAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bridge(address) => write!(f, "ntb:{address}"),
            Self::BridgeBy(address, Interface::Group) => write!(f, "ntb:{address}"),
            Self::BridgeBy(address, Interface::Iommufd) => write!(f, "ntb:{address},iommufd"),
            Self::BridgeBy(address, Interface::NoIommu) => write!(f, "ntb:{address},no-iommu"),
            Self::Emulated(path) => write!(f, "emu:{}", path.display()),
        }
    }
}

/// How a function is opened, whichever kind it is.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// The machine to look at.
    pub machine: Machine,
    /// For bridges.
    pub vfio: VfioOptions,
    /// For emulated ports.
    pub timeouts: Timeouts,
}

impl PortAddress {
    /// Opens the function. [`crate::hw::open`] makes a port of it.
    pub fn open(&self, options: &OpenOptions) -> Result<Arc<dyn PciFunction>, OpenError> {
        Ok(match self {
            Self::Bridge(address) => Vfio::open(&options.machine, *address, &options.vfio)?,
            Self::BridgeBy(address, interface) => {
                let vfio = VfioOptions {
                    interface: *interface,
                    ..options.vfio
                };
                Vfio::open(&options.machine, *address, &vfio)?
            }
            Self::Emulated(path) => VfioUser::open(path, options.timeouts)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for (text, shown) in [
            ("ntb:0000:81:00.0", "ntb:0000:81:00.0"),
            ("ntb:81:0.1", "ntb:0000:81:00.1"),
            ("ntb:81:0.1,iommufd", "ntb:0000:81:00.1,iommufd"),
            ("ntb:81:0.1,no-iommu", "ntb:0000:81:00.1,no-iommu"),
            ("emu:/run/a.sock", "emu:/run/a.sock"),
            ("emu:@a", "emu:@a"),
        ] {
            assert_eq!(text.parse::<PortAddress>().unwrap().to_string(), shown);
        }
        for bad in [
            "",
            "ntb:",
            "ntb:81:20.0",
            "ntb:81:00.8",
            "ntb:+1:00.0",
            "ntb:81:00.0,",
            "ntb:81:00.0,noiommu",
            "ntb:81:00.0,no-iommu,iommufd",
            "emu:",
            "emu:@",
            "soft:a",
            "81:00.0",
        ] {
            assert!(bad.parse::<PortAddress>().is_err(), "{bad}");
        }
    }

    #[test]
    fn no_iommu_is_opened_by_explicit_address_only() {
        use crate::pci::machine::tests::{Described, NTB};
        let options = |described: &Described| OpenOptions {
            machine: described.machine(),
            vfio: VfioOptions {
                patience: std::time::Duration::ZERO,
                ..VfioOptions::default()
            },
            ..OpenOptions::default()
        };
        let name = |address: &str, described: &Described| {
            let address: PortAddress = format!("ntb:{NTB}{address}").parse().unwrap();
            address.open(&options(described)).map(drop).unwrap_err().name()
        };
        // What the kernel makes where it has no IOMMU.
        let bare = Described::spr().file("/dev/vfio/noiommu-42", "");
        assert_eq!(name("", &bare), "no-iommu");
        assert_eq!(name(",iommufd", &bare), "no-iommu");
        // A file is no device node, so opening ends behind all checks.
        assert_ne!(name(",no-iommu", &bare), "no-iommu");
        // Asked for where the kernel does not offer it.
        let guarded = Described::spr();
        assert_eq!(name(",no-iommu", &guarded), "node-missing");
    }
}
