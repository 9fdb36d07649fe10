//! Addresses of arrays of other libraries, by the buffer protocol and DLPack.

use std::ffi::CStr;
use std::ptr::NonNull;

use pyo3::exceptions::{PyException, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::call::invalid_argument;
use crate::memory::dlpack::{self, Managed, Tensor, VersionedHead, VersionedTensor, type_name};

/// Returns address, bytes and whether it is read-only of an object with the buffer protocol, such
/// as a `memoryview`.
///
/// Not by `PyUntypedBuffer`, which refuses buffers without strides, as those of `ctypes`, and
/// without dimensions.
#[pyfunction]
pub(crate) fn buffer(array: &Bound<'_, PyAny>) -> PyResult<(usize, usize, bool)> {
    let mut view = ffi::Py_buffer::new();
    // SAFETY: the object lives during the call, which fills the view or raises.
    if unsafe { ffi::PyObject_GetBuffer(array.as_ptr(), &raw mut view, ffi::PyBUF_FULL_RO) } != 0 {
        return Err(PyErr::fetch(array.py()));
    }
    let nbytes = usize::try_from(view.len).unwrap_or(0);
    let found = (view.buf.expose_provenance(), nbytes, view.readonly != 0);

    // SAFETY: the view was filled above, and is released once.
    unsafe { ffi::PyBuffer_Release(&raw mut view) };
    Ok(found)
}

/// A tensor of another library that was taken out of a capsule.
#[pyclass(frozen)]
pub(crate) struct Borrowed(Taken);

/// A tensor in one of the two layouts of DLPack.
enum Taken {
    /// From before version 1.0, without flags.
    Unversioned(NonNull<Managed>),
    Versioned(NonNull<VersionedHead>),
}

// SAFETY: the tensor belongs to this object alone, and a deleter can be called on any thread that
// has the interpreter.
unsafe impl Send for Borrowed {}
// SAFETY: no method accesses the tensor.
unsafe impl Sync for Borrowed {}

impl Drop for Borrowed {
    fn drop(&mut self) {
        match self.0 {
            Taken::Unversioned(tensor) => {
                // SAFETY: the producer of the capsule keeps the tensor until its deleter was
                // called.
                if let Some(deleter) = unsafe { tensor.as_ref() }.deleter {
                    // SAFETY: this object has taken the tensor, and calls the deleter once.
                    unsafe { deleter(tensor.as_ptr()) };
                }
            }
            Taken::Versioned(tensor) => {
                // SAFETY: as for the other layout; every version has the deleter at this place.
                if let Some(deleter) = unsafe { tensor.as_ref() }.deleter {
                    // SAFETY: this object has taken the tensor, and calls the deleter once.
                    unsafe { deleter(tensor.as_ptr()) };
                }
            }
        }
    }
}

/// Flags of `DLManagedTensorVersioned`.
const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;

/// Address, bytes, type, device, flags (`None` from before version 1.0) and owner.
type Described = (usize, usize, &'static str, (i32, i32), Option<(bool, bool)>, Borrowed);

/// Returns what DLPack says of a contiguous array with `__dlpack__`: address, bytes, type, device,
/// whether it is read-only and whether it is a copy, and the owner of the memory.
#[pyfunction]
pub(crate) fn from_dlpack(name: &str, array: &Bound<'_, PyAny>) -> PyResult<Described> {
    let capsule = capsule(array).map_err(|error| refused(name, array, error))?;
    let owner = taken(name, &capsule)?;

    let (tensor, flags) = match owner.0 {
        // SAFETY: the tensor lives as long as `owner`.
        Taken::Unversioned(ref managed) => (unsafe { &managed.as_ref().tensor }, None),
        Taken::Versioned(ref head) => {
            // SAFETY: the tensor lives as long as `owner`.
            let [major, minor] = unsafe { head.as_ref() }.version;
            // The fields after the deleter may change with the major version.
            if major != 1 {
                return Err(invalid_argument(format!(
                    "{name} is a tensor of DLPack {major}.{minor}, expected version 1"
                )));
            }
            let whole: NonNull<VersionedTensor> = head.cast();
            // SAFETY: a tensor of version 1 has these fields, and lives as long as `owner`.
            let VersionedTensor { flags, tensor, .. } = unsafe { whole.as_ref() };
            (tensor, Some((flags & READ_ONLY != 0, flags & IS_COPIED != 0)))
        }
    };
    let (address, nbytes, type_name) = described(name, tensor)?;
    let device = tensor.device;

    Ok((address, nbytes, type_name, device, flags, owner))
}

/// Asks an array for a capsule, of version 1 if its library knows that.
fn capsule<'py>(array: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = array.py();
    let arguments = PyDict::new(py);

    // The caller's stream is used later, so the producer need not synchronise: -1 says so for
    // devices.
    let device: (i32, i32) = array.call_method0("__dlpack_device__")?.extract()?;
    if device.0 != 1 {
        arguments.set_item("stream", -1)?;
    }

    arguments.set_item("max_version", (1, 0))?;
    match array.call_method("__dlpack__", (), Some(&arguments)) {
        // A library from before version 1.0 does not know the argument.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            arguments.del_item("max_version")?;
            array.call_method("__dlpack__", (), Some(&arguments))
        }
        answer => answer,
    }
}

