//! Tests proofs for many ranks: fewer plans give the same verdict, and the coverage states which.

use insta::assert_snapshot;
use peerlane_hal::Rank;
use peerlane_planning::collective::Collective;
use peerlane_planning::plan::{Algorithm, FlagOrder};
use peerlane_planning::schedule::{self, Shape, algorithms};
use peerlane_planning::topology::Topology;
use peerlane_planning::verify::{Budget, Coverage, FaultClass, prove, verify};

/// A budget in which no set of plans is followed as a whole.
const THRIFTY: Budget =
    Budget { followed_steps: 0, asymmetric_steps: 0, compared_steps: usize::MAX };

fn shapes() -> impl Iterator<Item = Shape> {
    let shapes = FlagOrder::ALL.iter().flat_map(|&flags| {
        [(1, false), (2, false), (1, true)].map(|(outputs, in_place)| Shape {
            outputs,
            in_place,
            flags,
            ..Shape::default()
        })
    });
    shapes.flat_map(|shape| [false, true].map(|tiers| Shape { tiers, chunks: 2, ..shape }))
}

fn even(nodes: u32, ranks: u32) -> Topology {
    let of_rank: Vec<u32> = (0..nodes * ranks).map(|rank| rank / ranks).collect();
    Topology::of_nodes(&of_rank).unwrap()
}

/// Returns the algorithms of all-gathers that can be used on even nodes, and whose plans are
/// rotations of each other there.
fn symmetric(topology: &Topology, shape: Shape) -> impl Iterator<Item = Algorithm> {
    schedule::fitting(topology, shape).filter(|one| *one != Algorithm::RecursiveDoubling)
}

#[test]
fn an_unlimited_proof_is_that_of_all_plans() {
    for topology in [even(1, 5), even(2, 3), Topology::of_nodes(&[0, 1, 1, 0, 2]).unwrap()] {
        for shape in shapes() {
            for algorithm in schedule::fitting(&topology, shape) {
                let plans = schedule::plans(algorithm, &topology, shape).unwrap();
                let proof = prove(algorithm, &topology, shape, Budget::UNLIMITED);
                assert_eq!(proof, verify(&plans), "{algorithm}, {topology}, {shape:?}");
            }
        }
    }
}

#[test]
fn ranks_represent_others_if_the_topology_is_even() {
    let interleaved = Topology::of_nodes(&[0, 1, 2, 0, 1, 2]).unwrap();
    for topology in [even(1, 7), even(2, 4), even(3, 2), even(5, 1), interleaved] {
        for shape in shapes() {
            for algorithm in symmetric(&topology, shape) {
                let context = format!("{algorithm}, {topology}, {shape:?}");
                let proof = prove(algorithm, &topology, shape, THRIFTY).unwrap();
                let whole = prove(algorithm, &topology, shape, Budget::UNLIMITED).unwrap();
                assert_eq!((proof.steps, proof.flags), (whole.steps, whole.flags), "{context}");
                let Coverage::BySymmetry { followed, compared } = &proof.coverage else {
                    panic!("{context}: {proof}")
                };
                assert!(followed.len() <= topology.members(0).len(), "{context}: {proof}");
                assert_eq!(*compared, topology.ranks(), "{context}");
            }
        }
    }
}

#[test]
fn plans_of_uneven_nodes_are_summed_up_and_some_are_followed() {
    let nodes: Vec<u32> = (0..12).flat_map(|node| vec![node; 1 + node as usize % 4]).collect();
    let topology = Topology::of_nodes(&nodes).unwrap();
    let budget = Budget { followed_steps: 1500, ..THRIFTY };
    let shape = Shape { tiers: true, ..Shape::default() };
    for algorithm in schedule::fitting(&topology, shape) {
        let proof = prove(algorithm, &topology, shape, budget).unwrap();
        let whole = prove(algorithm, &topology, shape, Budget::UNLIMITED).unwrap();
        assert_eq!((proof.steps, proof.flags), (whole.steps, whole.flags), "{algorithm}");
        assert!(
            matches!(proof.coverage, Coverage::Sampled { summed: 30, ranks: 4.., nodes: 2.. }),
            "{proof}"
        );
    }
}

