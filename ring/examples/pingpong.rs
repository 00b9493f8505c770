//! Two processes in one file: run it twice, in either order.
//!
//! `cargo run --release -p ntb-ring --example pingpong -- ask` and `... -- answer`

use std::time::{Duration, Instant};

use ntb_ring::{
    channel::{Connection, Options, RecvFailure},
    link::select::{self, LinkOptions},
    session::ChannelSpec,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let role = std::env::args().nth(1).unwrap_or_default();
    let minute = Duration::from_secs(60);
    let opened = select::open(&"soft:example-pingpong".parse()?, &LinkOptions::default())?;
    let connection = Connection::open(opened.link, &Options::default())?;
    let (mut tx, mut rx) = connection.channel("pingpong", ChannelSpec::default())?;
    let mut buf = [0; 48];
    match role.as_str() {
        "ask" => {
            tx.wait_connected(minute)?;
            let start = Instant::now();
            let rounds = 100_000u32;
            for _ in 0..rounds {
                tx.send(&buf, minute)?;
                rx.recv(&mut buf, minute)?;
            }
            eprintln!("{rounds} round trips, {:?} each", start.elapsed() / rounds);
        }
        "answer" => loop {
            match rx.recv(&mut buf, minute) {
                Ok(got) => drop(tx.send(&buf[..got.len], minute)?),
                Err(RecvFailure::Lost(_)) => break, // the asker is done
                Err(e) => return Err(e.into()),
            }
        },
        _ => return Err("say 'ask' or 'answer'".into()),
    }
    Ok(())
}
