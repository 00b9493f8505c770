//! The rules of a link, on one of which both ends can be opened here: what the tests of each transport hold in a process,
//! held where the hardware or the kernel's devices are.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ntb_ring::link::{
    Link,
    conformance::{self, Rig},
};

use crate::{Report, Rng, venue::Venue};

/// Bytes of each end's memory.
const WINDOW_BYTES: u64 = 1 << 16;

/// A rule, by name.
type Rule = (&'static str, fn(&mut dyn Rig));

const RULES: [Rule; 7] = [
    ("registers", conformance::registers),
    ("windows", conformance::windows),
    ("doorbells", conformance::doorbells),
    ("loss_and_return", conformance::loss_and_return),
    ("flaps", conformance::flaps),
    ("engines_survive", conformance::engines_survive),
    ("waiting", conformance::waiting),
];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Transport under test; bridges have windows of their own size, and a suite in cargo test.
    #[arg(long, default_value = "soft", value_parser = ["soft", "tcp", "rdma"])]
    link: String,
    /// Seed of names.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

struct Ends<'a> {
    venue: &'a Venue,
    near: Box<dyn Link>,
    far: Option<Box<dyn Link>>,
}

impl Rig for Ends<'_> {
    fn near(&mut self) -> &mut dyn Link {
        &mut *self.near
    }

    fn far(&mut self) -> Option<&mut dyn Link> {
        self.far.as_mut().map(|far| &mut **far as &mut dyn Link)
    }

    fn lose(&mut self) {
        self.far = None;
    }

    fn restore(&mut self) {
        match self.venue.open(1, WINDOW_BYTES) {
            Ok(far) => self.far = Some(far),
            Err(e) => panic!("the far end does not open again: {e}"),
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<Report, String> {
    let mut report = Report::new("conformance", args.seed);
    let mut rng = Rng::new(args.seed);
    report.set("link", args.link.as_str());
    let mut held = Vec::new();
    for (name, rule) in RULES {
        let venue = Venue::new(&args.link, &mut rng)?;
        let mut ends = Ends {
            near: venue.open(0, WINDOW_BYTES)?,
            far: Some(venue.open(1, WINDOW_BYTES)?),
            venue: &venue,
        };
        match catch_unwind(AssertUnwindSafe(|| rule(&mut ends))) {
            Ok(()) => held.push(name),
            Err(why) => {
                let text = why.downcast_ref::<String>().map(String::as_str);
                let text = text.or(why.downcast_ref::<&str>().copied()).unwrap_or("panicked");
                report.violation(format!("{name}: {text}"));
            }
        }
    }
    report.set("rules", held);
    Ok(report)
}
