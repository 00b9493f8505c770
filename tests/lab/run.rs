//! Runs one scenario: starts the bridge and the guests, carries words between them, judges what they report.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::emulator::Pair;
use crate::error::{Context as _, LabError};
use crate::guest::{Event, Guest, Start};
use crate::initramfs;
use crate::programs::{self, Files};
use crate::report::{Outcome, Step, tail};
use crate::scenario::{ROLES, Scenario};
use crate::setup::Prepared;

/// Lines by which a kernel says that something went wrong inside it.
const COMPLAINTS: &[&str] = &[
    "BUG:",
    "WARNING:",
    "Oops",
    "Call Trace",
    "Kernel panic",
    "general protection fault",
    "DMAR: [DMA",
    "detected stall",
    "blocked for more than",
];

/// How long the other guest may go on after one has failed, for its side of the story.
const GRACE: Duration = Duration::from_secs(5);

/// Where a scenario's files go.
#[derive(Debug)]
pub(crate) struct Place {
    pub logs: PathBuf,
    /// Short: paths of Unix sockets are limited to 107 bytes.
    pub sockets: PathBuf,
    /// Where this workspace's programs are, for scenarios that need some.
    pub programs: Option<PathBuf>,
    /// For what scenarios leave to chance.
    pub seed: u32,
}

/// Runs a scenario to its end or its time limit. Errors are what kept it from running at all.
pub(crate) fn run(prepared: &Prepared, scenario: &Scenario, place: &Place) -> Result<Outcome, LabError> {
    if place.logs.exists() {
        fs::remove_dir_all(&place.logs).context("remove", &place.logs)?;
    }
    for folder in [&place.logs, &place.sockets] {
        fs::create_dir_all(folder).context("create", folder)?;
    }
    let initramfs = place.logs.join("initramfs");
    let mut files = Files::new();
    programs::add_debian(prepared, scenario.debian, &mut files)?;
    if let Some(built) = &place.programs {
        programs::add_own(prepared, built, scenario.programs, &mut files)?;
    }
    let archive = initramfs::pack(prepared, scenario.script, &files)?;
    fs::write(&initramfs, archive).context("write", &initramfs)?;

    let bridge = scenario
        .bridge
        .map(|bridge| Pair::start(bridge, &place.sockets))
        .transpose()?;
    let (sender, events) = mpsc::channel();
    let start = Instant::now();
    let mut guests = Vec::new();
    for (at, (role, machine)) in ROLES.into_iter().zip(&scenario.guests).enumerate() {
        let start = Start {
            prepared,
            place: at,
            role,
            machine,
            network: scenario.network,
            initramfs: &initramfs,
            settings: settings(scenario, place, at),
            port: bridge.as_ref().map(|bridge| bridge.socket(at).to_owned()),
            logs: &place.logs,
            sockets: &place.sockets,
        };
        guests.push(Guest::start(start, sender.clone())?);
    }

    let mut run = Run {
        scenario,
        start,
        guests,
        bridge,
        stories: Default::default(),
        first_failure: None,
        talk: Vec::new(),
        results: Vec::new(),
    };
    run.follow(&events);
    for guest in &mut run.guests {
        guest.kill();
    }
    fs::remove_file(&initramfs).context("remove", &initramfs)?;
    run.judge(place)
}

fn settings(scenario: &Scenario, place: &Place, at: usize) -> Vec<(&'static str, String)> {
    let mut all = vec![
        ("ROLE", ROLES[at].to_string()),
        ("PEER", ROLES[1 - at].to_string()),
        ("SEED", place.seed.to_string()),
    ];
    all.extend(
        scenario
            .settings
            .iter()
            .map(|(name, value)| (*name, (*value).to_owned())),
    );
    all
}

/// What is known of one guest.
#[derive(Debug, Default)]
struct Story {
    step: String,
    passed: Vec<(String, Duration)>,
    notes: Vec<String>,
    /// Boots after the first, by what was done to the machine.
    boots: u32,
    failure: Option<String>,
    done: bool,
    ended: bool,
}

impl Story {
    /// Nothing good can come from this guest any more.
    fn lost(&self) -> bool {
        self.failure.is_some() || (self.ended && !self.done)
    }
}

