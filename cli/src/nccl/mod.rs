//! NCCL beside Peerlane: loaded at run time, for comparisons in the same processes.
//!
//! A communicator that a failure leaves open is leaked: to destroy or to abort it may wait for peers
//! that are gone, while the end of the process ends it in any case.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::null_mut;
use std::rc::Rc;

use crate::error::{Failure, Result};
use crate::library::LibrarySpec;

mod sys;

/// Where NCCL is looked for.
pub(crate) const LIBRARY: LibrarySpec = LibrarySpec {
    name: "NCCL",
    option: "--nccl",
    variables: &["NCCL_HOME"],
    files: &["libnccl.so.2"],
    packages: &["nvidia/nccl/lib"],
    advice: "pip install nvidia-nccl-cu13, or the package libnccl2",
};

/// The library.
pub(crate) struct Nccl {
    functions: sys::Functions,
    version: c_int,
    path: String,
}

/// How thread blocks are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    /// As NCCL chooses.
    Default,
    /// None where copy engines can do it.
    CopyEngines,
}

/// A group of ranks, as NCCL sees it.
pub(crate) struct Communicator {
    nccl: Rc<Nccl>,
    raw: *mut sys::Comm,
}

/// Device memory that NCCL allocated, registered as a symmetric window.
pub(crate) struct Window {
    address: *mut c_void,
    raw: *mut sys::Window,
}

impl Nccl {
    /// Loads the library from `given` or from the usual places.
    ///
    /// # Errors
    /// If it is not there, or too old for the paths that are compared.
    pub(crate) fn open(given: Option<&Path>) -> Result<Rc<Self>> {
        let found = LIBRARY.open(given)?;
        let path = found.path;
        let functions = sys::Functions::look_up(found.library)
            .map_err(|symbol| too_old(format!("NCCL at {path} has no {symbol}")))?;
        let mut version = 0;
        // SAFETY: the pointer is to an integer that lives.
        let code = unsafe { (functions.version)(&mut version) };
        let nccl = Self { functions, version, path };
        nccl.check("ncclGetVersion", code, null_mut())?;
        if version < sys::VERSION {
            return Err(too_old(format!("NCCL at {} is {}", nccl.path, nccl.version())));
        }
        Ok(Rc::new(nccl))
    }

    /// The version, such as `2.28.9`.
    pub(crate) fn version(&self) -> String {
        let Self { version, .. } = self;
        format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
    }

    /// The file that was loaded.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Where ranks meet, for one communicator; made on one rank and given to all.
    ///
    /// # Errors
    /// NCCL's.
    pub(crate) fn unique_id(&self) -> Result<Vec<u8>> {
        let mut id = sys::UniqueId([0; 128]);
        // SAFETY: the pointer is to an id that lives.
        let code = unsafe { (self.functions.unique_id)(&mut id) };
        self.check("ncclGetUniqueId", code, null_mut())?;
        Ok(id.0.to_vec())
    }

    fn check(&self, call: &str, code: sys::NcclResult, communicator: *mut sys::Comm) -> Result<()> {
        if code == sys::SUCCESS {
            return Ok(());
        }
        // SAFETY: the function takes any code and gives a text that is never freed.
        let text = text(unsafe { (self.functions.error_text)(code) });
        // SAFETY: the function takes a communicator or null and gives a text of the library's own,
        // which is copied before the next call.
        let last = text_or_none(unsafe { (self.functions.last_error)(communicator) });
        let last = last.map_or(String::new(), |last| format!(" ({last})"));
        Err(Failure::failed(format!("NCCL {}: {call}: {text}{last}", self.version()))
            .with_advice("NCCL_DEBUG=WARN makes NCCL say more"))
    }
}

