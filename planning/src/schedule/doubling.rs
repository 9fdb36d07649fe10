//! Implements recursive doubling, in which ranks exchange all that they have with a rank twice as
//! far away in each round.
//!
//! In round k, a rank exchanges data with the rank whose number differs in bit k. Before, it has
//! the blocks of the 2^k ranks that agree with it in all bits from k on, and afterwards those of
//! twice as many. These blocks are neighbors in the output, so one copy moves them all, and one
//! flag announces them: that of the last cell, which is signalled behind the copies of all cells. A
//! rank waits log₂ n times, where direct makes n - 1 copies.
//!
//! The first round sends the input. Later rounds send from the output, also the rank's own block,
//! so that the copies stay neighbors. A signal of the rank to itself says that the self copy has
//! put it there.
//!
//! The number of ranks is a power of two. If a network connects the nodes, the first rounds stay
//! inside a node, which therefore has a power of two of consecutive ranks; all later rounds are in
//! the network lane. Lane 0 announces to it, by one signal, that the blocks of the node are there.
//!
//! With batched flags, the `ready` signals and waits of a lane are together.

use std::ops::Range;

use peerlane_hal::Rank;

use super::estimate::{CostRequest, EffectiveLink, PathEstimate, Term, Traffic};
use super::steps::{NETWORK_LANE, arrived, cells, put, self_copy, signal, wait, writable};
use super::{PlanRequest, Schedule, Shape};
use crate::collective::Collective;
use crate::plan::{Algorithm, Cell, Lane, LaneId, Source, Step, Tier};
use crate::topology::Topology;
use crate::units::{bytes, rate};

pub(super) const RECURSIVE_DOUBLING: Schedule = Schedule {
    algorithm: Algorithm::RecursiveDoubling,
    suits: |collective| collective == Collective::AllGather,
    fits,
    lanes,
    redundant: |sums| (sums.ranks <= 2).then_some("there are no more than two ranks"),
    forwards: |sums| sums.ranks > 2,
    chunks_in_round: |_| 1,
    gets: false,
    joins_blocks: true,
    needs_measurements: |_, _| true,
    lane_count: |nodes, tiers| if tiers && nodes > 1 { 2 } else { 1 },
    estimate,
    traffic,
};

fn fits(topology: &Topology, shape: Shape) -> Result<(), &'static str> {
    if !topology.ranks().is_power_of_two() {
        return Err("the number of ranks is not a power of two");
    }
    if !shape.tiers || topology.nodes() == 1 {
        return Ok(());
    }

    // The ranks of a node differ only in the lowest bits, so all rounds but the first leave it.
    // Nodes of equal size divide a power of two, so their size is one, too.
    let node_ranks = topology.members(0).len();
    let is_consecutive = |node: u32| {
        let members = topology.members(node);
        let last = members[members.len() - 1].index();
        members.len() == node_ranks && last - members[0].index() == node_ranks - 1
    };
    match (0..Rank::at(topology.nodes()).0).all(is_consecutive) {
        true => Ok(()),
        false => Err("the nodes do not have equal numbers of consecutive ranks"),
    }
}

/// Returns how many of the rounds stay inside a node.
fn local_rounds(request: &PlanRequest<'_>) -> u32 {
    let topology = request.topology;
    let local_ranks =
        if request.has_network() { topology.members(0).len() } else { topology.ranks() };

    local_ranks.ilog2()
}

fn lanes(request: &PlanRequest<'_>) -> Vec<Lane> {
    let rounds = request.topology.ranks().ilog2();
    let local = local_rounds(request);
    let own = last_cell(request, request.rank);

    // Rounds that read the own block from the output wait until the self copy has put it there.
    let has_self_copy = !request.shape.in_place;
    let announces = |lane, first: u32, count: u32| {
        // The first round of all reads the input.
        let reads_output = first + count > 1;
        let depends = has_self_copy || lane == NETWORK_LANE && first > 0;
        (count > 0 && reads_output && depends).then_some(arrived(own, lane))
    };
    let home_flag = announces(LaneId::HOME, 0, local);
    let network_flag = announces(NETWORK_LANE, local, rounds - local);

    // With prompt flags the self copy can run until the first partner is ready. With batched flags
    // it would divide the signals and waits, so it comes after them.
    let mut home = ready_signals(request, LaneId::HOME, 0..local);
    home.extend(batched_waits(request, LaneId::HOME, 0..local));
    home.extend(self_copy(request));
    home.extend(home_flag.map(|flag| signal(request.rank, flag)));
    home.extend(exchanges(request, LaneId::HOME, 0..local, home_flag.map(wait)));
    home.extend(network_flag.map(|flag| signal(request.rank, flag)));
    let mut lanes = vec![Lane { tier: Tier::Local, steps: home }];

    if request.has_network() {
        let mut network = ready_signals(request, NETWORK_LANE, local..rounds);
        network.extend(batched_waits(request, NETWORK_LANE, local..rounds));
        let flag = network_flag.map(wait);
        network.extend(exchanges(request, NETWORK_LANE, local..rounds, flag));
        lanes.push(Lane { tier: Tier::Network, steps: network });
    }

    lanes
}

/// Returns the signals that tell the partners of `rounds` that the output may be written.
fn ready_signals(request: &PlanRequest<'_>, lane: LaneId, rounds: Range<u32>) -> Vec<Step> {
    let ready = writable(request, request.rank, lane);
    let signals = rounds.filter_map(|round| Some(signal(partner(request.rank, round), ready?)));

    signals.collect()
}

