//! Declares the types and functions of libucp that the backend uses, as in `ucp/api/ucp.h` of UCX
//! 1.13. Structures begin with a mask of the fields that are set, so newer libraries accept them.

#![allow(non_camel_case_types, reason = "the names are those of the header")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use peerlane_toolkit::Fault;

/// The file name of libucp; its soname has not changed since 2017.
const LIBRARY: &str = "libucp.so.0";
/// The oldest version whose active messages behave as the backend expects.
const VERSION_MIN: (u32, u32) = (1, 13);

/// A status of UCX, 0 for success and negative for an error. Its enumeration is packed.
pub(crate) type ucs_status_t = i8;
/// A request, a null pointer for success, or a status of an error.
pub(crate) type ucs_status_ptr_t = *mut c_void;
pub(crate) type ucp_context_h = *mut c_void;
pub(crate) type ucp_worker_h = *mut c_void;
pub(crate) type ucp_ep_h = *mut c_void;
pub(crate) type ucp_config_t = *mut c_void;
pub(crate) type ucp_address_t = c_void;

pub(crate) const UCS_OK: ucs_status_t = 0;
pub(crate) const UCS_INPROGRESS: ucs_status_t = 1;
pub(crate) const UCS_ERR_BUSY: ucs_status_t = -15;
pub(crate) const UCS_ERR_LAST: ucs_status_t = -100;

pub(crate) const UCP_PARAM_FIELD_FEATURES: u64 = 1;
pub(crate) const UCP_PARAM_FIELD_MT_WORKERS_SHARED: u64 = 1 << 5;
pub(crate) const UCP_PARAM_FIELD_NAME: u64 = 1 << 8;
pub(crate) const UCP_FEATURE_WAKEUP: u64 = 1 << 4;
pub(crate) const UCP_FEATURE_AM: u64 = 1 << 6;

#[repr(C)]
pub(crate) struct ucp_params_t {
    pub(crate) field_mask: u64,
    pub(crate) features: u64,
    pub(crate) request_size: usize,
    pub(crate) request_init: *mut c_void,
    pub(crate) request_cleanup: *mut c_void,
    pub(crate) tag_sender_mask: u64,
    pub(crate) mt_workers_shared: c_int,
    pub(crate) estimated_num_eps: usize,
    pub(crate) estimated_num_ppn: usize,
    pub(crate) name: *const c_char,
}

pub(crate) const UCP_WORKER_PARAM_FIELD_THREAD_MODE: u64 = 1;
pub(crate) const UCS_THREAD_MODE_SERIALIZED: u32 = 1;

#[repr(C)]
pub(crate) struct ucp_worker_params_t {
    pub(crate) field_mask: u64,
    pub(crate) thread_mode: u32,
    pub(crate) cpu_mask: [u64; 16],
    pub(crate) events: u32,
    pub(crate) user_data: *mut c_void,
    pub(crate) event_fd: c_int,
    pub(crate) flags: u64,
    pub(crate) name: *const c_char,
    pub(crate) am_alignment: usize,
    pub(crate) client_id: u64,
}

pub(crate) const UCP_EP_PARAM_FIELD_REMOTE_ADDRESS: u64 = 1;
pub(crate) const UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE: u64 = 1 << 1;
pub(crate) const UCP_EP_PARAM_FIELD_ERR_HANDLER: u64 = 1 << 2;
pub(crate) const UCP_ERR_HANDLING_MODE_NONE: u32 = 0;
pub(crate) const UCP_ERR_HANDLING_MODE_PEER: u32 = 1;

#[repr(C)]
pub(crate) struct ucp_err_handler_t {
    pub(crate) cb: unsafe extern "C" fn(*mut c_void, ucp_ep_h, ucs_status_t),
    pub(crate) arg: *mut c_void,
}

#[repr(C)]
pub(crate) struct ucs_sock_addr_t {
    pub(crate) addr: *const c_void,
    pub(crate) addrlen: u32,
}

#[repr(C)]
pub(crate) struct ucp_ep_params_t {
    pub(crate) field_mask: u64,
    pub(crate) address: *const ucp_address_t,
    pub(crate) err_mode: u32,
    pub(crate) err_handler: ucp_err_handler_t,
    pub(crate) user_data: *mut c_void,
    pub(crate) flags: u32,
    pub(crate) sockaddr: ucs_sock_addr_t,
    pub(crate) conn_request: *mut c_void,
    pub(crate) name: *const c_char,
    pub(crate) local_sockaddr: ucs_sock_addr_t,
}

