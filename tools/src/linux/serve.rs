//! What goes on until it is interrupted: answering, and a TAP device.

use std::{io::Write, os::fd::AsFd};

use ntb_linux::{
    netdev::{
        answer::{self, Host, Meaning},
        tap::Tap,
    },
    transport::{Event, Sent, Step, Transport},
};

use super::{NAP, failure, transport};
use crate::{
    cli::linux::{EchoArgs, TapArgs},
    exit::{Exit, Failure},
    interrupt::Interrupt,
};

/// Frames of one direction before the other has its turn.
const TURN: usize = 64;
/// Bytes of the largest frame of a TAP device.
const LARGEST: usize = 65_535 + answer::ETHERNET_BYTES;

/// Says what happens, to whoever reads it.
fn tell(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

fn tell_event(event: Option<Event>) {
    match event {
        None => {}
        Some(Event::Up) => tell("connected"),
        Some(Event::Down(why)) => tell(&format!("disconnected: {why}")),
    }
}

/// Answers.
pub(super) fn echo(args: &EchoArgs, interrupt: &Interrupt) -> Result<Exit, Failure> {
    let mut transport = transport(&args.queue)?;
    let own = args.ip.map(Host::new);
    tell(&format!("serving on {}", args.queue.port.address));
    let mut frame = Vec::new();
    while !interrupt.came() {
        tell_event(transport.poll().map_err(|e| failure(&e))?);
        let room = transport.free() > 0;
        if !(room && transport.receive(&mut frame).map_err(|e| failure(&e))?) {
            transport.wait(None, NAP).map_err(|e| failure(&e))?;
            continue;
        }
        let answer = match &own {
            None => frame.clone(),
            Some(own) => match answer::understand(own, &frame) {
                Meaning::Answer(answer) => answer,
                _ => continue,
            },
        };
        send(&mut transport, &answer)?;
    }
    end(transport)
}

/// A frame that cannot go is lost, as on a wire.
fn send(transport: &mut Transport, frame: &[u8]) -> Result<bool, Failure> {
    use ntb_linux::LinuxError::{BadLength, Down};
    match transport.send(frame) {
        Ok(sent) => Ok(sent == Sent::Yes),
        Err(Down { .. } | BadLength { .. }) => Ok(false),
        Err(error) => Err(failure(&error)),
    }
}

fn end(mut transport: Transport) -> Result<Exit, Failure> {
    transport.close().map_err(|e| failure(&e))?;
    let counters = transport.counters();
    tell(&format!(
        "{} frames received, {} sent, {} malformed, {} connections",
        counters.received, counters.sent, counters.malformed, counters.connections
    ));
    Ok(Exit::Good)
}

/// Carries frames between the peer and a TAP device.
pub(super) fn tap(args: &TapArgs, interrupt: &Interrupt) -> Result<Exit, Failure> {
    // First what needs rights: a port that is opened makes the peer's link come up.
    let tap = Tap::open(&args.name).map_err(|e| failure(&e))?;
    let mut transport = transport(&args.queue)?;
    let largest = transport.largest().map_err(|e| failure(&e))?;
    tell(&format!(
        "serving on {} as {}; packets of up to {} bytes pass",
        args.queue.port.address,
        tap.name(),
        largest.saturating_sub(answer::ETHERNET_BYTES)
    ));
    let mut frame = Vec::new();
    let mut buffer = vec![0; LARGEST];
    while !interrupt.came() {
        tell_event(transport.poll().map_err(|e| failure(&e))?);
        let mut idle = true;
        for _ in 0..TURN {
            if !transport.receive(&mut frame).map_err(|e| failure(&e))? {
                break;
            }
            idle = false;
            tap.write(&frame).map_err(|e| failure(&e))?;
        }
        // Without a connection frames are taken and dropped, or what the peer gets first would be old.
        let up = transport.step() == Step::Up;
        for _ in 0..TURN {
            if up && transport.free() == 0 {
                break;
            }
            let Some(bytes) = tap.read(&mut buffer).map_err(|e| failure(&e))? else {
                break;
            };
            idle = false;
            send(&mut transport, buffer.get(..bytes).unwrap_or_default())?;
        }
        if idle {
            // With a full ring the device would wake it at once, again and again.
            let wakes = (!up || transport.free() > 0).then(|| tap.as_fd());
            transport.wait(wakes, NAP).map_err(|e| failure(&e))?;
        }
    }
    end(transport)
}
