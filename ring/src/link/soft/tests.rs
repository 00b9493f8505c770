//! Both ends in one process, driven in turn; `raw` plays peers that do not keep to the rules.
use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use rustix::event::EventfdFlags;

use super::{greeting::*, *};
use crate::link::{
    conformance::{Rig, WATCHDOG, until},
    ends::DESCRIPTORS,
    engine::StoreEngine,
};

fn unique() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!(
        "test-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    )
}

fn options() -> SoftOptions {
    SoftOptions {
        window_bytes: 1 << 16,
        pages: Pages::Normal,
        group: None,
    }
}

fn open(name: &str) -> SoftLink {
    SoftLink::open(name, &options()).unwrap()
}

fn up(link: &mut SoftLink) -> bool {
    link.poll().unwrap().state == LinkState::WindowsSet
}

fn join(a: &mut SoftLink, b: &mut SoftLink) {
    until(|| up(a) & up(b));
}

struct SoftRig {
    name: String,
    near: SoftLink,
    far: Option<SoftLink>,
    /// Which side listens: the near one is opened first, or the far one has been polled first.
    far_first: bool,
}

impl SoftRig {
    fn new(far_first: bool) -> Self {
        let name = unique();
        let (near, mut far) = (open(&name), open(&name));
        if far_first {
            far.poll().unwrap();
        }
        Self {
            name,
            near,
            far: Some(far),
            far_first,
        }
    }
}

impl Rig for SoftRig {
    fn near(&mut self) -> &mut dyn Link {
        &mut self.near
    }

    fn far(&mut self) -> Option<&mut dyn Link> {
        self.far.as_mut().map(|f| f as &mut dyn Link)
    }

    fn lose(&mut self) {
        self.far = None;
    }

    fn restore(&mut self) {
        let mut far = open(&self.name);
        if self.far_first {
            far.poll().unwrap();
        }
        self.far = Some(far);
    }
}

mod near_listens {
    crate::link_conformance!(super::SoftRig::new(false));
}

mod far_listens {
    crate::link_conformance!(super::SoftRig::new(true));
}

#[test]
fn without_a_peer_there_is_nothing() {
    let mut link = open(&unique());
    for _ in 0..3 {
        let status = link.poll().unwrap();
        assert_eq!((status.state, status.losses), (LinkState::CableDown, 0));
        assert_eq!(link.registers(), NO_REGISTERS);
        assert!(link.outbound().is_none());
        link.write_registers(&[1; 8]);
        link.ring(0);
        assert!(!link.doorbell(0).take());
    }
}

#[test]
fn the_one_that_called_listens_when_the_other_dies() {
    let name = unique();
    let (mut a, mut b) = (open(&name), open(&name));
    join(&mut a, &mut b);
    for losses in 1..=6 {
        // Whoever has been there longest dies.
        drop(std::mem::replace(&mut a, b));
        b = open(&name);
        join(&mut a, &mut b);
        assert_eq!(a.poll().unwrap().losses, 1, "loss {losses} of its own peer");
        assert_eq!(b.poll().unwrap().losses, 0);
    }
}

#[test]
fn a_third_is_told_who_holds_the_name() {
    let name = unique();
    let (mut a, mut b) = (open(&name), open(&name));
    join(&mut a, &mut b);
    for _ in 0..20 {
        let mut third = open(&name);
        let mut error = None;
        until(|| {
            assert!(up(&mut a) & up(&mut b), "the two are left alone");
            error = third.poll().err();
            error.is_some()
        });
        let error = error.unwrap();
        assert_eq!((error.name, error.exit), ("soft-name-taken", 6));
        assert!(
            error.what.contains(&format!("process {}", std::process::id())),
            "{error}"
        );
    }
    assert_eq!(a.counts().refused_taken + b.counts().refused_taken, 20);
    assert_eq!(a.poll().unwrap().losses, 0);
}

#[test]
fn a_peer_restarted_between_two_polls_does_not_find_the_name_taken() {
    let name = unique();
    let mut survivor = open(&name);
    survivor.poll().unwrap(); // listens
    let mut losses = 0;
    for _ in 0..100 {
        let mut peer = open(&name);
        peer.poll().unwrap(); // has greeted
        losses += u64::from(up(&mut survivor));
        drop(peer);
    }
    let mut last = open(&name);
    join(&mut survivor, &mut last);
    assert_eq!(survivor.poll().unwrap().losses, losses);
    assert_eq!(survivor.counts().refused_taken, 0);
}

/// Descriptors of this process that are open.
fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// In a process of its own, since other tests open and close descriptors meanwhile.
#[test]
fn a_thousand_reconnects_leave_no_descriptor_and_no_mapping() {
    in_child("a_thousand_reconnects_leave_no_descriptor_and_no_mapping", || {
        let name = unique();
        let mappings = || {
            std::fs::read_to_string("/proc/self/maps")
                .unwrap()
                .lines()
                .count()
        };
        let mut survivor = open(&name);
        let mut before = None;
        for round in 0..1000u64 {
            let mut peer = open(&name);
            join(&mut survivor, &mut peer);
            let mut engine = survivor.outbound().unwrap();
            engine.put(0, &ntb_mem::line::Line([round; 8]));
            drop(peer);
            until(|| !up(&mut survivor));
            engine.put(0, &ntb_mem::line::Line([round; 8]));
            drop(engine);
            let now = (open_descriptors(), mappings());
            if round == 9 {
                before = Some(now);
            }
            if round == 999 {
                // Mappings of the allocator may come; a leak would be two a round.
                let (fds, maps) = before.unwrap();
                assert_eq!(now.0, fds);
                assert!(now.1 < maps + 100, "{maps} mappings became {}", now.1);
            }
        }
        assert_eq!(survivor.poll().unwrap().losses, 1000);
    });
}

