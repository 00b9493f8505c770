//! Drives a session with arbitrary inputs: a peer that knows every rule, and keeps or breaks each as the data says.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use super::{Action, ChannelId, ChannelSpec, Inputs, Lanes, Session, SessionConfig};
use crate::{
    link::{
        LinkState, LinkStatus, Registers,
        engine::{Inbound, Order},
    },
    wire::{
        identity::{Direction, Identity},
        layout::{BEAT_LINE, CHANNELS_FIRST_LINE, HELLO_LINE, MAX_CHANNELS, TABLE_LINE},
        page::PAGE_LINES,
        pattern::Pattern,
        record::{self, RecordKind},
        registers::{Ended, Phase, Report},
        table::digest,
    },
};

const LINES: u64 = CHANNELS_FIRST_LINE + 8 * PAGE_LINES;
/// Lines of the peer's memory that can be reached.
const REACH: u64 = CHANNELS_FIRST_LINE + 16 * PAGE_LINES;

struct Memory(Vec<AtomicU64>);

impl Memory {
    fn store(&self, word: u64, value: u64) {
        let at = word as usize % self.0.len();
        self.0[at].store(value, Ordering::Relaxed);
    }

    fn store_line(&self, line: u64, content: &ntb_mem::line::Line) {
        for (i, word) in content.0.iter().enumerate() {
            self.store(line * 8 + i as u64, *word);
        }
    }
}

impl Inbound for Memory {
    fn lines(&self) -> u64 {
        self.0.len() as u64 / 8
    }

    fn load(&self, index: usize, order: Ordering) -> u64 {
        self.0[index].load(order)
    }
}

struct Data<'a>(&'a [u8]);

