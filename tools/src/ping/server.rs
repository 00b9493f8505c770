//! `ntb-ping serve`: answers whoever measures.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use std::{io::Write, sync::Arc, time::Duration};

use ntb_mem::clock::Clock;
use ntb_ring::{
    address::Address,
    channel::{ConnectError, Connection},
    link::select::{self, LinkOptions},
    session::ChannelSpec,
};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use super::{
    CHANNEL, channel_failure, connect_failure, connection_options,
    events::{Events, Print},
    link_failure, link_options,
    measure::{Hold, Port},
    message::{self, Control, Counted, Kind},
    ring_lines,
    station::Station,
};
use crate::{
    cli::ping::{Engine, LARGEST_SIZE, ServeArgs, Waiting},
    environment::topology::{self, Pinned},
    exit::{Exit, Failure},
    interrupt::Interrupt,
    stats::SequenceCheck,
};

/// Lines of the server's ring: 16 MiB, twice the largest message. A client with less gets what it has.
const RING_LINES: u64 = 1 << 18;
/// Memory for the ring, its control page and the session, with room to spare.
const WINDOW_BYTES: u64 = 32 << 20;
/// How long the server stays awake without a message between start and end of a measurement.
const AWAKE_NS: u64 = 10_000_000_000;
/// Longest sleep between two looks for a signal.
const NAP: Duration = Duration::from_millis(50);
/// Empty polls between two looks for a signal and at the clock.
const POLLS_A_LOOK: u64 = 1024;

/// Serves until it is interrupted.
pub fn serve(args: &ServeArgs) -> Result<Exit, Failure> {
    let interrupt = Interrupt::install().map_err(|e| Failure::new(Exit::Limits, "signals", e.to_string()))?;
    if let Some(parent) = args.parent {
        end_with(parent);
    }
    let pinned = match args.cpu {
        Some((cpu, _)) => Some(
            Pinned::to(cpu)
                .map_err(|e| Failure::new(Exit::Usage, "no-such-processor", format!("--cpu: {e}")))?,
        ),
        None => None,
    };
    let options = LinkOptions {
        window_bytes: WINDOW_BYTES,
        engine: Engine::choice(args.engine),
        meet_within: Duration::MAX,
        ..link_options(&args.link)?
    };
    if let (Address::Auto(Some(_)), false) = (&args.address, args.quiet) {
        let _ = writeln!(
            std::io::stdout(),
            "waiting at {} for the other end, to choose a transport with",
            args.address
        );
    }
    let opened = match select::open_while(&args.address, &options, &mut || !interrupt.came()) {
        Err(_) if interrupt.came() => return Ok(Exit::Good), // before anybody has come
        opened => opened.map_err(|e| link_failure(&e))?,
    };
    if !args.quiet {
        // Whoever started it may have closed standard output.
        let _ = writeln!(std::io::stdout(), "serving on {}", opened.chosen);
    }
    let ring_lines = ring_lines(RING_LINES, opened.link.inbound().lines());
    let connection =
        Connection::open(opened.link, &connection_options(&args.address)).map_err(|e| connect_failure(&e))?;
    let connection = Arc::new(connection);
    let print = if args.quiet { Print::Nothing } else { Print::All };
    let _events = Events::watch(Arc::clone(&connection), print)
        .map_err(|e| Failure::new(Exit::Limits, "no-thread", e.to_string()))?;
    let spec = ChannelSpec {
        ring_lines,
        smaller_if_different: true,
        ..ChannelSpec::default()
    };
    let ends = connection
        .channel(CHANNEL, spec)
        .map_err(|e| channel_failure(&connection, &e))?;
    let (clock, _) = Clock::set_up();
    let alone = topology::allowed().len() > 1 || pinned.is_some() && topology::online_count() > 1;
    let mut station = Station::new(
        ends,
        clock,
        args.wait,
        alone,
        LARGEST_SIZE as usize,
        Box::new(|_| true),
    );
    let mut inbox = vec![0; LARGEST_SIZE as usize];
    let mut server = Server {
        pinned,
        sleeps: args.wait == Waiting::Sleep,
        ..Server::default()
    };
    while !interrupt.came() {
        match connection.wait_running(NAP) {
            Ok(_) if station.connected(NAP) => server.answer(&mut station, &mut inbox, &interrupt)?,
            Ok(_) | Err(ConnectError::TimedOut { .. }) => {}
            Err(e @ (ConnectError::LinkFailed { .. } | ConnectError::NoThread(_))) => {
                return Err(connect_failure(&e));
            }
            // Until another peer comes.
            Err(ConnectError::Refused(_)) => std::thread::sleep(NAP),
        }
    }
    Ok(Exit::Good)
}

/// Ends this process when `parent` ends, also when that has happened already.
pub fn end_with(parent: u64) {
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let alive = getppid().map(Pid::as_raw_nonzero).map(|p| p.get().unsigned_abs());
    if alive.map(u64::from) != Some(parent) {
        std::process::exit(i32::from(Exit::NoPeer as u8));
    }
}

/// What the server knows of the measurement under way.
#[derive(Debug)]
struct Server {
    /// Started and not ended, with the time of the last message.
    awake: Option<u64>,
    kind: Kind,
    size: u64,
    next: u64,
    check: SequenceCheck,
    corrupt: u64,
    span: Option<(u64, u64)>,
    pinned: Option<Pinned>,
    sleeps: bool,
    /// Pinned because the client asked for it: until that one is gone.
    lent: Option<Pinned>,
}

