//! Device code against the Rust ring: the PTX that is checked in, run by the host stand-in's interpreter, must be understood by the
//! Rust producer and consumer, and understand them. The peer's memory is registered as an aperture, which the stand-in lets no
//! kernel load: so a test that passes has not read across.
//!
//! This is the code's logic and the order in which it publishes. It says nothing about a GPU.

#![allow(unsafe_code, reason = "memory that is shared with the host stand-in")]

mod common;

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use common::Standin;
use ntb_gpudirect::{
    aperture::OnGpu,
    ends::{BUDGET, GpuReceiver, GpuSender, Outgoing},
    kernels::{Record, Status},
    memory::{Exposed, GpuMemory},
    seam::{Arg, Gpu, HostMemory},
};
use ntb_mem::{
    export::Exportable,
    region::{Pages, Region},
};
use ntb_ring::{
    link::engine::{Order, WriteBack},
    queue::{Consumer, Lane, Producer, RecvError, SendError},
    wire::{mark::LaneKey, page::PAGE_LINES},
};

const RING: u64 = 16;

fn lane(first_seq: u64) -> Lane {
    Lane {
        ring_lines: RING,
        consumer_base: 3,
        producer_base: 1,
        to_consumer: LaneKey::new(0x4321, 0xffff_fff0, 7),
        to_producer: LaneKey::new(0x1234, 5, 9),
        first_seq,
    }
}

fn region(lines: u64) -> Arc<Region> {
    let region = Region::allocate(lines * 64, Pages::Normal).unwrap();
    // Every page is touched, as an aperture's are before it is registered.
    let region = Arc::new(region);
    (0..region.bytes() as usize / 8).for_each(|i| region.view().store(i, 0, Ordering::Relaxed));
    region
}

/// Memory of the peer: kernels may store to it and not load it.
fn aperture(gpu: &Arc<dyn Gpu>, region: &Arc<Region>) -> Arc<OnGpu> {
    // SAFETY: the tests keep the region until the end; it gives no reference out.
    Arc::new(unsafe { OnGpu::raw(gpu, region.as_ptr(), region.bytes(), HostMemory::Aperture) }.unwrap())
}

/// A GPU sends, a processor receives.
struct ToHost {
    sender: GpuSender,
    consumer: Consumer<WriteBack, ntb_mem::region::View>,
    messages: Arc<GpuMemory>,
    _regions: [Arc<Region>; 2],
    _standin: Standin,
}

fn to_host(first_seq: u64) -> ToHost {
    let standin = Standin::new("");
    let gpu = standin.gpu();
    let lane = lane(first_seq);
    let (theirs, ours) = (region(3 + PAGE_LINES + RING), region(1 + PAGE_LINES));
    let own = Arc::new(OnGpu::region(&gpu, &ours).unwrap());
    let sender = GpuSender::new(&gpu, &lane, &aperture(&gpu, &theirs), &own, 1).unwrap();
    let view = theirs.view();
    let consumer = Consumer::new(
        WriteBack::new(ours.view()),
        view.part(3, PAGE_LINES).unwrap(),
        view.part(3 + PAGE_LINES, RING).unwrap(),
        lane,
        Order::Relaxed,
    );
    ToHost {
        sender,
        consumer,
        messages: GpuMemory::allocate(&gpu, 1 << 16).unwrap(),
        _regions: [theirs, ours],
        _standin: standin,
    }
}

fn pattern(n: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (n * 131 + i * 7 + 1) as u8).collect()
}

#[test]
fn what_a_gpu_sends_a_processor_receives() {
    for first_seq in [0, 0x1_0000_0003, u64::MAX - 30] {
        let mut t = to_host(first_seq);
        let mut seq = first_seq;
        // Lengths around every border: within a line, in a long line, over several lines, as long as the ring takes; twice
        // round the ring.
        for len in [
            0usize, 1, 7, 8, 47, 48, 49, 56, 57, 64, 65, 127, 128, 129, 500, 959, 960, 3, 48, 64, 960,
        ] {
            let message = pattern(len as u64, len);
            t.messages.write(0, &message).unwrap();
            let out = Outgoing {
                memory: &t.messages,
                offset: 0,
                size: len as u32,
                count: 1,
                message_type: len as u32 + 100,
            };
            assert_eq!(t.sender.send(out).unwrap(), 1, "{len}");
            let mut buf = [0xee; 1024];
            let got = t.consumer.try_recv(&mut buf).unwrap();
            assert_eq!((got.len, got.message_type, got.seq), (len, len as u32 + 100, seq));
            assert_eq!(&buf[..len], &message[..], "{len}");
            seq = seq.wrapping_add(1);
            t.consumer.give_back();
        }
        assert_eq!(t.consumer.try_recv(&mut [0; 8]), Err(RecvError::Empty));
        assert_eq!(t.consumer.stats().incomplete, 0);
    }
}

