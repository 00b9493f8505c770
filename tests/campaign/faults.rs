//! Two-way traffic through engines that delay, hold back, tear and reorder, while the link flaps, a direction dies for a
//! while, late writes of earlier lives arrive and random bytes land anywhere.
//!
//! Within one life of a channel nothing may be lost, doubled, torn, stale or out of order, whatever happens; and traffic
//! must always flow again.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use ntb_ring::{
    channel::{Connection, Options, RecvFailure, SendFailure, Wait},
    link::{
        Link, Wrapped,
        faults::{FaultOptions, Faults},
        pair::{PairControl, PairOptions, pair},
    },
    session::ChannelSpec,
};
use serde_json::json;

use crate::{
    Report, Rng,
    traffic::{self, Checker},
    venue::Venue,
};

const RING_LINES: u64 = 128;
/// Longest time without a message before traffic counts as stuck.
const STUCK: Duration = Duration::from_secs(30);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Seed of all faults.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Messages to be received, over all parts and both directions.
    #[arg(long, default_value_t = 200_000, value_parser = clap::value_parser!(u64).range(1..=100_000_000_000))]
    messages: u64,
    /// Transport under test.
    #[arg(long, default_value = "pair", value_parser = ["pair", "emu", "tcp", "rdma"])]
    link: String,
    /// Accepted for symmetry: the result is always one JSON object.
    #[arg(long)]
    json: bool,
}

/// One part of the campaign.
struct Part {
    name: &'static str,
    options: FaultOptions,
    flaps: bool,
    dead: bool,
}

fn parts() -> [Part; 4] {
    let bad_wire = FaultOptions {
        delay: 20_000,
        hold: 10_000,
        split: 10_000,
        blank: 5_000,
        late: 2_000,
        ..FaultOptions::default()
    };
    [
        Part {
            name: "ordered",
            options: FaultOptions {
                keep_order: true,
                ..bad_wire.clone()
            },
            flaps: true,
            dead: false,
        },
        Part {
            name: "reordered",
            options: bad_wire.clone(),
            flaps: true,
            dead: false,
        },
        Part {
            name: "dead-directions",
            options: bad_wire.clone(),
            flaps: true,
            dead: true,
        },
        Part {
            name: "scribbled",
            options: FaultOptions {
                scribble: 300,
                ..bad_wire
            },
            flaps: false,
            dead: false,
        },
    ]
}

pub(crate) fn run(args: &Args) -> Result<Report, String> {
    let mut report = Report::new("faults", args.seed);
    report.set("link", args.link.clone());
    report.set("messages", args.messages);
    let mut rng = Rng::new(args.seed);
    let mut found = serde_json::Map::new();
    let parts = parts();
    let share = args.messages.div_ceil(parts.len() as u64);
    for part in parts {
        match run_part(&part, rng.next(), share, &args.link) {
            Ok(result) => {
                found.insert(part.name.to_owned(), result);
            }
            Err(e) => report.violation(format!("{}: {e}", part.name)),
        }
    }
    report.set("parts", found);
    Ok(report)
}

/// What the threads of a part share.
struct Board {
    received: AtomicU64,
    stop: AtomicBool,
}

/// What joins the two ends.
enum Wire {
    Pair(PairControl),
    Bridges(Venue),
    Relayed(Venue),
}

impl Wire {
    /// The ends of a link, and what joins them.
    fn new(link: &str, rng: &mut Rng) -> Result<([Box<dyn Link>; 2], Self), String> {
        const WINDOW_BYTES: u64 = 1 << 17;
        if link != "pair" {
            let venue = match link {
                "tcp" | "rdma" => Venue::relayed(link, rng)?,
                other => Venue::new(other, rng)?,
            };
            let mut ends = [venue.open(0, WINDOW_BYTES)?, venue.open(1, WINDOW_BYTES)?];
            if venue.meeting().is_some() {
                ends[0].poll().map_err(|e| e.to_string())?; // listens where the relay leads to
                return Ok((ends, Self::Relayed(venue)));
            }
            return Ok((ends, Self::Bridges(venue)));
        }
        let options = PairOptions {
            window_bytes: WINDOW_BYTES,
            ..PairOptions::default()
        };
        let (a, b) = pair(&options).map_err(|e| e.to_string())?;
        let control = a.control();
        Ok(([Box::new(a), Box::new(b)], Self::Pair(control)))
    }

