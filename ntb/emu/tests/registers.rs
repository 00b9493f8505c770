//! Register semantics of each family, by the access sequences of the Linux drivers.

#[path = "common/bench.rs"]
mod bench;

use bench::{
    Access::{R, W},
    Bench, ONES, bar_at, byte, enable_gen4, link_handler_gen4, probe_gen4, run, up_gen4,
};
use ntb::hw::regs::{RegMap, amd, epf, intel_gen3, intel_gen4};
use ntb_emu::model::{Action, Actor, SideId, SideId::A, SideId::B};

#[test]
fn gen4_probe_and_link() {
    for (name, usd, dsd, device, revision) in [
        ("intel-spr", 0x0200, 0x4200, 0x347E, 0x10),
        ("intel-gnr", 0x0200, 0x4200, 0x0DB4, 0x00),
        ("intel-icx", 0x0200, 0x1200, 0x347E, 0x02),
    ] {
        let bench = up_gen4(name, usd, dsd);
        assert_eq!(bench.cfg(A, 0, 2), 0x8086);
        assert_eq!(bench.cfg(A, 2, 2), device);
        assert_eq!(bench.cfg(A, 8, 1), revision);
        assert_eq!(bench.cfg(A, 9, 3), 0x06_8000);
        // Disabled at one end: both are told.
        run(
            &bench,
            A,
            &[W(0x0, 4, 0), W(0xB050, 2, 0x10), W(0x30EC, 1, 1), R(0xB0D4, 4, 8)],
        );
        for side in SideId::BOTH {
            link_handler_gen4(&bench, side, 0);
        }
        // Everything that crosses is gone now.
        run(
            &bench,
            A,
            &[W(0x8080, 4, 1), R(0x8080, 4, 0xFFFF_FFFF), W(0x100, 4, 1)],
        );
        run(&bench, B, &[R(0x80, 4, 0), R(0x40, 8, 0)]);
        assert_eq!(bench.pair.snapshot().a_to_b.lost_link_down, 3);
        assert_eq!(bench.pair.snapshot().a.reserved_accesses, 0);
    }
}

#[test]
fn gen4_link_bit_needs_its_cause_cleared_first() {
    let bench = Bench::new("intel-spr");
    probe_gen4(&bench, A, 0x0200);
    probe_gen4(&bench, B, 0x4200);
    enable_gen4(&bench, A);
    enable_gen4(&bench, B);
    run(
        &bench,
        A,
        &[
            W(0x40, 8, 1 << 32),
            R(0x40, 8, 1 << 32),
            W(0xB05A, 2, 0x100),
            W(0x44, 4, 1), // the upper half alone
            R(0x40, 8, 0),
        ],
    );
}

#[test]
fn gen4_doorbells() {
    let bench = up_gen4("intel-spr", 0x0200, 0x4200);
    // Masked: latched, silent; fires when unmasked; the interrupt does not clear it.
    run(&bench, A, &[W(0x100 + 4 * 5, 4, 1), R(0x100 + 4 * 5, 4, 0)]);
    assert_eq!(bench.fired(B), []);
    run(
        &bench,
        B,
        &[R(0x40, 8, 1 << 5), W(0x48, 8, 0xFFFF_FFFF & !(1 << 5))],
    );
    assert_eq!(bench.fired(B), [(5, 1)]);
    run(&bench, B, &[R(0x40, 4, 1 << 5), W(0x48, 8, 0xFFFF_FFDF)]);
    assert_eq!(bench.fired(B), [], "unmasked already");
    // A latch raises its edges only.
    run(&bench, A, &[W(0x100 + 4 * 5, 4, 1)]);
    assert_eq!(bench.fired(B), []);
    run(&bench, B, &[W(0x40, 8, 1 << 5), R(0x40, 8, 0)]);
    run(&bench, A, &[W(0x100 + 4 * 5, 4, 1)]);
    assert_eq!(bench.fired(B), [(5, 1)]);
    // Bit 0 of the word alone rings; two words in one store ring two.
    run(&bench, B, &[W(0x40, 8, ONES), W(0x48, 8, 0)]);
    run(
        &bench,
        A,
        &[
            W(0x100, 4, 2),
            W(0x101, 1, 1),
            W(0x100, 8, 1 << 32 | 1),
            W(0x17C, 1, 1),
        ],
    );
    assert_eq!(bench.fired(B), [(0, 1), (1, 1), (31, 1)]);
    run(&bench, B, &[R(0x40, 8, 0x8000_0003)]);
    // Vectors are chosen by byte.
    run(&bench, B, &[W(0x50 + 7, 1, 0), W(0x50 + 8, 1, 0)]);
    run(&bench, A, &[W(0x100 + 28, 8, 1 << 32 | 1)]);
    assert_eq!(bench.fired(B), [(0, 2)]);
    assert_eq!(bench.fired(A), []);
    // A function that is not bus master sends no interrupts.
    bench.port(B).config_write(0x04, &2u16.to_le_bytes());
    run(&bench, A, &[W(0x100 + 36, 4, 1)]);
    assert_eq!(bench.fired(B), []);
    run(&bench, B, &[R(0x40, 8, 0x8000_0383)]);
}

