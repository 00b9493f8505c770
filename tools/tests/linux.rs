//! `ntb-ping linux`, with this program at both ends of an emulated bridge.

mod common;

use std::sync::atomic::{AtomicU32, Ordering};

use common::{Running, object, run};
use ntb_emu::{EmuConfig, Emulator, model::family, server::Endpoint};

struct Bridges {
    _emulator: Emulator,
    addresses: [String; 2],
}

fn bridges(name: &str) -> Bridges {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let names = ["a", "b"].map(|side| format!("ntb-ping-linux-{}-{n}-{side}", std::process::id()));
    let [a, b] = names.clone().map(Endpoint::Abstract);
    let mut config = EmuConfig::new(family(name).unwrap(), a, b);
    config.pair.window_bytes = 1 << 20;
    Bridges {
        _emulator: Emulator::start(config).unwrap(),
        addresses: names.map(|name| format!("emu:@{name}")),
    }
}

#[test]
fn rings_are_counted() {
    let bridges = bridges("intel-spr");
    let [a, b] = &bridges.addresses;
    let far = Running::start(&["linux", "pingpong", b, "--pause", "1ms", "--count", "1000"]);
    let v = object(&run(&[
        "linux", "pingpong", a, "--pause", "1ms", "--count", "20", "--json",
    ]));
    assert_eq!((&v["client"], &v["heard"]), (&"ntb_pingpong".into(), &20.into()));
    drop(far);
}

#[test]
fn windows_are_written_both_ways() {
    let bridges = bridges("amd");
    let [a, b] = &bridges.addresses;
    let far = Running::start(&["linux", "perf", b, "--bytes", "1MiB", "--hold", "60s", "--json"]);
    // One lap each: a side whose memory has been written goes, and whoever is still writing loses the link.
    let near = run(&["linux", "perf", a, "--bytes", "1MiB", "--hold", "60s", "--json"]);
    let (near, far) = (object(&near), object(&far.finish()));
    for v in [&near, &far] {
        assert_eq!(v["sent_bytes"], 1 << 20, "{v}");
        assert_eq!(v["written_here_bytes"], 1 << 20, "{v}");
        assert_eq!(v["unknown_commands"], 0, "{v}");
    }
}

#[test]
fn frames_and_pings_are_answered() {
    for (family, serve, ask) in [
        ("intel-icx", &[][..], &[][..]),
        (
            "epf",
            &["--ip", "10.0.0.2"],
            &["--from", "10.0.0.1", "--to", "10.0.0.2"],
        ),
    ] {
        let bridges = bridges(family);
        let [a, b] = &bridges.addresses;
        let far = Running::start(&[&["linux", "echo", b], serve].concat());
        let near = run(&[
            &["linux", "ping", a, "--count", "300", "--size", "1000", "--json"],
            ask,
        ]
        .concat());
        let v = object(&near);
        assert_eq!(near.status.code(), Some(0), "{v}");
        assert_eq!(
            (&v["received"], &v["lost"], &v["corrupt"]),
            (&300.into(), &0.into(), &0.into()),
            "{v}"
        );
        assert!(v["rtt_ns"]["p50"].as_u64() > Some(0), "{v}");
        drop(far);
    }
}

#[test]
fn what_is_missing_is_said() {
    let bridges = bridges("intel-spr");
    let [a, b] = &bridges.addresses;
    let says = |args: &[&str], code: i32, words: &str| {
        let output = run(args);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {text}");
        assert!(text.contains(words), "{args:?}: {text}");
    };
    let soon = ["--timeout", "300ms"];
    for client in ["pingpong", "perf", "ping"] {
        says(
            &[&["linux", client, a], &soon[..]].concat(),
            4,
            "the link is down",
        );
    }
    let _idle = Running::start(&["linux", "pingpong", b, "--pause", "1h"]);
    says(
        &[&["linux", "ping", a], &soon[..]].concat(),
        4,
        "Load ntb_transport there",
    );
    says(&["linux", "ping", "soft:x"], 2, "ntb:BUS:DEVICE.FUNCTION");
    says(&["linux", "ping", a, "--from", "10.0.0.1"], 2, "--to");
    says(&["linux", "ping", a, "--size", "70000"], 2, "16 to 65000");
    says(
        &["linux", "ping", a, "--frame", "1000", "--size", "2000"],
        2,
        "do not fit a frame",
    );
    says(
        &["linux", "echo", a, "--queue", "5"],
        2,
        "queue pair 5 does not exist",
    );
    says(&["linux", "tap", a, "--name", "a/b"], 6, "1 to 15 bytes");
}