    /// Loses the link, some times, or does something else that bridges can suffer.
    fn disturb(&self, rng: &mut Rng, troubles: &mut BTreeMap<&'static str, u64>) -> Result<(), String> {
        let times = 1 + rng.below(3) as u32;
        match self {
            Self::Pair(control) => control.flap(times).map_err(|e| e.to_string())?,
            Self::Relayed(venue) => {
                for _ in 0..times {
                    venue.cut();
                    std::thread::sleep(Duration::from_micros(rng.below(5000)));
                }
                *troubles.entry("cut").or_default() += u64::from(times);
            }
            Self::Bridges(venue) => *troubles.entry(venue.trouble(rng)).or_default() += 1,
        }
        Ok(())
    }
}

fn run_part(part: &Part, seed: u64, messages: u64, link: &str) -> Result<serde_json::Value, String> {
    let mut rng = Rng::new(seed);
    let ([a, b], wire) = Wire::new(link, &mut rng)?;
    let mut troubles = BTreeMap::new();
    let faults = [0, 1].map(|_| {
        Faults::new(FaultOptions {
            seed: rng.next(),
            ..part.options.clone()
        })
    });
    let mut pumps = Vec::new();
    for f in &faults {
        pumps.push(
            f.pump_every(Duration::from_micros(200))
                .map_err(|e| e.to_string())?,
        );
    }
    let connect = |link: Box<dyn Link>, faults: &Faults| -> Result<Connection, String> {
        let order = faults.order(link.order());
        Connection::open(
            Box::new(Wrapped::new(link, order, faults.hook())),
            &Options::default(),
        )
        .map_err(|e| e.to_string())
    };
    let sides = [connect(a, &faults[0])?, connect(b, &faults[1])?];
    let board = Board {
        received: AtomicU64::new(0),
        stop: AtomicBool::new(false),
    };
    let results = std::thread::scope(|scope| {
        let board = &board;
        let threads: Vec<_> = sides
            .iter()
            .map(|side| {
                let seed = rng.next();
                scope.spawn(move || {
                    let result = traffic(side, seed, board);
                    if result.is_err() {
                        board.stop.store(true, Ordering::Relaxed);
                    }
                    result
                })
            })
            .collect();
        let watched = disturb(part, &mut rng, (&wire, &mut troubles), &faults, board, messages);
        board.stop.store(true, Ordering::Relaxed);
        let mut results: Vec<Result<Checker, String>> = Vec::new();
        for thread in threads {
            results.push(
                thread
                    .join()
                    .unwrap_or_else(|_| Err("a side panicked".to_owned())),
            );
        }
        watched.map(|()| results)
    });
    let results = results.map_err(|e| {
        let states: Vec<_> = sides.iter().map(|s| s.state().name()).collect();
        format!("{e} (states: {})", states.join(", "))
    })?;
    let mut received = 0;
    let mut lives = 0;
    for checker in results {
        let checker = checker?;
        received += checker.received;
        lives += checker.gaps;
    }
    let losses = sides[0].stats().losses;
    drop(sides);
    if let Wire::Bridges(venue) = &wire
        && let Some(violation) = venue.violations().first()
    {
        return Err(violation.clone());
    }
    let counts = faults.map(|f| f.counts());
    let sum = |what: fn(&ntb_ring::link::faults::FaultCounts) -> u64| counts.iter().map(what).sum::<u64>();
    Ok(json!({
        "received": received,
        "lives_with_loss": lives,
        "family": if let Wire::Bridges(venue) = &wire { venue.family() } else { None },
        "link_losses": losses,
        "misled": if let Wire::Bridges(venue) = &wire { venue.misled() } else { 0 },
        "delayed": sum(|c| c.delayed),
        "held": sum(|c| c.held),
        "reordered": sum(|c| c.reordered),
        "split": sum(|c| c.split),
        "blanked": sum(|c| c.blanked),
        "late": sum(|c| c.late),
        "scribbled": sum(|c| c.scribbled),
        "vanished": sum(|c| c.vanished),
        "troubles": troubles,
    }))
}

