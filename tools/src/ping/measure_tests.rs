use super::*;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;

/// A far end under a fake clock: it serves one message after the other, and sleeps when `asleep` says so.
struct Fake {
    now: u64,
    service_ns: u64,
    /// When it goes on, if it sleeps at this time.
    asleep: fn(u64) -> Option<u64>,
    /// Sender cannot send at this time.
    full: fn(u64) -> bool,
    replies: VecDeque<(u64, Vec<u8>)>,
    free: u64,
    /// What becomes of reply number n.
    fate: fn(u64) -> Fate,
    served: u64,
    looks: u64,
    stop_after: u64,
    down_at: Option<u64>,
}

#[derive(Clone, Copy)]
enum Fate {
    Good,
    Lost,
    Twice,
    Spoilt,
}

impl Fake {
    fn new(service_ns: u64) -> Self {
        Self {
            now: 5 * SECOND,
            service_ns,
            asleep: |_| None,
            full: |_| false,
            replies: VecDeque::new(),
            free: 0,
            fate: |_| Fate::Good,
            served: 0,
            looks: 0,
            stop_after: u64::MAX,
            down_at: None,
        }
    }
}

impl Port for Fake {
    fn try_send(&mut self, message: &[u8]) -> Result<(), Hold> {
        if self.down_at.is_some_and(|t| self.now >= t) {
            self.down_at = None;
            self.replies.clear();
            return Err(Hold::Down);
        }
        if (self.full)(self.now) {
            return Err(Hold::NotNow);
        }
        let mut start = self.now.max(self.free);
        if let Some(awake) = (self.asleep)(start) {
            start = awake;
        }
        self.free = start + self.service_ns;
        let mut reply = message.to_vec();
        let copies = match (self.fate)(self.served) {
            Fate::Good => 1,
            Fate::Lost => 0,
            Fate::Twice => 2,
            Fate::Spoilt => {
                *reply.last_mut().unwrap() ^= 1;
                1
            }
        };
        self.served += 1;
        for _ in 0..copies {
            self.replies.push_back((self.free, reply.clone()));
        }
        Ok(())
    }

    fn try_recv(&mut self, into: &mut [u8]) -> Result<usize, Hold> {
        match self.replies.front() {
            Some((at, _)) if *at <= self.now => {
                let (_, reply) = self.replies.pop_front().unwrap();
                into[..reply.len()].copy_from_slice(&reply);
                Ok(reply.len())
            }
            _ => Err(Hold::NotNow),
        }
    }

    fn ns(&mut self) -> u64 {
        self.now += 10;
        self.now
    }

    fn idle(&mut self, _polls: u64, until: u64) {
        // Straight to the next thing that happens, but not past a tenth of a millisecond.
        let reply = self.replies.front().map_or(u64::MAX, |(at, _)| *at);
        let next = reply.min(until).min(self.now + MS / 10);
        self.now = self.now.max(next);
    }

    fn look(&mut self, _: Progress) -> bool {
        self.looks += 1;
        self.looks < self.stop_after
    }
}

fn plan(rate_hz: Option<f64>, count: u64) -> Plan {
    Plan {
        size: 48,
        count: Some(count),
        duration_ns: None,
        rate_hz,
        kind: Kind::Echo,
        stall_ns: 2 * SECOND,
    }
}

fn near(value: u64, wanted: f64, within: f64) {
    let off = (value as f64 / wanted - 1.0).abs();
    assert!(off <= within, "{value}, wanted {wanted} within {within}");
}

/// A far end that sleeps 10 ms once a second delays one message in a hundred by 0 to 10 ms.
#[test]
fn a_stalling_peer_shows_in_the_tail() {
    let mut fake = Fake::new(50);
    fake.asleep = |t| (t % SECOND < 10 * MS).then_some(t - t % SECOND + 10 * MS);
    let mut run = Run::new(plan(Some(100_000.0), 2_000_000), 0);
    assert_eq!(run.drive(&mut fake), Ended::Done);
    assert_eq!(run.response.count(), 2_000_000);
    near(run.response.quantile(0.995), 5e6, 0.1);
    near(run.response.quantile(0.999), 9e6, 0.1);
    assert!(
        run.response.quantile(0.98) < 10_000,
        "{}",
        run.response.quantile(0.98)
    );
    assert_eq!((run.unsent, run.check().received), (0, 2_000_000));
}

