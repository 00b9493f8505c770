//! A producer whose credits may be anything: it never panics, never stores outside the peer's ring and never has more lines
//! out than the ring holds beyond the credits it has accepted.
#![no_main]

#[path = "support.rs"]
mod support;

use libfuzzer_sys::fuzz_target;
use ntb_ring::{
    link::engine::Order,
    queue::{Alarm, Producer, SendError},
    wire::{
        mark::LaneKey,
        page::{ARM, CREDIT, PAGE_LINES},
    },
};
use support::{Data, Engine, Memory, lane};

fuzz_target!(|data: &[u8]| {
    let mut data = Data(data);
    let options = data.byte();
    let order = if options & 1 == 0 {
        Order::Ordered
    } else {
        Order::Relaxed
    };
    let lane = lane(4 << (options >> 1) % 5, LaneKey::new(1, 0, 2));
    let key = lane.to_producer;
    let control = Memory::new(PAGE_LINES);
    let mut producer = Producer::new(
        Engine::new(PAGE_LINES + lane.ring_lines),
        control.clone(),
        lane,
        order,
    );
    let mut alarm = Alarm::new(
        Engine::new(PAGE_LINES),
        control.clone(),
        lane,
        producer.sent_counter(),
    );
    let bytes = vec![0x5a; lane.max_message() as usize + 64];
    let mut accepted = 0;
    while !data.0.is_empty() {
        let before = producer.stats();
        match data.byte() % 8 {
            0 => control.store((CREDIT * 8) as usize + usize::from(data.byte() % 2), data.word()),
            1 | 2 => {
                // A credit of this life: what was sent, or near it.
                let value = before
                    .lines
                    .wrapping_add(u64::from(data.byte()))
                    .wrapping_sub(128);
                let value = if data.byte() % 4 == 0 { value } else { before.lines };
                control.store(
                    (CREDIT * 8) as usize,
                    u64::from(key.tag()) << 48 | value & 0xffff_ffff_ffff,
                );
            }
            3 => control.store(
                (ARM * 8) as usize + usize::from(data.byte() % 2),
                u64::from(key.tag()) << 48 | u64::from(data.half()),
            ),
            4 => {
                alarm.poll();
            }
            5 => {
                let len = usize::from(data.half()) % bytes.len();
                let sent = producer.try_send(data.byte().into(), &bytes[..len]);
                if let Err(SendError::TooLong { max, .. }) = sent {
                    assert!(len as u64 > max);
                }
            }
            6 => {
                let size = 1 + usize::from(data.byte());
                let n = usize::from(data.half()) % (bytes.len() / size) + 1;
                let _ = producer.try_send_packed(0, size, &bytes[..n.min(bytes.len() / size) * size]);
            }
            _ => {
                let len = usize::from(data.half()) % bytes.len();
                if let Ok(mut claim) = producer.claim(len) {
                    claim.bytes().fill(1);
                    if data.byte() % 2 == 0 {
                        claim.commit(3);
                    }
                }
            }
        }
        let _ = producer.take_credit();
        let seq = producer.consumed_seq();
        assert!(seq <= producer.next_seq());
        let after = producer.stats();
        assert!(after.messages >= before.messages);
        if after.credits > before.credits {
            accepted = after.lines;
        }
        // What is out beyond the last accepted credit (at most all that had been sent by then) fits the ring.
        assert!(after.lines - accepted <= lane.ring_lines);
    }
});
