//! Connections by rdma_cm, without ever blocking.

#![allow(unsafe_code, reason = "calls of librdmacm, which hands out pointers")]

use std::{
    net::IpAddr,
    os::fd::BorrowedFd,
    sync::{Arc, Mutex, PoisonError},
};

use rustix::io::Errno;

use super::{
    super::{
        error::{failed, refused},
        verbs::{Meeting, Port, Prepare, Queue, QueueWish, TOKEN_BYTES},
    },
    abi::{
        CM_ADDR_CHANGE, CM_ADDR_RESOLVED, CM_CONNECT_REQUEST, CM_DEVICE_REMOVAL, CM_DISCONNECTED,
        CM_ESTABLISHED, CM_ROUTE_RESOLVED, CM_TIMEWAIT_EXIT, CmChannel, CmId, ConnParam, OPTION_ID,
        OPTION_ID_ACK_TIMEOUT, OPTION_ID_TOS, PS_TCP, Qp, QpInitAttr,
    },
    context::{Domain, Handle, set_nonblocking},
    load::{Manager, errno, returned},
    queue::RealQueue,
};
use crate::link::LinkError;

/// Time for the kernel to find the peer's address and the way to it.
const RESOLVE_MS: i32 = 2000;

/// Where events arrive.
#[derive(Debug)]
struct Channel {
    manager: &'static Manager,
    channel: Handle<CmChannel>,
}

impl Channel {
    fn new(manager: &'static Manager) -> Result<Self, LinkError> {
        // SAFETY: no arguments.
        let channel = unsafe { (manager.rdma_create_event_channel)() };
        if channel.is_null() {
            return Err(refused("making a channel of rdma_cm", errno()));
        }
        let made = Self {
            manager,
            channel: Handle(channel),
        };
        set_nonblocking(made.fd()).map_err(|e| refused("making a channel of rdma_cm non-blocking", e))?;
        Ok(made)
    }

    fn fd(&self) -> i32 {
        // SAFETY: a live channel; the field never changes.
        unsafe { (*self.channel.0).fd }
    }

    /// Takes the next event: its kind, status, the identifier it is of, and the token that a request came with. It is
    /// acknowledged at once, which invalidates whatever else it carries.
    fn next(&self) -> Option<Event> {
        let mut event = std::ptr::null_mut();
        // SAFETY: a live channel that does not block; the event is read before it is acknowledged, once.
        unsafe {
            if (self.manager.rdma_get_cm_event)(self.channel.0, &raw mut event) != 0 {
                return None;
            }
            let mut token = [0; TOKEN_BYTES];
            if (*event).event == CM_CONNECT_REQUEST {
                let conn = &(*event).conn;
                if !conn.private_data.is_null() && usize::from(conn.private_data_len) >= TOKEN_BYTES {
                    std::ptr::copy_nonoverlapping(conn.private_data.cast(), token.as_mut_ptr(), TOKEN_BYTES);
                }
            }
            let taken = Event {
                kind: (*event).event,
                status: (*event).status,
                id: Handle((*event).id),
                token,
            };
            (self.manager.rdma_ack_cm_event)(event);
            Some(taken)
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: made above; identifiers on it go before it, and all events were acknowledged.
        unsafe { (self.manager.rdma_destroy_event_channel)(self.channel.0) };
    }
}

#[derive(Debug)]
struct Event {
    kind: u32,
    status: i32,
    id: Handle<CmId>,
    token: [u8; TOKEN_BYTES],
}

/// An identifier, destroyed when dropped.
#[derive(Debug)]
struct Id {
    manager: &'static Manager,
    id: Handle<CmId>,
}

impl Id {
    fn new(channel: &Channel) -> Result<Self, LinkError> {
        let mut id = std::ptr::null_mut();
        // SAFETY: a live channel, which outlives the identifier: both are fields of one object, in this order.
        let code = unsafe {
            (channel.manager.rdma_create_id)(channel.channel.0, &raw mut id, std::ptr::null_mut(), PS_TCP)
        };
        returned(code).map_err(|e| refused("making an identifier of rdma_cm", e))?;
        Ok(Self {
            manager: channel.manager,
            id: Handle(id),
        })
    }

    /// Whether it has been bound to the device of `domain`.
    fn check_device(&self, domain: &Domain) -> Result<(), LinkError> {
        // SAFETY: a live identifier; the field is set once it is bound.
        match unsafe { (*self.id.0).verbs } == domain.context.0 {
            true => Ok(()),
            false => Err(failed(
                "rdma-other-device",
                4,
                "rdma_cm reaches the peer by another device than the chosen one: name that device, or the address that belongs \
                 to this one",
            )),
        }
    }

