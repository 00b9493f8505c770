//! Queue pairs of real devices.

#![allow(
    unsafe_code,
    reason = "calls of libibverbs, and requests that name memory by address"
)]

use std::{os::fd::BorrowedFd, sync::Arc};

use rustix::io::Errno;

use super::{
    super::{
        account::RUNS_MAX,
        error::refused,
        verbs::{Granted, Piece, Port, Queue, QueueAddress, QueueWish, Received, Request, Sent, Verb},
    },
    abi::{
        ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE, AhAttr, CompChannel, Cq, GlobalRoute, QP_ACCESS_FLAGS,
        QP_AV, QP_DEST_QPN, QP_MAX_DEST_RD_ATOMIC, QP_MAX_QP_RD_ATOMIC, QP_MIN_RNR_TIMER, QP_PATH_MTU,
        QP_PKEY_INDEX, QP_PORT, QP_RETRY_CNT, QP_RNR_RETRY, QP_RQ_PSN, QP_SQ_PSN, QP_STATE, QP_TIMEOUT,
        QPS_INIT, QPS_RTR, QPS_RTS, QPT_RC, Qp, QpAttr, QpCap, QpInitAttr, RecvWr, SEND_INLINE,
        SEND_SIGNALED, SendWr, Sge, WC_WITH_IMM, WR_SEND, WR_WRITE, WR_WRITE_WITH_IMM, Wc,
    },
    context::{Domain, Handle, set_nonblocking},
    load::{errno, returned},
    manager::Connection,
};
use crate::link::{LinkError, random};

/// Smallest queue that is asked for.
const DEPTH_LEAST: u32 = 16;
/// Inline data that is asked for at least: a line.
const INLINE_LEAST: u32 = 64;
/// `min_rnr_timer`: 0.64 ms until a sender tries again whose message found no receive.
const RNR_TIMER: u8 = 12;
/// Work requests handed over together, and completions taken together.
const TOGETHER: usize = 2 * RUNS_MAX;

/// Completion queues of a queue pair.
#[derive(Debug)]
struct Completions {
    domain: Arc<Domain>,
    channel: Handle<CompChannel>,
    send: Handle<Cq>,
    receive: Handle<Cq>,
}

impl Completions {
    fn new(domain: &Arc<Domain>, wish: &QueueWish) -> Result<Self, LinkError> {
        let verbs = domain.verbs;
        // SAFETY: a live context.
        let channel = unsafe { (verbs.ibv_create_comp_channel)(domain.context.0) };
        if channel.is_null() {
            return Err(refused("making a completion channel", errno()));
        }
        let mut made = Self {
            domain: Arc::clone(domain),
            channel: Handle(channel),
            send: Handle(std::ptr::null_mut()),
            receive: Handle(std::ptr::null_mut()),
        };
        set_nonblocking(made.fd()).map_err(|e| refused("making a completion channel non-blocking", e))?;
        let none = std::ptr::null_mut();
        for (slot, entries, channel) in [
            (&mut made.send, wish.depth + 1, none),
            (&mut made.receive, wish.receives + 1, channel),
        ] {
            let entries = i32::try_from(entries).unwrap_or(i32::MAX);
            let create = verbs.ibv_create_cq;
            // SAFETY: a live context and a live channel or none.
            let cq = unsafe { create(domain.context.0, entries, std::ptr::null_mut(), channel, 0) };
            if cq.is_null() {
                return Err(refused(
                    &format!("making a completion queue of {entries} entries"),
                    errno(),
                ));
            }
            *slot = Handle(cq);
        }
        Ok(made)
    }

    fn fd(&self) -> i32 {
        // SAFETY: a live channel; the field never changes.
        unsafe { (*self.channel.0).fd }
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        let verbs = self.domain.verbs;
        // SAFETY: made above, destroyed once, after the queue pair that used them; every event was acknowledged.
        unsafe {
            for cq in [self.send.0, self.receive.0] {
                if !cq.is_null() {
                    (verbs.ibv_destroy_cq)(cq);
                }
            }
            (verbs.ibv_destroy_comp_channel)(self.channel.0);
        }
    }
}

/// Who destroys the queue pair.
#[derive(Debug)]
enum Owner {
    This,
    Manager(Connection),
}

