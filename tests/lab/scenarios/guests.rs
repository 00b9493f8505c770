//! The lab itself: guests without a bridge.

use std::time::Duration;

use crate::scenario::{Machine, Scenario};

pub(crate) fn all() -> Vec<Scenario> {
    vec![Scenario {
        name: "guests",
        proves: "two guests boot side by side, one with an IOMMU, load the NTB modules, hear each other, run this \
                 project's programs, share a network, and are reset and switched off and on",
        guests: [Machine::PLAIN, Machine::IOMMU],
        script: include_str!("guests.sh"),
        network: true,
        programs: &["ntb-ping"],
        debian: &["usr/bin/rdma"],
        steps: vec![
            "modules",
            "a:no-iommu",
            "b:iommu",
            "words",
            "programs",
            "network",
            "power",
        ],
        time_limit: Duration::from_secs(150),
        ..Scenario::BASE
    }]
}