/// One stall of 10 ms at an interval of 1 ms: each message is counted once, none is added.
#[test]
fn nothing_is_corrected_twice() {
    let stall = |t: u64| (5 * SECOND + 100 * MS..5 * SECOND + 110 * MS).contains(&t);
    for by_sender in [false, true] {
        let mut fake = Fake::new(1000);
        if by_sender {
            fake.full = stall;
        } else {
            fake.asleep = |t| {
                (5 * SECOND + 100 * MS..5 * SECOND + 110 * MS)
                    .contains(&t)
                    .then_some(5 * SECOND + 110 * MS)
            };
        }
        let mut run = Run::new(plan(Some(1000.0), 1000), 0);
        assert_eq!(run.drive(&mut fake), Ended::Done);
        assert_eq!(
            (run.sent(), run.response.count(), run.service.count()),
            (1000, 1000, 1000)
        );
        // Nine or ten messages wait 1, 2, ... 10 ms; all others about a microsecond.
        let mut calculated = Latencies::default();
        (0..990).for_each(|_| calculated.record(1000));
        (1..=10).for_each(|n| calculated.record(n * MS));
        near(
            run.response.quantile(0.985),
            calculated.quantile(0.985) as f64,
            0.15,
        );
        for q in [
            0.9915, 0.9925, 0.9935, 0.9945, 0.9955, 0.9965, 0.9975, 0.9985, 0.9995,
        ] {
            near(run.response.quantile(q), calculated.quantile(q) as f64, 0.02);
        }
        // The service time knows nothing of a sender that could not send.
        let worst = run.service.percentiles().max.unwrap();
        if by_sender {
            assert!(worst < MS / 10, "{worst}");
        } else {
            near(worst, 10e6, 0.02);
        }
    }
}

#[test]
fn back_to_back_counts_from_the_sending() {
    let mut fake = Fake::new(700);
    let mut run = Run::new(plan(None, 5000), u64::MAX - 100);
    assert_eq!(run.drive(&mut fake), Ended::Done);
    assert_eq!(
        (run.sent(), run.response.count(), run.service.count()),
        (5000, 5000, 0)
    );
    near(run.response.quantile(0.5), 710.0, 0.05);
    assert_eq!(run.check().received, 5000);
}

#[test]
fn small_messages_are_matched_by_order() {
    for size in [1, 7, 23] {
        for rate_hz in [None, Some(10_000.0)] {
            let mut run = Run::new(
                Plan {
                    size,
                    ..plan(rate_hz, 500)
                },
                3,
            );
            assert_eq!(run.drive(&mut Fake::new(700)), Ended::Done);
            assert_eq!((run.response.count(), run.corrupt), (500, 0));
        }
    }
}

#[test]
fn loss_duplicates_and_spoilt_bytes_are_counted() {
    let mut fake = Fake::new(100);
    fake.fate = |n| match n {
        10 => Fate::Lost,
        20 => Fate::Twice,
        30 => Fate::Spoilt,
        _ => Fate::Good,
    };
    let mut run = Run::new(plan(Some(100_000.0), 1000), 0);
    assert_eq!(run.drive(&mut fake), Ended::Done);
    assert_eq!(run.sent() - run.check().received, 2);
    assert_eq!((run.check().duplicated, run.corrupt), (1, 1));
    assert_eq!(run.response.count(), 998);
}

#[test]
fn a_reply_that_never_comes_ends_the_run() {
    for rate_hz in [None, Some(1000.0)] {
        let mut fake = Fake::new(100);
        fake.fate = |n| if n >= 100 { Fate::Lost } else { Fate::Good };
        let mut run = Run::new(plan(rate_hz, 5000), 0);
        let Ended::Stalled { awaited, waited_ns } = run.drive(&mut fake) else {
            panic!("it went on");
        };
        assert_eq!(awaited, Awaited::Reply);
        assert!(waited_ns >= 2 * SECOND);
        assert_eq!(run.check().received, 100);
        assert!(fake.looks > 100, "nobody could have stopped it");
    }
}

