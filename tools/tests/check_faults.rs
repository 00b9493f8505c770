//! The set-up faults that are likeliest, each on a described machine: cause, remedy, stable name, exit class.

#![allow(unreachable_pub, dead_code, reason = "each test program uses its part")]

mod check_machines;

use check_machines::{Machine, NTB, about, dir, named};
use ntb::{
    hw::{NtbError, mode},
    pci::{OpenError, PciError},
};
use ntb_mem::region::{Pages, Region};

/// One fault: exit class and name, and what its finding and its remedy must say.
fn fault(machine: &Machine, args: &[&str], exit: i32, name: &str, finding: &[&str], remedy: &[&str]) {
    let (code, report) = machine.check(args);
    assert_eq!(code, exit, "{report:#}");
    assert_eq!(report["names"][0], name, "{report:#}");
    let item = named(&report, name);
    assert_eq!(
        (&item["state"], &item["exit"]),
        (&"fault".into(), &exit.into()),
        "{item:#}"
    );
    assert!(item["why"].as_str().unwrap().len() > 20, "{item:#}");
    for (field, parts) in [("finding", finding), ("remedy", remedy)] {
        let text = item[field].as_str().unwrap();
        assert!(
            !parts.is_empty() && parts.iter().all(|p| text.contains(p)),
            "{field}: {item:#}"
        );
    }
    // What is printed says the same.
    let text = String::from_utf8(machine.run(args).stdout).unwrap();
    assert!(
        text.contains(&format!("[{name}]")) && text.contains("do:  "),
        "{text}"
    );
}

#[test]
fn a_good_machine_passes() {
    let (code, report) = Machine::good().check(&["--strict"]);
    assert_eq!(code, 0, "{report:#}");
    assert_eq!(
        (&report["counts"]["warning"], &report["counts"]["fault"]),
        (&0.into(), &0.into()),
        "{report:#}"
    );
    let bridge = &report["bridges"][0];
    assert_eq!(bridge["family"], "intel-spr");
    assert_eq!(bridge["mode"], "upstream");
    assert_eq!(bridge["group"], 42);
    assert_eq!(bridge["link_now"], "x16 16.0 GT/s");
    assert_eq!(bridge["windows"][1]["usable_bytes"], 1 << 30);
    assert_eq!(bridge["windows"][0]["memory_type"], "write-combining");
}

#[test]
fn no_device() {
    // Transparent bridge of the same port, a switch with nothing but its management function, nothing at all.
    let bare = Machine::bare();
    let firmware = ["firmware set-up", "NTB to NTB"];
    fault(
        &bare,
        &[],
        3,
        "no-device",
        &["no NTB is visible", "none"],
        &firmware,
    );
    let switch = Machine::bare().function("0000:05:00.1", "0x11f8", "0x8536", "0x00", "0x058000", None);
    fault(
        &switch,
        &[],
        3,
        "no-device",
        &["0000:05:00.1 (11f8:8536"],
        &firmware,
    );
    let good = Machine::good();
    fault(
        &good,
        &["0000:99:00.0"],
        3,
        "no-device",
        &["0000:99:00.0", NTB],
        &firmware,
    );
}

#[test]
fn wrong_mode() {
    let machine = Machine::good().ppd1(0x0100);
    fault(
        &machine,
        &[],
        3,
        "wrong-mode",
        &["0x100", "back-to-back"],
        &["NTB to NTB"],
    );
    let skx = Machine::good()
        .file(&format!("{}/device", dir(NTB)), "0x201c")
        .bytes(&format!("{}/config", dir(NTB)), 0xD4, "02");
    fault(
        &skx,
        &[],
        3,
        "wrong-mode",
        &["NTB to root port"],
        &["NTB to NTB", "not split"],
    );
    let old = Machine::good().file(&format!("{}/device", dir(NTB)), "0x3725");
    fault(
        &old,
        &[],
        3,
        "wrong-mode",
        &["before Skylake"],
        &["docs/hardware.md lists"],
    );
    let driver = mode::intel_gen3(0x02).unwrap_err().of(NTB);
    assert_eq!((driver.name(), driver.class().code()), ("wrong-mode", 3));
    for part in ["NTB to root port", "firmware set-up"] {
        assert!(driver.to_string().contains(part), "{driver}");
    }
}

#[test]
fn group_not_viable() {
    let machine = Machine::good()
        .function(
            "0000:81:00.1",
            "0x8086",
            "0x0001",
            "0x00",
            "0x020000",
            Some("ice"),
        )
        .function("0000:81:00.2", "0x8086", "0x0002", "0x00", "0x020000", None)
        .group("0000:81:00.1", 42)
        .group("0000:81:00.2", 42);
    let finding = [
        "group 42",
        "0000:81:00.1 (ice, in the way)",
        "0000:81:00.2 (no driver)",
    ];
    let remedy = ["0000:81:00.1/driver_override"];
    fault(&machine, &[], 6, "group-not-viable", &finding, &remedy);
}

