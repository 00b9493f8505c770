//! Where a measurement takes place: the link, the peer, the channel.

use std::{
    hash::{BuildHasher, Hasher},
    io::IsTerminal,
    sync::Arc,
    time::{Duration, Instant},
};

use ntb_mem::clock::Clock;
use ntb_ring::{
    address::Address,
    channel::{ConnectError, Connection},
    link::{
        LinkFacts, LinkKind,
        engine::EngineChoice,
        select::{self, LinkOptions},
    },
    session::{ChannelSpec, SessionState},
};

use super::{
    super::{
        CHANNEL, channel_failure, connect_failure, connection_options, link_failure, link_options, ring_lines,
    },
    watch::watcher,
};
use crate::{
    cli::ping::{Engine, RunArgs, Waiting},
    environment::{Source, topology},
    exit::{Exit, Failure},
    interrupt::Interrupt,
    ping::{
        emulate::Emulation,
        events::{Events, Print},
        measure::{Hold, Plan, Port},
        message::{CONTROL_BYTES, Control, Counted},
        spawn::Peer,
        station::Station,
    },
};

/// Fewest lines of the client's ring: 64 KiB, which stay in a core's own cache.
const MIN_LINES: u64 = 1024;
/// Lines of memory beside the ring: session, channel table, control page, room to spare.
const OTHER_LINES: u64 = 1024;
/// One step of waiting.
const STEP: Duration = Duration::from_millis(50);
/// How long a connected server may take to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// What the server said of itself.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Welcome {
    pub(super) pid: Option<u32>,
    pub(super) sleeps: bool,
}

/// Link, peer and channel.
#[derive(Debug)]
pub(super) struct Site {
    // Dropped in this order: the goodbye is said before an own peer is ended.
    pub(super) station: Station,
    pub(super) events: Arc<Events>,
    pub(super) connection: Arc<Connection>,
    pub(super) peer: Option<Peer>,
    pub(super) emulation: Option<Emulation>,
    pub(super) facts: LinkFacts,
    pub(super) chosen: String,
    /// What TCP takes at the most between the two ends, where that is known: [`select::Opened::tcp_round_trip`].
    pub(super) tcp_round_trip: Option<Duration>,
    /// Processors of this end and of the far end.
    pub(super) cpus: (Option<u32>, Option<u32>),
    /// The user has left the choice of processors to this program.
    free: bool,
    /// Processor that the far end is asked to run on.
    wish: Option<u32>,
    pub(super) welcome: Welcome,
    pub(super) pin_trouble: Option<String>,
    interrupt: Interrupt,
    timeout: Duration,
}

