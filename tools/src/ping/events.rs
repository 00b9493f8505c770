//! What happens to a link, by name and with the time, as it happens.

use std::{
    io::Write,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use ntb_ring::{
    channel::Connection,
    link::LinkEvent,
    session::{Event, SessionState},
};
use serde::Serialize;

/// An event.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Record {
    /// Seconds since this program started to watch the link.
    pub at_s: f64,
    /// Stable name.
    pub name: String,
    /// In words; empty where the name says it all.
    pub detail: String,
}

/// Where events are printed as they come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Print {
    /// All of them, on standard output.
    All,
    /// Those that matter once the link has run, on standard error.
    Trouble,
    /// None.
    Nothing,
}

/// What is known of the peer's heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Silence {
    /// When it was last heard.
    pub since: Instant,
}

#[derive(Debug, Default)]
struct Log {
    records: Vec<Record>,
    silence: Option<Silence>,
    refused: Option<String>,
    word_of_link: Option<String>,
    runs: u64,
    /// What was last waited for, until something else happens.
    waiting: Option<String>,
}

/// Watches a connection on a thread of its own until it is dropped.
#[derive(Debug)]
pub struct Events {
    log: Arc<Mutex<Log>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Events kept for the report.
const KEPT: usize = 200;
/// How soon the thread notices that it is to end.
const TICK: Duration = Duration::from_millis(50);

impl Events {
    /// Starts to watch.
    pub fn watch(connection: Arc<Connection>, print: Print) -> std::io::Result<Self> {
        let log = Arc::new(Mutex::new(Log::default()));
        let stop = Arc::new(AtomicBool::new(false));
        let thread = {
            let (log, stop) = (Arc::clone(&log), Arc::clone(&stop));
            std::thread::Builder::new().name("ntb-events".into()).spawn(move || {
                let start = Instant::now();
                while !stop.load(Ordering::Relaxed) {
                    if let Some(event) = connection.next_event(TICK) {
                        take(&log, &event, start, print);
                    } else if matches!(connection.wait_running(Duration::ZERO), Err(e) if !is_temporary(&e)) {
                        std::thread::sleep(TICK); // it has failed for good: events no longer wait
                    }
                }
            })?
        };
        Ok(Self {
            log,
            stop,
            thread: Some(thread),
        })
    }

    /// All so far; beyond 200 the newest are left out.
    pub fn records(&self) -> Vec<Record> {
        self.lock().records.clone()
    }

    /// Since when the peer's heartbeat is missing.
    pub fn silence(&self) -> Option<Silence> {
        self.lock().silence
    }

    /// Why the peer's or a channel's shape does not fit, if it does not.
    pub fn refused(&self) -> Option<String> {
        self.lock().refused.clone()
    }

    /// What the link itself has told last that is no change of its state, such as strangers who came.
    pub fn word_of_link(&self) -> Option<String> {
        self.lock().word_of_link.clone()
    }

