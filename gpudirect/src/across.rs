//! A trial between two hosts: a window, its proof, then messages that are compared, byte for byte, with a processor or a GPU at
//! either end. It drives a port by itself, without a session: what it needs to say beside the messages goes by scratchpads.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use ntb::{
    address::{OpenOptions, PortAddress},
    hw::{self, NtbError, NtbPort},
    pci::DmaSpace,
    window::{Aperture, ApertureChoice, InboundWindow},
};
use ntb_mem::{export::Exportable, line::Line, region::Pages};
use ntb_ring::{
    link::engine::{Order, StoreEngine},
    queue::{Consumer, Lane, Producer, RecvError, SendError},
    wire::{mark::LaneKey, page::PAGE_LINES},
};

use crate::{
    GpuError,
    aperture::OnGpu,
    ends::{BUDGET, GpuReceiver, GpuSender, Outgoing},
    inbound::DeviceWindow,
    kernels::Status,
    memory::{Exposed, GPU_PAGE, GpuMemory},
    proof::Proof,
    seam::Gpu,
};

/// Lines of the trial's ring.
const RING: u64 = 256;
/// Bytes of each message.
const SIZE: usize = 200;
/// Longest wait for the peer at each step.
const PATIENCE: Duration = Duration::from_secs(60);
/// What the sides tell each other: numbers of their own, unlike what a register holds by accident.
const PROVEN: u32 = 0x6770_0001;
const RECEIVED: u32 = 0x6770_0002;
const WRONG: u32 = 0x6770_0003;

/// What is at an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The processor and memory of the host.
    Host,
    /// A GPU.
    Gpu,
}

fn ring_failed(what: &str, e: &dyn std::fmt::Display) -> GpuError {
    GpuError::new("gpu-trial", 1, format!("{what}: {e}"))
}

fn port_failed(e: &NtbError) -> GpuError {
    GpuError::new("gpu-trial-port", e.class().code(), e.to_string())
}

fn lane() -> Lane {
    Lane {
        ring_lines: RING,
        consumer_base: 0,
        producer_base: 0,
        to_consumer: LaneKey::new(0x2b2b, 0x1000, 0),
        to_producer: LaneKey::new(0x3c3c, 0x2000, 0),
        first_seq: 0,
    }
}

fn message(n: u64) -> Vec<u8> {
    (0..SIZE as u64)
        .map(|i| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8 ^ (i * 7) as u8)
        .collect()
}

/// A port whose link is up.
struct Side {
    port: Arc<dyn NtbPort>,
    space: Arc<DmaSpace>,
}

impl Side {
    fn open(address: &PortAddress) -> Result<Self, GpuError> {
        let function = address.open(&OpenOptions::default()).map_err(|e| {
            let e = NtbError::from(e);
            port_failed(&e)
        })?;
        let port = hw::open(&function).map_err(|e| port_failed(&e))?;
        let space = DmaSpace::new(function).map_err(|e| port_failed(&NtbError::from(e)))?;
        port.enable_link().map_err(|e| port_failed(&e))?;
        let side = Self { port, space };
        side.until("the link to come up", || {
            Ok(side.port.take_link_report()?.state.is_up())
        })?;
        Ok(side)
    }

