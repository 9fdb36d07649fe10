//! Compares the algorithm that the formulas choose with the one that is fastest in the simulation.

use peerlane_planning::collective::Collective;
use peerlane_planning::cost::{self, Candidate, Links, Question};
use peerlane_planning::layout::Layout;
use peerlane_planning::plan::Algorithm;
use peerlane_planning::schedule::{self, Shape};
use peerlane_planning::simulate::{self, Options};
use peerlane_planning::topology::Topology;

/// By how much the chosen algorithm may be slower than the fastest one.
const SLOWER_MAX: f64 = 1.05;

fn simulated(
    (algorithm, chunks): (Algorithm, u32),
    topology: &Topology,
    shape: Shape,
    blocks: &[u64],
    links: &Links,
) -> f64 {
    let shape = Shape { chunks, ..shape };
    let layout = Layout::new(shape.collective, blocks, chunks).unwrap();
    let plan = |rank| schedule::plan(algorithm, topology, rank, shape);
    let simulation =
        simulate::simulate(topology, &layout, links, &Options::default(), plan).unwrap();
    simulation.seconds()
}

#[test]
fn the_choice_is_among_the_fastest() {
    let mut slower = Vec::new();
    for nodes in ["1x4", "1x8", "1x64", "8x8", "64x1"] {
        let topology: Topology = nodes.parse().unwrap();
        for power in [10, 14, 18, 20, 24, 26] {
            let blocks = vec![1 << power; topology.ranks()];
            let tiers = topology.nodes() > 1;
            let shape = Shape { collective: Collective::AllGather, tiers, ..Shape::default() };
            let links = Links::default();
            let choice = cost::choose(&Question {
                topology: &topology,
                block_bytes: &blocks,
                shape,
                links: &links,
                measured: true,
                algorithm: None,
                chunks: None,
                refused: &[],
            });
            let choice = choice.unwrap();

            let time = |candidate: &Candidate| {
                let Candidate { algorithm, chunks, .. } = *candidate;
                simulated((algorithm, chunks), &topology, shape, &blocks, &links)
            };
            let times: Vec<f64> = choice.candidates.iter().map(time).collect();
            let fastest = times.iter().copied().fold(f64::INFINITY, f64::min);
            let mut text = format!("{nodes}, {} bytes: ", 1 << power);
            for (candidate, seconds) in choice.candidates.iter().zip(&times) {
                text += &format!(
                    "{} x{} {:.1} ({:.1}), ",
                    candidate.algorithm,
                    candidate.chunks,
                    seconds * 1e6,
                    candidate.cost.seconds() * 1e6
                );
            }
            println!("{:.2} {text}", times[0] / fastest);
            if times[0] > fastest * SLOWER_MAX {
                slower.push(text);
            }
        }
    }
    assert!(slower.is_empty(), "{}", slower.join("\n"));
}
