//! Parameters of a link over RDMA.

use std::{path::PathBuf, str::FromStr, time::Duration};

use ntb_mem::{line::LINE_BYTES, region::Pages};

use super::{error::failed, verbs::Fabric};
use crate::link::{LinkError, ends::WINDOW_BYTES};

/// Requests that a queue is asked for at least.
pub(super) const QUEUE_LEAST: u32 = 8;
/// Bytes to write from, at most: more is a slip of the pen.
const MIRROR_MOST: u64 = 1 << 36;

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

impl RdmaOptions {
    /// These, changed by what stands behind an address of a link, such as `device=mlx5_0,gid=3,strict`.
    ///
    /// | word | option | value |
    /// | --- | --- | --- |
    /// | `device` | [`Self::device`] | name |
    /// | `port` | [`Self::port`] | number |
    /// | `gid` | [`Self::gid_index`] | index |
    /// | `tc` | [`Self::traffic_class`] | 0 to 255 |
    /// | `sl` | [`Self::service_level`] | 0 to 15 |
    /// | `mtu` | [`Self::mtu`] | 256, 512, 1024, 2048 or 4096 |
    /// | `inline` | [`Self::inline_bytes`] | bytes |
    /// | `depth` | [`Self::depth`] | requests |
    /// | `batch` | [`Self::batch_bytes`] | bytes |
    /// | `mirror` | [`Self::mirror_bytes`] | bytes |
    /// | `timeout` | [`Self::timeout`] | exponent, 0 to 31 |
    /// | `retries` | [`Self::retries`] | 0 to 7 |
    /// | `stall` | [`Self::stall`] | milliseconds |
    /// | `manager` | [`Self::manager`] | `auto`, `only` or `never` |
    /// | `strict` | [`Self::strict`] | none |
    pub fn with(mut self, text: &str) -> Result<Self, LinkError> {
        for part in text.split(',').filter(|_| !text.is_empty()) {
            let (name, value) = match part.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (part, None),
            };
            match (name, value) {
                ("device", Some(device)) if !device.is_empty() => self.device = Some(device.to_owned()),
                ("port", Some(n)) => self.port = Some(number(part, n)?),
                ("gid", Some(n)) => self.gid_index = Some(number(part, n)?),
                ("tc", Some(n)) => self.traffic_class = number(part, n)?,
                ("sl", Some(n)) => self.service_level = number(part, n)?,
                ("mtu", Some(n)) => self.mtu = Some(number(part, n)?),
                ("inline", Some(n)) => self.inline_bytes = number(part, n)?,
                ("depth", Some(n)) => self.depth = number(part, n)?,
                ("batch", Some(n)) => self.batch_bytes = Some(number(part, n)?),
                ("mirror", Some(n)) => self.mirror_bytes = number(part, n)?,
                ("timeout", Some(n)) => self.timeout = number(part, n)?,
                ("retries", Some(n)) => self.retries = number(part, n)?,
                ("stall", Some(n)) => self.stall = Duration::from_millis(number(part, n)?),
                ("manager", Some("auto")) => self.manager = Manager::Auto,
                ("manager", Some("only")) => self.manager = Manager::Only,
                ("manager", Some("never")) => self.manager = Manager::Never,
                ("strict", None) => self.strict = true,
                _ => return Err(wrong(part, "no such option, or not such a value")),
            }
        }
        self.check()?;
        Ok(self)
    }

    /// Refuses what cannot be.
    pub(super) fn check(&self) -> Result<(), LinkError> {
        let wrong = |what: String| Err(failed("bad-option", 2, what));
        if let Some(mtu) = self.mtu.filter(|mtu| ![256, 512, 1024, 2048, 4096].contains(mtu)) {
            return wrong(format!(
                "packets of {mtu} bytes: 256, 512, 1024, 2048 or 4096 are possible"
            ));
        }
        if self.timeout > 31 || self.retries > 7 || self.service_level > 15 {
            return wrong(format!(
                "time-out {} (0 to 31), retries {} (0 to 7), service level {} (0 to 15)",
                self.timeout, self.retries, self.service_level
            ));
        }
        let line = LINE_BYTES as u32;
        if self.inline_bytes < line || self.batch_bytes.is_some_and(|bytes| bytes < line) {
            return wrong(format!(
                "{} bytes inline, batches of {} bytes: a line has {line}, and neither can be less",
                self.inline_bytes,
                self.batch_bytes.unwrap_or(line)
            ));
        }
        if self.depth < QUEUE_LEAST || self.stall.is_zero() {
            return wrong(format!(
                "{} requests under way ({QUEUE_LEAST} at least), stall {} ms (not 0)",
                self.depth,
                self.stall.as_millis()
            ));
        }
        if self.mirror_bytes > MIRROR_MOST {
            return wrong(format!(
                "{} bytes to write from: {MIRROR_MOST} at most",
                self.mirror_bytes
            ));
        }
        if self.manager == Manager::Only && self.is_beyond_manager() {
            return wrong(
                "manager=only with mtu or sl: rdma_cm finds packets and service level by itself".to_owned(),
            );
        }
        Ok(())
    }

    /// Refuses what that kind of wire does not have.
    pub(super) fn check_for(&self, fabric: Fabric) -> Result<(), LinkError> {
        if fabric == Fabric::Iwarp && self.is_beyond_manager() {
            return Err(failed(
                "bad-option",
                2,
                "mtu and sl: iWARP has no packets or service levels of its own, they are those of its TCP",
            ));
        }
        Ok(())
    }

    /// Whether something is wanted that rdma_cm finds by itself.
    fn is_beyond_manager(&self) -> bool {
        self.mtu.is_some() || self.service_level != 0
    }
}

