//! `ntb_perf`: each side exposes as much memory as the other's window is large, and the other writes into it.
//!
//! Commands go through three scratchpads at the receiver, numbered by the sender's port: command, low and high half of
//! its datum; all ones in the first is "empty", and the receiver puts it back when it has taken a command. The doorbell
//! is the bit of the receiver's port.
//!
//! | command | datum | the receiver |
//! | --- | --- | --- |
//! | 0, size | bytes of the sender's window | exposes that much memory and answers with the next |
//! | 2, translation | address at which the memory lies | may write from now on |
//!
//! The window that a side writes through is the one of its own port number; the one it exposes memory in, that of the
//! peer's. So two ports with different numbers need two windows of equal size.

use std::{
    collections::VecDeque,
    fmt,
    os::fd::BorrowedFd,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use ntb::{
    hw::{NtbError, NtbPort},
    pci::DmaSpace,
    window::InboundWindow,
};
use ntb_mem::region::Pages;

use crate::{
    LinuxError,
    link::{Change, Watch},
    outbound::Outbound,
};

/// Name of the kernel's client, for messages.
const CLIENT: &str = "ntb_perf";
/// Value of a command scratchpad without a command.
const EMPTY: u32 = u32::MAX;
const SIZE: u32 = 0;
const TRANSLATION: u32 = 2;
/// Time between two attempts to send a command.
const RETRY: Duration = Duration::from_millis(10);

/// Scratchpads of commands from the port with this number.
fn mailbox(port: u32) -> [usize; 3] {
    let first = 3 * port as usize;
    [first, first + 1, first + 2]
}

/// A command as it lies in the scratchpads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Bytes of the sender's window.
    Size(u64),
    /// Address, in the sender's I/O space, of the memory that it exposes.
    Translation(u64),
}

impl Command {
    /// What the scratchpads say: `None` for nothing, an error with the word for what no command is.
    pub fn decode(words: [u32; 3]) -> Option<Result<Self, u32>> {
        let [command, low, high] = words;
        let datum = u64::from(high) << 32 | u64::from(low);
        match command {
            EMPTY => None,
            SIZE => Some(Ok(Self::Size(datum))),
            TRANSLATION => Some(Ok(Self::Translation(datum))),
            other => Some(Err(other)),
        }
    }

    /// As the scratchpads are to say it.
    pub fn encode(self) -> [u32; 3] {
        let (command, datum) = match self {
            Self::Size(bytes) => (SIZE, bytes),
            Self::Translation(address) => (TRANSLATION, address),
        };
        [command, datum as u32, (datum >> 32) as u32]
    }
}

/// How far the greeting has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The link is down.
    Link,
    /// The peer has not said how large its window is.
    Size,
    /// It has not said that it exposes memory.
    Translation,
    /// Both sides may write.
    Ready,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Link => "the link is down. Check the cable, and that a driver of the peer has its port",
            Self::Size => "the link is up and the peer says nothing. Load ntb_perf there",
            Self::Translation => {
                "the peer has not exposed memory. See its kernel's log: a window above 4 MiB takes max_mw_size"
            }
            Self::Ready => "ready",
        })
    }
}

/// What a transfer took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Bytes written to the peer.
    pub bytes: u64,
    /// Until they had arrived: a read through the bridge behind them was answered.
    pub elapsed: Duration,
}

/// One side of `ntb_perf`.
#[derive(Debug)]
pub struct Perf {
    // Fields drop in order: the aperture, the window with its mapping, then the port.
    outbound: Outbound,
    inbound: Option<InboundWindow>,
    space: Arc<DmaSpace>,
    watch: Watch,
    port: Arc<dyn NtbPort>,
    limit: u64,
    queue: VecDeque<Command>,
    retry: Instant,
    peer_size: Option<u64>,
    ready: bool,
    last_received: (u64, u64),
    unknown: u64,
}

