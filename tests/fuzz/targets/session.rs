//! A session whose peer keeps or breaks every rule: its own assertions are the oracle.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    ntb_ring::session::fuzz(data);
});
