//! Exit codes that all tools share, and errors that carry one.

/// How a tool ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// All was well.
    Good = 0,
    /// It was measured and it is bad: loss, corruption, a limit missed.
    Bad = 1,
    /// The command line cannot be.
    Usage = 2,
    /// There is no such hardware.
    NoHardware = 3,
    /// Nobody answers.
    NoPeer = 4,
    /// The link or the peer was lost and did not come back.
    LinkLost = 5,
    /// Permission or a limit of the system is missing.
    Limits = 6,
    /// The two sides do not fit each other.
    Mismatch = 7,
}

impl Exit {
    /// The class of a number that a library error carries; what is unknown counts as [`Exit::Bad`].
    pub fn from_class(class: u8) -> Self {
        match class {
            0 => Self::Good,
            2 => Self::Usage,
            3 => Self::NoHardware,
            4 => Self::NoPeer,
            5 => Self::LinkLost,
            6 => Self::Limits,
            7 => Self::Mismatch,
            _ => Self::Bad,
        }
    }
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Why a tool stops before it has a result: an exit class, a stable name, and what was tried, found and can be done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct Failure {
    /// Exit class.
    pub exit: Exit,
    /// Stable name, such as `no-peer`.
    pub name: &'static str,
    /// In words, one line.
    pub what: String,
}

impl Failure {
    /// A failure.
    pub fn new(exit: Exit, name: &'static str, what: impl Into<String>) -> Self {
        Self {
            exit,
            name,
            what: what.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_the_numbers() {
        for n in [0u8, 2, 3, 4, 5, 6, 7] {
            assert_eq!(Exit::from_class(n) as u8, n);
        }
        assert_eq!(Exit::from_class(99), Exit::Bad);
    }
}
