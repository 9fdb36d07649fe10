//! Makes immediate calls for other languages, with memory by its address.

use std::ptr::{self, NonNull};
use std::time::Duration;

use peerlane::collective::Collective;
use peerlane::group::{Immediate, ImmediateStart, Input, Output, WindowPart};
use peerlane::{DType, Error, Group, Operator};

use crate::stream::Stream;

/// The input or the output of a call.
#[derive(Clone, Debug)]
pub enum Location {
    /// Memory of the caller at an address, as a number, so that another thread can make the call.
    Address(usize),
    /// A part of a window.
    Part(WindowPart),
}

/// Describes the input or the output of a call.
#[derive(Clone, Debug)]
pub struct Array {
    /// Where the elements are.
    pub location: Location,
    /// The type of the elements.
    pub dtype: DType,
    /// The elements of the type that count as one.
    pub unit: usize,
    /// The number of elements.
    pub len: usize,
}

impl Array {
    /// Returns the array as an input.
    ///
    /// # Safety
    /// As [`Input::from_address`].
    unsafe fn into_input(self) -> Input<'static> {
        let input = match self.location {
            Location::Part(part) => part.into(),
            // SAFETY: this function has the same contract.
            Location::Address(address) => unsafe {
                Input::from_address(pointer(address), self.dtype, self.len * self.unit)
            },
        };
        if self.unit == 1 { input } else { input.in_units(self.unit) }
    }

    /// Returns the array as an output.
    ///
    /// # Safety
    /// As [`Output::from_address`].
    unsafe fn into_output(self) -> Output<'static> {
        let output = match self.location {
            Location::Part(part) => part.into(),
            // SAFETY: this function has the same contract.
            Location::Address(address) => unsafe {
                Output::from_address(pointer(address), self.dtype, self.len * self.unit)
            },
        };
        if self.unit == 1 { output } else { output.in_units(self.unit) }
    }
}

/// Returns a pointer to an address. An array without elements can have none.
fn pointer(address: usize) -> NonNull<u8> {
    NonNull::new(ptr::with_exposed_provenance_mut(address)).unwrap_or(NonNull::dangling())
}

/// Describes a call, with the options that [`Group::immediate`] has.
#[derive(Clone, Debug)]
pub struct Call {
    /// The collective.
    pub collective: Collective,
    /// How a reduction joins elements; other collectives ignore it.
    pub operator: Operator,
    /// The lengths of the blocks of all ranks, if they differ.
    pub counts: Option<Vec<usize>>,
    /// The elements that this rank sends to each rank and receives from it, in an all-to-all whose
    /// blocks differ.
    pub splits: Option<(Vec<usize>, Vec<usize>)>,
    /// Whether the call runs beside kernels of the caller, or `None` for the setting of the group.
    pub beside_compute: Option<bool>,
    /// The timeout of the call, or `None` for that of the group.
    pub timeout: Option<Duration>,
    /// The input, or `None` if this rank has none.
    pub input: Option<Array>,
    /// The output, or `None` if this rank has none.
    pub output: Option<Array>,
}

/// Returns the input and the output of a call.
///
/// # Safety
/// As [`Input::from_address`] and [`Output::from_address`].
unsafe fn as_memory(
    input: Option<Array>,
    output: Option<Array>,
) -> (Input<'static>, Output<'static>) {
    // SAFETY: this function has the same contract.
    let input = input.map(|array| unsafe { array.into_input() });
    // SAFETY: as above.
    let output = output.map(|array| unsafe { array.into_output() });
    (input.unwrap_or_else(|| ().into()), output.unwrap_or_else(|| ().into()))
}

impl Call {
    /// Creates a call with the options of the group, and without memory.
    pub fn new(collective: Collective) -> Self {
        Self {
            collective,
            operator: Operator::Sum,
            counts: None,
            splits: None,
            beside_compute: None,
            timeout: None,
            input: None,
            output: None,
        }
    }

