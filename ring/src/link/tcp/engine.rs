//! Stores as frames: puts gather in a buffer, a flush sends them with one call.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use std::sync::Arc;

use ntb_mem::line::{LINE_BYTES, Line};

use super::{
    conn::Conn,
    frame::{self, HEADER_BYTES, PAYLOAD_MAX},
};
use crate::link::engine::{Order, StoreEngine};

/// Bytes that gather before they are sent without a flush.
const GATHER: usize = 4 * PAYLOAD_MAX;

/// Stores into the memory of the peer of one connection.
#[derive(Debug)]
pub(super) struct TcpEngine {
    conn: Arc<Conn>,
    buffer: Vec<u8>,
}

impl TcpEngine {
    pub(super) fn new(conn: Arc<Conn>) -> Self {
        Self {
            conn,
            // Messages of a few KiB never make it grow.
            buffer: Vec::with_capacity(1 << 14),
        }
    }

    fn check(&self, line: u64, lines: u64) {
        // As for stores to mapped memory: a bug of this program, which nothing a peer does can cause.
        assert!(
            line.checked_add(lines)
                .is_some_and(|end| end <= self.conn.peer_lines()),
            "line outside the peer's memory"
        );
    }

    fn gathered(&mut self) {
        if self.buffer.len() >= GATHER {
            self.flush();
        }
    }
}

impl StoreEngine for TcpEngine {
    #[inline]
    fn order(&self) -> Order {
        Order::Ordered // the stream keeps it, and one side at a time applies what comes
    }

    #[inline]
    fn lines(&self) -> u64 {
        self.conn.peer_lines()
    }

    #[inline]
    fn put(&mut self, line: u64, content: &Line) {
        self.check(line, 1);
        frame::put_line(&mut self.buffer, line, content);
        self.gathered();
    }

    fn put_bytes(&mut self, line: u64, bytes: &[u8]) {
        self.check(line, bytes.len().div_ceil(LINE_BYTES) as u64);
        for (i, chunk) in bytes.chunks(PAYLOAD_MAX).enumerate() {
            self.buffer.reserve(HEADER_BYTES + chunk.len());
            frame::put_bytes(
                &mut self.buffer,
                line + (i * PAYLOAD_MAX / LINE_BYTES) as u64,
                chunk,
            );
            self.gathered();
        }
    }

    #[inline]
    fn barrier(&mut self) {}

    #[inline]
    fn flush(&mut self) {
        self.conn.send(&self.buffer);
        self.buffer.clear();
    }
}
