//! Where no kernel can store into the peer's memory: kernels store into a ring in memory of this host, and the processor takes
//! the messages out and sends them.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use ntb_mem::{
    line::LINE_BYTES,
    region::{Pages, Region, View},
};
use ntb_ring::{
    channel::{SendFailure, Sender},
    link::engine::{Order, WriteBack},
    queue::{Consumer, Lane, RecvError},
    wire::{mark::LaneKey, page::PAGE_LINES},
};

use crate::{
    GpuError,
    aperture::OnGpu,
    ends::{GpuSender, Outgoing, Watch},
    kernels::Status,
    seam::Gpu,
};

/// Time between two looks for what the kernel has stored.
const SLICE: Duration = Duration::from_micros(20);
/// Time for which the peer is waited for before the caller is asked whether to go on.
pub(crate) const ASK: Duration = Duration::from_millis(50);

/// Sends a message; waits for room for `patience` at the most, and for as long as `goes_on`, which is asked again and again.
pub(crate) fn send_while(
    sender: &mut Sender,
    message_type: u32,
    bytes: &[u8],
    patience: Duration,
    goes_on: &mut dyn FnMut() -> bool,
) -> Result<(), GpuError> {
    let begin = Instant::now();
    loop {
        match sender.send_typed(message_type, bytes, ASK.min(patience)) {
            Ok(_) => return Ok(()),
            Err(SendFailure::TimedOut { .. }) if begin.elapsed() < patience && goes_on() => {}
            Err(e) => return Err(GpuError::new(e.name(), 5, e.to_string())),
        }
    }
}

/// A ring between a GPU and the processor.
#[derive(Debug)]
pub(crate) struct Stage {
    end: GpuSender,
    consumer: Consumer<WriteBack, View>,
    buf: Vec<u8>,
}

impl Stage {
    pub(crate) fn new(gpu: &Arc<dyn Gpu>, ring_lines: u64) -> Result<Self, GpuError> {
        let lane = Lane {
            ring_lines,
            consumer_base: 0,
            producer_base: 0,
            // Of this process alone.
            to_consumer: LaneKey::new(1, 0, 0),
            to_producer: LaneKey::new(2, 0, 0),
            first_seq: 0,
        };
        let region = |lines: u64| {
            Region::allocate(lines * LINE_BYTES as u64, Pages::HugeIfAny)
                .map(Arc::new)
                .map_err(|e| GpuError::new("gpu-host-memory", 6, e.to_string()))
        };
        let (ring, credits) = (region(PAGE_LINES + ring_lines)?, region(PAGE_LINES)?);
        let (peer, own) = (
            Arc::new(OnGpu::region(gpu, &ring)?),
            Arc::new(OnGpu::region(gpu, &credits)?),
        );
        let view = ring.view();
        let part = |first, lines| {
            view.part(first, lines)
                .ok_or_else(|| GpuError::new("gpu-outside", 7, "a region is smaller than was asked for"))
        };
        Ok(Self {
            end: GpuSender::new(gpu, &lane, &peer, &own, 0)?,
            consumer: Consumer::new(
                WriteBack::new(credits.view()),
                part(0, PAGE_LINES)?,
                part(PAGE_LINES, ring_lines)?,
                lane,
                Order::Relaxed,
            ),
            buf: Vec::new(),
        })
    }

    /// Runs one kernel, and sends on what it stores: how many messages have gone to the peer, and how it ended. A message that
    /// the peer has no room for within `patience`, or while `goes_on` holds, is an error; so is a kernel that gets nowhere for
    /// as long as is `allowed`.
    pub(crate) fn send(
        &mut self,
        sender: &mut Sender,
        out: Outgoing<'_>,
        budget: u64,
        [patience, allowed]: [Duration; 2],
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<(u64, Status), GpuError> {
        let Self { end, consumer, buf } = self;
        buf.resize(out.size as usize, 0);
        let (mut gone, mut failed) = (0, None);
        let mut carry = || {
            while failed.is_none() {
                match consumer.try_recv(buf) {
                    Ok(got) => {
                        let bytes = buf.get(..got.len).unwrap_or(&[]);
                        match send_while(sender, got.message_type, bytes, patience, goes_on) {
                            Ok(()) => gone += 1,
                            Err(e) => failed = Some(e),
                        }
                    }
                    Err(RecvError::Empty) => break,
                    Err(e) => failed = Some(GpuError::new("gpu-ring-corrupt", 5, e.to_string())),
                }
            }
            gone
        };
        let mut watch = Watch {
            progress: &mut carry,
            patience: allowed,
            slice: SLICE,
        };
        let (_, status) = end.start(out, budget)?.finish_watched(&mut watch)?;
        carry();
        match failed {
            Some(e) => Err(e),
            None => Ok((gone, status)),
        }
    }
}
