//! How a line reaches memory, one routine per memory type.
//!
//! | routine | for | order it gives |
//! | --- | --- | --- |
//! | [`write_back`] | coherent memory of this machine | words 0 to 6, then word 7 with release |
//! | [`combined`] | write-combining windows | none between lines until [`drain`]; a whole line leaves as one write where a buffer is not evicted early |
//! | [`direct`] | windows, on processors with `movdir64b` | the line is one write, never split; none between lines until [`drain`] |
//! | [`uncached8`] | uncached windows | eight 8-byte writes, ascending |
//!
//! Every store is naturally aligned and of fixed width (8, 16, 32 or 64 bytes); no library copy routine
//! touches the destination.

#![allow(
    unsafe_code,
    reason = "stores through raw pointers to memory that another party reads or writes"
)]

use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};

use crate::line::{LINE_WORDS, Line};

/// Stores a line to write-back memory: the first seven words in any order, then the last with release.
///
/// Pairs with a reader's acquire load of word 7: who sees the new word 7 sees the other seven.
///
/// # Safety
/// `dst` points to 64 mapped, writable bytes, aligned to 64, to which no Rust reference exists.
#[inline(always)]
pub unsafe fn write_back(dst: *mut u64, line: &Line) {
    for i in 0..LINE_WORDS - 1 {
        // SAFETY: i < 8 and the caller vouches for 64 aligned bytes.
        unsafe { AtomicU64::from_ptr(dst.add(i)) }.store(line.0[i].to_le(), Ordering::Relaxed);
    }
    // SAFETY: as above.
    unsafe { AtomicU64::from_ptr(dst.add(LINE_WORDS - 1)) }
        .store(line.0[LINE_WORDS - 1].to_le(), Ordering::Release);
}

/// Stores a line to an uncached window as eight 8-byte writes, in ascending order.
///
/// # Safety
/// As for [`write_back`].
#[inline(always)]
pub unsafe fn uncached8(dst: *mut u64, line: &Line) {
    for i in 0..LINE_WORDS {
        // SAFETY: i < 8 and the caller vouches for 64 aligned bytes; volatile, since each store is a bus write.
        unsafe { dst.add(i).write_volatile(line.0[i].to_le()) };
    }
}

