//! What the fabric asks of a device beside its memory.

use std::fmt;
use std::sync::Arc;

use super::address::DeviceId;
use crate::device::{DevicePtr, Fault};
use crate::regions::{Local, RegionDevice, Remote};
use crate::streams::SignalBy;
use peerlane_hal::CopyEngine;
use peerlane_hal::Rank;
use peerlane_hal::{EngineRequirements, LinkKind};

/// How a backend's fabric behaves, as far as the toolkit uses it.
pub trait PeerOptions: fmt::Debug + Clone + Send + Sync + 'static {
    /// What the backend does best, on the device with that ordinal.
    fn on_device(ordinal: u32) -> Self;

    /// Whether a way that is only second best is refused.
    fn is_strict(&self) -> bool;

    /// How signals get to peers; by default, what a trial shows.
    fn signal(&self) -> Option<SignalBy>;
}

/// What the driver says of the way to a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Way {
    /// The two reach each other, in both directions.
    Reached {
        /// What carries the bytes.
        kind: LinkKind,
        /// Bytes per second and direction, where the platform says so.
        bytes_per_second: Option<f64>,
    },
    /// They do not, and this is why.
    Apart(&'static str),
    /// The other device is hidden from this process; a trial tells.
    Hidden,
}

/// A connected peer, for an engine that is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reached {
    /// The peer.
    pub peer: Rank,
    /// Its device.
    pub device: [u8; 16],
    /// What carries the bytes.
    pub kind: LinkKind,
}

/// What an engine is made for.
#[derive(Clone, Debug)]
pub struct Purpose {
    /// This rank.
    pub rank: Rank,
    /// The peers that are connected, oneself too.
    pub peers: Vec<Reached>,
    /// How signals get to them.
    pub signal: SignalBy,
    /// The use of the engine.
    pub requirements: EngineRequirements,
    /// The least [`striped_rate`](PeerDevice::striped_rate) of all ranks, so that all choose alike.
    pub striped_rate: u64,
}

impl Purpose {
    /// Whether a peer is reached through memory of the host.
    pub fn is_staged(&self) -> bool {
        self.peers.iter().any(|peer| peer.kind == LinkKind::HostStaged)
    }
}

/// A device from which peers are reached.
pub trait PeerDevice: RegionDevice {
    /// What discovery says of it.
    type Found: fmt::Debug;
    /// How the backend's fabric behaves.
    type Options: PeerOptions;
    /// The backend's engine.
    type Engine: CopyEngine<Error = Self::Error, Local = Local<Self>, Remote = Remote<Self>>
        + 'static;

    /// Opens the device that the options name.
    ///
    /// # Errors
    /// [`Unavailable`](peerlane_hal::ErrorKind::Unavailable): no driver, no device, or one that others hold;
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument): no such device.
    fn open(options: &Self::Options) -> Result<Arc<Self>, Self::Error>;

    /// What discovery said of it.
    fn found(&self) -> &Self::Found;

    /// Who it is, for peers.
    fn device_id(&self) -> DeviceId;

    /// What the driver says of the way to another device, in both directions.
    ///
    /// # Errors
    /// The driver's refusal to answer.
    fn way_to(&self, other: &DeviceId) -> Result<Way, Self::Error>;

    /// Tries what reaches the flag of a peer, which is zero before and after.
    ///
    /// # Errors
    /// Nothing does.
    fn try_signal(&self, flag: DevicePtr) -> Result<SignalBy, Self::Error>;

    /// Whether flags lie where the host reads them: for engines that queue no waits.
    fn wants_flags_on_host(&self, options: &Self::Options) -> bool {
        let _ = options;
        false
    }

    /// Bytes per second of a copy to another device that all copy engines of the link share, for the
    /// slowest link; 0 where engines are of one kind, or nothing is known. Peers are told.
    fn striped_rate(&self, options: &Self::Options) -> u64 {
        let _ = options;
        0
    }

    /// A queue that reaches the peers.
    ///
    /// # Errors
    /// As [`Fabric::engine`](peerlane_hal::Fabric::engine).
    fn engine(
        context: &Arc<Self>,
        options: &Self::Options,
        purpose: Purpose,
    ) -> Result<Self::Engine, Self::Error>;

    /// Returns the refusal by the toolkit, if the error is one.
    fn fault(error: &Self::Error) -> Option<&Fault>;

    /// Whether the driver says that a device does not reach what it was to map.
    fn is_no_access(error: &Self::Error) -> bool;

    /// The driver's answer as the reason why a peer is not reached: `text` says which one. An error
    /// that is no answer of the driver stays as it is, and so does that of a device that is lost.
    fn unreachable(error: Self::Error, text: String) -> Self::Error;
}
