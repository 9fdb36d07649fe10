//! Calls NCCL, loaded at run time for comparisons in the same processes.
//!
//! A communicator that is open after a failure is leaked. To destroy or abort it could wait for
//! peers that are lost, and the end of the process ends it in any case.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::null_mut;
use std::rc::Rc;

use peerlane::DType;
use peerlane::collective::Collective;

use crate::error::{Failure, Result};
use crate::library::LibrarySpec;

mod sys;

pub(crate) use sys::data_type;

/// The file names and folders by which NCCL is found.
pub(crate) const LIBRARY: LibrarySpec = LibrarySpec {
    name: "NCCL",
    option: "--nccl",
    variables: &["NCCL_HOME"],
    files: &["libnccl.so.2"],
    packages: &["nvidia/nccl/lib"],
    advice: "pip install nvidia-nccl-cu13, or the package libnccl2",
};

/// The loaded NCCL library with its version and path.
pub(crate) struct Nccl {
    functions: sys::Functions,
    version: c_int,
    pub(crate) path: String,
}

/// NCCL's policies for the use of thread blocks (CTA policies).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    Default,
    /// Copy engines instead of thread blocks wherever they can do the work.
    CopyEngines,
}

/// An NCCL communicator, leaked unless it is closed.
pub(crate) struct Communicator {
    nccl: Rc<Nccl>,
    raw: *mut sys::Comm,
}

/// GPU memory that NCCL has allocated and registered as a symmetric window.
pub(crate) struct Window {
    pub(crate) address: *mut c_void,
    raw: *mut sys::Window,
}

/// Returns whether NCCL has the collective as one call, which [`Communicator::start`] makes.
pub(crate) fn has(collective: Collective) -> bool {
    !matches!(collective, Collective::Scan | Collective::Exscan)
}

impl Nccl {
    /// Loads NCCL from `given` or from the usual folders, and checks its version.
    pub(crate) fn open(given: Option<&Path>) -> Result<Rc<Self>> {
        let found = LIBRARY.open(given)?;
        let path = found.path;
        let functions = sys::Functions::look_up(found.library)
            .map_err(|symbol| too_old(format!("NCCL at {path} has no function {symbol}")))?;

        let mut version = 0;
        // SAFETY: the pointer points to a local variable.
        let code = unsafe { (functions.version)(&mut version) };
        let nccl = Self { functions, version, path };
        nccl.check("ncclGetVersion", code, null_mut())?;
        // An older library does not know the layout of the config.
        if version < sys::VERSION {
            return Err(too_old(format!("NCCL at {} is {}", nccl.path, nccl.version())));
        }
        Ok(Rc::new(nccl))
    }

    /// Returns the version as text, such as `2.28.9`.
    pub(crate) fn version(&self) -> String {
        let Self { version, .. } = self;
        format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
    }

    /// Creates the unique id by which all ranks join one communicator.
    pub(crate) fn unique_id(&self) -> Result<Vec<u8>> {
        let mut id = sys::UniqueId([0; 128]);
        // SAFETY: the pointer points to a local variable.
        let code = unsafe { (self.functions.unique_id)(&mut id) };
        self.check("ncclGetUniqueId", code, null_mut())?;
        Ok(id.0.to_vec())
    }

    fn check(&self, call: &str, code: sys::NcclResult, communicator: *mut sys::Comm) -> Result<()> {
        if code == sys::SUCCESS {
            return Ok(());
        }

        // SAFETY: the function takes any code and returns a static text.
        let text = text(unsafe { (self.functions.error_text)(code) });
        // SAFETY: the function takes a communicator or null. It returns a text of the library,
        // which is copied before the next call.
        let last = text_or_none(unsafe { (self.functions.last_error)(communicator) });
        let last = last.map_or(String::new(), |last| format!(" ({last})"));

        Err(Failure::failed(format!("NCCL {}: {call} failed: {text}{last}", self.version()))
            .with_advice("set NCCL_DEBUG=WARN to see the messages of NCCL"))
    }
}

impl Communicator {
    /// Joins a communicator as `rank` of `ranks` with the current GPU.
    ///
    /// Collective; waits for all ranks.
    pub(crate) fn join(
        nccl: &Rc<Nccl>,
        id: &[u8],
        rank: usize,
        ranks: usize,
        policy: Policy,
    ) -> Result<Rc<Self>> {
        let wrong = |what: &str| Failure::failed(format!("{what} exceeds the range of NCCL"));
        let id = id.try_into().map(sys::UniqueId).map_err(|_| wrong("the unique id"))?;
        let rank = c_int::try_from(rank).map_err(|_| wrong("the rank"))?;
        let ranks = c_int::try_from(ranks).map_err(|_| wrong("the number of ranks"))?;

        let mut config = sys::Config::with_policy(match policy {
            Policy::Default => sys::POLICY_DEFAULT,
            Policy::CopyEngines => sys::POLICY_ZERO,
        });

        let mut raw = null_mut();
        // SAFETY: both pointers point to local variables, and the config is initialised in the
        // layout of the version that it names.
        let code = unsafe { (nccl.functions.join)(&mut raw, ranks, id, rank, &mut config) };
        nccl.check("ncclCommInitRankConfig", code, null_mut())?;
        Ok(Rc::new(Self { nccl: Rc::clone(nccl), raw }))
    }