#[test]
fn gen4_scratchpads_are_live_both_ways() {
    let bench = up_gen4("intel-spr", 0x0200, 0x4200);
    for n in 0..16u32 {
        run(&bench, A, &[W(0x8080 + 4 * n, 4, 0xA0 + u64::from(n))]);
        run(&bench, B, &[W(0x8080 + 4 * n, 4, 0xB0 + u64::from(n))]);
    }
    for n in 0..16u32 {
        let n64 = u64::from(n);
        run(
            &bench,
            A,
            &[R(0x80 + 4 * n, 4, 0xB0 + n64), R(0x8080 + 4 * n, 4, 0xA0 + n64)],
        );
        run(&bench, B, &[R(0x80 + 4 * n, 4, 0xA0 + n64)]);
    }
    run(
        &bench,
        B,
        &[
            W(0x80, 4, 0xFFFF_FFFF),
            W(0x85, 1, 0x77),
            R(0x80, 8, 0x0000_77A1_FFFF_FFFF),
        ],
    );
    run(
        &bench,
        A,
        &[R(0x8080, 8, 0x0000_77A1_FFFF_FFFF), W(0x80BE, 2, 0x1234)],
    );
    assert_eq!(bench.pair.snapshot().a.reserved_accesses, 0);
    run(&bench, A, &[W(0x80C0, 4, 1), R(0x80C0, 4, 0)]);
    assert_eq!(bench.pair.snapshot().a.reserved_accesses, 2);
}

#[test]
fn gen4_windows_translate_as_an_iommu_would() {
    let bench = up_gen4("intel-spr", 0x0200, 0x4200);
    let region = bench.memory(B, 0x1234_5000, 0x2000);
    let base = bar_at(B, 2);
    let store = |at: u64, value: u8| bench.port(A).bar_write(2, at, &[value; 8]);
    let load = |at: u64| {
        let mut out = [0; 8];
        bench.port(A).bar_read(2, at, &mut out);
        out
    };
    store(0, 1); // closed: nothing is set
    run(
        &bench,
        B,
        &[
            W(0x10, 8, 0x1234_5000),
            W(0x18, 8, base + 0x3000),
            R(0x10, 8, 0x1234_5000),
        ],
    );
    store(0x8, 2);
    assert_eq!((byte(&region, 0), byte(&region, 8)), (0, 2));
    assert_eq!(load(8), [2; 8]);
    // Inside the limit, beyond what is mapped: the fault is the receiver's.
    store(0x2000, 3);
    assert_eq!(load(0x2000), [0xFF; 8]);
    // Beyond the limit, and across it.
    store(0x3000, 4);
    run(&bench, B, &[W(0x18, 8, base + 0x1004)]);
    store(0x1000, 5);
    assert_eq!(byte(&region, 0x1003), 5);
    assert_eq!(byte(&region, 0x1004), 0, "the limit cuts a store");
    assert_eq!(load(0x1000), [5, 5, 5, 5, 0xFF, 0xFF, 0xFF, 0xFF]);
    let s = bench.pair.snapshot();
    assert_eq!(s.a_to_b.fault_unmapped, 2);
    assert_eq!(s.a_to_b.outside_window, 4);
    assert_eq!((s.a_to_b.window_writes, s.a_to_b.window_reads), (5, 3));
    // Limit at or below the base: closed. Far above: the whole window.
    for closed in [base, base - 1, 0] {
        run(&bench, B, &[W(0x18, 8, closed)]);
        store(0x10, 9);
        assert_eq!(byte(&region, 0x10), 0, "limit {closed:#x}");
    }
    run(&bench, B, &[W(0x18, 8, 0x2000_0000_0000_0000)]);
    store(0x10, 9);
    assert_eq!(byte(&region, 0x10), 9);
    // The other window is another one; the other direction is closed.
    bench.port(A).bar_write(4, 0x20, &[7]);
    bench.port(B).bar_write(2, 0x20, &[7]);
    assert_eq!(byte(&region, 0x20), 0);
    run(
        &bench,
        B,
        &[W(0x20, 8, 0x1234_6000), W(0x28, 8, bar_at(B, 4) + 0x1000)],
    );
    bench.port(A).bar_write(4, 0x20, &[7]);
    assert_eq!(byte(&region, 0x1020), 7);
    // Not bus master: nothing goes in. Not mapped any more: nothing goes in.
    bench.port(B).config_write(0x04, &2u16.to_le_bytes());
    store(0x30, 8);
    bench.port(B).config_write(0x04, &6u16.to_le_bytes());
    bench.port(B).dma_unmap_all();
    store(0x38, 8);
    assert_eq!((byte(&region, 0x30), byte(&region, 0x38)), (0, 0));
    let s = bench.pair.snapshot();
    assert_eq!(s.a_to_b.not_master, 1);
    assert_eq!(s.a_to_b.fault_unmapped, 3);
}

