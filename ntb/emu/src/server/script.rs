//! A client that is only bytes: for fuzzing a session without a socket.

use std::{os::fd::OwnedFd, time::Instant};

use super::stream::{End, Transport};

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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ntb::pci::vfio_user::proto::{Command, HEADER_BYTES, Header, Version, flags};
    use proptest::prelude::*;
    use zerocopy::{FromBytes, IntoBytes};

    use super::*;
    use crate::{
        model::{FAMILIES, Pair, PairConfig, SideId},
        server::{Device, Limits, serve},
    };

    fn message(id: u16, command: u16, flags: u32, payload: &[u8]) -> Vec<u8> {
        let header = Header {
            id,
            command,
            size: (HEADER_BYTES + payload.len()) as u32,
            flags,
            error: 0,
        };
        [header.as_bytes(), payload].concat()
    }

    fn hello() -> Vec<u8> {
        message(
            0,
            Command::Version as u16,
            0,
            Version { major: 0, minor: 1 }.as_bytes(),
        )
    }

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

    /// Every answer in turn: in step, of the right kind, with a number when it is an error.
    fn check_answers(mut output: &[u8]) -> usize {
        let mut answers = 0;
        while !output.is_empty() {
            let (header, _) = Header::read_from_prefix(output).unwrap();
            assert!(header.size as usize <= output.len() && header.size as usize >= HEADER_BYTES);
            assert_eq!(header.flags & flags::TYPE_MASK, flags::REPLY);
            assert_eq!(header.flags & flags::ERROR != 0, header.error != 0);
            output = &output[header.size as usize..];
            answers += 1;
        }
        answers
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        #[test]
        fn any_messages_are_answered_one_by_one(
            family in 0..FAMILIES.len(),
            messages in prop::collection::vec((0..17u16, payload(), any::<bool>()), 0..30),
            piece in 0..40usize,
        ) {
            let pair = Pair::new(FAMILIES[family], PairConfig::default()).unwrap();
            let port = pair.port(SideId::A);
            let device = Device::new(Arc::clone(port));
            // Awake, so that registers are reached.
            let awake = [&4u64.to_ne_bytes()[..], &7u32.to_ne_bytes(), &2u32.to_ne_bytes(), &[6, 0]].concat();
            let mut input = [hello(), message(1, Command::RegionWrite as u16, 0, &awake)].concat();
            let mut wanted = 2;
            for (i, (command, payload, quiet)) in messages.iter().enumerate() {
                let flags = if *quiet { flags::NO_REPLY } else { 0 };
                wanted += usize::from(!quiet);
                input.extend(message(i as u16, *command, flags, payload));
            }
            let mut client = ScriptedClient { input, piece, ..ScriptedClient::default() };
            let end = serve(&device, &mut client, Limits::default());
            prop_assert!(matches!(end, End::Closed), "{end}");
            prop_assert_eq!(check_answers(&client.output), wanted);
        }

        #[test]
        fn any_bytes_end_a_session_in_order(bytes in prop::collection::vec(any::<u8>(), 0..200), piece in 0..9usize) {
            let pair = Pair::new(FAMILIES[0], PairConfig::default()).unwrap();
            let device = Device::new(Arc::clone(pair.port(SideId::A)));
            let input = [hello(), bytes].concat();
            let mut client = ScriptedClient { input, piece, ..ScriptedClient::default() };
            let _ = serve(&device, &mut client, Limits::default());
            prop_assert!(check_answers(&client.output) >= 1);
        }
    }
}
