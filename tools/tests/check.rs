//! `ntb-check` from the outside: command line, recording, and what is no fault but worth knowing.

#![allow(unreachable_pub, dead_code, reason = "each test program uses its part")]

mod check_machines;

use check_machines::{Machine, NTB, Scratch, about, dir, named, ntb_check};
use ntb_tools::check::{description::Described, record};

#[test]
fn a_link_that_is_narrower_than_it_could_be_is_a_warning() {
    let dir = dir(NTB);
    let machine = Machine::good()
        .file(&format!("{dir}/max_link_speed"), "32.0 GT/s PCIe")
        .file(&format!("{dir}/current_link_width"), "8");
    let (code, report) = machine.check(&[]);
    assert_eq!(code, 0);
    let item = named(&report, "narrow-link");
    assert_eq!(item["finding"], "x8 16.0 GT/s now, x16 32.0 GT/s possible");
    assert_eq!(machine.check(&["--strict"]).0, 1);
    // Idle links are slow to save power.
    let idle = Machine::good().file(&format!("{dir}/current_link_speed"), "2.5 GT/s PCIe");
    let (code, report) = idle.check(&["--strict"]);
    assert_eq!(
        (code, &about(&report, "link")["state"]),
        (0, &"note".into()),
        "{report:#}"
    );
    let unknown = Machine::good().file(&format!("{dir}/current_link_speed"), "Unknown");
    assert_eq!(about(&unknown.check(&[]).1, "link")["state"], "note");
}

#[test]
fn faults_in_the_kernel_log_are_shown_with_the_likely_cause() {
    let log = "6,1,1,-;boot\n3,2,2,-;DMAR: [DMA Write NO_PASID] Request device [81:00.0] fault addr 0xfe000000 \
               [fault reason 0x05] PTE Write access is not set\n SUBSYSTEM=pci\n\
               3,3,3,-;DMAR: [DMA Write NO_PASID] Request device [82:00.0] fault addr 0x1 [fault reason 0x05]\n\
               4,4,4,-;vfio-pci 0000:81:00.0: PCIe Bus Error: severity=Correctable, type=Data Link Layer\n";
    let (code, report) = Machine::good().file("/dev/kmsg", log).check(&["--strict"]);
    assert_eq!(code, 1);
    let item = named(&report, "iommu-faults");
    assert!(
        item["finding"].as_str().unwrap().starts_with("1 accesses"),
        "{item:#}"
    );
    assert!(
        item["remedy"].as_str().unwrap().contains("alias quirk"),
        "{item:#}"
    );
    named(&report, "aer-reports");
}

#[test]
fn errors_that_were_counted_are_shown() {
    let dir = dir(NTB);
    let some = Machine::good().file(&format!("{dir}/aer_dev_correctable"), "RxErr 3\nTOTAL_ERR_COR 3");
    assert_eq!(about(&some.check(&[]).1, "pcie-errors")["state"], "note");
    let bad = some.file(&format!("{dir}/aer_dev_fatal"), "TOTAL_ERR_FATAL 1");
    assert_eq!(named(&bad.check(&[]).1, "pcie-errors")["state"], "warning");
}

#[test]
fn windows_that_store_uncombined_are_named_with_the_cause() {
    let dir = dir(NTB);
    let wc = format!("{dir}/resource2_wc");
    let missing = Machine::good().without(&wc);
    let item = |m: &Machine| about(&m.check(&[]).1, "window").clone();
    let text = item(&missing)["finding"].as_str().unwrap().to_owned();
    assert!(
        text.contains("stores will be uncached") && text.contains("resource2_wc does not exist"),
        "{text}"
    );
    assert_eq!(item(&missing)["name"], "no-such-mapping");
    let forbidden = Machine::good().node(&wc, false);
    assert!(item(&forbidden)["remedy"].as_str().unwrap().contains("root"));
}

#[test]
fn a_bar_that_is_too_small_is_named_with_both_amounts() {
    let machine = Machine::good().file(
        &format!("{}/resource", dir(NTB)),
        "0x384000000000 0x384000007fff 0x14220c\n0x0 0x0 0x0\n0x380000000000 0x38003fffffff 0x14220c\n",
    );
    let (code, report) = machine.check(&[]);
    assert_eq!(code, 3);
    let text = named(&report, "too-small")["finding"].as_str().unwrap();
    assert!(text.contains("46276 bytes of BAR0, and it has 32768"), "{text}");
    // A window that the family has and the firmware gave no size.
    let window = named(&report, "no-bar")["finding"].as_str().unwrap();
    assert!(window.contains("window 1 lies in BAR4"), "{window}");
}

/// Nobody is told to take a network card from its driver.
#[test]
fn a_function_that_is_no_bridge_is_named_and_left_alone() {
    let at = "0000:05:00.0";
    let machine = Machine::good().function(at, "0x8086", "0x1592", "0x02", "0x020000", Some("ice"));
    let (code, report) = machine.check(&[at]);
    assert_eq!(
        (code, &report["names"]),
        (3, &serde_json::json!(["not-an-ntb"])),
        "{report:#}"
    );
    assert!(!report.to_string().contains("driver_override"), "{report:#}");
}

#[test]
fn a_device_that_has_vanished_is_told_from_one_in_the_wrong_mode() {
    let gone = Machine::good().bytes(&format!("{}/config", dir(NTB)), 0, "ffffffffffffffff");
    let (code, report) = gone.check(&[]);
    assert_eq!(
        (code, &report["names"][0]),
        (5, &"device-gone".into()),
        "{report:#}"
    );
}