#[test]
fn a_sample_is_the_same_every_time() {
    let budget = Budget { compared_steps: 5_000, ..THRIFTY };
    let topology = even(16, 4);
    let shape = Shape { tiers: true, ..Shape::default() };
    let proof = || prove(Algorithm::Hierarchical, &topology, shape, budget).unwrap();
    assert!(
        matches!(proof().coverage, Coverage::BySymmetry { compared: 2..64, .. }),
        "{}",
        proof()
    );
    assert_eq!(proof(), proof());
}

#[test]
fn many_ranks_are_proven() {
    for topology in [Topology::flat(512).unwrap(), even(64, 8)] {
        for algorithm in symmetric(&topology, Shape::default()) {
            let proof = prove(algorithm, &topology, Shape::default(), Budget::default()).unwrap();
            assert!(
                matches!(proof.coverage, Coverage::BySymmetry { compared: 512, .. }),
                "{proof}"
            );
        }
    }
}

/// No rotation maps the partners of one rank to those of another, so plans are summed up, and those
/// for a power of two of ranks are followed.
#[test]
fn recursive_doubling_of_many_ranks_is_proven() {
    for (topology, tiers) in [(Topology::flat(256).unwrap(), false), (even(64, 4), true)] {
        let shape = Shape { tiers, ..Shape::default() };
        let budget = Budget { followed_steps: 5000, ..THRIFTY };
        let proof = prove(Algorithm::RecursiveDoubling, &topology, shape, budget).unwrap();
        let Coverage::Sampled { summed: 256, ranks, .. } = proof.coverage else {
            panic!("{proof}")
        };
        assert!(ranks >= 16 && ranks.is_power_of_two(), "{proof}");
    }
}

#[test]
fn collectives_of_many_ranks_with_a_root_are_proven() {
    let rooted = || Collective::ALL.iter().filter(|one| one.root().is_some());
    let roots = [0, 14].into_iter().flat_map(|root| rooted().map(move |one| (one, root)));
    for collective in roots.map(|(one, root)| one.with_root(Rank(root))) {
        let suits = |shape: &Shape| collective.runs_in_place() || !shape.in_place;
        for shape in shapes().filter(suits).map(|shape| Shape { collective, ..shape }) {
            let topology = even(5, 3);
            for algorithm in schedule::fitting(&topology, shape) {
                let whole = prove(algorithm, &topology, shape, Budget::UNLIMITED).unwrap();
                let counted = prove(algorithm, &topology, shape, THRIFTY).unwrap();
                assert_eq!((counted.steps, counted.flags), (whole.steps, whole.flags));
                assert!(
                    matches!(counted.coverage, Coverage::Sampled { summed: 15, .. }),
                    "{counted}"
                );
            }
        }
    }
    let many = Topology::flat(5000).unwrap();
    let shape = Shape { collective: Collective::Broadcast { root: Rank(7) }, ..Shape::default() };
    let budget = Budget { followed_steps: 1000, ..Budget::default() };
    let proof = prove(Algorithm::Direct, &many, shape, budget).unwrap();
    assert!(matches!(proof.coverage, Coverage::Sampled { summed: 5000, .. }), "{proof}");
}

#[test]
fn all_to_alls_are_symmetric() {
    let shape = Shape { collective: Collective::AllToAll, ..Shape::default() };
    for algorithm in algorithms(shape.collective) {
        let topology = Topology::flat(512).unwrap();
        let proof = prove(algorithm, &topology, shape, Budget::default()).unwrap();
        assert!(matches!(proof.coverage, Coverage::BySymmetry { compared: 512, .. }), "{proof}");
    }
}

