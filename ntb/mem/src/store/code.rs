//! The machine code of the store routines, for instructions that this processor may not have: they are read back from the
//! running program, function by function, by its own symbol table.

use std::fs;

use super::{Width, combined, combined64, direct, drain};
use crate::line::Line;

#[inline(never)]
unsafe fn stores_directly(dst: *mut u64, line: &Line) {
    // SAFETY: never called.
    unsafe { direct(dst, line) }
}

#[inline(never)]
unsafe fn streams_words(dst: *mut u64, line: &Line) {
    // SAFETY: never called.
    unsafe { combined(dst, line, Width::Bytes8) }
}

#[inline(never)]
fn drains() {
    drain();
}

/// `N` bytes of a file at a place.
fn at<const N: usize>(file: &[u8], offset: u64) -> [u8; N] {
    let offset = usize::try_from(offset).unwrap();
    file[offset..offset + N].try_into().unwrap()
}

/// Code of the function at an address of this program. ELF-64: see `elf(5)`.
fn code(function: usize) -> Vec<u8> {
    const SYMBOLS: u32 = 2;
    const LOADED: u32 = 1;
    let exe = fs::read_link("/proc/self/exe").unwrap();
    let file = fs::read(&exe).unwrap();
    let (u16, u32, u64) = (
        |o| u64::from(u16::from_le_bytes(at(&file, o))),
        |o| u32::from_le_bytes(at(&file, o)),
        |o| u64::from_le_bytes(at(&file, o)),
    );
    let segments: Vec<_> = (0..u16(0x38))
        .map(|i| u64(0x20) + i * u16(0x36))
        .filter(|at| u32(*at) == LOADED)
        .map(|at| (u64(at + 0x08), u64(at + 0x10), u64(at + 0x20))) // file, memory, bytes
        .collect();
    // Where it was loaded: its first mapping holds its first segment.
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let first = maps.lines().find(|l| l.ends_with(exe.to_str().unwrap())).unwrap();
    let start = u64::from_str_radix(first.split_once('-').unwrap().0, 16).unwrap();
    let wanted = function as u64 - (start - (segments[0].1 & !0xFFF));
    let tables = (0..u16(0x3C))
        .map(|i| u64(0x28) + i * u16(0x3A))
        .filter(|at| u32(at + 4) == SYMBOLS);
    for table in tables {
        let (from, bytes) = (u64(table + 0x18), u64(table + 0x20));
        for symbol in (from..from + bytes).step_by(24) {
            let (value, size) = (u64(symbol + 8), u64(symbol + 16));
            if value == wanted && size > 0 {
                let (in_file, in_memory, _) = segments
                    .iter()
                    .find(|(_, memory, bytes)| (*memory..memory + bytes).contains(&value))
                    .unwrap();
                let place = (in_file + value - in_memory) as usize;
                return file[place..place + size as usize].to_vec();
            }
        }
    }
    panic!("the program has no symbol at {wanted:#x}: was it stripped?");
}

/// How often a run of bytes occurs; `None` stands for any byte.
fn count(code: &[u8], pattern: &[Option<u8>]) -> usize {
    code.windows(pattern.len())
        .filter(|w| w.iter().zip(pattern).all(|(b, p)| p.is_none_or(|p| p == *b)))
        .count()
}

/// Encodings: Intel SDM volume 2.
#[test]
fn each_routine_is_the_instruction_it_is_named_for() {
    let bytes = |b: &[u8]| b.iter().copied().map(Some).collect::<Vec<_>>();
    // movdir64b rax, [rdx].
    let direct = code(stores_directly as *const () as usize);
    assert_eq!(
        count(&direct, &bytes(&[0x66, 0x0F, 0x38, 0xF8, 0x02])),
        1,
        "{direct:02x?}"
    );
    // vmovntdq [register], zmm: EVEX, 512 bits, opcode E7; and its load vmovdqa64, opcode 6F.
    let combined = code(combined64 as *const () as usize);
    let evex = |pp: u8, opcode: u8| [Some(0x62), None, Some(pp), Some(0x48), Some(opcode)];
    assert_eq!(count(&combined, &evex(0x7D, 0xE7)), 1, "{combined:02x?}");
    assert_eq!(count(&combined, &evex(0xFD, 0x6F)), 1, "{combined:02x?}");
    // movnti [register], 64-bit register: eight, and no vector store among them.
    let words = code(streams_words as *const () as usize);
    let movnti: usize = (0x48..=0x4D)
        .map(|rex| count(&words, &bytes(&[rex, 0x0F, 0xC3])))
        .sum();
    assert!(movnti == 8 || movnti == 1, "{movnti}: {words:02x?}"); // 1 where the loop is not unrolled
    assert_eq!(count(&words, &evex(0x7D, 0xE7)), 0);
    // sfence.
    let drain = code(drains as *const () as usize);
    assert_eq!(count(&drain, &bytes(&[0x0F, 0xAE, 0xF8])), 1, "{drain:02x?}");
}
