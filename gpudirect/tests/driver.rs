//! The driver's interface against the host stand-in: what is missing is an error, calls come in order with the right flags, and
//! everything is given back.

#![allow(unsafe_code, reason = "memory that is shared with the host stand-in")]

mod common;

use std::sync::Arc;

use common::{Standin, missing_library, places};
use ntb_gpudirect::{
    aperture::OnGpu,
    cuda::{Cuda, Driver, SYMBOLS},
    memory::{Exposed, GPU_PAGE, GpuMemory, Way},
    seam::{Flush, Gpu, HostMemory, Ordering},
};
use ntb_mem::{
    export::Exportable,
    region::{Pages, Region},
};

#[test]
fn a_missing_library_is_an_error_with_the_remedy() {
    let e = Driver::load(&missing_library()).unwrap_err();
    assert_eq!((e.name, e.exit), ("gpu-library-missing", 3));
    // This machine may have a driver or none: either answer is one, and no panic.
    if let Err(e) = Driver::find() {
        assert!(matches!(e.exit, 3 | 5 | 6 | 7), "{e:?}");
        assert!(!e.what.is_empty());
    }
}

#[test]
fn a_file_that_is_no_library_is_an_error() {
    let standin = Standin::new("");
    let text = standin.path().with_file_name("text.so");
    std::fs::write(&text, "not a library").unwrap();
    assert_eq!(Driver::load(&text).unwrap_err().name, "gpu-library-missing");
}

#[test]
fn every_symbol_may_be_missing() {
    for symbol in SYMBOLS {
        let e = Standin::without(symbol).driver().unwrap_err();
        assert_eq!((e.name, e.exit), ("gpu-library-too-old", 7), "{symbol}");
        assert!(e.what.contains(symbol), "{e}");
    }
}

#[test]
fn symbols_that_are_wanted_only_are_missed_where_they_are_used() {
    let standin = Standin::without("cuMemGetHandleForAddressRange");
    let gpu = standin.gpu();
    assert!(!gpu.facts().dma_buf);
    let e = gpu.export(0, 4096).unwrap_err();
    assert_eq!(e.name, "gpu-library-too-old");
    let standin = Standin::without("cuFlushGPUDirectRDMAWrites");
    standin.configure("ordering=0");
    assert_eq!(standin.gpu().flush().unwrap_err().name, "gpu-library-too-old");
}

#[test]
fn stub_and_no_device_are_told_apart() {
    let e = Standin::new("stub").driver().unwrap_err();
    assert_eq!((e.name, e.exit, e.code), ("gpu-library-stub", 3, Some(34)));
    let e = Cuda::open(&Standin::new("no-device").driver().unwrap(), 0).unwrap_err();
    assert_eq!((e.name, e.exit, e.code), ("gpu-none", 3, Some(100)));
    let e = Cuda::open(&Standin::new("").driver().unwrap(), 7).unwrap_err();
    assert_eq!((e.name, e.exit), ("gpu-none", 3));
    assert!(e.what.contains("gpu:7"), "{e}");
    let e = Cuda::open(&Standin::new("capability=70").driver().unwrap(), 0).unwrap_err();
    assert_eq!((e.name, e.exit), ("gpu-code-refused", 7));
    assert!(e.what.contains("7.0"), "{e}");
}

#[test]
fn opening_and_closing_is_balanced_and_in_order() {
    let standin = Standin::new("");
    let gpu = standin.gpu();
    let facts = gpu.facts().clone();
    assert_eq!((facts.capability, facts.driver_version), (90, 13030));
    assert_eq!(facts.address.unwrap().to_string(), "0000:41:00.0");
    assert!(facts.dma_buf && facts.dma_buf_mmap && facts.host_flush);
    assert_eq!(facts.ordering, Ordering::All);
    assert!(
        facts
            .attributes
            .iter()
            .any(|(n, _, v)| *n == 116 && *v == Some(1))
    );
    drop(gpu);
    assert_eq!(standin.left(), 0);
    let at = places(
        &standin.log(),
        &[
            "cuInit 0",
            "cuDevicePrimaryCtxRetain",
            "cuStreamCreate 1",
            "cuModuleLoadData",
            "cuModuleUnload",
            "cuStreamDestroy_v2",
            "cuDevicePrimaryCtxRelease_v2",
        ],
    );
    assert!(at.is_sorted(), "{at:?}");
}

