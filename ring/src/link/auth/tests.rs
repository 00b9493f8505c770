//! Both sides over a stream in memory that lets through as little as it is told.
use std::{
    cell::RefCell,
    collections::VecDeque,
    io::{ErrorKind, Read, Write},
    rc::Rc,
};

use super::*;

type Pipe = Rc<RefCell<VecDeque<u8>>>;

/// One end of a stream of which each call moves `step` bytes at most.
struct End {
    read: Pipe,
    write: Pipe,
    step: usize,
    closed: bool,
}

impl Read for End {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let mut queue = self.read.borrow_mut();
        if queue.is_empty() {
            return if self.closed {
                Ok(0)
            } else {
                Err(ErrorKind::WouldBlock.into())
            };
        }
        let n = buf.len().min(self.step).min(queue.len());
        for slot in &mut buf[..n] {
            *slot = queue.pop_front().unwrap();
        }
        Ok(n)
    }
}

impl Write for End {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        let n = buf.len().min(self.step);
        self.write.borrow_mut().extend(&buf[..n]);
        Ok(n)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn stream(step: usize) -> (End, End) {
    let (ab, ba) = (Pipe::default(), Pipe::default());
    let end = |read: &Pipe, write: &Pipe| End {
        read: Rc::clone(read),
        write: Rc::clone(write),
        step,
        closed: false,
    };
    (end(&ba, &ab), end(&ab, &ba))
}

fn secret(text: &str) -> Secret {
    match text {
        "" => Secret::none(),
        text => Secret::new(text.as_bytes()).unwrap(),
    }
}

type Outcome = Result<Session, AuthError>;

/// Runs both sides to their ends.
fn run(mut a: (Handshake, End), mut b: (Handshake, End)) -> (Outcome, Outcome, End, End) {
    let (mut first, mut second) = (None, None);
    for _ in 0..1000 {
        for ((handshake, end), outcome) in [(&mut a, &mut first), (&mut b, &mut second)] {
            if outcome.is_none() {
                *outcome = handshake.drive(end).transpose();
            }
        }
        // Whoever fails closes.
        b.1.closed |= matches!(first, Some(Err(_)));
        a.1.closed |= matches!(second, Some(Err(_)));
        if first.is_some() && second.is_some() {
            break;
        }
    }
    (first.unwrap(), second.unwrap(), a.1, b.1)
}

fn meet(step: usize, ours: &str, theirs: &str) -> (Outcome, Outcome, End, End) {
    let (a, b) = stream(step);
    let initiator = Handshake::new(Role::Initiator, Purpose::Tcp, &secret(ours)).unwrap();
    let responder = Handshake::new(Role::Responder, Purpose::Tcp, &secret(theirs)).unwrap();
    run((initiator, a), (responder, b))
}

#[test]
fn the_same_secret_lets_both_in_whatever_the_stream_lets_through_at_a_time() {
    for step in [1, 2, 7, 31, 32, 33, 48, 1000] {
        for text in ["s", "0123456789abcdef0123456789abcdef", ""] {
            let (a, b, mut left, mut right) = meet(step, text, text);
            let (mut a, mut b) = (a.unwrap(), b.unwrap());
            let (mut opener_a, mut opener_b) = (a.opener(), b.opener());
            for content in [&b"window"[..], b"", &[7; SEALED_MAX]] {
                let message = a.seal(content).unwrap();
                left.write.borrow_mut().extend(&message);
                right.write.borrow_mut().extend(b.seal(content).unwrap());
                right.write.borrow_mut().extend(b"frames");
                assert_eq!(opener_b.next(&mut right).unwrap().unwrap(), content);
                assert_eq!(opener_a.next(&mut left).unwrap().unwrap(), content);
                let rest: Vec<u8> = left.read.borrow_mut().drain(..).collect();
                assert_eq!(rest, b"frames", "not a byte beyond its own is read");
            }
            assert!(a.seal(&[0; SEALED_MAX + 1]).is_none());
        }
    }
}

#[test]
fn another_secret_or_none_lets_nobody_in_and_both_are_told() {
    for (ours, theirs) in [
        ("a", "b"),
        ("", "b"),
        ("a", ""),
        ("a", "a\0"),
        ("secret", "Secret"),
    ] {
        let (a, b, left, _) = meet(1000, ours, theirs);
        assert!(matches!(b, Err(AuthError::Proof)), "{ours} {theirs}: {b:?}");
        assert!(matches!(a, Err(AuthError::Refused)), "{ours} {theirs}: {a:?}");
        assert_eq!(left.read.borrow().len(), 0, "nothing after the greeting");
        let error = a.unwrap_err().into_link_error("tcp:h:1");
        assert_eq!((error.name, error.exit), ("auth-secret-mismatch", 6));
    }
}

#[test]
fn a_stranger_hears_nothing_but_a_random_number() {
    let (mut a, b) = stream(1000);
    a.write_all(&hello(Role::Initiator, VERSION, 1)).unwrap();
    a.write_all(&[0; PROOF_BYTES]).unwrap();
    let mut responder = (
        Handshake::new(Role::Responder, Purpose::Tcp, &secret("s")).unwrap(),
        b,
    );
    let e = responder.0.drive(&mut responder.1).unwrap_err();
    assert!(matches!(e, AuthError::Proof), "{e}");
    let mut heard = vec![0; 200];
    assert_eq!(a.read(&mut heard).unwrap(), HELLO_BYTES);
    assert_eq!(heard[..8], MAGIC);
    assert!(heard[16..48].iter().any(|b| *b != 0));
}

fn hello(role: Role, version: u16, purpose: u8) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend(version.to_le_bytes());
    out.extend([purpose, role.code(), 0, 0, 0, 0]);
    out.extend([9; 32]);
    out
}