#[test]
fn icx_windows_want_index_and_alignment() {
    let bench = up_gen4("intel-icx", 0x0200, 0x1200);
    let region = bench.memory(B, 0x4000_0000, 0x10_0000);
    run(
        &bench,
        B,
        &[W(0x10, 8, 0x4000_1000), W(0x18, 8, bar_at(B, 2) + 0x10_0000)],
    );
    bench.port(A).bar_write(2, 0, &[1]);
    assert_eq!(byte(&region, 0), 0, "open without an index");
    run(&bench, B, &[W(0x74, 2, 20), R(0x74, 2, 20)]);
    bench.port(A).bar_write(2, 0, &[1]);
    // Lower bits of a translation that is not aligned are not there.
    assert_eq!((byte(&region, 0), byte(&region, 0x1000)), (1, 0));
    run(
        &bench,
        B,
        &[
            W(0x10, 8, 0),
            W(0x18, 8, bar_at(B, 2)),
            W(0x74, 2, 0xFFFF),
            R(0x74, 2, 0xFFFF),
        ],
    );
    bench.port(A).bar_write(2, 1, &[1]);
    assert_eq!(byte(&region, 1), 0);
}

#[test]
fn function_reset_clears_and_is_seen() {
    for by_config in [false, true] {
        let bench = up_gen4("intel-spr", 0x0200, 0x4200);
        run(
            &bench,
            A,
            &[W(0x80, 4, 5), W(0x10, 8, 0x1000), W(0x18, 8, 0x1000)],
        );
        run(&bench, B, &[W(0x100, 4, 1)]);
        let placed = [0x10, 0x18, 0x20].map(|bar| bench.cfg(A, bar, 4));
        assert!(placed.iter().any(|bar| bar & !0xF != 0), "no BAR was placed");
        if by_config {
            let control = bench.cfg(A, 0x48, 2) as u16;
            bench
                .port(A)
                .config_write(0x48, &(control | 1 << 15).to_le_bytes());
        } else {
            bench.port(A).reset(Actor::Client);
        }
        assert_eq!(bench.cfg(A, 4, 2), 0);
        // A client that answers reads of BARs itself would not put them back.
        assert_eq!([0x10, 0x18, 0x20].map(|bar| bench.cfg(A, bar, 4)), placed);
        assert_eq!(bench.r(A, 0x80, 4), 0xFFFF_FFFF, "memory decoding survived");
        bench.port(A).config_write(0x04, &6u16.to_le_bytes());
        run(
            &bench,
            A,
            &[
                R(0x80, 4, 0),
                R(0x10, 8, 0),
                R(0x18, 8, 0),
                R(0x48, 8, 0),
                R(0x50, 1, 1),
                R(0xB052, 2, 0),
                R(0xB4C0, 4, 0x200),
            ],
        );
        assert_eq!(bench.fired(B), [(32, 1)]);
        run(&bench, B, &[R(0xB052, 2, 0)]);
    }
}

