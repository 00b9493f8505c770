//! A link that shows a GPU's memory through its last window: the session runs in ordinary memory beside it, and knows nothing of
//! it.

mod common;

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use common::Standin;
use ntb_emu::{EmuConfig, Emulator, model::family, server::Endpoint};
use ntb_gpudirect::memory::{Exposed, GPU_PAGE, GpuMemory, Way};
use ntb_mem::{export::Exportable, line::Line};
use ntb_ring::link::{
    Link, LinkState,
    engine::StoreEngine,
    ntb::{NtbLink, NtbOptions},
};

const WINDOW: u64 = 1 << 20;

fn rise(links: [&mut NtbLink; 2]) {
    let start = Instant::now();
    let [a, b] = links;
    loop {
        let up = [&mut *a, &mut *b].map(|link| link.poll().unwrap().state == LinkState::WindowsSet);
        if up == [true, true] {
            return;
        }
        assert!(
            start.elapsed() < Duration::from_secs(30),
            "the link does not come up"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_links_engine_reaches_the_memory_that_the_peer_exports() {
    for name in ["intel-spr", "intel-icx", "amd"] {
        let names = ["a", "b"].map(|side| format!("ntb-gpu-link-{}-{name}-{side}", std::process::id()));
        let [a, b] = names.clone().map(Endpoint::Abstract);
        let mut config = EmuConfig::new(family(name).unwrap(), a, b);
        config.pair.window_bytes = WINDOW;
        let _emulator = Emulator::start(config).unwrap();
        let standin = Standin::new("");
        let gpu = standin.gpu();
        let memory = GpuMemory::allocate(&gpu, WINDOW).unwrap();
        let exposed: Arc<dyn Exportable> = Arc::new(Exposed::new(&memory, Some(Way::DmaBuf)).unwrap());
        let [a, b] = names.map(|n| format!("emu:@{n}").parse().unwrap());
        let mut near = NtbLink::open(&a, &NtbOptions::default()).unwrap();
        let options = NtbOptions {
            export: Some(exposed),
            window_bytes: 1 << 16, // what is in front of an export is never less than its windows
            ..NtbOptions::default()
        };
        let mut far = NtbLink::open(&b, &options).unwrap();
        // The exporting side's session has what the window before shows.
        assert_eq!(far.inbound().lines(), WINDOW / 64, "{name}");
        assert_eq!(far.exported().unwrap().lines(), WINDOW / 64, "{name}");
        assert!(near.exported().is_none());
        assert_eq!(
            near.inbound().lines(),
            2 * WINDOW / 64,
            "both windows, without an export"
        );
        rise([&mut near, &mut far]);
        let (first, lines) = (WINDOW / 64, WINDOW / 64);
        let mut engine = near.outbound().unwrap();
        let line = |n: u64| Line(std::array::from_fn(|i| n << 8 | i as u64));
        engine.put(first, &line(1));
        engine.put(first + lines - 1, &line(2));
        engine.put(0, &line(3));
        engine.put(WINDOW / 64 - 1, &line(4));
        engine.flush();
        let start = Instant::now();
        let at = memory.at();
        while gpu.poll(at + WINDOW - 8).unwrap() != line(2).0[7]
            || far
                .inbound()
                .load((WINDOW / 64 - 1) as usize * 8 + 7, Ordering::Acquire)
                != line(4).0[7]
        {
            assert!(
                start.elapsed() < Duration::from_secs(30),
                "{name}: the lines do not arrive"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(gpu.poll(at + 56).unwrap(), line(1).0[7]);
        assert_eq!(
            far.exported().unwrap().load(7, Ordering::Acquire),
            line(1).0[7],
            "the processor too"
        );
        assert_eq!(far.inbound().load(7, Ordering::Acquire), line(3).0[7]);
        // The link's end gives the GPU's memory back: nothing else holds it.
        drop((engine, near, far, options, memory, gpu));
        assert_eq!(standin.left(), 0, "{name}");
    }
}

#[test]
fn a_bridge_without_a_window_to_spare_says_so() {
    let names = ["a", "b"].map(|side| format!("ntb-gpu-link-{}-one-{side}", std::process::id()));
    let [a, b] = names.clone().map(Endpoint::Abstract);
    let mut config = EmuConfig::new(family("epf").unwrap(), a, b);
    config.pair.window_bytes = WINDOW;
    let _emulator = Emulator::start(config).unwrap();
    let standin = Standin::new("");
    let memory = GpuMemory::allocate(&standin.gpu(), GPU_PAGE).unwrap();
    let options = NtbOptions {
        export: Some(Arc::new(Exposed::new(&memory, None).unwrap())),
        ..NtbOptions::default()
    };
    let [a, _] = names.map(|n| format!("emu:@{n}").parse().unwrap());
    let e = NtbLink::open(&a, &options).unwrap_err();
    assert_eq!((e.name, e.exit), ("export-needs-window", 3), "{e}");
}
