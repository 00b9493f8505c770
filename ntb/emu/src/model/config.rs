//! Configuration space: header, BARs that can be sized, and the PCIe, MSI-X, power-management and AER capabilities.

use super::regfile::RegFile;

/// Bytes of configuration space.
pub const CONFIG_BYTES: usize = 4096;

/// One 64-bit base address register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarSpec {
    /// Its first (lower) index, 0, 2 or 4.
    pub index: u8,
    /// Bytes, a power of two, 4096 at least.
    pub bytes: u64,
    /// Whether reads have no side effects, so that it can be mapped write-combining.
    pub prefetchable: bool,
}

/// What a family's configuration space holds.
#[derive(Clone, Copy, Debug)]
pub struct ConfigSpec {
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Revision.
    pub revision: u8,
    /// 24-bit class code.
    pub class: u32,
    /// Where the PCIe capability stands.
    pub pcie_at: u8,
    /// Where the MSI-X capability stands.
    pub msix_at: u8,
    /// Where the power-management capability stands.
    pub pm_at: u8,
    /// Where the extended error-reporting capability stands; 0x100 must hold an extended header.
    pub aer_at: u16,
    /// MSI-X vectors.
    pub vectors: u16,
    /// BAR of the MSI-X table and pending bits.
    pub msix_bar: u8,
    /// Where the table starts in it.
    pub msix_table: u32,
    /// Where the pending bits start in it.
    pub msix_pba: u32,
    /// Greatest link speed (1 to 5) and lanes.
    pub link: (u8, u8),
}

/// Offsets within the header.
pub mod header {
    /// Command register.
    pub const COMMAND: u32 = 0x04;
    /// Command: memory accesses are answered.
    pub const COMMAND_MEMORY: u16 = 1 << 1;
    /// Command: the function may send memory requests, interrupts among them.
    pub const COMMAND_MASTER: u16 = 1 << 2;
    /// First base address register.
    pub const BAR0: u32 = 0x10;
}

/// Offsets within the PCIe capability.
pub mod pcie {
    /// Device control, 16 bits.
    pub const DEVCTL: u32 = 0x08;
    /// Device control: starts a function-level reset.
    pub const DEVCTL_FLR: u16 = 1 << 15;
    /// Device status, 16 bits.
    pub const DEVSTA: u32 = 0x0A;
    /// Link status, 16 bits.
    pub const LNKSTA: u32 = 0x12;
}

/// Offsets within the power-management capability.
pub mod pm {
    /// Control and status.
    pub const CSR: u32 = 4;
    /// The two bits that give the power state.
    pub const CSR_STATE: u16 = 3;
}

/// Offsets within the error-reporting capability.
pub mod aer {
    /// Uncorrectable errors seen.
    pub const UNCORRECTABLE: u32 = 0x04;
    /// Uncorrectable errors not to report.
    pub const UNCORRECTABLE_MASK: u32 = 0x08;
    /// Uncorrectable errors that are fatal.
    pub const SEVERITY: u32 = 0x0C;
    /// Correctable errors seen.
    pub const CORRECTABLE: u32 = 0x10;
    /// Data link protocol error: fatal by default.
    pub const DATA_LINK_PROTOCOL: u32 = 1 << 4;
    /// Completion time-out: not fatal by default.
    pub const COMPLETION_TIMEOUT: u32 = 1 << 14;
    /// Bad TLP: correctable.
    pub const BAD_TLP: u32 = 1 << 6;
}

const SUBSYSTEM: u32 = 0x2C;
const CAPABILITIES: u32 = 0x34;
const EXTENDED: u32 = 0x100;

