//! What concerns the machine as a whole.

use std::path::Path;

use ntb::{
    hw::NtbError,
    pci::{PciError, machine::Machine},
};
use ntb_mem::region::RegionError;
use rustix::io::Errno;

use super::item::Item;

/// Amounts of memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// All there is.
    pub total: u64,
    /// That programs can still have.
    pub available: u64,
    /// One huge page.
    pub huge_page: u64,
    /// Huge pages in the pool.
    pub huge_pages: u64,
    /// Of these free.
    pub huge_free: u64,
}

impl Memory {
    /// As the kernel says; `None` when it says nothing.
    pub fn of(machine: &Machine) -> Option<Self> {
        let text = machine.text("/proc/meminfo")?;
        let number = |key: &str| -> u64 {
            let line = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'));
            line.and_then(|l| l.split_whitespace().next()?.parse().ok())
                .unwrap_or(0)
        };
        Some(Self {
            total: number("MemTotal") * 1024,
            available: number("MemAvailable") * 1024,
            huge_page: number("Hugepagesize") * 1024,
            huge_pages: number("HugePages_Total"),
            huge_free: number("HugePages_Free"),
        })
    }
}

/// An amount of bytes with the largest unit that it is a multiple of, or nearly.
pub fn amount(bytes: u64) -> String {
    const UNITS: [(&str, u64); 4] = [
        ("TiB", 1 << 40),
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
    ];
    match UNITS.iter().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) if bytes.is_multiple_of(*unit) => format!("{} {name}", bytes / unit),
        Some((name, unit)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} bytes"),
    }
}

/// All items of the machine. `wanted` bytes will be let in through windows, the largest of which has `window`.
pub fn items(machine: &Machine, wanted: u64, window: u64) -> Vec<Item> {
    let mut items = vec![iommu(machine), lockdown(machine), locked_memory(machine, wanted)];
    if let Some(memory) = Memory::of(machine) {
        items.push(free_memory(&memory, wanted, window));
        items.push(huge_pages(&memory, wanted));
    } else {
        items.push(Item::note("memory", "/proc/meminfo cannot be read", MEMORY_WHY));
    }
    items.push(store_width(machine));
    items.push(power_saving(machine));
    items.extend(governor(machine));
    items.extend(sleep_states(machine));
    items
}

const MEMORY_WHY: &str = "the memory that the peer writes must be there in full before a link runs";

/// Kernel module parameter that lets devices be used without an IOMMU.
pub const UNSAFE_MODE: &str = "/sys/module/vfio/parameters/enable_unsafe_noiommu_mode";

fn iommu(machine: &Machine) -> Item {
    let units = machine.names("/sys/class/iommu");
    if machine.text(UNSAFE_MODE).is_some_and(|t| t == "Y" || t == "1") {
        return Item::warning(
            "iommu",
            "unsafe-mode-on",
            "VFIO's mode without IOMMU is switched on",
            "a program that opens the bridge in this mode lets the peer reach all memory of this machine",
            format!("as root: echo 0 > {UNSAFE_MODE}"),
        );
    }
    if units.is_empty() {
        return Item::warning(
            "iommu",
            "iommu-off",
            "the kernel runs no IOMMU",
            "without it the driver refuses the bridge: the peer could reach all memory of this machine",
            IOMMU_REMEDY,
        );
    }
    Item::pass("iommu", format!("on: {}", units.join(", ")))
}

/// How an IOMMU is switched on.
pub const IOMMU_REMEDY: &str = "enable VT-d or AMD-Vi in the firmware set-up, and boot with intel_iommu=on iommu=pt \
                                (Intel; AMD needs nothing more)";

fn lockdown(machine: &Machine) -> Item {
    match machine.lockdown() {
        None => Item::pass("lockdown", "the kernel is not locked down"),
        Some(mode) => Item::warning(
            "lockdown",
            "lockdown",
            format!("the kernel is locked down ('{mode}', which Secure Boot switches on)"),
            "write-combining mappings of windows are forbidden then: every line of 64 bytes costs eight bus writes, \
             unless the processor has movdir64b. VFIO itself works",
            "turn Secure Boot off in the firmware set-up, or accept uncached stores",
        ),
    }
}

