//! A peer's stores through an emulated bridge into GPU memory, which the host stand-in keeps: window, proof, messages, credits,
//! tear-down.

#![allow(unsafe_code, reason = "memory that is shared with the host stand-in")]

mod common;

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use common::Standin;
use ntb::{
    address::{OpenOptions, PortAddress},
    hw::{self, NtbPort},
    pci::DmaSpace,
    window::{Aperture, ApertureChoice, InboundWindow},
};
use ntb_emu::{EmuConfig, Emulator, model::family, server::Endpoint};
use ntb_gpudirect::{
    across::{self, End, Trial},
    aperture::OnGpu,
    ends::{BUDGET, GpuReceiver},
    inbound::DeviceWindow,
    kernels::Status,
    memory::{Exposed, GpuMemory, Way},
    proof::Proof,
    seam::HostMemory,
};
use ntb_mem::{
    export::Exportable,
    line::Line,
    region::{Pages, Region, View},
};
use ntb_ring::{
    link::engine::{Order, StoreEngine},
    queue::{Lane, Producer, SendError},
    wire::{mark::LaneKey, page::PAGE_LINES},
};

const WINDOW: u64 = 1 << 20;
const RING: u64 = 64;

/// Lines through an aperture that is written by calls.
struct Through(Arc<Aperture>);

impl StoreEngine for Through {
    fn order(&self) -> Order {
        Order::Relaxed
    }
    fn lines(&self) -> u64 {
        self.0.bytes() / 64
    }
    fn put(&mut self, line: u64, content: &Line) {
        self.0.post(line * 64, &content.to_bytes()).unwrap();
    }
    fn barrier(&mut self) {}
    fn flush(&mut self) {}
}

struct Side {
    port: Arc<dyn NtbPort>,
    space: Arc<DmaSpace>,
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(30), "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn emulated(name: &str, test: &str) -> (Emulator, [PortAddress; 2]) {
    let names = ["a", "b"].map(|side| format!("ntb-gpu-{}-{name}-{test}-{side}", std::process::id()));
    let [a, b] = names.clone().map(Endpoint::Abstract);
    let mut config = EmuConfig::new(family(name).unwrap(), a, b);
    config.pair.window_bytes = WINDOW;
    let emulator = Emulator::start(config).unwrap();
    (emulator, names.map(|n| format!("emu:@{n}").parse().unwrap()))
}

fn bridges(name: &str) -> (Emulator, [Side; 2]) {
    let (emulator, addresses) = emulated(name, "ports");
    let sides = addresses.map(|address| {
        let function = address.open(&OpenOptions::default()).unwrap();
        let port = hw::open(&function).unwrap();
        let space = DmaSpace::new(Arc::clone(&function)).unwrap();
        Side { port, space }
    });
    for side in &sides {
        side.port.enable_link().unwrap();
    }
    until("the link is up", || {
        sides
            .iter()
            .all(|side| side.port.take_link_report().unwrap().state.is_up())
    });
    (emulator, sides)
}

fn lane() -> Lane {
    Lane {
        ring_lines: RING,
        consumer_base: 0,
        producer_base: 0,
        to_consumer: LaneKey::new(0x2222, 0xffff_ffe0, 0),
        to_producer: LaneKey::new(0x3333, 1, 0),
        first_seq: 0,
    }
}

