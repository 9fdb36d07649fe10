//! Streams and what goes onto them.

use std::ffi::c_void;
use std::fmt::Debug;

use super::{DeviceContext, DevicePtr};

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
            #[repr(transparent)]
            pub struct $name(pub *mut c_void);

            // SAFETY: a handle is never dereferenced here; drivers take it from any thread.
            unsafe impl Send for $name {}
            // SAFETY: as above.
            unsafe impl Sync for $name {}
        )*
    };
}

handles! {
    /// A stream: an in-order queue of a device.
    StreamHandle;
    /// An event: a place in a stream.
    EventHandle;
    /// A graph that was recorded.
    GraphHandle;
    /// A graph that can be replayed.
    ExecHandle;
}

impl StreamHandle {
    /// Which default stream the handle is the number of, in words; CUDA and HIP number them alike.
    pub fn default_stream(self) -> Option<&'static str> {
        match self.0 as usize {
            0 => Some("the default stream (a null handle)"),
            1 => Some("the legacy default stream"),
            2 => Some("the thread's default stream"),
            _ => None,
        }
    }
}

/// Whether a stream captures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureState {
    /// It does not.
    None,
    /// It does, and the capture has this number.
    Active(u64),
    /// It does, or did and was spoilt, and the driver does not say in which one.
    Unknown,
}

/// Streams and events.
///
/// All streams are made so that nothing orders itself by a default stream, all events without a
/// time. The context is current in every call; looks at streams and events are made under
/// [`DeviceContext::enter_relaxed`].
pub trait StreamCalls: DeviceContext {
    /// A stream; an urgent one has the highest priority, so that it need not share a queue of the
    /// hardware with those that wait.
    ///
    /// # Errors
    /// The driver's refusal.
    fn create_stream(&self, urgent: bool) -> Result<StreamHandle, Self::Error>;

    /// What it still holds runs on, and some drivers wait for that; a refusal means that the device is
    /// gone.
    ///
    /// # Safety
    /// The stream lives, and is not used afterwards.
    unsafe fn destroy_stream(library: Self::Library, stream: StreamHandle);

    /// Whether everything on it is complete; an error is usually that of earlier work. Not for a
    /// stream that captures.
    ///
    /// # Errors
    /// The driver's refusal.
    ///
    /// # Safety
    /// The stream lives.
    unsafe fn is_idle(&self, stream: StreamHandle) -> Result<bool, Self::Error>;

    /// Refuses a stream that is not of this context, and a default stream.
    ///
    /// # Errors
    /// Of kind `InvalidArgument` or `Mismatch`; the driver's refusal.
    ///
    /// # Safety
    /// The stream lives, or is the number of a default stream.
    unsafe fn check_stream(&self, stream: StreamHandle) -> Result<(), Self::Error>;

    /// Whether what it gets is recorded. A capture that was spoilt goes on until it is ended.
    ///
    /// # Errors
    /// The driver's refusal.
    ///
    /// # Safety
    /// The stream lives.
    unsafe fn is_capturing(&self, stream: StreamHandle) -> Result<bool, Self::Error>;

    /// Which capture it is part of.
    ///
    /// # Errors
    /// The driver's refusal.
    ///
    /// # Safety
    /// The stream lives.
    unsafe fn capture_state(&self, stream: StreamHandle) -> Result<CaptureState, Self::Error>;

    /// An event.
    ///
    /// # Errors
    /// The driver's refusal.
    fn create_event(&self) -> Result<EventHandle, Self::Error>;

    /// Waits for it are not affected.
    ///
    /// # Safety
    /// The event lives, and is not used afterwards.
    unsafe fn destroy_event(library: Self::Library, event: EventHandle);

    /// It takes the place behind what the stream holds now.
    ///
    /// # Errors
    /// The driver's refusal.
    ///
    /// # Safety
    /// Both live.
    unsafe fn record_event(
        &self,
        event: EventHandle,
        stream: StreamHandle,
    ) -> Result<(), Self::Error>;

    /// What the stream gets next comes after the place where the event is now; it can be recorded
    /// anew at once.
    ///
    /// # Errors
    /// The driver's refusal.
    ///
    /// # Safety
    /// Both live.
    unsafe fn wait_for_event(
        &self,
        stream: StreamHandle,
        event: EventHandle,
    ) -> Result<(), Self::Error>;

    /// Whether the stream has come past it.
    ///
    /// # Errors
    /// The driver's refusal, or that of earlier work.
    ///
    /// # Safety
    /// The event lives.
    unsafe fn has_passed(&self, event: EventHandle) -> Result<bool, Self::Error>;
}

/// Whether one call takes several memory operations, and does them in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batching {
    /// It does, and they cost about as much as one.
    Trusted,
    /// A trial tells.
    ToBeTried,
    /// There is no such call.
    Never,
}

/// Memory operations: writes of 64-bit words, and waits for them.
pub trait WordCalls: StreamCalls {
    /// One operation, in the driver's own form.
    type WordOp: Copy + Debug + Send;

