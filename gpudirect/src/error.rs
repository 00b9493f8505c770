//! Why something with a GPU did not work.

/// A refusal of the driver, the kernel or this crate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct GpuError {
    /// Stable name, such as `gpu-library-missing`.
    pub name: &'static str,
    /// Exit class of the tools: 3 no hardware, 5 lost, 6 permission or limits, 7 version or layout.
    pub exit: u8,
    /// What was tried, needed and found, and what to do.
    pub what: String,
    /// The driver's own number, where it gave one.
    pub code: Option<i32>,
    /// The kernel's error number, where one was given.
    pub errno: Option<i32>,
}

impl GpuError {
    pub(crate) fn new(name: &'static str, exit: u8, what: impl Into<String>) -> Self {
        Self {
            name,
            exit,
            what: what.into(),
            code: None,
            errno: None,
        }
    }

    pub(crate) fn errno(name: &'static str, exit: u8, what: String, errno: rustix::io::Errno) -> Self {
        Self {
            errno: Some(errno.raw_os_error()),
            ..Self::new(name, exit, what)
        }
    }

    /// A library that was not loaded, in the loader's own words.
    pub(crate) fn loading(e: &libloading::Error) -> String {
        use std::error::Error;
        e.source().map_or_else(|| e.to_string(), ToString::to_string)
    }

    /// Whether the device or the driver has gone for good: nothing will work before it is opened anew.
    pub fn is_lost(&self) -> bool {
        self.name == "gpu-lost"
    }
}
