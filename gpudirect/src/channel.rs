//! Ends of a session's channels on a GPU: kernels store a channel's messages into the peer's memory, or take them out of this
//! side's. The peer is any end of a channel, on a processor or on a GPU; what it needs is that both sides open the channel with
//! checks ([`ntb_ring::session::ChannelSpec::check`]).
//!
//! | this side | the peer's memory is | way |
//! | --- | --- | --- |
//! | sends | mapped into this process, and the driver takes it | kernels store there |
//! | sends | anything else | *staging*: kernels store into memory of this host, the processor sends on |
//! | receives | – | kernels poll this side's ring: in the GPU's memory, where the link exports it, else in the host's |
//! | credits | mapped, and the driver takes it | kernels store them |
//! | credits | anything else | the processor posts them after each kernel |
//!
//! [`GpuTx::announcement`] and [`GpuRx::announcement`] say which it is and why nothing better.
//!
//! # Proof before use
//!
//! The session's test of the data path is stored by the processor, and says nothing of the way from a GPU to a bridge. So where
//! kernels store through an aperture, the first message of each life goes alone, and no more are sent before the far end has
//! taken it, for which its check must have held ([`GpuTx::prove`]). Credits that kernels store the processor posts once more
//! when the kernel has ended: one that got lost costs time, and no more.
//!
//! # Two GPUs that store into each other
//!
//! is a pattern for which NVIDIA's driver names a deadlock ([`BOTH_WAYS`]). Where both sides' rings of a channel lie in memory of
//! GPUs, sending by kernels is refused, and credits are posted by the processor, unless [`Options::both_ways`] asks for it. A
//! watchdog looks at every kernel: one that neither ends nor gets on for [`Options::patience`] is given up, with the reason.

use std::{
    sync::{Arc, Mutex, OnceLock, PoisonError, Weak},
    time::{Duration, Instant},
};

use ntb_mem::{
    line::{LINE_BYTES, LINE_WORDS},
    region::{Pages, Region, View},
};
use ntb_ring::{
    channel::{LentLane, Receiver, RecvFailure, SendFailure, Sender},
    link::{LinkKind, engine::Order},
    queue::{INCOMPLETE_DEADLINE, Lane, Position},
    session::Place,
    wire::page::{CREDIT, PAGE_LINES},
};

use crate::{
    GpuError,
    aperture::OnGpu,
    ends::{BUDGET, GpuReceiver, GpuSender, Outgoing, Reached, Watch},
    kernels::{Record, Status},
    memory::{Exposed, GpuMemory, Way},
    pace::Pace,
    proof::LOOK_FOR,
    seam::Gpu,
    stage::{ASK, Stage},
};

/// Why two GPUs do not store into each other's memory unasked.
pub const BOTH_WAYS: &str = "two GPUs store into each other's memory: NVIDIA's driver names a deadlock for devices that write through \
                             each other's BAR1 at once, keeps GPUs of one machine from it, and cannot see two GPUs behind a bridge";

/// How ends on a GPU are run.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Two GPUs may store into each other's memory: an experiment, see [`BOTH_WAYS`].
    pub both_ways: bool,
    /// Most looks that a kernel takes before it ends with nothing done; fewer where they would take longer than a fraction of
    /// a second, as measured. The next one goes on where it was.
    pub budget: u64,
    /// Time for which a kernel may neither end nor get on; longer where it has more to do than a machine so slow, as
    /// measured, does in that time.
    pub patience: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            both_ways: false,
            budget: BUDGET >> 6,
            patience: Duration::from_secs(10),
        }
    }
}

/// What the two ends of a channel on a GPU share.
#[derive(Debug)]
pub struct GpuChannel {
    gpu: Arc<dyn Gpu>,
    options: Options,
    exported: Option<Arc<Exposed>>,
    /// What is registered for the present life, while an end uses it: both ends reach the same pages, and the driver takes
    /// them once.
    reach: Mutex<Weak<Reach>>,
    /// What was measured for the first life.
    pace: OnceLock<Pace>,
}

