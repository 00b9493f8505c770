//! `ntb-ping --baseline`: what each layer costs, from a bare line to the kernel's TCP, side by side in one run.
//!
//! Each link is measured by a process of its own, this program again, with its own peer; the yardsticks at both ends of
//! the table are the bare line of the floor and a bare echo over TCP.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use std::{
    io::{ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::process::CommandExt,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use ntb_mem::clock::Clock;
use ntb_ring::link::{LinkKind, select};
use serde::Serialize;
use serde_json::Value;

use super::spawn::Peer;
use crate::{
    cli::ping::RunArgs,
    environment::{
        Source,
        topology::{Pinned, allowed},
    },
    exit::{Exit, Failure},
    floor,
    interrupt::Interrupt,
    report::SCHEMA,
    stats::Latencies,
};

/// Round trips of each row when nothing else is asked for.
const COUNT: u64 = 20_000;
/// A bare echo that takes longer than this for a message has failed.
const STUCK: Duration = Duration::from_secs(10);

/// A row of the table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// What was measured: `bare-line`, `soft`, `emulated-ntb`, `rdma`, `tcp`, `bare-tcp-echo`.
    pub layer: &'static str,
    /// Address of the link, where it is one.
    pub address: Option<String>,
    /// Median round trip in nanoseconds.
    pub rtt_p50_ns: Option<u64>,
    /// 99th percentile in nanoseconds.
    pub rtt_p99_ns: Option<u64>,
    /// Why there is no figure.
    pub unavailable: Option<String>,
}

/// The whole table.
#[derive(Clone, Debug, Serialize)]
struct Table {
    tool: &'static str,
    version: &'static str,
    schema: u32,
    mode: &'static str,
    size_bytes: u64,
    count: u64,
    rows: Vec<Row>,
    warnings: Vec<String>,
}

/// Measures every link that can be had on this machine, and prints a table, or one JSON object.
pub fn run(args: &RunArgs, interrupt: &Interrupt) -> Result<Exit, Failure> {
    let count = args.count.unwrap_or(COUNT);
    let size = args.size;
    let (clock, _) = Clock::set_up();
    let cpus = Source::default().topology().best_pair(&allowed());
    let far_cpu = cpus.map(|(_, far)| far);
    let mut rows = vec![bare_line(clock, cpus, interrupt)];
    let id = std::process::id();
    let own = |address: &str| {
        Command::new("/proc/self/exe")
            .arg(address)
            .args(common(args, count, size))
            .output_of()
    };
    let pinned = far_cpu;
    type Measure<'a> = Box<dyn Fn() -> Row + 'a>;
    let served = |layer, address: String| -> Row {
        match Peer::start(&address, pinned, args.wait, None) {
            Ok(_peer) => row(layer, Some(address.clone()), own(&address)),
            Err(e) => Row::missing(layer, format!("its peer cannot be started: {e}")),
        }
    };
    let layers: Vec<Measure<'_>> = vec![
        Box::new(|| served("soft", format!("soft:baseline-{id}"))),
        Box::new(|| {
            let output = Command::new("/proc/self/exe")
                .args(["--emulate", "intel-spr"])
                .args(common(args, count, size))
                .output_of();
            row("emulated-ntb", None, output)
        }),
        Box::new(
            || match select::rdma_unavailable(&select::LinkOptions::default()) {
                Some(why) => Row::missing("rdma", why),
                None => match free_port() {
                    Ok(port) => served("rdma", format!("rdma:127.0.0.1:{port}")),
                    Err(why) => Row::missing("rdma", why),
                },
            },
        ),
        Box::new(|| match free_port() {
            Ok(port) => served("tcp", format!("tcp:127.0.0.1:{port}")),
            Err(why) => Row::missing("tcp", why),
        }),
        Box::new(|| bare_echo(clock, size, count, cpus)),
    ];
    for layer in layers {
        if interrupt.came() {
            return Err(Failure::new(
                Exit::Bad,
                "interrupted",
                "interrupted before all layers were measured".to_owned(),
            ));
        }
        rows.push(layer());
    }
    let warnings = contradictions(&rows);
    let table = Table {
        tool: "ntb-ping",
        version: env!("CARGO_PKG_VERSION"),
        schema: SCHEMA,
        mode: "baseline",
        size_bytes: size,
        count,
        rows,
        warnings,
    };
    let text = if args.json {
        serde_json::to_string(&table).unwrap_or_default() + "\n"
    } else {
        table.text()
    };
    if std::io::stdout().lock().write_all(text.as_bytes()).is_err() {
        return Ok(Exit::Bad);
    }
    // A link that this program has and that could not be measured is bad; one that the machine lacks is not.
    let no_rdma = select::rdma_unavailable(&select::LinkOptions::default()).is_some();
    let all = table
        .rows
        .iter()
        .all(|r| r.rtt_p50_ns.is_some() || (r.layer == "rdma" && no_rdma));
    Ok(if all { Exit::Good } else { Exit::Bad })
}

