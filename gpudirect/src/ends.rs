//! Ring ends on a GPU: kernels store messages into a peer's ring, or take them out of one in the GPU's own memory.
//!
//! The lines are those of every other ring (docs/wire.md) with order *relaxed*, so that the other end may be a processor or a
//! GPU and neither notices. Credits go to memory of the host: two GPUs that store into each other's memory at once are a pattern
//! for which NVIDIA's driver knows a deadlock, so that one direction at a time crosses to a GPU.

#![allow(
    unsafe_code,
    reason = "starting kernels with addresses that were checked here"
)]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use ntb_ring::{
    queue::{Lane, Position},
    wire::page,
};

use crate::{
    GpuError,
    aperture::OnGpu,
    kernels::{MOST_THREADS, ReceiverState, Record, SenderState, Status, key_word},
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

/// Memory of this side that kernels load and the peer stores into.
#[derive(Clone, Debug)]
pub enum Reached {
    /// The GPU's own: what a kernel is to poll.
    Gpu(Arc<GpuMemory>),
    /// The host's: each look goes over the bus.
    Host(Arc<OnGpu>),
}

impl From<&Arc<GpuMemory>> for Reached {
    fn from(memory: &Arc<GpuMemory>) -> Self {
        Self::Gpu(Arc::clone(memory))
    }
}

impl From<&Arc<OnGpu>> for Reached {
    fn from(memory: &Arc<OnGpu>) -> Self {
        Self::Host(Arc::clone(memory))
    }
}

impl Reached {
    fn at(&self) -> u64 {
        match self {
            Self::Gpu(memory) => memory.at(),
            Self::Host(memory) => memory.at(),
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Gpu(memory) => memory.bytes(),
            Self::Host(memory) => memory.bytes(),
        }
    }

    /// Keeps it with the rest of what a kernel uses.
    fn kept(&self, mut uses: Vec<Used>) -> Vec<Used> {
        uses.push(match self {
            Self::Gpu(memory) => Arc::clone(memory) as _,
            Self::Host(memory) => Arc::clone(memory) as _,
        });
        uses
    }
}

/// Something that a kernel uses.
pub(crate) type Used = Arc<dyn std::any::Any + Send + Sync>;

/// Who looks while a kernel runs, and how long it may run without anything to show for it.
pub(crate) struct Watch<'a> {
    /// Called at each look: anything that changes as long as the kernel gets on.
    pub(crate) progress: &'a mut dyn FnMut() -> u64,
    /// Longest time without a change.
    pub(crate) patience: Duration,
    /// Time between two looks.
    pub(crate) slice: Duration,
}

impl Watch<'_> {
    /// Time between two looks when nothing has to be done meanwhile.
    pub(crate) const SLICE: Duration = Duration::from_millis(2);
    /// Longest time that counts between two looks.
    const LONGEST: Duration = Duration::from_millis(50);
}

/// A kernel on its way, and what it uses.
#[derive(Debug)]
pub(crate) struct InFlight {
    // Fields drop in order: the kernel's end, then what it uses.
    running: Box<dyn Running>,
    #[expect(dead_code, reason = "held, not used")]
    uses: Vec<Used>,
}

impl InFlight {
    /// `uses` stays until `running` has ended.
    pub(crate) fn new(running: Box<dyn Running>, uses: Vec<Used>) -> Self {
        Self { running, uses }
    }

    fn finish(self) -> Result<(), GpuError> {
        self.finish_watched(&mut Watch {
            progress: &mut || 0,
            patience: PATIENCE,
            slice: Watch::SLICE,
        })
    }

    /// Waits for the kernel's end. One that gets nowhere is left to itself, and all that it uses stays for good: its stores may
    /// yet complete.
    pub(crate) fn finish_watched(mut self, watch: &mut Watch<'_>) -> Result<(), GpuError> {
        let (mut seen, mut idle) = ((watch.progress)(), Duration::ZERO);
        loop {
            let begin = Instant::now();
            if self.running.wait(watch.slice)? {
                return Ok(());
            }
            let now = (watch.progress)();
            // A process that was itself stopped meanwhile has not watched for so long.
            idle += begin.elapsed().min(Watch::LONGEST);
            if now != seen {
                (seen, idle) = (now, Duration::ZERO);
            }
            if idle >= watch.patience {
                #[allow(
                    clippy::mem_forget,
                    reason = "dropping would wait for an end that may never come"
                )]
                std::mem::forget(self);
                return Err(GpuError::new(
                    "gpu-stalled",
                    5,
                    format!(
                        "a kernel has got nowhere for {:?}, which its budget of looks does not explain: the GPU may wait for \
                         stores that no longer complete. It cannot be stopped: end the process",
                        watch.patience
                    ),
                ));
            }
        }
    }
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
    peer: Arc<OnGpu>,
    own: Reached,
}