impl Communicator {
    /// Joins as `rank` of `ranks`; the GPU is the one that is current. Collective; waits for all.
    ///
    /// # Errors
    /// NCCL's.
    pub(crate) fn join(
        nccl: &Rc<Nccl>,
        id: &[u8],
        rank: usize,
        ranks: usize,
        policy: Policy,
    ) -> Result<Rc<Self>> {
        let wrong = |what: &str| Failure::failed(format!("{what} is nothing that NCCL takes"));
        let id = id.try_into().map(sys::UniqueId).map_err(|_| wrong("the unique id"))?;
        let rank = c_int::try_from(rank).map_err(|_| wrong("the rank"))?;
        let ranks = c_int::try_from(ranks).map_err(|_| wrong("the number of ranks"))?;
        let mut config = sys::Config::with_policy(match policy {
            Policy::Default => sys::POLICY_DEFAULT,
            Policy::CopyEngines => sys::POLICY_ZERO,
        });
        let mut raw = null_mut();
        // SAFETY: both pointers are to values that live over the call, and the config is initialised
        // in the layout of the version that it names.
        let code = unsafe { (nccl.functions.join)(&mut raw, ranks, id, rank, &mut config) };
        nccl.check("ncclCommInitRankConfig", code, null_mut())?;
        Ok(Rc::new(Self { nccl: Rc::clone(nccl), raw }))
    }

    /// Puts an all-gather of `bytes` from each rank on a stream. Collective.
    ///
    /// # Errors
    /// NCCL's.
    ///
    /// # Safety
    /// The stream is of this communicator's GPU; input and output are device memory of `bytes` and
    /// of `bytes` from each rank, and stay untouched until the stream has passed the gather.
    pub(crate) unsafe fn all_gather(
        &self,
        input: u64,
        output: u64,
        bytes: usize,
        stream: *mut c_void,
    ) -> Result<()> {
        let (input, output) = (input as *const c_void, output as *mut c_void);
        let Self { nccl, raw } = self;
        // SAFETY: the communicator lives; the rest is the caller's promise.
        let code =
            unsafe { (nccl.functions.all_gather)(input, output, bytes, sys::UINT8, *raw, stream) };
        nccl.check("ncclAllGather", code, *raw)
    }

    /// Allocates memory of the current GPU and registers it as a symmetric window. Collective.
    ///
    /// # Errors
    /// NCCL's.
    pub(crate) fn window(&self, bytes: usize) -> Result<Window> {
        let functions = &self.nccl.functions;
        let mut window = Window { address: null_mut(), raw: null_mut() };
        // SAFETY: the pointer is to a pointer that lives.
        let code = unsafe { (functions.allocate)(&mut window.address, bytes) };
        self.nccl.check("ncclMemAlloc", code, self.raw)?;
        let Window { address, raw } = &mut window;
        let flags = sys::WINDOW_SYMMETRIC;
        // SAFETY: the memory was just allocated with that length, and lives until the window is
        // closed or the process ends.
        let code = unsafe { (functions.register)(self.raw, *address, bytes, raw, flags) };
        self.nccl.check("ncclCommWindowRegister", code, self.raw)?;
        Ok(window)
    }

    /// Deregisters a window and frees its memory. Collective.
    ///
    /// # Errors
    /// NCCL's.
    pub(crate) fn close_window(&self, window: &Window) -> Result<()> {
        let functions = &self.nccl.functions;
        // SAFETY: the window was registered with a communicator that still lives; no stream uses it
        // any more.
        let code = unsafe { (functions.deregister)(self.raw, window.raw) };
        self.nccl.check("ncclCommWindowDeregister", code, self.raw)?;
        // SAFETY: ncclMemAlloc gave the address, and the window over it is gone.
        let code = unsafe { (functions.free)(window.address) };
        self.nccl.check("ncclMemFree", code, self.raw)
    }

    /// Leaves. Collective; without it the communicator stays until the process ends.
    ///
    /// # Errors
    /// NCCL's.
    pub(crate) fn close(&self) -> Result<()> {
        // SAFETY: it was joined, no call is under way, and nobody calls this twice.
        let code = unsafe { (self.nccl.functions.destroy)(self.raw) };
        self.nccl.check("ncclCommDestroy", code, null_mut())
    }
}

impl Window {
    /// The device address.
    pub(crate) fn address(&self) -> u64 {
        self.address as u64
    }
}

fn too_old(text: String) -> Failure {
    Failure::failed(format!("{text}; the comparison wants NCCL 2.28 or newer"))
        .with_advice("pip install -U nvidia-nccl-cu13, and name the file with --nccl")
}

fn text(text: *const c_char) -> String {
    text_or_none(text).unwrap_or_else(|| "an error without a text".to_owned())
}

fn text_or_none(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the library's texts end with a zero and are copied here, before another call.
    let text = unsafe { CStr::from_ptr(text) };
    Some(text.to_string_lossy().trim().to_owned()).filter(|text| !text.is_empty())
}
