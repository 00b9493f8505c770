//! Where a port is: on a bridge of this machine, or on an emulated one.

use std::{fmt, path::PathBuf, str::FromStr, sync::Arc};

use crate::pci::{
    OpenError, PciFunction,
    machine::{BadAddress, Machine, PciAddress},
    vfio::{Vfio, VfioOptions},
    vfio_user::{Timeouts, VfioUser},
};

/// The address of a port, as tools and configurations write it: `ntb:0000:81:00.0`, `emu:PATH`, `emu:@NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortAddress {
    /// A PCI function of this machine.
    Bridge(PciAddress),
    /// A socket at which an emulator serves; a name that starts with `@` is abstract.
    Emulated(PathBuf),
}

/// A text that is no port address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadPortAddress {
    /// Neither kind.
    #[error("'{0}' is no port address: write ntb:BUS:DEVICE.FUNCTION, emu:PATH or emu:@NAME")]
    Kind(String),
    /// The PCI address is wrong.
    #[error(transparent)]
    Pci(#[from] BadAddress),
}

impl FromStr for PortAddress {
    type Err = BadPortAddress;

    fn from_str(text: &str) -> Result<Self, BadPortAddress> {
        if let Some(address) = text.strip_prefix("ntb:") {
            return Ok(Self::Bridge(address.parse()?));
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
            "emu:",
            "emu:@",
            "soft:a",
            "81:00.0",
        ] {
            assert!(bad.parse::<PortAddress>().is_err(), "{bad}");
        }
    }
}
