//! The service of one link: handshakes, heartbeats, wake-ups, reconnects. The data path never needs it.

use std::{
    sync::mpsc,
    time::{Duration, Instant},
};

use ntb_mem::{
    line::Line,
    region::View,
    sync::{Arc, AtomicBool, Counter, Ordering},
};

use super::{
    ConnectError, Options,
    device::{Parts, SENDING},
    memory::Memory,
    shared::{Common, Shared, lock},
};
use crate::{
    link::{
        Link, LinkEvent, LinkKind, LinkState, LinkStatus,
        engine::{Engine, StoreEngine},
    },
    queue::{Alarm, Consumer, Producer},
    session::{
        Action, ChannelId, ChannelSpec, CloseReason, Event, Inputs, Lanes, OpenError, Place, Session,
        SessionConfig, SessionState,
    },
    wire::page::{self, PAGE_LINES},
};

/// Events kept for an application that does not ask.
const EVENTS_KEPT: usize = 1024;
/// How often arms are looked at while a reader of the peer may be asleep: the delay of a wake-up.
const ALARM_INTERVAL: Duration = Duration::from_micros(50);

/// Beats after which progress is posted even if nothing has changed, in case it did not get through.
const REPOST_BEATS: u32 = 16;

/// What the service of a link has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceStats {
    /// The transport in use.
    pub transport: Option<LinkKind>,
    /// Times the link was lost.
    pub losses: u64,
    /// Incarnations of the peer that channels have worked with.
    pub incarnations: u64,
    /// Sleeping readers of the peer that were rung.
    pub rings: u64,
    /// Events dropped because nobody asked for them.
    pub events_dropped: u64,
}

/// What connections ask of their service.
pub(super) enum Command {
    Open {
        name: String,
        spec: ChannelSpec,
        place: Place,
        answer: mpsc::Sender<Result<Arc<Shared>, OpenError>>,
    },
    Shutdown,
}

/// Serves one link: made by [`super::Connection::with_driver`].
#[derive(Debug)]
pub struct Driver {
    link: Box<dyn Link>,
    session: Session,
    common: Arc<Common>,
    commands: mpsc::Receiver<Command>,
    start: Instant,
    inbound: Memory,
    status: LinkStatus,
    engine: Option<Engine>,
    channels: Vec<Channel>,
    actions: Vec<Action>,
    progress_interval: Duration,
    next_progress: Instant,
    beats: u32,
    peer_incarnation: Option<u64>,
    ended: bool,
}

/// A channel as its service sees it.
#[derive(Debug)]
struct Channel {
    shared: Arc<Shared>,
    live: Option<Live>,
    /// Epoch at which the last life ended, while its reader may still be giving it out.
    draining: Option<u64>,
}

#[derive(Debug)]
struct Live {
    lanes: Lanes,
    alarm: Alarm<Engine, View>,
    consumed: Arc<Counter>,
    sent: Arc<Counter>,
    /// Both counts as last posted.
    reported: (u64, u64),
}

impl Channel {
    /// The ring may be written for the next life from now on (R1).
    fn end_drain(&mut self) {
        if let Some(epoch) = self.draining.take() {
            self.shared.reset.store(epoch + 1, Ordering::Release);
        }
    }
}

impl Driver {
    pub(super) fn new(
        link: Box<dyn Link>,
        options: &Options,
        common: Arc<Common>,
        commands: mpsc::Receiver<Command>,
    ) -> Result<Self, ConnectError> {
        let inbound = Memory::of(&*link);
        let facts = link.facts();
        {
            let mut status = lock(&common.status);
            status.stats.transport = Some(facts.kind);
            status.events.push_back(Event::Device(LinkEvent::Transport {
                name: "transport",
                why: format!("{} at {}", facts.kind.name(), facts.address),
            }));
        }
        let mut config = SessionConfig::new(&options.node, random(), random(), link.order());
        config.beat_interval = options.beat_interval;
        config.silent_after = options.silent_after;
        config.gone_after = options.gone_after;
        config.drain_timeout = options.drain_timeout;
        let (own, exported) = inbound.lines();
        let session = Session::with_export(config, own, exported).map_err(|e| ConnectError::LinkFailed {
            name: "bad-window",
            exit: 2,
            what: e.to_string(),
        })?;
        Ok(Self {
            session,
            inbound,
            link,
            common,
            commands,
            start: Instant::now(),
            status: LinkStatus {
                state: LinkState::CableDown,
                losses: 0,
            },
            engine: None,
            channels: Vec::new(),
            actions: Vec::with_capacity(64),
            progress_interval: options.beat_interval,
            next_progress: Instant::now(),
            beats: 0,
            peer_incarnation: None,
            ended: false,
        })
    }

