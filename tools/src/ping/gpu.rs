//! Ends on GPUs: `--from` and `--to`.

use std::sync::Arc;

use ntb::address::PortAddress;
use ntb_gpudirect::{
    GpuError,
    across::{self, End as Kind},
    cuda::{Cuda, Driver},
    local::{self, Measured},
    seam::Gpu,
};
use ntb_ring::address::Address;
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

/// Sends from one end to the other, and prints. The GPUs come first: without them nothing else is of interest.
#[allow(clippy::print_stdout, reason = "the result goes to standard output")]
pub fn run(args: &RunArgs) -> Result<Exit, Failure> {
    let (from, to) = (args.from.unwrap_or(End::Host), args.to.unwrap_or(End::Host));
    let (sender, receiver) = (open(from)?, open(to)?);
    let count = args.count.unwrap_or(COUNT);
    if let Some(address) = &args.address {
        let text = over(address, from, sender.as_ref(), count)?;
        println!("{text}");
        return Ok(Exit::Good);
    }
    // The range was checked when the command line was read.
    let size = u32::try_from(args.size).unwrap_or(local::LARGEST);
    let (gpu, measured) = match (sender, receiver) {
        (Some(gpu), None) => {
            let measured = local::to_host(&gpu, size, count);
            (gpu, measured)
        }
        (None, Some(gpu)) => {
            let measured = local::to_gpu(&gpu, size, count);
            (gpu, measured)
        }
        (Some(_), Some(_)) => {
            return Err(Failure::new(
                Exit::Usage,
                "gpu-needs-bridge",
                "between two GPUs there must be a bridge: give its address, such as ntb:0000:81:00.0, and start \
                 'gpu-try --serve' at the far end. GPUs of one machine reach each other by their driver's own peer access",
            ));
        }
        (None, None) => {
            return Err(Failure::new(
                Exit::Usage,
                "no-gpu-named",
                "--from and --to name no GPU: one of them is to be gpu:N; leave both out to measure between processors",
            ));
        }
    };
    let measured = measured.map_err(|e| failure(&e))?;
    println!("{}", told(args.json, from, to, &gpu.facts().name, &measured));
    Ok(Exit::Good)
}

fn over(address: &Address, from: End, sender: Option<&Arc<dyn Gpu>>, count: u64) -> Result<String, Failure> {
    let address: PortAddress = address.to_string().parse().map_err(|_| {
        Failure::new(
            Exit::Usage,
            "gpu-needs-bridge",
            format!("{address} is no bridge: GPU memory is reached over ntb: (and, in tests, emu:) links"),
        )
    })?;
    let end = match from {
        End::Host => Kind::Host,
        End::Gpu(_) => Kind::Gpu,
    };
    across::send(&address, end, sender, count).map_err(|e| failure(&e))
}

fn told(json: bool, from: End, to: End, gpu: &str, m: &Measured) -> String {
    let seconds = m.elapsed.as_secs_f64().max(1e-9);
    let (rate, bandwidth) = (
        m.messages as f64 / seconds,
        m.messages as f64 * f64::from(m.size) / seconds,
    );
    if json {
        return json!({
            "tool": "ntb-ping", "from": from.to_string(), "to": to.to_string(), "gpu": gpu, "size": m.size,
            "messages": m.messages, "lost": 0, "corrupt": 0, "seconds": seconds, "messages_per_second": rate,
            "bytes_per_second": bandwidth, "seen_incomplete": m.incomplete, "way": m.way,
        })
        .to_string();
    }
    format!(
        "{from} to {to} ({gpu}): {} messages of {} bytes, all received as sent\n\
         {rate:.0} messages/s, {:.3} GB/s, {seconds:.6} s; kernel starts are part of it\n{}",
        m.messages,
        m.size,
        bandwidth / 1e9,
        m.way
    )
}
