//! Links over the kernel's software devices for RDMA: soft-RoCE and siw (iWARP).

use crate::scenario::{Machine, Scenario};

const GUEST: Machine = Machine {
    memory_mib: 512,
    // A busy poller on the only processor would starve the device, which runs in soft interrupts.
    cpus: 2,
    ..Machine::PLAIN
};

/// What every guest has of Debian.
const DEBIAN: &[&str] = &[
    "usr/bin/rdma",
    "etc/libibverbs.d",
    "usr/lib/x86_64-linux-gnu/libibverbs",
    "usr/lib/x86_64-linux-gnu/libibverbs.so.1",
    "usr/lib/x86_64-linux-gnu/librdmacm.so.1",
];

/// The same, and what to compare with.
const WITH_PERFTEST: &[&str] = &[
    "usr/bin/rdma",
    "usr/bin/ib_write_lat",
    "etc/libibverbs.d",
    "usr/lib/x86_64-linux-gnu/libibverbs",
    "usr/lib/x86_64-linux-gnu/libibverbs.so.1",
    "usr/lib/x86_64-linux-gnu/librdmacm.so.1",
];

pub(crate) fn all() -> Vec<Scenario> {
    let devices = [("rdma-roce", "rxe"), ("rdma-siw", "siw")];
    let base = |kind| Scenario {
        guests: [GUEST, GUEST],
        network: true,
        programs: &["campaign", "lab-inside"],
        debian: DEBIAN,
        settings: vec![("KIND", kind)],
        ..Scenario::BASE
    };
    let looped = devices.map(|(name, kind)| Scenario {
        name,
        proves: "over soft-RoCE or siw (iWARP), looped in each guest: without a device, a provider or enough lockable memory \
                 the reason is said; the conformance suite holds; processes killed under traffic leave nothing wrong",
        script: include_str!("rdma.sh"),
        steps: vec!["none", "provider", "memlock", "conformance", "kill"],
        ..base(kind)
    });
    let campaigns = [("rdma-campaigns-roce", "rxe"), ("rdma-campaigns-siw", "siw")];
    let campaigns = campaigns.map(|(name, kind)| Scenario {
        name,
        proves: "more campaigns over the same: hostile peers and strangers; bad wires, connections cut and memory scribbled on; requests counted",
        script: include_str!("rdma-campaigns.sh"),
        steps: vec!["a:hostile", "a:faults", "b:count"],
        ..base(kind)
    });
    let guests = [("rdma-guests-roce", "rxe"), ("rdma-guests-siw", "siw")].map(|(name, kind)| Scenario {
        name,
        proves: "over soft-RoCE or siw between two guests: ntb-ping, beside ib_write_lat; options of the address; the \
                 automatic choice; one side's process killed under traffic with every message checked",
        programs: &["campaign", "ntb-ping"],
        debian: WITH_PERFTEST,
        script: include_str!("rdma-guests.sh"),
        steps: vec!["ping", "b:options", "b:ratio", "auto", "kill"],
        ..base(kind)
    });
    let troubles = [("rdma-trouble-roce", "rxe"), ("rdma-trouble-siw", "siw")].map(|(name, kind)| Scenario {
        name,
        proves: "over soft-RoCE or siw between two guests, under traffic with every message checked: ports go down and up, an \
                 address changes; each is told, nothing wrong arrives, and traffic flows again",
        programs: &["campaign"],
        script: include_str!("rdma-trouble.sh"),
        steps: vec!["traffic", "port", "address", "end"],
        ..base(kind)
    });
    looped
        .into_iter()
        .chain(campaigns)
        .chain(guests)
        .chain(troubles)
        .collect()
}
