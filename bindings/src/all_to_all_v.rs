//! Keeps all-to-alls with counts for each start between calls of other languages.

use std::fmt;

use peerlane::group::AllToAllV;
use peerlane::hal::BackendId;
use peerlane::{Error, ErrorKind, Group, MemoryRange, SendCounts, Untyped};

use crate::report;
use crate::stream::Stream;

/// An all-to-all-v of any element type, with the state of its last start.
pub struct AnyAllToAllV {
    exchange: AllToAllV<Untyped>,
    backend: BackendId,
    ranks: usize,
    /// Whether the caller has the output of a start on a stream. A [`Lease`](peerlane::Lease) would
    /// borrow the operation; this refuses other starts in its place.
    is_leased: bool,
}

impl AnyAllToAllV {
    /// Creates the object of an operation that `group` has prepared.
    pub fn new(exchange: AllToAllV<Untyped>, group: &Group) -> Self {
        let (backend, ranks) = (group.selection().local, group.ranks());
        Self { exchange, backend, ranks, is_leased: false }
    }

    /// Returns the backend of the group, whose streams the operation can be started on.
    pub fn backend(&self) -> BackendId {
        self.backend
    }

    /// Returns the number of ranks of the group.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Starts the operation and waits until its output is complete. Collective.
    ///
    /// # Errors
    /// As [`AllToAllV::run`], and if a start is leased.
    pub fn run(&mut self, counts: SendCounts<'_>) -> Result<(), Error> {
        self.check_lease()?;
        self.exchange.run(counts).map(drop)
    }

    /// Enqueues a start on a stream of the vendor, and returns the output.
    /// [`end_lease`](Self::end_lease) must follow. Collective.
    ///
    /// # Errors
    /// As [`AllToAllV::start_on`]; if a start is leased; the error of the stream if it has one.
    pub fn start_on(
        &mut self,
        stream: Result<Stream, Error>,
        counts: SendCounts<'_>,
    ) -> Result<MemoryRange, Error> {
        self.check_lease()?;
        let stream = stream.map_err(|error| self.refuse(error))?;
        let output = match stream {
            Stream::Cuda(stream) => self.exchange.start_on(&stream, counts)?.output(),
            Stream::Rocm(stream) => self.exchange.start_on(&stream, counts)?.output(),
        };

        self.is_leased = true;
        Ok(output)
    }

    /// Ends the lease of the last start on a stream, because the work that reads its output is on
    /// that stream now.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if no start is leased.
    pub fn end_lease(&mut self) -> Result<(), Error> {
        if !self.is_leased {
            return Err(invalid("no start on a stream is leased"));
        }
        self.is_leased = false;
        Ok(())
    }

    /// Takes part in a start that this rank refuses, so that all ranks return an error, and returns
    /// `error`. Collective.
    pub fn refuse(&mut self, error: Error) -> Error {
        // Without counts, the start fails on all ranks before a byte moves. If it fails otherwise,
        // the group has ended, which the next call says.
        let _ = self.exchange.run(&[]);
        error
    }

    /// Refuses a start while one on a stream is leased, on all ranks.
    fn check_lease(&mut self) -> Result<(), Error> {
        if !self.is_leased {
            return Ok(());
        }
        let error = invalid("a start on a stream is leased; end the lease first");
        Err(self.refuse(error))
    }

    /// Returns the number of elements that the last start receives from each rank.
    pub fn received_counts(&self) -> &[usize] {
        self.exchange.received_counts()
    }

    /// Returns the element of the output at which the block from each rank begins.
    pub fn received_displacements(&self) -> &[usize] {
        self.exchange.received_displacements()
    }

    /// Returns the address range of the whole input.
    ///
    /// # Errors
    /// As [`AllToAllV::input_memory`].
    pub fn input_memory(&self) -> Result<MemoryRange, Error> {
        self.exchange.input_memory()
    }

    /// Returns the address range of what the last start receives.
    pub fn output_memory(&self) -> MemoryRange {
        self.exchange.output_memory()
    }

    /// Returns the error of the start on a stream that has ended the group, if one has.
    ///
    /// # Errors
    /// As [`AllToAllV::check`].
    pub fn check(&self) -> Result<(), Error> {
        self.exchange.check()
    }

    /// Returns the report as one JSON object.
    pub fn report(&self) -> String {
        report::json(self.exchange.report()).to_string()
    }
}

impl fmt::Debug for AnyAllToAllV {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnyAllToAllV").field("backend", &self.backend).finish_non_exhaustive()
    }
}

fn invalid(text: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

#[cfg(test)]
mod tests {
    use peerlane::bootstrap::{Bootstrap, in_process};
    use peerlane::{DType, host};

    use super::*;

    #[test]
    fn a_leased_start_and_a_stream_without_a_device_refuse_a_start_on_all_ranks() {
        in_process::run(2, |bootstrap| {
            let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
            let mut group = Group::open(bootstrap, fabric)?;
            let is_first = group.rank().0 == 0;
            let exchange = group.untyped_all_to_all_v(DType::U8, 4, 4).prepare()?;
            let mut exchange = AnyAllToAllV::new(exchange, &group);
            let counts = SendCounts::new(&[1, 1]);

            // The host has no streams, so the state after a start on a stream is made here.
            exchange.is_leased = is_first;
            let refused = exchange.run(counts).unwrap_err();
            let (leased, kind) = match is_first {
                true => ("a start on a stream is leased", ErrorKind::InvalidArgument),
                false => ("rank 0 failed", ErrorKind::Aborted),
            };
            assert_eq!(refused.kind(), kind);
            assert!(refused.to_string().contains(leased), "{refused}");
            assert_eq!(exchange.end_lease().is_ok(), is_first);

            let refused = match is_first {
                true => exchange.start_on(Err(invalid("which has no streams")), counts).map(drop),
                false => exchange.run(counts),
            };
            assert_eq!(refused.unwrap_err().kind(), kind);

            exchange.run(counts)?;
            assert_eq!(exchange.received_counts(), [1, 1]);
            drop(exchange);
            group.close()
        })
        .unwrap();
    }
}