/// A queue pair.
#[derive(Debug)]
pub(super) struct RealQueue {
    qp: Handle<Qp>,
    owner: Owner,
    completions: Completions,
    granted: Granted,
    wish: QueueWish,
    port: Port,
    lid: u16,
    first_packet: u32,
}

/// Makes a queue pair by `create`, asking for less where the device does not give what is wished.
fn make<T>(
    completions: &Completions,
    wish: &QueueWish,
    mut create: impl FnMut(*mut QpInitAttr) -> Result<T, Errno>,
) -> Result<(T, Granted), LinkError> {
    let mut depth = wish.depth;
    loop {
        let mut inline = wish.inline;
        let last = loop {
            let mut attributes = QpInitAttr {
                qp_context: std::ptr::null_mut(),
                send_cq: completions.send.0,
                recv_cq: completions.receive.0,
                srq: std::ptr::null_mut(),
                cap: QpCap {
                    max_send_wr: depth,
                    max_recv_wr: wish.receives,
                    max_send_sge: 1,
                    max_recv_sge: 1,
                    max_inline_data: inline,
                },
                qp_type: QPT_RC,
                sq_sig_all: 0,
            };
            match create(&raw mut attributes) {
                Ok(made) => {
                    // What is granted may be more than what the completion queue was made for.
                    let granted = Granted {
                        depth: attributes.cap.max_send_wr.min(depth).max(1),
                        inline: attributes.cap.max_inline_data,
                    };
                    return Ok((made, granted));
                }
                Err(e) if inline <= INLINE_LEAST => break e,
                Err(_) => inline = (inline / 2).max(INLINE_LEAST),
            }
        };
        if depth <= DEPTH_LEAST {
            return Err(refused(
                &format!("making a queue pair of {depth} requests with {INLINE_LEAST} bytes of inline data"),
                last,
            ));
        }
        depth = (depth / 2).max(DEPTH_LEAST);
    }
}

impl RealQueue {
    /// A queue pair to be connected by exchange of addresses.
    pub(super) fn new(
        domain: &Arc<Domain>,
        port: &Port,
        lid: u16,
        wish: &QueueWish,
    ) -> Result<Self, LinkError> {
        let completions = Completions::new(domain, wish)?;
        let (qp, granted) = make(&completions, wish, |attributes| {
            // SAFETY: a live domain and attributes that name live completion queues.
            let qp = unsafe { (domain.verbs.ibv_create_qp)(domain.pd.0, attributes) };
            match qp.is_null() {
                true => Err(errno()),
                false => Ok(Handle(qp)),
            }
        })?;
        let queue = Self {
            qp,
            owner: Owner::This,
            completions,
            granted,
            wish: *wish,
            port: port.clone(),
            lid,
            // Any 24 bits: packets of an earlier queue pair with the same number are the less likely to be taken.
            first_packet: random_packet(),
        };
        let attributes = QpAttr {
            qp_state: QPS_INIT,
            port_num: port.port,
            qp_access_flags: ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE,
            ..QpAttr::default()
        };
        queue.modify(
            "INIT",
            attributes,
            QP_STATE | QP_PKEY_INDEX | QP_PORT | QP_ACCESS_FLAGS,
        )?;
        Ok(queue)
    }

    /// A queue pair of the connection manager's.
    pub(super) fn of_manager(
        domain: &Arc<Domain>,
        port: &Port,
        wish: &QueueWish,
        connection: Connection,
    ) -> Result<Self, LinkError> {
        let completions = Completions::new(domain, wish)?;
        let (qp, granted) = make(&completions, wish, |attributes| {
            connection.create_queue(domain, attributes)
        })?;
        Ok(Self {
            qp,
            owner: Owner::Manager(connection),
            completions,
            granted,
            wish: *wish,
            port: port.clone(),
            lid: 0,
            first_packet: 0,
        })
    }

    pub(super) fn connection(&self) -> Option<&Connection> {
        match &self.owner {
            Owner::This => None,
            Owner::Manager(connection) => Some(connection),
        }
    }

    fn modify(&self, to: &str, mut attributes: QpAttr, mask: i32) -> Result<(), LinkError> {
        let verbs = self.completions.domain.verbs;
        // SAFETY: a live queue pair of this object's, and attributes for what the mask names.
        let code = unsafe { (verbs.ibv_modify_qp)(self.qp.0, &raw mut attributes, mask) };
        returned(code).map_err(|e| refused(&format!("bringing a queue pair to {to}"), e))
    }
}

