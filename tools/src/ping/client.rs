//! The measuring side of `ntb-ping`.

mod site;
mod watch;

use std::{
    io::Write,
    time::{Duration, Instant, SystemTime},
};

use ntb_mem::clock::{Clock, ClockFacts};

use super::{
    diagnose::{Signs, diagnose},
    emulate::{Emulation, Sample},
    measure::{Awaited, Ended, Plan, Run},
    message::{Counted, Kind},
};
use crate::{
    cli::ping::{DEFAULT_COUNT, DEFAULT_PACED, DEFAULT_STREAM, RunArgs},
    environment::{Source, topology::Pinned},
    exit::{Exit, Failure},
    floor::{self, Floor},
    interrupt::Interrupt,
    noise::{Counts, Noise},
    report::{ErrorSection, FloorSection, LinkSection, OneWay, PeerSection, Report, SCHEMA},
    stats,
};
use site::Site;

/// Waiting for longer than this, or than the time-out, ends a run.
const STALL: Duration = Duration::from_secs(10);
/// Warming up ends after this time.
const WARM: Duration = Duration::from_secs(1);
/// How long replies may still come after an interrupt.
const DRAIN: Duration = Duration::from_millis(150);
/// How long the far end may take to report what it counted, and how long after an interrupt: all ends within a second.
const REPORT: Duration = Duration::from_secs(5);
const LAST_REPORT: Duration = Duration::from_millis(350);
/// A message without a reply that is younger than this at an interrupt counts as under way, not as lost.
const YOUNG_NS: u64 = 1_000_000_000;
/// Messages no longer than this take no longer than what both ends say to each other when they meet: one packet.
const PACKET: u64 = 1400;
/// Floors before and after that differ by more than this spoil a result.
const FLOOR_DRIFT: f64 = 0.2;

/// Measures and prints.
pub fn run(args: &RunArgs) -> Result<Exit, Failure> {
    let interrupt = Interrupt::install().map_err(|e| Failure::new(Exit::Limits, "signals", e.to_string()))?;
    if args.baseline {
        return super::baseline::run(args, &interrupt);
    }
    if let Some(path) = &args.histogram {
        // Better now than after an hour of measuring.
        std::fs::File::create(path).map_err(|e| unwritable(path, &e))?;
    }
    let (clock, facts) = Clock::set_up();
    let mut site = Site::open(args, clock, &interrupt)?;
    site.meet()?;
    let outcome = measure(args, &mut site, clock, &interrupt);
    if let Some(path) = &args.histogram {
        write_histogram(path, &outcome)?;
    }
    watch::end_progress(outcome.run.elapsed_ns());
    let report = report(args, &site, &facts, &outcome);
    // Nothing below can be lost to a peer that does not end.
    let text = if args.json {
        report.json() + "\n"
    } else {
        report.text()
    };
    let printed = std::io::stdout().lock().write_all(text.as_bytes());
    drop(site);
    if printed.is_err() {
        return Ok(Exit::Bad); // standard output was closed: nobody reads the result
    }
    Ok(verdict(&report, outcome.error.as_ref()))
}

fn unwritable(path: &std::path::Path, e: &std::io::Error) -> Failure {
    Failure::new(
        Exit::Limits,
        "histogram-file",
        format!("--histogram: '{}' cannot be written: {e}", path.display()),
    )
}

/// All that a measurement has brought.
#[derive(Debug)]
struct Outcome {
    run: Run,
    started: SystemTime,
    noise: Noise,
    floors: [Result<Floor, String>; 2],
    /// What the far end counted, where it said so.
    far: Option<Counted>,
    interrupted: bool,
    error: Option<Failure>,
    pinned: Option<u32>,
    /// What the wire had taken before and after.
    wire: Option<[Sample; 2]>,
}

