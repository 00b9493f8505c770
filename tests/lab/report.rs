//! What the lab says: progress lines, results as text and as JSON.

#![allow(
    clippy::print_stdout,
    reason = "the lab is a program; its progress and results go to standard output"
)]

use std::path::{Path, PathBuf};
use std::time::Duration;

use ntb_emu::Report;
use serde::Serialize;

use crate::error::{Context as _, LabError};

/// One line of progress.
pub(crate) fn say(line: &str) {
    println!("lab: {line}");
}

/// A line that continues the one before it.
pub(crate) fn say_more(line: &str) {
    println!("       {line}");
}

/// The last lines of a text file; empty when it cannot be read.
pub(crate) fn tail(path: &Path, lines: usize) -> String {
    let bytes = std::fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<&str> = text
        .lines()
        .map(str::trim_end)
        .filter(|line| !line.is_empty())
        .collect();
    all.get(all.len().saturating_sub(lines)..)
        .unwrap_or_default()
        .join("\n")
}

/// How one scenario went.
#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    pub scenario: &'static str,
    pub passed: bool,
    pub seconds: f64,
    /// Why it failed, one line per finding; empty when it passed.
    pub reasons: Vec<String>,
    pub steps: Vec<Step>,
    /// What guests reported besides: measured values, evidence.
    pub notes: Vec<String>,
    /// JSON objects of the programs that guests ran: `guest`, `name`, `value`.
    pub results: Vec<serde_json::Value>,
    /// What the emulator counted, where there is one.
    pub bridge: Option<Report>,
    /// Folder with consoles and channel logs, where kept.
    pub logs: Option<PathBuf>,
}

/// One step that a guest passed.
#[derive(Debug, Serialize)]
pub(crate) struct Step {
    pub guest: char,
    pub step: String,
    /// Since the guests were started.
    pub at_seconds: f64,
}

impl Outcome {
    pub(crate) fn print(&self) {
        let verdict = if self.passed { "pass" } else { "FAIL" };
        say(&format!(
            "{verdict} {} in {:.0} s, {} steps passed",
            self.scenario,
            self.seconds,
            self.steps.len()
        ));
        for reason in &self.reasons {
            say_more(reason);
        }
        // Of what failed, the reasons have them.
        for note in self.notes.iter().filter(|_| self.passed) {
            say_more(note);
        }
        if let Some(logs) = &self.logs {
            say_more(&format!("logs: {}", logs.display()));
        }
    }
}

#[derive(Serialize)]
struct Summary<'a> {
    tool: &'static str,
    version: &'static str,
    passed: usize,
    failed: usize,
    seconds: f64,
    scenarios: &'a [Outcome],
}

/// Prints the closing line and writes the JSON object; returns whether everything passed.
pub(crate) fn finish(outcomes: &[Outcome], elapsed: Duration, json: Option<&Path>) -> Result<bool, LabError> {
    let passed = outcomes.iter().filter(|outcome| outcome.passed).count();
    let failed = outcomes.len() - passed;
    if let Some(path) = json {
        let summary = Summary {
            tool: "lab",
            version: env!("CARGO_PKG_VERSION"),
            passed,
            failed,
            seconds: elapsed.as_secs_f64(),
            scenarios: outcomes,
        };
        let mut text = serde_json::to_string_pretty(&summary)
            .map_err(std::io::Error::from)
            .context("format", path)?;
        text.push('\n');
        std::fs::write(path, text).context("write", path)?;
    }
    say(&format!(
        "{} scenarios in {} s",
        outcomes.len(),
        elapsed.as_secs()
    ));
    println!("{passed} passed, {failed} failed");
    Ok(failed == 0 && passed > 0)
}