#[test]
fn a_recording_opens_nothing() {
    let text = "shared";
    let (a, b) = stream(1000);
    let (sent, heard) = (Rc::clone(&a.write), Rc::clone(&b.write));
    let mut initiator = Handshake::new(Role::Initiator, Purpose::Tcp, &secret(text)).unwrap();
    let mut responder = Handshake::new(Role::Responder, Purpose::Tcp, &secret(text)).unwrap();
    let (mut a, mut b) = (a, b);
    let mut recorded = Vec::new();
    assert!(initiator.drive(&mut a).unwrap().is_none());
    recorded.extend(sent.borrow().iter());
    assert!(responder.drive(&mut b).unwrap().is_none());
    let answer: Vec<u8> = heard.borrow().iter().copied().collect();
    assert!(initiator.drive(&mut a).unwrap().is_none());
    recorded.extend(sent.borrow().iter());
    assert!(responder.drive(&mut b).unwrap().is_some());
    assert_eq!(recorded.len(), HELLO_BYTES + PROOF_BYTES);

    // To another responder of the same secret, the initiator's words are worth nothing ...
    let (mut thief, mut b) = stream(1000);
    thief.write_all(&recorded).unwrap();
    let mut again = Handshake::new(Role::Responder, Purpose::Tcp, &secret(text)).unwrap();
    assert!(matches!(again.drive(&mut b), Err(AuthError::Proof)));
    // ... and to another initiator the responder's.
    let (mut a, mut thief) = stream(1000);
    let proof: Vec<u8> = heard.borrow().iter().copied().collect();
    thief.write_all(&[answer, proof].concat()).unwrap();
    let mut again = Handshake::new(Role::Initiator, Purpose::Tcp, &secret(text)).unwrap();
    assert!(matches!(again.drive(&mut a), Err(AuthError::Proof)));
}

/// Whoever sends everything back has proved nothing.
#[test]
fn a_mirror_is_no_peer() {
    let (mut a, mut mirror) = stream(1000);
    let mut initiator = Handshake::new(Role::Initiator, Purpose::Tcp, &secret("s")).unwrap();
    assert!(initiator.drive(&mut a).unwrap().is_none());
    let mut bytes = vec![0; 200];
    let n = mirror.read(&mut bytes).unwrap();
    mirror.write_all(&bytes[..n]).unwrap();
    let e = initiator.drive(&mut a).unwrap_err();
    assert!(matches!(e, AuthError::Malformed(_)), "{e}");
    // With the part exchanged, its own proof comes back: it is labelled as its own.
    let (mut a, mut mirror) = stream(1000);
    let mut initiator = Handshake::new(Role::Initiator, Purpose::Tcp, &secret("s")).unwrap();
    assert!(initiator.drive(&mut a).unwrap().is_none());
    let n = mirror.read(&mut bytes).unwrap();
    bytes[11] = Role::Responder.code();
    mirror.write_all(&bytes[..n]).unwrap();
    assert!(initiator.drive(&mut a).unwrap().is_none());
    let n = mirror.read(&mut bytes).unwrap();
    mirror.write_all(&bytes[..n]).unwrap();
    assert!(matches!(initiator.drive(&mut a), Err(AuthError::Proof)));
}

