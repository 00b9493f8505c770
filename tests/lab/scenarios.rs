//! The list of scenarios.

mod guests;

use crate::scenario::Scenario;

/// All scenarios, cheapest first.
pub(crate) fn all() -> Vec<Scenario> {
    let mut all = guests::all();
    all.sort_by_key(|scenario| scenario.time_limit);
    all
}