/// Builds configuration space after power-on.
pub fn build(spec: &ConfigSpec, bars: &[BarSpec]) -> RegFile {
    let mut f = RegFile::new(CONFIG_BYTES);
    let ro = |f: &mut RegFile, at: u32, width, value| f.define(at, width, 0, 0, value);
    ro(&mut f, 0x00, 2, spec.vendor.into());
    ro(&mut f, 0x02, 2, spec.device.into());
    // Memory, master, parity and system error response, no INTx.
    f.define(header::COMMAND, 2, 0x0546, 0, 0);
    f.define(0x06, 2, 0, 0xF900, 0x0010); // a capability list; error bits
    ro(
        &mut f,
        0x08,
        4,
        u64::from(spec.class) << 8 | u64::from(spec.revision),
    );
    f.define(0x0C, 1, 0xFF, 0, 0); // cache line size
    ro(&mut f, 0x0D, 3, 0); // latency timer, single-function endpoint, no self test
    for at in (0x10..0x28).step_by(4) {
        ro(&mut f, at, 4, 0);
    }
    for bar in bars {
        let kind = if bar.prefetchable { 0xC } else { 0x4 };
        let at = header::BAR0 + 4 * u32::from(bar.index);
        f.define(at, 8, !(bar.bytes - 1), 0, kind);
    }
    ro(&mut f, SUBSYSTEM, 2, spec.vendor.into());
    ro(&mut f, SUBSYSTEM + 2, 2, 0);
    ro(
        &mut f,
        CAPABILITIES,
        1,
        spec.pm_at.min(spec.pcie_at).min(spec.msix_at).into(),
    );
    f.define(0x3C, 1, 0xFF, 0, 0); // interrupt line: a scratch register
    ro(&mut f, 0x3D, 1, 0); // no INTx

    let mut order = [spec.pcie_at, spec.msix_at, spec.pm_at];
    order.sort_unstable();
    let next = |at: u8| order.into_iter().find(|&o| o > at).unwrap_or(0);
    pcie_capability(&mut f, spec, next(spec.pcie_at));
    msix_capability(&mut f, spec, next(spec.msix_at));
    pm_capability(&mut f, spec, next(spec.pm_at));
    aer_capability(&mut f, spec);
    f
}

fn pcie_capability(f: &mut RegFile, spec: &ConfigSpec, next: u8) {
    let at = u32::from(spec.pcie_at);
    let link = u64::from(spec.link.0) | u64::from(spec.link.1) << 4;
    f.define(at, 1, 0, 0, 0x10);
    f.define(at + 1, 1, 0, 0, next.into());
    f.define(at + 0x02, 2, 0, 0, 0x0002); // version 2, endpoint
    f.define(at + 0x04, 4, 0, 0, 1 << 28 | 1 << 15 | 1 << 5 | 1); // FLR, role-based errors, extended tags, 256 bytes
    // Relaxed ordering, no-snoop and read requests of 512 bytes as after reset; payload 256 as firmware sets it.
    f.define(at + pcie::DEVCTL, 2, 0x7FFF, 0, 0x2830);
    f.define(at + pcie::DEVSTA, 2, 0, 0x000F, 0);
    f.define(at + 0x0C, 4, 0, 0, link | 1 << 22); // no active-state power management
    f.define(at + 0x10, 2, 0x0FFB, 0, 0);
    f.define(at + pcie::LNKSTA, 2, 0, 0xC000, link | 1 << 12);
    for unused in (0x14..0x24).step_by(4) {
        f.define(at + unused, 4, 0, 0, 0); // no slot, no root port
    }
    f.define(at + 0x24, 4, 0, 0, 0x1F); // completion time-out ranges, can be disabled
    f.define(at + 0x28, 2, 0x041F, 0, 0);
    f.define(at + 0x2A, 2, 0, 0, 0);
    let speeds = (1u64 << spec.link.0) - 1;
    f.define(at + 0x2C, 4, 0, 0, speeds << 1);
    f.define(at + 0x30, 2, 0x00FF, 0, spec.link.0.into()); // target speed
    f.define(at + 0x32, 2, 0, 0, 0);
    f.define(at + 0x34, 8, 0, 0, 0);
}

