//! Ends of a session's channels on a GPU: real sessions over links in one process and over an emulated bridge, with the host
//! stand-in in the driver's place and its interpreter for the kernels.

mod common;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use common::Standin;
use ntb_emu::{EmuConfig, Emulator, model::family, server::Endpoint};
use ntb_gpudirect::{
    channel::{GpuChannel, GpuRx, GpuTx, Options},
    ends::Outgoing,
    kernels::Record,
    memory::{Exposed, GpuMemory, Way},
    seam::Gpu,
};
use ntb_mem::{export::Exportable, line::Line, region::View};
use ntb_ring::{
    channel::{Connection, Options as LinkOptions, Receiver, RecvFailure, Sender, Wait},
    link::{
        Doorbell, Link, LinkError, LinkFacts, LinkKind, LinkStatus, Registers,
        engine::{Direct, Engine, Order, StoreEngine, WriteBack},
        ntb::{NtbLink, NtbOptions},
        pair::{PairLink, PairOptions, pair},
    },
    session::{ChannelSpec, Place},
};

const LONG: Duration = Duration::from_secs(60);
const SPEC: ChannelSpec = ChannelSpec {
    ring_lines: 64,
    check: true,
    smaller_if_different: false,
};

fn options() -> Options {
    Options {
        budget: 2000, // the interpreter is slow, and a busy machine slower: nothing here stalls unless it is made to
        patience: LONG,
        ..Options::default()
    }
}

fn connect(link: Box<dyn Link>) -> Connection {
    Connection::open(link, &LinkOptions::default()).unwrap()
}

/// Two connections in this process. Memory of one reaches the other by plain stores.
fn near_and_far() -> [Connection; 2] {
    let (a, b) = pair(&PairOptions {
        window_bytes: 1 << 20,
        ..PairOptions::default()
    })
    .unwrap();
    [connect(Box::new(a)), connect(Box::new(b))]
}

fn channels(near: &Connection, far: &Connection, spec: ChannelSpec) -> [(Sender, Receiver); 2] {
    let mut ends = [near, far].map(|c| c.channel("c", spec).unwrap());
    for (tx, rx) in &mut ends {
        tx.wait_connected(LONG).unwrap();
        rx.wait_connected(LONG).unwrap();
    }
    ends
}

/// The service takes a moment to see that the ends before have gone.
fn open_again(connection: &Connection) -> (Sender, Receiver) {
    let start = Instant::now();
    loop {
        match connection.channel("c", SPEC) {
            Ok(ends) => return ends,
            Err(e) => assert!(start.elapsed() < LONG, "{e}"),
        }
    }
}

fn message(n: u64, size: usize) -> Vec<u8> {
    (0..size as u64).map(|i| (n * 37 + i * 11 + 5) as u8).collect()
}

/// Messages of one size in the GPU's memory, as kernels send them.
struct Source {
    memory: Arc<GpuMemory>,
    size: usize,
}

impl Source {
    fn new(gpu: &Arc<dyn Gpu>, numbers: std::ops::Range<u64>, size: usize) -> Self {
        let stride = size.next_multiple_of(8);
        let memory = GpuMemory::allocate(gpu, stride as u64 * (numbers.end - numbers.start)).unwrap();
        for (i, n) in numbers.enumerate() {
            memory.write((i * stride) as u64, &message(n, size)).unwrap();
        }
        Self { memory, size }
    }

    fn all(&self, count: u64) -> Outgoing<'_> {
        Outgoing {
            memory: &self.memory,
            offset: 0,
            size: self.size as u32,
            count: count as u32,
            message_type: 9,
        }
    }
}

/// Receives `numbers` and compares.
fn expect(rx: &mut Receiver, numbers: std::ops::Range<u64>, size: usize) {
    let mut buf = vec![0; 4096];
    for n in numbers {
        let got = rx.recv(&mut buf, LONG).unwrap();
        assert_eq!((got.message_type, got.len), (9, size), "message {n}");
        assert_eq!(buf[..got.len], message(n, size)[..], "message {n}");
    }
}

