//! Round trips through a queue pair.

use std::{
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use ntb_linux::{
    netdev::answer::{self, Host, Meaning},
    transport::{Event, Sent, Step, Transport},
};

use super::{NAP, failure, print, transport};
use crate::{
    cli::linux::PingArgs,
    exit::{Exit, Failure},
    interrupt::Interrupt,
    stats::Latencies,
};

/// A reply that takes longer counts as lost.
const PATIENCE: Duration = Duration::from_secs(5);
/// Looks at the ring before the first sleep.
const SPINS: u32 = 200;
/// Identifier of this program's pings: the same number as a text, "np".
const ID: u16 = 0x6E70;
/// First bytes of a frame to be sent back.
const MAGIC: [u8; 8] = *b"ntb-ping";

/// Whom to ask: the kernel's network stack, or a program that sends frames back.
enum Way {
    Host { own: Host, peer: Host },
    Frames,
}

impl Way {
    fn request(&self, sequence: u64, data: &[u8]) -> Vec<u8> {
        match self {
            Self::Host { own, peer } => answer::echo_request(own, peer, ID, sequence as u16, data),
            Self::Frames => [&MAGIC[..], &sequence.to_le_bytes()[..], data].concat(),
        }
    }

    /// Whether a frame is the reply, and, if it is, whether it is whole; otherwise what it asks of this side.
    fn reply(&self, frame: &[u8], sequence: u64, data: &[u8]) -> Reply {
        let is_it = |same: bool, whole: bool| match (same, whole) {
            (true, true) => Reply::Good,
            (true, false) => Reply::Corrupt,
            (false, _) => Reply::Other(None),
        };
        match self {
            Self::Host { own, peer } => match answer::understand(own, frame) {
                Meaning::EchoReply {
                    from,
                    id,
                    sequence: number,
                    data: got,
                } => is_it(
                    from == peer.ip && id == ID && number == sequence as u16,
                    got == data,
                ),
                Meaning::Answer(answer) => Reply::Other(Some(answer)),
                Meaning::Resolved(_) | Meaning::Nothing => Reply::Other(None),
            },
            Self::Frames => {
                let head = [&MAGIC[..], &sequence.to_le_bytes()[..]].concat();
                is_it(frame.starts_with(&head), frame.get(head.len()..) == Some(data))
            }
        }
    }
}

enum Reply {
    Good,
    Corrupt,
    Other(Option<Vec<u8>>),
}

/// The queue pair, and when to give up.
struct Line<'a> {
    transport: Transport,
    timeout: Duration,
    interrupt: &'a Interrupt,
    frame: Vec<u8>,
    losses: u64,
}

impl Line<'_> {
    /// Sends; waits for room and for a connection that was lost.
    fn send(&mut self, frame: &[u8]) -> Result<(), Failure> {
        let start = Instant::now();
        loop {
            if self.transport.step() != Step::Up {
                self.transport.connect(self.timeout).map_err(|e| failure(&e))?;
            }
            if self.transport.send(frame).map_err(|e| failure(&e))? == Sent::Yes {
                return Ok(());
            }
            if start.elapsed() >= self.timeout {
                let what = "the peer has taken no frame for as long as --timeout allows: its ring is full";
                return Err(Failure::new(Exit::LinkLost, "peer-stalled", what));
            }
            self.look()?;
            self.transport.wait(None, NAP).map_err(|e| failure(&e))?;
        }
    }

    fn look(&mut self) -> Result<(), Failure> {
        if let Some(Event::Down(_)) = self.transport.poll().map_err(|e| failure(&e))? {
            self.losses += 1;
        }
        Ok(())
    }

    /// The next frame until `end`; false when there is none.
    fn next(&mut self, end: Instant) -> Result<bool, Failure> {
        for round in 0_u32.. {
            if self.transport.receive(&mut self.frame).map_err(|e| failure(&e))? {
                return Ok(true);
            }
            let now = Instant::now();
            if now >= end || self.interrupt.came() || self.transport.step() != Step::Up {
                self.look()?;
                return Ok(false);
            }
            if round >= SPINS {
                self.look()?;
                let sleep = NAP.min(end.saturating_duration_since(now));
                self.transport.wait(None, sleep).map_err(|e| failure(&e))?;
            }
        }
        Ok(false)
    }
}

