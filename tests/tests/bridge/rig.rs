//! An emulator in this process and a link at each of its ends.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use ntb::address::PortAddress;
use ntb_emu::{
    Control, EmuConfig, Emulator, Report,
    model::{Action, SideId, family},
    server::Endpoint,
};
use ntb_ring::link::{
    Link, LinkError, LinkState, LinkStatus,
    conformance::{Rig, WATCHDOG},
    ntb::{NtbLink, NtbOptions},
};

/// Bytes of each emulated window.
pub(crate) const WINDOW: u64 = 1 << 16;

static NEXT: AtomicU64 = AtomicU64::new(0);

/// An emulated pair of bridges and the addresses of its ends.
pub(crate) struct Bridges {
    /// `None` only while it is restarted.
    emulator: Option<Emulator>,
    family: &'static str,
    names: [String; 2],
    pub(crate) addresses: [PortAddress; 2],
}

fn start(name: &str, sockets: &[String; 2]) -> Emulator {
    let [a, b] = sockets.clone().map(Endpoint::Abstract);
    let mut config = EmuConfig::new(family(name).unwrap(), a, b);
    config.pair.window_bytes = WINDOW;
    Emulator::start(config).unwrap()
}

impl Bridges {
    pub(crate) fn new(family: &'static str) -> Self {
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let names = ["a", "b"].map(|side| format!("ntb-link-test-{}-{n}-{side}", std::process::id()));
        Self {
            emulator: Some(start(family, &names)),
            family,
            addresses: names.clone().map(|n| format!("emu:@{n}").parse().unwrap()),
            names,
        }
    }

    pub(crate) fn control(&self) -> Control<'_> {
        self.emulator.as_ref().expect("it is running").control()
    }

    pub(crate) fn try_open(&self, side: usize, options: &NtbOptions) -> Result<NtbLink, LinkError> {
        NtbLink::open(&self.addresses[side], options)
    }

    pub(crate) fn open(&self, side: usize) -> NtbLink {
        self.try_open(side, &NtbOptions::default()).unwrap()
    }

    /// Ends the emulator and starts another one at the same sockets.
    pub(crate) fn restart(&mut self) {
        self.emulator = None;
        self.emulator = Some(start(self.family, &self.names));
    }

    pub(crate) fn act(&self, action: Action) {
        self.control().act(action);
    }

    pub(crate) fn report(&self) -> Report {
        self.control().report()
    }
}

/// What loses the link of a [`Joined`], and lets it return.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Trouble {
    /// The cable is pulled and plugged in.
    Cable,
    /// The far end's process ends, and another one starts.
    Peer,
    /// The near end's function leaves its slot and comes back.
    NearDevice,
    /// The far end's function does.
    FarDevice,
}

/// Two links and the bridges between them.
pub(crate) struct Joined {
    pub(crate) near: NtbLink,
    pub(crate) far: Option<NtbLink>,
    trouble: Trouble,
    pub(crate) bridges: Bridges,
}

impl Joined {
    pub(crate) fn new(family: &'static str, trouble: Trouble) -> Self {
        let bridges = Bridges::new(family);
        Self {
            near: bridges.open(0),
            far: Some(bridges.open(1)),
            trouble,
            bridges,
        }
    }

    /// Of links that were opened otherwise; the trouble is the cable's.
    pub(crate) fn of(near: NtbLink, far: Option<NtbLink>, bridges: Bridges) -> Self {
        Self {
            near,
            far,
            trouble: Trouble::Cable,
            bridges,
        }
    }

    pub(crate) fn poll(&mut self) -> [LinkStatus; 2] {
        let far = self.far.as_mut().expect("the far end is there");
        [self.near.poll().unwrap(), far.poll().unwrap()]
    }

    /// Polls both ends until both are in a state that suits.
    pub(crate) fn until(
        &mut self,
        what: &str,
        done: impl Fn(LinkStatus, LinkStatus) -> bool,
    ) -> [LinkStatus; 2] {
        let start = Instant::now();
        loop {
            let [a, b] = self.poll();
            if done(a, b) {
                return [a, b];
            }
            assert!(start.elapsed() < WATCHDOG, "never happened: {what}; {a:?} {b:?}");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    pub(crate) fn up(mut self) -> Self {
        self.until("both up", |a, b| {
            a.state == LinkState::WindowsSet && b.state == LinkState::WindowsSet
        });
        self
    }
}

impl Rig for Joined {
    fn near(&mut self) -> &mut dyn Link {
        &mut self.near
    }

    fn far(&mut self) -> Option<&mut dyn Link> {
        self.far.as_mut().map(|far| far as &mut dyn Link)
    }

    fn lose(&mut self) {
        match self.trouble {
            Trouble::Cable => self.bridges.act(Action::LinkDown),
            Trouble::Peer => self.far = None,
            Trouble::NearDevice => self.bridges.act(Action::Remove(SideId::A)),
            Trouble::FarDevice => self.bridges.act(Action::Remove(SideId::B)),
        }
    }

    fn restore(&mut self) {
        match self.trouble {
            Trouble::Cable => self.bridges.act(Action::LinkUp),
            Trouble::Peer => self.far = Some(self.bridges.open(1)),
            Trouble::NearDevice => self.bridges.act(Action::Return(SideId::A)),
            Trouble::FarDevice => self.bridges.act(Action::Return(SideId::B)),
        }
    }
}
