//! Looks at tensors of PyTorch without work of the interpreter.

use peerlane::DType;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// The classes and constants of PyTorch, once the program has imported it.
struct Torch {
    tensor: Py<PyAny>,
    strided: Py<PyAny>,
    /// The types of elements that Peerlane has, by their objects.
    dtypes: Vec<(Py<PyAny>, DType)>,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

/// A plain, contiguous tensor of a GPU.
pub(crate) struct GpuTensor {
    pub(crate) address: usize,
    pub(crate) len: usize,
    pub(crate) dtype: DType,
    /// The number of the GPU in PyTorch.
    pub(crate) device: i32,
}

fn torch(py: Python<'_>) -> PyResult<&Torch> {
    TORCH.get_or_try_init(py, || {
        let torch = py.import("torch")?;
        let dtypes = DType::ALL.into_iter().filter_map(|dtype| {
            // PyTorch lacks some types.
            let found = torch.getattr(dtype.python_name()).ok()?;
            Some((found.unbind(), dtype))
        });
        Ok(Torch {
            tensor: torch.getattr("Tensor")?.unbind(),
            strided: torch.getattr("strided")?.unbind(),
            dtypes: dtypes.collect(),
        })
    })
}

impl GpuTensor {
    /// Looks at a tensor. Returns `None` for everything else, and for tensors that need a closer
    /// look.
    pub(crate) fn of_array(array: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        let py = array.py();
        let torch = torch(py)?;
        if !array.is_instance(torch.tensor.bind(py))? {
            return Ok(None);
        }

        let is = |name: &Bound<'_, pyo3::types::PyString>| -> PyResult<bool> {
            array.call_method0(name)?.is_truthy()
        };
        let has = |name: &Bound<'_, pyo3::types::PyString>, value: &Py<PyAny>| -> PyResult<bool> {
            Ok(array.getattr(name)?.is(value))
        };
        let is_plain = array.getattr(intern!(py, "is_cuda"))?.is_truthy()?
            && has(intern!(py, "layout"), &torch.strided)?
            && is(intern!(py, "is_contiguous"))?
            && !is(intern!(py, "is_conj"))?
            && !is(intern!(py, "is_neg"))?;
        if !is_plain {
            return Ok(None);
        }

        let dtype = array.getattr(intern!(py, "dtype"))?;
        let known = torch.dtypes.iter().find(|(object, _)| dtype.is(object));
        let Some((_, dtype)) = known else { return Ok(None) };
        let address: usize = array.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let len: usize = array.call_method0(intern!(py, "numel"))?.extract()?;
        // A tensor without memory of its own, such as that of a subclass, has no address.
        if address == 0 && len > 0 {
            return Ok(None);
        }

        let device: i32 = array.call_method0(intern!(py, "get_device"))?.extract()?;
        Ok(Some(Self { address, len, dtype: *dtype, device }))
    }
}