fn number<T: FromStr>(part: &str, value: &str) -> Result<T, LinkError> {
    value
        .parse()
        .map_err(|_| wrong(part, "no number, or one that is too large"))
}

fn wrong(part: &str, why: &str) -> LinkError {
    failed(
        "bad-option",
        2,
        format!(
            "'{part}' cannot be understood ({why}): behind the port, each after a comma, may stand device=NAME, port=N, gid=N, \
             tc=N, sl=N, mtu=BYTES, inline=BYTES, depth=N, batch=BYTES, mirror=BYTES, timeout=N, retries=N, stall=MS, \
             manager=auto|only|never, strict"
        ),
    )
}

/// What is in force of that which the port does not say.
impl std::fmt::Display for RdmaOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.mtu {
            Some(mtu) => write!(f, "packets of {mtu} bytes")?,
            None => f.write_str("packets as large as both ports have")?,
        }
        write!(
            f,
            ", traffic class {}, service level {}, inline {} bytes, {} requests under way, ",
            self.traffic_class, self.service_level, self.inline_bytes, self.depth
        )?;
        match self.batch_bytes {
            Some(bytes) => write!(f, "batches of {bytes} bytes")?,
            None => f.write_str("batches as the wire takes them")?,
        }
        write!(
            f,
            ", time-out {} with {} retries, stall {} ms, rdma_cm {}, {}",
            self.timeout,
            self.retries,
            self.stall.as_millis(),
            match self.manager {
                Manager::Auto => "where both have it",
                Manager::Only => "only",
                Manager::Never => "never",
            },
            if self.strict {
                "strict"
            } else {
                "messages complete by their checks"
            }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_behind_an_address_are_taken_up_and_printed() {
        let all = "device=mlx5_1,port=2,gid=3,tc=104,sl=5,mtu=2048,inline=128,depth=64,batch=4096,mirror=65536,timeout=10,\
                   retries=3,stall=250,manager=never,strict";
        let options = RdmaOptions::default().with(all).unwrap();
        assert_eq!(
            (options.device.as_deref(), options.port, options.gid_index),
            (Some("mlx5_1"), Some(2), Some(3))
        );
        assert_eq!(
            (options.traffic_class, options.service_level, options.mtu),
            (104, 5, Some(2048))
        );
        assert_eq!(
            (options.inline_bytes, options.depth, options.batch_bytes),
            (128, 64, Some(4096))
        );
        assert_eq!(
            (options.mirror_bytes, options.timeout, options.retries),
            (65536, 10, 3)
        );
        assert_eq!(
            (options.stall, options.manager, options.strict),
            (Duration::from_millis(250), Manager::Never, true)
        );
        assert_eq!(
            options.to_string(),
            "packets of 2048 bytes, traffic class 104, service level 5, inline 128 bytes, 64 requests under way, batches of \
             4096 bytes, time-out 10 with 3 retries, stall 250 ms, rdma_cm never, strict"
        );
        let defaults = RdmaOptions::default().with("").unwrap().to_string();
        assert!(
            defaults.contains("as large as both ports have")
                && defaults.contains("time-out 14 with 7 retries"),
            "{defaults}"
        );
    }

    #[test]
    fn options_that_cannot_be_understood_are_named() {
        for text in [
            "device=",
            "device",
            "gid=256",
            "gid=-1",
            "tc=x",
            "sl=16",
            "mtu=1500",
            "retries=8",
            "timeout=32",
            "manager=cm",
            "strict=1",
            "x=1",
            "inline=63",
            "batch=0",
            "depth=7",
            "stall=0",
            "mirror=99999999999999",
            "manager=only,mtu=1024",
            "manager=only,sl=1",
            ",",
            "gid=1,",
            "mtu",
        ] {
            let e = RdmaOptions::default().with(text).unwrap_err();
            assert_eq!((e.name, e.exit), ("bad-option", 2), "{text}: {e}");
        }
        let small = RdmaOptions::default().with("mtu=1024").unwrap();
        assert!(small.check_for(Fabric::Roce).is_ok());
        assert_eq!(small.check_for(Fabric::Iwarp).unwrap_err().name, "bad-option");
        let e = RdmaOptions::default().with("gid=1,huge=2").unwrap_err();
        assert!(e.what.contains("'huge=2'"), "{e}");
    }
}
