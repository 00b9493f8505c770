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
        assert!(!said.contains("panicked"), "{said}");
    }
    let out = gpu_try(&standin, "", &["--gpu", "3"]);
    assert_eq!(out.status.code(), Some(3));
}
