//! Describing an all-gather.

use std::fmt;
use std::time::Duration;

use peerlane_hal::Fabric;

use super::AllGather;
use super::prepare;
use crate::element::Element;
use crate::error::Error;
use crate::group::buffer::Buffer;
use crate::group::{Group, Local};
use crate::plan::Algorithm;

/// An all-gather that is being described; [`prepare`](Self::prepare) makes it ready.
pub struct AllGatherBuilder<'g, F: Fabric, T> {
    group: &'g mut Group<F>,
    shard_len: usize,
    algorithm: Algorithm,
    parts: u32,
    in_place: bool,
    outputs: Option<u32>,
    capturable: bool,
    strict: bool,
    timeout: Duration,
    input: Option<Buffer<Local<F>, T>>,
    output: Option<Buffer<Local<F>, T>>,
}

impl<'g, F: Fabric, T: Element> AllGatherBuilder<'g, F, T> {
    pub(in crate::group) fn new(group: &'g mut Group<F>, shard_len: usize) -> Self {
        let (timeout, strict) = (group.timeout(), group.strict);
        Self {
            group,
            shard_len,
            algorithm: Algorithm::Direct,
            parts: 1,
            in_place: false,
            outputs: None,
            capturable: false,
            strict,
            timeout,
            input: None,
            output: None,
        }
    }

    /// Which schedule; [`Direct`](Algorithm::Direct) at first.
    #[must_use]
    pub fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.algorithm = algorithm;
        self
    }

    /// In how many parts a shard travels; one at first.
    #[must_use]
    pub fn parts(mut self, parts: u32) -> Self {
        self.parts = parts;
        self
    }

    /// The own shard lies in its place in the output already; there is no input buffer.
    #[must_use]
    pub fn in_place(mut self) -> Self {
        self.in_place = true;
        self
    }

    /// How many outputs are used in turn. With two, a start needs only one flag each way, because it
    /// writes where the start before the last one did; [`AllGather::output`] is always the newest.
    /// Two at first for small results that are out of place, not capturable and in memory that
    /// Peerlane allocates, one otherwise.
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

    /// Whether a [fallback](crate::group::Fallback) is an error, on every rank, when the operation is
    /// prepared; as the group has it at first. That a thread has to drive starts on a stream is an
    /// error of the start, or of the preparation of what is [`capturable`](Self::capturable).
    #[must_use]
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
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
    pub fn input(mut self, input: Buffer<Local<F>, T>) -> Self {
        self.input = Some(input);
        self
    }

    /// The buffer of the result; allocated if it is not given.
    #[must_use]
    pub fn output(mut self, output: Buffer<Local<F>, T>) -> Self {
        self.output = Some(output);
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
            shard_len: self.shard_len,
            algorithm: self.algorithm,
            parts: self.parts,
            in_place: self.in_place,
            outputs: self.outputs,
            capturable: self.capturable,
            strict: self.strict,
            timeout: self.timeout,
            input: self.input,
            output: self.output,
        };
        prepare::prepare(self.group, wish)
    }
}

impl<F: Fabric, T> fmt::Debug for AllGatherBuilder<'_, F, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AllGatherBuilder")
            .field("shard_len", &self.shard_len)
            .field("algorithm", &self.algorithm)
            .finish_non_exhaustive()
    }
}
