//! Where things lie: how many windows and queue pairs there are, which part of which window a queue pair has, and how
//! frames and their headers lie in it. Both sides compute this from the same numbers.
//!
//! ```text
//! slot:   [ frame 0 ][ frame 1 ] ... [ frame E-1 ] (slack) [ last 4 bytes: index of the frame consumed last ]
//! frame:  [ payload .................................. ][ version u32 ][ length u32 ][ flags u32 ]
//! ```

use crate::LinuxError;

/// Version of the protocol.
pub const VERSION: u32 = 4;
/// Scratchpads that are not about window sizes.
const FIXED_SCRATCHPADS: usize = 4;
/// Bytes of a frame's header, at its end.
pub const HEADER_BYTES: u32 = 12;
/// Bytes of the consumer's index, at the end of a slot.
const TRAILER_BYTES: u32 = 4;
/// Largest frame unless it is set otherwise (`transport_mtu` of the kernel's module).
pub const DEFAULT_FRAME: u32 = 0x10000;

/// Numbers of a scratchpad, in the memory of whoever is told.
pub mod scratchpad {
    /// Version of the protocol, written last.
    pub const VERSION: usize = 0;
    /// One bit for each queue pair that is ready.
    pub const READY: usize = 1;
    /// Number of queue pairs.
    pub const QUEUES: usize = 2;
    /// Number of memory windows.
    pub const WINDOWS: usize = 3;

    /// High half of the size of a window; the low half is in the next one.
    pub const fn size_high(window: usize) -> usize {
        super::FIXED_SCRATCHPADS + 2 * window
    }
}

/// How many windows and queue pairs there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Memory windows in use.
    pub windows: usize,
    /// Queue pairs.
    pub queues: usize,
}

impl Shape {
    /// What a port's resources give, as the kernel counts them. `clients` is its `max_num_clients`, 0 for no limit.
    ///
    /// `None` when there are too few of one of them.
    pub fn of(windows: usize, scratchpads: usize, doorbells: u64, clients: u8) -> Option<Self> {
        let by_scratchpads = scratchpads.checked_sub(FIXED_SCRATCHPADS)? / 2;
        let windows = windows.min(by_scratchpads);
        let by_doorbells = doorbells.checked_ilog2()? as usize;
        let clients = usize::from(clients);
        let queues = match (clients > 0 && clients < by_doorbells, windows < by_doorbells) {
            (true, _) => clients,
            (false, true) => windows,
            (false, false) => by_doorbells,
        };
        // The ready bits are 32.
        (windows > 0 && queues > 0 && queues <= 32).then_some(Self { windows, queues })
    }

    /// The window in which a queue pair lies.
    pub fn window_of(&self, queue: usize) -> usize {
        queue.checked_rem(self.windows).unwrap_or(0)
    }

    /// The slot of a queue pair in a window of `bytes`. `None` where it has no room for two frames with a byte of payload.
    ///
    /// The kernel calculates in 32 bits: of a window of 4 GiB and more the low half counts.
    pub fn slot(&self, queue: usize, bytes: u64, frame: u32) -> Option<Slot> {
        let window = self.window_of(queue);
        let whole = self.queues.checked_div(self.windows)?;
        let more = usize::from(window < self.queues % self.windows);
        let sharing = u32::try_from(whole + more).ok()?;
        // Truncation as in the kernel.
        let slot = (bytes as u32).checked_div(sharing)?;
        let place = u32::try_from(queue / self.windows).ok()?;
        let base = u64::from(slot).checked_mul(u64::from(place))?;
        let usable = slot.checked_sub(TRAILER_BYTES)?;
        let frame = frame.min(usable / 2);
        (frame > HEADER_BYTES).then(|| Slot {
            base,
            frame,
            frames: usable / frame,
            trailer: base + u64::from(usable),
        })
    }
}

