//! Machines in a file, for `ntb-check --machine`.

use std::{
    path::PathBuf,
    process::{Command, Output},
    sync::atomic::{AtomicU32, Ordering},
};

use ntb_tools::check::description::{Description, SCHEMA};
use serde_json::Value;

/// Address of the bridge.
pub const NTB: &str = "0000:81:00.0";

/// A file that goes away.
pub struct Scratch(pub PathBuf);

impl Scratch {
    /// A name that no other test has.
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        Self(std::env::temp_dir().join(format!("ntb-check-test-{}-{n}.json", std::process::id())))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A machine that a test describes.
#[derive(Clone)]
pub struct Machine(pub Description);

impl Machine {
    /// A machine without any bridge, and with nothing wrong with it.
    pub fn bare() -> Self {
        let d = Description {
            ntb_machine: SCHEMA,
            ..Description::default()
        };
        let mut this = Self(d)
            .file("/proc/sys/kernel/osrelease", "6.12.0")
            .file(
                "/sys/kernel/security/lockdown",
                "[none] integrity confidentiality",
            )
            .file(
                "/proc/meminfo",
                "MemTotal: 33554432 kB\nMemAvailable: 30000000 kB\nHugePages_Total: 64\nHugePages_Free: 64\n\
                 Hugepagesize: 2048 kB",
            )
            .file(
                "/proc/self/limits",
                "Max locked memory  unlimited  unlimited  bytes",
            )
            .file("/proc/self/status", "VmLck: 0 kB\nCapEff: 0000000000000000")
            .file("/proc/cpuinfo", "flags : fpu sse2 avx")
            .file("/dev/kmsg", "6,1,1,-;Linux version\n")
            .file(
                "/sys/module/pcie_aspm/parameters/policy",
                "[default] performance powersave",
            );
        this.0.directories.push("/sys/class/iommu/dmar0".to_owned());
        this.function("0000:00:00.0", "0x8086", "0x09a2", "0x04", "0x088000", None)
    }

    /// A Sapphire Rapids bridge, ready to be driven.
    pub fn good() -> Self {
        let dir = dir(NTB);
        let mut this = Self::bare()
            .function(NTB, "0x8086", "0x347e", "0x10", "0x068000", Some("vfio-pci"))
            .group(NTB, 42)
            .file(
                &format!("{dir}/resource"),
                "0x384000000000 0x38400000ffff 0x14220c\n0x0 0x0 0x0\n0x380000000000 0x38003fffffff 0x14220c\n\
                 0x0 0x0 0x0\n0x382000000000 0x38203fffffff 0x14220c\n",
            )
            .file(&format!("{dir}/current_link_speed"), "16.0 GT/s PCIe")
            .file(&format!("{dir}/current_link_width"), "16")
            .file(&format!("{dir}/max_link_speed"), "16.0 GT/s PCIe")
            .file(&format!("{dir}/max_link_width"), "16")
            .file(&format!("{dir}/power_state"), "D0")
            .file(&format!("{dir}/aer_dev_correctable"), "RxErr 0\nTOTAL_ERR_COR 0")
            .file(&format!("{dir}/aer_dev_nonfatal"), "TOTAL_ERR_NONFATAL 0")
            .file(&format!("{dir}/aer_dev_fatal"), "TOTAL_ERR_FATAL 0")
            .ppd1(0x0200);
        // Vendor, device, command with memory decoding.
        this = this.bytes(&format!("{dir}/config"), 0, "86807e3406001000");
        this.node("/dev/vfio/42", true)
            .node(&format!("{dir}/resource2_wc"), true)
            .node(&format!("{dir}/resource4_wc"), true)
    }

    pub fn file(mut self, path: &str, text: &str) -> Self {
        self.0.files.insert(path.to_owned(), text.to_owned());
        self
    }

    pub fn bytes(mut self, path: &str, at: u64, hex: &str) -> Self {
        self.0.bytes.insert(path.to_owned(), vec![(at, hex.to_owned())]);
        self
    }

