//! What a vfio-user client says to the emulator: answers stay in step, and nothing brings it down.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    ntb_emu::server::script::fuzz(data);
});
