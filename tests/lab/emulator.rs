//! The emulated bridge that a scenario's guests share: a pair of ports in this process, each served to one QEMU.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ntb_emu::model::family;
use ntb_emu::server::Endpoint;
use ntb_emu::{EmuConfig, Emulator, Report};

use crate::error::LabError;
use crate::scenario::{Bridge, ROLES};

/// How long the link trains. A real link takes milliseconds. With none at all the kernel's `ntb_transport` can
/// hang for good: its probe asks for the link, finds it down, and queues a clean-up; when the link comes up before
/// that has run, the clean-up cancels the work that the link's coming had queued, and clears scratchpads that the
/// peer has filled already. Long enough that a guest on a busy machine has run its clean-up by then.
const TRAINING: Duration = Duration::from_millis(300);

/// The bridge of one scenario.
#[derive(Debug)]
pub(crate) struct Pair {
    emulator: Emulator,
    sockets: [PathBuf; 2],
}

impl Pair {
    /// Makes the pair and serves it on two sockets in `folder`.
    pub(crate) fn start(bridge: Bridge, folder: &Path) -> Result<Self, LabError> {
        let refused = |why: String| LabError::Emulator {
            model: bridge.model,
            why,
        };
        let model = family(bridge.model).ok_or_else(|| refused("it has no model of that name".to_owned()))?;
        let sockets = ROLES.map(|role| folder.join(format!("{role}.sock")));
        let [a, b] = sockets.clone().map(Endpoint::Path);
        let mut config = EmuConfig::new(model, a, b);
        config.pair.window_bytes = bridge.window_bytes;
        config.pair.train_time = TRAINING;
        config.pair.tell_refused = true;
        let emulator = Emulator::start(config).map_err(|error| refused(error.to_string()))?;
        Ok(Self { emulator, sockets })
    }

    /// Where the guest in this place finds its port.
    pub(crate) fn socket(&self, place: usize) -> &Path {
        &self.sockets[place]
    }

    /// Does what a guest cannot do itself, such as `link down` for the cable; answers what is wrong with it.
    pub(crate) fn act(&self, action: &str) -> Result<(), String> {
        self.emulator
            .control()
            .act_text(action)
            .map_err(|error| error.to_string())
    }

    /// What crossed the link, and what became of it.
    pub(crate) fn report(&self) -> Report {
        self.emulator.control().report()
    }

    /// What a port's client did that a correct one does not.
    pub(crate) fn faults(&self) -> Vec<String> {
        let report = self.report();
        let servers = ROLES.into_iter().zip([&report.server_a, &report.server_b]);
        let fault = servers.filter_map(|(role, server)| {
            let last = server.last_fault.as_ref()?;
            Some(format!(
                "emulator: port {role}: {} faults of its client, the last: {last}",
                server.faults
            ))
        });
        fault.collect()
    }
}
