//! A link between two ends in one process, for tests: of this crate, and of programs that use it.
//!
//! Everything is as on a soft link, loss of the peer included, but for the socket: [`PairControl`] cuts and restores the
//! wire instead, and puts a new end in place of one that was dropped, as a restarted process would be.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use ntb_mem::region::{Pages, View};

use super::{
    Doorbell, Link, LinkError, LinkFacts, LinkKind, LinkState, LinkStatus, Registers,
    ends::{NO_REGISTERS, Own, Peer, WINDOW_BYTES},
    engine::{Engine, Order},
};

/// Parameters of a pair.
#[derive(Clone, Debug)]
pub struct PairOptions {
    /// Bytes of each end's memory, a multiple of 64; 64 MiB by default. Taken up where they are written.
    pub window_bytes: u64,
    /// Pages that the memory stands on.
    pub pages: Pages,
}

impl Default for PairOptions {
    fn default() -> Self {
        Self {
            window_bytes: WINDOW_BYTES,
            pages: Pages::Normal,
        }
    }
}

/// Makes both ends; the wire is up.
pub fn pair(options: &PairOptions) -> Result<(PairLink, PairLink), LinkError> {
    let wire = Arc::new(Mutex::new(Wire {
        up: true,
        ends: [None, None],
    }));
    let a = PairLink::attach(&wire, 0, options)?;
    let b = PairLink::attach(&wire, 1, options)?;
    Ok((a, b))
}

/// The wire between the ends.
#[derive(Debug)]
struct Wire {
    up: bool,
    ends: [Option<Arc<End>>; 2],
}

/// What both ends of the wire know of one of them.
#[derive(Debug)]
struct End {
    own: Own,
    /// Rung when the wire changes, as a socket would wake a soft link.
    changed: Doorbell,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    peer: Option<Peer>,
    losses: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is left half done under these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl End {
    /// Takes up the other end's memory.
    fn join(&self, other: &Own) -> Result<(), LinkError> {
        let no_descriptors = |e: std::io::Error| LinkError {
            name: "link-limits",
            exit: 6,
            what: format!(
                "the ends of a pair cannot be joined ({e}): raise the limit on open files with 'ulimit -n'"
            ),
            errno: e.raw_os_error(),
        };
        let fds = other
            .descriptors()
            .into_iter()
            .map(|fd| fd.try_clone_to_owned())
            .collect::<Result<Vec<OwnedFd>, _>>()
            .map_err(no_descriptors)?;
        let peer = Peer::new(fds, other.window().bytes()).map_err(|e| LinkError {
            name: "link-memory",
            exit: 6,
            what: format!("the ends of a pair cannot be joined: {e}"),
            errno: None,
        })?;
        lock(&self.state).peer = Some(peer);
        self.changed.ring();
        Ok(())
    }

    fn lose(&self) {
        let mut state = lock(&self.state);
        if state.peer.take().is_some() {
            state.losses += 1;
        }
        drop(state);
        self.changed.ring();
    }
}

impl Wire {
    fn connect(&self) -> Result<(), LinkError> {
        if let (true, [Some(a), Some(b)]) = (self.up, &self.ends) {
            // Before either can write the other's.
            a.own.clear_registers();
            b.own.clear_registers();
            a.join(&b.own)?;
            b.join(&a.own)?;
        }
        Ok(())
    }

    fn disconnect(&self) {
        for end in self.ends.iter().flatten() {
            end.lose();
        }
    }
}

/// One end of a pair. Dropping it is, to the other end, the death of its peer.
#[derive(Debug)]
pub struct PairLink {
    wire: Arc<Mutex<Wire>>,
    side: usize,
    end: Arc<End>,
}

impl PairLink {
    fn attach(wire: &Arc<Mutex<Wire>>, side: usize, options: &PairOptions) -> Result<Self, LinkError> {
        let end = Arc::new(End {
            own: Own::new(options.window_bytes, options.pages)?,
            changed: Doorbell::local().map_err(|errno| LinkError {
                name: "link-limits",
                exit: 6,
                what: format!("no event descriptor for a pair ({errno}): raise the limit with 'ulimit -n'"),
                errno: Some(errno.raw_os_error()),
            })?,
            state: Mutex::default(),
        });
        let mut locked = lock(wire);
        locked.ends[side] = Some(Arc::clone(&end));
        let connected = locked.connect();
        drop(locked);
        let link = Self {
            wire: Arc::clone(wire),
            side,
            end,
        };
        connected.map(|()| link)
    }

    /// A handle to cut and restore the wire with, from any thread.
    pub fn control(&self) -> PairControl {
        PairControl {
            wire: Arc::clone(&self.wire),
        }
    }
}

impl Drop for PairLink {
    fn drop(&mut self) {
        let mut wire = lock(&self.wire);
        wire.ends[self.side] = None;
        wire.disconnect();
        self.end.lose(); // revokes what engines of this end still store to
    }
}

impl Link for PairLink {
    fn facts(&self) -> LinkFacts {
        LinkFacts {
            kind: LinkKind::Soft,
            address: "pair".to_owned(),
            page_bytes: self.end.own.window().page_bytes(),
            engine: "write-back",
        }
    }

    fn order(&self) -> Order {
        Order::Ordered
    }

