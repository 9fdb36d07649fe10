//! Gathers over the backend, alone and with the host backend as a network between nodes.

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, GroupOptions, MemoryRange};
use peerlane_collectives::topology::Topology;
use peerlane_conformance::pattern;
use peerlane_hal::Space;
use peerlane_ring::model::Device;
use peerlane_ring::{Fabric, WINDOW};

/// Returns the address of a buffer for the vendor's calls.
fn address(device: Device, memory: MemoryRange) -> u64 {
    let address = memory.base.addr().get() as u64 - WINDOW;
    assert!(memory.space == Space::Device && device.contains(address, memory.bytes));
    address
}

fn gather(group: &mut Group, len: usize) -> Result<(), Error> {
    let (device, ranks, bytes) = (Device::open(group.rank().0).unwrap(), group.ranks(), 4 * len);
    let mut gather = group.all_gather::<u32>(len).prepare()?;
    for round in 0..3 {
        let sent = |rank: usize| pattern(100 * round + rank as u64, bytes as u64);
        let input = address(device, gather.input_memory()?);
        device.write(input, &sent(group.rank().index())).unwrap();
        gather.run()?;
        let mut output = vec![0; ranks * bytes];
        device.read(address(device, gather.output_memory()), &mut output).unwrap();
        for rank in 0..ranks {
            assert!(output[rank * bytes..][..bytes] == sent(rank), "{len} elements of rank {rank}");
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
            // A block of the last one is longer than the ring can hold.
            for len in [0, 1, 1000, 100_001, 1_000_003] {
                gather(&mut group, len)?;
            }
            group.close()
        })
        .unwrap();
    }
}

#[test]
fn ranks_of_two_nodes_gather() {
    for (ranks, nodes) in [(2, &[0, 1][..]), (4, &[0, 0, 1, 1]), (5, &[0, 0, 0, 1, 1])] {
        in_process::run(ranks, |bootstrap| {
            let (rank, ranks) = (bootstrap.rank(), bootstrap.ranks());
            let local = Fabric::open(rank, ranks);
            let local = local.map_err(|error| Error::of_backend("open the backend", error))?;
            let network = peerlane_host::Fabric::open(rank, ranks);
            let network = network.map_err(|error| Error::of_backend("open the network", error))?;
            let options = GroupOptions::default().topology(Topology::by_key(nodes.to_vec())?);
            let mut group = options.open_tiers(bootstrap, local, network)?;
            for len in [0, 1, 1000, 100_001] {
                gather(&mut group, len)?;
            }
            group.close()
        })
        .unwrap();
    }
}
