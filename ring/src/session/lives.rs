//! How lives of the link begin and end.

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

use super::{
    Action, CloseReason, Event, HOLD_MAX, HOLD_MIN, Inputs, Session, SessionState, life::Life, step,
};
use crate::{
    link::{LinkState, LinkStatus},
    wire::registers::{Ended, Phase, Report},
};

impl Session {
    /// A goodbye counts even when the link goes down with it.
    pub(super) fn hear_goodbye(&mut self, now: Duration, inputs: &Inputs<'_>, actions: &mut Vec<Action>) {
        let closed = |life: &Life| life.is_closed_by_beat(inputs.inbound);
        if self.life.as_ref().is_some_and(closed) {
            self.end_gone(now, CloseReason::ClosedByPeer, Ended::None, actions);
        }
    }

    pub(super) fn look_at_link(&mut self, now: Duration, link: LinkStatus, actions: &mut Vec<Action>) {
        let before = *self.link.get_or_insert(link);
        let losses = link.losses.saturating_sub(before.losses);
        // Where the transport has not counted the loss yet, the life ends all the same and the event follows.
        if losses > 0 || self.windows && link.state < LinkState::WindowsSet && self.life.is_some() {
            self.end_life(now, CloseReason::LinkLost, Ended::LinkLost, actions);
            self.seen = None;
            self.written = None;
            self.after = Some(SessionState::LinkLost);
            self.change_state(now, SessionState::LinkLost, actions);
        }
        if losses > 0 {
            actions.push(Action::Event(Event::LinkLost { losses }));
        }
        if link.state > LinkState::CableDown && self.after == Some(SessionState::LinkLost) {
            self.after = None;
        }
        self.link = Some(link);
    }

    pub(super) fn look_at_registers(
        &mut self,
        now: Duration,
        report: Report,
        inputs: &Inputs<'_>,
        actions: &mut Vec<Action>,
    ) {
        if report.who.incarnation == self.me.incarnation {
            return; // this side's own registers, come back
        }
        let echoed = report.echo == self.me.echo();
        if let Some(peer) = self.life.as_ref().map(Life::peer) {
            if report.who == peer {
                if report.phase == Phase::Closed {
                    return self.end_gone(now, CloseReason::ClosedByPeer, Ended::None, actions);
                }
                let step = step(now, self.windows, inputs, &self.config, &self.own);
                if let Some(life) = &mut self.life {
                    life.report(report, step, actions);
                }
                return;
            }
            if !echoed || report.who.is_before(peer) {
                return; // somebody else's, or left over
            }
            if report.who.incarnation == peer.incarnation {
                let reason = match report.ended {
                    Ended::LinkLost => CloseReason::LinkLost,
                    Ended::Corrupt => CloseReason::Corrupt,
                    Ended::PeerGone | Ended::None => CloseReason::PeerGone,
                };
                self.end_gone(now, reason, Ended::None, actions);
            } else {
                self.end_life(now, CloseReason::PeerRestarted, Ended::None, actions);
                self.tell_restart(report.who.incarnation, actions);
            }
        }
        if report.phase == Phase::Closed {
            self.seen = self.seen.filter(|seen| *seen != report.who);
            return;
        }
        if self.seen.is_some_and(|seen| report.who.is_before(seen)) {
            return;
        }
        self.seen = Some(report.who);
        if report.echo == self.me.echo() {
            self.begin_life(now, report, actions);
        }
    }

    pub(super) fn begin_life(&mut self, now: Duration, report: Report, actions: &mut Vec<Action>) {
        self.tell_restart(report.who.incarnation, actions);
        self.after = None;
        let mut life = Life::new(self.me, report, now, self.config.retry_interval);
        life.compare_versions(&self.own, actions);
        self.life = Some(life);
    }

    pub(super) fn tell_restart(&mut self, new: u64, actions: &mut Vec<Action>) {
        if let Some(old) = self.last_peer.replace(new)
            && old != new
        {
            actions.push(Action::Event(Event::PeerRestarted { old, new }));
        }
    }

    pub(super) fn end_corrupt(&mut self, now: Duration, actions: &mut Vec<Action>) {
        // Whoever has run well for a while starts over with the shortest hold.
        if now.saturating_sub(self.running_since) > HOLD_MAX {
            self.hold = HOLD_MIN;
        }
        self.hold_until = now.saturating_add(self.hold);
        self.hold = self.hold.saturating_mul(2).min(HOLD_MAX);
        self.end_gone(now, CloseReason::Corrupt, Ended::Corrupt, actions);
    }

    /// Ends the life because of the peer.
    pub(super) fn end_gone(
        &mut self,
        now: Duration,
        reason: CloseReason,
        ended: Ended,
        actions: &mut Vec<Action>,
    ) {
        self.end_life(now, reason, ended, actions);
        self.after = Some(SessionState::PeerGone);
        self.change_state(now, SessionState::PeerGone, actions);
        actions.push(Action::Event(Event::PeerGone(reason)));
    }

    pub(super) fn end_life(
        &mut self,
        now: Duration,
        reason: CloseReason,
        ended: Ended,
        actions: &mut Vec<Action>,
    ) {
        let drained_by = now.saturating_add(self.config.drain_timeout);
        self.channels.end_life(reason, drained_by, actions);
        if let Some(life) = self.life.take() {
            self.last_peer = Some(life.peer().incarnation);
            self.seen = Some(life.peer());
        }
        self.me = self.me.next();
        self.ended = ended;
        self.ready = false;
        self.corrupt = false;
    }
}
