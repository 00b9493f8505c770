//! Device code, and what it works on.
//!
//! The source is `kernels/ring.cu`; `kernels/ring.ptx` is what the driver gets. `kernels/check` holds one against the other. The
//! structures here mirror those there, field by field: all of eight bytes, little-endian.

use ntb_ring::wire::mark::LaneKey;

use crate::GpuError;

/// The device code, ended by a zero: PTX for compute capability 7.5 and newer.
pub(crate) const PTX: &str = concat!(include_str!("../kernels/ring.ptx"), "\0");

/// Most threads of a block that the device code has room for.
pub const MOST_THREADS: u32 = 256;

/// How a kernel ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// All was done.
    Done,
    /// The budget of looks was used up before the peer gave room, or sent.
    Budget,
    /// The message does not fit the ring.
    TooLong,
    /// The peer stored something that is no message.
    Corrupt,
    /// The next message does not fit what is left of the output.
    NoRoom,
    /// The peer gave back more than it was sent.
    BadCredit,
    /// No kernel has ended with this state yet.
    None,
}

impl Status {
    fn of(word: u64) -> Self {
        match word {
            1 => Self::Done,
            2 => Self::Budget,
            3 => Self::TooLong,
            4 => Self::Corrupt,
            5 => Self::NoRoom,
            6 => Self::BadCredit,
            _ => Self::None,
        }
    }

    /// An error for everything but [`Status::Done`].
    pub fn check(self) -> Result<(), GpuError> {
        let (name, exit, what) = match self {
            Self::Done => return Ok(()),
            Self::Budget => (
                "gpu-ring-stalled",
                5,
                "the peer gave no room, or sent nothing, for as long as the kernel looked",
            ),
            Self::TooLong => (
                "gpu-message-too-long",
                2,
                "the message is longer than the ring: use a larger ring",
            ),
            Self::Corrupt => (
                "gpu-ring-corrupt",
                5,
                "the peer stored something that is no message",
            ),
            Self::NoRoom => (
                "gpu-no-room",
                2,
                "the next message is longer than the output has room for",
            ),
            Self::BadCredit => (
                "gpu-ring-corrupt",
                5,
                "the peer gave back more lines than it was sent",
            ),
            Self::None => ("gpu-call", 1, "the kernel has not said how it ended"),
        };
        Err(GpuError::new(name, exit, what))
    }
}

macro_rules! state {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name { $($(#[$field_doc])* pub $field: u64,)* }

        impl $name {
            /// Bytes of it in the GPU's memory.
            pub const BYTES: usize = 8 * [$(stringify!($field)),*].len();

            /// As it lies in the GPU's memory.
            pub fn to_bytes(&self) -> Vec<u8> {
                [$(self.$field),*].iter().flat_map(|word| word.to_le_bytes()).collect()
            }

            /// From the GPU's memory.
            pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
                let mut words = bytes.chunks_exact(8).map(|c| u64::from_le_bytes(c.try_into().unwrap_or([0; 8])));
                Self { $($field: words.next().unwrap_or(0),)* }
            }
        }
    };
}

state! {
    /// A sending ring end. Addresses are the GPU's.
    SenderState {
        /// Line 0 of the ring, in the peer's memory.
        ring,
        /// Lines of the ring, less one.
        mask,
        /// Lines stored so far.
        head,
        /// Sequence of the next message.
        seq,
        /// Lines that the peer has given back, as last read.
        credit,
        /// Where the peer stores its credits: memory that this GPU may load.
        credit_line,
        /// Where this end says what it waits for, in the peer's memory.
        starved_line,
        /// Tag from bit 32 on, start of the sequence below, of what goes to the peer.
        out_key,
        /// Tag of what the peer stores.
        in_tag,
        /// Times the peer was asked for credit.
        attempt,
        /// How the last kernel ended: [`SenderState::status`].
        status_word,
        /// Messages that it sent.
        sent,
    }
}

state! {
    /// A receiving ring end. Addresses are the GPU's.
    ReceiverState {
        /// Line 0 of the ring, in this GPU's memory.
        ring,
        /// Lines of the ring, less one.
        mask,
        /// Lines consumed so far.
        tail,
        /// Sequence of the message that comes next.
        seq,
        /// Lines given back.
        credited,
        /// Where credits go, in the peer's memory.
        credit_line,
        /// Where the peer says what it waits for: in this GPU's memory.
        starved_line,
        /// Tag from bit 32 on, start of the sequence below, of what the peer stores.
        in_key,
        /// Tag of the credits.
        out_tag,
        /// How the last kernel ended: [`ReceiverState::status`].
        status_word,
        /// Blocks that it received.
        got,
        /// Times a mark was there and its check did not hold yet.
        incomplete,
        /// What the peer waited for when it was last given credit for that.
        answered,
        /// Which attempt of the peer's that was.
        answered_attempt,
    }
}

impl SenderState {
    /// How the last kernel ended.
    pub fn status(&self) -> Status {
        Status::of(self.status_word)
    }
}

impl ReceiverState {
    /// How the last kernel ended.
    pub fn status(&self) -> Status {
        Status::of(self.status_word)
    }
}

/// A key as the device code takes it.
pub fn key_word(key: LaneKey) -> u64 {
    u64::from(key.tag()) << 32 | u64::from(key.start)
}

/// A block of messages that a kernel has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Sequence of the first message.
    pub seq: u64,
    /// The application's type.
    pub message_type: u32,
    /// Bytes of each message.
    pub size: u32,
    /// Messages.
    pub count: u32,
    /// Where the first byte lies in the output.
    pub offset: u64,
}

impl Record {
    /// Bytes of it in the GPU's memory.
    pub const BYTES: usize = 32;

    /// From the GPU's memory.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let word = |at: usize| {
            let part = bytes.get(at..at + 8).and_then(|b| b.try_into().ok());
            u64::from_le_bytes(part.unwrap_or([0; 8]))
        };
        Self {
            seq: word(0),
            message_type: word(8) as u32,
            size: (word(8) >> 32) as u32,
            count: word(16) as u32,
            offset: word(24),
        }
    }
}
