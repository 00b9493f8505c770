//! Links over a network, and the choice among all: served and measured by name, with and without the secret.

mod common;

use common::{Running, object, run, until};
use rustix::process::Signal;

const SECRET: &str = "the secret of these tests";

/// A place to meet on the loopback that is free now.
fn place(kind: &str) -> String {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    format!("{kind}:127.0.0.1:{port}")
}

#[test]
fn tcp_is_served_and_measured_by_its_name() {
    let address = place("tcp");
    let server = Running::start(&["serve", &address, "--secret", SECRET]);
    for size in ["1", "48", "100000"] {
        let output = run(&[
            &address, "--secret", SECRET, "--json", "--count", "500", "--size", size,
        ]);
        let v = object(&output);
        assert_eq!(output.status.code(), Some(0), "{v}");
        assert_eq!((&v["received"], &v["lost"]), (&500.into(), &0.into()));
        assert_eq!(
            (&v["link"]["kind"], &v["link"]["address"]),
            (&"tcp".into(), &address.clone().into())
        );
        assert!(
            v["events"].to_string().contains("tcp at "),
            "the transport is an event: {v}"
        );
    }
    server.signal(Signal::TERM);
    let output = server.finish();
    assert_eq!(output.status.code(), Some(0));
    assert!(!String::from_utf8_lossy(&output.stdout).contains(SECRET));
}

#[test]
fn another_secret_is_refused_and_shown_nowhere() {
    let address = place("tcp");
    let server = Running::start(&["serve", &address, "--secret", SECRET]);
    server.expect("serving on", 1);
    for wrong in [&["--secret", "something else"][..], &[]] {
        let output = run(&[&[address.as_str(), "--count", "10"], wrong].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(6), "{said}");
        assert!(
            said.contains("auth-secret-mismatch") && !said.contains("something else"),
            "{said}"
        );
    }
    let output = run(&["tcp:0.0.0.0:9", "--count", "1"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(6), "{said}");
    assert!(
        said.contains("secret-needed") && said.contains("NTB_SECRET"),
        "{said}"
    );
    for (args, code) in [(["--secret", ""], 2), (["--secret-file", "/nowhere/at/all"], 6)] {
        let output = run(&[&[address.as_str()], &args[..]].concat());
        assert_eq!(
            output.status.code(),
            Some(code),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

/// Who waits is told that somebody came without the secret.
#[test]
fn strangers_are_named_to_who_waits_for_a_peer() {
    for kind in ["tcp", "auto"] {
        let address = place(kind);
        let waiting = Running::start(&[&address, "--secret", "a", "--count", "1", "--timeout", "6s"]);
        let port = address.rsplit(':').next().unwrap().to_owned();
        until("the one who waits to listen", || {
            std::net::TcpStream::connect(format!("127.0.0.1:{port}")).ok()
        });
        let stranger = run(&["serve", &address, "--secret", "b"]);
        assert_eq!(stranger.status.code(), Some(6), "{stranger:?}");
        let output = waiting.finish();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(4), "{said}");
        assert!(said.contains("had another secret or none"), "{kind}: {said}");
        assert!(!said.contains("; 0 in all"), "{kind}: {said}");
    }
}

#[test]
fn both_ends_choose_together_and_say_why() {
    let address = place("auto");
    let server = Running::start(&["serve", &address]);
    let output = run(&[&address, "--json", "--count", "500"]);
    let v = object(&output);
    assert_eq!(output.status.code(), Some(0), "{v}");
    assert_eq!(v["link"]["kind"], "soft", "both ends are on this machine: {v}");
    let why = v["link"]["reason"].as_str().unwrap();
    assert!(why.contains("no bridge (NTB)") && why.contains("RDMA"), "{why}");
    assert!(v["events"].to_string().contains("transport-chosen"), "{v}");
    // The next one is told what was chosen.
    let v = object(&run(&[&address, "--json", "--count", "500"]));
    assert_eq!((&v["link"]["kind"], &v["lost"]), (&"soft".into(), &0.into()));
    drop(server);
}

#[test]
fn what_is_not_there_is_named_and_nothing_else_taken() {
    let output = run(&["--strict", "--count", "1"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(
        said.contains("no bridge (NTB)") && said.contains("RDMA"),
        "{said}"
    );
    let output = run(&[&place("auto"), "--count", "1", "--timeout", "300ms"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(
        said.contains("looked for here: no bridge (NTB)") && said.contains("to be had: soft, tcp"),
        "{said}"
    );
}

#[test]
fn the_baseline_has_every_layer() {
    let output = run(&["--baseline", "--count", "300", "--json"]);
    let v = object(&output);
    let rows = v["rows"].as_array().unwrap();
    let layers: Vec<_> = rows.iter().map(|r| r["layer"].as_str().unwrap()).collect();
    assert_eq!(
        layers,
        [
            "bare-line",
            "soft",
            "emulated-ntb",
            "rdma",
            "tcp",
            "bare-tcp-echo"
        ]
    );
    for row in rows {
        let measured = row["rtt_p50_ns"].is_u64();
        assert!(
            measured || row["layer"] == "rdma" && row["unavailable"].is_string(),
            "{row}"
        );
    }
    assert_eq!(output.status.code(), Some(0), "{v}");
}
