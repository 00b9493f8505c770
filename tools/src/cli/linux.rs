//! The command line of `ntb-ping linux`.

use std::{net::Ipv4Addr, time::Duration};

use clap::{Args, Subcommand};
use ntb::address::PortAddress;

use super::values;

/// What to do with which client of the kernel.
#[derive(Debug, Subcommand)]
pub enum Linux {
    /// Plays with ntb_pingpong: counts rings of doorbells.
    Pingpong(PingpongArgs),
    /// Greets ntb_perf and writes into its memory window; then shows what it wrote here.
    Perf(PerfArgs),
    /// Measures round trips through a queue pair of ntb_transport: with --from and --to pings of ntb_netdev's interface,
    /// otherwise frames that 'ntb-ping linux echo' sends back.
    Ping(PingArgs),
    /// Answers through a queue pair of ntb_transport until it is interrupted: sends every frame back, or with --ip is a
    /// host that ntb_netdev's side can ping.
    Echo(EchoArgs),
    /// Joins ntb_netdev's interface with a TAP device of this machine until it is interrupted. Give the device an address
    /// and bring it up with the machine's own tools.
    Tap(TapArgs),
}

/// The port, and how it is opened.
#[derive(Args, Clone, Debug)]
pub struct PortArgs {
    /// Port of this side: ntb:BUS:DEV.FN, emu:PATH, emu:@NAME
    #[arg(value_name = "ADDRESS", value_parser = address)]
    pub address: PortAddress,
    /// How long to wait for the peer, to appear or to return
    #[arg(short, long, value_name = "TIME", value_parser = timeout, allow_hyphen_values = true, default_value = "90s")]
    pub timeout: Duration,
    /// Largest part of a memory window that is used, such as 4MiB: max_mw_size of the kernel's modules [default: 256MiB]
    #[arg(long, value_name = "BYTES", value_parser = window, allow_hyphen_values = true)]
    pub window: Option<u64>,
}

/// Options of everything that goes through a queue pair.
#[derive(Args, Clone, Debug)]
pub struct QueueArgs {
    /// The port.
    #[command(flatten)]
    pub port: PortArgs,
    /// Queue pair; the kernel's ntb_netdev has 0
    #[arg(long, value_name = "N", value_parser = queue, allow_hyphen_values = true, default_value = "0")]
    pub queue: u64,
    /// Largest frame, the same at both ends: transport_mtu of ntb_transport
    #[arg(long, value_name = "BYTES", value_parser = frame, allow_hyphen_values = true, default_value = "64KiB")]
    pub frame: u64,
    /// Queue pairs at most, the same at both ends: max_num_clients of ntb_transport, 0 for as many as windows
    #[arg(long, value_name = "N", value_parser = clients, allow_hyphen_values = true, default_value = "0")]
    pub clients: u64,
}

/// Options of `ntb-ping linux pingpong`.
#[derive(Args, Clone, Debug)]
pub struct PingpongArgs {
    /// The port.
    #[command(flatten)]
    pub port: PortArgs,
    /// Rings to hear
    #[arg(short = 'n', long, value_name = "N", value_parser = count, allow_hyphen_values = true, default_value = "10")]
    pub count: u64,
    /// Time between hearing and ringing: delay_ms of ntb_pingpong
    #[arg(long, value_name = "TIME", value_parser = pause, allow_hyphen_values = true, default_value = "20ms")]
    pub pause: Duration,
    /// Prints one JSON object and nothing else
    #[arg(short, long)]
    pub json: bool,
}

/// Options of `ntb-ping linux perf`.
#[derive(Args, Clone, Debug)]
pub struct PerfArgs {
    /// The port.
    #[command(flatten)]
    pub port: PortArgs,
    /// Bytes to write, lap after lap of the peer's memory
    #[arg(long, value_name = "BYTES", value_parser = bytes, allow_hyphen_values = true, default_value = "16MiB")]
    pub bytes: u64,
    /// How long to stay after that, for the peer to write; ends at once when all of the memory here was written, and a
    /// peer that writes more laps than one finds the link down then
    #[arg(long, value_name = "TIME", value_parser = hold, allow_hyphen_values = true, default_value = "0")]
    pub hold: Duration,
    /// Prints one JSON object and nothing else
    #[arg(short, long)]
    pub json: bool,
}

