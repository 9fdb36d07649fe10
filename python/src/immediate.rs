//! Makes immediate calls on arrays: converts their arguments, and keeps the handles of those that
//! are not complete.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use peerlane::collective::Collective;
use peerlane::group::ImmediateStart;
use peerlane::hal::Reduction;
use peerlane::{DType, Operator, Rank};
use peerlane_bindings::{Array, Call, Location};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::call::{SIGNALS, invalid_argument, limit, lock, short, wait};
use crate::memory;
use crate::tensors::GpuTensor;
use crate::window::Window;

/// The windows and places of arrays that have equal places on all ranks, by address and bytes.
#[derive(Default)]
pub(crate) struct ArrayPlaces(Mutex<HashMap<Extent, WindowPlace>>);

/// The address and the bytes of an array.
type Extent = (usize, usize);
/// A window and a byte of it.
type WindowPlace = (Py<Window>, usize);

impl ArrayPlaces {
    pub(crate) fn add(&self, address: usize, nbytes: usize, place: WindowPlace) {
        lock(&self.0).insert((address, nbytes), place);
    }

    pub(crate) fn remove(&self, address: usize, nbytes: usize) {
        let removed = lock(&self.0).remove(&(address, nbytes));
        // After the lock, because the drop of a window can be long.
        drop(removed);
    }

    pub(crate) fn contains(&self, address: usize, nbytes: usize) -> bool {
        lock(&self.0).contains_key(&(address, nbytes))
    }

    fn find(&self, array: &Array, address: usize) -> PyResult<Option<Location>> {
        let len = array.len * array.unit;
        let places = lock(&self.0);
        let Some((window, begin)) = places.get(&(address, len * array.dtype.bytes())) else {
            return Ok(None);
        };
        let part = window.get().with(|window| window.untyped_part(array.dtype, *begin, len))?;
        Ok(Some(Location::Part(part)))
    }
}

/// What a call on arrays gets from the package, which has looked at the arrays: the collective, the
/// root, the element type, the elements of the type in one of the arrays, the address and the
/// length of the input and of the output, the lengths of the blocks of all ranks, what this rank
/// sends to and receives from each rank, the reduction, and whether the call runs beside compute.
pub(crate) type Arguments<'py> = (
    Bound<'py, PyString>,
    u32,
    Bound<'py, PyString>,
    usize,
    Option<(usize, usize)>,
    Option<(usize, usize)>,
    Option<Vec<usize>>,
    Option<(Vec<usize>, Vec<usize>)>,
    Bound<'py, PyString>,
    Option<bool>,
);

impl ArrayPlaces {
    /// Returns the call, in which arrays that have places in windows are there.
    pub(crate) fn call(&self, ranks: u32, arguments: Arguments<'_>) -> PyResult<Call> {
        let (
            collective,
            root,
            dtype,
            unit,
            input,
            output,
            counts,
            splits,
            reduction,
            beside_compute,
        ) = arguments;
        let name = collective.to_str()?;
        let collective = Collective::of_name(name);
        let collective = collective.ok_or_else(|| unknown("collective", name))?;
        let collective = collective.with_root(Rank(root));
        let name = reduction.to_str()?;
        let operator = Operator::ALL.into_iter().find(|operator| operator.name() == name);
        let dtype = memory::dtype(dtype.to_str()?)?;

        let array =
            |(address, len)| Array { location: Location::Address(address), dtype, unit, len };
        let call = Call {
            collective,
            operator: operator.ok_or_else(|| unknown("reduction", name))?,
            counts,
            splits,
            beside_compute,
            timeout: None,
            input: input.map(array),
            output: output.map(array),
        };
        self.placed(ranks, call)
    }

