//! Every option, with values that cannot be: one line that names the allowed range, exit code 2.

mod common;

use common::run;

/// Option, part of the range that must be named, and whether zero is one of its values.
const OPTIONS: [(&str, &str, bool); 8] = [
    ("--count", "1 to 1000000000000", false),
    ("--size", "1 to 8388608", false),
    ("--rate", "0.001 to 100000000", false),
    ("--duration", "1ms to 30 days", false),
    ("--warmup", "0 to 1000000000", true),
    ("--cpu", "0 to 1023", true),
    ("--wait", "spin, yield, sleep", false),
    ("--timeout", "1ms to 24h", false),
];

fn refused(args: &[&str], part: &str) {
    let output = run(args);
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {err}");
    assert_eq!(err.lines().count(), 1, "{args:?}: {err}");
    assert!(
        err.starts_with("ntb-ping: ") && err.contains(part),
        "{args:?}: {err}"
    );
    assert!(output.stdout.is_empty(), "{args:?}");
}

#[test]
fn bad_values_get_one_line_with_the_range() {
    for (option, range, zero) in OPTIONS {
        for value in [
            "-1",
            "",
            "99999999999999999999999999",
            "x",
            "-",
            "1e999",
            "nan",
            "-inf",
        ] {
            refused(&[option, value], range);
            refused(&["soft:x", &format!("{option}={value}")], range);
        }
        if !zero {
            refused(&[option, "0"], range);
        }
        refused(&[option], range);
    }
    refused(&["--histogram", ""], "path of a file");
    refused(&["--histogram"], "path of a file");
}

#[test]
fn bad_values_of_the_server_too() {
    for value in ["-1", "", "99999999999999999999999999", "x", "0,1"] {
        refused(&["serve", "soft:x", "--cpu", value], "0 to 1023");
    }
    for value in ["", "0", "-1", "x"] {
        refused(&["serve", "soft:x", "--wait", value], "spin, yield, sleep");
    }
    refused(&["serve"], "ADDRESS");
}

#[test]
fn addresses_that_are_none() {
    for address in ["", "x", "soft:", "-1", "0", "soft:a b", "tcp:h:0", "tcp:h:99999"] {
        refused(&[address], "soft:NAME");
        refused(&["serve", address], "soft:NAME");
    }
    refused(&["soft:a", "soft:b"], "soft:b");
    refused(&["--frobnicate"], "--frobnicate");
    refused(&["soft:x\n\u{1b}[31m"], "soft:x??[31m");
}

#[test]
fn processors_and_files_that_cannot_be_had() {
    refused(&["--cpu", "1023"], "allowed: [");
    let output = run(&["--histogram", "/proc/no/such/file"]);
    assert_eq!(output.status.code(), Some(6));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/proc/no/such/file"));
}

#[test]
fn hardware_that_is_not_there() {
    for address in ["ntb:ffff:ff:1f.7", "tcp:localhost:1"] {
        let output = run(&[address, "--timeout", "1s"]);
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(3 | 4)), "{err}");
        assert_eq!(err.lines().count(), 1, "{err}");
    }
}

#[test]
fn help_and_version_go_to_standard_output() {
    for args in [["--help"], ["--version"], ["-h"]] {
        let output = run(&args);
        assert_eq!(output.status.code(), Some(0));
        assert!(String::from_utf8_lossy(&output.stdout).contains("ntb-ping"));
    }
    let help = run(&["--help"]);
    let help = String::from_utf8_lossy(&help.stdout).into_owned();
    for (option, ..) in OPTIONS {
        assert!(help.contains(option), "{option} is not in the help");
    }
    assert!(!help.contains("floor-peer") && !help.contains("--parent"));
}
