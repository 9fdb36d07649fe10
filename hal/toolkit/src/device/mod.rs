//! Defines the traits that a GPU backend implements for its device, and the types in those traits.
//!
//! | file | holds |
//! | --- | --- |
//! | `traits.rs` | the traits for streams and regions, in the order in which a port needs them |
//! | `peer.rs` | the traits for a fabric |
//! | `types.rs` | the types in their methods |
//!
//! The driver's handles are opaque pointers with every vendor, so they are plain types here, and so are
//! addresses. Methods are `unsafe` where the driver follows a handle or an address.
//!
//! [`streams`](crate::streams), [`regions`](crate::regions) and [`peers`](crate::peers) are built on these
//! traits. The rules of a vendor, the names of its calls in errors, and its optional symbols stay in its
//! backend.

mod peer;
mod traits;
mod types;

use std::marker::PhantomData;

use peerlane_hal::BackendId;

pub use peer::{PeerDevice, PeerOptions};
pub use traits::{
    CopyCalls, DeviceContext, FusedCalls, GraphCalls, IpcCalls, MemoryCalls, ReduceCalls,
    RegionDevice, StreamCalls, StreamDevice, Vendor, VirtualCalls, WordCalls,
};
pub use types::{
    Batching, CaptureState, ConnectedPeer, CopyBatch, CopyKind, EngineRequest, EventHandle,
    ExecHandle, Extent, FreeBytes, FusedKernel, GraphHandle, IpcHandle, MemoryHandle, Pointee,
    Reachability, StreamHandle, StreamLimits, shared_queues,
};

/// An address in the address space of a GPU.
pub type DevicePtr = u64;

/// Keeps a device context current on this thread, and restores the previous context when dropped.
#[derive(Debug)]
pub struct Entered<'a, D: DeviceContext> {
    context: &'a D,
    /// The context to restore, or `None` if the same context was current before.
    before: Option<D::Current>,
    /// Keeps the guard on its thread, because the current context is a property of the thread.
    not_send: PhantomData<*const ()>,
}

impl<D: DeviceContext> Drop for Entered<'_, D> {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            self.context.put_back(before);
        }
    }
}

/// Keeps a device context current and this thread's calls out of captures of other threads. Dropping it
/// restores both.
#[derive(Debug)]
pub struct Relaxed<'a, D: DeviceContext> {
    entered: Entered<'a, D>,
    before: D::CaptureMode,
}

impl<D: DeviceContext> Drop for Relaxed<'_, D> {
    fn drop(&mut self) {
        self.entered.context.put_back_captures(self.before);
    }
}

pub(crate) const fn backend_id<D: RegionDevice>() -> BackendId {
    <D::Vendor as Vendor>::BACKEND
}

pub(crate) fn name_bytes<D: RegionDevice>(device: &D, bytes: u64, error: D::Error) -> D::Error {
    if D::is_out_of_memory(&error) { device.out_of_memory(bytes) } else { error }
}
