//! The kernel's own NTB drivers and clients in both guests: they judge the emulator.

use std::time::Duration;

use crate::scenario::{Bridge, Machine, Scenario};

const MIB: u64 = 1 << 20;

pub(crate) fn all() -> Vec<Scenario> {
    let intel = [
        ("DRIVER", "ntb_hw_intel"),
        ("MASKS", "yes"),
        ("SIDED", "yes"),
        ("LINK", "client"),
    ];
    let amd = [
        ("DRIVER", "ntb_hw_amd"),
        ("MASKS", "yes"),
        ("SIDED", "yes"),
        ("LINK", "driver"),
    ];
    let epf = [
        ("DRIVER", "ntb_hw_epf"),
        ("MASKS", "no"),
        ("SIDED", "no"),
        ("LINK", "client"),
    ];
    vec![
        linux("linux-intel-spr", "intel-spr", intel),
        linux("linux-intel-icx", "intel-icx", intel),
        linux("linux-intel-skx", "intel-skx", intel),
        linux("linux-amd", "amd", amd),
        linux("linux-epf", "epf", epf),
    ]
}

fn linux(name: &'static str, model: &'static str, settings: [(&'static str, &'static str); 4]) -> Scenario {
    let [_, (_, masks), _, (_, link)] = settings;
    let mut steps = vec![
        "probe",
        "ports",
        "link-up",
        "scratchpads",
        "doorbells",
        "windows",
        "pingpong",
        "perf",
    ];
    steps.extend(["netdev", "tcp", "transport-reload", "driver-reload", "unload"]);
    if masks == "yes" {
        steps.push("doorbell-mask");
    }
    if link == "client" {
        steps.extend(["link-down", "cable"]);
    }
    let mut settings = settings.to_vec();
    settings.push(("WINDOW", "1048576"));
    Scenario {
        name,
        proves: "the kernel's driver takes the emulated port for its hardware: probe, link up and down, every \
                 scratchpad and doorbell, masks, windows and their ends; ntb_tool, ntb_pingpong, ntb_perf, \
                 ntb_transport with ntb_netdev (ping, TCP with checksum) run; unloading and reloading is seen",
        bridge: Some(Bridge {
            model,
            window_bytes: MIB,
        }),
        // One guest without an IOMMU: there only the window's own limit stands between the peer and all memory.
        guests: [Machine::PLAIN, Machine::IOMMU],
        script: include_str!("linux.sh"),
        settings,
        steps,
        tolerates: &[],
        time_limit: Duration::from_secs(180),
    }
}
