//! Memory windows: inbound memory that the peer stores into, and the aperture through which this side stores into
//! the peer's.
//!
//! Life of inbound memory, each step undone by the drop of what it made, in reverse: allocate (once; a link that
//! goes down and up keeps it), map through the IOMMU, open the window. A window is closed, and read back, before
//! its mapping goes, and the mapping goes before the memory.

pub mod memory_type;

use std::sync::Arc;

use ntb_mem::{
    export::Exportable,
    region::{Pages, Region, View},
};

use crate::{
    hw::{NtbError, NtbPort, WindowInfo},
    pci::{BarMap, CacheType, DmaMapping, DmaSpace, Isolation, PciError, PciFunction, config},
};

/// Memory of this machine that the peer reaches through a window, until dropped.
///
/// The peer may write any of it at any time, whatever the link's state: read it through [`InboundWindow::view`]
/// and check what is read.
#[derive(Debug)]
pub struct InboundWindow {
    // Fields drop in order: window, mapping, memory.
    open: OpenWindow,
    _mapping: Arc<DmaMapping>,
    region: Arc<Region>,
    offset: u64,
    bytes: u64,
}

impl InboundWindow {
    /// Allocates `bytes` (rounded up to what the window takes), maps them, and lets the peer in through window
    /// `index`.
    pub fn allocate(
        port: &Arc<dyn NtbPort>,
        space: &Arc<DmaSpace>,
        index: usize,
        bytes: u64,
        pages: Pages,
    ) -> Result<Self, NtbError> {
        let info = info(&**port, index)?;
        let rounded = round(&info, index, bytes)?;
        let region = Region::allocate(rounded, pages).map_err(|source| NtbError::Memory {
            bytes: rounded,
            source,
        })?;
        Self::over(port, space, index, &Arc::new(region), rounded)
    }

    /// Lets the peer into the first `bytes` bytes of `region`, which may be larger, and into nothing else of it.
    pub fn over(
        port: &Arc<dyn NtbPort>,
        space: &Arc<DmaSpace>,
        index: usize,
        region: &Arc<Region>,
        bytes: u64,
    ) -> Result<Self, NtbError> {
        let info = info(&**port, index)?;
        let bytes = round(&info, index, bytes)?;
        if bytes > region.bytes() {
            return Err(NtbError::BadWindowSize {
                window: index,
                asked: bytes,
                limit: region.bytes(),
                multiple: info.size_align,
            });
        }
        let mapping = Arc::new(space.map(region, info.address_align)?);
        Self::part(port, index, region, &mapping, 0, bytes)
    }

    /// Lets the peer into `bytes` bytes from `offset` on of `region`, which `mapping` has mapped whole: several windows
    /// can show parts of one memory. The mapping's address must suit the window at this offset.
    pub fn part(
        port: &Arc<dyn NtbPort>,
        index: usize,
        region: &Arc<Region>,
        mapping: &Arc<DmaMapping>,
        offset: u64,
        bytes: u64,
    ) -> Result<Self, NtbError> {
        let info = info(&**port, index)?;
        let bytes = round(&info, index, bytes)?;
        let all = region.bytes().min(mapping.bytes());
        if offset.checked_add(bytes).is_none_or(|end| end > all) || !offset.is_multiple_of(64) {
            return Err(NtbError::BadWindowSize {
                window: index,
                asked: offset.saturating_add(bytes),
                limit: all,
                multiple: info.size_align,
            });
        }
        let memory: Arc<dyn Exportable> = Arc::clone(region) as _;
        let open = OpenWindow::new(port, index, &memory, mapping.iova() + offset, bytes)?;
        Ok(Self {
            open,
            _mapping: Arc::clone(mapping),
            region: Arc::clone(region),
            offset,
            bytes,
        })
    }

    /// Bytes that the peer reaches.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of the window.
    pub fn index(&self) -> usize {
        self.open.index
    }

    /// The memory. Outlives the window for as long as the result is held; nothing reaches it then.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The bytes that the peer reaches, as words.
    pub fn view(&self) -> View {
        let all = self.region.view();
        // Windows are whole pages, so whole lines, and lie in the region.
        all.part(self.offset / 64, self.bytes / 64).unwrap_or(all)
    }