    fn describe<'g>(&self, group: &'g mut Group) -> Immediate<'g> {
        let mut call = group.immediate(self.collective).operator(self.operator);
        if let Some(counts) = &self.counts {
            call = call.counts(counts);
        }
        if let Some((send, receive)) = &self.splits {
            call = call.splits(send, receive);
        }
        if let Some(beside_compute) = self.beside_compute {
            call = call.beside_compute(beside_compute);
        }
        match self.timeout {
            Some(timeout) => call.timeout(timeout),
            None => call,
        }
    }

    /// Returns the input and the output.
    ///
    /// # Safety
    /// As [`Input::from_address`] and [`Output::from_address`].
    unsafe fn memory(&self) -> (Input<'static>, Output<'static>) {
        let (input, output) = (self.input.clone(), self.output.clone());
        // SAFETY: this function has the same contract.
        unsafe { as_memory(input, output) }
    }

    /// Starts the call on the host, as [`start`](Self::start), without a copy of its description.
    ///
    /// # Errors
    /// As [`Immediate::start`].
    ///
    /// # Safety
    /// As [`start`](Self::start).
    pub unsafe fn start_once(mut self, group: &mut Group) -> Result<ImmediateStart, Error> {
        let (input, output) = (self.input.take(), self.output.take());
        // SAFETY: this function has the same contract.
        let (input, output) = unsafe { as_memory(input, output) };
        // SAFETY: as above.
        unsafe { self.describe(group).start(input, output) }
    }

    /// Starts the call on the host.
    ///
    /// # Errors
    /// As [`Immediate::start`].
    ///
    /// # Safety
    /// As [`Immediate::start`] and [`Input::from_address`].
    pub unsafe fn start(&self, group: &mut Group) -> Result<ImmediateStart, Error> {
        // SAFETY: this function has the same contract.
        unsafe { self.clone().start_once(group) }
    }

    /// Starts the call on the host, unless that would exchange messages with the other ranks.
    ///
    /// # Errors
    /// As [`Immediate::try_start`].
    ///
    /// # Safety
    /// As [`start`](Self::start).
    pub unsafe fn try_start(&self, group: &mut Group) -> Result<Option<ImmediateStart>, Error> {
        // SAFETY: this function has the same contract.
        let (input, output) = unsafe { self.memory() };
        // SAFETY: as above.
        unsafe { self.describe(group).try_start(input, output) }
    }

    /// Enqueues the call on a stream of the vendor.
    ///
    /// If the stream captures, the call is recorded.
    ///
    /// # Errors
    /// As [`Immediate::run_on`]; the error of the stream if it has one.
    ///
    /// # Safety
    /// As [`Input::from_address`]; as [`Immediate::capturable`] if the stream captures.
    pub unsafe fn run_on(
        &self,
        group: &mut Group,
        stream: Result<Stream, Error>,
    ) -> Result<(), Error> {
        // SAFETY: this function has the same contract.
        let (input, output) = unsafe { self.memory() };
        let stream = stream.map_err(|error| match self.splits {
            Some(_) => group.refuse_splits(error),
            None => group.refuse_immediate(self.collective, error),
        })?;
        // SAFETY: as above.
        let call = unsafe { self.describe(group).capturable() };
        match stream {
            Stream::Cuda(stream) => call.run_on(&stream, input, output),
            Stream::Rocm(stream) => call.run_on(&stream, input, output),
        }
    }

    /// Enqueues the call on a stream of the vendor, unless that would exchange messages with the
    /// other ranks. Returns whether it did.
    ///
    /// # Errors
    /// As [`Immediate::try_run_on`]; the error of the stream if it has one.
    ///
    /// # Safety
    /// As [`run_on`](Self::run_on).
    pub unsafe fn try_run_on(
        &self,
        group: &mut Group,
        stream: Result<Stream, Error>,
    ) -> Result<bool, Error> {
        // The longer call tells the other ranks of the error.
        let Ok(stream) = stream else { return Ok(false) };
        // SAFETY: this function has the same contract.
        let (input, output) = unsafe { self.memory() };
        // SAFETY: as above.
        let call = unsafe { self.describe(group).capturable() };
        match stream {
            Stream::Cuda(stream) => call.try_run_on(&stream, input, output),
            Stream::Rocm(stream) => call.try_run_on(&stream, input, output),
        }
    }
}