    /// The most operations that one call takes.
    const WORD_OPS_MAX: usize;

    /// Refuses a driver or a device that lacks them; the text says what to do.
    ///
    /// # Errors
    /// Of kind `Unavailable`.
    fn check_words(&self) -> Result<(), Self::Error>;

    /// Whether one call takes several operations and does them in order.
    fn batching(&self) -> Batching;

    /// Stores the value, after everything before it in the stream.
    fn word_write(address: DevicePtr, value: u64) -> Self::WordOp;

    /// Holds the stream until the word is at least `value`. Of the two only one may be 2^63 or more:
    /// drivers differ in how they compare then.
    fn word_wait(address: DevicePtr, value: u64) -> Self::WordOp;

    /// Puts the operations onto the stream in one call: at least one, at most
    /// [`WORD_OPS_MAX`](Self::WORD_OPS_MAX), and several only where [`batching`](Self::batching) lets
    /// them. The driver has read them when this returns.
    ///
    /// # Errors
    /// The driver's refusal.
    ///
    /// # Safety
    /// The stream lives, and the words for as long as the operations run.
    unsafe fn put_words(
        &self,
        stream: StreamHandle,
        ops: &mut [Self::WordOp],
    ) -> Result<(), Self::Error>;

    /// Whether an error says that a stream does not write to such an address, and no more.
    fn is_write_refused(error: &Self::Error) -> bool;
}

/// What a copy is between; a driver may have a call for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Between {
    /// Two places of this device.
    Own,
    /// This device and a peer.
    Peers,
    /// A word of this device and the flag of a peer.
    Flags,
    /// A device and the host.
    Host,
}

/// Copies that go onto one stream in one call, as the arrays that drivers take.
#[derive(Debug)]
pub struct Copies<'a> {
    /// Where the bytes go.
    pub to: &'a mut [DevicePtr],
    /// Where they come from; as many.
    pub from: &'a mut [DevicePtr],
    /// How many of each; as many.
    pub bytes: &'a mut [usize],
}

/// Copies by a stream.
pub trait CopyCalls: StreamCalls {
    /// Whether one call may take several copies, in no order. Only a trial tells whether it does.
    fn may_copy_together(&self) -> bool;

    /// Whether such copies are made in a way that has to be tried first, because it may copy nothing
    /// and say nothing. A trial of one pair of devices says nothing of another.
    fn is_doubtful(&self, between: Between) -> bool {
        let _ = between;
        false
    }

    /// What a trial has shown. Where the way does not work, all contexts of the device make such copies
    /// in another one from now on, which needs no trial.
    fn note_trial(&self, between: Between, works: bool) {
        let _ = (between, works);
    }

    /// One copy.
    ///
    /// # Errors
    /// The driver's refusal.
    ///
    /// # Safety
    /// The stream lives, and the spans for as long as the copy runs.
    unsafe fn copy(
        &self,
        stream: StreamHandle,
        to: DevicePtr,
        from: DevicePtr,
        bytes: usize,
        between: Between,
    ) -> Result<(), Self::Error>;

    /// Several copies, none of which touches what another one writes.
    ///
    /// # Errors
    /// The driver's refusal.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    unsafe fn copy_together(
        &self,
        stream: StreamHandle,
        copies: Copies<'_>,
    ) -> Result<(), Self::Error>;

    /// Sets bytes to 0.
    ///
    /// # Errors
    /// The driver's refusal.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    unsafe fn clear(
        &self,
        stream: StreamHandle,
        address: DevicePtr,
        bytes: usize,
    ) -> Result<(), Self::Error>;
}

/// Captures and replays, for the trial of them.
pub trait GraphCalls: StreamCalls {
    /// What the stream gets is recorded from now on; other threads are not concerned.
    ///
    /// # Errors
    /// The driver's refusal.
    ///
    /// # Safety
    /// The stream lives.
    unsafe fn begin_capture(&self, stream: StreamHandle) -> Result<(), Self::Error>;

    /// What was recorded.
    ///
    /// # Errors
    /// The driver's refusal.
    ///
    /// # Safety
    /// The stream lives.
    unsafe fn end_capture(&self, stream: StreamHandle) -> Result<GraphHandle, Self::Error>;

    /// Makes a graph ready for replays.
    ///
    /// # Errors
    /// The driver's refusal.
    ///
    /// # Safety
    /// The graph lives.
    unsafe fn instantiate(&self, graph: GraphHandle) -> Result<ExecHandle, Self::Error>;

    /// One replay.
    ///
    /// # Errors
    /// The driver's refusal.
    ///
    /// # Safety
    /// Both live, and what the graph names for as long as it runs.
    unsafe fn launch(&self, exec: ExecHandle, stream: StreamHandle) -> Result<(), Self::Error>;

    /// # Safety
    /// It lives, and is not used afterwards.
    unsafe fn destroy_exec(&self, exec: ExecHandle);

    /// # Safety
    /// It lives, and is not used afterwards.
    unsafe fn destroy_graph(&self, graph: GraphHandle);
}
