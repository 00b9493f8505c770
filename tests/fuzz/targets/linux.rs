//! What a client of the kernel, or whoever says to be one, may write: the memory of a queue pair, the scratchpads of a
//! greeting, commands, and packets in frames.
#![no_main]

use std::net::Ipv4Addr;

use libfuzzer_sys::fuzz_target;
use ntb_linux::{
    netdev::answer::{self, Host},
    perf::Command,
    transport::{check_hostile, layout},
};

fuzz_target!(|data: &[u8]| {
    let Some((choice, rest)) = data.split_first() else {
        return;
    };
    match choice % 4 {
        0 => {
            let Some((size, memory)) = rest.split_first_chunk::<2>() else {
                return;
            };
            check_hostile(u16::from_le_bytes(*size).into(), memory);
        }
        1 => {
            let own = Host::new(Ipv4Addr::new(10, 0, 0, 1));
            let _ = answer::understand(&own, rest);
            // Past the address check too.
            let mut ours = own.mac.to_vec();
            ours.extend(rest);
            let _ = answer::understand(&own, &ours);
        }
        2 => {
            let words: Vec<u32> = rest
                .as_chunks()
                .0
                .iter()
                .map(|b| u32::from_le_bytes(*b))
                .collect();
            let shape = layout::Shape {
                windows: 2,
                queues: 2,
            };
            if let Ok(Some(sizes)) = layout::understand(&shape, &words) {
                for (queue, bytes) in sizes.iter().enumerate() {
                    if let Some(slot) = shape.slot(queue, *bytes, layout::DEFAULT_FRAME) {
                        assert!(slot.trailer + 4 <= *bytes && slot.frames >= 2);
                    }
                }
            }
        }
        _ => {
            let (words, _) = rest.as_chunks::<12>();
            for word in words {
                let [a, b, c, d, e, f, g, h, i, j, k, l] = *word;
                let words = [[a, b, c, d], [e, f, g, h], [i, j, k, l]].map(u32::from_le_bytes);
                if let Some(Ok(command)) = Command::decode(words) {
                    assert_eq!(command.encode(), words);
                }
            }
        }
    }
});
