//! Groups, windows and hubs.

use std::ffi::c_void;
use std::fmt::Display;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use peerlane::bootstrap::environment::Environment;
use peerlane::bootstrap::tcp::TcpBootstrap;
use peerlane::collective::Collective;
use peerlane::group::{GroupEnd, Matrix};
use peerlane::hal::{BackendId, Space};
use peerlane::{
    Backend, BlockLens, DType, Deadline, Error, GroupOptions, OpenOptions, Operator, Rank,
};
use peerlane_bindings::{Call, Request, Stream, check_process, stats_json};
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::call::{
    Running, SIGNALS, argument, begin, drop_detached, invalid, invalid_argument, lock, long,
    raised, seconds, short, take_owned, text, text_if_any, whole, whole_if_any,
};
use crate::hub::{Hub, secret_of};
use crate::immediate::{Arguments, ArrayPlaces, StartedCall};
use crate::memory;
use crate::operation::Operation;
use crate::window::Window;

/// A group of ranks.
#[pyclass(frozen)]
pub(crate) struct Group {
    inner: Arc<Inner>,
    end: GroupEnd,
    #[pyo3(get)]
    rank: u32,
    #[pyo3(get)]
    ranks: usize,
    /// Which backends and which GPU the group uses, and why.
    #[pyo3(get)]
    selection: String,
    /// The kinds of engines that all ranks offer, the preferred one first.
    #[pyo3(get)]
    engines: Vec<String>,
    /// Whether operations run beside kernels of the caller, unless they say otherwise.
    #[pyo3(get)]
    beside_compute: bool,
    backend: BackendId,
    device: Option<u32>,
    /// The places of arrays in windows.
    places: ArrayPlaces,
}

struct Inner {
    /// `None` after the group was closed.
    group: Mutex<Option<peerlane::Group>>,
    /// Whether the group is dropped when the call that uses it has ended.
    is_abandoned: AtomicBool,
}

impl Drop for Inner {
    fn drop(&mut self) {
        drop_detached(take_owned(&mut self.group));
    }
}

impl Inner {
    fn with<R>(
        &self,
        body: impl FnOnce(&mut peerlane::Group) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let mut group = lock(&self.group);
        let result = body(group.as_mut().ok_or_else(|| invalid("the group was closed"))?);

        // `abandon` could not drop the group while this call had it.
        if self.is_abandoned.load(Ordering::Relaxed) {
            *group = None;
        }
        result
    }
}

impl Group {
    fn new(group: peerlane::Group, beside_compute: bool) -> Result<Self, Error> {
        let selection = group.selection();
        let engines = group.engines().iter().map(|kind| kind.name().to_owned()).collect();

        Ok(Self {
            end: group.end()?,
            rank: group.rank().0,
            ranks: group.ranks(),
            selection: selection.to_string(),
            engines,
            beside_compute,
            backend: selection.local,
            device: selection.device,
            places: ArrayPlaces::default(),
            inner: Arc::new(Inner {
                group: Mutex::new(Some(group)),
                is_abandoned: AtomicBool::new(false),
            }),
        })
    }

    /// Makes a call that can wait for other ranks.
    fn long<R: Send + 'static>(
        &self,
        py: Python<'_>,
        body: impl FnOnce(&mut peerlane::Group) -> Result<R, Error> + Send + 'static,
    ) -> PyResult<R> {
        let inner = Arc::clone(&self.inner);
        long(py, move || inner.with(body))
    }

    /// Makes a call that exchanges messages with the other ranks, after its arguments were
    /// converted. If they are refused, so that this rank does not make the call, the other ranks
    /// learn of it.
    fn collective<A: Send + 'static, R: Send + 'static>(
        &self,
        py: Python<'_>,
        arguments: PyResult<A>,
        call: impl FnOnce(&mut peerlane::Group, A) -> Result<R, Error> + Send + 'static,
    ) -> PyResult<R> {
        match arguments {
            Ok(arguments) => self.long(py, move |group| call(group, arguments)),
            Err(refused) => {
                self.refuse(py, &refused.value(py).to_string())?;
                Err(refused)
            }
        }
    }

    /// Returns the number of ranks, which fits the number of a rank.
    fn size(&self) -> u32 {
        Rank::at(self.ranks).0
    }

    /// Ignores the error of a call that tells the other ranks of a refusal, because the caller
    /// raises its own one. Ctrl-C, which ends the wait for the other ranks, stays an error.
    fn without_own_error(py: Python<'_>, told: PyResult<()>) -> PyResult<()> {
        told.or_else(|failed| match failed.is_instance_of::<PyException>(py) {
            true => Ok(()),
            false => Err(failed),
        })
    }

    fn window(&self, window: peerlane::Window<u8>) -> Result<Window, Error> {
        Window::new(window, self.backend, self.device)
    }
}

