//! `ntb-ping linux`: speaks with the NTB clients of a Linux kernel at the other end of a bridge, so that one host can be
//! moved to user space before the other.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

mod ping;
mod serve;

use std::{
    io::Write,
    sync::Arc,
    time::{Duration, Instant},
};

use ntb::{
    address::OpenOptions,
    hw::{self, NtbError, NtbPort},
};
use ntb_linux::{
    LinuxError,
    perf::{Perf, Step},
    pingpong::PingPong,
    transport::{Transport, TransportOptions},
};

use crate::{
    cli::linux::{Linux, PerfArgs, PingpongArgs, PortArgs, QueueArgs},
    exit::{Exit, Failure},
    interrupt::Interrupt,
};

/// Memory exposed at most unless it is said otherwise.
const WINDOW_BYTES: u64 = 256 << 20;
/// Longest sleep between two looks at what is due.
const NAP: Duration = Duration::from_millis(5);
/// Bytes of one store into a window.
const CHUNK: usize = 64 << 10;

/// Runs one of them.
pub fn run(command: &Linux) -> Result<Exit, Failure> {
    let interrupt = Interrupt::install().map_err(|e| Failure::new(Exit::Limits, "signals", e.to_string()))?;
    match command {
        Linux::Pingpong(args) => pingpong(args, &interrupt),
        Linux::Perf(args) => perf(args, &interrupt),
        Linux::Ping(args) => ping::run(args, &interrupt),
        Linux::Echo(args) => serve::echo(args, &interrupt),
        Linux::Tap(args) => serve::tap(args, &interrupt),
    }
}

fn failure(e: &LinuxError) -> Failure {
    Failure::new(Exit::from_class(e.class().code()), e.name(), e.to_string())
}

fn port_failure(e: NtbError) -> Failure {
    failure(&e.into())
}

/// The result line, or the JSON object. Nobody may be there to read it.
fn print(json: bool, object: &serde_json::Value, text: &str) {
    let line = if json { object.to_string() } else { text.to_owned() };
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

fn open(args: &PortArgs) -> Result<Arc<dyn NtbPort>, Failure> {
    let function = args
        .address
        .open(&OpenOptions::default())
        .map_err(|e| port_failure(e.into()))?;
    hw::open(&function).map_err(port_failure)
}

fn transport(args: &QueueArgs) -> Result<Transport, Failure> {
    let port = open(&args.port)?;
    let options = TransportOptions {
        // Within range by the command line.
        queue: args.queue as usize,
        frame: args.frame as u32,
        clients: args.clients as u8,
        window_bytes: args.port.window.unwrap_or(WINDOW_BYTES),
    };
    Transport::open(&port, &options).map_err(|e| failure(&e))
}

fn pingpong(args: &PingpongArgs, interrupt: &Interrupt) -> Result<Exit, Failure> {
    let port = open(&args.port)?;
    let mut game = PingPong::open(&port, args.pause).map_err(|e| failure(&e))?;
    let (mut heard, mut value) = (0, 0);
    let mut last = Instant::now();
    while heard < args.count && !interrupt.came() {
        match game.poll().map_err(|e| failure(&e))? {
            Some(pong) => {
                heard += 1;
                value = pong.value;
                last = Instant::now();
            }
            None if last.elapsed() >= args.port.timeout => {
                return Err(failure(&game.no_peer(args.port.timeout)));
            }
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    let object = serde_json::json!({ "tool": "ntb-ping", "client": "ntb_pingpong", "heard": heard, "peer_count": value });
    let text = format!("ntb_pingpong: {heard} rings heard, the peer's count is {value}");
    print(args.json, &object, &text);
    Ok(Exit::Good)
}

fn perf(args: &PerfArgs, interrupt: &Interrupt) -> Result<Exit, Failure> {
    let port = open(&args.port)?;
    let mut side = Perf::open(&port, args.port.window.unwrap_or(WINDOW_BYTES)).map_err(|e| failure(&e))?;
    side.connect(args.port.timeout).map_err(|e| failure(&e))?;
    // Never zero, so that what was written shows.
    let fill = |done: u64, part: &mut [u8]| {
        for (i, byte) in part.iter_mut().enumerate() {
            *byte = ((done + i as u64) % 255) as u8 + 1;
        }
    };
    let done = side.transfer(args.bytes, CHUNK, fill).map_err(|e| failure(&e))?;
    let until = Instant::now() + args.hold;
    let mut received = side.received();
    let all_written = |(bytes, lines): (u64, u64)| bytes > 0 && lines * 64 == bytes;
    while Instant::now() < until && !interrupt.came() && !all_written(received) {
        let step = side.poll().map_err(|e| failure(&e))?;
        received = side.received();
        if step != Step::Ready {
            break;
        }
        side.wait(None, 4 * NAP).map_err(|e| failure(&e))?;
    }
    if side.step() == Step::Ready {
        received = side.received();
    }
    let (exposed, lines) = received;
    let written = lines * 64;
    let rate = done.bytes as f64 / done.elapsed.as_secs_f64().max(1e-9);
    let object = serde_json::json!({
        "tool": "ntb-ping", "client": "ntb_perf", "sent_bytes": done.bytes, "elapsed_ns": done.elapsed.as_nanos() as u64,
        "bytes_per_second": rate.round(), "window_bytes": side.window_bytes(), "exposed_bytes": exposed,
        "written_here_bytes": written, "unknown_commands": side.unknown_commands(),
    });
    let text = format!(
        "ntb_perf: {} bytes written to the peer in {:?} ({:.1} MB/s); of {exposed} bytes exposed here the peer has written \
         {written}",
        done.bytes,
        done.elapsed,
        rate / 1e6
    );
    print(args.json, &object, &text);
    Ok(Exit::Good)
}
