//! `ntb-ping` with an end on a GPU: what it says without one, and the way with the host stand-in in the driver's place.

use std::{
    path::PathBuf,
    process::{Command, Output},
};

/// A folder with the host stand-in under the driver's name. Cargo puts the shared object beside the test program.
fn folder(name: &str, with: bool) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("ntb-ping-gpu-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    if with {
        let me = std::env::current_exe().unwrap();
        let built = me.with_file_name("libntb_gpu_standin.so");
        std::fs::copy(built, folder.join("libcuda.so.1")).unwrap();
    }
    folder
}

fn ping(folder: &PathBuf, words: &str, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ntb-ping"))
        .args(args)
        .env("LD_LIBRARY_PATH", folder)
        .env("NTB_HOST_STANDIN", words)
        .output()
        .unwrap()
}

#[test]
fn without_a_gpu_it_says_what_is_missing_and_ends_with_3() {
    let with = folder("faults", true);
    for (words, name) in [("stub", "gpu-library-stub"), ("no-device", "gpu-none")] {
        for ends in [["gpu:0", "gpu:0"], ["gpu:0", "host"], ["host", "gpu:0"]] {
            let out = ping(&with, words, &["--from", ends[0], "--to", ends[1]]);
            let said = String::from_utf8_lossy(&out.stderr).into_owned();
            assert_eq!(out.status.code(), Some(3), "{said}");
            assert!(said.contains(name) && !said.contains("panicked"), "{said}");
        }
    }
    let out = ping(&with, "", &["--from", "gpu:5"]);
    assert_eq!(out.status.code(), Some(3), "there is one GPU");
    // A machine without a driver; one that has a driver answers with what it has.
    let out = ping(&folder("none", false), "", &["--from", "gpu:0", "--to", "gpu:0"]);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(matches!(out.status.code(), Some(2 | 3 | 5 | 6 | 7)), "{said}");
    assert!(!said.contains("panicked"), "{said}");
    std::fs::remove_dir_all(with).unwrap();
}

#[test]
fn both_directions_run_with_the_host_stand_in() {
    let with = folder("runs", true);
    for (from, to, way, words) in [
        ("gpu:0", "host", "kernel stores", ""),
        ("host", "gpu:0", "dma-buf", ""),
        ("host", "gpu:0", "staging", "no-dma-buf"),
        ("gpu:0", "gpu:0", "kernels poll memory of this host", ""),
    ] {
        for size in ["8", "48", "5000"] {
            let args = [
                "--from", from, "--to", to, "--size", size, "--count", "60", "--json",
            ];
            let out = ping(&with, words, &args);
            let said = String::from_utf8_lossy(&out.stderr).into_owned();
            assert_eq!(out.status.code(), Some(0), "{from} {to} {size}: {said}");
            let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
            assert_eq!(
                (json["messages"].as_u64(), json["from"].as_str()),
                (Some(60), Some(from))
            );
            assert!(json["gpu"].as_str().unwrap().contains("host stand-in"), "{json}");
            assert!(json["way"].as_str().unwrap().contains(way), "{json}");
            assert!(json["bytes_per_second"].as_f64().unwrap() > 0.0);
        }
    }
    std::fs::remove_dir_all(with).unwrap();
}

#[test]
fn ends_that_cannot_be_are_usage_errors() {
    let with = folder("usage", true);
    for args in [
        &["--from", "gpu"][..],
        &["--from", "gpu:-1"],
        &["--to", "gpu:256"],
        &["--to", "cpu"],
        &["--from", "host", "--to", "host"],
    ] {
        let out = ping(&with, "", args);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{args:?}: {said}");
    }
    std::fs::remove_dir_all(with).unwrap();
}

