//! One link's life as a state machine without I/O: `(now, inputs) -> actions`.
//!
//! The caller reads the link's status, registers and inbound memory, and carries the actions out; time is an input. So
//! the whole life of a link, deaths and restarts included, runs in tests with a fake clock.
//!
//! # How a life begins and ends
//!
//! Each side has an identity: its incarnation and a life number that rises whenever a life ends. Registers carry the
//! writer's identity and an echo of the reader's. A life begins at a side when it sees its own identity echoed; from
//! then on every record in memory is sealed with the four numbers of both identities, so nothing of another life
//! can be taken for one of this. A life ends when the link is lost, when the peer is silent for too long, says
//! goodbye, stores what cannot be, or shows another identity *together with an echo of this side's current one* (stale
//! registers of somebody else do not have that). The side that ends it raises its life number, by which the other
//! side learns of it. Since a side that has not begun a life yet only changes its echo, two sides that restart against
//! each other settle at once.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

mod channels;
mod clock;
#[cfg(any(fuzzing, test))]
mod fuzz;
mod greeting;
mod life;
mod lives;
mod random;
mod telling;
mod types;

#[cfg(test)]
mod tests;

use std::time::Duration;

use channels::{Channels, Context};
use clock::Retry;
use greeting::Own;
use life::{Life, Step};
use random::Random;

use crate::{
    link::{LinkState, LinkStatus, Registers},
    wire::{
        identity::Identity,
        layout::MIN_WINDOW_LINES,
        page::PAGE_LINES,
        registers::{Ended, Report},
    },
};

#[cfg(any(fuzzing, test))]
pub use fuzz::fuzz;
pub use types::{
    Action, ChannelId, ChannelSpec, CloseReason, Event, Inputs, Lanes, Mismatch, OpenError, PeerInfo, Place,
    SessionConfig, SessionState,
};

/// Time between two [`Event::Waiting`].
const WAITING_EVERY: Duration = Duration::from_secs(1);
/// Time for which a side keeps its memory closed after it found corrupt data, the first time.
const HOLD_MIN: Duration = Duration::from_millis(100);
/// And at most, when it happens again and again.
const HOLD_MAX: Duration = Duration::from_secs(5);

/// The session of one link. See the [module documentation](self).
#[derive(Debug)]
pub struct Session {
    config: SessionConfig,
    own: Own,
    random: Random,
    me: Identity,
    /// Why the life before ended, for the peer.
    ended: Ended,
    /// Somebody whose registers were seen while there is no life: echoed.
    seen: Option<Identity>,
    life: Option<Life>,
    /// Incarnation of the last peer, for telling a restart.
    last_peer: Option<u64>,
    channels: Channels,
    /// This life's memory has been announced as ready: not taken back before the life ends.
    ready: bool,
    corrupt: bool,
    hold_until: Duration,
    hold: Duration,
    /// When the last life began to run.
    running_since: Duration,
    link: Option<LinkStatus>,
    windows: bool,
    last_step: Duration,
    state: SessionState,
    /// Why there is no life, until there is one again.
    after: Option<SessionState>,
    waiting_due: Duration,
    written: Option<Registers>,
    announce: Retry,
    wake: Duration,
    closed: bool,
}

impl Session {
    /// The session of a link whose inbound memory has `window_lines` lines.
    pub fn new(config: SessionConfig, window_lines: u64) -> Result<Self, OpenError> {
        Self::with_export(config, window_lines, 0)
    }

