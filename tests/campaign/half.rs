//! One machine's half of a kill campaign: its side of the traffic, killed and restarted here, while the other machine does
//! the same or nothing to its own.

use std::{
    io::Read as _,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use crate::{
    Report, Rng,
    kill::{Hits, Side, one_round, tell_kills, until_traffic},
    leftovers::Leftovers,
    phase::PHASES,
};

/// How long between two looks at the side.
const LOOK: Duration = Duration::from_millis(20);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// This machine's end of the link, such as ntb:0000:81:00.0.
    address: String,
    /// Seed of all choices.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Kills of this machine's process. After the last, traffic goes on: each line on standard input has it held that
    /// messages still come, and the end of standard input ends the campaign.
    #[arg(long, default_value_t = 0)]
    kills: u64,
}

pub(crate) fn run(args: &Args) -> Result<Report, String> {
    let before = Leftovers::list();
    let mut report = Report::new("half", args.seed);
    report.set("link", args.address.clone());
    let mut hits: Hits = [0; PHASES.len()];
    let mut slowest = Duration::ZERO;
    let input = watch_input();
    {
        let mut rng = Rng::new(args.seed);
        let mut sides = [Side::new(&args.address, rng.next())?.loud()];
        let mut campaign = || -> Result<(), String> {
            sides[0].start()?;
            until_traffic(&mut sides).map_err(|e| format!("before the first kill: {e}"))?;
            eprintln!("traffic");
            for round in 0..args.kills {
                let took = one_round(&mut sides, &mut rng, round, &mut hits);
                slowest = slowest.max(took.map_err(|e| format!("round {round}: {e}"))?);
            }
            eprintln!("kills done");
            let mut heard = 0;
            while let News::Lines(lines) = wait_for(&mut sides[0], &input, heard)? {
                heard = lines;
                until_traffic(&mut sides).map_err(|e| format!("at line {heard}: {e}"))?;
                eprintln!("flows {heard}");
            }
            Ok(())
        };
        if let Err(e) = campaign() {
            eprintln!("violation: {e}");
            report.violation(e);
        }
        let board = sides[0].board();
        report.set("lives", board.running());
        report.set("sent", board.sent());
        report.set("received", board.received());
    }
    tell_kills(&mut report, &hits, slowest);
    for left in Leftovers::list().new_since(&before) {
        report.violation(left);
    }
    Ok(report)
}

/// What standard input has brought.
enum News {
    /// So many lines so far.
    Lines(u64),
    End,
}

/// Waits for more than the lines that were `heard`.
fn wait_for(side: &mut Side, input: &AtomicU64, heard: u64) -> Result<News, String> {
    loop {
        // Nothing else is handed over with the count.
        match input.load(Ordering::Relaxed) {
            END => return Ok(News::End),
            lines if lines > heard => return Ok(News::Lines(lines)),
            _ => {}
        }
        side.check_alive()?;
        std::thread::sleep(LOOK);
    }
}

/// The count of lines when no more will come.
const END: u64 = u64::MAX;

fn watch_input() -> Arc<AtomicU64> {
    let lines = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&lines);
    std::thread::spawn(move || {
        let mut byte = [0];
        while matches!(std::io::stdin().read(&mut byte), Ok(1)) {
            if byte == *b"\n" {
                count.fetch_add(1, Ordering::Relaxed);
            }
        }
        count.store(END, Ordering::Relaxed);
    });
    lines
}
