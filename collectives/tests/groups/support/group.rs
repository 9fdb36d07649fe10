//! Runs ranks as threads in one group over the host backend.

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::Group;
use peerlane_host as host;

/// Runs `body` on each rank of a group, closes the group, and returns what the ranks have returned.
pub(crate) fn in_group<R: Send>(
    ranks: usize,
    body: impl Fn(&mut Group) -> Result<R, Error> + Sync,
) -> Vec<R> {
    let results = in_process::run(ranks, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group = Group::open(bootstrap, fabric)?;
        let result = body(&mut group)?;
        group.close()?;
        Ok(result)
    });
    results.unwrap()
}
