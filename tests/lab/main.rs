//! The virtual-machine lab: software that no one here wrote judges the emulator and the driver.
//!
//! Guests run under QEMU with one port of an emulated bridge each, attached by vfio-user. In some scenarios the
//! kernel's own NTB drivers are the judge of the emulator; in others this project's driver runs through the
//! kernel's VFIO and a guest IOMMU. Everything runs in software emulation: the lab proves function, order and
//! isolation, never speed.

mod child;
mod cpio;
mod emulator;
mod error;
mod guest;
mod initramfs;
mod programs;
mod qmp;
mod report;
mod run;
mod scenario;
mod scenarios;
mod setup;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, Subcommand};

use error::{Context as _, LabError};
use report::{say, say_more};
use run::Place;
use scenario::Scenario;
use setup::{Cache, Prepared};

/// Runs scenarios in pairs of virtual machines joined by an emulated Non-Transparent Bridge.
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    #[command(subcommand)]
    command: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Prepare QEMU, kernel, modules and busybox, kept outside the source tree
    ///
    /// Folders: NTB_LAB_CACHE, else $XDG_CACHE_HOME/ntb-lab, else ~/.cache/ntb-lab. NTB_LAB_KERNEL names a
    /// folder with a ready bzImage* and modules/*.ko; NTB_LAB_MIRROR a Debian mirror other than apt's.
    Setup,
    /// Name the scenarios, what each proves and what it needs
    List,
    /// Run scenarios, preparing first what is not yet prepared
    Run {
        /// Scenarios to run; a trailing * takes all that begin so. Without any: all
        names: Vec<String>,
        /// Write the results to this file as one JSON object
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// Of the chosen scenarios only the first of each family; a name's first word is the family
        #[arg(long)]
        quick: bool,
        /// Seed of what scenarios leave to chance; another one each time unless it is given
        #[arg(long)]
        seed: Option<u32>,
        /// Keep the logs of scenarios that pass, too
        #[arg(long)]
        keep: bool,
    },
}

fn main() -> ExitCode {
    let result = match Options::parse().command {
        Action::Setup => setup_only(),
        Action::List => {
            list();
            Ok(true)
        }
        Action::Run {
            names,
            json,
            quick,
            seed,
            keep,
        } => choose(scenarios::all(), &names).and_then(|chosen| {
            let chosen = if quick { first_of_each(chosen) } else { chosen };
            let seed = seed.unwrap_or_else(std::process::id);
            run_all(&chosen, json.as_deref(), seed, keep)
        }),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            say(&format!("{error} [{}]", error.name()));
            ExitCode::from(error.exit_code())
        }
    }
}

fn setup_only() -> Result<bool, LabError> {
    Prepared::ensure(&Cache::open()?)?.describe();
    programs::build()?;
    Ok(true)
}

fn list() {
    for scenario in scenarios::all() {
        say(scenario.name);
        say_more(&format!("proves: {}", scenario.proves));
        say_more(&format!("needs: {}", scenario.needs()));
    }
}

fn run_all(chosen: &[Scenario], json: Option<&Path>, seed: u32, keep: bool) -> Result<bool, LabError> {
    let cache = Cache::open()?;
    let prepared = Prepared::ensure(&cache)?;
    let needs_programs = chosen.iter().any(|scenario| !scenario.programs.is_empty());
    let programs = needs_programs.then(programs::build).transpose()?;
    let start = Instant::now();
    let mut outcomes = Vec::new();
    for scenario in chosen {
        say(&format!("run {}", scenario.name));
        let place = Place {
            logs: cache.root().join("logs").join(scenario.name),
            // One lab uses a cache at a time, and what a killed one left here is replaced.
            sockets: cache.root().join("sockets"),
            programs: programs.clone(),
            seed,
        };
        let mut outcome = run::run(&prepared, scenario, &place)?;
        if outcome.passed && !keep {
            std::fs::remove_dir_all(&place.logs).context("remove", &place.logs)?;
            outcome.logs = None;
        }
        outcome.print();
        outcomes.push(outcome);
    }
    report::finish(&outcomes, start.elapsed(), json)
}

/// The scenarios that the patterns name, in the list's order.
fn choose(all: Vec<Scenario>, patterns: &[String]) -> Result<Vec<Scenario>, LabError> {
    let matches = |pattern: &String, name: &str| match pattern.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => name == pattern,
    };
    for pattern in patterns {
        if !all.iter().any(|scenario| matches(pattern, scenario.name)) {
            return Err(LabError::UnknownScenario {
                pattern: pattern.clone(),
            });
        }
    }
    let wanted = |scenario: &Scenario| {
        patterns.is_empty() || patterns.iter().any(|pattern| matches(pattern, scenario.name))
    };
    Ok(all.into_iter().filter(wanted).collect())
}

/// The first scenario of each family; says which are left out.
fn first_of_each(chosen: Vec<Scenario>) -> Vec<Scenario> {
    let mut families = BTreeSet::new();
    let (run, left): (Vec<_>, Vec<_>) = chosen
        .into_iter()
        .partition(|scenario| families.insert(scenario.family()));
    let names: Vec<&str> = left.iter().map(|scenario| scenario.name).collect();
    if !names.is_empty() {
        say(&format!("left out: {}", names.join(" ")));
    }
    run
}
