//! Erases the types of another harness's fabric.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::{DynEngine, DynError, DynFabric, DynRegion, ErrorKind, Rank};

use crate::checks::failure;
use crate::failure::Outcome;

use super::{EngineOf, Harness, LocalOf, OwnMemory};

/// Opens the fabric of any harness as a [`DynFabric`].
///
/// Checks are generic, and compiling all of them for a fabric takes long. [`Suite`](crate::Suite) runs them on this type,
/// for which they are compiled once.
#[derive(Clone)]
pub struct Erased(Arc<dyn ErasedHarness>);

impl Erased {
    /// Erases the types of `harness`. The name stays the same.
    pub fn new(harness: impl Harness) -> Self {
        Self(Arc::new(harness))
    }

    /// Returns the harness for checks that need the types of its fabric.
    pub(crate) fn typed(&self) -> &dyn ErasedHarness {
        &*self.0
    }
}

impl fmt::Debug for Erased {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Erased").field("name", &self.0.name()).finish_non_exhaustive()
    }
}

impl Harness for Erased {
    type Fabric = DynFabric;

    fn name(&self) -> &str {
        self.0.name()
    }

    fn open(&self, rank: Rank, ranks: usize) -> Result<DynFabric, DynError> {
        self.0.open(rank, ranks)
    }

    fn required(&self) -> bool {
        self.0.required()
    }

    fn not_applicable(&self) -> Option<String> {
        self.0.not_applicable()
    }

    fn timeout(&self) -> Duration {
        self.0.timeout()
    }

    fn limit_of(&self, wait: &str) -> Duration {
        self.0.limit_of(wait)
    }

    fn write(&self, region: &DynRegion, offset: u64, bytes: &[u8]) {
        self.0.write(region, offset, bytes);
    }

    fn read(&self, region: &DynRegion, offset: u64, bytes: &mut [u8]) {
        self.0.read(region, offset, bytes);
    }

    fn own_memory(&self, rank: Rank, bytes: u64) -> Option<Arc<dyn OwnMemory>> {
        self.0.own_memory(rank, bytes)
    }

    fn faults_are_device_wide(&self) -> bool {
        self.0.faults_are_device_wide()
    }

    fn break_engine(&self, engine: &mut DynEngine) -> Option<ErrorKind> {
        self.0.break_engine(engine)
    }
}

/// The methods of [`Harness`] without the types of the fabric, and the checks that need them.
pub(crate) trait ErasedHarness: Send + Sync {
    fn name(&self) -> &str;
    fn open(&self, rank: Rank, ranks: usize) -> Result<DynFabric, DynError>;
    fn required(&self) -> bool;
    fn not_applicable(&self) -> Option<String>;
    fn timeout(&self) -> Duration;
    fn limit_of(&self, wait: &str) -> Duration;
    fn write(&self, region: &DynRegion, offset: u64, bytes: &[u8]);
    fn read(&self, region: &DynRegion, offset: u64, bytes: &mut [u8]);
    fn own_memory(&self, rank: Rank, bytes: u64) -> Option<Arc<dyn OwnMemory>>;
    fn faults_are_device_wide(&self) -> bool;
    fn break_engine(&self, engine: &mut DynEngine) -> Option<ErrorKind>;

    // A `DynKey` carries a length of its own, so it would refuse malformed bytes before the backend sees them.
    fn malformed_keys_are_refused(&self) -> Outcome;
    fn a_key_survives_encoding(&self) -> Outcome;
}

impl<H: Harness> ErasedHarness for H {
    fn name(&self) -> &str {
        Harness::name(self)
    }

    fn open(&self, rank: Rank, ranks: usize) -> Result<DynFabric, DynError> {
        Harness::open(self, rank, ranks).map(DynFabric::new).map_err(DynError::new)
    }

    fn required(&self) -> bool {
        Harness::required(self)
    }

    fn not_applicable(&self) -> Option<String> {
        Harness::not_applicable(self)
    }

    fn timeout(&self) -> Duration {
        Harness::timeout(self)
    }

    fn limit_of(&self, wait: &str) -> Duration {
        Harness::limit_of(self, wait)
    }

    fn write(&self, region: &DynRegion, offset: u64, bytes: &[u8]) {
        Harness::write(self, &*typed::<H>(region), offset, bytes);
    }

    fn read(&self, region: &DynRegion, offset: u64, bytes: &mut [u8]) {
        Harness::read(self, &*typed::<H>(region), offset, bytes);
    }

    fn own_memory(&self, rank: Rank, bytes: u64) -> Option<Arc<dyn OwnMemory>> {
        Harness::own_memory(self, rank, bytes)
    }

    fn faults_are_device_wide(&self) -> bool {
        Harness::faults_are_device_wide(self)
    }

    fn break_engine(&self, engine: &mut DynEngine) -> Option<ErrorKind> {
        let engine = engine.downcast_mut::<EngineOf<H>>().expect("an engine of this harness");
        Harness::break_engine(self, engine)
    }

    fn malformed_keys_are_refused(&self) -> Outcome {
        failure::malformed_keys_are_refused(self)
    }

    fn a_key_survives_encoding(&self) -> Outcome {
        failure::a_key_survives_encoding(self)
    }
}

fn typed<H: Harness>(region: &DynRegion) -> Arc<LocalOf<H>> {
    region.downcast().expect("a region of this harness")
}
