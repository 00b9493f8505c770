//! Two memories and the wires between them, over loom's atomics.
//!
//! A put goes into a delay queue; a wire thread takes it out at any later time and stores its words into the other
//! side's memory. The queue gives an order from the side that puts to the wire and none back, and the words are
//! stored as weakly as the engine promises: so a reader sees all that a real link may show it, and nothing that two
//! processes on a link could not have learnt from each other is known to either.
//!
//! - [`Order::Ordered`]: word 7 of a line with release, after its other words; what a barrier separates in that order,
//!   lines between two barriers in the order that [`Pick`] says.
//! - [`Order::Relaxed`]: every word on its own, in any order, barriers ignored; only two stores to the same word keep
//!   theirs.
//!
//! Words whose value does not change are not stored: nobody could tell, and the model checker has fewer cases to look at.

use std::sync::{Arc, Mutex};

use loom::sync::atomic::{
    AtomicU64, AtomicUsize, Ordering,
    Ordering::{Acquire, Relaxed, Release},
    fence,
};
use ntb_mem::line::{LINE_WORDS, Line};
use ntb_ring::{
    link::engine::{Inbound, Order, StoreEngine},
    queue::Lane,
    wire::page::{ARM, CREDIT, ECHO, PAGE_LINES, STARVED},
};

/// Words of the control page that mean something. All others stay zero and are nobody's.
const CONTROL: [(u64, usize); 9] = [
    (CREDIT, 0),
    (CREDIT, 1),
    (STARVED, 0),
    (STARVED, 1),
    (ARM, 0),
    (ARM, 1),
    (ECHO, 0),
    (ECHO, 1),
    (MAILBOX, 0),
];

/// A line of the control page that stands for the session's page: one word for hello one way and key the other.
pub(crate) const MAILBOX: u64 = PAGE_LINES - 1;

/// One side's inbound memory: a control page and a ring.
pub(crate) struct Memory {
    words: Vec<Option<AtomicU64>>,
    /// What each word holds, as the wire knows.
    held: Mutex<Vec<u64>>,
    /// Rings of the doorbell that have arrived.
    bell: AtomicUsize,
}

impl Memory {
    pub(crate) fn new(ring_lines: u64) -> Arc<Self> {
        let len = (PAGE_LINES + ring_lines) as usize * LINE_WORDS;
        let control = |i: usize| {
            CONTROL
                .iter()
                .any(|(line, word)| *line as usize * LINE_WORDS + word == i)
        };
        let ring = PAGE_LINES as usize * LINE_WORDS;
        Arc::new(Self {
            words: (0..len)
                .map(|i| (i >= ring || control(i)).then(|| AtomicU64::new(0)))
                .collect(),
            held: Mutex::new(vec![0; len]),
            bell: AtomicUsize::new(0),
        })
    }

    pub(crate) fn control(self: &Arc<Self>) -> Part {
        Part {
            memory: Arc::clone(self),
            first: 0,
            lines: PAGE_LINES,
        }
    }

    pub(crate) fn ring(self: &Arc<Self>) -> Part {
        let lines = (self.words.len() / LINE_WORDS) as u64 - PAGE_LINES;
        Part {
            memory: Arc::clone(self),
            first: PAGE_LINES as usize * LINE_WORDS,
            lines,
        }
    }

    /// True when the doorbell has been rung since it was last asked.
    pub(crate) fn rung(&self) -> bool {
        self.bell.swap(0, Acquire) > 0
    }

    fn holds(&self, index: usize) -> u64 {
        self.held.lock().unwrap()[index]
    }

    fn store(&self, index: usize, value: u64, order: Ordering) {
        if std::mem::replace(&mut self.held.lock().unwrap()[index], value) != value {
            self.words[index]
                .as_ref()
                .expect("a word that nobody reads")
                .store(value, order);
        }
    }
}

/// A part of a side's own memory, for it to read.
pub(crate) struct Part {
    memory: Arc<Memory>,
    first: usize,
    lines: u64,
}

impl Inbound for Part {
    fn lines(&self) -> u64 {
        self.lines
    }

    fn load(&self, index: usize, order: Ordering) -> u64 {
        assert!(index < self.lines as usize * LINE_WORDS);
        self.memory.words[self.first + index]
            .as_ref()
            .expect("a word that nobody writes")
            .load(order)
    }
}

#[derive(Clone, Copy)]
enum Item {
    Line(u64, Line),
    Barrier,
    Bell,
}

/// A delay queue: what one engine has put and the wire may not have delivered.
#[derive(Default)]
struct Queue {
    items: Mutex<Vec<Item>>,
    /// Items that may leave. The one object the two threads share in the model's eyes.
    pushed: AtomicUsize,
    /// Items that have been flushed: the rest may sit in a buffer for ever.
    flushed: Mutex<usize>,
}

impl Queue {
    fn push(&self, item: Item) {
        let mut items = self.items.lock().unwrap();
        items.push(item);
        let len = items.len();
        drop(items);
        self.pushed.store(len, Release);
    }
}

/// The end of a wire that puts. A clone puts into the same queue.
#[derive(Clone)]
pub(crate) struct Sender {
    queue: Arc<Queue>,
    order: Order,
    lines: u64,
}