#[test]
fn a_batch_of_a_gpu_is_unpacked_by_a_processor() {
    let mut t = to_host(9);
    for (size, count) in [(16usize, 50usize), (1, 40), (40, 1), (8, 5), (24, 40), (48, 20)] {
        let bytes = pattern(size as u64, size * count);
        t.messages.write(8, &bytes).unwrap();
        let out = Outgoing {
            memory: &t.messages,
            offset: 8,
            size: size as u32,
            count: count as u32,
            message_type: 6,
        };
        let sent = t.sender.start_packed(out, BUDGET).unwrap().finish().unwrap();
        assert_eq!(sent, count as u64);
        let mut out = vec![0; size * count];
        assert_eq!(t.consumer.try_recv_packed(size, &mut out).unwrap(), count);
        assert_eq!(out, bytes, "{size} {count}");
        t.consumer.give_back();
    }
}

#[test]
fn a_full_ring_holds_a_gpu_up_until_credit_comes() {
    let mut t = to_host(0);
    let one = |count| Outgoing {
        memory: &t.messages,
        offset: 0,
        size: 40,
        count,
        message_type: 1,
    };
    t.messages.write(0, &pattern(1, 40)).unwrap();
    let (small, large) = (one(1), one(100));
    // Nobody reads: sixteen go, and the kernel ends by its budget, having said what it waits for.
    let e = t.sender.start(large, 1000).unwrap().finish().unwrap_err();
    assert_eq!((e.name, e.exit), ("gpu-ring-stalled", 5));
    let state = t.sender.state().unwrap();
    assert_eq!(
        (state.sent, state.status(), state.head),
        (RING, Status::Budget, RING)
    );
    assert_eq!(state.attempt, 0, "one line comes back by itself");
    // Six lines at once do not: the reader is told once.
    let many = Outgoing {
        size: 300,
        count: 1,
        ..small
    };
    t.sender.start(many, 1000).unwrap().finish().unwrap_err();
    assert_eq!(t.sender.state().unwrap().attempt, 1);
    // The reader takes six, which is past a quarter with more to read: a credit comes, and the sender goes on from where
    // it was.
    let mut buf = [0; 64];
    for seq in 0..6 {
        assert_eq!(t.consumer.try_recv(&mut buf).unwrap().seq, seq);
    }
    assert!(t.consumer.stats().credits >= 1);
    assert_eq!(t.sender.send(small).unwrap(), 1);
    // Reader and kernel at the same time.
    let mut next = 6;
    std::thread::scope(|s| {
        let sender = &mut t.sender;
        let kernel = s.spawn(move || sender.send(large));
        let begin = Instant::now();
        while next < RING + 1 + 100 {
            match t.consumer.try_recv(&mut buf) {
                Ok(got) => {
                    assert_eq!((got.seq, got.len), (next, 40));
                    next += 1;
                }
                Err(RecvError::Empty) => std::thread::yield_now(),
                Err(e) => panic!("{e}"),
            }
            assert!(begin.elapsed() < Duration::from_secs(60), "stuck at {next}");
        }
        assert_eq!(kernel.join().unwrap().unwrap(), 100);
    });
    let too_long = Outgoing {
        size: 961,
        count: 1,
        ..small
    };
    assert_eq!(t.sender.send(too_long).unwrap_err().name, "gpu-message-too-long");
}

