//! What a soft peer says on its socket: decoding gives a message or an error, and what decodes encodes to the same meaning.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ntb_ring::link::soft::greeting::Message;

fuzz_target!(|data: &[u8]| {
    let Ok(message) = Message::decode(data) else {
        return;
    };
    assert_eq!(Message::decode(&message.encode()).ok(), Some(message));
});