impl Sender {
    /// Rings the other side, behind everything put before.
    pub(crate) fn ring(&mut self) {
        self.queue.push(Item::Bell);
        self.flush();
    }
}

impl StoreEngine for Sender {
    fn order(&self) -> Order {
        self.order
    }

    fn lines(&self) -> u64 {
        self.lines
    }

    fn put(&mut self, line: u64, content: &Line) {
        assert!(line < self.lines);
        self.queue.push(Item::Line(line, *content));
    }

    fn barrier(&mut self) {
        self.queue.items.lock().unwrap().push(Item::Barrier);
    }

    fn flush(&mut self) {
        *self.queue.flushed.lock().unwrap() = self.queue.items.lock().unwrap().len();
    }
}

/// Which of the lines between two barriers travels first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pick {
    First,
    Last,
}

/// The end of a wire that delivers.
pub(crate) struct Wire {
    queue: Arc<Queue>,
    memory: Arc<Memory>,
    order: Order,
    pick: Pick,
    taken: Vec<bool>,
    /// Items up to the last barrier that everything delivered from now on lies behind.
    passed: usize,
    by_word: bool,
    /// Words of a line that is on its way word by word, the next one last.
    rest: Vec<(usize, u64)>,
}

/// A wire into `memory`.
pub(crate) fn wire(memory: &Arc<Memory>, order: Order, pick: Pick) -> (Sender, Wire) {
    let queue = Arc::new(Queue::default());
    let lines = (memory.words.len() / LINE_WORDS) as u64;
    (
        Sender {
            queue: Arc::clone(&queue),
            order,
            lines,
        },
        Wire {
            queue,
            memory: Arc::clone(memory),
            order,
            pick,
            taken: Vec::new(),
            passed: 0,
            by_word: false,
            rest: Vec::new(),
        },
    )
}

impl Wire {
    /// Delivers one item, if one is on the way.
    pub(crate) fn step(&mut self) -> bool {
        let limit = self.queue.pushed.load(Acquire);
        self.deliver(limit)
    }

    /// Delivers up to `steps` items, one after the other.
    pub(crate) fn steps(mut self, steps: usize) -> Self {
        for _ in 0..steps {
            self.step();
        }
        self
    }

    /// Lets each word of a line arrive on its own: for wires that the reading thread drives.
    pub(crate) fn by_word(mut self) -> Self {
        self.by_word = true;
        self
    }

    /// Delivers all that has been flushed; for when the threads have been joined.
    pub(crate) fn settle(&mut self) {
        let limit = *self.queue.flushed.lock().unwrap();
        while self.deliver(limit) {}
    }

    fn deliver(&mut self, limit: usize) -> bool {
        if let Some((index, word)) = self.rest.pop() {
            self.memory.store(index, word, Relaxed);
            return true;
        }
        let items: Vec<Item> = self.queue.items.lock().unwrap()[..limit].to_vec();
        self.taken.resize(self.taken.len().max(items.len()), false);
        // Barriers whose group has been delivered are passed.
        while self.passed < items.len() {
            match items[self.passed] {
                Item::Barrier if self.order == Order::Ordered => fence(Release),
                Item::Barrier => {}
                _ if self.taken[self.passed] => {}
                _ => break,
            }
            self.passed += 1;
        }
        let group = (self.passed..items.len()).take_while(|i| !matches!(items[*i], Item::Barrier));
        let mut open: Vec<usize> = group.filter(|i| !self.taken[*i]).collect();
        if self.pick == Pick::Last {
            // A bell rings behind what was put before; stores to the same line keep their order.
            if let Some(bell) = open.iter().position(|i| matches!(items[*i], Item::Bell)) {
                open.truncate(bell.max(1));
            }
            open.reverse();
        }
        let Some(mut at) = open.first().copied() else {
            return false;
        };
        if let Item::Line(line, _) = items[at] {
            at = *open
                .iter()
                .filter(|i| matches!(items[**i], Item::Line(l, _) if l == line))
                .min()
                .unwrap_or(&at);
        }
        self.taken[at] = true;
        match items[at] {
            Item::Line(line, content) => {
                let base = line as usize * LINE_WORDS;
                if self.by_word {
                    let words = (base..).zip(content.0);
                    self.rest = words.filter(|(i, word)| self.memory.holds(*i) != *word).collect();
                    if self.pick == Pick::First {
                        self.rest.reverse();
                    }
                    return self.deliver(limit);
                }
                for (i, word) in content.0.into_iter().enumerate() {
                    let last = i == LINE_WORDS - 1 && self.order == Order::Ordered;
                    self.memory
                        .store(base + i, word, if last { Release } else { Relaxed });
                }
            }
            Item::Bell => {
                self.memory.bell.fetch_add(1, Release);
            }
            Item::Barrier => {}
        }
        true
    }
}

/// Names the parts of a lane whose memories start at line 0.
pub(crate) fn lane(
    ring_lines: u64,
    to_consumer: ntb_ring::wire::mark::LaneKey,
    to_producer: ntb_ring::wire::mark::LaneKey,
) -> Lane {
    Lane {
        ring_lines,
        consumer_base: 0,
        producer_base: 0,
        to_consumer,
        to_producer,
        first_seq: 0,
    }
}
