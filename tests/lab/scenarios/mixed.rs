//! One host runs the kernel's driver and clients, the other this project's driver and its own form of their protocols.

use crate::scenario::{Bridge, Machine, Scenario};

const OURS: Machine = Machine {
    memory_mib: 512,
    ..Machine::IOMMU
};

const ALL: &[&str] = &[
    "bind", "pingpong", "perf", "ping", "answer", "tap", "closed", "killed", "unload",
];

pub(crate) fn all() -> Vec<Scenario> {
    vec![
        Scenario {
            settings: settings("ntb_hw_intel", "b", "transport"),
            steps: ALL
                .iter()
                .filter(|s| !["pingpong", "perf"].contains(s))
                .copied()
                .collect(),
            ..on(
                "mixed-transport",
                "intel-spr",
                "the kernel's ntb_netdev over ntb_transport is pinged by 'ntb-ping linux ping', pings 'ntb-ping linux echo', \
                 and is joined with a TAP device: ping, TCP, interface down and up, program killed",
            )
        },
        Scenario {
            settings: settings("ntb_hw_intel", "b", "pingpong"),
            steps: vec!["bind", "pingpong", "unload"],
            ..on(
                "mixed-pingpong",
                "intel-spr",
                "the kernel's ntb_pingpong and 'ntb-ping linux pingpong' count each other's rings",
            )
        },
        Scenario {
            settings: settings("ntb_hw_intel", "b", "perf"),
            steps: vec!["bind", "perf", "unload"],
            ..on(
                "mixed-perf",
                "intel-spr",
                "the kernel's ntb_perf and 'ntb-ping linux perf' greet, and each writes into the other's memory",
            )
        },
        Scenario {
            settings: settings("ntb_hw_amd", "b", "pingpong"),
            steps: vec!["bind", "pingpong", "unload"],
            ..on(
                "mixed-pingpong-amd",
                "amd",
                "the same on AMD registers; the kernel's transport does not pass there yet and is left out",
            )
        },
    ]
}

fn settings(
    driver: &'static str,
    ours: &'static str,
    parts: &'static str,
) -> Vec<(&'static str, &'static str)> {
    vec![("DRIVER", driver), ("OURS", ours), ("PARTS", parts)]
}

fn on(name: &'static str, model: &'static str, proves: &'static str) -> Scenario {
    Scenario {
        name,
        proves,
        bridge: Some(Bridge {
            model,
            window_bytes: 1 << 20,
        }),
        guests: [Machine::PLAIN, OURS],
        programs: &["ntb-ping"],
        script: include_str!("mixed.sh"),
        ..Scenario::BASE
    }
}
