//! The kernel's own NTB drivers and clients in both guests: they judge the emulator.

use crate::scenario::{Bridge, Machine, Scenario};

const MIB: u64 = 1 << 20;

/// What the kernel's driver of a family can do; the script and the steps follow from it.
#[derive(Debug, Clone, Copy)]
struct Driver {
    module: &'static str,
    /// The hardware masks doorbells.
    masks: bool,
    /// The two ends have different port numbers.
    sided: bool,
    /// A client can take the link down; otherwise only unloading the driver does.
    link_control: bool,
}

const INTEL: Driver = Driver {
    module: "ntb_hw_intel",
    masks: true,
    sided: true,
    link_control: true,
};
const AMD: Driver = Driver {
    module: "ntb_hw_amd",
    link_control: false,
    ..INTEL
};
const EPF: Driver = Driver {
    module: "ntb_hw_epf",
    masks: false,
    sided: false,
    ..INTEL
};

pub(crate) fn all() -> Vec<Scenario> {
    vec![
        linux(
            "linux-intel-spr",
            "intel-spr",
            INTEL,
            "the kernel's ntb_hw_intel takes the Sapphire Rapids port for its hardware (4 KiB translation): probe, \
             link, every scratchpad and doorbell, masks, both windows and their ends, and all clients of the kernel",
        ),
        linux(
            "linux-intel-icx",
            "intel-icx",
            INTEL,
            "the same for Ice Lake: translation as coarse as the BAR, with its index register",
        ),
        linux(
            "linux-intel-skx",
            "intel-skx",
            INTEL,
            "the same for Skylake: Gen3 registers, external limits, the erratum of vector 32",
        ),
        linux(
            "linux-amd",
            "amd",
            AMD,
            "the same for AMD: shared scratchpads, translation in the peer's block, link by ready bits",
        ),
        linux(
            "linux-epf",
            "epf",
            EPF,
            "the same for the endpoint function: commands by mailbox, doorbells without masks, one window",
        ),
    ]
}

fn linux(name: &'static str, model: &'static str, driver: Driver, proves: &'static str) -> Scenario {
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
    if driver.masks {
        steps.push("doorbell-mask");
    }
    if driver.link_control {
        steps.extend(["link-down", "cable"]);
    }
    let yes = |flag: bool| if flag { "yes" } else { "no" };
    Scenario {
        name,
        proves,
        bridge: Some(Bridge {
            model,
            window_bytes: MIB,
        }),
        // One guest without an IOMMU: there only the window's own limit stands between the peer and all memory.
        guests: [Machine::PLAIN, Machine::IOMMU],
        script: include_str!("linux.sh"),
        settings: vec![
            ("DRIVER", driver.module),
            ("MASKS", yes(driver.masks)),
            ("SIDED", yes(driver.sided)),
            ("LINK", if driver.link_control { "client" } else { "driver" }),
        ],
        steps,
        ..Scenario::BASE
    }
}