/// Returns, with batched flags, the waits until the outputs of the partners may be written.
fn batched_waits(request: &PlanRequest<'_>, lane: LaneId, rounds: Range<u32>) -> Vec<Step> {
    if !request.shape.flags.is_batched() {
        return Vec::new();
    }

    let waits = rounds.filter_map(|round| writable(request, partner(request.rank, round), lane));
    waits.map(wait).collect()
}

/// Returns the steps that exchange blocks with the partner of each of `rounds`.
///
/// `own_block` waits until the own block is in the output, and comes before the first round that
/// reads it there.
fn exchanges(
    request: &PlanRequest<'_>,
    lane: LaneId,
    rounds: Range<u32>,
    mut own_block: Option<Step>,
) -> Vec<Step> {
    let &PlanRequest { rank, shape, .. } = request;
    let mut steps = Vec::new();
    for round in rounds {
        let peer = partner(rank, round);
        if !shape.flags.is_batched() {
            steps.extend(writable(request, peer, lane).map(wait));
        }

        let from = if round == 0 { Source::Input } else { Source::Output };
        if round > 0 {
            steps.extend(own_block.take());
        }
        let run = blocks(rank, round).flat_map(|block| cells(block, shape.chunks));
        steps.extend(run.map(|cell| put(peer, cell, from)));
        // The signal comes behind all puts to the peer, so it announces all cells.
        steps.push(signal(peer, arrived(last_cell_of_run(request, rank, round), lane)));
        steps.push(wait(arrived(last_cell_of_run(request, peer, round), lane)));
    }

    steps
}

/// Returns the rank that exchanges blocks with `rank` in `round`.
fn partner(rank: Rank, round: u32) -> Rank {
    Rank(rank.0 ^ 1 << round)
}

/// Returns the ranks whose blocks `rank` has before `round`, in ascending order.
fn blocks(rank: Rank, round: u32) -> impl Iterator<Item = Rank> {
    let first = rank.0 >> round << round;
    (first..first + (1 << round)).map(Rank)
}

fn last_cell(request: &PlanRequest<'_>, block: Rank) -> Cell {
    Cell { block, chunk: request.shape.chunks - 1 }
}

/// Returns the last of the cells that `rank` sends in `round`.
fn last_cell_of_run(request: &PlanRequest<'_>, rank: Rank, round: u32) -> Cell {
    let last = rank.0 | ((1 << round) - 1);
    last_cell(request, Rank(last))
}

/// Returns how many bytes the operation moves inside nodes, and how many over the network, in this
/// order.
fn traffic(request: &CostRequest<'_>) -> [Traffic; 2] {
    let sums = request.sums;
    let blocks = |count: u64| sums.block_bytes_max.saturating_mul(count);
    let every = sums.moved_bytes;
    if !request.has_network() {
        return [Traffic::new(blocks(sums.ranks - 1), every), Traffic::default()];
    }

    let (node_ranks, _) = sums.node_ranks_min_max();
    let between = every.saturating_sub(sums.inside_bytes);
    [
        Traffic::new(blocks(node_ranks - 1), sums.inside_bytes),
        Traffic::new(blocks(sums.ranks - node_ranks), between),
    ]
}

/// Estimates the time of all rounds, which follow each other.
fn estimate(request: &CostRequest<'_>, node_ranks: u64) -> PathEstimate {
    let CostRequest { sums, links, .. } = *request;
    let link = |tier| EffectiveLink::new(links, tier, node_ranks, node_ranks);
    let own = link(None);
    let local = link(Some(Tier::Local));
    let network = link(Some(Tier::Network));

    let rounds = u64::from(sums.ranks.ilog2());
    let local_ranks = if request.has_network() { node_ranks } else { sums.ranks };
    let local_rounds = u64::from(local_ranks.ilog2());

    let mut puts: u64 = 0;
    let mut flags: u64 = 0;
    let mut hops: u64 = 0;
    for round in 0..rounds {
        let link = if round < local_rounds { &local } else { &network };
        let run_bytes = sums.block_bytes_max.saturating_mul(1 << round);
        // What a rank sends is what it has just received, except in the first round.
        let passed_on = if round > 0 { link.passed_on(1, run_bytes) } else { 0 };
        let copied = link.puts(1, run_bytes).max(link.receives(run_bytes));

        puts = puts.saturating_add(copied).saturating_add(passed_on);
        flags = flags.saturating_add(request.flags(link, 1).saturating_mul(2));
        hops = hops.saturating_add(link.hop);
    }

    // The network lane begins with a flag of lane 0, and ends with one to it.
    if rounds > local_rounds {
        hops = hops.saturating_add(own.hop.saturating_mul(2));
    }

    let farthest = if rounds > local_rounds { &network } else { &local };
    let ready = request.ready(farthest, rounds, Some(&own));
    let note = format!(
        "{rounds} rounds of up to {} at {}",
        bytes(sums.block_bytes_max.saturating_mul(sums.ranks / 2)),
        rate(farthest.rate(1))
    );
    let terms = vec![
        Term::new("ready", ready, format!("of {rounds} peers")),
        request.self_copy_term(&own, puts),
        Term::new("puts", puts, note),
        Term::new("flags", flags, "signals and waits"),
        Term::new("arrivals", hops, "one for each round"),
    ];

    let submits = local_rounds
        .saturating_mul(local.submit)
        .saturating_add((rounds - local_rounds).saturating_mul(network.submit));
    let host = submits.saturating_add(request.self_puts().saturating_mul(own.submit));
    PathEstimate { terms, host }
}
