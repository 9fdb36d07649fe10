//! Defines the traits that give a GPU backend the [fabric](crate::peers) of one host.

use std::fmt::Debug;
use std::sync::Arc;

use peerlane_hal::{CopyEngine, EngineOffer};

use super::DevicePtr;
use super::traits::RegionDevice;
use super::types::{EngineRequest, Reachability};
use crate::Fault;
use crate::peers::DeviceId;
use crate::regions::{Local, Remote};
use crate::streams::SignalBy;

/// The options of a GPU fabric, as far as the toolkit reads them.
pub trait PeerOptions: Debug + Clone + Send + Sync + 'static {
    /// Returns the default options for the device with the given ordinal.
    fn on_device(ordinal: u32) -> Self;

    /// Returns whether a slower fallback, such as copies through host memory, is an error.
    fn is_strict(&self) -> bool;

    /// Returns how signals are written to peers, or `None` to choose it by a probe.
    fn signal(&self) -> Option<SignalBy>;
}

/// A GPU that accesses the memory of other GPUs of the host.
///
/// # Safety
/// [`device_id`](Self::device_id) is that of this device. An [`engine`](Self::engine) belongs to
/// the given context and reaches the peers of the request, under the contract of [`CopyEngine`].
/// [`try_signal`](Self::try_signal) accesses only the flag, and returns a method whose signals keep
/// the order after copies.
pub unsafe trait PeerDevice: RegionDevice {
    /// The description of the device for the user, as discovery returns it.
    type DeviceInfo: Debug;
    /// The type of the options of the backend's fabric.
    type Options: PeerOptions;
    /// The type of the backend's engine.
    type Engine: CopyEngine<Error = Self::Error, Local = Local<Self>, Remote = Remote<Self>>
        + 'static;

    /// Opens a context on the device that the options name.
    ///
    /// # Errors
    /// Returns an error of kind [`Unavailable`](peerlane_hal::ErrorKind::Unavailable) without a
    /// driver or a device or if another process holds the device, and
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if there is no such device.
    fn open(options: &Self::Options) -> Result<Arc<Self>, Self::Error>;

    /// Returns the description of the device for the user.
    fn info(&self) -> &Self::DeviceInfo;

    /// Returns the UUID and the names of the device, which its peers get.
    fn device_id(&self) -> DeviceId;

    /// Returns whether this device and another one can access each other's memory, as the driver
    /// says.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn reachability(&self, other: &DeviceId) -> Result<Reachability, Self::Error>;

    /// Probes how a stream can write to a peer's flag. The flag is zero before and after.
    ///
    /// # Errors
    /// Returns an error if no method works.
    fn try_signal(&self, flag: DevicePtr) -> Result<SignalBy, Self::Error>;

    /// Returns whether the fabric must allocate flags in host memory, because its engines queue no
    /// waits.
    fn needs_host_flags(&self, options: &Self::Options) -> bool {
        let _ = options;
        false
    }

    /// Returns the kinds of engines that the device offers, the preferred kind first.
    ///
    /// # Errors
    /// As [`Fabric::offers`](peerlane_hal::Fabric::offers).
    fn offers(
        context: &Arc<Self>,
        options: &Self::Options,
    ) -> Result<Vec<EngineOffer>, Self::Error>;

    /// Creates an engine of the kind of the request that reaches the connected peers.
    ///
    /// # Errors
    /// As [`Fabric::engine`](peerlane_hal::Fabric::engine).
    fn engine(
        context: &Arc<Self>,
        options: &Self::Options,
        request: EngineRequest,
    ) -> Result<Self::Engine, Self::Error>;

    /// Returns the toolkit's error inside a backend's error, or `None` if the error is the
    /// driver's.
    fn fault(error: &Self::Error) -> Option<&Fault>;

    /// Returns whether an error means that a device cannot access the memory that it was asked to
    /// map.
    fn is_no_access(error: &Self::Error) -> bool;

    /// Turns an error of the driver into the reason why a peer is not reachable. An error that is
    /// not the driver's stays unchanged, and so does that of a lost device.
    fn unreachable(error: Self::Error, text: String) -> Self::Error;
}
