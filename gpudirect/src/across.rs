//! A trial between two ends of a link, with a processor or a GPU at either: the way is proven, then messages go, and every byte
//! of them is compared at the other end.
//!
//! It is an application of [`crate::channel`]. On one channel with checks the sender says what will come, sends a pattern through
//! the very way that the messages take and waits until the receiver has found it, and then sends. The receiver answers on the
//! other direction of the channel, by its processor.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use ntb::{
    address::{OpenOptions, PortAddress},
    hw,
};
use ntb_mem::{export::Exportable, line::LINE_BYTES};
use ntb_ring::{
    address::Address,
    channel::{ConnectError, Connection, Options as LinkOptions, Receiver, Sender},
    link::{
        Link, LinkError,
        ntb::{NtbLink, NtbOptions},
        select,
    },
    queue::max_message,
    session::{ChannelSpec, Place},
    wire::page::PAGE_LINES,
};

use crate::{
    GpuError,
    channel::{GpuChannel, GpuRx, GpuTx, Options},
    ends::Outgoing,
    memory::{Exposed, GPU_PAGE, GpuMemory},
    seam::Gpu,
    stage::send_while,
};

/// Name of the channel.
const CHANNEL: &str = "gpu-trial";
/// Longest wait for the peer at each step.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest ring at the receiving end, in lines: room for the largest message.
const LONGEST_RING: u64 = 1 << 18;
/// Bytes of different messages that are prepared: they come again and again.
const BATCH: u64 = 1 << 20;
/// Longest pattern of the proof in bytes.
const PROOF: u64 = 64 << 10;
/// Largest message in bytes.
pub const LARGEST: u32 = 8 << 20;

/// Types of messages: what comes, the pattern, what is compared; and the receiver's answers.
const PLAN: u32 = 1;
const PATTERN: u32 = 2;
const DATA: u32 = 3;
const PROVEN: u32 = 4;
const RECEIVED: u32 = 5;
const WRONG: u32 = 6;

/// What is at an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The processor and memory of the host.
    Host,
    /// A GPU.
    Gpu,
}

impl End {
    fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Gpu => "gpu",
        }
    }
}

/// What is sent.
#[derive(Clone, Copy, Debug)]
pub struct Trial {
    /// Bytes of each message.
    pub size: u32,
    /// Messages.
    pub messages: u64,
    /// What is to be at the far end, if that matters.
    pub far: Option<End>,
}

/// What was measured, by the sender.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Messages, all of them received as sent.
    pub messages: u64,
    /// From the first to the receiver's word that it has compared the last one.
    pub elapsed: Duration,
    /// How messages went and came, in words: both ends.
    pub way: String,
}

fn failed(what: impl std::fmt::Display) -> GpuError {
    GpuError::new("gpu-trial", 1, what.to_string())
}

fn link_failed(e: &LinkError) -> GpuError {
    GpuError::new(e.name, e.exit, e.what.clone())
}

fn connect_failed(e: &ConnectError) -> GpuError {
    GpuError::new(e.name(), e.exit(), e.to_string())
}

