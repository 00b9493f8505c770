//! Whole runs between real processes.

mod common;

use common::{Running, address, object, run};
use serde_json::Value;

/// A sound result of `sent` messages.
fn sound(v: &Value, sent: u64) {
    assert_eq!(v["sent"], sent, "{v}");
    assert_eq!(v["received"], sent, "{v}");
    for key in ["lost", "duplicated", "out_of_order", "corrupt", "unsent"] {
        assert_eq!(v[key], 0, "{key}: {v}");
    }
    assert!(v["error"].is_null(), "{v}");
}

#[test]
fn without_arguments_it_measures_a_hundred_thousand_round_trips() {
    let output = run(&[]);
    let out = String::from_utf8_lossy(&output.stdout);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{out}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let first = out.lines().next().unwrap();
    assert!(
        first.starts_with("link: soft:ntb-ping-") && first.contains("no bridge"),
        "{first}"
    );
    assert!(out.contains("sent 100000, received 100000, lost 0"), "{out}");
}

#[test]
fn the_automatic_choice_named_by_the_user_is_the_one_without_arguments() {
    let v = object(&run(&["auto", "--json", "--count", "500"]));
    sound(&v, 500);
    assert_eq!(v["link"]["kind"], "soft", "{v}");
    let why = v["link"]["reason"].as_str().unwrap();
    assert!(why.contains("no bridge") && why.contains("RDMA"), "{why}");
}

#[test]
fn warming_up_is_told_as_it_was() {
    for (asked, cut) in [("100", false), ("1000000000", true)] {
        let v = object(&run(&["--json", "--count", "10", "--warmup", asked]));
        let (warmup, asked) = (v["warmup"].as_u64().unwrap(), asked.parse().unwrap());
        assert!(warmup > 0, "{v}");
        assert_eq!(warmup < asked, cut, "{v}");
    }
}

