//! Engines onto the peer's memory through the apertures of this side's windows.
//!
//! What each of them keeps in order, and why that is enough, is a table in `docs/memory-model.md`.

#![allow(unsafe_code, reason = "stores to device memory by address")]

use std::{
    error::Error,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use ntb::{
    hw::{NtbError, NtbPort},
    pci::{CacheType, DmaMemory, DmaSpace},
    window::{Aperture, ApertureChoice, ApertureKind},
};
use ntb_mem::{
    cpu::CpuFeatures,
    line::{LINE_BYTES, LINE_WORDS, Line},
    store::{self, Width},
};

use super::joined::joined;
use crate::link::{
    LinkError,
    engine::{Direct, Engine, EngineChoice, Order, Populate, StoreEngine},
};

/// How lines are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    Combined(Width),
    Direct,
    Uncached8,
    WriteBack,
    Trapped64,
    Trapped8,
}

impl Method {
    /// What suits the aperture, the processor and the user's wish.
    pub(super) fn choose(
        kind: ApertureKind,
        cpu: CpuFeatures,
        wish: EngineChoice,
    ) -> Result<Self, LinkError> {
        let wide = Width::widest(cpu);
        let refused = |engine: &str, needed: &str| LinkError {
            name: "engine-not-to-be-had",
            exit: 3,
            what: format!(
                "engine {engine} was asked for and needs {needed}, but the window is {kind} here and the processor has \
                 movdir64b: {}, AVX-512: {}; leave the choice of the engine out to get the fastest there is",
                cpu.movdir64b, cpu.avx512f
            ),
            errno: None,
        };
        use ApertureKind::{Mapped, Trapped};
        Ok(match (wish, kind) {
            // A trapped window stands for the one that the store would go to, whatever the processor can.
            (EngineChoice::Uncached8, Trapped) => Self::Trapped8,
            (_, Trapped) => Self::Trapped64,
            (EngineChoice::Uncached8, Mapped(_)) => Self::Uncached8,
            (EngineChoice::Movdir64b, Mapped(_)) if cpu.movdir64b => Self::Direct,
            (EngineChoice::Movdir64b, Mapped(_)) => {
                return Err(refused("movdir64b", "a processor with movdir64b"));
            }
            (EngineChoice::Auto | EngineChoice::WriteCombining, Mapped(CacheType::WriteCombining)) => {
                Self::Combined(wide)
            }
            (EngineChoice::WriteCombining, Mapped(_)) => {
                return Err(refused("wc", "a window that is mapped write-combining"));
            }
            (EngineChoice::Auto, Mapped(CacheType::Uncached)) if cpu.movdir64b => Self::Direct,
            (EngineChoice::Auto, Mapped(CacheType::Uncached)) => Self::Uncached8,
            (EngineChoice::Auto, Mapped(CacheType::WriteBack)) => Self::WriteBack,
        })
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Combined(_) => "write-combining",
            Self::Direct => "movdir64b",
            Self::Uncached8 => "uncached-8",
            Self::WriteBack => "write-back",
            Self::Trapped64 => "trapped-64",
            Self::Trapped8 => "trapped-8",
        }
    }

    pub(super) fn order(self) -> Order {
        match self {
            Self::Combined(Width::Bytes64) | Self::Direct | Self::WriteBack => Order::Ordered,
            Self::Combined(Width::Bytes8) | Self::Uncached8 | Self::Trapped64 | Self::Trapped8 => {
                Order::Relaxed
            }
        }
    }
}

/// The apertures of the joined windows, one behind the other, for one life of the link.
///
/// Dropping it revokes them: engines that are left store into private memory, or nowhere. Where a device of this side has been
/// given a part, that comes when the device has let go of it: its own mapping does not follow the process's, and is taken back
/// while both still mean the same. Until then late stores go on into an aperture whose far window its owner has closed, or
/// reopens for marks of another tag.
#[derive(Debug)]
pub(super) struct Outbound {
    method: Method,
    reach: Reach,
    lines: u64,
}

#[derive(Clone, Debug)]
enum Reach {
    Mapped(Arc<Mapped>),
    Trapped(Arc<Gate>),
}

/// Part of the peer's memory behind one aperture.
#[derive(Debug)]
struct Piece {
    first_line: u64,
    lines: u64,
    aperture: Aperture,
}

