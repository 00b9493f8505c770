//! SIGKILL of either side at random instants under full two-way traffic, restart, in either order.

use std::{
    os::fd::{AsRawFd, OwnedFd},
    process::{Child, Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use ntb_ring::{
    channel::{Connection, Options, Receiver, RecvFailure, SendFailure, Sender, Wait},
    link::{Wrapped, auth::SECRET_ENV, select},
    session::ChannelSpec,
    wire::layout::CHANNELS_FIRST_LINE,
};

use crate::{
    Report, Rng,
    leftovers::Leftovers,
    phase::{Board, PHASES, Phase, Probe},
    traffic::{self, Checker, HEADER},
    venue::{self, Venue},
};

/// Lines of each ring: small, so that full rings and credits are frequent.
const RING_LINES: u64 = 128;
/// Longest that one step of a round may take before it counts as stuck.
const STUCK: Duration = Duration::from_secs(60);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Seed of all choices.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Kills.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    rounds: u64,
    /// Transport under test.
    #[arg(long, default_value = "soft", value_parser = ["soft", "emu", "tcp", "rdma"])]
    link: String,
    /// Accepted for symmetry: the result is always one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
pub(crate) struct SideArgs {
    address: String,
    board: i32,
    seed: u64,
    /// Prints the events of the link on standard error.
    #[arg(long)]
    events: bool,
}

/// One of the two processes, from the outside.
pub(crate) struct Side {
    board: Board,
    inherited: OwnedFd,
    child: Option<Child>,
    address: String,
    secret: Option<String>,
    starts: u64,
    seed: u64,
    /// Whether its words and events go to this process's standard error.
    loud: bool,
}

impl Side {
    pub(crate) fn new(address: &str, seed: u64) -> Result<Self, String> {
        let board = Board::new().map_err(|e| e.to_string())?;
        let inherited = board.inheritable().map_err(|e| e.to_string())?;
        Ok(Self {
            board,
            inherited,
            child: None,
            address: address.to_owned(),
            secret: None,
            starts: 0,
            seed,
            loud: false,
        })
    }

    /// Lets what it says be seen, events included.
    pub(crate) fn loud(mut self) -> Self {
        self.loud = true;
        self
    }

    /// Gives it the venue's secret.
    fn with_secret(mut self, venue: &Venue) -> Self {
        self.secret = venue.secret().map(str::to_owned);
        self
    }

    pub(crate) fn start(&mut self) -> Result<(), String> {
        self.board.reset();
        self.starts += 1;
        let exe = std::env::current_exe().map_err(|e| e.to_string())?;
        let child = Command::new(exe)
            .arg("kill-side")
            .arg(&self.address)
            .arg(self.inherited.as_raw_fd().to_string())
            .arg(self.seed.wrapping_add(self.starts).to_string())
            .args(self.loud.then_some("--events"))
            .envs(self.secret.iter().map(|secret| (SECRET_ENV, secret)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(if self.loud {
                Stdio::inherit()
            } else {
                Stdio::piped()
            })
            .spawn()
            .map_err(|e| format!("a side could not be started: {e}"))?;
        self.child = Some(child);
        Ok(())
    }

    /// Kills it and says in which phase it died.
    fn kill(&mut self) -> Result<u64, String> {
        let mut child = self.child.take().ok_or("no process to kill")?;
        child.kill().map_err(|e| e.to_string())?;
        child.wait().map_err(|e| e.to_string())?;
        Ok(self.board.phase())
    }

    /// An end that nobody ordered is a violation.
    pub(crate) fn check_alive(&mut self) -> Result<(), String> {
        let Some(child) = &mut self.child else {
            return Ok(());
        };
        match child.try_wait().map_err(|e| e.to_string())? {
            None => Ok(()),
            Some(status) => {
                let mut said = String::new();
                if let Some(mut stderr) = child.stderr.take() {
                    let _ = std::io::Read::read_to_string(&mut stderr, &mut said);
                }
                self.child = None;
                Err(format!("a side ended by itself ({status}): {}", said.trim()))
            }
        }
    }

    pub(crate) fn descriptors(&self) -> usize {
        let Some(child) = &self.child else { return 0 };
        std::fs::read_dir(format!("/proc/{}/fd", child.id())).map_or(0, Iterator::count)
    }

    pub(crate) fn board(&self) -> &Board {
        &self.board
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<Report, String> {
    let before = Leftovers::list();
    let mut report = Report::new("kill", args.seed);
    report.set("link", args.link.clone());
    report.set("rounds", args.rounds);
    let mut hits = [0u64; PHASES.len()];
    let mut slowest = Duration::ZERO;
    {
        let mut rng = Rng::new(args.seed);
        let venue = Venue::new(&args.link, &mut rng)?;
        if let Some(family) = venue.family() {
            report.set("family", family);
        }
        let mut sides = [
            Side::new(venue.address(0), rng.next())?.with_secret(&venue),
            Side::new(venue.address(1), rng.next())?.with_secret(&venue),
        ];
        for side in &mut sides {
            side.start()?;
        }
        if let Err(e) = until_traffic(&mut sides) {
            report.violation(format!("before the first kill: {e}"));
        }
        let steady = sides.iter().map(Side::descriptors).max().unwrap_or(0);
        for round in 0..args.rounds {
            if !report.violations.is_empty() {
                break;
            }
            match one_round(&mut sides, &mut rng, round, &mut hits) {
                Ok(took) => slowest = slowest.max(took),
                Err(e) => report.violation(format!("round {round}: {e}")),
            }
        }
        let grown = |sides: &[Side; 2]| sides.iter().map(Side::descriptors).max().unwrap_or(0) > steady + 2;
        let start = Instant::now();
        while grown(&sides) && start.elapsed() < Duration::from_secs(2) {
            std::thread::sleep(Duration::from_millis(20)); // a reconnect may be under way
        }
        if report.violations.is_empty() && grown(&sides) {
            report.violation(format!("descriptors of a survivor have grown beyond {steady}"));
        }
        drop(sides);
        venue.violations().into_iter().for_each(|v| report.violation(v));
    }
    let total: u64 = hits.iter().sum();
    for ((_, name), hit) in PHASES.iter().zip(hits) {
        if total >= 100 && hit * 20 < total {
            report.violation(format!("only {hit} of {total} kills hit the phase {name}"));
        }
    }
    tell_kills(&mut report, &hits, slowest);
    for left in Leftovers::list().new_since(&before) {
        report.violation(left);
    }
    Ok(report)
}

/// Kills by the phase that they hit.
pub(crate) type Hits = [u64; PHASES.len()];

pub(crate) fn tell_kills(report: &mut Report, hits: &Hits, slowest: Duration) {
    let by_phase = PHASES.iter().zip(hits);
    let by_phase: serde_json::Map<_, _> = by_phase
        .map(|((_, name), hit)| ((*name).to_owned(), (*hit).into()))
        .collect();
    report.set("kills", hits.iter().sum::<u64>());
    report.set("phases", by_phase);
    report.set(
        "slowest_recovery_ms",
        u64::try_from(slowest.as_millis()).unwrap_or(u64::MAX),
    );
}

/// Kills once (or twice, to hit a handshake), restarts, and waits until traffic flows both ways again. Of the sides that
/// are given: the other may be on another machine.
pub(crate) fn one_round(
    sides: &mut [Side],
    rng: &mut Rng,
    round: u64,
    hits: &mut Hits,
) -> Result<Duration, String> {
    let target = (round % PHASES.len() as u64) as usize;
    let (phase, name) = PHASES[target];
    let victim = rng.below(sides.len() as u64) as usize;
    let mut note = |hit: u64| {
        if let Some(slot) = hits.get_mut(hit as usize) {
            *slot += 1;
        }
    };
    if phase == Phase::Handshake {
        // The phase lasts as long as a start does: kill, restart, and kill again before it runs.
        sides[victim].kill()?;
        sides[victim].start()?;
        spin(Duration::from_micros(rng.below(6000)));
        note(sides[victim].kill()?);
    } else {
        spin(Duration::from_micros(rng.below(3000)));
        let start = Instant::now();
        while sides[victim].board.phase() != phase as u64 {
            if start.elapsed() > STUCK {
                for side in sides.iter_mut() {
                    side.check_alive()?;
                }
                return Err(format!("no side comes into the phase {name} any more"));
            }
            std::hint::spin_loop();
        }
        note(sides[victim].kill()?);
    }
    let start = Instant::now();
    let both = rng.below(8) == 0;
    if let (true, Some(survivor)) = (both, (0..sides.len()).find(|side| *side != victim)) {
        // Both die; they come back in either order.
        note(sides[survivor].kill()?);
        let first = rng.below(2) as usize;
        sides[first].start()?;
        std::thread::sleep(Duration::from_micros(rng.below(20_000)));
        sides[1 - first].start()?;
    } else {
        if rng.below(4) == 0 {
            std::thread::sleep(Duration::from_micros(rng.below(30_000)));
        }
        sides[victim].start()?;
    }
    until_traffic(sides)?;
    Ok(start.elapsed())
}

/// Waits until the sides have received some hundred messages more than now.
pub(crate) fn until_traffic(sides: &mut [Side]) -> Result<(), String> {
    let start = Instant::now();
    let base: Vec<u64> = sides.iter().map(|side| side.board.received()).collect();
    loop {
        let flows = sides.iter().zip(&base).all(|(s, b)| s.board.received() > b + 200);
        for side in sides.iter_mut() {
            side.check_alive()?;
        }
        if flows {
            return Ok(());
        }
        if start.elapsed() > STUCK {
            let counts: Vec<String> = sides
                .iter()
                .map(|s| {
                    format!(
                        "{} lives, {} sent, {} received",
                        s.board.running(),
                        s.board.sent(),
                        s.board.received()
                    )
                })
                .collect();
            return Err(format!(
                "no traffic both ways within {} s ({})",
                STUCK.as_secs(),
                counts.join("; ")
            ));
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

fn linger() {
    spin(Duration::from_micros(3));
}

/// One side: sends and receives as fast as it can, checks every byte, ends by itself only on a violation.
pub(crate) fn side(args: &SideArgs) -> ExitCode {
    match traffic(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::from(1)
        }
    }
}

fn traffic(args: &SideArgs) -> Result<(), String> {
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/self/fd/{}", args.board))
        .map_err(|e| format!("the board cannot be opened: {e}"))?;
    let board = Board::from_fd(file.into()).map_err(|e| e.to_string())?;
    let address = args.address.parse().map_err(|e| format!("{e}"))?;
    let options = venue::options()?;
    let opened = select::open(&address, &options).map_err(|e| e.to_string())?;
    let probe = board.clone();
    let order = opened.link.order();
    let hook = move |engine| Probe::wrap(engine, probe.clone(), CHANNELS_FIRST_LINE, RING_LINES);
    let link = Wrapped::new(opened.link, order, Box::new(hook));
    let connection = Connection::open(Box::new(link), &Options::default()).map_err(|e| e.to_string())?;
    let spec = ChannelSpec {
        ring_lines: RING_LINES,
        ..ChannelSpec::default()
    };
    let (tx, rx) = connection.channel("traffic", spec).map_err(|e| e.to_string())?;
    let source = u64::from(std::process::id()) << 32 ^ args.seed;
    Ends {
        board,
        tx,
        rx,
        source,
        number: 0,
        checker: Checker::default(),
        lives: 0,
        connection,
        events: args.events,
        start: Instant::now(),
    }
    .run(args.seed)
}

struct Ends {
    board: Board,
    tx: Sender,
    rx: Receiver,
    source: u64,
    number: u64,
    checker: Checker,
    lives: u64,
    connection: Connection,
    events: bool,
    start: Instant,
}

impl Ends {
    fn run(mut self, seed: u64) -> Result<(), String> {
        let mut rng = Rng::new(seed);
        let mut buf = vec![0; 8192];
        self.checker.life_ended();
        self.rx.set_wait(Wait::SpinSleep { spins: 50 });
        loop {
            self.board.set(Phase::Handshake);
            self.connect()?;
            self.lives += 1;
            self.board.set_running(self.lives);
            while self.burst(&mut rng)? && self.drain(&mut rng, &mut buf)? {}
            self.end_life(&mut buf)?;
        }
    }

    /// Waits for a peer.
    fn connect(&mut self) -> Result<(), String> {
        let start = Instant::now();
        loop {
            let connected = self.tx.wait_connected(Duration::from_millis(200));
            self.tell_events();
            match connected {
                Ok(()) => return Ok(()),
                Err(SendFailure::Lost(_)) => {}
                Err(e) if start.elapsed() > STUCK => return Err(format!("no peer for a minute: {e}")),
                Err(SendFailure::NotConnected(_) | SendFailure::TimedOut { .. }) => {}
                Err(e) => return Err(format!("waiting for a peer: {e}")),
            }
        }
    }

    fn tell_events(&self) {
        while let Some(event) = self.connection.next_event(Duration::ZERO) {
            if self.events {
                eprintln!(
                    "{:.3} {}: {event:?}",
                    self.start.elapsed().as_secs_f64(),
                    event.name()
                );
            }
        }
    }

    /// Takes what is left of an ended life, so that the next one need not wait for it.
    fn end_life(&mut self, buf: &mut [u8]) -> Result<(), String> {
        loop {
            match self.rx.try_recv(buf) {
                Ok(got) => self.take(&buf[..got.len])?,
                Err(RecvFailure::Lost(_)) => self.checker.life_ended(),
                Err(_) => return Ok(()),
            }
        }
    }

    /// Sends until the ring is full or a few dozen are sent; false when the life has ended.
    fn burst(&mut self, rng: &mut Rng) -> Result<bool, String> {
        for _ in 0..1 + rng.below(64) {
            let len = traffic::length(self.source, self.number, RING_LINES as usize * 32);
            self.board.set(Phase::Claim);
            let mut claim = match self.tx.claim(len) {
                Ok(claim) => claim,
                Err(SendFailure::Full { .. }) => return Ok(true),
                Err(SendFailure::Lost(_) | SendFailure::NotConnected(_)) => return Ok(false),
                Err(e) => return Err(format!("sending: {e}")),
            };
            traffic::fill(claim.bytes(), self.source, self.number);
            linger(); // so that a kill can hit between claim and commit
            claim.commit(0);
            self.number += 1;
        }
        Ok(true)
    }

    /// Receives what there is, and sometimes sleeps for more; false when the life has ended.
    fn drain(&mut self, rng: &mut Rng, buf: &mut [u8]) -> Result<bool, String> {
        for _ in 0..256 {
            self.board.set(Phase::Receive);
            // Read in place and slowly, so that a kill can hit in the middle of it.
            let got = self.rx.try_recv_with(|m| {
                linger();
                m.copy_to(0, buf)
            });
            match got {
                Ok(len) => self.take(&buf[..len])?,
                Err(RecvFailure::Empty) => break,
                Err(e) => return self.lost(&e),
            }
        }
        if rng.below(8) == 0 {
            self.board.set(Phase::Sleep);
            match self.rx.recv(buf, Duration::from_millis(2)) {
                Ok(got) => self.take(&buf[..got.len])?,
                Err(RecvFailure::TimedOut | RecvFailure::Empty) => {}
                Err(e) => return self.lost(&e),
            }
        }
        Ok(true)
    }

    fn take(&mut self, bytes: &[u8]) -> Result<(), String> {
        debug_assert!(bytes.len() >= HEADER);
        self.checker.check(bytes)?;
        self.board.count(self.number, self.checker.received);
        Ok(())
    }

    fn lost(&mut self, e: &RecvFailure) -> Result<bool, String> {
        match e {
            RecvFailure::Lost(_) => {
                self.checker.life_ended();
                Ok(false)
            }
            RecvFailure::NotConnected(_) => Ok(false),
            other => Err(format!("receiving: {other}")),
        }
    }
}