#[test]
fn low_power_and_memory_decoding_off_answer_ones() {
    let bench = up_gen4("intel-spr", 0x0200, 0x4200);
    bench.port(A).config_write(0xE4, &3u16.to_le_bytes());
    assert_eq!(bench.r(A, 0xB4C0, 4), 0xFFFF_FFFF);
    assert_eq!(bench.cfg(A, 0, 2), 0x8086, "configuration space answers in D3");
    bench.port(A).config_write(0xE4, &0u16.to_le_bytes());
    assert_eq!(bench.r(A, 0xB4C0, 4), 0x200);
    bench.port(A).config_write(0x04, &4u16.to_le_bytes());
    assert_eq!(bench.r(A, 0xB4C0, 4), 0xFFFF_FFFF);
    assert_eq!(bench.pair.snapshot().a.unanswered, 2);
}

#[test]
fn removed_functions_answer_ones() {
    let bench = up_gen4("intel-spr", 0x0200, 0x4200);
    bench.pair.act(Action::Remove(A));
    assert_eq!(bench.cfg(A, 0, 4), 0xFFFF_FFFF);
    assert_eq!(bench.r(A, 0xB052, 2), 0xFFFF);
    assert_eq!(bench.fired(B), [(32, 1)]);
    run(&bench, B, &[R(0xB052, 2, 0)]);
    bench.pair.act(Action::Return(A));
    assert_eq!(bench.cfg(A, 0, 2), 0x8086);
    assert_eq!(bench.cfg(A, 0x10, 8), 0xC, "as after power-on");
}

#[test]
fn gen3_probe_link_and_windows() {
    let bench = Bench::new("intel-skx");
    for (side, ppd) in [(A, 0x01), (B, 0x11)] {
        assert_eq!(bench.cfg(side, 0xD4, 1), ppd);
        assert_eq!(bench.cfg(side, 0xD0, 4), 0x1414_1414);
        assert_eq!(bench.cfg(side, 0x1A2, 2), 0);
        let mut steps = vec![
            W(0x18, 8, 0x2000_0000_0000_0000),
            R(0x18, 8, 0x2000_0000_0000_0000),
            W(0x28, 8, 0x4000_0000_0000_0000),
            W(0x10, 8, 0),
            W(0x20, 8, 0),
            W(0x4504, 2, 6),
            R(0x4504, 2, 6),
            W(0x48, 8, 0x7FFF_FFFF),
        ];
        for n in 0..33u32 {
            steps.push(R(0xD0 + n, 1, if n < 32 { u64::from(n) + 1 } else { 0 }));
            steps.push(W(0xD0 + n, 1, n.into()));
        }
        steps.push(W(0xD0 + 32, 1, 31)); // vector 32 is bad
        steps.push(W(0x40, 8, 1 << 32 | 1 << 31));
        run(&bench, side, &steps);
    }
    for side in SideId::BOTH {
        let control = bench.r(side, 0, 4);
        assert_eq!(control & 2, 2, "link disabled after reset");
        bench.w(side, 0, 4, control & !3 | 0x154);
    }
    for side in SideId::BOTH {
        assert_eq!(bench.fired(side), [(31, 1)]);
        run(
            &bench,
            side,
            &[R(0x40, 8, 1 << 32), W(0x40, 8, 3 << 31), R(0x40, 8, 0)],
        );
        assert_eq!(bench.cfg(side, 0x1A2, 2), 0x2083);
    }
    // Scratchpads and doorbells.
    run(&bench, A, &[W(0x180 + 60, 4, 9), W(0x100 + 4 * 30, 4, 1)]);
    run(
        &bench,
        B,
        &[R(0x80 + 60, 4, 9), R(0x40, 8, 1 << 30), W(0x48, 8, 0)],
    );
    assert_eq!(bench.fired(B), [(30, 1)]);
    // A window needs both limits.
    let region = bench.memory(B, 0x4000_0000, 0x10_0000);
    run(
        &bench,
        B,
        &[W(0x10, 8, 0x4000_0000), W(0x18, 8, bar_at(B, 2) + 0x10_0000)],
    );
    bench.port(A).bar_write(2, 0, &[1]);
    assert_eq!(byte(&region, 0), 0, "open without the external limit");
    assert_eq!(bench.r(B, 0x70, 2), 1, "misses are counted");
    let external = bench.r(B, 0x4518, 8) & !0xF;
    run(&bench, B, &[W(0x4018, 8, external + 0x10_0000)]);
    bench.port(A).bar_write(2, 0, &[1]);
    assert_eq!(byte(&region, 0), 1);
    // Vector 32 raises nothing.
    run(&bench, B, &[W(0xD0 + 32, 1, 32)]);
    bench.pair.act(Action::LinkDown);
    assert_eq!(bench.fired(B), []);
    assert_eq!(bench.fired(A), [(31, 1)]);
}