fn expect_on_gpu(rx: &mut GpuRx, out: &Arc<GpuMemory>, numbers: std::ops::Range<u64>, size: usize) {
    let mut n = numbers.start;
    while n < numbers.end {
        for record in rx.receive(out, 8, LONG).unwrap() {
            let Record {
                size: bytes, offset, ..
            } = record;
            assert_eq!((bytes as usize, record.count), (size, 1), "message {n}");
            let mut got = vec![0; size];
            out.read(offset, &mut got).unwrap();
            assert_eq!(got, message(n, size), "message {n}");
            n += 1;
        }
    }
}

#[test]
fn a_kernel_sends_into_a_channel_and_its_reader_may_sleep() {
    for size in [8usize, 48, 49, 600] {
        let [near, far] = near_and_far();
        let [(tx, _rx), (_tx, mut rx)] = channels(&near, &far, SPEC);
        let standin = Standin::new("");
        let gpu = standin.gpu();
        let channel = GpuChannel::new(&gpu, options(), None);
        let mut tx = GpuTx::new(&channel, tx);
        assert_eq!(tx.announcement().unwrap(), "kernels store into the peer's memory");
        rx.set_wait(Wait::SpinSleep { spins: 10 });
        let count = 150; // more than twice round the ring
        let source = Source::new(&gpu, 0..count, size);
        std::thread::scope(|s| {
            // Nothing is sent before the reader has slept.
            let (slept, until) = std::sync::mpsc::channel();
            let (tx, source) = (&mut tx, &source);
            let sending = s.spawn(move || {
                until.recv().unwrap();
                tx.send(source.all(count), LONG)
            });
            let start = Instant::now();
            while rx.sleeps() == 0 {
                let e = rx.recv(&mut [0; 8], Duration::from_millis(50)).unwrap_err();
                assert!(e == RecvFailure::TimedOut && start.elapsed() < LONG, "{e}");
            }
            slept.send(()).unwrap();
            expect(&mut rx, 0..count, size);
            assert_eq!(sending.join().unwrap().unwrap(), count);
        });
        assert_eq!(rx.stats().messages, count);
        // The processor goes on where the kernel has come, and the kernel where the processor has.
        let mut tx = tx.into_sender();
        assert_eq!(tx.stats().messages, count);
        tx.send_typed(9, &message(count, size), LONG).unwrap();
        let mut tx = GpuTx::new(&channel, tx);
        let last = Source::new(&gpu, count + 1..count + 2, size);
        assert_eq!(tx.send(last.all(1), LONG).unwrap(), 1);
        expect(&mut rx, count..count + 2, size);
        drop((tx, source, last, channel, gpu));
        assert_eq!(standin.left(), 0, "all was given back");
    }
}

#[test]
fn a_kernel_receives_what_a_processor_sends() {
    for size in [8usize, 48, 49, 600] {
        let [near, far] = near_and_far();
        let [(mut tx, _rx), (_tx, rx)] = channels(&near, &far, SPEC);
        let standin = Standin::new("");
        let gpu = standin.gpu();
        let channel = GpuChannel::new(&gpu, options(), None);
        let mut rx = GpuRx::new(&channel, rx);
        let said = rx.announcement().unwrap();
        assert_eq!(said, "kernels poll memory of this host; credits by the GPU");
        let out = GpuMemory::allocate(&gpu, 1 << 16).unwrap();
        let e = rx.receive(&out, 8, Duration::ZERO).unwrap_err();
        assert_eq!((e.name, e.exit), ("timed-out", 5));
        std::thread::scope(|s| {
            s.spawn(|| {
                for n in 0..150 {
                    tx.send_typed(9, &message(n, size), LONG).unwrap();
                }
                tx.wait_consumed(149, LONG).unwrap();
            });
            expect_on_gpu(&mut rx, &out, 0..150, size);
            // The sender asks for the last credit.
            let _ = rx.receive(&out, 8, Duration::from_millis(100));
        });
        // The processor takes over.
        tx.send_typed(9, &message(150, size), LONG).unwrap();
        let mut rx = rx.into_receiver();
        expect(&mut rx, 150..151, size);
        assert_eq!(rx.stats().messages, 151);
        drop((rx, out, channel, gpu));
        assert_eq!(standin.left(), 0, "all was given back");
    }
}

