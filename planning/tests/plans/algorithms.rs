//! Verifies the plans of every algorithm on many topologies and shapes. Random topologies are in `property.rs`.

use peerlane_planning::plan::FlagOrder;
use peerlane_planning::schedule::{self, Shape};
use peerlane_planning::topology::Topology;
use peerlane_planning::verify::verify;

/// Returns all shapes with these numbers of chunks.
fn shapes(chunks: &[u32]) -> Vec<Shape> {
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
                        ..Shape::default()
                    });
                }
            }
        }
    }
    shapes
}

fn verify_all(topology: &Topology, chunks: &[u32]) {
    for shape in shapes(chunks) {
        for algorithm in schedule::fitting(topology, shape) {
            let plans = schedule::plans(algorithm, topology, shape).unwrap();
            verify(&plans).unwrap_or_else(|fault| {
                let nodes = topology.node_of_rank();
                panic!("{algorithm}, nodes {nodes:?}, {shape:?}: {fault}\n{}", plans[0])
            });
        }
    }
}

#[test]
fn plans_of_one_node_are_correct() {
    for ranks in (1..=9).chain([12, 16]) {
        verify_all(&Topology::flat(ranks).unwrap(), &[1, 3]);
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
        verify_all(&Topology::of_nodes(nodes).unwrap(), &[1, 2]);
    }
}