/// Flaps the link and kills directions until enough has been received; an error when traffic stops.
fn disturb(
    part: &Part,
    rng: &mut Rng,
    (wire, troubles): (&Wire, &mut BTreeMap<&'static str, u64>),
    faults: &[Faults; 2],
    board: &Board,
    messages: u64,
) -> Result<(), String> {
    let (mut last, mut since) = (0, Instant::now());
    let mut next = Instant::now() + Duration::from_millis(50);
    // Where a connection takes longer to make than most pauses, trouble alone would keep it from ever being made: mostly it
    // is waited for, and now and then it is hit while it is made.
    let (mut patient, mut calm) = (false, 0);
    loop {
        std::thread::sleep(Duration::from_millis(1));
        let received = board.received.load(Ordering::Relaxed);
        if received >= messages || board.stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        if received != last {
            (last, since) = (received, Instant::now());
        } else if since.elapsed() > STUCK {
            return Err(format!("no message for {} s after {received}", STUCK.as_secs()));
        }
        if patient && received < calm + 2 * RING_LINES {
            next = next.max(Instant::now() + Duration::from_millis(10));
        }
        if Instant::now() < next {
            continue;
        }
        next = Instant::now() + Duration::from_millis(30 + rng.below(200));
        (patient, calm) = (rng.below(4) != 0, received);
        if part.dead && rng.below(4) == 0 {
            let direction = &faults[rng.below(2) as usize];
            direction.set_dead(true);
            std::thread::sleep(Duration::from_millis(rng.below(40)));
            direction.set_dead(false);
        } else if part.flaps {
            wire.disturb(rng, troubles)?;
        }
    }
}

/// One side's traffic.
fn traffic(side: &Connection, seed: u64, board: &Board) -> Result<Checker, String> {
    let mut rng = Rng::new(seed);
    let source = rng.next();
    let spec = ChannelSpec {
        ring_lines: RING_LINES,
        ..ChannelSpec::default()
    };
    let (mut tx, mut rx) = side.channel("traffic", spec).map_err(|e| e.to_string())?;
    rx.set_wait(Wait::SpinSleep { spins: 100 });
    let mut checker = Checker::default();
    checker.life_ended();
    let mut number = 0;
    let (mut message, mut buf) = (Vec::new(), vec![0; 8192]);
    let (mut unsaid, mut idle) = (0, 0u32);
    while !board.stop.load(Ordering::Relaxed) {
        let mut moved = false;
        for _ in 0..16 {
            message.resize(traffic::length(source, number, RING_LINES as usize * 32), 0);
            traffic::fill(&mut message, source, number);
            match tx.try_send(&message) {
                Ok(_) => {
                    number += 1;
                    moved = true;
                }
                Err(SendFailure::Full { .. } | SendFailure::NotConnected(_) | SendFailure::Lost(_)) => break,
                Err(e) => return Err(format!("sending: {e}")),
            }
        }
        for _ in 0..32 {
            match rx.try_recv(&mut buf) {
                Ok(got) => {
                    checker.check(&buf[..got.len])?;
                    unsaid += 1;
                    moved = true;
                }
                Err(RecvFailure::Lost(_)) => checker.life_ended(),
                Err(RecvFailure::Empty | RecvFailure::NotConnected(_)) => break,
                Err(e) => return Err(format!("receiving: {e}")),
            }
        }
        board
            .received
            .fetch_add(std::mem::take(&mut unsaid), Ordering::Relaxed);
        idle = if moved { 0 } else { idle + 1 };
        if idle > 50 {
            // Now and then the way through arm, echo and ring.
            match rx.recv(&mut buf, Duration::from_millis(1)) {
                Ok(got) => {
                    checker.check(&buf[..got.len])?;
                    unsaid += 1;
                }
                Err(RecvFailure::Lost(_)) => checker.life_ended(),
                Err(_) => {}
            }
            while side.next_event(Duration::ZERO).is_some() {}
        }
    }
    Ok(checker)
}
