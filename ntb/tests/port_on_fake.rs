//! The conformance suite of `NtbPort` on fakes.

mod spr_pair;

use ntb::conformance::PORT_CASES;
use spr_pair::Pair;

#[test]
fn suite() {
    for (name, case) in PORT_CASES {
        eprintln!("{name}");
        case(&Pair::default());
    }
}
