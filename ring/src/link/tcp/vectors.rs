//! The test vectors of the network part of `docs/wire.md`, recomputed: page and code cannot drift apart.
use std::{
    cell::RefCell,
    collections::VecDeque,
    io::{ErrorKind, Read, Write},
    rc::Rc,
};

use super::*;
use crate::link::{
    LinkKind,
    auth::{Handshake, Role, Session},
    auto::offer::{Answer, Offer, Refusal},
};

const PAGE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/wire.md"));

#[derive(Clone, Default)]
struct Pipe {
    waiting: Rc<RefCell<VecDeque<u8>>>,
    all: Rc<RefCell<Vec<u8>>>,
}

struct End(Pipe, Pipe);

impl Read for End {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let mut queue = self.0.waiting.borrow_mut();
        if queue.is_empty() {
            return Err(ErrorKind::WouldBlock.into());
        }
        let n = buf.len().min(queue.len());
        buf.iter_mut()
            .zip(queue.drain(..n))
            .for_each(|(to, from)| *to = from);
        Ok(n)
    }
}

impl Write for End {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        self.1.waiting.borrow_mut().extend(buf);
        self.1.all.borrow_mut().extend(buf);
        Ok(buf.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Both sides' bytes, and their sessions.
fn exchange() -> (Vec<u8>, Vec<u8>, Session, Session) {
    let secret = Secret::new(b"correct horse battery staple").unwrap();
    let nonce = |first: u8| std::array::from_fn(|i| first + i as u8);
    let mut initiator = Handshake::with_nonce(Role::Initiator, Purpose::Tcp, &secret, nonce(0));
    let mut responder = Handshake::with_nonce(Role::Responder, Purpose::Tcp, &secret, nonce(0x80));
    let (there, back) = (Pipe::default(), Pipe::default());
    let (mut a, mut b) = (End(back.clone(), there.clone()), End(there.clone(), back.clone()));
    assert!(initiator.drive(&mut a).unwrap().is_none());
    assert!(responder.drive(&mut b).unwrap().is_none());
    assert!(initiator.drive(&mut a).unwrap().is_none());
    let responder = responder.drive(&mut b).unwrap().unwrap();
    let initiator = initiator.drive(&mut a).unwrap().unwrap();
    let said = (there.all.borrow().clone(), back.all.borrow().clone());
    (said.0, said.1, initiator, responder)
}

fn vectors() -> Vec<(&'static str, Vec<u8>)> {
    let (there, back, mut initiator, mut responder) = exchange();
    let greeting = |window_bytes, pid| Message::Greeting(Greeting { window_bytes, pid }).encode();
    let frame = |put: &dyn Fn(&mut Vec<u8>)| {
        let mut out = Vec::new();
        put(&mut out);
        out
    };
    vec![
        ("auth-hello-initiator", there[..48].to_vec()),
        ("auth-hello-responder", back[..48].to_vec()),
        ("auth-proof-initiator", there[48..].to_vec()),
        ("auth-proof-responder", back[48..].to_vec()),
        (
            "tcp-greeting-initiator",
            initiator.seal(&greeting(1 << 20, 4711)).unwrap(),
        ),
        (
            "tcp-greeting-responder",
            responder.seal(&greeting(2 << 20, 4712)).unwrap(),
        ),
        (
            "frame-line",
            frame(&|out| frame::put_line(out, 256, &ntb_mem::line::Line([1, 2, 3, 4, 5, 6, 7, 8]))),
        ),
        ("frame-bytes", frame(&|out| frame::put_bytes(out, 300, b"hello"))),
        (
            "frame-registers",
            frame(&|out| frame::put_registers(out, &[1, 2, 3, 4, 5, 6, 7, 8])),
        ),
        ("frame-ring", frame(&|out| frame::put_ring(out, 3))),
        ("choice-offer", offer(4711, "auto-4711").encode()),
        (
            "choice-agreed",
            Answer::Agreed(LinkKind::Soft, offer(4712, "auto-4712")).encode(),
        ),
        (
            "choice-refused",
            Answer::Refused(Refusal::NothingInCommon, "no bridge".to_owned()).encode(),
        ),
    ]
}

fn offer(pid: u32, name: &str) -> Offer {
    Offer {
        pid,
        uid: 1000,
        window_bytes: 1 << 20,
        machine: 0x0123_4567_89ab_cdef,
        kinds: vec![LinkKind::Soft, LinkKind::Tcp],
        reasons: vec![
            (LinkKind::Ntb, "no bridge".to_owned()),
            (LinkKind::Rdma, "no RDMA".to_owned()),
        ],
        soft_name: Some(name.to_owned()),
    }
}

/// The bytes of the fenced block with the info string `bytes NAME`.
fn on_page(name: &str) -> Option<Vec<u8>> {
    let start = format!("```bytes {name}\n");
    let block = PAGE.split_once(&start)?.1.split_once("```")?.0;
    block
        .split_whitespace()
        .map(|byte| u8::from_str_radix(byte, 16).ok())
        .collect()
}

#[test]
fn the_page_shows_what_the_code_does() {
    let vectors = vectors();
    for (name, bytes) in &vectors {
        assert_eq!(on_page(name).as_ref(), Some(bytes), "{name}: {bytes:02x?}");
    }
    assert_eq!(
        PAGE.matches("```bytes ").count(),
        vectors.len(),
        "a block that nothing checks"
    );
}
