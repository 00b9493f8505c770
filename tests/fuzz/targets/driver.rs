//! A device that answers anything to the driver, every family of bridges.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    ntb::hw::fuzz::fuzz(data);
});
