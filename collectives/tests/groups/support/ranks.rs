//! Runs ranks as threads in one group over the host backend, and fills and checks their blocks.

use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::bootstrap::in_process;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, GroupOptions};
use peerlane_collectives::plan::Algorithm;
use peerlane_collectives::schedule::{self, Shape};
use peerlane_collectives::topology::Topology;
use peerlane_hal::Rank;
use peerlane_host as host;

pub(crate) type Host = Group;

/// The content of bytes that no operation writes.
pub(crate) const UNTOUCHED: u8 = 0xEE;

/// Lengths around multiples of cache lines and of the alignment of chunks.
pub(crate) const LENGTHS: [usize; 9] = [0, 1, 7, 63, 64, 65, 127, 1000, 4097];

/// Runs `body` on each rank of a group with at most two of `algorithms`, and closes the group.
///
/// It runs over one fabric, and with several ranks also over two fabrics on uneven nodes. With 3 ranks it runs all `algorithms`.
pub(crate) fn in_group(
    ranks: usize,
    algorithms: &[Algorithm],
    body: impl Fn(&mut Host, Algorithm) -> Result<(), Error> + Sync,
) {
    // A schedule can have a precondition on the topology, which is that of an all-gather here.
    let some = |topology: &Topology, first: usize| {
        let shape = Shape { tiers: topology.nodes() > 1, ..Shape::default() };
        let fitting: Vec<Algorithm> = schedule::fitting(topology, shape).collect();
        let number = if ranks == 3 { algorithms.len() } else { algorithms.len().min(2) };
        let picked = (0..number).map(|index| algorithms[(first + index) % algorithms.len()]);
        picked.filter(|algorithm| fitting.contains(algorithm)).collect::<Vec<_>>()
    };
    let flat = some(&Topology::flat(ranks).expect("there are ranks"), 2 * ranks);
    run(ranks, None, |group| flat.iter().try_for_each(|&algorithm| body(group, algorithm)));
    if ranks > 1 {
        let node_of_rank: Vec<u32> = (0..ranks).map(|rank| u32::from(rank % 3 == 1)).collect();
        let topology = Topology::of_nodes(&node_of_rank).expect("two nodes");
        let tiered = some(&topology, 2 * ranks + 2);
        run(ranks, Some(topology), |group| {
            tiered.iter().try_for_each(|&algorithm| body(group, algorithm))
        });
    }
}

/// Runs `body` on each rank of a group over one fabric, and closes the group.
pub(crate) fn in_flat_group(ranks: usize, body: impl Fn(&mut Host) -> Result<(), Error> + Sync) {
    run(ranks, None, body);
}

/// Runs `body` over one fabric, or with a topology over two.
fn run(
    ranks: usize,
    topology: Option<Topology>,
    body: impl Fn(&mut Host) -> Result<(), Error> + Sync,
) {
    let context = format!("{ranks} ranks, {topology:?}");
    let ended = in_process::run(ranks, |bootstrap| {
        let open = || host::Fabric::open(bootstrap.rank(), bootstrap.ranks());
        let (local, network) = (open()?, open()?);
        let mut group = match &topology {
            None => Group::open(bootstrap, local)?,
            Some(topology) => {
                let options = GroupOptions::default().topology(topology.clone());
                options.open_tiers(bootstrap, local, network)?
            }
        };
        body(&mut group)?;
        group.close()
    });
    ended.unwrap_or_else(|error| panic!("{context}: {error}"));
}

/// Returns the content of a rank's piece of a tensor in a start; never [`UNTOUCHED`].
pub(crate) fn content(rank: Rank, tensor: usize, start: usize) -> impl Iterator<Item = u8> {
    let seed = 1 + rank.index() * 37 + tensor * 11 + start * 101;
    (0..).map(move |index: usize| ((seed + index * 7) % usize::from(UNTOUCHED)) as u8)
}

pub(crate) fn fill(block: &mut [u8], rank: Rank, tensor: usize, start: usize) {
    block.iter_mut().zip(content(rank, tensor, start)).for_each(|(byte, value)| *byte = value);
}

#[track_caller]
pub(crate) fn check(found: &[u8], rank: Rank, tensor: usize, start: usize) {
    let wrong = found
        .iter()
        .zip(content(rank, tensor, start))
        .position(|(found, expected)| *found != expected);
    assert_eq!(wrong, None, "piece of rank {rank} of tensor {tensor} in start {start}");
}
