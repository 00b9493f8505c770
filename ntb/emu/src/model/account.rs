//! What crossed the wire, by a stated model, and what happened at each end.

use serde::Serialize;

/// Bytes that a memory write costs beside its payload: 2 framing, 6 data link, 16 header with a 64-bit address.
/// A read request costs the same and carries nothing.
pub const REQUEST_OVERHEAD: u64 = 24;
/// Bytes that a completion costs beside its payload: its header is 12 bytes.
pub const COMPLETION_OVERHEAD: u64 = 20;
/// No request crosses a multiple of this address.
const BOUNDARY: u64 = 4096;

/// The model behind the counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WireModel {
    /// See [`REQUEST_OVERHEAD`].
    pub request_overhead_bytes: u64,
    /// See [`COMPLETION_OVERHEAD`].
    pub completion_overhead_bytes: u64,
    /// Most payload of a packet.
    pub max_payload_bytes: u64,
}

impl WireModel {
    /// The model for a maximum payload size.
    pub const fn new(max_payload_bytes: u64) -> Self {
        Self {
            request_overhead_bytes: REQUEST_OVERHEAD,
            completion_overhead_bytes: COMPLETION_OVERHEAD,
            max_payload_bytes,
        }
    }

    /// Packets and payload bytes (whole 4-byte words) of `len` bytes at `address`.
    fn split(&self, address: u64, len: u64) -> (u64, u64) {
        let (mut packets, mut payload) = (0, 0);
        let (mut at, mut left) = (address, len);
        while left > 0 {
            let n = left.min(BOUNDARY - at % BOUNDARY).min(self.max_payload_bytes);
            packets += 1;
            payload += ((at % 4) + n).div_ceil(4) * 4;
            at = at.wrapping_add(n);
            left -= n;
        }
        (packets, payload)
    }

    /// Packets and bytes on the wire of a write.
    pub fn write(&self, address: u64, len: u64) -> Packets {
        let (packets, payload) = self.split(address, len);
        Packets {
            tlps: packets,
            wire_bytes: packets * self.request_overhead_bytes + payload,
        }
    }

    /// Requests, and the completions that come back, of a read.
    pub fn read(&self, address: u64, len: u64) -> (Packets, Packets) {
        let (packets, payload) = self.split(address, len);
        let request = Packets {
            tlps: packets,
            wire_bytes: packets * self.request_overhead_bytes,
        };
        let completion = Packets {
            tlps: packets,
            wire_bytes: packets * self.completion_overhead_bytes + payload,
        };
        (request, completion)
    }
}

/// Packets and what they took of the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Packets {
    /// Transaction-layer packets.
    pub tlps: u64,
    /// Bytes, headers and framing included.
    pub wire_bytes: u64,
}

impl std::ops::AddAssign for Packets {
    fn add_assign(&mut self, more: Self) {
        self.tlps += more.tlps;
        self.wire_bytes += more.wire_bytes;
    }
}

/// What one side sent towards the other. Counted as sent, whatever became of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DirectionStats {
    /// Stores to the windows.
    pub window_writes: u64,
    /// Bytes of them.
    pub window_write_bytes: u64,
    /// Their packets.
    pub window_write_packets: Packets,
    /// Loads from the windows: each stalls its processor for a round trip.
    pub window_reads: u64,
    /// Bytes of them.
    pub window_read_bytes: u64,
    /// Their requests.
    pub window_read_packets: Packets,
    /// Completions for the other side's reads.
    pub completion_packets: Packets,
    /// Stores to registers of the other side (scratchpads, mostly).
    pub register_writes: u64,
    /// Doorbells rung.
    pub doorbells: u64,
    /// Packets of both.
    pub register_write_packets: Packets,
    /// Loads of registers of the other side.
    pub register_reads: u64,
    /// Lost since the link was down.
    pub lost_link_down: u64,
    /// Lost to a scenario.
    pub lost_injected: u64,
    /// Arrived changed, by a scenario.
    pub altered: u64,
    /// Arrived late, by a scenario.
    pub delayed: u64,
    /// Arrived in two parts, by a scenario.
    pub held: u64,
    /// Arrived at a window that is closed, or beyond its limit.
    pub outside_window: u64,
    /// Arrived while the receiving function was not bus master.
    pub not_master: u64,
    /// Arrived at a bus address that the receiving client has not mapped.
    pub fault_unmapped: u64,
    /// Arrived at memory mapped for the other access only.
    pub fault_forbidden: u64,
    /// Of those that arrived at such addresses or memory, the ones that count here instead: they came through a window
    /// whose registers do not hold what its owner wrote last, since a scenario lost or altered that.
    pub fault_misled: u64,
    /// Arrived at memory that was mapped without a usable descriptor.
    pub fault_unreachable: u64,
}

/// What happened at one side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SideStats {
    /// Loads from own registers and through them.
    pub register_reads: u64,
    /// Stores to own registers and through them.
    pub register_writes: u64,
    /// Of both, those that touched bytes belonging to no register.
    pub reserved_accesses: u64,
    /// BAR accesses that nobody answered: memory decoding off, low power, or function removed.
    pub unanswered: u64,
    /// Interrupts raised towards the client.
    pub interrupts: u64,
    /// Interrupts without an event descriptor, or raised while not bus master.
    pub interrupts_lost: u64,
    /// Mappings the client asked for.
    pub maps: u64,
    /// Of these, refused by a scenario.
    pub maps_refused: u64,
    /// Of these, without memory that could be reached.
    pub maps_unreachable: u64,
    /// Mappings there are now.
    pub maps_now: u64,
    /// Times the link came up.
    pub link_ups: u64,
    /// Times it went down.
    pub link_downs: u64,
    /// Function resets.
    pub resets: u64,
    /// A client is connected.
    pub attached: bool,
}

/// The link as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LinkStats {
    /// Data can cross.
    pub up: bool,
    /// 1 to 5.
    pub speed: u8,
    /// Lanes.
    pub width: u8,
}

/// Everything counted, at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// The model's name.
    pub family: &'static str,
    /// How packets are counted.
    pub wire_model: WireModel,
    /// The link.
    pub link: LinkStats,
    /// From side A to side B.
    pub a_to_b: DirectionStats,
    /// From side B to side A.
    pub b_to_a: DirectionStats,
    /// At side A.
    pub a: SideStats,
    /// At side B.
    pub b: SideStats,
    /// Scenario actions that have been carried out.
    pub actions: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_by_the_book() {
        let m = WireModel::new(256);
        for (len, bytes) in [(4, 28), (8, 32), (32, 56), (64, 88), (128, 152), (256, 280)] {
            assert_eq!(
                m.write(0, len),
                Packets {
                    tlps: 1,
                    wire_bytes: bytes
                }
            );
        }
        assert_eq!(m.write(0, 257).tlps, 2);
        assert_eq!(m.write(4096 - 32, 64).tlps, 2, "no packet crosses 4 KiB");
        assert_eq!(m.write(3, 2).wire_bytes, 24 + 8, "two words touched");
        assert_eq!(m.write(0, 0), Packets::default());
        let (request, completion) = m.read(0, 512);
        assert_eq!((request.tlps, request.wire_bytes), (2, 48));
        assert_eq!((completion.tlps, completion.wire_bytes), (2, 552));
    }
}
