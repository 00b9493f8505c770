//! Ring ends on a GPU: kernels store messages into a peer's ring, or take them out of one in the GPU's own memory.
//!
//! The lines are those of every other ring (docs/wire.md) with order *relaxed*, so that the other end may be a processor or a
//! GPU and neither notices. Credits go to memory of the host: two GPUs that store into each other's memory at once are a pattern
//! for which NVIDIA's driver knows a deadlock, so that one direction at a time crosses to a GPU.

#![allow(
    unsafe_code,
    reason = "starting kernels with addresses that were checked here"
)]

use std::{sync::Arc, time::Duration};

use ntb_ring::{queue::Lane, wire::page};

use crate::{
    GpuError,
    aperture::OnGpu,
    kernels::{MOST_THREADS, ReceiverState, Record, SenderState, key_word},
    memory::{GPU_PAGE, GpuMemory},
    seam::{Arg, Gpu, Running},
};

const LINE: u64 = ntb_mem::line::LINE_BYTES as u64;

/// Looks that a kernel takes at memory before it gives up, by default: some seconds.
pub const BUDGET: u64 = 1 << 24;

/// Time after which a kernel that should have ended by its budget counts as lost.
const PATIENCE: Duration = Duration::from_secs(120);

fn lines_in(bytes: u64, first: u64, lines: u64, what: &str) -> Result<u64, GpuError> {
    let end = first.checked_add(lines).and_then(|end| end.checked_mul(LINE));
    if end.is_some_and(|end| end <= bytes) {
        return Ok(first * LINE);
    }
    Err(GpuError::new(
        "gpu-outside",
        7,
        format!(
            "{what}: {lines} lines from line {first} on are not in {bytes} bytes: the two sides do not agree"
        ),
    ))
}

fn check_lane(lane: &Lane) -> Result<(), GpuError> {
    if lane.ring_lines.is_power_of_two() && lane.ring_lines >= ntb_ring::queue::MIN_RING_LINES {
        return Ok(());
    }
    Err(GpuError::new(
        "gpu-ring-size",
        7,
        format!(
            "a ring of {} lines: it must be a power of two from 4 on",
            lane.ring_lines
        ),
    ))
}

/// Waits for a kernel's end.
fn finish(mut running: Box<dyn Running>) -> Result<(), GpuError> {
    if running.wait(PATIENCE)? {
        return Ok(());
    }
    Err(GpuError::new(
        "gpu-stalled",
        5,
        format!(
            "a kernel has not ended within {} s, which its budget of looks does not explain: the GPU may wait for stores that no \
             longer complete",
            PATIENCE.as_secs()
        ),
    ))
}

/// A state in the GPU's memory.
#[derive(Debug)]
struct State(Arc<GpuMemory>);

impl State {
    fn new(gpu: &Arc<dyn Gpu>, bytes: &[u8]) -> Result<Self, GpuError> {
        let memory = GpuMemory::allocate(gpu, GPU_PAGE)?;
        memory.write(0, bytes)?;
        Ok(Self(memory))
    }

    fn read<const N: usize>(&self) -> Result<[u8; N], GpuError> {
        let mut bytes = [0; N];
        self.0.read(0, &mut bytes)?;
        Ok(bytes)
    }
}

/// What lies in the GPU's memory and is to be sent.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// Where.
    pub memory: &'a Arc<GpuMemory>,
    /// First byte, a multiple of 8.
    pub offset: u64,
    /// Bytes of a message.
    pub size: u32,
    /// Messages.
    pub count: u32,
    /// The application's type.
    pub message_type: u32,
}

/// A sending end on a GPU.
#[derive(Debug)]
pub struct GpuSender {
    // The state goes first, then what it points to.
    state: State,
    gpu: Arc<dyn Gpu>,
    _peer: Arc<OnGpu>,
    _own: Arc<OnGpu>,
}

