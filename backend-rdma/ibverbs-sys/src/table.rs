//! Loads libibverbs and looks up the functions that it exports.

use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::sync::OnceLock;

use crate::objects::*;
use crate::values::*;

/// The file name of libibverbs; its soname has not changed since 2005.
pub const LIBRARY: &str = "libibverbs.so.1";

/// The reason why libibverbs cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The shared library is missing or cannot be loaded.
    #[error("cannot load {library}: {reason}")]
    Library {
        /// The file name of the library that cannot be loaded.
        library: String,
        /// The error text of the dynamic loader.
        reason: String,
    },
    /// The library lacks a function that every version since rdma-core 17 exports.
    #[error("{library} has no {symbol}: it is too old, expected rdma-core 17 or newer")]
    Symbol {
        /// The file name of the library that lacks the function.
        library: String,
        /// The name of the missing function.
        symbol: &'static str,
    },
}

macro_rules! table {
    (
        required { $($need:ident = $need_symbol:literal ($($need_arg:ty),*) -> $need_result:ty;)* }
        optional { $($may:ident = $may_symbol:literal ($($may_arg:ty),*) -> $may_result:ty;)* }
    ) => {
        /// The functions of libibverbs, loaded at run time; those that newer versions added are `Option`s.
        pub struct Library {
            $(
                #[doc = concat!("`", $need_symbol, "`")]
                pub $need: unsafe extern "C" fn($($need_arg),*) -> $need_result,
            )*
            $(
                #[doc = concat!("`", $may_symbol, "`")]
                pub $may: Option<unsafe extern "C" fn($($may_arg),*) -> $may_result>,
            )*
            /// The handle of the loaded library, which is never closed, because providers of libibverbs
            /// register at exit.
            _library: libloading::Library,
        }

        impl Library {
            fn look_up(name: &str, library: libloading::Library) -> Result<Self, LoadError> {
                Ok(Self {
                    // SAFETY: the type is the declaration of this symbol in verbs.h.
                    $($need: unsafe { symbol(name, &library, $need_symbol) }?,)*
                    // SAFETY: as above.
                    $($may: unsafe { symbol(name, &library, $may_symbol) }.ok(),)*
                    _library: library,
                })
            }
        }
    };
}