/// What message `n` holds: as the message of its place in the batch, the pattern before all.
fn content(n: u64, size: u64) -> Vec<u8> {
    (0..size)
        .map(|i| {
            (n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8 ^ ((i * 7) ^ (i >> 8)) as u8
        })
        .collect()
}

/// Different messages of `size` bytes.
fn different(size: u32) -> u64 {
    (BATCH / u64::from(size).next_multiple_of(8)).clamp(1, 4096)
}

/// Messages in the order in which they are compared: the pattern, then batches.
fn number(n: u64, size: u32) -> u64 {
    n % different(size)
}

fn spec(ring_lines: u64) -> ChannelSpec {
    ChannelSpec {
        ring_lines,
        check: true,
        smaller_if_different: true,
    }
}

/// The receiving end over `address`: waits for a sender, and compares all that it sends. Returns what to print.
pub fn receive(address: &Address, gpu: Option<&Arc<dyn Gpu>>) -> Result<String, GpuError> {
    let (link, exposed) = open(address, gpu)?;
    receive_over(link, gpu, exposed.as_ref())
}

/// The sending end over `address`.
pub fn send(address: &Address, gpu: Option<&Arc<dyn Gpu>>, trial: Trial) -> Result<Outcome, GpuError> {
    let (link, _) = open(address, None)?;
    send_over(link, gpu, trial)
}

/// A link, and what it exports.
type Opened = (Box<dyn Link>, Option<Arc<Exposed>>);

/// Opens a link; with a GPU's memory behind its last window, where it is one over a bridge that has a window to spare.
fn open(address: &Address, gpu: Option<&Arc<dyn Gpu>>) -> Result<Opened, GpuError> {
    let port = match address {
        Address::Ntb(_) | Address::Emulated(_) => address.to_string().parse::<PortAddress>().ok(),
        _ => None,
    };
    if let (Some(port), Some(gpu)) = (port, gpu)
        && let Some(bytes) = last_window(&port)?
    {
        let exposed = Arc::new(Exposed::new(&GpuMemory::allocate(gpu, bytes)?, None)?);
        let options = NtbOptions {
            export: Some(Arc::clone(&exposed) as Arc<dyn Exportable>),
            ..NtbOptions::default()
        };
        let link = NtbLink::open(&port, &options).map_err(|e| link_failed(&e))?;
        return Ok((Box::new(link), Some(exposed)));
    }
    let opened = select::open(address, &select::LinkOptions::default()).map_err(|e| link_failed(&e))?;
    Ok((opened.link, None))
}

/// Bytes that the last of several windows takes; `None` where there is one window only.
fn last_window(port: &PortAddress) -> Result<Option<u64>, GpuError> {
    let failed = |e: hw::NtbError| GpuError::new("gpu-trial-port", e.class().code(), e.to_string());
    let function = port
        .open(&OpenOptions::default())
        .map_err(|e| failed(hw::NtbError::from(e)))?;
    let port = hw::open(&function).map_err(failed)?;
    let [_, .., last] = port.windows() else {
        return Ok(None);
    };
    let unit = last.size_align.max(GPU_PAGE);
    let wanted = (PAGE_LINES + LONGEST_RING) * LINE_BYTES as u64;
    Ok(Some(wanted.next_multiple_of(unit).min(last.bytes)))
}

fn connection(link: Box<dyn Link>) -> Result<Connection, GpuError> {
    Connection::open(link, &LinkOptions::default()).map_err(|e| connect_failed(&e))
}

/// Sends an answer or a plan by the processor.
fn say(tx: &mut Sender, what: u32, bytes: &[u8]) -> Result<u64, GpuError> {
    let sent = tx.send_typed(what, bytes, PATIENCE);
    sent.map_err(|e| GpuError::new(e.name(), 5, e.to_string()))
}

fn hear(rx: &mut Receiver, patience: Duration) -> Result<(u32, Vec<u8>), GpuError> {
    let mut buf = vec![0; 16 << 10];
    let got = rx.recv(&mut buf, patience).map_err(|e| {
        let exit = if e.name() == "timed-out" { 4 } else { 5 };
        GpuError::new(e.name(), exit, format!("waiting for the other end: {e}"))
    })?;
    buf.truncate(got.len);
    Ok((got.message_type, buf))
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let word = bytes.get(at * 8..at * 8 + 8).and_then(|b| b.try_into().ok());
    word.map_or(0, u64::from_le_bytes)
}

/// As [`receive`], over a link of the caller's; `exposed` is what it exports.
pub fn receive_over(
    link: Box<dyn Link>,
    gpu: Option<&Arc<dyn Gpu>>,
    exposed: Option<&Arc<Exposed>>,
) -> Result<String, GpuError> {
    let place = exposed.map_or(Place::Ordinary, |_| Place::Exported);
    let memory = exposed.map_or(link.inbound().lines(), |e| e.bytes() / LINE_BYTES as u64);
    // Half of what there is at most, so that the session and the rounding of a power of two have room.
    let lines = memory.saturating_sub(PAGE_LINES * 8).clamp(8, LONGEST_RING + 1);
    let ring = 1u64 << (lines.ilog2());
    let connection = connection(link)?;
    let ends = connection.channel_at(CHANNEL, spec(ring), place);
    let (mut tx, mut rx) = ends.map_err(|e| failed(&e))?;
    rx.wait_connected(PATIENCE)
        .map_err(|e| GpuError::new("gpu-trial-no-peer", 4, e.to_string()))?;
    let (what, plan) = hear(&mut rx, PATIENCE)?;
    let (size, messages, proof) = (word(&plan, 0), word(&plan, 1), word(&plan, 2));
    let sound = what == PLAN && (1..=LARGEST.into()).contains(&size) && proof <= PROOF;
    let result = match sound {
        true => compare(&mut tx, rx, gpu, exposed, (size as u32, messages, proof)),
        false => Err(failed(
            "the sender says nothing that makes sense: it is of another version",
        )),
    };
    let far = gpu.map_or(End::Host, |_| End::Gpu).name();
    let last = match &result {
        Ok(way) => say(&mut tx, RECEIVED, format!("{far}\n{way}").as_bytes()),
        Err(e) => say(
            &mut tx,
            WRONG,
            format!("{}\n{}\n{}", e.name, e.exit, e.what).as_bytes(),
        ),
    };
    if let Ok(seq) = last {
        let _ = tx.wait_consumed(seq, PATIENCE); // or the sender has gone, having heard
    }
    result.map(|way| format!("{messages} messages of {size} bytes, all as sent; {way}"))
}

/// A receiving end, whichever it is.
enum Receiving {
    Host(Box<Receiver>, Vec<u8>),
    Gpu(Box<GpuRx>, Arc<GpuMemory>),
}

impl Receiving {
    /// At least one message, each with its type.
    fn some(&mut self) -> Result<Vec<(u32, Vec<u8>)>, GpuError> {
        match self {
            Self::Host(rx, buf) => {
                let got = rx.recv(buf, PATIENCE);
                let got = got.map_err(|e| GpuError::new(e.name(), 5, e.to_string()))?;
                Ok(vec![(
                    got.message_type,
                    buf.get(..got.len).unwrap_or(&[]).to_vec(),
                )])
            }
            Self::Gpu(rx, out) => {
                let records = rx.receive(out, 64, PATIENCE)?;
                let read = |record: crate::kernels::Record| {
                    let mut bytes = vec![0; record.size as usize];
                    out.read(record.offset, &mut bytes)?;
                    Ok((record.message_type, bytes))
                };
                records.into_iter().map(read).collect()
            }
        }
    }
}

/// Compares the pattern and all messages. Returns how they came.
fn compare(
    tx: &mut Sender,
    rx: Receiver,
    gpu: Option<&Arc<dyn Gpu>>,
    exposed: Option<&Arc<Exposed>>,
    (size, messages, proof): (u32, u64, u64),
) -> Result<String, GpuError> {
    let longest = u64::from(size).max(proof);
    let (mut receiving, way) = match gpu {
        None => {
            let buf = vec![0; longest as usize];
            (
                Receiving::Host(Box::new(rx), buf),
                "the processor polls memory of this host".to_owned(),
            )
        }
        Some(gpu) => {
            let channel = GpuChannel::new(gpu, Options::default(), exposed);
            let mut rx = GpuRx::new(&channel, rx);
            let way = rx.announcement()?;
            let room = longest.next_multiple_of(LINE_BYTES as u64).max(BATCH);
            (Receiving::Gpu(Box::new(rx), GpuMemory::allocate(gpu, room)?), way)
        }
    };
    let batch: Vec<Vec<u8>> = (0..different(size).min(messages.max(1)))
        .map(|n| content(n, size.into()))
        .collect();
    let (mut n, mut proven) = (0, false);
    while n < messages || !proven {
        for (what, bytes) in receiving.some()? {
            if !proven {
                if what != PATTERN || bytes != content(u64::MAX, proof) {
                    return Err(GpuError::new(
                        "gpu-path-unproven",
                        5,
                        "the pattern that came the whole way is not what was sent",
                    ));
                }
                proven = true;
                say(tx, PROVEN, &[])?;
                continue;
            }
            let sent = batch.get(number(n, size) as usize);
            if what != DATA || sent.is_none_or(|sent| *sent != bytes) {
                return Err(GpuError::new(
                    "gpu-wrong-data",
                    1,
                    format!("message {n} is not what was sent"),
                ));
            }
            n += 1;
        }
    }
    Ok(way)
}

/// As [`send`], over a link of the caller's.
pub fn send_over(link: Box<dyn Link>, gpu: Option<&Arc<dyn Gpu>>, trial: Trial) -> Result<Outcome, GpuError> {
    let Trial { size, messages, far } = trial;
    if !(1..=LARGEST).contains(&size) {
        return Err(GpuError::new(
            "gpu-message-size",
            2,
            format!("messages of {size} bytes: 1 to {LARGEST} can be sent"),
        ));
    }
    let lines = u64::from(size).div_ceil(LINE_BYTES as u64) + 1;
    let ring = (lines * 4).max(256).next_power_of_two().min(LONGEST_RING);
    let connection = connection(link)?;
    let ends = connection.channel(CHANNEL, spec(ring));
    let (mut tx, rx) = ends.map_err(|e| failed(&e))?;
    tx.wait_connected(PATIENCE)
        .map_err(|e| GpuError::new("gpu-trial-no-peer", 4, e.to_string()))?;
    let largest = tx.lend().map_or(ring, |lent| lent.lane.ring_lines);
    if u64::from(size) > max_message(largest) {
        return Err(GpuError::new(
            "message-too-long",
            2,
            format!(
                "messages of {size} bytes: the memory that the far end shows takes {} at most",
                max_message(largest)
            ),
        ));
    }
    // The pattern goes once round the ring, as far as it is sent in one message.
    let proof = max_message(largest).min(PROOF);
    let plan: Vec<u8> = [u64::from(size), messages, proof]
        .iter()
        .flat_map(|w| w.to_le_bytes())
        .collect();
    say(&mut tx, PLAN, &plan)?;
    let mut sending = Sending::new(tx, gpu, size, proof)?;
    let own = sending.announcement()?;
    let mut far_end = FarEnd { rx, said: None };
    let sent = sending.pattern(&mut || far_end.is_well());
    far_end.or_its_reason(sent)?;
    far_end.answer(PROVEN)?;
    let (begin, mut n) = (Instant::now(), 0);
    while n < messages {
        let sent = sending.some(messages - n, &mut || far_end.is_well());
        n += far_end.or_its_reason(sent)?;
    }
    let said = far_end.answer(RECEIVED)?;
    let elapsed = begin.elapsed();
    let (there, theirs) = said.split_once('\n').unwrap_or((&said, ""));
    match far {
        Some(wanted) if wanted.name() != there => Err(GpuError::new(
            "gpu-other-far-end",
            2,
            format!(
                "all arrived, but what is at the far end is '{there}', not '{}': 'gpu-try --serve ADDRESS --way ...' there decides",
                wanted.name()
            ),
        )),
        _ => Ok(Outcome {
            messages,
            elapsed,
            way: format!("here: {own}; there: {theirs}"),
        }),
    }
}

/// The far end, as the sender hears it.
struct FarEnd {
    rx: Receiver,
    /// What it has said and nobody has asked for yet.
    said: Option<(u32, Vec<u8>)>,
}

impl FarEnd {
    /// Whether it has not said that it failed: it takes nothing more then, and waiting for room would be for nothing.
    fn is_well(&mut self) -> bool {
        if self.said.is_none() {
            self.said = hear(&mut self.rx, Duration::ZERO).ok();
        }
        !matches!(self.said, Some((WRONG, _)))
    }

    /// What was sent, or why not: in the far end's words where it has some.
    fn or_its_reason<T>(&mut self, sent: Result<T, GpuError>) -> Result<T, GpuError> {
        match (sent, self.is_well()) {
            (Err(own), true) => Err(own),
            (Ok(sent), true) => Ok(sent),
            (_, false) => self.answer(RECEIVED).and_then(|_| Err(nonsense())),
        }
    }

    fn answer(&mut self, wanted: u32) -> Result<String, GpuError> {
        let (what, bytes) = match self.said.take() {
            Some(said) => said,
            None => hear(&mut self.rx, PATIENCE.saturating_mul(4))?,
        };
        let text = String::from_utf8_lossy(&bytes).into_owned();
        match what {
            _ if what == wanted => Ok(text),
            WRONG => Err(far_failure(&text)),
            _ => Err(nonsense()),
        }
    }
}

fn nonsense() -> GpuError {
    failed("the far end says nothing that makes sense: it is of another version")
}

/// The far end's error, by its name and exit class where they can be ones.
fn far_failure(text: &str) -> GpuError {
    let mut parts = text.splitn(3, '\n');
    let (name, exit, what) = (parts.next(), parts.next(), parts.next());
    let exit = exit.and_then(|exit| exit.parse().ok());
    let is_name = |name: &&str| {
        (1..=64).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    match (name.filter(is_name), exit, what) {
        (Some(name), Some(exit @ 1..=7), Some(what)) => GpuError::new(
            // Names are for good. This one is short, and a trial ends with it.
            Box::leak(name.to_owned().into_boxed_str()),
            exit,
            format!("the far end says: {what}"),
        ),
        _ => failed(format_args!("the far end says: {text}")),
    }
}

/// A sending end, whichever it is, with all that it sends.
enum Sending {
    Host(Box<Sender>, Vec<Vec<u8>>, u64),
    Gpu {
        tx: Box<GpuTx>,
        batch: Arc<GpuMemory>,
        pattern: Arc<GpuMemory>,
        size: u32,
        proof: u32,
        next: u64,
    },
}

impl Sending {
    fn new(tx: Sender, gpu: Option<&Arc<dyn Gpu>>, size: u32, proof: u64) -> Result<Self, GpuError> {
        let contents = || (0..different(size)).map(|n| content(n, size.into()));
        let Some(gpu) = gpu else {
            return Ok(Self::Host(Box::new(tx), contents().collect(), proof));
        };
        let stride = u64::from(size).next_multiple_of(8);
        let batch = GpuMemory::allocate(gpu, stride * different(size))?;
        for (n, bytes) in (0..).zip(contents()) {
            batch.write(n * stride, &bytes)?;
        }
        let pattern = GpuMemory::allocate(gpu, proof)?;
        pattern.write(0, &content(u64::MAX, proof))?;
        let channel = GpuChannel::new(gpu, Options::default(), None);
        Ok(Self::Gpu {
            tx: Box::new(GpuTx::new(&channel, tx)),
            batch,
            pattern,
            size,
            proof: proof as u32,
            next: 0,
        })
    }

    fn announcement(&mut self) -> Result<String, GpuError> {
        match self {
            Self::Host(..) => Ok("the processor stores".to_owned()),
            Self::Gpu { tx, .. } => tx.announcement(),
        }
    }

    fn pattern(&mut self, goes_on: &mut dyn FnMut() -> bool) -> Result<(), GpuError> {
        match self {
            Self::Host(tx, _, proof) => {
                send_while(tx, PATTERN, &content(u64::MAX, *proof), PATIENCE, goes_on)
            }
            Self::Gpu {
                tx, pattern, proof, ..
            } => {
                let out = Outgoing {
                    memory: pattern,
                    offset: 0,
                    size: *proof,
                    count: 1,
                    message_type: PATTERN,
                };
                tx.send_while(out, PATIENCE, goes_on)?;
                // Before the far end, which waits as long for it, gives up.
                tx.prove_while(PATIENCE / 4 * 3, goes_on)
            }
        }
    }

    /// Sends up to `most` messages from where it is in the batch. Returns how many.
    fn some(&mut self, most: u64, goes_on: &mut dyn FnMut() -> bool) -> Result<u64, GpuError> {
        match self {
            Self::Host(tx, batch, _) => {
                let mut sent = 0;
                for bytes in batch.iter().take(most as usize) {
                    send_while(tx, DATA, bytes, PATIENCE, goes_on)?;
                    sent += 1;
                }
                Ok(sent)
            }
            Self::Gpu {
                tx,
                batch,
                size,
                next,
                ..
            } => {
                let stride = u64::from(*size).next_multiple_of(8);
                let count = (different(*size) - *next).min(most);
                let out = Outgoing {
                    memory: batch,
                    offset: *next * stride,
                    size: *size,
                    count: count as u32,
                    message_type: DATA,
                };
                *next = (*next + count) % different(*size);
                tx.send_while(out, PATIENCE, goes_on)
            }
        }
    }
}