impl GpuSender {
    /// The sender of `lane`. `peer` is the peer's memory, in whose lines `lane.consumer_base` counts. `own` is memory of this host
    /// with this side's control page at `control_line`: the peer's credits arrive there.
    pub fn new(
        gpu: &Arc<dyn Gpu>,
        lane: &Lane,
        peer: &Arc<OnGpu>,
        own: &Arc<OnGpu>,
        control_line: u64,
    ) -> Result<Self, GpuError> {
        check_lane(lane)?;
        let base = lines_in(
            peer.bytes(),
            lane.consumer_base,
            page::PAGE_LINES + lane.ring_lines,
            "the ring in the peer's memory",
        )?;
        let control = lines_in(
            own.bytes(),
            control_line,
            page::PAGE_LINES,
            "this side's control page",
        )?;
        let state = SenderState {
            ring: peer.at() + base + page::PAGE_LINES * LINE,
            mask: lane.ring_lines - 1,
            seq: lane.first_seq,
            credit_line: own.at() + control + page::CREDIT * LINE,
            starved_line: peer.at() + base + page::STARVED * LINE,
            out_key: key_word(lane.to_consumer),
            in_tag: lane.to_producer.tag().into(),
            ..SenderState::default()
        };
        Ok(Self {
            state: State::new(gpu, &state.to_bytes())?,
            gpu: Arc::clone(gpu),
            _peer: Arc::clone(peer),
            _own: Arc::clone(own),
        })
    }

    /// The state after the last kernel.
    pub fn state(&self) -> Result<SenderState, GpuError> {
        Ok(SenderState::from_bytes(&self.state.read()?))
    }

    /// Starts sending messages one by one; each begins at a multiple of eight bytes.
    pub fn start(&mut self, out: Outgoing<'_>, budget: u64) -> Result<Sending<'_>, GpuError> {
        let stride = u64::from(out.size).next_multiple_of(8);
        let from = place(out, stride * u64::from(out.count))?;
        let args = [
            Arg::U64(self.state.0.at()),
            Arg::U64(from),
            Arg::U32(out.size),
            Arg::U64(stride),
            Arg::U32(out.count),
            Arg::U32(out.message_type),
            Arg::U64(budget),
        ];
        self.launch("ntb_send", threads_for(out.size.into()), &args, out.memory)
    }

    /// Starts sending messages that lie back to back as one block.
    pub fn start_packed(&mut self, out: Outgoing<'_>, budget: u64) -> Result<Sending<'_>, GpuError> {
        let bytes = u64::from(out.size) * u64::from(out.count);
        let from = place(out, bytes)?;
        if out.size == 0 || out.count == 0 {
            return Err(GpuError::new(
                "gpu-message-empty",
                2,
                "messages of no bytes cannot be packed",
            ));
        }
        let args = [
            Arg::U64(self.state.0.at()),
            Arg::U64(from),
            Arg::U32(out.size),
            Arg::U32(out.count),
            Arg::U32(out.message_type),
            Arg::U64(budget),
        ];
        self.launch("ntb_send_packed", threads_for(bytes), &args, out.memory)
    }

    fn launch(
        &mut self,
        kernel: &str,
        threads: u32,
        args: &[Arg],
        memory: &Arc<GpuMemory>,
    ) -> Result<Sending<'_>, GpuError> {
        // SAFETY: the arguments are those of the kernel; state, ring, credits and messages were checked to lie in memory that
        // this object and `Sending` hold until the kernel has ended.
        let running = unsafe { self.gpu.start(kernel, threads, args) }?;
        Ok(Sending {
            running,
            sender: self,
            _memory: Arc::clone(memory),
        })
    }

    /// Sends and waits for the end. Returns how many messages went; fewer than asked only with an error.
    pub fn send(&mut self, out: Outgoing<'_>) -> Result<u64, GpuError> {
        self.start(out, BUDGET)?.finish()
    }
}

/// Messages on their way.
#[derive(Debug)]
#[must_use = "dropping waits for the end and tells nothing"]
pub struct Sending<'a> {
    // Fields drop in order: the kernel's end, then what it uses.
    running: Box<dyn Running>,
    sender: &'a GpuSender,
    _memory: Arc<GpuMemory>,
}

impl Sending<'_> {
    /// Waits for the end. Returns how many messages were sent.
    pub fn finish(self) -> Result<u64, GpuError> {
        finish(self.running)?;
        let state = self.sender.state()?;
        state.status().check()?;
        Ok(state.sent)
    }
}

fn place(out: Outgoing<'_>, bytes: u64) -> Result<u64, GpuError> {
    let fits = out
        .offset
        .checked_add(bytes)
        .is_some_and(|end| end <= out.memory.bytes());
    if fits && out.offset.is_multiple_of(8) {
        return Ok(out.memory.at() + out.offset);
    }
    Err(GpuError::new(
        "gpu-outside",
        2,
        format!(
            "{bytes} bytes from {} on are not in a memory of {} bytes, or do not begin at a multiple of 8",
            out.offset,
            out.memory.bytes()
        ),
    ))
}

