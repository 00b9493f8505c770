//! A stretch of TCP that can be cut: takes connections at one port and hands their bytes on to another.

use std::{
    io::{ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, Timespec};

/// Bytes under way in each direction.
const BUFFER: usize = 1 << 16;
/// How soon a cut is noticed at the latest.
const LOOK: Duration = Duration::from_millis(1);

/// A relay that runs until it is dropped.
#[derive(Debug)]
pub(crate) struct Relay {
    port: u16,
    cuts: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// One connection, from both sides, and what of it is under way.
struct Pair {
    ends: [TcpStream; 2],
    under_way: [Vec<u8>; 2],
}

impl Relay {
    /// Listens at a port of its own, which leads to `target` of this machine.
    pub(crate) fn start(target: u16) -> Result<Self, String> {
        let listener = TcpListener::bind("127.0.0.1:0").map_err(|e| e.to_string())?;
        listener.set_nonblocking(true).map_err(|e| e.to_string())?;
        let port = listener.local_addr().map_err(|e| e.to_string())?.port();
        let (cuts, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let shared = (Arc::clone(&cuts), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name("relay".to_owned())
            .spawn(move || carry(&listener, target, &shared.0, &shared.1))
            .map_err(|e| e.to_string())?;
        Ok(Self {
            port,
            cuts,
            stop,
            thread: Some(thread),
        })
    }

    /// Where it listens.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Ends every connection; new ones are taken.
    pub(crate) fn cut(&self) {
        self.cuts.fetch_add(1, Ordering::AcqRel);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn carry(listener: &TcpListener, target: u16, cuts: &AtomicU64, stop: &AtomicBool) {
    let mut pairs: Vec<Pair> = Vec::new();
    let mut seen = 0;
    let mut buffer = vec![0; BUFFER];
    while !stop.load(Ordering::Acquire) {
        sleep(listener, &pairs);
        let now = cuts.load(Ordering::Acquire);
        if now != seen {
            seen = now;
            pairs.clear();
        }
        while let Ok((near, _)) = listener.accept() {
            if let Ok(far) = TcpStream::connect(("127.0.0.1", target)) {
                for end in [&near, &far] {
                    let _ = end.set_nonblocking(true);
                    let _ = end.set_nodelay(true);
                }
                pairs.push(Pair {
                    ends: [near, far],
                    under_way: [Vec::new(), Vec::new()],
                });
            }
        }
        pairs.retain_mut(|pair| pair.carry(&mut buffer));
    }
}

fn sleep(listener: &TcpListener, pairs: &[Pair]) {
    let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
    for pair in pairs {
        for (end, waiting) in pair.ends.iter().zip(&pair.under_way) {
            let flags = if waiting.is_empty() {
                PollFlags::IN
            } else {
                PollFlags::IN | PollFlags::OUT
            };
            fds.push(PollFd::new(end, flags));
        }
    }
    let time = Timespec {
        tv_sec: 0,
        tv_nsec: i64::from(LOOK.subsec_nanos()),
    };
    let _ = rustix::event::poll(&mut fds, Some(&time));
}

impl Pair {
    /// Moves what can be moved; false when either end has gone.
    fn carry(&mut self, buffer: &mut [u8]) -> bool {
        for from in 0..2 {
            let to = 1 - from;
            if self.under_way[to].is_empty() {
                match self.ends[from].read(buffer) {
                    Ok(0) => return false,
                    Ok(n) => self.under_way[to].extend_from_slice(&buffer[..n]),
                    Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                    Err(_) => return false,
                }
            }
            while !self.under_way[to].is_empty() {
                match self.ends[to].write(&self.under_way[to]) {
                    Ok(n) => drop(self.under_way[to].drain(..n)),
                    Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => break,
                    Err(_) => return false,
                }
            }
        }
        true
    }
}