/// Stores a line to write-combining memory with the widest streaming stores that `wide` allows.
///
/// The line may sit in a combining buffer until [`drain`].
///
/// # Safety
/// As for [`write_back`]; and the processor has the features that `wide` names.
#[inline(always)]
pub unsafe fn combined(dst: *mut u64, line: &Line, wide: Width) {
    match wide {
        #[cfg(target_arch = "x86_64")]
        Width::Bytes64 => {
            // SAFETY: the caller vouches for the destination and for AVX-512F.
            unsafe { combined64(dst, line) };
        }
        #[cfg(target_arch = "x86_64")]
        Width::Bytes8 => {
            for i in 0..LINE_WORDS {
                // SAFETY: i < 8 and the caller vouches for 64 aligned bytes; `movnti` is part of x86-64.
                unsafe {
                    std::arch::asm!(
                        "movnti [{dst}], {word}",
                        dst = in(reg) dst.add(i),
                        word = in(reg) line.0[i],
                        options(nostack, preserves_flags)
                    );
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        // SAFETY: the caller's promises are those of `uncached8`.
        _ => unsafe { uncached8(dst, line) },
    }
}

/// # Safety
/// As for [`combined`] with [`Width::Bytes64`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn combined64(dst: *mut u64, line: &Line) {
    // SAFETY: `Line` is 64-byte aligned, and the caller vouches for the destination. Spelt out, so that a line is one store
    // whatever the compiler thinks of.
    unsafe {
        std::arch::asm!(
            "vmovdqa64 {line}, [{src}]",
            "vmovntdq [{dst}], {line}",
            line = out(zmm_reg) _,
            src = in(reg) line.0.as_ptr(),
            dst = in(reg) dst,
            options(nostack, preserves_flags)
        );
    }
}

/// Stores a line as one 64-byte direct store (`movdir64b`).
///
/// # Safety
/// As for [`write_back`]; and the processor has `movdir64b` ([`crate::cpu::CpuFeatures`]).
#[inline(always)]
pub unsafe fn direct(dst: *mut u64, line: &Line) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller vouches for the destination and the feature. The instruction is spelt in bytes,
    // since assemblers older than it are still in use: movdir64b rax, [rdx].
    unsafe {
        std::arch::asm!(
            ".byte 0x66, 0x0f, 0x38, 0xf8, 0x02",
            in("rax") dst,
            in("rdx") line.0.as_ptr(),
            options(nostack, preserves_flags)
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller's promises are those of `uncached8`.
    unsafe {
        uncached8(dst, line);
    }
}

/// Width of the streaming stores that [`combined`] uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// One AVX-512 store a line: fills a combining buffer at once.
    Bytes64,
    /// Eight `movnti` a line: any x86-64 processor.
    Bytes8,
}

impl Width {
    /// The widest that `cpu` has.
    pub fn widest(cpu: crate::cpu::CpuFeatures) -> Self {
        if cpu.avx512f { Self::Bytes64 } else { Self::Bytes8 }
    }
}

/// Copies `lines` times 64 bytes with loads and stores of 16 bytes, ascending: for bulk into and out of write-back memory
/// that another process maps. Each byte is loaded once and stored once; nothing is promised about the order that others
/// see before [`order_write_back`].
///
/// # Safety
/// Both ranges are mapped, `dst` is writable, they do not overlap, and whichever of them another party may change is
/// reached by no Rust reference.
#[inline]
pub unsafe fn copy_lines(dst: *mut u8, src: *const u8, lines: usize) {
    if lines == 0 {
        return;
    }
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller vouches for both ranges; the loop touches `lines` times 64 bytes of each. Unaligned moves are
    // used, so that alignment is a matter of speed (and of stores being whole, when `dst` is aligned to 16).
    unsafe {
        std::arch::asm!(
            "2:",
            "movups {a}, [{src}]",
            "movups {b}, [{src} + 16]",
            "movups {c}, [{src} + 32]",
            "movups {d}, [{src} + 48]",
            "movups [{dst}], {a}",
            "movups [{dst} + 16], {b}",
            "movups [{dst} + 32], {c}",
            "movups [{dst} + 48], {d}",
            "add {src}, 64",
            "add {dst}, 64",
            "dec {n}",
            "jnz 2b",
            src = inout(reg) src => _,
            dst = inout(reg) dst => _,
            n = inout(reg) lines => _,
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            options(nostack)
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    for i in 0..lines * crate::line::LINE_BYTES {
        // SAFETY: in range by the caller's promise; volatile, since another party may change or read the memory.
        unsafe { dst.add(i).write_volatile(src.add(i).read_volatile()) };
    }
}

/// Copies `len` bytes, at most 48, by few wide moves that may overlap: each byte is loaded and stored once or
/// twice, in no order.
///
/// # Safety
/// `dst` points to `len` mapped, writable bytes and `src` to as many readable ones; no Rust reference exists to the one
/// that another party stores into or reads.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub unsafe fn copy_small(dst: *mut u8, src: *const u8, len: usize) {
    debug_assert!(len <= 48, "more than a small message");
    if len == 48 {
        // The most common one, with nothing to compute from the length.
        // SAFETY: as the caller says, 48 bytes at each; see `copy_16`.
        unsafe {
            std::arch::asm!(
                "movups {a}, [{src}]",
                "movups {b}, [{src} + 16]",
                "movups {c}, [{src} + 32]",
                "movups [{dst}], {a}",
                "movups [{dst} + 16], {b}",
                "movups [{dst} + 32], {c}",
                src = in(reg) src,
                dst = in(reg) dst,
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                c = out(xmm_reg) _,
                options(nostack, preserves_flags)
            );
        }
        return;
    }
    if len < 16 {
        // SAFETY: as the caller says.
        unsafe { copy_below_16(dst, src, len) };
        return;
    }
    // SAFETY: every move lies inside the first `len` bytes, of which there are at least 16.
    unsafe {
        copy_16(dst, src);
        if len > 32 {
            copy_16(dst.add(16), src.add(16));
        }
        copy_16(dst.add(len - 16), src.add(len - 16));
    }
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn copy_16(dst: *mut u8, src: *const u8) {
    // SAFETY: the caller vouches for 16 bytes at each; the moves are unaligned ones. In assembly, since another party may
    // load or store the same memory meanwhile.
    unsafe {
        std::arch::asm!(
            "movups {a}, [{src}]",
            "movups [{dst}], {a}",
            src = in(reg) src,
            dst = in(reg) dst,
            a = out(xmm_reg) _,
            options(nostack, preserves_flags)
        );
    }
}

#[cfg(target_arch = "x86_64")]
#[inline(never)]
unsafe fn copy_below_16(dst: *mut u8, src: *const u8, len: usize) {
    if len >= 8 {
        for at in [0, len - 8] {
            // SAFETY: both moves lie inside `len` bytes; as above.
            unsafe {
                std::arch::asm!(
                    "mov {a}, [{src}]",
                    "mov [{dst}], {a}",
                    src = in(reg) src.add(at),
                    dst = in(reg) dst.add(at),
                    a = out(reg) _,
                    options(nostack, preserves_flags)
                );
            }
        }
        return;
    }
    for i in 0..len {
        // SAFETY: below `len`; volatile, since another party may change or read the memory.
        unsafe { dst.add(i).write_volatile(src.add(i).read_volatile()) };
    }
}

/// Everything stored before is on its way, and ahead of anything stored after: drains the combining
/// buffers and orders streaming and direct stores (`sfence`).
#[inline(always)]
pub fn drain() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `sfence` has no operands and is part of x86-64.
    unsafe {
        std::arch::asm!("sfence", options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::sync::atomic::fence(Ordering::SeqCst);
}

/// Plain stores before are visible before plain stores after, to whoever reads with acquire
/// (write-back memory only; [`drain`] for the rest).
#[inline(always)]
pub fn order_write_back() {
    std::sync::atomic::fence(Ordering::Release);
    compiler_fence(Ordering::SeqCst);
}

/// Asks for a line in exclusive state, ahead of a store to it (write-back memory; a hint, never a fault).
///
/// # Safety
/// None in practice, since prefetches do not fault; `ptr` should lie in a mapping so that the hint is of use.
#[inline(always)]
pub unsafe fn prefetch_for_store(ptr: *const u64) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: PREFETCHW does not fault and changes no architectural state.
    unsafe {
        std::arch::asm!("prefetchw [{p}]", p = in(reg) ptr, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = ptr;
}

#[cfg(all(test, target_arch = "x86_64"))]
mod code;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cpu::CpuFeatures, waive::waive};

    fn check(store: impl Fn(*mut u64, &Line)) {
        let mut target = [Line([0x5555_5555_5555_5555; 8]); 3];
        let line = Line(std::array::from_fn(|i| 0x0102_0304_0506_0708 * (i as u64 + 1)));
        let base = target.as_mut_ptr().cast::<u64>();
        store(base.wrapping_add(8), &line);
        drain();
        assert_eq!(target[1], line);
        assert_eq!(target[0], Line([0x5555_5555_5555_5555; 8]));
        assert_eq!(target[2], Line([0x5555_5555_5555_5555; 8]));
    }

    #[test]
    fn lines_are_copied_from_and_to_any_alignment_and_no_byte_more() {
        let source: Vec<u8> = (0..64 * 5 + 8).map(|i| (i * 7 + i / 251) as u8).collect();
        for (lines, skew) in [(0, 0), (1, 0), (1, 3), (4, 1), (5, 8)] {
            let mut target = vec![0xee; 64 * 5 + 16];
            let dst = target.as_mut_ptr().wrapping_add(skew);
            let src = source.as_ptr().wrapping_add(8 - skew);
            // SAFETY: both lie in vectors long enough, and no other reference to the target is alive meanwhile.
            unsafe { copy_lines(dst, src, lines) };
            let end = skew + lines * 64;
            assert_eq!(target[skew..end], source[8 - skew..8 - skew + lines * 64]);
            assert!(target[..skew].iter().chain(&target[end..]).all(|b| *b == 0xee));
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn small_copies_take_every_length_and_no_byte_more() {
        let source: Vec<u8> = (1..=64).collect();
        for len in 0..=48 {
            for skew in 0..16 {
                let mut target = [0xee_u8; 80];
                // SAFETY: the first 48 bytes of one and 48 bytes inside the other; both local, no reference in use.
                unsafe { copy_small(target.as_mut_ptr().add(skew), source.as_ptr(), len) };
                assert_eq!(target[skew..skew + len], source[..len]);
                assert!(
                    target[..skew]
                        .iter()
                        .chain(&target[skew + len..])
                        .all(|b| *b == 0xee)
                );
            }
        }
    }

    #[test]
    fn every_routine_stores_exactly_its_line() {
        let cpu = CpuFeatures::detect();
        // SAFETY: the middle element of a local array of lines, no reference alive meanwhile; feature present.
        check(|p, l| unsafe { write_back(p, l) });
        // SAFETY: the middle element of a local array of lines, no reference alive meanwhile; feature present.
        check(|p, l| unsafe { uncached8(p, l) });
        // SAFETY: the middle element of a local array of lines, no reference alive meanwhile; feature present.
        check(|p, l| unsafe { combined(p, l, Width::Bytes8) });
        if cpu.avx512f {
            // SAFETY: the middle element of a local array of lines, no reference alive meanwhile; feature present.
            check(|p, l| unsafe { combined(p, l, Width::Bytes64) });
        } else {
            waive(
                "store-avx512",
                "this processor has no AVX-512: the code is checked, not run",
            );
        }
        if cpu.movdir64b {
            // SAFETY: the middle element of a local array of lines, no reference alive meanwhile; feature present.
            check(|p, l| unsafe { direct(p, l) });
        } else {
            waive(
                "store-movdir64b",
                "this processor has no movdir64b: the code is checked, not run",
            );
        }
    }
}
