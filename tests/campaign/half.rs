//! One machine's half of a kill campaign: its side of the traffic, killed and restarted here, while the other machine does
//! the same or nothing to its own.

use std::{
    io::Read as _,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
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
    /// Kills of this machine's process. After the last, traffic goes on: a line on standard input has it held that messages
    /// still come, and the end of standard input ends the campaign.
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
        let mut sides = [Side::new(&args.address, rng.next())?];
        let mut campaign = || -> Result<(), String> {
            sides[0].start()?;
            until_traffic(&mut sides).map_err(|e| format!("before the first kill: {e}"))?;
            eprintln!("traffic");
            for round in 0..args.kills {
                let took = one_round(&mut sides, &mut rng, round, &mut hits);
                slowest = slowest.max(took.map_err(|e| format!("round {round}: {e}"))?);
            }
            eprintln!("kills done");
            wait_for(&mut sides[0], &input, LINE)?;
            until_traffic(&mut sides).map_err(|e| format!("at the end: {e}"))?;
            eprintln!("flows");
            wait_for(&mut sides[0], &input, END)
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

fn wait_for(side: &mut Side, input: &AtomicU8, news: u8) -> Result<(), String> {
    while input.load(Ordering::Acquire) < news {
        side.check_alive()?;
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// News of standard input.
const LINE: u8 = 1;
const END: u8 = 2;

fn watch_input() -> Arc<AtomicU8> {
    let news = Arc::new(AtomicU8::new(0));
    let set = Arc::clone(&news);
    std::thread::spawn(move || {
        let mut byte = [0];
        while matches!(std::io::stdin().read(&mut byte), Ok(1)) {
            // Pairs with the acquire in `wait_for`, as below; nothing else is handed over.
            set.store(LINE, Ordering::Release);
        }
        set.store(END, Ordering::Release);
    });
    news
}
