//! What a session tells: the application by states and reminders, the peer by registers, the caller by the time of the
//! next step.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use std::time::Duration;

use super::{Action, Event, Inputs, Session, SessionState, WAITING_EVERY, clock::Earliest, life::Life, step};
use crate::{
    link::LinkState,
    wire::{
        identity::Identity,
        page::PAGE_LINES,
        registers::{Phase, Report},
    },
};

impl Session {
    pub(super) fn current_state(&self) -> SessionState {
        match (&self.life, self.after, self.link.map(|link| link.state)) {
            (Some(life), ..) => life.state(self.windows),
            (None, Some(after), _) => after,
            (None, None, None | Some(LinkState::CableDown)) => SessionState::CableDown,
            (None, None, _) => SessionState::CableUp,
        }
    }

    /// States that come with an event of their own are not told twice.
    pub(super) fn change_state(&mut self, now: Duration, state: SessionState, actions: &mut Vec<Action>) {
        if state == self.state {
            return;
        }
        self.state = state;
        self.waiting_due = now.saturating_add(WAITING_EVERY);
        match state {
            SessionState::Running
            | SessionState::PeerGone
            | SessionState::LinkLost
            | SessionState::Refused => {}
            _ => actions.push(Action::Event(Event::State(state))),
        }
    }

    pub(super) fn is_settled(&self) -> bool {
        matches!(self.state, SessionState::Running | SessionState::Refused)
    }

    pub(super) fn remind(&mut self, now: Duration, actions: &mut Vec<Action>) {
        if self.waiting_due == Duration::ZERO {
            self.waiting_due = now.saturating_add(WAITING_EVERY);
        }
        if !self.is_settled() && now >= self.waiting_due {
            self.waiting_due = now.saturating_add(WAITING_EVERY);
            actions.push(Action::Event(Event::Waiting(self.state)));
        }
    }

    pub(super) fn registers(&self) -> Report {
        let seen = self.life.as_ref().map(Life::peer).or(self.seen);
        let (pattern, found) = self.life.as_ref().map_or((0, 0), Life::patterns);
        Report {
            versions: self.own.versions,
            who: self.me,
            phase: match (self.closed, self.ready) {
                (true, _) => Phase::Closed,
                (false, true) => Phase::Ready,
                (false, false) => Phase::Waiting,
            },
            ended: self.ended,
            echo: seen.map_or(0, Identity::echo),
            pages: u32::try_from(self.own.window_lines / PAGE_LINES).unwrap_or(u32::MAX),
            pattern,
            found,
        }
    }

    pub(super) fn write_registers(&mut self, now: Duration, actions: &mut Vec<Action>) -> bool {
        if self.link.is_none_or(|link| link.state == LinkState::CableDown) {
            self.written = None;
            return false;
        }
        let registers = self.registers().encode();
        if self.written != Some(registers) {
            self.written = Some(registers);
            self.announce.restart();
        }
        if !self.announce.is_due(now) {
            return false;
        }
        self.announce.done(now);
        actions.push(Action::WriteRegisters(registers));
        !self.is_settled()
    }

    pub(super) fn plan(&mut self, now: Duration, inputs: &Inputs<'_>) {
        let mut earliest = Earliest::new();
        if self.link.is_some_and(|link| link.state > LinkState::CableDown) {
            earliest.note(self.announce.due());
        }
        if !self.is_settled() {
            earliest.note(self.waiting_due);
        }
        if now < self.hold_until {
            earliest.note(self.hold_until);
        }
        self.channels.note_deadlines(&mut earliest);
        if let Some(life) = &self.life {
            let step = step(now, self.windows, inputs, &self.config, &self.own);
            life.note_deadlines(step, &mut earliest);
        }
        self.wake = earliest.get();
    }
}