    fn until(&self, what: &str, mut done: impl FnMut() -> Result<bool, NtbError>) -> Result<(), GpuError> {
        let begin = Instant::now();
        while !done().map_err(|e| port_failed(&e))? {
            if begin.elapsed() > PATIENCE {
                let what = format!("waited {} s for {what}", PATIENCE.as_secs());
                return Err(GpuError::new("gpu-trial-no-peer", 4, what));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn tell(&self, word: u32) -> Result<(), GpuError> {
        self.port
            .set_peer_scratchpad(0, word)
            .map_err(|e| port_failed(&e))
    }

    fn aperture(&self, index: usize) -> Result<Arc<Aperture>, GpuError> {
        let aperture = Aperture::open(&*self.port, index, ApertureChoice::Best);
        aperture.map(Arc::new).map_err(|e| port_failed(&e))
    }
}

/// Lines through an aperture, whatever its kind: a trial is not a measurement.
struct Through(Arc<Aperture>);

impl StoreEngine for Through {
    fn order(&self) -> Order {
        Order::Relaxed
    }

    fn lines(&self) -> u64 {
        self.0.bytes() / 64
    }

    fn put(&mut self, line: u64, content: &Line) {
        // A store to a device that has gone vanishes, as it would on a bridge.
        let _ = self.0.write(line * 64, &content.to_bytes());
    }

    fn barrier(&mut self) {
        ntb_mem::store::drain();
    }

    fn flush(&mut self) {
        ntb_mem::store::drain();
    }
}

/// The receiving side: exports memory, waits for the proof, takes `messages` messages and compares them.
pub fn receive(
    address: &PortAddress,
    end: End,
    gpu: Option<&Arc<dyn Gpu>>,
    messages: u64,
) -> Result<String, GpuError> {
    let side = Side::open(address)?;
    let result = match (end, gpu) {
        (End::Gpu, Some(gpu)) => receive_on_gpu(&side, gpu, messages),
        _ => receive_on_host(&side, messages),
    };
    side.tell(if result.is_ok() { RECEIVED } else { WRONG })?;
    result
}

/// Bytes of window 1 that the ring takes, as the window takes them.
fn window_bytes(side: &Side) -> Result<u64, GpuError> {
    let info = side.port.windows().get(1).copied().ok_or_else(|| {
        GpuError::new(
            "gpu-window",
            3,
            "a window for messages and one for credits are needed, and the port has one",
        )
    })?;
    let unit = info.size_align.max(GPU_PAGE);
    Ok(((PAGE_LINES + RING) * 64).next_multiple_of(unit).min(info.bytes))
}

fn prove(
    side: &Side,
    bytes: u64,
    mut verify: impl FnMut(&Proof) -> Result<(), GpuError>,
) -> Result<(), GpuError> {
    let proof = Proof::new(1, 1, bytes / 64);
    let mut last = Ok(());
    let mut gave_up = false;
    let waited = side.until("the pattern", || {
        last = verify(&proof);
        gave_up = side.port.scratchpad(0)? == WRONG;
        Ok(gave_up || last.is_ok())
    });
    if gave_up {
        return Err(GpuError::new("gpu-trial", 1, "the sender cannot send: see there"));
    }
    // What was seen last says more than that time is over.
    last.and(waited)
}

fn receive_on_host(side: &Side, messages: u64) -> Result<String, GpuError> {
    let bytes = window_bytes(side)?;
    let window = InboundWindow::allocate(&side.port, &side.space, 1, bytes, Pages::Normal)
        .map_err(|e| port_failed(&e))?;
    let view = window.view();
    prove(side, bytes, |proof| {
        proof.verify(|at, to| {
            view.copy_out(at as usize, to);
            Ok(())
        })
    })?;
    (0..view.words()).for_each(|i| view.store(i, 0, std::sync::atomic::Ordering::Release));
    let part = |first, lines| {
        view.part(first, lines)
            .ok_or_else(|| ring_failed("the window", &"is smaller than the ring"))
    };
    let (control, ring) = (part(0, PAGE_LINES)?, part(PAGE_LINES, RING)?);
    let mut consumer = Consumer::new(Through(side.aperture(0)?), control, ring, lane(), Order::Relaxed);
    side.tell(PROVEN)?;
    let (mut buf, mut n) = ([0; SIZE], 0);
    let mut last = Instant::now();
    while n < messages {
        match consumer.try_recv(&mut buf) {
            Ok(got) if got.seq == n && buf[..got.len] == message(n)[..] => {
                n += 1;
                last = Instant::now();
            }
            Ok(got) => return Err(ring_failed("a message differs", &got.seq)),
            Err(RecvError::Empty) if last.elapsed() < PATIENCE => std::thread::yield_now(),
            Err(e) => return Err(ring_failed("receiving", &e)),
        }
    }
    consumer.give_back();
    Ok(format!("{n} messages, all as sent"))
}

fn receive_on_gpu(side: &Side, gpu: &Arc<dyn Gpu>, messages: u64) -> Result<String, GpuError> {
    let bytes = window_bytes(side)?;
    let memory = GpuMemory::allocate(gpu, bytes)?;
    let exposed = Arc::new(Exposed::new(&memory, None)?);
    let said = exposed.announcement();
    let exported: Arc<dyn Exportable> = Arc::clone(&exposed) as _;
    let window = DeviceWindow::open(&side.port, &side.space, 1, &exported)?;
    prove(side, bytes, |proof| {
        exposed.carry(0, bytes)?;
        window.verify(proof, |at, to| memory.read(at, to))
    })?;
    let zeros = vec![0; ((PAGE_LINES + RING) * 64) as usize];
    memory.write(0, &zeros)?;
    if let Some(region) = exposed.staging() {
        region.view().copy_in(0, &zeros);
    }
    // Kernels store credits themselves where the aperture is mapped. Elsewhere, on emulated bridges, into memory of the host,
    // from where the processor carries them on.
    let back = side.aperture(0)?;
    let direct = OnGpu::aperture(gpu, &back, &side.space).map(Arc::new);
    let page = ntb_mem::region::Region::allocate(PAGE_LINES * 64, Pages::Normal).map(Arc::new);
    let page = page.map_err(|e| ring_failed("memory", &e))?;
    let (peer, how) = match direct {
        Ok(direct) => (direct, "by the GPU"),
        Err(_) => (Arc::new(OnGpu::region(gpu, &page)?), "by the processor"),
    };
    let mut receiver = GpuReceiver::new(gpu, &lane(), &memory, 0, &peer)?;
    let out = GpuMemory::allocate(gpu, GPU_PAGE)?;
    side.tell(PROVEN)?;
    let mut n = 0;
    let mut last = Instant::now();
    while n < messages {
        exposed.carry(0, bytes)?;
        exported.settle().map_err(|e| ring_failed("settling", &e))?;
        let (records, status) = receiver.start(&out, 16, BUDGET >> 12)?.finish()?;
        for record in records {
            let mut got = vec![0; record.size as usize];
            memory_read(&out, record.offset, &mut got)?;
            if record.seq != n || got != message(n) {
                return Err(ring_failed("a message differs", &record.seq));
            }
            n += 1;
            last = Instant::now();
        }
        if how != "by the GPU" {
            let mut line = [0; 64];
            page.view().copy_out(0, &mut line);
            back.write(0, &line).map_err(|e| port_failed(&e))?;
        }
        if !matches!(status, Status::Done | Status::Budget | Status::NoRoom) || last.elapsed() > PATIENCE {
            status.check()?;
        }
    }
    window.close()?;
    Ok(format!("{n} messages, all as sent; {said}; credits {how}"))
}

fn memory_read(memory: &GpuMemory, at: u64, to: &mut [u8]) -> Result<(), GpuError> {
    memory.read(at, to)
}

/// The sending side: proves the way, then sends `messages` messages.
pub fn send(
    address: &PortAddress,
    end: End,
    gpu: Option<&Arc<dyn Gpu>>,
    messages: u64,
) -> Result<String, GpuError> {
    let side = Side::open(address)?;
    let own = window_bytes(&side)?;
    let host = InboundWindow::allocate(&side.port, &side.space, 0, GPU_PAGE, Pages::Normal)
        .map_err(|e| port_failed(&e))?;
    let aperture = side.aperture(1)?;
    let port = &side.port;
    port.set_scratchpad(0, 0).map_err(|e| port_failed(&e))?;
    // What cannot be is found before the peer is made to wait for it.
    let direct = match (end, gpu) {
        (End::Gpu, Some(gpu)) => match OnGpu::aperture(gpu, &aperture, &side.space) {
            Ok(direct) => Some(Arc::new(direct)),
            Err(e) => {
                side.tell(WRONG)?;
                return Err(e);
            }
        },
        _ => None,
    };
    let proof = Proof::new(1, 1, own / 64);
    let mut again = Instant::now();
    let store = || {
        for (at, line) in proof.lines() {
            aperture.write(at * 64, &line.to_bytes())?;
        }
        Ok::<(), NtbError>(())
    };
    side.until("the peer to find the pattern", || {
        if Instant::now() >= again {
            again = Instant::now() + Duration::from_millis(50);
            store()?;
        }
        Ok(matches!(port.scratchpad(0)?, PROVEN | WRONG))
    })?;
    match (direct, gpu) {
        (Some(peer), Some(gpu)) => {
            let credits = Arc::new(OnGpu::region(gpu, host.region())?);
            let mut sender = GpuSender::new(gpu, &lane(), &peer, &credits, 0)?;
            let batch = GPU_PAGE / SIZE as u64;
            let source = GpuMemory::allocate(gpu, GPU_PAGE)?;
            let mut n = 0;
            while n < messages {
                let count = batch.min(messages - n);
                for i in 0..count {
                    source.write(i * SIZE as u64, &message(n + i))?;
                }
                let out = Outgoing {
                    memory: &source,
                    offset: 0,
                    size: SIZE as u32,
                    count: count as u32,
                    message_type: 0,
                };
                n += sender.send(out)?;
            }
        }
        _ => {
            let control = host.view().part(0, PAGE_LINES);
            let control = control.ok_or_else(|| ring_failed("the window", &"is smaller than a page"))?;
            let mut producer = Producer::new(Through(Arc::clone(&aperture)), control, lane(), Order::Relaxed);
            for n in 0..messages {
                let message = message(n);
                let begin = Instant::now();
                loop {
                    match producer.try_send(0, &message) {
                        Ok(_) => break,
                        Err(SendError::Full { .. }) if begin.elapsed() < PATIENCE => std::thread::yield_now(),
                        Err(e) => return Err(ring_failed("sending", &e)),
                    }
                }
            }
        }
    }
    let mut answer = 0;
    side.until("the peer to compare", || {
        answer = port.scratchpad(0)?;
        Ok(matches!(answer, RECEIVED | WRONG))
    })?;
    match answer {
        RECEIVED => Ok(format!("{messages} messages, all received as sent")),
        _ => Err(GpuError::new(
            "gpu-trial",
            1,
            "the receiver says that something was wrong: see there",
        )),
    }
}