/// Apertures written by calls; `None` once revoked.
type Gate = Mutex<Option<Vec<Piece>>>;

/// Apertures written by stores.
#[derive(Debug)]
struct Mapped {
    /// First line, lines, address of the first line.
    segments: Vec<(u64, u64, *mut u64)>,
    pieces: Vec<Piece>,
    pages: Arc<dyn Populate>,
    used: Mutex<Used>,
}

/// Who still needs the mappings.
#[derive(Debug, Default)]
struct Used {
    /// Parts that devices have.
    lent: usize,
    /// The life is over.
    ended: bool,
    revoked: bool,
}

/// A part that a device has been given; the mappings are not revoked before it is dropped.
#[derive(Debug)]
struct Lent(Arc<Mapped>);

impl Lent {
    /// `None` when the life is over.
    fn new(mapped: &Arc<Mapped>) -> Option<Self> {
        let mut used = mapped.used();
        if used.ended {
            return None;
        }
        used.lent += 1;
        Some(Self(Arc::clone(mapped)))
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut used = self.0.used();
        used.lent -= 1;
        self.0.revoke_unless(&mut used);
    }
}

/// Where a range is mapped for DMA for a moment, which puts its pages into the page tables of the process: VFIO maps BARs
/// page by page as they are touched, and touching an aperture is a load across the link.
#[derive(Debug)]
struct Pages(Arc<DmaSpace>);

impl Populate for Pages {
    fn populate(&self, address: *mut u8, bytes: u64) -> Result<(), Box<dyn Error + Send + Sync>> {
        // SAFETY: `Direct` gives a part of an aperture's mapping, which it keeps and to which no reference exists.
        let memory = unsafe { DmaMemory::raw(address, bytes, None) };
        // SAFETY: as above; the mapping goes before this returns.
        unsafe { self.0.map_raw(&memory, 1) }.map(drop)?;
        Ok(())
    }
}

// SAFETY: the addresses are those of mappings that `pieces` keeps for as long as this lives; they belong to the process
// and are used by store routines only, which are sound from any thread.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Outbound {
    /// Opens the apertures of all joined windows. They must all be of the kind of the first.
    pub(super) fn open(
        port: &dyn NtbPort,
        space: &Arc<DmaSpace>,
        address: &str,
        cpu: CpuFeatures,
        wish: EngineChoice,
    ) -> Result<Self, LinkError> {
        let failed = |e: NtbError| super::error::link_error(address, &e);
        let (mut pieces, mut lines) = (Vec::<Piece>::new(), 0);
        for index in 0..joined(port.windows()).len() {
            let aperture = match pieces.first() {
                Some(first) => Aperture::open(port, index, ApertureChoice::Only(first.aperture.kind())),
                None => first_aperture(port, wish),
            };
            let aperture = aperture.map_err(failed)?;
            let here = aperture.bytes() / LINE_BYTES as u64;
            pieces.push(Piece {
                first_line: lines,
                lines: here,
                aperture,
            });
            lines += here;
        }
        let Some(first) = pieces.first() else {
            return Err(failed(NtbError::NoWindow {
                window: 0,
                windows: 0,
            }));
        };
        let method = Method::choose(first.aperture.kind(), cpu, wish).map_err(|mut e| {
            // Why the mapping is what it is, with the remedy.
            for refusal in first.aperture.refusals() {
                e.what.push_str(&format!("; {refusal}"));
            }
            e
        })?;
        let reach = match first.aperture.kind() {
            ApertureKind::Trapped => Reach::Trapped(Arc::new(Mutex::new(Some(pieces)))),
            ApertureKind::Mapped(_) => Reach::Mapped(Arc::new(Mapped::new(pieces, space).map_err(failed)?)),
        };
        Ok(Self { method, reach, lines })
    }

    pub(super) fn method(&self) -> Method {
        self.method
    }

    pub(super) fn engine(&self) -> Engine {
        let (method, lines) = (self.method, self.lines);
        Engine::Other(match &self.reach {
            Reach::Trapped(gate) => Box::new(Trapped {
                gate: Arc::clone(gate),
                method,
                lines,
            }),
            Reach::Mapped(mapped) => {
                let mapped = Arc::clone(mapped);
                match method {
                    Method::Direct => boxed(mapped, lines, method, |p, l| {
                        // SAFETY: `Stores::put` gives the address of a line in a live mapping; the method was chosen
                        // because the processor has the instruction.
                        unsafe { store::direct(p, l) }
                    }),
                    Method::Combined(Width::Bytes64) => boxed(mapped, lines, method, |p, l| {
                        // SAFETY: as above; the width was chosen because the processor has it.
                        unsafe { store::combined(p, l, Width::Bytes64) }
                    }),
                    Method::Combined(Width::Bytes8) => boxed(mapped, lines, method, |p, l| {
                        // SAFETY: as above, and every processor has this width.
                        unsafe { store::combined(p, l, Width::Bytes8) }
                    }),
                    Method::WriteBack => boxed(mapped, lines, method, |p, l| {
                        // SAFETY: as above.
                        unsafe { store::write_back(p, l) }
                    }),
                    Method::Uncached8 | Method::Trapped64 | Method::Trapped8 => {
                        boxed(mapped, lines, method, |p, l| {
                            // SAFETY: as above.
                            unsafe { store::uncached8(p, l) }
                        })
                    }
                }
            }
        })
    }
}