impl Site {
    /// Opens the link, and starts a peer where nobody named one and the link is one within this machine.
    #[allow(clippy::print_stdout, reason = "says what was chosen before it measures")]
    pub(super) fn open(args: &RunArgs, clock: Clock, interrupt: &Interrupt) -> Result<Self, Failure> {
        let allowed = topology::allowed();
        let own_peer = matches!(args.address, None | Some(Address::Auto(None)));
        let emulation = match args.emulate {
            Some(family) => Some(Emulation::start(family, args.engine, random())?),
            None => None,
        };
        // Where the far end is elsewhere, nothing is known of its processors.
        let near = own_peer || matches!(args.address, Some(Address::Soft(_) | Address::Emulated(_)));
        let cpus = choose(args.cpu, own_peer, near, &allowed)?;
        let needed = (2 * (args.size.div_ceil(64) + 1)).next_power_of_two();
        let lines = needed.max(MIN_LINES);
        let options = LinkOptions {
            window_bytes: (lines + OTHER_LINES) * 64,
            engine: match emulation {
                Some(_) => EngineChoice::Auto, // the model stands over it
                None => Engine::choice(args.engine),
            },
            soft_name: format!("ntb-ping-{}-{:016x}", std::process::id(), random()),
            meet_within: args.timeout,
            ..link_options(&args.link)?
        };
        let address = match &emulation {
            Some(emulation) => emulation.near(),
            None => args.address.clone().unwrap_or(Address::Auto(None)),
        };
        let mut opened = select::open_while(&address, &options, &mut || !interrupt.came())
            .map_err(|e| link_failure(&e))?;
        let facts = opened.link.facts();
        let far = match &emulation {
            Some(emulation) => Some(emulation.far().to_string()),
            None => (own_peer && facts.kind == LinkKind::Soft).then(|| facts.address.clone()),
        };
        if let Some(emulation) = &emulation {
            opened.link = emulation.model(opened.link);
            opened.chosen = format!("{}: {}", facts.address, emulation.about());
        }
        let peer = if let Some(far) = far {
            let peer = Peer::start(&far, cpus.1, args.wait, args.engine).map_err(|e| {
                Failure::new(
                    Exit::Limits,
                    "no-own-peer",
                    format!("the peer process cannot be started: {e}"),
                )
            })?;
            Some(peer)
        } else {
            None
        };
        if !args.json {
            let with = peer.as_ref().map_or(String::new(), |p| {
                format!("; started its own peer, process {}", p.pid())
            });
            println!("link: {}{with}", opened.chosen);
        }
        let lines = ring_lines(lines, opened.link.inbound().lines()).max(needed);
        let connection =
            Connection::open(opened.link, &connection_options(&address)).map_err(|e| connect_failure(&e))?;
        let connection = Arc::new(connection);
        let events = Events::watch(Arc::clone(&connection), Print::Trouble)
            .map_err(|e| Failure::new(Exit::Limits, "no-thread", e.to_string()))?;
        let events = Arc::new(events);
        let spec = ChannelSpec {
            ring_lines: lines,
            smaller_if_different: true,
            ..ChannelSpec::default()
        };
        let ends = connection
            .channel(CHANNEL, spec)
            .map_err(|e| channel_failure(&connection, &e))?;
        let shared = allowed.len() < 2 || matches!(cpus, (Some(a), Some(b)) if a == b);
        let largest = usize::try_from(args.size)
            .unwrap_or(usize::MAX)
            .max(CONTROL_BYTES);
        let look = watcher(
            args,
            interrupt.clone(),
            Arc::clone(&connection),
            Arc::clone(&events),
        );
        let station = Station::new(ends, clock, args.wait, !shared, largest, look);
        Ok(Self {
            station,
            events,
            connection,
            peer,
            emulation,
            facts,
            chosen: opened.chosen,
            tcp_round_trip: opened.tcp_round_trip,
            cpus: (cpus.0, if own_peer { cpus.1 } else { None }),
            free: args.cpu.is_none(),
            wish: if own_peer { None } else { cpus.1 },
            welcome: Welcome::default(),
            pin_trouble: (args.wait == Waiting::Spin && shared)
                .then(|| "both ends spin on one processor: use --wait yield or sleep".to_owned()),
            interrupt: interrupt.clone(),
            timeout: args.timeout,
        })
    }

    /// Waits for the peer and gets to know it.
    pub(super) fn meet(&mut self) -> Result<(), Failure> {
        self.get_to_know(self.timeout, Exit::NoPeer)
    }

    /// After a loss: waits until the peer is back and tells it what is going on.
    pub(super) fn recover(&mut self, patience: Duration, plan: &Plan, first: u64) -> Result<(), Failure> {
        self.get_to_know(patience, Exit::LinkLost)?;
        self.start(plan, first);
        Ok(())
    }

    /// Waits for a peer until one has said who it is: one may be lost before it does.
    fn get_to_know(&mut self, patience: Duration, exit: Exit) -> Result<(), Failure> {
        let begun = Instant::now();
        loop {
            self.wait_for_peer(patience.saturating_sub(begun.elapsed()), patience, exit)?;
            if self.hello()? {
                return Ok(());
            }
            if self.interrupt.came() {
                return Err(Failure::new(
                    exit,
                    "interrupted",
                    format!(
                        "interrupted before the peer on {} said who it is",
                        self.facts.address
                    ),
                ));
            }
        }
    }