fn locked_memory(machine: &Machine, wanted: u64) -> Item {
    const ITEM: &str = "locked-memory";
    const CAP_IPC_LOCK: u32 = 14;
    let status = machine.text("/proc/self/status").unwrap_or_default();
    let capabilities = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    let capabilities = capabilities
        .and_then(|c| u64::from_str_radix(c.trim(), 16).ok())
        .unwrap_or(0);
    if capabilities >> CAP_IPC_LOCK & 1 == 1 {
        return Item::pass(ITEM, "no limit for this user (privileged)");
    }
    let (limit, locked) = machine.locked_memory();
    let Some(allowed) = limit else {
        if machine.text("/proc/self/limits").is_none() {
            return Item::note(ITEM, "the limit cannot be read", LOCKED_WHY);
        }
        return Item::pass(ITEM, "no limit for this user");
    };
    let needed = wanted.saturating_add(locked);
    if needed <= allowed {
        return Item::pass(
            ITEM,
            format!("{} are allowed, {} needed", amount(allowed), amount(needed)),
        );
    }
    Item::fault(
        ITEM,
        &PciError::Memlock { needed, allowed },
        format!(
            "{} must be locked for the device and {} are allowed to this user ({needed} and {allowed} bytes)",
            amount(needed),
            amount(allowed)
        ),
        LOCKED_WHY,
        "in the shell 'ulimit -l unlimited'; in a service unit LimitMEMLOCK=infinity; for a container --ulimit \
         memlock=-1; for new sessions of a user '* - memlock unlimited' in /etc/security/limits.conf. The iommufd \
         interface counts the BARs of other devices too, the group interface does not",
    )
}

const LOCKED_WHY: &str = "memory that a device reaches is locked, and counts against this limit of the user";

fn free_memory(memory: &Memory, wanted: u64, window: u64) -> Item {
    const ITEM: &str = "memory";
    let huge = memory.huge_free.saturating_mul(memory.huge_page);
    let available = memory.available.saturating_add(huge);
    let found = format!(
        "{} wanted, {} available, of it {} in free huge pages",
        amount(wanted),
        amount(available),
        amount(huge)
    );
    // Normal and huge pages do not mix in one window.
    if wanted > memory.available.max(huge) {
        let source = RegionError::Kernel {
            step: "allocating",
            bytes: wanted,
            errno: Errno::NOMEM,
        };
        let error = NtbError::Memory {
            bytes: wanted,
            source,
        };
        return Item::fault(
            ITEM,
            &error,
            found,
            MEMORY_WHY,
            "ask for less memory (--memory here, the window bytes of the program's link options), or end what uses it; \
             a window need not be filled",
        );
    }
    if window > memory.total {
        return Item::warning(
            ITEM,
            "no-memory",
            format!(
                "{found}; the largest window, of {}, is larger than this machine's memory of {}",
                amount(window),
                amount(memory.total)
            ),
            "only part of the window can ever be used, and its I/O addresses are taken all the same",
            "choose a smaller window size in the firmware set-up, equal on both hosts",
        );
    }
    Item::pass(ITEM, found)
}

fn huge_pages(memory: &Memory, wanted: u64) -> Item {
    const ITEM: &str = "huge-pages";
    let page = memory.huge_page.max(1);
    let needed = wanted.div_ceil(page);
    let found = format!(
        "{} of {} huge pages of {} are free, {needed} are needed for {}",
        memory.huge_free,
        memory.huge_pages,
        amount(memory.huge_page),
        amount(wanted)
    );
    if memory.huge_page > 0 && memory.huge_free >= needed {
        return Item::pass(ITEM, found);
    }
    Item::warning(
        ITEM,
        "no-huge-pages",
        found,
        "normal pages are used instead: more entries in the IOMMU and in the processor's tables, so more misses on \
         the way of each message",
        format!(
            "as root: sysctl vm.nr_hugepages={}",
            memory.huge_pages + needed.saturating_sub(memory.huge_free)
        ),
    )
}