#[test]
fn another_driver() {
    for (driver, finding) in [(Some("ntb_hw_intel"), "driver ntb_hw_intel"), (None, "no driver")] {
        let machine = Machine::good().without(&format!("{}/driver", dir(NTB)));
        let machine = match driver {
            Some(driver) => machine.link(&format!("{}/driver", dir(NTB)), &format!("../{driver}")),
            None => machine,
        };
        let remedy = [&format!("driverctl set-override {NTB} vfio-pci"), "drivers_probe"];
        fault(
            &machine,
            &[],
            6,
            "wrong-driver",
            &[finding],
            &remedy.map(|r| r as &str),
        );
    }
}

#[test]
fn no_iommu() {
    let machine = Machine::good()
        .without(&format!("{}/iommu_group", dir(NTB)))
        .without(&format!("/sys/kernel/iommu_groups/42/devices/{NTB}"))
        .without("/sys/class/iommu/dmar0");
    fault(
        &machine,
        &[],
        6,
        "no-iommu",
        &["no group"],
        &["intel_iommu=on", "firmware"],
    );
    // Where VFIO's unsafe mode is on, the kernel makes groups without an IOMMU.
    let bare = Machine::good()
        .without("/dev/vfio/42")
        .node("/dev/vfio/noiommu-42", true)
        .file("/sys/module/vfio/parameters/enable_unsafe_noiommu_mode", "Y");
    fault(
        &bare,
        &[],
        6,
        "no-iommu",
        &["no group"],
        &["intel_iommu=on", "firmware"],
    );
    let (_, report) = bare.check(&[]);
    assert_eq!(
        report["names"],
        serde_json::json!(["no-iommu", "unsafe-mode-on"]),
        "{report:#}"
    );
}

#[test]
fn memlock_too_small() {
    let limit = "Max locked memory  8388608  8388608  bytes";
    let machine = Machine::good().file("/proc/self/limits", limit);
    let remedy = ["ulimit -l", "LimitMEMLOCK", "--ulimit memlock", "limits.conf"];
    fault(
        &machine,
        &[],
        6,
        "memlock-too-small",
        &["67108864", "8388608"],
        &remedy,
    );
    assert_eq!(machine.check(&["--memory", "8MiB"]).0, 0);
    // Root has no limit.
    let root = machine.file("/proc/self/status", "CapEff: 000001ffffffffff");
    assert_eq!(root.check(&[]).0, 0);
    let driver = PciError::Memlock {
        needed: 2,
        allowed: 1,
    };
    assert_eq!((driver.name(), driver.class().code()), ("memlock-too-small", 6));
    assert!(driver.to_string().contains("ulimit -l"), "{driver}");
}

#[test]
fn node_missing() {
    let machine = Machine::good().without("/dev/vfio/42");
    fault(
        &machine,
        &[],
        3,
        "node-missing",
        &["/dev/vfio/42"],
        &["modprobe vfio-pci", "--device"],
    );
    let forbidden = Machine::good().node("/dev/vfio/42", false);
    fault(
        &forbidden,
        &[],
        6,
        "no-permission",
        &["/dev/vfio/42"],
        &["chown", "udev"],
    );
}

#[test]
fn node_busy() {
    let machine = Machine::good()
        .link("/proc/77/fd/5", "/dev/vfio/42")
        .file("/proc/77/comm", "other");
    fault(
        &machine,
        &[],
        6,
        "node-busy",
        &["process 77 (other)"],
        &["fuser -v /dev/vfio/42"],
    );
}

/// Lockdown does not keep the driver from working: it makes it slow, and the driver says so in the same words.
#[test]
fn lockdown() {
    let machine = Machine::good().file(
        "/sys/kernel/security/lockdown",
        "none [integrity] confidentiality",
    );
    let (code, report) = machine.check(&[]);
    assert_eq!(
        (code, report["worst"].as_str()),
        (0, Some("warning")),
        "{report:#}"
    );
    assert_eq!(machine.check(&["--strict"]).0, 1);
    let item = named(&report, "lockdown");
    assert!(
        item["finding"].as_str().unwrap().contains("'integrity'"),
        "{item:#}"
    );
    assert!(
        item["remedy"].as_str().unwrap().contains("Secure Boot"),
        "{item:#}"
    );
    let window = about(&report, "window");
    assert_eq!(window["name"], "lockdown", "{window:#}");
    assert_eq!(report["bridges"][0]["windows"][0]["memory_type"], "uncached");
    let described = ntb_tools::check::description::Described::unpack(&machine.0).unwrap();
    let device = described.machine().device(NTB.parse().unwrap()).unwrap();
    let driver = device.combining_refusal(ntb::pci::Bar::B2).unwrap();
    assert_eq!((driver.name(), driver.class().code()), ("lockdown", 6));
    for part in ["'integrity'", "turn Secure Boot off"] {
        assert!(driver.to_string().contains(part), "{driver}");
    }
    // A processor that stores whole lines does not mind.
    let (_, report) = machine.file("/proc/cpuinfo", "flags : movdir64b").check(&[]);
    assert_eq!(about(&report, "window")["state"], "note", "{report:#}");
}

