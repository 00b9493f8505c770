//! Everything that keeps the lab from running, with what was needed and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

/// Why the lab could not do what was asked. A scenario that fails is not an error but a result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LabError {
    #[error("cannot {action} {path}: {source}")]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },

    #[error("{tool} is needed to {purpose} and was not found; {remedy}")]
    MissingTool {
        tool: &'static str,
        purpose: &'static str,
        remedy: String,
    },

    #[error(
        "found no Debian mirror among the sources that `apt-get indextargets` lists; \
         name one in NTB_LAB_MIRROR (it must carry {suite} and {suite}-backports)"
    )]
    NoMirror { suite: &'static str },

    #[error("{what} failed ({status}); its output is in {log} and ends:\n{tail}")]
    Command {
        what: String,
        status: String,
        log: PathBuf,
        tail: String,
    },

    #[error("{folder} (from NTB_LAB_KERNEL) has no {missing}; needed: one bzImage* and modules/*.ko")]
    KernelFolder { folder: PathBuf, missing: &'static str },

    #[error(
        "{what} is missing from {place} although it was prepared; remove that folder and run `lab setup`"
    )]
    Incomplete { what: &'static str, place: PathBuf },

    #[error(
        "{folder} is left of an interrupted run and has something mounted at {mount}; unmount that first"
    )]
    Mounted { folder: PathBuf, mount: PathBuf },

    #[error("neither XDG_CACHE_HOME nor HOME is set, so there is no place to keep {what}; set NTB_LAB_CACHE")]
    NoCacheFolder { what: &'static str },

    #[error("{program} cannot run in a guest, with the libraries of the prepared root: {why}")]
    Libraries { program: PathBuf, why: String },

    #[error("no scenario matches {pattern:?}; `lab list` names them")]
    UnknownScenario { pattern: String },

    #[error("the emulator cannot make a pair of {model} ports: {why}")]
    Emulator { model: &'static str, why: String },
}

impl LabError {
    /// Stable name, for programs.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Io { .. } => "io",
            Self::MissingTool { .. } => "missing-tool",
            Self::NoMirror { .. } => "no-mirror",
            Self::Command { .. } => "command-failed",
            Self::KernelFolder { .. } => "kernel-folder",
            Self::Incomplete { .. } => "incomplete",
            Self::Mounted { .. } => "mounted",
            Self::NoCacheFolder { .. } => "no-cache-folder",
            Self::Libraries { .. } => "libraries",
            Self::UnknownScenario { .. } => "unknown-scenario",
            Self::Emulator { .. } => "emulator",
        }
    }

    /// Exit status, by the classes that all programs of this project share.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::UnknownScenario { .. } | Self::KernelFolder { .. } | Self::NoMirror { .. } => 2,
            Self::Emulator { .. } => 3,
            Self::Io { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => 6,
            Self::NoCacheFolder { .. } => 6,
            Self::Io { .. }
            | Self::MissingTool { .. }
            | Self::Command { .. }
            | Self::Incomplete { .. }
            | Self::Mounted { .. }
            | Self::Libraries { .. } => 1,
        }
    }
}

/// Names the action and the file of an I/O error.
pub(crate) trait Context<T> {
    fn context(self, action: &'static str, path: &Path) -> Result<T, LabError>;
}

impl<T> Context<T> for io::Result<T> {
    fn context(self, action: &'static str, path: &Path) -> Result<T, LabError> {
        self.map_err(|source| LabError::Io {
            action,
            path: path.to_owned(),
            source,
        })
    }
}