#[test]
fn a_credit_that_cannot_be_stops_a_gpu() {
    let mut t = to_host(0);
    let key = lane(0).to_producer;
    let page = t._regions[1].view();
    let out = Outgoing {
        memory: &t.messages,
        offset: 0,
        size: 8,
        count: 17,
        message_type: 0,
    };
    // Sixteen lines were sent and seventeen are said to be consumed.
    page.store(8, u64::from(key.tag()) << 48 | 17, Ordering::Release);
    let e = t.sender.start(out, 100).unwrap().finish().unwrap_err();
    assert_eq!(e.name, "gpu-ring-corrupt");
    // A credit of another life is none.
    let mut t = to_host(0);
    t._regions[1].view().store(8, 0x7777 << 48 | 5, Ordering::Release);
    let out = Outgoing {
        memory: &t.messages,
        ..out
    };
    assert_eq!(
        t.sender.start(out, 100).unwrap().finish().unwrap_err().name,
        "gpu-ring-stalled"
    );
}

/// A processor sends, a GPU receives: its memory is exported, and the processor stores through the export.
struct ToGpu {
    receiver: GpuReceiver,
    producer: Producer<WriteBack, ntb_mem::region::View>,
    inbound: Arc<GpuMemory>,
    out: Arc<GpuMemory>,
    _regions: [Arc<Region>; 2],
    _standin: Standin,
}

fn to_gpu(first_seq: u64) -> ToGpu {
    let standin = Standin::new("");
    let gpu = standin.gpu();
    let lane = lane(first_seq);
    let inbound = GpuMemory::allocate(&gpu, (3 + PAGE_LINES + RING) * 64).unwrap();
    let exposed = Exposed::new(&inbound, None).unwrap();
    // The bridge's part: the exported file, mapped by whoever stores.
    let (fd, _) = exposed.descriptor().unwrap();
    rustix::fs::fcntl_add_seals(fd, rustix::fs::SealFlags::empty()).ok();
    let theirs = region(1 + PAGE_LINES);
    let peer = aperture(&gpu, &theirs);
    let receiver = GpuReceiver::new(&gpu, &lane, &inbound, 3, &peer).unwrap();
    let staging = region(3 + PAGE_LINES + RING);
    let producer = Producer::new(
        WriteBack::new(staging.view()),
        theirs.view().part(1, PAGE_LINES).unwrap(),
        lane,
        Order::Relaxed,
    );
    ToGpu {
        receiver,
        producer,
        inbound,
        out: GpuMemory::allocate(&gpu, 1 << 16).unwrap(),
        _regions: [staging, theirs],
        _standin: standin,
    }
}

impl ToGpu {
    /// What the bridge does with what the producer stored.
    fn carry(&self) {
        let staging = &self._regions[0];
        let mut bytes = vec![0; staging.bytes() as usize];
        staging.view().copy_out(0, &mut bytes);
        self.inbound
            .write(0, &bytes[..((3 + PAGE_LINES + RING) * 64) as usize])
            .unwrap();
    }

    fn receive(&mut self, most: u32, budget: u64) -> (Vec<Record>, Status) {
        let out = Arc::clone(&self.out);
        self.receiver.start(&out, most, budget).unwrap().finish().unwrap()
    }

    fn bytes(&self, record: &Record) -> Vec<u8> {
        let mut bytes = vec![0; record.size as usize * record.count as usize];
        self.out.read(record.offset, &mut bytes).unwrap();
        bytes
    }
}

#[test]
fn what_a_processor_sends_a_gpu_receives() {
    for first_seq in [0, u64::from(u32::MAX) - 5] {
        let mut t = to_gpu(first_seq);
        let mut seq = first_seq;
        for len in [
            0usize, 1, 8, 47, 48, 49, 56, 63, 64, 65, 130, 700, 959, 960, 5, 64, 300,
        ] {
            let message = pattern(len as u64, len);
            t.producer.try_send(len as u32 + 9, &message).unwrap();
            t.carry();
            let (records, status) = t.receive(1, 100);
            assert_eq!(status, Status::Done, "{len}");
            let record = records[0];
            assert_eq!(
                (
                    record.seq,
                    record.message_type,
                    record.size as usize,
                    record.count
                ),
                (seq, len as u32 + 9, len, 1)
            );
            assert_eq!(t.bytes(&record), message, "{len}");
            t.receiver.give_back().unwrap();
            assert!(t.producer.take_credit().unwrap());
            seq += 1;
        }
        assert_eq!(t.receive(1, 50), (vec![], Status::Budget));
        assert_eq!(t.producer.consumed_seq(), seq);
    }
}

