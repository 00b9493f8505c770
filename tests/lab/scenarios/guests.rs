//! The lab itself: guests without a bridge.

use std::time::Duration;

use crate::scenario::{Machine, Scenario};

pub(crate) fn all() -> Vec<Scenario> {
    vec![Scenario {
        name: "guests",
        proves: "two guests boot side by side, one with an IOMMU, load the NTB modules and hear each other",
        bridge: None,
        guests: [Machine::PLAIN, Machine::IOMMU],
        script: include_str!("guests.sh"),
        settings: vec![],
        steps: vec!["modules", "a:no-iommu", "b:iommu", "words"],
        tolerates: &[],
        time_limit: Duration::from_secs(60),
    }]
}