impl Perf {
    /// Takes a quiet port and asks for the link. At most `limit` bytes of memory are exposed, and that much of the window
    /// is used: `max_mw_size` of the kernel's module.
    pub fn open(port: &Arc<dyn NtbPort>, limit: u64) -> Result<Self, LinuxError> {
        let role = port.role();
        let few = |what, needed: u64, found: u64| LinuxError::TooFew {
            device: port.function().name().to_owned(),
            client: CLIENT,
            what,
            needed,
            found,
        };
        let windows = role.port().max(role.peer_port()) as usize + 1;
        if port.windows().len() < windows {
            return Err(few("memory windows", windows as u64, port.windows().len() as u64));
        }
        if port.scratchpads() < 6 {
            return Err(few("scratchpads", 6, port.scratchpads() as u64));
        }
        if port.doorbell_bits() & 3 != 3 {
            return Err(few("doorbells", 2, port.doorbell_bits().count_ones().into()));
        }
        for index in 0..port.scratchpads() {
            port.set_scratchpad(index, EMPTY)?;
        }
        port.unmask_doorbells(1 << role.port())?;
        Ok(Self {
            outbound: Outbound::open(&**port, role.port() as usize)?,
            inbound: None,
            space: DmaSpace::new(Arc::clone(port.function())).map_err(NtbError::from)?,
            watch: Watch::start(port)?,
            port: Arc::clone(port),
            limit,
            queue: VecDeque::new(),
            retry: Instant::now(),
            peer_size: None,
            ready: false,
            last_received: (0, 0),
            unknown: 0,
        })
    }

    /// How far the greeting has come.
    pub fn step(&self) -> Step {
        match (self.watch.is_up(), self.peer_size, self.ready) {
            (false, ..) => Step::Link,
            (true, None, _) => Step::Size,
            (true, Some(_), false) => Step::Translation,
            // What this side exposes is told as well before either measures.
            (true, Some(_), true) if !self.queue.is_empty() => Step::Translation,
            (true, Some(_), true) => Step::Ready,
        }
    }

    /// Bytes that one lap of the window writes.
    pub fn window_bytes(&self) -> u64 {
        self.outbound.bytes().min(self.limit)
    }

    /// Commands that are none.
    pub fn unknown_commands(&self) -> u64 {
        self.unknown
    }

    /// Does what is due. Call it every few milliseconds, and after [`Perf::wait`].
    pub fn poll(&mut self) -> Result<Step, LinuxError> {
        let now = Instant::now();
        match self.watch.look(now)? {
            Change::Nothing => {}
            Change::Up => self.queue = VecDeque::from([Command::Size(self.window_bytes())]),
            Change::Flap => self.greet_again()?,
            Change::Lost => self.lose()?,
        }
        if self.watch.is_up() {
            self.take_command()?;
            if now >= self.retry && !self.queue.is_empty() {
                self.retry = now + RETRY;
                self.send_command()?;
            }
        }
        Ok(self.step())
    }

    /// Polls until both sides may write.
    pub fn connect(&mut self, timeout: Duration) -> Result<(), LinuxError> {
        let start = Instant::now();
        while self.poll()? != Step::Ready {
            if start.elapsed() >= timeout {
                return Err(LinuxError::NoPeer {
                    client: CLIENT,
                    step: self.step().to_string(),
                    waited: timeout,
                });
            }
            self.wait(None, RETRY)?;
        }
        Ok(())
    }

    /// Writes `total` bytes to the peer, `chunk` at a time, lap after lap of its memory. `make` fills each chunk, given the
    /// number of bytes before it. Polls between chunks.
    pub fn transfer(
        &mut self,
        total: u64,
        chunk: usize,
        mut make: impl FnMut(u64, &mut [u8]),
    ) -> Result<Transfer, LinuxError> {
        let start = Instant::now();
        let window = self.window_bytes();
        let mut buffer = vec![0; chunk.max(1)];
        let (mut done, mut at) = (0, 0);
        while done < total {
            if self.poll()? != Step::Ready {
                return Err(LinuxError::Down {
                    client: CLIENT,
                    step: self.step().to_string(),
                });
            }
            let bytes = (buffer.len() as u64).min(total - done).min(window - at);
            let Some(part) = buffer.get_mut(..bytes as usize) else {
                break;
            };
            make(done, part);
            self.outbound.store(at, part)?;
            done += bytes;
            at = if at + bytes == window { 0 } else { at + bytes };
        }
        // A read behind posted writes pushes them ahead of it.
        let [command, ..] = mailbox(self.port.role().port());
        self.port.peer_scratchpad(command)?;
        Ok(Transfer {
            bytes: done,
            elapsed: start.elapsed(),
        })
    }

