//! Opens the host backend, which is the reference.

use peerlane_hal::Rank;
use peerlane_host as host;

use super::Harness;

/// Runs checks on the host backend with any options.
#[derive(Clone, Debug)]
pub struct HostHarness {
    name: String,
    options: host::Options,
}

impl HostHarness {
    /// Creates a harness with a name of its own.
    pub fn new(name: impl Into<String>, options: host::Options) -> Self {
        Self { name: name.into(), options }
    }
}

impl Default for HostHarness {
    fn default() -> Self {
        Self::new("host", host::Options::default())
    }
}

impl Harness for HostHarness {
    type Fabric = host::Fabric;

    fn name(&self) -> &str {
        &self.name
    }

    fn open(&self, rank: Rank, ranks: usize) -> Result<host::Fabric, host::Error> {
        host::Fabric::open_with(rank, ranks, self.options)
    }

    // Host memory is always available.
    fn required(&self) -> bool {
        true
    }
}