    /// Closes the window and gives the memory back, with the error that dropping would only log.
    pub fn close(mut self) -> Result<Arc<Region>, NtbError> {
        self.open.close()?;
        Ok(Arc::clone(&self.region))
    }
}

/// Memory of any owner that the peer reaches through a window, until dropped: another device's, for instance.
///
/// What the peer stores is read by whoever owns the memory.
#[derive(Debug)]
pub struct ExportedWindow {
    // Fields drop in order: window, mapping, memory.
    open: OpenWindow,
    mapping: Arc<DmaMapping>,
    memory: Arc<dyn Exportable>,
    bytes: u64,
}

impl ExportedWindow {
    /// Maps `memory` for the device, and lets the peer into all of it through window `index`: its length must be one that
    /// the window takes.
    pub fn open(
        port: &Arc<dyn NtbPort>,
        space: &Arc<DmaSpace>,
        index: usize,
        memory: &Arc<dyn Exportable>,
    ) -> Result<Self, NtbError> {
        let info = info(&**port, index)?;
        let bytes = memory.bytes();
        if round(&info, index, bytes)? != bytes {
            return Err(NtbError::BadWindowSize {
                window: index,
                asked: bytes,
                limit: info.bytes,
                multiple: info.size_align,
            });
        }
        let mapping = space.map_exported(memory, info.address_align.max(memory.alignment()))?;
        Self::over(port, index, memory, &Arc::new(mapping))
    }

    /// The same with memory that is mapped for the device already, all of it, at an address that suits the window.
    pub fn over(
        port: &Arc<dyn NtbPort>,
        index: usize,
        memory: &Arc<dyn Exportable>,
        mapping: &Arc<DmaMapping>,
    ) -> Result<Self, NtbError> {
        let bytes = memory.bytes();
        let open = OpenWindow::new(port, index, memory, mapping.iova(), bytes)?;
        Ok(Self {
            open,
            mapping: Arc::clone(mapping),
            memory: Arc::clone(memory),
            bytes,
        })
    }

    /// Address at which the device finds the memory.
    pub fn iova(&self) -> u64 {
        self.mapping.iova()
    }

    /// Bytes that the peer reaches.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The memory.
    pub fn memory(&self) -> &Arc<dyn Exportable> {
        &self.memory
    }

    /// Closes the window, with the error that dropping would only log; then the mapping goes.
    pub fn close(mut self) -> Result<(), NtbError> {
        self.open.close()
    }
}

/// A translation that is set; closed on drop.
#[derive(Debug)]
struct OpenWindow {
    port: Arc<dyn NtbPort>,
    index: usize,
    memory: Arc<dyn Exportable>,
    closed: bool,
}

impl OpenWindow {
    fn new(
        port: &Arc<dyn NtbPort>,
        index: usize,
        memory: &Arc<dyn Exportable>,
        iova: u64,
        bytes: u64,
    ) -> Result<Self, NtbError> {
        // Made before the window is touched: one that opened half way is closed too.
        let this = Self {
            port: Arc::clone(port),
            index,
            memory: Arc::clone(memory),
            closed: false,
        };
        this.port.open_window(index, iova, bytes)?;
        Ok(this)
    }

    fn close(&mut self) -> Result<(), NtbError> {
        self.port.close_window(self.index)?;
        self.closed = true;
        Ok(())
    }
}

impl Drop for OpenWindow {
    fn drop(&mut self) {
        if self.closed {
            return;
        }
        let Err(error) = self.port.close_window(self.index) else {
            return;
        };
        // The device would not close the window: then it may reach no memory at all.
        let function = &**self.port.function();
        let stopped = config::set_bus_master(function, false);
        tracing::warn!(window = self.index, %error, ?stopped, "a memory window could not be closed");
        let guarded = function.isolation() != Isolation::None;
        let gone = error.is_gone() && matches!(stopped, Err(PciError::Gone { .. }));
        if !(guarded || stopped.is_ok() || gone) {
            // Nothing stands between a device that still writes and this memory: it must never be used again.
            let _ = std::mem::ManuallyDrop::new(Arc::clone(&self.memory));
        }
    }
}

