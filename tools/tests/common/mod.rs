//! Running the program, and ending what was started whatever happens.

#![allow(dead_code, unreachable_pub, reason = "each test program uses its part")]

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// The program.
pub fn ntb_ping() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ntb-ping"));
    command.stdin(Stdio::null());
    command
}

/// Runs to the end.
pub fn run(args: &[&str]) -> Output {
    let child = Running::start(args);
    child.finish()
}

/// A link address that no other test uses.
pub fn address() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    format!(
        "soft:ping-test-{}-{}",
        std::process::id(),
        NUMBER.fetch_add(1, Ordering::Relaxed)
    )
}

/// Waits far longer than anything takes on a busy machine.
pub const WATCHDOG: Duration = Duration::from_secs(120);

/// Waits until `what` gives something.
pub fn until<T>(name: &str, mut what: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = what() {
            return found;
        }
        assert!(begun.elapsed() < WATCHDOG, "waited too long for {name}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A process under way, whose output is collected as it comes.
pub struct Running {
    child: Child,
    out: Arc<Mutex<String>>,
    err: Arc<Mutex<String>>,
    readers: Vec<JoinHandle<()>>,
}

impl Running {
    pub fn start(args: &[&str]) -> Self {
        let mut child = ntb_ping()
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (out, first) = collect(child.stdout.take().unwrap());
        let (err, second) = collect(child.stderr.take().unwrap());
        Self {
            child,
            out,
            err,
            readers: vec![first, second],
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn out(&self) -> String {
        self.out.lock().unwrap().clone()
    }

    pub fn err(&self) -> String {
        self.err.lock().unwrap().clone()
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.id().cast_signed()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Waits until a line of standard output or error contains `part`, `count` times.
    pub fn expect(&self, part: &str, count: usize) {
        until(part, || {
            let all = self.out() + &self.err();
            (all.matches(part).count() >= count).then_some(())
        });
    }

    pub fn status(&mut self) -> ExitStatus {
        until("the end of the process", || self.child.try_wait().unwrap())
    }

    pub fn finish(mut self) -> Output {
        let status = self.status();
        for reader in self.readers.drain(..) {
            reader.join().unwrap();
        }
        Output {
            status,
            stdout: self.out().into_bytes(),
            stderr: self.err().into_bytes(),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn collect(pipe: impl Read + Send + 'static) -> (Arc<Mutex<String>>, JoinHandle<()>) {
    let text = Arc::new(Mutex::new(String::new()));
    let to = Arc::clone(&text);
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            let mut to = to.lock().unwrap();
            to.push_str(&line);
            to.push('\n');
        }
    });
    (text, reader)
}

/// The JSON object of a run, which is all of its standard output.
pub fn object(output: &Output) -> serde_json::Value {
    let text = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(&text).unwrap_or_else(|e| {
        panic!(
            "{e}: {text}{} {:?}",
            String::from_utf8_lossy(&output.stderr),
            output.status
        )
    })
}
