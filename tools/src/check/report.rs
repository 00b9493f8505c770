//! What a check has found, as text and as JSON.

use std::fmt::{self, Write};

use serde::Serialize;

use super::{
    bridge::Bridge,
    item::{Item, State},
};
use crate::exit::Exit;

/// Rises when a key goes or changes its meaning.
pub const SCHEMA: u32 = 1;

/// All that was found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// `ntb-check`.
    pub tool: &'static str,
    /// Version of the package.
    pub version: &'static str,
    /// Version of this object.
    pub schema: u32,
    /// `this` or `described`.
    pub machine: &'static str,
    /// Kernel release.
    pub kernel: Option<String>,
    /// Bytes that a program will let its peer write.
    pub memory_bytes: u64,
    /// What concerns the machine as a whole.
    pub items: Vec<Item>,
    /// Its bridges.
    pub bridges: Vec<Bridge>,
    /// How many items of each kind there are.
    pub counts: Counts,
    /// The worst of all items.
    pub worst: State,
    /// Names of all warnings and faults, the worst first, each once.
    pub names: Vec<&'static str>,
    /// Exit code.
    pub exit: u8,
}

/// How many items there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// As they should be.
    pub pass: usize,
    /// Worth knowing.
    pub note: usize,
    /// Work, but not as well as they could.
    pub warning: usize,
    /// Keep the driver from working.
    pub fault: usize,
}

impl Report {
    /// Adds up what was found.
    pub fn new(
        machine: &'static str,
        kernel: Option<String>,
        memory_bytes: u64,
        items: Vec<Item>,
        bridges: Vec<Bridge>,
        strict: bool,
    ) -> Self {
        let all: Vec<&Item> = items
            .iter()
            .chain(bridges.iter().flat_map(|b| &b.items))
            .collect();
        let mut counts = Counts::default();
        for item in &all {
            *match item.state {
                State::Pass => &mut counts.pass,
                State::Note => &mut counts.note,
                State::Warning => &mut counts.warning,
                State::Fault => &mut counts.fault,
            } += 1;
        }
        let mut names = Vec::new();
        for state in [State::Fault, State::Warning] {
            for name in all.iter().filter(|i| i.state == state).filter_map(|i| i.name) {
                if !names.contains(&name) {
                    names.push(name);
                }
            }
        }
        let worst = all.iter().map(|i| i.state).max().unwrap_or(State::Pass);
        let exit = exit(&all, worst, strict) as u8;
        Self {
            tool: "ntb-check",
            version: env!("CARGO_PKG_VERSION"),
            schema: SCHEMA,
            machine,
            kernel,
            memory_bytes,
            counts,
            worst,
            names,
            exit,
            items,
            bridges,
        }
    }
}

/// The exit class of the worst item. Among faults, what is nearest to the hardware counts: it has to be put right first.
fn exit(items: &[&Item], worst: State, strict: bool) -> Exit {
    const ORDER: [Exit; 6] = [
        Exit::NoHardware,
        Exit::LinkLost,
        Exit::Mismatch,
        Exit::Limits,
        Exit::Usage,
        Exit::Bad,
    ];
    match worst {
        State::Fault => {
            let has = |exit: &Exit| items.iter().any(|i| i.exit == Some(*exit as u8));
            ORDER.into_iter().find(has).unwrap_or(Exit::Bad)
        }
        State::Warning if strict => Exit::Bad,
        _ => Exit::Good,
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kernel = self.kernel.as_deref().unwrap_or("unknown");
        let machine = if self.machine == "this" {
            "This machine"
        } else {
            "A described machine"
        };
        writeln!(f, "{machine}, kernel {kernel}")?;
        self.items.iter().try_for_each(|i| show(f, i))?;
        for bridge in &self.bridges {
            let family = bridge.family.unwrap_or("not supported");
            writeln!(f, "\nBridge {}, {family}", bridge.address)?;
            bridge.items.iter().try_for_each(|i| show(f, i))?;
        }
        let Counts {
            pass,
            note,
            warning,
            fault,
        } = self.counts;
        write!(
            f,
            "\n{pass} passed, {note} notes, {warning} warnings, {fault} faults"
        )?;
        if !self.names.is_empty() {
            write!(f, ": {}", self.names.join(", "))?;
        }
        writeln!(f)
    }
}

fn show(f: &mut fmt::Formatter<'_>, item: &Item) -> fmt::Result {
    let state = match item.state {
        State::Pass => "pass",
        State::Note => "note",
        State::Warning => "WARNING",
        State::Fault => "FAULT",
    };
    let name = item.name.map(|n| format!(" [{n}]")).unwrap_or_default();
    let mut text = format!("{}{name}: {}", item.item, printable(&item.finding));
    if let Some(why) = item.why {
        let _ = write!(text, "\n          why: {why}");
    }
    if let Some(remedy) = &item.remedy {
        let _ = write!(text, "\n          do:  {}", printable(remedy));
    }
    writeln!(f, "  {state:<7} {text}")
}

/// Without the control characters that a process name or a line of the log may have.
fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ntb::pci::{OpenError, PciError};

    fn report(items: Vec<Item>, strict: bool) -> Report {
        Report::new("described", None, 1, items, Vec::new(), strict)
    }

    #[test]
    fn the_worst_item_decides() {
        let warning = Item::warning("link", "narrow-link", "x8", "slow", "reseat");
        assert_eq!(report(vec![Item::pass("a", "b")], true).exit, 0);
        assert_eq!(report(vec![warning.clone()], false).exit, 0);
        assert_eq!(report(vec![warning.clone()], true).exit, 1);
        let limit = PciError::Memlock {
            needed: 2,
            allowed: 1,
        };
        let limit = Item::fault("locked-memory", &limit, "2 > 1", "locked", "ulimit");
        let missing = OpenError::NoDevice {
            address: String::new(),
            hint: String::new(),
        };
        let missing = Item::fault("bridges", &missing, "none", "needed", "firmware");
        assert_eq!(report(vec![warning.clone(), limit.clone()], false).exit, 6);
        let all = report(vec![warning, limit, missing], true);
        assert_eq!(all.exit, 3);
        assert_eq!(all.names, ["memlock-too-small", "no-device", "narrow-link"]);
        let text = all.to_string();
        assert!(
            text.contains("FAULT   locked-memory [memlock-too-small]: 2 > 1\n"),
            "{text}"
        );
        assert!(text.contains("do:  ulimit"), "{text}");
    }
}
