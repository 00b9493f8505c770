//! The command line of `ntb-check`.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use ntb::pci::machine::PciAddress;

use crate::cli::{Ranges, values};

/// Says whether this machine is set up for its PCIe Non-Transparent Bridges, and what to do where it is not.
///
/// Finds the bridges as the driver does and looks at all that the driver needs: mode, kernel driver, IOMMU group, device
/// node, BARs and windows, memory type, link, limits, memory, kernel log. Reads only: nothing on the machine is
/// changed. As root it sees more.
#[derive(Debug, Parser)]
#[command(
    name = "ntb-check",
    version,
    disable_help_subcommand = true,
    subcommand_negates_reqs = true
)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Each item is a pass, a note, a warning (works, but slower or not for long) or a fault (the driver \
    refuses, with an error of the same name).\n\n\
    Exit codes: 0 no fault, 1 warnings and --strict was given, 2 usage, 3 no such hardware or not set up as an NTB, \
    5 the device is gone, 6 permission or limits."
)]
pub struct Command {
    /// Something else than checking.
    #[command(subcommand)]
    pub sub: Option<Sub>,
    /// Checking.
    #[command(flatten)]
    pub check: CheckArgs,
}

/// Something else than checking.
#[derive(Debug, Subcommand)]
pub enum Sub {
    /// Writes a description of this machine for --machine: what the check reads and nothing else. No serial numbers,
    /// no names of hosts or users, no network addresses.
    Record {
        /// File to write; one that exists is not overwritten.
        #[arg(value_name = "FILE", value_parser = file, allow_hyphen_values = true)]
        file: PathBuf,
    },
}

/// Options of a check.
#[derive(Args, Clone, Debug)]
pub struct CheckArgs {
    /// Bridge to check, such as 0000:81:00.0 [default: all there are]
    #[arg(value_name = "BUS:DEV.FN", value_parser = address)]
    pub address: Option<PciAddress>,
    /// Checks a recorded machine, or the tree of a described one, instead of this machine
    #[arg(long, value_name = "FILE", value_parser = file, allow_hyphen_values = true)]
    pub machine: Option<PathBuf>,
    /// Memory that a program will let its peer write, such as 64MiB: what limits and free memory are held against
    #[arg(long, value_name = "BYTES", value_parser = memory, allow_hyphen_values = true, default_value = "64MiB")]
    pub memory: u64,
    /// Ends with 1 when there are warnings
    #[arg(long)]
    pub strict: bool,
    /// Prints one JSON object and nothing else
    #[arg(short, long)]
    pub json: bool,
}

const ADDRESS: &str =
    "BUS:DEVICE.FUNCTION or DOMAIN:BUS:DEVICE.FUNCTION, as lspci -D shows it, with or without 'ntb:'";
const MEMORY: &str = "4KiB to 1TiB, in bytes or with KiB, MiB, GiB, TiB";
const FILE: &str = "the path of a file";

/// Ranges, for messages about values that are missing altogether.
pub const RANGES: Ranges = &[("--memory", MEMORY), ("--machine", FILE)];

fn address(text: &str) -> Result<PciAddress, String> {
    let text = text.strip_prefix("ntb:").unwrap_or(text);
    text.parse()
        .map_err(|_| format!("is no PCI address; allowed: {ADDRESS}"))
}

fn file(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() {
        return Err(format!("is empty; allowed: {FILE}"));
    }
    Ok(PathBuf::from(text))
}

fn memory(text: &str) -> Result<u64, String> {
    values::bytes(text, &(4096..=1 << 40), MEMORY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units_and_a_range() {
        assert_eq!(memory("64MiB"), Ok(64 << 20));
        assert_eq!(memory("4096"), Ok(4096));
        assert_eq!(memory("1TiB"), Ok(1 << 40));
        for bad in [
            "",
            "0",
            "-1",
            "4095",
            "2TiB",
            "MiB",
            "1e9",
            "99999999999999999999GiB",
            "1 GiB",
        ] {
            assert!(memory(bad).unwrap_err().contains("4KiB to 1TiB"), "{bad}");
        }
        assert!(address("ntb:81:00.0").is_ok() && address("81:00").is_err());
    }
}
