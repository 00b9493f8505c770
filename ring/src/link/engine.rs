//! The data side of a link: how lines reach the peer, and how a side reads what the peer stored.

#![allow(unsafe_code, reason = "an address that is handed on to devices")]

use std::{
    error::Error,
    fmt::Debug,
    sync::{Arc, atomic::Ordering},
};

use ntb_mem::line::{LINE_BYTES, LINE_WORDS, Line};
use ntb_mem::region::{Small, View};

pub use crate::wire::line::Order;

/// How lines are to be stored, where a link leaves a choice: over bridges.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EngineChoice {
    /// The fastest that mapping and processor allow.
    #[default]
    Auto,
    /// Streaming stores to a write-combining mapping.
    WriteCombining,
    /// Direct stores of 64 bytes.
    Movdir64b,
    /// Stores of 8 bytes to an uncached mapping.
    Uncached8,
}

/// Puts lines into the peer's memory. The ring is generic over it, so that every transport, counter and fault wrapper
/// runs the same ring.
///
/// Lines are numbered from the start of the outbound memory. Implementations check bounds: a line outside is a bug of
/// this program, not something a peer can cause, and may panic.
pub trait StoreEngine: Send {
    /// What a receiver may rely on.
    fn order(&self) -> Order;

    /// Length of the outbound memory in lines.
    fn lines(&self) -> u64;

    /// Stores one line. With [`Order::Ordered`], word 7 becomes visible after the others.
    fn put(&mut self, line: u64, content: &Line);

    /// Stores a line of up to 48 bytes, filled up with zeros, and its words 6 and 7.
    #[inline]
    fn put_small(&mut self, line: u64, bytes: &[u8], word6: u64, word7: u64) {
        let mut content = Line::from_bytes(bytes);
        content.0[6] = word6;
        content.0[7] = word7;
        self.put(line, &content);
    }

    /// Stores `bytes` from the start of line `line` on, the last line filled up with zeros. Within the run no order is
    /// promised.
    #[inline]
    fn put_bytes(&mut self, line: u64, bytes: &[u8]) {
        for (at, chunk) in (line..).zip(bytes.chunks(LINE_BYTES)) {
            self.put(at, &Line::from_bytes(chunk));
        }
    }

    /// With [`Order::Ordered`]: everything put before becomes visible before anything put after.
    fn barrier(&mut self);

    /// Nothing put before stays in a buffer on this side.
    fn flush(&mut self);

    /// `lines` lines of the peer's memory from `first` on as they are mapped into this process in one piece, so that a device
    /// of this side can be let to store there itself. `None` where they are not: the processor carries the lines then.
    fn direct(&self, first: u64, lines: u64) -> Option<Direct> {
        let _ = (first, lines);
        None
    }
}

/// A piece of the peer's memory that is mapped into this process, and kept so. Nobody loads from it.
#[derive(Clone, Debug)]
pub struct Direct {
    address: *mut u8,
    bytes: u64,
    aperture: Option<Arc<dyn Populate>>,
    _keep: Arc<dyn Debug + Send + Sync>,
}

/// Puts the pages of a mapping of a device's memory into the page tables of this process without touching the device.
pub trait Populate: Debug + Send + Sync {
    /// Does so for `bytes` bytes at `address`, which lie in the mapping; the error says what stands in the way.
    fn populate(&self, address: *mut u8, bytes: u64) -> Result<(), Box<dyn Error + Send + Sync>>;
}

// SAFETY: the address is that of a mapping of the process that `_keep` keeps; nothing here dereferences it.
unsafe impl Send for Direct {}
// SAFETY: as above.
unsafe impl Sync for Direct {}

impl Direct {
    /// The mapping at `address` stays as long as `keep` does, and gives no reference out.
    pub(crate) fn new(
        address: *mut u8,
        bytes: u64,
        aperture: Option<Arc<dyn Populate>>,
        keep: Arc<dyn Debug + Send + Sync>,
    ) -> Self {
        Self {
            address,
            bytes,
            aperture,
            _keep: keep,
        }
    }

    /// First byte: for devices, never for references.
    pub fn as_ptr(&self) -> *mut u8 {
        self.address
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it is a bridge's aperture; ordinary memory of this machine otherwise.
    pub fn is_aperture(&self) -> bool {
        self.aperture.is_some()
    }

    /// Puts all its pages into the page tables of this process, without a load or a store where it is an aperture.
    pub fn populate(&self) -> Result<(), Box<dyn Error + Send + Sync>> {
        match &self.aperture {
            Some(aperture) => aperture.populate(self.address, self.bytes),
            None => Ok(()),
        }
    }
}

/// Local memory that the peer stores into, read by words and by lines.
///
/// Any word may change at any time.
pub trait Inbound: Send {
    /// Length in lines.
    fn lines(&self) -> u64;

    /// Loads a word; `index` is below `lines() * 8`.
    fn load(&self, index: usize, order: Ordering) -> u64;

    /// Copies line `line` out, word 7 first and with acquire.
    #[inline(always)]
    fn load_line(&self, line: u64) -> Line {
        let last = self.load(line as usize * LINE_WORDS + LINE_WORDS - 1, Ordering::Acquire);
        Line::from_parts(self.load_body(line), last)
    }

    /// Loads words 0 to 6 of line `line`, each once, relaxed.
    #[inline(always)]
    fn load_body(&self, line: u64) -> [u64; LINE_WORDS - 1] {
        let mut body = [0; LINE_WORDS - 1];
        for (i, slot) in body.iter_mut().enumerate() {
            *slot = self.load(line as usize * LINE_WORDS + i, Ordering::Relaxed);
        }
        body
    }

