//! Messages between a GPU and the processor of one machine, every byte compared: what can be measured without a bridge.

#![allow(unsafe_code, reason = "stores through the mapping of a GPU's memory")]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use ntb_mem::{
    export::Exportable,
    line::{LINE_BYTES, Line},
    region::{Pages, Region},
    store::{self, Width},
};
use ntb_ring::{
    link::engine::{Order, StoreEngine, WriteBack},
    queue::{Consumer, Lane, Producer, RecvError, SendError},
    wire::{mark::LaneKey, page::PAGE_LINES},
};

use crate::{
    GpuError,
    aperture::OnGpu,
    ends::{BUDGET, GpuReceiver, GpuSender, Outgoing},
    kernels::Status,
    memory::{Exposed, GpuMemory},
    seam::Gpu,
};

/// Longest wait for a message.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes of messages that are prepared at a time.
const BATCH: u64 = 1 << 20;
/// Largest message.
pub const LARGEST: u32 = 8 << 20;

/// What was measured.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Messages, all of them received as sent.
    pub messages: u64,
    /// Bytes of each.
    pub size: u32,
    /// Time from the first to the last, without what prepares and compares them.
    pub elapsed: Duration,
    /// Looks that found a mark before its message was whole.
    pub incomplete: u64,
    /// How the memory of the GPU was reached, in words.
    pub way: String,
}

fn byte(n: u64, i: usize) -> u8 {
    (n.wrapping_mul(31) as usize ^ i.wrapping_mul(7) ^ (i >> 8)) as u8
}

fn bytes_of(n: u64, size: u32) -> Vec<u8> {
    (0..size as usize).map(|i| byte(n, i)).collect()
}

fn lane(size: u32) -> Lane {
    let lines = u64::from(size).div_ceil(LINE_BYTES as u64) + 1;
    Lane {
        ring_lines: (lines * 4).max(256).next_power_of_two(),
        consumer_base: 0,
        producer_base: 0,
        to_consumer: LaneKey::new(0x5151, 0xffff_0000, 0),
        to_producer: LaneKey::new(0x6262, 9, 0),
        first_seq: 0,
    }
}

fn failed(what: impl std::fmt::Display) -> GpuError {
    GpuError::new("gpu-wrong-data", 1, what.to_string())
}

fn region(lines: u64) -> Result<Arc<Region>, GpuError> {
    let region = Region::allocate(lines * LINE_BYTES as u64, Pages::HugeIfAny);
    region
        .map(Arc::new)
        .map_err(|e| GpuError::new("gpu-host-memory", 6, e.to_string()))
}

fn check_size(size: u32) -> Result<(), GpuError> {
    if (1..=LARGEST).contains(&size) {
        return Ok(());
    }
    Err(GpuError::new(
        "gpu-message-size",
        2,
        format!("messages of {size} bytes: 1 to {LARGEST} can be sent"),
    ))
}

/// A kernel sends, the processor receives, in memory of the host.
pub fn to_host(gpu: &Arc<dyn Gpu>, size: u32, count: u64) -> Result<Measured, GpuError> {
    check_size(size)?;
    let lane = lane(size);
    let (theirs, ours) = (region(PAGE_LINES + lane.ring_lines)?, region(PAGE_LINES)?);
    let peer = Arc::new(OnGpu::region(gpu, &theirs)?);
    let own = Arc::new(OnGpu::region(gpu, &ours)?);
    let mut sender = GpuSender::new(gpu, &lane, &peer, &own, 0)?;
    let view = theirs.view();
    let part = |first, lines| {
        view.part(first, lines)
            .ok_or_else(|| failed("a region too small"))
    };
    let mut consumer = Consumer::new(
        WriteBack::new(ours.view()),
        part(0, PAGE_LINES)?,
        part(PAGE_LINES, lane.ring_lines)?,
        lane,
        Order::Relaxed,
    );
    let stride = u64::from(size).next_multiple_of(8);
    let at_once = (BATCH / stride).max(1);
    let source = GpuMemory::allocate(gpu, stride * at_once)?;
    let mut buf = vec![0; size as usize];
    let (mut n, mut elapsed) = (0, Duration::ZERO);
    while n < count {
        let batch = at_once.min(count - n);
        let mut all = vec![0; (stride * batch) as usize];
        for (i, slot) in all.chunks_mut(stride as usize).enumerate() {
            let message = bytes_of(n + i as u64, size);
            slot.iter_mut().zip(message).for_each(|(to, from)| *to = from);
        }
        source.write(0, &all)?;
        let out = Outgoing {
            memory: &source,
            offset: 0,
            size,
            count: u32::try_from(batch).unwrap_or(u32::MAX),
            message_type: 1,
        };
        let begin = Instant::now();
        let sending = sender.start(out, BUDGET)?;
        let (until, mut last, mut comparing) = (n + batch, begin, Duration::ZERO);
        while n < until {
            match consumer.try_recv(&mut buf) {
                Ok(got) => {
                    last = Instant::now();
                    if got.seq != n || got.len != buf.len() || buf != bytes_of(n, size) {
                        return Err(failed(format_args!("message {} is not what was sent", got.seq)));
                    }
                    n += 1;
                    comparing += last.elapsed();
                }
                Err(RecvError::Empty) if last.elapsed() < PATIENCE => std::thread::yield_now(),
                Err(e) => return Err(failed(format_args!("at message {n}: {e}"))),
            }
        }
        elapsed += begin.elapsed().saturating_sub(comparing);
        sending.finish()?;
    }
    Ok(Measured {
        messages: n,
        size,
        elapsed,
        incomplete: consumer.stats().incomplete,
        way: "a kernel stores into memory of the host".into(),
    })
}

