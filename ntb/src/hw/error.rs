//! What can go wrong on an NTB port.

use std::time::Duration;

use crate::pci::{Bar, ExitClass, OpenError, PciError, config::Identity};

/// A failure of an operation on an NTB port. [`NtbError::name`] is stable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NtbError {
    /// The function could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The PCI function below failed.
    #[error(transparent)]
    Pci(#[from] PciError),
    /// No family has this id.
    #[error(
        "{device} is not a supported NTB: vendor {:04x}, device {:04x}, revision {:02x}, class {:06x}",
        .identity.vendor, .identity.device, .identity.revision, .identity.class
    )]
    NotAnNtb {
        /// The function.
        device: String,
        /// Who it is.
        identity: Identity,
    },
    /// The port is in a mode that cannot be used.
    #[error("{device} is not usable as an NTB: {found}. {remedy}")]
    WrongMode {
        /// The function.
        device: String,
        /// The mode it is in, with the register value.
        found: String,
        /// The setting that is needed.
        remedy: &'static str,
    },
    /// The function lacks something that every one of its family has.
    #[error("{device}: {what} needs {needed:#x}, and there is {available:#x}")]
    TooSmall {
        /// The function.
        device: String,
        /// What.
        what: &'static str,
        /// Needed.
        needed: u64,
        /// Available.
        available: u64,
    },
    /// The device or the process behind it answers all ones everywhere.
    #[error("{device} is gone: {register} reads all ones")]
    Gone {
        /// The function.
        device: String,
        /// The register that showed it.
        register: &'static str,
    },
    /// The operation needs the link and it is down.
    #[error(
        "the link of {device} is down: {what} needs it. Check the cable, and that the peer's port is enabled"
    )]
    LinkDown {
        /// The function.
        device: String,
        /// What needs it.
        what: &'static str,
    },
    /// The hardware did not start link training.
    #[error("{device} does not start link training: {register} reads {read:#x} after writing {wrote:#x}")]
    TrainingRefused {
        /// The function.
        device: String,
        /// The register.
        register: &'static str,
        /// Value written.
        wrote: u64,
        /// Value read back.
        read: u64,
    },
    /// A value that the hardware did not keep.
    #[error("{device}: {register} was set to {wrote:#x} and reads back {read:#x}: {hint}")]
    NotTaken {
        /// The function.
        device: String,
        /// The register.
        register: &'static str,
        /// Value written.
        wrote: u64,
        /// Value read back.
        read: u64,
        /// What that means.
        hint: &'static str,
    },
    /// No such window.
    #[error("memory window {window} does not exist: there are {windows}")]
    NoWindow {
        /// Asked for.
        window: usize,
        /// How many there are.
        windows: usize,
    },
    /// A length that the window does not take.
    #[error(
        "{asked:#x} bytes do not fit memory window {window}: it takes multiples of {multiple:#x} bytes up to \
         {limit:#x}. Its size is set in the firmware set-up, equal on both hosts"
    )]
    BadWindowSize {
        /// The window.
        window: usize,
        /// Bytes asked for.
        asked: u64,
        /// Largest.
        limit: u64,
        /// Granularity.
        multiple: u64,
    },
    /// An address that the window does not take.
    #[error(
        "I/O address {address:#x} does not suit memory window {window}: it must be a non-zero multiple of {multiple:#x}"
    )]
    BadWindowAddress {
        /// The window.
        window: usize,
        /// The address given.
        address: u64,
        /// Alignment needed.
        multiple: u64,
    },
    /// Doorbell bits that do not exist or are not for clients.
    #[error("doorbell bits {bits:#x} are not all valid: valid are {valid:#x}")]
    BadDoorbell {
        /// Bits given.
        bits: u64,
        /// Bits that may be.
        valid: u64,
    },
    /// No such scratchpad.
    #[error("scratchpad {index} does not exist: there are {count} per side")]
    BadScratchpad {
        /// Index given.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// The endpoint's firmware refused a command or did not answer.
    #[error("the endpoint's firmware {outcome} command {command} ({argument:#x}) after {waited:?}")]
    Firmware {
        /// The command.
        command: &'static str,
        /// Its argument.
        argument: u32,
        /// "refused", "did not answer".
        outcome: &'static str,
        /// How long was waited.
        waited: Duration,
    },
    /// The endpoint describes itself in a way that cannot be.
    #[error("the endpoint's control block is wrong: {what} is {value:#x}")]
    BadControlBlock {
        /// Which field.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// Inbound memory cannot be had.
    #[error(
        "{bytes} bytes of inbound memory cannot be allocated: {source}. Ask for less (a window need not be filled), or end \
         what uses memory"
    )]
    Memory {
        /// Bytes asked for.
        bytes: u64,
        /// Why.
        source: ntb_mem::region::RegionError,
    },
    /// A window is larger than the aperture's BAR leaves room for.
    #[error("{bytes:#x} bytes at {offset:#x} lie outside the aperture of {limit:#x} bytes in BAR{bar}")]
    OutOfAperture {
        /// The BAR.
        bar: Bar,
        /// Offset asked for.
        offset: u64,
        /// Bytes asked for.
        bytes: u64,
        /// Length of the aperture.
        limit: u64,
    },
}

impl NtbError {
    /// Stable name of the kind of error.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Open(e) => e.name(),
            Self::Pci(e) => e.name(),
            Self::NotAnNtb { .. } => "not-an-ntb",
            Self::WrongMode { .. } => "wrong-mode",
            Self::TooSmall { .. } => "too-small",
            Self::Gone { .. } => "device-gone",
            Self::LinkDown { .. } => "link-down",
            Self::TrainingRefused { .. } => "training-refused",
            Self::NotTaken { .. } => "value-not-taken",
            Self::NoWindow { .. } => "no-window",
            Self::BadWindowSize { .. } => "bad-window-size",
            Self::BadWindowAddress { .. } => "bad-window-address",
            Self::BadDoorbell { .. } => "bad-doorbell",
            Self::BadScratchpad { .. } => "bad-scratchpad",
            Self::Firmware { .. } => "endpoint-firmware",
            Self::BadControlBlock { .. } => "bad-control-block",
            Self::Memory { .. } => "no-memory",
            Self::OutOfAperture { .. } => "out-of-aperture",
        }
    }

    /// Exit class.
    pub fn class(&self) -> ExitClass {
        match self {
            Self::Open(e) => e.class(),
            Self::Pci(e) => e.class(),
            Self::NotAnNtb { .. }
            | Self::WrongMode { .. }
            | Self::TooSmall { .. }
            | Self::BadControlBlock { .. }
            | Self::TrainingRefused { .. } => ExitClass::NoHardware,
            Self::Gone { .. } | Self::LinkDown { .. } | Self::NotTaken { .. } | Self::Firmware { .. } => {
                ExitClass::LinkLost
            }
            Self::NoWindow { .. }
            | Self::BadWindowSize { .. }
            | Self::BadWindowAddress { .. }
            | Self::BadDoorbell { .. }
            | Self::BadScratchpad { .. }
            | Self::OutOfAperture { .. } => ExitClass::Usage,
            Self::Memory { .. } => ExitClass::Permission,
        }
    }

    /// Whether the device itself is gone, rather than the link or one operation.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone { .. } | Self::Pci(PciError::Gone { .. }))
    }
}
