//! Opens CUDA devices for a fabric and checks peer access between GPUs.
//!
//! The fabric itself is `peerlane_toolkit::peers`. This file holds the queries that it makes of the
//! CUDA driver.

use std::sync::Arc;

use peerlane_hal::{EngineOffer, ErrorKind};
use peerlane_toolkit::Fault;
use peerlane_toolkit::device::DevicePtr;
use peerlane_toolkit::peers::{
    self, DeviceId, EngineRequest, PeerDevice, PeerOptions, Reachability,
};
use peerlane_toolkit::streams;

use crate::device::{self, Context, Device, DeviceLink};
use crate::engine::{Engine, EngineSetup, SelfCopy, SignalBy, probe_signal};
use crate::error::Error;
use crate::sys;

/// The options of a CUDA fabric, such as its device and how signals reach peers. The defaults are
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
    /// The largest number of blocks of 512 threads that run a reduction; `None` takes one for each
    /// multiprocessor. With fewer, more compute units stay free, and reductions take longer
    /// (docs/perf/cuda-additions.md).
    pub reduce_blocks: Option<u32>,
    /// The largest number of blocks of 512 threads that run a start as one launch; `None` takes as
    /// many as are useful. It must be equal on all ranks.
    pub fused_blocks: Option<u32>,
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
        let Device { uuid, mig, name, .. } = &self.info;
        DeviceId { uuid: *uuid, divided: *mig, text: self.info.uuid_text(), name: name.clone() }
    }

    fn reachability(&self, other: &DeviceId) -> Result<Reachability, Error> {
        if other.divided || self.info.mig {
            let why = "MIG instances cannot access the memory of other devices";
            return Ok(Reachability::Unreachable(why));
        }
        let Some((other, _)) = device::find_device(self.driver, &other.uuid)? else {
            return Ok(Reachability::NotVisible);
        };
        let to = device::link_between(self.driver, self.device, other)?;
        let from = device::link_between(self.driver, other, self.device)?;
        Ok(match to {
            // The driver does not report a rate; only a measurement gives one.
            DeviceLink { peer_access: true, kind, .. } if from.peer_access => {
                Reachability::Direct { kind, bytes_per_second: None }
            }
            _ => Reachability::Unreachable(
                "the driver offers no peer access between these devices (check with nvidia-smi \
                 topo -p2p r; it is off across PCIe roots, with some IOMMU settings and on \
                 consumer GPUs)",
            ),
        })
    }

    fn try_signal(&self, flag: DevicePtr) -> Result<SignalBy, Error> {
        probe_signal(self, flag)
    }

    fn offers(context: &Arc<Self>, options: &Options) -> Result<Vec<EngineOffer>, Error> {
        let streams = streams::offer(&**context)?;
        let kernels = streams::fused_offer(&**context, &streams, options.fused_blocks);
        Ok([streams].into_iter().chain(kernels).collect())
    }

    fn engine(
        context: &Arc<Self>,
        options: &Options,
        request: EngineRequest,
    ) -> Result<Engine, Error> {
        let setup = EngineSetup::new(&request, options.self_copy, options.reduce_blocks);
        Engine::open(Arc::clone(context), setup)
    }

    fn fault(error: &Error) -> Option<&Fault> {
        match error {
            Error::Fault(fault) => Some(fault),
            _ => None,
        }
    }

    fn is_no_access(error: &Error) -> bool {
        error.is_one_of(&[
            sys::CUDA_ERROR_INVALID_DEVICE,
            sys::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
            sys::CUDA_ERROR_NOT_SUPPORTED,
        ])
    }

    fn unreachable(error: Error, text: String) -> Error {
        match error {
            Error::Driver { result, kind, .. } if kind != ErrorKind::DeviceLost => {
                Error::Unavailable { text: format!("{text}: {result}"), result: Some(result) }
            }
            error => error,
        }
    }
}
