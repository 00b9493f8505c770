//! The command line of `ntb-ping`.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand};
use ntb_ring::{
    address::Address,
    link::{
        auth::{Secret, SecretError},
        engine::EngineChoice,
    },
};

use super::{Ranges, values};

/// Default message size in bytes: the largest that travels as one line.
pub const DEFAULT_SIZE: u64 = 48;
/// Largest message in bytes.
pub const LARGEST_SIZE: u64 = 8 << 20;
/// Round trips measured when neither a count nor a duration nor a rate is given.
pub const DEFAULT_COUNT: u64 = 100_000;
/// Messages streamed when neither a count nor a duration nor a rate is given.
pub const DEFAULT_STREAM: u64 = 1_000_000;
/// How long is measured when a rate is given and nothing else.
pub const DEFAULT_PACED: Duration = Duration::from_secs(10);
/// Round trips before counting starts, cut short after a second.
pub const DEFAULT_WARMUP: u64 = 10_000;
/// How long to wait for a peer by default: either side may start a minute before the other.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(90);

/// What a waiting thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// Polls without pause.
    Spin,
    /// Polls, then gives its time slice away between polls.
    Yield,
    /// Polls, then sleeps until the peer rings.
    Sleep,
}

impl Waiting {
    /// The word on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Spin => "spin",
            Self::Yield => "yield",
            Self::Sleep => "sleep",
        }
    }
}

/// An end of a way that a GPU may be at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The processor, and memory of the host.
    Host,
    /// The GPU of this number.
    Gpu(u32),
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Gpu(index) => write!(f, "gpu:{index}"),
        }
    }
}

/// How lines are stored on links over bridges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// Streaming stores to a write-combining mapping.
    Wc,
    /// Direct stores of 64 bytes.
    Movdir64b,
    /// Stores of 8 bytes to an uncached mapping.
    Uc8,
}

impl Engine {
    /// The word on the command line, and in the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Wc => "wc",
            Self::Movdir64b => "movdir64b",
            Self::Uc8 => "uc8",
        }
    }

    /// As links take it.
    pub fn choice(engine: Option<Self>) -> EngineChoice {
        match engine {
            None => EngineChoice::Auto,
            Some(Self::Wc) => EngineChoice::WriteCombining,
            Some(Self::Movdir64b) => EngineChoice::Movdir64b,
            Some(Self::Uc8) => EngineChoice::Uncached8,
        }
    }
}

/// A secret as it was given, which nothing prints: it is looked at after parsing, since errors repeat what they are about.
#[derive(Clone)]
pub struct SecretText(String);

impl std::fmt::Debug for SecretText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SecretText(..)")
    }
}

/// Options of how a link is opened, the same for both ends.
#[derive(Args, Clone, Debug, Default)]
pub struct LinkArgs {
    /// File with the secret that both ends of a link over a network share; also in the environment as NTB_SECRET
    #[arg(long, value_name = "FILE", value_parser = file, allow_hyphen_values = true, conflicts_with = "secret")]
    pub secret_file: Option<PathBuf>,
    /// The secret itself. Other users of this machine see it in the list of processes: for trials
    #[arg(long, value_name = "TEXT", value_parser = secret, allow_hyphen_values = true)]
    pub secret: Option<SecretText>,
    /// With auto: fails where only less than the best transport of this machine can be had, and on a machine without a
    /// bridge and an RDMA device
    #[arg(long)]
    pub strict: bool,
    /// On links over TCP: has the kernel poll the network device for so long, such as 50us (SO_BUSY_POLL)
    #[arg(long, value_name = "TIME", value_parser = busy_poll, allow_hyphen_values = true)]
    pub busy_poll: Option<Duration>,
}

impl LinkArgs {
    /// The secret that was given, in one way or another.
    pub fn secret(&self) -> Result<Secret, SecretError> {
        match (&self.secret, &self.secret_file) {
            (Some(SecretText(text)), _) => Secret::new(text.as_bytes()),
            (None, Some(path)) => Secret::from_file(path),
            (None, None) => Secret::from_env(),
        }
    }
}

