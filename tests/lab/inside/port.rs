//! A port by itself, its link up.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use ntb::{
    address::{OpenOptions, PortAddress},
    hw::{self, NtbPort},
    pci::{DmaSpace, PciFunction},
};

use super::{Result, said};

/// Longest wait for the peer.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) struct Port {
    pub(super) port: Arc<dyn NtbPort>,
    pub(super) space: Arc<DmaSpace>,
}

pub(super) fn function(address: &str) -> Result<Arc<dyn PciFunction>> {
    let address: PortAddress = address.parse().map_err(|e| said("address")(&e))?;
    address
        .open(&OpenOptions::default())
        .map_err(|e| said("opening the function")(&e))
}

impl Port {
    /// Opens the port: quiet, windows closed.
    pub(super) fn open(address: &str) -> Result<Self> {
        let function = function(address)?;
        let port = hw::open(&function).map_err(|e| said("opening the port")(&e))?;
        let space = DmaSpace::new(function).map_err(|e| said("its I/O addresses")(&e))?;
        Ok(Self { port, space })
    }

    /// Asks for the link and waits for it. The peer is opening its own port meanwhile.
    pub(super) fn link_up(&self) -> Result<()> {
        self.port.enable_link().map_err(|e| said("the link")(&e))?;
        let until = Instant::now() + PATIENCE;
        loop {
            let report = self.port.take_link_report();
            let state = report.map_err(|e| said("the link's state")(&e))?.state;
            if state.is_up() {
                return Ok(());
            }
            if Instant::now() > until {
                return Err(format!("no link within {} s", PATIENCE.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// SplitMix64, seeded: both ends know what the other stores.
pub(super) struct Words(pub(super) u64);

impl Iterator for Words {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Some(z ^ (z >> 31))
    }
}
