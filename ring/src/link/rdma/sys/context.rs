//! An open device of the library's, and memory registered at it.

#![allow(unsafe_code, reason = "calls of libibverbs, which hands out pointers")]

use std::{
    ffi::CStr,
    os::fd::{AsRawFd as _, BorrowedFd, RawFd},
    sync::Arc,
};

use rustix::{fs::OFlags, io::Errno};

use super::{
    super::{
        error::{MemoryKind, not_registered, refused, unavailable},
        verbs::{Memory, Notice, Registered},
    },
    abi::{
        ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE, AsyncEvent, Context, Device, EVENT_DEVICE_FATAL,
        EVENT_GID_CHANGE, EVENT_LID_CHANGE, EVENT_PORT_ACTIVE, EVENT_PORT_ERR, Mr, Pd, PortAttr,
    },
    load::{Manager, Verbs, errno, returned},
};
use crate::link::LinkError;

/// A pointer of the library's, which allows use by any thread.
#[derive(Debug)]
pub(super) struct Handle<T>(pub(super) *mut T);

// SAFETY: libibverbs and librdmacm let every object be used by every thread; what must not be used by two at once (a
// queue pair's send side, a completion queue) has a lock of the provider's own.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Handle<T> {}

/// A device opened by this module, closed when dropped.
#[derive(Debug)]
struct Opened {
    verbs: &'static Verbs,
    context: Handle<Context>,
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: opened by `open_by_name`, and nothing made from it is left: whoever made something holds this.
        unsafe { (self.verbs.ibv_close_device)(self.context.0) };
    }
}

/// A device and a protection domain.
#[derive(Debug)]
pub(super) struct Domain {
    pub(super) verbs: &'static Verbs,
    pub(super) manager: Option<&'static Manager>,
    /// What queue pairs and memory belong to: the connection manager's own opening where there is one, which stays open
    /// as long as the process.
    pub(super) context: Handle<Context>,
    pub(super) pd: Handle<Pd>,
    /// What tells of the device; the manager's is shared by all links of the process and read by none.
    events: Opened,
}

impl Domain {
    /// Opens the device called `name`. Without rdma_cm where `manager` is false or the machine has none.
    pub(super) fn open(name: &str, manager: bool) -> Result<Arc<Self>, LinkError> {
        let verbs = Verbs::get().map_err(unavailable)?;
        let events = open_by_name(verbs, name)?;
        set_nonblocking(events.async_fd()).map_err(|e| refused("making the event queue non-blocking", e))?;
        let mut wanted = vec![(events.context, None)];
        if let (true, Ok(manager)) = (manager, Manager::get()) {
            for context in of_manager(verbs, manager, name) {
                wanted.insert(0, (context, Some(manager)));
            }
        }
        let mut last = Errno::NODEV;
        for (context, manager) in wanted {
            // SAFETY: a context that was opened and not closed.
            let pd = unsafe { (verbs.ibv_alloc_pd)(context.0) };
            if !pd.is_null() {
                return Ok(Arc::new(Self {
                    verbs,
                    manager,
                    context,
                    pd: Handle(pd),
                    events,
                }));
            }
            last = errno(); // an opening of before the device was removed and came back
        }
        Err(refused("allocating a protection domain", last))
    }

    /// Attributes of a port.
    pub(super) fn query_port(&self, port: u8) -> Result<PortAttr, LinkError> {
        let mut attributes = PortAttr::default();
        // SAFETY: a live context, and room for more than the call writes.
        let code = unsafe { (self.verbs.ibv_query_port)(self.context.0, port, &raw mut attributes) };
        returned(code).map_err(|e| refused("asking for the port's attributes", e))?;
        Ok(attributes)
    }

    pub(super) fn notices(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the context, which lives as long as `self`.
        unsafe { BorrowedFd::borrow_raw(self.events.async_fd()) }
    }

    pub(super) fn notices_fd(&self) -> RawFd {
        self.events.async_fd()
    }

    pub(super) fn next_notice(&self, port: u8) -> Option<Notice> {
        let mut event = AsyncEvent {
            element: 0,
            event_type: 0,
        };
        loop {
            // SAFETY: a live context whose descriptor does not block, and room for an event.
            let code = unsafe { (self.verbs.ibv_get_async_event)(self.events.context.0, &raw mut event) };
            if code != 0 {
                return None;
            }
            let (kind, element) = (event.event_type, event.element);
            // SAFETY: an event that was just taken, acknowledged once.
            unsafe { (self.verbs.ibv_ack_async_event)(&raw mut event) };
            let of_port = element as u32 == u32::from(port);
            return Some(match kind {
                EVENT_DEVICE_FATAL => Notice::DeviceGone,
                EVENT_PORT_ACTIVE if of_port => Notice::PortUp,
                EVENT_PORT_ERR if of_port => Notice::PortDown,
                EVENT_GID_CHANGE | EVENT_LID_CHANGE if of_port => Notice::AddressesChanged,
                EVENT_PORT_ACTIVE | EVENT_PORT_ERR | EVENT_GID_CHANGE | EVENT_LID_CHANGE => continue,
                other => Notice::Other(other),
            });
        }
    }

