//! What comes over a network: the exchange of proofs as either side, sealed messages, greetings, offers, and frames.
#![no_main]

use std::io::{self, ErrorKind, Read, Write};

use libfuzzer_sys::fuzz_target;
use ntb_ring::link::{
    auth::{HELLO_BYTES, Handshake, PROOF_BYTES, Purpose, Role, Secret},
    auto::offer::{self, Answer},
    tcp::{frame, greeting},
};

/// Gives what it was given, a few bytes at a time, and counts what it is told.
struct Stream<'a> {
    input: &'a [u8],
    step: usize,
    told: usize,
}

impl Read for Stream<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = buf.len().min(self.step).min(self.input.len());
        if n == 0 {
            return Err(ErrorKind::WouldBlock.into());
        }
        let (now, later) = self.input.split_at(n);
        buf[..n].copy_from_slice(now);
        self.input = later;
        Ok(n)
    }
}

impl Write for Stream<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.told += buf.len();
        Ok(buf.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((choice, data)) = data.split_first() else {
        return;
    };
    let secret = Secret::new(b"fuzz").unwrap();
    match choice % 4 {
        0 | 1 => {
            let role = if choice % 4 == 0 {
                Role::Responder
            } else {
                Role::Initiator
            };
            let mut stream = Stream {
                input: data,
                step: 1 + usize::from(choice >> 2),
                told: 0,
            };
            let mut handshake = Handshake::new(role, Purpose::Tcp, &secret).unwrap();
            // Nobody guesses a proof.
            assert!(!matches!(handshake.drive(&mut stream), Ok(Some(_))));
            let most = match role {
                Role::Responder => HELLO_BYTES,
                Role::Initiator => HELLO_BYTES + PROOF_BYTES,
            };
            assert!(stream.told <= most);
            assert!(data.len() - stream.input.len() <= HELLO_BYTES + PROOF_BYTES);
        }
        2 => {
            if let Ok(message) = greeting::decode(data) {
                assert_eq!(greeting::decode(&message.encode()), Ok(message));
            }
            if let Ok(found) = offer::decode(data) {
                assert_eq!(offer::decode(&found.encode()).unwrap().kinds, found.kinds);
                let _ = found.choose(&found);
            }
            if let Ok(answer) = Answer::decode(data) {
                let _ = answer.encode();
            }
        }
        _ => {
            let mut at = 0;
            let mut again = Vec::new();
            while let Ok(Some((found, length))) = frame::parse(&data[at..]) {
                assert!(length >= frame::HEADER_BYTES && at + length <= data.len());
                again.clear();
                match found {
                    frame::Frame::Line(line, content) => frame::put_line(&mut again, line, &content),
                    frame::Frame::Bytes(line, bytes) => frame::put_bytes(&mut again, line, bytes),
                    frame::Frame::Registers(registers) => frame::put_registers(&mut again, &registers),
                    frame::Frame::Ring(number) => frame::put_ring(&mut again, number),
                }
                assert_eq!(frame::parse(&again).unwrap().unwrap().0, found);
                at += length;
            }
        }
    }
});