    /// The register of an Intel bridge that tells its mode.
    pub fn ppd1(self, value: u32) -> Self {
        let hex: String = value.to_le_bytes().iter().map(|b| format!("{b:02x}")).collect();
        self.bytes(&format!("{}/resource0", dir(NTB)), 0xB4C0, &hex)
    }

    pub fn node(mut self, path: &str, usable: bool) -> Self {
        self.0.nodes.insert(path.to_owned(), usable);
        self
    }

    pub fn link(mut self, path: &str, to: &str) -> Self {
        self.0.links.insert(path.to_owned(), to.to_owned());
        self
    }

    /// Takes a file, link, node or directory away.
    pub fn without(mut self, path: &str) -> Self {
        let gone = self.0.files.remove(path).is_some()
            || self.0.links.remove(path).is_some()
            || self.0.nodes.remove(path).is_some()
            || self.0.directories.iter().any(|d| d == path);
        assert!(gone, "{path} was not there");
        self.0.directories.retain(|d| d != path);
        self
    }

    pub fn function(
        self,
        at: &str,
        vendor: &str,
        device: &str,
        revision: &str,
        class: &str,
        driver: Option<&str>,
    ) -> Self {
        let dir = dir(at);
        let this = self
            .file(&format!("{dir}/vendor"), vendor)
            .file(&format!("{dir}/device"), device)
            .file(&format!("{dir}/revision"), revision)
            .file(&format!("{dir}/class"), class);
        match driver {
            Some(driver) => this.link(&format!("{dir}/driver"), &format!("../drivers/{driver}")),
            None => this,
        }
    }

    pub fn group(self, at: &str, group: u32) -> Self {
        self.link(&format!("{}/iommu_group", dir(at)), &format!("../groups/{group}"))
            .link(
                &format!("/sys/kernel/iommu_groups/{group}/devices/{at}"),
                &format!("../../{at}"),
            )
    }

    /// Runs the program on it.
    pub fn run(&self, args: &[&str]) -> Output {
        let file = Scratch::new();
        std::fs::write(&file.0, serde_json::to_string(&self.0).unwrap()).unwrap();
        let mut command = ntb_check();
        command.arg("--machine").arg(&file.0).args(args);
        command.output().unwrap()
    }

    /// Exit code and JSON object.
    pub fn check(&self, args: &[&str]) -> (i32, Value) {
        let output = self.run(&[&["--json"], args].concat());
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.stderr.is_empty(), "{err}");
        let value: Value = serde_json::from_slice(&output.stdout).unwrap();
        let code = output.status.code().unwrap();
        assert_eq!(value["exit"], code, "{value}");
        (code, value)
    }
}

/// Directory of a function.
pub fn dir(at: &str) -> String {
    format!("/sys/bus/pci/devices/{at}")
}

/// The program.
pub fn ntb_check() -> Command {
    Command::new(env!("CARGO_BIN_EXE_ntb-check"))
}

/// All items, of the machine and of its bridges.
pub fn items(report: &Value) -> Vec<&Value> {
    let bridges = report["bridges"].as_array().unwrap().iter();
    let of_bridges = bridges.flat_map(|b| b["items"].as_array().unwrap());
    report["items"]
        .as_array()
        .unwrap()
        .iter()
        .chain(of_bridges)
        .collect()
}

/// The item with a stable name of a fault or warning.
pub fn named<'a>(report: &'a Value, name: &str) -> &'a Value {
    let found = items(report).into_iter().find(|i| i["name"] == name);
    found.unwrap_or_else(|| panic!("no item is named {name}: {report:#}"))
}

/// The first item about something.
pub fn about<'a>(report: &'a Value, item: &str) -> &'a Value {
    let found = items(report).into_iter().find(|i| i["item"] == item);
    found.unwrap_or_else(|| panic!("no item is about {item}: {report:#}"))
}
