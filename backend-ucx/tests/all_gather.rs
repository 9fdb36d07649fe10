//! Gathers over the backend, alone and with the host backend as a network between nodes.

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, GroupOptions};
use peerlane_collectives::topology::Topology;
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

#[test]
fn ranks_of_one_node_gather() {
    for ranks in 1..=5 {
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
    in_process::run(4, |bootstrap| {
        let (rank, ranks) = (bootstrap.rank(), bootstrap.ranks());
        let local = Fabric::open(rank, ranks);
        let local = local.map_err(|error| Error::of_backend("open the backend", error))?;
        let network = peerlane_host::Fabric::open(rank, ranks);
        let network = network.map_err(|error| Error::of_backend("open the network", error))?;
        let options = GroupOptions::default().topology(Topology::by_key([0, 0, 1, 1])?);
        let mut group = options.open_tiers(bootstrap, local, network)?;
        for len in [1, 1000, 100_001] {
            gather(&mut group, len)?;
        }
        group.close()
    })
    .unwrap();
}
