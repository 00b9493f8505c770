//! Somebody on the network who does not know the secret: random bytes, half a greeting, another secret, a recording of a
//! peer, many connections at once.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use ntb_ring::link::auth::{HELLO_BYTES, Handshake, MAGIC, Purpose, Role, Secret};

use crate::Rng;

/// How long a stranger listens for an answer at most.
const PATIENCE: Duration = Duration::from_secs(5);

/// Calls several times and says something else each time. An error when it was told more than a random number.
pub(crate) fn call((port, purpose): (u16, Purpose), secret: &Secret, rng: &mut Rng) -> Result<u64, String> {
    let mut calls = 0;
    for _ in 0..1 + rng.below(6) {
        let Some(mut stream) = connect(port) else { continue };
        calls += 1;
        let told = match rng.below(6) {
            0 => {
                let bytes: Vec<u8> = (0..rng.below(3000)).map(|_| rng.next() as u8).collect();
                say(&mut stream, &bytes, rng)
            }
            1 => {
                let mut bytes = [&MAGIC[..], &[1, 0, 1, 1, 0, 0, 0, 0]].concat();
                bytes.extend((0..rng.below(200)).map(|_| rng.next() as u8));
                say(&mut stream, &bytes, rng)
            }
            2 => say(&mut stream, &MAGIC[..rng.below(9) as usize], rng),
            3 => {
                drop(stream);
                continue;
            }
            4 => another_secret(purpose, stream, rng),
            _ => recording((port, purpose), stream, secret, rng),
        }?;
        if told > HELLO_BYTES as u64 {
            return Err(format!("a stranger was told {told} bytes"));
        }
    }
    Ok(calls)
}

/// Opens many connections at once, says nothing, and lets them all go a little later.
pub(crate) fn flood(port: u16, rng: &mut Rng) -> u64 {
    let held: Vec<_> = (0..150).filter_map(|_| connect(port)).collect();
    std::thread::sleep(Duration::from_micros(rng.below(20_000)));
    held.len() as u64
}

fn connect(port: u16) -> Option<TcpStream> {
    let stream =
        TcpStream::connect_timeout(&([127, 0, 0, 1], port).into(), Duration::from_millis(20)).ok()?;
    stream.set_read_timeout(Some(Duration::from_millis(20))).ok()?;
    Some(stream)
}

/// Says it, in one piece or two, and counts the bytes of the answer.
fn say(stream: &mut TcpStream, bytes: &[u8], rng: &mut Rng) -> Result<u64, String> {
    let (a, b) = bytes.split_at(rng.below(bytes.len() as u64 + 1) as usize);
    let _ = stream.write_all(a);
    std::thread::sleep(Duration::from_micros(rng.below(500)));
    let _ = stream.write_all(b);
    // Those that only half say something are left to time out; nobody waits for that here.
    let patience = Duration::from_millis(rng.below(50));
    Ok(listen(stream, patience))
}

fn listen(stream: &mut TcpStream, patience: Duration) -> u64 {
    let (mut told, mut buffer) = (0, [0; 4096]);
    let start = Instant::now();
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return told,
            Ok(n) => told += n as u64,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return told,
        }
        if start.elapsed() >= patience {
            return told;
        }
    }
}

fn another_secret(purpose: Purpose, mut stream: TcpStream, rng: &mut Rng) -> Result<u64, String> {
    let wrong = Secret::new(&rng.next().to_le_bytes()).map_err(|e| e.to_string())?;
    let mut handshake = Handshake::new(Role::Initiator, purpose, &wrong).map_err(|e| e.to_string())?;
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        match handshake.drive(&mut stream) {
            Ok(None) => {}
            Ok(Some(_)) => return Err("another secret was let in".to_owned()),
            Err(_) => return Ok(listen(&mut stream, Duration::ZERO)),
        }
    }
    Ok(0) // the victim had no time for it, or it was pushed out
}

/// Keeps what is written to a stream.
struct Recorder<'a>(&'a mut TcpStream, Vec<u8>);

impl Read for Recorder<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(buf)
    }
}

impl Write for Recorder<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let n = self.0.write(buf)?;
        self.1.extend_from_slice(&buf[..n]);
        Ok(n)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// What a peer says while it proves itself, said again to a new connection.
fn recording(
    (port, purpose): (u16, Purpose),
    mut stream: TcpStream,
    secret: &Secret,
    rng: &mut Rng,
) -> Result<u64, String> {
    let mut handshake = Handshake::new(Role::Initiator, purpose, secret).map_err(|e| e.to_string())?;
    let mut recorder = Recorder(&mut stream, Vec::new());
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        match handshake.drive(&mut recorder) {
            Ok(None) => {}
            Ok(Some(_)) | Err(_) => break,
        }
    }
    let recorded = recorder.1;
    let Some(mut again) = connect(port) else {
        return Ok(0);
    };
    let _ = again.write_all(&recorded);
    let _ = again.write_all(&[rng.next() as u8; 64]);
    Ok(listen(&mut again, Duration::from_millis(200)))
}