table! {
    required {
        get_device_list = "ibv_get_device_list" (*mut c_int) -> *mut *mut ibv_device;
        free_device_list = "ibv_free_device_list" (*mut *mut ibv_device) -> ();
        get_device_name = "ibv_get_device_name" (*mut ibv_device) -> *const c_char;
        open_device = "ibv_open_device" (*mut ibv_device) -> *mut ibv_context;
        close_device = "ibv_close_device" (*mut ibv_context) -> c_int;
        get_async_event = "ibv_get_async_event" (*mut ibv_context, *mut ibv_async_event) -> c_int;
        ack_async_event = "ibv_ack_async_event" (*mut ibv_async_event) -> ();
        query_device = "ibv_query_device" (*mut ibv_context, *mut ibv_device_attr) -> c_int;
        query_port = "ibv_query_port" (*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        query_gid = "ibv_query_gid" (*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
        alloc_pd = "ibv_alloc_pd" (*mut ibv_context) -> *mut ibv_pd;
        dealloc_pd = "ibv_dealloc_pd" (*mut ibv_pd) -> c_int;
        reg_mr = "ibv_reg_mr" (*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        dereg_mr = "ibv_dereg_mr" (*mut ibv_mr) -> c_int;
        create_comp_channel = "ibv_create_comp_channel" (*mut ibv_context) -> *mut ibv_comp_channel;
        destroy_comp_channel = "ibv_destroy_comp_channel" (*mut ibv_comp_channel) -> c_int;
        create_cq = "ibv_create_cq" (*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        destroy_cq = "ibv_destroy_cq" (*mut ibv_cq) -> c_int;
        get_cq_event = "ibv_get_cq_event" (*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        ack_cq_events = "ibv_ack_cq_events" (*mut ibv_cq, u32) -> ();
        create_srq = "ibv_create_srq" (*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
        modify_srq = "ibv_modify_srq" (*mut ibv_srq, *mut ibv_srq_attr, c_int) -> c_int;
        destroy_srq = "ibv_destroy_srq" (*mut ibv_srq) -> c_int;
        create_qp = "ibv_create_qp" (*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        modify_qp = "ibv_modify_qp" (*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        query_qp = "ibv_query_qp" (*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
        destroy_qp = "ibv_destroy_qp" (*mut ibv_qp) -> c_int;
        wc_status_str = "ibv_wc_status_str" (ibv_wc_status) -> *const c_char;
        event_type_str = "ibv_event_type_str" (ibv_event_type) -> *const c_char;
        fork_init = "ibv_fork_init" () -> c_int;
    }
    optional {
        // rdma-core 32.
        query_gid_ex = "_ibv_query_gid_ex" (*mut ibv_context, u32, u32, *mut ibv_gid_entry, u32, usize) -> c_int;
        // rdma-core 34.
        reg_dmabuf_mr = "ibv_reg_dmabuf_mr" (*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
        // rdma-core 42.
        query_qp_data_in_order = "ibv_query_qp_data_in_order" (*mut ibv_qp, ibv_wr_opcode, u32) -> c_int;
    }
}

impl Library {
    /// Returns the functions of libibverbs, which is loaded once per process.
    ///
    /// # Errors
    /// It is not there, or too old; the same answer at every call.
    pub fn load() -> Result<&'static Self, LoadError> {
        static LOADED: OnceLock<Result<Library, LoadError>> = OnceLock::new();
        LOADED.get_or_init(|| Self::load_from(LIBRARY)).as_ref().map_err(Clone::clone)
    }

    /// Loads libibverbs from a file with another name or path.
    ///
    /// # Errors
    /// It is not there, or lacks a function.
    pub fn load_from(name: &str) -> Result<Self, LoadError> {
        // SAFETY: what runs at load is the library's own; libibverbs only reads its environment.
        let library = unsafe { libloading::Library::new(name) }.map_err(|error| {
            // libloading's own text says only that `dlopen` failed; the loader's reason is behind it.
            let source = std::error::Error::source(&error);
            let reason = source.map_or_else(|| error.to_string(), ToString::to_string);
            LoadError::Library { library: name.to_owned(), reason }
        })?;
        Self::look_up(name, library)
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").finish_non_exhaustive()
    }
}

/// Looks up a function of the library by its name.
///
/// # Safety
/// `T` is the type of the symbol.
unsafe fn symbol<T: Copy>(
    name: &str,
    library: &libloading::Library,
    symbol: &'static str,
) -> Result<T, LoadError> {
    // SAFETY: the caller's.
    let found = unsafe { library.get::<T>(symbol) };
    found.map(|found| *found).map_err(|_| LoadError::Symbol { library: name.to_owned(), symbol })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error() {
        let error = Library::load_from("libpeerlane-none.so.1").unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("cannot load libpeerlane-none.so.1: "), "{text}");
        assert!(text.contains("No such file"), "{text}");
    }

    #[test]
    fn another_library_lacks_the_first_function() {
        let error = Library::load_from("libc.so.6").unwrap_err();
        assert_eq!(
            error.to_string(),
            "libc.so.6 has no ibv_get_device_list: it is too old, expected rdma-core 17 or newer"
        );
    }

    #[test]
    fn the_library_is_whole_or_absent() {
        match Library::load() {
            Ok(_) => {}
            Err(LoadError::Library { .. }) => peerlane_test_support::not_covered(
                "the_library_is_whole_or_absent",
                &format!("there is no {LIBRARY}"),
            ),
            Err(error) => panic!("{error}"),
        }
    }
}
