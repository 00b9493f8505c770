//! Several memory windows as one line of memory.
//!
//! The memory that the peer writes is one piece. Window 0 shows its beginning, window 1 what follows, and so on; the
//! sender numbers lines through its own apertures in the same way. Firmware sets the windows to equal sizes on both
//! hosts, so both count alike; where it did not, the session's test of the data path finds lines that do not arrive.

use std::sync::Arc;

use ntb::{
    hw::{NtbError, NtbPort, WindowInfo},
    pci::{DmaMapping, DmaSpace},
    window::{ExportedWindow, InboundWindow},
};
use ntb_mem::{export::Exportable, region::Region};

/// The windows that can be joined: all of them, unless one would not begin at an address that suits its alignment.
pub(super) fn joined(windows: &[WindowInfo]) -> &[WindowInfo] {
    let mut start = 0u64;
    let fits = |info: &WindowInfo| {
        let here = start;
        start = start.saturating_add(info.bytes);
        here.is_multiple_of(info.address_align.max(1)) && info.bytes.is_multiple_of(info.size_align.max(1))
    };
    let count = windows.iter().take_while({
        let mut fits = fits;
        move |info| fits(info)
    });
    windows.get(..count.count()).unwrap_or(&[])
}

/// Those of them that show this side's ordinary memory: all, or, where the last one shows what somebody else exports, the
/// others.
pub(super) fn ordinary(windows: &[WindowInfo], exporting: bool) -> &[WindowInfo] {
    let all = joined(windows);
    all.get(..all.len() - usize::from(exporting && !all.is_empty()))
        .unwrap_or(all)
}

/// Bytes of all of them.
pub(super) fn capacity(windows: &[WindowInfo]) -> u64 {
    windows.iter().fold(0, |sum, info| sum.saturating_add(info.bytes))
}

/// Alignment of the I/O address of the memory that they show.
fn alignment(windows: &[WindowInfo]) -> u64 {
    windows.iter().map(|info| info.address_align).max().unwrap_or(1)
}

/// This side's memory on its way to the peer: mapped for the device, and shown through windows while the link is up.
#[derive(Debug)]
pub(super) struct Inbound {
    // Fields drop in order: windows are closed and read back, then the mappings go.
    open: Vec<InboundWindow>,
    exported: Option<ExportedWindow>,
    mapping: Arc<DmaMapping>,
    export: Option<(Arc<dyn Exportable>, Arc<DmaMapping>)>,
}

impl Inbound {
    /// Maps the memory for the device, at an address that was not used before.
    pub(super) fn map(
        port: &dyn NtbPort,
        space: &Arc<DmaSpace>,
        region: &Arc<Region>,
        export: Option<&Arc<dyn Exportable>>,
    ) -> Result<Self, NtbError> {
        let align = alignment(ordinary(port.windows(), export.is_some()));
        let mapping = Arc::new(space.map(region, align)?);
        let export = match (export, joined(port.windows()).last()) {
            (Some(memory), Some(info)) => {
                let align = info.address_align.max(memory.alignment());
                Some((Arc::clone(memory), Arc::new(space.map_exported(memory, align)?)))
            }
            _ => None,
        };
        Ok(Self {
            open: Vec::new(),
            exported: None,
            mapping,
            export,
        })
    }

    /// Closes the windows, and leaves the memory mapped.
    pub(super) fn close(&mut self) {
        self.open.clear();
        self.exported = None;
    }

    /// Shows the first `bytes` bytes of the memory to the peer, and all of what is exported.
    pub(super) fn open(
        &mut self,
        port: &Arc<dyn NtbPort>,
        region: &Arc<Region>,
        bytes: u64,
    ) -> Result<(), NtbError> {
        let mut start = 0;
        let all = joined(port.windows());
        for (index, info) in ordinary(port.windows(), self.export.is_some()).iter().enumerate() {
            let part = info.bytes.min(bytes - start);
            if part == 0 {
                break;
            }
            let window = InboundWindow::part(port, index, region, &self.mapping, start, part)?;
            self.open.push(window);
            start += part;
        }
        if let Some((memory, mapping)) = &self.export {
            let index = all.len().saturating_sub(1);
            self.exported = Some(ExportedWindow::over(port, index, memory, mapping)?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ntb::pci::Bar;

    fn window(bytes: u64, address_align: u64) -> WindowInfo {
        WindowInfo {
            bar: Bar::B2,
            offset: 0,
            bytes,
            address_align,
            size_align: 4096,
        }
    }

    #[test]
    fn windows_are_joined_as_far_as_their_alignment_allows() {
        const M: u64 = 1 << 20;
        let equal = [window(M, M), window(M, M)];
        assert_eq!((joined(&equal).len(), capacity(joined(&equal))), (2, 2 * M));
        let page = [window(M, 4096), window(4 * M, 4096), window(M, 4096)];
        assert_eq!((joined(&page).len(), capacity(joined(&page))), (3, 6 * M));
        let growing = [window(M, M), window(4 * M, 4 * M), window(M, M)];
        assert_eq!(capacity(joined(&growing)), M);
        assert_eq!(alignment(&growing), 4 * M);
        let shrinking = [window(4 * M, 4 * M), window(M, M)];
        assert_eq!(capacity(joined(&shrinking)), 5 * M);
        assert_eq!(capacity(joined(&[window(M + 64, 4096), window(M, 4096)])), 0);
        assert_eq!(joined(&[]).len(), 0);
        assert_eq!(
            (ordinary(&equal, false).len(), ordinary(&equal, true).len()),
            (2, 1)
        );
        assert_eq!(ordinary(&[], true).len(), 0);
    }
}