    fn set(&self, option: i32, value: u8) {
        let mut value = value;
        // SAFETY: a live identifier and an option of one byte. Kernels that do not know it refuse, and go on without.
        unsafe { (self.manager.rdma_set_option)(self.id.0, OPTION_ID, option, (&raw mut value).cast(), 1) };
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: made by the library and destroyed once; its queue pair was destroyed before, and its events were
        // acknowledged.
        unsafe { (self.manager.rdma_destroy_id)(self.id.0) };
    }
}

/// A connection's identifier and where its events arrive.
#[derive(Debug)]
pub(super) struct Connection {
    // Fields drop in order.
    id: Id,
    _listener: Option<Id>,
    channel: Channel,
    /// Why it has ended.
    over: Mutex<Option<String>>,
}

impl Connection {
    pub(super) fn create_queue(
        &self,
        domain: &Domain,
        attributes: *mut QpInitAttr,
    ) -> Result<Handle<Qp>, Errno> {
        let (manager, id) = (self.id.manager, self.id.id.0);
        // SAFETY: an identifier bound to the domain's device, and attributes that name live completion queues; the
        // caller's frame holds them.
        let code = unsafe { (manager.rdma_create_qp)(id, domain.pd.0, attributes) };
        returned(code)?;
        // SAFETY: the call has set it.
        Ok(Handle(unsafe { (*id).qp }))
    }

    pub(super) fn destroy_queue(&self) {
        let (manager, id) = (self.id.manager, self.id.id.0);
        // SAFETY: a live identifier with the queue pair that `create_queue` made. Disconnecting tells the peer; where the
        // connection is over already, it fails and changes nothing.
        unsafe {
            (manager.rdma_disconnect)(id);
            (manager.rdma_destroy_qp)(id);
        }
    }

    /// Why the connection has ended, if it has.
    pub(super) fn ended(&self) -> Option<String> {
        let mut over = self.over.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(event) = self.channel.next() {
            let why = match event.kind {
                CM_DISCONNECTED => "the peer has disconnected",
                CM_DEVICE_REMOVAL => "the device is being removed",
                CM_ADDR_CHANGE => "the address has changed",
                CM_TIMEWAIT_EXIT => "the connection is over",
                _ => continue,
            };
            over.get_or_insert_with(|| why.to_owned());
        }
        over.clone()
    }

    pub(super) fn news(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the channel, which lives as long as `self`.
        unsafe { BorrowedFd::borrow_raw(self.channel.fd()) }
    }

    fn parameters(wish: &QueueWish, token: Option<&[u8; TOKEN_BYTES]>) -> ConnParam {
        ConnParam {
            private_data: token.map_or(std::ptr::null(), |token| token.as_ptr().cast()),
            private_data_len: token.map_or(0, |_| TOKEN_BYTES as u8),
            responder_resources: 0,
            initiator_depth: 0,
            flow_control: 1,
            retry_count: wish.retries,
            rnr_retry_count: wish.rnr_retries,
            srq: 0,
            qp_num: 0,
        }
    }
}

/// What both kinds of meeting know.
struct Common {
    domain: Arc<Domain>,
    port: Port,
    wish: QueueWish,
    token: [u8; TOKEN_BYTES],
    prepare: Prepare,
}

impl Common {
    /// Makes the queue pair of a connection and posts its receives.
    fn queue(&mut self, connection: Connection) -> Result<RealQueue, LinkError> {
        connection.id.check_device(&self.domain)?;
        let queue = RealQueue::of_manager(&self.domain, &self.port, &self.wish, connection)?;
        (self.prepare)(&queue).map_err(|e| refused("posting receives", e))?;
        Ok(queue)
    }
}

/// A side that waits.
pub(super) struct Listening {
    common: Common,
    number: u16,
    /// Not connected yet: the listener and its channel. Afterwards the queue has them.
    waiting: Option<(Id, Channel)>,
    queue: Option<Arc<RealQueue>>,
}

/// A side that calls.
pub(super) struct Calling {
    common: Common,
    connection: Option<Connection>,
    queue: Option<Arc<RealQueue>>,
}

fn manager_of(domain: &Domain) -> Result<&'static Manager, LinkError> {
    domain
        .manager
        .ok_or_else(|| failed("rdma-no-manager", 3, "rdma_cm is not there"))
}

/// A socket address as the kernel has it.
#[repr(C)]
union Address {
    v4: libc::sockaddr_in,
    v6: libc::sockaddr_in6,
    any: libc::sockaddr,
}

