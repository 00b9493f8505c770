//! What the IOMMU and the windows keep out, what keeps the driver out, and windows onto other devices' memory.

use crate::scenario::{Bridge, Machine, Scenario};

const SPR: Bridge = Bridge {
    model: "intel-spr",
    window_bytes: 1 << 20,
};

const GUEST: Machine = Machine {
    memory_mib: 512,
    ..Machine::IOMMU
};

pub(crate) fn all() -> Vec<Scenario> {
    let isolation = |name, model, fine, proves| Scenario {
        name,
        proves,
        bridge: Some(Bridge { model, ..SPR }),
        guests: [GUEST, GUEST],
        programs: &["ntb-check", "lab-inside"],
        script: include_str!("isolation.sh"),
        settings: vec![("FINE", fine)],
        steps: vec!["bind", "window", "iommu", "registers", "report"],
        tolerates: &["DMAR: [DMA"],
        ..Scenario::BASE
    };
    vec![
        isolation(
            "isolation",
            "intel-spr",
            "yes",
            "a hostile peer stores everywhere it can reach: memory outside the window keeps its guards, the window \
             refuses, behind it the IOMMU refuses, and ntb-check reports the kernel's faults",
        ),
        isolation(
            "isolation-amd",
            "amd",
            "yes",
            "the same on AMD, whose peer can set this side's translations",
        ),
        Scenario {
            name: "refusals",
            proves: "the driver and ntb-check name what is in the way, and the remedy: no driver, the kernel's driver, no \
                     IOMMU, a group that is not viable, no permission, too little lockable memory, no huge pages, lockdown",
            bridge: Some(SPR),
            guests: [
                Machine {
                    qemu: &["-device", "virtio-net-pci,bus=ntb-slot,addr=0x0.1"],
                    ..GUEST
                },
                Machine::PLAIN,
            ],
            programs: &["ntb-ping", "ntb-check", "lab-inside"],
            script: include_str!("refusals.sh"),
            steps: vec![
                "no-driver",
                "kernel-driver",
                "b:no-iommu",
                "a:group",
                "a:permission",
                "a:memlock",
                "a:huge-pages",
                "a:lockdown",
            ],
            ..Scenario::BASE
        },
        Scenario {
            name: "peer-bar",
            proves: "a second device's BAR (the stand-in for a GPU) is mapped into the bridge's IOMMU domain, and the other \
                     host's message lies in it byte for byte, and nothing beside it; its decoding goes off and on, it is \
                     reset, and what comes once the mapping is gone is refused",
            bridge: Some(SPR),
            guests: [
                Machine {
                    qemu: &[
                        "-object",
                        "memory-backend-memfd,id=bar,size=1M,share=on",
                        "-device",
                        // Behind a port of its own: that is what can be reset.
                        "pcie-root-port,id=second,chassis=7,slot=7,addr=7",
                        "-device",
                        "ivshmem-plain,memdev=bar,bus=second",
                    ],
                    ..GUEST
                },
                GUEST,
            ],
            programs: &["lab-inside"],
            script: include_str!("peer-bar.sh"),
            steps: vec!["bind", "message", "decoding", "reset", "unmapped"],
            tolerates: &["DMAR: [DMA"],
            ..Scenario::BASE
        },
    ]
}
