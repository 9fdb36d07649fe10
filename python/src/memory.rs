//! Views of memory of the library, for DLPack and the buffer protocol.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;

use peerlane::element::ElementKind;
use peerlane::hal::{BackendId, Reduction, Space};
use peerlane::{DType, MemoryRange, Operator};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::call::{argument, invalid_argument, whole};

const CPU: (i32, i32) = (1, 0);
const CUDA: i32 = 2;
const ROCM: i32 = 10;

/// A range of memory of elements of one type, which keeps its owner alive.
///
/// It supports DLPack, the buffer protocol (host memory only) and `__cuda_array_interface__`.
#[pyclass(frozen)]
pub(crate) struct Memory {
    address: usize,
    #[pyo3(get)]
    nbytes: usize,
    dtype: DType,
    device: (i32, i32),
    /// Keeps the memory allocated.
    _owner: Py<PyAny>,
    /// The number of elements, which views of the buffer protocol point to.
    shape: [ffi::Py_ssize_t; 1],
    /// The bytes of an element.
    strides: [ffi::Py_ssize_t; 1],
}

/// Returns the device of memory as in DLPack.
pub(crate) fn device(space: Space, backend: BackendId, ordinal: Option<u32>) -> (i32, i32) {
    let number = ordinal.and_then(|ordinal| i32::try_from(ordinal).ok()).unwrap_or(0);
    match (space, backend) {
        (Space::Device, BackendId::ROCM) => (ROCM, number),
        (Space::Device, _) => (CUDA, number),
        (Space::Host, _) => CPU,
    }
}

/// Holds an address range as numbers, which may move between threads, unlike the pointer of a
/// [`MemoryRange`].
pub(crate) struct RawRange {
    address: usize,
    nbytes: usize,
    space: Space,
}

impl From<MemoryRange> for RawRange {
    fn from(memory: MemoryRange) -> Self {
        let nbytes = usize::try_from(memory.bytes).unwrap_or(usize::MAX);
        Self { address: memory.base.as_ptr().expose_provenance(), nbytes, space: memory.space }
    }
}

impl RawRange {
    pub(crate) fn device(&self, backend: BackendId, ordinal: Option<u32>) -> (i32, i32) {
        device(self.space, backend, ordinal)
    }
}

impl Memory {
    pub(crate) fn within(
        range: &RawRange,
        dtype: DType,
        device: (i32, i32),
        owner: Py<PyAny>,
    ) -> Self {
        Self::from_address((range.address, range.nbytes), dtype, device, owner)
    }

    fn from_address(
        (address, nbytes): (usize, usize),
        dtype: DType,
        device: (i32, i32),
        owner: Py<PyAny>,
    ) -> Self {
        let size = dtype.bytes();
        let (shape, strides) = ([(nbytes / size).cast_signed()], [size.cast_signed()]);
        Self { address, nbytes, dtype, device, _owner: owner, shape, strides }
    }
}

/// Returns a type as in DLPack: code and bits.
fn dlpack_type(dtype: DType) -> (u8, u8) {
    let bits = u8::try_from(8 * dtype.bytes()).expect("an element has at most 16 bytes");
    (dtype.dlpack_code(), bits)
}

/// Returns the letter that NumPy has for the kind of a type, or `None` if it lacks the type.
fn numpy_kind(dtype: DType) -> Option<&'static str> {
    match dtype.dlpack_code() {
        dlpack::INT => Some("i"),
        dlpack::UINT => Some("u"),
        dlpack::FLOAT => Some("f"),
        dlpack::COMPLEX => Some("c"),
        _ => None,
    }
}

/// Returns all element types: the name, the name in PyTorch, that in NumPy, the bytes of an
/// element, and whether elements can be reduced.
///
/// For a type that NumPy lacks, its name is that of unsigned integers.
#[pyfunction]
pub(crate) fn element_types() -> Vec<(&'static str, &'static str, &'static str, usize, bool)> {
    let unsigned = |dtype: DType| {
        let is_like =
            |other: &DType| other.kind() == ElementKind::Unsigned && other.bytes() == dtype.bytes();
        DType::ALL.into_iter().find(is_like).unwrap_or(dtype)
    };
    let row = |dtype: DType| {
        let in_numpy = if numpy_kind(dtype).is_some() { dtype } else { unsigned(dtype) };
        let is_reduced = Reduction::new(Operator::Sum, dtype).is_ok();
        (dtype.name(), dtype.python_name(), in_numpy.python_name(), dtype.bytes(), is_reduced)
    };
    DType::ALL.map(row).to_vec()
}

