//! A pair reached without a socket, set up as a host would, with an event counter on every vector.

#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    missing_debug_implementations,
    reason = "shared by test programs"
)]

use std::os::fd::{AsFd, OwnedFd};

use ntb_emu::model::{DmaAccess, IrqKind, Pair, PairConfig, Port, SideId, SideId::A, SideId::B, family};
use ntb_mem::region::{Pages, Region};
use rustix::event::{EventfdFlags, eventfd};

pub const ONES: u64 = u64::MAX;

/// A pair with memory and bus mastering enabled, BARs placed, and an event counter on every vector.
pub struct Bench {
    pub pair: Pair,
    events: [Vec<OwnedFd>; 2],
}

/// Where the BARs are placed: different on both sides.
pub fn bar_at(side: SideId, bar: u8) -> u64 {
    let host = if side == A { 0x38_0000_0000 } else { 0x7C_0000_0000 };
    host + 0x4000_0000 * u64::from(bar)
}

pub fn set_up(port: &Port) -> Vec<OwnedFd> {
    port.attach();
    for bar in [0, 2, 4] {
        port.config_write(0x10 + 4 * u64::from(bar), &bar_at(port.side(), bar).to_le_bytes());
    }
    port.config_write(0x04, &6u16.to_le_bytes());
    (0..port.vectors(IrqKind::Msix))
        .map(|v| {
            let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
            port.set_vector(IrqKind::Msix, v, Some(fd.try_clone().unwrap()))
                .unwrap();
            fd
        })
        .collect()
}

impl Bench {
    pub fn new(name: &str) -> Self {
        Self::with(name, PairConfig::default())
    }

    pub fn with(name: &str, config: PairConfig) -> Self {
        let pair = Pair::new(family(name).unwrap(), config).unwrap();
        let events = [set_up(pair.port(A)), set_up(pair.port(B))];
        Self { pair, events }
    }

    pub fn port(&self, side: SideId) -> &Port {
        self.pair.port(side)
    }

    pub fn w(&self, side: SideId, offset: u32, width: usize, value: u64) {
        self.port(side)
            .bar_write(0, offset.into(), &value.to_le_bytes()[..width]);
    }

    pub fn r(&self, side: SideId, offset: u32, width: usize) -> u64 {
        let mut bytes = [0; 8];
        self.port(side).bar_read(0, offset.into(), &mut bytes[..width]);
        u64::from_le_bytes(bytes)
    }

    pub fn cfg(&self, side: SideId, offset: u64, width: usize) -> u64 {
        let mut bytes = [0; 8];
        self.port(side).config_read(offset, &mut bytes[..width]);
        u64::from_le_bytes(bytes)
    }

    /// Vectors that have fired since last asked, with how often.
    pub fn fired(&self, side: SideId) -> Vec<(usize, u64)> {
        let events = &self.events[usize::from(side == B)];
        let mut bytes = [0; 8];
        let count = |fd: &OwnedFd, bytes: &mut [u8; 8]| {
            rustix::io::read(fd, &mut bytes[..]).map_or(0, |_| u64::from_ne_bytes(*bytes))
        };
        events
            .iter()
            .enumerate()
            .map(|(v, fd)| (v, count(fd, &mut bytes)))
            .filter(|(_, n)| *n > 0)
            .collect()
    }

    pub fn memory(&self, side: SideId, iova: u64, bytes: u64) -> Region {
        let region = Region::allocate(bytes, Pages::Normal).unwrap();
        let fd = region.descriptor().try_clone_to_owned().unwrap();
        let access = DmaAccess {
            read: true,
            write: true,
        };
        self.port(side).dma_map(iova, bytes, 0, access, Some(fd)).unwrap();
        region
    }
}

pub fn byte(region: &Region, at: u64) -> u8 {
    let mut byte = [0];
    rustix::io::pread(region.descriptor().as_fd(), &mut byte, at).unwrap();
    byte[0]
}

/// One access of a sequence: write, or read and compare.
pub enum Access {
    W(u32, usize, u64),
    R(u32, usize, u64),
}
pub use Access::{R, W};

pub fn run(bench: &Bench, side: SideId, sequence: &[Access]) {
    for (i, access) in sequence.iter().enumerate() {
        match *access {
            W(offset, width, value) => bench.w(side, offset, width, value),
            R(offset, width, value) => {
                let got = bench.r(side, offset, width);
                assert_eq!(
                    got, value,
                    "step {i}: {width} bytes at {offset:#x} of side {side}"
                );
            }
        }
    }
}

/// What `ntb_hw_intel` does at probe on Gen4.
pub fn probe_gen4(bench: &Bench, side: SideId, ppd1: u64) {
    let mut steps = vec![
        R(0xB4C0, 4, ppd1),
        W(0x18, 8, 0x2000_0000_0000_0000),
        R(0x18, 8, 0x2000_0000_0000_0000),
        W(0x28, 8, 0x4000_0000_0000_0000),
        R(0x28, 8, 0x4000_0000_0000_0000),
        W(0x10, 8, 0),
        W(0x20, 8, 0),
        W(0x48, 8, 0xFFFF_FFFF),
        R(0xB050, 2, 0),
        W(0xB050, 2, 0x10),
    ];
    for n in 0..33u32 {
        let reset = if n < 32 { n + 1 } else { 0 };
        steps.push(R(0x50 + n, 1, reset.into()));
        steps.push(W(0x50 + n, 1, n.into()));
    }
    steps.extend([
        W(0x48, 8, 0xFFFF_FFFF),
        W(0xB05A, 2, 0x100),
        W(0x40, 8, 1 << 32),
        R(0xB052, 2, 0),
    ]);
    run(bench, side, &steps);
}

pub fn enable_gen4(bench: &Bench, side: SideId) {
    run(
        bench,
        side,
        &[
            W(0x30F0, 4, 0x8800_8800),
            W(0x30F4, 4, 0x8A58_8A58),
            W(0x30EC, 1, 0),
            W(0x0, 4, 0x154),
            W(0xB050, 2, 0),
            W(0xB0D4, 4, 8),
            R(0xB0D4, 4, 8),
        ],
    );
}

/// What the driver does when the link interrupt comes.
pub fn link_handler_gen4(bench: &Bench, side: SideId, status: u64) {
    assert_eq!(bench.fired(side), [(32, 1)]);
    run(
        bench,
        side,
        &[
            R(0x40, 8, 1 << 32),
            W(0xB05A, 2, 0x100),
            R(0xB05A, 2, 0),
            W(0x40, 8, 1 << 32),
            R(0x40, 8, 0),
            R(0xB052, 2, status),
        ],
    );
}

pub fn up_gen4(name: &str, usd: u64, dsd: u64) -> Bench {
    let bench = Bench::new(name);
    probe_gen4(&bench, A, usd);
    probe_gen4(&bench, B, dsd);
    enable_gen4(&bench, A);
    assert_eq!(bench.fired(A), [], "up with one end");
    enable_gen4(&bench, B);
    for side in SideId::BOTH {
        link_handler_gen4(&bench, side, 0x2104);
    }
    bench
}