/// How a GPU reaches the memory of one life of a channel.
#[derive(Debug)]
struct Reach {
    /// Addresses in this process of what it was made for.
    made_for: (usize, usize),
    own: Reached,
    /// Line of `own` at which the channel begins.
    first: u64,
    peer: Result<Arc<OnGpu>, GpuError>,
    /// Both rings lie in memory of GPUs.
    both: bool,
}

impl GpuChannel {
    /// `exported` is what the link exports, when the channel's ring at this side lies in it.
    pub fn new(gpu: &Arc<dyn Gpu>, options: Options, exported: Option<&Arc<Exposed>>) -> Arc<Self> {
        Arc::new(Self {
            gpu: Arc::clone(gpu),
            options,
            exported: exported.map(Arc::clone),
            reach: Mutex::new(Weak::new()),
            pace: OnceLock::new(),
        })
    }

    fn pace(&self) -> Result<Pace, GpuError> {
        if let Some(pace) = self.pace.get() {
            return Ok(*pace);
        }
        let pace = Pace::measure(&self.gpu, self.options.budget, self.options.patience)?;
        Ok(*self.pace.get_or_init(|| pace))
    }

    fn reach(&self, lent: &LentLane) -> Result<Arc<Reach>, GpuError> {
        if lent.order == Order::Ordered {
            return Err(GpuError::new(
                "gpu-channel-unchecked",
                7,
                "a GPU does not promise that a line travels whole, and this channel's messages carry no check: both sides must open \
                 it with checks",
            ));
        }
        let made_for = (
            lent.own.as_ptr().addr(),
            lent.direct.as_ref().map_or(0, |d| d.as_ptr().addr()),
        );
        let mut known = self.reach.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reach) = known.upgrade().filter(|r| r.made_for == made_for) {
            return Ok(reach);
        }
        let on_gpu = self.exported.as_ref().filter(|e| e.way() != Way::Staging);
        let (own, first) = match (lent.own_place, on_gpu) {
            (Place::Exported, Some(exposed)) => {
                let base = ntb_mem::export::Exportable::as_ptr(&**exposed).addr();
                let first = made_for.0.checked_sub(base).ok_or_else(|| {
                    GpuError::new(
                        "gpu-outside",
                        2,
                        "the channel lies in exported memory, but not in that of this GPU: give what the link exports",
                    )
                })?;
                (Reached::from(exposed.memory()), first as u64 / LINE_BYTES as u64)
            }
            _ => (Reached::from(&Arc::new(OnGpu::view(&self.gpu, &lent.own)?)), 0),
        };
        let peer = match &lent.direct {
            Some(direct) => OnGpu::direct(&self.gpu, direct).map(Arc::new),
            None => Err(GpuError::new(
                "gpu-aperture-not-mapped",
                3,
                "the peer's memory is not mapped into this process in one piece, so no kernel can store there",
            )),
        };
        let reach = Arc::new(Reach {
            made_for,
            both: matches!(own, Reached::Gpu(_)) && lent.peer_place == Place::Exported,
            own,
            first,
            peer,
        });
        *known = Arc::downgrade(&reach);
        Ok(reach)
    }

    /// Kernels must not store into the peer's memory.
    fn forbids(&self, reach: &Reach) -> bool {
        reach.both && !self.options.both_ways
    }
}

/// A lane as `Direct` and `own` count: from the channel's first line on.
fn at_zero(lane: &Lane) -> Lane {
    Lane {
        consumer_base: 0,
        producer_base: 0,
        ..*lane
    }
}

fn send_failure(e: &SendFailure) -> GpuError {
    let exit = match e {
        SendFailure::NotConnected(_) => 4,
        SendFailure::TooLong { .. } => 2,
        SendFailure::Lost(_) | SendFailure::Full { .. } | SendFailure::TimedOut { .. } => 5,
    };
    GpuError::new(e.name(), exit, e.to_string())
}