fn random_packet() -> u32 {
    let mut bytes = [0; 4];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(4) => u32::from_le_bytes(bytes) & 0xff_ffff,
        _ => random::Random::new(u64::from(std::process::id())).next() as u32 & 0xff_ffff,
    }
}

impl Drop for RealQueue {
    fn drop(&mut self) {
        match &self.owner {
            // SAFETY: made by this object and destroyed once; completion queues go after it.
            Owner::This => drop(unsafe { (self.completions.domain.verbs.ibv_destroy_qp)(self.qp.0) }),
            Owner::Manager(connection) => connection.destroy_queue(),
        }
    }
}

/// Number of a packet size in `enum ibv_mtu`.
pub(super) fn mtu_number(bytes: u32) -> u32 {
    (bytes.max(256) / 256).ilog2() + 1
}

/// Bytes of a packet by its number in `enum ibv_mtu`.
pub(super) fn mtu_bytes(number: u32) -> u32 {
    128 << number.clamp(1, 5)
}

impl Queue for RealQueue {
    fn granted(&self) -> Granted {
        self.granted
    }

    fn address(&self) -> QueueAddress {
        QueueAddress {
            // SAFETY: a live queue pair; the field never changes.
            number: unsafe { (*self.qp.0).qp_num },
            first_packet: self.first_packet,
            lid: self.lid,
            gid: self.port.gid,
            mtu: self.wish.mtu,
        }
    }

    fn connect(&self, peer: &QueueAddress) -> Result<(), LinkError> {
        let is_global = peer.lid == 0 || self.lid == 0;
        let ready = QpAttr {
            qp_state: QPS_RTR,
            path_mtu: mtu_number(self.wish.mtu.min(peer.mtu)),
            dest_qp_num: peer.number,
            rq_psn: peer.first_packet,
            max_dest_rd_atomic: 1,
            min_rnr_timer: RNR_TIMER,
            ah_attr: AhAttr {
                grh: GlobalRoute {
                    dgid: peer.gid,
                    sgid_index: self.port.gid_index,
                    hop_limit: 64,
                    traffic_class: self.wish.traffic_class,
                    flow_label: 0,
                },
                dlid: peer.lid,
                sl: self.wish.service_level,
                is_global: u8::from(is_global),
                port_num: self.port.port,
                ..AhAttr::default()
            },
            ..QpAttr::default()
        };
        let mask = QP_STATE
            | QP_AV
            | QP_PATH_MTU
            | QP_DEST_QPN
            | QP_RQ_PSN
            | QP_MAX_DEST_RD_ATOMIC
            | QP_MIN_RNR_TIMER;
        self.modify("RTR", ready, mask)?;
        let sending = QpAttr {
            qp_state: QPS_RTS,
            timeout: self.wish.timeout,
            retry_cnt: self.wish.retries,
            rnr_retry: self.wish.rnr_retries,
            sq_psn: self.first_packet,
            max_rd_atomic: 1,
            ..QpAttr::default()
        };
        let mask = QP_STATE | QP_TIMEOUT | QP_RETRY_CNT | QP_RNR_RETRY | QP_SQ_PSN | QP_MAX_QP_RD_ATOMIC;
        self.modify("RTS", sending, mask)
    }

    fn post(&self, requests: &[Request]) -> Result<(), Errno> {
        for some in requests.chunks(TOGETHER) {
            let mut pieces = [Sge::default(); TOGETHER];
            let mut orders = [SendWr::EMPTY; TOGETHER];
            let mut next: *mut SendWr = std::ptr::null_mut();
            // From the last to the first, each naming the one behind it.
            for ((request, piece), order) in some.iter().zip(&mut pieces).zip(&mut orders).rev() {
                fill(request, piece, order);
                order.next = next;
                next = order;
            }
            let mut bad = std::ptr::null_mut();
            // SAFETY: a live queue pair with its context's table of operations; requests, pieces and inline data live until
            // the call returns, and other data is registered memory, held by the mirror until its completion.
            let code = unsafe {
                match (*(*self.qp.0).context).ops.post_send {
                    Some(post_send) => post_send(self.qp.0, next, &raw mut bad),
                    None => return Err(Errno::NOSYS),
                }
            };
            returned(code)?;
        }
        Ok(())
    }

