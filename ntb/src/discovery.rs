//! Which bridges this machine has, and which of them can be opened as things are. Reads files of the kernel only:
//! nothing is opened, woken or changed.

use std::io;

use crate::{
    address::PortAddress,
    hw::Family,
    pci::{
        OpenError,
        machine::{Device, Machine},
        vfio::Interface,
    },
};

/// A bridge that was found.
#[derive(Clone, Debug)]
pub struct Found {
    /// Where it is.
    pub address: PortAddress,
    /// Its family; `None` for bridges that are known but not driven here.
    pub family: Option<Family>,
    /// Why it cannot be opened; `None` when nothing that can be seen from outside speaks against it. The mode it is in
    /// and the state of its link show when it is opened.
    pub refusal: Option<Refusal>,
}

/// Why a bridge cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Stable name of the error that opening it would give.
    pub name: &'static str,
    /// Cause and remedy.
    pub what: String,
}

impl From<&OpenError> for Refusal {
    fn from(e: &OpenError) -> Self {
        Self {
            name: e.name(),
            what: e.to_string(),
        }
    }
}

impl Found {
    /// The bridge in one line, such as `ntb:0000:81:00.0 (Intel Sapphire Rapids): ready`.
    pub fn summary(&self) -> String {
        let family = self.family.map_or("unsupported".to_owned(), |f| f.to_string());
        match &self.refusal {
            None => format!("{} ({family}): ready", self.address),
            Some(refusal) => format!("{} ({family}) cannot be used: {}", self.address, refusal.what),
        }
    }
}

/// The bridges of a machine by address. `no_iommu` says whether to open them without an IOMMU.
pub fn bridges(machine: &Machine, no_iommu: bool) -> Vec<Found> {
    machine
        .bridges()
        .iter()
        .map(|device| {
            let identity = device.identity();
            let family = identity.as_ref().and_then(Family::of);
            let unsupported = identity.as_ref().and_then(Family::why_unsupported);
            let refusal = match unsupported {
                Some(why) => Some(Refusal {
                    name: "unsupported-bridge",
                    what: why.to_owned(),
                }),
                None => refusal(machine, device, no_iommu).as_ref().map(Refusal::from),
            };
            Found {
                address: match no_iommu {
                    true => PortAddress::BridgeBy(device.address(), Interface::NoIommu),
                    false => PortAddress::Bridge(device.address()),
                },
                family,
                refusal,
            }
        })
        .collect()
}

/// The first thing that opening would stumble over.
fn refusal(machine: &Machine, device: &Device, no_iommu: bool) -> Option<OpenError> {
    if let Some(first) = device.refusals(no_iommu).into_iter().next() {
        return Some(first);
    }
    let node = match no_iommu {
        true => device.bare_node()?,
        false => device.group_node()?,
    };
    let text = node.display().to_string();
    if !machine.path(&node).exists() {
        return Some(OpenError::NodeMissing {
            node: text,
            waited: std::time::Duration::ZERO,
            hint: "is the module vfio-pci loaded, and does udev (or the container) provide /dev/vfio?",
        });
    }
    if !machine.may_use(&node) {
        return Some(OpenError::Permission {
            remedy: format!("run as root, or give this user the node: 'chown $USER {text}' or a udev rule"),
            node: text,
            source: io::ErrorKind::PermissionDenied.into(),
        });
    }
    let holders = machine.holders(&node);
    (!holders.is_empty()).then_some(OpenError::NodeBusy {
        node: text,
        waited: std::time::Duration::ZERO,
        holders,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pci::machine::tests::{Described, NTB};
    use std::os::unix::fs::PermissionsExt;

    fn only(described: &Described) -> Found {
        let [found] = &bridges(&described.machine(), false)[..] else {
            panic!("one bridge is described")
        };
        found.clone()
    }

    #[test]
    fn a_bridge_that_is_set_up_is_ready() {
        let found = only(&Described::spr());
        assert_eq!(found.refusal, None);
        assert_eq!(found.family, Some(Family::IntelSpr));
        assert_eq!(found.address.to_string(), format!("ntb:{NTB}"));
        assert!(found.summary().ends_with("ready"), "{}", found.summary());
        assert!(bridges(&Described::empty().machine(), false).is_empty());
    }

    #[test]
    fn the_first_obstacle_is_told_with_its_remedy() {
        let name = |described: &Described| {
            let found = only(described);
            let refusal = found.refusal.clone().unwrap();
            assert!(found.summary().contains(&refusal.what));
            refusal.name
        };
        let unbound =
            Described::empty().function(NTB, "0x8086", "0x347e", "0x10", "0x068000", Some("ntb_hw_intel"));
        assert_eq!(name(&unbound), "wrong-driver");
        let alone =
            Described::empty().function(NTB, "0x8086", "0x347e", "0x10", "0x068000", Some("vfio-pci"));
        assert_eq!(name(&alone), "no-iommu");
        let old = Described::empty().function(NTB, "0x8086", "0x6f0d", "0x01", "0x068000", Some("vfio-pci"));
        assert_eq!(name(&old), "unsupported-bridge");

        let described = Described::spr();
        let node = described.machine().path("/dev/vfio/42");
        std::fs::set_permissions(&node, PermissionsExt::from_mode(0o000)).unwrap();
        assert_eq!(name(&described), "no-permission");
        std::fs::remove_file(&node).unwrap();
        assert_eq!(name(&described), "node-missing");
    }

    #[test]
    fn a_bridge_without_an_iommu_is_ready_only_where_that_is_accepted() {
        let described = Described::spr();
        std::fs::rename(
            described.machine().path("/dev/vfio/42"),
            described.machine().path("/dev/vfio/noiommu-42"),
        )
        .unwrap();
        let refusal = only(&described).refusal.unwrap();
        assert_eq!(refusal.name, "no-iommu");
        assert_eq!(bridges(&described.machine(), true)[0].refusal, None);
    }
}