#[test]
fn window_larger_than_memory() {
    let small = Machine::good().file("/proc/meminfo", "MemTotal: 524288 kB\nMemAvailable: 400000 kB");
    let finding = ["1 GiB wanted", "390.6 MiB available"];
    fault(
        &small,
        &["--memory", "1GiB"],
        6,
        "no-memory",
        &finding,
        &["need not be filled"],
    );
    // The default fits, but the window as a whole does not.
    let (code, report) = small.check(&[]);
    assert_eq!(code, 0);
    let item = named(&report, "no-memory");
    assert_eq!(item["state"], "warning");
    assert!(
        item["remedy"].as_str().unwrap().contains("smaller window size"),
        "{item:#}"
    );
    // The driver's error for memory that cannot be had.
    let source = Region::allocate(1 << 60, Pages::default()).unwrap_err();
    let driver = NtbError::Memory {
        bytes: 1 << 60,
        source,
    };
    assert_eq!((driver.name(), driver.class().code()), ("no-memory", 6));
    assert!(driver.to_string().contains("need not be filled"), "{driver}");
}

/// The names that the check gives are those with which the driver refuses the same machine; and the driver, too, says why
/// and what to do. Where more than a described machine is needed to see it refuse, that is in its own tests: the limit on
/// locked memory, a busy node, memory that is not to be had, and the mode of a port.
#[test]
fn the_driver_refuses_what_the_check_faults() {
    let unpacked = |m: &Machine| ntb_tools::check::description::Described::unpack(&m.0).unwrap();
    let shared = Machine::good()
        .function(
            "0000:81:00.1",
            "0x8086",
            "0x0001",
            "0x00",
            "0x020000",
            Some("ice"),
        )
        .group("0000:81:00.1", 42);
    let unplaced = Machine::good().file(
        &format!("{}/resource", dir(NTB)),
        "0x384000000000 0x38400000ffff 0x14220c\n0x0 0x0 0x0\n0x0 0x3fffffffff 0x2014220c\n0x0 0x0 0x0\n\
         0x382000000000 0x38203fffffff 0x14220c\n",
    );
    let no_iommu: &[&str] = &["is in no IOMMU group", "VT-d or AMD-Vi", "intel_iommu=on"];
    let cases: [(Machine, &str, &[&str]); 7] = [
        (
            Machine::good().without(&format!("{}/driver", dir(NTB))),
            "wrong-driver",
            &[
                "held by no driver",
                "driverctl set-override 0000:81:00.0 vfio-pci",
            ],
        ),
        (
            Machine::good().without(&format!("{}/iommu_group", dir(NTB))),
            "no-iommu",
            no_iommu,
        ),
        (
            Machine::good().node("/dev/vfio/noiommu-42", true),
            "no-iommu",
            no_iommu,
        ),
        (
            shared,
            "group-not-viable",
            &[
                "group 42",
                "0000:81:00.1 is with ice (in the way)",
                "echo vfio-pci > /sys/bus/pci/devices/0000:81:00.1/driver_override",
            ],
        ),
        (
            unplaced,
            "bar-not-placed",
            &["BAR2", "has no address", "above 4G decoding"],
        ),
        (
            Machine::good().without("/dev/vfio/42"),
            "node-missing",
            &["/dev/vfio/42 does not exist", "vfio-pci loaded", "container"],
        ),
        (
            Machine::bare(),
            "no-device",
            &["no PCI function 0000:81:00.0", "firmware set-up", "lspci -nn"],
        ),
    ];
    for (machine, name, says) in cases {
        let described = unpacked(&machine);
        let options = ntb::pci::vfio::VfioOptions {
            patience: std::time::Duration::ZERO,
            ..Default::default()
        };
        let address = NTB.parse().unwrap();
        let refused: OpenError =
            ntb::pci::vfio::Vfio::open(described.machine(), address, &options).unwrap_err();
        assert_eq!(refused.name(), name);
        let text = refused.to_string();
        assert!(says.iter().all(|part| text.contains(part)), "{says:?}: {text}");
        let (code, report) = machine.check(&[]);
        assert_eq!(report["names"][0], name, "{report:#}");
        assert_eq!(code, i32::from(refused.class().code()), "{name}");
    }
}