    /// As [`Session::new`], with `exported` lines of another owner's memory behind `own_lines` of ordinary memory. The test of
    /// the data path goes over both.
    pub fn with_export(config: SessionConfig, own_lines: u64, exported: u64) -> Result<Self, OpenError> {
        let window_lines = match exported {
            0 => own_lines,
            // Pages are what channels are given, and the two parts must meet at one.
            _ if !own_lines.is_multiple_of(PAGE_LINES) || own_lines < MIN_WINDOW_LINES => 0,
            _ => own_lines.saturating_add(exported),
        };
        let pages = u32::try_from(window_lines / PAGE_LINES);
        let (MIN_WINDOW_LINES.., Ok(pages)) = (window_lines, pages) else {
            return Err(OpenError::BadWindow {
                lines: window_lines,
                min: MIN_WINDOW_LINES,
            });
        };
        let window_lines = u64::from(pages) * PAGE_LINES;
        let mut random = Random::new(config.seed, config.incarnation);
        Ok(Self {
            own: Own::new(window_lines),
            me: Identity {
                incarnation: config.incarnation,
                life: 1,
            },
            ended: Ended::None,
            seen: None,
            life: None,
            last_peer: None,
            channels: Channels::new(
                own_lines.min(window_lines),
                window_lines,
                config.retry_interval,
                &mut random,
            ),
            ready: false,
            corrupt: false,
            hold_until: Duration::ZERO,
            hold: HOLD_MIN,
            running_since: Duration::ZERO,
            link: None,
            windows: false,
            last_step: Duration::ZERO,
            state: SessionState::CableDown,
            after: None,
            waiting_due: Duration::ZERO,
            written: None,
            announce: Retry::new(config.retry_interval),
            wake: Duration::ZERO,
            closed: false,
            random,
            config,
        })
    }

    /// Opens a channel under `name`. It comes up ([`Action::ChannelUp`]) when the peer opens one of the same name, and
    /// again in each later life of the link.
    pub fn open(&mut self, name: &str, spec: ChannelSpec) -> Result<ChannelId, OpenError> {
        self.open_at(name, spec, Place::Ordinary)
    }

    /// As [`Session::open`], with this side's ring at `place`.
    pub fn open_at(&mut self, name: &str, spec: ChannelSpec, place: Place) -> Result<ChannelId, OpenError> {
        let id = self.channels.open(name, spec, place)?;
        self.wake = Duration::ZERO;
        Ok(id)
    }

    /// Closes a channel whose ends at this side are gone. No action tells of it.
    pub fn close(&mut self, id: ChannelId) {
        self.channels.close(id);
        self.wake = Duration::ZERO;
    }

    /// The local reader has taken everything of the channel's ended life: its memory may be used again.
    pub fn reader_drained(&mut self, id: ChannelId) {
        self.channels.reader_drained(id);
        self.wake = Duration::ZERO;
    }

    /// A device of this side is at work in the channel's memory or in the peer's: no next life before it has ended.
    pub fn hold(&mut self, id: ChannelId, held: bool) {
        if self.channels.hold(id, held) {
            self.wake = Duration::ZERO;
        }
    }

    /// An end of the channel's present life found something that cannot be. Ends this life of the link at the next step;
    /// the next one is held off for 100 ms, twice as long each time up to 5 s.
    ///
    /// Not to be called for what is left to read of an ended life: it says nothing about the present one.
    pub fn corrupt(&mut self, id: ChannelId) {
        if self.life.is_some() && self.channels.is_up(id) {
            self.corrupt = true;
            self.wake = Duration::ZERO;
        }
    }

    /// Says goodbye: the peer's channels end with [`CloseReason::ClosedByPeer`]. The session does nothing afterwards.
    pub fn shutdown(&mut self, actions: &mut Vec<Action>) {
        if self.closed {
            return;
        }
        self.closed = true;
        self.wake = Duration::MAX;
        if self.link.is_some_and(|link| link.state > LinkState::CableDown) {
            if let Some(life) = &mut self.life {
                life.goodbye(self.windows, actions);
            }
            actions.push(Action::WriteRegisters(self.registers().encode()));
            actions.push(Action::Ring);
        }
        self.state = SessionState::CableDown;
    }

    /// Where the link stands.
    pub fn state(&self) -> SessionState {
        self.state
    }