    fn post_receive(&self, id: u64, buffer: Piece) -> Result<(), Errno> {
        let mut piece = Sge {
            addr: buffer.address,
            length: buffer.bytes,
            lkey: buffer.lkey,
        };
        let mut order = RecvWr {
            wr_id: id,
            next: std::ptr::null_mut(),
            sg_list: &raw mut piece,
            num_sge: 1,
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: as in `post`; the buffer is registered memory that outlives the queue pair.
        let code = unsafe {
            match (*(*self.qp.0).context).ops.post_recv {
                Some(post_recv) => post_recv(self.qp.0, &raw mut order, &raw mut bad),
                None => return Err(Errno::NOSYS),
            }
        };
        returned(code)
    }

    fn sent(&self, out: &mut [Sent]) -> Result<usize, Errno> {
        take(self.completions.send, out, |wc| Sent {
            id: wc.wr_id,
            status: wc.status,
        })
    }

    fn received(&self, out: &mut [Received]) -> Result<usize, Errno> {
        take(self.completions.receive, out, |wc| Received {
            id: wc.wr_id,
            status: wc.status,
            bytes: wc.byte_len,
            immediate: (wc.wc_flags & WC_WITH_IMM != 0).then(|| u32::from_be(wc.imm_data)),
        })
    }

    fn arrivals(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the channel, which lives as long as `self`.
        unsafe { BorrowedFd::borrow_raw(self.completions.fd()) }
    }

    fn arm(&self) -> Result<(), Errno> {
        let verbs = self.completions.domain.verbs;
        let (mut cq, mut cookie) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: a live channel that does not block; each event taken is acknowledged once, at its queue.
        unsafe {
            while (verbs.ibv_get_cq_event)(self.completions.channel.0, &raw mut cq, &raw mut cookie) == 0 {
                (verbs.ibv_ack_cq_events)(cq, 1);
            }
            let cq = self.completions.receive.0;
            match (*(*cq).context).ops.req_notify_cq {
                Some(req_notify_cq) => returned(req_notify_cq(cq, 0)),
                None => Err(Errno::NOSYS),
            }
        }
    }

    fn ended(&self) -> Option<String> {
        self.connection().and_then(Connection::ended)
    }

    fn news(&self) -> Option<BorrowedFd<'_>> {
        self.connection().map(Connection::news)
    }
}

fn fill(request: &Request, piece: &mut Sge, order: &mut SendWr) {
    *piece = Sge {
        addr: request.data.address,
        length: request.data.bytes,
        lkey: request.data.lkey,
    };
    order.wr_id = request.id;
    order.sg_list = piece;
    order.num_sge = i32::from(request.data.bytes > 0);
    if request.signalled {
        order.send_flags |= SEND_SIGNALED;
    }
    if request.inline && request.data.bytes > 0 {
        order.send_flags |= SEND_INLINE;
    }
    match request.verb {
        Verb::Write { address, rkey } => {
            order.opcode = WR_WRITE;
            (order.remote_addr, order.rkey) = (address, rkey);
        }
        Verb::WriteImmediate {
            address,
            rkey,
            number,
        } => {
            order.opcode = WR_WRITE_WITH_IMM;
            (order.remote_addr, order.rkey) = (address, rkey);
            order.imm_data = number.to_be();
        }
        Verb::Send => order.opcode = WR_SEND,
    }
}

fn take<T>(cq: Handle<Cq>, out: &mut [T], convert: impl Fn(&Wc) -> T) -> Result<usize, Errno> {
    let mut taken = [Wc::default(); TOGETHER];
    let most = out.len().min(TOGETHER) as i32;
    // SAFETY: a live completion queue with its context's table of operations, and room for `most` completions.
    let count = unsafe {
        match (*(*cq.0).context).ops.poll_cq {
            Some(poll_cq) => poll_cq(cq.0, most, taken.as_mut_ptr()),
            None => return Err(Errno::NOSYS),
        }
    };
    let count = usize::try_from(count).map_err(|_| Errno::IO)?;
    for (to, from) in out.iter_mut().zip(taken.iter().take(count)) {
        *to = convert(from);
    }
    Ok(count)
}