/// The part of a window that a queue pair has, seen as a ring of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Offset of the slot in the window.
    pub base: u64,
    /// Bytes of a frame, its header included; more than [`HEADER_BYTES`].
    pub frame: u32,
    /// Number of frames, 2 or more.
    pub frames: u32,
    /// Offset in the window of the consumer's index.
    pub trailer: u64,
}

impl Slot {
    /// Largest payload.
    pub fn largest(&self) -> u32 {
        self.frame - HEADER_BYTES
    }

    /// Offset in the window of frame `index`, which is below [`Slot::frames`].
    pub fn frame_at(&self, index: u32) -> u64 {
        self.base + u64::from(index) * u64::from(self.frame)
    }

    /// Offset in the window of the header of frame `index`.
    pub fn header_at(&self, index: u32) -> u64 {
        self.frame_at(index) + u64::from(self.largest())
    }

    /// The frame behind frame `index`.
    pub fn after(&self, index: u32) -> u32 {
        let next = index.saturating_add(1);
        if next < self.frames { next } else { 0 }
    }
}

/// What a side says about itself: each scratchpad with its value, in the order in which they are to be written.
pub fn announcement(shape: &Shape, sizes: &[u64]) -> Vec<(usize, u32)> {
    let mut all = Vec::new();
    for (window, bytes) in sizes.iter().enumerate() {
        let high = scratchpad::size_high(window);
        all.push((high, (bytes >> 32) as u32));
        all.push((high + 1, *bytes as u32));
    }
    // Both counts are small; a port that had more would have been refused.
    all.push((scratchpad::WINDOWS, shape.windows as u32));
    all.push((scratchpad::QUEUES, shape.queues as u32));
    all.push((scratchpad::VERSION, VERSION));
    all
}

