//! An open device with this side's memory registered, for as long as the device is there.

use std::sync::{Arc, atomic::Ordering};

use ntb_mem::region::{Pages, Region, View};

use super::{
    account::{CONTROL_BYTES, Remote},
    mirror::Mirror,
    options::{Manager, RdmaOptions},
    receive::{Buffers, RECEIVES, RECEIVES_STRICT},
    verbs::{Adapter, Fabric, Memory, QueueWish, Registered},
};
use crate::link::{LinkError, REGISTERS, Registers, ends::memory_error};

/// This side's memory. It stays the same whatever becomes of the device.
#[derive(Debug)]
pub(super) struct Own {
    window: Arc<Region>,
    /// Where runs arrive in strict mode, to be shown in the window once they are complete.
    landing: Option<Arc<Region>>,
    control: Arc<Region>,
}

impl Own {
    pub(super) fn new(options: &RdmaOptions) -> Result<Self, LinkError> {
        let allocate = |bytes, pages| {
            Region::allocate(bytes, pages)
                .map(Arc::new)
                .map_err(|e| memory_error(&e))
        };
        let window = allocate(options.window_bytes, options.pages)?;
        Ok(Self {
            landing: match options.strict {
                true => Some(allocate(window.bytes(), options.pages)?),
                false => None,
            },
            control: allocate(CONTROL_BYTES, Pages::Normal)?,
            window,
        })
    }

    pub(super) fn window(&self) -> &Arc<Region> {
        &self.window
    }

    pub(super) fn control(&self) -> View {
        self.control.view()
    }

    /// Landing place and window, in strict mode.
    pub(super) fn runs(&self) -> Option<(View, View)> {
        self.landing.as_ref().map(|l| (l.view(), self.window.view()))
    }

    /// This side's registers as the peer has written them.
    pub(super) fn registers(&self) -> Registers {
        let view = self.control.view();
        let mut out = [0; REGISTERS];
        for (i, pair) in out.chunks_exact_mut(2).enumerate() {
            let word = view.load(i, Ordering::Acquire);
            for (slot, shift) in pair.iter_mut().zip([0, 32]) {
                *slot = (word >> shift) as u32;
            }
        }
        out
    }

    /// Clears what an earlier peer has written, before the next one can write.
    pub(super) fn clear_control(&self) {
        let view = self.control.view();
        for word in 0..view.words() {
            view.store(word, 0, Ordering::Release);
        }
    }
}

/// An open device. Queue pairs end before it does: who holds one holds it in front of this.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) buffers: Buffers,
    /// Where the peer writes lines: the window, or the landing place.
    target: Arc<dyn Registered>,
    control: Arc<dyn Registered>,
    /// rdma_cm was waited for in vain. Of a device whose port was down the kernel may have lost the queue pair that it talks
    /// to other kernels with (soft-RoCE does), for as long as the device is there.
    pub(super) manager_is_silent: bool,
    pub(super) adapter: Arc<dyn Adapter>,
}

impl Device {
    /// Registers this side's memory.
    pub(super) fn new(adapter: Arc<dyn Adapter>, own: &Own) -> Result<Self, LinkError> {
        let target = own.landing.as_ref().unwrap_or(&own.window);
        let receives = match own.landing {
            Some(_) => RECEIVES_STRICT,
            None => RECEIVES,
        };
        Ok(Self {
            buffers: Buffers::new(&*adapter, receives)?,
            target: adapter.register(Memory::Local(Arc::clone(target)), true)?,
            control: adapter.register(Memory::Local(Arc::clone(&own.control)), true)?,
            manager_is_silent: false,
            adapter,
        })
    }

    /// Whether rdma_cm is to be used where the peer has it too. It finds packets and service level by itself: who wants others
    /// does without it. `mtu` is the most that has been seen to work.
    pub(super) fn has_manager(&self, options: &RdmaOptions, mtu: u32) -> bool {
        let finds_them = options.mtu.is_none() && options.service_level == 0 && mtu >= self.adapter.mtu();
        self.adapter.has_manager()
            && match options.manager {
                Manager::Never => false,
                Manager::Only => true,
                Manager::Auto if self.adapter.port().fabric == Fabric::Iwarp => true,
                Manager::Auto => finds_them && !self.manager_is_silent,
            }
    }

    /// What the peer is told of this side's memory.
    pub(super) fn told(&self) -> Remote {
        let place = |registered: &Arc<dyn Registered>| (registered.memory().address(), registered.rkey());
        let (address, key) = place(&self.target);
        Remote {
            window: (address, key, self.target.memory().bytes()),
            control: place(&self.control),
            receives: self.buffers.count,
        }
    }

    /// Memory to write from, for one connection.
    pub(super) fn mirror(&self, options: &RdmaOptions) -> Result<Mirror, LinkError> {
        Mirror::new(&*self.adapter, options.mirror_bytes, Pages::Normal)
    }

    /// What to ask for in a queue pair. `mtu` is the most that has been seen to work.
    pub(super) fn wish(&self, options: &RdmaOptions, mtu: u32) -> QueueWish {
        QueueWish {
            depth: options.depth,
            inline: options.inline_bytes,
            receives: self.buffers.count,
            service_level: options.service_level,
            traffic_class: options.traffic_class,
            timeout: options.timeout,
            retries: options.retries,
            rnr_retries: 7,
            mtu: options.mtu.unwrap_or_else(|| mtu.min(self.adapter.mtu())),
        }
    }
}
