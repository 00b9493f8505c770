//! Decoding of one line: a head inside the lane's limits, or none.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    ntb_ring::wire::fuzz::line(data);
});