fn common(args: &RunArgs, count: u64, size: u64) -> Vec<String> {
    let mut out = vec![
        "--json".to_owned(),
        "--wait".to_owned(),
        args.wait.name().to_owned(),
    ];
    for (option, value) in [("--count", count), ("--size", size)] {
        out.extend([option.to_owned(), value.to_string()]);
    }
    out.extend(["--timeout".to_owned(), "20s".to_owned()]);
    out
}

trait OutputOf {
    /// The JSON object that it prints, or what it says instead.
    fn output_of(&mut self) -> Result<Value, String>;
}

impl OutputOf for Command {
    fn output_of(&mut self) -> Result<Value, String> {
        let output = self
            .arg0("ntb-ping")
            .stdin(Stdio::null())
            .output()
            .map_err(|e| format!("a process for it cannot be started: {e}"))?;
        serde_json::from_slice(&output.stdout).map_err(|_| {
            let said = String::from_utf8_lossy(&output.stderr);
            let said = said.lines().last().unwrap_or("nothing was printed");
            said.trim_start_matches("ntb-ping: ").to_owned()
        })
    }
}

fn row(layer: &'static str, address: Option<String>, output: Result<Value, String>) -> Row {
    let found = match output {
        Err(why) => return Row::missing(layer, why),
        Ok(found) => found,
    };
    let text = |key: &str| found.pointer(key).and_then(Value::as_str).map(str::to_owned);
    Row {
        layer,
        address: address.or_else(|| text("/link/address")),
        rtt_p50_ns: found.pointer("/rtt_ns/p50").and_then(Value::as_u64),
        rtt_p99_ns: found.pointer("/rtt_ns/p99").and_then(Value::as_u64),
        unavailable: text("/error/what"),
    }
}

impl Row {
    fn missing(layer: &'static str, why: String) -> Self {
        Self {
            layer,
            address: None,
            rtt_p50_ns: None,
            rtt_p99_ns: None,
            unavailable: Some(why),
        }
    }
}

fn bare_line(clock: Clock, cpus: Option<(u32, u32)>, interrupt: &Interrupt) -> Row {
    let _pinned = cpus.and_then(|(near, _)| Pinned::to(near).ok());
    match floor::between_processes(cpus.map(|(_, far)| far), clock, || !interrupt.came()) {
        Ok(floor) => Row {
            layer: "bare-line",
            address: None,
            rtt_p50_ns: Some(floor.p50_ns),
            rtt_p99_ns: None,
            unavailable: None,
        },
        Err(e) => Row::missing("bare-line", e.to_string()),
    }
}

fn free_port() -> Result<u16, String> {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .map(|address| address.port())
        .map_err(|e| format!("no port of the loopback can be had: {e}"))
}

/// As many bytes each way over the loopback, between two threads that poll, without any link.
fn bare_echo(clock: Clock, size: u64, count: u64, cpus: Option<(u32, u32)>) -> Row {
    const LAYER: &str = "bare-tcp-echo";
    let run = || -> std::io::Result<Latencies> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut near = TcpStream::connect(listener.local_addr()?)?;
        let (mut far, _) = listener.accept()?;
        for end in [&near, &far] {
            end.set_nodelay(true)?;
            end.set_nonblocking(true)?;
        }
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        std::thread::scope(|scope| {
            let echo = scope.spawn(move || -> std::io::Result<()> {
                let _pinned = cpus.and_then(|(_, far)| Pinned::to(far).ok());
                let mut buf = vec![0; size];
                for _ in 0..count {
                    echo_step(&mut far, &mut buf, false)?;
                    echo_step(&mut far, &mut buf, true)?;
                }
                Ok(())
            });
            let _pinned = cpus.and_then(|(near, _)| Pinned::to(near).ok());
            let mut latencies = Latencies::default();
            let mut buf = vec![7; size];
            for _ in 0..count {
                let start = clock.ticks();
                echo_step(&mut near, &mut buf, true)?;
                echo_step(&mut near, &mut buf, false)?;
                latencies.record(clock.to_ns(clock.ticks().saturating_sub(start)));
            }
            let _ = echo.join();
            Ok(latencies)
        })
    };
    match run() {
        Ok(latencies) => Row {
            layer: LAYER,
            address: None,
            rtt_p50_ns: Some(latencies.quantile(0.5)),
            rtt_p99_ns: Some(latencies.quantile(0.99)),
            unavailable: None,
        },
        Err(e) => Row::missing(LAYER, e.to_string()),
    }
}