impl Drop for Outbound {
    fn drop(&mut self) {
        match &self.reach {
            Reach::Trapped(gate) => drop(gate.lock().unwrap_or_else(PoisonError::into_inner).take()),
            Reach::Mapped(mapped) => {
                let mut used = mapped.used();
                used.ended = true;
                mapped.revoke_unless(&mut used);
            }
        }
    }
}

/// The fastest aperture that suits the wish. Stores of 8 bytes go to uncached mappings: on a combining one they combine.
fn first_aperture(port: &dyn NtbPort, wish: EngineChoice) -> Result<Aperture, NtbError> {
    let only = |kind| Aperture::open(port, 0, ApertureChoice::Only(kind));
    match wish {
        EngineChoice::Uncached8 => {
            only(ApertureKind::Mapped(CacheType::Uncached)).or_else(|_| only(ApertureKind::Trapped))
        }
        _ => Aperture::open(port, 0, ApertureChoice::Best),
    }
}

impl Mapped {
    fn new(pieces: Vec<Piece>, space: &Arc<DmaSpace>) -> Result<Self, NtbError> {
        let segments = pieces
            .iter()
            .map(|piece| {
                let pointer = piece.aperture.pointer(0, piece.lines * LINE_BYTES as u64)?;
                Ok((piece.first_line, piece.lines, pointer.cast()))
            })
            .collect::<Result<_, NtbError>>()?;
        let pages = Arc::new(Pages(Arc::clone(space)));
        Ok(Self {
            segments,
            pieces,
            pages,
            used: Mutex::default(),
        })
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Revokes the mappings, unless the life goes on or a device has a part.
    fn revoke_unless(&self, used: &mut Used) {
        if !used.ended || used.lent > 0 || used.revoked {
            return;
        }
        used.revoked = true;
        for piece in &self.pieces {
            // Where the kernel refuses (too many mappings), late stores go on as if a device had it.
            let _ = piece.aperture.revoke();
        }
    }

    #[inline(always)]
    fn address(&self, line: u64) -> *mut u64 {
        for (first, lines, base) in &self.segments {
            if line.wrapping_sub(*first) < *lines {
                return base.wrapping_add((line - first) as usize * LINE_WORDS);
            }
        }
        outside()
    }
}

#[cold]
#[inline(never)]
#[allow(clippy::panic, reason = "lines are computed by this program: see StoreEngine")]
fn outside() -> ! {
    panic!("line outside the peer's memory")
}

fn boxed<S>(mapped: Arc<Mapped>, lines: u64, method: Method, store: S) -> Box<dyn StoreEngine>
where
    S: Fn(*mut u64, &Line) + Send + 'static,
{
    Box::new(Stores {
        mapped,
        lines,
        method,
        store,
    })
}

/// Stores by instructions.
struct Stores<S> {
    mapped: Arc<Mapped>,
    lines: u64,
    method: Method,
    store: S,
}

impl<S: Fn(*mut u64, &Line) + Send> StoreEngine for Stores<S> {
    #[inline]
    fn order(&self) -> Order {
        self.method.order()
    }

    #[inline]
    fn lines(&self) -> u64 {
        self.lines
    }

    #[inline]
    fn put(&mut self, line: u64, content: &Line) {
        (self.store)(self.mapped.address(line), content);
    }

    #[inline]
    fn barrier(&mut self) {
        match self.method {
            Method::WriteBack => store::order_write_back(),
            _ => store::drain(),
        }
    }