impl Address {
    fn new(ip: IpAddr, port: u16) -> Self {
        match ip {
            IpAddr::V4(ip) => Self {
                v4: libc::sockaddr_in {
                    sin_family: libc::AF_INET as u16,
                    sin_port: port.to_be(),
                    sin_addr: libc::in_addr {
                        s_addr: u32::from_ne_bytes(ip.octets()),
                    },
                    sin_zero: [0; 8],
                },
            },
            IpAddr::V6(ip) => Self {
                v6: libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as u16,
                    sin6_port: port.to_be(),
                    sin6_flowinfo: 0,
                    sin6_addr: libc::in6_addr { s6_addr: ip.octets() },
                    sin6_scope_id: 0,
                },
            },
        }
    }

    fn as_mut_ptr(&mut self) -> *mut libc::sockaddr {
        &raw mut self.any
    }
}

impl Listening {
    pub(super) fn new(
        domain: &Arc<Domain>,
        port: &Port,
        wish: &QueueWish,
        token: [u8; TOKEN_BYTES],
        prepare: Prepare,
    ) -> Result<Self, LinkError> {
        let channel = Channel::new(manager_of(domain)?)?;
        let id = Id::new(&channel)?;
        let ip = port.ip.ok_or_else(|| {
            failed(
                "rdma-no-address",
                3,
                format!("{} has no IP address, which rdma_cm needs", port.device),
            )
        })?;
        let mut address = Address::new(ip, 0);
        // SAFETY: a live identifier and an address that lives until the call returns.
        let code = unsafe { (id.manager.rdma_bind_addr)(id.id.0, address.as_mut_ptr()) };
        returned(code).map_err(|e| refused(&format!("binding rdma_cm to {ip}"), e))?;
        // SAFETY: a live, bound identifier.
        let code = unsafe { (id.manager.rdma_listen)(id.id.0, 4) };
        returned(code).map_err(|e| refused(&format!("listening by rdma_cm at {ip}"), e))?;
        Ok(Self {
            // SAFETY: as above.
            number: u16::from_be(unsafe { (id.manager.rdma_get_src_port)(id.id.0) }),
            common: Common {
                domain: Arc::clone(domain),
                port: port.clone(),
                wish: *wish,
                token,
                prepare,
            },
            waiting: Some((id, channel)),
            queue: None,
        })
    }

    /// Accepts the caller with the token; sends any other away.
    fn hear(&mut self, event: &Event) -> Result<(), LinkError> {
        let Some((listener, channel)) = self.waiting.take() else {
            return Ok(());
        };
        let id = Id {
            manager: listener.manager,
            id: event.id,
        };
        if event.token != self.common.token {
            // SAFETY: an identifier that came with the request, not accepted; it is destroyed below.
            unsafe { (id.manager.rdma_reject)(id.id.0, std::ptr::null(), 0) };
            self.waiting = Some((listener, channel));
            return Ok(());
        }
        // The caller's traffic class counts for both; the time of acknowledgements is each side's own.
        id.set(OPTION_ID_ACK_TIMEOUT, self.common.wish.timeout);
        let raw = id.id;
        let queue = self.common.queue(Connection {
            id,
            _listener: Some(listener),
            channel,
            over: Mutex::new(None),
        })?;
        let mut parameters = Connection::parameters(&self.common.wish, None);
        let manager = manager_of(&self.common.domain)?;
        // SAFETY: an identifier that the queue holds, and parameters that live until the call returns.
        let code = unsafe { (manager.rdma_accept)(raw.0, &raw mut parameters) };
        returned(code).map_err(|e| refused("accepting a connection", e))?;
        self.queue = Some(Arc::new(queue));
        Ok(())
    }
}

impl Meeting for Listening {
    fn poll(&mut self) -> Result<Option<Arc<dyn Queue>>, LinkError> {
        loop {
            let channel = match (&self.waiting, self.queue.as_ref().and_then(|q| q.connection())) {
                (Some((_, channel)), _) => channel,
                (None, Some(connection)) => &connection.channel,
                (None, None) => return Err(failed("rdma-refused", 4, "the connection has failed")),
            };
            let Some(event) = channel.next() else {
                return Ok(None);
            };
            match event.kind {
                CM_CONNECT_REQUEST if self.waiting.is_some() => self.hear(&event)?,
                // One too many; dropped, which turns it away.
                CM_CONNECT_REQUEST => drop(Id {
                    manager: manager_of(&self.common.domain)?,
                    id: event.id,
                }),
                CM_ESTABLISHED => return Ok(self.queue.take().map(|queue| queue as Arc<dyn Queue>)),
                kind => return Err(unexpected(kind, event.status)),
            }
        }
    }

    fn news(&self) -> BorrowedFd<'_> {
        let fd = match (&self.waiting, self.queue.as_ref().and_then(|q| q.connection())) {
            (Some((_, channel)), _) => channel.fd(),
            (None, Some(connection)) => connection.channel.fd(),
            (None, None) => self.common.domain.notices_fd(),
        };
        // SAFETY: each of them belongs to an object that lives as long as `self`.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    fn port(&self) -> u16 {
        self.number
    }
}

