//! What keeps the driver from opening a bridge: another driver, the IOMMU group, the device node.

use std::time::Duration;

use ntb::pci::{
    GroupMember, OpenError, bind_command,
    machine::{Device, Machine},
};

use super::{item::Item, machine::IOMMU_REMEDY};

/// The kernel driver that holds it.
pub fn driver(device: &Device, refusals: &[OpenError]) -> Item {
    const ITEM: &str = "driver";
    let address = device.address().to_string();
    let refusal = refusals
        .iter()
        .find(|e| matches!(e, OpenError::WrongDriver { .. }));
    let Some(error) = refusal else {
        return Item::pass(ITEM, "vfio-pci");
    };
    let holder = device.driver();
    Item::fault(
        ITEM,
        error,
        holder.map_or("no driver holds it".to_owned(), |d| {
            format!("driver {d} holds it")
        }),
        "the bridge is driven from user space through vfio-pci, and a function has one driver",
        format!(
            "'modprobe vfio-pci; driverctl set-override {address} vfio-pci', which survives reboots; or as root, until \
             the next boot: 'modprobe vfio-pci; {}'",
            bind_command(&address)
        ),
    )
}

/// Its IOMMU group, and who shares it.
pub fn group(device: &Device, refusals: &[OpenError]) -> Item {
    const ITEM: &str = "iommu-group";
    for error in refusals {
        match error {
            OpenError::NoIommu { .. } => {
                return Item::fault(
                    ITEM,
                    error,
                    "it is in no group that an IOMMU guards: the IOMMU is absent or off",
                    "without an IOMMU the peer could write to all memory of this machine; the driver takes that only \
                     when it is told to",
                    IOMMU_REMEDY,
                );
            }
            OpenError::GroupNotViable { group, members, .. } => {
                let (list, blocking) = describe_group(device, members);
                return Item::fault(
                    ITEM,
                    error,
                    format!("group {group} is shared with {list}"),
                    "functions of one group can reach each other's memory, so VFIO gives out all of them or none",
                    format!(
                        "as root: {}; or put the card into another slot",
                        blocking
                            .iter()
                            .map(|a| bind_command(a))
                            .collect::<Vec<_>>()
                            .join("; ")
                    ),
                );
            }
            _ => {}
        }
    }
    let (list, _) = describe_group(device, &device.group_members());
    let group = device.group().unwrap_or_default();
    if list.is_empty() {
        return Item::pass(ITEM, format!("group {group}, alone in it"));
    }
    Item::pass(
        ITEM,
        format!("group {group}, shared with {list}: none is in the way"),
    )
}

/// The others of a group in words, and which are in the way.
fn describe_group(device: &Device, members: &[GroupMember]) -> (String, Vec<String>) {
    let own = device.address().to_string();
    let others = members.iter().filter(|m| m.address != own);
    let list: Vec<String> = others
        .map(|m| {
            let driver = m.driver.as_deref().unwrap_or("no driver");
            let note = if m.in_the_way { ", in the way" } else { "" };
            format!("{} ({driver}{note})", m.address)
        })
        .collect();
    let blocking = members.iter().filter(|m| m.in_the_way).map(|m| m.address.clone());
    (list.join(", "), blocking.collect())
}

/// The device node: only where one is to be expected.
pub fn node(machine: &Machine, device: &Device, refusals: &[OpenError]) -> Option<Item> {
    const ITEM: &str = "device-node";
    const WHY: &str = "the driver opens the bridge through this node";
    let path = device.group_node()?;
    let node = path.display().to_string();
    let none_expected =
        |e: &OpenError| matches!(e, OpenError::WrongDriver { .. } | OpenError::NoIommu { .. });
    if refusals.iter().any(none_expected) {
        return None;
    }
    if !machine.path(&path).exists() {
        let error = OpenError::NodeMissing {
            node: node.clone(),
            waited: Duration::ZERO,
            hint: "",
        };
        return Some(Item::fault(
            ITEM,
            &error,
            format!("{node} does not exist, though vfio-pci holds the function"),
            WHY,
            format!(
                "load the module ('modprobe vfio-pci'); give a container the node: --device /dev/vfio/vfio --device {node}"
            ),
        ));
    }
    if !machine.may_use(&path) {
        let error = OpenError::Permission {
            node: node.clone(),
            source: std::io::ErrorKind::PermissionDenied.into(),
            remedy: String::new(),
        };
        return Some(Item::fault(
            ITEM,
            &error,
            format!("{node} may not be opened by this user"),
            WHY,
            format!(
                "run as root; or as root: 'chown USER {node}', or a udev rule that does it at every boot"
            ),
        ));
    }
    let holders = machine.holders(&path);
    if !holders.is_empty() {
        let error = OpenError::NodeBusy {
            node: node.clone(),
            waited: Duration::ZERO,
            holders: holders.clone(),
        };
        return Some(Item::fault(
            ITEM,
            &error,
            format!("{node} is held by {}", holders.join(", ")),
            "one program at a time drives a bridge",
            format!("end that program if it should not run; as root, 'fuser -v {node}' shows its user"),
        ));
    }
    Some(Item::pass(ITEM, node))
}
