//! What a scenario is: data, a shell script that runs in both guests, and what they must report.

use std::time::Duration;

/// One named, independent proof.
#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub name: &'static str,
    /// What is known once it passes.
    pub proves: &'static str,
    /// The pair of ports that the guests get; `None` for guests without a bridge.
    pub bridge: Option<Bridge>,
    pub guests: [Machine; 2],
    /// Whether the guests share a network besides the bridge: `eth0` in both.
    pub network: bool,
    /// Programs of this workspace that the guests get in `/bin`.
    pub programs: &'static [&'static str],
    /// Files and folders of the prepared Debian root that the guests get at the same path, with the libraries that
    /// they load.
    pub debian: &'static [&'static str],
    /// Runs in both guests; `ROLE` is `a` or `b`, `PEER` the other.
    pub script: &'static str,
    /// Further environment of the script.
    pub settings: Vec<(&'static str, &'static str)>,
    /// Steps that must be reported as passed, by both guests; `a:NAME` or `b:NAME` by that one only.
    pub steps: Vec<&'static str>,
    /// Kernel complaints that belong to the scenario; any other fails it.
    pub tolerates: &'static [&'static str],
    pub time_limit: Duration,
}

/// An emulated pair of ports.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bridge {
    /// The emulator's name of the family.
    pub model: &'static str,
    /// Size of each memory window; both ends alike.
    pub window_bytes: u64,
}

/// One guest's hardware.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Machine {
    pub memory_mib: u32,
    pub cpus: u32,
    /// Whether the guest kernel translates the bridge's DMA. Off, the bridge reaches all guest memory and only
    /// its own window limits protect it.
    pub iommu: bool,
    /// Further arguments of QEMU: devices besides the bridge's port, and the objects that they need. A device with
    /// `bus=ntb-slot,addr=0x0.1` is another function of the port's card.
    pub qemu: &'static [&'static str],
    /// Further words of the kernel's command line.
    pub kernel: &'static [&'static str],
}

impl Machine {
    pub(crate) const PLAIN: Self = Self {
        memory_mib: 256,
        cpus: 1,
        iommu: false,
        qemu: &[],
        kernel: &[],
    };
    pub(crate) const IOMMU: Self = Self {
        iommu: true,
        ..Self::PLAIN
    };
}

/// The two guests, as they are called in scripts, steps and logs.
pub(crate) const ROLES: [char; 2] = ['a', 'b'];

impl Scenario {
    /// What scenarios have in common unless they say otherwise.
    pub(crate) const BASE: Self = Self {
        name: "",
        proves: "",
        bridge: None,
        guests: [Machine::PLAIN, Machine::PLAIN],
        network: false,
        programs: &[],
        debian: &[],
        script: "",
        settings: Vec::new(),
        steps: Vec::new(),
        tolerates: &[],
        time_limit: Duration::from_secs(180),
    };

    /// What it belongs to: scenarios of a family prove the same of different hardware or circumstances.
    pub(crate) fn family(&self) -> &'static str {
        self.name.split('-').next().unwrap_or(self.name)
    }

    /// The steps that the guest must pass.
    pub(crate) fn steps_of(&self, role: char) -> impl Iterator<Item = &'static str> {
        self.steps
            .iter()
            .filter_map(move |step| match step.split_once(':') {
                Some((only, step)) => (only.chars().eq([role])).then_some(step),
                None => Some(*step),
            })
    }

    /// What it needs besides what `setup` prepares, for `lab list`.
    pub(crate) fn needs(&self) -> String {
        let bridge = match self.bridge {
            Some(bridge) => format!(
                "ntb-emu ({}, {} KiB windows)",
                bridge.model,
                bridge.window_bytes >> 10
            ),
            None => "no bridge".to_owned(),
        };
        let memory: u32 = self.guests.iter().map(|guest| guest.memory_mib).sum();
        let programs = match self.programs {
            [] => String::new(),
            names => format!(", {} built by cargo", names.join(" ")),
        };
        format!(
            "{bridge}, two guests with {memory} MiB in all{programs}, up to {} s",
            self.time_limit.as_secs()
        )
    }
}
