//! A peer that writes random bytes over all memory it can reach and into the socket. The victim is one process through all
//! rounds: it must neither fall nor deliver anything that was not sent, and after each attack an honest peer must find
//! it at work.

use std::{
    process::{Child, Command, ExitCode, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use ntb_mem::{line::Line, region::View};
use ntb_ring::{
    channel::{Connection, Options, Receiver, RecvFailure, SendFailure, Sender},
    link::{
        Doorbell, Link, LinkError, LinkFacts, LinkState, LinkStatus, Pump, Registers,
        auth::{SECRET_ENV, Secret},
        engine::{Engine, Order, StoreEngine},
        select,
    },
    session::ChannelSpec,
};

use crate::{
    Report, Rng,
    leftovers::Leftovers,
    strangers,
    traffic::{self, Checker},
    venue::{self, Venue},
};

const RING_LINES: u64 = 256;
/// Every message carries a check: without one, a peer that alters its own message before it is read has sent another
/// message, and nobody could tell.
fn spec() -> ChannelSpec {
    ChannelSpec {
        ring_lines: RING_LINES,
        check: true,
        ..ChannelSpec::default()
    }
}

const WATCHDOG: Duration = Duration::from_secs(20);
/// The window is small, so that random stores often hit what matters.
const WINDOW_BYTES: u64 = 1 << 20;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Seed of all choices.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Attacks.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    rounds: u64,
    /// Transport under test.
    #[arg(long, default_value = "soft", value_parser = ["soft", "emu", "tcp", "rdma"])]
    link: String,
    /// Accepted for symmetry: the result is always one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
pub(crate) struct VictimArgs {
    address: String,
}

/// The ways to attack.
const ATTACKS: [&str; 5] = [
    "socket-bytes",
    "socket-flood",
    "before-greeting",
    "in-session",
    "aimed",
];

pub(crate) fn run(args: &Args) -> Result<Report, String> {
    let mut before = Leftovers::list();
    let mut report = Report::new("hostile", args.seed);
    report.set("link", args.link.clone());
    report.set("rounds", args.rounds);
    let mut counts = [0u64; ATTACKS.len()];
    let mut stores = 0;
    let mut honest = 0;
    {
        let mut rng = Rng::new(args.seed);
        let venue = Venue::new(&args.link, &mut rng)?;
        if let Some(family) = venue.family() {
            report.set("family", family);
        }
        let mut victim = Victim::start(&venue)?;
        meet(&venue, &mut rng)?;
        if args.link == "rdma" {
            before.count_descriptors(); // RDMA's libraries keep some from their first use on
        }
        let descriptors = victim.descriptors();
        for round in 0..args.rounds {
            let kind = (round % ATTACKS.len() as u64) as usize;
            counts[kind] += 1;
            let attacked = match kind {
                0 | 1 if venue.meeting().is_some() => beside(&venue, &mut rng, kind == 1),
                0 => socket_bytes(&venue, &mut rng),
                1 => socket_flood(&venue, &mut rng),
                2 => scribble(&venue, &mut rng, false, false),
                3 => scribble(&venue, &mut rng, true, false),
                _ => scribble(&venue, &mut rng, true, true),
            };
            match attacked {
                Ok(n) => stores += n,
                Err(e) => report.violation(format!(
                    "round {round} ({}): the attack failed: {e}",
                    ATTACKS[kind]
                )),
            }
            if let Err(e) = victim.check_alive() {
                report.violation(format!("round {round} ({}): {e}", ATTACKS[kind]));
                break;
            }
            match meet(&venue, &mut rng) {
                Ok(n) => honest += n,
                Err(e) => {
                    report.violation(format!(
                        "round {round} ({}): the honest peer after it: {e}",
                        ATTACKS[kind]
                    ));
                    break;
                }
            }
        }
        let start = Instant::now();
        while victim.descriptors() > descriptors + 2 && start.elapsed() < Duration::from_secs(3) {
            std::thread::sleep(Duration::from_millis(20));
        }
        if victim.descriptors() > descriptors + 2 {
            report.violation(format!(
                "the victim's descriptors have grown beyond {descriptors}"
            ));
        }
        if let Err(e) = victim.check_alive() {
            report.violation(e);
        }
    }
    let by_kind: serde_json::Map<_, _> = ATTACKS
        .iter()
        .zip(counts)
        .map(|(name, n)| ((*name).to_owned(), n.into()))
        .collect();
    report.set("attacks", by_kind);
    report.set("hostile_stores", stores);
    report.set("honest_messages", honest);
    for left in Leftovers::list().new_since(&before) {
        report.violation(left);
    }
    Ok(report)
}

/// Strangers without the secret, while an honest peer's stream is under way: it must lose nothing.
fn beside(venue: &Venue, rng: &mut Rng, flood: bool) -> Result<u64, String> {
    let meeting = venue.meeting().ok_or("nobody meets at a port here")?;
    let secret = Secret::new(venue.secret().unwrap_or_default().as_bytes()).map_err(|e| e.to_string())?;
    let connection =
        Connection::open(venue.open(1, WINDOW_BYTES)?, &Options::default()).map_err(|e| e.to_string())?;
    let ends = connection.channel("traffic", spec()).map_err(|e| e.to_string())?;
    let mut traffic = Traffic::new(ends, rng.next());
    let start = Instant::now();
    let more = |traffic: &mut Traffic, messages: u64| {
        let (sent, received) = (traffic.number + messages, traffic.checker.received + messages);
        while traffic.checker.received < received || traffic.number < sent {
            traffic.step()?;
            if start.elapsed() > WATCHDOG {
                return Err("the stream beside the strangers has stopped".to_owned());
            }
        }
        Ok(())
    };
    more(&mut traffic, 200)?;
    let done = AtomicBool::new(false);
    let strangers = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let told = if flood {
                Ok(strangers::flood(meeting.0, rng))
            } else {
                strangers::call(meeting, &secret, rng)
            };
            done.store(true, Ordering::Release);
            told
        });
        while !done.load(Ordering::Acquire) {
            more(&mut traffic, 10)?;
        }
        thread.join().map_err(|_| "the stranger panicked".to_owned())?
    })?;
    more(&mut traffic, 200)?;
    let stats = connection.stats();
    if traffic.losses > 0 || stats.losses > 0 || stats.incarnations != 1 {
        return Err(format!(
            "the stream beside the strangers was lost: {} losses, {} of the link",
            traffic.losses, stats.losses
        ));
    }
    Ok(strangers)
}

