//! What a side states in its version message, beside the version.

/// Descriptors per message that a side can take unless it says otherwise.
pub const DEFAULT_MAX_FDS: u64 = 1;
/// Bytes per transfer that a side can take unless it says otherwise.
pub const DEFAULT_MAX_TRANSFER: u64 = 1 << 20;
/// Longest text that is looked at.
const MAX_TEXT: usize = 4096;

/// Capabilities that a side states in its version message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Descriptors that it can take in one message.
    pub max_fds: u64,
    /// Bytes that it can take in one transfer.
    pub max_transfer: u64,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self {
            max_fds: DEFAULT_MAX_FDS,
            max_transfer: DEFAULT_MAX_TRANSFER,
        }
    }
}

impl Capabilities {
    /// The JSON that follows the version, with its final zero.
    pub fn to_json(self) -> Vec<u8> {
        let mut text = format!(
            r#"{{"capabilities":{{"max_msg_fds":{},"max_data_xfer_size":{}}}}}"#,
            self.max_fds, self.max_transfer
        )
        .into_bytes();
        text.push(0);
        text
    }

    /// From what follows the version; nothing there means the defaults. `None` when it is not JSON of the right
    /// form, or a value cannot be.
    pub fn from_json(data: &[u8]) -> Option<Self> {
        let text = data.strip_suffix(&[0]).unwrap_or(data);
        if text.is_empty() {
            return Some(Self::default());
        }
        if text.len() > MAX_TEXT {
            return None;
        }
        let json: serde_json::Value = serde_json::from_slice(text).ok()?;
        let number = |name: &str, otherwise| match json.get("capabilities").and_then(|c| c.get(name)) {
            None => Some(otherwise),
            Some(v) => v.as_u64().filter(|n| *n > 0),
        };
        Some(Self {
            max_fds: number("max_msg_fds", DEFAULT_MAX_FDS)?,
            max_transfer: number("max_data_xfer_size", DEFAULT_MAX_TRANSFER)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_survive_the_wire_and_default() {
        let c = Capabilities {
            max_fds: 8,
            max_transfer: 65536,
        };
        assert_eq!(Capabilities::from_json(&c.to_json()), Some(c));
        assert_eq!(Capabilities::from_json(b""), Some(Capabilities::default()));
        assert_eq!(Capabilities::from_json(b"{}\0"), Some(Capabilities::default()));
        for bad in [&b"{"[..], b"{\"capabilities\":{\"max_msg_fds\":0}}", b"\xff\0"] {
            assert_eq!(Capabilities::from_json(bad), None);
        }
    }
}