    /// As [`View::take_small`].
    #[inline]
    fn take_small(&self, line: u64, word7: u64, upper: u32, buf: &mut [u8]) -> Small {
        let content = self.load_line(line);
        let differing = content.0[7] ^ word7;
        let (len, seal) = ((differing >> 56) as usize, content.0[6]);
        match buf.get_mut(..len) {
            Some(dst) if differing << 8 == 0 && len <= 48 && (seal >> 32) as u32 == upper => {
                content.copy_to(dst);
                let lower = seal as u32;
                Small::Taken { len, lower }
            }
            _ => Small::Not(content.0[7]),
        }
    }

    /// Copies bytes out, from byte `from` on. Each word is loaded once, relaxed.
    fn copy_out(&self, from: usize, dst: &mut [u8]) {
        let mut at = from;
        let mut rest = dst;
        while !rest.is_empty() {
            let skip = at % 8;
            let word = self.load(at / 8, Ordering::Relaxed).to_le_bytes();
            let take = (8 - skip).min(rest.len());
            let (now, later) = rest.split_at_mut(take);
            now.copy_from_slice(&word[skip..skip + take]);
            at += take;
            rest = later;
        }
    }
}

impl Inbound for View {
    #[inline(always)]
    fn lines(&self) -> u64 {
        View::lines(self)
    }

    #[inline(always)]
    fn load(&self, index: usize, order: Ordering) -> u64 {
        View::load(self, index, order)
    }

    #[inline(always)]
    fn load_body(&self, line: u64) -> [u64; LINE_WORDS - 1] {
        View::load_body(self, line)
    }

    #[inline(always)]
    fn take_small(&self, line: u64, word7: u64, upper: u32, buf: &mut [u8]) -> Small {
        View::take_small(self, line, word7, upper, buf)
    }

    #[inline(always)]
    fn copy_out(&self, from: usize, dst: &mut [u8]) {
        View::copy_out(self, from, dst);
    }
}

/// Stores to coherent memory of the same machine: plain stores, kept in order by the processor's release semantics.
#[derive(Debug)]
pub struct WriteBack {
    memory: View,
}

impl WriteBack {
    /// An engine onto memory that both sides map write-back.
    pub fn new(memory: View) -> Self {
        Self { memory }
    }
}

impl StoreEngine for WriteBack {
    #[inline(always)]
    fn order(&self) -> Order {
        Order::Ordered
    }

    #[inline(always)]
    fn lines(&self) -> u64 {
        self.memory.lines()
    }

    #[inline(always)]
    fn put(&mut self, line: u64, content: &Line) {
        self.memory.store_line(line, content);
    }

    #[inline(always)]
    fn put_small(&mut self, line: u64, bytes: &[u8], word6: u64, word7: u64) {
        self.memory.store_small(line, bytes, word6, word7);
    }

    #[inline]
    fn put_bytes(&mut self, line: u64, bytes: &[u8]) {
        self.memory.copy_in(line as usize * LINE_BYTES, bytes);
    }

    #[inline(always)]
    fn barrier(&mut self) {
        ntb_mem::store::order_write_back();
    }

    #[inline(always)]
    fn flush(&mut self) {}

    fn direct(&self, first: u64, lines: u64) -> Option<Direct> {
        let part = self.memory.part(first, lines)?;
        let bytes = lines * LINE_BYTES as u64;
        Some(Direct::new(part.as_ptr().cast(), bytes, None, Arc::new(part)))
    }
}

/// An engine chosen at run time. The write-back one is dispatched without a virtual call, since it is the one whose
/// cost is measured in single nanoseconds.
pub enum Engine {
    /// Coherent memory of the same machine.
    WriteBack(WriteBack),
    /// Everything else.
    Other(Box<dyn StoreEngine>),
}

impl Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::WriteBack(_) => "Engine::WriteBack",
            Self::Other(_) => "Engine::Other",
        })
    }
}

impl StoreEngine for Engine {
    #[inline(always)]
    fn order(&self) -> Order {
        match self {
            Self::WriteBack(e) => e.order(),
            Self::Other(e) => e.order(),
        }
    }

    #[inline(always)]
    fn lines(&self) -> u64 {
        match self {
            Self::WriteBack(e) => e.lines(),
            Self::Other(e) => e.lines(),
        }
    }

    #[inline(always)]
    fn put(&mut self, line: u64, content: &Line) {
        match self {
            Self::WriteBack(e) => e.put(line, content),
            Self::Other(e) => e.put(line, content),
        }
    }

    #[inline(always)]
    fn put_small(&mut self, line: u64, bytes: &[u8], word6: u64, word7: u64) {
        match self {
            Self::WriteBack(e) => e.put_small(line, bytes, word6, word7),
            Self::Other(e) => e.put_small(line, bytes, word6, word7),
        }
    }

    #[inline]
    fn put_bytes(&mut self, line: u64, bytes: &[u8]) {
        match self {
            Self::WriteBack(e) => e.put_bytes(line, bytes),
            Self::Other(e) => e.put_bytes(line, bytes),
        }
    }

    #[inline(always)]
    fn barrier(&mut self) {
        match self {
            Self::WriteBack(e) => e.barrier(),
            Self::Other(e) => e.barrier(),
        }
    }

    #[inline(always)]
    fn flush(&mut self) {
        match self {
            Self::WriteBack(e) => e.flush(),
            Self::Other(e) => e.flush(),
        }
    }

    fn direct(&self, first: u64, lines: u64) -> Option<Direct> {
        match self {
            Self::WriteBack(e) => e.direct(first, lines),
            Self::Other(e) => e.direct(first, lines),
        }
    }
}
