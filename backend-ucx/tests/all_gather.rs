//! Gathers over the backend, alone and as the network between nodes of the host backend.

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, GroupOptions};
use peerlane_collectives::topology::Topology;
use peerlane_test_support::not_covered;
use peerlane_ucx::Fabric;

fn gather(group: &mut Group, len: usize) -> Result<(), Error> {
    let mut gather = group.all_gather::<u32>(len).prepare()?;
    for round in 0..3 {
        gather.input_mut()?.fill(100 * round + group.rank().0);
        gather.run()?;
        for rank in 0..group.ranks() {
            let expected = 100 * round + rank as u32;
            assert!(
                gather.output()?[rank * len..(rank + 1) * len].iter().all(|it| *it == expected)
            );
        }
    }
    Ok(())
}

/// Returns whether libucp is here, and says it if not.
fn has_ucx(test: &str) -> bool {
    let missing = peerlane_ucx::version().err();
    missing.iter().for_each(|error| not_covered(test, &error.to_string()));
    missing.is_none()
}

#[test]
fn ranks_of_one_node_gather() {
    if !has_ucx("ranks_of_one_node_gather") {
        return;
    }
    for ranks in 1..=9 {
        in_process::run(ranks, |bootstrap| {
            let fabric = Fabric::open(bootstrap.rank(), bootstrap.ranks());
            let fabric = fabric.map_err(|error| Error::of_backend("open the backend", error))?;
            let mut group = Group::open(bootstrap, fabric)?;
            for len in [0, 1, 1000, 100_001] {
                gather(&mut group, len)?;
            }
            group.close()
        })
        .unwrap();
    }
}

#[test]
fn ranks_of_two_nodes_gather() {
    if !has_ucx("ranks_of_two_nodes_gather") {
        return;
    }
    // Nodes of equal and of unequal size.
    for nodes in [&[0, 0, 1, 1][..], &[0, 0, 0, 1, 2, 2]] {
        in_process::run(nodes.len(), |bootstrap| {
            let (rank, ranks) = (bootstrap.rank(), bootstrap.ranks());
            let local = peerlane_host::Fabric::open(rank, ranks);
            let local = local.map_err(|error| Error::of_backend("open the backend", error))?;
            let network = Fabric::open(rank, ranks);
            let network = network.map_err(|error| Error::of_backend("open the network", error))?;
            let options = GroupOptions::default().topology(Topology::by_key(nodes)?);
            let mut group = options.open_tiers(bootstrap, local, network)?;
            for len in [1, 1000, 100_001] {
                gather(&mut group, len)?;
            }
            group.close()
        })
        .unwrap();
    }
}