struct Run<'a> {
    scenario: &'a Scenario,
    start: Instant,
    guests: Vec<Guest<'a>>,
    bridge: Option<Pair>,
    stories: [Story; 2],
    /// The guest that failed first.
    first_failure: Option<usize>,
    /// Everything said over the channels, with the time.
    talk: Vec<u8>,
    /// JSON objects that guests handed over.
    results: Vec<Value>,
}

impl Run<'_> {
    /// Listens until both guests have ended, one has failed, or the time is up.
    fn follow(&mut self, events: &mpsc::Receiver<Event>) {
        let mut deadline = self.start + self.scenario.time_limit;
        while self.stories.iter().any(|story| !story.ended) {
            let left = deadline.saturating_duration_since(Instant::now());
            match events.recv_timeout(left) {
                Ok(event) if !self.guests[event.place].told(&event) => {}
                Ok(Event { place, line, .. }) => match line {
                    Some(line) => self.hear(place, &line),
                    None => self.stories[place].ended = true,
                },
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return,
            }
            if self.stories.iter().any(Story::lost) {
                deadline = deadline.min(Instant::now() + GRACE);
            }
        }
    }

    fn hear(&mut self, at: usize, line: &str) {
        let elapsed = self.start.elapsed();
        let _ = writeln!(self.talk, "{:8.3} {} {line}", elapsed.as_secs_f64(), ROLES[at]);
        let story = &mut self.stories[at];
        let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
        match verb {
            "begin" => rest.clone_into(&mut story.step),
            "pass" => story.passed.push((rest.to_owned(), elapsed)),
            "note" => story.notes.push(rest.to_owned()),
            "fail" => {
                story.failure = Some(rest.to_owned());
                // The first to fail is the one to blame; the other is asked for its side of the story.
                self.first_failure.get_or_insert(at);
                self.guests[1 - at].tell("abort");
            }
            "done" => story.done = true,
            "put" => self.guests[1 - at].tell(line),
            "bridge" => {
                let answer = match self.bridge.as_ref().map(|bridge| bridge.act(rest)) {
                    Some(Ok(())) => "done".to_owned(),
                    Some(Err(why)) => why,
                    None => "there is no bridge".to_owned(),
                };
                self.guests[at].tell(&format!("put bridge {answer}"));
            }
            "count" => {
                let answer = self.count(rest);
                self.guests[at].tell(&format!("put count {answer}"));
            }
            "machine" => {
                let answer = self.machine(rest).err().unwrap_or_else(|| "done".to_owned());
                self.guests[at].tell(&format!("put machine {answer}"));
            }
            "boots" => {
                let boots = story.boots;
                self.guests[at].tell(&format!("put boots {boots}"));
            }
            "result" => {
                let (name, text) = rest.split_once(' ').unwrap_or((rest, ""));
                match serde_json::from_str::<Value>(text) {
                    Ok(value) => self
                        .results
                        .push(json!({ "guest": ROLES[at], "name": name, "value": value })),
                    Err(why) => story.notes.push(format!("{name} is no JSON: {why}")),
                }
            }
            // Not one of the script's lines: kept in the talk log, where an author of scripts looks.
            _ => {}
        }
    }

    /// A count of the emulator by the names on the way to it, joined by dots.
    fn count(&self, path: &str) -> String {
        let Some(bridge) = &self.bridge else {
            return "no-bridge".to_owned();
        };
        let report = serde_json::to_value(bridge.report()).unwrap_or_default();
        match report.pointer(&format!("/{}", path.replace('.', "/"))) {
            Some(value) => value.to_string(),
            None => "no-such-count".to_owned(),
        }
    }

    /// Does `ROLE ACTION` to a guest's machine.
    fn machine(&mut self, request: &str) -> Result<(), String> {
        let (role, action) = request.split_once(' ').unwrap_or((request, ""));
        let place = ROLES.iter().position(|known| role.chars().eq([*known]));
        let place = place.ok_or_else(|| format!("{role:?} is no guest"))?;
        if self.guests[place].act(action)? {
            let story = &mut self.stories[place];
            story.boots += 1;
            (story.done, story.ended) = (false, false);
        }
        Ok(())
    }

    fn judge(self, place: &Place) -> Result<Outcome, LabError> {
        let talk = place.logs.join("talk");
        fs::write(&talk, &self.talk).context("write", &talk)?;
        let seconds = self.start.elapsed().as_secs_f64();
        let mut reasons = Vec::new();
        reasons.extend(self.bridge.iter().flat_map(Pair::faults));
        for (at, role) in ROLES.into_iter().enumerate() {
            reasons.extend(
                self.verdict(at)
                    .into_iter()
                    .map(|reason| format!("guest {role}: {reason}")),
            );
            let complaints = complaints(&self.guests[at].console, self.scenario.tolerates);
            reasons.extend(
                complaints
                    .into_iter()
                    .map(|line| format!("guest {role}: kernel: {line}")),
            );
        }
        let passed = reasons.is_empty();
        if !passed {
            reasons.extend(self.evidence(place));
        }
        let all = |at: usize| {
            self.stories[at]
                .passed
                .iter()
                .map(move |passed| (ROLES[at], passed))
        };
        let mut steps: Vec<Step> = all(0)
            .chain(all(1))
            .map(|(guest, (step, at))| Step {
                guest,
                step: step.clone(),
                at_seconds: at.as_secs_f64(),
            })
            .collect();
        steps.sort_by(|one, other| one.at_seconds.total_cmp(&other.at_seconds));
        let notes = ROLES.into_iter().zip(&self.stories);
        let notes =
            notes.flat_map(|(role, story)| story.notes.iter().map(move |note| format!("{role}: {note}")));
        Ok(Outcome {
            scenario: self.scenario.name,
            passed,
            seconds,
            reasons,
            steps,
            notes: notes.collect(),
            results: self.results,
            bridge: self.bridge.as_ref().map(Pair::report),
            logs: Some(place.logs.clone()),
        })
    }

    /// What is wrong with one guest's report.
    fn verdict(&self, at: usize) -> Vec<String> {
        let story = &self.stories[at];
        let step = if story.step.is_empty() {
            "start-up"
        } else {
            &story.step
        };
        if let Some(failure) = &story.failure {
            return if self.first_failure == Some(at) {
                vec![failure.clone()]
            } else {
                vec![]
            };
        }
        if !story.done {
            // The other guest's failure ends the run early; this one is then only a bystander.
            return match (story.ended, self.stories[1 - at].lost()) {
                (true, _) => vec![format!("ended in {step} without a word")],
                (false, true) => vec![],
                (false, false) => vec![format!("still in {step} when the time was up")],
            };
        }
        let passed: BTreeSet<&str> = story.passed.iter().map(|(step, _)| step.as_str()).collect();
        let missing = self
            .scenario
            .steps_of(ROLES[at])
            .filter(|step| !passed.contains(step));
        missing.map(|step| format!("never reported {step}")).collect()
    }

    /// The lines that matter of a failed run.
    fn evidence(&self, place: &Place) -> Vec<String> {
        let mut lines = Vec::new();
        for (at, role) in ROLES.into_iter().enumerate() {
            let story = &self.stories[at];
            lines.extend(story.notes.iter().map(|note| format!("[{role} note] {note}")));
            let console = tail(&self.guests[at].console, 12);
            lines.extend(console.lines().map(|line| format!("[{role} console] {line}")));
            // The first line is the command; QEMU's own complaints follow.
            let qemu = tail(&place.logs.join(format!("{role}.qemu")), 6);
            let complaints = qemu.lines().filter(|line| line.starts_with("qemu"));
            lines.extend(complaints.map(|line| format!("[{role} QEMU] {line}")));
        }
        lines
    }
}

fn complaints(console: &Path, tolerated: &[&str]) -> Vec<String> {
    let bytes = fs::read(console).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let is_complaint = |line: &&str| {
        COMPLAINTS.iter().any(|mark| line.contains(mark)) && !tolerated.iter().any(|mark| line.contains(mark))
    };
    text.lines()
        .filter(is_complaint)
        .take(5)
        .map(|line| line.trim_end().to_owned())
        .collect()
}
