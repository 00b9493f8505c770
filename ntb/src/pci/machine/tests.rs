//! Described machines, and what is made of them.

use super::*;
use crate::pci::{Bar, OpenError};
use std::{
    os::unix::fs::symlink,
    sync::atomic::{AtomicU32, Ordering},
};

/// Address of the bridge on described machines.
pub(crate) const NTB: &str = "0000:81:00.0";

/// A machine in a directory that goes away with it.
pub(crate) struct Described {
    root: PathBuf,
}

impl Drop for Described {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

impl Described {
    pub(crate) fn empty() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let root = std::env::temp_dir().join(format!("ntb-machine-{}-{n}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        Self { root }
    }

    /// A Sapphire Rapids bridge alone in group 42, held by vfio-pci, with its node.
    pub(crate) fn spr() -> Self {
        Self::empty()
            .function(NTB, "0x8086", "0x347e", "0x10", "0x068000", Some("vfio-pci"))
            .group(NTB, 42)
            .file(
                &format!("/sys/bus/pci/devices/{NTB}/resource"),
                "0x0000384000000000 0x000038400000ffff 0x000000000014220c\n\
                 0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                 0x0000380000000000 0x000038003fffffff 0x000000000014220c\n\
                 0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                 0x0000382000000000 0x000038203fffffff 0x000000000014220c\n",
            )
            .file("/dev/vfio/42", "")
    }

    pub(crate) fn machine(&self) -> Machine {
        Machine::at(&self.root)
    }

    pub(crate) fn file(self, path: &str, text: &str) -> Self {
        let path = self.machine().path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    pub(crate) fn link(self, path: &str, to: &str) -> Self {
        let path = self.machine().path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        symlink(to, path).unwrap();
        self
    }

    pub(crate) fn function(
        self,
        at: &str,
        vendor: &str,
        device: &str,
        revision: &str,
        class: &str,
        driver: Option<&str>,
    ) -> Self {
        let dir = format!("/sys/bus/pci/devices/{at}");
        let mut this = self
            .file(&format!("{dir}/vendor"), vendor)
            .file(&format!("{dir}/device"), device)
            .file(&format!("{dir}/revision"), revision)
            .file(&format!("{dir}/class"), class);
        if let Some(driver) = driver {
            this = this.link(
                &format!("{dir}/driver"),
                &format!("../../../../bus/pci/drivers/{driver}"),
            );
        }
        this
    }

    pub(crate) fn group(self, at: &str, group: u32) -> Self {
        self.link(
            &format!("/sys/bus/pci/devices/{at}/iommu_group"),
            &format!("../../../kernel/iommu_groups/{group}"),
        )
        .link(
            &format!("/sys/kernel/iommu_groups/{group}/devices/{at}"),
            &format!("../../../../devices/{at}"),
        )
    }

    pub(crate) fn ntb(&self) -> Device {
        self.machine().device(NTB.parse().unwrap()).unwrap()
    }
}

fn refusal(described: &Described, no_iommu: bool) -> OpenError {
    described.ntb().check(no_iommu).expect_err("a refusal")
}

#[test]
fn a_good_machine_is_not_refused() {
    let described = Described::spr();
    described.ntb().check(false).unwrap();
    let bridges = described.machine().bridges();
    assert_eq!(bridges.len(), 1);
    assert_eq!(
        Family::of(&bridges[0].identity().unwrap()),
        Some(Family::IntelSpr)
    );
    let window = bridges[0].resource(Bar::B2).unwrap();
    assert_eq!((window.start, window.bytes), (0x3800_0000_0000, 1 << 30));
    assert!(window.placed && window.prefetchable);
    assert_eq!(bridges[0].resource(Bar::B1), None);
}

#[test]
fn another_driver_or_none_is_named_with_the_bind_command() {
    for driver in [Some("ntb_hw_intel"), Some("uio_pci_generic"), None] {
        let described = Described::empty()
            .function(NTB, "0x8086", "0x347e", "0x10", "0x068000", driver)
            .group(NTB, 42);
        let e = refusal(&described, false);
        assert_eq!(e.name(), "wrong-driver");
        let text = e.to_string();
        assert!(text.contains(driver.unwrap_or("no driver")), "{text}");
        assert!(
            text.contains(&format!("/sys/bus/pci/devices/{NTB}/driver_override")),
            "{text}"
        );
    }
}

#[test]
fn a_group_that_is_not_viable_lists_its_members() {
    let described = Described::spr()
        .function(
            "0000:80:01.0",
            "0x8086",
            "0x352a",
            "0x04",
            "0x060400",
            Some("pcieport"),
        )
        .function(
            "0000:81:00.1",
            "0x8086",
            "0x0001",
            "0x00",
            "0x020000",
            Some("ice"),
        )
        .function("0000:81:00.2", "0x8086", "0x0002", "0x00", "0x020000", None)
        .group("0000:80:01.0", 42)
        .group("0000:81:00.1", 42)
        .group("0000:81:00.2", 42);
    let e = refusal(&described, false);
    assert_eq!(e.name(), "group-not-viable");
    assert_eq!(e.class(), crate::pci::ExitClass::Permission);
    let text = e.to_string();
    for part in [
        "group 42",
        "0000:80:01.0 is with pcieport",
        "0000:81:00.1 is with ice (in the way)",
    ] {
        assert!(text.contains(part), "'{part}' is not in: {text}");
    }
    assert!(text.contains("0000:81:00.2 is with no driver;"), "{text}");
    assert!(text.contains("devices/0000:81:00.1/driver_override"), "{text}");
    assert!(
        !text.contains("devices/0000:81:00.2/driver_override"),
        "rebinds what is not in the way: {text}"
    );
}

#[test]
fn a_machine_without_iommu_is_told_apart_by_what_was_asked() {
    let described =
        Described::empty().function(NTB, "0x8086", "0x347e", "0x10", "0x068000", Some("vfio-pci"));
    let e = refusal(&described, false);
    assert_eq!(e.name(), "no-iommu");
    assert!(e.to_string().contains("intel_iommu=on"), "{e}");
    let e = refusal(&described, true);
    assert_eq!(e.name(), "no-iommu-mode-off");
    assert!(e.to_string().contains("enable_unsafe_noiommu_mode"), "{e}");
}

#[test]
fn a_bar_that_was_not_placed_is_refused() {
    let described = Described::spr().file(
        &format!("/sys/bus/pci/devices/{NTB}/resource"),
        "0x384000000000 0x38400000ffff 0x14220c\n0x0 0x0 0x0\n0x0 0x3fffffffff 0x2014220c\n",
    );
    let e = refusal(&described, false);
    assert_eq!(e.name(), "bar-not-placed");
    assert!(e.to_string().contains("above 4G"), "{e}");
}

#[test]
fn holders_of_a_node_are_named() {
    let described = Described::spr()
        .link("/proc/77/fd/5", "/dev/vfio/42")
        .file("/proc/77/comm", "ntb-ping\n")
        .link("/proc/78/fd/5", "/dev/null");
    assert_eq!(
        described.machine().holders(Path::new("/dev/vfio/42")),
        ["process 77 (ntb-ping)"]
    );
}

#[test]
fn link_rates_are_read() {
    let dir = format!("/sys/bus/pci/devices/{NTB}");
    let described = Described::spr()
        .file(&format!("{dir}/current_link_speed"), "16.0 GT/s PCIe")
        .file(&format!("{dir}/current_link_width"), "8")
        .file(&format!("{dir}/max_link_speed"), "32.0 GT/s PCIe")
        .file(&format!("{dir}/max_link_width"), "16");
    let (now, best) = described.ntb().link();
    assert_eq!(now.unwrap().to_string(), "x8 16.0 GT/s");
    assert_eq!(best.unwrap().to_string(), "x16 32.0 GT/s");
    assert_eq!(Described::spr().ntb().link(), (None, None));
}

#[test]
fn refused_combining_names_the_cause() {
    let why = |described: &Described, n| {
        let error = io::Error::from_raw_os_error(n);
        described.ntb().refused_combining(Bar::B2, &error)
    };
    let locked = Described::spr().file(
        "/sys/kernel/security/lockdown",
        "none [integrity] confidentiality",
    );
    let e = why(&locked, libc::EPERM);
    assert_eq!(
        (e.name(), e.class()),
        ("lockdown", crate::pci::ExitClass::Permission)
    );
    assert!(e.to_string().contains("lockdown ('integrity'"), "{e}");
    assert!(e.to_string().contains("turn Secure Boot off"), "{e}");
    let e = why(&locked, libc::ENOENT);
    assert_eq!(e.name(), "no-such-mapping");
    assert!(e.to_string().contains("not prefetchable"), "{e}");
    let e = why(&locked, libc::EINVAL).to_string();
    assert!(e.contains("vfio-pci") && e.contains("unbind"), "{e}");
    let open = Described::spr().file(
        "/sys/kernel/security/lockdown",
        "[none] integrity confidentiality",
    );
    let e = why(&open, libc::EACCES).to_string();
    assert!(e.contains("root") && !e.contains("lockdown"), "{e}");
}

#[test]
fn what_speaks_against_combining_shows_before_it_is_tried() {
    let file = format!("/sys/bus/pci/devices/{NTB}/resource2_wc");
    let lockdown = "/sys/kernel/security/lockdown";
    let name = |d: &Described| d.ntb().combining_refusal(Bar::B2).map(|e| e.name());
    assert_eq!(name(&Described::spr()), Some("no-such-mapping"));
    let offered = Described::spr().file(&file, "");
    assert_eq!(name(&offered), None);
    assert_eq!(
        name(&offered.file(lockdown, "none [integrity]")),
        Some("lockdown")
    );
}

#[test]
fn registers_are_read_without_opening() {
    let described = Described::spr();
    let dir = described.ntb().directory();
    fs::write(dir.join("config"), [0x86, 0x80, 0x7E, 0x34]).unwrap();
    fs::write(dir.join("resource0"), vec![0xA5; 0xB4C8]).unwrap();
    let device = described.ntb();
    assert_eq!(device.config_bytes(0), Some([0x86, 0x80]));
    assert_eq!(device.config_bytes::<4>(2), None, "behind what may be read");
    assert_eq!(device.peek(Bar::B0, 0xB4C0).unwrap(), 0xA5A5_A5A5);
    assert!(device.peek(Bar::B0, 0xB4C8).is_err(), "behind the end");
    assert!(device.peek(Bar::B2, 0).is_err(), "no such file");
}