#[test]
fn the_json_object_has_its_keys_and_nothing_else_is_printed() {
    let output = run(&["--json", "--count", "2000", "--warmup", "100"]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stdout).lines().count(), 1);
    let v = object(&output);
    sound(&v, 2000);
    assert_eq!(v["tool"], "ntb-ping");
    assert_eq!(v["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(v["schema"], 1);
    assert_eq!(
        (&v["link"]["kind"], &v["size_bytes"]),
        (&"soft".into(), &48.into())
    );
    assert!(v["link"]["address"].as_str().unwrap().starts_with("soft:"));
    assert!(v["link"]["reason"].is_string());
    assert!(v["rate_hz"].is_null());
    let rtt = v["rtt_ns"].as_object().unwrap();
    let keys: Vec<&str> = rtt.keys().map(String::as_str).collect();
    let mut wanted = ["min", "p50", "p90", "p99", "p999", "p9999", "max"];
    wanted.sort_unstable();
    let mut sorted = keys;
    sorted.sort_unstable();
    assert_eq!(sorted, wanted);
    for key in ["min", "p50", "p90", "p99", "max"] {
        assert!(rtt[key].as_u64().unwrap() > 0, "{key}: {v}");
    }
    assert!(
        rtt["p9999"].is_null() && rtt["p999"].is_null(),
        "2000 samples do not back them: {v}"
    );
    assert!(v["floor_ns"]["clock"].as_f64().unwrap() > 0.0);
    assert!(v["floor_ns"]["line_rtt_p50"].as_u64().unwrap() > 0);
    assert!(
        v["environment"]["kernel"].is_string() && v["environment"]["page_bytes"].as_u64().unwrap() >= 4096
    );
    assert!(v["warnings"].is_array() && v["events"].is_array());
    assert_eq!(v["peer"]["own"], true);
}

/// Text and JSON come from one structure: the same numbers stand in both.
#[test]
fn every_percentile_is_named_in_the_text() {
    let output = run(&["--count", "1000", "--warmup", "0"]);
    let out = String::from_utf8_lossy(&output.stdout);
    for part in [
        "min ",
        "p50 ",
        "p99.99 -",
        "max ",
        "floor:",
        "noise:",
        "environment:",
        "pages ",
    ] {
        assert!(out.contains(part), "{part} is not in {out}");
    }
}

#[test]
fn sizes_from_one_byte_to_eight_mebibytes_carry_their_content() {
    for (size, count) in [
        (1, 500),
        (7, 500),
        (23, 500),
        (24, 500),
        (49, 500),
        (57, 500),
        (95, 500),
        (96, 500),
        (4097, 500),
        (65_537, 100),
        (1 << 20, 20),
        (8 << 20, 3),
    ] {
        let (size, n) = (size.to_string(), count.to_string());
        let output = run(&["--json", "--size", &size, "--count", &n, "--warmup", "10"]);
        let v = object(&output);
        assert_eq!(output.status.code(), Some(0), "{v}");
        sound(&v, count);
        assert_eq!(v["size_bytes"].to_string(), size);
    }
}

#[test]
fn paced_runs_report_response_and_service_time() {
    let output = run(&["--json", "--rate", "2000", "--count", "1000", "--warmup", "100"]);
    let v = object(&output);
    sound(&v, 1000);
    assert_eq!(v["rate_hz"], 2000.0);
    assert_eq!(v["rtt_samples"], 1000);
    let (response, service) = (&v["rtt_ns"]["p50"], &v["service_ns"]["p50"]);
    assert!(response.as_u64() >= service.as_u64(), "{v}");
}

#[test]
fn a_rate_out_of_reach_is_reported_with_the_one_reached() {
    let output = run(&[
        "--json",
        "--rate",
        "100000000",
        "--duration",
        "100ms",
        "--warmup",
        "0",
    ]);
    let v = object(&output);
    assert!(v["unsent"].as_u64().unwrap() > 0, "{v}");
    assert!(v["reached_hz"].as_f64().unwrap() < 1e8);
    assert!(v["warnings"].to_string().contains("rate was not reached"), "{v}");
    assert_eq!(v["lost"], 0);
}

#[test]
fn slow_rates_and_durations() {
    let output = run(&["--json", "--rate", "20", "--duration", "500ms", "--warmup", "0"]);
    sound(&object(&output), 10);
}

#[test]
fn streams_are_counted_at_the_far_end() {
    for extra in [
        &["--count", "20000"][..],
        &["--rate", "50000", "--count", "2000"],
        &["--size", "5", "--count", "3000"],
    ] {
        let output = run(&[&["--json", "--oneway"], extra].concat());
        let v = object(&output);
        assert_eq!(output.status.code(), Some(0), "{v}");
        sound(&v, v["sent"].as_u64().unwrap());
        assert_eq!(v["mode"], "one-way");
        assert!(v["oneway"]["messages_per_second"].as_f64().unwrap() > 0.0);
        assert!(v["rtt_ns"]["p50"].is_null());
    }
}

#[test]
fn every_way_of_waiting_works() {
    for wait in ["spin", "yield", "sleep"] {
        let output = run(&["--json", "--wait", wait, "--count", "200", "--warmup", "10"]);
        let v = object(&output);
        sound(&v, 200);
        assert_eq!(v["wait"], wait);
    }
}

/// Both ends on one processor: nobody starves.
#[test]
fn one_processor_is_enough() {
    let cpu = first_cpu();
    for wait in ["yield", "sleep"] {
        let output = run(&[
            "--json",
            "--cpu",
            &format!("{cpu},{cpu}"),
            "--wait",
            wait,
            "--count",
            "200",
            "--warmup",
            "10",
        ]);
        let v = object(&output);
        sound(&v, 200);
        assert_eq!(v["environment"]["placement"], "same processor");
        assert!(v["warnings"].to_string().contains("share one processor"));
    }
}

fn first_cpu() -> usize {
    let set = rustix::thread::sched_getaffinity(None).unwrap();
    (0..1024).find(|cpu| set.is_set(*cpu)).unwrap()
}

#[test]
fn the_far_end_can_be_pinned_from_here() {
    let address = address();
    let _server = Running::start(&["serve", &address]);
    let cpu = first_cpu();
    let output = run(&[
        &address,
        "--json",
        "--cpu",
        &format!("{cpu},{cpu}"),
        "--count",
        "200",
        "--warmup",
        "0",
    ]);
    let v = object(&output);
    sound(&v, 200);
    assert_eq!(
        (&v["environment"]["cpu"], &v["environment"]["peer_cpu"]),
        (&cpu.into(), &cpu.into())
    );
    assert_eq!(v["peer"]["own"], false);
}

#[test]
fn a_histogram_log_is_written() {
    let path = std::env::temp_dir().join(format!("ntb-ping-{}.hlog", std::process::id()));
    let output = run(&[
        "--json",
        "--count",
        "1000",
        "--rate",
        "10000",
        "--histogram",
        path.to_str().unwrap(),
    ]);
    let text = std::fs::read_to_string(&path);
    std::fs::remove_file(&path).unwrap();
    sound(&object(&output), 1000);
    let text = text.unwrap();
    assert!(
        text.contains("#[StartTime: ") && text.contains("Tag=rtt,") && text.contains("Tag=service,"),
        "{text}"
    );
    assert!(
        text.lines().filter(|l| l.contains("HISTFAAAA")).count() == 2,
        "{text}"
    );
}
