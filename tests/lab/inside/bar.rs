//! A window onto another device's BAR. The way in, its proof and its end are those of a GPU's memory (`ntb_gpudirect::inbound`);
//! only the memory comes from elsewhere.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use ntb::{
    pci::{Bar, BarMap, CacheType, Function as _, PciFunction, config},
    window::{Aperture, ApertureChoice},
};
use ntb_gpudirect::{
    inbound::{DeviceWindow, PeerBar},
    proof::Proof,
};
use ntb_mem::export::Exportable;
use serde_json::{Map, Value};

use super::{
    Result,
    port::{Port, Words, function},
    said, stop_at,
};

/// Longest wait for the message.
const PATIENCE: Duration = Duration::from_secs(60);
/// What the BAR holds before.
const BLANK: u64 = 0x1111_2222_3333_4444;

#[derive(clap::Args)]
pub(super) struct ReceiveArgs {
    /// The port.
    address: String,
    /// The other device, such as ntb:0000:00:03.0, bound to vfio-pci.
    device: String,
    /// Which BAR of it.
    #[arg(long, default_value_t = 2)]
    bar: u8,
    /// Bytes of the message.
    #[arg(long, default_value_t = 65536)]
    bytes: u64,
    /// Where in the BAR the window begins: a multiple of 4096.
    #[arg(long, default_value_t = 4096)]
    offset: u64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(clap::Args)]
