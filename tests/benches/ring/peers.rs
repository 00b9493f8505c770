//! The yardsticks: rtrb between two threads, and a hand-off by plain copies.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use ntb_mem::region::{Region, View};

use crate::{
    child::{BATCH, CPUS, pin},
    floor::runs,
};

/// Slots of the rings: as many as keep 64 KiB in flight.
fn slots<const N: usize>() -> usize {
    (1 << 16) / N.next_power_of_two()
}

/// Nanoseconds of a round trip of `N` bytes through two rtrb rings.
pub(crate) fn rtrb_round_trip<const N: usize>(n: u64) -> f64 {
    let (mut there, mut far_in) = rtrb::RingBuffer::<[u8; N]>::new(slots::<N>());
    let (mut far_out, mut back) = rtrb::RingBuffer::<[u8; N]>::new(slots::<N>());
    let far = std::thread::spawn(move || {
        pin(CPUS[1]);
        for _ in 0..n {
            let message = pop(&mut far_in);
            push(&mut far_out, message);
        }
    });
    let mut message = [7; N];
    let ns = runs(n, || {
        push(&mut there, message);
        message = pop(&mut back);
    });
    let _ = far.join();
    std::hint::black_box(message);
    ns
}

/// Nanoseconds a message of `N` bytes one way, one by one.
pub(crate) fn rtrb_single<const N: usize>(n: u64) -> f64 {
    let (mut tx, mut rx) = rtrb::RingBuffer::<[u8; N]>::new(slots::<N>());
    let far = std::thread::spawn(move || {
        pin(CPUS[1]);
        for _ in 0..n {
            std::hint::black_box(pop(&mut rx));
        }
    });
    let message = [7; N];
    let start = Instant::now();
    for _ in 0..n {
        push(&mut tx, std::hint::black_box(message));
    }
    let _ = far.join();
    start.elapsed().as_nanos() as f64 / n as f64
}

/// Nanoseconds a message of `N` bytes one way, in chunks.
pub(crate) fn rtrb_chunks<const N: usize>(n: u64) -> f64 {
    let (mut tx, mut rx) = rtrb::RingBuffer::<[u8; N]>::new(slots::<N>());
    let far = std::thread::spawn(move || {
        pin(CPUS[1]);
        let mut out = [[0; N]; BATCH];
        let mut got = 0;
        while got < n {
            let there = rx.slots().min(BATCH);
            match rx.read_chunk(there) {
                Ok(chunk) if there > 0 => {
                    let (a, b) = chunk.as_slices();
                    out[..a.len()].copy_from_slice(a);
                    out[a.len()..there].copy_from_slice(b);
                    std::hint::black_box(&out);
                    chunk.commit_all();
                    got += there as u64;
                }
                _ => std::hint::spin_loop(),
            }
        }
    });
    let batch = [[7; N]; BATCH];
    let start = Instant::now();
    let mut sent = 0;
    while sent < n {
        let room = tx.slots().min(BATCH).min((n - sent) as usize);
        match tx.write_chunk_uninit(room) {
            Ok(chunk) if room > 0 => {
                chunk.fill_from_iter(std::hint::black_box(&batch)[..room].iter().copied());
                sent += room as u64;
            }
            _ => std::hint::spin_loop(),
        }
    }
    let _ = far.join();
    start.elapsed().as_nanos() as f64 / n as f64
}

fn push<const N: usize>(tx: &mut rtrb::Producer<[u8; N]>, mut message: [u8; N]) {
    while let Err(rtrb::PushError::Full(back)) = tx.push(message) {
        message = back;
        std::hint::spin_loop();
    }
}

fn pop<const N: usize>(rx: &mut rtrb::Consumer<[u8; N]>) -> [u8; N] {
    loop {
        match rx.pop() {
            Ok(message) => return message,
            Err(_) => std::hint::spin_loop(),
        }
    }
}

/// Flags of the copy hand-off: buffers filled, buffers emptied.
fn flags(region: &Arc<Region>) -> Option<(View, View)> {
    let view = region.view();
    Some((view.part(16, 1)?, view.part(48, 1)?))
}

/// Hands `count` buffers of `buf`'s size over by plain copies into the two halves of the shared memory; nanoseconds each.
pub(crate) fn copy_in(region: &Arc<Region>, buf: &[u8], count: u64) -> f64 {
    let Some((filled, emptied)) = flags(region) else {
        return f64::NAN;
    };
    let base = filled.load(0, Ordering::Acquire);
    let start = Instant::now();
    for i in base..base + count {
        while i - emptied.load(0, Ordering::Acquire) >= 2 {
            std::hint::spin_loop();
        }
        plain_copy_in(region, half(i), buf);
        filled.store(0, i + 1, Ordering::Release);
    }
    while emptied.load(0, Ordering::Acquire) != base + count {
        std::hint::spin_loop();
    }
    start.elapsed().as_nanos() as f64 / count as f64
}

/// The other side of [`copy_in`].
pub(crate) fn copy_out(region: &Arc<Region>, buf: &mut [u8], count: u64) {
    let Some((filled, emptied)) = flags(region) else {
        return;
    };
    let base = emptied.load(0, Ordering::Acquire);
    for i in base..base + count {
        while filled.load(0, Ordering::Acquire) == i {
            std::hint::spin_loop();
        }
        plain_copy_out(region, half(i), buf);
        std::hint::black_box(&buf);
        emptied.store(0, i + 1, Ordering::Release);
    }
}

fn half(i: u64) -> usize {
    4096 + ((i % 2) << 20) as usize
}

#[allow(
    unsafe_code,
    reason = "the yardstick is the C library's memcpy, on memory that the protocol keeps still"
)]
fn plain_copy_in(region: &Region, at: usize, buf: &[u8]) {
    assert!(at + buf.len() <= region.bytes() as usize);
    // SAFETY: in bounds by the assertion; the other process does not touch this half before the flag says so.
    unsafe { std::ptr::copy_nonoverlapping(buf.as_ptr(), region.as_ptr().add(at), buf.len()) };
}

#[allow(unsafe_code, reason = "as above")]
fn plain_copy_out(region: &Region, at: usize, buf: &mut [u8]) {
    assert!(at + buf.len() <= region.bytes() as usize);
    // SAFETY: in bounds by the assertion; the other process does not touch this half before the flag says so.
    unsafe { std::ptr::copy_nonoverlapping(region.as_ptr().add(at), buf.as_mut_ptr(), buf.len()) };
}