#[test]
fn amd_probe_and_traffic() {
    let bench = Bench::new("amd");
    for (side, info) in [(A, 0), (B, 1)] {
        run(
            &bench,
            side,
            &[
                R(0x408, 4, info),
                W(0x470, 4, 0x7F),
                W(0x45C, 2, 0x7FFF),
                R(0x45C, 2, 0x7FFF),
                W(0x470, 4, 0x1F),
                W(0x408, 4, info | 2),
                R(0x408, 4, info | 2),
                W(0x200, 4, 0x30_0000),
                R(0x200, 4, 0x30_0000),
            ],
        );
    }
    // The side is not for software to choose; the peer's block is live.
    run(&bench, A, &[W(0x408, 4, 3), R(0x408, 4, 2), R(0x808, 4, 3)]);
    run(&bench, B, &[R(0x808, 4, 2), W(0x808, 4, 0), R(0x808, 4, 0)]);
    run(&bench, A, &[R(0x408, 4, 0), W(0x408, 4, 2)]);
    assert_eq!(bench.cfg(A, 0x64 + 0x10, 4) >> 16 & 0x3FF, 16 << 4 | 4);
    // One set of scratchpads.
    for n in 0..16u32 {
        let writer = if n % 2 == 0 { A } else { B };
        run(&bench, writer, &[W(0x210 + 4 * n, 4, 0x50 + u64::from(n))]);
        for side in SideId::BOTH {
            run(&bench, side, &[R(0x210 + 4 * n, 4, 0x50 + u64::from(n))]);
        }
    }
    // Doorbells: 15 goes through the mask that probe leaves.
    run(
        &bench,
        A,
        &[W(0x454, 2, 0x8001), R(0x454, 2, 0), R(0x458, 2, 0x8001)],
    );
    assert_eq!(bench.fired(B), [(15, 1)]);
    run(
        &bench,
        B,
        &[R(0x460, 2, 0x8001), W(0x460, 2, 0x8000), R(0x460, 2, 1)],
    );
    run(&bench, B, &[W(0x45C, 2, 0x7FFE)]);
    assert_eq!(bench.fired(B), [(0, 1)]);
    run(&bench, A, &[R(0x460, 2, 0)]);
    // Windows: programmed in the peer's block, a length, closed by zero.
    let region = bench.memory(B, 0x7000_0000, 0x1000);
    bench.port(A).bar_write(4, 8, &[1]);
    run(
        &bench,
        B,
        &[
            W(0x840, 8, 0x7000_0000),
            R(0x840, 8, 0x7000_0000),
            W(0x820, 8, 0x800),
            R(0x820, 8, 0x800),
        ],
    );
    run(&bench, A, &[R(0x440, 8, 0x7000_0000), R(0x420, 8, 0x800)]);
    bench.port(A).bar_write(4, 16, &[2]);
    bench.port(A).bar_write(4, 0x800, &[3]);
    assert_eq!(
        (byte(&region, 8), byte(&region, 16), byte(&region, 0x800)),
        (0, 2, 0)
    );
    run(&bench, B, &[W(0x840, 8, 0), W(0x820, 8, 0)]);
    bench.port(A).bar_write(4, 24, &[2]);
    assert_eq!(byte(&region, 24), 0);
    // Events, one at a time: the cable.
    bench.pair.act(Action::LinkDown);
    assert_eq!(bench.fired(A), [(16, 1)]);
    run(&bench, A, &[R(0x474, 4, 1 << 6), R(0x808, 4, 0xFFFF_FFFF)]);
    run(&bench, A, &[W(0x474, 4, 1 << 6), R(0x474, 4, 0)]);
    bench.pair.act(Action::LinkUp);
    assert_eq!(bench.fired(A), [(16, 1)]);
    run(&bench, A, &[R(0x474, 4, 1 << 5), W(0x474, 4, 1 << 5)]);
    // A peer that is reset while it was ready: an event, and its ready bit is gone.
    let _ = bench.fired(B);
    bench.port(B).reset(Actor::Client);
    assert_eq!(bench.fired(A), [], "masked as probe leaves it");
    run(&bench, A, &[W(0x470, 4, 0)]); // link enable
    assert_eq!(bench.fired(A), [(16, 1)]);
    run(&bench, A, &[R(0x474, 4, 1 << 1), R(0x808, 4, 1)]);
    assert_eq!(bench.pair.snapshot().a.reserved_accesses, 0);
}