    /// Waits for a connected channel for as long as is `left` of `patience`.
    fn wait_for_peer(&mut self, left: Duration, patience: Duration, exit: Exit) -> Result<(), Failure> {
        let begun = Instant::now();
        let mut shown = None;
        loop {
            let state = match self.connection.wait_running(STEP) {
                Ok(_) if self.station.connected(STEP) => return Ok(()),
                Ok(_) => SessionState::Running,
                Err(ConnectError::TimedOut { state, .. }) => state,
                Err(e) => return Err(connect_failure(&e)),
            };
            if let Some(why) = self.events.refused() {
                return Err(Failure::new(
                    Exit::Mismatch,
                    "refused",
                    format!("the peer on {} does not fit: {why}", self.facts.address),
                ));
            }
            let missing = match state {
                SessionState::Running => "channel: the peer runs but has not opened the channel of ntb-ping",
                state => state.missing(),
            };
            let address = &self.facts.address;
            if self.interrupt.came() {
                return Err(Failure::new(
                    exit,
                    "interrupted",
                    format!("interrupted while waiting for the peer on {address}; missing {missing}"),
                ));
            }
            if let Some(how) = self.peer.as_mut().and_then(Peer::ended) {
                return Err(Failure::new(
                    exit,
                    "own-peer-ended",
                    format!("the peer process that was started for {address} {how}; missing {missing}"),
                ));
            }
            if begun.elapsed() >= left {
                let name = if exit == Exit::NoPeer {
                    "no-peer"
                } else {
                    "peer-lost"
                };
                return Err(Failure::new(
                    exit,
                    name,
                    format!(
                        "no peer on {address} within {:.1} s; missing {missing}{}; start 'ntb-ping serve ADDRESS' at the other end",
                        patience.as_secs_f64(),
                        self.events
                            .word_of_link()
                            .map_or_else(String::new, |word| format!(" ({word})"))
                    ),
                ));
            }
            show_waiting(address, missing, begun, &mut shown);
        }
    }

    /// Asks the peer who it is. False when it was lost meanwhile.
    fn hello(&mut self) -> Result<bool, Failure> {
        let hello = Control::Hello { cpu: self.wish };
        let epoch = self.events.runs();
        let silent = |site: &mut Self| {
            // A peer that is gone, or already another one, is no silent one.
            if site.interrupt.came() || !site.station.connected(Duration::ZERO) || site.events.runs() != epoch
            {
                return Ok(false);
            }
            Err(Failure::new(
                Exit::LinkLost,
                "no-answer",
                format!(
                    "the peer on {} is connected but does not answer: its receiving thread has stopped, or it is no \
                     'ntb-ping serve'",
                    site.facts.address
                ),
            ))
        };
        if !self.say(hello, ANSWER) {
            return silent(self);
        }
        let answer = self.hear(ANSWER.min(self.timeout), true, |control| match control {
            Control::Welcome {
                pid,
                cpu,
                pin_errno,
                sleeps,
            } => Some((pid, cpu, pin_errno, sleeps)),
            _ => None,
        });
        let Some((pid, cpu, pin_errno, sleeps)) = answer else {
            return silent(self);
        };
        self.welcome = Welcome {
            pid: Some(pid),
            sleeps,
        };
        self.cpus.1 = cpu;
        if self.free && self.cpus.0.is_some() && self.cpus.0 == cpu {
            // Its user had bound it to the one that was chosen here.
            self.cpus.0 = cpu.map(|cpu| Source::default().topology().partner(cpu, &topology::allowed()));
        }
        if let (Some(wish), true) = (self.wish, pin_errno != 0) {
            let errno = std::io::Error::from_raw_os_error(pin_errno.cast_signed());
            self.pin_trouble = Some(format!(
                "the far end could not be pinned to processor {wish}: {errno}"
            ));
        }
        Ok(true)
    }

    /// Announces the messages that follow. A link that is down shows at the first of them.
    pub(super) fn start(&mut self, plan: &Plan, first: u64) {
        let start = Control::Start {
            size: plan.size as u64,
            first,
            kind: plan.kind,
        };
        let _ = self.say(start, ANSWER);
    }

