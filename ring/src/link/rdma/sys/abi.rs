//! The part of the binary interface of libibverbs and librdmacm that the link uses: structures, and functions by pointer.
//!
//! Written by hand after `infiniband/verbs.h` and `rdma/rdma_cma.h` of rdma-core, whose layout has not changed since
//! version 1.1 of its symbols: fields are only added behind those here, and the library allocates what it hands out. The
//! sizes and offsets are asserted below, and compared with the real headers by the test `layout` where those are
//! installed. Fields that are never used here are left out where nothing used stands behind them.
//!
//! Enumerations are plain integers: a library may send values that this version does not know.

use std::{
    ffi::{c_int, c_uint, c_void},
    mem::{offset_of, size_of},
};

/// An object whose inside is the library's own.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Opaque([u8; 0]);

/// `struct ibv_device`.
pub(crate) type Device = Opaque;

/// `struct ibv_context`, whose table of operations holds what C reaches by inline functions.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) device: *mut Device,
    pub(crate) ops: ContextOps,
    pub(crate) cmd_fd: c_int,
    pub(crate) async_fd: c_int,
    pub(crate) num_comp_vectors: c_int,
}

type Slot = *mut c_void;

/// `struct ibv_context_ops`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct ContextOps {
    before_poll_cq: [Slot; 11],
    pub(crate) poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    pub(crate) req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    before_post_send: [Slot; 12],
    pub(crate) post_send: Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    pub(crate) post_recv: Option<unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    after_post_recv: [Slot; 5],
}

/// `struct ibv_pd`.
pub(crate) type Pd = Opaque;

/// `struct ibv_mr`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Mr {
    context: *mut Context,
    pd: *mut Pd,
    addr: *mut c_void,
    length: usize,
    handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

/// `struct ibv_comp_channel`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct CompChannel {
    context: *mut Context,
    pub(crate) fd: c_int,
    refcnt: c_int,
}

/// `struct ibv_cq`, its first fields.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Cq {
    pub(crate) context: *mut Context,
    channel: *mut CompChannel,
    cq_context: *mut c_void,
    handle: u32,
    cqe: c_int,
}

/// `struct ibv_qp`, its first fields.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Qp {
    pub(crate) context: *mut Context,
    qp_context: *mut c_void,
    pd: *mut Pd,
    send_cq: *mut Cq,
    recv_cq: *mut Cq,
    srq: *mut c_void,
    handle: u32,
    pub(crate) qp_num: u32,
    state: c_uint,
    qp_type: c_uint,
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wc {
    pub(crate) wr_id: u64,
    pub(crate) status: c_uint,
    pub(crate) opcode: c_uint,
    pub(crate) vendor_err: u32,
    pub(crate) byte_len: u32,
    pub(crate) imm_data: u32,
    qp_num: u32,
    src_qp: u32,
    pub(crate) wc_flags: c_uint,
    pkey_index: u16,
    slid: u16,
    sl: u8,
    dlid_path_bits: u8,
}

/// `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sge {
    pub(crate) addr: u64,
    pub(crate) length: u32,
    pub(crate) lkey: u32,
}

/// `struct ibv_send_wr`; of the unions only what writes and sends use.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut SendWr,
    pub(crate) sg_list: *mut Sge,
    pub(crate) num_sge: c_int,
    pub(crate) opcode: c_uint,
    pub(crate) send_flags: c_uint,
    pub(crate) imm_data: u32,
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
    rest_of_wr: [u32; 5],
    rest: [u64; 7],
}

impl SendWr {
    pub(crate) const EMPTY: Self = Self {
        wr_id: 0,
        next: std::ptr::null_mut(),
        sg_list: std::ptr::null_mut(),
        num_sge: 0,
        opcode: 0,
        send_flags: 0,
        imm_data: 0,
        remote_addr: 0,
        rkey: 0,
        rest_of_wr: [0; 5],
        rest: [0; 7],
    };
}