/// Measures the round trip of messages over a link.
///
/// Without arguments: chooses the best link there is, starts its own peer if that is the soft link, and measures
/// 100,000 round trips of 48 bytes. Latencies are round trips, not halves of them.
#[derive(Debug, Parser)]
#[command(
    name = "ntb-ping",
    version,
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true
)]
#[command(
    after_help = "Exit codes: 0 good, 1 measured but bad (loss, corruption, stall), 2 usage, 3 no such hardware, \
    4 no peer, 5 link lost, 6 permission or limits, 7 version or layout mismatch."
)]
pub struct Command {
    /// Something else than measuring.
    #[command(subcommand)]
    pub sub: Option<Sub>,
    /// Measuring.
    #[command(flatten)]
    pub run: RunArgs,
}

/// Something else than measuring.
#[derive(Debug, Subcommand)]
pub enum Sub {
    /// Answers whoever measures, until it is interrupted.
    Serve(ServeArgs),
    /// Speaks with the NTB clients of a Linux kernel at the other end of a bridge.
    #[command(subcommand)]
    Linux(super::linux::Linux),
    /// The far end of the bare ping-pong that results are compared with; started by ntb-ping itself.
    #[command(hide = true)]
    FloorPeer(FloorPeerArgs),
}

/// Options of a measurement.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// Link to measure.
    #[arg(value_parser = address, allow_hyphen_values = true, help = LINK_TO_MEASURE)]
    pub address: Option<Address>,
    /// Starts a pair of emulated bridges of this family, and its own peer at the other end, and measures over them:
    /// intel-spr, intel-icx, intel-gnr, intel-skx, amd, epf
    #[arg(long, value_name = "FAMILY", value_parser = family, allow_hyphen_values = true, conflicts_with = "address")]
    pub emulate: Option<&'static str>,
    /// How lines are stored on links over bridges: wc (streaming stores to a write-combining mapping), movdir64b (direct
    /// stores of 64 bytes), uc8 (stores of 8 bytes to an uncached mapping) [default: the fastest to be had; with
    /// --emulate wc]
    #[arg(long, value_name = "HOW", value_parser = engine, allow_hyphen_values = true)]
    pub engine: Option<Engine>,
    /// Where messages come from, when a GPU is at either end: host, or gpu:N for the GPU of that number. Without an address the
    /// other end is this machine's own
    #[arg(long, value_name = "END", value_parser = end, allow_hyphen_values = true, conflicts_with = "emulate")]
    pub from: Option<End>,
    /// Where they go: host or gpu:N
    #[arg(long, value_name = "END", value_parser = end, allow_hyphen_values = true, conflicts_with = "emulate")]
    pub to: Option<End>,
    /// Messages to send [default: 100000, with --oneway 1000000; without limit when --duration is given]
    #[arg(short = 'n', long, value_name = "N", value_parser = count, allow_hyphen_values = true)]
    pub count: Option<u64>,
    /// Bytes in a message
    #[arg(short, long, value_name = "BYTES", value_parser = size, allow_hyphen_values = true,
        default_value_t = DEFAULT_SIZE)]
    pub size: u64,
    /// Messages a second, on a schedule that does not slip; latency counts from the planned time. Without it the next
    /// message follows the reply at once
    #[arg(short, long, value_name = "HZ", value_parser = rate, allow_hyphen_values = true)]
    pub rate: Option<f64>,
    /// How long to measure, such as 10, 500ms, 2s, 5m [default: 10s when only --rate is given]
    #[arg(short, long, value_name = "TIME", value_parser = duration, allow_hyphen_values = true)]
    pub duration: Option<Duration>,
    /// Messages before counting starts, cut short after a second
    #[arg(short, long, value_name = "N", value_parser = warmup, allow_hyphen_values = true,
        default_value_t = DEFAULT_WARMUP)]
    pub warmup: u64,
    /// Sends a stream one way and has the far end count it
    #[arg(long)]
    pub oneway: bool,
    /// Processor to run on, and after a comma the far end's [default: two that are near each other]
    #[arg(short, long, value_name = "A[,B]", value_parser = cpu_pair, allow_hyphen_values = true)]
    pub cpu: Option<(u32, Option<u32>)>,
    /// What a waiting end does: spin (never gives its processor away), yield (spins, then yields between polls), sleep
    /// (spins, then sleeps until rung)
    #[arg(long, value_name = "HOW", value_parser = waiting, allow_hyphen_values = true, default_value = "yield")]
    pub wait: Waiting,
    /// How long to wait for the peer, to appear or to return
    #[arg(short, long, value_name = "TIME", value_parser = timeout, allow_hyphen_values = true, default_value = "90s")]
    pub timeout: Duration,
    /// Prints one JSON object and nothing else
    #[arg(short, long)]
    pub json: bool,
    /// Writes the histogram as an HdrHistogram log
    #[arg(long, value_name = "FILE", value_parser = file, allow_hyphen_values = true)]
    pub histogram: Option<PathBuf>,
    /// Measures every link that can be had on this machine side by side, from a bare line to a bare echo over TCP
    #[arg(long, conflicts_with_all = ["address", "emulate", "rate", "duration", "oneway", "histogram"])]
    pub baseline: bool,
    /// How the link is opened.
    #[command(flatten)]
    pub link: LinkArgs,
}

