//! Measurements over emulated bridges: one command, every family, every engine.

mod common;

use common::{object, run};
use serde_json::Value;

const FAMILIES: [&str; 6] = ["intel-spr", "intel-icx", "intel-gnr", "intel-skx", "amd", "epf"];

fn measured(args: &[&str]) -> Value {
    let output = run(args);
    let v = object(&output);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {v}");
    for key in ["lost", "duplicated", "out_of_order", "corrupt"] {
        assert_eq!(v[key], 0, "{args:?}, {key}: {v}");
    }
    let wire = &v["wire"];
    assert_eq!(wire["remote_reads"], 0, "{args:?}: {v}");
    assert_eq!(wire["modelled_writes"], wire["counted_writes"], "{args:?}: {v}");
    v
}

#[test]
fn every_family_carries_round_trips() {
    for family in FAMILIES {
        let v = measured(&["--emulate", family, "--json", "--count", "3000"]);
        assert_eq!(
            (&v["received"], &v["link"]["kind"]),
            (&3000.into(), &"ntb".into())
        );
        assert_eq!(
            (&v["wire"]["engine"], &v["peer"]["own"]),
            (&"wc".into(), &true.into())
        );
        assert!(v["link"]["reason"].as_str().unwrap().contains(family), "{v}");
    }
}

/// What a message of 48 bytes may take of the wire, credits and heartbeats included.
#[test]
fn every_engine_is_counted_as_what_it_is() {
    for (engine, least, most) in [("wc", 1.0, 1.05), ("movdir64b", 1.0, 1.05), ("uc8", 8.0, 8.4)] {
        let v = measured(&[
            "--emulate",
            "intel-spr",
            "--json",
            "--oneway",
            "--count",
            "50000",
            "--engine",
            engine,
        ]);
        let wire = &v["wire"];
        assert_eq!(wire["engine"], engine);
        let tlps = wire["tlps_per_message"].as_f64().unwrap();
        assert!((least..most).contains(&tlps), "{engine}: {wire}");
        let bytes = wire["bytes_per_message"].as_f64().unwrap();
        let each = if engine == "uc8" { 32.0 * 8.0 } else { 88.0 };
        assert!(bytes >= each, "{engine}: {wire}");
    }
}

#[test]
fn families_and_engines_that_there_are_not() {
    for (args, part) in [
        (["--emulate", "intel-xyz"], "intel-spr"),
        (["--engine", "fast"], "movdir64b"),
    ] {
        let output = run(&args);
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{err}");
        assert!(err.contains(args[1]) && err.contains(part), "{err}");
    }
}