/// Speaks no greeting, or half of one, or too much.
fn socket_bytes(venue: &Venue, rng: &mut Rng) -> Result<u64, String> {
    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};
    let mut sent = 0;
    for _ in 0..1 + rng.below(8) {
        let kind = match (venue.socket_kind(), rng.below(8)) {
            (SocketType::SEQPACKET, 0) => SocketType::STREAM, // not what is spoken there
            (kind, _) => kind,
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).map_err(|e| e.to_string())?;
        let socket_name = venue.socket(rng.below(2) as usize);
        let address = rustix::net::SocketAddrUnix::new_abstract_name(socket_name.as_bytes())
            .map_err(|e| e.to_string())?;
        if rustix::net::connect(&socket, &address).is_err() {
            continue; // a full backlog, or another kind of socket
        }
        for _ in 0..rng.below(4) {
            let bytes: Vec<u8> = (0..rng.below(600)).map(|_| rng.next() as u8).collect();
            sent += u64::from(rustix::net::send(&socket, &bytes, SendFlags::NOSIGNAL).is_ok());
        }
        std::thread::sleep(Duration::from_micros(rng.below(3000)));
    }
    Ok(sent)
}

/// Opens many connections at once and says nothing.
fn socket_flood(venue: &Venue, rng: &mut Rng) -> Result<u64, String> {
    use rustix::net::{AddressFamily, SocketFlags};
    let kind = venue.socket_kind();
    let address = rustix::net::SocketAddrUnix::new_abstract_name(venue.socket(1).as_bytes())
        .map_err(|e| e.to_string())?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let mut held = Vec::new();
    for _ in 0..100 {
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).map_err(|e| e.to_string())?;
        if rustix::net::connect(&socket, &address).is_ok() {
            held.push(socket);
        }
    }
    std::thread::sleep(Duration::from_micros(rng.below(20_000)));
    Ok(0)
}

