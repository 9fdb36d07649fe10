//! What the driver knows of the way to another device.

use std::sync::Arc;

use peerlane_hal::ErrorKind;
use peerlane_toolkit::device::{DevicePtr, Fault};
use peerlane_toolkit::peers::{DeviceId, PeerDevice, Purpose, Way};

use super::Options;
use crate::device::{self, Context, Device, DeviceLink};
use crate::engine::{Engine, EngineSetup, SignalBy, probe_signal};
use crate::error::Error;
use crate::sys;

impl PeerDevice for Context {
    type Found = Device;
    type Options = Options;
    type Engine = Engine;

    fn open(options: &Options) -> Result<Arc<Self>, Error> {
        Self::open(options.device)
    }

    fn found(&self) -> &Device {
        &self.found
    }

    fn device_id(&self) -> DeviceId {
        let Device { uuid, mig, name, .. } = &self.found;
        DeviceId { uuid: *uuid, divided: *mig, text: self.found.uuid_text(), name: name.clone() }
    }

    fn way_to(&self, other: &DeviceId) -> Result<Way, Error> {
        if other.divided || self.found.mig {
            let why = "instances of a divided GPU (MIG) have no access to other devices";
            return Ok(Way::Apart(why));
        }
        let Some((other, _)) = device::find(self.driver, &other.uuid)? else {
            return Ok(Way::Hidden);
        };
        let there = device::between(self.driver, self.device, other)?;
        let back = device::between(self.driver, other, self.device)?;
        Ok(match there {
            // The driver names no rate; only a measurement does.
            DeviceLink { peer_access: true, kind, .. } if back.peer_access => {
                Way::Reached { kind, bytes_per_second: None }
            }
            _ => Way::Apart(
                "the driver gives no peer access between them (see nvidia-smi topo -p2p r; it is \
                 off across PCIe roots, under some IOMMUs, and on consumer GPUs)",
            ),
        })
    }

    fn try_signal(&self, flag: DevicePtr) -> Result<SignalBy, Error> {
        probe_signal(self, flag)
    }

    fn engine(context: &Arc<Self>, options: &Options, purpose: Purpose) -> Result<Engine, Error> {
        let setup = EngineSetup {
            rank: purpose.rank,
            peers: purpose.peers.iter().map(|reached| reached.peer).collect(),
            signal: purpose.signal,
            own_copy: options.own_copy,
            staged: purpose.is_staged(),
        };
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
