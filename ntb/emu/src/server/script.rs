//! A client that is only bytes: for fuzzing a session without a socket.

use std::{os::fd::OwnedFd, sync::Arc, time::Instant};

use ntb::pci::vfio_user::proto::{Command, HEADER_BYTES, Header, RegionAccess, Version, flags, region};
use zerocopy::{FromBytes, IntoBytes};

use super::{
    Device, serve,
    stream::{End, Limits, Transport},
};
use crate::model::{FAMILIES, Pair, PairConfig, SideId};

/// Hands out `input` in pieces of at most `piece` bytes, and keeps what the server sends.
#[derive(Debug, Default)]
pub struct ScriptedClient {
    /// What is still to be received.
    pub input: Vec<u8>,
    /// Bytes received so far.
    pub taken: usize,
    /// Most bytes per receive; 0 for no limit.
    pub piece: usize,
    /// Descriptors, handed out one by one with the next bytes.
    pub fds: Vec<OwnedFd>,
    /// What the server has sent.
    pub output: Vec<u8>,
}

impl Transport for ScriptedClient {
    fn receive(
        &mut self,
        buf: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        _deadline: Option<Instant>,
    ) -> Result<usize, End> {
        let rest = self.input.get(self.taken..).unwrap_or_default();
        let limit = if self.piece == 0 { usize::MAX } else { self.piece };
        let n = rest.len().min(buf.len()).min(limit);
        if let (Some(to), Some(from)) = (buf.get_mut(..n), rest.get(..n)) {
            to.copy_from_slice(from);
        }
        self.taken += n;
        if n > 0 {
            fds.extend(self.fds.pop());
        }
        Ok(n)
    }

    fn send(&mut self, bytes: &[u8], _deadline: Instant) -> Result<(), End> {
        self.output.extend_from_slice(bytes);
        Ok(())
    }
}

/// A session with any messages and any bytes: what a fuzzer calls.
///
/// The first byte chooses the family, the second how the stream is cut; then come messages, each as command, length
/// and payload, until one has the command 255: what follows it is sent as it is.
///
/// # Panics
/// When an answer is out of step, or is not what the protocol allows: that is what is looked for.
pub fn fuzz(data: &[u8]) {
    let [family, piece, rest @ ..] = data else {
        return;
    };
    let mut rest = rest;
    let family = FAMILIES.get(usize::from(*family) % FAMILIES.len());
    let Some(pair) = family.and_then(|f| Pair::new(*f, PairConfig::default()).ok()) else {
        return;
    };
    let mut input = message(
        0,
        Command::Version as u16,
        Version { major: 0, minor: 1 }.as_bytes(),
    );
    // Awake, so that registers are reached.
    let command = RegionAccess {
        offset: 4,
        region: region::CONFIG,
        count: 2,
    };
    input.extend(message(
        1,
        Command::RegionWrite as u16,
        &[command.as_bytes(), &[6, 0]].concat(),
    ));
    let mut answers = 2;
    while let [command, len, tail @ ..] = rest {
        if *command == u8::MAX {
            input.extend_from_slice(tail);
            break;
        }
        let (payload, tail) = tail.split_at(tail.len().min((*len).into()));
        input.extend(message(2, (*command).into(), payload));
        answers += 1;
        rest = tail;
    }
    let mut client = ScriptedClient {
        input,
        piece: (*piece).into(),
        ..ScriptedClient::default()
    };
    let end = serve(
        &Device::new(Arc::clone(pair.port(SideId::A))),
        &mut client,
        Limits::default(),
    );
    let given = count_answers(&client.output);
    assert!(
        given >= answers,
        "{given} answers to {answers} commands, then: {end}"
    );
}

fn message(id: u16, command: u16, payload: &[u8]) -> Vec<u8> {
    let header = Header {
        id,
        command,
        size: (HEADER_BYTES + payload.len()) as u32,
        flags: flags::COMMAND,
        error: 0,
    };
    [header.as_bytes(), payload].concat()
}

/// Answers in what a server has sent, each in step and with a number exactly when it is an error.
fn count_answers(mut output: &[u8]) -> usize {
    let mut answers = 0;
    while let Ok((header, _)) = Header::read_from_prefix(output) {
        let size = header.size as usize;
        assert!(
            (HEADER_BYTES..=output.len()).contains(&size),
            "an answer out of step"
        );
        assert_eq!(header.flags & flags::TYPE_MASK, flags::REPLY);
        assert_eq!(header.flags & flags::ERROR != 0, header.error != 0);
        output = output.get(size..).unwrap_or_default();
        answers += 1;
    }
    assert!(output.is_empty(), "half an answer");
    answers
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Numbers that bounds checks get wrong.
    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![
            0..40u64,
            Just(0x1000),
            Just(0xFFFF),
            Just(0x1_0000),
            0..0x2_0000u64,
            Just(u64::from(u32::MAX)),
            Just(u64::MAX),
            Just(u64::MAX - 7),
            any::<u64>(),
        ]
    }

    fn payload() -> impl Strategy<Value = Vec<u8>> {
        let words = prop::collection::vec((number(), any::<bool>()), 0..6);
        (words, 0..4usize).prop_map(|(words, extra)| {
            let mut bytes: Vec<u8> = words
                .into_iter()
                .flat_map(|(n, wide)| n.to_ne_bytes()[..if wide { 8 } else { 4 }].to_vec())
                .collect();
            bytes.extend(&[0xA5; 4][..extra]);
            bytes
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        #[test]
        fn any_messages_are_answered_one_by_one(
            family in any::<u8>(),
            piece in 0..40u8,
            messages in prop::collection::vec((0..17u8, payload()), 0..30),
        ) {
            let mut data = vec![family, piece];
            for (command, payload) in messages {
                data.extend([command, payload.len() as u8]);
                data.extend(payload);
            }
            fuzz(&data);
        }

        #[test]
        fn any_bytes_end_a_session_in_order(
            family in any::<u8>(),
            piece in 0..9u8,
            bytes in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            fuzz(&[&[family, piece, 255, 0], &bytes[..]].concat());
        }
    }
}
