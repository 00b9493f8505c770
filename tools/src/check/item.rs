//! One thing that was looked at.

use ntb::{
    hw::NtbError,
    pci::{ExitClass, OpenError, PciError},
};
use serde::Serialize;

/// How good it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// As it should be.
    Pass,
    /// Worth knowing; nothing has to be done.
    Note,
    /// It works, but slower, or not for long.
    Warning,
    /// The driver will refuse.
    Fault,
}

/// One thing that was looked at: what was found, why it matters, what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Item {
    /// What was looked at, such as `iommu-group`. Stable.
    pub item: &'static str,
    /// How good it is.
    pub state: State,
    /// Stable name of what is wrong: that of the driver's error where the driver has one.
    pub name: Option<&'static str>,
    /// What was found.
    pub finding: String,
    /// Why it matters; for everything but a pass.
    pub why: Option<&'static str>,
    /// What to do, with the commands; for what can be changed.
    pub remedy: Option<String>,
    /// Exit code that a fault leads to.
    pub exit: Option<u8>,
}

impl Item {
    /// It is as it should be.
    pub fn pass(item: &'static str, finding: impl Into<String>) -> Self {
        Self {
            item,
            state: State::Pass,
            name: None,
            finding: finding.into(),
            why: None,
            remedy: None,
            exit: None,
        }
    }

    /// Worth knowing.
    pub fn note(item: &'static str, finding: impl Into<String>, why: &'static str) -> Self {
        Self {
            state: State::Note,
            why: Some(why),
            ..Self::pass(item, finding)
        }
    }

    /// It works, but not as well as it could.
    pub fn warning(
        item: &'static str,
        name: &'static str,
        finding: impl Into<String>,
        why: &'static str,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            state: State::Warning,
            name: Some(name),
            remedy: Some(remedy.into()),
            ..Self::note(item, finding, why)
        }
    }

    /// The driver will refuse, with this error.
    pub fn fault(
        item: &'static str,
        error: &impl DriverError,
        finding: impl Into<String>,
        why: &'static str,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            state: State::Fault,
            exit: Some(error.class().code()),
            ..Self::warning(item, error.name(), finding, why, remedy)
        }
    }
}

/// An error that the driver gives: what it is called, and how a program ends with it.
pub trait DriverError {
    /// Stable name.
    fn name(&self) -> &'static str;
    /// Exit class.
    fn class(&self) -> ExitClass;
}

macro_rules! driver_errors {
    ($($error:ty)*) => {$(
        impl DriverError for $error {
            fn name(&self) -> &'static str {
                self.name()
            }

            fn class(&self) -> ExitClass {
                self.class()
            }
        }
    )*};
}
driver_errors!(OpenError PciError NtbError);