    fn poll(&mut self) -> Result<LinkStatus, LinkError> {
        self.end.changed.take();
        let state = lock(&self.end.state);
        Ok(LinkStatus {
            state: match state.peer {
                Some(_) => LinkState::WindowsSet,
                None => LinkState::CableDown,
            },
            losses: state.losses,
        })
    }

    fn wait(&self, timeout: Duration) {
        self.end.own.wait(&[self.end.changed.as_fd()], timeout);
    }

    fn registers(&self) -> Registers {
        match lock(&self.end.state).peer {
            Some(_) => self.end.own.registers(),
            None => NO_REGISTERS,
        }
    }

    fn write_registers(&mut self, registers: &Registers) {
        if let Some(peer) = &lock(&self.end.state).peer {
            peer.write_registers(registers);
        }
    }

    fn inbound(&self) -> View {
        self.end.own.window().view()
    }

    fn outbound(&self) -> Option<Engine> {
        lock(&self.end.state).peer.as_ref().map(Peer::engine)
    }

    fn ring(&mut self, doorbell: u32) {
        if let Some(peer) = &lock(&self.end.state).peer {
            peer.ring(doorbell);
        }
    }

    fn doorbell(&self, number: u32) -> Doorbell {
        self.end.own.doorbell(number)
    }
}

/// Cuts and restores the wire of a pair.
#[derive(Clone, Debug)]
pub struct PairControl {
    wire: Arc<Mutex<Wire>>,
}

impl PairControl {
    /// Cuts the wire: both ends count a loss, unless it was down.
    pub fn cut(&self) {
        let mut wire = lock(&self.wire);
        wire.up = false;
        wire.disconnect();
    }

    /// Restores the wire. Both ends are connected again, if both are there.
    pub fn restore(&self) -> Result<(), LinkError> {
        let mut wire = lock(&self.wire);
        if wire.up {
            return Ok(());
        }
        wire.up = true;
        wire.connect()
    }

    /// Cuts and restores the wire `times` times, as fast as can be.
    pub fn flap(&self, times: u32) -> Result<(), LinkError> {
        for _ in 0..times {
            self.cut();
            self.restore()?;
        }
        Ok(())
    }

    /// Puts a new end, with new memory, in place of one that was dropped: a peer that was restarted.
    pub fn replace(&self, options: &PairOptions) -> Result<PairLink, LinkError> {
        let side = lock(&self.wire).ends.iter().position(Option::is_none);
        let side = side.ok_or_else(|| LinkError {
            name: "pair-taken",
            exit: 2,
            what: "both ends of the pair are in use: drop one before it is replaced".to_owned(),
            errno: None,
        })?;
        PairLink::attach(&self.wire, side, options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::conformance::Rig;

    fn options() -> PairOptions {
        PairOptions {
            window_bytes: 1 << 16,
            ..PairOptions::default()
        }
    }

    /// Both ends stay, the wire is cut.
    struct Cut(PairLink, PairLink);

    impl Rig for Cut {
        fn near(&mut self) -> &mut dyn Link {
            &mut self.0
        }
        fn far(&mut self) -> Option<&mut dyn Link> {
            Some(&mut self.1)
        }
        fn lose(&mut self) {
            self.0.control().cut();
        }
        fn restore(&mut self) {
            self.0.control().restore().unwrap();
        }
    }

    mod cut {
        fn rig() -> super::Cut {
            let (a, b) = super::pair(&super::options()).unwrap();
            super::Cut(a, b)
        }
        crate::link_conformance!(rig());
    }

    /// The far end dies and is replaced.
    struct Replaced(PairLink, Option<PairLink>);

    impl Rig for Replaced {
        fn near(&mut self) -> &mut dyn Link {
            &mut self.0
        }
        fn far(&mut self) -> Option<&mut dyn Link> {
            self.1.as_mut().map(|f| f as &mut dyn Link)
        }
        fn lose(&mut self) {
            self.1 = None;
        }
        fn restore(&mut self) {
            self.1 = Some(self.0.control().replace(&options()).unwrap());
        }
    }

    mod replaced {
        fn rig() -> super::Replaced {
            let (a, b) = super::pair(&super::options()).unwrap();
            super::Replaced(a, Some(b))
        }
        crate::link_conformance!(rig());
    }

    #[test]
    fn flaps_between_two_polls_are_all_counted_at_both_ends() {
        let (mut a, mut b) = pair(&options()).unwrap();
        let control = a.control();
        control.flap(7).unwrap();
        control.restore().unwrap(); // up already
        for end in [&mut a, &mut b] {
            let status = end.poll().unwrap();
            assert_eq!((status.state, status.losses), (LinkState::WindowsSet, 7));
        }
        control.cut();
        control.cut(); // down already
        assert_eq!(a.poll().unwrap().losses, 8);
    }

    #[test]
    fn an_end_in_use_is_not_replaced() {
        let (a, b) = pair(&options()).unwrap();
        let e = a.control().replace(&options()).unwrap_err();
        assert_eq!(e.name, "pair-taken");
        drop(b);
        let mut b = a.control().replace(&options()).unwrap();
        assert_eq!(b.poll().unwrap().state, LinkState::WindowsSet);
    }
}