#[test]
fn gpu_memory_is_aligned_whole_synchronous_and_cleared() {
    for words in ["", "odd-address"] {
        let standin = Standin::new(words);
        let gpu = standin.gpu();
        let memory = GpuMemory::allocate(&gpu, 100_000).unwrap();
        assert_eq!(memory.bytes(), 131_072);
        assert!(memory.at().is_multiple_of(GPU_PAGE), "{words}");
        let log = standin.log();
        assert!(log.contains(&"cuMemAlloc_v2 2097152".to_owned()), "{log:?}");
        assert!(log.contains(&"cuPointerSetAttribute 6".to_owned()), "{log:?}");
        let mut all = vec![1; 131_072];
        memory.read(0, &mut all).unwrap();
        assert!(all.iter().all(|b| *b == 0));
        memory.write(131_070, &[7, 8]).unwrap();
        assert_eq!(memory.write(131_071, &[7, 8]).unwrap_err().name, "gpu-outside");
        assert_eq!(memory.read(u64::MAX, &mut [0]).unwrap_err().name, "gpu-outside");
        drop((memory, gpu));
        assert_eq!(standin.left(), 0);
    }
    let gpu = Standin::new("").gpu();
    assert_eq!(GpuMemory::allocate(&gpu, 2 << 30).unwrap_err().name, "gpu-memory");
    assert_eq!(
        GpuMemory::allocate(&gpu, u64::MAX).unwrap_err().name,
        "gpu-memory"
    );
}

#[test]
fn exposed_memory_is_the_gpus_own_and_goes_in_order() {
    let standin = Standin::new("");
    let gpu = standin.gpu();
    let memory = GpuMemory::allocate(&gpu, GPU_PAGE).unwrap();
    let exposed = Exposed::new(&memory, None).unwrap();
    assert_eq!((exposed.way(), exposed.refusals().len()), (Way::DmaBuf, 0));
    assert!(
        standin
            .log()
            .contains(&"cuMemGetHandleForAddressRange 65536 kind 1 flags 0".to_owned())
    );
    // What a device stores at the exported address is what the GPU finds.
    // SAFETY: the exported mapping, which nobody else uses in this test.
    unsafe { exposed.as_ptr().add(40).write_volatile(0x22) };
    assert_eq!(gpu.poll(memory.at() + 40).unwrap(), 0x22);
    assert_eq!(exposed.alignment(), GPU_PAGE);
    exposed.settle().unwrap();
    drop((gpu, memory));
    assert!(
        !standin.log().iter().any(|l| l == "cuMemFree_v2"),
        "the export holds the memory"
    );
    drop(exposed);
    assert_eq!(standin.left(), 0);
}

#[test]
fn without_a_dma_buf_mapping_the_next_way_is_taken_and_said() {
    for (words, name) in [
        ("no-dma-buf", "gpu-no-dma-buf"),
        ("no-mmap", "gpu-no-dma-buf-mapping"),
        ("not-supported", "gpu-not-supported"),
        ("odd-address", "gpu-invalid-value"),
    ] {
        let standin = Standin::new(words);
        let memory = GpuMemory::allocate(&standin.gpu(), GPU_PAGE).unwrap();
        // No gdrcopy on the machines this runs on, so staging is what is left.
        let exposed = Exposed::new(&memory, None).unwrap();
        assert_eq!(exposed.refusals()[0].0, Way::DmaBuf);
        assert_eq!(exposed.refusals()[0].1.name, name, "{words}");
        let said = exposed.announcement();
        assert!(said.contains("not by dma-buf"), "{said}");
        if exposed.way() == Way::Staging {
            assert!(said.contains("copied by the processor"), "{said}");
            exposed
                .staging()
                .unwrap()
                .view()
                .store(3, 99, std::sync::atomic::Ordering::Release);
            assert_eq!(memory.gpu().poll(memory.at() + 24).unwrap(), 0);
            exposed.carry(0, 64).unwrap();
            assert_eq!(memory.gpu().poll(memory.at() + 24).unwrap(), 99);
        }
        let e = Exposed::new(&memory, Some(Way::DmaBuf)).unwrap_err();
        assert_eq!(e.name, name, "a way that was asked for is taken or refused");
    }
}

