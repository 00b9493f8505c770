//! The exported functions of libibverbs and librdmacm, found when the program runs: no binary needs the libraries to start.

#![allow(unsafe_code, reason = "functions of another library, by name")]

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::OnceLock,
};

use super::abi::{
    AsyncEvent, CmChannel, CmEvent, CmId, CompChannel, ConnParam, Context, Cq, Device, Mr, Pd, PortAttr, Qp,
    QpAttr, QpInitAttr,
};

/// A table of functions of one library, and how it is filled.
macro_rules! library {
    ($(#[$doc:meta])* $table:ident, $file:literal,
     { $(fn $name:ident($($argument:ty),*) $(-> $result:ty)?;)* }
     { $(optional fn $oname:ident($($oargument:ty),*) $(-> $oresult:ty)?;)* }) => {
        $(#[$doc])*
        pub(crate) struct $table {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            $(pub(crate) $oname: Option<unsafe extern "C" fn($($oargument),*) $(-> $oresult)?>,)*
        }

        impl $table {
            fn load() -> Result<Self, String> {
                let library = open($file)?;
                Ok(Self {
                    $($name: {
                        let address = symbol(library, stringify!($name))
                            .ok_or_else(|| format!("{} has no function {}: it is too old", $file, stringify!($name)))?;
                        // SAFETY: the library documents a function of this name and of this type, and says so by the
                        // version in its file's name; libraries are never unloaded.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(address) }
                    },)*
                    $($oname: symbol(library, stringify!($oname)).map(|address| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($oargument),*) $(-> $oresult)?>(address) }
                    }),)*
                })
            }

            /// The table, loaded by the first call; or why there is none.
            pub(crate) fn get() -> Result<&'static Self, &'static str> {
                static LOADED: OnceLock<Result<$table, String>> = OnceLock::new();
                LOADED.get_or_init(Self::load).as_ref().map_err(String::as_str)
            }
        }

        impl std::fmt::Debug for $table {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str($file)
            }
        }
    };
}

library!(
    /// libibverbs.
    Verbs, "libibverbs.so.1", {
        fn ibv_get_device_list(*mut c_int) -> *mut *mut Device;
        fn ibv_free_device_list(*mut *mut Device);
        fn ibv_get_device_name(*mut Device) -> *const c_char;
        fn ibv_open_device(*mut Device) -> *mut Context;
        fn ibv_close_device(*mut Context) -> c_int;
        fn ibv_get_async_event(*mut Context, *mut AsyncEvent) -> c_int;
        fn ibv_ack_async_event(*mut AsyncEvent);
        fn ibv_query_port(*mut Context, u8, *mut PortAttr) -> c_int;
        fn ibv_alloc_pd(*mut Context) -> *mut Pd;
        fn ibv_dealloc_pd(*mut Pd) -> c_int;
        fn ibv_reg_mr(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
        fn ibv_dereg_mr(*mut Mr) -> c_int;
        fn ibv_create_comp_channel(*mut Context) -> *mut CompChannel;
        fn ibv_destroy_comp_channel(*mut CompChannel) -> c_int;
        fn ibv_create_cq(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq;
        fn ibv_destroy_cq(*mut Cq) -> c_int;
        fn ibv_get_cq_event(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
        fn ibv_ack_cq_events(*mut Cq, c_uint);
        fn ibv_create_qp(*mut Pd, *mut QpInitAttr) -> *mut Qp;
        fn ibv_modify_qp(*mut Qp, *mut QpAttr, c_int) -> c_int;
        fn ibv_destroy_qp(*mut Qp) -> c_int;
    } {
        optional fn ibv_reg_dmabuf_mr(*mut Pd, u64, usize, u64, c_int, c_int) -> *mut Mr;
    }
);

library!(
    /// librdmacm.
    Manager, "librdmacm.so.1", {
        fn rdma_get_devices(*mut c_int) -> *mut *mut Context;
        fn rdma_free_devices(*mut *mut Context);
        fn rdma_create_event_channel() -> *mut CmChannel;
        fn rdma_destroy_event_channel(*mut CmChannel);
        fn rdma_create_id(*mut CmChannel, *mut *mut CmId, *mut c_void, c_uint) -> c_int;
        fn rdma_destroy_id(*mut CmId) -> c_int;
        fn rdma_bind_addr(*mut CmId, *mut libc::sockaddr) -> c_int;
        fn rdma_resolve_addr(*mut CmId, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
        fn rdma_resolve_route(*mut CmId, c_int) -> c_int;
        fn rdma_create_qp(*mut CmId, *mut Pd, *mut QpInitAttr) -> c_int;
        fn rdma_destroy_qp(*mut CmId);
        fn rdma_connect(*mut CmId, *mut ConnParam) -> c_int;
        fn rdma_listen(*mut CmId, c_int) -> c_int;
        fn rdma_accept(*mut CmId, *mut ConnParam) -> c_int;
        fn rdma_reject(*mut CmId, *const c_void, u8) -> c_int;
        fn rdma_disconnect(*mut CmId) -> c_int;
        fn rdma_get_cm_event(*mut CmChannel, *mut *mut CmEvent) -> c_int;
        fn rdma_ack_cm_event(*mut CmEvent) -> c_int;
        fn rdma_get_src_port(*mut CmId) -> u16;
        fn rdma_set_option(*mut CmId, c_int, c_int, *mut c_void, usize) -> c_int;
    } {}
);

/// A library that stays for as long as the process.
#[derive(Clone, Copy)]
struct Library(*mut c_void);

fn open(file: &str) -> Result<Library, String> {
    let name = std::ffi::CString::new(file).map_err(|e| e.to_string())?;
    // SAFETY: a terminated name; loading runs the library's own initialisation, as linking with it would.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        // SAFETY: no argument; what it returns is a terminated text, valid until the next such call of this thread, or null.
        let why = unsafe { libc::dlerror().as_ref() };
        let why = why.map_or("no reason given".to_owned(), |text| {
            // SAFETY: as above.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        });
        return Err(format!("{file} cannot be loaded ({why})"));
    }
    Ok(Library(handle))
}

fn symbol(library: Library, name: &str) -> Option<*mut c_void> {
    let name = std::ffi::CString::new(name).ok()?;
    // SAFETY: a handle from dlopen that was never closed, and a terminated name.
    let address = unsafe { libc::dlsym(library.0, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}

/// The calling thread's error number, as the last failed call has left it.
pub(crate) fn errno() -> rustix::io::Errno {
    std::io::Error::last_os_error()
        .raw_os_error()
        .map_or(rustix::io::Errno::IO, rustix::io::Errno::from_raw_os_error)
}

/// What a call returns that gives an error number, or -1 with one in `errno`.
pub(crate) fn returned(code: c_int) -> Result<(), rustix::io::Errno> {
    match code {
        0 => Ok(()),
        code if code > 0 => Err(rustix::io::Errno::from_raw_os_error(code)),
        _ => Err(errno()),
    }
}