impl Data<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (now, later) = self.0.split_at(N.min(self.0.len()));
        self.0 = later;
        let mut out = [0; N];
        out[..now.len()].copy_from_slice(now);
        out
    }

    fn byte(&mut self) -> u8 {
        self.take::<1>()[0]
    }

    fn half(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    fn word(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

/// Runs a session over inputs made of `data`, and returns how many channels came up.
///
/// # Panics
/// When the session breaks one of its promises: stores outside the peer's memory, lanes outside either memory, channels
/// up twice.
pub fn fuzz(data: &[u8]) -> usize {
    let mut data = Data(data);
    let config = SessionConfig::new("fuzz", 1, 2, Order::Ordered);
    let Ok(mut session) = Session::new(config, LINES) else {
        panic!("the window is large enough")
    };
    let memory = Memory((0..LINES * 8).map(|_| AtomicU64::new(0)).collect());
    let mut registers: Registers = [0; 8];
    let mut link = LinkStatus {
        state: LinkState::WindowsSet,
        losses: 0,
    };
    let mut now = Duration::ZERO;
    let mut peer = Identity {
        incarnation: 77,
        life: 1,
    };
    let (mut up, mut ups) = (Vec::new(), 0);
    let (mut table, mut life) = ([0; MAX_CHANNELS], session.me.life);
    while !data.0.is_empty() {
        let mut actions = Vec::new();
        match data.byte() % 14 {
            0 => now += Duration::from_micros(data.half().into()),
            1 => now += Duration::from_millis(u64::from(data.byte()) << (data.byte() / 32)),
            2 => memory.store(data.half().into(), data.word()),
            3 => registers[usize::from(data.byte() % 8)] = data.word() as u32,
            4 | 5 => registers = report(&session, &mut peer, &mut data).encode(),
            6 => {
                let receive = receive(&session);
                let pattern = Pattern::new(receive.id(), data.half().clamp(1, 0xfffe));
                for line in pattern.places(LINES) {
                    memory.store_line(line, &pattern.line(line));
                }
            }
            7..=9 => {
                let (line, kind) = match data.byte() {
                    0..64 => (BEAT_LINE, RecordKind::Beat),
                    n @ 64..128 => (HELLO_LINE + u64::from(n) % 4, RecordKind::Hello),
                    n => (TABLE_LINE + u64::from(n) % 8, RecordKind::Channel),
                };
                let content = sealed(receive(&session), line, kind, &table, &mut data);
                memory.store_line(line, &content);
            }
            10 => match data.byte() % 64 {
                0 => link.losses += u64::from(data.byte()),
                1 => link.state = LinkState::CableDown,
                2 => link.state = LinkState::CableUp,
                _ => link.state = LinkState::WindowsSet,
            },
            11 => {
                let name = ["a", "b", "c", "a much longer name than fits here"][usize::from(data.byte() % 4)];
                let flags = data.byte();
                let spec = ChannelSpec {
                    ring_lines: 1 << (2 + flags % 6),
                    check: flags & 0x40 != 0,
                    smaller_if_different: flags & 0x80 != 0,
                };
                let _ = session.open(name, spec);
            }
            12 => {
                let id = ChannelId(u32::from(data.byte()) % 16);
                match data.byte() % 32 {
                    0 => {
                        session.close(id);
                        up.retain(|other| *other != id);
                    }
                    1 => session.corrupt(id),
                    2 if data.byte() == 0 => session.shutdown(&mut actions),
                    _ => session.reader_drained(id),
                }
            }
            _ => {}
        }
        let inputs = Inputs {
            link,
            registers,
            inbound: &memory,
            outbound_lines: (link.state == LinkState::WindowsSet).then_some(REACH),
        };
        session.step(now, &inputs, &mut actions);
        assert!(session.next_wakeup(now) <= Duration::from_secs(1));
        if session.me.life != life {
            (table, life) = ([0; MAX_CHANNELS], session.me.life);
        }
        for action in &actions {
            if let Action::Put { line, content } = action
                && let Some(slot) = line.checked_sub(TABLE_LINE)
                && let Some(last) = table.get_mut(slot as usize)
            {
                *last = content.0[7];
            }
            verify(action, &mut up);
            ups += usize::from(matches!(action, Action::ChannelUp(..)));
        }
    }
    ups
}

fn receive(session: &Session) -> Direction {
    let nobody = Identity {
        incarnation: 0,
        life: 0,
    };
    Direction {
        writer: session.life.as_ref().map_or(nobody, |life| life.peer()),
        reader: session.me,
    }
}

fn report(session: &Session, peer: &mut Identity, data: &mut Data<'_>) -> Report {
    match data.byte() {
        0..3 => *peer = peer.next(),
        3..5 => peer.incarnation = data.byte().into(),
        _ => {}
    }
    Report {
        versions: (1 + u8::from(data.byte() < 2), 3),
        who: *peer,
        phase: match data.byte() {
            0..2 => Phase::Waiting,
            2..4 => Phase::Closed,
            _ => Phase::Ready,
        },
        ended: Ended::None,
        echo: session.me.echo(),
        pages: match data.byte() {
            n @ 0..8 => u32::from(n) * 0x2222_2222,
            n => (REACH / PAGE_LINES) as u32 - u32::from(n % 4 == 0),
        },
        pattern: data.byte().into(),
        found: u16::from(data.byte() % 4),
    }
}

/// A record that opens, with a payload that is partly right.
fn sealed(
    direction: Direction,
    line: u64,
    kind: RecordKind,
    table: &[u64],
    data: &mut Data<'_>,
) -> ntb_mem::line::Line {
    let mut payload = [0; record::PAYLOAD];
    let Direction { writer, reader } = direction;
    match kind {
        RecordKind::Beat => {
            payload[0] = writer.incarnation;
            payload[1] = reader.incarnation;
            payload[2] = u64::from(writer.life) | u64::from(reader.life) << 32;
            // Rising, but for some that come late.
            payload[3] = (1 << 32) - data.0.len() as u64 - u64::from(data.byte() / 250);
            let flags = match data.byte() {
                0..245 => 3,
                n => n,
            };
            let taken = match data.byte() {
                0..240 => digest(table).into(),
                _ => data.word(),
            };
            payload[4] = u64::from(flags) | u64::from(data.byte() % 4) << 16 | taken << 32;
        }
        RecordKind::Hello if line == HELLO_LINE + 1 && data.byte() < 250 => {
            let items = crate::wire::layout::ITEM_VALUES;
            for (word, pair) in payload.iter_mut().zip(items.chunks(2)) {
                *word = u64::from(pair[0]) | u64::from(pair[1]) << 32;
            }
        }
        RecordKind::Hello if line == HELLO_LINE && data.byte() < 250 => {
            let items = crate::wire::layout::ITEM_VALUES;
            payload[0] = 0x0001_0101;
            payload[3] = crate::wire::layout::fingerprint(&items).into();
        }
        RecordKind::Channel => {
            payload[0] = u64::from(b"abc"[usize::from(data.byte() % 3)]);
            payload[4] = u64::from(data.byte() % 32) | data.word() << 32;
            payload[5] = u64::from(data.byte() % 4) << 32 | u64::from(data.byte() % 6) << 48;
            payload[6] = u64::from(data.half())
                | u64::from(2 + data.byte() % 9) << 16
                | u64::from(data.byte() % 4) << 24
                | u64::from(data.byte() % 20) << 32
                | u64::from(data.byte() % 4) << 40;
        }
        RecordKind::Hello => {
            for word in &mut payload {
                *word = data.word();
            }
        }
    }
    record::seal(direction.id(), line, kind, &payload)
}

fn verify(action: &Action, up: &mut Vec<ChannelId>) {
    match action {
        Action::Put { line, .. } => assert!(*line < REACH, "a store at line {line}"),
        Action::ChannelUp(id, lanes) => {
            assert!(!up.contains(id), "up twice");
            up.push(*id);
            verify_lanes(lanes);
        }
        Action::ChannelDown(id, _) => {
            assert!(up.contains(id), "down but not up");
            up.retain(|other| other != id);
        }
        _ => {}
    }
}

fn verify_lanes(lanes: &Lanes) {
    for (lane, consumer, producer) in [(lanes.transmit, REACH, LINES), (lanes.receive, LINES, REACH)] {
        assert!(lane.ring_lines.is_power_of_two());
        let inside = |base: u64, lines: u64, end| base >= CHANNELS_FIRST_LINE && base + lines <= end;
        assert!(inside(lane.consumer_base, PAGE_LINES + lane.ring_lines, consumer));
        assert!(inside(lane.producer_base, PAGE_LINES + lane.ring_lines, producer));
    }
    assert!(lanes.peer_doorbell < crate::link::DOORBELLS);
}
