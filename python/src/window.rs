//! Defines the Python class of windows, and the views of their memory.

use std::sync::{Arc, Mutex};

use peerlane::Error;
use peerlane::hal::BackendId;
use peerlane_bindings::check_process;
use pyo3::prelude::*;

use crate::call::{drop_locked, invalid_argument, lock, raised, whole_if_any};
use crate::memory::{self, Memory};

/// Memory of the same size on every rank.
#[pyclass(frozen)]
pub(crate) struct Window {
    /// `None` after the window was released.
    window: Arc<Mutex<Option<peerlane::Window<u8>>>>,
    /// The address on this rank.
    #[pyo3(get)]
    address: usize,
    #[pyo3(get)]
    nbytes: usize,
    device: (i32, i32),
    /// Counts the views of the memory.
    views: Arc<()>,
}

/// A window that its group releases, if nothing of its memory is in use.
pub(crate) type Released = Arc<Mutex<Option<peerlane::Window<u8>>>>;

impl Window {
    pub(crate) fn new(
        window: peerlane::Window<u8>,
        backend: BackendId,
        device: Option<u32>,
    ) -> Result<Self, Error> {
        let memory = window.memory(0..window.len())?;
        Ok(Self {
            address: memory.base.as_ptr().expose_provenance(),
            nbytes: window.len(),
            device: memory::device(memory.space, backend, device),
            views: Arc::default(),
            window: Arc::new(Mutex::new(Some(window))),
        })
    }

    /// Returns the place of the window for its release, unless arrays use its memory.
    pub(crate) fn unused(&self) -> PyResult<Released> {
        match Arc::strong_count(&self.views) - 1 {
            0 => Ok(Arc::clone(&self.window)),
            views => Err(invalid_argument(format!(
                "{views} arrays or tensors of the window are in use; delete them before it is released"
            ))),
        }
    }

    pub(crate) fn with<R>(
        &self,
        body: impl FnOnce(&peerlane::Window<u8>) -> Result<R, Error>,
    ) -> PyResult<R> {
        let window = lock(&self.window);
        let window = window.as_ref().ok_or_else(|| invalid_argument("the window was released"))?;
        body(window).map_err(|error| raised(&error))
    }

    pub(crate) fn cast(&self) -> PyResult<peerlane::Window<u8>> {
        self.with(|window| Ok(window.cast()))
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if check_process().is_err() {
            // The window stays with the parent.
            std::mem::forget(Arc::clone(&self.window));
        }
        drop_locked(&self.window);
    }
}

#[pymethods]
impl Window {
    /// Returns `nbytes` bytes of the window from `begin` on, as elements of a type.
    #[pyo3(signature = (begin=None, nbytes=None, dtype="u8"))]
    fn memory(
        slf: &Bound<'_, Self>,
        begin: Option<&Bound<'_, PyAny>>,
        nbytes: Option<&Bound<'_, PyAny>>,
        dtype: &str,
    ) -> PyResult<Memory> {
        let begin: usize = whole_if_any("begin", begin)?.unwrap_or(0);
        let nbytes: Option<usize> = whole_if_any("nbytes", nbytes)?;

        let this = slf.get();
        let nbytes = nbytes.unwrap_or(this.nbytes.saturating_sub(begin));
        let size = memory::dtype(dtype)?.bytes();
        if !begin.is_multiple_of(size) || !nbytes.is_multiple_of(size) {
            let text = format!(
                "begin is {begin} and nbytes {nbytes}, expected multiples of {size}, the size of {dtype}"
            );
            return Err(invalid_argument(text));
        }

        let window = this.cast()?;
        let memory = window.memory(begin..begin.saturating_add(nbytes));
        let memory = memory.map_err(|error| raised(&error))?;

        // The window stays open as long as an array uses this view.
        let owner = View { _window: slf.clone().unbind(), _count: Arc::clone(&this.views) };
        let owner = Py::new(slf.py(), owner)?.into_any();
        Ok(Memory::within(&memory.into(), memory::dtype(dtype)?, this.device, owner))
    }
}

/// Keeps a window open for one view of its memory, and counts the view.
#[pyclass(frozen)]
struct View {
    _window: Py<Window>,
    _count: Arc<()>,
}
