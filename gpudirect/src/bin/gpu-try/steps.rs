//! The steps that one GPU allows.

#![allow(
    unsafe_code,
    reason = "kernels started with addresses of memory that lives through the step"
)]

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use ntb_gpudirect::{
    GpuError, across,
    aperture::OnGpu,
    ends::{BUDGET, GpuReceiver, GpuSender, Outgoing},
    kernels::Status,
    local,
    memory::{Exposed, GPU_PAGE, GpuMemory, Way},
    seam::{Arg, Gpu, HostMemory},
};
use ntb_mem::region::{Pages, Region};
use ntb_ring::{
    queue::Lane,
    wire::{mark::LaneKey, page::PAGE_LINES},
};

/// Time after which a step has hung.
const PATIENCE: Duration = Duration::from_secs(60);
/// Rounds of words to and fro, and those of one kernel.
const ROUNDS: usize = 10_000;
const ROUNDS_OF_ONE: u64 = 101;
/// Time after which there are enough of them.
const ENOUGH: Duration = Duration::from_secs(10);
/// Messages through rings.
const MESSAGES: u64 = 10_000;
const RING: u64 = 256;

/// How a step went.
pub(crate) struct Outcome {
    pub(crate) name: &'static str,
    /// `pass`, `fail` or `waived`.
    pub(crate) state: &'static str,
    pub(crate) what: String,
}

/// Passed with what was seen, or waived with the reason.
pub(crate) enum Seen {
    Pass(String),
    Waived(String),
}

type Step = fn(&Arc<dyn Gpu>) -> Result<Seen, GpuError>;

/// All of them, in order.
const STEPS: [(&str, Step); 12] = [
    ("report", report),
    ("dma-buf", dma_buf),
    ("gdrcopy", gdrcopy),
    ("ring-to-host", ring_to_host),
    ("ring-to-gpu", ring_to_gpu),
    ("ring-on-gpu", ring_on_gpu),
    ("channel", channel),
    ("poll-gpu-memory", poll_gpu_memory),
    ("round-trip", round_trip),
    ("copy-then-mark", copy_then_mark),
    ("aperture", aperture),
    ("bar", super::bars::bars),
];

fn chosen(only: &str) -> impl Iterator<Item = (&'static str, Step)> {
    STEPS.into_iter().filter(move |(name, _)| name.starts_with(only))
}

fn told(name: &'static str, state: &'static str, what: String) -> Outcome {
    let shown = if state == "fail" { "FAIL" } else { state };
    eprintln!("{shown:<7}{name}: {what}");
    Outcome { name, state, what }
}

/// Runs the steps whose names begin so.
pub(crate) fn run(gpu: &Arc<dyn Gpu>, only: &str) -> Vec<Outcome> {
    chosen(only)
        .map(|(name, step)| match step(gpu) {
            Ok(Seen::Pass(what)) => told(name, "pass", what),
            Ok(Seen::Waived(why)) => told(name, "waived", why),
            Err(e) => told(name, "fail", format!("{}: {e}", e.name)),
        })
        .collect()
}

/// The same steps where there is nothing to run them on.
pub(crate) fn waived(only: &str, why: &GpuError) -> Vec<Outcome> {
    chosen(only)
        .map(|(name, _)| told(name, "waived", format!("{}: {why}", why.name)))
        .collect()
}

pub(crate) fn wrong(what: impl Into<String>) -> GpuError {
    GpuError {
        name: "wrong-data",
        exit: 1,
        what: what.into(),
        code: None,
        errno: None,
    }
}

fn region(bytes: u64) -> Result<Arc<Region>, GpuError> {
    let region = Region::allocate(bytes, Pages::HugeIfAny).map_err(|e| wrong(e.to_string()))?;
    Ok(Arc::new(region))
}

fn report(gpu: &Arc<dyn Gpu>) -> Result<Seen, GpuError> {
    let facts = gpu.facts();
    let flavour = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let open = if flavour.contains("Open Kernel Module") {
        "open"
    } else {
        "closed or unknown"
    };
    let attributes: Vec<String> = facts
        .attributes
        .iter()
        .map(|(n, name, value)| {
            format!(
                "{n} {name}: {}",
                value.map_or("unknown".into(), |v| v.to_string())
            )
        })
        .collect();
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let bar1 = facts
        .address
        .and_then(|at| super::bars::bytes(&at.to_string(), 1))
        .map_or("unknown".to_owned(), |bytes| format!("{} MiB", bytes >> 20));
    let parameters = std::fs::read_to_string("/proc/driver/nvidia/params").unwrap_or_default();
    let parameters: Vec<&str> = parameters
        .lines()
        .filter(|l| {
            [
                "EnablePCIERelaxedOrderingMode",
                "DmaRemapPeerMmio",
                "RegistryDwords:",
            ]
            .iter()
            .any(|p| l.starts_with(p))
        })
        .collect();
    Ok(Seen::Pass(format!(
        "{}, compute capability {}.{}, driver {}, {open} modules, kernel {}, BAR1 {bar1}; {}; {}",
        facts.name,
        facts.capability / 10,
        facts.capability % 10,
        facts.driver_version,
        kernel.trim(),
        attributes.join(", "),
        parameters.join(", ")
    )))
}