/// Parses a name of which `-` and `_` are equal.
fn named<T>(
    field: &str,
    name: &str,
    values: impl IntoIterator<Item = (&'static str, T)>,
) -> PyResult<T> {
    let values: Vec<_> = values.into_iter().collect();
    let names: Vec<&str> = values.iter().map(|(name, _)| *name).collect();
    let text = format!("{field} is {name:?}, expected one of {}", names.join(", "));
    let found = values.into_iter().find(|(known, _)| *known == name.replace('_', "-"));
    found.map(|(_, value)| value).ok_or_else(|| invalid_argument(text))
}

/// What [`Lens`] accepts.
pub(crate) const LENS: &str = "a whole number, one for each rank, or a pair of lists of them";
/// What a place in a window is.
const PLACE: &str = "a pair: a window and the element at which it begins";

/// A window and the element at which the part of an operation begins.
type WindowBegin = Option<(peerlane::Window<u8>, usize)>;

/// Converts the rows of a matrix and the sides that are one.
fn matrix_of(value: &Bound<'_, PyAny>) -> PyResult<(usize, Matrix)> {
    let expected = "a pair: a number of rows, and \"input\", \"output\" or \"both\"";
    let (rows, sides): (Bound<'_, PyAny>, String) = argument("matrix", value, expected)?;
    let all = Matrix::ALL.into_iter().map(|it| (it.name(), it));
    Ok((whole("the rows of matrix", &rows)?, named("the sides of matrix", &sides, all)?))
}

/// Converts a place that is a window and a whole number.
fn place(name: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<WindowBegin> {
    let Some(value) = value else { return Ok(None) };
    let (window, begin): (Py<Window>, Bound<'_, PyAny>) = argument(name, value, PLACE)?;
    let begin = whole(&format!("the begin of {name}"), &begin)?;
    Ok(Some((window.get().cast()?, begin)))
}

/// Converts the address and the size of memory of the caller.
fn memory_of(address: &Bound<'_, PyAny>, nbytes: &Bound<'_, PyAny>) -> PyResult<(usize, usize)> {
    let address: usize = whole("address", address)?;
    let nbytes: usize = whole("nbytes", nbytes)?;
    if address == 0 {
        return Err(invalid_argument("address is 0, expected memory of the caller"));
    }
    Ok((address, nbytes))
}

/// Returns a duplicate of a descriptor, with the length and the offset of a part of its file. The
/// caller may close the descriptor while the call goes on.
fn file_of(
    descriptor: &Bound<'_, PyAny>,
    nbytes: &Bound<'_, PyAny>,
    offset: &Bound<'_, PyAny>,
) -> PyResult<(OwnedFd, usize, u64)> {
    let number: usize = whole("descriptor", descriptor)?;
    let nbytes: usize = whole("nbytes", nbytes)?;
    let offset: usize = whole("offset", offset)?;
    let refused = |why: &dyn Display| {
        invalid_argument(format!("descriptor is {number}, expected that of an open file: {why}"))
    };

    let descriptor = RawFd::try_from(number).map_err(|error| refused(&error))?;
    // SAFETY: it is not negative. Only the duplicate is used, which fails if it is not open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let file = borrowed.try_clone_to_owned().map_err(|error| refused(&error))?;
    Ok((file, nbytes, offset as u64))
}

/// The lengths of blocks: equal, by rank, or what this rank sends and receives.
#[derive(FromPyObject)]
pub(crate) enum Lens {
    Equal(usize),
    ByRank(Vec<usize>),
    SendReceive(Vec<usize>, Vec<usize>),
}

impl From<Lens> for BlockLens {
    fn from(lens: Lens) -> Self {
        match lens {
            Lens::Equal(len) => len.into(),
            Lens::ByRank(lens) => lens.into(),
            Lens::SendReceive(send, receive) => Self::send_receive(&send, &receive),
        }
    }
}

/// Converts an option that is off by default.
fn flag(name: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
    Ok(flag_if_any(name, value)?.unwrap_or(false))
}

fn flag_if_any(name: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<bool>> {
    value.map(|value| argument(name, value, "True or False")).transpose()
}

fn bytes(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    argument(name, value, "bytes")
}

/// The address of a hub, or, for rank 0, the hub itself, which then lives as long as the group.
#[derive(FromPyObject)]
enum HubArgument {
    Own(Py<Hub>),
    Address(String),
}

#[pymethods]
impl Group {
    /// Opens a group of the launcher, or of the ranks that join a hub. Collective.
    #[staticmethod]
    #[pyo3(signature = (*, hub=None, rank=None, ranks=None, secret=None, backend=None, network=None, device=None, timeout=None,
                        start_timeout=None, strict=None, beside_compute=None, engine=None, label=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn open(
        py: Python<'_>,
        hub: Option<&Bound<'_, PyAny>>,
        rank: Option<&Bound<'_, PyAny>>,
        ranks: Option<&Bound<'_, PyAny>>,
        secret: Option<&Bound<'_, PyAny>>,
        backend: Option<&Bound<'_, PyAny>>,
        network: Option<&Bound<'_, PyAny>>,
        device: Option<&Bound<'_, PyAny>>,
        timeout: Option<&Bound<'_, PyAny>>,
        start_timeout: Option<&Bound<'_, PyAny>>,
        strict: Option<&Bound<'_, PyAny>>,
        beside_compute: Option<&Bound<'_, PyAny>>,
        engine: Option<&Bound<'_, PyAny>>,
        label: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let hub: Option<HubArgument> = hub
            .map(|hub| argument("hub", hub, "a Hub or an address such as \"10.0.0.1:29501\""))
            .transpose()?;
        let rank: u32 = whole_if_any("rank", rank)?.unwrap_or(0);
        let ranks: Option<usize> = whole_if_any("ranks", ranks)?;
        let secret = text_if_any("secret", secret)?;
        let backend = text_if_any("backend", backend)?;
        let network = text_if_any("network", network)?;
        let device: Option<u32> = whole_if_any("device", device)?;
        let strict = flag("strict", strict)?;
        let beside_compute = flag("beside_compute", beside_compute)?;

        // What is not set keeps the default of the options.
        let parse = |name: &str| name.parse::<Backend>().map_err(|error| raised(&error));
        let mut options = OpenOptions::default();
        let mut group = GroupOptions::default().strict(strict).beside_compute(beside_compute);
        if let Some(name) = &backend {
            options = options.backend(parse(name)?);
        }
        if let Some(name) = &network {
            options = options.network(parse(name)?);
        }
        if let Some(device) = device {
            options = options.device(device);
        }
        if let Some(engine) = text_if_any("engine", engine)? {
            group = group.engine(engine);
        }
        if let Some(label) = text_if_any("label", label)? {
            group = group.label(label);
        }

        let timeout = seconds("timeout", timeout)?;
        let start = seconds("start_timeout", start_timeout)?;
        if let Some(timeout) = timeout {
            group = group.timeout(timeout);
        }
        if let Some(start) = start {
            group = group.start_timeout(start);
        }
        options = options.group(group);

        // Without a hub, the launcher decides the number of ranks, and `ranks` is the expected one.
        if let (Some(ranks), None) = (ranks, &hub) {
            options = options.ranks(ranks);
        }

        let (environment, own_hub) = match hub {
            None => (None, None),
            Some(HubArgument::Address(hub)) => {
                (Some(Environment::at_hub(&hub, Rank(rank), ranks.unwrap_or(1))), None)
            }
            Some(HubArgument::Own(hub)) => {
                let taken = py.detach(|| hub.get().take());
                let hub = taken.ok_or_else(|| {
                    invalid_argument(
                        "hub was closed or given to another group, expected an open hub",
                    )
                })?;

                if let Some(ranks) = ranks.filter(|&ranks| ranks != hub.ranks()) {
                    return Err(invalid_argument(format!(
                        "ranks is {ranks}, expected {}, the number of ranks of the hub",
                        hub.ranks()
                    )));
                }

                if rank != 0 {
                    return Err(invalid_argument(format!(
                        "rank is {rank}, expected 0 for the rank that gives its hub; other ranks give its address"
                    )));
                }
                (None, Some(hub))
            }
        };

        let secret = secret_of(secret.as_deref())?;
        let group = long(py, move || {
            // A bootstrap has no options, so this is the default of `OpenOptions::group`.
            let deadline = || {
                let longer = Duration::from_secs(120).max(timeout.unwrap_or_default());
                Deadline::after(start.unwrap_or(longer))
            };

            if let Some(hub) = own_hub {
                return options.open(TcpBootstrap::join_with_hub(hub, deadline())?);
            }
            let Some(mut environment) = environment else { return options.from_env() };

            if secret.is_some() {
                environment.secret = secret;
            }
            options.open(TcpBootstrap::join(&environment, deadline())?)
        })?;
        Self::new(group, beside_compute).map_err(|error| raised(&error))
    }

    /// Returns the name of the backend inside a node.
    #[getter]
    fn backend(&self) -> String {
        self.backend.to_string()
    }

    /// Returns the number of this rank's GPU in its driver, or `None`.
    #[getter]
    fn device(&self) -> Option<u32> {
        self.device
    }

    /// Returns the device of memory of the group, as in DLPack: (1, 0) for the host.
    #[getter]
    fn memory_device(&self) -> (i32, i32) {
        let on_gpu = self.backend == BackendId::CUDA || self.backend == BackendId::ROCM;
        let space = if on_gpu { Space::Device } else { Space::Host };
        memory::device(space, self.backend, self.device)
    }

    /// Waits until all ranks have called it.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        self.long(py, peerlane::Group::barrier)
    }

    /// Returns what the group holds as one JSON object.
    fn stats(&self, py: Python<'_>) -> PyResult<String> {
        self.long(py, |group| Ok(stats_json(&group.stats())))
    }

    /// Releases the memory of the heap that no operation uses, and returns its number of bytes.
    fn trim(&self, py: Python<'_>) -> PyResult<u64> {
        self.long(py, peerlane::Group::trim)
    }

    /// Tells the other ranks that this rank refuses the arguments of the call that they make, which
    /// exchanges messages.
    fn refuse(&self, py: Python<'_>, text: &str) -> PyResult<()> {
        let error = invalid(text);
        let told = self.long(py, move |group| {
            group.refuse(error);
            Ok(())
        });

        Self::without_own_error(py, told)
    }

    /// Gathers bytes of every rank.
    fn exchange<'py>(
        &self,
        py: Python<'py>,
        data: &Bound<'py, PyAny>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let data = bytes("data", data);
        let all = self.collective(py, data, |group, data| group.exchange(&data))?;
        Ok(all.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
    }

    /// Begins to gather bytes of every rank. No other call that ranks make together may be made
    /// before its `wait`.
    fn begin_exchange(&self, data: &Bound<'_, PyAny>) -> PyResult<Exchange> {
        let data = bytes("data", data)?;
        let inner = Arc::clone(&self.inner);
        begin(move || inner.with(|group| group.exchange(&data))).map(Exchange)
    }

    /// Notes the place of an array in a window, which is equal on all ranks, so that calls use it
    /// without a copy.
    fn add_place(&self, address: usize, nbytes: usize, window: Py<Window>, begin: usize) {
        self.places.add(address, nbytes, (window, begin));
    }

    /// Returns whether an array has a place in a window.
    fn has_place(&self, address: usize, nbytes: usize) -> bool {
        self.places.contains(address, nbytes)
    }

    /// Forgets the place of an array that was freed.
    fn remove_place(&self, address: usize, nbytes: usize) {
        self.places.remove(address, nbytes);
    }

    /// Starts a collective call on arrays of the host, and waits a short time for it if `waits` is
    /// set. Returns `None` if it is complete.
    fn call(
        &self,
        py: Python<'_>,
        arguments: Arguments<'_>,
        waits: bool,
    ) -> PyResult<Option<StartedCall>> {
        let call = self.places.call(self.size(), arguments)?;
        let begun = short(py, || {
            self.inner.with(|group| {
                // SAFETY: the caller in Python keeps the arrays until the call is complete.
                let Some(mut start) = unsafe { call.try_start(group) }? else { return Ok(None) };
                let is_done = waits && start.wait_part(SIGNALS)?;
                Ok(Some((!is_done).then_some(start)))
            })
        })?;

        let start = match begun {
            Some(start) => start,
            None => {
                // SAFETY: as above.
                Some(self.long(py, move |group| unsafe { call.start(group) })?)
            }
        };
        Ok(start.map(StartedCall::new))
    }

    /// Enqueues a collective call on a stream of CUDA or ROCm, by its handle.
    fn call_on(&self, py: Python<'_>, arguments: Arguments<'_>, stream: usize) -> PyResult<()> {
        let call = self.places.call(self.size(), arguments)?;
        let backend = self.backend;
        let stream = move || {
            let stream = ptr::with_exposed_provenance_mut::<c_void>(stream);
            // SAFETY: the caller in Python gives a stream that lives.
            unsafe { Stream::from_raw(backend, stream) }
        };

        // SAFETY: the caller in Python keeps the arrays until the stream is done, and its
        // documentation says when the replays of graphs must be complete.
        let enqueued =
            short(py, || self.inner.with(|group| unsafe { call.try_run_on(group, stream()) }))?;
        if enqueued {
            return Ok(());
        }
        // SAFETY: as above.
        self.long(py, move |group| unsafe { call.run_on(group, stream()) })
    }

    /// Enqueues a collective call on plain tensors of the GPU, on a stream by its handle, if that
    /// exchanges no messages. Returns whether it did; nothing has happened otherwise.
    #[expect(clippy::too_many_arguments, reason = "a tuple costs more to convert")]
    fn try_call_on(
        &self,
        py: Python<'_>,
        collective: &str,
        root: u32,
        reduction: &str,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        beside_compute: Option<bool>,
        stream: usize,
    ) -> PyResult<bool> {
        let device = self.device.and_then(|device| i32::try_from(device).ok()).unwrap_or(0);
        let described = (collective, root, reduction);
        let ranks = (Rank(self.rank), self.size());
        let call = self.places.call_of_tensors(ranks, described, [input, output], device)?;
        let Some(call) = call else { return Ok(false) };
        let call = Call { beside_compute, ..call };

        short(py, || {
            self.inner.with(|group| {
                let stream = ptr::with_exposed_provenance_mut::<c_void>(stream);
                // SAFETY: the caller in Python gives a stream that lives.
                let stream = unsafe { Stream::from_raw(self.backend, stream) };
                // SAFETY: as in `call_on`.
                unsafe { call.try_run_on(group, stream) }
            })
        })
    }

    /// Tells the other ranks that this rank refuses the arguments of an all-to-all with splits.
    fn refuse_splits(&self, py: Python<'_>, text: &str) -> PyResult<()> {
        let error = invalid(text);
        let told = self.long(py, move |group| {
            group.refuse_splits(error);
            Ok(())
        });
        Self::without_own_error(py, told)
    }

    /// Tells the other ranks that this rank refuses the arguments of a call on arrays, unless that
    /// would exchange messages. Returns whether it did.
    fn note_call_refusal(&self, collective: &str, text: &str) -> bool {
        // While another call of this rank has the group, that one says what this rank does.
        if check_process().is_err() {
            return true;
        }
        let Ok(group) = self.inner.group.try_lock() else { return true };
        let Some(collective) = Collective::of_name(collective) else { return false };
        let group = group.as_ref();
        group.is_none_or(|group| group.note_immediate_refusal(collective, &invalid(text)))
    }

    /// Raises the error that has ended the group, if one has. It does not wait.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        short(py, || self.end.check())
    }

    /// Forms groups of the ranks that give the same color.
    #[pyo3(signature = (color, key, label=None))]
    fn split(
        &self,
        py: Python<'_>,
        color: Option<&Bound<'_, PyAny>>,
        key: &Bound<'_, PyAny>,
        label: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Self>> {
        let arguments = || {
            let color: Option<u32> = whole_if_any("color", color)?;
            let key: i64 = whole("key", key)?;
            Ok((color, key, text_if_any("label", label)?))
        };

        let part = self.collective(py, arguments(), |group, (color, key, label)| {
            let options = group.split_options();
            let options = match label {
                Some(label) => options.label(label),
                None => options,
            };
            group.split_with(options, color, key)
        })?;
        let part = part.map(|part| Self::new(part, self.beside_compute)).transpose();
        part.map_err(|error| raised(&error))
    }

    /// Forms a group of the ranks of a list.
    fn subgroup(&self, py: Python<'_>, ranks: &Bound<'_, PyAny>) -> PyResult<Self> {
        let ranks: PyResult<Vec<u32>> = argument("ranks", ranks, "a list of ranks");
        let part = self.collective(py, ranks, |group, ranks| {
            group.subgroup(&ranks.into_iter().map(Rank).collect::<Vec<_>>())
        })?;
        Self::new(part, self.beside_compute).map_err(|error| raised(&error))
    }

    /// Opens a group of the ranks that remain.
    fn shrink(&self, py: Python<'_>) -> PyResult<Self> {
        let rest = self.long(py, |group| group.shrink())?;
        Self::new(rest, self.beside_compute).map_err(|error| raised(&error))
    }

    /// Closes the group. A second call does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let inner = Arc::clone(&self.inner);
        long(py, move || {
            let group = lock(&inner.group).take();
            group.map_or(Ok(()), peerlane::Group::close)
        })
    }

    /// Leaves the group without the other ranks, which lose this rank unless the group is closed.
    /// It does not wait for a call that Ctrl-C has left.
    fn abandon(&self) {
        self.inner.is_abandoned.store(true, Ordering::Relaxed);
        if let Ok(mut group) = self.inner.group.try_lock() {
            drop_detached(group.take());
        }
    }

    /// Opens a window of zeroed memory of `nbytes` bytes on every rank, of which the system gives a
    /// page at its first use if `on_demand` is set.
    #[pyo3(signature = (nbytes, on_demand=false))]
    fn allocate_window(
        &self,
        py: Python<'_>,
        nbytes: &Bound<'_, PyAny>,
        on_demand: bool,
    ) -> PyResult<Window> {
        let nbytes: PyResult<usize> = whole("nbytes", nbytes);
        let window = self.collective(py, nbytes, move |group, nbytes| match on_demand {
            true => group.window_on_demand::<u8>(nbytes),
            false => group.window::<u8>(nbytes),
        })?;
        self.window(window).map_err(|error| raised(&error))
    }

    /// Opens a window over memory of the caller, who keeps it allocated until the window is
    /// released.
    fn window_over(
        &self,
        py: Python<'_>,
        address: &Bound<'_, PyAny>,
        nbytes: &Bound<'_, PyAny>,
    ) -> PyResult<Window> {
        let arguments = memory_of(address, nbytes);
        let window = self.collective(py, arguments, |group, (address, nbytes)| {
            let base = NonNull::new(ptr::with_exposed_provenance_mut(address));
            let base = base.expect("the address is not 0");
            // SAFETY: the documentation of `Group.window_over` in Python requires it.
            let buffer = unsafe { group.register_at::<u8>(base, nbytes) };
            match buffer {
                Ok(buffer) => group.window_over(buffer),
                Err(error) => Err(group.refuse(error)),
            }
        })?;
        self.window(window).map_err(|error| raised(&error))
    }

    /// Opens a window over a part of a file of the caller, who keeps its pages until the window is
    /// released.
    fn window_over_descriptor(
        &self,
        py: Python<'_>,
        descriptor: &Bound<'_, PyAny>,
        nbytes: &Bound<'_, PyAny>,
        offset: &Bound<'_, PyAny>,
    ) -> PyResult<Window> {
        let arguments = file_of(descriptor, nbytes, offset);
        let window = self.collective(py, arguments, |group, (file, nbytes, offset)| {
            // SAFETY: the documentation of `Group.window_over_descriptor` in Python requires it.
            let buffer = unsafe { group.register_descriptor::<u8>(&file, offset, nbytes) };
            match buffer {
                Ok(buffer) => group.window_over(buffer),
                Err(error) => Err(group.refuse(error)),
            }
        })?;
        self.window(window).map_err(|error| raised(&error))
    }

    /// Releases the memory of a window on every rank.
    fn release(&self, py: Python<'_>, window: &Window) -> PyResult<()> {
        self.collective(py, window.unused(), |group, place| {
            // The interpreter must not wait for the lock as long as the release takes.
            let Some(window) = lock(&place).take() else {
                return Err(group.refuse(invalid("the window was released")));
            };

            // A window that could not be released stays open.
            group.release(window).map_err(|failed| {
                *lock(&place) = Some(failed.window);
                failed.error
            })
        })
    }

    /// Prepares an operation.
    #[pyo3(signature = (collective, dtype, lens, *, root=None, reduction=None, algorithm=None, chunks=None, in_place=None,
                        capturable=None, resizable=None, check_starts=None, arrivals=None, departures=None, strict=None,
                        beside_compute=None, engine=None, timeout=None, input=None, output=None, matrix=None, label=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn prepare(
        slf: &Bound<'_, Self>,
        collective: &Bound<'_, PyAny>,
        dtype: &str,
        lens: &Bound<'_, PyAny>,
        root: Option<&Bound<'_, PyAny>>,
        reduction: Option<&Bound<'_, PyAny>>,
        algorithm: Option<&Bound<'_, PyAny>>,
        chunks: Option<&Bound<'_, PyAny>>,
        in_place: Option<&Bound<'_, PyAny>>,
        capturable: Option<&Bound<'_, PyAny>>,
        resizable: Option<&Bound<'_, PyAny>>,
        check_starts: Option<&Bound<'_, PyAny>>,
        arrivals: Option<&Bound<'_, PyAny>>,
        departures: Option<&Bound<'_, PyAny>>,
        strict: Option<&Bound<'_, PyAny>>,
        beside_compute: Option<&Bound<'_, PyAny>>,
        engine: Option<&Bound<'_, PyAny>>,
        timeout: Option<&Bound<'_, PyAny>>,
        input: Option<&Bound<'_, PyAny>>,
        output: Option<&Bound<'_, PyAny>>,
        matrix: Option<&Bound<'_, PyAny>>,
        label: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Operation> {
        // The conversion is one result, so that the other ranks learn of a refused argument.
        let arguments = || {
            let dtype: DType = memory::dtype(dtype)?;
            let lens: Lens = argument("count", lens, LENS)?;
            let root: u32 = whole_if_any("root", root)?.unwrap_or(0);
            let collective = collective_of(&text("collective", collective)?)?;

            let collective = collective.with_root(Rank(root));
            let mut request = Request::new(collective, dtype, lens.into());

            if let Some(reduction) = text_if_any("reduction", reduction)? {
                let operators = Operator::ALL.into_iter().map(|it| (it.name(), it));
                request.operator = named("reduction", &reduction, operators)?;
            }
            if let Some(name) = text_if_any("algorithm", algorithm)? {
                let algorithm = name.parse();
                request.algorithm = Some(
                    algorithm.map_err(|error| invalid_argument(format!("algorithm: {error}")))?,
                );
            }

            request.chunks = whole_if_any("chunks", chunks)?;
            request.matrix = matrix.map(matrix_of).transpose()?;
            request.in_place = flag("in_place", in_place)?;
            request.resizable = flag("resizable", resizable)?;
            request.check_starts = flag("check_starts", check_starts)?;
            request.arrivals = flag("arrivals", arrivals)?;
            request.departures = flag("departures", departures)?;
            request.strict = flag("strict", strict)?;
            request.beside_compute = flag_if_any("beside_compute", beside_compute)?;
            request.engine = text_if_any("engine", engine)?;
            request.label = text_if_any("label", label)?;
            request.timeout = seconds("timeout", timeout)?;
            request.input = place("input", input)?;
            request.output = place("output", output)?;
            request.capturable = flag("capturable", capturable)?;
            Ok(request)
        };

        let this = slf.get();
        let (prepared, dtype) = this.collective(slf.py(), arguments(), |group, request| {
            let dtype = request.dtype;
            // SAFETY: the documentation of `Group.prepare` in Python says when the replays must be
            // complete.
            let prepared = request.prepare(group, |builder| unsafe { builder.capturable() })?;
            Ok((prepared, dtype))
        })?;
        Ok(Operation::new(prepared, dtype, this.backend, this.device))
    }
}

/// An exchange of bytes between all ranks in progress.
#[pyclass(frozen)]
pub(crate) struct Exchange(Running<Vec<Vec<u8>>>);

#[pymethods]
impl Exchange {
    /// Waits for the bytes of every rank.
    fn wait<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        Ok(self.0.wait(py)?.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
    }
}

fn collective_of(name: &str) -> PyResult<Collective> {
    let collectives = Collective::ALL.iter().map(|it| (it.name(), *it));
    named("collective", name, collectives)
}

/// States what a collective takes from one rank and gives to it.
#[pyclass(frozen, get_all, module = "peerlane._native")]
pub(crate) struct Goal {
    /// Whether the rank has an input.
    has_input: bool,
    /// Whether the rank has an output.
    has_output: bool,
    /// Whether every rank has an input and an output.
    is_for_all_ranks: bool,
    /// Whether the input has a block for every rank.
    takes_all: bool,
    /// Whether the output has a block of every rank.
    gives_all: bool,
    /// Whether elements are combined.
    is_reduction: bool,
    /// Whether each rank can have a block length of its own.
    lengths_may_differ: bool,
}

#[pymethods]
impl Goal {
    /// Returns the names of all collectives.
    #[staticmethod]
    fn names() -> Vec<&'static str> {
        Collective::ALL.iter().map(|collective| collective.name()).collect()
    }

    #[new]
    fn new(collective: &str, root: u32, rank: u32, ranks: u32) -> PyResult<Self> {
        let goal = collective_of(collective)?.with_root(Rank(root));
        let has_both = |rank| goal.is_provider(rank) && goal.is_receiver(rank);
        let [takes_all, gives_all] =
            [goal.has_input_block_per_receiver(), goal.has_output_block_per_provider()];

        Ok(Self {
            has_input: goal.is_provider(Rank(rank)),
            has_output: goal.is_receiver(Rank(rank)),
            is_for_all_ranks: (0..ranks).map(Rank).all(has_both),
            takes_all,
            gives_all,
            is_reduction: goal.is_reduction(),
            // With a single block on both sides, there is only one length.
            lengths_may_differ: goal.lengths_may_differ() && takes_all != gives_all,
        })
    }
}
