//! Real devices, through libibverbs and librdmacm.

mod abi;
mod choose;
mod context;
#[cfg(test)]
mod layout;
mod load;
mod manager;
mod queue;

use std::{net::IpAddr, os::fd::BorrowedFd, sync::Arc};

use super::{
    error::unavailable,
    options::{Manager as Who, RdmaOptions},
    verbs::{
        Adapter, Fabric, Meeting, Memory, Notice, Port, Prepare, Queue, QueueWish, Registered, TOKEN_BYTES,
        Unusable,
    },
};
use crate::link::LinkError;
use context::Domain;
use load::Verbs;
use queue::{RealQueue, mtu_bytes};

/// What there is of RDMA on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// A link can be made over this port.
    Usable(Port),
    /// It cannot; why.
    Unavailable(String),
}

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Usable(port) => port.fmt(f),
            Self::Unavailable(why) => write!(f, "unavailable: {why}"),
        }
    }
}

/// Looks for a device that a link could use, without opening it. `wanted` is the address of this machine that the peer is
/// met by, where that is known.
pub fn probe(options: &RdmaOptions, wanted: Option<IpAddr>) -> Found {
    match find(options, wanted) {
        Ok(port) => Found::Usable(port),
        Err(e) => {
            let why = e.what.strip_prefix("RDMA unavailable: ").unwrap_or(&e.what);
            Found::Unavailable(why.to_owned())
        }
    }
}

/// The kernel's devices first: without any, nobody is told to install a library.
fn find(options: &RdmaOptions, wanted: Option<IpAddr>) -> Result<Port, LinkError> {
    let chosen = choose::choose(options, wanted, &addresses);
    if let (Err(e), Err(why)) = (&chosen, Verbs::get()) {
        let found = e.what.strip_prefix("RDMA unavailable: ").unwrap_or(&e.what);
        return Err(unavailable(format!(
            "{found}; {why}: install rdma-core (libibverbs1, librdmacm1, ibverbs-providers)"
        )));
    }
    let port = chosen?;
    Verbs::get().map_err(|why| {
        unavailable(format!(
            "device {} is there, but {why}: install rdma-core (libibverbs1, librdmacm1, ibverbs-providers)",
            port.device
        ))
    })?;
    let driven = context::driven()?;
    if !driven.contains(&port.device) {
        return Err(unavailable(format!(
            "the kernel has device {}, but no provider library drives it: install ibverbs-providers (rdma-core)",
            port.device
        )));
    }
    Ok(port)
}

/// Opens the device that suits.
pub(crate) fn open(options: &RdmaOptions, wanted: Option<IpAddr>) -> Result<Arc<dyn Adapter>, LinkError> {
    let port = find(options, wanted)?;
    let domain = Domain::open(&port.device, options.manager != Who::Never)?;
    let attributes = domain.query_port(port.port)?;
    Ok(Arc::new(RealAdapter {
        lid: if port.fabric == Fabric::InfiniBand {
            attributes.lid
        } else {
            0
        },
        mtu: mtu_bytes(attributes.active_mtu),
        options: options.clone(),
        domain,
        port,
    }))
}

/// IP addresses of a network interface.
fn addresses(interface: &str) -> Vec<IpAddr> {
    interfaces::addresses(interface)
}

mod interfaces {
    #![allow(unsafe_code, reason = "a list that the C library hands out")]

    use std::{ffi::CStr, net::IpAddr};

    /// IP addresses of a network interface.
    pub(super) fn addresses(interface: &str) -> Vec<IpAddr> {
        let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
        // SAFETY: room for a pointer.
        if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
            return Vec::new();
        }
        let (mut found, mut at) = (Vec::new(), list);
        // SAFETY: a list that was not freed yet, whose entries name each other and end with null.
        while let Some(entry) = unsafe { at.as_ref() } {
            // SAFETY: every entry has a terminated name.
            let name = unsafe { CStr::from_ptr(entry.ifa_name) };
            if name.to_bytes() == interface.as_bytes() {
                found.extend(address(entry.ifa_addr));
            }
            at = entry.ifa_next;
        }
        // SAFETY: the list that was returned, once.
        unsafe { libc::freeifaddrs(list) };
        found
    }

    fn address(at: *const libc::sockaddr) -> Option<IpAddr> {
        // SAFETY: null, or an address of the family that it says.
        unsafe {
            match i32::from(at.as_ref()?.sa_family) {
                libc::AF_INET => {
                    let v4 = at.cast::<libc::sockaddr_in>().read_unaligned();
                    Some(IpAddr::from(v4.sin_addr.s_addr.to_ne_bytes()))
                }
                libc::AF_INET6 => {
                    let v6 = at.cast::<libc::sockaddr_in6>().read_unaligned();
                    Some(IpAddr::from(v6.sin6_addr.s6_addr))
                }
                _ => None,
            }
        }
    }
}

#[derive(Debug)]
struct RealAdapter {
    domain: Arc<Domain>,
    port: Port,
    lid: u16,
    mtu: u32,
    options: RdmaOptions,
}

impl Adapter for RealAdapter {
    fn port(&self) -> &Port {
        &self.port
    }

    fn is_usable(&self) -> Result<(), Unusable> {
        choose::is_unchanged(&self.options.sysfs, &self.port, &addresses)
    }

    fn mtu(&self) -> u32 {
        self.mtu
    }

    fn has_manager(&self) -> bool {
        // rdma_cm goes by IP addresses.
        self.domain.manager.is_some() && self.port.ip.is_some()
    }

    fn register(&self, memory: Memory, remote: bool) -> Result<Arc<dyn Registered>, LinkError> {
        self.domain.register(memory, remote)
    }

    fn queue(&self, wish: &QueueWish) -> Result<Arc<dyn Queue>, LinkError> {
        Ok(Arc::new(RealQueue::new(
            &self.domain,
            &self.port,
            self.lid,
            wish,
        )?))
    }

    fn listen(
        &self,
        wish: &QueueWish,
        token: [u8; TOKEN_BYTES],
        prepare: Prepare,
    ) -> Result<Box<dyn Meeting>, LinkError> {
        let listening = manager::Listening::new(&self.domain, &self.port, wish, token, prepare)?;
        Ok(Box::new(listening))
    }

    fn call(
        &self,
        wish: &QueueWish,
        to: (IpAddr, u16),
        token: [u8; TOKEN_BYTES],
        prepare: Prepare,
    ) -> Result<Box<dyn Meeting>, LinkError> {
        let calling = manager::Calling::new(&self.domain, &self.port, wish, to, token, prepare)?;
        Ok(Box::new(calling))
    }

    fn notices(&self) -> BorrowedFd<'_> {
        self.domain.notices()
    }

    fn next_notice(&self) -> Option<Notice> {
        self.domain.next_notice(self.port.port)
    }
}