    /// Serves until the connection is dropped or the link fails for good.
    pub(super) fn run(&mut self) {
        while let Some(pause) = self.poll() {
            self.link.wait(pause);
        }
    }

    /// Does all that is due, without sleeping. Returns how long nothing will be due if nothing happens; `None` once the
    /// connection has been dropped or the link has failed.
    pub fn poll(&mut self) -> Option<Duration> {
        if self.ended {
            return None;
        }
        self.take_commands();
        if self.ended {
            return None;
        }
        match self.link.poll() {
            Ok(status) => {
                if status.losses != self.status.losses {
                    self.engine = None; // it leads to the memory of a peer that has gone, perhaps replaced already
                }
                self.status = status;
            }
            Err(e) => {
                self.fail(ConnectError::LinkFailed {
                    name: e.name,
                    exit: e.exit,
                    what: e.what,
                });
                return None;
            }
        }
        while let Some(event) = self.link.next_event() {
            self.publish(Event::Device(event));
        }
        self.look_after_channels();
        self.step();
        let busy = self.ring_sleepers();
        self.post_progress();
        let mut pause = self.session.next_wakeup(self.start.elapsed());
        if busy {
            pause = pause.min(ALARM_INTERVAL);
        }
        Some(pause.min(Duration::from_millis(100)))
    }

    fn take_commands(&mut self) {
        loop {
            match self.commands.try_recv() {
                Ok(Command::Open {
                    name,
                    spec,
                    place,
                    answer,
                }) => {
                    let result = self.session.open_at(&name, spec, place).map(|id| {
                        let shared = Arc::new(Shared::new(id, Arc::clone(&self.common)));
                        self.channels.push(Channel {
                            shared: Arc::clone(&shared),
                            live: None,
                            draining: None,
                        });
                        shared
                    });
                    let _ = answer.send(result); // who asked may have gone
                }
                Ok(Command::Shutdown) | Err(mpsc::TryRecvError::Disconnected) => {
                    self.shutdown();
                    return;
                }
                Err(mpsc::TryRecvError::Empty) => return,
            }
        }
    }

    fn step(&mut self) {
        let outbound_lines = match self.status.state {
            LinkState::WindowsSet => {
                if self.engine.is_none() {
                    self.engine = self.link.outbound();
                }
                self.engine.as_ref().map(StoreEngine::lines)
            }
            _ => {
                self.engine = None;
                None
            }
        };
        let inputs = Inputs {
            link: self.status,
            registers: self.link.registers(),
            inbound: &self.inbound,
            outbound_lines,
        };
        let mut actions = std::mem::take(&mut self.actions);
        self.session.step(self.start.elapsed(), &inputs, &mut actions);
        self.carry_out(&mut actions);
        self.actions = actions;
    }

    fn carry_out(&mut self, actions: &mut Vec<Action>) {
        let mut unflushed = false;
        for action in actions.drain(..) {
            if unflushed && !matches!(action, Action::Put { .. }) {
                self.flush();
                unflushed = false;
            }
            match action {
                Action::WriteRegisters(registers) => self.link.write_registers(&registers),
                Action::Put { line, content } => {
                    if let Some(engine) = &mut self.engine
                        && line < engine.lines()
                    {
                        engine.put(line, &content);
                        unflushed = true;
                    }
                }
                Action::Ring => self.link.ring(0),
                Action::ChannelUp(id, lanes) => self.channel_up(id, &lanes),
                Action::ChannelDown(id, reason) => self.channel_down(id, reason),
                Action::DrainEnded(id) => {
                    if let Some(channel) = self.channel(id) {
                        channel.end_drain();
                    }
                }
                Action::Event(event) => self.publish(event),
            }
        }
        if unflushed {
            self.flush();
        }
        let state = self.session.state();
        let mut status = lock(&self.common.status);
        if status.state != state {
            status.state = state;
            self.common.changed.notify_all();
        }
        status.stats.losses = self.status.losses;
    }