#[test]
fn amd_stores_that_a_lost_write_misleads_are_counted_apart() {
    let bench = Bench::new("amd");
    let faults = || {
        let s = bench.pair.snapshot().a_to_b;
        (s.fault_unmapped, s.fault_misled)
    };
    let lose = |count| bench.pair.act(Action::LoseRegisters { from: B, count });
    let blank = |count| bench.pair.act(Action::BlankRegisters { from: B, count });
    let store = || bench.port(A).bar_write(2, 0, &[1; 8]);
    // B opens window 0 to memory that it has not mapped: its own fault.
    run(&bench, B, &[W(0x838, 8, 0x7000_0000), W(0x818, 8, 0x1000)]);
    store();
    assert_eq!(faults(), (1, 0));
    // What was lost are other registers, or the other window's: still its own.
    lose(2);
    run(&bench, B, &[W(0x230, 4, 5), W(0x840, 8, 0x7000_0000)]);
    store();
    assert_eq!(faults(), (2, 0));
    // The write that closes it is lost, or arrives as ones, in whole or in part: not its fault.
    for disturb in [&lose as &dyn Fn(u64), &blank] {
        for (at, width) in [(0x838, 8), (0x83C, 4), (0x818, 8)] {
            let before = faults();
            disturb(1);
            run(&bench, B, &[W(at, width, 0)]);
            store();
            assert_eq!(faults(), (before.0, before.1 + 1), "{at:#x}");
            // Until it is written again.
            run(&bench, B, &[W(0x838, 8, 0x7000_0000), W(0x818, 8, 0x1000)]);
            store();
            assert_eq!(faults(), (before.0 + 1, before.1 + 1), "{at:#x}");
        }
    }
    // A write that arrives late is on its way, not lost; and what was altered stays so until another arrives.
    let delay = |from, ms| {
        let time = std::time::Duration::from_millis(ms);
        bench.pair.act(Action::Delay { from, time });
    };
    let (own, misled) = faults();
    delay(B, 30_000);
    blank(1);
    run(&bench, B, &[W(0x838, 8, 0)]);
    store();
    assert_eq!(faults(), (own + 1, misled));
    run(&bench, B, &[R(0x838, 8, 0xFFFF_FFFF_FFFF_FFFF)]);
    store();
    assert_eq!(faults(), (own + 1, misled + 1));
    delay(B, 0);
    // All that is sent while the direction is dead is lost; a reset puts the registers right.
    run(&bench, B, &[W(0x838, 8, 0x7000_0000)]);
    bench.pair.act(Action::Dead { from: B, dead: true });
    run(&bench, B, &[W(0x838, 8, 0)]);
    bench.pair.act(Action::Dead { from: B, dead: false });
    store();
    assert_eq!(faults(), (own + 1, misled + 2));
    bench.port(A).reset(Actor::Client);
    bench.port(A).config_write(0x04, &6u16.to_le_bytes());
    run(&bench, B, &[W(0x838, 8, 0x7000_0000), W(0x818, 8, 0x1000)]);
    store();
    assert_eq!(faults(), (own + 2, misled + 2));
}

