//! Memory that one fabric of a rank holds and another one registers.

use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::memory::Region;

/// A region of one fabric in the hands of another: whoever keeps this keeps the memory.
#[derive(Clone)]
pub struct Held {
    region: Arc<dyn Region>,
    typed: Arc<dyn Any + Send + Sync>,
}

impl Held {
    /// Takes part in a region.
    pub fn new<R: Region>(region: Arc<R>) -> Self {
        Self { typed: Arc::clone(&region) as _, region }
    }

    /// The region, whatever fabric it is of.
    pub fn region(&self) -> &dyn Region {
        &*self.region
    }

    /// The region with its type, if it is this one.
    pub fn downcast<R: Region>(&self) -> Option<Arc<R>> {
        Arc::clone(&self.typed).downcast().ok()
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held")
            .field("base", &self.region.base())
            .field("bytes", &self.region.bytes())
            .finish_non_exhaustive()
    }
}

/// Memory of a device as other devices map it.
#[derive(Debug)]
pub struct DmaBuf {
    /// The descriptor of the dma-buf, which holds one allocation or a part of it.
    pub fd: OwnedFd,
    /// Where the region begins in it, in bytes.
    pub offset: u64,
}

/// Makes visible to a device what another device has written to its memory.
///
/// A network card that says that bytes have come has handed them to the bus; not every device sees
/// them at once.
pub trait Flush: Send + Sync + fmt::Debug {
    /// Returns when everything that had come to the device's memory before the call is visible to its
    /// engines and its compute.
    ///
    /// # Errors
    /// Why that cannot be brought about, such as that the device is lost.
    fn flush(&self) -> Result<(), String>;
}
