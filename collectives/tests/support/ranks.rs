//! Ranks as threads in one group over the host backend, and what their shards hold.

use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::bootstrap::in_process;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::Group;
use peerlane_hal::{Rank, host};

pub(crate) type Host = Group<host::Fabric>;

/// What lies where nothing is gathered.
pub(crate) const UNTOUCHED: u8 = 0xEE;

/// Lengths around what parts and cache lines are made of.
pub(crate) const LENGTHS: [usize; 9] = [0, 1, 7, 63, 64, 65, 127, 1000, 4097];

/// Runs `body` as each rank of a group, and closes it.
pub(crate) fn in_group(ranks: usize, body: impl Fn(&mut Host) -> Result<(), Error> + Sync) {
    let ended = in_process::run(ranks, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group = Group::open(bootstrap, fabric)?;
        body(&mut group)?;
        group.close()
    });
    ended.unwrap_or_else(|error| panic!("{ranks} ranks: {error}"));
}

/// What the shard of a rank, or its piece of a tensor, holds in a start; never [`UNTOUCHED`].
pub(crate) fn content(rank: Rank, tensor: usize, start: usize) -> impl Iterator<Item = u8> {
    let seed = 1 + rank.index() * 37 + tensor * 11 + start * 101;
    (0..).map(move |index: usize| ((seed + index * 7) % usize::from(UNTOUCHED)) as u8)
}

pub(crate) fn fill(shard: &mut [u8], rank: Rank, tensor: usize, start: usize) {
    shard.iter_mut().zip(content(rank, tensor, start)).for_each(|(byte, value)| *byte = value);
}

#[track_caller]
pub(crate) fn check(seen: &[u8], rank: Rank, tensor: usize, start: usize) {
    let wrong =
        seen.iter().zip(content(rank, tensor, start)).position(|(seen, wanted)| *seen != wanted);
    assert_eq!(wrong, None, "piece of rank {rank} of tensor {tensor} in start {start}");
}