    fn flush(&mut self) {
        if let Some(engine) = &mut self.engine {
            engine.flush();
        }
    }

    fn channel(&mut self, id: ChannelId) -> Option<&mut Channel> {
        self.channels.iter_mut().find(|c| c.shared.id == id)
    }

    fn channel_up(&mut self, id: ChannelId, lanes: &Lanes) {
        let engine = |link: &dyn Link| link.outbound();
        let (Some(tx_engine), Some(rx_engine), Some(alarm_engine)) =
            (engine(&*self.link), engine(&*self.link), engine(&*self.link))
        else {
            return; // lost in this very moment: the next step says so
        };
        let lines = lanes.receive.ring_lines;
        let Some(own) = self.inbound.channel(lanes.inbound_base, lines) else {
            return; // the session allocates inside the window
        };
        let (Some(control), Some(ring)) = (own.part(0, PAGE_LINES), own.part(PAGE_LINES, lines)) else {
            return; // the session allocates inside the window
        };
        let tx = Producer::new(tx_engine, control.clone(), lanes.transmit, lanes.transmit_order);
        let rx = Consumer::new(
            rx_engine,
            control.clone(),
            ring,
            lanes.receive,
            lanes.receive_order,
        );
        let live = Live {
            lanes: *lanes,
            alarm: Alarm::new(alarm_engine, control, lanes.transmit, tx.sent_counter()),
            consumed: rx.consumed_counter(),
            sent: tx.sent_counter(),
            reported: (lanes.receive.first_seq, lanes.transmit.first_seq),
        };
        let doorbell = self.link.doorbell(lanes.own_doorbell);
        let pump = self.link.pump();
        let peer = lock(&self.common.status).peer.clone();
        let Some(channel) = self.channel(id) else { return };
        channel.live = Some(live);
        channel.draining = None;
        channel.shared.corrupt.store(false, Ordering::Relaxed); // what an earlier life left behind
        channel.shared.change(|life| {
            life.up = true;
            life.untold |= life.rx.is_some();
            life.tx = Some(tx);
            life.rx = Some(rx);
            life.doorbell = Some(doorbell);
            life.pump = pump;
            life.parts = Some(Parts { lanes: *lanes, own });
            if let Some(peer) = peer {
                life.peer = peer;
            }
        });
    }

    fn channel_down(&mut self, id: ChannelId, reason: CloseReason) {
        let Some(channel) = self.channel(id) else { return };
        channel.live = None;
        channel.shared.change(|life| {
            life.up = false;
            life.ended = Some(reason);
            life.tx = None;
        });
        channel.draining = Some(channel.shared.epoch.load(Ordering::Relaxed));
    }

    /// Notices what the ends have left behind: drained lives, corrupt data, arms, their own end.
    fn look_after_channels(&mut self) {
        let mut ring_peer = false;
        for channel in &mut self.channels {
            let shared = &channel.shared;
            if let Some(epoch) = channel.draining
                && (shared.drained.load(Ordering::Acquire) >= epoch
                    || !shared.has_reader.load(Ordering::Acquire))
            {
                self.session.reader_drained(shared.id);
                channel.end_drain();
            }
            let shared = &channel.shared;
            self.session
                .hold(shared.id, shared.device.load(Ordering::Acquire) != 0);
            if taken(&shared.corrupt) {
                self.session.corrupt(shared.id);
            }
            ring_peer |= taken(&shared.armed);
        }
        if ring_peer {
            self.link.ring(0);
        }
        let session = &mut self.session;
        self.channels.retain(|channel| {
            let alive = channel.shared.ends.load(Ordering::Acquire) > 0;
            if !alive {
                session.close(channel.shared.id);
            }
            alive
        });
    }

