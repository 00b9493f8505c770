//! Facts of the machine that change results. Nothing about people, networks or names of hosts.

pub mod topology;

use std::{
    fs,
    path::{Path, PathBuf},
};

use ntb_mem::clock::ClockFacts;
use serde::Serialize;

use topology::Topology;

/// The environment of a measurement. What could not be read is null.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Environment {
    /// Processor model.
    pub cpu_model: Option<String>,
    /// Processors online.
    pub cpus_online: usize,
    /// Processor this end is pinned to.
    pub cpu: Option<u32>,
    /// Processor the far end is pinned to, on its machine.
    pub peer_cpu: Option<u32>,
    /// How near the two processors are; `not pinned` where one end may move.
    pub placement: &'static str,
    /// NUMA nodes of the two processors.
    pub numa_nodes: [Option<u32>; 2],
    /// Frequency governor of this end's processor.
    pub governor: Option<String>,
    /// Sleep states that are enabled, with their exit latency in microseconds.
    pub idle_states: Vec<IdleState>,
    /// Whether turbo is on.
    pub turbo: Option<bool>,
    /// Processors kept free of other work at boot.
    pub isolated_cpus: Option<String>,
    /// Processes ready to run, averaged over a minute.
    pub load_1min: Option<f64>,
    /// Running under a hypervisor.
    pub hypervisor: Option<bool>,
    /// Kernel release.
    pub kernel: String,
    /// Page size in bytes behind this end's receive memory.
    pub page_bytes: u64,
    /// The clock of the measurement.
    pub clock: ClockSection,
}

/// A sleep state of the processor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct IdleState {
    /// Its name.
    pub name: String,
    /// Time to wake from it.
    pub latency_us: u64,
}

/// The clock.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClockSection {
    /// `tsc` or `monotonic`.
    pub source: &'static str,
    /// Ticks a second.
    pub hz: f64,
    /// `kernel`, `measured` or `fixed`.
    pub rate: &'static str,
    /// Bound of the rate's error.
    pub rate_error_ppm: f64,
    /// Step in nanoseconds.
    pub granularity_ns: f64,
    /// Why the cycle counter is not used.
    pub why_not_tsc: Option<String>,
}

impl From<&ClockFacts> for ClockSection {
    fn from(facts: &ClockFacts) -> Self {
        let rounded = |v: f64| (v * 1000.0).round() / 1000.0;
        Self {
            source: facts.source,
            hz: facts.hz.round(),
            rate: facts.rate.name(),
            rate_error_ppm: rounded(facts.rate_error_ppm),
            granularity_ns: rounded(facts.granularity_ns),
            why_not_tsc: facts.why_not_cycle_counter.clone(),
        }
    }
}

/// Where the kernel tells what it knows: `/proc` and `/sys`, or copies of them in tests.
#[derive(Clone, Debug)]
pub struct Source {
    proc: PathBuf,
    sys: PathBuf,
}

impl Default for Source {
    fn default() -> Self {
        Self::at(Path::new("/"))
    }
}

impl Source {
    /// The trees below `root`.
    pub fn at(root: &Path) -> Self {
        Self {
            proc: root.join("proc"),
            sys: root.join("sys"),
        }
    }

    fn sys(&self, path: &str) -> Option<String> {
        text(&self.sys.join(path))
    }

    fn proc(&self, path: &str) -> Option<String> {
        text(&self.proc.join(path))
    }

    /// How near processors are to each other.
    pub fn topology(&self) -> Topology {
        Topology::read(&self.sys.join("devices/system"))
    }