    /// The peer of this life, once it has greeted.
    pub fn peer(&self) -> Option<&PeerInfo> {
        self.life.as_ref()?.peer_info()
    }

    /// How long the next step can wait when nothing rings before: a second at most.
    pub fn next_wakeup(&self, now: Duration) -> Duration {
        self.wake.saturating_sub(now).min(WAITING_EVERY)
    }

    /// Looks at `inputs` and appends to `actions` what is to be done, in order. `now` is the time since any fixed start
    /// and never goes back.
    pub fn step(&mut self, now: Duration, inputs: &Inputs<'_>, actions: &mut Vec<Action>) {
        if self.closed {
            return;
        }
        self.notice_own_stall(now);
        self.hear_goodbye(now, inputs, actions);
        self.look_at_link(now, inputs.link, actions);
        if std::mem::take(&mut self.corrupt) && self.life.is_some() {
            self.end_corrupt(now, actions);
        }
        self.channels.expire_drains(now, actions);
        self.windows = inputs.link.state == LinkState::WindowsSet && inputs.outbound_lines.is_some();
        self.ready = self.windows && (self.ready || !self.channels.is_draining() && now >= self.hold_until);
        if let Some(report) = Report::decode(&inputs.registers)
            && inputs.link.state > LinkState::CableDown
        {
            self.look_at_registers(now, report, inputs, actions);
        }
        self.listen(now, inputs, actions);
        self.change_state(now, self.current_state(), actions);
        let mut urgent = self.speak(now, inputs, actions);
        urgent |= self.write_registers(now, actions);
        if urgent {
            actions.push(Action::Ring);
        }
        self.remind(now, actions);
        self.plan(now, inputs);
    }

    fn notice_own_stall(&mut self, now: Duration) {
        let gap = now.saturating_sub(self.last_step);
        self.last_step = now;
        if gap >= self.config.silent_after
            && let Some(life) = &mut self.life
        {
            life.forgive(gap, now);
        }
    }

    /// Takes in what the peer has stored, and gives it up when that was nothing for too long.
    fn listen(&mut self, now: Duration, inputs: &Inputs<'_>, actions: &mut Vec<Action>) {
        let step = step(now, self.windows, inputs, &self.config, &self.own);
        let Some(life) = &mut self.life else { return };
        let was_running = life.is_running();
        if self.windows {
            life.listen(step, actions);
        }
        if life.is_running() && !was_running {
            self.running_since = now;
        }
        if life.watch(step, actions) {
            self.end_gone(now, CloseReason::PeerGone, Ended::PeerGone, actions);
        }
    }

    /// Stores what is due into the peer's memory. True when the peer should look at once.
    fn speak(&mut self, now: Duration, inputs: &Inputs<'_>, actions: &mut Vec<Action>) -> bool {
        let step = step(now, self.windows, inputs, &self.config, &self.own);
        let Some(life) = &mut self.life else {
            return false;
        };
        let mut urgent = false;
        if life.is_running() && self.windows {
            let (transmit, receive, peer_lines, peer_order) = life.directions();
            let context = Context {
                now,
                transmit,
                receive,
                peer_lines,
                own_order: self.config.order,
                peer_order,
                drain_timeout: self.config.drain_timeout,
            };
            if let Some(taken) = life.acknowledged() {
                self.channels.acknowledge(taken);
            }
            urgent = self
                .channels
                .step(context, inputs.inbound, &mut self.random, actions);
        }
        life.speak(step, self.channels.taken_digest(), actions) || urgent
    }
}

fn step<'a>(
    now: Duration,
    windows: bool,
    inputs: &Inputs<'a>,
    config: &'a SessionConfig,
    own: &'a Own,
) -> Step<'a> {
    Step {
        now,
        inbound: inputs.inbound,
        reach: inputs.outbound_lines.filter(|_| windows),
        config,
        own,
    }
}