fn recv_failure(e: &RecvFailure) -> GpuError {
    let exit = match e {
        RecvFailure::NotConnected(_) => 4,
        RecvFailure::Lost(_) | RecvFailure::TimedOut | RecvFailure::Empty => 5,
        _ => 2,
    };
    GpuError::new(e.name(), exit, e.to_string())
}

/// A kernel that got nowhere, with the reason where there is one.
fn explain_stall(e: GpuError, both: bool) -> GpuError {
    match (e.name, both) {
        ("gpu-stalled", true) => GpuError {
            name: "gpu-both-ways-stalled",
            what: format!("{e}. Both directions were asked for, and {BOTH_WAYS}"),
            ..e
        },
        _ => e,
    }
}

/// Why a link shows the peer no memory of a GPU, where it is not plain memory of one machine anyway.
fn why_not_gpu(transport: LinkKind) -> Option<&'static str> {
    match transport {
        LinkKind::Soft => None,
        LinkKind::Ntb => Some(
            "this link exports none; it takes a window to spare, and GPU memory given to the link to export",
        ),
        LinkKind::Rdma => Some(
            "channels do not use GPU memory as a region of an RDMA device. It would take a link that registers the GPU's dma-buf with the \
             adapter (ibv_reg_dmabuf_mr, which the adapter's driver must have) and exports it",
        ),
        LinkKind::Tcp => Some("over TCP this host's processor stores what arrives, in its own memory"),
    }
}

fn announce_both(text: &mut String, reach: &Reach, allowed: bool) {
    if reach.both && allowed {
        text.push_str("; both directions, as asked for: ");
        text.push_str(BOTH_WAYS);
    }
}

/// The sending end of a channel, on a GPU. Dropping it waits for its kernel.
#[derive(Debug)]
pub struct GpuTx {
    // The life goes first: its kernels use what the sender's channel keeps mapped.
    life: Option<TxLife>,
    channel: Arc<GpuChannel>,
    sender: Sender,
    stalled: Option<GpuError>,
}

#[derive(Debug)]
struct TxLife {
    way: TxWay,
    pace: Pace,
    proof: Proof,
    reach: Arc<Reach>,
    /// This side's control page: the peer's credits arrive there.
    control: View,
}

/// Whether a life's way has been shown to carry what kernels store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Proof {
    /// The first message is still to be sent, alone.
    Due,
    /// It has this sequence, and was not taken yet.
    Sent(u64),
    /// Shown, or not needed.
    Given,
}

#[derive(Debug)]
enum TxWay {
    Direct(Box<GpuSender>),
    Staged(Box<Stage>, GpuError),
}

impl GpuTx {
    /// Takes a channel's sending end over. It may have sent already.
    pub fn new(channel: &Arc<GpuChannel>, sender: Sender) -> Self {
        Self {
            life: None,
            channel: Arc::clone(channel),
            sender,
            stalled: None,
        }
    }

    /// The channel's end, which goes on where the GPU has come.
    pub fn into_sender(self) -> Sender {
        let Self { life, sender, .. } = self;
        drop(life);
        sender
    }

    /// Sends all messages of `out`, waiting for room as long as `timeout`. Returns how many went: all, unless it is an error.
    ///
    /// An error named as a [`ntb_ring::session::CloseReason`] says that the life of the channel has ended; the next call belongs
    /// to the next one.
    pub fn send(&mut self, out: Outgoing<'_>, timeout: Duration) -> Result<u64, GpuError> {
        self.send_while(out, timeout, &mut || true)
    }

