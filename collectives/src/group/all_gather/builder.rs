//! Describing an all-gather.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::Fabric;

use super::AllGather;
use super::method::Method;
use super::prepare;
use super::request::Target;
use super::shards::Shards;
use crate::collective::Collective;
use crate::cost::Links;
use crate::element::Element;
use crate::error::Error;
use crate::group::buffer::Buffer;
use crate::group::window::{Inner, Window};
use crate::group::{Group, Local};
use crate::plan::Algorithm;

/// An all-gather that is being described; [`prepare`](Self::prepare) makes it ready.
pub struct AllGatherBuilder<'g, F: Fabric, T> {
    group: &'g mut Group<F>,
    operation: &'static str,
    collective: Collective,
    shards: Shards,
    target: Target,
    method: Method,
    in_place: bool,
    outputs: Option<u32>,
    capturable: bool,
    any_engine: bool,
    strict: bool,
    traced: bool,
    timeout: Duration,
    inputs: Vec<Buffer<Local<F>, T>>,
    source: Option<(Arc<Inner>, usize)>,
    output_buffers: Vec<Buffer<Local<F>, T>>,
}

impl<'g, F: Fabric, T: Element> AllGatherBuilder<'g, F, T> {
    /// `operation` is what all ranks must call alike.
    pub(in crate::group) fn new(
        group: &'g mut Group<F>,
        operation: &'static str,
        collective: Collective,
        shards: Shards,
        target: Target,
    ) -> Self {
        let (timeout, strict) = (group.timeout(), group.strict);
        Self {
            group,
            operation,
            collective,
            shards,
            target,
            method: Method::default(),
            in_place: false,
            outputs: None,
            capturable: false,
            any_engine: false,
            strict,
            traced: false,
            timeout,
            inputs: Vec::new(),
            source: None,
            output_buffers: Vec::new(),
        }
    }

    /// Which schedule; at first the one that is [predicted](crate::cost::choose) to be the fastest.
    #[must_use]
    pub fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.method.algorithm = Some(algorithm);
        self
    }

    /// In how many parts a shard travels; at first as many as are predicted to be the fastest.
    #[must_use]
    pub fn parts(mut self, parts: u32) -> Self {
        self.method.parts = Some(parts);
        self
    }

    /// What the links give, for the choice of algorithm and parts, such as the links of a
    /// [`Calibration`](crate::cost::Calibration); equal on all ranks. At first those of the
    /// [group](Group::links).
    #[must_use]
    pub fn links(mut self, links: Links) -> Self {
        self.method.links = Some(links);
        self
    }

    /// The own shard lies in its place in the output already, be that a list, several tensors or a
    /// range of a window; there is no input buffer.
    #[must_use]
    pub fn in_place(mut self) -> Self {
        self.in_place = true;
        self
    }

    /// How many outputs are used in turn. With two, a start needs only one flag each way, because it
    /// writes where the start before the last one did; [`AllGather::output`] is always the newest.
    /// Two at first for small results that are out of place, not capturable and in one buffer that
    /// Peerlane allocates, one otherwise; always one for lists and windows. Where only some ranks give
    /// buffers of their own, all say how many.
    #[must_use]
    pub fn outputs(mut self, outputs: u32) -> Self {
        self.outputs = Some(outputs);
        self
    }

    /// Starts may be recorded into graphs: [`AllGather::start_on`] does so on a stream that is being
    /// captured. There is one output then. Starts that run at once and replays may alternate.
    ///
    /// All ranks record and replay alike, on one stream or on streams in the same order. The
    /// operation and its group outlive the last replay of the graph. A replay is not under the
    /// deadline of a start; when the group ends, it is let go like one, and its output is worthless.
    #[must_use]
    pub fn capturable(mut self) -> Self {
        self.capturable = true;
        self
    }

    /// Lets the fabric take whichever kind of its engines is predicted to be the fastest for this
    /// operation, also one that takes no streams: [`AllGather::start_on`] is then refused, and
    /// [`run`](AllGather::run) and [`start`](AllGather::start) drive it. Which it was says
    /// [`LaneReport::kind`](crate::group::LaneReport::kind). Of no effect where engines are of one
    /// kind, and on what is [`capturable`](Self::capturable).
    #[must_use]
    pub fn any_engine(mut self) -> Self {
        self.any_engine = true;
        self
    }

    /// Whether a [fallback](crate::group::Fallback) is an error, on every rank, when the operation is
    /// prepared; as the group has it at first. That a thread has to drive starts on a stream is an
    /// error of the start, or of the preparation of what is [`capturable`](Self::capturable).
    #[must_use]
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// Whether every step is timed, for [`AllGather::trace`]; not at first. Each step is submitted by
    /// itself then and looked at, which makes starts slower: what takes how long compared with the
    /// rest shows, and what overlaps, but not the speed. Not together with
    /// [`capturable`](Self::capturable).
    #[must_use]
    pub fn trace(mut self, trace: bool) -> Self {
        self.traced = trace;
        self
    }

    /// How long a start may take; the group's timeout at first.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The buffer of the own shard; allocated if it is not given.
    #[must_use]
    pub fn input(self, input: Buffer<Local<F>, T>) -> Self {
        self.input_buffers(vec![input])
    }

    /// The buffers of the own shard: one, in which its pieces of all tensors lie one after another, or
    /// one for each tensor.
    #[must_use]
    pub fn input_buffers(mut self, inputs: Vec<Buffer<Local<F>, T>>) -> Self {
        self.inputs = inputs;
        self
    }

    /// The own shard lies in a window, from this element on.
    #[must_use]
    pub fn input_from(mut self, window: &Window<T>, begin: usize) -> Self {
        self.source = Some((Arc::clone(&window.inner), begin));
        self
    }

    /// The buffer of the result; allocated if it is not given.
    #[must_use]
    pub fn output(self, output: Buffer<Local<F>, T>) -> Self {
        self.output_buffers(vec![output])
    }

    /// The buffers of the result: one, in which all tensors lie one after another, or one for each
    /// tensor. Of a list, those that its destinations count; what nothing is gathered to is not
    /// touched.
    #[must_use]
    pub fn output_buffers(mut self, outputs: Vec<Buffer<Local<F>, T>>) -> Self {
        self.output_buffers = outputs;
        self
    }

    /// Makes the operation ready: plans and verifies it, checks that all ranks mean the same,
    /// exchanges keys. Collective; an error on one rank is an error on all.
    ///
    /// # Errors
    /// [`Mismatch`](peerlane_hal::ErrorKind::Mismatch), naming the rank and the field that differs;
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument);
    /// [`OutOfMemory`](peerlane_hal::ErrorKind::OutOfMemory); the group's end.
    pub fn prepare(self) -> Result<AllGather<T>, Error> {
        let wish = prepare::Wish {
            operation: self.operation,
            collective: self.collective,
            shards: self.shards,
            target: self.target,
            method: self.method,
            in_place: self.in_place,
            outputs: self.outputs,
            capturable: self.capturable,
            any_engine: self.any_engine,
            strict: self.strict,
            traced: self.traced,
            timeout: self.timeout,
            inputs: self.inputs,
            source: self.source,
            output_buffers: self.output_buffers,
        };
        prepare::prepare(self.group, wish)
    }
}

impl<F: Fabric, T> fmt::Debug for AllGatherBuilder<'_, F, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AllGatherBuilder")
            .field("operation", &self.operation)
            .field("shards", &self.shards)
            .field("method", &self.method)
            .finish_non_exhaustive()
    }
}
