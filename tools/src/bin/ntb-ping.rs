//! Measures the round trip of messages over a link.

use std::process::ExitCode;

fn main() -> ExitCode {
    ntb_tools::ping::main(std::env::args_os()).into()
}
