//! Puts a layer over the fabric of another harness.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::{ErrorKind, Rank};
use peerlane_layers::{Error, Layer, Wrapped};

use crate::checks::Abilities;

use super::{EngineOf, ErrorOf, Harness, LocalOf, OwnMemory};

/// Wraps every rank's fabric of a harness in a layer.
pub struct Layered<H, L> {
    inner: H,
    name: String,
    timeout: Duration,
    limit_of: Box<dyn Fn(&str) -> Duration + Send + Sync>,
    layer: Box<dyn Fn(Rank) -> L + Send + Sync>,
}

impl<H: Harness, L: Layer<H::Fabric> + 'static> Layered<H, L> {
    /// Puts `layer`, created for each rank, over `inner`. The name is `inner`'s, `+`, and `what`.
    pub fn new(inner: H, what: &str, layer: impl Fn(Rank) -> L + Send + Sync + 'static) -> Self {
        let name = format!("{}+{what}", inner.name());
        let timeout = inner.timeout();
        let limit_of = Box::new(move |_: &str| timeout);
        Self { inner, name, timeout, limit_of, layer: Box::new(layer) }
    }

    /// Overrides the inner harness's timeout.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }.limits(move |_| timeout)
    }

    /// Overrides the limit of each wait, from what it waits for.
    #[must_use]
    pub fn limits(self, limit_of: impl Fn(&str) -> Duration + Send + Sync + 'static) -> Self {
        Self { limit_of: Box::new(limit_of), ..self }
    }
}

impl<H: fmt::Debug, L> fmt::Debug for Layered<H, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layered").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<H: Harness, L: Layer<H::Fabric> + 'static> Harness for Layered<H, L> {
    type Fabric = Wrapped<H::Fabric, L>;

    fn name(&self) -> &str {
        &self.name
    }

    fn open(&self, rank: Rank, ranks: usize) -> Result<Self::Fabric, Error<ErrorOf<H>>> {
        let fabric = self.inner.open(rank, ranks).map_err(Error::Inner)?;
        Ok(Wrapped::new(fabric, (self.layer)(rank)))
    }

    fn required(&self) -> bool {
        self.inner.required()
    }

    fn not_applicable(&self) -> Option<String> {
        self.inner.not_applicable().or_else(|| {
            // An error of the backend is reported when the wrapped fabric is opened.
            let caps = Abilities::probe(&self.inner).ok()?.caps();
            (self.layer)(Rank(0)).missing(&caps)
        })
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn limit_of(&self, wait: &str) -> Duration {
        (self.limit_of)(wait)
    }

    fn write(&self, region: &LocalOf<Self>, offset: u64, bytes: &[u8]) {
        self.inner.write(region, offset, bytes);
    }

    fn read(&self, region: &LocalOf<Self>, offset: u64, bytes: &mut [u8]) {
        self.inner.read(region, offset, bytes);
    }

    fn own_memory(&self, rank: Rank, bytes: u64) -> Option<Arc<dyn OwnMemory>> {
        self.inner.own_memory(rank, bytes)
    }

    fn faults_are_device_wide(&self) -> bool {
        self.inner.faults_are_device_wide()
    }

    fn break_engine(&self, engine: &mut EngineOf<Self>) -> Option<ErrorKind> {
        L::break_engine(engine)
    }
}
