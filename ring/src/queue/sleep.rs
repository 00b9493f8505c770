//! Sleeping without losing a wake-up, on a link where no fence orders one side's "about to sleep" against the other
//! side's "sent".
//!
//! The consumer posts an *arm* that carries what it has consumed, and sleeps only once the arm is echoed with the
//! same count sent. From the echo on, the producer's service thread rings as soon as more has been sent than the arm
//! says. Whichever way arm, echo and messages are delayed, one of two things holds: the echo shows more sent than
//! consumed, and the consumer does not sleep; or what is sent later is seen by the thread that echoed, which rings.

use std::sync::atomic::Ordering::Acquire;

use ntb_mem::{
    line::{LINE_WORDS, Line},
    sync::{Arc, Counter},
};

use super::Lane;
use crate::{
    link::engine::{Inbound, StoreEngine},
    wire::{mark::widen48, page},
};

/// What the producer's side has said to the last arm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Nothing yet: do not sleep.
    None,
    /// Nothing has been sent that is not consumed: sleep, a ring will come.
    Sleep,
    /// More is on its way: go on polling.
    Poll,
}

/// The producer side's answer to arms. Driven by the service thread, never by the data path.
pub struct Alarm<E, I> {
    engine: E,
    control: I,
    lane: Lane,
    sent: Arc<Counter>,
    answered: Option<u64>,
    /// Consumed count of an arm that waits for its ring.
    waiting: Option<u64>,
}

impl<E, I> std::fmt::Debug for Alarm<E, I> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Alarm")
            .field("answered", &self.answered)
            .field("waiting", &self.waiting)
            .finish()
    }
}

impl<E: StoreEngine, I: Inbound> Alarm<E, I> {
    /// The alarm of `lane`: `control` is the producer side's own control page, `sent` its producer's counter.
    pub fn new(engine: E, control: I, lane: Lane, sent: Arc<Counter>) -> Self {
        Self {
            engine,
            control,
            lane,
            sent,
            answered: None,
            waiting: None,
        }
    }

    /// Answers a new arm, and says whether the consumer is to be rung now.
    ///
    /// To be called again and again, often while [`Alarm::is_waiting`]: the time between two calls is the delay of a
    /// wake-up.
    pub fn poll(&mut self) -> bool {
        let at = page::ARM as usize * LINE_WORDS;
        let key = self.lane.to_producer;
        if let Some(number) = key.open(self.control.load(at, Acquire))
            && self.answered != Some(number)
            && let Some(consumed) = key.open(self.control.load(at + 1, Acquire))
        {
            self.answered = Some(number);
            let sent = self.sent.load(Acquire);
            self.waiting = Some(widen48(consumed, sent));
            let key = self.lane.to_consumer;
            let mut content = Line::ZERO;
            content.0[0] = key.seal(number);
            content.0[1] = key.seal(sent);
            self.engine.put(self.lane.consumer_base + page::ECHO, &content);
            self.engine.flush();
        }
        match self.waiting {
            Some(consumed) if self.sent.load(Acquire) != consumed => {
                self.waiting = None;
                true
            }
            _ => false,
        }
    }

    /// True while a consumer may be asleep.
    pub fn is_waiting(&self) -> bool {
        self.waiting.is_some()
    }
}