    #[inline]
    fn flush(&mut self) {
        self.barrier();
    }

    fn direct(&self, first: u64, lines: u64) -> Option<Direct> {
        let (at, address) = self.mapped.segments.iter().find_map(|(start, count, address)| {
            let at = first.checked_sub(*start)?;
            (at.checked_add(lines)? <= *count).then_some((at, *address))
        })?;
        let bytes = lines * LINE_BYTES as u64;
        let address = address.wrapping_add(at as usize * LINE_WORDS).cast();
        let pages = Arc::clone(&self.mapped.pages);
        let lent = Lent::new(&self.mapped)?;
        Some(Direct::new(address, bytes, Some(pages), Arc::new(lent)))
    }
}

/// Stores by calls of the backend. They leave in the order they are made, so there is nothing to wait for.
struct Trapped {
    gate: Arc<Gate>,
    method: Method,
    lines: u64,
}

impl StoreEngine for Trapped {
    fn order(&self) -> Order {
        self.method.order()
    }

    fn lines(&self) -> u64 {
        self.lines
    }

    fn put(&mut self, line: u64, content: &Line) {
        if line >= self.lines {
            outside();
        }
        let gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        let piece = gate
            .iter()
            .flatten()
            .find(|piece| line.wrapping_sub(piece.first_line) < piece.lines);
        let Some(piece) = piece else { return }; // revoked
        let at = (line - piece.first_line) * LINE_BYTES as u64;
        let bytes = content.to_bytes();
        let width = match self.method {
            Method::Trapped8 => 8,
            _ => LINE_BYTES,
        };
        for (offset, part) in (0..).step_by(width).zip(bytes.chunks(width)) {
            // Posted as on a bus: a write to a device that has gone vanishes, and the link notices the loss by itself.
            let _ = piece.aperture.post(at + offset, part);
        }
    }

    fn barrier(&mut self) {}