#[test]
fn both_ends_of_a_channel_are_gpus_and_both_directions_run_through_memory_of_hosts() {
    let [near, far] = near_and_far();
    let [(tx_a, rx_a), (tx_b, rx_b)] = channels(&near, &far, SPEC);
    let standins = [Standin::new(""), Standin::new("")];
    let sides = [(&standins[0], tx_a, rx_a), (&standins[1], tx_b, rx_b)];
    std::thread::scope(|s| {
        for (standin, tx, rx) in sides {
            let gpu = standin.gpu();
            let channel = GpuChannel::new(&gpu, options(), None);
            let (mut tx, mut rx) = (GpuTx::new(&channel, tx), GpuRx::new(&channel, rx));
            s.spawn(move || {
                let source = Source::new(&gpu, 0..200, 100);
                let out = GpuMemory::allocate(&gpu, 1 << 16).unwrap();
                std::thread::scope(|s| {
                    s.spawn(|| assert_eq!(tx.send(source.all(200), LONG).unwrap(), 200));
                    s.spawn(|| expect_on_gpu(&mut rx, &out, 0..200, 100));
                });
            });
        }
    });
}

#[test]
fn the_end_of_a_life_is_told_once_and_the_next_one_goes_on() {
    let [near, far] = near_and_far();
    let [(tx, rx), (far_tx, far_rx)] = channels(&near, &far, SPEC);
    let standin = Standin::new("");
    let gpu = standin.gpu();
    let channel = GpuChannel::new(&gpu, options(), None);
    let (mut tx, mut rx) = (GpuTx::new(&channel, tx), GpuRx::new(&channel, rx));
    let source = Source::new(&gpu, 0..10, 100);
    let out = GpuMemory::allocate(&gpu, 1 << 16).unwrap();
    assert_eq!(tx.send(source.all(10), LONG).unwrap(), 10);
    assert_eq!(rx.receive(&out, 1, Duration::ZERO).unwrap_err().name, "timed-out");
    drop((far_tx, far_rx));
    let ended = |call: &mut dyn FnMut() -> String| {
        let start = Instant::now();
        while start.elapsed() < LONG {
            match call().as_str() {
                "timed-out" | "sent" => std::thread::sleep(Duration::from_millis(1)),
                name => return name.to_owned(),
            }
        }
        panic!("nothing is told");
    };
    let told = ended(&mut || match tx.send(source.all(1), Duration::ZERO) {
        Ok(_) => "sent".into(),
        Err(e) if e.name == "gpu-ring-stalled" => "sent".into(),
        Err(e) => e.name.into(),
    });
    assert_eq!(told, "closed-by-peer");
    let told = ended(&mut || rx.receive(&out, 1, Duration::ZERO).unwrap_err().name.into());
    assert_eq!(told, "closed-by-peer");
    assert_eq!(
        tx.send(source.all(1), Duration::ZERO).unwrap_err().name,
        "not-connected"
    );
    // The next life, from its first message on.
    let (mut far_tx, mut far_rx) = open_again(&far);
    far_tx.wait_connected(LONG).unwrap();
    let start = Instant::now();
    while let Err(e) = tx.send(source.all(10), LONG) {
        assert!(e.name == "not-connected" && start.elapsed() < LONG, "{e}");
    }
    expect(&mut far_rx, 0..10, 100);
    far_tx.send_typed(9, &message(0, 100), LONG).unwrap();
    expect_on_gpu(&mut rx, &out, 0..1, 100);
}

