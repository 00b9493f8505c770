//! The structures against the real headers: `cargo test -p ntb-ring --lib layout -- --ignored`, with `NTB_RDMA_HEADERS` as the
//! folder of `infiniband/verbs.h` where that is not the compiler's own.

use std::{
    fmt::Write as _,
    mem::{offset_of, size_of},
    process::Command,
};

use super::abi::{
    AhAttr, AsyncEvent, CmChannel, CmEvent, CmId, CompChannel, ConnParam, Context, ContextOps, Cq,
    GlobalRoute, Mr, PortAttr, Qp, QpAttr, QpCap, QpInitAttr, RecvWr, SendWr, Sge, Wc,
};

macro_rules! expect {
    ($out:ident; $($ours:ident = $theirs:literal $($whole:ident)? { $($field:ident $(as $name:literal)?),* };)*) => {
        $(
            $(let _ = stringify!($whole); $out.push((format!("sizeof({})", $theirs), size_of::<$ours>()));)?
            $(
                #[allow(unused_mut, unused_assignments, reason = "some have another name in C")]
                let name = { let mut name = stringify!($field); $(name = $name;)? name };
                $out.push((format!("offsetof({}, {})", $theirs, name), offset_of!($ours, $field)));
            )*
        )*
    };
}

#[test]
#[ignore = "needs a C compiler and the headers of libibverbs and librdmacm"]
fn structures_are_those_of_the_headers() {
    let mut all: Vec<(String, usize)> = Vec::new();
    expect!(all;
        ContextOps = "struct ibv_context_ops" whole { poll_cq, req_notify_cq, post_send, post_recv };
        Context = "struct ibv_context" { device, ops, async_fd };
        Mr = "struct ibv_mr" whole { lkey, rkey };
        CompChannel = "struct ibv_comp_channel" whole { fd };
        Cq = "struct ibv_cq" { context };
        Qp = "struct ibv_qp" { context, qp_num };
        Wc = "struct ibv_wc" whole { wr_id, status, opcode, vendor_err, byte_len, imm_data, wc_flags };
        Sge = "struct ibv_sge" whole { addr, length, lkey };
        SendWr = "struct ibv_send_wr" whole { wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data,
            remote_addr as "wr.rdma.remote_addr", rkey as "wr.rdma.rkey" };
        RecvWr = "struct ibv_recv_wr" whole { wr_id, next, sg_list, num_sge };
        QpCap = "struct ibv_qp_cap" whole { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data };
        QpInitAttr = "struct ibv_qp_init_attr" whole { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all };
        GlobalRoute = "struct ibv_global_route" whole { dgid, flow_label, sgid_index, hop_limit, traffic_class };
        AhAttr = "struct ibv_ah_attr" whole { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num };
        QpAttr = "struct ibv_qp_attr" whole { qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn,
            dest_qp_num, qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index, alt_pkey_index, en_sqd_async_notify,
            sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry,
            alt_port_num, alt_timeout, rate_limit };
        PortAttr = "struct ibv_port_attr" whole { state, max_mtu, active_mtu, gid_tbl_len, max_msg_sz, lid, link_layer };
        AsyncEvent = "struct ibv_async_event" whole { element, event_type };
        CmChannel = "struct rdma_event_channel" whole { fd };
        CmId = "struct rdma_cm_id" { verbs, qp, port_num };
        ConnParam = "struct rdma_conn_param" whole { private_data, private_data_len, responder_resources,
            initiator_depth, flow_control, retry_count, rnr_retry_count, srq, qp_num };
        CmEvent = "struct rdma_cm_event" { id, listen_id, event, status, conn as "param.conn" };
    );
    let constants: [(&str, u32); 13] = [
        ("IBV_QPT_RC", super::abi::QPT_RC),
        ("IBV_NODE_RNIC", super::abi::NODE_RNIC),
        ("IBV_WR_RDMA_WRITE_WITH_IMM", super::abi::WR_WRITE_WITH_IMM),
        ("IBV_WR_SEND", super::abi::WR_SEND),
        ("IBV_SEND_SIGNALED", super::abi::SEND_SIGNALED),
        ("IBV_SEND_INLINE", super::abi::SEND_INLINE),
        ("IBV_WC_WITH_IMM", super::abi::WC_WITH_IMM),
        ("IBV_EVENT_GID_CHANGE", super::abi::EVENT_GID_CHANGE),
        ("IBV_EVENT_PORT_ERR", super::abi::EVENT_PORT_ERR),
        ("IBV_EVENT_DEVICE_FATAL", super::abi::EVENT_DEVICE_FATAL),
        ("IBV_QP_DEST_QPN", super::abi::QP_DEST_QPN as u32),
        ("RDMA_CM_EVENT_TIMEWAIT_EXIT", super::abi::CM_TIMEWAIT_EXIT),
        ("RDMA_PS_TCP", super::abi::PS_TCP),
    ];
    all.extend(constants.map(|(name, value)| (format!("(size_t){name}"), value as usize)));

    let mut source =
        String::from("#include <stddef.h>\n#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n");
    for (expression, value) in &all {
        writeln!(
            source,
            "_Static_assert({expression} == {value}, \"{expression} is not {value}\");"
        )
        .unwrap();
    }
    let folder = std::env::temp_dir().join(format!("ntb-layout-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("layout.c");
    std::fs::write(&file, source).unwrap();
    let mut compiler = Command::new("cc");
    if let Some(headers) = std::env::var_os("NTB_RDMA_HEADERS") {
        compiler.arg("-I").arg(headers);
    }
    let output = compiler
        .arg("-fsyntax-only")
        .arg(&file)
        .output()
        .expect("a C compiler");
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(all.len() > 120, "{}", all.len());
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