fn exposed(gpu: &Arc<dyn Gpu>, way: Way) -> Result<Seen, GpuError> {
    let memory = GpuMemory::allocate(gpu, 2 << 20)?;
    let exposed = match Exposed::new(&memory, Some(way)) {
        Ok(exposed) => exposed,
        Err(e) if e.exit == 3 || e.exit == 6 => return Ok(Seen::Waived(format!("{}: {e}", e.name))),
        Err(e) => return Err(e),
    };
    use ntb_mem::export::Exportable;
    // SAFETY: the first eight bytes of a mapping that lives here and is used by nobody else.
    let word = unsafe { std::sync::atomic::AtomicU64::from_ptr(exposed.as_ptr().cast()) };
    word.store(0x1234_5678_9abc_def0, Ordering::Relaxed);
    ntb_mem::store::drain();
    exposed.settle().map_err(|e| wrong(e.to_string()))?;
    let seen = gpu.poll(memory.at())?;
    if seen != 0x1234_5678_9abc_def0 {
        return Err(wrong(format!(
            "stored through the mapping, the GPU has {seen:#x}"
        )));
    }
    Ok(Seen::Pass("mapped; what is stored there the GPU finds".into()))
}

fn dma_buf(gpu: &Arc<dyn Gpu>) -> Result<Seen, GpuError> {
    exposed(gpu, Way::DmaBuf)
}

fn gdrcopy(gpu: &Arc<dyn Gpu>) -> Result<Seen, GpuError> {
    exposed(gpu, Way::Gdrcopy)
}

fn lane() -> Lane {
    Lane {
        ring_lines: RING,
        consumer_base: 0,
        producer_base: 0,
        to_consumer: LaneKey::new(0x5151, 0xffff_0000, 0),
        to_producer: LaneKey::new(0x6262, 9, 0),
        first_seq: 0,
    }
}

/// A kernel sends into memory of the host, the processor checks every byte: torn messages count.
fn ring_to_host(gpu: &Arc<dyn Gpu>) -> Result<Seen, GpuError> {
    let mut said = Vec::new();
    for size in [8, 48, 64, 200, 1000, 100_000] {
        let m = local::to_host(gpu, size, MESSAGES / u64::from(size / 100 + 1))?;
        said.push(format!(
            "{} of {size} bytes in {:?} ({} seen early)",
            m.messages, m.elapsed, m.incomplete
        ));
    }
    Ok(Seen::Pass(format!("every byte as sent: {}", said.join(", "))))
}

/// The processor sends into the GPU's memory, a kernel receives.
fn ring_to_gpu(gpu: &Arc<dyn Gpu>) -> Result<Seen, GpuError> {
    let mut said = String::new();
    for size in [8, 48, 64, 1000] {
        let m = local::to_gpu(gpu, size, MESSAGES / 10)?;
        said = m.way;
    }
    Ok(Seen::Pass(format!("every byte as sent; {said}")))
}