#[test]
fn no_next_life_begins_while_a_kernel_is_at_work_in_the_old_one() {
    let [near, far] = near_and_far();
    let [(tx, _rx), (far_tx, far_rx)] = channels(&near, &far, SPEC);
    let standin = Standin::new("");
    let gpu = standin.gpu();
    let channel = GpuChannel::new(&gpu, options(), None);
    let mut tx = GpuTx::new(&channel, tx);
    let source = Source::new(&gpu, 0..1, 100);
    tx.announcement().unwrap(); // registered before stores are held up
    standin.configure("hold-stores");
    std::thread::scope(|s| {
        let sending = s.spawn(|| tx.send(source.all(1), LONG));
        std::thread::sleep(Duration::from_millis(50)); // the kernel has begun to store
        drop((far_tx, far_rx));
        let (mut next, _rx) = open_again(&far);
        assert!(next.wait_connected(Duration::from_millis(500)).is_err());
        standin.configure("");
        assert_eq!(sending.join().unwrap().unwrap(), 1, "sent, to nobody");
        next.wait_connected(LONG).unwrap();
    });
    assert_eq!(
        tx.send(source.all(1), LONG).unwrap_err().name,
        "closed-by-peer",
        "and that is told"
    );
}

#[test]
fn a_channel_without_checks_is_refused() {
    let [near, far] = near_and_far();
    let unchecked = ChannelSpec { check: false, ..SPEC };
    let [(tx, rx), _far] = channels(&near, &far, unchecked);
    let gpu = Standin::new("").gpu();
    let channel = GpuChannel::new(&gpu, options(), None);
    let source = Source::new(&gpu, 0..1, 8);
    let e = GpuTx::new(&channel, tx).send(source.all(1), LONG).unwrap_err();
    assert_eq!((e.name, e.exit), ("gpu-channel-unchecked", 7));
    let out = GpuMemory::allocate(&gpu, 1 << 16).unwrap();
    let e = GpuRx::new(&channel, rx).receive(&out, 1, LONG).unwrap_err();
    assert_eq!((e.name, e.exit), ("gpu-channel-unchecked", 7));
}

#[test]
fn what_is_no_message_ends_the_life_after_its_time() {
    let [near, far] = near_and_far();
    let [(mut tx, _rx), (_tx, rx)] = channels(&near, &far, SPEC);
    let gpu = Standin::new("").gpu();
    let channel = GpuChannel::new(&gpu, options(), None);
    let mut rx = GpuRx::new(&channel, rx);
    let out = GpuMemory::allocate(&gpu, 1 << 16).unwrap();
    // The message that is due, with a bit of it turned over.
    let lent = tx.lend().unwrap();
    tx.send_typed(9, b"twelve bytes", LONG).unwrap();
    let engine = tx.engine_mut().unwrap();
    let head = lent.lane.consumer_base + ntb_ring::wire::page::PAGE_LINES;
    let mut line = Line([0; 8]);
    for (i, word) in line.0.iter_mut().enumerate() {
        let piece = engine.direct(head, 1).unwrap();
        // The pair's memory is this process's own.
        *word = read_word(piece.as_ptr(), i);
    }
    line.0[0] ^= 1;
    engine.put(head, &line);
    let e = rx.receive(&out, 1, LONG).unwrap_err();
    assert_eq!(e.name, "gpu-ring-corrupt");
    let start = Instant::now();
    loop {
        match rx.receive(&out, 1, Duration::ZERO) {
            Err(e) if e.name == "corrupt-peer-data" => break,
            Err(e) if e.name == "gpu-ring-corrupt" && start.elapsed() < LONG => {}
            other => panic!("{other:?}"),
        }
    }
}

#[allow(unsafe_code, reason = "a test looks at what it has stored")]
#[allow(clippy::cast_ptr_alignment, reason = "lines are aligned")]
fn read_word(at: *mut u8, i: usize) -> u64 {
    // SAFETY: a line of the pair's memory, which is mapped and accessed through atomics only.
    unsafe { std::sync::atomic::AtomicU64::from_ptr(at.cast::<u64>().add(i)) }
        .load(std::sync::atomic::Ordering::Acquire)
}

