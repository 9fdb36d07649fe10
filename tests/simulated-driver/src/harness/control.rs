//! Loads the shared library into this process, and calls its functions for tests.
//!
//! The functions are looked up in the loaded library. This program contains a second copy of them,
//! from the Rust library, whose devices are not used.

use std::ffi::{CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::library::{self, NAMES};
use crate::device::log::Transfer;

/// The driver as this process has loaded it.
#[derive(Clone, Copy, Debug)]
pub struct Driver {
    symbols: &'static Symbols,
}

macro_rules! symbols {
    ($($name:ident: $signature:ty;)*) => {
        #[derive(Debug)]
        struct Symbols { $($name: $signature,)* }

        impl Symbols {
            fn look_up(library: *mut c_void) -> Self {
                Self { $($name: {
                    let symbol = look_up(library, stringify!($name));
                    // SAFETY: the library is ours, and `crate::control` has this function with this
                    // signature.
                    unsafe { std::mem::transmute::<*mut c_void, $signature>(symbol) }
                },)* }
            }
        }
    };
}

symbols! {
    peerlane_sim_adopt: extern "C" fn(*const c_char) -> c_int;
    peerlane_sim_fail: extern "C" fn(*const c_char, u32, c_int, c_int);
    peerlane_sim_delay_us: extern "C" fn(*const c_char, u64);
    peerlane_sim_clear: extern "C" fn();
    peerlane_sim_calls: extern "C" fn(*const c_char) -> u64;
    peerlane_sim_set: extern "C" fn(*const c_char, *const c_char) -> c_int;
    peerlane_sim_counter: extern "C" fn(*const c_char, c_int) -> i64;
    peerlane_sim_log: extern "C" fn(*mut Transfer, usize) -> usize;
    peerlane_sim_clear_log: extern "C" fn();
    peerlane_sim_reset_counters: extern "C" fn();
    peerlane_sim_break: extern "C" fn(c_int, c_int) -> c_int;
    peerlane_sim_destroy_context: extern "C" fn(c_int) -> c_int;
}

/// Loads the library that cargo built, so that whoever loads `libcuda.so.1` in this process later
/// gets it. Cheap when it is loaded already.
///
/// # Panics
/// If there is no library, or another one was loaded first.
pub fn install() -> Driver {
    static INSTALLED: OnceLock<Driver> = OnceLock::new();
    *INSTALLED.get_or_init(|| {
        // The names that the library then finds itself under.
        library::library_folder();
        load(&library::library(), &NAMES)
    })
}

/// As [`install`], also under the names of the newest release of ROCm, for a process that uses both.
///
/// # Panics
/// If there is no library, or another one was loaded first.
pub fn install_all() -> Driver {
    // The library looks for its other names beside itself.
    load(&super::folder_of_all().join(NAMES[0]), &super::rocm::names_of_all())
}

/// As [`install`], from a folder of [`super::without_symbols`]; one process can load only one.
///
/// # Panics
/// If it cannot be loaded, or another one was loaded first.
pub fn install_from(folder: &Path) -> Driver {
    load(&folder.join(NAMES[0]), &NAMES)
}

/// Loads this file, and gives it these names in this process.
pub(super) fn load(path: &Path, names: &[impl AsRef<str>]) -> Driver {
    static INSTALLED: OnceLock<(PathBuf, Symbols)> = OnceLock::new();
    let (installed, symbols) = INSTALLED.get_or_init(|| {
        let text = CString::new(path.as_os_str().as_bytes()).expect("a path without a zero");
        // SAFETY: our own library; loading it runs nothing.
        let library = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        assert!(!library.is_null(), "{path:?} cannot be loaded");
        let symbols = Symbols::look_up(library);
        for name in names {
            let adopted = (symbols.peerlane_sim_adopt)(c_text(name.as_ref()).as_ptr());
            assert_eq!(adopted, 0, "another {} was loaded before {path:?}", name.as_ref());
        }
        (path.to_owned(), symbols)
    });
    assert_eq!(installed, path, "another simulated driver was installed before");
    Driver { symbols }
}

fn look_up(library: *mut c_void, symbol: &str) -> *mut c_void {
    let name = CString::new(symbol).expect("a name without a zero");
    // SAFETY: the library is loaded and never closed.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(
        !found.is_null(),
        "the simulated driver has no symbol {symbol}, because it was built from another version; run \
         `cargo clean -p peerlane-simulated-driver`"
    );
    found
}

