//! The process at the other end.

use std::{
    process::{Child, Command, ExitCode, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use ntb_mem::region::{Pages, Region};
use ntb_ring::{
    channel::{Connection, Options, Receiver, Sender, Wait},
    link::select::{self, LinkOptions},
    session::ChannelSpec,
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::floor::{Floor, SHARED_BYTES};

pub(crate) const FLAG: &str = "--other-end";
/// Processors of the two ends.
pub(crate) const CPUS: [usize; 2] = [0, 1];
/// Longest wait for anything: a watchdog, not a measure.
pub(crate) const LONG: Duration = Duration::from_secs(60);
/// Lines of the rings that round trips are measured on: few enough that the lines of both directions stay in the
/// first-level caches. The second ring is for messages that the first does not take.
pub(crate) const PING_LINES: [u64; 2] = [64, 128];

/// Which of the two rings a message of `size` bytes goes by.
pub(crate) fn ping(size: usize) -> usize {
    usize::from(size > 63 * 64)
}

/// Messages of a batch.
pub(crate) const BATCH: usize = 64;

/// What the far side is to do.
#[derive(Clone, Copy, Debug, IntoBytes, FromBytes, Immutable)]
#[repr(C)]
pub(crate) struct Job {
    pub(crate) what: u64,
    pub(crate) size: u64,
    pub(crate) count: u64,
}

pub(crate) const FLOOR: u64 = 1;
pub(crate) const ECHO: u64 = 2;
pub(crate) const ECHO_CHECKED: u64 = 3;
pub(crate) const DRAIN: u64 = 4;
pub(crate) const DRAIN_BATCHES: u64 = 5;
pub(crate) const DRAIN_BULK: u64 = 6;
pub(crate) const COPY: u64 = 7;
pub(crate) const TURNS: u64 = 8;
pub(crate) const END: u64 = 9;

/// The channels between the two ends.
pub(crate) struct Ends {
    pub(crate) control: (Sender, Receiver),
    /// Round trips, by length of ring.
    pub(crate) ping: [(Sender, Receiver); 2],
    pub(crate) checked: [(Sender, Receiver); 2],
    pub(crate) plain: (Sender, Receiver),
    pub(crate) bulk: (Sender, Receiver),
    pub(crate) page_bytes: u64,
    _connection: Connection,
}

impl Ends {
    pub(crate) fn open(name: &str) -> Result<Self, Box<dyn std::error::Error>> {
        let opened = select::open(&name.parse()?, &LinkOptions::default())?;
        let connection = Connection::open(opened.link, &Options::default())?;
        let spec = ChannelSpec {
            ring_lines: 1024,
            ..ChannelSpec::default()
        };
        let short = |i: usize, check| ChannelSpec {
            ring_lines: PING_LINES[i],
            check,
            ..spec
        };
        let bulk = ChannelSpec {
            ring_lines: 1 << 16,
            ..spec
        };
        let mut ends = Self {
            control: connection.channel("control", spec)?,
            ping: [
                connection.channel("ping", short(0, false))?,
                connection.channel("long", short(1, false))?,
            ],
            checked: [
                connection.channel("checked", short(0, true))?,
                connection.channel("checked-long", short(1, true))?,
            ],
            plain: connection.channel("plain", spec)?,
            bulk: connection.channel("bulk", bulk)?,
            page_bytes: connection.facts().page_bytes,
            _connection: connection,
        };
        let single = [&mut ends.control, &mut ends.plain, &mut ends.bulk];
        for (tx, rx) in single.into_iter().chain(&mut ends.ping).chain(&mut ends.checked) {
            tx.wait_connected(LONG)?;
            rx.wait_connected(LONG)?;
        }
        ends.control.1.set_wait(Wait::SpinSleep { spins: 1000 });
        Ok(ends)
    }
}

/// Starts the far side.
pub(crate) fn start(name: &str, region: &Region) -> std::io::Result<Child> {
    let fd = rustix::io::dup(region.descriptor())?;
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::empty())?;
    let number = std::os::fd::AsRawFd::as_raw_fd(&fd);
    Command::new(std::env::current_exe()?)
        .args([FLAG, name, &number.to_string()])
        .stdin(Stdio::null())
        .spawn()
}

pub(crate) fn run(args: &[String]) -> ExitCode {
    match serve(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("other end: {e}");
            ExitCode::from(1)
        }
    }
}

fn serve(args: &[String]) -> Result<(), Box<dyn std::error::Error>> {
    let [name, fd] = args else {
        return Err("a name and a descriptor are needed".into());
    };
    pin(CPUS[1]);
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/self/fd/{fd}"))?;
    let region = Arc::new(Region::from_peer(file.into(), SHARED_BYTES)?);
    let floor = Floor::new(&region).ok_or("the shared memory is too small")?;
    let turns = Floor::turns(&region).ok_or("the shared memory is too small")?;
    let mut ends = Ends::open(name)?;
    let mut buf = vec![0; 1 << 20];
    loop {
        let got = ends.control.1.recv(&mut buf[..size_of::<Job>()], LONG)?;
        let Ok(job) = Job::read_from_bytes(&buf[..got.len]) else {
            return Err("a job of the wrong size".into());
        };
        ends.control.0.send(b"ready", LONG)?;
        let size = job.size as usize;
        match job.what {
            FLOOR => floor.answer(job.count),
            TURNS => turns.answer(job.count),
            ECHO => echo(&mut ends.ping[ping(size)], &mut buf, job.count)?,
            ECHO_CHECKED => echo(&mut ends.checked[ping(size)], &mut buf, job.count)?,
            DRAIN => drain(&mut ends.plain.1, &mut buf[..size], job.count)?,
            DRAIN_BULK => drain(&mut ends.bulk.1, &mut buf[..size], job.count)?,
            DRAIN_BATCHES => drain_batches(&mut ends.plain.1, size, &mut buf, job.count)?,
            COPY => crate::peers::copy_out(&region, &mut buf[..size], job.count),
            _ => return Ok(()),
        }
        ends.control.0.send(b"done", LONG)?;
    }
}

fn echo(
    (tx, rx): &mut (Sender, Receiver),
    buf: &mut [u8],
    count: u64,
) -> Result<(), Box<dyn std::error::Error>> {
    for _ in 0..count {
        let got = spin(|| rx.try_recv(buf).ok());
        tx.try_send(&buf[..got.len])?;
    }
    Ok(())
}

fn drain(rx: &mut Receiver, buf: &mut [u8], count: u64) -> Result<(), Box<dyn std::error::Error>> {
    for _ in 0..count {
        spin(|| rx.try_recv(buf).ok());
        std::hint::black_box(&buf);
    }
    Ok(())
}

fn drain_batches(
    rx: &mut Receiver,
    size: usize,
    buf: &mut [u8],
    count: u64,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut got = 0;
    while got < count {
        got += spin(|| rx.try_recv_packed(size, &mut buf[..size * BATCH]).ok()) as u64;
        std::hint::black_box(&buf);
    }
    Ok(())
}

/// Polls until there is something; gives up after the watchdog's time by ending the process.
#[inline(always)]
pub(crate) fn spin<T>(mut poll: impl FnMut() -> Option<T>) -> T {
    let mut n = 0u64;
    loop {
        if let Some(found) = poll() {
            return found;
        }
        n += 1;
        std::hint::spin_loop();
        if n.is_multiple_of(1 << 28) {
            watchdog(n);
        }
    }
}

#[cold]
fn watchdog(n: u64) {
    thread_local!(static SINCE: Instant = Instant::now());
    if n > 1 << 28 && SINCE.with(Instant::elapsed) > LONG {
        eprintln!("benchmark: nothing has arrived for a minute");
        std::process::exit(1);
    }
}

pub(crate) fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    let _ = rustix::thread::sched_setaffinity(None, &set); // fewer cores: measured all the same, and printed
}

pub(crate) fn shared() -> Result<Arc<Region>, ntb_mem::region::RegionError> {
    Region::allocate(SHARED_BYTES, Pages::Normal).map(Arc::new)
}
