//! `ntb-ping`: round trips over a link, measured so that they can be believed.

pub mod baseline;
pub mod client;
pub mod diagnose;
pub mod emulate;
pub mod events;
pub mod gpu;
pub mod measure;
pub mod message;
pub mod server;
pub mod spawn;
pub mod station;

use std::{ffi::OsString, time::Duration};

use ntb_ring::{
    address::Address,
    channel::{ConnectError, Connection, Options},
    link::{LinkError, auth::SecretError, select::LinkOptions},
    queue::MIN_RING_LINES,
    session::OpenError,
    wire::{layout::CHANNELS_FIRST_LINE, page::PAGE_LINES},
};

use crate::{
    cli::{
        self, Answer,
        ping::{Command, LinkArgs, RANGES, Sub},
    },
    environment::topology::Pinned,
    exit::{Exit, Failure},
    floor, linux,
};

/// Name of the channel.
const CHANNEL: &str = "ntb-ping";

/// Lines of a ring for a link with so many lines of memory: as many as are wanted, or the most there is room for beside the
/// session's own where that is less, as on bridges with small windows.
fn ring_lines(wanted: u64, memory: u64) -> u64 {
    let room = memory.saturating_sub(CHANNELS_FIRST_LINE + PAGE_LINES);
    let most = 1_u64 << room.max(1).ilog2();
    wanted.min(most).max(MIN_RING_LINES)
}

/// The whole program: parses, runs, prints. The exit code is returned.
#[allow(clippy::print_stdout, clippy::print_stderr, reason = "this is the program")]
pub fn main(args: impl IntoIterator<Item = OsString>) -> Exit {
    let command: Command = match cli::parse(args, RANGES) {
        Ok(command) => command,
        Err(Answer::Text(text)) => {
            print!("{text}");
            return Exit::Good;
        }
        Err(Answer::Wrong(failure)) => {
            eprintln!("ntb-ping: {failure}");
            return failure.exit;
        }
    };
    let result = match &command.sub {
        None if command.run.from.or(command.run.to).is_some() => gpu::run(&command.run),
        None => client::run(&command.run),
        Some(Sub::Serve(args)) => server::serve(args),
        Some(Sub::Linux(args)) => linux::run(args),
        Some(Sub::FloorPeer(args)) => {
            server::end_with(args.parent);
            let _pinned = args.cpu.and_then(|(cpu, _)| Pinned::to(cpu).ok());
            floor::serve()
                .map(|()| Exit::Good)
                .map_err(|e| Failure::new(Exit::Limits, "floor", e.to_string()))
        }
    };
    result.unwrap_or_else(|failure| {
        eprintln!("ntb-ping: {}: {failure}", failure.name);
        failure.exit
    })
}

/// Parameters of a link by the options that both ends have.
fn link_options(args: &LinkArgs) -> Result<LinkOptions, Failure> {
    let secret = args.secret().map_err(|e| {
        let exit = match e {
            SecretError::File { .. } => Exit::Limits,
            SecretError::Empty | SecretError::TooLong => Exit::Usage,
        };
        Failure::new(exit, "secret", e.to_string())
    })?;
    Ok(LinkOptions {
        secret,
        strict: args.strict,
        busy_poll: args.busy_poll,
        ..LinkOptions::default()
    })
}

fn link_failure(e: &LinkError) -> Failure {
    Failure::new(Exit::from_class(e.exit), e.name, e.to_string())
}

fn connect_failure(e: &ConnectError) -> Failure {
    Failure::new(Exit::from_class(e.exit()), e.name(), e.to_string())
}

/// Why a channel could not be opened: where the link has failed for good, that is why.
fn channel_failure(connection: &Connection, e: &OpenError) -> Failure {
    if let OpenError::Ended = e
        && let Err(why @ ConnectError::LinkFailed { .. }) =
            connection.wait_running(Duration::from_millis(100))
    {
        return connect_failure(&why);
    }
    Failure::new(Exit::Limits, "channel", e.to_string())
}

/// How a link to this address is served. On emulated bridges a store is a call of some microseconds and what is counted
/// is packets a message: beats at the pace of a real bridge would be a visible share of them, as they are not there.
fn connection_options(address: &Address) -> Options {
    match address {
        Address::Emulated(_) => Options {
            beat_interval: Duration::from_millis(100),
            silent_after: Duration::from_secs(2),
            ..Options::default()
        },
        _ => Options::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_fit_what_small_windows_have() {
        assert_eq!(ring_lines(1 << 18, 1 << 20), 1 << 18);
        // Two windows of 1 MiB.
        assert_eq!(ring_lines(1 << 18, 1 << 15), 1 << 14);
        assert_eq!(ring_lines(1024, 1 << 15), 1024);
        // One of 64 KiB, and less than there can be.
        assert_eq!(ring_lines(1024, 1024), 512);
        assert_eq!(ring_lines(1024, 0), MIN_RING_LINES);
    }
}