pub(crate) const UCP_AM_HANDLER_PARAM_FIELD_ID: u64 = 1;
pub(crate) const UCP_AM_HANDLER_PARAM_FIELD_CB: u64 = 1 << 2;
pub(crate) const UCP_AM_HANDLER_PARAM_FIELD_ARG: u64 = 1 << 3;

/// The function that UCX calls with a message.
pub(crate) type ucp_am_recv_callback_t = unsafe extern "C" fn(
    arg: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const ucp_am_recv_param_t,
) -> ucs_status_t;

#[repr(C)]
pub(crate) struct ucp_am_handler_param_t {
    pub(crate) field_mask: u64,
    pub(crate) id: u32,
    pub(crate) flags: u32,
    pub(crate) cb: ucp_am_recv_callback_t,
    pub(crate) arg: *mut c_void,
}

pub(crate) const UCP_AM_RECV_ATTR_FIELD_REPLY_EP: u64 = 1;
pub(crate) const UCP_AM_RECV_ATTR_FLAG_RNDV: u64 = 1 << 17;

#[repr(C)]
pub(crate) struct ucp_am_recv_param_t {
    pub(crate) recv_attr: u64,
    pub(crate) reply_ep: ucp_ep_h,
}

pub(crate) const UCP_OP_ATTR_FIELD_CALLBACK: u32 = 1 << 1;
pub(crate) const UCP_OP_ATTR_FIELD_USER_DATA: u32 = 1 << 2;
pub(crate) const UCP_OP_ATTR_FIELD_FLAGS: u32 = 1 << 4;
pub(crate) const UCP_AM_SEND_FLAG_REPLY: u32 = 1;
/// Closes an endpoint without a flush; its requests end with an error.
pub(crate) const UCP_EP_CLOSE_FLAG_FORCE: u32 = 1;

/// The function that UCX calls when a request ends; which member is set depends on the request.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union ucp_request_callback {
    pub(crate) send: unsafe extern "C" fn(*mut c_void, ucs_status_t, *mut c_void),
    pub(crate) recv_am: unsafe extern "C" fn(*mut c_void, ucs_status_t, usize, *mut c_void),
}

#[repr(C)]
pub(crate) struct ucp_request_param_t {
    pub(crate) op_attr_mask: u32,
    pub(crate) flags: u32,
    pub(crate) request: *mut c_void,
    pub(crate) cb: ucp_request_callback,
    pub(crate) datatype: u64,
    pub(crate) user_data: *mut c_void,
    pub(crate) reply_buffer: *mut c_void,
    pub(crate) memory_type: u32,
    pub(crate) recv_info: *mut c_void,
    pub(crate) memh: *mut c_void,
}