    /// As [`GpuTx::send`], for as long as `goes_on`, which is asked again and again while there is no room.
    pub(crate) fn send_while(
        &mut self,
        out: Outgoing<'_>,
        timeout: Duration,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<u64, GpuError> {
        if let Some(e) = &self.stalled {
            return Err(e.clone());
        }
        let (begin, mut rest, stride) = (Instant::now(), out, u64::from(out.size).next_multiple_of(8));
        loop {
            self.prove_while(timeout.saturating_sub(begin.elapsed()), goes_on)?;
            let (sent, status) = self.kernel(rest, goes_on)?;
            rest.count -= (sent as u32).min(rest.count);
            rest.offset += sent * stride;
            match status {
                Status::Done if rest.count == 0 => return Ok(out.count.into()),
                Status::Done if self.first_on_its_way().is_some() => {}
                Status::Done | Status::Budget if begin.elapsed() < timeout && goes_on() => {}
                Status::Done => return Err(Status::Budget.check().err().unwrap_or_else(unknown_end)),
                other => other.check()?,
            }
        }
    }

    /// Waits until the far end has taken the first message of this life, where kernels store through an aperture: see the
    /// module. [`GpuTx::send`] does so before the second one; who sends one and waits for an answer calls it between the two.
    /// `gpu-path-unproven` when `timeout` is over first; the first message stays sent then, and is waited for again.
    pub fn prove(&mut self, timeout: Duration) -> Result<(), GpuError> {
        self.prove_while(timeout, &mut || true)
    }

    pub(crate) fn prove_while(
        &mut self,
        timeout: Duration,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<(), GpuError> {
        let Some(seq) = self.first_on_its_way() else {
            return Ok(());
        };
        let begin = Instant::now();
        loop {
            let left = timeout.saturating_sub(begin.elapsed());
            match self.sender.wait_consumed(seq, left.min(ASK)) {
                Ok(()) => break,
                Err(SendFailure::TimedOut { .. }) if begin.elapsed() < timeout && goes_on() => {}
                Err(SendFailure::TimedOut { .. }) => {
                    return Err(GpuError::new(
                        "gpu-path-unproven",
                        5,
                        format!(
                            "the first message that a kernel has stored into the peer's memory was not taken within {:?}, and no \
                             more are sent before it is. Either nobody receives at the far end, or the path was set up without an \
                             error and does not carry what the GPU stores: {LOOK_FOR}",
                            begin.elapsed()
                        ),
                    ));
                }
                Err(e) => {
                    self.life = None;
                    return Err(send_failure(&e));
                }
            }
        }
        if let Some(life) = &mut self.life {
            life.proof = Proof::Given;
        }
        Ok(())
    }

    fn first_on_its_way(&self) -> Option<u64> {
        match self.life.as_ref()?.proof {
            Proof::Sent(seq) => Some(seq),
            Proof::Due | Proof::Given => None,
        }
    }

    /// How messages go, and why not in a better way: to be told to the user. Connects if there is a peer.
    pub fn announcement(&mut self) -> Result<String, GpuError> {
        let allowed = self.channel.options.both_ways;
        let life = self.life()?;
        let mut text = match &life.way {
            TxWay::Direct(_) => "kernels store into the peer's memory".to_owned(),
            TxWay::Staged(_, why) => format!(
                "staging: kernels store into memory of this host, and the processor sends every byte on; not directly: {why}"
            ),
        };
        announce_both(&mut text, &life.reach, allowed);
        Ok(text)
    }

    fn life(&mut self) -> Result<&mut TxLife, GpuError> {
        let lent = self.sender.lend();
        if self.life.is_none() || lent.is_err() {
            self.life = None;
            let lent = lent.map_err(|e| send_failure(&e))?;
            self.life = Some(self.begin(&lent)?);
        }
        self.life.as_mut().ok_or_else(unknown_end)
    }

    fn begin(&self, lent: &LentLane) -> Result<TxLife, GpuError> {
        let gpu = &self.channel.gpu;
        let reach = self.channel.reach(lent)?;
        if self.channel.forbids(&reach) && reach.peer.is_ok() {
            return Err(GpuError::new(
                "gpu-both-ways",
                2,
                format!(
                    "not sent: {BOTH_WAYS}. Let this side's ring of the channel lie in ordinary memory, or ask for both directions"
                ),
            ));
        }
        let foreign =
            lent.peer_place == Place::Exported || lent.direct.as_ref().is_some_and(|d| d.is_aperture());
        let proof = match &reach.peer {
            Ok(_) if foreign => Proof::Due,
            _ => Proof::Given,
        };
        let way = match &reach.peer {
            Ok(peer) => {
                let mut end =
                    GpuSender::new(gpu, &at_zero(&lent.lane), peer, reach.own.clone(), reach.first)?;
                end.go_on_from(lent.position)?;
                TxWay::Direct(Box::new(end))
            }
            Err(why) => TxWay::Staged(Box::new(Stage::new(gpu, lent.lane.ring_lines)?), why.clone()),
        };
        Ok(TxLife {
            way,
            pace: self.channel.pace()?,
            proof,
            control: lent.own.clone(),
            reach,
        })
    }

    /// Runs one kernel: how many messages went, and how it ended.
    fn kernel(
        &mut self,
        out: Outgoing<'_>,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<(u64, Status), GpuError> {
        let patience = self.channel.options.patience;
        self.life()?;
        let Self { life, sender, .. } = self;
        let Some(life) = life else {
            return Err(unknown_end());
        };
        let out = match life.proof {
            Proof::Due => Outgoing {
                count: out.count.min(1),
                ..out
            },
            _ => out,
        };
        let budget = life.pace.budget();
        let allowed = life.pace.allowed(u64::from(out.size) * u64::from(out.count));
        let begin = Instant::now();
        let end = match &mut life.way {
            TxWay::Direct(end) => end,
            TxWay::Staged(stage, _) => {
                let ended = stage.send(sender, out, budget, [patience, allowed], goes_on);
                if ended.is_err() {
                    self.life = None; // with what it may still hold of a life that has ended
                }
                return ended;
            }
        };
        if let Err(e) = sender.device_starts(out.count.into()) {
            self.life = None;
            return Err(send_failure(&e));
        }
        let control = &life.control;
        let credit = CREDIT as usize * LINE_WORDS;
        let mut watch = Watch {
            progress: &mut || control.load(credit, std::sync::atomic::Ordering::Acquire),
            patience: allowed,
            slice: Watch::SLICE,
        };
        let ended = end.start(out, budget).and_then(|s| s.finish_watched(&mut watch));
        let came = end.position();
        match ended {
            Ok(ended) => {
                let came = came?;
                sender.device_stopped(came);
                if life.proof == Proof::Due && ended.0 > 0 {
                    life.proof = Proof::Sent(came.seq.wrapping_sub(1));
                }
                if ended == (0, Status::Budget) {
                    life.pace.took(budget, begin.elapsed());
                }
                Ok(ended)
            }
            Err(e) if e.name == "gpu-stalled" => {
                // It may yet store: the channel's memory is not given to anything else.
                let e = explain_stall(e, life.reach.both);
                self.stalled = Some(e.clone());
                Err(e)
            }
            Err(e) => {
                // Nothing runs: it was not started, or the GPU is lost with all that it had sent.
                let nowhere = sender.lend().map(|lent| lent.position);
                sender.device_stopped(came.ok().or(nowhere.ok()).unwrap_or(Position {
                    lines: 0,
                    seq: 0,
                    credit: 0,
                }));
                self.life = None;
                Err(e)
            }
        }
    }
}

fn unknown_end() -> GpuError {
    GpuError::new("gpu-call", 1, "a kernel has not said how it ended")
}

/// The receiving end of a channel, on a GPU. Dropping it waits for its kernel.
#[derive(Debug)]
pub struct GpuRx {
    life: Option<RxLife>,
    channel: Arc<GpuChannel>,
    receiver: Receiver,
    stalled: Option<GpuError>,
}

#[derive(Debug)]
struct RxLife {
    end: GpuReceiver,
    pace: Pace,
    /// Bytes of the ring.
    ring: u64,
    reach: Arc<Reach>,
    /// Why kernels do not post the credits themselves.
    by_processor: Option<GpuError>,
    /// Lines that the processor has given back.
    credited: u64,
    /// Since when the next message has been there and incomplete.
    incomplete: Option<(u64, Instant)>,
}

impl GpuRx {
    /// Takes a channel's receiving end over. It may have received already.
    pub fn new(channel: &Arc<GpuChannel>, receiver: Receiver) -> Self {
        Self {
            life: None,
            channel: Arc::clone(channel),
            receiver,
            stalled: None,
        }
    }

    /// The channel's end, which goes on where the GPU has come.
    pub fn into_receiver(self) -> Receiver {
        let Self { life, receiver, .. } = self;
        drop(life);
        receiver
    }

    /// Receives up to `most` blocks into `out`, waiting for the first as long as `timeout`. Each begins at a multiple of 64 bytes.
    ///
    /// An error named as a [`ntb_ring::session::CloseReason`] says that the life of the channel has ended; `timed-out` that
    /// nothing came.
    pub fn receive(
        &mut self,
        out: &Arc<GpuMemory>,
        most: u32,
        timeout: Duration,
    ) -> Result<Vec<Record>, GpuError> {
        if let Some(e) = &self.stalled {
            return Err(e.clone());
        }
        let begin = Instant::now();
        loop {
            let (records, status) = self.kernel(out, most)?;
            if !records.is_empty() {
                return Ok(records);
            }
            match status {
                Status::Done | Status::Budget if begin.elapsed() < timeout => {}
                Status::Done | Status::Budget => return Err(recv_failure(&RecvFailure::TimedOut)),
                // Still on its way, for as long as any other end would wait.
                Status::Corrupt if !self.is_corrupt()? => {}
                other => other.check()?,
            }
        }
    }

    /// How messages come, and why not in a better way: to be told to the user. Connects if there is a peer.
    pub fn announcement(&mut self) -> Result<String, GpuError> {
        let allowed = self.channel.options.both_ways;
        let exported = self.channel.exported.clone();
        let transport = self.receiver.transport();
        let life = self.life()?;
        let mut text = match &life.reach.own {
            Reached::Gpu(_) => "kernels poll the GPU's memory".to_owned(),
            Reached::Host(_) => "kernels poll memory of this host".to_owned(),
        };
        match (exported, transport.and_then(why_not_gpu)) {
            (Some(exposed), _) => {
                text.push_str("; ");
                text.push_str(&exposed.announcement());
            }
            (None, Some(why)) => text.push_str(&format!(", not the GPU's: {why}")),
            (None, None) => {}
        }
        match &life.by_processor {
            None => text.push_str("; credits by the GPU"),
            Some(why) => text.push_str(&format!("; credits by the processor: {why}")),
        }
        announce_both(&mut text, &life.reach, allowed);
        Ok(text)
    }

    fn life(&mut self) -> Result<&mut RxLife, GpuError> {
        // The life that was lent first gives out all that had arrived: see `kernel`.
        if self.life.is_none() {
            let lent = self.receiver.lend().map_err(|e| recv_failure(&e))?;
            self.life = Some(self.begin(&lent)?);
        }
        self.life.as_mut().ok_or_else(unknown_end)
    }

    fn begin(&self, lent: &LentLane) -> Result<RxLife, GpuError> {
        let gpu = &self.channel.gpu;
        let reach = self.channel.reach(lent)?;
        let by_processor = match &reach.peer {
            Ok(_) if self.channel.forbids(&reach) => Some(GpuError::new("gpu-both-ways", 2, BOTH_WAYS)),
            Ok(_) => None,
            Err(why) => Some(why.clone()),
        };
        let credits = match (&reach.peer, &by_processor) {
            (Ok(peer), None) => Arc::clone(peer),
            _ => {
                let page = Region::allocate(PAGE_LINES * LINE_BYTES as u64, Pages::Normal);
                let page = page.map_err(|e| GpuError::new("gpu-host-memory", 6, e.to_string()))?;
                Arc::new(OnGpu::region(gpu, &Arc::new(page))?)
            }
        };
        let mut end = GpuReceiver::new(
            gpu,
            &at_zero(&lent.lane),
            reach.own.clone(),
            reach.first,
            &credits,
        )?;
        end.go_on_from(lent.position)?;
        Ok(RxLife {
            end,
            pace: self.channel.pace()?,
            ring: lent.lane.ring_lines * LINE_BYTES as u64,
            reach,
            by_processor,
            credited: lent.position.credit,
            incomplete: None,
        })
    }

    fn kernel(&mut self, out: &Arc<GpuMemory>, most: u32) -> Result<(Vec<Record>, Status), GpuError> {
        // Only into the GPU's own memory can what vouches for a message come before the message.
        if let Reached::Gpu(_) = self.life()?.reach.own {
            self.channel.gpu.flush()?;
        }
        let Self { life, receiver, .. } = self;
        let Some(life) = life else {
            return Err(unknown_end());
        };
        // After the end of a life nothing more comes: what is there is there at the first look.
        let ended_before = !receiver.is_current();
        let budget = if ended_before { 0 } else { life.pace.budget() };
        let allowed = life.pace.allowed(out.bytes().min(life.ring));
        let begin = Instant::now();
        let pump = match receiver.device_starts() {
            Ok(pump) => pump,
            Err(e) => {
                self.life = None;
                return Err(recv_failure(&e));
            }
        };
        let mut watch = Watch {
            progress: &mut || pump.as_ref().map_or(0, |pump| u64::from(pump.pump())),
            patience: allowed,
            slice: Watch::SLICE,
        };
        let ended = life
            .end
            .start(out, most, budget)
            .and_then(|r| r.finish_watched(&mut watch));
        let came = life.end.position();
        match ended {
            Ok((records, status)) => {
                let came = came?;
                if records.is_empty() && status == Status::Budget {
                    life.pace.took(budget, begin.elapsed());
                }
                // The processor gives it back once more, whatever the kernel has: its credits may not have arrived.
                let credit = came.lines.saturating_sub(1).max(life.credited);
                let sound = receiver.device_stopped(Position { credit, ..came });
                life.credited = came.lines;
                if status != Status::Corrupt {
                    life.incomplete = None;
                }
                if !sound || ended_before && records.is_empty() {
                    self.life = None;
                    self.life()?; // tells the end, once
                    return Ok((Vec::new(), Status::Budget));
                }
                Ok((records, status))
            }
            Err(e) if e.name == "gpu-stalled" => {
                let e = explain_stall(e, life.reach.both);
                self.stalled = Some(e.clone());
                Err(e)
            }
            Err(e) => {
                let here = receiver.lend().map(|lent| lent.position);
                receiver.device_stopped(here.unwrap_or(Position {
                    lines: 0,
                    seq: 0,
                    credit: 0,
                }));
                self.life = None;
                Err(e)
            }
        }
    }

    /// A message is there whose check does not hold: whether it has been so for too long. That ends this life of the link.
    fn is_corrupt(&mut self) -> Result<bool, GpuError> {
        let life = self.life()?;
        let seq = life.end.position()?.seq;
        let since = match life.incomplete {
            Some((same, since)) if same == seq => since,
            _ => Instant::now(),
        };
        life.incomplete = Some((seq, since));
        let corrupt = since.elapsed() >= INCOMPLETE_DEADLINE;
        if corrupt {
            self.receiver.device_found_corrupt();
        }
        Ok(corrupt)
    }
}