#[test]
fn a_processors_batches_reach_a_gpu_and_room_comes_back_in_quarters() {
    let mut t = to_gpu(4);
    let bytes = pattern(3, 24 * 12);
    let sent = t.producer.try_send_packed(2, 24, &bytes).unwrap();
    t.carry();
    let (records, _) = t.receive(8, 100);
    let got: Vec<u8> = records.iter().flat_map(|r| t.bytes(r)).collect();
    assert_eq!(got, bytes[..sent * 24]);
    assert_eq!(
        records.iter().map(|r| u64::from(r.count)).sum::<u64>(),
        sent as u64
    );
    // One by one: a credit with every fifth line and no more.
    let before = t.receiver.state().unwrap();
    let mut credited = Vec::new();
    for n in 0..10u64 {
        while let Err(SendError::Full { .. }) = t.producer.try_send(0, &n.to_le_bytes()) {
            t.carry();
            t.receive(1, 20);
        }
        t.carry();
        assert_eq!(t.receive(1, 20).1, Status::Done);
        credited.push(t.receiver.state().unwrap().credited);
    }
    credited.dedup();
    assert!(credited.len() <= 4, "from {} on: {credited:?}", before.credited);
}

#[test]
fn torn_and_hostile_lines_reach_no_gpu_program() {
    // A payload word changed behind the mark: the check does not hold, and it is corrupt once the budget is used up.
    let mut t = to_gpu(0);
    t.producer.try_send(1, &pattern(1, 200)).unwrap();
    t.carry();
    let place = (3 + PAGE_LINES + 2) * 64;
    t.inbound.write(place, &[0xff; 8]).unwrap();
    assert_eq!(t.receive(1, 40), (vec![], Status::Corrupt));
    assert!(t.receiver.state().unwrap().incomplete > 0);
    // The rest arrives: the same message is received.
    t.carry();
    assert_eq!(t.receive(1, 40).1, Status::Done);
    // Lengths that cannot be, with the right mark: never copied, whatever they say.
    for (word0, kind, len) in [
        (u64::MAX, 3u64, 0u64),
        (1 << 32 | 0xffff_ffff, 3, 0),
        (5, 3, 0),
        (0xffff_ffff << 32 | 0xffff_ffff, 4, 0),
        (2 << 32, 4, 0),
        (1 << 32 | 60, 3, 9),
        (0, 1, 49),
        (0, 1, 255),
        (0, 2, 50),
        (0, 9, 0),
    ] {
        let mut t = to_gpu(0);
        let mut line = [0u8; 64];
        line[..8].copy_from_slice(&word0.to_le_bytes());
        let mark = 0x4321u64 << 32 | 0xffff_fff0 | kind << 48 | len << 56;
        line[56..].copy_from_slice(&mark.to_le_bytes());
        t.inbound.write((3 + PAGE_LINES) * 64, &line).unwrap();
        assert_eq!(
            t.receive(1, 10),
            (vec![], Status::Corrupt),
            "{word0:x} {kind} {len}"
        );
    }
}

/// A ring in one GPU's memory with a kernel at each end: what crosses is what a processor would have written.
#[test]
fn two_kernels_at_the_ends_of_one_ring() {
    let standin = Standin::new("");
    let gpu = standin.gpu();
    let lane = lane(0);
    let inbound = GpuMemory::allocate(&gpu, (3 + PAGE_LINES + RING) * 64).unwrap();
    let exposed = Exposed::new(&inbound, None).unwrap();
    let credits = region(1 + PAGE_LINES);
    // SAFETY: the exported mapping lives until the end of the test, and no reference to it is made.
    let into = unsafe {
        for page in 0..exposed.bytes() / 4096 {
            exposed.as_ptr().add(page as usize * 4096).read_volatile();
        }
        OnGpu::raw(&gpu, exposed.as_ptr(), exposed.bytes(), HostMemory::Aperture)
    };
    let into = Arc::new(into.unwrap());
    // The receiver's side of the credits is an aperture; the sender's is memory of the host: two mappings of one file.
    let other = {
        let fd = credits.descriptor().try_clone_to_owned().unwrap();
        Arc::new(Region::from_peer(fd, credits.bytes()).unwrap())
    };
    (0..other.bytes() as usize / 8).for_each(|i| other.view().store(i, 0, Ordering::Relaxed));
    let own = Arc::new(OnGpu::region(&gpu, &credits).unwrap());
    let mut sender = GpuSender::new(&gpu, &lane, &into, &own, 1).unwrap();
    let mut receiver = GpuReceiver::new(&gpu, &lane, &inbound, 3, &aperture(&gpu, &other)).unwrap();
    let (source, sink) = (
        GpuMemory::allocate(&gpu, 1 << 16).unwrap(),
        GpuMemory::allocate(&gpu, 1 << 16).unwrap(),
    );
    let messages = 60u32;
    let bytes = pattern(5, 104 * messages as usize);
    source.write(0, &bytes).unwrap();
    let out = Outgoing {
        memory: &source,
        offset: 0,
        size: 100,
        count: messages,
        message_type: 3,
    };
    let sending = sender.start(out, BUDGET).unwrap();
    let (records, status) = receiver.start(&sink, messages, BUDGET).unwrap().finish().unwrap();
    assert_eq!(sending.finish().unwrap(), u64::from(messages));
    assert_eq!((records.len(), status), (messages as usize, Status::Done));
    for (n, record) in records.iter().enumerate() {
        let mut got = [0; 100];
        sink.read(record.offset, &mut got).unwrap();
        assert_eq!(record.seq, n as u64);
        assert_eq!(got[..], bytes[n * 104..n * 104 + 100]);
    }
}