    /// Enqueues a collective on a stream. A reduction is a sum. Collective.
    ///
    /// # Safety
    /// The stream belongs to this communicator's GPU. Input and output are device memory of the
    /// lengths that NCCL documents for `count` elements, and nothing else uses them until the
    /// stream has completed the collective.
    pub(crate) unsafe fn start(
        &self,
        collective: Collective,
        (input, output): (u64, u64),
        (count, dtype): (usize, DType),
        stream: *mut c_void,
    ) -> Result<()> {
        let (input, output) = (input as *const c_void, output as *mut c_void);
        let Self { nccl, raw } = self;
        let (raw, functions) = (*raw, &nccl.functions);

        let unsupported =
            || Failure::usage(format!("NCCL does not support {collective} of {dtype}"));
        let number = data_type(dtype).ok_or_else(unsupported)?;

        let (call, code) = match collective {
            Collective::AllGather => {
                // SAFETY: the communicator was created by `join`; the caller guarantees the rest.
                let code =
                    unsafe { (functions.all_gather)(input, output, count, number, raw, stream) };
                ("ncclAllGather", code)
            }
            Collective::AllReduce => {
                // SAFETY: as above.
                let code = unsafe {
                    (functions.all_reduce)(input, output, count, number, sys::SUM, raw, stream)
                };
                ("ncclAllReduce", code)
            }
            Collective::ReduceScatter => {
                // SAFETY: as above.
                let code = unsafe {
                    (functions.reduce_scatter)(input, output, count, number, sys::SUM, raw, stream)
                };
                ("ncclReduceScatter", code)
            }
            Collective::Reduce { root } => {
                let (sum, root) = (sys::SUM, root.0 as c_int);
                // SAFETY: as above.
                let code = unsafe {
                    (functions.reduce)(input, output, count, number, sum, root, raw, stream)
                };
                ("ncclReduce", code)
            }
            Collective::Broadcast { root } => {
                let root = root.0 as c_int;
                // SAFETY: as above.
                let code = unsafe {
                    (functions.broadcast)(input, output, count, number, root, raw, stream)
                };
                ("ncclBroadcast", code)
            }
            Collective::AllToAll => {
                // SAFETY: as above.
                let code =
                    unsafe { (functions.all_to_all)(input, output, count, number, raw, stream) };
                ("ncclAlltoAll", code)
            }
            Collective::Gather { root } => {
                let root = root.0 as c_int;
                // SAFETY: as above.
                let code =
                    unsafe { (functions.gather)(input, output, count, number, root, raw, stream) };
                ("ncclGather", code)
            }
            Collective::Scatter { root } => {
                let root = root.0 as c_int;
                // SAFETY: as above.
                let code =
                    unsafe { (functions.scatter)(input, output, count, number, root, raw, stream) };
                ("ncclScatter", code)
            }
            Collective::Scan | Collective::Exscan => return Err(unsupported()),
            #[cfg(not(peerlane_workspace))]
            _ => return Err(unsupported()),
        };

        nccl.check(call, code, raw)
    }

    /// Allocates memory on the current GPU and registers it as a symmetric window. Collective.
    pub(crate) fn window(&self, bytes: usize) -> Result<Window> {
        let functions = &self.nccl.functions;
        let mut window = Window { address: null_mut(), raw: null_mut() };

        // SAFETY: the pointer points to a local variable.
        let code = unsafe { (functions.allocate)(&mut window.address, bytes) };
        self.nccl.check("ncclMemAlloc", code, self.raw)?;

        let Window { address, raw } = &mut window;
        let flags = sys::WINDOW_SYMMETRIC;
        // SAFETY: the memory was just allocated with this length, and stays allocated until the
        // window is closed or the process ends.
        let code = unsafe { (functions.register)(self.raw, *address, bytes, raw, flags) };
        self.nccl.check("ncclCommWindowRegister", code, self.raw)?;
        Ok(window)
    }

    /// Deregisters a window and frees its memory. Collective.
    pub(crate) fn close_window(&self, window: &Window) -> Result<()> {
        let functions = &self.nccl.functions;

        // SAFETY: the window was registered with this communicator, which is still open, and no
        // stream uses it.
        let code = unsafe { (functions.deregister)(self.raw, window.raw) };
        self.nccl.check("ncclCommWindowDeregister", code, self.raw)?;

        // SAFETY: `ncclMemAlloc` returned the address, and its window has been deregistered.
        let code = unsafe { (functions.free)(window.address) };
        self.nccl.check("ncclMemFree", code, self.raw)
    }

    /// Destroys the communicator, which otherwise stays open until the process ends. Collective.
    pub(crate) fn close(&self) -> Result<()> {
        // SAFETY: the communicator was created by `join`, no call is in progress, and the caller
        // calls this once.
        let code = unsafe { (self.nccl.functions.destroy)(self.raw) };
        self.nccl.check("ncclCommDestroy", code, null_mut())
    }
}

fn too_old(text: String) -> Failure {
    Failure::failed(format!("{text}, expected NCCL 2.28 or newer"))
        .with_advice("run pip install -U nvidia-nccl-cu13, and give the file with --nccl")
}

fn text(text: *const c_char) -> String {
    text_or_none(text).unwrap_or_else(|| "unknown error".to_owned())
}

fn text_or_none(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }

    // SAFETY: texts of the library end with a zero byte and are copied here, before another call.
    let text = unsafe { CStr::from_ptr(text) };
    Some(text.to_string_lossy().trim().to_owned()).filter(|text| !text.is_empty())
}
