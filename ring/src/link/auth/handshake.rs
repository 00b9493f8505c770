//! The exchange itself: two random numbers, two proofs.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use std::io::{self, ErrorKind, Read, Write};

use super::{AuthError, Secret, Session, TAG_BYTES, tag, tag_is};

/// First bytes of either side.
pub const MAGIC: [u8; 8] = *b"NTBAUTH\0";
/// Version of the exchange. The first 16 bytes of a hello are the same in all versions.
pub const VERSION: u16 = 1;
/// Bytes of a hello: the first message of either side.
pub const HELLO_BYTES: usize = 48;
/// Bytes of a proof: the second message of either side.
pub const PROOF_BYTES: usize = TAG_BYTES;

/// Which side of the exchange one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Connected, and speaks first.
    Initiator,
    /// Was connected to, and proves itself last: it says nothing about itself to a stranger.
    Responder,
}

impl Role {
    /// The other side.
    pub fn other(self) -> Self {
        match self {
            Self::Initiator => Self::Responder,
            Self::Responder => Self::Initiator,
        }
    }

    pub(super) fn code(self) -> u8 {
        match self {
            Self::Initiator => 1,
            Self::Responder => 2,
        }
    }

    fn label(self) -> &'static [u8; 16] {
        match self {
            Self::Initiator => b"ntb-initiator\0\0\0",
            Self::Responder => b"ntb-responder\0\0\0",
        }
    }
}

/// What a stream is for once it is authenticated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A link over TCP.
    Tcp,
    /// What is exchanged before RDMA can be used.
    Rdma,
    /// Choosing a transport together.
    Auto,
}

impl Purpose {
    /// As in addresses.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
            Self::Auto => "auto",
        }
    }

    fn code(self) -> u8 {
        match self {
            Self::Tcp => 1,
            Self::Rdma => 2,
            Self::Auto => 3,
        }
    }
}

/// The exchange from one side. [`Handshake::drive`] it until it gives a session.
pub struct Handshake {
    role: Role,
    purpose: Purpose,
    secret: Secret,
    ours: [u8; HELLO_BYTES],
    theirs: [u8; HELLO_BYTES],
    proof: [u8; PROOF_BYTES],
    step: Step,
    /// Bytes of the message of this step that are through.
    done: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    SendHello,
    HearHello,
    SendProof,
    HearProof,
    Done,
}

impl std::fmt::Debug for Handshake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handshake")
            .field("role", &self.role)
            .field("step", &self.step)
            .finish_non_exhaustive()
    }
}