/// Two links over an emulated bridge. `exported` is shown by the far one, or by both.
fn bridge(test: &str, exported: [Option<&Arc<Exposed>>; 2]) -> (Emulator, [Connection; 2]) {
    let names = ["a", "b"].map(|side| format!("ntb-gpu-channel-{}-{test}-{side}", std::process::id()));
    let [a, b] = names.clone().map(Endpoint::Abstract);
    let mut config = EmuConfig::new(family("intel-spr").unwrap(), a, b);
    config.pair.window_bytes = WINDOW;
    let emulator = Emulator::start(config).unwrap();
    let mut sides = names.iter().zip(exported).map(|(name, exported)| {
        let options = NtbOptions {
            export: exported.map(|e| Arc::clone(e) as Arc<dyn Exportable>),
            ..NtbOptions::default()
        };
        let link = NtbLink::open(&format!("emu:@{name}").parse().unwrap(), &options).unwrap();
        connect(Box::new(link))
    });
    let connections = [sides.next().unwrap(), sides.next().unwrap()];
    (emulator, connections)
}

const WINDOW: u64 = 1 << 20;

fn exposed(gpu: &Arc<dyn Gpu>, way: Way) -> Arc<Exposed> {
    let memory = GpuMemory::allocate(gpu, WINDOW).unwrap();
    Arc::new(Exposed::new(&memory, Some(way)).unwrap())
}

#[test]
fn a_channel_lies_in_a_gpus_memory_behind_a_bridge() {
    for way in [Way::DmaBuf, Way::Staging] {
        let standins = [Standin::new(""), Standin::new("")];
        let gpus = [standins[0].gpu(), standins[1].gpu()];
        let memory = exposed(&gpus[1], way);
        let (emulator, [near, far]) = bridge(way.name(), [None, Some(&memory)]);
        let (mut tx, _rx) = near.channel("c", SPEC).unwrap();
        let (far_tx, mut rx) = far.channel_at("c", SPEC, Place::Exported).unwrap();
        tx.wait_connected(LONG).unwrap();
        rx.wait_connected(LONG).unwrap();
        assert_eq!(tx.lend().unwrap().peer_place, Place::Exported, "the peer is told");

        // A processor sends, a GPU receives; its credits cannot be stored through an aperture that is written by calls.
        let channel = GpuChannel::new(&gpus[1], options(), Some(&memory));
        let mut rx = GpuRx::new(&channel, rx);
        let said = rx.announcement().unwrap();
        let polls = match way {
            Way::Staging => "kernels poll memory of this host",
            _ => "kernels poll the GPU's memory",
        };
        assert!(said.starts_with(polls) && said.contains(way.name()), "{said}");
        assert!(
            said.contains("credits by the processor: the peer's memory is not mapped"),
            "{said}"
        );
        let out = GpuMemory::allocate(&gpus[1], 1 << 16).unwrap();
        std::thread::scope(|s| {
            s.spawn(|| {
                for n in 0..150 {
                    tx.send_typed(9, &message(n, 100), LONG).unwrap();
                }
            });
            expect_on_gpu(&mut rx, &out, 0..150, 100);
        });

        // GPUs at both ends: no kernel can store there, so the processor sends on, and says so.
        let channel = GpuChannel::new(&gpus[0], options(), None);
        let mut tx = GpuTx::new(&channel, tx);
        let said = tx.announcement().unwrap();
        assert!(
            said.starts_with("staging: ") && said.contains("not mapped"),
            "{said}"
        );
        let source = Source::new(&gpus[0], 150..300, 100);
        std::thread::scope(|s| {
            let sending = s.spawn(|| tx.send(source.all(150), LONG));
            expect_on_gpu(&mut rx, &out, 150..300, 100);
            assert_eq!(sending.join().unwrap().unwrap(), 150);
        });
        assert_eq!(emulator.control().report().pair.a_to_b.window_reads, 0);
        assert_eq!(emulator.control().report().pair.b_to_a.window_reads, 0);
        drop((tx, rx, far_tx, near, far, memory, out, source, channel));
    }
}

#[test]
fn a_link_that_exports_nothing_says_so() {
    let [near, _far] = near_and_far();
    let e = near.channel_at("c", SPEC, Place::Exported).unwrap_err();
    assert!(e.to_string().contains("this link exports none"), "{e}");
}