fn c_text(text: &str) -> CString {
    CString::new(text).expect("a name without a zero")
}

impl Driver {
    /// Lets one call of this symbol fail with this code, after `after` calls that do not.
    pub fn fail(&self, call: &str, after: u32, code: i32) {
        (self.symbols.peerlane_sim_fail)(c_text(call).as_ptr(), after, code, 0);
    }

    /// As [`Self::fail`], and every later call as well.
    pub fn fail_always(&self, call: &str, after: u32, code: i32) {
        (self.symbols.peerlane_sim_fail)(c_text(call).as_ptr(), after, code, 1);
    }

    /// Lets every call of this symbol take this long.
    pub fn delay(&self, call: &str, delay: std::time::Duration) {
        let micros = u64::try_from(delay.as_micros()).unwrap_or(u64::MAX);
        (self.symbols.peerlane_sim_delay_us)(c_text(call).as_ptr(), micros);
    }

    /// Takes [`Self::fail`] and [`Self::delay`] back.
    pub fn clear(&self) {
        (self.symbols.peerlane_sim_clear)();
    }

    /// How often this symbol was called.
    #[must_use]
    pub fn calls(&self, call: &str) -> u64 {
        (self.symbols.peerlane_sim_calls)(c_text(call).as_ptr())
    }

    /// Changes a setting, such as `("COPY_ENGINES", "2")`; see the top of this crate.
    ///
    /// # Panics
    /// If there is no such setting, or it cannot be this.
    pub fn set(&self, setting: &str, value: &str) {
        let (name, text) = (c_text(setting), c_text(value));
        let refused = (self.symbols.peerlane_sim_set)(name.as_ptr(), text.as_ptr());
        assert_eq!(refused, 0, "{setting} cannot be {value}");
    }

    /// What was counted, for one device or all together: `copies`, `copy_bytes`, `host_copies`,
    /// `most_copies_at_once` (that wanted an engine), `most_copies_running`, `copies_that_waited`,
    /// `batches`, `batched_words`, `single_words`, `blocked_waits` (for words, and of kernels),
    /// `fills`, `starts`, `graph_launches`, `default_stream_uses`, `host_ns`; and what exists now: `live_allocations`, `live_bytes`,
    /// `open_imports`, `live_reservations`, `live_mappings`, `live_streams`, `live_events`,
    /// `live_graphs`, `live_contexts`.
    ///
    /// # Panics
    /// If there is no such counter.
    #[must_use]
    pub fn counter(&self, counter: &str, device: Option<u32>) -> i64 {
        let device = device.and_then(|device| c_int::try_from(device).ok()).unwrap_or(-1);
        let count = (self.symbols.peerlane_sim_counter)(c_text(counter).as_ptr(), device);
        assert!(count != -1, "the simulated driver does not count {counter}");
        count
    }

    /// What the numbered engines did in this process since the last [`Self::clear_log`], in the order
    /// in which copies ended.
    #[must_use]
    pub fn log(&self) -> Vec<Transfer> {
        let count = (self.symbols.peerlane_sim_log)(std::ptr::null_mut(), 0);
        let mut log: Vec<Transfer> = Vec::with_capacity(count);
        let there = (self.symbols.peerlane_sim_log)(log.as_mut_ptr(), count);
        // SAFETY: the library has written so many, and not more than there was room for.
        unsafe { log.set_len(count.min(there)) };
        log
    }

    /// Forgets what the engines did.
    pub fn clear_log(&self) {
        (self.symbols.peerlane_sim_clear_log)();
    }

    /// Sets all counters to 0 but those of what exists now.
    pub fn reset_counters(&self) {
        (self.symbols.peerlane_sim_reset_counters)();
    }

    /// Breaks the context of a device with this code for good, as a hardware error would.
    ///
    /// # Panics
    /// If the device has no context in this process.
    pub fn break_device(&self, device: u32, code: i32) {
        let device = c_int::try_from(device).expect("an ordinal");
        let refused = (self.symbols.peerlane_sim_break)(device, code);
        assert_eq!(refused, 0, "device {device} has no context");
    }

    /// Destroys the context of a device under its users.
    ///
    /// # Panics
    /// If the device has no context in this process.
    pub fn destroy_context(&self, device: u32) {
        let device = c_int::try_from(device).expect("an ordinal");
        let refused = (self.symbols.peerlane_sim_destroy_context)(device);
        assert_eq!(refused, 0, "device {device} has no context");
    }
}
