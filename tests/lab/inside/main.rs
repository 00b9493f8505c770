//! What runs inside guests beside the project's own programs: the two ends of scenarios about isolation and about
//! windows onto other devices' memory. Drives ports by themselves, without a ring.
//!
//! Each command says on standard error how far it is, waits for a line on standard input where a script has to do
//! something in between, and prints one JSON object. Exit status 0 only if everything held.

#![allow(clippy::print_stdout, reason = "the result goes to standard output")]

mod bar;
mod hostile;
mod port;
mod user;
mod victim;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use serde_json::{Map, Value};

/// Both ends of what the lab does with a port and no ring.
#[derive(Parser)]
#[command(name = "lab-inside", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Opens windows onto memory with guards around it, and holds that nothing but the windows changes.
    Victim(victim::Args),
    /// Stores everywhere it can reach.
    Hostile(hostile::Args),
    /// Opens a window onto a BAR of another device, and holds that what comes lies in it, byte for byte.
    BarReceive(bar::ReceiveArgs),
    /// Stores a message of random bytes through a window.
    BarSend(bar::SendArgs),
    /// Runs a program as a user without any rights.
    AsUser(user::Args),
}

/// Facts, or what did not hold.
type Result<T> = std::result::Result<T, String>;

fn main() -> ExitCode {
    let mut facts = Map::new();
    let result = match Cli::parse().command {
        Command::Victim(args) => victim::run(&args, &mut facts),
        Command::Hostile(args) => hostile::run(&args, &mut facts),
        Command::BarReceive(args) => bar::receive(&args, &mut facts),
        Command::BarSend(args) => bar::send(&args, &mut facts),
        Command::AsUser(args) => Err(user::run(&args)),
    };
    facts.insert("passed".to_owned(), result.is_ok().into());
    if let Err(why) = &result {
        eprintln!("lab-inside: {why}");
        facts.insert("why".to_owned(), why.clone().into());
    }
    println!("{}", Value::Object(facts));
    ExitCode::from(u8::from(result.is_err()))
}

/// Says how far it is, and waits for a line.
fn stop_at(place: &str) -> Result<()> {
    eprintln!("{place}");
    let mut line = String::new();
    match std::io::stdin().read_line(&mut line) {
        Ok(0) => Err(format!("standard input ended at {place}")),
        Ok(_) => Ok(()),
        Err(e) => Err(e.to_string()),
    }
}

/// Any error in words.
fn said(what: &str) -> impl Fn(&dyn std::fmt::Display) -> String + '_ {
    move |why| format!("{what}: {why}")
}