fn msix_capability(f: &mut RegFile, spec: &ConfigSpec, next: u8) {
    let at = u32::from(spec.msix_at);
    let bar = u64::from(spec.msix_bar);
    f.define(at, 1, 0, 0, 0x11);
    f.define(at + 1, 1, 0, 0, next.into());
    f.define(at + 2, 2, 0xC000, 0, u64::from(spec.vectors) - 1);
    f.define(at + 4, 4, 0, 0, u64::from(spec.msix_table) | bar);
    f.define(at + 8, 4, 0, 0, u64::from(spec.msix_pba) | bar);
}

fn pm_capability(f: &mut RegFile, spec: &ConfigSpec, next: u8) {
    let at = u32::from(spec.pm_at);
    f.define(at, 1, 0, 0, 0x01);
    f.define(at + 1, 1, 0, 0, next.into());
    f.define(at + 2, 2, 0, 0, 0x0003); // version 1.2, D0 and D3
    f.define(at + pm::CSR, 2, pm::CSR_STATE.into(), 0, 0x0008); // no reset on the way back to D0
    f.define(at + 6, 2, 0, 0, 0);
}

fn aer_capability(f: &mut RegFile, spec: &ConfigSpec) {
    let at = u32::from(spec.aer_at);
    if at != EXTENDED {
        // The list starts at 0x100: a vendor-specific capability of no content leads on.
        f.define(EXTENDED, 4, 0, 0, u64::from(at) << 20 | 1 << 16 | 0x000B);
        f.define(EXTENDED + 4, 4, 0, 0, 0x00C0_0001); // 12 bytes long
        f.define(EXTENDED + 8, 4, 0, 0, 0);
    }
    f.define(at, 4, 0, 0, 2 << 16 | 0x0001);
    let errors = 0x01FF_F030;
    f.define(at + aer::UNCORRECTABLE, 4, 0, errors, 0);
    f.define(at + aer::UNCORRECTABLE_MASK, 4, errors, 0, 0);
    f.define(at + aer::SEVERITY, 4, errors, 0, 0x0046_2030);
    f.define(at + aer::CORRECTABLE, 4, 0, 0xF1C1, 0);
    f.define(at + 0x14, 4, 0xF1C1, 0, 0x2000);
    f.define(at + 0x18, 4, 0, 0, 0); // no ECRC
    for log in (0x1C..0x2C).step_by(4) {
        f.define(at + log, 4, 0, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: ConfigSpec = ConfigSpec {
        vendor: 0x8086,
        device: 0x347E,
        revision: 0x10,
        class: 0x06_8000,
        pcie_at: 0x40,
        msix_at: 0x80,
        pm_at: 0xE0,
        aer_at: 0x148,
        vectors: 33,
        msix_bar: 0,
        msix_table: 0x2000,
        msix_pba: 0x2800,
        link: (4, 16),
    };

    #[test]
    fn bars_size_as_pci_wants_it() {
        let bars = [BarSpec {
            index: 2,
            bytes: 1 << 20,
            prefetchable: true,
        }];
        let mut f = build(&SPEC, &bars);
        f.write(0x18, &[0xFF; 8]);
        assert_eq!(f.get(0x18, 8), 0xFFFF_FFFF_FFF0_000C);
        f.write(0x18, &0x38_1234_5678u64.to_le_bytes());
        assert_eq!(f.get(0x18, 8), 0x38_1230_000C);
        f.write(0x10, &[0xFF; 8]); // not there
        assert_eq!(f.get(0x10, 8), 0);
    }

    #[test]
    fn both_capability_lists_end() {
        let f = build(&SPEC, &[]);
        let mut seen = Vec::new();
        let mut at = f.get(CAPABILITIES, 1) as u32;
        while at != 0 {
            seen.push(f.get(at, 1));
            at = f.get(at + 1, 1) as u32;
        }
        assert_eq!(seen, [0x10, 0x11, 0x01]);
        let mut seen = Vec::new();
        let mut at = EXTENDED;
        while at != 0 {
            let head = f.get(at, 4);
            seen.push(head & 0xFFFF);
            at = (head >> 20) as u32;
        }
        assert_eq!(seen, [0x000B, 0x0001]);
    }
}