    fn flush(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Nothing;

    impl Populate for Nothing {
        fn populate(&self, _: *mut u8, _: u64) -> Result<(), Box<dyn Error + Send + Sync>> {
            Err("nothing is mapped".into())
        }
    }

    const NONE: CpuFeatures = CpuFeatures {
        movdir64b: false,
        avx512f: false,
        avx: false,
    };
    const ALL: CpuFeatures = CpuFeatures {
        movdir64b: true,
        avx512f: true,
        avx: true,
    };

    fn chosen(
        kind: ApertureKind,
        cpu: CpuFeatures,
        wish: EngineChoice,
    ) -> Result<(&'static str, Order), &'static str> {
        Method::choose(kind, cpu, wish)
            .map(|m| (m.name(), m.order()))
            .map_err(|e| {
                assert!(e.what.contains(&kind.to_string()), "{e}");
                e.name
            })
    }

    #[test]
    fn the_method_follows_mapping_processor_and_wish() {
        use ApertureKind::{Mapped, Trapped};
        use CacheType::{Uncached, WriteBack, WriteCombining};
        use EngineChoice::{Auto, Movdir64b, Uncached8};
        use Order::{Ordered, Relaxed};
        const NOT: &str = "engine-not-to-be-had";
        let wc = EngineChoice::WriteCombining;
        for (kind, cpu, wish, expected) in [
            (
                Mapped(WriteCombining),
                ALL,
                Auto,
                Ok(("write-combining", Ordered)),
            ),
            (
                Mapped(WriteCombining),
                NONE,
                Auto,
                Ok(("write-combining", Relaxed)),
            ),
            (Mapped(WriteCombining), ALL, Movdir64b, Ok(("movdir64b", Ordered))),
            (Mapped(WriteCombining), NONE, Movdir64b, Err(NOT)),
            (Mapped(Uncached), ALL, Auto, Ok(("movdir64b", Ordered))),
            (Mapped(Uncached), NONE, Auto, Ok(("uncached-8", Relaxed))),
            (Mapped(Uncached), ALL, Uncached8, Ok(("uncached-8", Relaxed))),
            (Mapped(Uncached), ALL, wc, Err(NOT)),
            (Mapped(WriteBack), NONE, Auto, Ok(("write-back", Ordered))),
            (Trapped, NONE, Auto, Ok(("trapped-64", Relaxed))),
            (Trapped, NONE, wc, Ok(("trapped-64", Relaxed))),
            (Trapped, NONE, Movdir64b, Ok(("trapped-64", Relaxed))),
            (Trapped, ALL, Uncached8, Ok(("trapped-8", Relaxed))),
        ] {
            assert_eq!(chosen(kind, cpu, wish), expected, "{kind} {cpu:?} {wish:?}");
        }
    }

    #[test]
    fn mappings_are_revoked_after_the_last_device_has_let_go_and_none_gets_them_later() {
        let outbound = || {
            let mapped = Arc::new(Mapped {
                segments: vec![(0, 64, std::ptr::null_mut())],
                pieces: Vec::new(),
                pages: Arc::new(Nothing),
                used: Mutex::default(),
            });
            let reach = Reach::Mapped(Arc::clone(&mapped));
            let (method, lines) = (Method::WriteBack, 64);
            (Outbound { method, reach, lines }, mapped)
        };
        let (alone, mapped) = outbound();
        drop(alone.engine().direct(0, 1).unwrap());
        assert!(!mapped.used().revoked, "the life goes on");
        drop(alone);
        assert!(mapped.used().revoked, "at once");

        let (lending, mapped) = outbound();
        let engine = lending.engine();
        let device = engine.direct(0, 64).unwrap();
        let same = device.clone();
        drop(lending);
        assert!(engine.direct(0, 64).is_none(), "too late for another");
        drop(device);
        assert!(!mapped.used().revoked, "a device has it still");
        drop(same);
        assert!(mapped.used().revoked);
    }

    /// Plain memory in the place of two apertures, the second one twice as long.
    #[test]
    fn every_method_stores_whole_lines_where_they_belong() {
        use ntb_mem::region::{Pages, Region};
        let cpu = CpuFeatures::detect();
        let mut methods = vec![
            Method::Combined(Width::Bytes8),
            Method::Uncached8,
            Method::WriteBack,
        ];
        if cpu.avx512f {
            methods.push(Method::Combined(Width::Bytes64));
        }
        if cpu.movdir64b {
            methods.push(Method::Direct);
        }
        for method in methods {
            let regions = [4096, 8192].map(|n| Arc::new(Region::allocate(n, Pages::Normal).unwrap()));
            let [first, second] = regions.each_ref().map(|r| r.view());
            let outbound = Outbound {
                method,
                reach: Reach::Mapped(Arc::new(Mapped {
                    segments: vec![(0, 64, first.as_ptr()), (64, 128, second.as_ptr())],
                    pieces: Vec::new(),
                    pages: Arc::new(Nothing),
                    used: Mutex::default(),
                })),
                lines: 192,
            };
            let mut engine = outbound.engine();
            assert_eq!((engine.lines(), engine.order()), (192, method.order()));
            let line = |n: u64| Line(std::array::from_fn(|i| n << 8 | i as u64 | 1 << 60));
            for n in [0, 1, 63, 64, 65, 191] {
                engine.put(n, &line(n));
            }
            // A device is told of pieces that lie in one window.
            let direct = engine.direct(64, 128).unwrap();
            assert_eq!((direct.as_ptr(), direct.bytes()), (second.as_ptr().cast(), 8192));
            assert!(direct.is_aperture() && direct.populate().is_err());
            assert_eq!(
                engine.direct(70, 1).unwrap().as_ptr(),
                second.as_ptr().wrapping_add(48).cast()
            );
            for (at, lines) in [(63, 2), (64, 129), (192, 1), (u64::MAX, 2)] {
                assert!(engine.direct(at, lines).is_none(), "{at} {lines}");
            }
            engine.barrier();
            engine.put_bytes(62, &[0x77; 3 * LINE_BYTES]);
            engine.flush();
            let load = |n: u64| match n {
                0..64 => crate::link::engine::Inbound::load_line(&first, n),
                _ => crate::link::engine::Inbound::load_line(&second, n - 64),
            };
            for n in 0..192 {
                let expected = match n {
                    62..65 => Line([0x7777_7777_7777_7777; 8]),
                    0 | 1 | 65 | 191 => line(n),
                    _ => Line::ZERO,
                };
                assert_eq!(load(n), expected, "{method:?}, line {n}");
            }
            let outside = std::panic::AssertUnwindSafe(|| engine.put(192, &Line::ZERO));
            assert!(std::panic::catch_unwind(outside).is_err(), "{method:?}");
        }
    }
}