fn plan(args: &RunArgs) -> Plan {
    let nothing = args.count.is_none() && args.duration.is_none();
    let count = match args.count {
        None if nothing && args.rate.is_none() => Some(if args.oneway {
            DEFAULT_STREAM
        } else {
            DEFAULT_COUNT
        }),
        count => count,
    };
    let duration = args
        .duration
        .or((nothing && args.rate.is_some()).then_some(DEFAULT_PACED));
    Plan {
        size: usize::try_from(args.size).unwrap_or(usize::MAX),
        count,
        duration_ns: duration.map(nanos),
        rate_hz: args.rate,
        kind: if args.oneway { Kind::Stream } else { Kind::Echo },
        stall_ns: nanos(args.timeout.min(STALL)),
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn measure(args: &RunArgs, site: &mut Site, clock: Clock, interrupt: &Interrupt) -> Outcome {
    let plan = plan(args);
    let pinned = site.cpus.0.and_then(|cpu| Pinned::to(cpu).ok());
    let floor = |site: &Site| {
        floor::between_processes(site.floor_cpu(), clock, || !interrupt.came()).map_err(|e| e.to_string())
    };
    let before = floor(site);

    let warm_plan = Plan {
        count: Some(args.warmup),
        duration_ns: Some(nanos(WARM)),
        rate_hz: None,
        ..plan
    };
    let mut warm = Run::new(warm_plan, 0);
    let mut error = None;
    let mut interrupted = false;
    if args.warmup > 0 {
        site.start(&plan, 0);
        (error, interrupted) = go(args, site, &mut warm, warm_plan, interrupt);
    }

    let sample = |site: &Site| site.emulation.as_ref().map(Emulation::sample);
    let wire_before = sample(site);
    let mut run = Run::new(plan, warm.next_seq());
    let started = SystemTime::now();
    let counts = Counts::read();
    if error.is_none() && !interrupted {
        site.start(&plan, run.next_seq());
        (error, interrupted) = go(args, site, &mut run, plan, interrupt);
    }
    let noise = Counts::read().since(counts, run.largest_gap_ns);
    let far = if error.is_none() {
        site.finish(if interrupted { LAST_REPORT } else { REPORT })
    } else {
        None
    };
    let wire = wire_before.zip(sample(site)).map(<[Sample; 2]>::from);
    let after = if interrupted {
        Err("not measured after an interrupt".to_owned())
    } else {
        floor(site)
    };
    Outcome {
        run,
        started,
        noise,
        floors: [before, after],
        far,
        interrupted,
        error,
        pinned: pinned.as_ref().map(|p| p.cpu),
        wire,
    }
}

/// Drives a run to its end, over losses of the peer. True when it was interrupted.
fn go(
    args: &RunArgs,
    site: &mut Site,
    run: &mut Run,
    plan: Plan,
    interrupt: &Interrupt,
) -> (Option<Failure>, bool) {
    let begun = Instant::now();
    loop {
        let error = match run.drive(&mut site.station) {
            Ended::Done => return (None, false),
            Ended::Stopped => {
                run.drain(&mut site.station, nanos(DRAIN));
                return (None, true);
            }
            Ended::Down => {
                // With an end in time, there is no use in waiting far beyond it.
                let left = plan
                    .duration_ns
                    .map(|d| (Duration::from_nanos(d) + WARM).saturating_sub(begun.elapsed()));
                let patience = args.timeout.min(left.unwrap_or(Duration::MAX));
                match site.recover(patience, &plan, run.next_seq()) {
                    Ok(()) => continue,
                    Err(_) if interrupt.came() => return (None, true),
                    Err(failure) => failure,
                }
            }
            Ended::Stalled { awaited, waited_ns } => {
                stalled(site, run, awaited, Duration::from_nanos(waited_ns))
            }
            Ended::Broken(failure) => *failure,
        };
        return (Some(error), false);
    }
}

fn stalled(site: &Site, run: &Run, awaited: Awaited, waited: Duration) -> Failure {
    diagnose(&Signs {
        state: site.connection.state(),
        silence: site.events.silence().map(|s| s.since.elapsed()),
        unread: site.station.sender().hold_up().map(|h| h.unread_messages),
        unanswered: run.unanswered(),
        peer_sleeps: site.welcome.sleeps,
        awaited,
        waited,
    })
}

fn write_histogram(path: &std::path::Path, outcome: &Outcome) -> Result<(), Failure> {
    let mut histograms = vec![("rtt", &outcome.run.response)];
    if outcome.run.service.count() > 0 {
        histograms.push(("service", &outcome.run.service));
    }
    let lasted = Duration::from_nanos(outcome.run.elapsed_ns());
    let comment = concat!("ntb-ping ", env!("CARGO_PKG_VERSION"));
    stats::write_log(path, comment, outcome.started, lasted, &histograms).map_err(|e| unwritable(path, &e))
}

fn report(args: &RunArgs, site: &Site, facts: &ClockFacts, outcome: &Outcome) -> Report {
    let run = &outcome.run;
    let elapsed_ns = run.elapsed_ns();
    let far = outcome.far.unwrap_or_default();
    let check = run.check();
    let under_way = match (outcome.interrupted, args.oneway) {
        (true, false) => run.under_way(YOUNG_NS),
        // What the far end has counted is unknown, and nothing hints at a loss.
        (true, true) if outcome.far.is_none() => run.sent(),
        _ => 0,
    };
    let (received, duplicated, out_of_order) = if args.oneway {
        (far.received, far.duplicated, far.out_of_order)
    } else {
        // The far end echoes what it gets, so that its duplicates come back; its count tells nothing new.
        (check.received, check.duplicated, check.out_of_order)
    };
    let rtt = run.response.percentiles();
    let floor = floor_section(&outcome.floors, facts);
    let environment = Source::default().read(
        (outcome.pinned, site.cpus.1),
        site.same_machine(),
        site.facts.page_bytes,
        facts,
    );
    let mut report = Report {
        tool: "ntb-ping",
        version: env!("CARGO_PKG_VERSION"),
        schema: SCHEMA,
        link: LinkSection {
            address: site.facts.address.clone(),
            kind: site.facts.kind.name(),
            reason: site.chosen.clone(),
            engine: site.facts.engine,
        },
        mode: if args.oneway { "one-way" } else { "round-trip" },
        size_bytes: args.size,
        rate_hz: args.rate,
        reached_hz: per_second(run.sent(), elapsed_ns),
        elapsed_ns,
        warmup: run.next_seq().wrapping_sub(run.sent()), // as many as there was time for
        wait: args.wait.name(),
        sent: run.sent(),
        received,
        lost: run.sent().saturating_sub(received + under_way),
        under_way,
        duplicated,
        out_of_order,
        corrupt: run.corrupt + far.corrupt,
        unsent: run.unsent,
        wire: site
            .emulation
            .as_ref()
            .zip(outcome.wire.as_ref())
            .map(|(emulation, samples)| emulation.section(samples, args.oneway, received)),
        rtt_ns: rtt,
        rtt_samples: run.response.count(),
        rtt_mean_ns: run.response.mean().map(tenth),
        loop_mean_ns: (args.rate.is_none() && !args.oneway && check.received > 0)
            .then(|| tenth(elapsed_ns as f64 / check.received as f64)),
        service_ns: args.rate.map(|_| run.service.percentiles()),
        oneway: args.oneway.then(|| {
            let rate = per_second(far.received, far.span_ns).unwrap_or(0.0);
            OneWay {
                span_ns: far.span_ns,
                messages_per_second: rate,
                bytes_per_second: rate * args.size as f64,
            }
        }),
        floor_ns: floor,
        rtt_p50_over_floor: rtt
            .p50
            .filter(|_| args.rate.is_none()) // a schedule's delays are not the link's
            .zip(floor.line_rtt_p50)
            .map(|(rtt, line)| (rtt as f64 / line.max(1) as f64 * 1000.0).round() / 1000.0),
        noise: outcome.noise,
        peer: PeerSection {
            pid: site.welcome.pid,
            own: site.peer.is_some(),
            reconnects: site.events.runs().saturating_sub(1),
        },
        events: site.events.records(),
        environment,
        warnings: Vec::new(),
        error: outcome.error.as_ref().map(|e| ErrorSection {
            name: e.name,
            what: e.what.clone(),
        }),
    };
    report.warnings = warnings(&report, site, outcome);
    report
}

fn per_second(count: u64, ns: u64) -> Option<f64> {
    (ns > 0).then(|| tenth(count as f64 * 1e9 / ns as f64))
}

fn tenth(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

fn floor_section(floors: &[Result<Floor, String>; 2], facts: &ClockFacts) -> FloorSection {
    let [before, after] = floors.each_ref().map(|f| f.as_ref().ok());
    let medians: Vec<u64> = [before, after].into_iter().flatten().map(|f| f.p50_ns).collect();
    FloorSection {
        clock: tenth(facts.pair_ns),
        line_rtt_p50: (!medians.is_empty()).then(|| medians.iter().sum::<u64>() / medians.len() as u64),
        line_rtt_p50_before: before.map(|f| f.p50_ns),
        line_rtt_p50_after: after.map(|f| f.p50_ns),
        line_rtt_mean_before: before.map(|f| tenth(f.mean_ns)),
        line_rtt_mean_after: after.map(|f| tenth(f.mean_ns)),
    }
}

fn warnings(report: &Report, site: &Site, outcome: &Outcome) -> Vec<String> {
    let mut out = report.environment.warnings();
    out.extend(report.link.warning());
    // What was said when both ends met fits into a packet too.
    if report.size_bytes <= PACKET && report.rate_hz.is_none() && report.oneway.is_none() {
        out.extend(
            report
                .link
                .dearer_than_tcp(report.rtt_ns.p50, site.tcp_round_trip),
        );
    }
    for (when, floor) in ["before", "after"].iter().zip(&outcome.floors) {
        if let Err(e) = floor {
            out.push(format!("the floor {when} the measurement is missing: {e}"));
        }
    }
    let floor = &report.floor_ns;
    if let (Some(a), Some(b)) = (floor.line_rtt_p50_before, floor.line_rtt_p50_after) {
        let drift = (a.max(b) as f64 / a.min(b).max(1) as f64) - 1.0;
        if drift > FLOOR_DRIFT {
            out.push(format!(
                "the floor moved by {:.0} % during the measurement ({a} ns before, {b} ns after): compare nothing with it",
                drift * 100.0
            ));
        }
    }
    if let Some(e) = &site.pin_trouble {
        out.push(e.clone());
    }
    if report.unsent > 0 {
        out.push(format!(
            "the rate was not reached: {} messages that were due were not sent; {} Hz asked, {} Hz reached",
            report.unsent,
            report.rate_hz.unwrap_or(0.0),
            report.reached_hz.unwrap_or(0.0)
        ));
    } else if let (Some(asked), Some(reached)) = (report.rate_hz, report.reached_hz)
        && report.sent > 100
        && reached < asked * 0.99
    {
        out.push(format!(
            "the rate was not reached: {asked} Hz asked, {reached} Hz reached"
        ));
    }
    if report.peer.reconnects > 0 {
        out.push(format!(
            "the link ran anew {} time(s): messages under way were lost, and what the far end had counted before is not in \
             this result",
            report.peer.reconnects
        ));
    }
    if outcome.noise.involuntary_context_switches > 0 {
        out.push(format!(
            "the measuring thread was taken off its processor {} time(s): the largest values may be the machine's, not the \
             link's",
            outcome.noise.involuntary_context_switches
        ));
    }
    if outcome.error.is_none() && outcome.far.is_none() {
        out.push("the far end did not report what it counted".to_owned());
    }
    if let Some(wire) = &report.wire
        && wire.modelled_writes != wire.counted_writes
    {
        out.push(format!(
            "the model says that this end made {} writes and the emulator counted {}: one of them is wrong",
            wire.modelled_writes, wire.counted_writes
        ));
    }
    if outcome.interrupted {
        out.push("interrupted: this is what was measured until then".to_owned());
    }
    out
}

fn verdict(report: &Report, error: Option<&Failure>) -> Exit {
    if let Some(failure) = error {
        return failure.exit;
    }
    let agree = report
        .wire
        .is_none_or(|wire| wire.modelled_writes == wire.counted_writes);
    let good = agree
        && report.lost == 0
        && report.duplicated == 0
        && report.out_of_order == 0
        && report.corrupt == 0;
    if good { Exit::Good } else { Exit::Bad }
}
