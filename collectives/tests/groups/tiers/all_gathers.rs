//! Checks results of every algorithm, topology, shape and kind of engine.

use peerlane_collectives::element::Element;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{BlockLens, Destination, Group, Operation, OutputPart};
use peerlane_collectives::plan::Algorithm;
use peerlane_collectives::schedule::{self, Shape};
use peerlane_collectives::topology::Topology;
use peerlane_hal::Rank;

use super::{QUEUED, WAITS, in_tiers};

const LEN: usize = 333;

fn value(round: usize, rank: usize, index: usize) -> i32 {
    (round * 1_000_003 + rank * 10_007 + index) as i32
}

/// Runs rounds with new data each, and checks the result.
fn rounds<T: Element + PartialEq>(
    gather: &mut Operation<T>,
    (rank, ranks): (usize, usize),
    rounds: usize,
    value: impl Fn(usize, usize, usize) -> T,
) -> Result<(), Error> {
    let report = gather.report().to_string();
    for round in 0..rounds {
        for (index, element) in gather.input_mut()?.iter_mut().enumerate() {
            *element = value(round, rank, index);
        }
        gather.run()?;
        for from in 0..ranks {
            for (index, seen) in gather.output_of(Rank::at(from))?.iter().enumerate() {
                assert_eq!(*seen, value(round, from, index), "{from}.{index}, {report}");
            }
        }
    }
    Ok(())
}

fn gather(
    group: &mut Group,
    algorithm: Algorithm,
    chunks: u32,
    in_place: bool,
) -> Result<(), Error> {
    let ranks = (group.rank().index(), group.ranks());
    let builder = group.all_gather::<i32>(LEN).algorithm(algorithm).chunks(chunks);
    let builder = if in_place { builder.in_place() } else { builder };
    rounds(&mut builder.prepare()?, ranks, 6, value)
}

#[test]
fn every_algorithm_gathers_over_two_fabrics() {
    for nodes in ["1", "1x3", "2x1", "2x2", "3x1", "2+1", "3+1+2", "0,1,0,1", "0,1,1,0,2"] {
        let topology: Topology = nodes.parse().unwrap();
        in_tiers(&topology, QUEUED, |group| {
            let shape = Shape { tiers: topology.nodes() > 1, ..Shape::default() };
            for algorithm in schedule::fitting(&topology, shape) {
                for chunks in 1..=4 {
                    gather(group, algorithm, chunks, chunks % 2 == 0)?;
                }
            }
            Ok(())
        });
    }
}

#[test]
fn lanes_that_queue_waits_run_with_lanes_that_do_not() {
    for nodes in ["2x2", "3+1+2"] {
        let topology: Topology = nodes.parse().unwrap();
        for waits in WAITS {
            in_tiers(&topology, waits, |group| {
                let shape = Shape { tiers: true, ..Shape::default() };
                schedule::fitting(&topology, shape)
                    .try_for_each(|algorithm| gather(group, algorithm, 2, false))
            });
        }
    }
}

#[test]
fn every_algorithm_gathers_over_one_fabric_with_a_topology_of_the_caller() {
    use peerlane_collectives::bootstrap::in_process;
    use peerlane_collectives::group::GroupOptions;

    for nodes in ["2x2", "3+1+2"] {
        let topology: Topology = nodes.parse().unwrap();
        let ended = in_process::run(topology.ranks(), |bootstrap| {
            let fabric = super::fabric(&bootstrap, true)?;
            let options = GroupOptions::default().topology(topology.clone());
            let mut group = options.open(bootstrap, fabric)?;
            for algorithm in schedule::fitting(&topology, Shape::default()) {
                gather(&mut group, algorithm, 3, false)?;
            }
            group.close()
        });
        ended.unwrap_or_else(|error| panic!("{nodes}: {error}"));
    }
}

/// The blocks are much larger than what an engine copies in one poll.
#[test]
fn large_blocks_are_gathered_over_both_fabrics() {
    let topology: Topology = "2+1".parse().unwrap();
    for algorithm in [Algorithm::Hierarchical, Algorithm::Pull] {
        in_tiers(&topology, QUEUED, |group| {
            let ranks = (group.rank().index(), group.ranks());
            let builder = group.all_gather::<u8>(3 << 20).algorithm(algorithm);
            let mut gather = builder.chunks(4).prepare()?;
            rounds(&mut gather, ranks, 1, |_, rank, index| (rank * 91 + index / 1000) as u8)
        });
    }
}

#[test]
fn every_shape_is_gathered_over_the_network() {
    let topology: Topology = "2+1+2".parse().unwrap();
    let shape = Shape { tiers: true, ..Shape::default() };
    for algorithm in schedule::fitting(&topology, shape) {
        in_tiers(&topology, WAITS[1], |group| {
            let (rank, ranks) = (group.rank().index(), group.ranks());
            let lens: Vec<usize> = (0..ranks).map(|rank| rank * 65 % 131).collect();
            let builder = group.all_gather::<i32>(&lens).algorithm(algorithm).chunks(2);
            rounds(&mut builder.prepare()?, (rank, ranks), 3, value)?;

            let backwards: Vec<Destination> = (0..ranks)
                .map(|block| Destination { buffer: 0, offset: (ranks - 1 - block) * 150 + rank })
                .collect();
            let builder =
                group.all_gather::<i32>(&lens).destinations(&backwards).algorithm(algorithm);
            rounds(&mut builder.prepare()?, (rank, ranks), 3, value)?;

            let builder = group.all_gather::<i32>(BlockLens::tensors([3, 70])).algorithm(algorithm);
            let mut gather = builder.chunks(2).prepare()?;
            for tensor in 0..2 {
                gather.input_piece_mut(tensor)?.fill((rank * 10 + tensor) as i32);
            }
            gather.run()?;
            for (tensor, len) in [3, 70].into_iter().enumerate() {
                for (index, seen) in
                    gather.output_of(OutputPart::Tensor(tensor))?.iter().enumerate()
                {
                    assert_eq!(*seen, (index / len * 10 + tensor) as i32, "{algorithm}");
                }
            }

            let window = group.window::<i32>(500)?;
            for range in [0..ranks * 20, 7..7 + ranks * 90] {
                let len = range.len() / ranks;
                let own = range.start + rank * len..range.start + (rank + 1) * len;
                let builder =
                    group.all_gather(len).output_into(&window, range.start).algorithm(algorithm);
                let mut gather = builder.in_place().prepare()?;
                window.slice_mut(own)?.fill(rank as i32 + 1);
                gather.run()?;
                for (index, seen) in window.slice(range)?.iter().enumerate() {
                    assert_eq!(*seen, (index / len) as i32 + 1, "{algorithm}");
                }
            }
            Ok(())
        });
    }
}