#[test]
fn versions_and_purposes_that_differ_are_named() {
    let (mut a, mut b) = stream(1000);
    a.write_all(&hello(Role::Initiator, 7, 1)).unwrap();
    let mut responder = Handshake::new(Role::Responder, Purpose::Tcp, &secret("s")).unwrap();
    let e = responder.drive(&mut b).unwrap_err();
    assert!(matches!(e, AuthError::Version { theirs: 7 }), "{e}");
    let mut initiator = Handshake::new(Role::Initiator, Purpose::Tcp, &secret("s")).unwrap();
    let (mut a, mut b) = stream(1000);
    b.write_all(&hello(Role::Responder, 3, 1)).unwrap();
    let e = initiator.drive(&mut a).unwrap_err().into_link_error("tcp:h:1");
    assert_eq!((e.name, e.exit), ("auth-version-mismatch", 7));
    assert!(e.what.contains('3') && e.what.contains('1'), "{e}");

    let (a, b) = stream(1000);
    let initiator = Handshake::new(Role::Initiator, Purpose::Rdma, &secret("s")).unwrap();
    let responder = Handshake::new(Role::Responder, Purpose::Tcp, &secret("s")).unwrap();
    let (first, second, ..) = run((initiator, a), (responder, b));
    for e in [first.unwrap_err(), second.unwrap_err()] {
        assert!(
            e.to_string().contains("rdma") && e.to_string().contains("tcp"),
            "{e}"
        );
    }
}

#[test]
fn sealed_messages_that_were_altered_repeated_or_sent_back_are_refused() {
    let sessions = || {
        let (a, b, left, right) = meet(1000, "s", "s");
        (a.unwrap(), b.unwrap(), left, right)
    };
    // Every bit of one.
    for bit in 0..(4 + 3 + 32) * 8 {
        let (mut a, b, left, mut right) = sessions();
        let mut message = a.seal(b"abc").unwrap();
        message[bit / 8] ^= 1 << (bit % 8);
        left.write.borrow_mut().extend(&message);
        left.write.borrow_mut().extend([0; SEALED_MAX + 32]); // whatever length it may claim now
        let result = b.opener().next(&mut right);
        assert!(
            matches!(result, Err(AuthError::Malformed(_))),
            "bit {bit}: {result:?}"
        );
    }
    let (mut a, b, left, mut right) = sessions();
    let message = a.seal(b"abc").unwrap();
    left.write
        .borrow_mut()
        .extend([message.clone(), message.clone()].concat());
    let mut opener = b.opener();
    assert!(opener.next(&mut right).unwrap().is_some());
    assert!(opener.next(&mut right).is_err(), "the same again");
    let (mut a, _b, mut left, right) = sessions();
    let message = a.seal(b"abc").unwrap();
    right.write.borrow_mut().extend(&message);
    assert!(a.opener().next(&mut left).is_err(), "its own, sent back");
}

#[test]
fn secrets_come_from_files_and_never_show() {
    let folder = std::env::temp_dir().join(format!("ntb-secret-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("secret");
    for (content, same) in [
        ("abc", "abc"),
        ("abc\n", "abc"),
        ("abc\r\n", "abc"),
        ("abc\n\n", "abc\n"),
    ] {
        std::fs::write(&path, content).unwrap();
        assert!(Secret::from_file(&path).unwrap() == secret(same));
    }
    for (content, long) in [("", false), ("\n", false), (&"x".repeat(SECRET_MAX + 1), true)] {
        std::fs::write(&path, content).unwrap();
        let e = Secret::from_file(&path).unwrap_err();
        assert_eq!(matches!(e, SecretError::TooLong), long, "{e}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
    let e = Secret::from_file(&path).unwrap_err().to_string();
    assert!(e.contains("ntb-secret-"), "{e}");
    let shown = format!(
        "{:?}{:?}",
        secret("hush"),
        Handshake::new(Role::Initiator, Purpose::Tcp, &secret("hush"))
    );
    assert!(!shown.contains("hush") && !shown.contains("104, 117"), "{shown}");
}