    /// Reads all that is known for two ends on processors `cpu` and `peer_cpu`, of this machine both or of two.
    pub fn read(
        &self,
        (cpu, peer_cpu): (Option<u32>, Option<u32>),
        same_machine: bool,
        page_bytes: u64,
        clock: &ClockFacts,
    ) -> Environment {
        let info = self.proc("cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            info.lines()
                .filter_map(|l| l.split_once(':'))
                .find(|(key, _)| key.trim() == name)
                .map(|(_, value)| value.trim().to_owned())
        };
        let topology = self.topology();
        let at = cpu.unwrap_or(0);
        Environment {
            cpu_model: field("model name"),
            cpus_online: topology.online().len(),
            cpu,
            peer_cpu,
            placement: match (cpu, peer_cpu) {
                (Some(_), Some(_)) if !same_machine => "two machines",
                (Some(a), Some(b)) => topology.nearness(a, b).name(),
                _ => "not pinned",
            },
            numa_nodes: [cpu, peer_cpu.filter(|_| same_machine)].map(|c| topology.node(c?)),
            governor: self.sys(&format!("devices/system/cpu/cpu{at}/cpufreq/scaling_governor")),
            idle_states: self.idle_states(at),
            turbo: self.turbo(),
            isolated_cpus: self.sys("devices/system/cpu/isolated"),
            load_1min: self
                .proc("loadavg")
                .and_then(|l| l.split_whitespace().next()?.parse().ok()),
            hypervisor: field("flags").map(|f| f.split_whitespace().any(|flag| flag == "hypervisor")),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            page_bytes,
            clock: clock.into(),
        }
    }

    fn idle_states(&self, cpu: u32) -> Vec<IdleState> {
        let base = format!("devices/system/cpu/cpu{cpu}/cpuidle");
        (0..16)
            .filter_map(|n| {
                let name = self.sys(&format!("{base}/state{n}/name"))?;
                let latency_us = self.sys(&format!("{base}/state{n}/latency"))?.parse().ok()?;
                let disabled = self.sys(&format!("{base}/state{n}/disable"))? != "0";
                (!disabled).then_some(IdleState { name, latency_us })
            })
            .collect()
    }

    fn turbo(&self) -> Option<bool> {
        if let Some(off) = self.sys("devices/system/cpu/intel_pstate/no_turbo") {
            return Some(off == "0");
        }
        self.sys("devices/system/cpu/cpufreq/boost").map(|on| on == "1")
    }
}

