//! Makes immediate calls on arrays: converts their arguments, and keeps the handles of those that
//! are not complete.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use peerlane::collective::Collective;
use peerlane::group::ImmediateStart;
use peerlane::{Operator, Rank};
use peerlane_bindings::{Array, Call, Location};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::call::{SIGNALS, invalid_argument, limit, lock, short, wait};
use crate::memory;
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

        // With counts, an array can be whole on one rank and a part of one on another. If not all
        // ranks have both arrays, a rank does not know whether another one gives one array for
        // both.
        let mut ranks = (0..ranks).map(Rank);
        let is_for_all = ranks.clone().all(|rank| collective.is_provider(rank));
        let is_for_all = is_for_all || matches!(collective, Collective::Broadcast { .. });
        let has_places = is_for_all && ranks.all(|rank| collective.is_receiver(rank));
        let has_places = has_places && counts.is_none() && splits.is_none();
        let array = |given: Option<(usize, usize)>| {
            let Some((address, len)) = given else { return Ok(None) };
            let mut array = Array { location: Location::Address(address), dtype, unit, len };
            if has_places && let Some(location) = self.find(&array, address)? {
                array.location = location;
            }
            Ok::<_, PyErr>(Some(array))
        };

        Ok(Call {
            collective,
            operator: operator.ok_or_else(|| unknown("reduction", name))?,
            counts,
            splits,
            beside_compute,
            timeout: None,
            input: array(input)?,
            output: array(output)?,
        })
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