/// An end of a pair that exports a GPU's memory, and reaches the peer's by stores: what a mapped bridge between two GPUs is.
#[derive(Debug)]
struct Exporting {
    link: PairLink,
    own: Arc<dyn Exportable>,
    peer: Arc<dyn Exportable>,
}

fn exporting_pair(memories: &[Arc<Exposed>; 2]) -> [Box<dyn Link>; 2] {
    let (a, b) = pair(&PairOptions {
        window_bytes: 1 << 20,
        ..PairOptions::default()
    })
    .unwrap();
    let [m, n] = memories.each_ref().map(|e| Arc::clone(e) as Arc<dyn Exportable>);
    let end = |link, own: &Arc<dyn Exportable>, peer: &Arc<dyn Exportable>| Exporting {
        link,
        own: Arc::clone(own),
        peer: Arc::clone(peer),
    };
    [Box::new(end(a, &m, &n)), Box::new(end(b, &n, &m))]
}

/// Lines of the peer's ordinary memory, and of what it exports behind them.
struct Two {
    ordinary: Engine,
    exported: WriteBack,
}

impl StoreEngine for Two {
    fn order(&self) -> Order {
        self.ordinary.order()
    }
    fn lines(&self) -> u64 {
        self.ordinary.lines() + self.exported.lines()
    }
    fn put(&mut self, line: u64, content: &Line) {
        match line.checked_sub(self.ordinary.lines()) {
            Some(line) => self.exported.put(line, content),
            None => self.ordinary.put(line, content),
        }
    }
    fn barrier(&mut self) {
        self.ordinary.barrier();
    }
    fn flush(&mut self) {
        self.ordinary.flush();
    }
    fn direct(&self, first: u64, lines: u64) -> Option<Direct> {
        match first.checked_sub(self.ordinary.lines()) {
            Some(first) => self.exported.direct(first, lines),
            None => self.ordinary.direct(first, lines),
        }
    }
}

impl Link for Exporting {
    fn facts(&self) -> LinkFacts {
        self.link.facts()
    }
    fn order(&self) -> Order {
        self.link.order()
    }
    fn poll(&mut self) -> Result<LinkStatus, LinkError> {
        self.link.poll()
    }
    fn wait(&self, timeout: Duration) {
        self.link.wait(timeout);
    }
    fn registers(&self) -> Registers {
        self.link.registers()
    }
    fn write_registers(&mut self, registers: &Registers) {
        self.link.write_registers(registers);
    }
    fn inbound(&self) -> View {
        self.link.inbound()
    }
    fn exported(&self) -> Option<View> {
        Some(View::exported(&self.own))
    }
    fn outbound(&self) -> Option<Engine> {
        Some(Engine::Other(Box::new(Two {
            ordinary: self.link.outbound()?,
            exported: WriteBack::new(View::exported(&self.peer)),
        })))
    }
    fn ring(&mut self, doorbell: u32) {
        self.link.ring(doorbell);
    }
    fn doorbell(&self, number: u32) -> Doorbell {
        self.link.doorbell(number)
    }
}

/// A pair that says to be of another kind.
#[derive(Debug)]
struct Called(PairLink, LinkKind);

impl Link for Called {
    fn facts(&self) -> LinkFacts {
        LinkFacts {
            kind: self.1,
            ..self.0.facts()
        }
    }
    fn order(&self) -> Order {
        self.0.order()
    }
    fn poll(&mut self) -> Result<LinkStatus, LinkError> {
        self.0.poll()
    }
    fn wait(&self, timeout: Duration) {
        self.0.wait(timeout);
    }
    fn registers(&self) -> Registers {
        self.0.registers()
    }
    fn write_registers(&mut self, registers: &Registers) {
        self.0.write_registers(registers);
    }
    fn inbound(&self) -> View {
        self.0.inbound()
    }
    fn outbound(&self) -> Option<Engine> {
        self.0.outbound()
    }
    fn ring(&mut self, doorbell: u32) {
        self.0.ring(doorbell);
    }
    fn doorbell(&self, number: u32) -> Doorbell {
        self.0.doorbell(number)
    }
}

