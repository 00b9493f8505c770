//! How a fake function is built.

use super::super::{Area, Bar, BarInfo, Isolation, ResetPlan, config, iova::IovaRange};

/// How a [`super::Fake`] is built.
#[derive(Debug)]
pub struct FakeConfig {
    pub(super) name: String,
    pub(super) space: Vec<u8>,
    pub(super) bars: [Option<BarInfo>; 6],
    pub(super) vectors: u16,
    pub(super) ranges: Vec<IovaRange>,
    pub(super) reset: ResetPlan,
    pub(super) isolation: Isolation,
}

/// Where the fake's PCIe capability stands.
const CAP_PCIE_AT: usize = 0x40;
/// Where its MSI-X capability stands.
const CAP_MSIX_AT: usize = 0x80;

impl FakeConfig {
    /// A function with this identity, PCIe and MSI-X capabilities, 4 KiB of configuration space and no BARs.
    pub fn new(name: &str, vendor: u16, device: u16) -> Self {
        let mut this = Self {
            name: name.to_owned(),
            space: vec![0; 4096],
            bars: [const { None }; 6],
            vectors: 0,
            ranges: vec![IovaRange {
                start: 0,
                last: (1 << 48) - 1,
            }],
            reset: ResetPlan {
                method: Some("function level reset".to_owned()),
                also: Vec::new(),
            },
            isolation: Isolation::Software,
        };
        this.put(config::VENDOR_ID as usize, &vendor.to_le_bytes());
        this.put(config::DEVICE_ID as usize, &device.to_le_bytes());
        this.put(
            config::STATUS as usize,
            &config::STATUS_CAPABILITIES.to_le_bytes(),
        );
        this.put(config::CAPABILITIES as usize, &[CAP_PCIE_AT as u8]);
        this.put(CAP_PCIE_AT, &[config::CAP_PCIE, CAP_MSIX_AT as u8]);
        this.class(0x06_8000)
    }

    /// Bytes of configuration space.
    pub fn put(&mut self, at: usize, bytes: &[u8]) {
        if let Some(place) = self.space.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }

    /// Revision.
    #[must_use]
    pub fn revision(mut self, revision: u8) -> Self {
        self.put(config::REVISION as usize, &[revision]);
        self
    }

    /// Class, 24 bits.
    #[must_use]
    pub fn class(mut self, class: u32) -> Self {
        self.put(config::CLASS as usize, &class.to_le_bytes()[..3]);
        self
    }

    /// Link of the function itself, now and possible, as in the PCIe capability.
    #[must_use]
    pub fn link(mut self, status: u16, capability: u32) -> Self {
        self.put(CAP_PCIE_AT + 0x0C, &capability.to_le_bytes());
        self.put(CAP_PCIE_AT + 0x12, &status.to_le_bytes());
        self
    }

    /// A 64-bit prefetchable BAR whose accesses are trapped.
    #[must_use]
    pub fn bar(self, bar: Bar, bytes: u64) -> Self {
        self.bar_with(bar, bytes, Vec::new())
    }

    /// A BAR of which these areas can be mapped.
    #[must_use]
    pub fn bar_with(mut self, bar: Bar, bytes: u64, mappable: Vec<Area>) -> Self {
        let at = config::BAR0 as usize + 4 * bar.index();
        // Placed apart, as firmware would: BAR n at n + 1 tebibytes.
        let address = (bar.index() as u64 + 1) << 40;
        self.put(at, &(address as u32 | 0xC).to_le_bytes());
        if bar != Bar::B5 {
            self.put(at + 4, &((address >> 32) as u32).to_le_bytes());
        }
        if let Some(slot) = self.bars.get_mut(bar.index()) {
            *slot = Some(BarInfo {
                bar,
                bytes,
                prefetchable: true,
                mappable,
            });
        }
        self
    }

    /// MSI-X vectors.
    #[must_use]
    pub fn vectors(mut self, vectors: u16) -> Self {
        self.vectors = vectors;
        let next = CAP_MSIX_AT;
        self.put(next, &[config::CAP_MSIX, 0]);
        self.put(next + 2, &vectors.saturating_sub(1).to_le_bytes());
        self
    }

    /// I/O addresses that may be mapped.
    #[must_use]
    pub fn iova_ranges(mut self, ranges: Vec<IovaRange>) -> Self {
        self.ranges = ranges;
        self
    }

    /// What a reset would do.
    #[must_use]
    pub fn reset_plan(mut self, plan: ResetPlan) -> Self {
        self.reset = plan;
        self
    }

    /// What keeps the device from other memory.
    #[must_use]
    pub fn isolation(mut self, isolation: Isolation) -> Self {
        self.isolation = isolation;
        self
    }
}
