//! What drivers of accelerators have in common, as traits that a backend implements once for its
//! context: a device of this process, made current for each call.
//!
//! | trait | calls |
//! | --- | --- |
//! | [`DeviceContext`] | the context itself: errors, texts, what is current on a thread |
//! | [`StreamCalls`] | streams, events, and whether a stream captures |
//! | [`WordCalls`] | writes of and waits for 64-bit words by a stream |
//! | [`CopyCalls`] | copies by a stream |
//! | [`GraphCalls`] | captures and replays |
//! | [`MemoryCalls`] | allocations, and host memory that the device reaches |
//! | [`IpcCalls`] | allocations that another process opens by a handle |
//! | [`VirtualCalls`] | physical memory and addresses apart, and descriptors of it |
//!
//! Handles of the driver are opaque pointers with all vendors, so they are plain types here, and so
//! is an address. Methods are `unsafe` where the driver follows a handle or an address.
//!
//! `streams` makes an engine from it. A vendor's rules, the names of its calls in errors
//! and its symbols that may be missing stay in its backend.

mod current;
mod fault;
mod memory;
mod streams;

use std::fmt::Debug;
use std::sync::Arc;

pub use current::{Entered, Relaxed};
pub use fault::Fault;
pub use memory::{Extent, FreeBytes, IpcCalls, IpcHandle, MemoryCalls, MemoryHandle, VirtualCalls};
pub use streams::{
    Batching, Between, CaptureState, Copies, CopyCalls, EventHandle, ExecHandle, GraphCalls,
    GraphHandle, StreamCalls, StreamHandle, WordCalls,
};

/// An address as a device sees it.
pub type DevicePtr = u64;

/// One device of this process, as its driver knows it.
pub trait DeviceContext: Debug + Send + Sync + Sized + 'static {
    /// The backend's error.
    type Error: peerlane_hal::Error + Clone + From<Fault>;
    /// The driver's entry points: what a handle's owner keeps to destroy it.
    type Library: Copy + Debug + Send + Sync + 'static;
    /// What is current on a thread.
    type Current: Copy + Debug;
    /// How what a thread does concerns captures of others.
    type CaptureMode: Copy + Debug;

    /// The driver's entry points.
    fn library(&self) -> Self::Library;

    /// The device in texts, such as `device 2 (NVIDIA H200)`.
    fn label(&self) -> &Arc<str>;

    /// The driver's number of the device in this process.
    fn device(&self) -> i32;

    /// Tells the contexts of one backend in this process apart; two ranks on one device have the
    /// same.
    fn id(&self) -> usize;

    /// Makes the context current on this thread; what to put back, if it was another one.
    ///
    /// # Errors
    /// The driver's refusal.
    fn make_current(&self) -> Result<Option<Self::Current>, Self::Error>;

    /// Undoes [`make_current`](Self::make_current); what is gone since is not put back.
    fn put_back(&self, before: Self::Current);

    /// From now on nothing that this thread does is taken for part of a capture that another thread
    /// began; what to put back.
    ///
    /// # Errors
    /// The driver's refusal.
    fn relax_captures(&self) -> Result<Self::CaptureMode, Self::Error>;

    /// Undoes [`relax_captures`](Self::relax_captures).
    fn put_back_captures(&self, before: Self::CaptureMode);

    /// Makes the context current on this thread until the guard is dropped.
    ///
    /// # Errors
    /// The driver's refusal.
    fn enter(&self) -> Result<Entered<'_, Self>, Self::Error> {
        Entered::begin(self)
    }

    /// The same, and nothing that this thread does is taken for part of a capture that another
    /// thread began in the global mode: allocations and looks at events are else refused, and spoil
    /// the capture.
    ///
    /// # Errors
    /// The driver's refusal.
    fn enter_relaxed(&self) -> Result<Relaxed<'_, Self>, Self::Error> {
        Relaxed::begin(self)
    }
}
