//! Draws plans as SVG: ranks as columns, and copies as arrows from the rank that is read to the rank that is written.
//!
//! Time runs downwards in rounds. In each round, a lane makes the next copy whose flags were signalled in earlier rounds, so
//! the drawing shows the order of the copies and not their duration.

use std::collections::HashSet;
use std::fmt::Write;

use peerlane::Rank;
use peerlane_planning::plan::{Cell, Flag, Plan, Step};

const COLUMN: usize = 130;
const ROUND: usize = 70;
const LEFT: usize = 60;
const TOP: usize = 50;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    Copy { from: Rank, to: Rank, cell: Cell },
    Addition { rank: Rank, cell: Cell },
}

/// Returns the plans of all ranks as an SVG document.
pub(super) fn svg(plans: &[Plan]) -> String {
    let rounds = rounds(plans);
    let x = |rank: Rank| LEFT + rank.index() * COLUMN;
    let (width, bottom) = (2 * LEFT + (plans.len() - 1) * COLUMN, TOP + rounds.len() * ROUND);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {}\" width=\"{width}\" \
         font-family=\"sans-serif\" font-size=\"13\" text-anchor=\"middle\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <defs><marker id=\"head\" viewBox=\"0 0 8 8\" refX=\"8\" refY=\"4\" markerWidth=\"8\" markerHeight=\"8\" \
         orient=\"auto\"><path d=\"M0 0 8 4 0 8z\" fill=\"context-stroke\"/></marker></defs>\n",
        bottom + 20
    );
    let mut add = |line: std::fmt::Arguments<'_>| {
        svg.write_fmt(line).expect("a string can be written");
        svg.push('\n');
    };
    for rank in plans.iter().map(|plan| plan.rank) {
        let x = x(rank);
        add(format_args!(
            "<text x=\"{x}\" y=\"{}\" font-weight=\"bold\">rank {rank}</text>",
            TOP - 20
        ));
        add(format_args!(
            "<line x1=\"{x}\" y1=\"{}\" x2=\"{x}\" y2=\"{bottom}\" stroke=\"#bbb\" stroke-width=\"2\"/>",
            TOP - 10
        ));
    }
    for (round, marks) in rounds.iter().enumerate() {
        let y = TOP + round * ROUND;
        for mark in marks {
            match *mark {
                Mark::Copy { from, to, cell } if from == to => add(format_args!(
                    "<path d=\"M{0} {y}c34 4 34 40 0 44\" fill=\"none\" stroke=\"{1}\" stroke-width=\"2\" \
                     marker-end=\"url(#head)\"/><text x=\"{2}\" y=\"{3}\" fill=\"{1}\">{cell}</text>",
                    x(from),
                    color(cell.block),
                    x(from) + 40,
                    y + 27
                )),
                Mark::Copy { from, to, cell } => {
                    let (start, end) = (x(from), x(to));
                    // Labels are near the start, where fewer arrows cross.
                    let label = if end > start { start + 26 } else { start - 26 };
                    let slope = 44.0 * 26.0 / start.abs_diff(end) as f64;
                    add(format_args!(
                        "<line x1=\"{start}\" y1=\"{y}\" x2=\"{end}\" y2=\"{}\" stroke=\"{2}\" stroke-width=\"2\" \
                         marker-end=\"url(#head)\"/><text x=\"{label}\" y=\"{1:.0}\" fill=\"{2}\">{cell}</text>",
                        y + 44,
                        y as f64 + slope - 5.0,
                        color(cell.block)
                    ));
                }
                Mark::Addition { rank, cell } => add(format_args!(
                    "<circle cx=\"{0}\" cy=\"{1}\" r=\"11\" fill=\"white\" stroke=\"{2}\" stroke-width=\"2\"/>\
                     <text x=\"{0}\" y=\"{3}\" fill=\"{2}\">+</text>",
                    x(rank),
                    y + 22,
                    color(cell.block),
                    y + 27
                )),
            }
        }
    }
    svg + "</svg>\n"
}

