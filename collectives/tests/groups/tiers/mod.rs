//! Tests groups over two fabrics: ranks are threads, with one host fabric inside nodes and another between nodes.

use std::time::Duration;

use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::bootstrap::in_process::{self, InProcessBootstrap};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, GroupOptions};
use peerlane_collectives::topology::Topology;
use peerlane_host as host;

mod all_gathers;
mod endings;
mod options;
mod reports;

/// A timeout that no test reaches.
pub(crate) const LONG: Duration = Duration::from_secs(20);

/// Whether the engines of each tier queue waits; otherwise the executor polls their flags.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waits {
    pub(crate) local: bool,
    pub(crate) network: bool,
}

pub(crate) const QUEUED: Waits = Waits { local: true, network: true };
pub(crate) const WAITS: [Waits; 4] = [
    QUEUED,
    Waits { local: true, network: false },
    Waits { local: false, network: true },
    Waits { local: false, network: false },
];

pub(crate) fn fabric(
    bootstrap: &InProcessBootstrap,
    queued_wait: bool,
) -> Result<host::Fabric, Error> {
    let mut options = host::Options::default();
    options.caps.queued_wait = queued_wait;
    Ok(host::Fabric::open_with(bootstrap.rank(), bootstrap.ranks(), options)?)
}

pub(crate) fn open(
    bootstrap: InProcessBootstrap,
    options: GroupOptions,
    waits: Waits,
) -> Result<Group, Error> {
    let (local, network) = (fabric(&bootstrap, waits.local)?, fabric(&bootstrap, waits.network)?);
    options.open_tiers(bootstrap, local, network)
}

/// Runs `body` on each rank of a group on `topology`, and closes the group.
pub(crate) fn in_tiers<R: Send>(
    topology: &Topology,
    waits: Waits,
    body: impl Fn(&mut Group) -> Result<R, Error> + Sync,
) -> Vec<R> {
    let ended = in_process::run(topology.ranks(), |bootstrap| {
        let options = GroupOptions::default().timeout(LONG).topology(topology.clone());
        let mut group = open(bootstrap, options, waits)?;
        let answer = body(&mut group)?;
        group.close()?;
        Ok(answer)
    });
    ended.unwrap_or_else(|error| panic!("{}, {waits:?}: {error}", topology.notation()))
}