#[test]
fn a_link_without_gpu_memory_says_why_by_its_kind() {
    for (kind, why) in [
        (
            LinkKind::Rdma,
            "not the GPU's: channels do not use GPU memory as a region",
        ),
        (LinkKind::Rdma, "ibv_reg_dmabuf_mr"),
        (LinkKind::Tcp, "over TCP"),
        (LinkKind::Ntb, "a window to spare"),
    ] {
        let (a, b) = pair(&PairOptions::default()).unwrap();
        let (near, far) = (connect(Box::new(a)), connect(Box::new(Called(b, kind))));
        let [_near, (_tx, rx)] = channels(&near, &far, SPEC);
        let gpu = Standin::new("").gpu();
        let said = GpuRx::new(&GpuChannel::new(&gpu, options(), None), rx)
            .announcement()
            .unwrap();
        assert!(said.contains(why), "{kind:?}: {said}");
    }
}

/// A GPU at each end of a link that exports memory of both.
struct TwoGpus {
    standins: [Standin; 2],
    gpus: [Arc<dyn Gpu>; 2],
    memories: [Arc<Exposed>; 2],
    near: Connection,
    far: Connection,
}

impl TwoGpus {
    fn new() -> Self {
        let standins = [Standin::new(""), Standin::new("")];
        let gpus = [standins[0].gpu(), standins[1].gpu()];
        let memories = [exposed(&gpus[0], Way::DmaBuf), exposed(&gpus[1], Way::DmaBuf)];
        let [a, b] = exporting_pair(&memories);
        Self {
            standins,
            gpus,
            memories,
            near: connect(a),
            far: connect(b),
        }
    }
}

#[test]
fn nothing_is_sent_into_a_gpu_before_the_first_message_of_the_life_was_taken() {
    let TwoGpus {
        standins,
        gpus,
        memories: _memories,
        near,
        far,
    } = TwoGpus::new();
    let (mut tx, own_rx) = near.channel("c", SPEC).unwrap();
    let (far_tx, mut rx) = far.channel_at("c", SPEC, Place::Exported).unwrap();
    tx.wait_connected(LONG).unwrap();
    rx.wait_connected(LONG).unwrap();
    let channel = GpuChannel::new(&gpus[0], options(), None);
    let mut tx = GpuTx::new(&channel, tx);
    let source = Source::new(&gpus[0], 0..20, 100);
    let short = Duration::from_millis(200);
    let unproven = |e: ntb_gpudirect::GpuError| {
        assert_eq!((e.name, e.exit), ("gpu-path-unproven", 5), "{e}");
        assert!(
            e.what.contains("access control") && e.what.contains("nobody receives"),
            "{e}"
        );
    };
    tx.prove(short).unwrap(); // nothing was sent that could be waited for
    assert_eq!(tx.send(source.all(1), LONG).unwrap(), 1);
    unproven(tx.prove(short).unwrap_err());
    unproven(tx.send(source.all(5), short).unwrap_err());
    expect(&mut rx, 0..1, 100);
    assert!(
        matches!(rx.try_recv(&mut [0; 256]), Err(RecvFailure::Empty)),
        "one and no more"
    );
    // It was taken, and that is seen; from now on nothing waits.
    tx.prove(LONG).unwrap();
    assert_eq!(tx.send(source.all(20), LONG).unwrap(), 20);
    expect(&mut rx, 0..20, 100);

    // A way that carries nothing, in the next life.
    drop((tx, own_rx, far_tx, rx));
    let (mut tx, _own_rx) = open_again(&near);
    let start = Instant::now();
    let (_far_tx, mut rx) = loop {
        match far.channel_at("c", SPEC, Place::Exported) {
            Ok(ends) => break ends,
            Err(e) => assert!(start.elapsed() < LONG, "{e}"),
        }
    };
    tx.wait_connected(LONG).unwrap();
    let mut tx = GpuTx::new(&channel, tx);
    tx.announcement().unwrap();
    standins[0].configure("lose-stores");
    unproven(tx.send(source.all(5), short).unwrap_err());
    let e = rx.recv(&mut [0; 256], short).unwrap_err();
    assert_eq!(e, RecvFailure::TimedOut);
}

