//! The list of scenarios.

mod guests;
mod linux;

use crate::scenario::Scenario;

/// All scenarios, what others build on first.
pub(crate) fn all() -> Vec<Scenario> {
    [guests::all(), linux::all()].concat()
}
