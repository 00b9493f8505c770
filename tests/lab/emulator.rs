//! The emulated bridge: one `ntb-emu` process that serves both ports.
use std::path::{Path, PathBuf};
use crate::error::LabError;
use crate::scenario::Bridge;
#[derive(Debug)]
pub(crate) struct Emulator { sockets: PathBuf }
impl Emulator {
    pub(crate) fn start(_bridge: Bridge, sockets: &Path, _logs: &Path) -> Result<Self, LabError> {
        Ok(Self { sockets: sockets.to_owned() })
    }
    pub(crate) fn socket(&self, at: usize) -> PathBuf { self.sockets.join(if at == 0 { "a.sock" } else { "b.sock" }) }
    pub(crate) fn ended(&mut self) -> Option<String> { None }
}
