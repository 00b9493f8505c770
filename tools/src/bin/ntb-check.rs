//! Says whether a machine is set up for its bridge, and what to do where it is not.

use std::process::ExitCode;

fn main() -> ExitCode {
    ntb_tools::check::main(std::env::args_os()).into()
}