#[test]
fn the_text_of_a_proof_states_its_coverage() {
    let text = |topology: &Topology, budget| {
        let shape = Shape { tiers: true, ..Shape::default() };
        let proof = prove(Algorithm::Ring, topology, shape, budget).unwrap().to_string();
        proof.split(": every byte").next().unwrap().to_owned()
    };
    let few = Budget { compared_steps: 300, ..THRIFTY };
    let uneven = Topology::of_nodes(&[0, 0, 0, 1, 2, 2]).unwrap();
    assert_snapshot!(text(&even(1, 4), THRIFTY), @"verified (ranks: 4, chunks: 1, starts: 2, steps: 48, flags: 16; followed for 1 rank that represents the others, all plans compared)");
    assert_snapshot!(text(&even(3, 2), THRIFTY), @"verified (ranks: 6, chunks: 1, starts: 2, steps: 156, flags: 60; followed for 2 ranks that represent the others, all plans compared)");
    assert_snapshot!(text(&even(8, 3), few), @"verified (ranks: 24, chunks: 1, starts: 2, steps: 2144, flags: 784; followed for 3 ranks that represent the others, 3 of 24 plans compared)");
    assert_snapshot!(text(&uneven, THRIFTY), @"verified (ranks: 6, chunks: 1, starts: 2, steps: 144, flags: 54; all plans summed up, followed only for 2 ranks on 2 nodes)");
}

#[test]
fn impossible_shapes_are_not_proven() {
    let shape = Shape { chunks: 0, ..Shape::default() };
    let fault = prove(Algorithm::Direct, &even(1, 2), shape, Budget::default()).unwrap_err();
    assert_eq!(fault.class(), FaultClass::Unknown);
    assert_snapshot!(fault, @"cannot create the plans: chunks is 0, expected 1 to 65536");
}

#[test]
fn reductions_are_proven_for_any_number_of_ranks() {
    let reductions = Collective::ALL.iter().filter(|one| one.is_reduction());
    let goals = reductions.flat_map(|&goal| {
        let roots: &[u32] = if goal.root().is_some() { &[0, 1] } else { &[0] };
        roots.iter().map(move |&root| goal.with_root(Rank(root)))
    });
    for collective in goals {
        for nodes in [vec![2], vec![9], vec![2, 3], vec![64], vec![16, 16, 16]] {
            let of_rank = nodes.iter().zip(0..).flat_map(|(&ranks, node)| vec![node; ranks]);
            let topology = Topology::of_nodes(&of_rank.collect::<Vec<u32>>()).unwrap();
            for (outputs, inboxes, flags) in [
                (1, 1, FlagOrder::Prompt),
                (2, 1, FlagOrder::Batched),
                (1, 2, FlagOrder::Prompt),
                (1, 2, FlagOrder::Batched),
            ] {
                let tiers = nodes.len() > 1;
                let shape = Shape {
                    collective,
                    chunks: 2,
                    outputs,
                    inboxes,
                    flags,
                    tiers,
                    ..Shape::default()
                };
                let budget = Budget { followed_steps: 10_000, ..Budget::default() };
                let proven = prove(Algorithm::Direct, &topology, shape, budget);
                let proof =
                    proven.unwrap_or_else(|fault| panic!("{collective}, {nodes:?}: {fault}"));
                let ranks = topology.ranks();
                let sums = match collective {
                    Collective::Reduce { .. } => ranks,
                    Collective::Scan => ranks * (ranks + 1) / 2,
                    Collective::Exscan => ranks * (ranks - 1) / 2,
                    _ => ranks * ranks,
                };
                assert_eq!(proof.additions, 2 * sums, "{collective}, {nodes:?}");
                let end = "; every contribution is added exactly once, after it has arrived and in \
                           the order that the collective states";
                assert!(proof.to_string().ends_with(end), "{proof}");
            }
        }
    }
}