/// Kernels at both ends of a ring in the GPU's memory, credits in memory of the host.
fn ring_on_gpu(gpu: &Arc<dyn Gpu>) -> Result<Seen, GpuError> {
    // A kernel stores into GPU memory by its own address here: the bridge is what is missing.
    let credits = region(PAGE_LINES * 64)?;
    let inbound = GpuMemory::allocate(gpu, (PAGE_LINES + RING) * 64)?;
    let exposed = match Exposed::new(&inbound, None) {
        Ok(exposed) if exposed.way() != Way::Staging => exposed,
        Ok(exposed) => return Ok(Seen::Waived(exposed.announcement())),
        Err(e) => return Err(e),
    };
    use ntb_mem::export::Exportable;
    // SAFETY: the mapping lives to the end of this function, after what is made of it.
    let into = unsafe { OnGpu::raw(gpu, exposed.as_ptr(), exposed.bytes(), HostMemory::Ram) };
    let into = match into {
        Ok(into) => Arc::new(into),
        // The driver does not map a GPU's BAR for that GPU: right on real boards.
        Err(e) => {
            return Ok(Seen::Waived(format!(
                "the GPU's own BAR is refused, as it should be: {e}"
            )));
        }
    };
    let on_gpu = Arc::new(OnGpu::region(gpu, &credits)?);
    let mut sender = GpuSender::new(gpu, &lane(), &into, &on_gpu, 0)?;
    let mut receiver = GpuReceiver::new(gpu, &lane(), &inbound, 0, &on_gpu)?;
    let (source, sink) = (
        GpuMemory::allocate(gpu, 1 << 20)?,
        GpuMemory::allocate(gpu, 1 << 20)?,
    );
    let count = 1000;
    let bytes: Vec<u8> = (0..104 * count).map(|i| (i * 7 + i / 104) as u8).collect();
    source.write(0, &bytes)?;
    let out = Outgoing {
        memory: &source,
        offset: 0,
        size: 100,
        count: count as u32,
        message_type: 1,
    };
    let sending = sender.start(out, BUDGET)?;
    let (records, status) = receiver.start(&sink, count as u32, BUDGET)?.finish()?;
    sending.finish()?;
    if status != Status::Done || records.len() as u64 != count {
        return Err(wrong(format!(
            "{} of {count} messages arrived: {status:?}",
            records.len()
        )));
    }
    for (record, sent) in records.iter().zip(bytes.chunks(104)) {
        let mut got = [0; 100];
        sink.read(record.offset, &mut got)?;
        if got[..] != sent[..100] {
            return Err(wrong(format!("message {} is not what was sent", record.seq)));
        }
    }
    Ok(Seen::Pass(format!("{count} messages between two kernels")))
}

/// A channel of a session between two ends of this process, with kernels at both: all but the bridge.
fn channel(gpu: &Arc<dyn Gpu>) -> Result<Seen, GpuError> {
    use ntb_ring::link::pair::{PairOptions, pair};
    let mut said = Vec::new();
    for (size, messages) in [(48, 1000), (100_000, 20)] {
        let (near, far) = pair(&PairOptions::default()).map_err(|e| wrong(e.what))?;
        let trial = across::Trial {
            size,
            messages,
            far: Some(across::End::Gpu),
        };
        let (sent, received) = std::thread::scope(|s| {
            let receiving = s.spawn(|| across::receive_over(Box::new(far), Some(gpu), None));
            (
                across::send_over(Box::new(near), Some(gpu), trial),
                receiving.join(),
            )
        });
        received.map_err(|_| wrong("the receiving end panicked"))??;
        let sent = sent?;
        said.push(format!("{messages} of {size} bytes in {:?}", sent.elapsed));
        if size > 48 {
            said.push(sent.way);
        }
    }
    Ok(Seen::Pass(said.join("; ")))
}

/// A kernel polls the GPU's memory, which a stream writes: how long until it sees a word.
fn poll_gpu_memory(gpu: &Arc<dyn Gpu>) -> Result<Seen, GpuError> {
    let words = GpuMemory::allocate(gpu, GPU_PAGE)?;
    let at = words.at();
    let rounds = 200;
    let args = |pong: u64| {
        [
            Arg::U64(at),
            Arg::U64(pong),
            Arg::U64(rounds),
            Arg::U64(BUDGET << 6),
            Arg::U64(0),
            Arg::U64(at + 256),
        ]
    };
    // SAFETY: all addresses lie in `words`, which lives until the kernel has ended.
    let mut echo = unsafe { gpu.start("ntb_echo", 32, &args(at + 128)) }?;
    let mut times = Vec::new();
    for n in 1..=rounds {
        let begin = Instant::now();
        gpu.publish(at, n)?;
        while gpu.poll(at + 128)? != n {
            if begin.elapsed() > PATIENCE {
                return Err(wrong(format!("word {n} was not answered")));
            }
        }
        times.push(begin.elapsed());
    }
    if !echo.wait(PATIENCE)? {
        return Err(wrong("the kernel does not end"));
    }
    Ok(Seen::Pass(format!(
        "stream to kernel to copy: {}",
        spread(&mut times)
    )))
}

