//! What has stopped, when nothing comes any more.

use std::time::Duration;

use ntb_ring::session::SessionState;

use super::measure::Awaited;
use crate::exit::{Exit, Failure};

/// What is known when a wait becomes too long.
#[derive(Clone, Copy, Debug)]
pub struct Signs {
    /// Where the link stands.
    pub state: SessionState,
    /// How long the peer's heartbeat has been missing, if it is.
    pub silence: Option<Duration>,
    /// Messages sent that the peer has not taken, where that is known.
    pub unread: Option<u64>,
    /// Messages sent that were not answered.
    pub unanswered: u64,
    /// The peer's receiving thread sleeps while it waits.
    pub peer_sleeps: bool,
    /// What is waited for.
    pub awaited: Awaited,
    /// For how long.
    pub waited: Duration,
}

/// Names what has stopped and since when.
pub fn diagnose(signs: &Signs) -> Failure {
    let waited = signs.waited.as_secs_f64();
    let awaited = match signs.awaited {
        Awaited::Reply => "reply",
        Awaited::Room => "room in the ring",
    };
    let head = format!("no {awaited} for {waited:.1} s");
    match signs.state {
        SessionState::Running => {}
        SessionState::PeerGone | SessionState::PeerSeen => {
            return Failure::new(
                Exit::LinkLost,
                "stalled-peer-process",
                format!(
                    "{head}; stopped: peer process (missing {})",
                    signs.state.missing()
                ),
            );
        }
        SessionState::Refused => {
            return Failure::new(
                Exit::Mismatch,
                "refused",
                format!("{head}; {}", signs.state.missing()),
            );
        }
        state => {
            return Failure::new(
                Exit::LinkLost,
                "stalled-link",
                format!("{head}; stopped: link (missing {})", state.missing()),
            );
        }
    }
    if let Some(silence) = signs.silence {
        return Failure::new(
            Exit::LinkLost,
            "stalled-peer-process",
            format!(
                "{head}; stopped: peer process, no heartbeat for {:.1} s while the link is up",
                silence.as_secs_f64()
            ),
        );
    }
    let alive = "the link is up and the peer's heartbeat is there";
    let Some(unread) = signs.unread else {
        return Failure::new(
            Exit::Bad,
            "stalled-ring",
            format!("{head}; stopped: ring or its doorbell; {alive}"),
        );
    };
    // The newest may be under way: what counts is whether any was taken and not answered.
    if unread < signs.unanswered && signs.awaited == Awaited::Reply {
        return Failure::new(
            Exit::Bad,
            "stalled-ring",
            format!(
                "{head}; stopped: ring, back from the peer: it has taken messages, but {} replies do not arrive; {alive}",
                signs.unanswered
            ),
        );
    }
    if signs.peer_sleeps {
        return Failure::new(
            Exit::Bad,
            "stalled-doorbell",
            format!(
                "{head}; stopped: doorbell: the peer's reader sleeps while {unread} messages wait for it and has not been \
                 woken; {alive}"
            ),
        );
    }
    Failure::new(
        Exit::Bad,
        "stalled-ring",
        format!(
            "{head}; stopped: ring, towards the peer: its reader has not taken {unread} messages; {alive}"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_that_can_stop_is_named() {
        let healthy = Signs {
            state: SessionState::Running,
            silence: None,
            unread: Some(3),
            unanswered: 3,
            peer_sleeps: false,
            awaited: Awaited::Reply,
            waited: Duration::from_millis(1500),
        };
        let silence = Some(Duration::from_millis(1400));
        for (signs, name, part, exit) in [
            (healthy, "stalled-ring", "ring, towards the peer", Exit::Bad),
            (
                Signs {
                    unread: Some(1),
                    ..healthy
                },
                "stalled-ring",
                "ring, back",
                Exit::Bad,
            ),
            (
                Signs {
                    unread: None,
                    ..healthy
                },
                "stalled-ring",
                "ring or its doorbell",
                Exit::Bad,
            ),
            (
                Signs {
                    peer_sleeps: true,
                    ..healthy
                },
                "stalled-doorbell",
                "doorbell",
                Exit::Bad,
            ),
            (
                Signs { silence, ..healthy },
                "stalled-peer-process",
                "heartbeat for 1.4 s",
                Exit::LinkLost,
            ),
            (
                Signs {
                    state: SessionState::PeerGone,
                    ..healthy
                },
                "stalled-peer-process",
                "peer process",
                Exit::LinkLost,
            ),
            (
                Signs {
                    state: SessionState::LinkLost,
                    ..healthy
                },
                "stalled-link",
                "stopped: link",
                Exit::LinkLost,
            ),
            (
                Signs {
                    awaited: Awaited::Room,
                    ..healthy
                },
                "stalled-ring",
                "no room in the ring for 1.5 s",
                Exit::Bad,
            ),
        ] {
            let failure = diagnose(&signs);
            assert_eq!((failure.name, failure.exit), (name, exit));
            assert!(failure.what.contains(part), "{failure}");
            assert!(failure.what.contains("for 1.5 s"), "{failure}");
        }
    }
}
