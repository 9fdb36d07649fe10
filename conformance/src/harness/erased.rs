//! Erases the types of another harness's fabric.

use std::fmt;
use std::time::Duration;

use peerlane_hal::{DynError, DynFabric, Rank};

use super::Harness;

/// Opens the fabric of a harness as a [`DynFabric`]. The harness must use host memory.
pub struct Erased<H> {
    inner: H,
    name: String,
}

impl<H: Harness> Erased<H> {
    /// Erases the types of `inner`. The name is `inner`'s and `+dyn`.
    pub fn new(inner: H) -> Self {
        let name = format!("{}+dyn", inner.name());
        Self { inner, name }
    }
}

impl<H: fmt::Debug> fmt::Debug for Erased<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Erased").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<H: Harness> Harness for Erased<H> {
    type Fabric = DynFabric;

    fn name(&self) -> &str {
        &self.name
    }

    fn open(&self, rank: Rank, ranks: usize) -> Result<DynFabric, DynError> {
        self.inner.open(rank, ranks).map(DynFabric::new).map_err(DynError::new)
    }

    fn required(&self) -> bool {
        self.inner.required()
    }

    fn timeout(&self) -> Duration {
        self.inner.timeout()
    }
}
