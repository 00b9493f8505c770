//! Round trips, rates and bandwidth between two processes, each against its yardstick on the same two cores in the same
//! run.
//!
//! Virtual cores move near and far from each other, so nothing is compared with a figure of another minute: every block
//! is bracketed by the floor, blocks of all rows are interleaved, and what is printed are medians of ratios.
//!
//! - *floor*: a bare ping-pong of one 64-byte line each way, all eight words written and read, between the same two
//!   processes.
//! - *bare, another line each time*: the same over 1024 lines in turn, as any ring takes them.
//! - *rtrb*: the SPSC ring of that name, between two threads on the same two cores.
//! - *copy*: the same hand-off of a buffer by plain memory copies and one flag.
//!
//! `cargo bench -p ntb-tests --bench ring -- [--quick] [--blocks N] [--json]`

#![allow(clippy::print_stdout, reason = "a benchmark prints")]

mod child;
mod floor;
mod peers;
mod rows;

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.first().map(String::as_str) == Some(child::FLAG) {
        return child::run(&args[1..]);
    }
    // `cargo bench` and `cargo test --benches` pass flags of their own.
    let quick = args.iter().any(|a| a == "--quick" || a == "--test");
    let json = args.iter().any(|a| a == "--json");
    let blocks = args
        .iter()
        .position(|a| a == "--blocks")
        .and_then(|i| args.get(i + 1))
        .and_then(|n| n.parse().ok())
        .unwrap_or(if quick { 3 } else { 9 });
    match rows::run(blocks, quick, json) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("benchmark: {e}");
            ExitCode::from(1)
        }
    }
}
