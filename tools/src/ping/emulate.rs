//! A pair of emulated bridges in this process, and what their wire takes.
//!
//! Stores to an emulated window are calls. So that the result says what the chosen engine would cost on a bridge, this
//! end's lines go through a model of the processor's path to the bus first (combining buffers, word stores): what leaves
//! the model is what the emulator sees, write by write, and both counts must agree.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use ntb_emu::{
    EmuConfig, Emulator,
    model::{self, Snapshot},
    server::Endpoint,
};
use ntb_ring::{
    address::Address,
    link::{
        Link, Wrapped,
        combining::{Combining, CombiningOptions, StorePath, Traffic},
    },
    wire::{layout::CHANNELS_FIRST_LINE, page},
};

use crate::{
    cli::ping::Engine,
    exit::{Exit, Failure},
    report::WireSection,
};

/// Bytes of each emulated window: more than either end asks for. Windows take up no memory.
const WINDOW_BYTES: u64 = 64 << 20;
/// How long both counts are given to meet at an instant at which nothing is under way.
const PATIENCE: Duration = Duration::from_secs(2);

/// The bridges, and the model over this end's stores.
#[derive(Debug)]
pub struct Emulation {
    emulator: Emulator,
    family: &'static str,
    engine: Engine,
    model: Combining,
    names: [String; 2],
}

/// Both counts at one instant.
#[derive(Clone, Debug)]
pub struct Sample {
    modelled: Traffic,
    counted: Snapshot,
}

impl Emulation {
    /// Starts bridges of a family. `random` goes into their names and into the model.
    pub fn start(family: &'static str, engine: Option<Engine>, random: u64) -> Result<Self, Failure> {
        let engine = engine.unwrap_or(Engine::Wc);
        let failed = |e: String| Failure::new(Exit::Limits, "no-emulator", e);
        let names = ["a", "b"].map(|side| format!("ntb-ping-{}-{random:016x}-{side}", std::process::id()));
        let [a, b] = names.clone().map(Endpoint::Abstract);
        let found = model::family(family).ok_or_else(|| failed(format!("family {family} is unknown")))?;
        let mut config = EmuConfig::new(found, a, b);
        config.pair.window_bytes = WINDOW_BYTES;
        let emulator = Emulator::start(config)
            .map_err(|e| failed(format!("the emulated bridges cannot be started: {e}")))?;
        let path = match engine {
            Engine::Wc => StorePath::Combining8,
            Engine::Movdir64b => StorePath::Direct64,
            Engine::Uc8 => StorePath::Uncached8,
        };
        // The only channel is the first of the peer's memory.
        let credit = CHANNELS_FIRST_LINE + page::CREDIT;
        let options = CombiningOptions {
            is_credit: Some(Arc::new(move |line| line == credit)),
            ..CombiningOptions::new(path, random)
        };
        Ok(Self {
            emulator,
            family,
            engine,
            model: Combining::new(options),
            names,
        })
    }

    /// Address of this end.
    pub fn near(&self) -> Address {
        let [near, _] = &self.names;
        Address::Emulated(format!("@{near}"))
    }

    /// Address of the far end.
    pub fn far(&self) -> Address {
        let [_, far] = &self.names;
        Address::Emulated(format!("@{far}"))
    }

    /// What this is, for people.
    pub fn about(&self) -> String {
        format!(
            "emulated bridge {}; stores as by {}",
            self.family,
            self.engine.name()
        )
    }

    /// Puts the model over the link of this end.
    pub fn model(&self, link: Box<dyn Link>) -> Box<dyn Link> {
        let order = self.model.order(link.order());
        Box::new(Wrapped::new(link, order, self.model.hook()))
    }

    /// Both counts, at an instant at which they agree; after two seconds without one, as they are.
    pub fn sample(&self) -> Sample {
        let start = Instant::now();
        loop {
            let before = self.model.traffic();
            let counted = self.emulator.control().report().pair;
            let modelled = self.model.traffic();
            let agree = before == modelled && modelled.tlps == counted.a_to_b.window_writes;
            if agree || start.elapsed() > PATIENCE {
                return Sample { modelled, counted };
            }
            std::thread::yield_now();
        }
    }

    /// What `messages` one-way messages, or as many round trips, have taken between two samples.
    pub fn section(&self, [before, after]: &[Sample; 2], oneway: bool, messages: u64) -> WireSection {
        let near = after.modelled - before.modelled;
        let packets = |s: &Snapshot| s.b_to_a.window_write_packets;
        let far_tlps = packets(&after.counted).tlps - packets(&before.counted).tlps;
        let far_bytes = packets(&after.counted).wire_bytes - packets(&before.counted).wire_bytes;
        let reads = |s: &Snapshot| {
            [s.a_to_b, s.b_to_a]
                .map(|way| way.window_reads + way.register_reads)
                .iter()
                .sum::<u64>()
        };
        let line_tlps = if self.engine == Engine::Uc8 { 8 } else { 1 };
        let (ways, credits) = match oneway {
            true => (1, far_tlps),
            false => (2, near.credits * line_tlps),
        };
        let each = |count: u64, of: u64| (count as f64 / of.max(1) as f64 * 1e5).round() / 1e5;
        WireSection {
            engine: self.engine.name(),
            tlps_per_message: each(near.tlps + far_tlps, ways * messages),
            bytes_per_message: each(near.wire_bytes + far_bytes, ways * messages),
            remote_reads: reads(&after.counted) - reads(&before.counted),
            credit_tlps_per_message: each(credits, messages),
            modelled_writes: after.modelled.tlps,
            counted_writes: after.counted.a_to_b.window_writes,
        }
    }
}