#[test]
fn a_tile_arrives_before_its_flag() {
    let standin = Standin::new("");
    let gpu = standin.gpu();
    let theirs = region(64);
    let to = aperture(&gpu, &theirs);
    let from = GpuMemory::allocate(&gpu, 4096).unwrap();
    let bytes = pattern(8, 4096);
    from.write(0, &bytes).unwrap();
    let args = [
        Arg::U64(to.at() + 64),
        Arg::U64(256),
        Arg::U64(from.at() + 8),
        Arg::U64(512),
        Arg::U32(5),
        Arg::U32(24),
        Arg::U64(to.at()),
        Arg::U64(77),
    ];
    // SAFETY: five rows of 192 bytes lie in both memories at these pitches; both live until the kernel has ended.
    let mut running = unsafe { gpu.start("ntb_tile", 64, &args) }.unwrap();
    assert!(running.wait(Duration::from_secs(60)).unwrap());
    assert_eq!(theirs.view().load(0, Ordering::Acquire), 77);
    for row in 0..5 {
        let mut got = [0; 192];
        theirs.view().copy_out(64 + row * 256, &mut got);
        assert_eq!(got[..], bytes[8 + row * 512..8 + row * 512 + 192], "row {row}");
    }
}

/// Three GPUs in a ring, all of them the stand-in: the usual two rounds of an all-reduce over three chunks.
#[test]
fn an_all_reduce_over_three_gives_everyone_the_sums() {
    const N: usize = 3;
    const CHUNK: usize = 7; // odd, so that a number stands alone at the end
    const PITCH: u64 = 32;
    let standin = Standin::new("");
    let gpu = standin.gpu();
    // Per GPU: own numbers; what the one before stores (one place a step), and a flag a step.
    let own: Vec<_> = (0..N).map(|_| GpuMemory::allocate(&gpu, 4096).unwrap()).collect();
    let inbox: Vec<_> = (0..N).map(|_| GpuMemory::allocate(&gpu, 4096).unwrap()).collect();
    let status = GpuMemory::allocate(&gpu, 64).unwrap();
    let start = |gpu: usize, i: usize| (gpu * 100 + i) as f32;
    for (g, memory) in own.iter().enumerate() {
        for chunk in 0..N {
            let bytes: Vec<u8> = (0..CHUNK)
                .flat_map(|i| start(g, chunk * CHUNK + i).to_le_bytes())
                .collect();
            memory.write(chunk as u64 * PITCH, &bytes).unwrap();
        }
    }
    let steps = 2 * (N - 1);
    for step in 0..=steps as u64 {
        for g in 0..N {
            let chunk = (g as u64 + 2 * N as u64 - step) % N as u64;
            let next = &inbox[(g + 1) % N];
            // Step `step` takes what the step before has stored, at a place and with a flag of its own; the first takes zeros,
            // the last hands nothing on.
            let (slot, flag) = (step * PITCH, 2048 + step * 8);
            let (incoming, flag_in) = match step {
                0 => (1024, 3072),
                _ => (slot - PITCH, flag - 8),
            };
            let forward = step < steps as u64;
            let args = [
                Arg::U64(own[g].at() + chunk * PITCH),
                Arg::U64(inbox[g].at() + incoming),
                Arg::U64(if forward { next.at() + slot } else { 0 }),
                Arg::U32(CHUNK as u32),
                Arg::U64(inbox[g].at() + flag_in),
                Arg::U64(step),
                Arg::U64(next.at() + flag),
                Arg::U32(u32::from(step < N as u64)),
                Arg::U64(BUDGET),
                Arg::U64(status.at()),
            ];
            // SAFETY: all addresses lie in memories that live until the end of the test.
            let mut running = unsafe { gpu.start("ntb_reduce_step", 32, &args) }.unwrap();
            assert!(running.wait(Duration::from_secs(60)).unwrap());
            let mut word = [0; 8];
            status.read(0, &mut word).unwrap();
            assert_eq!(u64::from_le_bytes(word), 1, "step {step} of {g}");
        }
    }
    for memory in &own {
        for chunk in 0..N {
            let mut bytes = [0; CHUNK * 4];
            memory.read(chunk as u64 * PITCH, &mut bytes).unwrap();
            for (i, four) in bytes.chunks_exact(4).enumerate() {
                let sum: f32 = (0..N).map(|g| start(g, chunk * CHUNK + i)).sum();
                assert_eq!(
                    f32::from_le_bytes(four.try_into().unwrap()),
                    sum,
                    "chunk {chunk}, number {i}"
                );
            }
        }
    }
}