/// Options of `ntb-ping serve`.
#[derive(Args, Clone, Debug)]
pub struct ServeArgs {
    /// Link to answer on.
    #[arg(value_parser = address, allow_hyphen_values = true, help = LINK_TO_ANSWER_ON)]
    pub address: Address,
    /// How lines are stored on links over bridges: wc, movdir64b, uc8 [default: the fastest to be had]
    #[arg(long, value_name = "HOW", value_parser = engine, allow_hyphen_values = true)]
    pub engine: Option<Engine>,
    /// Processor to run on
    #[arg(short, long, value_name = "A", value_parser = cpu_one, allow_hyphen_values = true)]
    pub cpu: Option<(u32, Option<u32>)>,
    /// What it does while it waits for the next message of a measurement: spin, yield or sleep. Between measurements
    /// it sleeps
    #[arg(long, value_name = "HOW", value_parser = waiting, allow_hyphen_values = true, default_value = "yield")]
    pub wait: Waiting,
    /// Prints no events
    #[arg(short, long)]
    pub quiet: bool,
    /// How the link is opened.
    #[command(flatten)]
    pub link: LinkArgs,
    /// Ends when this process ends; for ntb-ping itself.
    #[arg(long, hide = true, value_name = "PID", value_parser = pid)]
    pub parent: Option<u64>,
}

/// Options of the far end of the floor.
#[derive(Args, Clone, Debug)]
pub struct FloorPeerArgs {
    /// Process whose end ends it.
    #[arg(long, value_name = "PID", value_parser = pid)]
    pub parent: u64,
    /// Processor to run on.
    #[arg(long, value_name = "A", value_parser = cpu_one)]
    pub cpu: Option<(u32, Option<u32>)>,
}

const LINK_TO_MEASURE: &str =
    "Link to measure: soft:NAME, ntb:BUS:DEV.FN, emu:PATH, rdma:HOST:PORT, tcp:HOST:PORT, auto[:HOST:PORT]";
const LINK_TO_ANSWER_ON: &str =
    "Link to answer on: soft:NAME, ntb:BUS:DEV.FN, emu:PATH, rdma:HOST:PORT, tcp:HOST:PORT, auto[:HOST:PORT]";
const COUNT: &str = "1 to 1000000000000 messages";
const SIZE: &str = "1 to 8388608 bytes";
const RATE: &str = "0.001 to 100000000 messages a second";
const DURATION: &str = "1ms to 30 days (720h), in seconds or with ns, us, ms, s, m, h";
const WARMUP: &str = "0 to 1000000000 messages";
const CPU: &str = "A or A,B, each 0 to 1023";
const CPU_ONE: &str = "0 to 1023";
const WAIT: &str = "spin, yield, sleep";
const TIMEOUT: &str = "1ms to 24h, in seconds or with ns, us, ms, s, m, h";
const FAMILY: &str = "intel-spr, intel-icx, intel-gnr, intel-skx, amd, epf";
const ENGINE: &str = "wc, movdir64b, uc8";
const END: &str = "host, gpu:0 to gpu:255";
const FILE: &str = "the path of a file that can be written";
const SECRET: &str = "1 to 1024 bytes";
const BUSY_POLL: &str = "1us to 1s, in seconds or with ns, us, ms, s, m, h";
const PID: &str = "1 to 4194304";

