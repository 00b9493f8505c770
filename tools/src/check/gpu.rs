//! GPUs, and what lies between each of them and a bridge: whether the one's stores can reach the other.
//!
//! Only what the machine says is read; nothing here asks a driver. What it finds is about likelihood: a path counts as good when
//! its proof has run (`ntb-ping --from gpu:N`).

use std::collections::BTreeMap;

use ntb::pci::{
    Bar,
    machine::{Device, Machine, PciAddress},
};

use super::{item::Item, machine::amount};

const NVIDIA: u16 = 0x10de;
/// Parameters of the driver's module, as it runs with them.
pub const PARAMS: &str = "/proc/driver/nvidia/params";
const PARAMS_REMEDY: &str = "load the driver's module ('modprobe nvidia') and look again, as root if the file is there and cannot be read";
/// Version and flavour of the driver's module.
pub const VERSION: &str = "/proc/driver/nvidia/version";
/// Modules that give other devices a way into GPU memory.
pub const MODULES: [&str; 2] = ["/sys/module/gdrdrv", "/sys/module/nvidia_peermem"];
/// Bytes of a bridge's configuration space that say which buses lie behind it.
const BUSES: u32 = 0x18;
/// Largest BAR1 of boards that show only a part of their memory.
const SMALL_BAR1: u64 = 256 << 20;
/// Bits of access control by which packets between two devices are sent up to the root.
const REDIRECTS: [(u16, &str); 3] = [
    (0x04, "request redirect"),
    (0x08, "completion redirect"),
    (0x10, "upstream forwarding"),
];

/// All GPUs of a machine that this project knows how to use.
pub fn gpus(machine: &Machine) -> Vec<Device> {
    let is_gpu = |d: &Device| {
        d.identity()
            .is_some_and(|i| i.vendor == NVIDIA && matches!(i.class >> 8, 0x0300 | 0x0302))
    };
    machine.functions().into_iter().filter(is_gpu).collect()
}

/// All items: none where there is no GPU.
pub fn items(machine: &Machine, bridges: &[Device]) -> Vec<Item> {
    let gpus = gpus(machine);
    if gpus.is_empty() {
        return Vec::new();
    }
    let mut items = vec![
        driver(machine),
        permission(machine),
        ways(machine),
        relaxed_ordering(machine, &gpus),
        translation(machine),
    ];
    let above = Above::of(machine);
    for gpu in &gpus {
        items.push(window(gpu));
        for bridge in bridges {
            items.extend(path(&above, gpu, bridge));
        }
    }
    items
}