fn info(port: &dyn NtbPort, index: usize) -> Result<WindowInfo, NtbError> {
    port.windows().get(index).copied().ok_or(NtbError::NoWindow {
        window: index,
        windows: port.windows().len(),
    })
}

fn round(info: &WindowInfo, index: usize, bytes: u64) -> Result<u64, NtbError> {
    bytes
        .checked_next_multiple_of(info.size_align.max(1))
        .filter(|b| *b > 0 && *b <= info.bytes)
        .ok_or(NtbError::BadWindowSize {
            window: index,
            asked: bytes,
            limit: info.bytes,
            multiple: info.size_align,
        })
}

/// How stores reach an aperture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ApertureKind {
    /// By store instructions to a mapping of this memory type.
    Mapped(CacheType),
    /// By writes that the backend passes on one by one: an emulated device whose windows are not mapped.
    Trapped,
}

impl std::fmt::Display for ApertureKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Mapped(cache) => write!(f, "mapped {cache}"),
            Self::Trapped => f.write_str("trapped"),
        }
    }
}

/// Which kind of aperture to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ApertureChoice {
    /// The fastest that can be had: write-combining, then uncached, then trapped. [`Aperture::refusals`] says why
    /// not a faster one.
    #[default]
    Best,
    /// This one or an error.
    Only(ApertureKind),
}

/// The window's BAR, through which stores reach the peer's memory.
///
/// Stores are posted: they vanish without an error when the link is down or the peer's window is closed. Loads
/// cross the link and stall; there is no method for one on purpose.
#[derive(Debug)]
pub struct Aperture {
    // Fields drop in order: the mapping before the function.
    map: Option<BarMap>,
    info: WindowInfo,
    kind: ApertureKind,
    refusals: Vec<PciError>,
    function: Arc<dyn PciFunction>,
}

impl Aperture {
    /// Opens the aperture of window `index`.
    pub fn open(port: &dyn NtbPort, index: usize, choice: ApertureChoice) -> Result<Self, NtbError> {
        let info = info(port, index)?;
        let function = Arc::clone(port.function());
        let order = match choice {
            ApertureChoice::Only(kind) => vec![kind],
            ApertureChoice::Best => vec![
                ApertureKind::Mapped(CacheType::WriteCombining),
                ApertureKind::Mapped(CacheType::Uncached),
                ApertureKind::Trapped,
            ],
        };
        let mut refusals = Vec::new();
        for kind in order {
            match attach(&function, &info, kind) {
                Ok((map, kind)) => {
                    return Ok(Self {
                        map,
                        info,
                        kind,
                        refusals,
                        function,
                    });
                }
                Err(e) => refusals.push(e),
            }
        }
        // The last one asked for is the one that decides.
        Err(refusals.pop().map_or(
            NtbError::NoWindow {
                window: index,
                windows: 0,
            },
            NtbError::from,
        ))
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.info.bytes
    }

    /// How stores reach it.
    pub fn kind(&self) -> ApertureKind {
        self.kind
    }

    /// Why faster kinds could not be had, with the remedy.
    pub fn refusals(&self) -> &[PciError] {
        &self.refusals
    }

    /// Whether the device vanished under a store: stores land nowhere since then.
    pub fn lost(&self) -> bool {
        self.map.as_ref().is_some_and(BarMap::lost)
    }

    /// Address of `bytes` bytes at `offset`, for the store routines of [`ntb_mem::store`]; valid while the aperture
    /// lives. Fails with [`PciError::Hole`] where the mapping has one, and on trapped apertures.
    pub fn pointer(&self, offset: u64, bytes: u64) -> Result<*mut u8, NtbError> {
        self.check(offset, bytes)?;
        match &self.map {
            Some(map) => Ok(map.pointer(self.info.offset + offset, bytes)?),
            None => Err(NtbError::Pci(PciError::NoSuchMapping {
                bar: self.info.bar,
                device: self.function.name().to_owned(),
                wanted: CacheType::WriteBack,
                why: "the aperture is trapped: post to it instead".to_owned(),
            })),
        }
    }

