//! Configuration spaces after power-on: byte for byte, and as `lspci` reads them.
//!
//! `tests/golden/FAMILY.hex` holds side A's; after an intended change, run with `BLESS=1` and read the difference.

use std::{path::PathBuf, process::Command};

use ntb_emu::model::{FAMILIES, Pair, PairConfig, SideId};

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/{name}.hex"))
}

#[test]
fn byte_for_byte() {
    for family in FAMILIES {
        let pair = Pair::new(family, PairConfig::default()).unwrap();
        let text = pair.port(SideId::A).config_dump();
        let path = golden(family.name());
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        let expected = std::fs::read_to_string(&path).unwrap();
        for (now, then) in text.lines().zip(expected.lines()) {
            assert_eq!(now, then, "{}", family.name());
        }
        assert_eq!(text.len(), expected.len());
    }
}

#[test]
fn lspci_reads_them() {
    if Command::new("lspci").arg("--version").output().is_err() {
        ntb_mem::waive::waive(
            "lspci",
            "pciutils is not installed, so no lspci reads the configuration spaces",
        );
        return;
    }
    let expected: [(&str, &[&str]); 6] = [
        ("intel-spr", &INTEL_GEN4),
        ("intel-icx", &INTEL_GEN4),
        ("intel-gnr", &INTEL_GEN4),
        (
            "intel-skx",
            &[
                "Class 0680: Device 8086:201c (rev 04)",
                "Capabilities: [80] MSI-X: Enable- Count=33 Masked-",
                "Capabilities: [90] Express (v2) Endpoint",
                "LnkCap:\tPort #0, Speed 8GT/s, Width x8",
                "Capabilities: [e0] Power Management version 3",
                "Capabilities: [100 v1] Vendor Specific Information: ID=0001 Rev=0 Len=00c",
                "Capabilities: [148 v2] Advanced Error Reporting",
            ],
        ),
        (
            "amd",
            &[
                "Class 0680: Device 1022:14c0",
                "Capabilities: [50] Power Management version 3",
                "Capabilities: [64] Express (v2) Endpoint",
                "Capabilities: [c0] MSI-X: Enable- Count=24 Masked-",
                "Capabilities: [150 v2] Advanced Error Reporting",
            ],
        ),
        (
            "epf",
            &[
                "Class 0500: Device 1957:0809",
                "Capabilities: [40] Power Management version 3",
                "Capabilities: [70] Express (v2) Endpoint",
                "Capabilities: [b0] MSI-X: Enable- Count=32 Masked-",
                "PBA: BAR=0 offset=00001800",
                "Capabilities: [100 v2] Advanced Error Reporting",
            ],
        ),
    ];
    for (name, lines) in expected {
        let out = Command::new("lspci")
            .args(["-nvv", "-F"])
            .arg(golden(name))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&out.stdout);
        // Not about the dump: lspci looks for kernel modules of the devices it shows.
        let complaints: String = String::from_utf8_lossy(&out.stderr)
            .lines()
            .filter(|line| !line.contains("libkmod"))
            .collect();
        assert!(
            out.status.success() && complaints.is_empty(),
            "{name}: {complaints}"
        );
        for line in lines {
            let class = line.strip_prefix("Class ").map_or(*line, |l| l);
            let class = class.replace(": Device ", ": ");
            assert!(text.contains(&class), "{name}: no '{class}' in\n{text}");
        }
        for wrong in [
            "<access denied>",
            "Unknown",
            "<chain looped>",
            "<chain broken>",
            "unassigned class",
        ] {
            assert!(!text.contains(wrong), "{name}: '{wrong}' in\n{text}");
        }
    }
}

const INTEL_GEN4: [&str; 8] = [
    "Class 0680: Device 8086:",
    "Capabilities: [40] Express (v2) Endpoint",
    "LnkCap:\tPort #0, Speed 16GT/s, Width x16",
    "Capabilities: [80] MSI-X: Enable- Count=33 Masked-",
    "Vector table: BAR=0 offset=00002000",
    "PBA: BAR=0 offset=00002800",
    "Capabilities: [e0] Power Management version 3",
    "Capabilities: [100 v2] Advanced Error Reporting",
];