/// A far end in a process of its own, as `gpu-try` is at another host: here over a link of this machine, and a pair of emulated
/// bridges.
#[test]
fn over_a_link_both_ends_say_how_and_json_has_the_bandwidth() {
    let with = folder("over", true);
    let name = |what: &str| format!("ntb-ping-gpu-{}-{what}", std::process::id());
    let mut config = ntb_emu::EmuConfig::new(
        ntb_emu::model::family("intel-spr").unwrap(),
        ntb_emu::server::Endpoint::Abstract(name("a")),
        ntb_emu::server::Endpoint::Abstract(name("b")),
    );
    config.pair.window_bytes = 1 << 20;
    let _emulator = ntb_emu::Emulator::start(config).unwrap();
    let soft = format!("soft:{}", name("soft"));
    let emulated = ["a", "b"].map(|side| format!("emu:@{}", name(side)));
    for (near, far, size, said) in [
        (&soft, &soft, "100000", "kernels store into the peer's memory"),
        (&emulated[0], &emulated[1], "5000", "staging"),
    ] {
        let gpu = standin_gpu(&with);
        let address = far.parse().unwrap();
        let receiving = std::thread::spawn(move || ntb_gpudirect::across::receive(&address, Some(&gpu)));
        let args = [
            near, "--from", "gpu:0", "--to", "gpu:0", "--size", size, "--count", "20", "--json",
        ];
        let out = ping(&with, "", &args);
        let error = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(0), "{near}: {error}");
        let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        assert_eq!(json["address"].as_str(), Some(near.as_str()));
        assert_eq!(
            (json["messages"].as_u64(), json["size"].as_u64()),
            (Some(20), size.parse().ok())
        );
        assert!(json["bytes_per_second"].as_f64().unwrap() > 0.0, "{json}");
        let way = json["way"].as_str().unwrap();
        assert!(way.contains(said) && way.contains("there: kernels poll"), "{way}");
        receiving.join().unwrap().unwrap();
    }
    std::fs::remove_dir_all(with).unwrap();
}

/// A receiver whose GPU goes, before the first message and among them: the sender does not wait for room that nobody gives.
#[test]
fn a_far_end_that_fails_ends_the_sender_with_its_reason() {
    let with = folder("fails", true);
    for (from, calls) in [("gpu:0", 0), ("host", 0), ("gpu:0", 150)] {
        let address = format!("soft:ntb-ping-gpu-{}-fails-{from}-{calls}", std::process::id());
        let own = folder(&format!("far-{from}-{calls}"), true);
        let gpu = standin_gpu(&own);
        configure(&own, &format!("lost={calls}"));
        let far = address.parse().unwrap();
        let receiving = std::thread::spawn(move || ntb_gpudirect::across::receive(&far, Some(&gpu)));
        let args = [
            &address, "--from", from, "--to", "gpu:0", "--size", "48", "--count", "1000000",
        ];
        let begin = std::time::Instant::now();
        let out = ping(&with, "", &args);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(5), "{from} {calls}: {said}");
        assert!(
            said.contains("gpu-lost") && said.contains("the far end says"),
            "{from} {calls}: {said}"
        );
        // The trial's own patience is a minute.
        assert!(
            begin.elapsed().as_secs() < 50,
            "{from} {calls}: {:?}",
            begin.elapsed()
        );
        assert_eq!(receiving.join().unwrap().unwrap_err().name, "gpu-lost");
        std::fs::remove_dir_all(own).unwrap();
    }
    std::fs::remove_dir_all(with).unwrap();
}

#[test]
fn a_gpu_that_cannot_flush_receives_through_memory_of_the_host() {
    let with = folder("flush", true);
    let args = [
        "--from", "gpu:0", "--to", "gpu:0", "--size", "48", "--count", "60",
    ];
    let out = ping(&with, "ordering=0 no-flush", &args);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(0), "{said}");
    std::fs::remove_dir_all(with).unwrap();
}

/// Tells the host stand-in of this folder what to do.
#[allow(unsafe_code, reason = "calling the host stand-in's own function")]
fn configure(folder: &std::path::Path, words: &str) {
    let words = std::ffi::CString::new(words).unwrap();
    // SAFETY: the stand-in's own function, with its signature; the file is the one that is loaded already.
    unsafe {
        let object = libloading::Library::new(folder.join("libcuda.so.1")).unwrap();
        let configure: libloading::Symbol<'_, unsafe extern "C" fn(*const std::ffi::c_char)> =
            object.get(b"ntb_standin_configure\0").unwrap();
        configure(words.as_ptr());
    }
}

/// The host stand-in in this process.
fn standin_gpu(folder: &std::path::Path) -> std::sync::Arc<dyn ntb_gpudirect::seam::Gpu> {
    let driver = ntb_gpudirect::cuda::Driver::load(&folder.join("libcuda.so.1")).unwrap();
    std::sync::Arc::new(ntb_gpudirect::cuda::Cuda::open(&driver, 0).unwrap())
}
