//! What the network's cards get of a device's memory: a dma-buf to reach it by, and the flush without
//! which the device need not see what they have written.

use std::fmt;
use std::sync::{Arc, OnceLock};

use super::device::RegionDevice;
use crate::device::DevicePtr;
use peerlane_hal::{DmaBuf, Flush};

/// A device, for the cards; one for all regions of a fabric.
#[derive(Debug)]
pub(super) struct Cards<D: RegionDevice> {
    context: Arc<D>,
    flushing: OnceLock<Flushing>,
}

/// How bytes of cards become visible to the device.
#[derive(Clone, Debug)]
enum Flushing {
    /// As soon as the card says that they have come.
    Needless,
    Needed(Arc<dyn Flush>),
    /// Nobody says how, so that nothing may be received.
    Unknown(Arc<Unknown>),
}

impl<D: RegionDevice> Cards<D> {
    pub(super) fn new(context: &Arc<D>) -> Self {
        Self { context: Arc::clone(context), flushing: OnceLock::new() }
    }

    /// A dma-buf of a span of the device's memory.
    pub(super) fn dma_buf(&self, address: DevicePtr, bytes: u64) -> Result<DmaBuf, String> {
        if let Flushing::Unknown(unknown) = self.flushing() {
            return Err(unknown.0.clone());
        }
        let _current = self.context.enter_relaxed().map_err(|error| error.to_string())?;
        self.context.dma_buf(address, bytes).map_err(|error| error.to_string())
    }

    pub(super) fn flush(&self) -> Option<Arc<dyn Flush>> {
        match self.flushing() {
            Flushing::Needless => None,
            Flushing::Needed(flush) => Some(flush),
            Flushing::Unknown(unknown) => Some(unknown),
        }
    }

    fn flushing(&self) -> Flushing {
        let ask = || match D::card_flush(&self.context) {
            Ok(None) => Flushing::Needless,
            Ok(Some(flush)) => Flushing::Needed(flush),
            Err(error) => Flushing::Unknown(Arc::new(Unknown(error.to_string()))),
        };
        self.flushing.get_or_init(ask).clone()
    }
}

/// Why nothing is flushed.
struct Unknown(String);

impl fmt::Debug for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Flush for Unknown {
    fn flush(&self) -> Result<(), String> {
        Err(self.0.clone())
    }
}