/// Connects as a peer would and stores random lines everywhere: over the whole window, or aimed at the pages that are in
/// use; before any session, or in the middle of one.
fn scribble(venue: &Venue, rng: &mut Rng, in_session: bool, aimed: bool) -> Result<u64, String> {
    let (link, tap) = Tap::open(venue)?;
    let mut lines = 0;
    if in_session {
        let connection = Connection::open(Box::new(link), &Options::default()).map_err(|e| e.to_string())?;
        let (mut tx, mut rx) = connection.channel("traffic", spec()).map_err(|e| e.to_string())?;
        tx.wait_connected(WATCHDOG).map_err(|e| e.to_string())?;
        let source = rng.next();
        let mut buf = vec![0; 8192];
        for number in 0..rng.below(500) {
            let mut message = vec![0; traffic::length(source, number, 4000)];
            traffic::fill(&mut message, source, number);
            if tx.send(&message, Duration::from_millis(100)).is_err() {
                break;
            }
            let _ = rx.try_recv(&mut buf);
        }
        lines += tap.scribble(rng, aimed)?;
        std::thread::sleep(Duration::from_millis(rng.below(30)));
        lines += tap.scribble(rng, aimed)?;
    } else {
        let mut link = link;
        let start = Instant::now();
        while link.poll().map_err(|e| e.to_string())?.state != LinkState::WindowsSet {
            if start.elapsed() > WATCHDOG {
                return Err("the victim does not answer the soft link's greeting".to_owned());
            }
            link.wait(Duration::from_millis(1));
        }
        for _ in 0..3 {
            lines += tap.scribble(rng, aimed)?;
            link.write_registers(&std::array::from_fn(|_| rng.next() as u32));
            for _ in 0..4 {
                link.ring(rng.below(20) as u32);
            }
            std::thread::sleep(Duration::from_millis(rng.below(5)));
        }
    }
    Ok(lines)
}

/// A link that lends an engine onto the peer's memory to the attacker.
#[derive(Debug)]
struct Tap {
    inner: Box<dyn Link>,
    engine: Arc<Mutex<Option<Engine>>>,
}

struct Needle(Arc<Mutex<Option<Engine>>>);

impl Tap {
    fn open(venue: &Venue) -> Result<(Self, Needle), String> {
        let inner = venue.open(1, WINDOW_BYTES)?;
        let engine = Arc::new(Mutex::new(None));
        Ok((
            Self {
                inner,
                engine: Arc::clone(&engine),
            },
            Needle(engine),
        ))
    }
}

impl Needle {
    fn scribble(&self, rng: &mut Rng, aimed: bool) -> Result<u64, String> {
        let mut guard = self.0.lock().map_err(|e| e.to_string())?;
        let Some(engine) = guard.as_mut() else {
            return Ok(0);
        };
        let lines = engine.lines();
        // The session's pages and the first channel, or all there is.
        let reach = if aimed {
            lines.min(256 + 64 + RING_LINES)
        } else {
            lines
        };
        let n = if aimed { 2000 } else { 20_000 };
        for _ in 0..n {
            let at = rng.below(reach);
            let content = match rng.below(8) {
                0 => Line([u64::MAX; 8]),
                1 => Line::ZERO,
                // Small numbers: lengths and counts that may look sound.
                2 => Line(std::array::from_fn(|_| rng.below(1 << 10))),
                _ => Line(std::array::from_fn(|_| rng.next())),
            };
            engine.put(at, &content);
        }
        engine.flush();
        Ok(n)
    }
}

impl Link for Tap {
    fn facts(&self) -> LinkFacts {
        self.inner.facts()
    }
    fn order(&self) -> Order {
        self.inner.order()
    }
    fn poll(&mut self) -> Result<LinkStatus, LinkError> {
        let status = self.inner.poll()?;
        if status.state == LinkState::WindowsSet
            && let Ok(mut engine) = self.engine.lock()
            && engine.is_none()
        {
            *engine = self.inner.outbound();
        }
        Ok(status)
    }
    fn wait(&self, timeout: Duration) {
        self.inner.wait(timeout);
    }
    fn registers(&self) -> Registers {
        self.inner.registers()
    }
    fn write_registers(&mut self, registers: &Registers) {
        self.inner.write_registers(registers);
    }
    fn inbound(&self) -> View {
        self.inner.inbound()
    }
    fn outbound(&self) -> Option<Engine> {
        self.inner.outbound()
    }
    fn ring(&mut self, doorbell: u32) {
        self.inner.ring(doorbell);
    }
    fn doorbell(&self, number: u32) -> Doorbell {
        self.inner.doorbell(number)
    }
    fn pump(&self) -> Option<Arc<dyn Pump>> {
        self.inner.pump()
    }
}

