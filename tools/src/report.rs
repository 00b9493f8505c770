//! The result of a measurement: one structure, printed as text or as JSON.

use std::{fmt::Write, time::Duration};

use ntb_ring::link::LinkKind;
use serde::Serialize;

use crate::{environment::Environment, noise::Noise, ping::events::Record, stats::Percentiles};

/// Version of the JSON object: rises when a key goes or changes its meaning, not when one is added.
pub const SCHEMA: u32 = 1;

/// A result. Times are nanoseconds unless a name says otherwise; null stands for what is not known or not backed by
/// enough samples.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// `ntb-ping`.
    pub tool: &'static str,
    /// Package version.
    pub version: &'static str,
    /// Version of this object.
    pub schema: u32,
    /// The link.
    pub link: LinkSection,
    /// `round-trip` or `one-way`.
    pub mode: &'static str,
    /// Bytes of a message.
    pub size_bytes: u64,
    /// Messages a second asked for; null back to back.
    pub rate_hz: Option<f64>,
    /// Messages a second reached.
    pub reached_hz: Option<f64>,
    /// From the first message to the last reply.
    pub elapsed_ns: u64,
    /// Messages before counting started.
    pub warmup: u64,
    /// What waiting ends did: `spin`, `yield` or `sleep`.
    pub wait: &'static str,
    /// Messages sent.
    pub sent: u64,
    /// Replies received; one-way: messages that the far end counted.
    pub received: u64,
    /// Sent and not received, but for those under way.
    pub lost: u64,
    /// After an interrupt: messages sent less than a second before, without a reply yet.
    pub under_way: u64,
    /// Received more than once.
    pub duplicated: u64,
    /// Received after a later one.
    pub out_of_order: u64,
    /// Received with other bytes than were sent, at either end.
    pub corrupt: u64,
    /// Messages that were due and not sent before the end.
    pub unsent: u64,
    /// Over emulated bridges: what the wire took.
    pub wire: Option<WireSection>,
    /// Round trips: from the planned sending to the reply, or from the sending where there is no plan.
    pub rtt_ns: Percentiles,
    /// Samples behind `rtt_ns`.
    pub rtt_samples: u64,
    /// Mean of the samples.
    pub rtt_mean_ns: Option<f64>,
    /// Time of the whole loop divided by its round trips: the mean without the stamps' part, back to back only.
    pub loop_mean_ns: Option<f64>,
    /// Paced runs: from the real sending to the reply.
    pub service_ns: Option<Percentiles>,
    /// One-way runs: what the far end saw.
    pub oneway: Option<OneWay>,
    /// What the harness itself costs.
    pub floor_ns: FloorSection,
    /// Back to back: median round trip divided by that of the bare line.
    pub rtt_p50_over_floor: Option<f64>,
    /// What disturbed the measuring thread.
    pub noise: Noise,
    /// The far end.
    pub peer: PeerSection,
    /// What happened to the link.
    pub events: Vec<Record>,
    /// The machine.
    pub environment: Environment,
    /// What spoils this result, in words.
    pub warnings: Vec<String>,
    /// What ended the run early.
    pub error: Option<ErrorSection>,
}

/// The link measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LinkSection {
    /// Its address.
    pub address: String,
    /// Transport.
    pub kind: &'static str,
    /// Why this one and nothing better.
    pub reason: String,
    /// How lines are stored.
    pub engine: &'static str,
}

impl LinkSection {
    /// What every result over such a link is marked with.
    pub fn warning(&self) -> Option<String> {
        self.address.ends_with(",no-iommu").then(|| {
            format!(
                "{}: no IOMMU guards this machine: the peer, and any fault of the bridge, reaches all of its memory",
                self.address
            )
        })
    }

    /// What a result is marked with whose median, in nanoseconds, contradicts the order in which transports are chosen. `tcp` is
    /// what a round trip took over TCP at the most, where that is known.
    pub fn dearer_than_tcp(&self, p50: Option<u64>, tcp: Option<Duration>) -> Option<String> {
        let (ours, tcp) = (p50?, u64::try_from(tcp?.as_nanos()).ok()?);
        (self.kind != LinkKind::Tcp.name() && ours > tcp).then(|| {
            format!(
                "{} is preferred to tcp and costs more here: {ours} ns against {tcp} ns at the most, which a round trip took over \
                 TCP when both ends met; name the transport to have the other",
                self.kind
            )
        })
    }
}