/// Whether the processor of a machine stores whole lines on any memory type.
pub fn has_movdir64b(machine: &Machine) -> bool {
    let text = machine.text("/proc/cpuinfo").unwrap_or_default();
    let flags = text.lines().find(|l| l.starts_with("flags")).unwrap_or_default();
    flags.split_whitespace().any(|f| f == "movdir64b")
}

fn store_width(machine: &Machine) -> Item {
    if has_movdir64b(machine) {
        return Item::pass("whole-line-stores", "the processor has movdir64b");
    }
    Item::note(
        "whole-line-stores",
        "the processor has no movdir64b",
        "whole lines then need a write-combining mapping of the window",
    )
}

/// Policy of the kernel for putting PCIe links to sleep.
pub const ASPM: &str = "/sys/module/pcie_aspm/parameters/policy";

fn power_saving(machine: &Machine) -> Item {
    const ITEM: &str = "link-power-saving";
    let text = machine.text(ASPM).unwrap_or_default();
    let policy = text
        .split_once('[')
        .and_then(|(_, rest)| Some(rest.split_once(']')?.0));
    match policy {
        Some(policy @ ("powersave" | "powersupersave")) => Item::warning(
            ITEM,
            "aspm",
            format!("the kernel's ASPM policy is '{policy}'"),
            "idle links sleep: the first message after a pause takes up to 100 microseconds longer, and some links do \
             not wake up",
            format!("as root: echo performance > {ASPM}; or boot with pcie_aspm.policy=performance"),
        ),
        Some(policy) => Item::pass(ITEM, format!("the kernel's ASPM policy is '{policy}'")),
        None => Item::pass(ITEM, "the kernel does not manage ASPM"),
    }
}

/// Governor of the first processor, which stands for all.
pub const GOVERNOR: &str = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor";

fn governor(machine: &Machine) -> Option<Item> {
    const ITEM: &str = "processor-frequency";
    let governor = machine.text(GOVERNOR)?;
    Some(if governor == "powersave" {
        Item::warning(
            ITEM,
            "governor",
            "the frequency governor is 'powersave'",
            "processors slow down when idle, and take tens of microseconds to speed up again",
            "as root: for f in /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor; do echo performance > $f; done",
        )
    } else {
        Item::pass(ITEM, format!("the frequency governor is '{governor}'"))
    })
}

/// Sleep states of the first processor.
pub const SLEEP_STATES: &str = "/sys/devices/system/cpu/cpu0/cpuidle";

fn sleep_states(machine: &Machine) -> Option<Item> {
    const ITEM: &str = "processor-sleep";
    /// States that take longer to leave are felt.
    const LONG_US: u64 = 10;
    let states = machine.names(SLEEP_STATES);
    let of = |state: &String, file: &str| machine.text(Path::new(SLEEP_STATES).join(state).join(file));
    let deep: Vec<(String, u64)> = states
        .iter()
        .filter(|s| of(s, "disable").as_deref() != Some("1"))
        .filter_map(|s| Some((of(s, "name")?, of(s, "latency")?.parse::<u64>().ok()?)))
        .filter(|(_, us)| *us > LONG_US)
        .collect();
    if states.is_empty() {
        return None;
    }
    let Some((_, worst)) = deep.iter().max_by_key(|(_, us)| *us) else {
        return Some(Item::pass(ITEM, "no deep sleep states are enabled"));
    };
    let list: Vec<String> = deep
        .iter()
        .map(|(name, us)| format!("{name} ({us} us)"))
        .collect();
    Some(Item::note(
        ITEM,
        format!(
            "sleep states that take long to leave are enabled: {}; up to {worst} us",
            list.join(", ")
        ),
        "a thread that sleeps until it is rung pays this; one that spins does not. Processors that hold 0 in \
         /dev/cpu_dma_latency stay awake",
    ))
}
