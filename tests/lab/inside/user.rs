//! Another program, as a user without any rights: a guest has no accounts.

use std::{os::unix::process::CommandExt as _, process};

#[derive(clap::Args)]
pub(super) struct Args {
    /// Number of the user and of its group.
    id: u32,
    /// The program and its arguments.
    #[arg(trailing_var_arg = true, required = true)]
    command: Vec<String>,
}

/// Turns into the program; returns only what kept it from that.
pub(super) fn run(args: &Args) -> String {
    let Some((program, arguments)) = args.command.split_first() else {
        return "no program".to_owned();
    };
    let mut command = process::Command::new(program);
    let error = command.args(arguments).gid(args.id).uid(args.id).exec();
    format!("{program}: {error}")
}