#[test]
fn gdrcopy_pins_maps_and_undoes_both() {
    use ntb_gpudirect::gdrcopy::{Gdrcopy, Pinned};
    let standin = Standin::new("");
    let gpu = standin.gpu();
    let memory = GpuMemory::allocate(&gpu, GPU_PAGE).unwrap();
    let library = Gdrcopy::load(&standin.path()).unwrap();
    let before = standin.left();
    let pinned = Pinned::new(&library, memory.at(), GPU_PAGE).unwrap();
    drop(pinned);
    assert_eq!(standin.left(), before);
    assert_eq!(
        Pinned::new(&library, memory.at() + 8, GPU_PAGE).unwrap_err().name,
        "gpu-alignment"
    );
    standin.configure("not-supported");
    let e = Pinned::new(&library, memory.at(), GPU_PAGE).unwrap_err();
    assert_eq!((e.name, e.errno), ("gdrcopy-refused", Some(12)));
    assert!(e.what.contains("BAR1"), "{e}");
    assert_eq!(standin.left(), before);
    let log = standin.log();
    let at = places(
        &log,
        &["gdr_pin_buffer", "gdr_map", "gdr_unmap", "gdr_unpin_buffer"],
    );
    assert!(at.is_sorted(), "{log:?}");
    drop(library);
    standin.configure("no-device");
    assert_eq!(
        Gdrcopy::load(&standin.path()).unwrap_err().name,
        "gdrcopy-no-device"
    );
    assert_eq!(
        Gdrcopy::load(&missing_library()).unwrap_err().name,
        "gdrcopy-missing"
    );
}

#[test]
fn an_aperture_must_be_populated_and_permitted() {
    let standin = Standin::new("");
    let gpu = standin.gpu();
    let region = Region::allocate(1 << 20, Pages::Normal).unwrap();
    // SAFETY: the region is mapped, gives no reference out, and outlives what is made of it here.
    let register = || unsafe { OnGpu::raw(&gpu, region.as_ptr(), region.bytes(), HostMemory::Aperture) };
    let e = register().unwrap_err();
    assert_eq!(
        (e.name, e.code),
        ("gpu-aperture-refused", Some(1)),
        "no page was touched yet"
    );
    assert!(e.what.contains("570.133.07") && e.what.contains("1048576"), "{e}");
    for page in 0..region.bytes() / 4096 {
        // SAFETY: in the region; nobody else uses it.
        unsafe { region.as_ptr().add(page as usize * 4096).write_volatile(0) };
    }
    let registered = register().unwrap();
    assert_eq!(registered.bytes(), 1 << 20);
    assert!(
        standin
            .log()
            .contains(&"cuMemHostRegister_v2 1048576 flags 6".to_owned())
    );
    // Stores go through, loads are what must never happen: the stand-in refuses them.
    gpu.publish(registered.at() + 64, 5).unwrap();
    assert_eq!(gpu.poll(registered.at()).unwrap_err().name, "gpu-invalid-value");
    let before = standin.left();
    drop(registered);
    assert_eq!(standin.left(), before - 1);
    standin.configure("not-permitted");
    let e = register().unwrap_err();
    assert_eq!((e.name, e.exit, e.code), ("gpu-not-permitted", 6, Some(800)));
    assert!(e.what.contains("PeerMappingOverride=1"), "{e}");
}

#[test]
fn host_memory_is_registered_without_the_flag_of_apertures() {
    let standin = Standin::new("not-permitted");
    let gpu = standin.gpu();
    let region = Arc::new(Region::allocate(4096, Pages::Normal).unwrap());
    let on_gpu = OnGpu::region(&gpu, &region).unwrap();
    assert!(
        standin
            .log()
            .contains(&"cuMemHostRegister_v2 4096 flags 2".to_owned())
    );
    gpu.publish(on_gpu.at() + 8, 77).unwrap();
    assert_eq!(region.view().load(1, std::sync::atomic::Ordering::Acquire), 77);
    assert_eq!(gpu.poll(on_gpu.at() + 8).unwrap(), 77);
}

#[test]
fn flushes_follow_the_order_that_the_gpu_promises() {
    for (words, expected) in [
        ("ordering=200", Ok(Flush::NotNeeded)),
        ("ordering=100", Ok(Flush::NotNeeded)),
        ("ordering=0", Ok(Flush::Done)),
        ("ordering=0 no-flush", Err("gpu-no-flush")),
    ] {
        let standin = Standin::new(words);
        let gpu = standin.gpu();
        assert_eq!(gpu.flush().map_err(|e| e.name), expected, "{words}");
        let called = standin.log().iter().filter(|l| l.starts_with("cuFlush")).count();
        assert_eq!(called, usize::from(expected == Ok(Flush::Done)), "{words}");
    }
    let standin = Standin::new("ordering=0");
    let gpu = standin.gpu();
    let memory = GpuMemory::allocate(&gpu, GPU_PAGE).unwrap();
    let before = standin.log().len();
    gpu.poll(memory.at()).unwrap();
    let log = standin.log().split_off(before);
    // The flush comes behind the look at the mark: it is what the mark vouches for that has to be there.
    assert_eq!(log, ["cuMemcpyDtoH_v2 8", "cuFlushGPUDirectRDMAWrites 0 100"]);
}

