//! The peer that `ntb-ping` starts for itself when nobody names one.

use std::{
    io,
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::cli::ping::Waiting;

/// A peer process. Ended when this is dropped, and by the kernel should this process die.
#[derive(Debug)]
pub struct Peer {
    child: Child,
}

/// How long it may take to end in order.
const GRACE: Duration = Duration::from_millis(200);

impl Peer {
    /// Starts this program again as a server on `address`.
    pub fn start(address: &str, cpu: Option<u32>, waiting: Waiting) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0("ntb-ping")
            .args(["serve", address, "--quiet", "--wait", waiting.name()])
            .args(["--parent", &std::process::id().to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            // Signals from the terminal are for the measuring side, which ends this one.
            .process_group(0);
        if let Some(cpu) = cpu {
            command.args(["--cpu", &cpu.to_string()]);
        }
        Ok(Self {
            child: command.spawn()?,
        })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<String> {
        let status = self.child.try_wait().ok().flatten()?;
        Some(match (status.code(), status.signal()) {
            (Some(code), _) => format!("exited with code {code}"),
            (None, Some(signal)) => format!("was ended by signal {signal}"),
            (None, None) => "ended".to_owned(),
        })
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if self.ended().is_some() {
            return;
        }
        if let Some(pid) = Pid::from_raw(self.child.id().cast_signed()) {
            let _ = kill_process(pid, Signal::TERM);
        }
        let deadline = Instant::now() + GRACE;
        while Instant::now() < deadline {
            if self.ended().is_some() {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
