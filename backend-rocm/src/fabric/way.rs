//! What HIP knows of the way to another device.

use std::sync::Arc;

use peerlane_hal::ErrorKind;
use peerlane_toolkit::device::{DevicePtr, Fault};
use peerlane_toolkit::peers::{DeviceId, PeerDevice, Purpose, Reachability};

use super::Options;
use crate::device::{Context, Device, DeviceLink, between, find};
use crate::engine::{Engine, EngineKind, SignalBy, probe_signal, striped_rate};
use crate::error::Error;
use crate::sys::hip::hipError_t;

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
        let text = format!("{} at {}", self.found.uuid_text(), self.found.pci);
        let (uuid, name) = (self.found.identity(), self.found.name.clone());
        DeviceId { uuid, divided: false, text, name }
    }

    fn reachability(&self, other: &DeviceId) -> Result<Reachability, Error> {
        let Some(other) = find(self.hip, &other.uuid)? else { return Ok(Reachability::NotVisible) };
        let there = between(self.hip, &self.found, &other)?;
        let back = between(self.hip, &other, &self.found)?;
        Ok(match there {
            DeviceLink { peer_access: true, kind, bytes_per_second, .. } if back.peer_access => {
                Reachability::Direct { kind, bytes_per_second }
            }
            _ => Reachability::Unreachable(
                "HIP gives no peer access between them (see rocm-smi --showtopoaccess; over PCI Express \
                 it takes large BAR and an IOMMU in pass-through)",
            ),
        })
    }

    fn try_signal(&self, flag: DevicePtr) -> Result<SignalBy, Error> {
        probe_signal(self, flag)
    }

    fn wants_flags_on_host(&self, options: &Options) -> bool {
        options.engine.decided(self) == EngineKind::Sdma
    }

    fn striped_rate(&self, options: &Options) -> u64 {
        let choosing = options.engine == EngineKind::Auto
            && options.engine.decided(self) == EngineKind::Streams;
        if choosing { striped_rate(self) } else { 0 }
    }

    fn engine(context: &Arc<Self>, options: &Options, purpose: Purpose) -> Result<Engine, Error> {
        Engine::open(context, options.engine, options.own_copy, &purpose)
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
            // Of IPC that is refused.
            Error::Unavailable { text: why, result } => {
                Error::Unavailable { text: format!("{text}: {why}"), result }
            }
            error => error,
        }
    }
}
