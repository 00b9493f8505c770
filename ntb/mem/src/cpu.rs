//! What the processor offers for storing lines. A value, so that tests can inject any processor.

/// Processor features that the choice of a store routine depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct CpuFeatures {
    /// `movdir64b`: one instruction, one 64-byte write, no combining buffer involved.
    pub movdir64b: bool,
    /// AVX-512F: a 64-byte vector store fills a write-combining buffer at once.
    pub avx512f: bool,
    /// AVX: 32-byte vector stores.
    pub avx: bool,
}

/// What CPUID answers to a leaf and sub-leaf: EAX, EBX, ECX, EDX.
pub type Cpuid = [u32; 4];

impl CpuFeatures {
    /// The features of the processor this runs on.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            Self::from_cpuid(
                |leaf, sub| {
                    let r = std::arch::x86_64::__cpuid_count(leaf, sub);
                    [r.eax, r.ebx, r.ecx, r.edx]
                },
                enabled_state,
            )
        }
        #[cfg(not(target_arch = "x86_64"))]
        Self::default()
    }

    /// The features of a processor that answers so. `enabled_state` gives XCR0, which says what registers the system keeps;
    /// it is asked only where there is one.
    ///
    /// Bits: Intel SDM volume 2, CPUID, and volume 1, 15.2 "Detection of AVX-512 foundation instructions"; AMD has the same.
    pub fn from_cpuid(cpuid: impl Fn(u32, u32) -> Cpuid, enabled_state: impl FnOnce() -> u64) -> Self {
        /// Leaf 1, ECX: XGETBV is there, and AVX.
        const OSXSAVE: u32 = 1 << 27;
        const AVX: u32 = 1 << 28;
        /// Leaf 7, EBX and ECX.
        const AVX512F: u32 = 1 << 16;
        const MOVDIR64B: u32 = 1 << 28;
        /// XCR0: XMM and YMM; mask registers and ZMM.
        const STATE_AVX: u64 = 0b110;
        const STATE_AVX512: u64 = 0b1110_0110;
        let [max, ..] = cpuid(0, 0);
        let [_, _, basic, _] = if max >= 1 { cpuid(1, 0) } else { [0; 4] };
        let [_, extended, more, _] = if max >= 7 { cpuid(7, 0) } else { [0; 4] };
        let state = if basic & OSXSAVE != 0 { enabled_state() } else { 0 };
        Self {
            movdir64b: more & MOVDIR64B != 0,
            avx512f: extended & AVX512F != 0 && state & STATE_AVX512 == STATE_AVX512,
            avx: basic & AVX != 0 && state & STATE_AVX == STATE_AVX,
        }
    }
}

/// XCR0.
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "one instruction")]
fn enabled_state() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: reads a register, and is called only where CPUID says that the system has switched XGETBV on.
    unsafe {
        std::arch::asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack, preserves_flags));
    }
    u64::from(high) << 32 | u64::from(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A processor with leaf 1 ECX, leaf 7 EBX and ECX.
    fn processor(max: u32, basic: u32, extended: u32, more: u32) -> impl Fn(u32, u32) -> Cpuid {
        move |leaf, sub| match (leaf, sub) {
            (0, _) => [max, 0, 0, 0],
            (1, _) => [0, 0, basic, 0],
            (7, 0) => [0, extended, more, 0],
            // What is past the last leaf answers anything.
            _ => [u32::MAX; 4],
        }
    }

    #[test]
    fn every_kind_of_processor_is_told() {
        let feature = |movdir64b, avx512f, avx| CpuFeatures {
            movdir64b,
            avx512f,
            avx,
        };
        let (basic, zmm, direct) = (0b11 << 27, 1 << 16, 1 << 28);
        for (what, cpu, state, expected) in [
            (
                "Sapphire Rapids",
                processor(0x20, basic, zmm, direct),
                0xE7,
                feature(true, true, true),
            ),
            (
                "Skylake server",
                processor(0x16, basic, zmm, 0),
                0xE7,
                feature(false, true, true),
            ),
            (
                "without AVX-512",
                processor(0x20, basic, 0, direct),
                0x07,
                feature(true, false, true),
            ),
            (
                "the system keeps no ZMM",
                processor(0x20, basic, zmm, direct),
                0x07,
                feature(true, false, true),
            ),
            (
                "half of the state",
                processor(0x20, basic, zmm, direct),
                0x67,
                feature(true, false, true),
            ),
            (
                "no XGETBV",
                processor(0x20, 1 << 28, zmm, direct),
                u64::MAX,
                feature(true, false, false),
            ),
            (
                "leaf 7 is not there",
                processor(6, basic, zmm, direct),
                0xE7,
                feature(false, false, true),
            ),
            (
                "nothing",
                processor(0, u32::MAX, u32::MAX, u32::MAX),
                0xE7,
                feature(false, false, false),
            ),
        ] {
            assert_eq!(CpuFeatures::from_cpuid(cpu, || state), expected, "{what}");
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn this_processor_is_told_as_the_standard_library_tells_it() {
        let here = CpuFeatures::detect();
        assert_eq!(here.avx512f, std::arch::is_x86_feature_detected!("avx512f"));
        assert_eq!(here.avx, std::arch::is_x86_feature_detected!("avx"));
    }
}
