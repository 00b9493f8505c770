//! A far end that lives and does not do its part: what has stopped is named.

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use common::{Running, address, object};
use ntb_ring::{
    channel::{Connection, Options, RecvFailure, Wait},
    link::select::{self, LinkOptions},
    session::ChannelSpec,
};
use ntb_tools::ping::message::{Control, Kind, header};

/// What the far end leaves out.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    /// Says who it is, and takes nothing more.
    TakesNothing { sleeps: bool },
    /// Takes everything, and sends no reply.
    RepliesNothing,
    /// Does not even say who it is.
    Mute,
    /// Spoils a byte of each hundredth reply, sends another one twice.
    Careless,
}

/// A far end in this process, until it is dropped.
struct FarEnd {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl FarEnd {
    fn start(address: &str, fault: Fault) -> Self {
        let address = address.parse().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let end = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let opened = select::open(&address, &LinkOptions::default()).unwrap();
            let connection = Connection::open(opened.link, &Options::default()).unwrap();
            let spec = ChannelSpec {
                smaller_if_different: true,
                ..ChannelSpec::default()
            };
            let (mut tx, mut rx) = connection.channel("ntb-ping", spec).unwrap();
            rx.set_wait(Wait::SpinSleep { spins: 0 });
            let mut buf = vec![0; 65_536];
            let mut welcomed = false;
            let mut replies = 0u32;
            while !end.load(Ordering::Relaxed) {
                if fault == Fault::Mute || (welcomed && matches!(fault, Fault::TakesNothing { .. })) {
                    std::thread::sleep(Duration::from_millis(10));
                    continue;
                }
                let len = match rx.recv(&mut buf, Duration::from_millis(20)) {
                    Ok(received) => received.len,
                    Err(RecvFailure::TimedOut | RecvFailure::NotConnected(_) | RecvFailure::Lost(_)) => {
                        continue;
                    }
                    Err(e) => panic!("{e}"),
                };
                let message = &mut buf[..len];
                match header(message).map(|h| h.kind) {
                    Some(Kind::Control) => {
                        if let Some(Control::Hello { .. }) = Control::decode(message) {
                            let welcome = Control::Welcome {
                                pid: std::process::id(),
                                cpu: None,
                                pin_errno: 0,
                                sleeps: fault == Fault::TakesNothing { sleeps: true },
                            };
                            tx.send(&welcome.encode(), Duration::from_secs(5)).unwrap();
                            welcomed = true;
                        }
                    }
                    _ if fault == Fault::Careless => {
                        replies += 1;
                        if replies % 100 == 50 {
                            *message.last_mut().unwrap() ^= 0x10;
                        }
                        for _ in 0..=u32::from(replies % 100 == 20) {
                            let _ = tx.send(message, Duration::from_secs(5)); // the client may have gone
                        }
                    }
                    _ => {}
                }
            }
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for FarEnd {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().unwrap().join();
    }
}

fn client(address: &str, extra: &[&str]) -> std::process::Output {
    Running::start(&[&[address, "--json", "--timeout", "1500ms"], extra].concat()).finish()
}

#[test]
fn what_has_stopped_is_named() {
    for (fault, name, part) in [
        (
            Fault::TakesNothing { sleeps: false },
            "stalled-ring",
            "ring, towards the peer",
        ),
        (
            Fault::TakesNothing { sleeps: true },
            "stalled-doorbell",
            "has not been woken",
        ),
        (Fault::RepliesNothing, "stalled-ring", "ring, back from the peer"),
    ] {
        for rate in [&["--rate", "100"][..], &[]] {
            let address = address();
            let _far = FarEnd::start(&address, fault);
            let output = client(&address, &[&["--warmup", "0"], rate].concat());
            let v = object(&output);
            assert_eq!(output.status.code(), Some(1), "{v}");
            assert_eq!(v["error"]["name"], name, "{v}");
            let what = v["error"]["what"].as_str().unwrap();
            assert!(
                what.contains(part) && what.contains("no reply for 1."),
                "{part}: {what}"
            );
            assert!(v["lost"].as_u64().unwrap() > 0);
        }
    }
}

#[test]
fn a_stream_that_nobody_takes_is_named() {
    let address = address();
    let _far = FarEnd::start(&address, Fault::TakesNothing { sleeps: false });
    let output = client(&address, &["--oneway"]);
    let v = object(&output);
    assert_eq!(output.status.code(), Some(1), "{v}");
    assert!(
        v["error"]["what"]
            .as_str()
            .unwrap()
            .contains("no room in the ring"),
        "{v}"
    );
}

#[test]
fn a_peer_that_says_nothing_is_no_answer() {
    let address = address();
    let _far = FarEnd::start(&address, Fault::Mute);
    let output = client(&address, &[]);
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "{err}");
    assert!(err.contains("no-answer"), "{err}");
}

/// Nothing is hidden by a run that otherwise goes well.
#[test]
fn spoilt_and_doubled_replies_are_counted() {
    let address = address();
    let _far = FarEnd::start(&address, Fault::Careless);
    let output = client(&address, &["--warmup", "0", "--rate", "2000", "--count", "1000"]);
    let v = object(&output);
    assert_eq!(output.status.code(), Some(1), "{v}");
    assert_eq!(
        (&v["corrupt"], &v["lost"], &v["duplicated"]),
        (&10.into(), &10.into(), &10.into())
    );
}

/// Whatever has stopped, an interrupt ends the wait.
#[test]
fn an_interrupt_ends_a_stalled_run() {
    for fault in [Fault::TakesNothing { sleeps: false }, Fault::Mute] {
        let address = address();
        let _far = FarEnd::start(&address, fault);
        let client = Running::start(&[&address, "--warmup", "0", "--duration", "60s"]);
        if fault == Fault::Mute {
            std::thread::sleep(Duration::from_millis(1500));
        } else {
            client.expect("stalled: no reply", 1);
        }
        client.signal(rustix::process::Signal::INT);
        let begun = std::time::Instant::now();
        let output = client.finish();
        eprintln!("{:?} after the interrupt", begun.elapsed());
        assert_ne!(output.status.code(), Some(0));
    }
}