macro_rules! library {
    ($($field:ident = $symbol:literal ($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of libucp, looked up at run time.
        pub(crate) struct Library {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// The library is never closed, because UCX has threads and handlers of its own.
            _library: libloading::Library,
        }

        impl Library {
            fn look_up(name: &str, library: libloading::Library) -> Result<Self, Fault> {
                $(
                    // SAFETY: the type is the declaration of this symbol in the header.
                    let $field = unsafe { library.get($symbol) }
                        .map(|found| *found)
                        .map_err(|_| lacks(name, $symbol))?;
                )*
                Ok(Self { $($field,)* _library: library })
            }
        }
    };
}

library! {
    get_version = "ucp_get_version" (*mut u32, *mut u32, *mut u32);
    // Of libucs, which libucp is linked to.
    status_string = "ucs_status_string" (ucs_status_t) -> *const c_char;
    config_read = "ucp_config_read" (*const c_char, *const c_char, *mut ucp_config_t) -> ucs_status_t;
    config_modify = "ucp_config_modify" (ucp_config_t, *const c_char, *const c_char) -> ucs_status_t;
    config_release = "ucp_config_release" (ucp_config_t);
    init = "ucp_init_version" (u32, u32, *const ucp_params_t, ucp_config_t, *mut ucp_context_h) -> ucs_status_t;
    cleanup = "ucp_cleanup" (ucp_context_h);
    print_context = "ucp_context_print_info" (ucp_context_h, *mut libc::FILE);
    worker_create = "ucp_worker_create" (ucp_context_h, *const ucp_worker_params_t, *mut ucp_worker_h) -> ucs_status_t;
    worker_destroy = "ucp_worker_destroy" (ucp_worker_h);
    get_address = "ucp_worker_get_address" (ucp_worker_h, *mut *mut ucp_address_t, *mut usize) -> ucs_status_t;
    release_address = "ucp_worker_release_address" (ucp_worker_h, *mut ucp_address_t);
    progress = "ucp_worker_progress" (ucp_worker_h) -> u32;
    arm = "ucp_worker_arm" (ucp_worker_h) -> ucs_status_t;
    get_efd = "ucp_worker_get_efd" (ucp_worker_h, *mut c_int) -> ucs_status_t;
    set_handler = "ucp_worker_set_am_recv_handler" (ucp_worker_h, *const ucp_am_handler_param_t) -> ucs_status_t;
    ep_create = "ucp_ep_create" (ucp_worker_h, *const ucp_ep_params_t, *mut ucp_ep_h) -> ucs_status_t;
    ep_close = "ucp_ep_close_nbx" (ucp_ep_h, *const ucp_request_param_t) -> ucs_status_ptr_t;
    ep_flush = "ucp_ep_flush_nbx" (ucp_ep_h, *const ucp_request_param_t) -> ucs_status_ptr_t;
    am_send = "ucp_am_send_nbx" (ucp_ep_h, u32, *const c_void, usize, *const c_void, usize, *const ucp_request_param_t) -> ucs_status_ptr_t;
    am_receive = "ucp_am_recv_data_nbx" (ucp_worker_h, *mut c_void, *mut c_void, usize, *const ucp_request_param_t) -> ucs_status_ptr_t;
    am_release = "ucp_am_data_release" (ucp_worker_h, *mut c_void);
    request_free = "ucp_request_free" (*mut c_void);
}

impl Library {
    /// Returns the functions of libucp, which is loaded once per process.
    ///
    /// # Errors
    /// [`Fault::Unavailable`] if it is missing or too old; the same answer at every call.
    pub(crate) fn load() -> Result<&'static Self, Fault> {
        static LOADED: OnceLock<Result<Library, Fault>> = OnceLock::new();
        LOADED.get_or_init(|| Self::load_from(LIBRARY)).as_ref().map_err(Clone::clone)
    }

    fn load_from(name: &str) -> Result<Self, Fault> {
        // SAFETY: what runs at load is the library's own; UCX reads its environment.
        let library = unsafe { libloading::Library::new(name) }.map_err(|error| {
            // The text of libloading says only that `dlopen` failed; the reason is its source.
            let source = std::error::Error::source(&error);
            let reason = source.map_or_else(|| error.to_string(), ToString::to_string);
            Fault::Unavailable(format!(
                "cannot load {name}: {reason}; install the package libucx0 (Debian, Ubuntu) or ucx \
                 (Fedora, RHEL)"
            ))
        })?;
        let library = Self::look_up(name, library)?;

        let (major, minor, _) = library.version();
        if (major, minor) < VERSION_MIN {
            let (major_min, minor_min) = VERSION_MIN;
            return Err(Fault::Unavailable(format!(
                "{name} is of UCX {}, expected {major_min}.{minor_min} or newer",
                library.version_text()
            )));
        }
        Ok(library)
    }

    /// Returns the version of the library: major, minor and release.
    pub(crate) fn version(&self) -> (u32, u32, u32) {
        let (mut major, mut minor, mut release) = (0, 0, 0);
        // SAFETY: the pointers are valid for the call.
        unsafe { (self.get_version)(&mut major, &mut minor, &mut release) };
        (major, minor, release)
    }

    pub(crate) fn version_text(&self) -> String {
        let (major, minor, release) = self.version();
        format!("{major}.{minor}.{release}")
    }

    /// Returns the text of a status.
    pub(crate) fn status_text(&self, status: ucs_status_t) -> String {
        // SAFETY: the function takes every number.
        let text = unsafe { (self.status_string)(status) };
        // SAFETY: its result is a text, which lives as long as the library.
        let text = unsafe { CStr::from_ptr(text) };
        text.to_string_lossy().into_owned()
    }
}

fn lacks(name: &str, symbol: &str) -> Fault {
    let (major, minor) = VERSION_MIN;
    Fault::Unavailable(format!(
        "{name} has no {symbol}: it is too old, expected UCX {major}.{minor} or newer"
    ))
}

#[cfg(test)]
mod tests {
    use c_layout::{Claim, Header};
    use peerlane_test_support::not_covered;

    use super::*;

    #[test]
    fn a_missing_library_says_what_to_install() {
        let text = Library::load_from("libpeerlane-none.so.1").err().unwrap().to_string();
        assert!(text.starts_with("cannot load libpeerlane-none.so.1: "), "{text}");
        assert!(text.ends_with("libucx0 (Debian, Ubuntu) or ucx (Fedora, RHEL)"), "{text}");
    }

    #[test]
    fn another_library_lacks_the_first_function() {
        assert_eq!(
            Library::load_from("libc.so.6").err().unwrap().to_string(),
            "libc.so.6 has no ucp_get_version: it is too old, expected UCX 1.13 or newer"
        );
    }

    fn claims() -> Vec<Claim> {
        let mut claims = [
            c_layout::claims!(
                "ucp_params_t",
                ucp_params_t { field_mask, features, mt_workers_shared, name }
            ),
            c_layout::claims!(
                "ucp_worker_params_t",
                ucp_worker_params_t { field_mask, thread_mode, cpu_mask, events, flags, client_id }
            ),
            c_layout::claims!(
                "ucp_ep_params_t",
                ucp_ep_params_t { field_mask, address, err_mode, err_handler, sockaddr, name }
            ),
            c_layout::claims!(
                "ucp_am_handler_param_t",
                ucp_am_handler_param_t { field_mask, id, flags, cb, arg }
            ),
            c_layout::claims!(
                "struct ucp_am_recv_param",
                ucp_am_recv_param_t { recv_attr, reply_ep }
            ),
            c_layout::claims!(
                "ucp_request_param_t",
                ucp_request_param_t { op_attr_mask, flags, cb, user_data, memory_type, memh }
            ),
        ]
        .concat();
        claims.extend([
            Claim::of("sizeof(ucs_status_t)", size_of::<ucs_status_t>() as u64),
            Claim::of("UCS_INPROGRESS", 1),
            Claim::of("-UCS_ERR_BUSY", u64::from(UCS_ERR_BUSY.unsigned_abs())),
            Claim::of("-UCS_ERR_LAST", u64::from(UCS_ERR_LAST.unsigned_abs())),
            Claim::of("UCP_PARAM_FIELD_NAME", UCP_PARAM_FIELD_NAME),
            Claim::of("UCP_PARAM_FIELD_MT_WORKERS_SHARED", UCP_PARAM_FIELD_MT_WORKERS_SHARED),
            Claim::of("UCP_FEATURE_WAKEUP | UCP_FEATURE_AM", UCP_FEATURE_WAKEUP | UCP_FEATURE_AM),
            Claim::of("UCS_THREAD_MODE_SERIALIZED", UCS_THREAD_MODE_SERIALIZED.into()),
            Claim::of("UCP_EP_PARAM_FIELD_ERR_HANDLER", UCP_EP_PARAM_FIELD_ERR_HANDLER),
            Claim::of("UCP_ERR_HANDLING_MODE_NONE", UCP_ERR_HANDLING_MODE_NONE.into()),
            Claim::of("UCP_ERR_HANDLING_MODE_PEER", UCP_ERR_HANDLING_MODE_PEER.into()),
            Claim::of("UCP_AM_HANDLER_PARAM_FIELD_ARG", UCP_AM_HANDLER_PARAM_FIELD_ARG),
            Claim::of("UCP_AM_RECV_ATTR_FLAG_RNDV", UCP_AM_RECV_ATTR_FLAG_RNDV),
            Claim::of("UCP_OP_ATTR_FIELD_FLAGS", UCP_OP_ATTR_FIELD_FLAGS.into()),
            Claim::of("UCP_OP_ATTR_FIELD_USER_DATA", UCP_OP_ATTR_FIELD_USER_DATA.into()),
            Claim::of("UCP_AM_SEND_FLAG_REPLY", UCP_AM_SEND_FLAG_REPLY.into()),
            Claim::of("UCP_EP_CLOSE_FLAG_FORCE", UCP_EP_CLOSE_FLAG_FORCE.into()),
        ]);
        claims
    }

    #[test]
    fn declarations_are_those_of_the_header() {
        let folder = std::env::temp_dir();
        let header = Header { includes: "#include <ucp/api/ucp.h>", arguments: Vec::new() };
        if !header.is_there(&folder) {
            return not_covered(
                "declarations_are_those_of_the_header",
                "there is no C compiler with <ucp/api/ucp.h> (libucx-dev)",
            );
        }
        c_layout::check(&header, &claims(), &folder).unwrap();
    }
}
