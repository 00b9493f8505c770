//! How near processors are to each other, and pinning threads to them.

use std::{fs, path::Path};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// How near two processors are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Nearness {
    /// One and the same.
    SameProcessor,
    /// Two threads of one core.
    SameCore,
    /// Two cores with a common last-level cache.
    SameCache,
    /// Two cores of one socket.
    SameSocket,
    /// Two sockets.
    DifferentSockets,
    /// The kernel does not say.
    Unknown,
}

impl Nearness {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Self::SameProcessor => "same processor",
            Self::SameCore => "two threads of one core",
            Self::SameCache => "different cores, same L3",
            Self::SameSocket => "different cores, same socket",
            Self::DifferentSockets => "different sockets",
            Self::Unknown => "unknown",
        }
    }
}

/// What the kernel tells of its processors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    cpus: Vec<Cpu>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Cpu {
    number: u32,
    siblings: Vec<u32>,
    cache: Vec<u32>,
    socket: Option<i32>,
    node: Option<u32>,
}

impl Topology {
    /// Reads `/sys/devices/system`, or a copy of it.
    pub fn read(system: &Path) -> Self {
        let text = |path: String| fs::read_to_string(system.join(path)).ok();
        let list = |path: String| text(path).map(|t| parse_list(&t)).unwrap_or_default();
        let nodes: Vec<(u32, Vec<u32>)> = list("node/online".into())
            .into_iter()
            .chain(0..8)
            .map(|n| (n, list(format!("node/node{n}/cpulist"))))
            .collect();
        let cpus = list("cpu/online".into())
            .into_iter()
            .map(|number| {
                let cache = (0..8)
                    .map(|i| format!("cpu/cpu{number}/cache/index{i}"))
                    .find(|dir| text(format!("{dir}/level")).is_some_and(|l| l.trim() == "3"))
                    .map(|dir| list(format!("{dir}/shared_cpu_list")))
                    .unwrap_or_default();
                Cpu {
                    number,
                    siblings: list(format!("cpu/cpu{number}/topology/thread_siblings_list")),
                    cache,
                    socket: text(format!("cpu/cpu{number}/topology/physical_package_id"))
                        .and_then(|t| t.trim().parse().ok()),
                    node: nodes
                        .iter()
                        .find(|(_, cpus)| cpus.contains(&number))
                        .map(|(n, _)| *n),
                }
            })
            .collect();
        Self { cpus }
    }

    /// Numbers of the processors online.
    pub fn online(&self) -> Vec<u32> {
        self.cpus.iter().map(|c| c.number).collect()
    }

    /// NUMA node of a processor.
    pub fn node(&self, cpu: u32) -> Option<u32> {
        self.cpu(cpu)?.node
    }

    /// How near two processors are.
    pub fn nearness(&self, a: u32, b: u32) -> Nearness {
        if a == b {
            return Nearness::SameProcessor;
        }
        let (Some(x), Some(y)) = (self.cpu(a), self.cpu(b)) else {
            return Nearness::Unknown;
        };
        if x.siblings.contains(&b) {
            Nearness::SameCore
        } else if x.cache.contains(&b) {
            Nearness::SameCache
        } else {
            match (x.socket, y.socket) {
                (Some(s), Some(t)) if s == t => Nearness::SameSocket,
                (Some(_), Some(_)) => Nearness::DifferentSockets,
                _ => Nearness::Unknown,
            }
        }
    }

    /// The one of `allowed` that suits an end best whose other end runs on `cpu`; `cpu` itself when there is no other.
    pub fn partner(&self, cpu: u32, allowed: &[u32]) -> u32 {
        allowed
            .iter()
            .copied()
            .filter(|other| *other != cpu)
            .min_by_key(|other| (self.rank(cpu, *other), *other == 0, *other))
            .unwrap_or(cpu)
    }

    /// The two of `allowed` that suit two ends best: different cores, as near as can be, away from the first processor
    /// where there are others, since it serves most interrupts.
    pub fn best_pair(&self, allowed: &[u32]) -> Option<(u32, u32)> {
        let first = *allowed.first()?;
        let pairs = allowed
            .iter()
            .flat_map(|a| allowed.iter().filter(move |b| a < b).map(move |b| (*a, *b)));
        pairs
            .min_by_key(|(a, b)| (self.rank(*a, *b), *a == 0, *a, *b))
            .or(Some((first, first)))
    }

    /// How well two processors suit two ends, best first.
    fn rank(&self, a: u32, b: u32) -> u32 {
        match self.nearness(a, b) {
            Nearness::SameCache => 0,
            Nearness::SameSocket => 1,
            Nearness::DifferentSockets | Nearness::Unknown => 2,
            Nearness::SameCore => 3,
            Nearness::SameProcessor => 4,
        }
    }

