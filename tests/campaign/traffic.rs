//! Messages whose content proves where they come from, and the check of what arrives.

/// Bytes of the header: source, number, length.
pub(crate) const HEADER: usize = 24;

/// Fills `buf` with message `number` of `source`.
pub(crate) fn fill(buf: &mut [u8], source: u64, number: u64) {
    let len = buf.len();
    buf[..8].copy_from_slice(&source.to_le_bytes());
    buf[8..16].copy_from_slice(&number.to_le_bytes());
    buf[16..HEADER].copy_from_slice(&(len as u64).to_le_bytes());
    let mut state = source ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for chunk in buf[HEADER..].chunks_mut(8) {
        state = state
            .rotate_left(23)
            .wrapping_mul(0xd129_0a3b_4a2f_6f35)
            .wrapping_add(1);
        chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
    }
}

/// Length of message `number`: mostly small, sometimes many lines, never beyond `max`.
pub(crate) fn length(source: u64, number: u64, max: usize) -> usize {
    let mix = (source ^ number).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33;
    let len = match mix % 16 {
        0 => 57 + (mix / 16) as usize % 2000,
        1..=3 => 49 + (mix / 16) as usize % 16,
        _ => HEADER + (mix / 16) as usize % 25,
    };
    len.clamp(HEADER, max)
}

/// What a reader has seen of each source.
#[derive(Debug, Default)]
pub(crate) struct Checker {
    source: Option<u64>,
    /// Sources that have been replaced.
    past: std::collections::HashSet<u64>,
    next: u64,
    /// The next message may leave out earlier ones: a life of the channel has ended.
    gap_allowed: bool,
    pub(crate) received: u64,
    pub(crate) gaps: u64,
    pub(crate) skipped: u64,
}

impl Checker {
    /// A life of the channel has ended: messages under way may be gone, and the source may be another.
    pub(crate) fn life_ended(&mut self) {
        self.gap_allowed = true;
    }

    /// Checks one message.
    pub(crate) fn check(&mut self, bytes: &[u8]) -> Result<(), String> {
        if bytes.len() < HEADER {
            return Err(format!("a message of {} bytes was never sent", bytes.len()));
        }
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default());
        let (source, number, len) = (word(0), word(8), word(16));
        if len != bytes.len() as u64 {
            return Err(format!(
                "message {number} of {source:x}: {} bytes instead of {len}",
                bytes.len()
            ));
        }
        let mut expected = vec![0; bytes.len()];
        fill(&mut expected, source, number);
        if expected != bytes {
            return Err(format!(
                "message {number} of {source:x} ({len} bytes): torn or altered"
            ));
        }
        if self.source != Some(source) {
            if !self.gap_allowed {
                return Err(format!(
                    "message {number} of another source {source:x} within one life of the channel"
                ));
            }
            if let Some(old) = self.source.replace(source) {
                self.past.insert(old);
            }
            if self.past.contains(&source) {
                return Err(format!(
                    "message {number} of source {source:x}, which had been replaced: stale"
                ));
            }
            self.next = number;
        } else if number < self.next {
            return Err(format!(
                "message {number} of {source:x} again, {} was due: doubled or out of order",
                self.next
            ));
        } else if number > self.next {
            if !self.gap_allowed {
                return Err(format!(
                    "messages {} to {} of {source:x} are lost",
                    self.next,
                    number - 1
                ));
            }
            self.gaps += 1;
            self.skipped += number - self.next;
        }
        self.gap_allowed = false;
        self.next = number + 1;
        self.received += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(source: u64, number: u64) -> Vec<u8> {
        let mut buf = vec![0; length(source, number, 4096)];
        fill(&mut buf, source, number);
        buf
    }

    #[test]
    fn every_rule_is_checked() {
        let mut c = Checker::default();
        c.life_ended();
        c.check(&message(1, 0)).unwrap();
        c.check(&message(1, 1)).unwrap();
        assert!(c.check(&message(1, 1)).unwrap_err().contains("doubled"));
        assert!(c.check(&message(1, 3)).unwrap_err().contains("lost"));
        let mut torn = message(1, 2);
        *torn.last_mut().unwrap() ^= 1;
        assert!(c.check(&torn).is_err());
        assert!(c.check(&message(2, 0)).unwrap_err().contains("another source"));
        c.life_ended();
        c.check(&message(2, 5)).unwrap();
        c.life_ended();
        assert!(c.check(&message(1, 9)).unwrap_err().contains("stale"));
    }
}