/// Lines through the mapping of a GPU's memory, which is write-combining.
struct Through(Arc<Exposed>);

impl StoreEngine for Through {
    fn order(&self) -> Order {
        Order::Relaxed
    }

    fn lines(&self) -> u64 {
        self.0.bytes() / LINE_BYTES as u64
    }

    fn put(&mut self, line: u64, content: &Line) {
        assert!(line < StoreEngine::lines(self), "line outside the GPU's memory");
        let at = self.0.as_ptr().wrapping_add(line as usize * LINE_BYTES);
        // SAFETY: in bounds by the line above; the mapping is page-aligned, lives as long as the export, and has no reference.
        unsafe { store::combined(at.cast(), content, Width::Bytes8) };
    }

    fn barrier(&mut self) {
        store::drain();
    }

    fn flush(&mut self) {
        store::drain();
    }
}

/// The processor sends, a kernel receives, in the GPU's memory.
pub fn to_gpu(gpu: &Arc<dyn Gpu>, size: u32, count: u64) -> Result<Measured, GpuError> {
    check_size(size)?;
    let lane = lane(size);
    let inbound = GpuMemory::allocate(gpu, (PAGE_LINES + lane.ring_lines) * LINE_BYTES as u64)?;
    let exposed = Arc::new(Exposed::new(&inbound, None)?);
    let credits = region(PAGE_LINES)?;
    let peer = Arc::new(OnGpu::region(gpu, &credits)?);
    let mut receiver = GpuReceiver::new(gpu, &lane, &inbound, 0, &peer)?;
    let mut producer = Producer::new(
        Through(Arc::clone(&exposed)),
        credits.view(),
        lane,
        Order::Relaxed,
    );
    let room = u64::from(size).next_multiple_of(64);
    let most = (BATCH / room).clamp(1, 1024) as u32;
    let sink = GpuMemory::allocate(gpu, room * u64::from(most))?;
    let (mut sent, mut got, mut elapsed) = (0, 0, Duration::ZERO);
    let mut last = Instant::now();
    while got < count {
        let begin = Instant::now();
        while sent < count && sent - got < u64::from(most) {
            match producer.try_send(1, &bytes_of(sent, size)) {
                Ok(_) => sent += 1,
                Err(SendError::Full { .. }) => break,
                Err(e) => return Err(failed(e)),
            }
        }
        exposed.carry(0, inbound.bytes())?;
        exposed.settle().map_err(failed)?;
        let (records, status) = receiver
            .start(&sink, (sent - got).max(1) as u32, BUDGET >> 8)?
            .finish()?;
        receiver.give_back()?;
        elapsed += begin.elapsed();
        for record in &records {
            let mut bytes = vec![0; record.size as usize];
            sink.read(record.offset, &mut bytes)?;
            if record.seq != got || bytes != bytes_of(got, size) {
                return Err(failed(format_args!(
                    "message {} is not what was sent",
                    record.seq
                )));
            }
            got += 1;
            last = Instant::now();
        }
        if !matches!(status, Status::Done | Status::Budget) || last.elapsed() > PATIENCE {
            status.check()?;
            return Err(failed(format_args!("message {got} has not arrived")));
        }
    }
    Ok(Measured {
        messages: got,
        size,
        elapsed,
        incomplete: receiver.state()?.incomplete,
        way: exposed.announcement(),
    })
}
