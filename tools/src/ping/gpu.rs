//! Ends on GPUs: `--from` and `--to`.

use std::{sync::Arc, time::Duration};

use ntb_gpudirect::{
    GpuError,
    across::{self, End as Kind, Outcome, Trial},
    cuda::{Cuda, Driver},
    local,
    seam::Gpu,
};
use ntb_ring::link::pair::{PairOptions, pair};
use serde_json::json;

use crate::{
    cli::ping::{DEFAULT_COUNT, End, RunArgs},
    exit::{Exit, Failure},
};

/// Messages that are sent by default: each is compared byte by byte.
const COUNT: u64 = DEFAULT_COUNT / 10;

fn failure(e: &GpuError) -> Failure {
    Failure::new(Exit::from_class(e.exit), e.name, e.to_string())
}

fn open(end: End) -> Result<Option<Arc<dyn Gpu>>, Failure> {
    let End::Gpu(index) = end else { return Ok(None) };
    let driver = Driver::find().map_err(|e| failure(&e))?;
    let gpu = Cuda::open(&driver, index).map_err(|e| failure(&e))?;
    Ok(Some(Arc::new(gpu)))
}

/// What was measured, whichever way.
struct Figures {
    messages: u64,
    elapsed: Duration,
    /// Looks that found a mark before its message was whole, where they were counted.
    incomplete: Option<u64>,
    /// What the time is of.
    of: &'static str,
    way: String,
}

impl From<local::Measured> for Figures {
    fn from(m: local::Measured) -> Self {
        Self {
            messages: m.messages,
            elapsed: m.elapsed,
            incomplete: Some(m.incomplete),
            of: "kernel starts are part of it",
            way: m.way,
        }
    }
}

impl From<Outcome> for Figures {
    fn from(o: Outcome) -> Self {
        Self {
            messages: o.messages,
            elapsed: o.elapsed,
            incomplete: None,
            of: "kernel starts, and comparing every byte at the other end, are part of it",
            way: o.way,
        }
    }
}

/// Sends from one end to the other, and prints. The GPUs come first: without them nothing else is of interest. Over an address
/// the receiving end is at the far end, and so is its GPU.
#[allow(clippy::print_stdout, reason = "the result goes to standard output")]
pub fn run(args: &RunArgs) -> Result<Exit, Failure> {
    let (from, to) = (args.from.unwrap_or(End::Host), args.to.unwrap_or(End::Host));
    let sender = open(from)?;
    let count = args.count.unwrap_or(COUNT);
    // The range was checked when the command line was read.
    let size = u32::try_from(args.size).unwrap_or(across::LARGEST);
    let trial = Trial {
        size,
        messages: count,
        far: Some(match to {
            End::Host => Kind::Host,
            End::Gpu(_) => Kind::Gpu,
        }),
    };
    let (gpu, measured) = if let Some(address) = &args.address {
        let outcome = across::send(address, sender.as_ref(), trial);
        (sender, outcome.map(Figures::from))
    } else {
        match (sender, open(to)?) {
            (Some(gpu), None) => {
                let measured = local::to_host(&gpu, size, count);
                (Some(gpu), measured.map(Figures::from))
            }
            (None, Some(gpu)) => {
                let measured = local::to_gpu(&gpu, size, count);
                (Some(gpu), measured.map(Figures::from))
            }
            (Some(gpu), Some(other)) => {
                let outcome = between(&gpu, &other, trial);
                (Some(gpu), outcome.map(Figures::from))
            }
            (None, None) => {
                return Err(Failure::new(
                    Exit::Usage,
                    "no-gpu-named",
                    "--from and --to name no GPU: one of them is to be gpu:N; leave both out to measure between processors",
                ));
            }
        }
    };
    let measured = measured.map_err(|e| failure(&e))?;
    let name = gpu.map_or_else(|| "at the far end".to_owned(), |gpu| gpu.facts().name.clone());
    println!("{}", told(args, (from, to), &name, size, &measured));
    Ok(Exit::Good)
}

/// Two GPUs of this machine, or one twice: through memory of the host, since there is no bridge.
fn between(from: &Arc<dyn Gpu>, to: &Arc<dyn Gpu>, trial: Trial) -> Result<Outcome, GpuError> {
    let link = |e: ntb_ring::link::LinkError| GpuError {
        name: e.name,
        exit: e.exit,
        what: e.what,
        code: None,
        errno: e.errno,
    };
    let (near, far) = pair(&PairOptions::default()).map_err(link)?;
    std::thread::scope(|s| {
        let receiving = s.spawn(|| across::receive_over(Box::new(far), Some(to), None));
        let sent = across::send_over(Box::new(near), Some(from), trial);
        match receiving.join() {
            // What the receiver says is wrong is wrong at the sender too, and said better there.
            Ok(_) | Err(_) => sent,
        }
    })
}

fn told(args: &RunArgs, (from, to): (End, End), gpu: &str, size: u32, m: &Figures) -> String {
    let seconds = m.elapsed.as_secs_f64().max(1e-9);
    let (rate, bandwidth) = (
        m.messages as f64 / seconds,
        m.messages as f64 * f64::from(size) / seconds,
    );
    if args.json {
        return json!({
            "tool": "ntb-ping", "from": from.to_string(), "to": to.to_string(), "gpu": gpu, "size": size,
            "address": args.address.as_ref().map(ToString::to_string),
            "messages": m.messages, "lost": 0, "corrupt": 0, "seconds": seconds, "messages_per_second": rate,
            "bytes_per_second": bandwidth, "seen_incomplete": m.incomplete, "way": m.way,
        })
        .to_string();
    }
    format!(
        "{from} to {to} ({gpu}): {} messages of {size} bytes, all received as sent\n\
         {rate:.0} messages/s, {:.3} GB/s, {seconds:.6} s; {}\n{}",
        m.messages,
        bandwidth / 1e9,
        m.of,
        m.way
    )
}
