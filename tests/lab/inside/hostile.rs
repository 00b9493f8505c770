//! A peer that stores everywhere it can reach.

use ntb::{
    pci::{Bar, Function as _},
    window::{Aperture, ApertureChoice},
};
use serde_json::{Map, Value};

use super::{
    Result,
    port::{Port, Words},
    said, stop_at,
};

#[derive(clap::Args)]
pub(super) struct Args {
    /// The port.
    address: String,
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

pub(super) fn run(args: &Args, facts: &mut Map<String, Value>) -> Result<()> {
    let open = Port::open(&args.address)?;
    let port = &open.port;
    open.link_up()?;
    let mut words = Words(args.seed);
    let mut stores = 0_u64;
    // A word into every line of every window, of the whole BAR and not of what the peer has opened of it.
    let mut windows = |words: &mut Words| -> Result<()> {
        for index in 0..port.windows().len() {
            let aperture = Aperture::open(&**port, index, ApertureChoice::Best);
            let aperture = aperture.map_err(|e| said("the aperture")(&e))?;
            for line in 0..aperture.bytes() / 64 {
                let word = words.next().unwrap_or_default();
                let stored = aperture.write(line * 64 + word % 8 * 8, &word.to_le_bytes());
                stored.map_err(|e| said("a store")(&e))?;
                stores += 1;
            }
        }
        // Behind the stores: what reads across the link pushes them.
        port.peer_scratchpad(0)
            .map_err(|e| said("the peer's scratchpad")(&e))?;
        Ok(())
    };
    stop_at("link up")?;
    windows(&mut words)?;
    for index in 0..port.scratchpads() {
        let word = words.next().unwrap_or_default() as u32;
        port.set_peer_scratchpad(index, word)
            .map_err(|e| said("a scratchpad")(&e))?;
    }
    port.ring_peer(port.doorbell_bits())
        .map_err(|e| said("the doorbells")(&e))?;
    stop_at("written")?;
    windows(&mut words)?;
    stop_at("written again")?;
    // All registers of the port, whatever they are: on some families the peer's translations are among them.
    let function = port.function();
    let registers = function
        .bar_or_error(Bar::B0)
        .map_err(|e| said("BAR0")(&e))?
        .bytes;
    let mut refused = 0_u64;
    for offset in (0..registers).step_by(8) {
        let word = words.next().unwrap_or_default();
        refused += u64::from(function.bar_write(Bar::B0, offset, &word.to_le_bytes()).is_err());
    }
    let again = windows(&mut words);
    facts.insert("stores".to_owned(), stores.into());
    facts.insert("register_bytes".to_owned(), registers.into());
    facts.insert("register_writes_refused".to_owned(), refused.into());
    facts.insert("windows_after_scribbling".to_owned(), again.is_ok().into());
    Ok(())
}