    /// Bytes that this side exposes, and how many of its 64-byte lines have something other than zero in them: what the
    /// peer has written. Without a link, what it was when the link was lost.
    pub fn received(&self) -> (u64, u64) {
        let Some(inbound) = &self.inbound else {
            return self.last_received;
        };
        let view = inbound.view();
        let lines = (0..view.lines() as usize)
            .filter(|line| (0..8).any(|word| view.load(8 * line + word, Ordering::Acquire) != 0));
        (inbound.bytes(), lines.count() as u64)
    }

    /// Bytes out of the memory that this side exposes, from `offset` on; `None` when they do not lie in it.
    pub fn exposed(&self, offset: usize, into: &mut [u8]) -> Option<()> {
        let inbound = self.inbound.as_ref()?;
        let end = offset.checked_add(into.len())? as u64;
        (end <= inbound.bytes()).then(|| inbound.view().copy_out(offset, into))
    }

    /// Sleeps until the peer rings, the link changes, `other` can be read, or `timeout` has passed.
    pub fn wait(&mut self, other: Option<BorrowedFd<'_>>, timeout: Duration) -> Result<(), LinuxError> {
        self.watch.sleep(1 << self.port.role().port(), other, timeout)?;
        Ok(())
    }

    fn take_command(&mut self) -> Result<(), LinuxError> {
        let [command, low, high] = mailbox(self.port.role().peer_port());
        let word = |index| self.port.scratchpad(index);
        if word(command)? == EMPTY {
            return Ok(());
        }
        let words = [word(command)?, word(low)?, word(high)?];
        self.port.set_scratchpad(command, EMPTY)?;
        match Command::decode(words) {
            None => {}
            Some(Ok(Command::Size(bytes))) => self.expose(bytes)?,
            Some(Ok(Command::Translation(_))) => self.ready = true,
            Some(Err(_)) => self.unknown += 1,
        }
        Ok(())
    }

    fn expose(&mut self, asked: u64) -> Result<(), LinuxError> {
        let window = self.port.role().peer_port() as usize;
        let most = self.port.windows().get(window).map_or(0, |info| info.bytes);
        let limit = self.limit.min(most);
        if asked == 0 || asked > limit {
            return Err(LinuxError::TooMuchMemory { window, asked, limit });
        }
        self.inbound = None;
        let inbound = InboundWindow::allocate(&self.port, &self.space, window, asked, Pages::default())?;
        self.inbound = Some(inbound);
        self.peer_size = Some(asked);
        // Where the memory lies is of no use to the peer: its hardware translates here. The kernel's clients do not look
        // at it either where windows are set up by the side that exposes.
        self.queue.push_back(Command::Translation(0));
        Ok(())
    }

    /// Sends the next command if the peer has taken the last one.
    fn send_command(&mut self) -> Result<(), LinuxError> {
        let Some(next) = self.queue.front() else {
            return Ok(());
        };
        let [command, low, high] = mailbox(self.port.role().port());
        if self.port.peer_scratchpad(command)? != EMPTY {
            return Ok(());
        }
        let words = next.encode();
        // The command last: with it the others count.
        for (index, word) in [low, high, command]
            .into_iter()
            .zip([words[1], words[2], words[0]])
        {
            self.port.set_peer_scratchpad(index, word)?;
        }
        self.port.ring_peer(1 << self.port.role().peer_port())?;
        self.queue.pop_front();
        Ok(())
    }

    /// After a link that was down for a moment: the window may have been closed, and the peer may not have noticed.
    fn greet_again(&mut self) -> Result<(), LinuxError> {
        self.ready = false;
        self.queue = VecDeque::from([Command::Size(self.window_bytes())]);
        self.peer_size.map_or(Ok(()), |bytes| self.expose(bytes))
    }

    fn lose(&mut self) -> Result<(), LinuxError> {
        self.queue.clear();
        self.peer_size = None;
        self.ready = false;
        self.last_received = self.received();
        self.inbound = None;
        for index in 0..self.port.scratchpads() {
            self.port.set_scratchpad(index, EMPTY)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_read_as_written() {
        for command in [Command::Size(0x1_0000_0002), Command::Translation(u64::MAX)] {
            assert_eq!(Command::decode(command.encode()), Some(Ok(command)));
        }
        assert_eq!(Command::decode([u32::MAX, 1, 1]), None);
        for word in [1, 3, 4, 99] {
            assert_eq!(
                Command::decode([word, 0, 0]),
                Some(Err(word)),
                "the kernel's own work items"
            );
        }
        assert_eq!(mailbox(1), [3, 4, 5]);
    }
}