/// A warp for small messages, as many threads as there are words for larger ones.
fn threads_for(bytes: u64) -> u32 {
    let words = u32::try_from(bytes / 8).unwrap_or(MOST_THREADS);
    words.next_multiple_of(32).clamp(32, MOST_THREADS)
}

/// A receiving end on a GPU.
#[derive(Debug)]
pub struct GpuReceiver {
    state: State,
    gpu: Arc<dyn Gpu>,
    _own: Arc<GpuMemory>,
    _peer: Arc<OnGpu>,
}

impl GpuReceiver {
    /// The receiver of `lane`. `own` is the GPU's memory that the peer stores into, with control page and ring from `own_line` on.
    /// `peer` is memory of the peer's, in whose lines `lane.producer_base` counts: credits go there.
    pub fn new(
        gpu: &Arc<dyn Gpu>,
        lane: &Lane,
        own: &Arc<GpuMemory>,
        own_line: u64,
        peer: &Arc<OnGpu>,
    ) -> Result<Self, GpuError> {
        check_lane(lane)?;
        let base = lines_in(
            own.bytes(),
            own_line,
            page::PAGE_LINES + lane.ring_lines,
            "the ring in the GPU's memory",
        )?;
        let control = lines_in(
            peer.bytes(),
            lane.producer_base,
            page::PAGE_LINES,
            "the control page in the peer's memory",
        )?;
        let state = ReceiverState {
            ring: own.at() + base + page::PAGE_LINES * LINE,
            mask: lane.ring_lines - 1,
            seq: lane.first_seq,
            credit_line: peer.at() + control + page::CREDIT * LINE,
            starved_line: own.at() + base + page::STARVED * LINE,
            in_key: key_word(lane.to_consumer),
            out_tag: lane.to_producer.tag().into(),
            ..ReceiverState::default()
        };
        Ok(Self {
            state: State::new(gpu, &state.to_bytes())?,
            gpu: Arc::clone(gpu),
            _own: Arc::clone(own),
            _peer: Arc::clone(peer),
        })
    }

    /// The state after the last kernel.
    pub fn state(&self) -> Result<ReceiverState, GpuError> {
        Ok(ReceiverState::from_bytes(&self.state.read()?))
    }

    /// Starts receiving up to `most` blocks into `out`.
    pub fn start<'a>(
        &'a mut self,
        out: &Arc<GpuMemory>,
        most: u32,
        budget: u64,
    ) -> Result<Receiving<'a>, GpuError> {
        let records = GpuMemory::allocate(&self.gpu, u64::from(most) * Record::BYTES as u64)?;
        let args = [
            Arg::U64(self.state.0.at()),
            Arg::U64(out.at()),
            Arg::U64(out.bytes()),
            Arg::U64(records.at()),
            Arg::U32(most),
            Arg::U64(budget),
        ];
        // SAFETY: the arguments are those of the kernel; state, ring, credits, output and records lie in memory that this object
        // and `Receiving` hold until the kernel has ended.
        let running = unsafe { self.gpu.start("ntb_receive", MOST_THREADS, &args) }?;
        Ok(Receiving {
            running,
            receiver: self,
            records,
            _out: Arc::clone(out),
        })
    }

    /// Gives everything consumed back at once.
    pub fn give_back(&mut self) -> Result<(), GpuError> {
        // SAFETY: as for `start`.
        finish(unsafe {
            self.gpu
                .start("ntb_give_back", 32, &[Arg::U64(self.state.0.at())])
        }?)
    }
}

/// Messages being received.
#[derive(Debug)]
#[must_use = "dropping waits for the end and tells nothing"]
pub struct Receiving<'a> {
    // Fields drop in order: the kernel's end, then what it uses.
    running: Box<dyn Running>,
    receiver: &'a GpuReceiver,
    records: Arc<GpuMemory>,
    _out: Arc<GpuMemory>,
}

impl Receiving<'_> {
    /// Waits for the end. Returns what was received, and how it ended: [`crate::kernels::Status::Budget`] when less came
    /// than was asked for.
    pub fn finish(self) -> Result<(Vec<Record>, crate::kernels::Status), GpuError> {
        finish(self.running)?;
        let state = self.receiver.state()?;
        let mut records = Vec::new();
        for n in 0..state.got {
            let mut bytes = [0; Record::BYTES];
            self.records.read(n * Record::BYTES as u64, &mut bytes)?;
            records.push(Record::from_bytes(&bytes));
        }
        Ok((records, state.status()))
    }
}
