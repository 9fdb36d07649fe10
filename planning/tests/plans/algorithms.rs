//! Verifies the plans of every algorithm on many topologies and shapes. Random topologies are in `property.rs`.

use peerlane_hal::Rank;
use peerlane_planning::collective::Collective;
use peerlane_planning::plan::{FlagOrder, Plan, Step};
use peerlane_planning::schedule::{self, Shape};
use peerlane_planning::topology::Topology;
use peerlane_planning::verify::verify;

/// Returns all shapes of a collective with these numbers of chunks.
fn shapes(collective: Collective, chunks: &[u32]) -> Vec<Shape> {
    let mut shapes = Vec::new();
    for &chunks in chunks {
        for (in_place, outputs) in [(false, 1), (false, 2), (true, 1)] {
            for &flags in FlagOrder::ALL {
                for tiers in [false, true] {
                    shapes.push(Shape {
                        chunks,
                        in_place,
                        outputs,
                        flags,
                        tiers,
                        collective,
                        ..Shape::default()
                    });
                }
            }
        }
    }
    shapes
}

fn verify_all(topology: &Topology, collective: Collective, chunks: &[u32]) {
    for shape in shapes(collective, chunks) {
        for algorithm in schedule::fitting(topology, shape) {
            let plans = schedule::plans(algorithm, topology, shape).unwrap();
            verify(&plans).unwrap_or_else(|fault| {
                let nodes = topology.node_of_rank();
                panic!("{algorithm}, nodes {nodes:?}, {shape:?}: {fault}\n{}", plans[0])
            });
            plans.iter().for_each(|plan| check_arrivals(plan, &plans));
        }
    }
}

/// Checks that what a plan calls an arrival is one: the step copies the chunk itself, or waits for a signal behind the
/// put that has brought it.
fn check_arrivals(plan: &Plan, plans: &[Plan]) {
    let arrives_with = plan.arrivals();
    let steps = plan.lanes.iter().flat_map(|lane| &lane.steps);
    for (step, cell) in steps.filter_map(|step| Some((step, arrives_with(step)?))) {
        let Step::Wait { flag } = *step else { continue };
        if plan.in_place && cell.block == plan.rank {
            continue;
        }
        let signals = |step: &Step| matches!(*step, Step::Signal { peer, flag: of } if (peer, of) == (plan.rank, flag));
        let brings = |step: &Step| matches!(*step, Step::Put { peer, cell: of, .. } if (peer, of) == (plan.rank, cell));

        let is_behind_a_put = plans.iter().flat_map(|plan| &plan.lanes).any(|lane| {
            let signal = lane.steps.iter().position(signals);
            signal.is_some_and(|signal| lane.steps[..signal].iter().any(brings))
        });
        // Another lane of this rank can pass on that it has waited for the same chunk.
        let is_relayed = plan.lanes.iter().any(|lane| {
            let signal = lane.steps.iter().position(signals);
            let tells = |step: &Step| arrives_with(step) == Some(cell);
            signal.is_some_and(|signal| lane.steps[..signal].iter().any(tells))
        });
        assert!(is_behind_a_put || is_relayed, "{cell} has not arrived with {step:?} in\n{plan}");
    }
}

#[test]
fn plans_of_one_node_are_correct() {
    for ranks in (1..=9).chain([12, 16]) {
        verify_all(&Topology::flat(ranks).unwrap(), Collective::AllGather, &[1, 3]);
    }
}

#[test]
fn broadcasts_of_one_node_are_correct() {
    for ranks in 1..=9 {
        for root in [Rank(0), Rank::at(ranks / 2), Rank::at(ranks - 1)] {
            let broadcast = Collective::Broadcast { root };
            verify_all(&Topology::flat(ranks).unwrap(), broadcast, &[1, 3]);
        }
    }
}

#[test]
fn plans_of_several_nodes_are_correct() {
    for nodes in [
        &[0, 1][..],
        &[0, 1, 2],
        &[0, 1, 2, 3, 4],
        &[0, 0, 1],
        &[0, 1, 1, 1],
        &[0, 0, 1, 1],
        &[0, 1, 0, 1],
        &[0, 0, 0, 1, 1, 2],
        &[2, 0, 1, 1, 1, 0, 0],
        &[0, 0, 1, 1, 2, 2],
        &[0, 0, 0, 0, 1, 1, 1, 1],
        &[0, 1, 2, 0, 1, 2, 0, 1, 0],
        &[0, 0, 0, 0, 0, 1, 2, 2, 3, 3, 3, 4],
    ] {
        verify_all(&Topology::of_nodes(nodes).unwrap(), Collective::AllGather, &[1, 2]);
    }
}