#[test]
fn ask_and_echo_meet_and_end_by_their_budget() {
    let standin = Standin::new("");
    let gpu = standin.gpu();
    let words = GpuMemory::allocate(&gpu, 4096).unwrap();
    let at = words.at();
    let args = |done: u64, spent: u64, budget: u64| {
        [
            Arg::U64(at),
            Arg::U64(at + 64),
            Arg::U64(100),
            Arg::U64(budget),
            Arg::U64(spent),
            Arg::U64(done),
        ]
    };
    // SAFETY: all addresses lie in `words`, which lives until both have ended.
    unsafe {
        let mut echo = gpu.start("ntb_echo", 32, &args(at + 128, 0, BUDGET)).unwrap();
        let mut ask = gpu
            .start("ntb_ask", 32, &args(at + 136, at + 1024, BUDGET))
            .unwrap();
        assert!(echo.wait(Duration::from_secs(60)).unwrap() && ask.wait(Duration::from_secs(60)).unwrap());
        assert_eq!(
            (gpu.poll(at + 128).unwrap(), gpu.poll(at + 136).unwrap()),
            (100, 100)
        );
        assert!(
            gpu.poll(at + 1024 + 99 * 8).unwrap() > 0,
            "each wait has its time"
        );
        let mut alone = gpu.start("ntb_ask", 32, &args(at + 144, 0, 50)).unwrap();
        assert!(alone.wait(Duration::from_secs(60)).unwrap());
        assert_eq!(gpu.poll(at + 144).unwrap(), 0, "nobody answered");
    }
}

#[test]
fn ends_that_do_not_fit_are_refused_before_a_kernel_starts() {
    let standin = Standin::new("");
    let gpu = standin.gpu();
    let short = region(PAGE_LINES);
    let far = aperture(&gpu, &short);
    let own = Arc::new(OnGpu::region(&gpu, &region(PAGE_LINES * 2)).unwrap());
    let memory = GpuMemory::allocate(&gpu, 1 << 16).unwrap();
    let sound = lane(0);
    let refused = |lane: Lane, control| GpuSender::new(&gpu, &lane, &far, &own, control).unwrap_err().name;
    assert_eq!(refused(sound, 0), "gpu-outside");
    assert_eq!(
        refused(
            Lane {
                ring_lines: 12,
                ..sound
            },
            0
        ),
        "gpu-ring-size"
    );
    assert_eq!(
        refused(
            Lane {
                consumer_base: u64::MAX,
                ..sound
            },
            0
        ),
        "gpu-outside"
    );
    let e = GpuReceiver::new(&gpu, &sound, &memory, 1 << 20, &far).unwrap_err();
    assert_eq!((e.name, e.exit), ("gpu-outside", 7));
    let e = GpuReceiver::new(
        &gpu,
        &Lane {
            producer_base: 1,
            ..sound
        },
        &memory,
        0,
        &far,
    )
    .unwrap_err();
    assert_eq!(e.name, "gpu-outside");
}