fn driver(machine: &Machine) -> Item {
    const ITEM: &str = "gpu-driver";
    const WHY: &str = "the driver's open kernel modules are what maps a bridge's aperture for a GPU on current kernels, and what \
                       exports GPU memory";
    let Some(version) = machine.text(VERSION) else {
        return Item::warning(
            ITEM,
            "gpu-no-driver",
            "the NVIDIA driver's kernel module is not loaded",
            WHY,
            "install the driver in its open flavour (Debian and Ubuntu: a package named nvidia-open or nvidia-driver-NNN-open), \
             then 'modprobe nvidia'",
        );
    };
    let first = version.lines().next().unwrap_or_default();
    let number = first.split_whitespace().find_map(|word| {
        let mut parts = word.split('.').map(str::parse::<u32>);
        let (Some(Ok(a)), Some(Ok(b))) = (parts.next(), parts.next()) else {
            return None;
        };
        Some((a, b, parts.next().and_then(Result::ok).unwrap_or(0)))
    });
    let said = number.map_or("unknown".to_owned(), |(a, b, c)| format!("{a}.{b:02}.{c:02}"));
    if !first.contains("Open Kernel Module") {
        return Item::warning(
            ITEM,
            "gpu-driver-closed",
            format!("driver {said} with closed kernel modules"),
            WHY,
            "install the open flavour of the same version: from kernel 6.12 on the closed one cannot look a device's pages up",
        );
    }
    let release = machine.text("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut parts = release.split(['.', '-']).map(|p| p.parse::<u32>().unwrap_or(0));
    let kernel = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    if kernel >= (6, 10) && number.is_some_and(|n| n < (570, 133, 7)) {
        return Item::warning(
            ITEM,
            "gpu-driver-too-old",
            format!("driver {said} on kernel {release}: a pair known to fail"),
            "kernels from 6.10 on took the function away by which older drivers find a device's pages: registering an aperture gives \
             'invalid argument' there",
            "install driver 570.133.07 or newer, built on this machine after its kernel; 'gpu-try --only aperture' tries it",
        );
    }
    Item::pass(
        ITEM,
        format!("driver {said}, open kernel modules, kernel {release}"),
    )
}

fn permission(machine: &Machine) -> Item {
    const ITEM: &str = "gpu-peer-mapping";
    let status = machine.text("/proc/self/status").unwrap_or_default();
    let capabilities = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    let bits = capabilities.and_then(|c| u64::from_str_radix(c.trim(), 16).ok());
    const CAP_SYS_ADMIN: u32 = 21;
    if bits.is_some_and(|b| b >> CAP_SYS_ADMIN & 1 == 1) {
        return Item::pass(
            ITEM,
            "this user may let a GPU store into other devices (privileged)",
        );
    }
    let params = machine.text(PARAMS).unwrap_or_default();
    if params.contains("PeerMappingOverride=1") {
        return Item::pass(ITEM, "the driver lets any user do it (PeerMappingOverride=1)");
    }
    Item::warning(
        ITEM,
        "gpu-not-permitted",
        "this user is not root, and the driver lets only root register other devices' memory",
        "a GPU cannot store into the bridge then: error 800",
        "run as root, or put 'options nvidia NVreg_RegistryDwords=\"PeerMappingOverride=1;\"' into \
         /etc/modprobe.d/nvidia.conf and load the module anew",
    )
}

fn ways(machine: &Machine) -> Item {
    const ITEM: &str = "gpu-modules";
    let loaded: Vec<&str> = MODULES
        .into_iter()
        .filter(|m| machine.path(m).exists())
        .filter_map(|m| m.rsplit('/').next())
        .collect();
    let list = match loaded.is_empty() {
        true => "neither gdrdrv nor nvidia_peermem".to_owned(),
        false => loaded.join(", "),
    };
    const WHY: &str = "a driver with CUDA 13.3 or newer lets programs map GPU memory by itself; older ones need gdrcopy's module \
                       gdrdrv, or everything is copied by the processor";
    if loaded.contains(&"gdrdrv") {
        return Item::pass(ITEM, format!("loaded: {list}"));
    }
    Item {
        remedy: Some(
            "nothing with CUDA 13.3 or newer; else install gdrcopy's module (Debian and Ubuntu: gdrdrv-dkms) and 'modprobe \
             gdrdrv'; for RDMA 'modprobe nvidia_peermem' where no dma-buf is to be had"
                .to_owned(),
        ),
        ..Item::note(ITEM, format!("loaded: {list}"), WHY)
    }
}

/// What the IOMMU does to packets between the two devices.
fn translation(machine: &Machine) -> Item {
    const ITEM: &str = "gpu-iommu";
    if machine.names("/sys/class/iommu").is_empty() {
        return Item::warning(
            ITEM,
            "gpu-no-iommu",
            "no IOMMU is on",
            "where GPU memory lies on the bus is told to nobody but the driver, so that a bridge cannot be pointed at it: messages to \
             a GPU go by memory of this host. A GPU that sends is not touched by it",
            super::machine::IOMMU_REMEDY,
        );
    }
    const UNMAPPED: &str = "with DmaRemapPeerMmio=0 a bridge's aperture is not mapped for the GPU: what kernels store there arrives \
                            nowhere";
    let Some(params) = machine.text(PARAMS) else {
        return Item {
            remedy: Some(PARAMS_REMEDY.to_owned()),
            ..Item::note(
                ITEM,
                format!(
                    "an IOMMU is on; whether the driver maps apertures in it could not be checked: {PARAMS} cannot be read"
                ),
                UNMAPPED,
            )
        };
    };
    let off = |line: &str| {
        let value = line.strip_prefix("DmaRemapPeerMmio:");
        value.is_some_and(|v| v.trim() == "0")
    };
    if params.lines().any(off) {
        return Item::warning(
            ITEM,
            "gpu-peer-mmio-unmapped",
            "an IOMMU is on, and the driver runs with DmaRemapPeerMmio=0",
            UNMAPPED,
            "remove NVreg_DmaRemapPeerMmio=0 from the module's options (1 is the default) and load it anew",
        );
    }
    Item::pass(ITEM, "an IOMMU is on, and the driver maps apertures in it")
}

/// Whether writes may overtake each other on their way out: the driver has to ask for it, and the device's own control to let it.
fn relaxed_ordering(machine: &Machine, gpus: &[Device]) -> Item {
    const ITEM: &str = "gpu-relaxed-ordering";
    const WHY: &str = "a mark may overtake the bytes that it vouches for; the check in every message catches that, at the price of looks in vain";
    let unknown = |finding: String, remedy: &str| Item {
        remedy: Some(remedy.to_owned()),
        ..Item::note(ITEM, finding, WHY)
    };
    let Some(params) = machine.text(PARAMS) else {
        return unknown(
            format!("could not be checked: {PARAMS} cannot be read"),
            PARAMS_REMEDY,
        );
    };
    let value = params
        .lines()
        .find_map(|l| l.strip_prefix("EnablePCIERelaxedOrderingMode:"));
    let other = match value.map(str::trim) {
        None => {
            return unknown(
                format!("could not be checked: {PARAMS} says nothing of EnablePCIERelaxedOrderingMode"),
                "'lspci -vv -s GPU' as root: RlxdOrd+ in DevCtl lets the GPU reorder, RlxdOrd- forbids it",
            );
        }
        Some("0") => return Item::pass(ITEM, "the driver keeps writes in order"),
        Some(other) => other,
    };
    let (mut allowed, mut unread) = (Vec::new(), Vec::new());
    for gpu in gpus {
        match device_control(gpu, &mut |_, _| {}) {
            Some(Some(word)) if word & RELAXED_ORDERING == 0 => {}
            Some(_) => allowed.push(gpu.address().to_string()),
            None => unread.push(gpu.address().to_string()),
        }
    }
    let mode = format!("the driver runs with EnablePCIERelaxedOrderingMode={other}");
    let hidden = format!("that of {} could not be read, needs root", unread.join(", "));
    if allowed.is_empty() && unread.is_empty() {
        return Item::pass(ITEM, format!("{mode}, and every GPU's device control forbids it"));
    }
    if allowed.is_empty() {
        return unknown(
            format!("{mode}; a GPU's device control may forbid it, and {hidden}"),
            "run ntb-check as root",
        );
    }
    let mut finding = format!(
        "{mode}, and nothing in the device control of {} forbids it",
        allowed.join(", ")
    );
    if !unread.is_empty() {
        finding += &format!("; {hidden}");
    }
    Item::warning(
        ITEM,
        "gpu-relaxed-ordering",
        finding,
        WHY,
        "remove NVreg_EnablePCIERelaxedOrderingMode from the module's options and load it anew, or take the device's leave with \
         'setpci -s GPU CAP_EXP+8.w=0:10'",
    )
}

/// `Enable Relaxed Ordering` of the Device Control register.
const RELAXED_ORDERING: u16 = 0x10;

/// A device's Device Control register: `Some(None)` where it has none, `None` where that cannot be read.
/// `seen` is told what was read.
fn device_control(device: &Device, seen: &mut dyn FnMut(u32, &[u8])) -> Option<Option<u16>> {
    const FIRST: u32 = 0x34;
    const PCI_EXPRESS: u8 = 0x10;
    let [first] = device.config_bytes::<1>(FIRST)?;
    seen(FIRST, &[first]);
    let mut at = u32::from(first & !3);
    // As many as fit.
    for _ in 0..48 {
        if at < 0x40 {
            return Some(None);
        }
        let header = device.config_bytes::<2>(at)?;
        seen(at, &header);
        let [id, next] = header;
        if id == PCI_EXPRESS {
            let control = device.config_bytes::<2>(at + 8)?;
            seen(at + 8, &control);
            return Some(Some(u16::from_le_bytes(control)));
        }
        at = u32::from(next & !3);
    }
    Some(None)
}

fn window(gpu: &Device) -> Item {
    const ITEM: &str = "gpu-bar1";
    let address = gpu.address();
    let Some(bar) = gpu.resource(Bar::B1) else {
        return Item::note(
            ITEM,
            format!("{address}: the size of BAR1 is not told"),
            "what other devices reach of the GPU's memory lies in BAR1",
        );
    };
    if bar.bytes > SMALL_BAR1 {
        return Item::pass(ITEM, format!("{address}: BAR1 has {}", amount(bar.bytes)));
    }
    Item::warning(
        ITEM,
        "gpu-small-bar1",
        format!("{address}: BAR1 has {}", amount(bar.bytes)),
        "no more than about 220 MiB of the GPU's memory can be shown to other devices",
        "enable 'Above 4G decoding' and resizable BAR in the firmware set-up; options nvidia NVreg_EnableResizableBar=1",
    )
}

/// Parts of a configuration space: offset and bytes.
type Parts = Vec<(u32, Vec<u8>)>;

/// All ports and GPUs, with the parts of their configuration space that are looked at here.
pub fn looked_at(machine: &Machine) -> Vec<(Device, Parts)> {
    let is_port = |d: &Device| d.identity().is_some_and(|i| i.class >> 8 == 0x0604);
    let gpus = gpus(machine).into_iter().map(|device| {
        let mut parts: Parts = Vec::new();
        device_control(&device, &mut |at, bytes| parts.push((at, bytes.to_vec())));
        (device, parts)
    });
    let ports = machine.functions().into_iter().filter(is_port);
    ports
        .map(|device| {
            let mut parts: Parts = Vec::new();
            if let Some(buses) = device.config_bytes::<4>(BUSES) {
                parts.push((BUSES, buses.to_vec()));
            }
            acs_control(&device, &mut |at, bytes| parts.push((at, bytes.to_vec())));
            (device, parts)
        })
        .chain(gpus)
        .collect()
}

/// Which bridge lies above each bus.
struct Above(BTreeMap<(String, u8), Device>);

impl Above {
    fn of(machine: &Machine) -> Self {
        let mut above = BTreeMap::new();
        for device in machine.functions() {
            let is_bridge = device.identity().is_some_and(|i| i.class >> 8 == 0x0604);
            let Some([_, secondary, ..]) = is_bridge.then(|| device.config_bytes::<4>(BUSES)).flatten()
            else {
                continue;
            };
            let (domain, _) = place(device.address());
            above.insert((domain, secondary), device);
        }
        Self(above)
    }

    /// The bridges above a function, nearest first, up to the root port.
    fn chain(&self, device: &Device) -> Vec<&Device> {
        let mut chain: Vec<&Device> = Vec::new();
        let mut at = place(device.address());
        while let Some(bridge) = self.0.get(&at) {
            // Numbers that a machine could not have must not lead in a circle.
            if chain.len() > 32 {
                break;
            }
            at = place(bridge.address());
            chain.push(bridge);
        }
        chain
    }
}

/// Domain and bus of an address.
fn place(address: PciAddress) -> (String, u8) {
    let text = address.to_string();
    let mut parts = text.split(':');
    let domain = parts.next().unwrap_or_default().to_owned();
    let bus = parts.next().and_then(|b| u8::from_str_radix(b, 16).ok());
    (domain, bus.unwrap_or(0))
}

fn path(above: &Above, gpu: &Device, bridge: &Device) -> Vec<Item> {
    const ITEM: &str = "gpu-path";
    let pair = format!("{} and {}", gpu.address(), bridge.address());
    let (up_gpu, up_bridge) = (above.chain(gpu), above.chain(bridge));
    let common = up_gpu
        .iter()
        .find(|a| up_bridge.iter().any(|b| b.address() == a.address()));
    let node = |d: &Device| {
        d.text("numa_node")
            .and_then(|n| n.parse::<i32>().ok())
            .filter(|n| *n >= 0)
    };
    let mut items = Vec::new();
    let mut on_path: Vec<&Device> = Vec::new();
    match common {
        Some(common) => {
            let below = |chain: &[&'_ Device]| {
                chain
                    .iter()
                    .take_while(|d| d.address() != common.address())
                    .count()
            };
            on_path.extend(up_gpu.iter().take(below(&up_gpu)));
            on_path.extend(up_bridge.iter().take(below(&up_bridge)));
            items.push(Item::pass(
                ITEM,
                format!("{pair} lie below the same switch or port, {}", common.address()),
            ));
        }
        None => {
            on_path.extend(up_gpu.iter().chain(&up_bridge));
            let apart = matches!((node(gpu), node(bridge)), (Some(a), Some(b)) if a != b);
            items.push(if apart {
                Item::warning(
                    ITEM,
                    "gpu-other-socket",
                    format!("{pair} are at different sockets"),
                    "packets between devices of two sockets are slow at best and do not arrive at worst",
                    "put both cards into slots of one socket, best below one PCIe switch",
                )
            } else {
                Item::warning(
                    ITEM,
                    "gpu-other-root-port",
                    format!("{pair} lie below different root ports"),
                    "PCI Express does not promise that packets are routed between root ports; AMD since Zen and Intel since Skylake-SP \
                     do it",
                    "put both cards below one PCIe switch; or rely on the proof that runs before the first message",
                )
            });
        }
    }
    if gpu.group().is_some() && gpu.group() == bridge.group() {
        items.push(Item::warning(
            "gpu-group",
            "gpu-same-group",
            format!("{pair} are in one IOMMU group"),
            "a group goes to programs as a whole: the bridge cannot be opened while the GPU has its own driver",
            "use another slot for one of them; access control (ACS) of the ports between decides about groups",
        ));
    }
    items.extend(access_control(&pair, &on_path));
    items
}

fn access_control(pair: &str, on_path: &[&Device]) -> Option<Item> {
    const ITEM: &str = "gpu-acs";
    const WHY: &str = "packets between the two devices go up to the root and down again: slower, and on some systems they hang";
    let mut found = Vec::new();
    let mut unknown = 0;
    for port in on_path {
        match acs_control(port, &mut |_, _| {}) {
            Some(Some(control)) => {
                let bits: Vec<&str> = REDIRECTS
                    .iter()
                    .filter(|(bit, _)| control & bit != 0)
                    .map(|(_, name)| *name)
                    .collect();
                if !bits.is_empty() {
                    found.push(format!("{} ({})", port.address(), bits.join(", ")));
                }
            }
            Some(None) => {}
            None => unknown += 1,
        }
    }
    if !found.is_empty() {
        return Some(Item::warning(
            ITEM,
            "gpu-acs-redirect",
            format!("between {pair}: {}", found.join("; ")),
            WHY,
            "take it as it is and let the proof decide, or, giving up the isolation that it is there for: 'setpci -s PORT \
             ECAP_ACS+6.w=0:1c', which merges IOMMU groups at the next boot",
        ));
    }
    if unknown > 0 {
        return Some(Item::note(
            ITEM,
            format!(
                "between {pair}: access control of {unknown} ports could not be checked: reading it needs root"
            ),
            WHY,
        ));
    }
    (!on_path.is_empty()).then(|| Item::pass(ITEM, format!("between {pair}: no redirection")))
}

/// The access control word of a port: `Some(None)` where it has none, `None` where that cannot be read.
/// `seen` is told what was read.
fn acs_control(port: &Device, seen: &mut dyn FnMut(u32, &[u8])) -> Option<Option<u16>> {
    const ACS: u32 = 0x000d;
    let mut at = 0x100;
    for _ in 0..48 {
        let header = port.config_bytes::<4>(at)?;
        seen(at, &header);
        let header = u32::from_le_bytes(header);
        if header == 0 || header == u32::MAX {
            return Some(None);
        }
        if header & 0xffff == ACS {
            let control = port.config_bytes::<2>(at + 6)?;
            seen(at + 6, &control);
            return Some(Some(u16::from_le_bytes(control)));
        }
        at = header >> 20 & !3;
        if at < 0x100 {
            return Some(None);
        }
    }
    Some(None)
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use super::*;
    use crate::check::{description::Described, item::State, record};

    /// A described machine: files below a directory of this test's own.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str) -> Self {
            let root = std::env::temp_dir().join(format!("ntb-check-gpu-{}-{name}", std::process::id()));
            let _ = fs::remove_dir_all(&root);
            Self(root)
        }

        fn file(&self, path: &str, content: impl AsRef<[u8]>) -> &Self {
            let path = self.0.join(path.trim_start_matches('/'));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
            self
        }

        fn function(&self, address: &str, vendor: &str, class: &str, node: &str) -> &Self {
            let dir = format!("/sys/bus/pci/devices/{address}");
            self.file(&format!("{dir}/vendor"), vendor)
                .file(&format!("{dir}/device"), "0x2330")
                .file(&format!("{dir}/class"), class)
                .file(&format!("{dir}/revision"), "0x00")
                .file(&format!("{dir}/numa_node"), node)
        }

        /// A port above bus `secondary`, with this access control word, or none.
        fn port(&self, address: &str, secondary: u8, acs: Option<u16>) -> &Self {
            self.function(address, "0x8086", "0x060400", "0");
            let mut config = vec![0u8; 4096];
            config[0x19] = secondary;
            if let Some(control) = acs {
                // One other capability first.
                config[0x100..0x104].copy_from_slice(&0x1401_0001u32.to_le_bytes());
                config[0x140..0x144].copy_from_slice(&0x0001_000du32.to_le_bytes());
                config[0x146..0x148].copy_from_slice(&control.to_le_bytes());
            }
            self.file(&format!("/sys/bus/pci/devices/{address}/config"), config)
        }

        fn items(&self, bridge: &str) -> Vec<Item> {
            let machine = Machine::at(&self.0);
            let bridge = machine.device(bridge.parse().unwrap()).unwrap();
            items(&machine, &[bridge])
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn named<'a>(items: &'a [Item], item: &str) -> &'a Item {
        items
            .iter()
            .find(|i| i.item == item)
            .unwrap_or_else(|| panic!("no {item} in {items:#?}"))
    }

    const OPEN: &str = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build";

    #[test]
    fn a_switch_above_both_is_good_and_redirection_is_found() {
        for (acs, expected) in [
            (None, State::Pass),
            (Some(0x01), State::Pass),
            (Some(0x1d), State::Warning),
            (Some(0x04), State::Warning),
        ] {
            let tree = Tree::new(&format!("switch-{acs:?}"));
            tree.port("0000:00:01.0", 1, Some(0x1d)) // root port, above the switch: not on the path
                .port("0000:01:00.0", 2, None)
                .port("0000:02:00.0", 3, acs)
                .port("0000:02:01.0", 4, None)
                .function("0000:03:00.0", "0x10de", "0x030200", "0")
                .function("0000:04:00.0", "0x8086", "0x068000", "0")
                .file(VERSION, OPEN)
                .file("/proc/sys/kernel/osrelease", "6.12.1-amd64");
            let items = tree.items("0000:04:00.0");
            let path = named(&items, "gpu-path");
            assert_eq!(path.state, State::Pass);
            assert!(path.finding.contains("0000:01:00.0"), "{path:?}");
            let item = named(&items, "gpu-acs");
            assert_eq!(item.state, expected, "{item:?}");
            if expected == State::Warning {
                assert!(
                    item.finding.contains("0000:02:00.0 (request redirect"),
                    "{item:?}"
                );
                assert!(item.remedy.as_ref().unwrap().contains("setpci"));
            }
        }
    }

    #[test]
    fn root_ports_and_sockets_are_told_apart() {
        for (node, name) in [("0", "gpu-other-root-port"), ("1", "gpu-other-socket")] {
            let tree = Tree::new(name);
            tree.port("0000:00:01.0", 1, None)
                .port("0000:80:01.0", 0x81, Some(0))
                .function("0000:01:00.0", "0x10de", "0x030000", "0")
                .function("0000:81:00.0", "0x8086", "0x068000", node);
            let items = tree.items("0000:81:00.0");
            assert_eq!(named(&items, "gpu-path").name, Some(name));
            assert_eq!(named(&items, "gpu-acs").state, State::Pass);
            assert_eq!(named(&items, "gpu-driver").name, Some("gpu-no-driver"));
        }
    }

    #[test]
    fn what_a_user_may_not_read_is_not_called_fine() {
        let tree = Tree::new("unread");
        for (port, bus) in [("0000:00:01.0", 1u8), ("0000:00:02.0", 2)] {
            let mut config = vec![0u8; 64]; // as much as a user is shown
            config[0x19] = bus;
            tree.function(port, "0x8086", "0x060400", "0")
                .file(&format!("/sys/bus/pci/devices/{port}/config"), config);
        }
        tree.function("0000:01:00.0", "0x10de", "0x030200", "0").function(
            "0000:02:00.0",
            "0x8086",
            "0x068000",
            "0",
        );
        let items = tree.items("0000:02:00.0");
        let acs = named(&items, "gpu-acs");
        assert_eq!(acs.state, State::Note);
        assert!(acs.finding.contains("of 2 ports could not be checked"), "{acs:?}");
    }

    /// A GPU and a bridge under different buses.
    fn machine(name: &str) -> Tree {
        let tree = Tree::new(name);
        tree.function("0000:01:00.0", "0x10de", "0x030200", "0").function(
            "0000:81:00.0",
            "0x8086",
            "0x068000",
            "0",
        );
        tree
    }

    #[test]
    fn the_iommu_the_modules_and_the_group() {
        let tree = machine("iommu");
        let items = tree.items("0000:81:00.0");
        let off = named(&items, "gpu-iommu");
        assert_eq!(off.name, Some("gpu-no-iommu"));
        assert!(off.remedy.as_ref().unwrap().contains("iommu=pt"));
        let modules = named(&items, "gpu-modules");
        assert!(
            modules.finding.contains("neither")
                && modules.remedy.as_ref().unwrap().contains("modprobe gdrdrv")
        );
        tree.file("/sys/class/iommu/dmar0/version", "1")
            .file(PARAMS, "EnablePCIERelaxedOrderingMode: 0\nDmaRemapPeerMmio: 0\n")
            .file("/sys/module/gdrdrv/version", "2.5");
        let items = tree.items("0000:81:00.0");
        let unmapped = named(&items, "gpu-iommu");
        assert_eq!(unmapped.name, Some("gpu-peer-mmio-unmapped"));
        assert!(
            unmapped
                .remedy
                .as_ref()
                .unwrap()
                .contains("NVreg_DmaRemapPeerMmio")
        );
        assert_eq!(named(&items, "gpu-modules").state, State::Pass);
        tree.file(PARAMS, "DmaRemapPeerMmio: 1\n");
        assert_eq!(named(&tree.items("0000:81:00.0"), "gpu-iommu").state, State::Pass);
        // GPU and bridge in one group: the bridge cannot be had while the GPU has its own driver.
        for device in ["0000:01:00.0", "0000:81:00.0"] {
            tree.file("/sys/kernel/iommu_groups/7/type", "DMA");
            let link = tree.0.join(format!("sys/bus/pci/devices/{device}/iommu_group"));
            std::os::unix::fs::symlink("../../../../kernel/iommu_groups/7", link).unwrap();
        }
        let items = tree.items("0000:81:00.0");
        let group = named(&items, "gpu-group");
        assert_eq!(
            (group.state, group.name),
            (State::Warning, Some("gpu-same-group"))
        );
        assert!(group.remedy.is_some());
        // Whatever is wrong comes with what to do.
        for item in items.iter().filter(|i| i.state >= State::Warning) {
            assert!(item.remedy.is_some() && item.why.is_some(), "{item:?}");
        }
    }

    /// The configuration space of a GPU with this device control.
    fn with_control(control: u16) -> Vec<u8> {
        let mut config = vec![0u8; 4096];
        config[0x34] = 0x60;
        config[0x60..0x62].copy_from_slice(&[0x01, 0x78]); // another capability first
        config[0x78..0x7a].copy_from_slice(&[0x10, 0]);
        config[0x80..0x82].copy_from_slice(&control.to_le_bytes());
        config
    }

    #[test]
    fn without_the_drivers_parameters_nothing_that_hangs_on_them_is_called_fine() {
        let tree = machine("no-params");
        tree.file("/sys/class/iommu/dmar0/version", "1");
        for item in ["gpu-relaxed-ordering", "gpu-iommu"] {
            let items = tree.items("0000:81:00.0");
            let item = named(&items, item);
            assert_eq!(item.state, State::Note, "{item:?}");
            assert!(
                item.finding.contains("could not be checked")
                    && item.remedy.as_ref().unwrap().contains("modprobe"),
                "{item:?}"
            );
        }
        tree.file(PARAMS, "DmaRemapPeerMmio: 1\n");
        let items = tree.items("0000:81:00.0");
        assert_eq!(named(&items, "gpu-relaxed-ordering").state, State::Note);
        // Of two GPUs the one that was read is told from the one that was not.
        tree.function("0000:02:00.0", "0x10de", "0x030200", "0")
            .file("/sys/bus/pci/devices/0000:01:00.0/config", with_control(0x10))
            .file(PARAMS, "EnablePCIERelaxedOrderingMode: 1\n");
        let items = tree.items("0000:81:00.0");
        let item = named(&items, "gpu-relaxed-ordering");
        assert_eq!(item.state, State::Warning);
        assert!(
            item.finding
                .contains("of 0000:01:00.0 forbids it; that of 0000:02:00.0 could not be read"),
            "{item:?}"
        );
    }

    #[test]
    fn a_recording_says_of_gpus_what_the_machine_says() {
        const PARAMETERS: &str = "OtherThing: 5\nEnablePCIERelaxedOrderingMode: 1\nDmaRemapPeerMmio: 0\n";
        let gpu = "/sys/bus/pci/devices/0000:01:00.0";
        for (params, control, shown) in [
            (None, 0, 4096),
            (Some(""), 0, 4096),
            (Some(PARAMETERS), 0, 4096),
            (Some(PARAMETERS), 0x10, 4096),
            (Some(PARAMETERS), 0, 64), // as much as a user is shown
            (Some("DmaRemapPeerMmio: 1"), 0, 0),
        ] {
            let tree = Tree::new("recorded");
            tree.port("0000:00:01.0", 1, Some(0x1d))
                .port("0000:80:01.0", 0x81, None)
                .function("0000:01:00.0", "0x10de", "0x030200", "0")
                .file(&format!("{gpu}/config"), &with_control(control)[..shown])
                .file(
                    &format!("{gpu}/resource"),
                    "0x0 0xffffff 0x40200\n0x380000000000 0x38000fffffff 0x14220c\n",
                )
                .function("0000:81:00.0", "0x8086", "0x068000", "1")
                .file("/sys/bus/pci/devices/0000:81:00.0/device", "0x347e") // a bridge that is known
                .file("/sys/class/iommu/dmar0/version", "1")
                .file("/sys/module/gdrdrv/version", "2.5")
                .file("/sys/kernel/iommu_groups/7/type", "DMA")
                .file("/proc/self/status", "CapEff:\t0000000000000000")
                .file("/proc/sys/kernel/osrelease", "6.12.1-amd64")
                .file(VERSION, OPEN);
            for device in ["0000:01:00.0", "0000:81:00.0"] {
                let link = tree.0.join(format!("sys/bus/pci/devices/{device}/iommu_group"));
                std::os::unix::fs::symlink("../../../../kernel/iommu_groups/7", link).unwrap();
            }
            if let Some(params) = params {
                tree.file(PARAMS, params);
            }
            let recorded = Described::unpack(&record::describe(&Machine::at(&tree.0))).unwrap();
            let bridge = recorded
                .machine()
                .device("0000:81:00.0".parse().unwrap())
                .unwrap();
            let said = items(recorded.machine(), &[bridge]);
            assert_eq!(
                said,
                tree.items("0000:81:00.0"),
                "{params:?} {control:#x} {shown}"
            );
            if params == Some(PARAMETERS) {
                assert_eq!(named(&said, "gpu-iommu").name, Some("gpu-peer-mmio-unmapped"));
            }
            // What was not asked about is not recorded.
            let text = recorded.machine().text(PARAMS).unwrap_or_default();
            assert!(!text.contains("OtherThing"), "{text}");
        }
    }

    #[test]
    fn drivers_and_their_parameters() {
        for (version, kernel, name) in [
            (OPEN, "6.12.1", None),
            (
                "NVIDIA UNIX Open Kernel Module for x86_64  565.57.01",
                "6.12.1",
                Some("gpu-driver-too-old"),
            ),
            (
                "NVIDIA UNIX Open Kernel Module for x86_64  565.57.01",
                "6.8.0",
                None,
            ),
            (
                "NVIDIA UNIX x86_64 Kernel Module  550.54.14",
                "6.1.0",
                Some("gpu-driver-closed"),
            ),
        ] {
            let tree = machine("version");
            tree.file(VERSION, version)
                .file("/proc/sys/kernel/osrelease", kernel);
            assert_eq!(
                named(&tree.items("0000:81:00.0"), "gpu-driver").name,
                name,
                "{version} {kernel}"
            );
        }
        let tree = machine("params");
        tree.file("/proc/self/status", "CapEff:\t0000000000000000")
            .file(PARAMS, "EnablePCIERelaxedOrderingMode: 1\nRegistryDwords: \"\"")
            .file(
                "/sys/bus/pci/devices/0000:01:00.0/resource",
                "0x0 0xffffff 0x40200\n0x380000000000 0x38000fffffff 0x14220c\n",
            );
        let items = tree.items("0000:81:00.0");
        // The device's own control has the last word, where it can be read.
        let path = "/sys/bus/pci/devices/0000:01:00.0/config";
        for config in [None, Some(&with_control(0)[..64])] {
            if let Some(config) = config {
                tree.file(path, config);
            }
            let items = tree.items("0000:81:00.0");
            let item = named(&items, "gpu-relaxed-ordering");
            assert_eq!(item.state, State::Note, "{item:?}");
            assert!(
                item.finding
                    .contains("0000:01:00.0 could not be read, needs root")
                    && item.remedy.is_some(),
                "{item:?}"
            );
        }
        for (control, state) in [(0x10u16, State::Warning), (0, State::Pass)] {
            tree.file(path, with_control(control));
            assert_eq!(
                named(&tree.items("0000:81:00.0"), "gpu-relaxed-ordering").state,
                state,
                "{control:#x}"
            );
            // What was looked at is enough for whoever looks at the record.
            let machine = Machine::at(&tree.0);
            let (_, parts) = looked_at(&machine)
                .into_iter()
                .find(|(device, _)| device.address().to_string() == "0000:01:00.0")
                .unwrap();
            assert_eq!(parts.last(), Some(&(0x80, control.to_le_bytes().to_vec())));
        }
        assert_eq!(named(&items, "gpu-peer-mapping").name, Some("gpu-not-permitted"));
        assert_eq!(named(&items, "gpu-bar1").name, Some("gpu-small-bar1"));
        tree.file(
            PARAMS,
            "EnablePCIERelaxedOrderingMode: 0\nRegistryDwords: \"PeerMappingOverride=1;\"",
        );
        let items = tree.items("0000:81:00.0");
        assert_eq!(named(&items, "gpu-relaxed-ordering").state, State::Pass);
        assert_eq!(named(&items, "gpu-peer-mapping").state, State::Pass);
        // A machine without a GPU is told nothing about GPUs.
        let none = Tree::new("none");
        none.function("0000:81:00.0", "0x8086", "0x068000", "0");
        assert!(none.items("0000:81:00.0").is_empty());
    }
}