    pub(super) fn register(
        self: &Arc<Self>,
        memory: Memory,
        remote: bool,
    ) -> Result<Arc<dyn Registered>, LinkError> {
        let access = match remote {
            true => ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE,
            false => ACCESS_LOCAL_WRITE,
        } as i32;
        let (address, bytes) = (memory.address(), memory.bytes());
        let (mr, kind) = match &memory {
            Memory::Local(_) | Memory::Peer { .. } => {
                let kind = match memory {
                    Memory::Local(_) => MemoryKind::Local,
                    _ => MemoryKind::Peer,
                };
                let register = self.verbs.ibv_reg_mr;
                // SAFETY: a live protection domain. The memory is pinned or refused; it stays mapped as long as it is
                // registered, since the region is held here, or by the contract of `Memory::Peer`.
                let mr = unsafe { register(self.pd.0, address as *mut _, bytes as usize, access) };
                (mr, kind)
            }
            Memory::DmaBuf {
                descriptor, offset, ..
            } => {
                let Some(register) = self.verbs.ibv_reg_dmabuf_mr else {
                    return Err(not_registered(bytes, MemoryKind::DmaBuf, Errno::NOSYS));
                };
                // SAFETY: a live protection domain; the kernel checks descriptor and range, and holds the buffer.
                let mr = unsafe {
                    register(
                        self.pd.0,
                        *offset,
                        bytes as usize,
                        address,
                        descriptor.as_raw_fd(),
                        access,
                    )
                };
                (mr, MemoryKind::DmaBuf)
            }
        };
        if mr.is_null() {
            return Err(not_registered(bytes, kind, errno()));
        }
        // SAFETY: the library has just returned it; its keys never change.
        let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
        Ok(Arc::new(Region {
            mr: Handle(mr),
            lkey,
            rkey,
            memory,
            domain: Arc::clone(self),
        }))
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: nothing in the domain is left: whatever was made in it holds it.
        unsafe { (self.verbs.ibv_dealloc_pd)(self.pd.0) };
    }
}

impl Opened {
    fn async_fd(&self) -> RawFd {
        // SAFETY: a live context; the field never changes.
        unsafe { (*self.context.0).async_fd }
    }
}

#[derive(Debug)]
struct Region {
    mr: Handle<Mr>,
    lkey: u32,
    rkey: u32,
    memory: Memory,
    domain: Arc<Domain>,
}

impl Registered for Region {
    fn memory(&self) -> &Memory {
        &self.memory
    }
    fn lkey(&self) -> u32 {
        self.lkey
    }
    fn rkey(&self) -> u32 {
        self.rkey
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: registered by this library and not released before; memory and domain are dropped after this.
        unsafe { (self.domain.verbs.ibv_dereg_mr)(self.mr.0) };
    }
}

/// Names of the devices that the library can drive.
pub(super) fn driven() -> Result<Vec<String>, LinkError> {
    let verbs = Verbs::get().map_err(unavailable)?;
    let mut names = Vec::new();
    each_device(verbs, |device| names.push(name_of(verbs, device)))?;
    Ok(names)
}

fn each_device(verbs: &Verbs, mut each: impl FnMut(*mut Device)) -> Result<(), LinkError> {
    let mut count = 0;
    // SAFETY: room for a count.
    let list = unsafe { (verbs.ibv_get_device_list)(&raw mut count) };
    if list.is_null() {
        let why = match errno() {
            Errno::NOSYS => "the kernel has no RDMA: load ib_uverbs and the device's module".to_owned(),
            e => format!("devices cannot be listed: {e}"),
        };
        return Err(unavailable(why));
    }
    for at in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has `count` entries and is freed below.
        each(unsafe { *list.add(at) });
    }
    // SAFETY: the list that was returned, once; opened devices outlive it.
    unsafe { (verbs.ibv_free_device_list)(list) };
    Ok(())
}

fn name_of(verbs: &Verbs, device: *mut Device) -> String {
    // SAFETY: a device of a list that was not freed, or of a live context; the name is a terminated text in it.
    let name = unsafe { (verbs.ibv_get_device_name)(device) };
    if name.is_null() {
        return String::new();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

fn open_by_name(verbs: &'static Verbs, name: &str) -> Result<Opened, LinkError> {
    let mut opened = None;
    each_device(verbs, |device| {
        if opened.is_none() && name_of(verbs, device) == name {
            // SAFETY: a device of a list that was not freed yet.
            let context = unsafe { (verbs.ibv_open_device)(device) };
            opened = Some(match context.is_null() {
                true => Err(errno()),
                false => Ok(Opened {
                    verbs,
                    context: Handle(context),
                }),
            });
        }
    })?;
    match opened {
        Some(Ok(opened)) => Ok(opened),
        Some(Err(e)) => Err(refused(&format!("opening {name}"), e)),
        None => Err(unavailable(format!(
            "the kernel has device {name}, but no provider library drives it: install ibverbs-providers (rdma-core)"
        ))),
    }
}

/// The manager's openings of the device called `name`, newest last.
fn of_manager(verbs: &Verbs, manager: &Manager, name: &str) -> Vec<Handle<Context>> {
    let mut count = 0;
    // SAFETY: room for a count.
    let list = unsafe { (manager.rdma_get_devices)(&raw mut count) };
    if list.is_null() {
        return Vec::new(); // no module rdma_ucm, or no right to use it
    }
    let found = (0..usize::try_from(count).unwrap_or(0))
        .filter_map(|at| {
            // SAFETY: the list has `count` entries, contexts that stay open as long as the library is loaded.
            let context = unsafe { *list.add(at) };
            // SAFETY: as above.
            let device = unsafe { context.as_ref()?.device };
            (name_of(verbs, device) == name).then_some(Handle(context))
        })
        .collect();
    // SAFETY: the list that was returned, once.
    unsafe { (manager.rdma_free_devices)(list) };
    found
}

pub(super) fn set_nonblocking(fd: RawFd) -> Result<(), Errno> {
    // SAFETY: the caller's descriptor is open during the call.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = rustix::fs::fcntl_getfl(fd)?;
    rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK)
}
