//! Links over the kernel's software devices for RDMA: soft-RoCE and siw (iWARP).

use crate::scenario::{Machine, Scenario};

const GUEST: Machine = Machine {
    memory_mib: 512,
    // A busy poller on the only processor would starve the device, which runs in soft interrupts.
    cpus: 2,
    ..Machine::PLAIN
};

pub(crate) fn all() -> Vec<Scenario> {
    let rdma = |name, kind, proves| Scenario {
        name,
        proves,
        guests: [GUEST, GUEST],
        network: true,
        programs: &["campaign", "lab-inside"],
        debian: &[
            "usr/bin/rdma",
            "etc/libibverbs.d",
            "usr/lib/x86_64-linux-gnu/libibverbs",
            "usr/lib/x86_64-linux-gnu/libibverbs.so.1",
            "usr/lib/x86_64-linux-gnu/librdmacm.so.1",
        ],
        script: include_str!("rdma.sh"),
        settings: vec![("KIND", kind)],
        steps: vec!["none", "provider", "memlock", "conformance", "kill"],
        ..Scenario::BASE
    };
    vec![
        rdma(
            "rdma-roce",
            "rxe",
            "over soft-RoCE, looped in each guest: without a device, a provider or enough lockable memory the reason is said; \
             the conformance suite holds; processes killed under traffic leave nothing wrong",
        ),
        rdma(
            "rdma-siw",
            "siw",
            "the same over siw, the kernel's iWARP in software",
        ),
    ]
}
