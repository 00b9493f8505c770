//! The list of scenarios.

mod guests;
mod linux;
mod mixed;
mod others;
mod rdma;
mod vfio;

use crate::scenario::Scenario;

/// All scenarios, what others build on first.
pub(crate) fn all() -> Vec<Scenario> {
    [
        guests::all(),
        linux::all(),
        vfio::all(),
        mixed::all(),
        others::all(),
        rdma::all(),
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::all;
    use crate::scenario::ROLES;

    #[test]
    fn names_differ_and_every_step_is_in_the_script() {
        let mut names = BTreeSet::new();
        for scenario in all() {
            assert!(names.insert(scenario.name), "{} is there twice", scenario.name);
            for role in ROLES {
                assert!(scenario.steps_of(role).next().is_some());
                for step in scenario.steps_of(role) {
                    let line = format!("step {step}");
                    let begun = scenario.script.lines().any(|text| text.trim() == line);
                    assert!(begun, "{}: nothing begins {step}", scenario.name);
                }
            }
        }
    }
}