#[test]
fn epf_commands_and_traffic() {
    let bench = Bench::new("epf");
    let command = |side, argument: u64, command: u64| {
        run(&bench, side, &[W(4, 4, argument), W(0, 4, command)]);
        let status = bench.r(side, 8, 2);
        run(&bench, side, &[R(0, 8, 0), W(8, 2, 0), R(8, 2, 0)]);
        status
    };
    assert_eq!(bench.cfg(A, 9, 3), 0x05_0000);
    run(
        &bench,
        A,
        &[
            R(0x20, 4, 1),
            R(0x2C, 4, 16),
            R(0x30, 4, 4),
            R(0x34, 4, 1),
            R(0x34 + 124, 4, 32),
        ],
    );
    for side in SideId::BOTH {
        assert_eq!(command(side, 32 | 0x1_0000, 1), 1);
    }
    assert_eq!(command(A, 33 | 0x1_0000, 1), 2, "more vectors than there are");
    assert_eq!(command(A, 0, 9), 2, "no such command");
    // The link needs both; both hear of it.
    assert_eq!(command(A, 0, 5), 1);
    assert_eq!((bench.fired(A), bench.r(A, 0xA, 2)), (vec![], 0));
    assert_eq!(command(B, 0, 5), 1);
    for side in SideId::BOTH {
        assert_eq!((bench.fired(side), bench.r(side, 0xA, 2)), (vec![(0, 1)], 1));
    }
    assert_eq!(command(B, 0, 6), 1);
    assert_eq!(command(B, 0, 5), 1);
    assert_eq!(bench.fired(A), [(0, 2)]);
    let _ = bench.fired(B);
    // Scratchpads, cross-wired.
    let own = bench.r(A, 0x28, 4) as u32;
    run(&bench, A, &[W(own + 64, 4, 7), R(own + 64, 4, 7), R(own, 4, 0)]);
    run(&bench, B, &[R(own, 4, 7), W(own + 64 + 60, 4, 8)]);
    run(&bench, A, &[R(own + 60, 4, 8)]);
    // Doorbell 0 is slot 2.
    bench.port(A).bar_write(2, 8, &3u32.to_le_bytes());
    assert_eq!(bench.fired(B), [(2, 1)]);
    // A window by command.
    let region = bench.memory(B, 0x5000_0000, 0x1000);
    let window = |size: u64, index: u64| {
        run(&bench, B, &[W(0x10, 8, 0x5000_0000), W(0x18, 8, size)]);
        command(B, index, 3)
    };
    assert_eq!(window(0x1000, 1), 2, "no such window");
    assert_eq!(window(0x20_0000, 0), 2, "larger than the BAR");
    bench.port(A).bar_write(4, 0, &[1]);
    assert_eq!(window(0x800, 0), 1);
    bench.port(A).bar_write(4, 8, &[2]);
    bench.port(A).bar_write(4, 0x800, &[3]);
    assert_eq!(
        (byte(&region, 0), byte(&region, 8), byte(&region, 0x800)),
        (0, 2, 0)
    );
    assert_eq!(command(B, 0, 4), 1);
    bench.port(A).bar_write(4, 16, &[2]);
    assert_eq!(byte(&region, 16), 0);
    assert_eq!(bench.pair.snapshot().a.reserved_accesses, 0);
}

#[test]
fn every_named_register_is_there_and_nothing_else() {
    let cases: [(&str, &RegMap); 6] = [
        ("intel-spr", &intel_gen4::MAP),
        ("intel-icx", &intel_gen4::MAP),
        ("intel-gnr", &intel_gen4::MAP),
        ("intel-skx", &intel_gen3::MAP),
        ("amd", &amd::MAP),
        ("epf", &epf::MAP),
    ];
    for (name, map) in cases {
        let bench = Bench::new(name);
        let reserved = || bench.pair.snapshot().a.reserved_accesses;
        for reg in map.regs {
            for n in 0..reg.count {
                let _ = bench.r(A, reg.offset + n * reg.step, reg.width as usize);
            }
        }
        assert_eq!(reserved(), 0, "{name}");
        // The last byte of a gap: MSI-X tables lie in the middle of some.
        for (i, gap) in map.gaps.iter().enumerate() {
            let _ = bench.r(A, gap.end - 1, 1);
            assert_eq!(reserved(), i as u64 + 1, "{name}: {gap:x?}");
        }
    }
}