/// An honest peer: exchanges messages with the victim, both ways, and checks them.
fn meet(venue: &Venue, rng: &mut Rng) -> Result<u64, String> {
    let link = venue.open(1, WINDOW_BYTES)?;
    let connection = Connection::open(link, &Options::default()).map_err(|e| e.to_string())?;
    let ends = connection.channel("traffic", spec()).map_err(|e| e.to_string())?;
    let mut traffic = Traffic::new(ends, rng.next());
    let start = Instant::now();
    while traffic.checker.received < 200 || traffic.number < 200 {
        traffic.step()?;
        if start.elapsed() > WATCHDOG {
            let state = connection.state().name();
            return Err(format!(
                "no traffic within {} s: {} sent, {} received, state {state}",
                WATCHDOG.as_secs(),
                traffic.number,
                traffic.checker.received
            ));
        }
    }
    Ok(traffic.checker.received)
}

/// Two-way traffic of one side.
struct Traffic {
    tx: Sender,
    rx: Receiver,
    source: u64,
    number: u64,
    checker: Checker,
    losses: u64,
    buf: Vec<u8>,
    message: Vec<u8>,
}

impl Traffic {
    fn new((tx, rx): (Sender, Receiver), source: u64) -> Self {
        let mut checker = Checker::default();
        checker.life_ended();
        Self {
            tx,
            rx,
            source,
            number: 0,
            checker,
            losses: 0,
            buf: vec![0; 1 << 16],
            message: Vec::new(),
        }
    }

    /// Sends and receives what can be; true when something moved.
    fn step(&mut self) -> Result<bool, String> {
        let mut moved = false;
        self.message
            .resize(traffic::length(self.source, self.number, 4000), 0);
        traffic::fill(&mut self.message, self.source, self.number);
        match self.tx.try_send(&self.message) {
            Ok(_) => {
                self.number += 1;
                moved = true;
            }
            Err(SendFailure::Full { .. } | SendFailure::NotConnected(_) | SendFailure::Lost(_)) => {}
            Err(e) => return Err(format!("sending: {e}")),
        }
        match self.rx.try_recv(&mut self.buf) {
            Ok(got) => {
                self.checker.check(&self.buf[..got.len])?;
                moved = true;
            }
            Err(RecvFailure::Empty | RecvFailure::NotConnected(_)) => {}
            Err(RecvFailure::Lost(_)) => {
                self.losses += 1;
                self.checker.life_ended();
            }
            Err(e) => return Err(format!("receiving: {e}")),
        }
        if !moved {
            std::thread::yield_now();
        }
        Ok(moved)
    }
}

/// The process under attack, from the outside.
struct Victim(Option<Child>);

impl Victim {
    fn start(venue: &Venue) -> Result<Self, String> {
        let exe = std::env::current_exe().map_err(|e| e.to_string())?;
        let child = Command::new(exe)
            .args(["hostile-victim", venue.address(0)])
            .envs(venue.secret().map(|secret| (SECRET_ENV, secret)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| format!("the victim could not be started: {e}"))?;
        Ok(Self(Some(child)))
    }

    fn check_alive(&mut self) -> Result<(), String> {
        let Some(child) = &mut self.0 else {
            return Err("the victim is gone".to_owned());
        };
        match child.try_wait().map_err(|e| e.to_string())? {
            None => Ok(()),
            Some(status) => {
                let mut said = String::new();
                if let Some(mut stderr) = child.stderr.take() {
                    let _ = std::io::Read::read_to_string(&mut stderr, &mut said);
                }
                self.0 = None;
                Err(format!("the victim fell ({status}): {}", said.trim()))
            }
        }
    }

    fn descriptors(&self) -> usize {
        let Some(child) = &self.0 else { return 0 };
        std::fs::read_dir(format!("/proc/{}/fd", child.id())).map_or(0, Iterator::count)
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The process under attack.
pub(crate) fn victim(args: &VictimArgs) -> ExitCode {
    match serve(&args.address) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::from(1)
        }
    }
}

fn serve(address: &str) -> Result<(), String> {
    let address = address.parse().map_err(|e| format!("{e}"))?;
    let options = select::LinkOptions {
        window_bytes: WINDOW_BYTES,
        ..venue::options()?
    };
    let opened = select::open(&address, &options).map_err(|e| e.to_string())?;
    let connection = Connection::open(opened.link, &Options::default()).map_err(|e| e.to_string())?;
    let ends = connection.channel("traffic", spec()).map_err(|e| e.to_string())?;
    let mut traffic = Traffic::new(ends, u64::from(std::process::id()));
    loop {
        traffic.step()?;
        while connection.next_event(Duration::ZERO).is_some() {}
    }
}
