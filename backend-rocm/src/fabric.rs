//! Opens AMD GPUs for a fabric and checks peer access between GPUs.
//!
//! The fabric itself is `peerlane_toolkit::peers`. This file holds the queries that it makes of
//! HIP.

use std::sync::Arc;

use peerlane_hal::{EngineOffer, ErrorKind};
use peerlane_toolkit::Fault;
use peerlane_toolkit::device::DevicePtr;
use peerlane_toolkit::peers::{
    self, DeviceId, EngineRequest, PeerDevice, PeerOptions, Reachability,
};

use crate::device::{Context, Device, DeviceLink, find_device, link_between};
use crate::engine::{Engine, EngineKind, SelfCopy, SignalBy, offers, probe_signal};
use crate::error::Error;
use crate::sys::hip::hipError_t;

/// The options of a ROCm fabric, such as its device and the kind of its engines. The defaults are
/// the fastest that work.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The ordinal of the device among those that are visible to this process.
    pub device: u32,
    /// Whether a slower fallback, such as copies through host memory, is an error. The fallbacks
    /// are memory without a descriptor on a device that reports descriptors, and staging through
    /// host memory between devices without peer access.
    pub strict: bool,
    /// The method by which the engine writes the flags of peers; `None` chooses the method by a
    /// test.
    pub signal: Option<SignalBy>,
    /// The method by which a rank copies its own block to its own output.
    pub self_copy: SelfCopy,
    /// The kinds of engines that the fabric offers: those on HIP streams, SDMA engines, or both.
    pub engine: EngineKind,
}

impl PeerOptions for Options {
    fn on_device(ordinal: u32) -> Self {
        Self { device: ordinal, ..Self::default() }
    }

    fn is_strict(&self) -> bool {
        self.strict
    }

    fn signal(&self) -> Option<SignalBy> {
        self.signal
    }
}

/// A fabric that connects the GPU of one rank with the GPUs of other ranks on the same host.
pub type Fabric = peers::Fabric<Context>;

// SAFETY: the device id and the engine are those of the context; `try_signal` probes with the word
// of the flag, by the toolkit.
unsafe impl PeerDevice for Context {
    type DeviceInfo = Device;
    type Options = Options;
    type Engine = Engine;

    fn open(options: &Options) -> Result<Arc<Self>, Error> {
        Self::open(options.device)
    }

    fn info(&self) -> &Device {
        &self.info
    }

    fn device_id(&self) -> DeviceId {
        let text = format!("{} at {}", self.info.uuid_text(), self.info.pci);
        let (uuid, name) = (self.info.identity(), self.info.name.clone());
        DeviceId { uuid, divided: false, text, name }
    }

    fn reachability(&self, other: &DeviceId) -> Result<Reachability, Error> {
        let Some(other) = find_device(self.hip, &other.uuid)? else {
            return Ok(Reachability::NotVisible);
        };

        let to = link_between(self.hip, &self.info, &other)?;
        let from = link_between(self.hip, &other, &self.info)?;
        Ok(match to {
            DeviceLink { peer_access: true, kind, bytes_per_second, .. } if from.peer_access => {
                Reachability::Direct { kind, bytes_per_second }
            }
            _ => Reachability::Unreachable(
                "HIP offers no peer access between these devices (check with rocm-smi \
                 --showtopoaccess; over PCI Express it needs large BAR and an IOMMU in \
                 pass-through mode)",
            ),
        })
    }

    fn try_signal(&self, flag: DevicePtr) -> Result<SignalBy, Error> {
        probe_signal(self, flag)
    }

    fn needs_host_flags(&self, options: &Options) -> bool {
        options.engine.for_device(self) == EngineKind::Sdma
    }

    fn offers(context: &Arc<Self>, options: &Options) -> Result<Vec<EngineOffer>, Error> {
        offers(context, options.engine)
    }

    fn engine(
        context: &Arc<Self>,
        options: &Options,
        request: EngineRequest,
    ) -> Result<Engine, Error> {
        Engine::open(context, options.self_copy, &request)
    }

    fn fault(error: &Error) -> Option<&Fault> {
        match error {
            Error::Fault(fault) => Some(fault),
            _ => None,
        }
    }

    fn is_no_access(error: &Error) -> bool {
        error.is_one_of(&[
            hipError_t::hipErrorInvalidDevice,
            hipError_t::hipErrorPeerAccessUnsupported,
            hipError_t::hipErrorNotSupported,
        ])
    }

    fn unreachable(error: Error, text: String) -> Error {
        match error {
            Error::Driver { call, result, kind, .. } if kind != ErrorKind::DeviceLost => {
                let text = format!("{text}: {call}: {result}");
                Error::Unavailable { text, result: Some(result) }
            }
            // IPC was refused.
            Error::Unavailable { text: reason, result } => {
                Error::Unavailable { text: format!("{text}: {reason}"), result }
            }
            error => error,
        }
    }
}