/// Measures and prints.
pub(super) fn run(args: &PingArgs, interrupt: &Interrupt) -> Result<Exit, Failure> {
    let mut line = Line {
        transport: transport(&args.queue)?,
        timeout: args.queue.port.timeout,
        interrupt,
        frame: Vec::new(),
        losses: 0,
    };
    let largest = line.transport.largest().map_err(|e| failure(&e))?;
    let most = largest.saturating_sub(answer::ECHO_OVERHEAD) as u64;
    if args.size > most {
        let what = format!(
            "--size: {} bytes do not fit a frame here: allowed: 16 to {most}",
            args.size
        );
        return Err(Failure::new(Exit::Usage, "usage", what));
    }
    line.transport
        .connect(args.queue.port.timeout)
        .map_err(|e| failure(&e))?;
    let way = match (args.from, args.to) {
        (Some(from), Some(to)) => resolve(&mut line, Host::new(from), to)?,
        _ => Way::Frames,
    };
    let mut times = Latencies::default();
    let (mut sent, mut corrupt) = (0, 0);
    while sent < args.count && !interrupt.came() {
        let data: Vec<u8> = (0..args.size).map(|i| (sent + i) as u8).collect();
        let request = way.request(sent, &data);
        let begun = Instant::now();
        line.send(&request)?;
        while line.next(begun + PATIENCE)? {
            match way.reply(&line.frame, sent, &data) {
                Reply::Good => {
                    times.record(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX));
                    break;
                }
                Reply::Corrupt => {
                    corrupt += 1;
                    break;
                }
                Reply::Other(Some(answer)) => line.send(&answer)?,
                Reply::Other(None) => {}
            }
        }
        sent += 1;
        std::thread::sleep(args.interval.saturating_sub(begun.elapsed()));
    }
    let received = times.count() + corrupt;
    let lost = sent - received;
    let shown = times.percentiles();
    let counters = line.transport.counters();
    let object = serde_json::json!({
        "tool": "ntb-ping", "client": if args.to.is_some() { "ntb_netdev" } else { "ntb_transport" },
        "size_bytes": args.size, "sent": sent, "received": received, "lost": lost, "corrupt": corrupt,
        "connections_lost": line.losses, "malformed": counters.malformed, "rtt_ns": shown,
    });
    let mut text = format!("{sent} sent, {received} received, {lost} lost, {corrupt} corrupt; round trips");
    for (name, value) in shown.rows() {
        if let Some(ns) = value {
            text += &format!(" {name} {:.1} us", ns as f64 / 1e3);
        }
    }
    print(args.json, &object, &text);
    Ok(if lost + corrupt == 0 {
        Exit::Good
    } else {
        Exit::Bad
    })
}

/// Asks for the hardware address of `ip`, once a second.
fn resolve(line: &mut Line<'_>, own: Host, ip: Ipv4Addr) -> Result<Way, Failure> {
    let start = Instant::now();
    while start.elapsed() < line.timeout && !line.interrupt.came() {
        line.send(&answer::arp_request(&own, ip))?;
        let end = Instant::now() + Duration::from_secs(1);
        while line.next(end)? {
            match answer::understand(&own, &line.frame) {
                Meaning::Resolved(peer) if peer.ip == ip => return Ok(Way::Host { own, peer }),
                Meaning::Answer(answer) => line.send(&answer)?,
                _ => {}
            }
        }
    }
    let what = format!(
        "nobody answers for {ip} through the queue pair. Give ntb_netdev's interface at the peer this address, and bring it \
         up"
    );
    Err(Failure::new(Exit::NoPeer, "no-peer", what))
}
