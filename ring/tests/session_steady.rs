//! A running session allocates nothing: beats, checks of the peer's table and silence watching come from what it holds.

#![allow(unsafe_code, reason = "a global allocator that counts")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use ntb_ring::{
    link::{
        LinkState, LinkStatus, Registers,
        engine::{Inbound, Order},
    },
    session::{Action, ChannelSpec, Inputs, Session, SessionConfig, SessionState},
};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is passed on to the system's allocator unchanged; the counter is a thread-local without destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promises are those of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above; the block came from there.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const LINES: u64 = 1024;

struct Side {
    session: Session,
    memory: Memory,
    registers: Registers,
    up: usize,
}

struct Memory(Vec<AtomicU64>);

impl Inbound for Memory {
    fn lines(&self) -> u64 {
        LINES
    }

    fn load(&self, index: usize, order: Ordering) -> u64 {
        self.0[index].load(order)
    }
}

fn side(name: &str, incarnation: u64) -> Side {
    let config = SessionConfig::new(name, incarnation, 1, Order::Ordered);
    let mut session = Session::new(config, LINES).unwrap();
    let spec = ChannelSpec {
        ring_lines: 64,
        check: false,
        smaller_if_different: false,
    };
    for channel in ["a", "b", "c"] {
        session.open(channel, spec).unwrap();
    }
    Side {
        session,
        memory: Memory((0..LINES * 8).map(|_| AtomicU64::new(0)).collect()),
        registers: [0; 8],
        up: 0,
    }
}

fn step(own: &mut Side, peer: &mut Side, now: Duration, actions: &mut Vec<Action>) {
    let inputs = Inputs {
        link: LinkStatus {
            state: LinkState::WindowsSet,
            losses: 0,
        },
        registers: own.registers,
        inbound: &own.memory,
        outbound_lines: Some(LINES),
    };
    own.session.step(now, &inputs, actions);
    for action in actions.drain(..) {
        match action {
            Action::WriteRegisters(registers) => peer.registers = registers,
            Action::Put { line, content } => {
                for (slot, word) in peer.memory.0[line as usize * 8..].iter().zip(content.0) {
                    slot.store(word, Ordering::Relaxed);
                }
            }
            Action::ChannelUp(..) => own.up += 1,
            _ => {}
        }
    }
}

#[test]
fn ten_minutes_of_a_running_link_allocate_nothing() {
    let (mut left, mut right) = (side("left", 1), side("right", 2));
    let mut actions = Vec::with_capacity(64);
    let mut now = Duration::ZERO;
    let mut run = |time: Duration| {
        let end = now + time;
        while now < end {
            step(&mut left, &mut right, now, &mut actions);
            step(&mut right, &mut left, now, &mut actions);
            now += left.session.next_wakeup(now).max(Duration::from_millis(1));
        }
        (left.session.state(), left.up, right.up)
    };
    assert_eq!(run(Duration::from_secs(1)), (SessionState::Running, 3, 3));
    let before = ALLOCATIONS.get();
    assert!(before > 0, "the counter counts");
    assert_eq!(run(Duration::from_secs(600)), (SessionState::Running, 3, 3));
    assert_eq!(ALLOCATIONS.get(), before);
}
