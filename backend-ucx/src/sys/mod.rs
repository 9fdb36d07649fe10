//! Wraps contexts, workers, endpoints and requests of libucp. Only this module contains raw calls.
//!
//! All calls of a worker and of its endpoints need exclusive access to the worker, and UCX calls
//! back only within them. So its callbacks never run at the same time as other code with the
//! worker.

mod ffi;
mod worker;

use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::ptr;
use std::sync::Arc;

use peerlane_toolkit::Fault;

use crate::error::{Error, Status};
use crate::options::Options;
use ffi::*;
pub(crate) use worker::{
    Calls, Completion, Ended, EndpointId, OnLoss, Receiver, Rendezvous, ReplyTo, Worker,
};

/// Settings of the TCP transport: the name for UCX, the variable by which users set it, and the
/// value if they do not.
const TCP_SETTINGS: [(&CStr, &str, &str); 2] = [
    // The bytes of one system call. UCX has 8 KiB: a message of 32 KiB takes 2 to 5 times as long.
    (c"TX_SEG_SIZE", "UCX_TCP_TX_SEG_SIZE", "64k"),
    // Whether UCX connects without blocking. It does not by default, and then a firewall that drops
    // packets blocks the rank for minutes.
    (c"CONN_NB", "UCX_TCP_CONN_NB", "y"),
];

/// Returns the version of libucp, such as `1.13.1`.
pub(crate) fn version() -> Result<String, Fault> {
    Ok(Library::load()?.version_text())
}

/// Returns the status of an error code, with its text in UCX.
fn failed_with(code: ucs_status_t) -> Status {
    let text = Library::load().map(|library| library.status_text(code)).unwrap_or_default();
    Status { code, text }
}

/// A context of UCX (`ucp_context_h`), which has opened the devices.
pub(crate) struct Context {
    library: &'static Library,
    raw: ucp_context_h,
}

// SAFETY: a context is created for workers of several threads (`mt_workers_shared`).
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn open(options: &Options) -> Result<Arc<Self>, Error> {
        let library = Library::load()?;
        let config = read_config(library, options)?;
        let params = ucp_params_t {
            field_mask: UCP_PARAM_FIELD_FEATURES
                | UCP_PARAM_FIELD_MT_WORKERS_SHARED
                | UCP_PARAM_FIELD_NAME,
            features: UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
            request_size: 0,
            request_init: ptr::null_mut(),
            request_cleanup: ptr::null_mut(),
            tag_sender_mask: 0,
            mt_workers_shared: 1,
            estimated_num_eps: 0,
            estimated_num_ppn: 0,
            name: c"peerlane".as_ptr(),
        };

        let (major, minor, _) = library.version();
        let mut raw = ptr::null_mut();
        // SAFETY: the parameters and the configuration are valid for the call.
        let status = unsafe { (library.init)(major, minor, &params, config, &mut raw) };
        // SAFETY: the configuration was read by the library and is released once.
        unsafe { (library.config_release)(config) };
        if status != UCS_OK {
            return Err(Error::NoTransport {
                wanted: options.describe(),
                version: library.version_text(),
                status: failed_with(status),
            });
        }
        Ok(Arc::new(Self { library, raw }))
    }

    /// Returns the transports of the context with their devices, such as `tcp` and `eth0`.
    ///
    /// UCX has no call for it but one that prints, in lines that end with `tcp/eth0`.
    pub(crate) fn resources(&self) -> Vec<(String, String)> {
        let (mut text, mut length) = (ptr::null_mut::<c_char>(), 0);
        // SAFETY: both pointers are valid until the stream is closed.
        let file = unsafe { libc::open_memstream(&mut text, &mut length) };
        if file.is_null() {
            return Vec::new();
        }
        // SAFETY: context and stream are valid.
        unsafe { (self.library.print_context)(self.raw, file) };
        // SAFETY: the stream was opened above, and is closed once.
        unsafe { libc::fclose(file) };
        // SAFETY: a closed stream has left a text that ends with a zero.
        let printed = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        // SAFETY: the text was allocated by the stream, and is freed once.
        unsafe { libc::free(text.cast()) };

        parse_resources(&printed)
    }

    pub(crate) fn version(&self) -> String {
        self.library.version_text()
    }

    fn check(&self, call: &'static str, status: ucs_status_t) -> Result<(), Error> {
        match status {
            UCS_OK => Ok(()),
            status => Err(Error::Call { call, status: failed_with(status) }),
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: workers keep the context, so none is left.
        unsafe { (self.library.cleanup)(self.raw) };
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").finish_non_exhaustive()
    }
}

/// Returns the names behind `resource` in what UCX prints of a context.
fn parse_resources(printed: &str) -> Vec<(String, String)> {
    let lines = printed.lines().filter(|line| line.contains("resource"));
    let names = lines.filter_map(|line| line.split_whitespace().last()?.split_once('/'));
    names.map(|(transport, device)| (transport.to_owned(), device.to_owned())).collect()
}

/// Reads the configuration of UCX from the variables of the environment, and sets what the options
/// say.
fn read_config(library: &'static Library, options: &Options) -> Result<ucp_config_t, Error> {
    let mut config = ptr::null_mut();
    // SAFETY: the pointers are valid for the call; without names the library uses its own.
    let status = unsafe { (library.config_read)(ptr::null(), ptr::null(), &mut config) };
    if status != UCS_OK {
        return Err(Error::Call { call: "ucp_config_read", status: failed_with(status) });
    }

    let set = |name: &CStr, value: &str| {
        let Ok(value) = CString::new(value) else { return UCS_OK };
        // SAFETY: the configuration and both texts are valid for the call.
        unsafe { (library.config_modify)(config, name.as_ptr(), value.as_ptr()) }
    };
    for (name, values) in [(c"NET_DEVICES", &options.devices), (c"TLS", &options.transports)] {
        if !values.is_empty() {
            let status = set(name, &values.join(","));
            debug_assert_eq!(status, UCS_OK, "{name:?}");
        }
    }
    for (name, variable, value) in TCP_SETTINGS {
        if std::env::var_os(variable).is_none() {
            // A version of UCX without the setting works, only slower.
            let _ = set(name, value);
        }
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transports_and_devices_are_found_in_what_ucx_prints() {
        let printed = "#\n# UCP context\n#     component 0  :  self\n#          md 0  :  tcp\n\
                       #    resource 0  :  md 0  dev 0  flags ---- self/memory\n\
                       #    resource 1  :  md 1  dev 1  flags ---- tcp/eth0\n\
                       #    resource 2  :  md 2  dev 2  flags ---- rc_verbs/mlx5_0:1\n";
        let found = parse_resources(printed);
        let found: Vec<_> = found.iter().map(|(tl, device)| format!("{tl} {device}")).collect();
        assert_eq!(found, ["self memory", "tcp eth0", "rc_verbs mlx5_0:1"]);
    }
}
