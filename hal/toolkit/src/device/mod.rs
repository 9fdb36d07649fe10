//! Traits that a GPU backend implements for its device context, in the order in which a port needs them.
//!
//! | trait | in | covers |
//! | --- | --- | --- |
//! | [`DeviceContext`] | here | the context: errors, labels, what is current on a thread |
//! | [`MemoryCalls`] | `calls` | allocations, and pinned host memory |
//! | [`StreamCalls`] | `calls` | streams, events, and the capture state of a stream |
//! | [`WordCalls`] | `calls` | writes of 64-bit words and waits for them in a stream |
//! | [`CopyCalls`] | `calls` | copies in a stream |
//! | [`GraphCalls`] | `calls` | captures and replays |
//! | [`IpcCalls`] | `calls` | allocations that another process opens by a handle |
//! | [`VirtualCalls`] | `calls` | physical memory apart from addresses, and its descriptors |
//! | [`Vendor`], [`RegionDevice`] | `backend` | the properties that regions need |
//! | [`StreamDevice`] | `backend` | the limits that the stream engine needs |
//! | [`PeerOptions`], [`PeerDevice`] | `backend` | the properties that the fabric needs |
//!
//! The driver's handles are opaque pointers with every vendor, so they are plain types here, and so are
//! addresses. Methods are `unsafe` where the driver follows a handle or an address.
//!
//! [`streams`](crate::streams), [`regions`](crate::regions) and [`peers`](crate::peers) are built on these
//! traits. The rules of a vendor, the names of its calls in errors, and its optional symbols stay in its
//! backend. [`Fault`] holds the errors that are the same for every vendor.

mod backend;
mod calls;
mod fault;

use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::Arc;

pub use backend::{
    ConnectedPeer, EngineRequest, PeerDevice, PeerOptions, Pointee, Reachability, RegionDevice,
    StreamDevice, StreamLimits, Vendor,
};
pub(crate) use backend::{backend_id, name_bytes};
pub use calls::{
    Batching, CaptureState, CopyBatch, CopyCalls, CopyKind, EventHandle, ExecHandle, Extent,
    FreeBytes, GraphCalls, GraphHandle, IpcCalls, IpcHandle, MemoryCalls, MemoryHandle,
    StreamCalls, StreamHandle, VirtualCalls, WordCalls,
};
pub use fault::Fault;

/// An address in a device's address space.
pub type DevicePtr = u64;

/// One device of this process, as its driver knows it.
pub trait DeviceContext: Debug + Send + Sync + Sized + 'static {
    /// The backend's error.
    type Error: peerlane_hal::Error + Clone + From<Fault>;
    /// The driver's entry points. The owner of a handle keeps them to destroy the handle.
    type Library: Copy + Debug + Send + Sync + 'static;
    /// The driver's reference to the context that is current on a thread.
    type Current: Copy + Debug;
    /// The mode that decides how calls of a thread interact with captures of other threads.
    type CaptureMode: Copy + Debug;

    /// Returns the driver's entry points.
    fn library(&self) -> Self::Library;

    /// Returns the name of the device for texts, such as `device 2 (NVIDIA H200)`.
    fn label(&self) -> &Arc<str>;

    /// Returns the driver's number of the device in this process.
    fn device(&self) -> i32;

    /// Returns a number that distinguishes the contexts of one backend in this process. Two ranks on one
    /// device have the same number.
    fn id(&self) -> usize;

    /// Makes the context current on this thread. Returns the context to restore if another one was
    /// current.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn make_current(&self) -> Result<Option<Self::Current>, Self::Error>;

    /// Undoes [`make_current`](Self::make_current). A context that was destroyed since is not restored.
    fn put_back(&self, before: Self::Current);

    /// Keeps all further calls of this thread out of captures that other threads began. Returns the mode
    /// to restore.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn relax_captures(&self) -> Result<Self::CaptureMode, Self::Error>;

    /// Undoes [`relax_captures`](Self::relax_captures).
    fn put_back_captures(&self, before: Self::CaptureMode);

    /// Makes the context current on this thread until the guard is dropped.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn enter(&self) -> Result<Entered<'_, Self>, Self::Error> {
        Ok(Entered { context: self, before: self.make_current()?, not_send: PhantomData })
    }

    /// Makes the context current and keeps this thread's calls out of captures of other threads, until the
    /// guard is dropped.
    ///
    /// Without it, allocations and event queries are refused while another thread captures in the global
    /// mode, and they invalidate that capture.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn enter_relaxed(&self) -> Result<Relaxed<'_, Self>, Self::Error> {
        let entered = self.enter()?;
        Ok(Relaxed { entered, before: self.relax_captures()? })
    }
}

/// Keeps a context current on this thread; restores the previous one when dropped.
#[derive(Debug)]
pub struct Entered<'a, D: DeviceContext> {
    context: &'a D,
    /// The context to restore, if it was another one.
    before: Option<D::Current>,
    /// The current context is a property of the thread.
    not_send: PhantomData<*const ()>,
}

impl<D: DeviceContext> Drop for Entered<'_, D> {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            self.context.put_back(before);
        }
    }
}

/// Keeps a context current and this thread's calls out of captures of other threads; restores both when
/// dropped.
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
