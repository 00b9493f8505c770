//! Why a function could not be opened: each kind with its cause and its remedy.

use std::{io, time::Duration};

use super::{ExitClass, PciError};

/// A device that shares an IOMMU group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupMember {
    /// PCI address.
    pub address: String,
    /// Driver that holds it; `None` when no driver does.
    pub driver: Option<String>,
    /// Whether this is the one that keeps the group from being used.
    pub in_the_way: bool,
}

/// A refusal to open a function. [`OpenError::name`] is stable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// No such function.
    #[error("there is no PCI function {address}: {hint}")]
    NoDevice {
        /// The address asked for.
        address: String,
        /// What there is instead, or what to look at.
        hint: String,
    },
    /// Another driver, or none, holds the function.
    #[error(
        "{address} is held by {}, and must be held by vfio-pci: run 'modprobe vfio-pci; driverctl set-override \
         {address} vfio-pci', or without driverctl: '{bind}'",
        .driver.as_deref().map_or("no driver".to_owned(), |d| format!("driver {d}"))
    )]
    WrongDriver {
        /// The address.
        address: String,
        /// The driver that holds it.
        driver: Option<String>,
        /// Shell command that binds it to vfio-pci.
        bind: String,
    },
    /// Other functions of the group are with kernel drivers.
    #[error("IOMMU group {group} of {address} is not viable: {}", describe_group(.members))]
    GroupNotViable {
        /// The function asked for.
        address: String,
        /// The group.
        group: u32,
        /// Who else is in the group.
        members: Vec<GroupMember>,
    },
    /// The machine has no IOMMU, or it is off.
    #[error(
        "{address} is in no IOMMU group: the IOMMU is absent or off. Enable VT-d or AMD-Vi in the firmware set-up and \
         boot with intel_iommu=on iommu=pt (Intel; AMD needs nothing more). Without an IOMMU the bridge could write to \
         all memory of this machine; who accepts that writes ntb:{address},no-iommu"
    )]
    NoIommu {
        /// The function asked for.
        address: String,
    },
    /// No-IOMMU mode was asked for and the kernel does not allow it.
    #[error(
        "no-IOMMU mode was asked for, but the kernel does not offer it for {address}: as root, 'echo 1 > \
         /sys/module/vfio/parameters/enable_unsafe_noiommu_mode', then bind the function to vfio-pci again"
    )]
    NoIommuModeOff {
        /// The function asked for.
        address: String,
    },
    /// A device node is not there.
    #[error("{node} does not exist after waiting {waited:?}: {hint}")]
    NodeMissing {
        /// The node.
        node: String,
        /// How long was waited.
        waited: Duration,
        /// What makes it appear.
        hint: &'static str,
    },
    /// A device node is in use.
    #[error("{node} is busy after waiting {waited:?}; {}", describe_holders(.holders))]
    NodeBusy {
        /// The node.
        node: String,
        /// How long was waited.
        waited: Duration,
        /// Processes that hold it open, as far as this user may see.
        holders: Vec<String>,
    },
    /// Not allowed.
    #[error("no permission to open {node} ({source}): {remedy}")]
    Permission {
        /// What was to be opened.
        node: String,
        /// The cause.
        source: io::Error,
        /// What to do.
        remedy: String,
    },
    /// The kernel lacks an interface.
    #[error("the kernel does not offer {what}: {hint}")]
    NoInterface {
        /// Which.
        what: &'static str,
        /// How to get it.
        hint: &'static str,
    },
    /// An operation on the way failed.
    #[error(transparent)]
    Pci(#[from] PciError),
}

impl OpenError {
    /// Stable name of the kind of error.
    pub fn name(&self) -> &'static str {
        match self {
            Self::NoDevice { .. } => "no-device",
            Self::WrongDriver { .. } => "wrong-driver",
            Self::GroupNotViable { .. } => "group-not-viable",
            Self::NoIommu { .. } => "no-iommu",
            Self::NoIommuModeOff { .. } => "no-iommu-mode-off",
            Self::NodeMissing { .. } => "node-missing",
            Self::NodeBusy { .. } => "node-busy",
            Self::Permission { .. } => "no-permission",
            Self::NoInterface { .. } => "no-kernel-interface",
            Self::Pci(e) => e.name(),
        }
    }

    /// Exit class.
    pub fn class(&self) -> ExitClass {
        match self {
            Self::NoDevice { .. } | Self::NodeMissing { .. } => ExitClass::NoHardware,
            Self::WrongDriver { .. }
            | Self::GroupNotViable { .. }
            | Self::NoIommu { .. }
            | Self::NoIommuModeOff { .. }
            | Self::NodeBusy { .. }
            | Self::Permission { .. }
            | Self::NoInterface { .. } => ExitClass::Permission,
            Self::Pci(e) => e.class(),
        }
    }
}

fn describe_group(members: &[GroupMember]) -> String {
    let mut text = String::new();
    for m in members {
        let driver = m.driver.as_deref().unwrap_or("no driver");
        let note = if m.in_the_way { " (in the way)" } else { "" };
        text.push_str(&format!("{} is with {driver}{note}; ", m.address));
    }
    let blocking: Vec<&str> = members
        .iter()
        .filter(|m| m.in_the_way)
        .map(|m| m.address.as_str())
        .collect();
    text.push_str("bind to vfio-pci, or unbind: ");
    text.push_str(
        &blocking
            .iter()
            .map(|a| bind_command(a))
            .collect::<Vec<_>>()
            .join("; "),
    );
    text
}

fn describe_holders(holders: &[String]) -> String {
    if holders.is_empty() {
        return "no process of this user holds it: run 'fuser -v' on it as root to see who does".to_owned();
    }
    format!("held by {}: end it first", holders.join(", "))
}

/// Shell command, for root, that hands a function to vfio-pci.
pub fn bind_command(address: &str) -> String {
    format!(
        "echo vfio-pci > /sys/bus/pci/devices/{address}/driver_override; \
         echo {address} > /sys/bus/pci/devices/{address}/driver/unbind; echo {address} > /sys/bus/pci/drivers_probe"
    )
}