#[test]
fn a_peers_messages_reach_a_gpu_and_its_credits_come_back() {
    for name in ["intel-spr", "intel-skx", "amd"] {
        let (emulator, [sender, receiver]) = bridges(name);
        let standin = Standin::new("");
        let gpu = standin.gpu();

        // The receiver's GPU memory behind its window 1, the sender's control page behind its window 0.
        let memory = GpuMemory::allocate(&gpu, WINDOW).unwrap();
        let exposed = Arc::new(Exposed::new(&memory, Some(Way::DmaBuf)).unwrap());
        let exported: Arc<dyn Exportable> = exposed;
        let window = DeviceWindow::open(&receiver.port, &receiver.space, 1, &exported).unwrap();
        let host = InboundWindow::allocate(&sender.port, &sender.space, 0, WINDOW, Pages::Normal).unwrap();
        let into_gpu = Arc::new(Aperture::open(&*sender.port, 1, ApertureChoice::Best).unwrap());
        let back = Aperture::open(&*receiver.port, 0, ApertureChoice::Best).unwrap();

        // Proof before use: what is not there is told, what is there is found.
        let proof = Proof::new(0x1234, 1, WINDOW / 64);
        let verify = || window.verify(&proof, |at, to| memory.read(at, to));
        assert_eq!(verify().unwrap_err().name, "gpu-path-unproven");
        for (at, line) in proof.lines() {
            into_gpu.post(at * 64, &line.to_bytes()).unwrap();
        }
        let start = Instant::now();
        while let Err(e) = verify() {
            let report = || format!("{:?}", emulator.control().report().pair);
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "{name}: {e}; {}",
                report()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        // What is left of it would be taken for nothing: no tag of this life.
        memory
            .write(0, &vec![0; ((PAGE_LINES + RING) * 64) as usize])
            .unwrap();

        let mut producer = Producer::new(
            Through(Arc::clone(&into_gpu)),
            host.view().part(0, PAGE_LINES).unwrap(),
            lane(),
            Order::Relaxed,
        );
        // An emulated aperture is written by calls, which no kernel can do: the kernel stores its credits into memory of the
        // host that stands for the aperture, and they are carried on from there.
        let credits = Region::allocate(PAGE_LINES * 64, Pages::Normal).unwrap();
        let credits = Arc::new(credits);
        (0..credits.view().words()).for_each(|i| credits.view().store(i, 0, Ordering::Relaxed));
        // SAFETY: the region lives until the end of the test, is populated, and gives no reference out.
        let peer = unsafe { OnGpu::raw(&gpu, credits.as_ptr(), credits.bytes(), HostMemory::Aperture) };
        let mut consumer = GpuReceiver::new(&gpu, &lane(), &memory, 0, &Arc::new(peer.unwrap())).unwrap();
        let carry = |view: &View| {
            let mut line = [0; 64];
            view.copy_out(0, &mut line);
            back.write(0, &line).unwrap();
        };

        let out = GpuMemory::allocate(&gpu, 1 << 16).unwrap();
        let mut full = 0;
        for n in 0..40u64 {
            let message: Vec<u8> = (0..n * 23 % 700).map(|i| (i * n + 1) as u8).collect();
            until("room", || match producer.try_send(n as u32, &message) {
                Ok(seq) => seq == n,
                Err(SendError::Full { .. }) => {
                    full += 1;
                    carry(&credits.view());
                    false
                }
                Err(e) => panic!("{e}"),
            });
            let (records, status) = consumer.start(&out, 1, BUDGET).unwrap().finish().unwrap();
            assert_eq!(status, Status::Done, "{name} {n}");
            assert_eq!((records[0].seq, records[0].message_type), (n, n as u32));
            let mut got = vec![0; records[0].size as usize];
            out.read(records[0].offset, &mut got).unwrap();
            assert_eq!(got, message, "{name} {n}");
        }
        assert!(full > 0, "the ring was never full: credits were not needed");
        assert_eq!(
            emulator.control().report().pair.a_to_b.window_reads,
            0,
            "nothing is read across"
        );

        // The end: window, I/O mapping, the processor's mapping, memory.
        drop((exported, memory, consumer, out));
        let before = standin.log().iter().filter(|l| *l == "cuMemFree_v2").count();
        window.close().unwrap();
        let after = standin.log().iter().filter(|l| *l == "cuMemFree_v2").count();
        assert_eq!(
            after,
            before + 1,
            "the window held the memory, and nothing else did"
        );
    }
}

/// The trial that two hosts run, with two threads for hosts and an emulated bridge between them.
#[test]
fn the_trial_between_two_hosts_runs_over_an_emulated_bridge() {
    for (name, ends, words, size, here, there) in [
        (
            "intel-spr",
            [End::Host, End::Host],
            "",
            200,
            "the processor stores",
            "the processor polls",
        ),
        (
            "intel-spr",
            [End::Host, End::Gpu],
            "",
            200,
            "the processor stores",
            "poll the GPU's memory",
        ),
        (
            "amd",
            [End::Host, End::Gpu],
            "ordering=0",
            8,
            "the processor stores",
            "poll the GPU's memory",
        ),
        (
            "intel-skx",
            [End::Host, End::Gpu],
            "no-dma-buf",
            200,
            "the processor stores",
            "reached by staging",
        ),
        (
            "epf",
            [End::Host, End::Gpu],
            "",
            200,
            "the processor stores",
            "poll memory of this host",
        ),
        (
            "intel-icx",
            [End::Gpu, End::Host],
            "",
            200,
            "staging: kernels store",
            "the processor polls",
        ),
        (
            "intel-spr",
            [End::Gpu, End::Gpu],
            "",
            5000,
            "staging: kernels store",
            "poll the GPU's memory",
        ),
    ] {
        let (_emulator, addresses) = emulated(name, &format!("{ends:?}-{}", words.len()));
        let [a, b] = addresses.map(|a| a.to_string().parse().unwrap());
        let standins = [Standin::new(words), Standin::new(words)];
        let [from, to] = [0, 1].map(|i| (ends[i] == End::Gpu).then(|| standins[i].gpu()));
        let receiving = std::thread::spawn(move || across::receive(&b, to.as_ref()));
        let trial = Trial {
            size,
            messages: 300,
            far: Some(ends[1]),
        };
        let sent = across::send(&a, from.as_ref(), trial);
        let said = receiving
            .join()
            .unwrap()
            .unwrap_or_else(|e| panic!("{name} {ends:?}: {e}"));
        let start = format!("300 messages of {size} bytes, all as sent; ");
        assert!(said.starts_with(&start) && said.contains(there), "{said}");
        let sent = sent.unwrap_or_else(|e| panic!("{name} {ends:?}: {e}"));
        assert_eq!(sent.messages, 300);
        assert!(sent.way.contains(&format!("here: {here}")), "{}", sent.way);
        assert!(sent.way.contains(there), "{}", sent.way);
        drop(from);
        assert_eq!(
            standins.each_ref().map(Standin::left),
            [0, 0],
            "all was given back"
        );
    }
}

#[test]
fn a_trial_that_is_not_what_was_asked_for_says_so() {
    let (_emulator, addresses) = emulated("intel-spr", "other");
    let [a, b] = addresses.map(|a| a.to_string().parse().unwrap());
    let receiving = std::thread::spawn(move || across::receive(&b, None));
    let trial = Trial {
        size: 8,
        messages: 10,
        far: Some(End::Gpu),
    };
    let e = across::send(&a, None, trial).unwrap_err();
    assert_eq!((e.name, e.exit), ("gpu-other-far-end", 2), "{e}");
    receiving.join().unwrap().unwrap();
    let e = across::send(&a, None, Trial { size: 0, ..trial }).unwrap_err();
    assert_eq!((e.name, e.exit), ("gpu-message-size", 2), "{e}");
}

#[test]
fn what_a_window_cannot_take_is_refused_before_the_peer_is_let_in() {
    let (_emulator, [_, receiver]) = bridges("intel-icx");
    let standin = Standin::new("");
    let gpu = standin.gpu();
    let memory = GpuMemory::allocate(&gpu, 3 << 20).unwrap();
    let too_large: Arc<dyn Exportable> = Arc::new(Exposed::new(&memory, None).unwrap());
    let e = DeviceWindow::open(&receiver.port, &receiver.space, 1, &too_large).unwrap_err();
    assert_eq!(e.name, "gpu-window");
    let memory = GpuMemory::allocate(&gpu, WINDOW).unwrap();
    let fits: Arc<dyn Exportable> = Arc::new(Exposed::new(&memory, None).unwrap());
    assert_eq!(
        DeviceWindow::open(&receiver.port, &receiver.space, 9, &fits)
            .unwrap_err()
            .name,
        "gpu-window"
    );
    let window = DeviceWindow::open(&receiver.port, &receiver.space, 1, &fits).unwrap();
    assert_eq!(window.bytes(), WINDOW);
    assert!(
        window.iova().is_multiple_of(WINDOW),
        "as coarse as this family's translation"
    );
}