impl Calling {
    pub(super) fn new(
        domain: &Arc<Domain>,
        port: &Port,
        wish: &QueueWish,
        to: (IpAddr, u16),
        token: [u8; TOKEN_BYTES],
        prepare: Prepare,
    ) -> Result<Self, LinkError> {
        let channel = Channel::new(manager_of(domain)?)?;
        let id = Id::new(&channel)?;
        if wish.traffic_class != 0 {
            id.set(OPTION_ID_TOS, wish.traffic_class);
        }
        let mut from = port
            .ip
            .filter(|ip| ip.is_ipv4() == to.0.is_ipv4())
            .map(|ip| Address::new(ip, 0));
        let from = from.as_mut().map_or(std::ptr::null_mut(), Address::as_mut_ptr);
        let mut address = Address::new(to.0, to.1);
        // SAFETY: a live identifier and addresses that live until the call returns.
        let code = unsafe { (id.manager.rdma_resolve_addr)(id.id.0, from, address.as_mut_ptr(), RESOLVE_MS) };
        returned(code).map_err(|e| refused(&format!("finding {} by rdma_cm", to.0), e))?;
        Ok(Self {
            common: Common {
                domain: Arc::clone(domain),
                port: port.clone(),
                wish: *wish,
                token,
                prepare,
            },
            connection: Some(Connection {
                id,
                _listener: None,
                channel,
                over: Mutex::new(None),
            }),
            queue: None,
        })
    }

    fn connection(&self) -> Option<&Connection> {
        let queue = self.queue.as_ref().and_then(|queue| queue.connection());
        self.connection.as_ref().or(queue)
    }

    fn resolve_route(&self) -> Result<(), LinkError> {
        let Some(connection) = self.connection() else {
            return Ok(());
        };
        connection.id.check_device(&self.common.domain)?;
        // SAFETY: a live identifier whose address is resolved.
        let code = unsafe { (connection.id.manager.rdma_resolve_route)(connection.id.id.0, RESOLVE_MS) };
        returned(code).map_err(|e| refused("finding the way to the peer", e))
    }

    fn connect(&mut self) -> Result<(), LinkError> {
        let Some(connection) = self.connection.take() else {
            return Ok(());
        };
        connection.id.set(OPTION_ID_ACK_TIMEOUT, self.common.wish.timeout);
        let raw = connection.id.id;
        let queue = self.common.queue(connection)?;
        let mut parameters = Connection::parameters(&self.common.wish, Some(&self.common.token));
        let manager = manager_of(&self.common.domain)?;
        // SAFETY: an identifier that the queue holds, and parameters and a token that live until the call returns.
        let code = unsafe { (manager.rdma_connect)(raw.0, &raw mut parameters) };
        returned(code).map_err(|e| refused("calling the peer", e))?;
        self.queue = Some(Arc::new(queue));
        Ok(())
    }
}

impl Meeting for Calling {
    fn poll(&mut self) -> Result<Option<Arc<dyn Queue>>, LinkError> {
        while let Some(event) = self.connection().and_then(|c| c.channel.next()) {
            match event.kind {
                CM_ADDR_RESOLVED => self.resolve_route()?,
                CM_ROUTE_RESOLVED => self.connect()?,
                CM_ESTABLISHED => return Ok(self.queue.take().map(|queue| queue as Arc<dyn Queue>)),
                kind => return Err(unexpected(kind, event.status)),
            }
        }
        Ok(None)
    }

    fn news(&self) -> BorrowedFd<'_> {
        let fd = self
            .connection()
            .map_or(self.common.domain.notices_fd(), |c| c.channel.fd());
        // SAFETY: each of them belongs to an object that lives as long as `self`.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    fn port(&self) -> u16 {
        0
    }
}

impl std::fmt::Debug for Listening {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Listening")
            .field("port", &self.number)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Calling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Calling").finish_non_exhaustive()
    }
}

/// An event that ends an attempt.
fn unexpected(kind: u32, status: i32) -> LinkError {
    let what = match kind {
        1 => "the peer's address is on no network of this device",
        3 => "there is no way to the peer",
        6 => "the connection failed",
        7 => "the peer does not answer",
        8 => "the peer turned the call away",
        CM_DISCONNECTED => "the peer has gone already",
        CM_DEVICE_REMOVAL => "the device is being removed",
        _ => "an event that does not belong here",
    };
    failed(
        "rdma-not-connected",
        4,
        format!("rdma_cm: {what} (event {kind}, status {status})"),
    )
}