/// Runs `body` in a process of its own: this test binary once more, with this one test.
pub(super) fn in_child(test: &str, body: impl FnOnce()) {
    const MARK: &str = "NTB_RING_TEST_CHILD";
    if std::env::var_os(MARK).is_some() {
        return body();
    }
    let output = child(test, &[(MARK, "1")]).wait_with_output().unwrap();
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

fn child(test: &str, env: &[(&str, &str)]) -> std::process::Child {
    std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "--test-threads=1"])
        .arg(format!("link::soft::tests::{test}"))
        .envs(env.iter().copied())
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap()
}

/// The other process of the tests with two: writes to the near side what it reads there, line 1 from line 0, until it
/// is killed.
#[test]
fn zz_helper_echo() {
    let Some(name) = std::env::var("NTB_RING_TEST_ECHO").ok() else {
        return;
    };
    let mut link = open(&name);
    let start = Instant::now();
    while start.elapsed() < 2 * WATCHDOG {
        if up(&mut link) {
            let line = crate::link::engine::Inbound::load_line(&link.inbound(), 0);
            link.outbound().unwrap().put(1, &line);
            link.ring(0);
        }
        link.wait(Duration::from_millis(1));
    }
}

#[test]
fn two_processes_in_either_order_and_killed_at_any_moment() {
    let name = unique();
    let spawn = || child("zz_helper_echo", &[("NTB_RING_TEST_ECHO", &name)]);
    let mut link = None;
    let mut losses = 0;
    for round in 1..=12u64 {
        let mut other = spawn();
        let link = link.get_or_insert_with(|| {
            std::thread::sleep(Duration::from_millis(30)); // the other is first, this once
            open(&name)
        });
        until(|| {
            link.wait(Duration::from_millis(2));
            up(link)
        });
        let line = ntb_mem::line::Line([round; 8]);
        link.outbound().unwrap().put(0, &line);
        until(|| {
            link.wait(Duration::from_millis(2));
            assert!(up(link));
            crate::link::engine::Inbound::load_line(&link.inbound(), 1) == line
        });
        assert_eq!(link.peer_pid(), Some(other.id()));
        other.kill().unwrap();
        other.wait().unwrap();
        losses += 1;
        until(|| {
            link.wait(Duration::from_millis(2));
            !up(link)
        });
        assert_eq!(link.poll().unwrap().losses, losses);
    }
}

/// As when a child was forked meanwhile and has not executed its program yet.
#[test]
fn a_link_ends_when_it_is_dropped_though_somebody_has_copies_of_its_sockets() {
    let name = unique();
    let (mut a, mut b) = (open(&name), open(&name));
    a.poll().unwrap();
    join(&mut a, &mut b);
    let copy = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().unwrap();
    let _copy = copy(b.connected.as_ref().unwrap().socket.as_fd());
    drop(b);
    until(|| !up(&mut a));
    let mut b = open(&name);
    join(&mut a, &mut b);
    let Role::Listening(listener) = &a.role else {
        panic!("{a:?}")
    };
    let copies: Vec<_> = listener.descriptors().map(copy).collect();
    drop(a);
    until(|| !up(&mut b));
    let mut c = open(&name);
    for _ in 0..100 {
        assert!(!up(&mut b) & !up(&mut c), "nobody can listen there yet");
    }
    drop(copies);
    join(&mut b, &mut c);
}

/// Connects, forks a child that keeps every descriptor, says which, and waits to be killed.
#[test]
#[allow(unsafe_code, reason = "fork")]
fn zz_helper_fork() {
    let Some(name) = std::env::var("NTB_RING_TEST_FORK").ok() else {
        return;
    };
    let mut link = open(&name);
    until(|| {
        link.wait(Duration::from_millis(1));
        up(&mut link)
    });
    // SAFETY: the child calls nothing but sleep and _exit, which are async-signal-safe.
    let child = unsafe {
        match libc::fork() {
            0 => {
                libc::sleep(60);
                libc::_exit(0)
            }
            child => child,
        }
    };
    let line = ntb_mem::line::Line([child as u64; 8]);
    link.outbound().unwrap().put(0, &line);
    std::thread::sleep(2 * WATCHDOG);
}

#[test]
fn a_death_is_noticed_while_a_forked_child_keeps_the_socket_open() {
    let name = unique();
    let mut link = open(&name);
    link.poll().unwrap();
    let mut other = child("zz_helper_fork", &[("NTB_RING_TEST_FORK", &name)]);
    let mut grandchild = 0;
    until(|| {
        link.wait(Duration::from_millis(2));
        up(&mut link);
        grandchild = link.inbound().load(0, Ordering::Acquire);
        grandchild != 0
    });
    other.kill().unwrap();
    other.wait().unwrap();
    until(|| {
        link.wait(Duration::from_millis(2));
        !up(&mut link)
    });
    assert_eq!(link.poll().unwrap().losses, 1);
    let grandchild = rustix::process::Pid::from_raw(grandchild as i32).unwrap();
    // It was there all the time, and a peer that is restarted is taken in spite of it.
    rustix::process::test_kill_process(grandchild).unwrap();
    let mut next = open(&name);
    join(&mut link, &mut next);
    rustix::process::kill_process(grandchild, rustix::process::Signal::KILL).unwrap();
}

// ---- peers that do not keep to the rules ----

mod hostile;