/// Moves all of `buf` out or in, polling.
fn echo_step(stream: &mut TcpStream, buf: &mut [u8], out: bool) -> std::io::Result<()> {
    let (mut done, mut polls) = (0, 0u32);
    let mut since = None;
    while let Some(rest) = buf.get_mut(done..).filter(|r| !r.is_empty()) {
        let moved = if out {
            stream.write(rest)
        } else {
            stream.read(rest)
        };
        match moved {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                polls = polls.wrapping_add(1);
                if polls.is_multiple_of(4096) {
                    if since.get_or_insert_with(Instant::now).elapsed() > STUCK {
                        return Err(ErrorKind::TimedOut.into());
                    }
                    std::thread::yield_now();
                }
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Where what was measured contradicts the order in which transports are chosen.
fn contradictions(rows: &[Row]) -> Vec<String> {
    let order = [
        (LinkKind::Rdma, "rdma"),
        (LinkKind::Soft, "soft"),
        (LinkKind::Tcp, "tcp"),
    ];
    // An emulated bridge costs what the emulator costs, which says nothing about a real one; and on one machine a soft link
    // is what everything else is compared with.
    let p50 = |layer: &str| rows.iter().find(|r| r.layer == layer).and_then(|r| r.rtt_p50_ns);
    let mut out = Vec::new();
    for (i, (better, a)) in order.iter().enumerate() {
        for (worse, b) in order.iter().skip(i + 1) {
            if let (Some(x), Some(y)) = (p50(a), p50(b))
                && x > y
            {
                out.push(format!(
                    "{} is preferred to {} and costs more here: {x} ns against {y} ns; name the transport to have the other",
                    better.name(),
                    worse.name()
                ));
            }
        }
    }
    out
}

impl Table {
    fn text(&self) -> String {
        let mut out = format!(
            "round trips of {} bytes, {} of each; both ends on this machine\n{:<14} {:>12} {:>12} {:>8}  \n",
            self.size_bytes, self.count, "layer", "p50 ns", "p99 ns", "x line"
        );
        let line = self.rows.first().and_then(|r| r.rtt_p50_ns);
        for row in &self.rows {
            let number = |n: Option<u64>| n.map_or("-".to_owned(), |n| n.to_string());
            let ratio = row.rtt_p50_ns.zip(line).map_or("-".to_owned(), |(n, line)| {
                format!("{:.1}", n as f64 / line.max(1) as f64)
            });
            let note = row
                .unavailable
                .clone()
                .or_else(|| row.address.clone())
                .unwrap_or_default();
            out += &format!(
                "{:<14} {:>12} {:>12} {ratio:>8}  {note}\n",
                row.layer,
                number(row.rtt_p50_ns),
                number(row.rtt_p99_ns)
            );
        }
        for warning in &self.warnings {
            out += &format!("warning: {warning}\n");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(layer: &'static str, p50: u64) -> Row {
        Row {
            rtt_p50_ns: Some(p50),
            unavailable: None,
            ..Row::missing(layer, String::new())
        }
    }

    #[test]
    fn a_cost_against_the_order_is_a_warning() {
        let good = [measured("soft", 100), measured("rdma", 50), measured("tcp", 200)];
        assert_eq!(contradictions(&good), Vec::<String>::new());
        let bad = [measured("rdma", 300), measured("soft", 100), measured("tcp", 200)];
        let warnings = contradictions(&bad);
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert!(
            warnings[0].contains("rdma is preferred to soft")
                && warnings[0].contains("300 ns against 100 ns")
        );
        assert!(contradictions(&[Row::missing("rdma", "none".to_owned()), measured("tcp", 1)]).is_empty());
    }

    #[test]
    fn the_bare_echo_echoes() {
        let row = bare_echo(Clock::set_up().0, 48, 50, None);
        assert!(row.rtt_p50_ns.is_some_and(|n| n > 0), "{row:?}");
    }

    #[test]
    fn what_a_child_printed_becomes_a_row() {
        let json =
            serde_json::json!({"link": {"address": "soft:x"}, "rtt_ns": {"p50": 5, "p99": 9}, "error": null});
        let found = row("soft", None, Ok(json));
        assert_eq!((found.rtt_p50_ns, found.rtt_p99_ns), (Some(5), Some(9)));
        assert_eq!(found.address.as_deref(), Some("soft:x"));
        assert_eq!(
            row("tcp", None, Err("why".to_owned())).unavailable.as_deref(),
            Some("why")
        );
    }
}
