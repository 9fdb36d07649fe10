//! Registers device memory of the crate `cudarc` with a group.

use std::sync::Arc;

use cudarc::driver::CudaSlice;
use peerlane_hal::{BackendId, ErrorKind, Fabric};

use crate::{Buffer, Element, Error, Group};

/// Registers device memory of the crate cudarc (`CudaSlice`) with a group.
///
/// The trait adds [`register_slice`](Self::register_slice) to [`Group`], which is of a crate without backends.
pub trait RegisterSlice {
    /// Registers a slice of the crate cudarc, so that operations can use it as input or output.
    ///
    /// The buffer, and the operation or window over it, keep the slice. To use the slice between starts, or to get it back
    /// with `Arc::into_inner` after the operation, pass a clone of an `Arc`.
    ///
    /// On most devices cudarc allocates from a stream-ordered pool, whose memory peers cannot access. Such a slice can be the
    /// output with [`Algorithm::Pull`](crate::Algorithm::Pull), and the input with any other algorithm but
    /// [`Algorithm::GetRing`](crate::Algorithm::GetRing). For other cases let
    /// Peerlane allocate the memory; `peerlane::cuda::RegionView` gives cudarc access to the
    /// [region](Buffer::region) of a buffer.
    ///
    /// ```no_run
    /// use std::sync::Arc;
    /// use cudarc::driver::CudaContext;
    /// use peerlane::{Algorithm, Error, Group, RegisterSlice, cuda};
    ///
    /// # fn example(mut group: Group) -> Result<(), Box<dyn std::error::Error>> {
    /// let stream = CudaContext::new(0)?.new_stream()?;
    /// let slice = Arc::new(stream.clone_htod(&[1.0_f32; 1024])?);
    /// // SAFETY: only work on `stream` accesses the slice, and no peer.
    /// let input = unsafe { group.register_slice(Arc::clone(&slice)) }?;
    /// let mut gather = group.all_gather(1024).algorithm(Algorithm::Direct).input(input).prepare()?;
    /// gather.start_on(&cuda::Stream::from(&stream))?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Mismatch`](ErrorKind::Mismatch) if the [fabric](Group::fabric) of the group is not CUDA;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the slice is memory of another device.
    /// [`prepare`](crate::group::OperationBuilder::prepare) returns the errors of a wrong length, and of memory that peers
    /// cannot access.
    ///
    /// # Safety
    /// If peers access the slice, it must stay allocated until every rank has dropped the buffer and the operation that owns
    /// it, as for [`Group::register`]: keep a clone of the `Arc` until a [`barrier`](Group::barrier) after the drops.
    ///
    /// Nobody may access the slice while an operation that uses it has an open start. That includes work that streams
    /// already hold, such as the copy that fills the slice. Use [`start_on`](crate::Operation::start_on) behind that work, or
    /// synchronise its stream before [`run`](crate::Operation::run).
    unsafe fn register_slice<T: Element>(
        &self,
        slice: impl Into<Arc<CudaSlice<T>>>,
    ) -> Result<Buffer<T>, Error>;
}

impl RegisterSlice for Group {
    unsafe fn register_slice<T: Element>(
        &self,
        slice: impl Into<Arc<CudaSlice<T>>>,
    ) -> Result<Buffer<T>, Error> {
        let slice = slice.into();
        // Other backends cannot tell that the address is one of a CUDA device.
        let (found, expected) = (self.fabric().backend(), BackendId::CUDA);
        if found != expected {
            let text = format!(
                "cannot register a slice of {} elements on CUDA device {}: the fabric of the group is {found}, expected \
                 {expected}",
                slice.len(),
                slice.ordinal()
            );
            return Err(Error::new(ErrorKind::Mismatch, text));
        }
        let base = peerlane_cuda::slice_base(&slice, slice.stream());
        // SAFETY: the buffer keeps the slice on this rank; the caller vouches for the other ranks and for all accesses.
        let buffer = unsafe { self.register_at(base, slice.len()) }?;
        Ok(buffer.keep_alive(slice))
    }
}
