//! Calling the other side.

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
    io::Write,
    net::{SocketAddr, TcpStream},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{event::PollFlags, io::Errno};

use super::{Met, Place, socket};
use crate::link::auth::{AuthError, Handshake, Role};

/// How long it may take to get through.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the other side may take from then on. Its process may be stopped: then it is called again.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// A call that is under way.
#[derive(Debug)]
pub(super) struct Call {
    step: Step,
    handshake: Option<Handshake>,
    greeting: Vec<u8>,
    busy_poll: Option<Duration>,
    until: Instant,
    /// When this side said what an answer is waited for.
    said: Instant,
}

#[derive(Debug)]
enum Step {
    Connecting(OwnedFd),
    Proving(TcpStream),
    Hearing(Box<Met>),
    Over,
}

/// What has become of a call.
pub(super) enum Progress {
    Waiting,
    /// Nobody takes calls there.
    Nobody,
    TimedOut,
    /// The other side knows the secret, was told the greeting and has said this.
    Answered(Box<Met>, Vec<u8>),
}

impl Call {
    pub(super) fn start(place: &Place, target: &SocketAddr, greeting: &[u8]) -> Result<Self, Errno> {
        let handshake = Handshake::new(Role::Initiator, place.purpose, &place.secret);
        Ok(Self {
            handshake: Some(handshake.map_err(|_| Errno::NOSYS)?),
            step: Step::Connecting(socket::connect(target)?),
            greeting: greeting.to_vec(),
            busy_poll: place.busy_poll,
            until: Instant::now() + CONNECT_TIMEOUT,
            said: Instant::now(),
        })
    }

    /// Goes on without waiting.
    pub(super) fn drive(&mut self) -> Result<Progress, AuthError> {
        loop {
            match std::mem::replace(&mut self.step, Step::Over) {
                Step::Connecting(fd) => {
                    if !socket::is_writable(&fd) {
                        self.step = Step::Connecting(fd);
                        return Ok(self.waiting());
                    }
                    if !matches!(rustix::net::sockopt::socket_error(&fd), Ok(Ok(()))) {
                        return Ok(Progress::Nobody);
                    }
                    let stream = TcpStream::from(fd);
                    if socket::is_itself(&stream) || socket::prepare(&stream, self.busy_poll).is_err() {
                        return Ok(Progress::Nobody);
                    }
                    self.said = Instant::now();
                    self.until = self.said + ANSWER_TIMEOUT;
                    self.step = Step::Proving(stream);
                }
                Step::Proving(mut stream) => {
                    let Some(handshake) = &mut self.handshake else {
                        return Ok(Progress::Nobody);
                    };
                    let Some(mut session) = handshake.drive(&mut stream)? else {
                        self.step = Step::Proving(stream);
                        return Ok(self.waiting());
                    };
                    let message = session.seal(&self.greeting).unwrap_or_default();
                    // A few bytes into an empty socket: what does not go at once does not go.
                    stream.write_all(&message).map_err(|error| AuthError::Stream {
                        step: "greeting",
                        error,
                    })?;
                    // Hello and hello, proof and proof.
                    let round_trip = self.said.elapsed() / 2;
                    self.said = Instant::now();
                    self.step = Step::Hearing(Box::new(Met {
                        opener: session.opener(),
                        stream,
                        session,
                        round_trip: Some(round_trip),
                    }));
                }
                Step::Hearing(mut met) => {
                    let Some(said) = met.opener.next(&mut met.stream)? else {
                        self.step = Step::Hearing(met);
                        return Ok(self.waiting());
                    };
                    let round_trip = self.said.elapsed();
                    met.round_trip = met.round_trip.map(|least| least.min(round_trip));
                    return Ok(Progress::Answered(met, said));
                }
                Step::Over => return Ok(Progress::Nobody),
            }
        }
    }

    fn waiting(&self) -> Progress {
        if Instant::now() < self.until {
            Progress::Waiting
        } else {
            Progress::TimedOut
        }
    }

    /// What to be woken by.
    pub(super) fn waker(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        match &self.step {
            Step::Connecting(fd) => Some((fd.as_fd(), PollFlags::OUT)),
            Step::Proving(stream) => Some((stream.as_fd(), PollFlags::IN)),
            Step::Hearing(met) => Some((met.stream.as_fd(), PollFlags::IN)),
            Step::Over => None,
        }
    }
}