/// What the peer's announcement says: the sizes of its windows; `None` while there is none.
///
/// `own` holds this side's scratchpads from the first on, at least as many as [`announcement`] names.
pub fn understand(shape: &Shape, own: &[u32]) -> Result<Option<Vec<u64>>, LinuxError> {
    let at = |index: usize| own.get(index).copied().unwrap_or(0);
    let differs = |what, own: u64, peer: u32, remedy| LinuxError::Disagree {
        what,
        own,
        peer: peer.into(),
        remedy,
    };
    match at(scratchpad::VERSION) {
        // Nothing yet, or nobody there to answer.
        0 | u32::MAX => return Ok(None),
        VERSION => {}
        other => {
            let remedy = "Another client may be loaded at the peer: load ntb_transport there, of a kernel that speaks \
                          this version";
            return Err(differs("version of ntb_transport", VERSION.into(), other, remedy));
        }
    }
    let queues = at(scratchpad::QUEUES);
    if u64::from(queues) != shape.queues as u64 {
        let remedy = "Give both sides the same max_num_clients";
        return Err(differs("queue pairs", shape.queues as u64, queues, remedy));
    }
    let windows = at(scratchpad::WINDOWS);
    if u64::from(windows) != shape.windows as u64 {
        let remedy = "Both ends of a bridge must be of one kind and set up alike";
        return Err(differs("memory windows", shape.windows as u64, windows, remedy));
    }
    let size = |window| {
        let high = scratchpad::size_high(window);
        u64::from(at(high)) << 32 | u64::from(at(high + 1))
    };
    Ok(Some((0..shape.windows).map(size).collect()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn counts_are_the_kernels() {
        let of = |w, s, d, c| Shape::of(w, s, d, c).map(|s| (s.windows, s.queues));
        assert_eq!(of(2, 16, 0xFFFF_FFFF, 0), Some((2, 2)), "Sapphire Rapids");
        assert_eq!(of(2, 8, 0xFFFF, 0), Some((2, 2)), "AMD");
        assert_eq!(of(4, 8, 0xFFFF, 0), Some((2, 2)), "scratchpads limit windows");
        assert_eq!(of(1, 16, 0xF, 0), Some((1, 1)));
        assert_eq!(
            of(2, 16, 0xFFFF, 5),
            Some((2, 5)),
            "clients beyond windows share them"
        );
        assert_eq!(of(2, 5, 0xFFFF, 0), None, "too few scratchpads");
        assert_eq!(of(2, 3, 0xFFFF, 0), None);
        assert_eq!(of(2, 16, 1, 0), None, "one doorbell makes no queue");
        assert_eq!(of(2, 16, 0, 0), None);
    }

    #[test]
    fn rings_are_the_kernels() {
        let one = Shape {
            windows: 1,
            queues: 1,
        };
        let ring = |bytes| one.slot(0, bytes, DEFAULT_FRAME).map(|s| (s.frame, s.frames));
        assert_eq!(ring(64 << 10), Some((32766, 2)));
        assert_eq!(ring(512 << 10), Some((65536, 7)));
        assert_eq!(ring(1 << 20), Some((65536, 15)));
        assert_eq!(ring(4 << 20), Some((65536, 63)));
        assert_eq!(ring(4 << 30), None, "32-bit arithmetic");
        assert_eq!(ring(0), None);
        assert_eq!(ring(28), None);
        assert_eq!(ring(32), Some((14, 2)));
        let slot = one.slot(0, 1 << 20, DEFAULT_FRAME).unwrap();
        assert_eq!(slot.trailer, (1 << 20) - 4);
        assert_eq!(slot.header_at(1), 2 * 65536 - 12);
        let shared = Shape {
            windows: 2,
            queues: 5,
        };
        let slot = shared.slot(4, 3 << 20, DEFAULT_FRAME).unwrap();
        assert_eq!((shared.window_of(4), slot.base), (0, 2 << 20));
        assert_eq!(shared.slot(3, 3 << 20, DEFAULT_FRAME).unwrap().base, 3 << 19);
    }

    #[test]
    fn an_announcement_is_understood_as_it_was_meant() {
        let shape = Shape {
            windows: 2,
            queues: 2,
        };
        let sizes = vec![1 << 20, 0x2_0000_1000];
        let mut spads = vec![0; 8];
        let all = announcement(&shape, &sizes);
        assert_eq!(
            all.last(),
            Some(&(scratchpad::VERSION, VERSION)),
            "the version comes last"
        );
        for (at, value) in all {
            spads[at] = value;
        }
        assert_eq!(understand(&shape, &spads).unwrap(), Some(sizes));
        let refused = |at: usize, value| {
            let mut wrong = spads.clone();
            wrong[at] = value;
            understand(&shape, &wrong)
        };
        assert_eq!(refused(0, 0).unwrap(), None);
        assert_eq!(refused(0, u32::MAX).unwrap(), None);
        for (at, value) in [(0, 3), (2, 1), (3, 3)] {
            assert_eq!(refused(at, value).unwrap_err().name(), "peer-disagrees");
        }
    }

    proptest! {
        #[test]
        fn slots_lie_in_their_window_and_apart(
            windows in 1usize..5, clients in 0u8..12, bytes in 0u64..1 << 33, frame in 0u32..1 << 20,
        ) {
            let Some(shape) = Shape::of(windows, 32, 0xFFFF, clients) else { return Ok(()) };
            let mut ends = vec![0; shape.windows];
            for queue in 0..shape.queues {
                let Some(slot) = shape.slot(queue, bytes, frame) else { continue };
                let end = &mut ends[shape.window_of(queue)];
                prop_assert!(slot.base >= *end);
                prop_assert!(slot.frames >= 2 && slot.largest() >= 1);
                prop_assert!(slot.header_at(slot.frames - 1) + 12 <= slot.trailer);
                *end = slot.trailer + 4;
                prop_assert!(*end <= bytes);
            }
        }

        #[test]
        fn any_scratchpads_are_borne(own in proptest::collection::vec(any::<u32>(), 0..20)) {
            let shape = Shape { windows: 2, queues: 2 };
            let _ = understand(&shape, &own);
        }
    }
}