    fn cpu(&self, number: u32) -> Option<&Cpu> {
        self.cpus.iter().find(|c| c.number == number)
    }
}

/// A list in the kernel's notation, such as `0-3,8`. What is no number is left out.
fn parse_list(text: &str) -> Vec<u32> {
    const MOST: u32 = 4096;
    text.trim()
        .split(',')
        .filter_map(|part| {
            let (from, to) = part.split_once('-').unwrap_or((part, part));
            let (from, to): (u32, u32) = (from.trim().parse().ok()?, to.trim().parse().ok()?);
            (to < MOST).then_some(from..=to)
        })
        .flatten()
        .collect()
}

/// Processors that the calling thread may run on.
pub fn allowed() -> Vec<u32> {
    let Ok(set) = sched_getaffinity(None) else {
        return Vec::new();
    };
    (0..CpuSet::MAX_CPU as u32)
        .filter(|cpu| set.is_set(*cpu as usize))
        .collect()
}

/// Processors online.
pub fn online_count() -> usize {
    Topology::read(Path::new("/sys/devices/system")).cpus.len()
}

/// A thread bound to one processor until this is dropped.
#[derive(Debug)]
pub struct Pinned {
    before: CpuSet,
    /// The processor.
    pub cpu: u32,
}

impl Pinned {
    /// Binds the calling thread to `cpu`.
    pub fn to(cpu: u32) -> Result<Self, PinError> {
        let error = |errno| PinError {
            cpu,
            errno,
            allowed: allowed(),
        };
        let before = sched_getaffinity(None).map_err(error)?;
        if cpu as usize >= CpuSet::MAX_CPU {
            return Err(error(rustix::io::Errno::INVAL));
        }
        let mut set = CpuSet::new();
        set.set(cpu as usize);
        sched_setaffinity(None, &set).map_err(error)?;
        Ok(Self { before, cpu })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = sched_setaffinity(None, &self.before);
    }
}

/// A processor that cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot run on processor {cpu}: {errno}; this process may run on {allowed:?}")]
pub struct PinError {
    /// The one asked for.
    pub cpu: u32,
    /// What the kernel said.
    pub errno: rustix::io::Errno,
    /// Those that can be had.
    pub allowed: Vec<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        assert_eq!(parse_list("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(parse_list("\n"), Vec::<u32>::new());
        assert_eq!(parse_list("x,2-,5-4,7,0-99999999"), [7]);
    }

    /// Two sockets, two cores each, two threads a core.
    fn eight() -> Topology {
        let cpus = (0..8)
            .map(|n| Cpu {
                number: n,
                siblings: vec![n % 4, n % 4 + 4],
                cache: [0, 1, 2, 3, 4, 5, 6, 7]
                    .into_iter()
                    .filter(|m| m % 4 / 2 == n % 4 / 2)
                    .collect(),
                socket: Some((n % 4 / 2) as i32),
                node: Some(n % 4 / 2),
            })
            .collect();
        Topology { cpus }
    }

    #[test]
    fn nearness_in_words() {
        let t = eight();
        assert_eq!(t.nearness(1, 1), Nearness::SameProcessor);
        assert_eq!(t.nearness(1, 5), Nearness::SameCore);
        assert_eq!(t.nearness(0, 1), Nearness::SameCache);
        assert_eq!(t.nearness(0, 2), Nearness::DifferentSockets);
        assert_eq!(t.nearness(0, 9), Nearness::Unknown);
    }

    #[test]
    fn the_best_pair_has_two_cores_and_one_cache() {
        let t = eight();
        assert_eq!(t.best_pair(&[0, 1, 2, 3, 4, 5, 6, 7]), Some((1, 4)));
        assert_eq!(t.best_pair(&[0, 4, 2]), Some((2, 4)));
        assert_eq!(t.best_pair(&[0, 4]), Some((0, 4)));
        assert_eq!(t.best_pair(&[3]), Some((3, 3)));
        assert_eq!(t.best_pair(&[]), None);
        assert_eq!(t.partner(2, &[0, 1, 2, 3, 6]), 3);
        assert_eq!(t.partner(2, &[2]), 2);
    }

    #[test]
    fn a_pinned_thread_is_freed_again() {
        let before = allowed();
        let last = *before.last().unwrap();
        {
            let pinned = Pinned::to(last).unwrap();
            assert_eq!((pinned.cpu, allowed()), (last, vec![last]));
        }
        assert_eq!(allowed(), before);
        let e = Pinned::to(1023).unwrap_err();
        assert!(e.to_string().contains("may run on"), "{e}");
        assert!(Pinned::to(u32::MAX).is_err());
    }
}
