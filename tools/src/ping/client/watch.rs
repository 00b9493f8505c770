//! What is done now and then while it measures: progress, news of a stall, an end on request.

use std::{
    io::{IsTerminal, Write},
    sync::Arc,
    time::Duration,
};

use ntb_ring::channel::Connection;

use crate::{
    cli::ping::RunArgs,
    interrupt::Interrupt,
    ping::{
        diagnose::{Signs, diagnose},
        events::Events,
        measure::Progress,
        station::Look,
    },
};

/// Runs shorter than this show no progress.
const QUIET_NS: u64 = 2_000_000_000;
/// Between two lines of progress.
const PROGRESS_NS: u64 = 500_000_000;
/// A wait that is told of while it lasts.
const NEWS_NS: u64 = 1_000_000_000;

/// The function that the measuring loop calls every ten milliseconds or so.
pub(super) fn watcher(
    args: &RunArgs,
    interrupt: Interrupt,
    connection: Arc<Connection>,
    events: Arc<Events>,
) -> Look {
    let terminal = std::io::stderr().is_terminal();
    let one_way = args.oneway;
    let mut shown = 0;
    let mut told = false;
    Box::new(move |progress: Progress| {
        match progress.waiting {
            Some((awaited, ns)) if ns >= NEWS_NS => {
                if !told {
                    told = true;
                    let failure = diagnose(&Signs {
                        state: connection.state(),
                        silence: events.silence().map(|s| s.since.elapsed()),
                        unanswered: 0,
                        unread: None, // only the sender knows, and it is at work
                        peer_sleeps: false,
                        awaited,
                        waited: Duration::from_nanos(ns),
                    });
                    say(format_args!("ntb-ping: stalled: {failure}\n"));
                }
            }
            _ => told = false,
        }
        if terminal && progress.elapsed_ns >= QUIET_NS && progress.elapsed_ns - shown >= PROGRESS_NS {
            shown = progress.elapsed_ns;
            let seconds = progress.elapsed_ns as f64 / 1e9;
            if one_way {
                say(format_args!("\r{} sent, {seconds:.1} s ", progress.sent));
            } else {
                say(format_args!(
                    "\r{} sent, {} received, {seconds:.1} s ",
                    progress.sent, progress.received
                ));
            }
        }
        !interrupt.came()
    })
}

/// Ends the line of progress, if there was one.
pub(super) fn end_progress(elapsed_ns: u64) {
    if elapsed_ns >= QUIET_NS && std::io::stderr().is_terminal() {
        say(format_args!("\n"));
    }
}

fn say(what: std::fmt::Arguments<'_>) {
    let _ = std::io::stderr().write_fmt(what); // a terminal that has gone is no reason to stop
}