/// What the wire of a bridge took for a message. One message is one way: a round trip is two of them.
///
/// This end's stores go through a model of the processor's path to the bus, whose writes the emulator counts once more;
/// the far end's are counted by the emulator. Heartbeats of both ends are in it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WireSection {
    /// How lines are stored: `wc`, `movdir64b` or `uc8`.
    pub engine: &'static str,
    /// Posted writes a message, credits included, in both directions.
    pub tlps_per_message: f64,
    /// Bytes that they take on the wire, headers included.
    pub bytes_per_message: f64,
    /// Loads that crossed the link while messages flowed, of memory and of registers, by either end.
    pub remote_reads: u64,
    /// Posted writes a message that went against the messages (one-way), or carried credits of this end (round trip).
    pub credit_tlps_per_message: f64,
    /// Writes of this end that left the model.
    pub modelled_writes: u64,
    /// Writes of this end that the emulator counted.
    pub counted_writes: u64,
}

/// A stream as the far end saw it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OneWay {
    /// From the first message to the end, by the far end's clock.
    pub span_ns: u64,
    /// Messages a second.
    pub messages_per_second: f64,
    /// Bytes of payload a second.
    pub bytes_per_second: f64,
}

/// The floor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct FloorSection {
    /// A pair of stamps.
    pub clock: f64,
    /// Median of a bare ping-pong of one line between the same two processors: mean of before and after.
    pub line_rtt_p50: Option<u64>,
    /// The same before the measurement.
    pub line_rtt_p50_before: Option<u64>,
    /// The same after it.
    pub line_rtt_p50_after: Option<u64>,
    /// Mean of its whole loop, before the measurement.
    pub line_rtt_mean_before: Option<f64>,
    /// Mean of its whole loop, after the measurement.
    pub line_rtt_mean_after: Option<f64>,
}

/// The far end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PeerSection {
    /// Its process id.
    pub pid: Option<u32>,
    /// It was started by this program.
    pub own: bool,
    /// Times the link ran anew during the measurement.
    pub reconnects: u64,
}

/// What ended a run early.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorSection {
    /// Stable name.
    pub name: &'static str,
    /// In words.
    pub what: String,
}

impl Report {
    /// One JSON object on one line.
    pub fn json(&self) -> String {
        // Nothing in it can fail to be written: no maps, no foreign types.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let _ = self.write_text(&mut out); // writing to a string does not fail
        out
    }

    fn write_text(&self, out: &mut String) -> std::fmt::Result {
        let pace = match (self.rate_hz, self.reached_hz) {
            (Some(asked), Some(reached)) => format!("at {asked} Hz (reached {reached})"),
            (None, Some(reached)) if self.oneway.is_some() => format!("as fast as possible ({reached} Hz)"),
            _ => "back to back".to_owned(),
        };
        writeln!(
            out,
            "{} messages of {} bytes, {}, {pace}, in {} ns after {} to warm up; waiting: {}",
            self.sent, self.size_bytes, self.mode, self.elapsed_ns, self.warmup, self.wait
        )?;
        writeln!(
            out,
            "sent {}, received {}, lost {}, under way {}, duplicated {}, out of order {}, corrupt {}, not sent in time {}",
            self.sent,
            self.received,
            self.lost,
            self.under_way,
            self.duplicated,
            self.out_of_order,
            self.corrupt,
            self.unsent
        )?;
        if let Some(oneway) = &self.oneway {
            writeln!(
                out,
                "far end: {:.0} messages/s, {:.0} bytes/s over {} ns",
                oneway.messages_per_second, oneway.bytes_per_second, oneway.span_ns
            )?;
        } else {
            let what = if self.service_ns.is_some() {
                "round trip from the planned sending"
            } else {
                "round trip"
            };
            self.row(out, what, &self.rtt_ns)?;
            if let Some(service) = &self.service_ns {
                self.row(out, "round trip from the real sending", service)?;
            }
            let mean = |v: Option<f64>| v.map_or("-".to_owned(), |v| format!("{v:.1}"));
            writeln!(
                out,
                "{} samples, mean {} ns, whole loop {} ns each",
                self.rtt_samples,
                mean(self.rtt_mean_ns),
                mean(self.loop_mean_ns)
            )?;
        }
        if let Some(wire) = &self.wire {
            writeln!(
                out,
                "wire ({}): {:.3} TLPs and {:.1} bytes a message, {:.4} TLPs of them for credits, {} remote reads",
                wire.engine,
                wire.tlps_per_message,
                wire.bytes_per_message,
                wire.credit_tlps_per_message,
                wire.remote_reads
            )?;
        }
        let floor = &self.floor_ns;
        writeln!(
            out,
            "floor: bare line round trip p50 {} ns (before {}, after {}), pair of stamps {:.1} ns{}",
            number(floor.line_rtt_p50),
            number(floor.line_rtt_p50_before),
            number(floor.line_rtt_p50_after),
            floor.clock,
            self.rtt_p50_over_floor.map_or(String::new(), |r| format!(
                "; round trip p50 is {r:.2} times the floor"
            ))
        )?;
        let noise = &self.noise;
        writeln!(
            out,
            "noise: largest gap of the polling loop {} ns, {} involuntary context switches, {} page faults, {} ms stolen",
            noise.largest_gap_ns,
            noise.involuntary_context_switches,
            noise.minor_page_faults + noise.major_page_faults,
            noise.stolen_ms
        )?;
        self.write_environment(out)?;
        for warning in &self.warnings {
            writeln!(out, "warning: {warning}")?;
        }
        if let Some(error) = &self.error {
            writeln!(out, "error: {}: {}", error.name, error.what)?;
        }
        Ok(())
    }