/// `struct ibv_recv_wr`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct RecvWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut RecvWr,
    pub(crate) sg_list: *mut Sge,
    pub(crate) num_sge: c_int,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct QpCap {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct QpInitAttr {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut Cq,
    pub(crate) recv_cq: *mut Cq,
    pub(crate) srq: *mut c_void,
    pub(crate) cap: QpCap,
    pub(crate) qp_type: c_uint,
    pub(crate) sq_sig_all: c_int,
}

/// `struct ibv_global_route`.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GlobalRoute {
    pub(crate) dgid: [u8; 16],
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AhAttr {
    pub(crate) grh: GlobalRoute,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(crate) src_path_bits: u8,
    pub(crate) static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port_num: u8,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct QpAttr {
    pub(crate) qp_state: c_uint,
    pub(crate) cur_qp_state: c_uint,
    pub(crate) path_mtu: c_uint,
    pub(crate) path_mig_state: c_uint,
    pub(crate) qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) dest_qp_num: u32,
    pub(crate) qp_access_flags: c_uint,
    pub(crate) cap: QpCap,
    pub(crate) ah_attr: AhAttr,
    pub(crate) alt_ah_attr: AhAttr,
    pub(crate) pkey_index: u16,
    pub(crate) alt_pkey_index: u16,
    pub(crate) en_sqd_async_notify: u8,
    pub(crate) sq_draining: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) port_num: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) alt_port_num: u8,
    pub(crate) alt_timeout: u8,
    pub(crate) rate_limit: u32,
}

/// `struct ibv_port_attr`; the library's `ibv_query_port` fills it up to `flags`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PortAttr {
    pub(crate) state: c_uint,
    pub(crate) max_mtu: c_uint,
    pub(crate) active_mtu: c_uint,
    pub(crate) gid_tbl_len: c_int,
    port_cap_flags: u32,
    pub(crate) max_msg_sz: u32,
    bad_pkey_cntr: u32,
    qkey_viol_cntr: u32,
    pkey_tbl_len: u16,
    pub(crate) lid: u16,
    sm_lid: u16,
    lmc: u8,
    max_vl_num: u8,
    sm_sl: u8,
    subnet_timeout: u8,
    init_type_reply: u8,
    active_width: u8,
    active_speed: u8,
    phys_state: u8,
    pub(crate) link_layer: u8,
    flags: u8,
    port_cap_flags2: u16,
}

/// `struct ibv_async_event`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AsyncEvent {
    /// A pointer, or for events of a port its number in the first four bytes.
    pub(crate) element: u64,
    pub(crate) event_type: c_uint,
}

/// `struct rdma_event_channel`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct CmChannel {
    pub(crate) fd: c_int,
}

/// `struct rdma_cm_id`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct CmId {
    pub(crate) verbs: *mut Context,
    channel: *mut CmChannel,
    context: *mut c_void,
    pub(crate) qp: *mut Qp,
    route: [u64; 39],
    ps: c_uint,
    pub(crate) port_num: u8,
}

/// `struct rdma_conn_param`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnParam {
    pub(crate) private_data: *const c_void,
    pub(crate) private_data_len: u8,
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) flow_control: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) srq: u8,
    pub(crate) qp_num: u32,
}

/// `struct rdma_cm_event`; of the union only what connections use.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct CmEvent {
    pub(crate) id: *mut CmId,
    pub(crate) listen_id: *mut CmId,
    pub(crate) event: c_uint,
    pub(crate) status: c_int,
    pub(crate) conn: ConnParam,
}

