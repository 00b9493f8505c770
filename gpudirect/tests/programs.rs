//! `gpu-try` as a program: with the host stand-in in the driver's place, and without any driver.

#![allow(unsafe_code, reason = "calling the host stand-in's own functions")]

mod common;

use std::process::{Command, Output};

use common::Standin;

fn gpu_try(standin: &Standin, words: &str, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gpu-try"))
        .args(args)
        .env("LD_LIBRARY_PATH", standin.path().parent().unwrap())
        .env("NTB_HOST_STANDIN", words)
        .output()
        .unwrap()
}

#[test]
fn all_steps_run_against_the_host_stand_in() {
    let standin = Standin::new("");
    let out = gpu_try(&standin, "", &["--only", "r"]);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(0), "{said}");
    assert!(said.contains("pass   report: host stand-in (no GPU)"), "{said}");
    for step in ["ring-to-host", "ring-to-gpu", "ring-on-gpu", "round-trip"] {
        assert!(said.contains(&format!("pass   {step}")), "{said}");
    }
    let json = String::from_utf8(out.stdout).unwrap();
    assert!(
        json.contains("\"passed\":true") && json.contains("host stand-in (no GPU)"),
        "{json}"
    );
    for (step, words) in [
        ("dma", ""),
        ("copy", ""),
        ("aperture", ""),
        ("poll", "ordering=0"),
        ("channel", ""),
    ] {
        let out = gpu_try(&standin, words, &["--only", step]);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success() && said.starts_with("pass"), "{step}: {said}");
    }
    let out = gpu_try(&standin, "no-dma-buf", &["--only", "dma"]);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(
        out.status.success() && said.contains("waived") && said.contains("attribute 124"),
        "{said}"
    );
}

#[test]
fn without_a_usable_driver_it_says_what_is_missing() {
    let standin = Standin::new("");
    for (words, name, exit) in [
        ("stub", "gpu-library-stub", 3),
        ("no-device", "gpu-none", 3),
        ("capability=70", "gpu-code-refused", 7),
        ("lost=3", "gpu-lost", 5),
    ] {
        let out = gpu_try(&standin, words, &[]);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(exit), "{words}: {said}");
        assert!(said.contains(name), "{words}: {said}");
        // Nothing to try it on is no failure: every step says so.
        if exit == 3 {
            assert!(said.lines().all(|l| l.starts_with("waived ")), "{said}");
            assert_eq!(said.lines().count(), 12, "{said}");
        }
        assert!(!said.contains("panicked"), "{said}");
    }
    let out = gpu_try(&standin, "", &["--gpu", "3"]);
    assert_eq!(out.status.code(), Some(3));
}

/// The script for a machine with a GPU, on one without: it runs to the end, and its log says of every step why not.
#[test]
fn the_script_runs_to_the_end_without_a_gpu() {
    let standin = Standin::new("");
    let folder = standin.path().parent().unwrap().to_owned();
    let built = std::path::Path::new(env!("CARGO_BIN_EXE_gpu-try"))
        .parent()
        .unwrap();
    let log = folder.join("log.json");
    let out = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/gpu/run"))
        .args([
            std::ffi::OsStr::new("--built"),
            built.as_os_str(),
            log.as_os_str(),
        ])
        .env("LD_LIBRARY_PATH", &folder)
        .env("NTB_HOST_STANDIN", "stub")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(3), "{said}");
    assert_eq!(said.lines().count(), 15, "{said}");
    for line in said.lines() {
        let (state, rest) = line.split_once(' ').unwrap();
        let (step, why) = rest.trim().split_once(": ").unwrap();
        assert!(state == "waived" && !step.is_empty() && why.len() > 10, "{line}");
    }
    let log: serde_json::Value = serde_json::from_slice(&std::fs::read(log).unwrap()).unwrap();
    let waived = |steps: &serde_json::Value| {
        let steps = steps.as_array().unwrap();
        assert!(
            steps.iter().all(|s| s["state"] == "waived" && s["what"] != ""),
            "{steps:?}"
        );
        steps.len()
    };
    assert_eq!((waived(&log["tried"]["steps"]), waived(&log["script"])), (12, 3));
    assert_eq!(log["tried"]["name"], "gpu-library-stub");
}
