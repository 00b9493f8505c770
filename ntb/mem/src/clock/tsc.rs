//! The cycle counter of x86 processors.

#![allow(
    unsafe_code,
    reason = "reading the counter, and the kernel's page about its rate"
)]

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{fitness, kernel_hz, stamp};

#[cfg(not(target_arch = "x86_64"))]
pub(super) use other::{fitness, kernel_hz, stamp};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::{
        arch::x86_64::{__cpuid, __rdtscp, _mm_lfence},
        os::fd::{AsFd, FromRawFd, OwnedFd},
    };

    use rustix::mm::{MapFlags, ProtFlags};

    /// A stamp: `rdtscp` waits for what stands before it, the fence holds up what stands after it (Intel SDM volume 2,
    /// RDTSCP).
    #[inline(always)]
    pub(in super::super) fn stamp() -> u64 {
        let mut processor = 0;
        // SAFETY: the instruction exists: only [`fitness`] leads here, which has looked. It writes to the local only.
        let ticks = unsafe { __rdtscp(&mut processor) };
        // SAFETY: part of SSE2, which every x86-64 processor has.
        unsafe { _mm_lfence() };
        ticks
    }

    /// Whether the counter can be used as a clock by what the processor says of it.
    pub(in super::super) fn fitness() -> Result<(), &'static str> {
        // Leaf 0x80000007 EDX bit 8: invariant TSC; leaf 0x80000001 EDX bit 27: RDTSCP (Intel SDM volume 2, CPUID).
        let top = __cpuid(0x8000_0000).eax;
        if top < 0x8000_0007 || __cpuid(0x8000_0007).edx & (1 << 8) == 0 {
            return Err("the processor does not promise that its cycle counter is invariant");
        }
        if __cpuid(0x8000_0001).edx & (1 << 27) == 0 {
            return Err("the processor has no RDTSCP instruction");
        }
        Ok(())
    }

    /// The kernel's own figure of the counter's rate in Hz, from the page of a perf event. The kernel gives it only
    /// where its scheduler clock is the bare counter (often not in virtual machines), and may refuse perf events.
    pub(in super::super) fn kernel_hz() -> Option<f64> {
        // struct perf_event_attr, first published version (linux/perf_event.h): type u32, size u32, config u64,
        // then sample fields, flags at byte 40.
        const ATTR_BYTES: usize = 64;
        const SOFTWARE_DUMMY: (u64, u64) = (1, 9); // PERF_TYPE_SOFTWARE, PERF_COUNT_SW_DUMMY
        const EXCLUDE_KERNEL_AND_HYPERVISOR: u64 = 1 << 5 | 1 << 6;
        const CLOSE_ON_EXEC: u64 = 1 << 3;
        let mut attr = [0u64; ATTR_BYTES / 8];
        attr[0] = SOFTWARE_DUMMY.0 | (ATTR_BYTES as u64) << 32;
        attr[1] = SOFTWARE_DUMMY.1;
        attr[5] = EXCLUDE_KERNEL_AND_HYPERVISOR;
        // SAFETY: the call reads the attribute, whose size stands in it, and returns a new descriptor or -1.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_perf_event_open,
                attr.as_ptr(),
                0i32,
                -1i32,
                -1i32,
                CLOSE_ON_EXEC,
            )
        };
        let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
        // SAFETY: the descriptor was just made and belongs to nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let page = rustix::param::page_size();
        // SAFETY: a new read-only mapping at an address the kernel chooses.
        let map = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                page,
                ProtFlags::READ,
                MapFlags::SHARED,
                fd.as_fd(),
                0,
            )
        }
        .ok()?;
        // struct perf_event_mmap_page: capabilities u64 at byte 40 (bit 3: cap_user_time), time_shift u16 at 50,
        // time_mult u32 at 52. They change only when the kernel changes its mind about the rate.
        // SAFETY: aligned, inside the page just mapped; the kernel may write meanwhile, so the loads are volatile.
        let (caps, shift, mult) = unsafe {
            (
                map.byte_add(40).cast::<u64>().read_volatile(),
                map.byte_add(50).cast::<u16>().read_volatile(),
                map.byte_add(52).cast::<u32>().read_volatile(),
            )
        };
        // SAFETY: exactly the mapping made above, of which nothing is left in use.
        let _ = unsafe { rustix::mm::munmap(map, page) };
        rate(caps, shift, mult)
    }

    /// ns = ticks * mult >> shift.
    fn rate(caps: u64, shift: u16, mult: u32) -> Option<f64> {
        const USER_TIME: u64 = 1 << 3;
        (caps & USER_TIME != 0 && mult != 0 && shift < 64)
            .then(|| 1e9 * (1u64 << shift) as f64 / f64::from(mult))
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn the_kernels_figure_is_taken_only_when_it_is_given() {
            let hz = rate(1 << 3, 31, 715_827_883).unwrap();
            assert!((hz - 3e9).abs() < 10.0, "{hz}");
            assert_eq!(rate(2, 0, 0), None);
            assert_eq!(rate(1 << 3, 31, 0), None);
            assert_eq!(rate(1 << 3, 64, 1), None);
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod other {
    pub(in super::super) fn stamp() -> u64 {
        0
    }

    pub(in super::super) fn fitness() -> Result<(), &'static str> {
        Err("the cycle counter is used on x86-64 only")
    }

    pub(in super::super) fn kernel_hz() -> Option<f64> {
        None
    }
}