impl Handshake {
    /// Starts the exchange. Fails where the system has no random numbers to give.
    pub fn new(role: Role, purpose: Purpose, secret: &Secret) -> io::Result<Self> {
        let mut nonce = [0; 32];
        let got = rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())?;
        if got != nonce.len() {
            return Err(io::Error::other("too few random bytes"));
        }
        Ok(Self::with_nonce(role, purpose, secret, nonce))
    }

    pub(crate) fn with_nonce(role: Role, purpose: Purpose, secret: &Secret, nonce: [u8; 32]) -> Self {
        let mut ours = [0; HELLO_BYTES];
        let (head, tail) = ours.split_at_mut(16);
        let [v0, v1] = VERSION.to_le_bytes();
        let rest = [v0, v1, purpose.code(), role.code(), 0, 0, 0, 0];
        for (to, from) in head.iter_mut().zip(MAGIC.into_iter().chain(rest)) {
            *to = from;
        }
        tail.copy_from_slice(&nonce);
        Self {
            role,
            purpose,
            secret: secret.clone(),
            ours,
            theirs: [0; HELLO_BYTES],
            proof: [0; PROOF_BYTES],
            step: match role {
                Role::Initiator => Step::SendHello,
                Role::Responder => Step::HearHello,
            },
            done: 0,
        }
    }

    /// Goes on as far as the stream lets it: `Some` when the peer has proved itself and been proved to, `None` when
    /// the stream would block (or a time limit of its own has passed). No byte is read beyond the exchange.
    ///
    /// How long a peer may take is for the caller to limit. After an error the stream is to be closed without another word.
    pub fn drive(&mut self, stream: &mut (impl Read + Write)) -> Result<Option<Session>, AuthError> {
        loop {
            let (what, complete) = match self.step {
                Step::SendHello => ("greeting", write(stream, &self.ours, &mut self.done)),
                Step::HearHello => (
                    "waiting for the greeting",
                    read(stream, &mut self.theirs, &mut self.done),
                ),
                Step::SendProof => {
                    let proof = tag(self.secret.key(), &self.transcript(self.role));
                    ("proving the secret", write(stream, &proof, &mut self.done))
                }
                Step::HearProof => (
                    "waiting for the proof",
                    read(stream, &mut self.proof, &mut self.done),
                ),
                Step::Done => return Err(AuthError::Malformed("the exchange is over")),
            };
            match complete {
                Ok(true) => self.done = 0,
                Ok(false) => return Ok(None),
                // Whoever has seen a wrong proof closes.
                Err(e) if self.step == Step::HearProof && self.role == Role::Initiator && ended(&e) => {
                    return Err(AuthError::Refused);
                }
                Err(error) => return Err(AuthError::Stream { step: what, error }),
            }
            if let Some(session) = self.advance(stream)? {
                return Ok(Some(session));
            }
        }
    }

    fn advance(&mut self, stream: &mut impl Write) -> Result<Option<Session>, AuthError> {
        self.step = match (self.step, self.role) {
            (Step::SendHello, Role::Initiator) => Step::HearHello,
            (Step::SendHello, Role::Responder) => Step::HearProof,
            (Step::HearHello, role) => {
                if let Err(e) = self.check_hello() {
                    if let (AuthError::Version { .. }, Role::Responder) = (&e, role) {
                        // So that the other side can say so too; there is nothing to be done if it does not arrive.
                        let _ = stream.write(&self.ours);
                    }
                    return Err(e);
                }
                match role {
                    Role::Initiator => Step::SendProof,
                    Role::Responder => Step::SendHello,
                }
            }
            (Step::SendProof, Role::Initiator) => Step::HearProof,
            (Step::HearProof, role) => {
                if !tag_is(self.secret.key(), &self.transcript(role.other()), &self.proof) {
                    return Err(AuthError::Proof);
                }
                match role {
                    Role::Initiator => return self.finish().map(Some),
                    Role::Responder => Step::SendProof,
                }
            }
            (Step::SendProof, Role::Responder) => return self.finish().map(Some),
            (Step::Done, _) => Step::Done,
        };
        Ok(None)
    }

    fn check_hello(&self) -> Result<(), AuthError> {
        let [m @ .., v0, v1, _purpose, role, _, _, _, _] = first(&self.theirs);
        if m != MAGIC {
            return Err(AuthError::Malformed("it does not greet as one"));
        }
        let theirs = u16::from_le_bytes([v0, v1]);
        if theirs != VERSION {
            return Err(AuthError::Version { theirs });
        }
        if role != self.role.other().code() {
            return Err(AuthError::Malformed("it takes this side's own part"));
        }
        Ok(())
    }

    /// What the proof of `role` is over: the label says whose it is, so that none can be sent back.
    fn transcript(&self, role: Role) -> [&[u8]; 3] {
        let (initiator, responder) = self.hellos();
        [role.label(), initiator, responder]
    }

    fn hellos(&self) -> (&[u8; HELLO_BYTES], &[u8; HELLO_BYTES]) {
        match self.role {
            Role::Initiator => (&self.ours, &self.theirs),
            Role::Responder => (&self.theirs, &self.ours),
        }
    }

    fn finish(&mut self) -> Result<Session, AuthError> {
        self.step = Step::Done;
        let [.., theirs, _, _, _, _, _] = first(&self.theirs);
        if theirs != self.purpose.code() {
            let names = [Purpose::Tcp, Purpose::Rdma, Purpose::Auto];
            return Err(AuthError::Purpose {
                ours: self.purpose.name(),
                theirs: names
                    .into_iter()
                    .find(|p| p.code() == theirs)
                    .map_or("something unknown", Purpose::name),
            });
        }
        let (initiator, responder) = self.hellos();
        let key = tag(
            self.secret.key(),
            &[b"ntb-session\0\0\0\0\0", initiator, responder],
        );
        Ok(Session::new(self.role, key))
    }
}

fn first(hello: &[u8; HELLO_BYTES]) -> [u8; 16] {
    let mut out = [0; 16];
    for (to, from) in out.iter_mut().zip(hello) {
        *to = *from;
    }
    out
}

/// Whether an error says that the other side has closed.
fn ended(e: &io::Error) -> bool {
    matches!(
        e.kind(),
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe
    )
}

/// Reads on until `buffer` is full: true then, false when the stream would block.
pub(super) fn read(stream: &mut impl Read, buffer: &mut [u8], done: &mut usize) -> io::Result<bool> {
    while let Some(rest) = buffer.get_mut(*done..).filter(|r| !r.is_empty()) {
        match stream.read(rest) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => *done += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return Ok(false),
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}

/// Writes on until all of `bytes` is out: true then, false when the stream would block.
pub(super) fn write(stream: &mut impl Write, bytes: &[u8], done: &mut usize) -> io::Result<bool> {
    while let Some(rest) = bytes.get(*done..).filter(|r| !r.is_empty()) {
        match stream.write(rest) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n) => *done += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return Ok(false),
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}
