//! Test suites that every implementation of a seam must pass, generic over it.
//!
//! A suite is a list of named cases that take a fixture; a case panics when it fails. An implementation runs all of
//! them with a fixture and one loop:
//!
//! ```no_run
//! # use ntb::conformance::{PortFixture, PORT_CASES};
//! # fn fixture() -> Box<dyn PortFixture> { loop {} }
//! for (name, case) in PORT_CASES {
//!     println!("{name}");
//!     case(&*fixture());
//! }
//! ```
//!
//! No case asserts an upper time bound; waits have a watchdog of [`PATIENCE`].

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "tests fail by panicking"
)]

mod function;
mod port;
mod windows;

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

pub use function::{FUNCTION_CASES, FunctionFixture};
pub use port::{PORT_CASES, PortFixture, Ports};

/// How long a case waits for something that must happen before it calls it a failure.
pub const PATIENCE: Duration = Duration::from_secs(30);

thread_local! {
    static WAIT: Cell<Duration> = const { Cell::new(PATIENCE) };
}

/// Runs cases with another patience than [`PATIENCE`]: a short one where they are expected to fail.
pub fn with_patience<R>(patience: Duration, run: impl FnOnce() -> R) -> R {
    struct Restore(Duration);
    impl Drop for Restore {
        fn drop(&mut self) {
            WAIT.set(self.0);
        }
    }
    let _restore = Restore(WAIT.replace(patience));
    run()
}

/// Waits until `done` says so.
fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    let patience = WAIT.get();
    while !done() {
        assert!(start.elapsed() < patience, "{what}: not within {patience:?}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Whether a descriptor is readable now.
fn readable(fd: std::os::fd::BorrowedFd<'_>) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&now)).expect("poll") > 0
}