    fn row(&self, out: &mut String, what: &str, percentiles: &Percentiles) -> std::fmt::Result {
        write!(out, "{what} in ns:")?;
        for (name, value) in percentiles.rows() {
            write!(out, "  {name} {}", number(value))?;
        }
        if percentiles.p9999.is_none() && percentiles.max.is_some() {
            write!(out, "  (- is backed by fewer than 10 samples)")?;
        }
        writeln!(out)
    }

    fn write_environment(&self, out: &mut String) -> std::fmt::Result {
        let e = &self.environment;
        let or = |v: &Option<String>| {
            v.as_deref()
                .filter(|t| !t.is_empty())
                .unwrap_or("unknown")
                .to_owned()
        };
        let cpu = |c: Option<u32>| c.map_or("any".to_owned(), |c| c.to_string());
        writeln!(
            out,
            "environment: {}; kernel {}; processors {} and {} ({}); governor {}; turbo {}; isolated {}; clock {} ({}); pages {} \
             bytes; load {}; {}",
            or(&e.cpu_model),
            e.kernel,
            cpu(e.cpu),
            cpu(e.peer_cpu),
            e.placement,
            or(&e.governor),
            match e.turbo {
                Some(true) => "on",
                Some(false) => "off",
                None => "unknown",
            },
            e.isolated_cpus
                .as_deref()
                .filter(|t| !t.is_empty())
                .unwrap_or("none"),
            e.clock.source,
            e.clock.rate,
            e.page_bytes,
            e.load_1min.map_or("unknown".to_owned(), |l| l.to_string()),
            match e.hypervisor {
                Some(true) => "virtual machine",
                Some(false) => "no hypervisor",
                None => "hypervisor unknown",
            }
        )
    }
}

fn number(value: Option<u64>) -> String {
    value.map_or("-".to_owned(), |v| v.to_string())
}

#[cfg(test)]
mod link_tests {
    use super::*;

    fn link(kind: &'static str, address: &str) -> LinkSection {
        LinkSection {
            address: address.to_owned(),
            kind,
            reason: String::new(),
            engine: "write-combining",
        }
    }

    #[test]
    fn a_cost_against_the_order_is_a_warning() {
        let (less, more) = (Some(99_999), Some(100_001));
        let tcp = Some(Duration::from_micros(100));
        let ntb = link("ntb", "ntb:0000:81:00.0");
        let said = ntb.dearer_than_tcp(more, tcp).unwrap();
        assert!(
            said.contains("ntb is preferred to tcp") && said.contains("100001 ns against 100000 ns"),
            "{said}"
        );
        for (link, p50, tcp) in [
            (&ntb, less, tcp),
            (&ntb, None, tcp),
            (&ntb, more, None),
            (&link("tcp", "tcp:127.0.0.1:1"), more, tcp),
        ] {
            assert_eq!(link.dearer_than_tcp(p50, tcp), None);
        }
    }

    #[test]
    fn results_without_an_iommu_are_marked() {
        let warning = |address: &str| link("ntb", address).warning();
        assert_eq!(warning("ntb:0000:81:00.0"), None);
        assert_eq!(warning("ntb:0000:81:00.0,iommufd"), None);
        let marked = warning("ntb:0000:81:00.0,no-iommu").unwrap();
        assert!(marked.contains("all of its memory"), "{marked}");
    }
}