    /// Answers arms and rings sleepers. True while a reader of the peer may be asleep.
    fn ring_sleepers(&mut self) -> bool {
        let mut busy = false;
        let mut rings = 0;
        for live in self.channels.iter_mut().filter_map(|c| c.live.as_mut()) {
            if live.alarm.poll() {
                self.link.ring(live.lanes.peer_doorbell);
                rings += 1;
            }
            busy |= live.alarm.is_waiting();
        }
        if rings > 0 {
            lock(&self.common.status).stats.rings += rings;
        }
        busy
    }

    /// Posts how far each reader of this side has come and how much each sender has sent: at every beat where
    /// that has changed, and now and then in any case.
    fn post_progress(&mut self) {
        let now = Instant::now();
        if now < self.next_progress || self.session.state() != SessionState::Running {
            return;
        }
        self.next_progress = now + self.progress_interval;
        self.beats = self.beats.wrapping_add(1);
        let again = self.beats.is_multiple_of(REPOST_BEATS);
        let Some(engine) = &mut self.engine else { return };
        for channel in &mut self.channels {
            let Some(live) = &mut channel.live else { continue };
            let Lanes {
                transmit, receive, ..
            } = &live.lanes;
            let consumed = live.consumed.load(Ordering::Relaxed);
            let sent = live.sent.load(Ordering::Acquire);
            // While a device sends, that is what it may come to at most: a reader would miss what was never sent.
            let sent = match channel.shared.device.load(Ordering::Acquire) & SENDING {
                0 => sent,
                _ => live.reported.1,
            };
            if again || live.reported != (consumed, sent) {
                live.reported = (consumed, sent);
                let mut content = Line::ZERO;
                content.0[0] = receive.to_producer.seal(consumed);
                engine.put(receive.producer_base + page::PROGRESS, &content);
                content.0[0] = transmit.to_consumer.seal(sent);
                engine.put(transmit.consumer_base + page::SENT, &content);
                engine.flush();
            }
        }
    }

    fn publish(&mut self, event: Event) {
        let mut status = lock(&self.common.status);
        match &event {
            Event::Running(peer) => {
                status.peer = Some(Arc::new(peer.clone()));
                status.refused = None;
                if self.peer_incarnation != Some(peer.incarnation) {
                    self.peer_incarnation = Some(peer.incarnation);
                    status.stats.incarnations += 1;
                }
            }
            Event::Refused(differs) => {
                let list: Vec<String> = differs.iter().map(ToString::to_string).collect();
                status.refused = Some(list.join("; "));
            }
            _ => {}
        }
        if status.events.len() == EVENTS_KEPT {
            status.events.pop_front();
            status.events_dropped += 1;
            status.stats.events_dropped += 1;
        }
        status.events.push_back(event);
        self.common.changed.notify_all();
    }

    fn shutdown(&mut self) {
        let mut actions = std::mem::take(&mut self.actions);
        self.session.shutdown(&mut actions);
        self.carry_out(&mut actions);
        self.end_channels();
        self.ended = true;
    }

    fn fail(&mut self, error: ConnectError) {
        lock(&self.common.status).failed = Some(error);
        self.common.changed.notify_all();
        self.end_channels();
        self.ended = true;
    }

    fn end_channels(&mut self) {
        for channel in self.channels.drain(..) {
            if channel.live.is_some() {
                channel.shared.change(|life| {
                    life.up = false;
                    life.ended = Some(CloseReason::ClosedByUs);
                    life.tx = None;
                });
            }
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if !self.ended {
            self.shutdown();
        }
    }
}

/// Takes a flag. Looks first: the line it lies on is read by the data path, and an exchange would take it away there.
fn taken(flag: &AtomicBool) -> bool {
    flag.load(Ordering::Relaxed) && flag.swap(false, Ordering::AcqRel)
}

/// A random number for incarnations and seeds.
fn random() -> u64 {
    let mut bytes = [0; 8];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(8) => u64::from_ne_bytes(bytes),
        // Without a random source, time and process id still tell two starts apart.
        _ => {
            let now = std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .unwrap_or_default();
            (now.as_nanos() as u64) ^ u64::from(std::process::id()).rotate_left(40)
        }
    }
}