/// Ranges, for messages about values that are missing altogether.
pub const RANGES: Ranges = &[
    ("--emulate", FAMILY),
    ("--engine", ENGINE),
    ("--from", END),
    ("--to", END),
    ("--count", COUNT),
    ("--size", SIZE),
    ("--rate", RATE),
    ("--duration", DURATION),
    ("--warmup", WARMUP),
    ("--cpu", CPU),
    ("--wait", WAIT),
    ("--timeout", TIMEOUT),
    ("--histogram", FILE),
    ("--pause", super::linux::PAUSE),
    ("--bytes", super::linux::BYTES),
    ("--window", super::linux::WINDOW),
    ("--hold", super::linux::HOLD),
    ("--interval", super::linux::PAUSE),
    ("--frame", super::linux::FRAME),
    ("--clients", super::linux::CLIENTS),
    ("--queue", super::linux::QUEUE),
    ("--secret", SECRET),
    ("--secret-file", FILE),
    ("--busy-poll", BUSY_POLL),
];

fn address(text: &str) -> Result<Address, String> {
    text.parse::<Address>()
        .map_err(|e| format!("is no link address: {}; allowed: {ADDRESS}", e.why))
}

const ADDRESS: &str =
    "soft:NAME, ntb:BUS:DEV.FN, emu:PATH, rdma:HOST:PORT, tcp:HOST:PORT, auto[:HOST:PORT], and serve";

fn count(text: &str) -> Result<u64, String> {
    values::whole(text, &(1..=1_000_000_000_000), COUNT)
}

fn size(text: &str) -> Result<u64, String> {
    values::whole(text, &(1..=LARGEST_SIZE), SIZE)
}

fn rate(text: &str) -> Result<f64, String> {
    values::real(text, &(0.001..=1e8), RATE)
}

fn duration(text: &str) -> Result<Duration, String> {
    const MONTH: Duration = Duration::from_secs(30 * 24 * 3600);
    values::time(text, &(Duration::from_millis(1)..=MONTH), DURATION)
}

fn warmup(text: &str) -> Result<u64, String> {
    values::whole(text, &(0..=1_000_000_000), WARMUP)
}

fn cpu_pair(text: &str) -> Result<(u32, Option<u32>), String> {
    values::cpus(text, 2, CPU)
}

fn cpu_one(text: &str) -> Result<(u32, Option<u32>), String> {
    values::cpus(text, 1, CPU_ONE)
}

fn waiting(text: &str) -> Result<Waiting, String> {
    let words = [Waiting::Spin, Waiting::Yield, Waiting::Sleep].map(|w| (w.name(), w));
    values::word(text, &words, WAIT)
}

fn family(text: &str) -> Result<&'static str, String> {
    let words = ntb_emu::model::FAMILIES.map(|f| (f.name(), f.name()));
    values::word(text, &words, FAMILY)
}

fn engine(text: &str) -> Result<Engine, String> {
    let words = [Engine::Wc, Engine::Movdir64b, Engine::Uc8].map(|e| (e.name(), e));
    values::word(text, &words, ENGINE)
}

fn end(text: &str) -> Result<End, String> {
    if text == "host" {
        return Ok(End::Host);
    }
    let number = text.strip_prefix("gpu:").and_then(|n| n.parse::<u8>().ok());
    number
        .map(|n| End::Gpu(n.into()))
        .ok_or_else(|| format!("is no end; allowed: {END}"))
}

fn timeout(text: &str) -> Result<Duration, String> {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    values::time(text, &(Duration::from_millis(1)..=DAY), TIMEOUT)
}

fn file(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() {
        return Err(format!("is empty; allowed: {FILE}"));
    }
    Ok(PathBuf::from(text))
}

#[allow(clippy::unnecessary_wraps, reason = "as the parser wants it")]
fn secret(text: &str) -> Result<SecretText, String> {
    Ok(SecretText(text.to_owned()))
}

fn busy_poll(text: &str) -> Result<Duration, String> {
    values::time(
        text,
        &(Duration::from_micros(1)..=Duration::from_secs(1)),
        BUSY_POLL,
    )
}

fn pid(text: &str) -> Result<u64, String> {
    values::whole(text, &(1..=4_194_304), PID)
}
