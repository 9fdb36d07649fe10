//! Runs every algorithm, with ranks on one node and on several; the host waits for each start.

use peerlane_collectives::group::{Group, GroupOptions, Operation};
use peerlane_collectives::plan::Algorithm;
use peerlane_collectives::schedule::{self, Shape};
use peerlane_collectives::topology::Topology;
use peerlane_tests::Outcome;

use super::Case;
use crate::support::data::unexpected;
use crate::support::test_rank::{TIMEOUT, TestRank, gather_once, open_group_with};

/// Around the lengths at which copies take other ways, in place and not.
const SHAPES: [(usize, bool); 2] = [(4097, true), (70_001, false)];
const STARTS: usize = 2;

pub(crate) fn cases(ranks: usize) -> Vec<Case> {
    let mut cases = vec![Case::new("one node", |test_rank| {
        let (me, mut round) = ((test_rank.me, test_rank.ranks), 1000);
        let TestRank { gpu, stream, group, .. } = test_rank;
        gathers(group, &mut |gather| {
            round += 1;
            gather_once(gpu, stream, gather, me, round)
        })
    })];
    if ranks > 1 {
        cases.push(Case::new("several nodes", several_nodes));
    }
    cases
}

/// Nodes of two ranks, and the last one of what is left.
fn several_nodes(test_rank: &mut TestRank) -> Outcome {
    let nodes: Vec<u32> = (0..test_rank.ranks as u32).map(|rank| rank / 2).collect();
    // Two ranks are two nodes.
    let nodes = if test_rank.ranks == 2 { vec![0, 1] } else { nodes };
    let topology = Topology::of_nodes(&nodes).map_err(unexpected)?;
    let options = GroupOptions::default().timeout(TIMEOUT).topology(topology);
    let (me, hub) = ((test_rank.me, test_rank.ranks), test_rank.hubs.remove(0));
    let mut group = open_group_with(&test_rank.gpu, &hub, me, options)?;
    let (mut round, gpu, stream) = (2000, &test_rank.gpu, &test_rank.stream);
    gathers(&mut group, &mut |gather| {
        round += 1;
        gather_once(gpu, stream, gather, me, round)
    })?;
    group.close().map_err(unexpected)
}

type Once<'a> = &'a mut dyn FnMut(&mut Operation<u8>) -> Outcome;

fn gathers(group: &mut Group, once: Once<'_>) -> Outcome {
    let shape = Shape { tiers: group.topology().nodes() > 1, ..Shape::default() };
    let fitting: Vec<Algorithm> = schedule::fitting(group.topology(), shape).collect();
    for algorithm in fitting {
        for (bytes, in_place) in SHAPES {
            let builder = group.all_gather::<u8>(bytes).algorithm(algorithm).chunks(2);
            let builder = if in_place { builder.in_place() } else { builder };
            let mut gather = builder.prepare().map_err(unexpected)?;
            let gathered = (0..STARTS).try_for_each(|_| once(&mut gather));
            gathered.map_err(|failure| failure.within(format!("{algorithm}, {bytes} bytes")))?;
        }
    }
    Ok(())
}