    /// Returns a call on plain tensors of the GPU `device`, or `None` if an argument needs a closer
    /// look.
    pub(crate) fn call_of_tensors(
        &self,
        (rank, ranks): (Rank, u32),
        (collective, root, reduction): (&str, u32, &str),
        [input, output]: [&Bound<'_, PyAny>; 2],
        device: i32,
    ) -> PyResult<Option<Call>> {
        let operator = Operator::ALL.into_iter().find(|operator| operator.name() == reduction);
        let (Some(collective), Some(operator)) = (Collective::of_name(collective), operator) else {
            return Ok(None);
        };
        let collective = collective.with_root(Rank(root));
        let look = |array: &Bound<'_, PyAny>| -> PyResult<Option<Array>> {
            let seen = GpuTensor::of_array(array)?.filter(|tensor| tensor.device == device);
            Ok(seen.map(|GpuTensor { address, len, dtype, .. }| Array {
                location: Location::Address(address),
                dtype,
                unit: 1,
                len,
            }))
        };

        // Every rank has the array of a broadcast.
        let is_broadcast = matches!(collective, Collective::Broadcast { .. });
        let has_input = is_broadcast || collective.is_provider(rank);
        let has_output = collective.is_receiver(rank);
        let input = if has_input { Some(look(input)?) } else { None };
        let output = if has_output { Some(look(output)?) } else { None };
        if matches!(input, Some(None)) || matches!(output, Some(None)) || root >= ranks {
            return Ok(None);
        }
        let (input, output) = (input.flatten(), output.flatten());
        let dtypes = [&input, &output].map(|array| array.as_ref().map(|array| array.dtype));
        let is_odd =
            |dtype: DType| collective.is_reduction() && Reduction::new(operator, dtype).is_err();
        match dtypes {
            [Some(input), Some(output)] if input != output => return Ok(None),
            [Some(dtype), _] | [_, Some(dtype)] if is_odd(dtype) => return Ok(None),
            _ => {}
        }

        let call = Call {
            collective,
            operator,
            counts: None,
            splits: None,
            beside_compute: None,
            timeout: None,
            input,
            output,
        };
        self.placed(ranks, call).map(Some)
    }

    /// Returns a call in which arrays that have places in windows are there.
    fn placed(&self, ranks: u32, mut call: Call) -> PyResult<Call> {
        // With counts, an array can be whole on one rank and a part of one on another. If not all
        // ranks have both arrays, a rank does not know whether another one gives one array for
        // both.
        let mut ranks = (0..ranks).map(Rank);
        let collective = call.collective;
        let is_for_all = ranks.clone().all(|rank| collective.is_provider(rank));
        let is_for_all = is_for_all || matches!(collective, Collective::Broadcast { .. });
        let is_for_all = is_for_all && ranks.all(|rank| collective.is_receiver(rank));

        if is_for_all && call.counts.is_none() && call.splits.is_none() {
            for array in [&mut call.input, &mut call.output].into_iter().flatten() {
                if let Location::Address(address) = array.location
                    && let Some(location) = self.find(array, address)?
                {
                    array.location = location;
                }
            }
        }
        Ok(call)
    }
}

fn unknown(field: &str, name: &str) -> PyErr {
    let names: Vec<&str> = match field {
        "collective" => Collective::ALL.iter().map(|collective| collective.name()).collect(),
        _ => Operator::ALL.iter().map(|operator| operator.name()).collect(),
    };
    invalid_argument(format!("{field} is {name:?}, expected one of {}", names.join(", ")))
}

/// A call on arrays of the host that is not complete yet.
#[pyclass(frozen)]
pub(crate) struct StartedCall(Mutex<ImmediateStart>);

impl StartedCall {
    pub(crate) fn new(start: ImmediateStart) -> Self {
        Self(Mutex::new(start))
    }
}

#[pymethods]
impl StartedCall {
    /// Waits until the output is complete.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let limit = limit("timeout", timeout)?;
        wait(py, limit, |left| {
            let mut start = lock(&self.0);
            match left {
                Some(left) => start.wait_for(left.min(SIGNALS)),
                None => start.wait_part(SIGNALS),
            }
        })
    }

    /// Returns whether the output is complete, without waiting.
    fn is_done(&self, py: Python<'_>) -> PyResult<bool> {
        short(py, || lock(&self.0).wait_for(Duration::ZERO))
    }
}
