//! A pair with a server at each end: what programs and tests start.

use std::time::Duration;

use rustix::io::Errno;
use serde::Serialize;

use crate::{
    model::{Action, Family, Pair, PairConfig, SideId, Snapshot},
    scenario::{self, ScenarioError},
    server::{Endpoint, Limits, ListenError, Server, ServerStats},
};

/// Least bytes of a memory window.
pub const MIN_WINDOW: u64 = 4096;
/// Most bytes of a memory window.
pub const MAX_WINDOW: u64 = 1 << 39;

/// What to emulate, and where.
#[derive(Debug)]
pub struct EmuConfig {
    /// The family; see [`crate::model::FAMILIES`].
    pub family: &'static dyn Family,
    /// Where side A is served.
    pub a: Endpoint,
    /// Where side B is served.
    pub b: Endpoint,
    /// Windows, link, scenario.
    pub pair: PairConfig,
    /// How long clients may take.
    pub limits: Limits,
}

impl EmuConfig {
    /// `family` at two endpoints, with everything else as usual.
    pub fn new(family: &'static dyn Family, a: Endpoint, b: Endpoint) -> Self {
        Self {
            family,
            a,
            b,
            pair: PairConfig::default(),
            limits: Limits::default(),
        }
    }
}

impl PairConfig {
    /// Whether PCIe has such sizes.
    ///
    /// # Errors
    /// Which it has not.
    pub fn check(&self) -> Result<(), EmuError> {
        let bytes = self.window_bytes;
        if !bytes.is_power_of_two() || !(MIN_WINDOW..=MAX_WINDOW).contains(&bytes) {
            return Err(EmuError::BadWindow { bytes });
        }
        let payload = self.max_payload;
        if !payload.is_power_of_two() || !(128..=4096).contains(&payload) {
            return Err(EmuError::BadPayload { bytes: payload });
        }
        Ok(())
    }
}

/// Why an emulator does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmuError {
    /// A window size that no BAR can have.
    #[error(
        "a window of {bytes} bytes was asked for: the size must be a power of two from {MIN_WINDOW} to {MAX_WINDOW}"
    )]
    BadWindow {
        /// Bytes asked for.
        bytes: u64,
    },
    /// A payload size that PCIe does not have.
    #[error("a maximum payload of {bytes} bytes was asked for: 128, 256, 512, 1024, 2048 and 4096 exist")]
    BadPayload {
        /// Bytes asked for.
        bytes: u64,
    },
    /// The scenario is not one.
    #[error("the scenario cannot be used: {0}")]
    Scenario(#[from] ScenarioError),
    /// A socket could not be had.
    #[error("side {side} cannot be served: {error}")]
    Listen {
        /// Which side.
        side: SideId,
        /// Why.
        error: ListenError,
    },
    /// No thread could be started.
    #[error("the emulator's threads cannot be started: {0}: raise the limit on processes ('ulimit -u')")]
    Threads(Errno),
}

impl EmuError {
    /// A stable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::BadWindow { .. } => "bad-window-size",
            Self::BadPayload { .. } => "bad-payload-size",
            Self::Scenario(e) => e.name(),
            Self::Listen { error, .. } => error.name(),
            Self::Threads(_) => "no-threads",
        }
    }

    /// Exit code of a tool that stops because of it: 2 for a bad request, 6 for a limit or permission.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::BadWindow { .. } | Self::BadPayload { .. } | Self::Scenario(_) => 2,
            Self::Listen {
                error: ListenError::BadAddress { .. },
                ..
            } => 2,
            Self::Listen { .. } | Self::Threads(_) => 6,
        }
    }
}

/// What one side's server has seen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ClientReport {
    /// Clients served so far.
    pub clients: u64,
    /// Clients turned away since another was being served.
    pub refused: u64,
    /// Connections that ended in a fault of the client.
    pub faults: u64,
    /// The last such fault.
    pub last_fault: Option<String>,
}

impl From<&ServerStats> for ClientReport {
    fn from(stats: &ServerStats) -> Self {
        Self {
            clients: stats.clients(),
            refused: stats.refused(),
            faults: stats.faults(),
            last_fault: stats.last_fault(),
        }
    }
}

/// All counts of an emulator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Of the pair.
    #[serde(flatten)]
    pub pair: Snapshot,
    /// Of side A's server.
    pub server_a: ClientReport,
    /// Of side B's server.
    pub server_b: ClientReport,
}

/// A running emulator. Dropping it ends both servers and takes their sockets away.
#[derive(Debug)]
pub struct Emulator {
    // Servers first: they end before the pair they serve.
    a: Server,
    b: Server,
    pair: Pair,
}

impl Emulator {
    /// Starts it: both ends can be connected to when this returns.
    ///
    /// # Errors
    /// See [`EmuError`].
    pub fn start(config: EmuConfig) -> Result<Self, EmuError> {
        config.pair.check()?;
        let pair = Pair::new(config.family, config.pair).map_err(EmuError::Threads)?;
        let serve = |side, endpoint| {
            Server::start(endpoint, pair.port(side).clone(), config.limits)
                .map_err(|error| EmuError::Listen { side, error })
        };
        let a = serve(SideId::A, config.a)?;
        let b = serve(SideId::B, config.b)?;
        Ok(Self { a, b, pair })
    }

    /// To make things happen and to see what has.
    pub fn control(&self) -> Control<'_> {
        Control { emulator: self }
    }
}

/// A handle on a running emulator.
#[derive(Clone, Copy, Debug)]
pub struct Control<'e> {
    emulator: &'e Emulator,
}

impl Control<'_> {
    /// Does something now.
    pub fn act(self, action: Action) {
        self.emulator.pair.act(action);
    }

    /// Does what a scenario line without its time says.
    ///
    /// # Errors
    /// When it says nothing.
    pub fn act_text(self, text: &str) -> Result<(), ScenarioError> {
        self.act(scenario::parse_action(text)?);
        Ok(())
    }

    /// Everything counted so far.
    pub fn report(self) -> Report {
        Report {
            pair: self.emulator.pair.snapshot(),
            server_a: self.emulator.a.stats().into(),
            server_b: self.emulator.b.stats().into(),
        }
    }

    /// The pair itself, for programs that want to reach a port without a socket.
    pub fn pair(&self) -> &Pair {
        &self.emulator.pair
    }
}

/// Parses a time as scenarios write it.
///
/// # Errors
/// In words.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    scenario::duration(text)
}
