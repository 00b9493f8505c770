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

impl CpuFeatures {
    /// The features of the processor this runs on.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            // Leaf 7, sub-leaf 0, ECX bit 28 is MOVDIR64B (Intel SDM volume 2, CPUID); AMD uses the same bit.
            let movdir64b = {
                use std::arch::x86_64::{__cpuid, __cpuid_count};
                let max = __cpuid(0).eax;
                max >= 7 && __cpuid_count(7, 0).ecx & (1 << 28) != 0
            };
            Self {
                movdir64b,
                avx512f: std::arch::is_x86_feature_detected!("avx512f"),
                avx: std::arch::is_x86_feature_detected!("avx"),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        Self::default()
    }
}
