//! Parameters of a link over RDMA.

use std::{path::PathBuf, time::Duration};

use ntb_mem::region::Pages;

use crate::link::ends::WINDOW_BYTES;

/// Parameters of a link over RDMA. The defaults are those of the fields' documentation.
#[derive(Clone, Debug)]
pub struct RdmaOptions {
    /// Bytes of this side's memory that the peer writes, a multiple of 64; 64 MiB by default. All of it is pinned.
    pub window_bytes: u64,
    /// Pages that this memory stands on.
    pub pages: Pages,
    /// Device, such as `mlx5_0`; the one whose address suits the peer's by default.
    pub device: Option<String>,
    /// Port of the device; the first that is up by default.
    pub port: Option<u8>,
    /// Index into the port's table of GIDs. By default the first RoCE v2 entry that holds the wanted IPv4 address, then any
    /// IPv4-mapped one, then a global IPv6 one; never a link-local one. Index 0 on InfiniBand.
    pub gid_index: Option<u8>,
    /// Traffic class of RoCE packets (DSCP times four); 0 by default.
    pub traffic_class: u8,
    /// Service level on InfiniBand; 0 by default.
    pub service_level: u8,
    /// Bytes of a packet: 256, 512, 1024, 2048 or 4096. By default the largest that both ports have.
    pub mtu: Option<u32>,
    /// Bytes that a request carries itself, without a registered buffer: 220 by default, less where the device grants
    /// less, and a line at least.
    pub inline_bytes: u32,
    /// Requests that may be under way; 256 by default, less where the device grants less.
    pub depth: u32,
    /// Bytes that are gathered into one request where the application batches. By default between a line and 16 KiB: more
    /// while requests are waiting for the wire, less while they are not.
    pub batch_bytes: Option<u32>,
    /// Bytes of the registered mirror that larger runs are written from; 1 MiB by default.
    pub mirror_bytes: u64,
    /// Exponent of the time that an acknowledgement may take, in 4.096 µs times two to the power of it; 14 by default, 67
    /// ms. With [`RdmaOptions::retries`] it bounds how long a dead path goes unnoticed: some 0.5 s.
    pub timeout: u8,
    /// Resends until a path is given up, 0 to 7; 7 by default.
    pub retries: u8,
    /// Time that a request may wait for room in the device before the connection is given up; 5 s by default.
    pub stall: Duration,
    /// Whether messages are taken up only when the device has said that they are complete, which is what the standards
    /// promise, rather than by their checks. Costs a completion and a copy per run. Both sides must agree. Off by
    /// default.
    pub strict: bool,
    /// Whether queue pairs are connected by rdma_cm: by default where both sides have it.
    pub manager: Manager,
    /// Where sysfs is mounted.
    pub sysfs: PathBuf,
}

/// Who connects queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Manager {
    /// rdma_cm where both sides have it, an exchange of addresses otherwise.
    #[default]
    Auto,
    /// rdma_cm or nothing.
    Only,
    /// Never rdma_cm. Not on iWARP, which knows no other way.
    Never,
}

impl Default for RdmaOptions {
    fn default() -> Self {
        Self {
            window_bytes: WINDOW_BYTES,
            pages: Pages::default(),
            device: None,
            port: None,
            gid_index: None,
            traffic_class: 0,
            service_level: 0,
            mtu: None,
            inline_bytes: 220,
            depth: 256,
            batch_bytes: None,
            mirror_bytes: 1 << 20,
            timeout: 14,
            retries: 7,
            stall: Duration::from_secs(5),
            strict: false,
            manager: Manager::default(),
            sysfs: PathBuf::from("/sys"),
        }
    }
}