pub(super) struct SendArgs {
    /// The port.
    address: String,
    /// Bytes of the message.
    #[arg(long, default_value_t = 65536)]
    bytes: u64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn bar(number: u8) -> Result<Bar> {
    let found = Bar::ALL
        .into_iter()
        .find(|bar| bar.index() == usize::from(number));
    found.ok_or_else(|| format!("there is no BAR {number}"))
}

/// Words of the BAR from `offset` on that are not what `expected` gives.
fn wrong_words(map: &BarMap, offset: u64, expected: impl Iterator<Item = u64>) -> Result<u64> {
    let mut wrong = 0;
    for (at, expected) in (offset..).step_by(8).zip(expected) {
        let word: u64 = map.load(at).map_err(|e| said("reading the BAR")(&e))?;
        wrong += u64::from(word != expected);
    }
    Ok(wrong)
}

/// What goes the way before the message, the same at both ends.
fn proof(seed: u64, bytes: u64) -> Proof {
    Proof::new(seed, 1, bytes / 64)
}

/// Maps the BAR and opens a window onto its part.
fn enter(
    args: &ReceiveArgs,
    open: &Port,
    other: &Arc<dyn PciFunction>,
) -> Result<(Arc<BarMap>, Arc<PeerBar>, DeviceWindow)> {
    let map = Arc::clone(other).map_bar(bar(args.bar)?, CacheType::Uncached);
    let map = Arc::new(map.map_err(|e| said("mapping the BAR")(&e))?);
    let part = PeerBar::new(&map, args.offset, args.bytes);
    let part = Arc::new(part.map_err(|e| said("the BAR's part")(&e))?);
    let memory: Arc<dyn Exportable> = Arc::clone(&part) as _;
    let window = DeviceWindow::open(&open.port, &open.space, 0, &memory);
    let window = window.map_err(|e| said("opening a window onto the BAR")(&e))?;
    Ok((map, part, window))
}

pub(super) fn receive(args: &ReceiveArgs, facts: &mut Map<String, Value>) -> Result<()> {
    let open = Port::open(&args.address)?;
    let other = function(&args.device)?;
    let number = bar(args.bar)?;
    let size = other.bar_or_error(number).map_err(|e| said("the BAR")(&e))?.bytes;
    let map = Arc::clone(&other)
        .map_bar(number, CacheType::Uncached)
        .map_err(|e| said("mapping the BAR")(&e))?;
    for at in (0..size).step_by(8) {
        map.store(at, BLANK).map_err(|e| said("filling the BAR")(&e))?;
    }
    drop(map);
    open.link_up()?;
    let (map, part, window) = enter(args, &open, &other)?;
    let map = &*map;
    let proof = proof(args.seed, args.bytes);
    let verify = || window.verify(&proof, |at, to| part.read(at, to));
    // Nothing has been stored yet: who finds a pattern now looks at something else.
    if verify().is_ok() {
        return Err("the pattern is there before it was stored".to_owned());
    }
    eprintln!("window open");
    let until = Instant::now() + PATIENCE;
    while let Err(e) = verify() {
        if Instant::now() > until {
            return Err(e.to_string());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    stop_at("proven")?;
    let words = args.bytes / 8;
    let message = || Words(args.seed).take(words as usize);
    let last = message().last().unwrap_or_default();
    let until = Instant::now() + PATIENCE;
    while map
        .load::<u64>(args.offset + (words - 1) * 8)
        .map_err(|e| said("reading the BAR")(&e))?
        != last
    {
        if Instant::now() > until {
            return Err("the message's last word did not come".to_owned());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let differing = wrong_words(map, args.offset, message())?;
    let blank = |bytes: u64| std::iter::repeat_n(BLANK, (bytes / 8) as usize);
    let end = args.offset + args.bytes;
    let outside = wrong_words(map, 0, blank(args.offset))? + wrong_words(map, end, blank(size - end))?;
    facts.insert("bytes".to_owned(), args.bytes.into());
    facts.insert("bar_bytes".to_owned(), size.into());
    facts.insert("differing_words".to_owned(), differing.into());
    facts.insert("changed_outside".to_owned(), outside.into());
    if differing + outside > 0 {
        return Err(format!(
            "{differing} words of the message differ, {outside} words outside it have changed"
        ));
    }
    stop_at("received")?;
    let lost = trouble(args, &open, &other, (window, part))?;
    facts.insert("decoding_off".to_owned(), lost.into());
    Ok(())
}

/// The other device's decoding goes off and on, it is reset, and its memory is taken out of the bridge's reach. Returns how the
/// first was told.
fn trouble(
    args: &ReceiveArgs,
    open: &Port,
    other: &Arc<dyn PciFunction>,
    (window, part): (DeviceWindow, Arc<PeerBar>),
) -> Result<String> {
    let decode = |on: bool| -> Result<()> {
        let command =
            config::read16(&**other, config::COMMAND).map_err(|e| said("the command register")(&e))?;
        let command = match on {
            true => command | config::COMMAND_MEMORY,
            false => command & !config::COMMAND_MEMORY,
        };
        config::write16(&**other, config::COMMAND, command).map_err(|e| said("the command register")(&e))
    };
    let verify = |window: &DeviceWindow, part: &PeerBar, round| {
        window.verify(&proof(args.seed + round, args.bytes), |at, to| part.read(at, to))
    };
    decode(false)?;
    let told = match verify(&window, &part, 1) {
        Err(e) if e.name == "gpu-bar-lost" => e.to_string(),
        other => return Err(format!("a BAR that is not decoded is not told: {other:?}")),
    };
    decode(true)?;
    window.close().map_err(|e| said("closing the window")(&e))?;
    drop(part);
    // All of it anew, as after any loss.
    let (map, part, window) = enter(args, open, other)?;
    stop_at("open again")?;
    verify(&window, &part, 1).map_err(|e| said("after decoding was switched on again")(&e))?;

    // A reset takes nothing away: what is stored afterwards arrives.
    other
        .reset()
        .map_err(|e| said("resetting the other device")(&e))?;
    decode(true)?;
    stop_at("reset")?;
    verify(&window, &part, 2).map_err(|e| said("after a reset")(&e))?;

    // The bridge's I/O mapping goes, and the window stays open as if somebody had forgotten it: the IOMMU refuses.
    let (iova, bytes) = (window.iova(), window.bytes());
    window.close().map_err(|e| said("closing the window")(&e))?;
    drop(part);
    for at in (0..args.bytes).step_by(8) {
        map.store(args.offset + at, BLANK)
            .map_err(|e| said("filling the BAR")(&e))?;
    }
    let wrong = open.port.open_window(0, iova, bytes);
    wrong.map_err(|e| said("opening a window onto nothing")(&e))?;
    stop_at("window onto nothing")?;
    let changed = wrong_words(
        &map,
        args.offset,
        std::iter::repeat_n(BLANK, (args.bytes / 8) as usize),
    )?;
    let close = open.port.close_window(0);
    close.map_err(|e| said("closing the window onto nothing")(&e))?;
    match changed {
        0 => Ok(told),
        _ => Err(format!(
            "{changed} words have arrived through an I/O mapping that was taken away"
        )),
    }
}

pub(super) fn send(args: &SendArgs, facts: &mut Map<String, Value>) -> Result<()> {
    let open = Port::open(&args.address)?;
    open.link_up()?;
    stop_at("link up")?;
    let aperture = Aperture::open(&*open.port, 0, ApertureChoice::Best);
    let aperture = aperture.map_err(|e| said("the aperture")(&e))?;
    let pattern = |round| -> Result<()> {
        for (at, line) in proof(args.seed + round, args.bytes).lines() {
            aperture
                .write(at * 64, &line.to_bytes())
                .map_err(|e| said("a store of the pattern")(&e))?;
        }
        Ok(())
    };
    pattern(0)?;
    stop_at("pattern stored")?;
    for (at, word) in (0..args.bytes).step_by(8).zip(Words(args.seed)) {
        aperture
            .write(at, &word.to_le_bytes())
            .map_err(|e| said("a store")(&e))?;
    }
    facts.insert("bytes".to_owned(), args.bytes.into());
    stop_at("sent")?;
    for round in 1..=3 {
        pattern(round)?;
        stop_at(&format!("round {round}"))?;
    }
    Ok(())
}
