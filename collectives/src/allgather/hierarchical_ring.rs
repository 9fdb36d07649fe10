//! Hierarchical with rings for rails: shards are passed on from node to node.
//!
//! Home is that of the [hierarchical] plan. Lane 1 puts the own shard to the next
//! node only, then every part that arrives from the node before, until it has been everywhere. So a
//! rank has few peers in other nodes, however many nodes there are. Two lanes need what arrives, home
//! to spread it and lane 1 to pass it on, and each is told by a flag of its own.

use peerlane_hal::Rank;

use super::Task;
use super::hierarchical;
use super::rails::{Rails, entry};
use super::steps::{BETWEEN, arrived, put, ready, signal, wait};
use crate::plan::{Cell, FlagOrder, Lane, LaneId, Source, Step};

/// The lanes of one rank.
pub(super) fn lanes(task: &Task<'_>) -> Vec<Lane> {
    hierarchical::lanes_with(task, between)
}

fn between(task: &Task<'_>, rails: &Rails<'_>) -> Vec<Step> {
    let &Task { rank, shape, .. } = task;
    let mut awaited = targets(rails);
    let mut steps = Vec::new();
    if task.says_ready() {
        let writers = writers(rails);
        steps.extend(writers.into_iter().map(|writer| signal(writer, ready(rank, BETWEEN))));
    } else {
        awaited.clear();
    }
    if shape.flags == FlagOrder::Batched {
        steps.extend(awaited.drain(..).map(|target| wait(ready(target, BETWEEN))));
    }
    for hop in 0..last_hop(rails) + 1 {
        let from = if hop == 0 { Source::Input } else { Source::Output };
        for part in 0..shape.parts {
            for (shard, place) in passing(rails, hop) {
                let cell = Cell { shard, part };
                let target = entry(rails.ahead(1), place);
                if hop > 0 {
                    steps.push(wait(arrived(cell, BETWEEN)));
                }
                if let Some(at) = awaited.iter().position(|&other| other == target) {
                    awaited.remove(at);
                    steps.push(wait(ready(target, BETWEEN)));
                }
                steps.push(put(target, cell, from));
                if hop < last_hop(rails) {
                    steps.push(signal(target, arrived(cell, BETWEEN)));
                }
                steps.push(signal(target, arrived(cell, LaneId::HOME)));
            }
        }
    }
    steps
}

/// The last hop of a shard is into the node behind its own.
fn last_hop(rails: &Rails<'_>) -> usize {
    rails.nodes() - 2
}

/// The shards that this rank puts to the next node after `hop` hops, with the local index of their
/// owners.
fn passing<'a>(rails: &Rails<'a>, hop: usize) -> impl Iterator<Item = (Rank, usize)> + use<'a> {
    let step = if hop == 0 { usize::MAX } else { rails.mates().len() };
    rails.behind(hop).iter().copied().zip(0..).skip(rails.at()).step_by(step)
}

/// The ranks of the next node that this rank puts to, in order of their place there.
fn targets(rails: &Rails<'_>) -> Vec<Rank> {
    let next = rails.ahead(1);
    let mut is_target = vec![false; next.len()];
    for hop in 0..last_hop(rails) + 1 {
        passing(rails, hop).for_each(|(_, place)| is_target[place % next.len()] = true);
    }
    picked(next, &is_target)
}

/// The ranks of the node before that put to this rank, in order of their place there.
fn writers(rails: &Rails<'_>) -> Vec<Rank> {
    let previous = rails.behind(1);
    let mut is_writer = vec![false; previous.len()];
    for by in 1..rails.nodes() {
        let places = (rails.at()..rails.behind(by).len()).step_by(rails.mates().len());
        places.for_each(|place| is_writer[place % previous.len()] = true);
    }
    picked(previous, &is_writer)
}

fn picked(members: &[Rank], is_picked: &[bool]) -> Vec<Rank> {
    members.iter().zip(is_picked).filter(|&(_, &picked)| picked).map(|(&rank, _)| rank).collect()
}
