//! Starting in either order, killing and restarting either side, stalling, interrupting.

mod common;

use std::time::Duration;

use common::{Running, address, object, until};
use rustix::process::Signal;

const DELAY: Duration = Duration::from_millis(700);

#[test]
fn either_side_may_start_first() {
    let address = address();
    for client_first in [true, false] {
        let start_server = || Running::start(&["serve", &address]);
        let start_client = || Running::start(&[&address, "--json", "--count", "500", "--warmup", "10"]);
        let (server, client) = if client_first {
            let client = start_client();
            std::thread::sleep(DELAY);
            (start_server(), client)
        } else {
            let server = start_server();
            std::thread::sleep(DELAY);
            (server, start_client())
        };
        let output = client.finish();
        let v = object(&output);
        assert_eq!(output.status.code(), Some(0), "{v}");
        assert_eq!((&v["received"], &v["lost"]), (&500.into(), &0.into()));
        server.expect("running", 1);
    }
}

#[test]
fn a_server_outlives_its_clients() {
    let address = address();
    let server = Running::start(&["serve", &address]);
    for round in 1..=3 {
        let output = Running::start(&[&address, "--json", "--count", "300", "--warmup", "10"]).finish();
        assert_eq!(output.status.code(), Some(0), "{}", object(&output));
        server.expect("] running", round);
    }
    // One that is killed in mid-traffic is no different.
    for round in 4..=6 {
        let client = Running::start(&[&address, "--json", "--duration", "60s"]);
        server.expect("] running", round);
        std::thread::sleep(Duration::from_millis(200));
        client.signal(Signal::KILL);
        drop(client);
    }
    let output = Running::start(&[&address, "--json", "--count", "300", "--warmup", "10"]).finish();
    assert_eq!(object(&output)["lost"], 0);
    assert!(server.out().contains("peer-gone"), "{}", server.out());
    server.signal(Signal::TERM);
    assert_eq!(server.finish().status.code(), Some(0));
}

#[test]
fn a_client_goes_on_when_its_server_is_killed_and_restarted() {
    let address = address();
    let server = Running::start(&["serve", &address]);
    let client = Running::start(&[
        &address,
        "--json",
        "--rate",
        "2000",
        "--duration",
        "300s",
        "--timeout",
        "60s",
    ]);
    server.expect("] running", 1);
    std::thread::sleep(DELAY);
    let mut next = server;
    for round in 1..=2 {
        next.signal(Signal::KILL);
        drop(next);
        // The link notices that its process has gone before the session misses it.
        until("the loss", || {
            (client.err().matches("link-lost").count() + client.err().matches("peer-gone").count() >= round)
                .then_some(())
        });
        next = Running::start(&["serve", &address]);
        client.expect("] running", round);
        std::thread::sleep(DELAY);
    }
    client.signal(Signal::INT);
    let output = client.finish();
    let v = object(&output);
    assert_eq!(v["peer"]["reconnects"], 2, "{v}");
    assert!(v["received"].as_u64().unwrap() > 0, "{v}");
    assert!(v["events"].to_string().contains("peer-restarted"), "{v}");
}

#[test]
fn a_server_that_does_not_come_back_is_a_lost_link() {
    let address = address();
    let server = Running::start(&["serve", &address]);
    let client = Running::start(&[&address, "--json", "--duration", "60s", "--timeout", "1s"]);
    server.expect("] running", 1);
    std::thread::sleep(DELAY);
    server.signal(Signal::KILL);
    let output = client.finish();
    let v = object(&output);
    assert_eq!(output.status.code(), Some(5), "{v}");
    assert_eq!(v["error"]["name"], "peer-lost", "{v}");
    assert!(v["events"].to_string().contains("link-lost"), "{v}");
}

#[test]
fn nobody_there_is_told_with_the_missing_step() {
    let output = Running::start(&[&address(), "--timeout", "300ms"]).finish();
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{err}");
    assert_eq!(err.lines().count(), 1, "{err}");
    assert!(err.contains("missing") && err.contains("no-peer"), "{err}");
}

#[test]
fn a_stalled_peer_is_named() {
    let address = address();
    let server = Running::start(&["serve", &address]);
    let client = Running::start(&[
        &address,
        "--json",
        "--rate",
        "1000",
        "--duration",
        "60s",
        "--timeout",
        "2s",
    ]);
    server.expect("] running", 1);
    std::thread::sleep(DELAY);
    server.signal(Signal::STOP);
    let output = client.finish();
    server.signal(Signal::CONT);
    let v = object(&output);
    assert_eq!(output.status.code(), Some(5), "{v}");
    assert_eq!(v["error"]["name"], "stalled-peer-process", "{v}");
    assert!(
        v["error"]["what"].as_str().unwrap().contains("no heartbeat for"),
        "{v}"
    );
    assert!(v["events"].to_string().contains("peer-silent"), "{v}");
}

#[test]
fn an_own_peer_that_dies_ends_the_run() {
    let client = Running::start(&["--duration", "60s"]);
    client.expect("started its own peer, process ", 1);
    let out = client.out();
    let pid: i32 = out.split("process ").nth(1).unwrap().trim().parse().unwrap();
    std::thread::sleep(DELAY);
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    let output = client.finish();
    let out = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(5), "{out}");
    assert!(
        out.contains("own-peer-ended") && out.contains("signal 9"),
        "{out}"
    );
}

#[test]
fn an_own_peer_does_not_outlive_a_killed_client() {
    let client = Running::start(&["--duration", "60s"]);
    client.expect("started its own peer, process ", 1);
    let pid: i32 = client
        .out()
        .split("process ")
        .nth(1)
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    client.signal(Signal::KILL);
    drop(client);
    until("the end of the peer", || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        (stat.is_empty() || stat.contains(") Z ")).then_some(())
    });
}

#[test]
fn an_interrupt_prints_the_summary() {
    for signal in [Signal::INT, Signal::TERM] {
        for extra in [&["--rate", "1000"][..], &[], &["--oneway"], &["--wait", "sleep"]] {
            let client = Running::start(&[&["--duration", "60s"], extra].concat());
            client.expect("started its own peer", 1);
            std::thread::sleep(DELAY);
            client.signal(signal);
            let output = client.finish();
            let out = String::from_utf8_lossy(&output.stdout);
            assert!(
                out.contains("interrupted: this is what was measured"),
                "{extra:?} {out}"
            );
            assert_eq!(output.status.code(), Some(0), "{extra:?} {out}");
        }
    }
}

#[test]
fn an_interrupt_ends_the_wait_for_a_peer() {
    let client = Running::start(&[&address()]);
    std::thread::sleep(DELAY);
    client.signal(Signal::INT);
    let output = client.finish();
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{err}");
    assert!(err.contains("interrupted while waiting"), "{err}");
}
