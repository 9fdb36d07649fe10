//! Groups over two fabrics: ranks as threads, one host fabric inside the node, another between nodes.

use std::time::Duration;

use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::bootstrap::in_process::{self, InProcess};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, GroupOptions};
use peerlane_collectives::plan::Algorithm;
use peerlane_collectives::topology::Topology;
use peerlane_hal::host;

/// Engines that queue waits, and engines of which the executor reads the flags.
#[derive(Clone, Copy, Debug)]
struct Waits {
    local: bool,
    network: bool,
}

const WAITS: [Waits; 4] = [
    Waits { local: true, network: true },
    Waits { local: true, network: false },
    Waits { local: false, network: true },
    Waits { local: false, network: false },
];

fn fabric(bootstrap: &InProcess, queued_wait: bool) -> Result<host::Fabric, Error> {
    let mut options = host::Options::default();
    options.caps.queued_wait = queued_wait;
    Ok(host::Fabric::open_with(bootstrap.rank(), bootstrap.ranks(), options)?)
}

fn open(
    bootstrap: InProcess,
    topology: &Topology,
    waits: Waits,
) -> Result<Group<host::Fabric>, Error> {
    let (local, network) = (fabric(&bootstrap, waits.local)?, fabric(&bootstrap, waits.network)?);
    GroupOptions::default()
        .timeout(Duration::from_secs(20))
        .topology(topology.clone())
        .open_tiers(bootstrap, local, network)
}

fn value(round: usize, rank: usize, index: usize) -> i32 {
    (round * 1_000_003 + rank * 10_007 + index) as i32
}

fn gather(topology: &Topology, algorithm: Algorithm, parts: u32, in_place: bool, waits: Waits) {
    let context = format!("{algorithm} on {}, {parts} parts, {waits:?}", topology.notation());
    in_process::run(topology.ranks(), |bootstrap| {
        let rank = bootstrap.rank().index();
        let mut group = open(bootstrap, topology, waits)?;
        let builder = group.all_gather::<i32>(333).algorithm(algorithm).parts(parts);
        let builder = if in_place { builder.in_place() } else { builder };
        let mut gather = builder.prepare()?;
        for round in 0..6 {
            for (index, element) in gather.input_mut()?.iter_mut().enumerate() {
                *element = value(round, rank, index);
            }
            gather.run()?;
            for (index, seen) in gather.output()?.iter().enumerate() {
                let wanted = value(round, index / 333, index % 333);
                assert_eq!(*seen, wanted, "{context}, rank {rank}, round {round}, {index}");
            }
        }
        group.barrier()?;
        drop(gather);
        group.close()
    })
    .unwrap_or_else(|error| panic!("{context}: {error}"));
}

#[test]
fn every_algorithm_gathers_over_two_fabrics() {
    for nodes in ["1", "1x3", "2x1", "2x2", "3x1", "2+1", "3+1+2", "0,1,0,1", "0,1,1,0,2"] {
        let topology: Topology = nodes.parse().unwrap();
        for &algorithm in Algorithm::ALL {
            for parts in [1, 3] {
                gather(&topology, algorithm, parts, parts > 1, WAITS[0]);
            }
        }
    }
}

#[test]
fn lanes_that_queue_waits_stand_beside_lanes_that_do_not() {
    for nodes in ["2x2", "3+1+2"] {
        let topology: Topology = nodes.parse().unwrap();
        for &algorithm in Algorithm::ALL {
            for waits in WAITS {
                gather(&topology, algorithm, 2, false, waits);
            }
        }
    }
}