#[test]
fn credits_of_kernels_that_do_not_arrive_stop_nobody() {
    let [near, far] = near_and_far();
    let [(mut tx, _rx), (_tx, rx)] = channels(&near, &far, SPEC);
    let standin = Standin::new("");
    let gpu = standin.gpu();
    let channel = GpuChannel::new(&gpu, options(), None);
    let mut rx = GpuRx::new(&channel, rx);
    assert!(rx.announcement().unwrap().contains("credits by the GPU"));
    let out = GpuMemory::allocate(&gpu, 1 << 16).unwrap();
    standin.configure("lose-stores");
    std::thread::scope(|s| {
        // More than twice round the ring.
        let sending =
            s.spawn(|| (0..60).try_for_each(|n| tx.send_typed(9, &message(n, 200), LONG).map(drop)));
        expect_on_gpu(&mut rx, &out, 0..60, 200);
        sending.join().unwrap().unwrap();
    });
}

#[test]
fn two_gpus_do_not_store_into_each_other_unasked_and_a_stall_is_told_with_the_reason() {
    let TwoGpus {
        standins,
        gpus,
        memories,
        near,
        far,
    } = TwoGpus::new();
    let (mut tx, own_rx) = near.channel_at("c", SPEC, Place::Exported).unwrap();
    let (mut far_tx, mut rx) = far.channel_at("c", SPEC, Place::Exported).unwrap();
    far_tx.wait_connected(LONG).unwrap();
    tx.wait_connected(LONG).unwrap();
    let source = Source::new(&gpus[0], 0..20, 100);

    let cautious = GpuChannel::new(&gpus[0], options(), Some(&memories[0]));
    let mut sender = GpuTx::new(&cautious, tx);
    let e = sender.send(source.all(1), LONG).unwrap_err();
    assert_eq!((e.name, e.exit), ("gpu-both-ways", 2));
    assert!(
        e.what.contains("deadlock") && e.what.contains("ordinary memory"),
        "{e}"
    );
    // Credits are the processor's then.
    let receiving = GpuChannel::new(&gpus[0], options(), Some(&memories[0]));
    let mut credits = GpuRx::new(&receiving, own_rx);
    let said = credits.announcement().unwrap();
    assert!(
        said.contains("credits by the processor: two GPUs store into each other"),
        "{said}"
    );
    drop(credits);

    // Asked for, it runs, and says what it is.
    let bold = Options {
        both_ways: true,
        ..options()
    };
    let channel = GpuChannel::new(&gpus[0], bold, Some(&memories[0]));
    let mut sender = GpuTx::new(&channel, sender.into_sender());
    let said = sender.announcement().unwrap();
    assert!(
        said.contains("both directions, as asked for") && said.contains("deadlock"),
        "{said}"
    );
    std::thread::scope(|s| {
        let sending = s.spawn(|| sender.send(source.all(20), LONG));
        expect(&mut rx, 0..20, 100);
        assert_eq!(sending.join().unwrap().unwrap(), 20);
    });

    let watched = Options {
        patience: Duration::from_millis(300),
        ..bold
    };
    let channel = GpuChannel::new(&gpus[0], watched, Some(&memories[0]));
    let mut sender = GpuTx::new(&channel, sender.into_sender());
    sender.announcement().unwrap(); // registered before stores are held up

    // Stores that do not complete: the watchdog says so, in bounded time, and again at the next call.
    standins[0].configure("hold-stores");
    for _ in 0..2 {
        let e = sender.send(source.all(1), LONG).unwrap_err();
        assert_eq!((e.name, e.exit), ("gpu-both-ways-stalled", 5));
        assert!(
            e.what.contains("deadlock")
                && e.what.contains("got nowhere for")
                && e.what.contains("end the process"),
            "{e}"
        );
    }
    standins[0].configure("");
    assert_eq!(
        rx.recv(&mut [0; 256], LONG).unwrap().len,
        100,
        "late, it may yet arrive"
    );
    assert!(matches!(rx.try_recv(&mut [0; 256]), Err(RecvFailure::Empty)));
}