pub(crate) fn dtype(name: &str) -> PyResult<DType> {
    let found = DType::ALL.into_iter().find(|dtype| dtype.name() == name);
    found.ok_or_else(|| {
        let names: Vec<&str> = DType::ALL.iter().map(|dtype| dtype.name()).collect();
        invalid_argument(format!("dtype is {name:?}, expected one of {}", names.join(", ")))
    })
}

#[pymethods]
impl Memory {
    /// Describes `nbytes` bytes at `address` on a device as in DLPack.
    #[new]
    fn new(
        address: &Bound<'_, PyAny>,
        nbytes: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        device: &Bound<'_, PyAny>,
        owner: Py<PyAny>,
    ) -> PyResult<Self> {
        let address: usize = whole("address", address)?;
        let nbytes: usize = whole("nbytes", nbytes)?;
        let dtype: &str = &argument::<String>("dtype", dtype, "the name of a type")?;
        let expected = "a pair of whole numbers, kind and number as in DLPack";
        let device: (i32, i32) = argument("device", device, expected)?;

        let dtype = self::dtype(dtype)?;
        if address == 0 || !nbytes.is_multiple_of(dtype.bytes()) {
            let text = format!(
                "memory of {nbytes} bytes at {address:#x}, expected an address and whole elements of {} bytes",
                dtype.bytes()
            );
            return Err(invalid_argument(text));
        }

        Ok(Self::from_address((address, nbytes), dtype, device, owner))
    }

    /// Returns the address of the first byte, on the host or on the device.
    #[getter]
    fn address(&self) -> usize {
        self.address
    }

    /// Returns the device as in DLPack: kind and number.
    #[getter]
    fn device(&self) -> (i32, i32) {
        self.device
    }

    /// Returns the name of the element type, such as "f32".
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    fn __len__(&self) -> usize {
        self.nbytes / self.dtype.bytes()
    }

    fn __repr__(&self) -> String {
        let (kind, number) = self.device;
        let place = match kind {
            CUDA => format!("CUDA device {number}"),
            ROCM => format!("ROCm device {number}"),
            _ => "the host".to_owned(),
        };
        format!("<peerlane.Memory of {} {} on {place}>", self.__len__(), self.dtype.name())
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        self.device
    }

    /// Returns a capsule of DLPack. The memory is not copied, and no stream is synchronised.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        slf: &Bound<'py, Self>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let _ = stream;
        let this = slf.get();

        if copy == Some(true) || dl_device.is_some_and(|wanted| wanted != this.device) {
            let text = "memory of Peerlane is not copied to make a capsule; expected its own device and no copy";
            return Err(PyBufferError::new_err(text));
        }

        let is_versioned = max_version.is_some_and(|(major, _)| major >= 1);
        dlpack::capsule(slf, is_versioned)
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let Some(kind) = numpy_kind(self.dtype).filter(|_| self.device.0 != CPU.0) else {
            let text = "only memory of a GPU with a type of NumPy has __cuda_array_interface__";
            return Err(pyo3::exceptions::PyAttributeError::new_err(text));
        };

        let interface = pyo3::types::PyDict::new(py);
        interface.set_item("shape", (self.__len__(),))?;
        interface.set_item("typestr", format!("<{kind}{}", self.dtype.bytes()))?;
        interface.set_item("data", (self.address, false))?;
        interface.set_item("version", 3)?;
        Ok(interface.into_any())
    }

    /// Fills a view of the buffer protocol.
    ///
    /// # Safety
    /// The interpreter calls it with a valid view.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        _flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        if this.device.0 != CPU.0 {
            return Err(PyBufferError::new_err("memory of a GPU has no buffer; use DLPack"));
        }

        let filled = ffi::Py_buffer {
            buf: ptr::with_exposed_provenance_mut(this.address),
            len: this.nbytes.cast_signed(),
            itemsize: this.strides[0],
            readonly: 0,
            ndim: 1,
            format: this.dtype.buffer_format().as_ptr().cast_mut(),
            // The view owns the object, which has these numbers and is at a fixed address.
            shape: this.shape.as_ptr().cast_mut(),
            strides: this.strides.as_ptr().cast_mut(),
            suboffsets: ptr::null_mut(),
            internal: ptr::null_mut(),
            obj: slf.clone().into_any().into_ptr(),
        };

        // SAFETY: the interpreter gives a view to fill.
        unsafe { view.write(filled) };
        Ok(())
    }
}

/// Structures and numbers of DLPack 1.1, from <https://dmlc.github.io/dlpack/latest/c_api.html>.
pub(crate) mod dlpack {
    use super::{CStr, DType, Memory, c_void, ffi, ptr};
    use pyo3::prelude::*;