#[test]
fn settings_that_cost_latency_are_warnings() {
    let machine = Machine::good()
        .file(
            "/sys/module/pcie_aspm/parameters/policy",
            "default performance [powersave]",
        )
        .file(
            "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
            "powersave",
        )
        .file("/sys/devices/system/cpu/cpu0/cpuidle/state2/name", "C6")
        .file("/sys/devices/system/cpu/cpu0/cpuidle/state2/latency", "170")
        .file("/sys/module/vfio/parameters/enable_unsafe_noiommu_mode", "Y");
    let (code, report) = machine.check(&[]);
    assert_eq!(code, 0);
    for name in ["aspm", "governor", "unsafe-mode-on"] {
        assert_eq!(named(&report, name)["state"], "warning");
    }
    let sleep = about(&report, "processor-sleep");
    assert!(
        sleep["finding"].as_str().unwrap().contains("C6 (170 us)"),
        "{sleep:#}"
    );
}

#[test]
fn what_is_unknown_is_a_note_and_no_panic() {
    let mut machine = Machine::good();
    for text in machine.0.files.values_mut() {
        *text = "\u{fffd} -1 [ 0x".to_owned();
    }
    machine.0.bytes.clear();
    let (_, report) = machine.check(&[]);
    assert_eq!(report["names"][0], "no-device", "{report:#}");
    let (code, _) = machine.check(&[NTB]);
    assert!([0, 3, 6].contains(&code), "{code}");
}

/// A recorded machine gives the same answers as the machine it was recorded from, and holds no more than it should.
#[test]
fn a_recording_answers_as_the_machine_does() {
    let dir = dir(NTB);
    let machine = Machine::good()
        .function(
            "0000:81:00.1",
            "0x8086",
            "0x0001",
            "0x00",
            "0x020000",
            Some("ice"),
        )
        .group("0000:81:00.1", 42)
        .file(
            "/proc/self/limits",
            "Max cpu time 1 1 s\nMax locked memory  65536  65536  bytes",
        )
        .file(
            "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
            "powersave",
        )
        .file("/etc/hostname", "secret-host")
        .file("/proc/cmdline", "root=secret-root")
        .file("/proc/self/environ", "USER=secret-user")
        .file(
            "/dev/kmsg",
            "6,1,1,-;secret-host booted\n3,2,2,-;DMAR: [81:00.0] fault addr 0x1\n",
        )
        .file(&format!("{dir}/serial"), "secret-serial");
    let described = Described::unpack(&machine.0).unwrap();
    let recorded = Machine(record::describe(described.machine()));
    assert_eq!(recorded.check(&[]), machine.check(&[]));
    assert!(machine.check(&[]).1["names"].as_array().unwrap().len() >= 4);
    let text = serde_json::to_string(&recorded.0).unwrap();
    assert!(!text.contains("secret"), "{text}");
    // Recording a recording changes nothing.
    let described = Described::unpack(&recorded.0).unwrap();
    assert_eq!(record::describe(described.machine()), recorded.0);
}

#[test]
fn this_machine_is_recorded_and_nothing_is_overwritten() {
    let file = Scratch::new();
    let record = || ntb_check().arg("record").arg(&file.0).output().unwrap();
    let first = record();
    assert!(
        first.status.success(),
        "{}",
        String::from_utf8_lossy(&first.stderr)
    );
    let output = ntb_check()
        .arg("--json")
        .arg("--machine")
        .arg(&file.0)
        .output()
        .unwrap();
    assert!(
        output.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let again = record();
    assert_eq!(again.status.code(), Some(6));
    assert!(String::from_utf8_lossy(&again.stderr).contains("choose another name"));
}

#[test]
fn bad_usage_is_one_line() {
    let cases: [(&[&str], i32, &str); 7] = [
        (&["--memory", "0"], 2, "4KiB to 1TiB"),
        (&["--memory"], 2, "4KiB to 1TiB"),
        (&["81:00"], 2, "BUS:DEVICE.FUNCTION"),
        (&["--machine", "/nonexistent/x"], 2, "/nonexistent/x"),
        (&["--machine", "/dev/zero"], 2, "no file"),
        (&["record"], 2, "FILE"),
        (&["--bogus"], 2, "--help"),
    ];
    for (args, code, part) in cases {
        let output = ntb_check().args(args).output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {err}");
        assert!(err.lines().count() == 1 && err.contains(part), "{args:?}: {err}");
    }
    let help = ntb_check().arg("--help").output().unwrap();
    let help = String::from_utf8_lossy(&help.stdout);
    assert!(
        help.contains("Exit codes") && help.contains("record") && help.contains("--machine"),
        "{help}"
    );
}

#[test]
fn descriptions_that_cannot_be_are_refused() {
    let file = Scratch::new();
    for (text, code) in [
        ("", 2),
        ("{}", 2),
        ("{\"ntb_machine\":1,\"files\":{\"/../x\":\"\"}}", 2),
        ("{\"ntb_machine\":1,\"unknown\":1}", 2),
        ("{\"ntb_machine\":99}", 7),
    ] {
        std::fs::write(&file.0, text).unwrap();
        let output = ntb_check().arg("--machine").arg(&file.0).output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{text}: {err}");
        assert_eq!(err.lines().count(), 1, "{text}: {err}");
    }
}