const _: () = {
    assert!(size_of::<ContextOps>() == 32 * 8);
    assert!(offset_of!(ContextOps, poll_cq) == 88);
    assert!(offset_of!(ContextOps, post_send) == 200);
    assert!(offset_of!(Context, async_fd) == 268);
    assert!(offset_of!(Mr, rkey) == 40);
    assert!(offset_of!(Qp, qp_num) == 52);
    assert!(size_of::<Wc>() == 48);
    assert!(size_of::<SendWr>() == 128);
    assert!(size_of::<RecvWr>() == 32);
    assert!(size_of::<QpInitAttr>() == 64);
    assert!(size_of::<QpAttr>() == 144);
    assert!(size_of::<AhAttr>() == 32);
    assert!(size_of::<PortAttr>() == 52);
    assert!(size_of::<AsyncEvent>() == 16);
    assert!(size_of::<ConnParam>() == 24);
    assert!(offset_of!(CmId, qp) == 24);
    assert!(offset_of!(CmId, port_num) == 348);
    assert!(offset_of!(CmEvent, conn) == 24);
};

pub(crate) const QPT_RC: c_uint = 2;
pub(crate) const NODE_RNIC: u32 = 4;

pub(crate) const ACCESS_LOCAL_WRITE: c_uint = 1;
pub(crate) const ACCESS_REMOTE_WRITE: c_uint = 2;

pub(crate) const WR_WRITE: c_uint = 0;
pub(crate) const WR_WRITE_WITH_IMM: c_uint = 1;
pub(crate) const WR_SEND: c_uint = 2;

pub(crate) const SEND_SIGNALED: c_uint = 2;
pub(crate) const SEND_INLINE: c_uint = 8;

pub(crate) const WC_WITH_IMM: c_uint = 2;

pub(crate) const QPS_INIT: c_uint = 1;
pub(crate) const QPS_RTR: c_uint = 2;
pub(crate) const QPS_RTS: c_uint = 3;

pub(crate) const QP_STATE: c_int = 1;
pub(crate) const QP_ACCESS_FLAGS: c_int = 1 << 3;
pub(crate) const QP_PKEY_INDEX: c_int = 1 << 4;
pub(crate) const QP_PORT: c_int = 1 << 5;
pub(crate) const QP_AV: c_int = 1 << 7;
pub(crate) const QP_PATH_MTU: c_int = 1 << 8;
pub(crate) const QP_TIMEOUT: c_int = 1 << 9;
pub(crate) const QP_RETRY_CNT: c_int = 1 << 10;
pub(crate) const QP_RNR_RETRY: c_int = 1 << 11;
pub(crate) const QP_RQ_PSN: c_int = 1 << 12;
pub(crate) const QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
pub(crate) const QP_MIN_RNR_TIMER: c_int = 1 << 15;
pub(crate) const QP_SQ_PSN: c_int = 1 << 16;
pub(crate) const QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
pub(crate) const QP_DEST_QPN: c_int = 1 << 20;

pub(crate) const EVENT_DEVICE_FATAL: c_uint = 8;
pub(crate) const EVENT_PORT_ACTIVE: c_uint = 9;
pub(crate) const EVENT_PORT_ERR: c_uint = 10;
pub(crate) const EVENT_LID_CHANGE: c_uint = 11;
pub(crate) const EVENT_GID_CHANGE: c_uint = 18;

pub(crate) const PS_TCP: c_uint = 0x0106;

pub(crate) const CM_ADDR_RESOLVED: c_uint = 0;
pub(crate) const CM_ROUTE_RESOLVED: c_uint = 2;
pub(crate) const CM_CONNECT_REQUEST: c_uint = 4;
pub(crate) const CM_ESTABLISHED: c_uint = 9;
pub(crate) const CM_DISCONNECTED: c_uint = 10;
pub(crate) const CM_DEVICE_REMOVAL: c_uint = 11;
pub(crate) const CM_ADDR_CHANGE: c_uint = 14;
pub(crate) const CM_TIMEWAIT_EXIT: c_uint = 15;

/// `RDMA_OPTION_ID`, its type of service and its time-out for acknowledgements.
pub(crate) const OPTION_ID: c_int = 0;
pub(crate) const OPTION_ID_TOS: c_int = 0;
pub(crate) const OPTION_ID_ACK_TIMEOUT: c_int = 3;
