//! Ring: every rank passes what arrives on to the next one, part by part.
//!
//! The ranks stand in a circle, node after node, so that the circle leaves each node once. A rank puts
//! its own shard to the next rank, then each part as soon as it has arrived. Every byte goes straight
//! to its place, so `ready` of the next rank is all that a rank must know. Two outputs in turn spare
//! even that: the shard of the next rank has come all the way round in the start before.
//!
//! The double ring has two lanes, one a direction. Each takes every shard half of the way round; where
//! the number of ranks is even, the rank on the far side gets even parts from one and odd parts from
//! the other. Both directions carry half, with half of the steps of one ring.
//!
//! Where a network reaches the other nodes, puts that leave the node are in a network lane. What has
//! arrived from the own node is heard by the local lane, which relays it to the network lane by a
//! signal to its own rank. What arrives from another node is heard by the lane that passes it on.
//!
//! With batched flags the `ready` signal and wait stand together; behind that, the signal of one part
//! and the wait for the next stand together anyway.

use std::ops::Range;

use peerlane_hal::Rank;

use super::Task;
use super::steps::{after, arrived, put, ready, signal, wait};
use crate::plan::{Cell, FlagOrder, Lane, LaneId, Source, Step, Tier};

/// The lanes of one rank, with all shards going one way.
pub(super) fn lanes(task: &Task<'_>) -> Vec<Lane> {
    let circle = circle(task);
    let last = circle.len() - 1;
    let all_round = Way {
        circle: &circle,
        local: LaneId::HOME,
        network: LaneId(1),
        reach: [last; 2],
        copied: 0..task.shape.parts,
    };
    let mut lanes = empty_lanes(task, 1);
    all_round.extend(task, &mut lanes);
    lanes
}

/// The lanes of one rank, with all shards going both ways.
pub(super) fn double_lanes(task: &Task<'_>) -> Vec<Lane> {
    let mut circle = circle(task);
    let last = circle.len() - 1;
    let (near, far) = (last / 2, last.div_ceil(2));
    let middle = task.shape.parts.div_ceil(2);
    let mut lanes = empty_lanes(task, 2);
    let forwards = Way {
        circle: &circle,
        local: LaneId::HOME,
        network: LaneId(2),
        reach: [far, near],
        copied: 0..middle,
    };
    forwards.extend(task, &mut lanes);
    circle[1..].reverse();
    let backwards = Way {
        circle: &circle,
        local: LaneId(1),
        network: LaneId(3),
        reach: [near, far],
        copied: middle..task.shape.parts,
    };
    backwards.extend(task, &mut lanes);
    lanes
}

fn empty_lanes(task: &Task<'_>, ways: usize) -> Vec<Lane> {
    let tiers = if task.has_network() { Tier::ALL } else { &[Tier::Local] };
    let lane = |&tier| vec![Lane { tier, steps: Vec::new() }; ways];
    tiers.iter().flat_map(lane).collect()
}

/// All ranks in the order of the circle, from this one.
fn circle(task: &Task<'_>) -> Vec<Rank> {
    let &Task { topology, rank, .. } = task;
    let node = topology.node(rank);
    let (mates, at) = (topology.members(node), topology.local_index(rank));
    let others = after(topology.nodes(), node as usize)
        .flat_map(|node| topology.members(Rank::at(node).0).iter().copied());
    mates[at..].iter().copied().chain(others).chain(mates[..at].iter().copied()).collect()
}

/// One direction of a ring.
struct Way<'a> {
    /// All ranks from this one, in the order in which shards pass them.
    circle: &'a [Rank],
    /// The lane of the puts inside a node.
    local: LaneId,
    /// The lane of the puts between nodes.
    network: LaneId,
    /// How many ranks behind its owner an even, and an odd, part of a shard reaches.
    reach: [usize; 2],
    /// Which parts of the own shard this direction copies.
    copied: Range<u32>,
}

impl Way<'_> {
    fn extend(self, task: &Task<'_>, lanes: &mut [Lane]) {
        let &Task { rank, shape, .. } = task;
        let parts = || (0..shape.parts).map(|part| (part, self.reach(part)));
        let furthest = parts().map(|(_, reach)| reach).max().unwrap_or(0);
        let copies = self.copied.clone().filter(|_| !shape.in_place);
        let copies = copies.map(|part| put(rank, Cell { shard: rank, part }, Source::Input));
        let (next, previous) = (self.place(1), self.place(self.circle.len() - 1));
        let (inward, outward) = (self.lane(task, previous, rank), self.lane(task, rank, next));
        let (heard, heard_next) = (self.hears(task, 0), self.hears(task, 1));
        let mut push = |lane: LaneId, step: Step| lanes[lane.index()].steps.push(step);
        let asks = task.says_ready() && furthest > 0;
        let wait_ready = wait(ready(next, outward));
        if asks {
            push(inward, signal(previous, ready(rank, inward)));
        }
        if asks && shape.flags == FlagOrder::Batched {
            push(outward, wait_ready);
        }
        copies.for_each(|copy| push(self.local, copy));
        if asks && shape.flags == FlagOrder::Prompt {
            push(outward, wait_ready);
        }
        for hop in 0..furthest {
            let (shard, from) = (self.place(self.circle.len() - hop), source(hop));
            for (part, _) in parts().filter(|&(_, reach)| reach > hop) {
                let cell = Cell { shard, part };
                if hop > 0 {
                    push(heard, wait(arrived(cell, heard)));
                }
                if hop > 0 && heard != outward {
                    push(heard, signal(rank, arrived(cell, outward)));
                    push(outward, wait(arrived(cell, outward)));
                }
                push(outward, put(next, cell, from));
                push(outward, signal(next, arrived(cell, heard_next)));
            }
        }
        for (part, reach) in parts().filter(|&(_, reach)| reach > 0) {
            let cell = Cell { shard: self.place(self.circle.len() - reach), part };
            push(heard, wait(arrived(cell, heard)));
        }
    }

    fn reach(&self, part: u32) -> usize {
        self.reach[part as usize % 2]
    }

    /// The rank `by` places further on, or behind it by counting all round.
    fn place(&self, by: usize) -> Rank {
        self.circle[by % self.circle.len()]
    }

    /// The lane of the puts from one rank to the next.
    fn lane(&self, task: &Task<'_>, from: Rank, to: Rank) -> LaneId {
        let leaves = task.topology.node(from) != task.topology.node(to);
        if leaves && task.has_network() { self.network } else { self.local }
    }

    /// The lane of the rank `by` places further on that hears arrivals: no local lane signals a
    /// network lane of a peer.
    fn hears(&self, task: &Task<'_>, by: usize) -> LaneId {
        let last = self.circle.len() - 1;
        let (rank, previous, next) = (self.place(by), self.place(by + last), self.place(by + 1));
        match self.lane(task, previous, rank) == self.network {
            true => self.lane(task, rank, next),
            false => self.local,
        }
    }
}

fn source(hop: usize) -> Source {
    if hop == 0 { Source::Input } else { Source::Output }
}
