//! The emulated bridge that a scenario's guests share: a pair of ports in this process, each served to one QEMU.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ntb_emu::model::{Action, Pair, PairConfig, SideId, Snapshot, family};
use ntb_emu::server::{Endpoint, Limits, Server};

use crate::error::LabError;
use crate::scenario::{Bridge, ROLES};

/// How long the link trains. A real link takes milliseconds. With none at all the kernel's `ntb_transport` can
/// hang for good: its probe asks for the link, finds it down, and queues a clean-up; when the link comes up before
/// that has run, the clean-up cancels the work that the link's coming had queued, and clears scratchpads that the
/// peer has filled already. Long enough that a guest on a busy machine has run its clean-up by then.
const TRAINING: Duration = Duration::from_millis(300);

const SIDES: [SideId; 2] = [SideId::A, SideId::B];

/// The bridge of one scenario.
#[derive(Debug)]
pub(crate) struct Emulator {
    servers: Vec<(PathBuf, Server)>,
    pair: Pair,
}

impl Emulator {
    /// Makes the pair and serves it on two sockets in `folder`.
    pub(crate) fn start(bridge: Bridge, folder: &Path) -> Result<Self, LabError> {
        let refused = |why: String| LabError::Emulator { model: bridge.model, why };
        let model = family(bridge.model).ok_or_else(|| refused("it has no model of that name".to_owned()))?;
        let config = PairConfig { window_bytes: bridge.window_bytes, train_time: TRAINING, ..PairConfig::default() };
        let pair = Pair::new(model, config).map_err(|errno| refused(errno.to_string()))?;
        let mut servers = Vec::new();
        for (side, role) in SIDES.into_iter().zip(ROLES) {
            let socket = folder.join(format!("{role}.sock"));
            let endpoint = Endpoint::Path(socket.clone());
            let server = Server::start(endpoint, pair.port(side).clone(), Limits::default())
                .map_err(|error| refused(error.to_string()))?;
            servers.push((socket, server));
        }
        Ok(Self { servers, pair })
    }

    /// Where the guest in this place finds its port.
    pub(crate) fn socket(&self, place: usize) -> &Path {
        &self.servers[place].0
    }

    /// Does what a guest cannot do itself; answers whether it knows the action.
    pub(crate) fn act(&self, place: usize, action: &str) -> bool {
        let action = match action {
            "cable out" => Action::LinkDown,
            "cable in" => Action::LinkUp,
            "remove" => Action::Remove(SIDES[place]),
            "return" => Action::Return(SIDES[place]),
            _ => return false,
        };
        self.pair.act(action);
        true
    }

    /// What a client did that a correct one does not.
    pub(crate) fn faults(&self) -> Vec<String> {
        let fault = |(role, (_, server)): (char, &(PathBuf, Server))| {
            let stats = server.stats();
            let last = stats.last_fault()?;
            Some(format!("emulator: port {role}: {} faults of its client, the last: {last}", stats.faults()))
        };
        ROLES.into_iter().zip(&self.servers).filter_map(fault).collect()
    }

    /// What crossed the link.
    pub(crate) fn counts(&self) -> Snapshot {
        self.pair.snapshot()
    }
}