/// The mark goes into the stream right behind the copy; what is waited for comes after both, and after a mark that is refused too,
/// since the copy may still read its source.
#[test]
fn a_mark_follows_its_copy_in_one_stream() {
    let standin = Standin::new("");
    let gpu = standin.gpu();
    let memory = GpuMemory::allocate(&gpu, GPU_PAGE).unwrap();
    let copy = "cuMemcpyHtoDAsync_v2 16";
    for (mark, expected) in [
        (
            memory.at(),
            [copy, "cuStreamWriteValue64_v2 flags 0", "cuStreamSynchronize"],
        ),
        (
            memory.at() + 4,
            [
                copy,
                "cuStreamWriteValue64_v2 flags 0 -> 1",
                "cuStreamSynchronize",
            ],
        ),
    ] {
        let before = standin.log().len();
        let result = gpu.write_then_publish(memory.at() + 64, &[7; 16], mark, 5);
        assert_eq!(result.is_ok(), mark == memory.at(), "{result:?}");
        assert_eq!(standin.log().split_off(before), expected);
    }
    let mut back = [0; 16];
    memory.read(64, &mut back).unwrap();
    assert_eq!((gpu.poll(memory.at()).unwrap(), back), (5, [7; 16]));
    // Without its copy no mark is stored.
    assert!(gpu.write_then_publish(8, &[7; 16], memory.at(), 6).is_err());
    assert_eq!(gpu.poll(memory.at()).unwrap(), 5);
}

#[test]
fn a_lost_device_is_an_error_everywhere_and_drops_do_not_hang() {
    let standin = Standin::new("");
    let gpu = standin.gpu();
    let memory = GpuMemory::allocate(&gpu, GPU_PAGE).unwrap();
    let exposed = Exposed::new(&memory, None).unwrap();
    standin.configure("lost=0");
    let lost = |result: Result<(), ntb_gpudirect::GpuError>| {
        let e = result.unwrap_err();
        assert_eq!((e.name, e.exit, e.is_lost()), ("gpu-lost", 5, true), "{e}");
    };
    lost(gpu.poll(memory.at()).map(drop));
    lost(gpu.publish(memory.at(), 1));
    lost(gpu.write_then_publish(memory.at() + 64, &[1], memory.at(), 1));
    lost(gpu.allocate(4096).map(drop));
    lost(gpu.export(memory.at(), 4096).map(drop));
    lost(memory.write(0, &[1]));
    // SAFETY: no kernel starts.
    lost(unsafe { gpu.start("ntb_give_back", 32, &[]) }.map(drop));
    drop((exposed, memory, gpu));
}

/// The device vanishes at each call in turn, from the first to the last of a whole life: always an error, never a panic.
#[test]
fn a_device_may_vanish_at_any_call() {
    let standin = Standin::new("");
    let life = |standin: &Standin| -> Result<(), ntb_gpudirect::GpuError> {
        let gpu: Arc<dyn Gpu> = Arc::new(Cuda::open(&standin.driver()?, 0)?);
        let memory = GpuMemory::allocate(&gpu, GPU_PAGE)?;
        let exposed = Exposed::new(&memory, Some(Way::DmaBuf))?;
        gpu.publish(memory.at(), 1)?;
        gpu.poll(memory.at())?;
        drop(exposed);
        Ok(())
    };
    let before = standin.log().len();
    life(&standin).unwrap();
    let calls = standin.log().len() - before;
    assert!(calls > 20);
    let mut errors = 0;
    for at in 0..calls {
        let standin = Standin::new(&format!("lost={at}"));
        match life(&standin) {
            Ok(()) => assert!(
                at + 6 > calls,
                "only the end may be without an error: call {at} of {calls}"
            ),
            Err(e) => {
                errors += 1;
                assert!(matches!(e.name, "gpu-lost" | "gpu-none"), "{at}: {e:?}");
            }
        }
    }
    assert!(errors > 15);
}