#[test]
fn a_ring_that_stays_full_ends_the_run() {
    let mut fake = Fake::new(100);
    fake.full = |t| t > 5 * SECOND + MS / 10;
    fake.fate = |_| Fate::Lost;
    let mut run = Run::new(
        Plan {
            kind: Kind::Stream,
            ..plan(None, 1_000_000)
        },
        0,
    );
    let Ended::Stalled { awaited, .. } = run.drive(&mut fake) else {
        panic!("it went on");
    };
    assert_eq!(awaited, Awaited::Room);
}

#[test]
fn a_ring_that_is_full_from_the_start_ends_a_paced_run() {
    let mut fake = Fake::new(100);
    fake.full = |_| true;
    let Ended::Stalled { awaited, .. } = Run::new(plan(Some(1000.0), 10), 0).drive(&mut fake) else {
        panic!("it went on");
    };
    assert_eq!(awaited, Awaited::Room);
}

#[test]
fn it_can_be_stopped_and_it_ends_on_time() {
    let endless = Plan {
        count: None,
        ..plan(Some(1000.0), 0)
    };
    let mut fake = Fake::new(100);
    fake.stop_after = 5;
    assert_eq!(Run::new(endless, 0).drive(&mut fake), Ended::Stopped);

    // What is under way when it is stopped is no loss.
    let mut fake = Fake::new(100);
    fake.asleep = |t| (t > 5 * SECOND + 20 * MS && t < 5 * SECOND + 90 * MS).then_some(5 * SECOND + 90 * MS);
    fake.stop_after = 7;
    let mut run = Run::new(endless, 0);
    assert_eq!(run.drive(&mut fake), Ended::Stopped);
    assert!(run.check().received < run.sent());
    let under_way = run.sent() - run.check().received;
    assert_eq!((run.under_way(SECOND), run.under_way(0)), (under_way, 0));
    run.drain(&mut fake, SECOND);
    assert_eq!(run.unanswered(), 0);
    assert_eq!(run.check().received, run.sent());
    assert_eq!(run.response.count(), run.sent());

    for rate_hz in [None, Some(1000.0)] {
        let timed = Plan {
            rate_hz,
            duration_ns: Some(SECOND),
            ..endless
        };
        let mut run = Run::new(timed, 0);
        assert_eq!(run.drive(&mut Fake::new(100)), Ended::Done);
        near(run.elapsed_ns(), 1e9, 0.01);
        if rate_hz.is_some() {
            assert_eq!((run.sent(), run.unsent), (1000, 0));
        }
    }
}

#[test]
fn a_rate_out_of_reach_is_told() {
    let mut fake = Fake::new(100);
    let mut run = Run::new(
        Plan {
            count: None,
            duration_ns: Some(10 * MS),
            ..plan(Some(1e8), 0)
        },
        0,
    );
    assert_eq!(run.drive(&mut fake), Ended::Done);
    assert!(run.sent() < 1_000_000);
    assert_eq!(run.sent() + run.unsent, 1_000_000);
}

#[test]
fn a_run_goes_on_after_the_channel_was_down() {
    for rate_hz in [None, Some(10_000.0)] {
        let mut fake = Fake::new(100);
        fake.down_at = Some(5 * SECOND + MS);
        let mut run = Run::new(plan(rate_hz, 2000), 0);
        if rate_hz.is_none() {
            fake.down_at = Some(5 * SECOND + MS / 10);
        }
        assert_eq!(run.drive(&mut fake), Ended::Down);
        fake.now += 10 * MS;
        assert_eq!(run.drive(&mut fake), Ended::Done);
        assert_eq!(run.sent(), 2000);
        if rate_hz.is_some() {
            near(run.response.percentiles().max.unwrap(), 10e6, 0.02);
        }
    }
}

#[test]
fn streams_are_sent_and_not_answered() {
    for rate_hz in [None, Some(100_000.0)] {
        let mut fake = Fake::new(0);
        fake.fate = |_| Fate::Lost;
        let mut run = Run::new(
            Plan {
                kind: Kind::Stream,
                ..plan(rate_hz, 10_000)
            },
            0,
        );
        assert_eq!(run.drive(&mut fake), Ended::Done);
        assert_eq!(fake.served, 10_000);
        if rate_hz.is_some() {
            near(run.elapsed_ns(), 1e8, 0.01);
        }
    }
}