impl Default for Server {
    fn default() -> Self {
        Self {
            awake: None,
            kind: Kind::Echo,
            size: 0,
            next: 0,
            check: SequenceCheck::new(0),
            corrupt: 0,
            span: None,
            pinned: None,
            sleeps: false,
            lent: None,
        }
    }
}

impl Server {
    /// Answers until the channel goes down or a signal comes.
    fn answer(
        &mut self,
        station: &mut Station,
        inbox: &mut [u8],
        interrupt: &Interrupt,
    ) -> Result<(), Failure> {
        let mut polls = 0u64;
        let end = loop {
            match station.try_recv(inbox) {
                Ok(len) => {
                    polls = 0;
                    let Some(message) = inbox.get(..len) else { continue };
                    if let Err(hold) = self.take(message, station, interrupt) {
                        break hold;
                    }
                }
                Err(Hold::NotNow) => {
                    polls += 1;
                    if polls.is_multiple_of(POLLS_A_LOOK) || self.awake.is_none() {
                        if interrupt.came() {
                            return Ok(());
                        }
                        let now = station.ns();
                        if self.awake.is_some_and(|last| now.saturating_sub(last) > AWAKE_NS) {
                            self.awake = None;
                        }
                    }
                    if self.awake.is_some() {
                        station.idle(polls, u64::MAX);
                    } else {
                        station.sleep(NAP);
                    }
                }
                Err(hold) => break hold,
            }
        };
        self.awake = None;
        self.lent = None;
        match end {
            Hold::Broken(failure) => Err(*failure),
            _ => Ok(()),
        }
    }

    #[inline]
    fn take(&mut self, message: &[u8], station: &mut Station, interrupt: &Interrupt) -> Result<(), Hold> {
        let header = message::header(message);
        let (kind, seq) = match header {
            Some(header) => (header.kind, header.seq),
            None => (self.kind, self.next),
        };
        match kind {
            Kind::Echo => {
                // First the reply, then the books: the client is waiting.
                send(message, station, interrupt)?;
                self.count(message, seq);
                if let Some(last) = &mut self.awake
                    && self.check.received.is_multiple_of(256)
                {
                    *last = station.ns();
                }
                Ok(())
            }
            Kind::Stream => {
                self.count(message, seq);
                if self.span.is_none() || self.check.received.is_multiple_of(256) {
                    self.heard(station.ns());
                }
                Ok(())
            }
            Kind::Control => match Control::decode(message) {
                Some(control) => self.control(control, station, interrupt),
                None => {
                    self.corrupt += 1;
                    Ok(())
                }
            },
        }
    }

    fn heard(&mut self, now: u64) {
        self.awake = self.awake.map(|_| now);
        self.span = Some(self.span.map_or((now, now), |(first, _)| (first, now)));
    }

    #[inline]
    fn count(&mut self, message: &[u8], seq: u64) {
        let sized = self.awake.is_none() || message.len() as u64 == self.size;
        if !sized || !message::verify(message, seq) {
            self.corrupt += 1;
            return;
        }
        self.check.observe(seq);
        self.next = seq.wrapping_add(1);
    }

    fn control(
        &mut self,
        control: Control,
        station: &mut Station,
        interrupt: &Interrupt,
    ) -> Result<(), Hold> {
        match control {
            Control::Hello { cpu } => {
                let mut pin_errno = 0;
                if let (Some(cpu), None) = (cpu, &self.pinned) {
                    self.lent = None;
                    match Pinned::to(cpu) {
                        Ok(pinned) => self.lent = Some(pinned),
                        Err(e) => pin_errno = e.errno.raw_os_error().unsigned_abs(),
                    }
                }
                let welcome = Control::Welcome {
                    pid: std::process::id(),
                    cpu: self.pinned.as_ref().or(self.lent.as_ref()).map(|p| p.cpu),
                    pin_errno,
                    sleeps: self.sleeps,
                };
                send(&welcome.encode(), station, interrupt)
            }
            Control::Start { size, first, kind } => {
                self.awake = Some(station.ns());
                self.kind = kind;
                self.size = size;
                self.next = first;
                self.check = SequenceCheck::new(first);
                self.corrupt = 0;
                self.span = None;
                Ok(())
            }
            Control::End => {
                let now = station.ns();
                self.heard(now);
                self.awake = None;
                let report = Control::Report(Counted {
                    received: self.check.received,
                    duplicated: self.check.duplicated,
                    out_of_order: self.check.out_of_order,
                    corrupt: self.corrupt,
                    span_ns: self.span.map_or(0, |(first, last)| last.saturating_sub(first)),
                });
                send(&report.encode(), station, interrupt)
            }
            // What a server says is nothing to a server.
            Control::Welcome { .. } | Control::Report(_) => Ok(()),
        }
    }
}

/// Sends, waiting for room until the channel goes down or a signal comes.
#[inline]
fn send(message: &[u8], station: &mut Station, interrupt: &Interrupt) -> Result<(), Hold> {
    let mut polls = 0u64;
    loop {
        match station.try_send(message) {
            Err(Hold::NotNow) if polls.is_multiple_of(POLLS_A_LOOK) && interrupt.came() => return Ok(()),
            Err(Hold::NotNow) => {
                polls += 1;
                if polls < POLLS_A_LOOK {
                    ntb_mem::sync::spin_hint();
                } else {
                    ntb_mem::sync::yield_now();
                }
            }
            other => return other,
        }
    }
}
