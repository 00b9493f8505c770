//! A stream of typed values through both ends of a link in one process, packed into as few lines as possible: what a
//! test of your own program can look like, without hardware and without a second process.
//!
//! `cargo run --release -p ntb-ring --example stream`

use std::time::Duration;

use ntb_ring::{
    channel::{Connection, Options, RecvFailure, SendFailure},
    link::pair::{PairOptions, pair},
    session::ChannelSpec,
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A price update: fixed width, no padding, the same bytes on every host.
#[derive(Clone, Copy, Debug, Default, PartialEq, IntoBytes, FromBytes, Immutable)]
#[repr(C)]
struct Quote {
    instrument: u32,
    size: u32,
    price: u64,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (near, far) = pair(&PairOptions::default())?;
    let near = Connection::open(Box::new(near), &Options::default())?;
    let far = Connection::open(Box::new(far), &Options::default())?;
    let (mut tx, _) = near.channel("quotes", ChannelSpec::default())?;
    let (_, mut rx) = far.channel("quotes", ChannelSpec::default())?;
    tx.wait_connected(Duration::from_secs(10))?;

    let total = 1_000_000u32;
    let reader = std::thread::spawn(move || {
        let mut next = 0;
        while next < total {
            match rx.try_recv_value::<Quote>() {
                Ok(quote) => {
                    assert_eq!(quote.instrument, next);
                    next += 1;
                }
                Err(RecvFailure::Empty | RecvFailure::NotConnected(_)) => std::thread::yield_now(),
                Err(e) => panic!("{e}"),
            }
        }
        rx.stats()
    });
    let mut next = 0;
    while next < total {
        let end = total.min(next + 64);
        let batch: Vec<Quote> = (next..end)
            .map(|i| Quote {
                instrument: i,
                size: 100,
                price: 7,
            })
            .collect();
        let mut sent = 0;
        while sent < batch.len() {
            match tx.try_send_values(&batch[sent..]) {
                Ok(n) => sent += n,
                Err(SendFailure::Full { .. }) => std::thread::yield_now(),
                Err(e) => return Err(e.into()),
            }
        }
        next = end;
    }
    let (sent, received) = (tx.stats(), reader.join().map_err(|_| "the reader panicked")?);
    eprintln!(
        "{} sent in {} lines, {} received",
        sent.messages, sent.lines, received.messages
    );
    Ok(())
}
