//! Round trips over a TCP link against a bare echo over TCP: two processes of this machine, the loopback, both with no
//! delay and both polling, blocks interleaved, and what counts is the median of the blocks' ratios.
//!
//! - *bare echo*: as many bytes each way with one `send` and one `recv` that find them, without waiting in the kernel.
//! - *bare echo, blocking*: the same, asleep in `recv`; for comparison.
//!
//! `cargo bench -p ntb-tests --bench tcp -- [--quick] [--blocks N] [--size BYTES] [--json]`

#![allow(clippy::print_stdout, reason = "a benchmark prints")]

use std::{
    error::Error,
    io::{ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use ntb_ring::{
    channel::{Connection, Options, Receiver, Sender, Wait},
    link::select::{self, LinkOptions},
    session::ChannelSpec,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const FLAG: &str = "--other-end";
/// Processors of the two ends.
const CPUS: [usize; 2] = [0, 1];
/// Longest wait for anything: a watchdog, not a measure.
const LONG: Duration = Duration::from_secs(60);
const SIZES: [usize; 4] = [16, 48, 256, 4096];
/// What the ratio at 48 bytes is held to.
const BAR: f64 = 1.15;

/// What the far side echoes on.
#[derive(Clone, Copy, PartialEq)]
#[repr(u64)]
enum What {
    Link = 1,
    Bare = 2,
    Blocking = 3,
    End = 4,
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let result = if args.first().map(String::as_str) == Some(FLAG) {
        serve(&args[1..])
    } else {
        // `cargo bench` and `cargo test --benches` pass flags of their own.
        let has = |flag: &str| args.iter().any(|a| a == flag);
        let quick = has("--quick") || has("--test");
        let number = |flag: &str| -> Option<usize> {
            let at = args.iter().position(|a| a == flag)?;
            args.get(at + 1)?.parse().ok()
        };
        let blocks = number("--blocks").unwrap_or(if quick { 3 } else { 15 });
        let sizes = number("--size").map_or_else(|| SIZES.to_vec(), |size| vec![size]);
        run(&sizes, blocks, if quick { 500 } else { 4000 }, has("--json"))
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("benchmark: {e}");
            ExitCode::from(1)
        }
    }
}

/// The two ends' ways to each other.
struct Ends {
    control: (Sender, Receiver),
    ping: (Sender, Receiver),
    bare: TcpStream,
    _connection: Connection,
}

impl Ends {
    fn open(address: &str, bare: TcpStream) -> Result<Self> {
        bare.set_nodelay(true)?;
        let opened = select::open(&address.parse()?, &LinkOptions::default())?;
        let connection = Connection::open(opened.link, &Options::default())?;
        let spec = ChannelSpec {
            ring_lines: 1 << 14,
            ..ChannelSpec::default()
        };
        let mut ends = Self {
            control: connection.channel("control", spec)?,
            ping: connection.channel("ping", spec)?,
            bare,
            _connection: connection,
        };
        for (tx, rx) in [&mut ends.control, &mut ends.ping] {
            tx.wait_connected(LONG)?;
            rx.wait_connected(LONG)?;
        }
        ends.control.1.set_wait(Wait::SpinSleep { spins: 1000 });
        Ok(ends)
    }

    fn say(&mut self, what: What, size: usize, count: u64) -> Result<()> {
        let mut job = [0; 24];
        for (slot, value) in job.chunks_exact_mut(8).zip([what as u64, size as u64, count]) {
            slot.copy_from_slice(&value.to_le_bytes());
        }
        self.control.0.send(&job, LONG)?;
        if what != What::End {
            self.control.1.recv(&mut job, LONG)?;
        }
        Ok(())
    }

    /// Nanoseconds of a round trip.
    fn measure(&mut self, what: What, size: usize, count: u64) -> Result<f64> {
        self.say(what, size, count)?;
        self.bare.set_nonblocking(what == What::Bare)?;
        let mut buf = vec![7; size];
        let start = Instant::now();
        for _ in 0..count {
            if what == What::Link {
                spin(|| self.ping.0.try_send(&buf).ok())?;
                spin(|| self.ping.1.try_recv(&mut buf).ok())?;
            } else {
                write(&mut self.bare, &buf)?;
                read(&mut self.bare, &mut buf)?;
            }
        }
        Ok(start.elapsed().as_nanos() as f64 / count as f64)
    }
}

fn spin<T>(mut poll: impl FnMut() -> Option<T>) -> Result<T> {
    let mut polls = 0u64;
    let mut since = None;
    loop {
        if let Some(found) = poll() {
            return Ok(found);
        }
        polls += 1;
        if polls.is_multiple_of(1 << 16) && since.get_or_insert_with(Instant::now).elapsed() > LONG {
            return Err("nothing has arrived for a minute".into());
        }
    }
}

fn write(stream: &mut TcpStream, bytes: &[u8]) -> Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match stream.write(&bytes[done..]) {
            Ok(n) => done += n,
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn read(stream: &mut TcpStream, bytes: &mut [u8]) -> Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match stream.read(&mut bytes[done..]) {
            Ok(0) => return Err("the other end has gone".into()),
            Ok(n) => done += n,
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// The process at the other end.
fn serve(args: &[String]) -> Result<()> {
    let [address, port] = args else {
        return Err("an address and a port are needed".into());
    };
    pin(CPUS[1]);
    let bare = TcpStream::connect(("127.0.0.1", port.parse::<u16>()?))?;
    let mut ends = Ends::open(address, bare)?;
    let mut buf = vec![0; 1 << 16];
    loop {
        let got = ends.control.1.recv(&mut buf, LONG)?.len;
        let word = |i: usize| -> u64 {
            let bytes = buf[..got].get(i * 8..i * 8 + 8).unwrap_or(&[0; 8]);
            bytes.iter().rev().fold(0, |w, b| w << 8 | u64::from(*b))
        };
        let (what, size, count) = (word(0), word(1) as usize, word(2));
        if what == What::End as u64 {
            return Ok(());
        }
        ends.bare.set_nonblocking(what == What::Bare as u64)?;
        ends.control.0.send(b"ready", LONG)?;
        for _ in 0..count {
            if what == What::Link as u64 {
                let len = spin(|| ends.ping.1.try_recv(&mut buf).ok())?.len;
                spin(|| ends.ping.0.try_send(&buf[..len]).ok())?;
            } else {
                read(&mut ends.bare, &mut buf[..size])?;
                write(&mut ends.bare, &buf[..size])?;
            }
        }
    }
}

fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    let _ = rustix::thread::sched_setaffinity(None, &set); // fewer cores: measured all the same
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

fn run(sizes: &[usize], blocks: usize, count: u64, json: bool) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let free = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let address = format!("tcp:127.0.0.1:{free}");
    let mut far = Command::new(std::env::current_exe()?)
        .args([FLAG, &address, &listener.local_addr()?.port().to_string()])
        .stdin(Stdio::null())
        .spawn()?;
    pin(CPUS[0]);
    let (bare, _) = listener.accept()?;
    let mut ends = Ends::open(&address, bare)?;
    let mut rows = Vec::new();
    for &size in sizes {
        let (mut link, mut bare, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        let mut blocking = Vec::new();
        ends.measure(What::Link, size, count)?;
        ends.measure(What::Bare, size, count)?;
        for _ in 0..blocks {
            let before = ends.measure(What::Bare, size, count)?;
            let ours = ends.measure(What::Link, size, count)?;
            let after = ends.measure(What::Bare, size, count)?;
            blocking.push(ends.measure(What::Blocking, size, count / 4)?);
            link.push(ours);
            bare.push(f64::midpoint(before, after));
            ratios.push(ours / f64::midpoint(before, after));
        }
        ratios.sort_by(f64::total_cmp);
        rows.push((size, median(&link), median(&bare), median(&blocking), ratios));
    }
    ends.say(What::End, 0, 0)?;
    far.wait()?;
    if json {
        let rows: Vec<_> = rows
            .iter()
            .map(|(size, link, bare, blocking, ratios)| {
                serde_json::json!({
                    "row": format!("round trip {size} B over TCP"), "unit": "ns", "median": link, "against": "bare echo",
                    "yardstick_median": bare, "blocking_echo_median": blocking, "ratio": median(ratios),
                    "ratio_min": ratios.first(), "ratio_max": ratios.last(),
                    "goal": if *size == 48 { format!("bar {BAR}") } else { String::new() },
                })
            })
            .collect();
        println!(
            "{}",
            serde_json::json!({ "benchmark": "tcp", "blocks": blocks, "rows": rows })
        );
        return Ok(());
    }
    println!(
        "two processes on processors {CPUS:?}, {blocks} interleaved blocks of {count}; medians, and the ratio's range"
    );
    for (size, link, bare, blocking, ratios) in rows {
        println!(
            "round trip {size:>4} B over TCP  {link:>9.0} ns   bare echo {bare:>9.0} ns   ratio {:.3} ({:.3} to {:.3}){}   \
             blocking echo {blocking:>9.0} ns",
            median(&ratios),
            ratios.first().unwrap_or(&f64::NAN),
            ratios.last().unwrap_or(&f64::NAN),
            if size == 48 {
                format!(", bar {BAR}")
            } else {
                String::new()
            },
        );
    }
    Ok(())
}