fn color(block: Rank) -> &'static str {
    const COLORS: [&str; 8] =
        ["#0b62a4", "#c0392b", "#1e8449", "#7d3c98", "#b9770e", "#117a65", "#884ea0", "#34495e"];
    COLORS[block.index() % COLORS.len()]
}

/// Returns the copies and additions of each round.
fn rounds(plans: &[Plan]) -> Vec<Vec<Mark>> {
    let mut lanes: Vec<(&Plan, Vec<Step>)> = Vec::new();
    for plan in plans {
        for lane in plan.lane_ids() {
            let mut steps = plan.closed_lane(lane, |_| true);
            steps.reverse();
            lanes.push((plan, steps));
        }
    }
    let mut signalled: HashSet<(Rank, Flag)> = HashSet::new();
    let mut rounds = Vec::new();
    // A verified plan reaches its end; the last round makes no step.
    loop {
        let (mut marks, mut moved) = (Vec::new(), false);
        let mut signals = Vec::new();
        for (plan, steps) in &mut lanes {
            let mut is_busy = false;
            while let Some(&step) = steps.last() {
                match step {
                    Step::Wait { flag } if flag.lag() == 0 => {
                        if !signalled.contains(&(plan.rank, flag)) {
                            break;
                        }
                    }
                    Step::Wait { .. } => {}
                    Step::Signal { peer, flag } => signals.push((peer, flag)),
                    // All contributions are added at once.
                    Step::Reduce { cell, .. } => {
                        let mark = Mark::Addition { rank: plan.rank, cell };
                        if !marks.contains(&mark) {
                            if is_busy {
                                break;
                            }
                            marks.push(mark);
                            is_busy = true;
                        }
                    }
                    Step::Put { .. } | Step::Get { .. } if is_busy => break,
                    Step::Put { peer, cell, .. } => {
                        marks.push(Mark::Copy { from: plan.rank, to: peer, cell });
                        is_busy = true;
                    }
                    Step::Get { peer, cell, .. } => {
                        marks.push(Mark::Copy { from: peer, to: plan.rank, cell });
                        is_busy = true;
                    }
                }
                steps.pop();
                moved = true;
            }
        }
        signalled.extend(signals);
        if !marks.is_empty() {
            rounds.push(marks);
        }
        if !moved {
            return rounds;
        }
    }
}

#[cfg(test)]
mod tests {
    use peerlane::Algorithm;
    use peerlane::collective::Collective;
    use peerlane::topology::Topology;
    use peerlane_planning::schedule::{self, Shape};

    use super::*;

    fn drawn(algorithm: Algorithm, collective: Collective, nodes: &[u32]) -> Vec<Vec<Mark>> {
        let topology = Topology::of_nodes(nodes).unwrap();
        let in_place = collective != Collective::ReduceScatter;
        let shape = Shape { collective, in_place, ..Shape::default() };
        rounds(&schedule::plans(algorithm, &topology, shape).unwrap())
    }

    #[test]
    fn every_copy_is_in_the_round_in_which_its_data_is_there() {
        let direct = drawn(Algorithm::Direct, Collective::AllGather, &[0; 4]);
        assert_eq!(direct.iter().map(Vec::len).collect::<Vec<_>>(), [4, 4, 4]);
        let ring = drawn(Algorithm::Ring, Collective::AllGather, &[0; 4]);
        let passed = |rank: u32, block: u32| Mark::Copy {
            from: Rank(rank),
            to: Rank((rank + 1) % 4),
            cell: Cell { block: Rank(block), chunk: 0 },
        };
        for (round, marks) in ring.iter().enumerate() {
            for rank in 0..4 {
                assert!(marks.contains(&passed(rank, (rank + 4 - round as u32) % 4)));
            }
        }
        let sum = drawn(Algorithm::Direct, Collective::AllReduce, &[0; 2]);
        let kinds = sum.iter().map(|marks| matches!(marks[0], Mark::Addition { .. }));
        assert_eq!(kinds.collect::<Vec<_>>(), [false, true, false]);
    }
}
