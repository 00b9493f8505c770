//! This project's driver in both guests, through the kernel's VFIO and an IOMMU.

use crate::scenario::{Bridge, Machine, Scenario};

const MIB: u64 = 1 << 20;

const GUEST: Machine = Machine {
    memory_mib: 512,
    ..Machine::IOMMU
};

const PROGRAMS: &[&str] = &["ntb-ping", "ntb-check", "campaign"];

pub(crate) fn all() -> Vec<Scenario> {
    let ping = |name, model, proves| Scenario {
        name,
        proves,
        script: include_str!("vfio.sh"),
        steps: vec!["bind", "group", "other-order", "iommufd", "stream"],
        ..on(model)
    };
    let campaign = |name, model, interface, proves| Scenario {
        name,
        proves,
        script: include_str!("vfio-campaign.sh"),
        settings: vec![("VFIO", interface)],
        steps: vec!["bind", "kill", "kill-random", "flap", "no-remote-reads"],
        ..on(model)
    };
    vec![
        ping(
            "vfio-intel-spr",
            "intel-spr",
            "ntb-ping over Sapphire Rapids registers through vfio-pci and VT-d on both hosts: the group interface, \
             iommufd and one of each, either side first, nothing lost, nothing read across the link",
        ),
        ping("vfio-intel-icx", "intel-icx", "the same over Ice Lake registers"),
        ping("vfio-intel-skx", "intel-skx", "the same over Skylake registers"),
        ping("vfio-amd", "amd", "the same over AMD registers"),
        ping(
            "vfio-epf",
            "epf",
            "the same over the endpoint function's registers",
        ),
        campaign(
            "vfio-campaign-intel-spr",
            "intel-spr",
            "",
            "processes killed and the cable pulled under full two-way traffic, by a fixed and a random seed: every \
             message is the right one or its life is over, and traffic comes back (group interface)",
        ),
        campaign(
            "vfio-campaign-amd",
            "amd",
            ",iommufd",
            "the same over AMD registers, through iommufd",
        ),
        Scenario {
            name: "vfio-reset",
            proves: "a guest is reset, then its power is cut, in mid-traffic: the other's process lives through both, and \
                     a guest that boots anew carries on",
            script: include_str!("vfio-reset.sh"),
            steps: vec!["bind", "first-traffic", "b:reset", "b:power-cut", "last-traffic"],
            ..on("intel-spr")
        },
        Scenario {
            name: "vfio-removal",
            proves: "the port vanishes under the running program, by surprise and by its slot's button: the driver lets \
                     go, takes it up again when it is back, and the other host's process lives through it",
            script: include_str!("vfio-removal.sh"),
            steps: vec!["bind", "traffic", "surprise", "wanted-back", "back", "button"],
            ..on("intel-spr")
        },
    ]
}

fn on(model: &'static str) -> Scenario {
    Scenario {
        bridge: Some(Bridge {
            model,
            window_bytes: MIB,
        }),
        guests: [GUEST, GUEST],
        programs: PROGRAMS,
        ..Scenario::BASE
    }
}
