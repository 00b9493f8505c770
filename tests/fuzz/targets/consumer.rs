//! A consumer whose ring and control page may hold anything at any time, called in any order.
//!
//! It never panics, never reads or stores outside its memories, never delivers more than a message can hold, never gives
//! back more than it has consumed, and counts what it delivers.
#![no_main]

#[path = "support.rs"]
mod support;

use libfuzzer_sys::fuzz_target;
use ntb_ring::{
    link::engine::Order,
    queue::{Consumer, RecvError},
    wire::{mark::LaneKey, page::PAGE_LINES},
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
    let key = LaneKey::new(0x4711, 0, 0x600d_600d);
    let lane = lane(4 << (options >> 1) % 5, key);
    let (control, ring) = (Memory::new(PAGE_LINES), Memory::new(lane.ring_lines));
    let engine = Engine::new(PAGE_LINES);
    let credits = engine.credits();
    let mut credited = 0;
    let mut consumer = Consumer::new(engine, control.clone(), ring.clone(), lane, order);
    consumer.set_incomplete_deadline(std::time::Duration::ZERO);
    let max = lane.max_message() as usize;
    let mut buf = vec![0; max];
    let mut received = 0;
    while !data.0.is_empty() {
        match data.byte() % 10 {
            0 => ring.store(data.half().into(), data.word()),
            1 => control.store(usize::from(data.byte() % 64), data.word()),
            2 => control.store(
                usize::from(data.byte() % 64),
                u64::from(key.tag()) << 48 | data.word() >> 16,
            ),
            // A line that is due, of any kind, with any content.
            3..=5 => {
                let line = usize::from(data.byte()) % lane.ring_lines as usize;
                let mark = u64::from(key.tag()) << 32 | consumer.next_seq() & 0xffff_ffff;
                ring.store(line * 8, data.half().into());
                if data.byte() % 2 == 0 {
                    ring.store(line * 8, u64::from(data.half()) | u64::from(data.half()) << 32);
                }
                ring.store(line * 8 + 6, u64::from(key.guard) << 32 | u64::from(data.byte()));
                ring.store(
                    line * 8 + 7,
                    mark | u64::from(data.byte() % 8) << 48 | u64::from(data.byte()) << 56,
                );
            }
            6 => {
                let len = usize::from(data.half()) % (max + 1);
                match consumer.try_recv(&mut buf[..len]) {
                    Ok(r) => {
                        assert!(r.len <= len);
                        received += 1;
                    }
                    Err(RecvError::TooSmall { needed, .. }) => assert!(needed <= max),
                    Err(_) => {}
                }
            }
            7 => {
                let from = usize::from(data.half());
                if let Ok(n) = consumer.try_recv_with(|m| {
                    assert!(m.len() <= max);
                    assert_eq!(m.copy_to(from, &mut buf), m.len().saturating_sub(from));
                    assert_eq!(m.word(from).is_some(), from * 8 < m.len());
                    m.to_vec().len()
                }) {
                    assert!(n <= max);
                    received += 1;
                }
            }
            8 => {
                let size = 1 + usize::from(data.byte());
                if let Ok(n) = consumer.try_recv_packed(size, &mut buf) {
                    assert!(n * size <= buf.len());
                    received += n as u64;
                }
            }
            _ => {
                consumer.arm();
                let _ = consumer.answer();
                consumer.has_arrived();
            }
        }
        assert_eq!(consumer.stats().messages, received);
        // Credits rise, and never above what was consumed. By how much at a time is the producer's doing: one that
        // overruns its credit can have several rings consumed before the next.
        let consumed = consumer.stats().lines;
        for credit in credits.lock().unwrap().drain(..) {
            assert!(
                credited <= credit && credit <= consumed,
                "{credited} lines were credited, then {credit} of {consumed}"
            );
            credited = credit;
        }
    }
});
