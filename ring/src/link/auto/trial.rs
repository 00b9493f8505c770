//! Trying a transport that both ends have agreed on, before either settles on it.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use std::{
    io::Write as _,
    time::{Duration, Instant},
};

use super::offer::Word;
use crate::link::{Link, LinkError, LinkEvent, LinkState, meet::Met};

/// Longest sleep between two looks at the link and at the stream.
const NAP: Duration = Duration::from_millis(2);

/// What came of it.
pub(super) enum Trial {
    /// Both ends are connected by it. The stream is still that of the meeting.
    Works(Box<dyn Link>, Met),
    /// One of them is not; why.
    Fails(String),
    /// The peer has gone before it was known, or nobody wants to know any more.
    PeerGone,
}

/// Says a word. What does not go at once into a stream that is all but empty does not go: the peer finds its end then.
pub(super) fn say(met: &mut Met, word: &Word) {
    if let Some(sealed) = met.session.seal(&word.encode()) {
        let _ = met.stream.write_all(&sealed);
    }
}

/// Tries the link that was opened, or was not, until `end`.
pub(super) fn run(
    opened: Result<Box<dyn Link>, LinkError>,
    mut met: Met,
    end: Instant,
    go_on: &mut dyn FnMut() -> bool,
) -> Trial {
    let start = Instant::now();
    let fails = |met: &mut Met, why: String| {
        say(met, &Word::Fails(why.clone()));
        Trial::Fails(why)
    };
    let mut link = match opened {
        Ok(link) => link,
        Err(e) => return fails(&mut met, e.what),
    };
    let (mut works, mut theirs) = (false, false);
    let mut trouble = String::new();
    loop {
        match link.poll() {
            Ok(status) if status.state == LinkState::WindowsSet => {
                if !works {
                    works = true;
                    say(&mut met, &Word::Works);
                }
            }
            Ok(_) => {}
            Err(e) => return fails(&mut met, e.what),
        }
        while let Some(event) = link.next_event() {
            if let LinkEvent::Transport { why, .. } = event {
                trouble = format!(": {why}");
            }
        }
        match met.opener.next(&mut met.stream) {
            Ok(None) => {}
            Ok(Some(said)) => match Word::decode(&said) {
                Ok(Word::Works) => theirs = true,
                Ok(Word::Fails(why)) => return Trial::Fails(format!("at the peer: {why}")),
                Err(_) => return Trial::PeerGone,
            },
            Err(_) => return Trial::PeerGone,
        }
        if works && theirs {
            return Trial::Works(link, met);
        }
        if !go_on() {
            return Trial::PeerGone;
        }
        if Instant::now() > end {
            let kind = link.facts().kind.name();
            let waited = start.elapsed().as_secs_f64();
            return fails(
                &mut met,
                format!("{kind} did not connect the two within {waited:.1} s{trouble}"),
            );
        }
        link.wait(NAP);
    }
}