    /// How often the link has begun to run.
    pub fn runs(&self) -> u64 {
        self.lock().runs
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn is_temporary(e: &ntb_ring::channel::ConnectError) -> bool {
    matches!(e, ntb_ring::channel::ConnectError::TimedOut { .. })
}

#[allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "events are for the terminal"
)]
fn take(log: &Mutex<Log>, event: &Event, start: Instant, print: Print) {
    let now = Instant::now();
    let record = Record {
        at_s: (start.elapsed().as_secs_f64() * 1000.0).round() / 1000.0,
        name: event.name().to_owned(),
        detail: describe(event),
    };
    let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
    let repeated = matches!(event, Event::Waiting(_)) && log.waiting.as_ref() == Some(&record.detail);
    if repeated {
        return; // it comes every second
    }
    log.waiting = matches!(event, Event::Waiting(_)).then(|| record.detail.clone());
    match event {
        Event::PeerSilent { silent } => {
            log.silence = Some(Silence {
                since: now.checked_sub(*silent).unwrap_or(now),
            });
        }
        Event::PeerBack { .. } | Event::PeerGone(_) | Event::PeerRestarted { .. } => log.silence = None,
        Event::Running(_) => {
            log.runs += 1;
            log.silence = None;
            log.refused = None;
        }
        Event::Refused(_) | Event::ChannelRefused { .. } => log.refused = Some(record.detail.clone()),
        Event::Device(LinkEvent::Transport { name, .. }) if *name != "transport-chosen" => {
            log.word_of_link = Some(record.detail.clone());
        }
        _ => {}
    }
    let shown = match print {
        Print::All => true,
        // The first start is no news to somebody who waited for it.
        Print::Trouble => {
            log.runs > 0 && is_news(event) && (log.runs > 1 || !matches!(event, Event::Running(_)))
        }
        Print::Nothing => false,
    };
    if shown {
        let line = line(&record);
        // A reader that has gone is no reason to stop.
        let _ = match print {
            Print::All => writeln!(std::io::stdout(), "{line}"),
            _ => writeln!(std::io::stderr(), "{line}"),
        };
    }
    if log.records.len() < KEPT {
        log.records.push(record);
    }
}

fn line(record: &Record) -> String {
    let separator = if record.detail.is_empty() { "" } else { ": " };
    format!(
        "[{:10.3}] {}{separator}{}",
        record.at_s, record.name, record.detail
    )
}

fn is_news(event: &Event) -> bool {
    match event {
        Event::State(state) => matches!(
            state,
            SessionState::PeerGone | SessionState::LinkLost | SessionState::Refused
        ),
        _ => true,
    }
}

fn describe(event: &Event) -> String {
    let list = |differs: &[ntb_ring::session::Mismatch]| {
        let items: Vec<String> = differs.iter().map(ToString::to_string).collect();
        items.join("; ")
    };
    match event {
        Event::State(_) => String::new(),
        Event::LinkLost { losses } => format!("{losses} time(s)"),
        Event::Running(peer) => format!("peer process {}, package {}", peer.pid, peer.package),
        Event::PeerSilent { silent } => format!("no heartbeat for {} ms", silent.as_millis()),
        Event::PeerBack { silent } => format!("it was silent for {} ms", silent.as_millis()),
        Event::PeerGone(reason) => reason.name().to_owned(),
        Event::PeerRestarted { old, new } => format!("incarnation {new:016x} in place of {old:016x}"),
        Event::Refused(differs) => list(differs),
        Event::ChannelRefused { name, differs } => format!("channel '{name}': {}", list(differs)),
        Event::Waiting(state) => state.missing().to_owned(),
        Event::Device(event) => event.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ntb_ring::session::CloseReason;

    #[test]
    fn events_are_named_and_kept() {
        let log = Mutex::new(Log::default());
        let start = Instant::now();
        for event in [
            Event::PeerSilent {
                silent: Duration::from_millis(200),
            },
            Event::PeerGone(CloseReason::PeerGone),
        ] {
            take(&log, &event, start, Print::Nothing);
        }
        let log = log.into_inner().unwrap();
        assert_eq!(log.records[0].name, "peer-silent");
        assert!(log.records[0].detail.contains("200 ms"));
        assert!(line(&log.records[1]).ends_with("peer-gone: peer-gone"));
        assert_eq!(log.silence, None);
    }

    #[test]
    fn silence_lasts_until_the_peer_is_heard() {
        let log = Mutex::new(Log::default());
        let silent = Duration::from_millis(300);
        take(
            &log,
            &Event::PeerSilent { silent },
            Instant::now(),
            Print::Nothing,
        );
        let since = log.lock().unwrap().silence.unwrap().since;
        assert!(since.elapsed() >= silent);
        take(&log, &Event::PeerBack { silent }, Instant::now(), Print::Nothing);
        assert_eq!(log.lock().unwrap().silence, None);
    }

    #[test]
    fn a_wait_is_told_once() {
        let log = Mutex::new(Log::default());
        for event in [
            Event::Waiting(SessionState::CableDown),
            Event::Waiting(SessionState::CableDown),
            Event::State(SessionState::CableUp),
            Event::Waiting(SessionState::CableUp),
            Event::State(SessionState::CableDown),
            Event::Waiting(SessionState::CableDown),
        ] {
            take(&log, &event, Instant::now(), Print::Nothing);
        }
        assert_eq!(log.lock().unwrap().records.len(), 5);
    }
}
