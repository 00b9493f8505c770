//! Campaigns: long seeded runs that hold the rules of delivery and of a link's life under everything that can go wrong.
//!
//! Each prints one JSON object and exits 0 only if every rule held.

#![allow(clippy::print_stdout, reason = "the result goes to standard output")]

mod conformance;
mod count;
mod faults;
mod half;
mod hostile;
mod kill;
mod leftovers;
mod phase;
mod relay;
mod strangers;
mod traffic;
mod venue;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Seeded campaigns over real links; each prints one JSON object and exits 0 only if every rule held.
#[derive(Parser)]
#[command(name = "campaign", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Kill either side at random instants under full two-way traffic, restart it, in either order.
    Kill(kill::Args),
    /// Traffic through an engine that delays, reorders, tears and drops, with link losses and scribbles.
    Faults(faults::Args),
    /// The rules of a link, each on one whose both ends are opened here.
    Conformance(conformance::Args),
    /// Counts what leaves a write-combining buffer per message.
    Count(count::Args),
    /// A peer that writes random bytes over all memory and into the socket.
    Hostile(hostile::Args),
    /// This machine's half of a kill campaign over a link to another machine, which runs the other half.
    Half(half::Args),
    /// One side of the kill campaign (started by it).
    #[command(hide = true)]
    KillSide(kill::SideArgs),
    /// The victim of the hostile campaign (started by it).
    #[command(hide = true)]
    HostileVictim(hostile::VictimArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Kill(args) => kill::run(&args),
        Command::Faults(args) => faults::run(&args),
        Command::Conformance(args) => conformance::run(&args),
        Command::Count(args) => count::run(&args),
        Command::Hostile(args) => hostile::run(&args),
        Command::Half(args) => half::run(&args),
        Command::KillSide(args) => return kill::side(&args),
        Command::HostileVictim(args) => return hostile::victim(&args),
    };
    match result {
        Ok(report) => report.print(),
        Err(e) => {
            eprintln!("campaign: {e}");
            ExitCode::from(1)
        }
    }
}

/// What a campaign found, as one JSON object.
struct Report {
    name: &'static str,
    fields: serde_json::Map<String, serde_json::Value>,
    violations: Vec<String>,
}

impl Report {
    fn new(name: &'static str, seed: u64) -> Self {
        let mut fields = serde_json::Map::new();
        fields.insert("seed".to_owned(), seed.into());
        Self {
            name,
            fields,
            violations: Vec::new(),
        }
    }

    fn set(&mut self, key: &str, value: impl Into<serde_json::Value>) {
        self.fields.insert(key.to_owned(), value.into());
    }

    fn violation(&mut self, what: impl Into<String>) {
        self.violations.push(what.into());
    }

    fn print(self) -> ExitCode {
        let good = self.violations.is_empty();
        let mut object = serde_json::Map::new();
        object.insert("campaign".to_owned(), self.name.into());
        object.insert("passed".to_owned(), good.into());
        object.extend(self.fields);
        object.insert("violations".to_owned(), self.violations.into());
        println!("{}", serde_json::Value::Object(object));
        if good {
            ExitCode::SUCCESS
        } else {
            ExitCode::from(1)
        }
    }
}

/// SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): small, seeded, good
/// enough to choose faults with.
struct Rng(u64);

impl Rng {
    fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`, which is not zero.
    fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }
}
