//! Addresses of arrays of other libraries, by the buffer protocol and DLPack.

use std::ffi::CStr;
use std::ptr::NonNull;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::call::invalid_argument;
use crate::memory::dlpack::{Managed, dtype_of};

/// Returns address, bytes and whether it is read-only of an object with the buffer protocol.
#[pyfunction]
pub(crate) fn buffer(array: &Bound<'_, PyAny>) -> PyResult<(usize, usize, bool)> {
    let buffer = PyUntypedBuffer::get(array)?;
    Ok((buffer.buf_ptr().expose_provenance(), buffer.len_bytes(), buffer.readonly()))
}

/// A tensor of another library that was taken out of a capsule.
#[pyclass(frozen)]
pub(crate) struct Borrowed(NonNull<Managed>);

// SAFETY: the tensor belongs to this object alone, and a deleter can be called on any thread that has the interpreter.
unsafe impl Send for Borrowed {}
// SAFETY: no method accesses the tensor.
unsafe impl Sync for Borrowed {}

impl Drop for Borrowed {
    fn drop(&mut self) {
        let tensor = self.0.as_ptr();
        // SAFETY: the producer of the capsule keeps the tensor until its deleter was called.
        if let Some(deleter) = unsafe { (*tensor).deleter } {
            // SAFETY: this object has taken the tensor, and calls the deleter once.
            unsafe { deleter(tensor) };
        }
    }
}

const NAME: &CStr = c"dltensor";
const USED: &CStr = c"used_dltensor";

type Taken = (usize, usize, Option<&'static str>, (i32, i32), Borrowed);

/// Returns address, bytes, type, device and owner of a contiguous array with `__dlpack__`.
#[pyfunction]
pub(crate) fn from_dlpack(name: &str, array: &Bound<'_, PyAny>) -> PyResult<Taken> {
    let arguments = PyDict::new(array.py());
    // The caller's stream is used later, so the producer need not synchronise: -1 says so for devices.
    let device: (i32, i32) = array.call_method0("__dlpack_device__")?.extract()?;
    if device.0 != 1 {
        arguments.set_item("stream", -1)?;
    }
    let capsule = array.call_method("__dlpack__", (), Some(&arguments))?;
    let capsule = capsule.cast::<PyCapsule>()?;
    let pointer = capsule.pointer_checked(Some(NAME))?.cast::<Managed>();
    // SAFETY: a capsule of this name has such a tensor, and the name that follows says that it was taken.
    if unsafe { pyo3::ffi::PyCapsule_SetName(capsule.as_ptr(), USED.as_ptr()) } != 0 {
        return Err(PyErr::fetch(array.py()));
    }
    let owner = Borrowed(pointer);
    // SAFETY: the tensor lives as long as `owner`.
    let tensor = unsafe { &pointer.as_ref().tensor };
    let Some(layout) = tensor.layout() else {
        return Err(invalid_argument(format!(
            "{name} is not contiguous; copy it first, such as with `ascontiguousarray`"
        )));
    };
    Ok((layout.address, layout.nbytes, dtype_of(tensor), tensor.device, owner))
}