impl GpuSender {
    /// The sender of `lane`. `peer` is the peer's memory, in whose lines `lane.consumer_base` counts. `own` is memory of this host
    /// with this side's control page at `control_line`: the peer's credits arrive there.
    pub fn new(
        gpu: &Arc<dyn Gpu>,
        lane: &Lane,
        peer: &Arc<OnGpu>,
        own: impl Into<Reached>,
        control_line: u64,
    ) -> Result<Self, GpuError> {
        check_lane(lane)?;
        let own = own.into();
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
            peer: Arc::clone(peer),
            own,
        })
    }

    /// The state after the last kernel.
    pub fn state(&self) -> Result<SenderState, GpuError> {
        Ok(SenderState::from_bytes(&self.state.read()?))
    }

    /// How far it has come.
    pub fn position(&self) -> Result<Position, GpuError> {
        let state = self.state()?;
        Ok(Position {
            lines: state.head,
            seq: state.seq,
            credit: state.credit,
        })
    }

    /// Goes on from where another end of the same lane has come.
    pub fn go_on_from(&mut self, position: Position) -> Result<(), GpuError> {
        let state = SenderState {
            head: position.lines,
            seq: position.seq,
            credit: position.credit,
            ..self.state()?
        };
        self.state.0.write(0, &state.to_bytes())
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
        let uses: Vec<Used> = vec![
            Arc::clone(&self.state.0) as _,
            Arc::clone(&self.peer) as _,
            Arc::clone(memory) as _,
        ];
        Ok(Sending {
            kernel: InFlight {
                running,
                uses: self.own.kept(uses),
            },
            sender: self,
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
    kernel: InFlight,
    sender: &'a GpuSender,
}

impl Sending<'_> {
    /// Waits for the end. Returns how many messages were sent.
    pub fn finish(self) -> Result<u64, GpuError> {
        self.kernel.finish()?;
        let state = self.sender.state()?;
        state.status().check()?;
        Ok(state.sent)
    }

    /// As [`Sending::finish`], watched; how many were sent, and how it ended.
    pub(crate) fn finish_watched(self, watch: &mut Watch<'_>) -> Result<(u64, Status), GpuError> {
        self.kernel.finish_watched(watch)?;
        let state = self.sender.state()?;
        Ok((state.sent, state.status()))
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
    own: Reached,
    peer: Arc<OnGpu>,
}

impl GpuReceiver {
    /// The receiver of `lane`. `own` is memory that the peer stores into, best the GPU's, with control page and ring from `own_line`
    /// on.
    /// `peer` is memory of the peer's, in whose lines `lane.producer_base` counts: credits go there.
    pub fn new(
        gpu: &Arc<dyn Gpu>,
        lane: &Lane,
        own: impl Into<Reached>,
        own_line: u64,
        peer: &Arc<OnGpu>,
    ) -> Result<Self, GpuError> {
        check_lane(lane)?;
        let own = own.into();
        let base = lines_in(
            own.bytes(),
            own_line,
            page::PAGE_LINES + lane.ring_lines,
            "the ring in this side's memory",
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
            own,
            peer: Arc::clone(peer),
        })
    }

    /// How far it has come.
    pub fn position(&self) -> Result<Position, GpuError> {
        let state = self.state()?;
        Ok(Position {
            lines: state.tail,
            seq: state.seq,
            credit: state.credited,
        })
    }

    /// Goes on from where another end of the same lane has come.
    pub fn go_on_from(&mut self, position: Position) -> Result<(), GpuError> {
        let state = ReceiverState {
            tail: position.lines,
            seq: position.seq,
            credited: position.credit,
            ..self.state()?
        };
        self.state.0.write(0, &state.to_bytes())
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
            kernel: self.in_flight(running, &[&records, out]),
            receiver: self,
            records,
        })
    }

    /// Gives everything consumed back at once.
    pub fn give_back(&mut self) -> Result<(), GpuError> {
        // SAFETY: as for `start`.
        let running = unsafe {
            self.gpu
                .start("ntb_give_back", 32, &[Arg::U64(self.state.0.at())])
        }?;
        self.in_flight(running, &[]).finish()
    }

    fn in_flight(&self, running: Box<dyn Running>, memory: &[&Arc<GpuMemory>]) -> InFlight {
        let uses: Vec<Used> = vec![Arc::clone(&self.state.0) as _, Arc::clone(&self.peer) as _];
        let uses = uses.into_iter().chain(memory.iter().map(|m| Arc::clone(m) as _));
        InFlight {
            running,
            uses: self.own.kept(uses.collect()),
        }
    }
}

/// Messages being received.
#[derive(Debug)]
#[must_use = "dropping waits for the end and tells nothing"]
pub struct Receiving<'a> {
    kernel: InFlight,
    receiver: &'a GpuReceiver,
    records: Arc<GpuMemory>,
}

impl Receiving<'_> {
    /// Waits for the end. Returns what was received, and how it ended: [`crate::kernels::Status::Budget`] when less came
    /// than was asked for.
    pub fn finish(self) -> Result<(Vec<Record>, Status), GpuError> {
        self.finish_watched(&mut Watch {
            progress: &mut || 0,
            patience: PATIENCE,
            slice: Watch::SLICE,
        })
    }

    /// As [`Receiving::finish`], watched.
    pub(crate) fn finish_watched(self, watch: &mut Watch<'_>) -> Result<(Vec<Record>, Status), GpuError> {
        self.kernel.finish_watched(watch)?;
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