    /// The names of capsules that no consumer has taken.
    pub(crate) const UNVERSIONED: &CStr = c"dltensor";
    pub(crate) const VERSIONED: &CStr = c"dltensor_versioned";

    /// Codes of element types, `DLDataTypeCode`.
    pub(crate) const INT: u8 = 0;
    pub(crate) const UINT: u8 = 1;
    pub(crate) const FLOAT: u8 = 2;
    pub(crate) const COMPLEX: u8 = 5;
    const BOOL: u8 = 6;

    /// The types that only move and are not those of Peerlane: code, bits, and the name in NumPy,
    /// PyTorch or `ml_dtypes`.
    ///
    /// Handles (code 3) are addresses of one process, and types of 4 and 6 bits share bytes, so
    /// both are left out.
    const MOVED: [(u8, u8, &str); 8] = [
        (BOOL, 8, "bool"),
        (COMPLEX, 32, "complex32"),
        (COMPLEX, 128, "complex128"),
        (7, 8, "float8_e3m4"),
        (8, 8, "float8_e4m3"),
        (9, 8, "float8_e4m3b11fnuz"),
        (11, 8, "float8_e4m3fnuz"),
        (13, 8, "float8_e5m2fnuz"),
    ];

    #[repr(C)]
    pub(crate) struct Tensor {
        data: *mut c_void,
        pub(crate) device: (i32, i32),
        ndim: i32,
        code: u8,
        bits: u8,
        lanes: u16,
        shape: *mut i64,
        strides: *mut i64,
        byte_offset: u64,
    }

    /// `DLManagedTensor`
    #[repr(C)]
    pub(crate) struct Managed {
        pub(crate) tensor: Tensor,
        context: *mut c_void,
        pub(crate) deleter: Option<unsafe extern "C" fn(*mut Self)>,
    }

    /// A tensor that this module gives to others.
    #[repr(C)]
    struct Given {
        managed: Managed,
        /// Not part of DLPack.
        kept: Kept,
    }

    /// The address and the size of a contiguous tensor.
    pub(crate) struct Layout {
        pub(crate) address: usize,
        pub(crate) nbytes: usize,
    }

    impl Tensor {
        /// Returns code, bits and lanes of an element.
        pub(crate) fn element(&self) -> (u8, u8, u16) {
            (self.code, self.bits, self.lanes)
        }

        /// Returns where the elements are, if they follow each other and their numbers make sense.
        pub(crate) fn layout(&self) -> Option<Layout> {
            let dims = usize::try_from(self.ndim).ok()?;
            if dims > 0 && self.shape.is_null() {
                return None;
            }
            let slice = |numbers: *const i64| match dims {
                0 => &[][..],
                // SAFETY: a tensor of DLPack has one number for each dimension.
                _ => unsafe { std::slice::from_raw_parts(numbers, dims) },
            };

            let shape = slice(self.shape);
            let is_empty = shape.contains(&0);
            let mut elements: i64 = 1;
            for len in shape {
                let is_size = *len >= 0;
                elements = is_size.then(|| elements.checked_mul(*len))??;
            }

            // Strides of an empty tensor, and those of dimensions of one element, have no meaning.
            let mut expected: i64 = 1;
            if !is_empty && !self.strides.is_null() {
                for (len, stride) in shape.iter().zip(slice(self.strides)).rev() {
                    if *len != 1 && *stride != expected {
                        return None;
                    }
                    expected = expected.checked_mul(*len)?;
                }
            }

            let element_bytes = usize::from(self.bits) * usize::from(self.lanes) / 8;
            let nbytes = usize::try_from(elements).ok()?.checked_mul(element_bytes)?;
            let offset = usize::try_from(self.byte_offset).ok()?;
            let address = self.data.expose_provenance().checked_add(offset)?;
            Some(Layout { address, nbytes })
        }
    }