/// Returns the error for an array whose library gives no capsule. Exceptions such as
/// `KeyboardInterrupt` stay.
fn refused(name: &str, array: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    if !error.is_instance_of::<PyException>(array.py()) {
        return error;
    }
    invalid_argument(format!(
        "{name} is a {}, expected an array that DLPack can describe; its library says: {error}",
        array.get_type()
    ))
}

/// Takes the tensor out of a capsule.
fn taken(name: &str, capsule: &Bound<'_, PyAny>) -> PyResult<Borrowed> {
    let py = capsule.py();
    let wrong = || {
        invalid_argument(format!(
            "`__dlpack__` of {name} returned a {}, expected a capsule \"dltensor\" or \"dltensor_versioned\" that is not used yet",
            capsule.get_type()
        ))
    };
    let capsule = capsule.cast::<PyCapsule>().map_err(|_| wrong())?;
    let find = |name: &'static CStr| {
        let found = capsule.is_valid_checked(Some(name));
        found.then(|| capsule.pointer_checked(Some(name))).transpose()
    };
    let (owner, used) = if let Some(pointer) = find(dlpack::VERSIONED)? {
        (Borrowed(Taken::Versioned(pointer.cast())), c"used_dltensor_versioned")
    } else if let Some(pointer) = find(dlpack::UNVERSIONED)? {
        (Borrowed(Taken::Unversioned(pointer.cast())), c"used_dltensor")
    } else {
        return Err(wrong());
    };

    // SAFETY: a capsule of this name has such a tensor, and the name that follows says that it was
    // taken.
    if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } != 0 {
        // The capsule keeps the tensor, and its destructor calls the deleter.
        std::mem::forget(owner);
        return Err(PyErr::fetch(py));
    }
    Ok(owner)
}

/// Returns address, bytes and type of a tensor.
fn described(name: &str, tensor: &Tensor) -> PyResult<(usize, usize, &'static str)> {
    let Some(type_name) = type_name(tensor) else {
        let (code, bits, lanes) = tensor.element();
        return Err(invalid_argument(format!(
            "{name} has elements of the code {code} of DLPack with {bits} bits and {lanes} lanes, expected integers, floating-point \
             or complex numbers or booleans of whole bytes"
        )));
    };

    let Some(layout) = tensor.layout() else {
        return Err(invalid_argument(format!(
            "{name} is not contiguous; copy it first, such as with `ascontiguousarray`"
        )));
    };
    if layout.nbytes > 0 && layout.address == 0 {
        return Err(invalid_argument(format!(
            "{name} has {} bytes without memory, expected an address",
            layout.nbytes
        )));
    }
    Ok((layout.address, layout.nbytes, type_name))
}