/// Words to and fro between the processor and a kernel through memory of the host, kernel after kernel: as many as there is time
/// for, on a machine where the two wait for one processor.
fn round_trip(gpu: &Arc<dyn Gpu>) -> Result<Seen, GpuError> {
    let host = region(4096)?;
    let on_gpu = OnGpu::region(gpu, &host)?;
    let done = GpuMemory::allocate(gpu, GPU_PAGE)?;
    let args = [
        Arg::U64(on_gpu.at()),
        Arg::U64(on_gpu.at() + 128),
        Arg::U64(ROUNDS_OF_ONE),
        Arg::U64(BUDGET << 6),
        Arg::U64(0),
        Arg::U64(done.at()),
    ];
    let view = host.view();
    let mut times = Vec::new();
    let start = Instant::now();
    while times.len() < ROUNDS && (times.is_empty() || start.elapsed() < ENOUGH) {
        view.store(0, 0, Ordering::Relaxed);
        view.store(16, 0, Ordering::Release);
        // SAFETY: all addresses lie in memory that lives until the kernel has ended.
        let mut echo = unsafe { gpu.start("ntb_echo", 32, &args) }?;
        for n in 1..=ROUNDS_OF_ONE {
            let begin = Instant::now();
            view.store(0, n, Ordering::Release);
            while view.load(16, Ordering::Acquire) != n {
                if begin.elapsed() > PATIENCE {
                    return Err(wrong(format!("word {n} was not answered")));
                }
                std::hint::spin_loop();
            }
            // The first one waits for the kernel to begin.
            if n > 1 {
                times.push(begin.elapsed());
            }
        }
        if !echo.wait(PATIENCE)? {
            return Err(wrong("the kernel does not end"));
        }
    }
    Ok(Seen::Pass(format!(
        "processor to kernel and back: {}",
        spread(&mut times)
    )))
}

fn spread(times: &mut [Duration]) -> String {
    times.sort_unstable();
    let at = |part: f64| {
        times
            .get(((times.len() - 1) as f64 * part) as usize)
            .copied()
            .unwrap_or_default()
    };
    format!(
        "median {:?}, 99 % {:?}, 99.9 % {:?}, {} rounds",
        at(0.5),
        at(0.99),
        at(0.999),
        times.len()
    )
}

/// A copy, then a mark behind it in the same stream, without a wait between them: who sees the mark meanwhile finds the copy.
fn copy_then_mark(gpu: &Arc<dyn Gpu>) -> Result<Seen, GpuError> {
    const ROUNDS: u64 = 50;
    const BYTES: usize = 512 << 10;
    let memory = GpuMemory::allocate(gpu, 1 << 20)?;
    let mark = memory.at();
    gpu.publish(mark, 0)?;
    let mut early = 0;
    for n in 1..=ROUNDS {
        let bytes = vec![n as u8; BYTES];
        let mut back = vec![0; BYTES];
        std::thread::scope(|s| {
            let copying = s.spawn(|| gpu.write_then_publish(mark + 4096, &bytes, mark, n));
            loop {
                // Before the look: once it has ended, the mark is there.
                let ended = copying.is_finished();
                if gpu.poll(mark)? == n {
                    early += u64::from(!ended);
                    break;
                }
                if ended {
                    joined(copying)?;
                    return Err(wrong("the mark is not there"));
                }
            }
            memory.read(4096, &mut back)?;
            joined(copying)
        })?;
        if back != bytes {
            return Err(wrong(format!("round {n}: the mark was there before its copy")));
        }
    }
    Ok(Seen::Pass(format!(
        "{ROUNDS} copies of 512 KiB, each there when its mark was; {early} marks seen before the stream was waited for"
    )))
}

fn joined(copying: std::thread::ScopedJoinHandle<'_, Result<(), GpuError>>) -> Result<(), GpuError> {
    copying.join().map_err(|_| wrong("the copying thread panicked"))?
}

/// Pages that are not there must be refused as an aperture; those of ordinary memory are not taken for one either.
fn aperture(gpu: &Arc<dyn Gpu>) -> Result<Seen, GpuError> {
    let untouched = region(1 << 20)?;
    // SAFETY: mapped, kept to the end of this function, and nobody has a reference to it.
    let result = unsafe { OnGpu::raw(gpu, untouched.as_ptr(), untouched.bytes(), HostMemory::Aperture) };
    match result {
        Ok(_) => Ok(Seen::Waived(
            "ordinary memory was taken as an aperture: nothing follows from it without a bridge".into(),
        )),
        Err(e) if e.name == "gpu-not-permitted" => Ok(Seen::Pass(format!("not permitted, and said so: {e}"))),
        Err(e) if e.name == "gpu-aperture-refused" => {
            Ok(Seen::Pass("untouched pages are refused, and said so".into()))
        }
        Err(e) => Err(e),
    }
}
