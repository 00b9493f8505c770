//! An emulator in this process and a port at each of its ends.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use ntb::{
    address::{OpenOptions, PortAddress},
    hw::{self, NtbPort},
};
use ntb_emu::{Control, EmuConfig, Emulator, model::family, server::Endpoint};

/// After this long something hangs.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(30);
/// Bytes of each emulated window.
pub(crate) const WINDOW: u64 = 1 << 20;
/// All families.
pub(crate) const FAMILIES: [&str; 6] = ["intel-spr", "intel-icx", "intel-gnr", "intel-skx", "amd", "epf"];

static NEXT: AtomicU64 = AtomicU64::new(0);

/// An emulated pair of ports.
pub(crate) struct Bridges {
    emulator: Emulator,
    addresses: [PortAddress; 2],
}

impl Bridges {
    pub(crate) fn new(name: &str) -> Self {
        Self::with_window(name, WINDOW)
    }

    pub(crate) fn with_window(name: &str, bytes: u64) -> Self {
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let names = ["a", "b"].map(|side| format!("ntb-linux-test-{}-{n}-{side}", std::process::id()));
        let [a, b] = names.clone().map(Endpoint::Abstract);
        let mut config = EmuConfig::new(family(name).unwrap(), a, b);
        config.pair.window_bytes = bytes;
        Self {
            emulator: Emulator::start(config).unwrap(),
            addresses: names.map(|n| format!("emu:@{n}").parse().unwrap()),
        }
    }

    pub(crate) fn port(&self, side: usize) -> Arc<dyn NtbPort> {
        let function = self.addresses[side].open(&OpenOptions::default()).unwrap();
        hw::open(&function).unwrap()
    }

    pub(crate) fn control(&self) -> Control<'_> {
        self.emulator.control()
    }
}

/// Does `step` until it is true.
pub(crate) fn until(what: &str, mut step: impl FnMut() -> bool) {
    let start = Instant::now();
    while !step() {
        assert!(start.elapsed() < WATCHDOG, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether `done` holds for every side; each is asked, whatever the others answer.
pub(crate) fn every<T>(sides: &mut [T; 2], mut done: impl FnMut(&mut T) -> bool) -> bool {
    sides.iter_mut().fold(true, |all, side| all & done(side))
}
