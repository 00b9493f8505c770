//! From meeting a peer to a connection with it.

use std::{sync::Arc, time::Duration};

use super::{
    Connected, DEPTH_LEAST, RdmaLink,
    error::failed,
    exchange::{Exchange, Hello, Message},
    joining::{Joined, Joining, Trouble, own_hello},
    named,
    receive::GREETING,
    send::{Parts, Wire},
};
use crate::link::{
    LinkError,
    meet::{Arrival, Guest, Met},
};

/// How long a caller is told that there is a peer already before it gives up. Joining one may take the other side eight
/// seconds, and noticing that one has died less.
const TAKEN_PATIENCE: Duration = Duration::from_secs(10);

impl RdmaLink {
    /// Meets peers: takes one on if there is none yet, and tells others so.
    pub(super) fn meet(&mut self) -> Result<(), LinkError> {
        let Some(device) = &self.device else { return Ok(()) };
        let hello = Message::Hello(own_hello(device, &self.options, self.mtu)).encode();
        for arrival in self.meeting.poll(&hello)? {
            match arrival {
                Arrival::Guest(guest, said) => self.welcome(guest, &said, &hello),
                Arrival::Host(met, said) => self.called(met, &said)?,
            }
        }
        if let Some(why) = self.meeting.news_of_strangers() {
            self.tell_transport("strangers", why);
        }
        Ok(())
    }

    /// Answers somebody who knows the secret and came here. Whoever does not fit is the one to give up.
    fn welcome(&mut self, guest: Guest, said: &[u8], hello: &[u8]) {
        if self.joining.is_some() || self.connected.is_some() {
            self.meeting.count_taken();
            let _ = guest.answer(&Message::Taken.encode());
            return;
        }
        let Some(Message::Hello(theirs)) = Message::decode(said) else {
            return self.give_up("the peer does not greet".to_owned());
        };
        // It is answered even if it does not fit, so that it can say in what.
        let Some(met) = guest.answer(hello) else { return };
        match self.begin(met, &theirs) {
            Ok(()) => {}
            Err(Trouble::Passing(why)) => self.give_up(why),
            Err(Trouble::Silent) => self.go_around_manager(),
            Err(Trouble::Final(e)) => self.give_up(e.what),
        }
    }

    /// rdma_cm is waited for no longer: the next connection is made without.
    fn go_around_manager(&mut self) {
        if let Some(device) = &mut self.device {
            device.manager_is_silent = true;
        }
        self.give_up("rdma_cm does not connect the two: from now on it is gone around".to_owned());
    }

    /// Takes up the answer of the side that was called.
    fn called(&mut self, met: Met, said: &[u8]) -> Result<(), LinkError> {
        let trouble = match Message::decode(said) {
            Some(Message::Hello(theirs)) => match self.begin(met, &theirs) {
                Ok(()) => return Ok(()),
                Err(trouble) => trouble,
            },
            Some(Message::Taken) => {
                if self.meeting.again_if_taken(TAKEN_PATIENCE) {
                    return Ok(());
                }
                Trouble::Final(failed(
                    "rdma-taken",
                    6,
                    "two have met there and a link has two ends; use another port or end one of them",
                ))
            }
            _ => Trouble::Final(failed(
                "rdma-mismatch",
                7,
                "the peer does not greet: build both from the same release",
            )),
        };
        match trouble {
            Trouble::Passing(why) => {
                self.give_up(why);
                Ok(())
            }
            Trouble::Silent => {
                self.go_around_manager();
                Ok(())
            }
            Trouble::Final(e) => Err(named(self.meeting.address(), e)),
        }
    }

    fn begin(&mut self, met: Met, theirs: &Hello) -> Result<(), Trouble> {
        let Some(device) = &self.device else { return Ok(()) };
        // Before the peer can know where anything is.
        self.own.clear_control();
        self.inbox.forget_rings();
        let exchange = Exchange::new(met);
        self.joining = Some(Joining::new(exchange, theirs, device, &self.options, self.mtu)?);
        Ok(())
    }

    /// Goes on with a connection that is being made.
    pub(super) fn join(&mut self) -> Result<(), LinkError> {
        let (Some(joining), Some(device)) = (self.joining.take(), &self.device) else {
            return Ok(());
        };
        match joining.poll(device, &self.options) {
            Ok(Err(joining)) => self.joining = Some(joining),
            Ok(Ok(joined)) => {
                if let Err(why) = self.connect(joined) {
                    self.give_up(why);
                }
            }
            Err(Trouble::Final(e)) => return Err(named(self.meeting.address(), e)),
            Err(Trouble::Passing(why)) => self.give_up(why),
            Err(Trouble::Silent) => self.go_around_manager(),
        }
        Ok(())
    }

    /// A connection did not come about; another is tried.
    fn give_up(&mut self, why: String) {
        self.inbox.detach();
        self.connected = None;
        self.meeting.again();
        if self.last_trouble.as_ref() != Some(&why) {
            self.tell_transport("rdma-not-connected", why.clone());
            self.last_trouble = Some(why);
        }
    }

    fn connect(&mut self, joined: Joined) -> Result<(), String> {
        let Joined {
            exchange,
            queue,
            remote,
        } = joined;
        let Some(device) = &self.device else { return Ok(()) };
        let mirror = device.mirror(&self.options).map_err(|e| e.what)?;
        let wire = Arc::new(Wire::new(Parts {
            queue: Arc::clone(&queue),
            mirror,
            remote,
            control: self.own.control(),
            immediate: device.adapter.port().fabric.has_immediate(),
            strict: self.options.strict,
            depth: self.options.depth,
            inline: self.options.inline_bytes,
        }));
        if queue.granted().depth < DEPTH_LEAST {
            let depth = queue.granted().depth;
            return Err(format!(
                "the device takes {depth} requests, and {DEPTH_LEAST} are needed"
            ));
        }
        if wire.inline < ntb_mem::line::LINE_BYTES {
            return Err(format!(
                "the device carries {} bytes in a request, and a line has 64",
                wire.inline
            ));
        }
        self.inbox
            .attach(
                Arc::clone(&queue),
                Arc::clone(&wire),
                device.buffers.clone(),
                self.own.runs(),
            )
            .map_err(|e| format!("completions cannot be waited for: {e}"))?;
        if exchange.is_caller() {
            wire.ring(GREETING);
        }
        self.last_trouble = None;
        self.tally.follow(&wire);
        self.connected = Some(Connected {
            wire,
            mtu: device.wish(&self.options, self.mtu).mtu,
            queue,
            exchange,
        });
        Ok(())
    }
}