    /// Lets go of the device's memory behind a mapped aperture while others may still be storing to it: the addresses
    /// stay valid and turn into private memory that nobody reads. Nothing to do on trapped ones.
    pub fn revoke(&self) -> Result<(), NtbError> {
        Ok(self.map.as_ref().map_or(Ok(()), BarMap::revoke)?)
    }

    /// Posts bytes to a trapped aperture: one write of the window per call, in order.
    pub fn post(&self, offset: u64, data: &[u8]) -> Result<(), NtbError> {
        self.check(offset, data.len() as u64)?;
        Ok(self
            .function
            .bar_post(self.info.bar, self.info.offset + offset, data)?)
    }

    /// Writes bytes that need not be fast, on every kind of aperture. On mapped apertures they leave in ascending order,
    /// in naturally aligned stores of eight bytes and fewer, and are on their way when this returns.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), NtbError> {
        self.check(offset, data.len() as u64)?;
        let Some(map) = &self.map else {
            return Ok(self
                .function
                .bar_write(self.info.bar, self.info.offset + offset, data)?);
        };
        let mut at = self.info.offset + offset;
        let mut rest = data;
        while !rest.is_empty() {
            at += store_first(map, at, &mut rest)?;
        }
        ntb_mem::store::drain();
        Ok(())
    }

    fn check(&self, offset: u64, bytes: u64) -> Result<(), NtbError> {
        if offset
            .checked_add(bytes)
            .is_some_and(|end| end <= self.info.bytes)
        {
            return Ok(());
        }
        Err(NtbError::OutOfAperture {
            bar: self.info.bar,
            offset,
            bytes,
            limit: self.info.bytes,
        })
    }
}

/// Stores as many of the first bytes as one naturally aligned store at `at` takes, and says how many those were.
fn store_first(map: &BarMap, at: u64, rest: &mut &[u8]) -> Result<u64, NtbError> {
    macro_rules! try_width {
        ($($width:ty)*) => {$(
            const BYTES: usize = size_of::<$width>();
            if at.is_multiple_of(BYTES as u64)
                && let Some((first, others)) = rest.split_first_chunk::<BYTES>()
            {
                map.store(at, <$width>::from_ne_bytes(*first))?;
                *rest = others;
                return Ok(BYTES as u64);
            }
        )*};
    }
    {
        try_width!(u64);
    }
    {
        try_width!(u32);
    }
    {
        try_width!(u16);
    }
    {
        try_width!(u8);
    }
    Ok(0)
}

fn attach(
    function: &Arc<dyn PciFunction>,
    info: &WindowInfo,
    kind: ApertureKind,
) -> Result<(Option<BarMap>, ApertureKind), PciError> {
    match kind {
        ApertureKind::Trapped => Ok((None, kind)),
        ApertureKind::Mapped(wanted) => {
            let map = Arc::clone(function).map_bar(info.bar, wanted)?;
            let kind = ApertureKind::Mapped(map.cache());
            Ok((Some(map), kind))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pci::{Area, Bar, MappedArea};

    #[test]
    fn bytes_leave_in_the_widest_aligned_stores_and_nothing_beside_them() {
        let region = Region::allocate(4096, Pages::Normal).unwrap();
        let whole = Area {
            offset: 0,
            bytes: 4096,
        };
        let areas = vec![MappedArea::shared(whole, &region).unwrap()];
        let map = BarMap::new(Bar::B2, CacheType::WriteBack, areas, ());
        let data: Vec<u8> = (1..=20).collect();
        let mut at = 5;
        let mut rest = &data[..];
        let mut widths = Vec::new();
        while !rest.is_empty() {
            let bytes = store_first(&map, at, &mut rest).unwrap();
            widths.push(bytes);
            at += bytes;
        }
        assert_eq!(widths, [1, 2, 8, 8, 1]);
        let mut seen = vec![0; 40];
        Arc::new(region).view().copy_out(0, &mut seen);
        let mut expected = vec![0; 5];
        expected.extend(&data);
        expected.resize(40, 0);
        assert_eq!(seen, expected);
    }
}
