//! A stream as Peerlane takes it, which is of each backend's own type.

use peerlane::{AllGather, Element, cuda, rocm};

use super::device::Stream;
use crate::allgather::backend::Backend;
use crate::error::Result;

/// A stream of the measurement.
pub(super) enum Lent {
    Cuda(cuda::Stream),
    Rocm(rocm::Stream),
}

impl Lent {
    /// Lends a stream; whoever has it keeps the stream longer.
    pub(super) fn of(stream: &Stream) -> Self {
        match stream.gpu().backend() {
            // SAFETY: a stream of this GPU's only context; that it is kept is the caller's duty.
            Backend::Rocm => Self::Rocm(unsafe { rocm::Stream::from_raw(stream.raw()) }),
            // SAFETY: as above.
            _ => Self::Cuda(unsafe { cuda::Stream::from_raw(stream.raw()) }),
        }
    }

    /// Starts behind what the stream holds; where the host drives the engines, it waits for that and for
    /// the end.
    ///
    /// # Errors
    /// That of the start.
    pub(super) fn start_behind<T: Element>(
        &self,
        stream: &Stream,
        gather: &mut AllGather<T>,
    ) -> Result<()> {
        if gather.report().takes_streams() {
            return self.start(gather);
        }
        stream.gpu().finish(stream, "what comes before a start")?;
        Ok(gather.run()?)
    }

    /// Puts a start on the stream. Nothing on the device reads the output between two starts; the host
    /// does, after it has waited for the stream. So the lease can end at once.
    ///
    /// # Errors
    /// That of the start.
    pub(super) fn start<T: Element>(&self, gather: &mut AllGather<T>) -> Result<()> {
        match self {
            Self::Cuda(stream) => drop(gather.start_on(stream)?),
            Self::Rocm(stream) => drop(gather.start_on(stream)?),
        }
        Ok(())
    }
}
