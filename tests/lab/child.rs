//! Child processes that do not outlive the lab.

#![allow(
    unsafe_code,
    reason = "a process attribute has to be set between fork and exec"
)]

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};

use rustix::process::{Signal, set_parent_process_death_signal};

/// A child that is killed when it is dropped, and by the kernel when the lab dies first. Start it from the main
/// thread: the kernel's signal is sent when the starting thread ends.
#[derive(Debug)]
pub(crate) struct Tied(Child);

impl Tied {
    pub(crate) fn spawn(command: &mut Command) -> io::Result<Self> {
        let tie = || set_parent_process_death_signal(Some(Signal::KILL)).map_err(io::Error::from);
        // SAFETY: the closure runs in the forked child and makes one system call; it neither allocates nor
        // takes locks.
        unsafe { command.pre_exec(tie) };
        command.spawn().map(Self)
    }

    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.0
    }

    /// Ends the child by its process id and reaps it. No effect on one that has ended.
    pub(crate) fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Tied {
    fn drop(&mut self) {
        self.kill();
    }
}