    /// Says that this was all, and hears what the far end counted.
    pub(super) fn finish(&mut self, patience: Duration) -> Option<Counted> {
        // Also after an interrupt: the patience is short then.
        self.station.say(&Control::End.encode(), patience).ok()?;
        self.hear(patience, false, |control| match control {
            Control::Report(counted) => Some(counted),
            _ => None,
        })
    }

    /// Sends a message of the agreement; false when there is no room for it in time or the link is down.
    fn say(&mut self, control: Control, patience: Duration) -> bool {
        let begun = Instant::now();
        loop {
            match self.station.say(&control.encode(), STEP) {
                Ok(()) => return true,
                Err(Hold::NotNow) if begun.elapsed() < patience && !self.interrupt.came() => {}
                Err(_) => return false,
            }
        }
    }

    /// Whether the far end is on this machine.
    pub(super) fn same_machine(&self) -> bool {
        self.facts.kind == LinkKind::Soft || self.facts.address.starts_with("emu:")
    }

    /// Processor for the far end of the floor: the peer's, where that is one of this machine.
    pub(super) fn floor_cpu(&self) -> Option<u32> {
        if self.same_machine() {
            return self.cpus.1;
        }
        let partner = |cpu| Source::default().topology().partner(cpu, &topology::allowed());
        self.cpus.0.map(partner)
    }

    /// Waits for a message of the agreement that `wanted` takes, ended by an interrupt where that is not yet the reason
    /// for it.
    fn hear<T>(
        &mut self,
        patience: Duration,
        interruptible: bool,
        wanted: impl Fn(Control) -> Option<T>,
    ) -> Option<T> {
        let begun = Instant::now();
        let mut inbox = [0; CONTROL_BYTES];
        let mut long = Vec::new();
        while begun.elapsed() < patience {
            self.station.sleep(STEP.min(patience));
            let received = match self.station.try_recv(&mut inbox) {
                Err(Hold::Broken(_)) => {
                    // A late reply that is longer: it has to be taken to get at what follows.
                    long.resize(crate::cli::ping::LARGEST_SIZE as usize, 0);
                    let _ = self.station.try_recv(&mut long);
                    continue;
                }
                Err(Hold::Down) => return None,
                Err(Hold::NotNow) if interruptible && self.interrupt.came() => return None,
                Err(Hold::NotNow) => continue,
                Ok(len) => inbox.get(..len).and_then(Control::decode),
            };
            if let Some(found) = received.and_then(&wanted) {
                return Some(found);
            }
        }
        None
    }
}

/// Which processors the two ends run on.
fn choose(
    wish: Option<(u32, Option<u32>)>,
    own_peer: bool,
    near: bool,
    allowed: &[u32],
) -> Result<(Option<u32>, Option<u32>), Failure> {
    let check = |cpu: u32| {
        if allowed.contains(&cpu) {
            return Ok(cpu);
        }
        Err(Failure::new(
            Exit::Usage,
            "no-such-processor",
            format!(
                "--cpu: processor {cpu} is not among those this process may run on; allowed: {allowed:?}"
            ),
        ))
    };
    let topology = Source::default().topology();
    Ok(match wish {
        None if near => topology
            .best_pair(allowed)
            .map_or((None, None), |(a, b)| (Some(a), Some(b))),
        None => (topology.best_pair(allowed).map(|(a, _)| a), None),
        Some((a, None)) if near => (Some(check(a)?), Some(topology.partner(a, allowed))),
        Some((a, Some(b))) if own_peer => (Some(check(a)?), Some(check(b)?)),
        Some((a, b)) => (Some(check(a)?), b), // the far end checks its own
    })
}

fn random() -> u64 {
    // Seeded by the operating system for each state.
    std::hash::RandomState::new().build_hasher().finish()
}

#[allow(
    clippy::print_stderr,
    reason = "tells a person at a terminal what is waited for"
)]
fn show_waiting(address: &str, missing: &'static str, begun: Instant, shown: &mut Option<&'static str>) {
    if begun.elapsed() < Duration::from_secs(1) || *shown == Some(missing) || !std::io::stderr().is_terminal()
    {
        return;
    }
    *shown = Some(missing);
    eprintln!("waiting for the peer on {address}; missing {missing}");
}