fn text(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

impl Environment {
    /// What in this environment spoils results, in words.
    pub fn warnings(&self) -> Vec<String> {
        /// Waking takes longer than many round trips.
        const DEEP_US: u64 = 20;
        let mut out = Vec::new();
        match self.placement {
            "not pinned" => out.push(
                "an end is not pinned to a processor and may move: use --cpu A,B (or --cpu A at each end)"
                    .to_owned(),
            ),
            "same processor" => out.push(
                "both ends share one processor: every message waits for a switch between them".to_owned(),
            ),
            _ => {}
        }
        if let [Some(a), Some(b)] = self.numa_nodes
            && a != b
        {
            out.push(format!("the two ends run on different NUMA nodes ({a} and {b})"));
        }
        if let Some(governor) = self.governor.as_deref()
            && governor != "performance"
        {
            out.push(format!(
                "the frequency governor is '{governor}', not 'performance': latency depends on the load before"
            ));
        }
        if let Some(deepest) = self.idle_states.iter().max_by_key(|s| s.latency_us)
            && deepest.latency_us >= DEEP_US
        {
            out.push(format!(
                "sleep state {} takes {} us to leave and is enabled: sleeping ends wake late",
                deepest.name, deepest.latency_us
            ));
        }
        if let Some(why) = &self.clock.why_not_tsc {
            out.push(format!(
                "stamps come from the system clock, which costs more than the cycle counter: {why}"
            ));
        }
        if self.hypervisor == Some(true) {
            out.push(
                "this is a virtual machine: its processors can be taken away at any time, and near and far from each other \
                 as the host likes"
                    .to_owned(),
            );
        }
        if let Some(load) = self.load_1min
            && load >= self.cpus_online as f64 * 0.75
        {
            out.push(format!(
                "the machine is busy: load {load} on {} processors",
                self.cpus_online
            ));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use ntb_mem::clock::Clock;

    use super::*;

    fn tree(files: &[(&str, &str)]) -> (PathBuf, Source) {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let root = std::env::temp_dir().join(format!(
            "ntb-environment-{}-{}",
            std::process::id(),
            NUMBER.fetch_add(1, Ordering::Relaxed)
        ));
        for (path, content) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let source = Source::at(&root);
        (root, source)
    }

    #[test]
    fn a_badly_set_up_machine_is_described_and_warned_of() {
        let cpu = "sys/devices/system/cpu";
        let files: Vec<(String, &str)> = vec![
            (
                "proc/cpuinfo".into(),
                "processor : 0\nmodel name\t: Fast One\nflags : fpu hypervisor tsc\n",
            ),
            ("proc/loadavg".into(), "3.50 1 1 2/3 4\n"),
            (format!("{cpu}/online"), "0-1\n"),
            (format!("{cpu}/isolated"), "\n"),
            (format!("{cpu}/cpufreq/boost"), "1\n"),
            (format!("{cpu}/cpu0/cpufreq/scaling_governor"), "powersave\n"),
            (format!("{cpu}/cpu0/cpuidle/state0/name"), "POLL\n"),
            (format!("{cpu}/cpu0/cpuidle/state0/latency"), "0\n"),
            (format!("{cpu}/cpu0/cpuidle/state0/disable"), "0\n"),
            (format!("{cpu}/cpu0/cpuidle/state1/name"), "C6\n"),
            (format!("{cpu}/cpu0/cpuidle/state1/latency"), "133\n"),
            (format!("{cpu}/cpu0/cpuidle/state1/disable"), "0\n"),
            (format!("{cpu}/cpu0/topology/physical_package_id"), "0\n"),
            (format!("{cpu}/cpu1/topology/physical_package_id"), "1\n"),
            ("sys/devices/system/node/node0/cpulist".into(), "0\n"),
            ("sys/devices/system/node/node1/cpulist".into(), "1\n"),
        ];
        let files: Vec<(&str, &str)> = files.iter().map(|(p, c)| (p.as_str(), *c)).collect();
        let (root, source) = tree(&files);
        let e = source.read((Some(0), Some(1)), true, 4096, &Clock::system("it jumps").1);
        fs::remove_dir_all(root).unwrap();
        assert_eq!(e.cpu_model.as_deref(), Some("Fast One"));
        assert_eq!(
            (e.cpus_online, e.turbo, e.hypervisor),
            (2, Some(true), Some(true))
        );
        assert_eq!(e.numa_nodes, [Some(0), Some(1)]);
        assert_eq!(e.placement, "different sockets");
        assert_eq!(e.idle_states.len(), 2);
        let warnings = e.warnings().join("\n");
        for part in [
            "'powersave'",
            "C6 takes 133 us",
            "it jumps",
            "virtual machine",
            "load 3.5",
            "NUMA nodes (0 and 1)",
        ] {
            assert!(warnings.contains(part), "{part} not in {warnings}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_null_and_not_warned_of() {
        let (_, source) = tree(&[]);
        let e = source.read((Some(0), Some(1)), true, 4096, &Clock::system("x").1);
        assert_eq!(
            (e.cpu_model.as_ref(), e.governor.as_ref(), e.turbo, e.hypervisor),
            (None, None, None, None)
        );
        assert_eq!(e.warnings().len(), 1, "{:?}", e.warnings());
    }

    #[test]
    fn processors_of_two_machines_are_not_compared() {
        let e = Source::default().read((Some(0), Some(0)), false, 4096, &Clock::system("x").1);
        assert_eq!((e.placement, e.numa_nodes[1]), ("two machines", None));
        assert!(
            !e.warnings().iter().any(|w| w.contains("processor:")),
            "{:?}",
            e.warnings()
        );
    }

    #[test]
    fn unpinned_ends_are_warned_of() {
        let e = Source::default().read((None, Some(0)), true, 4096, &Clock::system("x").1);
        assert!(e.warnings()[0].contains("--cpu"));
        assert!(!e.kernel.is_empty());
    }
}
