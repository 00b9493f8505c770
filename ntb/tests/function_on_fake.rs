//! The conformance suite of `PciFunction` on the in-process fake.

use std::{
    cell::RefCell,
    sync::{Arc, Weak},
};

use ntb::{
    conformance::{FUNCTION_CASES, FunctionFixture},
    hw::regs::intel_gen4,
    pci::{
        Area, Bar, PciFunction, ResetPlan,
        fake::{Fake, FakeConfig, RegisterFile},
    },
};

struct OnFake {
    plan: ResetPlan,
    last: RefCell<Weak<Fake>>,
}

impl FunctionFixture for OnFake {
    fn open(&self) -> Arc<dyn PciFunction> {
        let hole_at_the_table = vec![
            Area {
                offset: 0,
                bytes: 0x2000,
            },
            Area {
                offset: 0x3000,
                bytes: 0xD000,
            },
        ];
        let config = FakeConfig::new("fake", 0x8086, 0x347E)
            .revision(0x10)
            .bar_with(Bar::B0, 0x10000, hole_at_the_table)
            .bar(Bar::B2, 1 << 20)
            .vectors(33)
            .reset_plan(self.plan.clone());
        let fake = Fake::new(config, RegisterFile::new(&intel_gen4::MAP, 0x10000));
        *self.last.borrow_mut() = Arc::downgrade(&fake);
        fake
    }

    fn scratch(&self) -> (Bar, u64) {
        (Bar::B0, intel_gen4::IM_SPAD.offset().into())
    }

    fn raise(&self, _: &Arc<dyn PciFunction>, vector: u16) -> bool {
        self.last.borrow().upgrade().unwrap().interrupt(vector);
        true
    }
}

fn run(method: Option<&str>, also: &[&str]) {
    for (name, case) in FUNCTION_CASES {
        eprintln!("{name}");
        case(&OnFake {
            plan: ResetPlan {
                method: method.map(str::to_owned),
                also: also.iter().map(|s| (*s).to_owned()).collect(),
            },
            last: RefCell::default(),
        });
    }
}

#[test]
fn suite() {
    run(Some("function level reset"), &[]);
}

#[test]
fn suite_without_reset() {
    run(None, &[]);
}

#[test]
fn suite_where_reset_hits_others() {
    run(
        Some("bus reset"),
        &["0000:81:00.1 (driver nvme)", "0000:81:00.2 (no driver)"],
    );
}