/// Options of `ntb-ping linux ping`.
#[derive(Args, Clone, Debug)]
pub struct PingArgs {
    /// The queue pair.
    #[command(flatten)]
    pub queue: QueueArgs,
    /// Own address in ntb_netdev's network
    #[arg(long, value_name = "IPV4", requires = "to")]
    pub from: Option<Ipv4Addr>,
    /// Address to ping: that of ntb_netdev's interface
    #[arg(long, value_name = "IPV4", requires = "from")]
    pub to: Option<Ipv4Addr>,
    /// Round trips
    #[arg(short = 'n', long, value_name = "N", value_parser = count, allow_hyphen_values = true, default_value = "100")]
    pub count: u64,
    /// Bytes of data in each
    #[arg(short, long, value_name = "BYTES", value_parser = size, allow_hyphen_values = true, default_value = "48")]
    pub size: u64,
    /// Time between two of them
    #[arg(short, long, value_name = "TIME", value_parser = pause, allow_hyphen_values = true, default_value = "0")]
    pub interval: Duration,
    /// Prints one JSON object and nothing else
    #[arg(short, long)]
    pub json: bool,
}

/// Options of `ntb-ping linux echo`.
#[derive(Args, Clone, Debug)]
pub struct EchoArgs {
    /// The queue pair.
    #[command(flatten)]
    pub queue: QueueArgs,
    /// Address to answer as, to pings and to questions for it
    #[arg(long, value_name = "IPV4")]
    pub ip: Option<Ipv4Addr>,
}

/// Options of `ntb-ping linux tap`.
#[derive(Args, Clone, Debug)]
pub struct TapArgs {
    /// The queue pair.
    #[command(flatten)]
    pub queue: QueueArgs,
    /// Name of the device
    #[arg(long, value_name = "NAME", default_value = "ntb0")]
    pub name: String,
}

/// Ranges, for messages.
pub const PAUSE: &str = "0 to 1h, in seconds or with ns, us, ms, s, m, h";
/// Bytes to write.
pub const BYTES: &str = "64 to 1TiB, in bytes or with KiB, MiB, GiB, TiB";
/// Part of a window.
pub const WINDOW: &str = "4096 to 1TiB, in bytes or with KiB, MiB, GiB, TiB";
/// Staying.
pub const HOLD: &str = "0 to 24h, in seconds or with ns, us, ms, s, m, h";
/// Largest frame.
pub const FRAME: &str = "64 to 1MiB, in bytes or with KiB, MiB";
/// Queue pairs.
pub const CLIENTS: &str = "0 to 32";
/// Number of a queue pair.
pub const QUEUE: &str = "0 to 31";
const COUNT: &str = "1 to 1000000000";
const SIZE: &str = "16 to 65000 bytes";
const TIMEOUT: &str = "1ms to 24h, in seconds or with ns, us, ms, s, m, h";
const HOUR: Duration = Duration::from_secs(3600);

fn address(text: &str) -> Result<PortAddress, String> {
    text.parse::<PortAddress>().map_err(|e| e.to_string())
}

fn count(text: &str) -> Result<u64, String> {
    values::whole(text, &(1..=1_000_000_000), COUNT)
}

fn size(text: &str) -> Result<u64, String> {
    values::whole(text, &(16..=65_000), SIZE)
}

fn queue(text: &str) -> Result<u64, String> {
    values::whole(text, &(0..=31), QUEUE)
}

fn clients(text: &str) -> Result<u64, String> {
    values::whole(text, &(0..=32), CLIENTS)
}

fn frame(text: &str) -> Result<u64, String> {
    values::bytes(text, &(64..=1 << 20), FRAME)
}

fn bytes(text: &str) -> Result<u64, String> {
    values::bytes(text, &(64..=1 << 40), BYTES)
}

fn window(text: &str) -> Result<u64, String> {
    values::bytes(text, &(4096..=1 << 40), WINDOW)
}

fn pause(text: &str) -> Result<Duration, String> {
    values::time(text, &(Duration::ZERO..=HOUR), PAUSE)
}

fn hold(text: &str) -> Result<Duration, String> {
    values::time(text, &(Duration::ZERO..=24 * HOUR), HOLD)
}

fn timeout(text: &str) -> Result<Duration, String> {
    values::time(text, &(Duration::from_millis(1)..=24 * HOUR), TIMEOUT)
}