    /// Returns the name of the type of a tensor, in which elements are whole bytes, or `None` if it
    /// is unknown.
    pub(crate) fn type_name(tensor: &Tensor) -> Option<&'static str> {
        if tensor.lanes != 1 {
            return None;
        }
        let element = (tensor.code, tensor.bits);
        let is_known = |dtype: &DType| super::dlpack_type(*dtype) == element;
        let known = DType::ALL.into_iter().find(is_known).map(DType::name);
        let moved = MOVED.iter().find(|(code, bits, _)| (*code, *bits) == element);
        known.or_else(|| moved.map(|(_, _, name)| *name))
    }

    /// The beginning of `DLManagedTensorVersioned`, which is the same in every version.
    #[repr(C)]
    pub(crate) struct VersionedHead {
        pub(crate) version: [u32; 2],
        context: *mut c_void,
        pub(crate) deleter: Option<unsafe extern "C" fn(*mut Self)>,
    }

    /// `DLManagedTensorVersioned` of version 1.
    #[repr(C)]
    pub(crate) struct VersionedTensor {
        _head: VersionedHead,
        pub(crate) flags: u64,
        pub(crate) tensor: Tensor,
    }

    /// A tensor of version 1 that this module gives to others.
    #[repr(C)]
    struct Versioned {
        version: [u32; 2],
        context: *mut c_void,
        deleter: Option<unsafe extern "C" fn(*mut Self)>,
        flags: u64,
        tensor: Tensor,
        /// Not part of DLPack.
        kept: Kept,
    }

    struct Kept {
        shape: [i64; 1],
        strides: [i64; 1],
        /// Keeps the memory allocated.
        _memory: Option<Py<PyAny>>,
    }

    impl Drop for Kept {
        fn drop(&mut self) {
            let memory = self._memory.take();
            let mut memory = Some(memory);
            // A library may give its tensor back on any thread; after the end of the interpreter
            // nothing is left to free.
            if Python::try_attach(|_| drop(memory.take())).is_none() {
                std::mem::forget(memory);
            }
        }
    }

    trait Capsule {
        const NAME: &'static CStr;
    }

    impl Capsule for Given {
        const NAME: &'static CStr = UNVERSIONED;
    }

    impl Capsule for Versioned {
        const NAME: &'static CStr = VERSIONED;
    }

    unsafe extern "C" fn delete<T: Capsule>(object: *mut T) {
        // SAFETY: it came from a box, and the consumer calls this once.
        drop(unsafe { Box::from_raw(object) });
    }

    unsafe extern "C" fn end<T: Capsule>(capsule: *mut ffi::PyObject) {
        // SAFETY: the interpreter passes the capsule that it destroys.
        if unsafe { ffi::PyCapsule_IsValid(capsule, T::NAME.as_ptr()) } == 0 {
            return; // A consumer has taken the tensor and renamed the capsule.
        }
        // SAFETY: the capsule is valid and has this name.
        let object = unsafe { ffi::PyCapsule_GetPointer(capsule, T::NAME.as_ptr()) };
        // SAFETY: it is the object of the capsule, which nobody has taken.
        unsafe { delete(object.cast::<T>()) };
    }

    /// Creates a capsule that owns a tensor.
    fn new_capsule<'py, T: Capsule>(
        py: Python<'py>,
        object: Box<T>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let raw = Box::into_raw(object);
        // SAFETY: the name is static, and the destructor takes this type.
        let capsule = unsafe { ffi::PyCapsule_New(raw.cast(), T::NAME.as_ptr(), Some(end::<T>)) };
        if capsule.is_null() {
            // SAFETY: no capsule has the box.
            drop(unsafe { Box::from_raw(raw) });
        }

        // SAFETY: it is a new reference, or NULL with an exception.
        unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
    }

    /// Returns a capsule of memory, of version 1 or without a version.
    pub(super) fn capsule<'py>(
        memory: &Bound<'py, Memory>,
        is_versioned: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let this = memory.get();
        let (code, bits) = super::dlpack_type(this.dtype);
        let tensor = Tensor {
            data: ptr::with_exposed_provenance_mut(this.address),
            device: this.device,
            ndim: 1,
            code,
            bits,
            lanes: 1,
            shape: ptr::null_mut(),
            strides: ptr::null_mut(),
            byte_offset: 0,
        };

        let kept = Kept {
            shape: [this.shape[0] as i64],
            strides: [1],
            _memory: Some(memory.clone().into_any().unbind()),
        };
        let context = ptr::null_mut();

        if is_versioned {
            let (version, deleter) = ([1, 0], Some(delete::<Versioned> as _));
            let mut object =
                Box::new(Versioned { version, context, deleter, flags: 0, tensor, kept });
            // The box gives the numbers their final address.
            object.tensor.shape = object.kept.shape.as_mut_ptr();
            object.tensor.strides = object.kept.strides.as_mut_ptr();
            return new_capsule(memory.py(), object);
        }

        let deleter: unsafe extern "C" fn(*mut Given) = delete::<Given>;
        // SAFETY: only the type of the argument differs, which is the first field of the other.
        let deleter = unsafe {
            std::mem::transmute::<
                unsafe extern "C" fn(*mut Given),
                unsafe extern "C" fn(*mut Managed),
            >(deleter)
        };
        let managed = Managed { tensor, context, deleter: Some(deleter) };

        let mut object = Box::new(Given { managed, kept });
        object.managed.tensor.shape = object.kept.shape.as_mut_ptr();
        object.managed.tensor.strides = object.kept.strides.as_mut_ptr();
        new_capsule(memory.py(), object)
    }
}
